//! Conversion of a caller's `T` and `E` to the bytes and texts that are shared, and back.

use std::any::type_name;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::load_context::{LoadContext, LoadSettings};
use crate::error::{Error, Failure, LoadError};
use crate::failure_text::failure_text;
use crate::guard_state::GuardState;
use crate::key::Key;
use crate::loader::{LeaseState, LoadInput, LoadResult, Loader};
use crate::observe::{Count, log, warn_if};
use crate::policy::Policy;
use crate::sync::lock;
use crate::value::codec::Codec;
use crate::value::entry::Entry;
use crate::value::freshness::{Freshness, Storage, Unstored};
use crate::value::lz4::Packed;
use crate::value::reader::{EntryReader, SharedValue};

/// Decodes an entry as a `T`.
pub(crate) struct TypedReader<T> {
    value: PhantomData<fn() -> T>,
}

impl<T> TypedReader<T> {
    pub(crate) fn new() -> Self {
        Self { value: PhantomData }
    }
}

impl<T: DeserializeOwned + 'static> EntryReader for TypedReader<T> {
    type Value = T;

    fn open(&self, entry: &Entry, _now: u64, _shared: Option<&SharedValue>) -> Option<T> {
        Codec::decode(entry.encoding, &entry.payload)
    }
}

/// Decodes an entry as a `T` that its callers share.
pub(crate) struct SharedReader<T>(pub(crate) TypedReader<T>);

impl<T: DeserializeOwned + Send + Sync + 'static> EntryReader for SharedReader<T> {
    type Value = Arc<T>;

    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<Arc<T>> {
        if let Some(decoded) = shared.and_then(SharedValue::get)
            && let Ok(decoded) = Arc::clone(decoded).downcast()
        {
            return Some(decoded);
        }
        let decoded = Arc::new(self.0.open(entry, now, None)?);
        if let Some(shared) = shared {
            // Another caller may have been first, or may share the entry as another type.
            let _ = shared.set(Arc::clone(&decoded) as _);
        }
        Some(decoded)
    }
}

/// Decodes an entry as a `T`, and reads whether the value is stored.
pub(crate) struct StorageReader<T>(pub(crate) TypedReader<T>);

impl<T: DeserializeOwned + 'static> EntryReader for StorageReader<T> {
    type Value = (T, Storage);

    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<(T, Storage)> {
        Some((self.0.open(entry, now, shared)?, entry.expiry.storage()))
    }
}

/// As [`StorageReader`], for a caller that wants a new load: it accepts no older value.
pub(crate) struct ForcedReader<T>(pub(crate) StorageReader<T>);

impl<T: DeserializeOwned + 'static> EntryReader for ForcedReader<T> {
    type Value = (T, Storage);

    fn serves(&self, _entry: &Entry, _now: u64, _shared: Option<&SharedValue>) -> Freshness {
        Freshness::Expired
    }

    fn stands_in(&self, _entry: &Entry, _now: u64) -> bool {
        false
    }

    /// Otherwise each of the concurrent callers would load for itself.
    fn goes_on_alone(&self) -> bool {
        false
    }

    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<(T, Storage)> {
        self.0.open(entry, now, shared)
    }
}

/// The slot in which a caller's own loader leaves its typed result for that caller alone.
pub(crate) type OwnResult<T, E> = Arc<Mutex<Option<Result<T, LoadError<E>>>>>;

/// Boxes a caller's `load`.
pub(crate) fn loader<T, E, F, Fut>(
    load: F,
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    key: &Key,
    own: &OwnResult<T, E>,
) -> Loader
where
    T: Serialize + DeserializeOwned + Send + 'static,
    E: fmt::Display + fmt::Debug + Send + Sync + 'static,
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, E>> + Send + 'static,
{
    let (own, state, policy, key) = (Arc::clone(own), Arc::clone(state), Arc::clone(policy), key.clone());
    Loader::new(move |given| async move {
        let settings = Mutex::new(LoadSettings::new(&policy, Bytes::new()));
        let loaded = load().await.map_err(Arc::new);
        let (result, kept) = concluded(&key, loaded, given.mode, &state, &policy, &settings);
        *lock(&own) = Some(kept);
        result.into()
    })
}

/// Boxes a caller's `load` that takes a context.
pub(crate) fn loader_with<T, E, F, Fut>(
    load: F,
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    key: &Key,
    own: &OwnResult<T, E>,
) -> Loader
where
    T: Serialize + DeserializeOwned + Send + 'static,
    E: fmt::Display + fmt::Debug + Send + Sync + 'static,
    F: FnOnce(LoadContext<T>) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, E>> + Send + 'static,
{
    let (own, state, policy, key) = (Arc::clone(own), Arc::clone(state), Arc::clone(policy), key.clone());
    Loader::new(move |given| async move {
        let LoadInput { mode, previous, deadline, lost, announcer: _ } = given;
        let (previous, validator) = match previous {
            Some(entry) => (Codec::decode(entry.encoding, &entry.payload), Bytes::from(entry.validator)),
            None => (None, Bytes::new()),
        };
        // A validator without its value is useless: "not modified" would then yield no value.
        let validator = if previous.is_some() { validator } else { Bytes::new() };
        let settings = Arc::new(Mutex::new(LoadSettings::new(&policy, validator)));
        let (given, of) = (Arc::clone(&settings), Arc::clone(&policy));
        let context = LoadContext::new(previous, deadline, lost, given, Arc::clone(&state), mode, of);
        let loaded = load(context).await.map_err(Arc::new);
        let (result, kept) = concluded(&key, loaded, mode, &state, &policy, &settings);
        *lock(&own) = Some(kept);
        result.into()
    })
}

/// A load's result for its waiters, and for its own caller.
pub(super) fn concluded<T: Serialize + DeserializeOwned + 'static, E>(
    key: &Key,
    loaded: Result<T, Arc<E>>,
    mode: LeaseState,
    state: &GuardState,
    policy: &Policy,
    settings: &Mutex<LoadSettings>,
) -> (LoadResult, Result<T, LoadError<E>>)
where
    E: fmt::Display + Send + Sync + 'static,
{
    match loaded {
        Ok(value) => (shared(key, mode, state, policy, &mut lock(settings), &value), Ok(value)),
        Err(error) => {
            let text = failure_text(&*error);
            let (source, shared) = (Some(Arc::clone(&error) as _), policy.errors.encode(&*error));
            let failure = Failure::Loader { text, source, shared };
            (LoadResult::failed(failure), Err(LoadError::Loader(error)))
        }
    }
}

/// The result that the other waiters of a loaded value are given.
fn shared<T: Serialize + DeserializeOwned + 'static>(
    key: &Key,
    mode: LeaseState,
    state: &GuardState,
    policy: &Policy,
    settings: &mut LoadSettings,
    value: &T,
) -> LoadResult {
    if mode == LeaseState::Alone {
        // No flight takes it.
        return LoadResult::OnlyForCaller;
    }
    // Check that the value can be read back. Otherwise waiters and later callers would find a useless entry and load
    // again, unnoticed. (A value that is too long is not shared, so it need not be checked.)
    let encoded = policy.codec.encode(value).and_then(|(encoding, payload)| {
        let fits = payload.len() <= policy.max_body;
        let unreadable = fits.then(|| Codec::unreadable::<T>(encoding, &payload)).flatten();
        unreadable.map_or(Ok((encoding, payload)), Err)
    });
    match encoded {
        Ok((_, payload)) if payload.len() > policy.max_body => {
            unshareable(
                state,
                policy,
                key,
                Unshareable::TooLong { size: payload.len(), max_body: policy.max_body },
            );
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
            // Without the lease nothing is stored.
            let from = if mode == LeaseState::Leased { policy.compress_from } else { usize::MAX };
            let packed = Packed::of(&payload, from);
            let (brief, unstored) = (None, Unstored::OfResource);
            LoadResult::Value { encoding, payload, packed, lifetimes, validator, tags, brief, unstored }
        }
        Err(error) => {
            unshareable(state, policy, key, Unshareable::NotCoded { error: &error, value: type_name::<T>() });
            // Callers with another type may share theirs.
            LoadResult::Uncacheable { unstored: Unstored::OfResource, mark: false }
        }
    }
}

/// Why a loaded value is given to its own caller only.
enum Unshareable<'a> {
    TooLong {
        size: usize,
        max_body: usize,
    },
    /// It cannot be encoded, or not be decoded again.
    NotCoded {
        error: &'a Error,
        value: &'static str,
    },
}

/// Warns the operator that this key has no stampede protection.
fn unshareable(state: &GuardState, policy: &Policy, key: &Key, why: Unshareable<'_>) {
    let is_news = state.unshareable(policy);
    match why {
        Unshareable::TooLong { size, max_body } => {
            warn_if!(
                log::GUARD,
                is_news,
                ?key,
                size,
                max_body,
                "a loaded value is longer than max_body: it is not shared"
            );
        }
        // Logged without its source, because a serializer's error may contain the value.
        Unshareable::NotCoded { error, value } => {
            warn_if!(log::GUARD, is_news, ?key, %error, value, "a loaded value is not shared: `Codec::check` has the reason");
        }
    }
}
