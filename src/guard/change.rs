//! Changes of stored entries, which the store has to confirm.
//!
//! One attempt at a change: it is counted, and kept if it invalidates something, unless the store confirms it.
//!
//! The task that sends kept invalidations: one for all clones of a guard, as soon as the store can be reached.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream;
use futures_util::stream::StreamExt as _;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::StampedeGuard;
use crate::error::{Error, ErrorKind, InvalidationTarget};
use crate::guard_state::GuardState;
use crate::guard_state::retained::{ChangeTarget, RetainedInvalidation};
use crate::key::Key;
use crate::local::Change;
use crate::observe::GuardCount;
use crate::store::attempt::SentAttempt;
use crate::store::volume::{Announced, ChangedName};
use crate::store::{Insert, LATEST, Reply, StoreError, StoreErrorKind};

/// How long a change is repeated until the store confirms it.
pub(super) const LONGEST: Duration = Duration::from_secs(2);

impl ChangeAttempt {
    /// Makes the change: invalidates the target, or replaces its value by `insert`.
    pub(super) async fn make(mut self, until: Instant, insert: Option<Insert>) -> Result<(), Error> {
        let replicated = self.reaches_all(until, insert).await?;
        // A flight that began before the store had the change may hold an entry that was read before it.
        self.detach_flights();
        self.made();
        self.succeeds(replicated)
    }

    /// Waits until the store has the change and no process serves an older copy. `Err` inside: the replicas lack it.
    async fn reaches_all(&self, until: Instant, insert: Option<Insert>) -> Result<Result<(), Error>, Error> {
        let Self { guard, target, .. } = self;
        // First, so that replicas that have the later change have this one too.
        let of_reports = match self.of_reports() {
            Some(tag) => {
                let change = guard.change(tag.name());
                let answer = guard.remove_tag(&change, &tag.key, until).await;
                Some((change, answer.map_err(|error| self.unconfirmed(error))?))
            }
            None => None,
        };
        let change = guard.change(target.name());
        let answer = guard.confirmed(&change, target, until, insert).await;
        let answer = answer.map_err(|error| self.unconfirmed(error))?;
        let of_reports = async {
            match of_reports {
                Some((change, answer)) => change.reaches_all(answer, until).await,
                None => Ok(()),
            }
        };
        let reached = async { tokio::try_join!(change.reaches_all(answer, until), of_reports) };
        let (reached, replicated) = tokio::join!(reached, self.replicated());
        reached.map_err(|error| self.unannounced(error))?;
        Ok(replicated)
    }

    /// Waits for the server's replicas, if the policy says so.
    async fn replicated(&self) -> Result<(), Error> {
        let Self { guard, target: ChangeTarget { key, .. }, what, .. } = self;
        let Some((replicas, timeout)) = guard.policy.replicas else { return Ok(()) };
        let have = guard.state.store.tags().replicated(key, replicas, timeout).await;
        let have =
            have.map_err(|error| Error::store(&format!("not confirmed by replicas: {what}"), key, error))?;
        if have >= replicas {
            return Ok(());
        }
        let digest = key.digest();
        let text = format!("{what} of key #{digest}: {have} of {replicas} replicas have it");
        Err(Error::new(ErrorKind::Store, text))
    }
}

impl StampedeGuard {
    /// Makes a change, and waits until the server has confirmed it.
    async fn confirmed(
        &self,
        change: &Change<'_>,
        target: &ChangeTarget,
        until: Instant,
        insert: Option<Insert>,
    ) -> Result<Answer, StoreError> {
        let (store, key) = (&self.state.store, &target.key);
        let command = |within| {
            if target.is_tag {
                return self.forget_id(change, key, within);
            }
            let (announcement, insert) = (change.attempt(), insert.clone());
            answered(self.state.local.attempt_sent(), announcement.id, async move {
                store.invalidate(key, insert, &announcement, within).await
            })
        };
        let answer =
            self.retry_until(key, until, |within| Box::pin(self.count_errors(command(within)))).await?;
        self.state.count(GuardCount::invalidations);
        self.state.publish_regularly();
        Ok(answer)
    }

    /// Waits until no process serves a copy that is older than a refresh.
    pub(super) async fn announce_refresh(&self, key: &Key) -> Result<(), Error> {
        let attempt = ChangeAttempt::of_value(self, key, "the refresh", false);
        let change = self.change(ChangedName::value(key));
        match change.announce_and_wait(Instant::now() + LONGEST).await {
            // As far as is known there are no copies, so the refresh does not depend on the store.
            Err(_) if !self.policy.local_elsewhere && !self.state.local.knows_of_copies() => {}
            announced => announced.map_err(|error| attempt.unannounced(error))?,
        }
        attempt.succeeds(Ok(()))
    }

    /// Removes the id of a tag, as a part of another change, which waits for the announcement.
    async fn remove_tag(&self, change: &Change<'_>, tag: &Key, until: Instant) -> Result<Answer, StoreError> {
        let forget =
            |within| Box::pin(self.count_errors(self.forget_id(change, tag, within))) as Reply<'_, _>;
        self.retry_until(tag, until, forget).await
    }

    /// Sends a kept invalidation, and waits until no process serves a copy of what it invalidates. It detaches no flights: they were
    /// detached when it was kept, and flights that began after that hold nothing that it invalidates.
    pub(super) async fn send_retained(
        &self,
        retained: &RetainedInvalidation,
        until: Instant,
    ) -> Result<(), StoreError> {
        let (attempt, target) = (self.state.retained.next_attempt(), &retained.target);
        let change = self.change(target.name());
        let answer = self.confirmed(&change, target, until, None).await?;
        change.reaches_all(answer, until).await?;
        if self.settle(&target.name(), attempt) {
            self.state.count(GuardCount::invalidations_resent);
        }
        Ok(())
    }

    /// An attempt with this number was confirmed. Returns whether that settles a kept invalidation.
    pub(super) fn settle(&self, name: &ChangedName, attempt: u64) -> bool {
        let state = &self.state;
        let loads_end = |load_timeout: Duration| {
            let longest = load_timeout + LATEST;
            state.store.now().saturating_add(longest.as_millis().try_into().unwrap_or(u64::MAX))
        };
        state.retained.confirmed(name, attempt, loads_end)
    }

    fn forget_id<'a>(&'a self, change: &Change<'_>, tag: &'a Key, within: Duration) -> Reply<'a, Answer> {
        let (announcement, tags) = (change.attempt(), self.state.store.tags());
        let id = announcement.id;
        answered(self.state.local.attempt_sent(), id, async move {
            tags.forget_tag(tag, &announcement, within).await
        })
    }

    /// Begins a change: this process drops its copies, even if the store cannot be reached.
    fn change(&self, name: ChangedName) -> Change<'_> {
        self.state.local.forget(&name);
        self.state.local.change(name, self.policy.local_elsewhere)
    }

    pub(super) async fn count_errors<T>(
        &self,
        reply: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        reply.await.inspect_err(|_| self.state.count(GuardCount::store_errors))
    }

    /// Repeats a command until `until`, past the coordination budget, because the caller asked for this change only.
    pub(super) async fn retry_until<'a, T>(
        &'a self,
        key: &Key,
        until: Instant,
        command: impl Fn(Duration) -> Reply<'a, T>,
    ) -> Result<T, StoreError> {
        let mut retry_until = StoreError::new(StoreErrorKind::Unavailable);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(retry_until);
            }
            // Unlike a load, a change waits for a reconnect.
            let done = match self.count_errors(self.state.store.reach(key.name(), left)).await {
                Ok(()) => command(left.min(LONGEST / 4)).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(done) => return Ok(done),
                Err(error) => {
                    if error.is_final() {
                        return Err(error);
                    }
                    retry_until = error;
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50)).min(left)).await;
                }
            }
        }
    }
}

/// The answer to one attempt at a change: the id of its announcement, and what became of that.
pub(super) type Answer = (Uuid, Announced);

fn answered<'a>(
    sent: SentAttempt<'a>,
    id: Uuid,
    step: impl Future<Output = Result<Announced, StoreError>> + Send + 'a,
) -> Reply<'a, Answer> {
    Box::pin(async move {
        let announced = step.await?;
        sent.answered();
        Ok((id, announced))
    })
}

/// A change on its way. It counts as not confirmed unless it succeeds: also if its caller, which may have a bound of its own, drops it.
pub(super) struct ChangeAttempt {
    pub(super) guard: StampedeGuard,
    pub(super) target: ChangeTarget,
    /// The name of the operation in errors.
    pub(super) what: &'static str,
    number: u64,
    /// It is kept if it ends now.
    is_retained: bool,
    succeeded: bool,
}

impl ChangeAttempt {
    /// An invalidation of the target. This process drops its copies and detaches its flights at once, independent of the store.
    pub(super) fn invalidation(guard: &StampedeGuard, target: ChangeTarget) -> Self {
        let what = if target.is_tag { "the invalidation by the tag" } else { "the invalidation" };
        let attempt = Self::new(guard, target, what, true);
        attempt.drop_copies();
        attempt.detach_flights();
        attempt
    }

    /// Another change of this key's value, which is kept as an invalidation if it `invalidates`.
    pub(super) fn of_value(guard: &StampedeGuard, key: &Key, what: &'static str, invalidates: bool) -> Self {
        Self::new(guard, ChangeTarget::value(key.clone()), what, invalidates)
    }

    fn new(guard: &StampedeGuard, target: ChangeTarget, what: &'static str, is_retained: bool) -> Self {
        let number = guard.state.retained.next_attempt();
        Self { guard: guard.clone(), target, what, number, is_retained, succeeded: false }
    }

    /// Whether the target's server is known to be down. In a cluster each key may be on another one.
    pub(super) fn is_unreachable(&self) -> bool {
        self.guard.state.store.is_down(self.target.key.name())
    }

    /// The store has made the change, and no process serves an older copy: nothing is left to send.
    pub(super) fn made(&mut self) {
        self.is_retained = false;
        for target in self.targets() {
            self.guard.settle(&target.name(), self.number);
        }
    }

    /// How the change ends for its caller.
    pub(super) fn succeeds(mut self, replicated: Result<(), Error>) -> Result<(), Error> {
        self.succeeded = replicated.is_ok();
        replicated
    }

    /// The error of a change that the store has refused or not confirmed.
    pub(super) fn unconfirmed(&self, error: StoreError) -> Error {
        self.failed("not confirmed yet", error)
    }

    /// The error of a change that was made, and of which other processes could not be told.
    pub(super) fn unannounced(&self, error: StoreError) -> Error {
        self.failed("not announced yet to the other processes", error)
    }

    fn failed(&self, how: &str, error: StoreError) -> Error {
        let Self { guard, target: ChangeTarget { key, is_tag }, what, .. } = self;
        if !self.is_retained {
            return match error.is_final() {
                true => Error::store(what, key, error),
                false => Error::store(&format!("{}: {what}", how.replace(" yet", "")), key, error),
            };
        }
        let target = match (key.cache_key(&guard.state.namespace), is_tag) {
            (key, false) => InvalidationTarget::Key(key),
            (tag, true) => InvalidationTarget::Tag(tag),
        };
        if error.kind == StoreErrorKind::Closed {
            return Error::store(what, key, error).with_unconfirmed(vec![target]);
        }
        let digest = key.digest();
        let text = format!(
            "{how}: {what} of key #{digest} failed. It is kept, and sent as soon as the store answers; until then this process \
             serves nothing that it invalidates"
        );
        Error::with_source(Error::kind_of(&error), text, Arc::new(error)).with_unconfirmed(vec![target])
    }

    /// Keeps what it invalidates. The order is part of the proof: the name, the copies, the flights.
    fn keep(&self) {
        let (state, policy) = (&self.guard.state, &self.guard.policy);
        for target in self.targets() {
            let retained = RetainedInvalidation { target, attempt: self.number, policy: Arc::clone(policy) };
            if state.retained.keep(retained) {
                state.count(GuardCount::invalidations_overflowed);
                state.local.forget_all();
                state.flights.detach_all();
            }
        }
        self.drop_copies();
        self.detach_flights();
        self.guard.send_retained_later();
    }

    fn drop_copies(&self) {
        for target in self.targets() {
            self.guard.state.local.forget(&target.name());
        }
    }

    pub(super) fn detach_flights(&self) {
        let (state, ChangeTarget { key, is_tag }) = (&self.guard.state, &self.target);
        match is_tag {
            true if key.is_path() => state.detach_path(key),
            // A loader sets tags until its load ends, so any flight may have the tag: detach all, and later callers begin new ones.
            true => state.flights.detach_all(),
            false => state.detach_resource(key),
        }
    }

    /// What the change invalidates: the target and, for an HTTP resource, the responses to requests with reports of proxies.
    fn targets(&self) -> impl Iterator<Item = ChangeTarget> {
        [self.of_reports(), Some(self.target.clone())].into_iter().flatten()
    }

    /// The tag of the responses to requests with reports of proxies, if the target is an HTTP resource.
    pub(super) fn of_reports(&self) -> Option<ChangeTarget> {
        let ChangeTarget { key, is_tag } = &self.target;
        let reports = (!is_tag).then(|| key.of_reports(&self.guard.state.namespace)).flatten();
        reports.map(ChangeTarget::tag)
    }
}

impl Drop for ChangeAttempt {
    fn drop(&mut self) {
        if self.succeeded {
            return;
        }
        self.guard.state.count(GuardCount::invalidations_unconfirmed);
        if self.is_retained {
            self.keep();
        }
    }
}

/// How many are sent at once.
const AT_ONCE: usize = 64;

/// How long one wait for the store lasts. The task keeps a guard that was dropped for as long.
const REACHES: Duration = Duration::from_millis(500);

/// The pause after a round that has failed, and the longest one.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl StampedeGuard {
    /// Starts the task, if something is kept and there is no task.
    pub(super) fn send_retained_later(&self) {
        let Ok(runtime) = Handle::try_current() else { return };
        if self.state.retained.begin_to_send() {
            runtime.spawn(Resending { state: Arc::downgrade(&self.state), is_over: false }.run());
        }
    }
}

/// The task's reference to the guard. Weak: dropping the guard ends its task.
struct Resending {
    state: Weak<GuardState>,
    /// All are sent, and another task sends what is kept from now on; or the store is closed, and there is no other task.
    is_over: bool,
}

impl Drop for Resending {
    /// The task ended with its runtime: the next call that needs a key starts another.
    fn drop(&mut self) {
        if let Some(state) = self.state.upgrade()
            && !self.is_over
        {
            state.retained.sends_no_more();
        }
    }
}

impl Resending {
    async fn run(mut self) {
        let mut pause = PAUSE;
        loop {
            let Some(state) = self.state.upgrade() else { return };
            let mut retained = state.retained.to_send();
            // In a cluster each key may be on another server.
            let is_up = |retained: &&RetainedInvalidation| !state.store.is_down(retained.target.key.name());
            let Some(first) = retained.iter().find(is_up).or_else(|| retained.first()) else {
                self.is_over = true;
                return;
            };
            // This waits for a reconnect, and ends with it.
            if let Err(error) = state.store.reach(first.target.key.name(), REACHES).await {
                self.is_over = error.kind == StoreErrorKind::Closed;
                if self.is_over {
                    return;
                }
                drop(state);
                sleep(PAUSE).await;
                continue;
            }
            if pause > PAUSE {
                // None was confirmed in the last round. One at a time finds out when that ends; not the same one each time.
                let one = retained.swap_remove(fastrand::usize(..retained.len()));
                retained = vec![one];
            }
            let all = retained.len();
            let sent =
                stream::iter(retained).map(|retained| send(&state, retained)).buffer_unordered(AT_ONCE);
            let sent: Vec<_> = sent.collect().await;
            self.is_over = sent.iter().flatten().any(|error| error.kind == StoreErrorKind::Closed);
            if self.is_over {
                return;
            }
            drop(state);
            match sent.iter().filter(|error| error.is_some()).count() {
                0 => pause = PAUSE,
                failed => {
                    pause = if failed == all { (pause * 2).min(LONGEST_PAUSE) } else { PAUSE };
                    sleep(pause).await;
                }
            }
        }
    }
}

/// Sends one of them, unless its server is known to be down. Returns why it is still kept.
async fn send(state: &Arc<GuardState>, retained: RetainedInvalidation) -> Option<StoreError> {
    if state.store.is_down(retained.target.key.name()) {
        return Some(StoreError::new(StoreErrorKind::Unavailable));
    }
    let (state, policy) = (Arc::clone(state), Arc::clone(&retained.policy));
    let guard = StampedeGuard::with(state, policy);
    guard.send_retained(&retained, Instant::now() + LONGEST).await.err()
}
