//! Conversion of a caller's `T` and `E` to the bytes and texts that are shared, and back; and [`LoadContext`], a loader's inputs and its
//! settings for the value.

use std::any::type_name;
use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;

use super::memoize::{CacheableResponse, SharedError};
use crate::error::{Error, Failure, LoadError};
use crate::guard_state::GuardState;
use crate::key::{CacheKey, Key};
use crate::loader::{LeaseState, LoadInput, LoadResult, Loader};
use crate::observe::{Count, failure_text, log, warn_if};
use crate::policy::Policy;
use crate::read_through::OwnResult;
use crate::read_through::call::Call;
use crate::sync::lock;
use crate::value::codec::Codec;
use crate::value::entry::{Entry, Lifetimes, Packed, Storage, Unstored};
use crate::value::{SharedValue, entry};

/// Decodes an entry as a `T`.
pub(crate) fn read_typed<T: DeserializeOwned + 'static>(
    entry: &Entry,
    _now: u64,
    _shared: Option<&SharedValue>,
) -> Option<T> {
    Codec::decode(entry.encoding, &entry.payload)
}

/// Decodes an entry as a `T` that its callers share.
pub(crate) fn read_shared<T: DeserializeOwned + Send + Sync + 'static>(
    entry: &Entry,
    _now: u64,
    shared: Option<&SharedValue>,
) -> Option<Arc<T>> {
    if let Some(decoded) = shared.and_then(SharedValue::get)
        && let Ok(decoded) = Arc::clone(decoded).downcast()
    {
        return Some(decoded);
    }
    let decoded = Arc::new(Codec::decode(entry.encoding, &entry.payload)?);
    if let Some(shared) = shared {
        // This fails if another caller was first, perhaps with another type.
        let _ = shared.set(Arc::clone(&decoded) as _);
    }
    Some(decoded)
}

/// Decodes an entry as a `T`, and reads whether the value is stored.
pub(crate) fn read_with_storage<T: DeserializeOwned + 'static>(
    entry: &Entry,
    _now: u64,
    _shared: Option<&SharedValue>,
) -> Option<(T, Storage)> {
    Some((Codec::decode(entry.encoding, &entry.payload)?, entry.expiry.storage()))
}

/// A value that a caller has loaded, and whether it is stored. `entry` is the one that the caller's flight ended with, if any.
pub(super) fn with_storage<T>(own: T, entry: Option<&Entry>) -> (T, Storage) {
    (own, entry.map_or(Storage::Forbidden, |entry| entry.expiry.storage()))
}

/// Boxes a caller's `load`.
pub(crate) fn loader<T: CacheableResponse, E: SharedError, F, Fut>(
    load: F,
    call: Call<'_>,
    own: OwnResult<T, E>,
) -> Loader
where
    F: FnOnce(LoadContext<T>) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, E>> + Send + 'static,
{
    let (state, policy, key) = (Arc::clone(call.state), Arc::clone(call.policy), call.key.clone());
    Loader::new(move |input| async move {
        let mode = input.mode;
        let context = LoadContext::new(input, Arc::clone(&state), &policy);
        let settings = Arc::clone(&context.settings);
        let loaded = load(context).await.map_err(Arc::new);
        let call = Call { state: &state, policy: &policy, key: &key };
        let (result, own_result) = concluded(call, loaded, mode, &settings);
        // A caller that has left needs no answer.
        let _ = own.send(own_result);
        result.into()
    })
}

/// A load's result for its waiters, and for its own caller.
pub(super) fn concluded<T: CacheableResponse, E: SharedError>(
    call: Call<'_>,
    loaded: Result<T, Arc<E>>,
    mode: LeaseState,
    settings: &Mutex<LoadSettings>,
) -> (LoadResult, Result<T, LoadError<E>>) {
    match loaded {
        Ok(value) => (shared(call, mode, &mut lock(settings), &value), Ok(value)),
        Err(error) => {
            let text = failure_text(&*error);
            let (source, shared) = (Some(Arc::clone(&error) as _), call.policy.errors.encode(&*error));
            let failure = Failure::Loader { text, source, shared };
            (LoadResult::failed(failure), Err(LoadError::Loader(error)))
        }
    }
}

/// The result for the other waiters of a loaded value.
fn shared<T: Serialize + DeserializeOwned + 'static>(
    call: Call<'_>,
    mode: LeaseState,
    settings: &mut LoadSettings,
    value: &T,
) -> LoadResult {
    if mode == LeaseState::Alone {
        // No flight uses the result.
        return LoadResult::OnlyForCaller;
    }
    let policy = call.policy;
    // Check that the value can be decoded. Otherwise waiters and later callers would find a useless entry and load
    // again, unnoticed. (A value that is too long is not shared, so it need not be checked.)
    let encoded = policy.codec.encode(value).and_then(|(encoding, payload)| {
        let fits = payload.len() <= policy.max_body;
        let unreadable = fits.then(|| Codec::unreadable::<T>(encoding, &payload)).flatten();
        unreadable.map_or(Ok((encoding, payload)), Err)
    });
    match encoded {
        Ok((_, payload)) if payload.len() > policy.max_body => {
            warn_too_long(call, payload.len());
            LoadResult::of_resource()
        }
        Ok((encoding, payload)) => {
            if !settings.decided && policy.is_negative(encoding, &payload) {
                settings.make_negative();
            }
            if settings.negative {
                policy.count(Count::negatives);
            }
            let (lifetimes, validator) = (settings.lifetimes(), settings.validator.clone());
            let tags = std::mem::take(&mut settings.tags);
            // Without the lease nothing is stored, so nothing is compressed.
            let from = if mode == LeaseState::Leased { policy.compress_from } else { usize::MAX };
            let packed = Packed::of(&payload, from);
            let (status_only, unstored) = (None, Unstored::OfResource);
            LoadResult::Value { encoding, payload, packed, lifetimes, validator, tags, status_only, unstored }
        }
        Err(error) => {
            warn_not_coded(call, &error, type_name::<T>());
            // No marker is stored: callers that load another type under this key may be able to share their values.
            LoadResult::Uncacheable { unstored: Unstored::OfResource, mark: false }
        }
    }
}

/// Warns the operator that this key has no stampede protection, because its value is too long.
fn warn_too_long(Call { state, policy, key }: Call<'_>, size: usize) {
    let (is_news, max_body) = (state.unshareable(policy), policy.max_body);
    warn_if!(
        log::GUARD,
        is_news,
        ?key,
        size,
        max_body,
        "a loaded value is longer than max_body: it is not shared"
    );
}

/// Warns the operator that this key has no stampede protection: its value cannot be encoded, or its encoding cannot be decoded.
/// Logged without the error's source: a serializer's error may contain the value.
fn warn_not_coded(Call { state, policy, key }: Call<'_>, error: &Error, value: &'static str) {
    let is_news = state.unshareable(policy);
    warn_if!(log::GUARD, is_news, ?key, %error, value, "a loaded value is not shared: `Codec::check` has the reason");
}

/// The longest validator, in bytes, that is stored with a value.
const LONGEST_VALIDATOR: usize = 1024;

/// One load, as its loader sees it: the previous value, the deadline of the load, and setters for how the
/// new value is stored.
///
/// Passed to the loaders of [`StampedeGuard::load`](crate::StampedeGuard::load). Settings replace the
/// policy's for this value; if two conflict, the last call counts, and [`do_not_store`](Self::do_not_store) wins over all.
///
/// # Examples
///
/// A conditional request: if the origin says "not modified", the previous value stays and is fresh again.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_guard::{LoadContext, StampedeGuard};
///
/// /// `None`: not modified since `version`.
/// async fn fetch(version: Option<&str>) -> Result<Option<(String, String)>, std::io::Error> {
///     Ok((version != Some("v1")).then(|| ("v1".to_owned(), "the report".to_owned())))
/// }
///
/// let guard = StampedeGuard::in_memory();
/// let load = |mut cx: LoadContext<String>| async move {
///     match (fetch(cx.validator()).await?, cx.take_previous()) {
///         (None, Some(previous)) => Ok(previous),
///         (Some((version, report)), _) => {
///             cx.set_validator(version);
///             cx.fresh_for(Duration::from_secs(300));
///             Ok(report)
///         }
///         (None, None) => Err(std::io::Error::other("nothing to be unmodified")),
///     }
/// };
/// assert_eq!(guard.load("report").get(load).await?.value, "the report");
/// assert_eq!(guard.load("report").refresh(load).await?.value, "the report");
/// # Ok(()) }
/// ```
pub struct LoadContext<T> {
    /// The previous value. Its validator is emptied if the value cannot be decoded: an origin's "not modified" would then yield no value.
    previous: Option<Entry>,
    /// The previous value, decoded when it is first needed.
    decoded: OnceLock<Option<T>>,
    deadline: Instant,
    lost: watch::Receiver<bool>,
    settings: Arc<Mutex<LoadSettings>>,
    state: Arc<GuardState>,
}

/// A loader's settings for its value.
#[derive(Debug)]
pub(super) struct LoadSettings {
    lifetimes: Lifetimes,
    validator: Bytes,
    tags: Vec<Key>,
    max_tags: usize,
    negative_for: Duration,
    /// Whether the value must not be stored, whatever the other settings say: because the loader says so, or because a tag was refused,
    /// so that the value would outlive its invalidation.
    unstored: bool,
    /// Whether the loader has called `fresh_for` or `do_not_store`. Then the policy's rule for negative values does not apply.
    decided: bool,
    /// Whether the value is negative: it says "there is nothing".
    negative: bool,
}

impl LoadSettings {
    pub(super) fn new(policy: &Policy, validator: Bytes) -> Self {
        let (lifetimes, negative_for) = (policy.lifetimes(), policy.negative_for());
        let [unstored, decided, negative] = [false; 3];
        let (tags, max_tags) = (Vec::new(), policy.max_tags);
        Self { lifetimes, validator, tags, max_tags, negative_for, unstored, decided, negative }
    }

    /// The value's lifetimes, after the loader has ended.
    fn lifetimes(&self) -> Lifetimes {
        if self.unstored { Lifetimes::default() } else { self.lifetimes }
    }

    /// Marks the value as negative, with the policy's lifetime for such values.
    fn make_negative(&mut self) {
        self.lifetimes.fresh_for = self.negative_for;
        self.negative = true;
    }
}

impl<T: DeserializeOwned + 'static> LoadContext<T> {
    fn new(input: LoadInput, state: Arc<GuardState>, policy: &Policy) -> Self {
        let LoadInput { previous, deadline, lost, .. } = input;
        let settings = Arc::new(Mutex::new(LoadSettings::new(policy, Bytes::new())));
        let decoded = OnceLock::new();
        let mut context = Self { previous, decoded, deadline, lost, settings, state };
        if context.previous.as_ref().is_some_and(|entry| !entry.validator.is_empty()) {
            let is_decoded = context.previous().is_some();
            match &mut context.previous {
                Some(entry) if is_decoded => {
                    lock(&context.settings).validator = entry.validator.clone().into()
                }
                Some(entry) => entry.validator = Box::default(),
                None => {}
            }
        }
        context
    }

    /// The older value that this load replaces, if the store still has it.
    pub fn previous(&self) -> Option<&T> {
        let decode =
            || self.previous.as_ref().and_then(|entry| Codec::decode(entry.encoding, &entry.payload));
        self.decoded.get_or_init(decode).as_ref()
    }

    /// Takes the previous value, so that the loader can return it again: it is then stored as if it had been loaded now.
    pub fn take_previous(&mut self) -> Option<T> {
        self.previous();
        self.decoded.get_mut().and_then(Option::take)
    }
}

impl<T> LoadContext<T> {
    /// The validator that was [set](Self::set_validator) when the previous value was loaded: an entity tag, a
    /// version, a time. `None` without a previous value.
    pub fn validator(&self) -> Option<&str> {
        let validator = std::str::from_utf8(&self.previous.as_ref()?.validator).ok();
        validator.filter(|text| !text.is_empty())
    }

    /// Stores a validator of at most 1 KiB with the value; a longer one is not stored. A load that sets no validator keeps
    /// that of the previous value.
    pub fn set_validator(&mut self, validator: impl Into<String>) {
        let validator = validator.into();
        let stored = if validator.len() <= LONGEST_VALIDATOR { Bytes::from(validator) } else { Bytes::new() };
        lock(&self.settings).validator = stored;
    }

    /// When the load is aborted, by the policy's [`load_timeout`](crate::PolicyBuilder::load_timeout).
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Resolves when the lease was lost: the value will then reach the waiters of this process only and will not be
    /// stored. A load with side effects may want to stop then. Never resolves for a load without a lease.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut lost = self.lost.clone();
        async move {
            if lost.wait_for(|lost| *lost).await.is_err() {
                // The sender was dropped because the load has ended, so the lease can no longer be lost.
                std::future::pending::<()>().await;
            }
        }
    }

    /// How long this value is served before it is loaded again, also if it says "there is nothing". The policy's jitter still
    /// shortens it.
    pub fn fresh_for(&mut self, fresh_for: Duration) {
        let mut settings = lock(&self.settings);
        settings.decided = true;
        settings.lifetimes.fresh_for = fresh_for;
    }

    /// Like [`PolicyBuilder::stale_while_revalidate`](crate::PolicyBuilder::stale_while_revalidate), for this value.
    pub fn stale_while_revalidate(&mut self, window: Duration) {
        lock(&self.settings).lifetimes.stale_while_revalidate = window;
    }

    /// Like [`PolicyBuilder::stale_if_error`](crate::PolicyBuilder::stale_if_error), for this value.
    pub fn stale_if_error(&mut self, window: Duration) {
        lock(&self.settings).lifetimes.stale_if_error = window;
    }

    /// Adds tags to this value besides the policy's: [`invalidate_tag`](crate::StampedeGuard::invalidate_tag) with any of
    /// them invalidates it. At most [`max_tags`](crate::PolicyBuilder::max_tags), however many the policy has.
    ///
    /// Call this whenever the tags are known, also after the origin has answered: a value is not stored if one of its tags was
    /// invalidated since the load began. A load that begins in case of such tags costs one command,
    /// one that has added some a round trip for their ids and one for the check.
    ///
    /// # Errors
    ///
    /// An empty tag, or too many tags: the value then gets none of the tags of this call, and is not stored.
    ///
    /// # Cancel safety
    ///
    /// Safe: this waits for nothing.
    pub async fn tag<K: Into<CacheKey>>(&mut self, tags: impl IntoIterator<Item = K>) -> Result<(), Error> {
        let mut settings = lock(&self.settings);
        let LoadSettings { tags: has, max_tags, .. } = &mut *settings;
        let added = entry::add_tags(has, &self.state.namespace, tags, *max_tags);
        settings.unstored |= added.is_err();
        added
    }

    /// Declares that this value says "there is nothing": it is stored for the policy's
    /// [`negative_for`](crate::PolicyBuilder::negative_for).
    pub fn negative(&mut self) {
        lock(&self.settings).make_negative();
    }

    /// Does not store the value, whatever other settings are made before or after: only the waiters of this load receive it. The older
    /// value ends, in all processes: it is no longer served, nor does it stand in for a later failure.
    pub fn do_not_store(&mut self) {
        let mut settings = lock(&self.settings);
        settings.decided = true;
        settings.unstored = true;
    }
}

debug_as!(self: LoadContext<T> { has_previous: self.previous.is_some(), deadline: self.deadline });
