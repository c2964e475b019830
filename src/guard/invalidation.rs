//! One invalidation of many keys, tags and paths: [`StampedeGuard::invalidation`].

use std::collections::{HashMap, HashSet, hash_map};
use std::fmt;
use std::future::Future;

use futures_util::stream::{self, StreamExt as _};

use super::StampedeGuard;
use super::change::Change;
use super::entries::{CHANGES, SharedDeadline};
use crate::error::{Error, ErrorKind, InvalidationTarget};
use crate::guard_state::retained::ChangeTarget;
use crate::key::{CacheKey, Key};
use crate::store::{StoreError, StoreErrorKind};

/// How many targets the text of an error names.
const NAMED: usize = 8;

impl StampedeGuard {
    /// One invalidation of many keys, tags and paths, for a change of the origin that affects more than one of them. Nothing happens
    /// before [`send`](Invalidation::send).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert(("price", 7), &499_u32).await?;
    /// guard.insert_with_tags("offers", &1_u32, ["catalog"]).await?;
    /// guard.invalidation().key(("price", 7)).tag("catalog").send().await?;
    /// assert_eq!(guard.get::<u32>(("price", 7)).await?, None);
    /// assert_eq!(guard.get::<u32>("offers").await?, None);
    /// # Ok(()) }
    /// ```
    pub fn invalidation(&self) -> Invalidation {
        Invalidation { guard: self.current().into_owned(), targets: Vec::new() }
    }
}

/// Keys, tags and paths that are invalidated together; made by [`StampedeGuard::invalidation`].
#[must_use = "nothing is invalidated before `send`"]
#[derive(Clone, Debug)]
pub struct Invalidation {
    guard: StampedeGuard,
    /// Each target as the caller named it, and its changes in the store.
    targets: Vec<(InvalidationTarget, Result<Vec<ChangeTarget>, Error>)>,
}

impl Invalidation {
    /// Adds a key, as in [`invalidate`](StampedeGuard::invalidate).
    pub fn key(self, key: impl Into<CacheKey>) -> Self {
        self.keys([key])
    }

    /// Adds keys.
    pub fn keys<K: Into<CacheKey>>(mut self, keys: impl IntoIterator<Item = K>) -> Self {
        for key in keys {
            let key = key.into();
            let stored = self.guard.key(key.clone()).map(|key| vec![ChangeTarget::value(key)]);
            self = self.target(InvalidationTarget::Key(key), stored);
        }
        self
    }

    /// Adds a tag, as in [`invalidate_tag`](StampedeGuard::invalidate_tag).
    pub fn tag(self, tag: impl Into<CacheKey>) -> Self {
        let tag = tag.into();
        let stored = self.guard.key(tag.clone()).map(|tag| vec![ChangeTarget::tag(tag)]);
        self.target(InvalidationTarget::Tag(tag), stored)
    }

    pub(crate) fn target(
        mut self,
        named: InvalidationTarget,
        stored: Result<Vec<ChangeTarget>, Error>,
    ) -> Self {
        self.targets.push((named, stored));
        self
    }

    /// The guard with the policy of this invalidation.
    pub(crate) fn guard(&self) -> &StampedeGuard {
        &self.guard
    }

    /// Invalidates all of them, 32 at once; each once, however often it was named. `Ok` once each is confirmed as by
    /// [`invalidate`](StampedeGuard::invalidate).
    ///
    /// # Errors
    ///
    /// If the store has not confirmed all of them: [`Error::unconfirmed`] lists the others. They were retried for two seconds in all,
    /// or, if there are more than 32, for two seconds since the last confirmation. They are retained, and sent as soon as the store
    /// answers: no need to repeat them. The kind is that of the first failure.
    ///
    /// [`InvalidKey`](ErrorKind::InvalidKey) for an empty key or tag and a text that is not a path,
    /// [`InvalidPolicy`](ErrorKind::InvalidPolicy) for a path under a policy without an authority; all others are invalidated
    /// nevertheless.
    ///
    /// # Cancel safety
    ///
    /// From this call on this process drops its copies and shares no load that began before. The commands are sent by polling the
    /// future. If the future is dropped, even without a poll, some may have happened in the store; all unconfirmed ones are retained
    /// as after an error.
    ///
    /// # Consistency
    ///
    /// As [`invalidate`](StampedeGuard::invalidate), for each. They are not atomic: until this has returned, a reader may receive the newer
    /// value of one and the older value of another.
    pub fn send(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        let mut named = HashSet::new();
        self.targets.retain(|(target, _)| named.insert(target.clone()));
        let begun = self.begin();
        async move {
            let failed = begun.make_each().await.into_iter().filter_map(Result::err).collect();
            joined(named.len(), failed)
        }
    }

    /// Begins all changes before the first command is sent: from now on an error or a cancellation loses none of them.
    pub(crate) fn begin(self) -> BegunInvalidation {
        let Self { guard, targets } = self;
        let (mut positions, mut attempts) = (HashMap::new(), Vec::new());
        let mut begin = |target: ChangeTarget| match positions.entry(target) {
            hash_map::Entry::Occupied(position) => *position.get(),
            hash_map::Entry::Vacant(vacant) => {
                attempts.push(Ok(Change::invalidation(&guard, vacant.key().clone())));
                *vacant.insert(attempts.len() - 1)
            }
        };
        let targets = targets
            .into_iter()
            .map(|(named, stored)| {
                let changes = stored.map(|stored| stored.into_iter().map(&mut begin).collect());
                BegunTarget { named, changes }
            })
            .collect();
        BegunInvalidation { guard, attempts, targets }
    }
}

/// An invalidation that has begun. If it is dropped, it is retained.
pub(crate) struct BegunInvalidation {
    guard: StampedeGuard,
    /// Each change once. `Err`: it was retained without an attempt to send it.
    attempts: Vec<Result<Change, FailedChange>>,
    targets: Vec<BegunTarget>,
}

struct BegunTarget {
    named: InvalidationTarget,
    /// The indices of its changes in `attempts`.
    changes: Result<Vec<usize>, Error>,
}

#[derive(Clone)]
struct FailedChange {
    key: Key,
    error: Error,
}

/// A target whose invalidation has failed, at least in part.
pub(crate) struct FailedTarget {
    named: InvalidationTarget,
    /// The key of the failed change; `None` if the target was not valid.
    key: Option<Key>,
    pub(crate) error: Error,
}

impl BegunInvalidation {
    /// Retains the changes on servers that are known to be down, without an attempt to send them. Returns how many.
    pub(crate) fn retain_unreachable(&mut self) -> usize {
        let mut retained = 0;
        for entry in &mut self.attempts {
            if let Ok(attempt) = entry
                && attempt.is_unreachable()
            {
                let error = attempt.unconfirmed(StoreError::new(StoreErrorKind::Unavailable));
                *entry = Err(FailedChange { key: attempt.target.key.clone(), error });
                retained += 1;
            }
        }
        retained
    }

    /// Whether any changes remain to be made.
    pub(crate) fn has_attempts(&self) -> bool {
        self.attempts.iter().any(Result::is_ok)
    }

    /// Makes all changes. Returns the result of each target, in their order.
    pub(crate) async fn make_each(self) -> Vec<Result<(), FailedTarget>> {
        let Self { guard, attempts, targets } = self;
        let deadline = &SharedDeadline::new(&guard.policy);
        let make = async |attempt: Result<Change, FailedChange>| {
            let attempt = attempt?;
            let (key, is_unreachable) = (attempt.target.key.clone(), attempt.is_unreachable());
            let make = async |until| attempt.run(until, None).await;
            let made = Box::pin(deadline.holds(is_unreachable, make)).await;
            made.map_err(|error| FailedChange { key, error })
        };
        let made: Vec<_> = stream::iter(attempts.into_iter().map(make)).buffered(CHANGES).collect().await;
        targets.into_iter().map(|target| target.answer(&made)).collect()
    }
}

impl BegunTarget {
    /// The result of this target. If several of its changes have failed, the error is that of an unconfirmed one.
    fn answer(self, made: &[Result<(), FailedChange>]) -> Result<(), FailedTarget> {
        let Self { named, changes } = self;
        let changes = match changes {
            Ok(changes) => changes,
            Err(error) => return Err(FailedTarget { named, key: None, error }),
        };
        let failed = changes.into_iter().filter_map(|index| made.get(index)?.as_ref().err());
        match failed.min_by_key(|failed| failed.error.unconfirmed().is_empty()).cloned() {
            None => Ok(()),
            Some(FailedChange { key, error }) => {
                let unconfirmed = error.unconfirmed().iter().take(1).map(|_| named.clone()).collect();
                Err(FailedTarget { named, key: Some(key), error: error.with_unconfirmed(unconfirmed) })
            }
        }
    }
}

impl FailedTarget {
    fn is_retained(&self) -> bool {
        !self.error.unconfirmed().is_empty() && self.error.kind() != ErrorKind::Closed
    }
}

/// Never prints the key itself: an error's text names digests.
impl fmt::Display for FailedTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.named {
            InvalidationTarget::Key(_) => "key",
            InvalidationTarget::Tag(_) => "tag",
            #[cfg(feature = "http")]
            InvalidationTarget::Path(_) => "path",
        };
        write!(f, "{kind} #{}", self.key.as_ref().map(Key::digest).unwrap_or_default())
    }
}

/// The result of all targets together.
fn joined(all: usize, failed: Vec<FailedTarget>) -> Result<(), Error> {
    let Some(first) = failed.first().map(|failed| failed.error.clone()) else { return Ok(()) };
    if all == 1 {
        return Err(first);
    }
    let unconfirmed = failed.iter().flat_map(|failed| failed.error.unconfirmed()).cloned().collect();
    let (retained, others): (Vec<_>, Vec<_>) = failed.into_iter().partition(FailedTarget::is_retained);
    let mut texts = Vec::new();
    if !retained.is_empty() {
        texts.push(format!(
            "not confirmed yet: {} of {all} invalidations ({}). They are kept, and sent as soon as the store answers; until then this \
             process serves nothing that they invalidate",
            retained.len(),
            listed(&retained, FailedTarget::to_string)
        ));
    }
    if !others.is_empty() {
        texts.push(listed(&others, |failed| failed.error.to_string()));
    }
    Err(first.with_text(texts.join("; ")).with_unconfirmed(unconfirmed))
}

/// The texts of the first failed targets, and how many more there are.
fn listed(all: &[FailedTarget], text: impl Fn(&FailedTarget) -> String) -> String {
    let mut texts: Vec<_> = all.iter().take(NAMED).map(text).collect();
    let more = all.len().saturating_sub(NAMED);
    texts.extend((more > 0).then(|| format!("and {more} more")));
    texts.join(", ")
}
