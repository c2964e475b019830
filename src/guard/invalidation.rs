//! The invalidations of one key, of a tag, of everything, and of many keys; and [`StampedeGuard::invalidation`], one invalidation of many
//! keys, tags and paths, which may begin before the origin is changed.

use std::collections::{HashMap, HashSet, hash_map};
use std::fmt;
use std::future::Future;
use std::mem;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt as _};
use tokio::time::Instant;

use super::StampedeGuard;
use super::change::{Change, LONGEST, detach_flights};
use super::entries::{CHANGES, SharedDeadline};
use crate::error::{Error, ErrorKind, InvalidationTarget};
use crate::guard_state::GuardState;
use crate::guard_state::retained::ChangeTarget;
use crate::key::{CacheKey, Key};
use crate::store::protocol::ChangedName;
use crate::store::{StoreError, StoreErrorKind};
use crate::value::entry;

/// How many targets the text of an error names.
const NAMED: usize = 8;

impl StampedeGuard {
    /// Removes `key`. Loads that are running do not bring it back: their values are not stored. For several keys, tags and paths at
    /// once: [`invalidation`](Self::invalidation).
    ///
    /// Where processes have local copies (`local_for`), it then waits until each of them has dropped its copy: about a round trip, or at
    /// most one `local_term` (two seconds) for a process that is dead, hung, paused or cut off.
    ///
    /// # Errors
    ///
    /// An empty key, or a store that did not confirm the invalidation within two seconds, in which case it may or may not
    /// have happened. The guard then retains it, and sends it again as soon as the store answers: no need to repeat it.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the invalidation may or may not have happened in the store; it is retained as after an error. In this
    /// process running loads are detached at once.
    ///
    /// # Consistency
    ///
    /// After an error, or once the future is dropped, this process serves no value that was stored before, from the store or from
    /// memory. Other processes may serve one until the invalidation is sent; it is lost if this process dies before
    /// ([`most_kept_invalidations`](crate::StampedeGuardBuilder::most_kept_invalidations)).
    ///
    /// Once it has returned `Ok`, no later caller in any process receives a value that was loaded before. (In another process a caller
    /// may join a load after the last moment at which its lease was known to be held. Such a caller looks again when the store refuses
    /// the load's value.) There are two exceptions: a store that cannot be reached at that moment, and clients that read an HTTP response
    /// while its body arrives, until the invalidation has reached their process (about a round trip later, or, if that message is lost,
    /// at the next renewal of the lease).
    pub async fn invalidate(&self, key: impl Into<CacheKey>) -> Result<(), Error> {
        let (guard, key) = (self.current(), key.into());
        let value = guard.key(key.clone())?;
        if guard.policy.search_tag(&guard.state.namespace, &value).is_some() {
            return Box::pin(guard.invalidation().key(key).send()).await;
        }
        let change = Change::invalidation(&guard, ChangeTarget::value(value));
        // Boxed, because otherwise the caller's future would be as large as this one.
        Box::pin(change.run(Instant::now() + LONGEST, None)).await
    }

    /// Removes every value with this tag by one command, however many values there are; the values of loads that are running are not
    /// stored. Values have the tags of their policy ([`PolicyBuilder::tags`](crate::PolicyBuilder::tags)) and
    /// those that their loader added ([`LoadContext::tag`](crate::LoadContext::tag)).
    ///
    /// # Errors
    ///
    /// See [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// See [`invalidate`](Self::invalidate).
    ///
    /// # Consistency
    ///
    /// Once it has returned, no later caller in any process receives a value that was loaded before. It stays invalidated:
    /// no late load or eviction brings it back. A failover to a replica that has not received the invalidation, or a restart from an
    /// older data set, can bring it back; [`PolicyBuilder::invalidate_replicas`](crate::PolicyBuilder::invalidate_replicas) waits for
    /// replicas.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{MemoryStore, Policy, StampedeGuard};
    ///
    /// let policy = Policy::builder().tags(["catalog"]).build()?;
    /// let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;
    /// guard.insert(("price", 7), &499_u32).await?;
    /// guard.invalidate_tag("catalog").await?;
    /// assert_eq!(guard.get::<u32>(("price", 7)).await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn invalidate_tag(&self, tag: impl Into<CacheKey>) -> Result<(), Error> {
        self.invalidation().tag(tag).send().await
    }

    /// Ends the freshness of every value with this tag, by one command: each is served for the rest of its
    /// [`stale_while_revalidate`](crate::PolicyBuilder::stale_while_revalidate) window, which begins now, and is loaded anew by the next
    /// request for it, in the background, once in the fleet and within the policy's limit of loads. If the limit is reached, the request
    /// begins no load, and a later one does; so the values that are asked for most are loaded first.
    ///
    /// For changes that may be seen late, such as a new template of ten thousand pages: no request waits. A value without that window is
    /// loaded by the next request for it, which waits; the older value is served if that load fails, within
    /// [`stale_if_error`](crate::PolicyBuilder::stale_if_error). ([`expire`](Self::expire) ends the first window of one key too.)
    ///
    /// # Errors
    ///
    /// See [`invalidate`](Self::invalidate). After an error the guard retains an invalidation of the tag, and sends that.
    ///
    /// # Cancel safety
    ///
    /// See [`invalidate`](Self::invalidate).
    ///
    /// # Consistency
    ///
    /// Once it has returned, no later caller in any process receives a value as fresh that was loaded before. If a tag is expired again
    /// before a value was loaded anew, the value's windows begin with the latest expiry; they never end later than without any.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use stampede_guard::{MemoryStore, Policy, StampedeGuard};
    ///
    /// let policy = Policy::builder().stale_while_revalidate(Duration::from_secs(60)).tags(["pages"]).build()?;
    /// let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;
    /// guard.insert(("page", 7), &"old".to_owned()).await?;
    /// guard.expire_tag("pages").await?;
    /// let page = guard.get_or_load(("page", 7), async || Ok::<_, std::io::Error>("new".to_owned())).await?;
    /// assert_eq!(page, "old"); // at once; the next one is "new"
    /// # Ok(()) }
    /// ```
    pub async fn expire_tag(&self, tag: impl Into<CacheKey>) -> Result<(), Error> {
        let guard = self.current();
        let change = Change::expiry_of_tag(&guard, guard.key(tag)?);
        Box::pin(change.run(Instant::now() + LONGEST, None)).await
    }

    /// Removes every value of this namespace that is stored under a policy with
    /// [`PolicyBuilder::invalidate_all`](crate::PolicyBuilder::invalidate_all), this guard's among them: as
    /// [`invalidate_tag`](Self::invalidate_tag), with a tag that all of them have.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`] if this guard's policy lacks that setting: its own values would stay. Otherwise as
    /// [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// See [`invalidate`](Self::invalidate).
    pub async fn invalidate_all(&self) -> Result<(), Error> {
        let guard = self.current();
        if !guard.policy.invalidate_all {
            let text = "invalidate_all does not reach this guard's own values: build its policy with \
                        Policy::builder().invalidate_all(true); what was stored without that is then a miss";
            return Err(Error::new(ErrorKind::InvalidPolicy, text));
        }
        guard.invalidation().tag(CacheKey::reserved(entry::EVERYTHING)).send().await
    }

    /// Removes many keys, as [`invalidate`](Self::invalidate) does with each; the answers are in the order of the keys.
    ///
    /// # Errors
    ///
    /// The errors of [`invalidate`](Self::invalidate), for each key. Once the store has confirmed no invalidation for two seconds, this
    /// call sends no more: the rest is retained, as the unconfirmed ones are. For the first error of all:
    /// `.into_iter().collect::<Result<(), _>>()?`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, some keys may have been removed in the store; all unconfirmed invalidations are retained, as after an
    /// error.
    ///
    /// # Consistency
    ///
    /// Like [`invalidate`](Self::invalidate), for each key. If values are always removed together, give them a common tag:
    /// [`invalidate_tag`](Self::invalidate_tag) is one command.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert_many([("a", 1_u32), ("b", 2)]).await.into_iter().collect::<Result<(), _>>()?;
    /// guard.invalidate_many(["a", "b"]).await.into_iter().collect::<Result<(), _>>()?;
    /// assert_eq!(guard.get::<u32>("a").await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn invalidate_many<K: Into<CacheKey>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Vec<Result<(), Error>> {
        let made = self.invalidation().keys(keys).changes().make_each().await;
        made.into_iter().map(|made| made.map_err(|failed| failed.error)).collect()
    }

    /// One invalidation of many keys, tags and paths, for a change of the origin that affects more than one of them. Nothing happens
    /// before [`send`](Invalidation::send) or [`begin`](Invalidation::begin).
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
#[must_use = "nothing is invalidated before `send` or `begin`"]
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

    /// Adds keys, each as in [`invalidate`](StampedeGuard::invalidate).
    pub fn keys<K: Into<CacheKey>>(mut self, keys: impl IntoIterator<Item = K>) -> Self {
        for key in keys {
            let key = key.into();
            let stored = self.guard.key(key.clone()).map(|key| {
                let search = self.guard.policy.search_tag(&self.guard.state.namespace, &key);
                [ChangeTarget::value(key)].into_iter().chain(search.map(ChangeTarget::tag)).collect()
            });
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

    /// Invalidates all targets, 32 at once, and each only once, however many times it was named. Returns `Ok` once each is confirmed as
    /// by [`invalidate`](StampedeGuard::invalidate).
    ///
    /// # Errors
    ///
    /// If the store has not confirmed all targets: [`Error::unconfirmed`] lists the unconfirmed ones. They were retried for two seconds in
    /// all, or, if there are more than 32, for two seconds since the last confirmation. They are retained, and sent as soon as the store
    /// answers: no need to repeat them. The error's kind is that of the first failure.
    ///
    /// [`InvalidKey`](ErrorKind::InvalidKey) for an empty key or tag and a text that is not a path,
    /// [`InvalidPolicy`](ErrorKind::InvalidPolicy) for a path under a policy without an authority; all other targets are invalidated
    /// nevertheless.
    ///
    /// # Cancel safety
    ///
    /// From this call on this process drops its copies and shares no load that began before. The commands are sent by polling the
    /// future. If the future is dropped, even without a poll, some targets may have been invalidated in the store; all unconfirmed ones
    /// are retained as after an error.
    ///
    /// # Consistency
    ///
    /// Like [`invalidate`](StampedeGuard::invalidate), for each target. The invalidation is not atomic: until this has returned, a reader
    /// may receive the newer value of one target and the older value of another.
    pub fn send(self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        self.without_repetitions().changes().make_all()
    }

    /// Begins the invalidation before the origin is changed: from now on this process serves nothing stored that it names. For a
    /// transaction of a database, which may be committed although the program never reaches the next line:
    ///
    /// | then | what happens |
    /// |---|---|
    /// | [`send`](PendingInvalidation::send), after the commit | as [`send`](Self::send) |
    /// | [`withdraw`](PendingInvalidation::withdraw), after a rollback | nothing was invalidated |
    /// | it is dropped: an error of the commit, a panic, a client that leaves | it is sent in the background: the origin may have changed |
    ///
    /// Until then each value that it names is a miss in this process, and is loaded, once for all callers that wait. So begin it late in
    /// the transaction.
    ///
    /// # Errors
    ///
    /// The first name that [`send`](Self::send) would not accept; then nothing has begun.
    ///
    /// # Consistency
    ///
    /// Other processes serve what is stored until the invalidation is sent. If this process dies between the commit and the invalidation,
    /// it is lost; only a reader of the database's log does not miss it (the crate `stampede-guard-postgres`).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # struct Transaction; impl Transaction { async fn commit(self) -> std::io::Result<()> { Ok(()) } }
    /// # let tx = Transaction;
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert(("price", 7), &499_u32).await?;
    ///
    /// let change = guard.invalidation().key(("price", 7)).begin()?;
    /// tx.commit().await?; // an error here drops `change`: the price may have changed
    /// change.send().await?;
    /// assert_eq!(guard.get::<u32>(("price", 7)).await?, None);
    /// # Ok(()) }
    /// ```
    pub fn begin(self) -> Result<PendingInvalidation, Error> {
        let invalidation = self.without_repetitions();
        let mut targets = Vec::new();
        for (_, stored) in &invalidation.targets {
            targets.extend(stored.as_ref().map_err(Error::clone)?);
        }
        let _hidden = HiddenTargets::hide(&invalidation.guard, &targets);
        Ok(PendingInvalidation { invalidation, _hidden })
    }

    fn without_repetitions(mut self) -> Self {
        let mut named = HashSet::new();
        self.targets.retain(|(target, _)| named.insert(target.clone()));
        self
    }

    /// Begins all changes before the first command is sent: from now on an error or a cancellation loses none of them.
    pub(crate) fn changes(self) -> InvalidationChanges {
        let Self { guard, targets } = self;
        let (mut positions, mut changes) = (HashMap::new(), Vec::new());
        let mut begin = |target: ChangeTarget| match positions.entry(target) {
            hash_map::Entry::Occupied(position) => *position.get(),
            hash_map::Entry::Vacant(vacant) => {
                changes.push(Ok(Change::invalidation(&guard, vacant.key().clone())));
                *vacant.insert(changes.len() - 1)
            }
        };
        let targets = targets
            .into_iter()
            .map(|(named, stored)| {
                let changes = stored.map(|stored| stored.into_iter().map(&mut begin).collect());
                TargetChanges { named, changes }
            })
            .collect();
        InvalidationChanges { guard, changes, targets }
    }
}

/// An invalidation that has [begun](Invalidation::begin) before its change of the origin. If it is dropped, it is sent in the background.
#[must_use = "dropped, it is sent in the background: call `send` after the commit, `withdraw` after a rollback"]
#[derive(Debug)]
pub struct PendingInvalidation {
    /// Without targets once it is sent or withdrawn.
    invalidation: Invalidation,
    /// Shown again after what `drop` retains, so that nothing is served in between.
    _hidden: HiddenTargets,
}

impl PendingInvalidation {
    /// Sends the invalidation, once the origin has changed; see [`Invalidation::send`].
    ///
    /// # Errors
    ///
    /// See [`Invalidation::send`].
    ///
    /// # Cancel safety
    ///
    /// See [`Invalidation::send`].
    pub fn send(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        let sent = (self.take_changes(), self);
        async move {
            // Dropped in this order also where the future is dropped early: what is not confirmed is retained before it is shown.
            let (changes, pending) = sent;
            let result = changes.make_all().await;
            drop(pending);
            result
        }
    }

    /// Ends the invalidation without sending it, because the origin has not changed: after a rollback. After an error of a commit drop it
    /// instead: the commit may have happened.
    pub fn withdraw(mut self) {
        self.invalidation.targets.clear();
    }

    /// The changes begin now, not with this value: their numbers must be later than those of all attempts before the origin's change.
    fn take_changes(&mut self) -> InvalidationChanges {
        let targets = mem::take(&mut self.invalidation.targets);
        Invalidation { guard: self.invalidation.guard.clone(), targets }.changes()
    }
}

impl Drop for PendingInvalidation {
    fn drop(&mut self) {
        drop(self.take_changes());
    }
}

/// Targets of which this process serves nothing stored until this is dropped.
struct HiddenTargets {
    state: Arc<GuardState>,
    names: Vec<ChangedName>,
}

impl HiddenTargets {
    /// In the order of the invariants 4 and 5 of `guard_state::retained`: the names, the copies, the flights. As in a change, the flights
    /// of a resource's reports are detached with those of the resource, not by their tag, which would detach all flights.
    fn hide(guard: &StampedeGuard, targets: &[&ChangeTarget]) -> Self {
        let state = Arc::clone(guard.parts().0);
        let names: Vec<_> = targets
            .iter()
            .flat_map(|target| target.with_reports(&state.namespace))
            .map(|it| it.name())
            .collect();
        state.retained.hide(&names);
        names.iter().for_each(|name| state.local.forget(name));
        targets.iter().for_each(|target| detach_flights(&state, target));
        Self { state, names }
    }
}

impl Drop for HiddenTargets {
    fn drop(&mut self) {
        self.state.retained.show(&self.names);
    }
}

impl fmt::Debug for HiddenTargets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HiddenTargets").field("names", &self.names.len()).finish_non_exhaustive()
    }
}

/// The changes of an invalidation. If this is dropped, those that are not made are retained.
pub(crate) struct InvalidationChanges {
    guard: StampedeGuard,
    /// Each change once. `Err`: the change was retained without an attempt to send it.
    changes: Vec<Result<Change, FailedChange>>,
    targets: Vec<TargetChanges>,
}

struct TargetChanges {
    named: InvalidationTarget,
    /// The indices of the target's changes in `InvalidationChanges::changes`; an error if the target is not valid.
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

impl InvalidationChanges {
    /// Retains the changes on servers that are known to be down, without an attempt to send them. Returns how many were retained.
    pub(crate) fn retain_unreachable(&mut self) -> usize {
        let mut retained = 0;
        for entry in &mut self.changes {
            if let Ok(change) = entry
                && change.is_unreachable()
            {
                let error = change.unconfirmed(StoreError::new(StoreErrorKind::Unavailable));
                *entry = Err(FailedChange { key: change.target.key.clone(), error });
                retained += 1;
            }
        }
        retained
    }

    /// Whether any changes remain to be made.
    pub(crate) fn has_changes(&self) -> bool {
        self.changes.iter().any(Result::is_ok)
    }

    /// Makes all changes, and returns the one result of all targets.
    async fn make_all(self) -> Result<(), Error> {
        let all = self.targets.len();
        let failed = self.make_each().await.into_iter().filter_map(Result::err).collect();
        joined(all, failed)
    }

    /// Makes all changes. Returns the results of the targets, in the order of the targets.
    pub(crate) async fn make_each(self) -> Vec<Result<(), FailedTarget>> {
        let Self { guard, changes, targets } = self;
        let deadline = &SharedDeadline::new(&guard.policy);
        let make = async |change: Result<Change, FailedChange>| {
            let change = change?;
            let (key, is_unreachable) = (change.target.key.clone(), change.is_unreachable());
            let make = async |until| change.run(until, None).await;
            let made = Box::pin(deadline.holds(is_unreachable, make)).await;
            made.map_err(|error| FailedChange { key, error })
        };
        let made: Vec<_> = stream::iter(changes.into_iter().map(make)).buffered(CHANGES).collect().await;
        targets.into_iter().map(|target| target.result(&made)).collect()
    }
}

impl TargetChanges {
    /// The result of this target. If several of its changes have failed, the error is that of an unconfirmed one.
    fn result(self, made: &[Result<(), FailedChange>]) -> Result<(), FailedTarget> {
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

/// The one result of all targets. `failed`: the targets that have failed, of `all`.
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
