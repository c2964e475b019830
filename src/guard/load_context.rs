//! [`LoadContext`]: a loader's inputs, and its settings for the value.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::Error;
use crate::guard_state::GuardState;
use crate::key::CacheKey;
use crate::loader::LeaseState;
use crate::observe::{GuardCount, log, warn_if};
use crate::policy::Policy;
use crate::sync::lock;
use crate::value::freshness::Lifetimes;
use crate::value::tags::{self, TagId};

/// The longest validator, in bytes, that is stored with a value.
const LONGEST_VALIDATOR: usize = 1024;

/// One load, as its loader sees it: the previous value, the deadline of the load, and setters for how the
/// new value is kept.
///
/// Given to the loader of [`get_or_load_with`](crate::StampedeGuard::get_or_load_with). Settings replace the
/// policy's for this value; if two conflict, the last call counts, and [`do_not_store`](Self::do_not_store) wins over all.
///
/// # Examples
///
/// A conditional request: if the origin says "not modified", the previous value is kept and is fresh again.
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
/// assert_eq!(guard.get_or_load_with("report", load).await?, "the report");
/// assert_eq!(guard.refresh_with("report", load).await?, "the report");
/// # Ok(()) }
/// ```
pub struct LoadContext<T> {
    previous: Option<T>,
    validator: Option<String>,
    deadline: Instant,
    lost: watch::Receiver<bool>,
    settings: Arc<Mutex<LoadSettings>>,
    state: Arc<GuardState>,
    mode: LeaseState,
    policy: Arc<Policy>,
}

/// A loader's settings for its value.
#[derive(Debug)]
pub(crate) struct LoadSettings {
    lifetimes: Lifetimes,
    pub(crate) validator: Bytes,
    pub(crate) tags: Vec<TagId>,
    negative_for: Duration,
    /// Whether the value must not be stored, whatever the other settings say: the loader wants that, or the id of one of its tags
    /// could not be read, so that the value would outlive the tag's invalidation.
    unstored: bool,
    /// Whether the loader has called `fresh_for` or `do_not_store`. Then the policy's rule for negative values does not apply.
    pub(crate) decided: bool,
    /// Whether the value says that there is nothing.
    pub(crate) negative: bool,
}

impl LoadSettings {
    pub(crate) fn new(policy: &Policy, validator: Bytes) -> Self {
        let (lifetimes, negative_for) = (policy.lifetimes(), policy.negative_for());
        let [unstored, decided, negative] = [false; 3];
        Self { lifetimes, validator, tags: Vec::new(), negative_for, unstored, decided, negative }
    }

    /// The value's lifetimes, after the loader has ended.
    pub(crate) fn lifetimes(&self) -> Lifetimes {
        if self.unstored { Lifetimes::default() } else { self.lifetimes }
    }

    /// The lifetimes of a value that says "there is nothing".
    pub(crate) fn make_negative(&mut self) {
        self.lifetimes.fresh_for = self.negative_for;
        self.negative = true;
    }
}

impl<T> LoadContext<T> {
    pub(crate) fn new(
        previous: Option<T>,
        deadline: Instant,
        lost: watch::Receiver<bool>,
        settings: Arc<Mutex<LoadSettings>>,
        state: Arc<GuardState>,
        mode: LeaseState,
        policy: Arc<Policy>,
    ) -> Self {
        let validator = lock(&settings).validator.clone();
        let validator = String::from_utf8(validator.to_vec()).ok().filter(|text| !text.is_empty());
        Self { previous, validator, deadline, lost, settings, state, mode, policy }
    }

    /// The value that is loaded anew, if the store still has it.
    pub fn previous(&self) -> Option<&T> {
        self.previous.as_ref()
    }

    /// Takes the previous value, to return it again: it is then stored as if it had been loaded now.
    pub fn take_previous(&mut self) -> Option<T> {
        self.previous.take()
    }

    /// The validator that was [set](Self::set_validator) when the previous value was loaded: an entity tag, a
    /// version, a time. `None` without a previous value.
    pub fn validator(&self) -> Option<&str> {
        self.validator.as_deref()
    }

    /// Keeps a validator of at most 1 KiB with the value; a longer one is not kept. A load that sets none keeps
    /// the previous one.
    pub fn set_validator(&mut self, validator: impl Into<String>) {
        let validator = validator.into();
        let kept = if validator.len() <= LONGEST_VALIDATOR { Bytes::from(validator) } else { Bytes::new() };
        lock(&self.settings).validator = kept;
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
                // The load is over.
                std::future::pending::<()>().await;
            }
        }
    }

    /// How long this value is served before it is loaded again, also if it says "there is nothing". Still shortened by the
    /// policy's jitter.
    pub fn fresh_for(&mut self, fresh_for: Duration) {
        let mut settings = lock(&self.settings);
        settings.decided = true;
        settings.lifetimes.fresh_for = fresh_for;
    }

    /// As [`PolicyBuilder::stale_while_revalidate`](crate::PolicyBuilder::stale_while_revalidate), for this value.
    pub fn stale_while_revalidate(&mut self, window: Duration) {
        lock(&self.settings).lifetimes.stale_while_revalidate = window;
    }

    /// As [`PolicyBuilder::stale_if_error`](crate::PolicyBuilder::stale_if_error), for this value.
    pub fn stale_if_error(&mut self, window: Duration) {
        lock(&self.settings).lifetimes.stale_if_error = window;
    }

    /// Gives this value tags besides the policy's: [`invalidate_tag`](crate::StampedeGuard::invalidate_tag) with any of
    /// them invalidates it. At most 16, whatever the policy has. Call it *before* you ask the origin for what is stored: an
    /// invalidation between the answer of the origin and this call is missed, and the older value is stored. Each call costs a round
    /// trip, and each read of such a value a second one; tags of the policy cost neither.
    ///
    /// If the store cannot be reached, the load does not fail: the value goes to its waiters and is not
    /// stored, because an invalidation would not find it.
    ///
    /// # Errors
    ///
    /// An empty tag, or too many tags: the value then has none of those passed in this call.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the value is not stored.
    pub async fn tag<K: Into<CacheKey>>(&mut self, tags: impl IntoIterator<Item = K>) -> Result<(), Error> {
        let before = lock(&self.settings).tags.len();
        let tags = tags::keys(&self.state.namespace, tags, before)?;
        let stored_without = std::mem::replace(&mut lock(&self.settings).unstored, true);
        if self.mode != LeaseState::Leased {
            // Nothing of this load is stored.
            return Ok(());
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let within = left.min(self.policy.coordination_budget);
        match self.state.tagged(tags, self.policy.tag_life(), within).await {
            Ok(tagged) => {
                let mut settings = lock(&self.settings);
                settings.tags.extend(tagged);
                settings.unstored = stored_without;
            }
            Err(error) => {
                self.state.count(GuardCount::store_errors);
                warn_if!(log::GUARD, self.state.unshareable_log.is_due(), %error, "the ids of a value's tags can not be read: it is not stored");
            }
        }
        Ok(())
    }

    /// Declares that this value says "there is nothing": it is kept for the policy's
    /// [`negative_for`](crate::PolicyBuilder::negative_for).
    pub fn negative(&mut self) {
        lock(&self.settings).make_negative();
    }

    /// Gives the value to the waiters of this load and stores nothing, whatever other settings are made before or after. The older value
    /// ends, in all processes: it is no longer served, nor does it stand in for a later failure.
    pub fn do_not_store(&mut self) {
        let mut settings = lock(&self.settings);
        settings.decided = true;
        settings.unstored = true;
    }
}

impl<T> fmt::Debug for LoadContext<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { previous, validator: _, deadline, lost: _, settings: _, state: _, mode: _, policy: _ } =
            self;
        f.debug_struct("LoadContext")
            .field("has_previous", &previous.is_some())
            .field("deadline", deadline)
            .finish_non_exhaustive()
    }
}
