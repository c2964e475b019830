//! Changes of stored entries, which the store must confirm.
//!
//! A [`ChangeAttempt`] that the store does not confirm is counted as unconfirmed, and retained if it invalidates something. [`Resending`]
//! is the task that sends retained invalidations as soon as the store can be reached: one task for all clones of a guard.

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
use crate::local::AnnouncedChange;
use crate::observe::GuardCount;
use crate::store::volume::{Announced, ChangedName};
use crate::store::{Insert, LATEST, SentAttempt, StoreError, StoreErrorKind, StoreFuture};

/// How long a change is retried until the store confirms it.
pub(super) const LONGEST: Duration = Duration::from_secs(2);

impl ChangeAttempt {
    /// Makes the change: invalidates the target, or replaces its value by `insert`.
    pub(super) async fn make(mut self, until: Instant, insert: Option<Insert>) -> Result<(), Error> {
        let replicated = self.reaches_all(until, insert).await?;
        // A flight that began before the store made the change may hold an entry that was read before it.
        self.detach_flights();
        self.made();
        self.succeeds(replicated)
    }

    /// Waits until the store has made the change and no process serves an older copy. The inner `Err`: the replicas lack the change.
    async fn reaches_all(&self, until: Instant, insert: Option<Insert>) -> Result<Result<(), Error>, Error> {
        let Self { guard, target, .. } = self;
        // The reports' tag first: replicas that have the later change then have this one too.
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
        let have = guard.state.store.replicated(key, replicas, timeout).await;
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
        change: &AnnouncedChange<'_>,
        target: &ChangeTarget,
        until: Instant,
        insert: Option<Insert>,
    ) -> Result<ChangeOutcome, StoreError> {
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
            // No copies are known, so the refresh does not depend on the store.
            Err(_) if !self.policy.local_elsewhere && !self.state.local.knows_of_copies() => {}
            announced => announced.map_err(|error| attempt.unannounced(error))?,
        }
        attempt.succeeds(Ok(()))
    }

    /// Removes the id of a tag as a part of another change; that change waits until the announcement has reached all processes.
    async fn remove_tag(
        &self,
        change: &AnnouncedChange<'_>,
        tag: &Key,
        until: Instant,
    ) -> Result<ChangeOutcome, StoreError> {
        let forget =
            |within| Box::pin(self.count_errors(self.forget_id(change, tag, within))) as StoreFuture<'_, _>;
        self.retry_until(tag, until, forget).await
    }

    /// Sends a retained invalidation, and waits until no process serves a copy that it invalidates. Detaches no flights: they were
    /// detached when it was retained, and flights that began after that hold nothing that it invalidates.
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

    /// Called when an attempt with this number was confirmed. Returns whether this settles a retained invalidation.
    pub(super) fn settle(&self, name: &ChangedName, attempt: u64) -> bool {
        let state = &self.state;
        let loads_end = |load_timeout: Duration| {
            let longest = load_timeout + LATEST;
            state.store.now().saturating_add(longest.as_millis().try_into().unwrap_or(u64::MAX))
        };
        state.retained.confirmed(name, attempt, loads_end)
    }

    fn forget_id<'a>(
        &'a self,
        change: &AnnouncedChange<'_>,
        tag: &'a Key,
        within: Duration,
    ) -> StoreFuture<'a, ChangeOutcome> {
        let (announcement, store) = (change.attempt(), &self.state.store);
        let id = announcement.id;
        answered(self.state.local.attempt_sent(), id, async move {
            store.forget_tag(tag, &announcement, within).await
        })
    }

    /// Begins a change: this process drops its copies first, even if the store cannot be reached.
    fn change(&self, name: ChangedName) -> AnnouncedChange<'_> {
        self.state.local.forget(&name);
        self.state.local.change(name, self.policy.local_elsewhere)
    }

    pub(super) async fn count_errors<T>(
        &self,
        reply: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        reply.await.inspect_err(|_| self.state.count(GuardCount::store_errors))
    }

    /// Retries a command until `until`, beyond the coordination budget, because the caller needs nothing but this change.
    pub(super) async fn retry_until<'a, T>(
        &'a self,
        key: &Key,
        until: Instant,
        command: impl Fn(Duration) -> StoreFuture<'a, T>,
    ) -> Result<T, StoreError> {
        let mut last_error = StoreError::new(StoreErrorKind::Unavailable);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(last_error);
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
                    last_error = error;
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50)).min(left)).await;
                }
            }
        }
    }
}

/// The answer to one attempt at a change: the id of its announcement, and how the store handled that.
pub(super) type ChangeOutcome = (Uuid, Announced);

fn answered<'a>(
    sent: SentAttempt<'a>,
    id: Uuid,
    step: impl Future<Output = Result<Announced, StoreError>> + Send + 'a,
) -> StoreFuture<'a, ChangeOutcome> {
    Box::pin(async move {
        let announced = step.await?;
        sent.answered();
        Ok((id, announced))
    })
}

/// A running change. It counts as unconfirmed unless it succeeds, also if its caller, which may have its own time limit, drops it.
pub(super) struct ChangeAttempt {
    pub(super) guard: StampedeGuard,
    pub(super) target: ChangeTarget,
    /// The name of the operation in errors.
    pub(super) what: &'static str,
    number: u64,
    /// Whether the change is retained if it ends now.
    is_retained: bool,
    succeeded: bool,
}

impl ChangeAttempt {
    /// An invalidation of the target. This process drops its copies and detaches its flights at once, before any command is sent.
    pub(super) fn invalidation(guard: &StampedeGuard, target: ChangeTarget) -> Self {
        let what = if target.is_tag { "the invalidation by the tag" } else { "the invalidation" };
        let attempt = Self::new(guard, target, what, true);
        attempt.drop_copies();
        attempt.detach_flights();
        attempt
    }

    /// Another change of this key's value. If it `invalidates` and ends unconfirmed, it is retained as an invalidation.
    pub(super) fn of_value(guard: &StampedeGuard, key: &Key, what: &'static str, invalidates: bool) -> Self {
        Self::new(guard, ChangeTarget::value(key.clone()), what, invalidates)
    }

    fn new(guard: &StampedeGuard, target: ChangeTarget, what: &'static str, is_retained: bool) -> Self {
        let number = guard.state.retained.next_attempt();
        Self { guard: guard.clone(), target, what, number, is_retained, succeeded: false }
    }

    /// Whether the target's server is known to be down. In a cluster each key may be on a different server.
    pub(super) fn is_unreachable(&self) -> bool {
        self.guard.state.store.is_down(self.target.key.name())
    }

    /// Called when the store has made the change and no process serves an older copy: nothing remains to send.
    pub(super) fn made(&mut self) {
        self.is_retained = false;
        for target in self.targets() {
            self.guard.settle(&target.name(), self.number);
        }
    }

    /// Ends the attempt with the result for its caller.
    pub(super) fn succeeds(mut self, replicated: Result<(), Error>) -> Result<(), Error> {
        self.succeeded = replicated.is_ok();
        replicated
    }

    /// The error of a change that the store has refused or not confirmed.
    pub(super) fn unconfirmed(&self, error: StoreError) -> Error {
        self.failed("not confirmed yet", error)
    }

    /// The error of a change that the store has made, but whose announcement has not reached all other processes.
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

    /// Retains the invalidation. The order matters, see the invariants of `guard_state::retained`: the name, the copies, the flights.
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
            // A loader can add tags until its load ends, so any flight may have the tag: detach all. Later callers begin new ones.
            true => state.flights.detach_all(),
            false => state.detach_resource(key),
        }
    }

    /// The targets of the change: its own and, for an HTTP resource, the tag of [`of_reports`](Self::of_reports).
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

/// How many retained invalidations are sent at once.
const AT_ONCE: usize = 64;

/// How long one wait for the store lasts. The task may keep the state of a dropped guard alive for that long.
const REACHES: Duration = Duration::from_millis(500);

/// The first pause after a failed round, and the longest one.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl StampedeGuard {
    /// Starts the task that sends retained invalidations, if there are any and no such task runs.
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
    /// Whether the task has ended on purpose: all invalidations are sent, and later ones start another task; or the store is closed, and
    /// no other task is needed.
    is_over: bool,
}

impl Drop for Resending {
    /// If the task ended with its runtime, the next call that needs a key starts another.
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
            // In a cluster each key may be on a different server.
            let is_up = |retained: &&RetainedInvalidation| !state.store.is_down(retained.target.key.name());
            let Some(first) = retained.iter().find(is_up).or_else(|| retained.first()) else {
                self.is_over = true;
                return;
            };
            // Waits for a reconnect.
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
                // None was confirmed in the last round: probe the store with one at a time, and not always the same one.
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

/// Sends one invalidation, unless its server is known to be down. Returns the error if it is still retained.
async fn send(state: &Arc<GuardState>, retained: RetainedInvalidation) -> Option<StoreError> {
    if state.store.is_down(retained.target.key.name()) {
        return Some(StoreError::new(StoreErrorKind::Unavailable));
    }
    let (state, policy) = (Arc::clone(state), Arc::clone(&retained.policy));
    let guard = StampedeGuard::with(state, policy);
    guard.send_retained(&retained, Instant::now() + LONGEST).await.err()
}
