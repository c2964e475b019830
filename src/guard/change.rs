//! Changes of stored entries, which the store must confirm.
//!
//! A [`Change`] that the store does not confirm is counted as unconfirmed, and retained if it invalidates something. [`Resending`] is the
//! task that sends retained invalidations as soon as the store can be reached: one task for all clones of a guard.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream;
use futures_util::stream::StreamExt as _;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::StampedeGuard;
use crate::error::{Error, ErrorKind, InvalidationTarget};
use crate::guard_state::GuardState;
use crate::guard_state::retained::{ChangeTarget, RetainedInvalidation};
use crate::key::Key;
use crate::local::AnnouncedChange;
use crate::observe::GuardCount;
use crate::store::protocol::{Announced, ChangedName};
use crate::store::{Insert, LATEST, StoreError, StoreErrorKind, StoreResult};

/// How long a change is retried at most until the store confirms it.
pub(super) const LONGEST: Duration = Duration::from_secs(2);

/// A change of stored entries, from its beginning until the store has confirmed it and no process serves an older copy. If it ends before
/// that, it counts as unconfirmed, also if its caller, which may have its own time limit, drops it.
///
/// What [`guard_state::retained`](crate::guard_state::retained) and [`store::Attempts`](crate::store::Attempts) need of it:
///
/// - *Its number is taken when it begins*, before its first command, so that it settles no invalidation that was retained after that
///   (invariant 1 there). So `expire` begins its change before it reads the entry, because it may store that entry again.
/// - *Each command has a new announcement id and a new attempt number.* An attempt without an answer is noted as one that may still run, so
///   that the next one voids it.
/// - *Dropped before its end, it is retained*, if it invalidates: first the name, then the copies, then the flights (invariants 4 and 5).
pub(super) struct Change {
    guard: StampedeGuard,
    pub(super) target: ChangeTarget,
    /// For an HTTP resource: the tag of the responses to requests with reports of proxies, which is invalidated with the resource.
    of_reports: Option<ChangeTarget>,
    /// Whether the values of the tag become stale, instead of invalid.
    only_expires: bool,
    /// The name of the operation in errors.
    what: &'static str,
    number: u64,
    /// Whether the change is retained if it ends now.
    is_retained: bool,
    succeeded: bool,
}

/// What a change does to its target.
#[derive(Clone, Copy)]
enum Effect<'a> {
    Invalidate,
    /// Ends the freshness of all values with the tag.
    ExpireTag,
    Insert(&'a Insert),
}

impl Change {
    /// An invalidation of the target. This process drops its copies and detaches its flights at once, before any command is sent.
    pub(super) fn invalidation(guard: &StampedeGuard, target: ChangeTarget) -> Self {
        let what = if target.is_tag { "the invalidation by the tag" } else { "the invalidation" };
        let change = Self::new(guard, target, what, true);
        change.drop_copies();
        change.detach_flights();
        change
    }

    /// An expiry of a tag. If it ends unconfirmed, it is retained as an invalidation.
    pub(super) fn expiry_of_tag(guard: &StampedeGuard, tag: Key) -> Self {
        let mut change = Self::new(guard, ChangeTarget::tag(tag), "the expiry of the tag", true);
        change.only_expires = true;
        change.drop_copies();
        change.detach_flights();
        change
    }

    /// Another change of this key's value. If it `invalidates` and ends unconfirmed, it is retained as an invalidation.
    pub(super) fn of_value(guard: &StampedeGuard, key: &Key, what: &'static str, invalidates: bool) -> Self {
        Self::new(guard, ChangeTarget::value(key.clone()), what, invalidates)
    }

    fn new(guard: &StampedeGuard, target: ChangeTarget, what: &'static str, is_retained: bool) -> Self {
        let of_reports = target.of_reports(&guard.state.namespace);
        let (guard, number) = (guard.clone(), guard.state.retained.next_attempt());
        let (only_expires, succeeded) = (false, false);
        Self { guard, target, of_reports, only_expires, what, number, is_retained, succeeded }
    }

    /// Makes the change: invalidates the target, or replaces its value by `insert`. Waits until the store has made it and no process serves
    /// an older copy, and for the server's replicas, if the policy says so.
    pub(super) async fn run(mut self, until: Instant, insert: Option<Insert>) -> Result<(), Error> {
        let replicated = {
            let send = |target, effect| Self::send(&self.guard, target, effect, until);
            // The reports' tag is sent first: replicas that have the later change then have this one too.
            let of_reports = match &self.of_reports {
                Some(tag) => {
                    let sent = send(tag, Effect::Invalidate).await;
                    Some(sent.map_err(|error| self.unconfirmed(error))?)
                }
                None => None,
            };
            let effect = match &insert {
                Some(insert) => Effect::Insert(insert),
                None if self.only_expires => Effect::ExpireTag,
                None => Effect::Invalidate,
            };
            let sent = send(&self.target, effect).await.map_err(|error| self.unconfirmed(error))?;
            self.guard.count_invalidation();
            let of_reports = async {
                match of_reports {
                    Some((change, announced)) => change.reaches_all(announced, until).await,
                    None => Ok(()),
                }
            };
            let (change, announced) = sent;
            let reached = async { tokio::try_join!(change.reaches_all(announced, until), of_reports) };
            let (reached, replicated) = tokio::join!(reached, self.replicated());
            reached.map_err(|error| self.unannounced(error))?;
            replicated
        };
        // A flight that began before the store made the change may hold an entry that was read before it.
        self.detach_flights();
        // The store has made the change and no process serves an older copy: nothing remains to send.
        self.is_retained = false;
        for target in self.targets() {
            self.guard.settle(&target.name(), self.number);
        }
        self.succeeded = replicated.is_ok();
        replicated
    }

    /// Sends a change until the store confirms it. This process drops its copies first, even if the store cannot be reached.
    async fn send<'a>(
        guard: &'a StampedeGuard,
        target: &ChangeTarget,
        effect: Effect<'_>,
        until: Instant,
    ) -> StoreResult<(AnnouncedChange<'a>, Announced)> {
        let GuardState { store, local, .. } = &***guard.state;
        let (mut change, key) = (guard.change(target.name()), &target.key);
        let mut retries = Retries::until(guard, key, until);
        loop {
            let within = retries.next().await?;
            let (sent, announcement) = (local.attempt_sent(), change.attempt());
            let announced = match effect {
                Effect::ExpireTag => store.expire_tag(key, store.now(), &announcement, within).await,
                Effect::Insert(insert) => {
                    store.invalidate(key, Some(insert.clone()), &announcement, within).await
                }
                Effect::Invalidate if target.is_tag => store.forget_tag(key, &announcement, within).await,
                Effect::Invalidate => store.invalidate(key, None, &announcement, within).await,
            };
            match guard.count_errors(announced) {
                Ok(announced) => {
                    sent.answered();
                    return Ok((change, announced));
                }
                Err(error) => {
                    // This attempt may still run, so the next one voids it.
                    drop(sent);
                    retries.pause_after(error).await?;
                }
            }
        }
    }

    /// Waits for the server's replicas, if the policy says so.
    async fn replicated(&self) -> Result<(), Error> {
        let Self { guard, target: ChangeTarget { key, .. }, what, .. } = self;
        let Some((replicas, timeout)) = guard.policy.replicas else { return Ok(()) };
        let store = &guard.state.store;
        // In a cluster the note in the journal of tags is on another server.
        let journal = Some(guard.state.local.volume()).filter(|_| self.target.is_tag && store.is_spread());
        let mut have = u32::MAX;
        for written in [key].into_iter().chain(journal) {
            let written = store.replicated(written, replicas, timeout).await;
            let failed = |error| Error::store(&format!("not confirmed by replicas: {what}"), key, error);
            have = have.min(written.map_err(failed)?);
        }
        if have >= replicas {
            return Ok(());
        }
        let digest = key.digest();
        let text = format!("{what} of key #{digest}: {have} of {replicas} replicas have it");
        Err(Error::new(ErrorKind::Store, text))
    }

    /// Whether the target's server is known to be down. In a cluster each key may be on a different server.
    pub(super) fn is_unreachable(&self) -> bool {
        self.guard.state.store.is_down(self.target.key.name())
    }

    /// The error of a change that the store has refused or not confirmed.
    pub(super) fn unconfirmed(&self, error: StoreError) -> Error {
        self.failed("not confirmed yet", error)
    }

    /// The error of a change that the store has made, if its announcement failed: other processes may still serve older copies.
    fn unannounced(&self, error: StoreError) -> Error {
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
            let (target, policy) = (target.clone(), Arc::clone(policy));
            let retained = RetainedInvalidation { target, attempt: self.number, policy };
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
        detach_flights(&self.guard.state, &self.target);
    }

    fn targets(&self) -> impl Iterator<Item = &ChangeTarget> {
        self.of_reports.iter().chain([&self.target])
    }
}

/// Has later callers begin new loads of what the target names.
pub(super) fn detach_flights(state: &GuardState, ChangeTarget { key, is_tag }: &ChangeTarget) {
    match is_tag {
        // No loader and no handler can set the tag of a path, and no response has that of another path.
        true if key.is_path() => state.flights.detach_if(|flight| flight.key.has_path(key)),
        // A loader can add tags until its load ends, so any flight may have the tag: detach all. Later callers begin new flights.
        true => state.flights.detach_all(),
        false => state.detach_resource(key),
    }
}

impl Drop for Change {
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

impl StampedeGuard {
    /// Waits until no process serves a copy that is older than a refresh.
    pub(super) async fn announce_refresh(&self, key: &Key) -> Result<(), Error> {
        let mut refresh = Change::of_value(self, key, "the refresh", false);
        let announced = self.change(refresh.target.name());
        match announced.reaches_all(Announced::Separately, Instant::now() + LONGEST).await {
            // No copies are known, so the refresh does not depend on the store.
            Err(_) if !self.policy.local_elsewhere && !self.state.local.knows_of_copies() => {}
            reached => reached.map_err(|error| refresh.unannounced(error))?,
        }
        refresh.succeeded = true;
        Ok(())
    }

    /// Sends a retained invalidation, and waits until no process serves a copy that it invalidates. Detaches no flights: they were
    /// detached when it was retained, and flights that began after that hold nothing that it invalidates.
    async fn send_retained(&self, target: &ChangeTarget, until: Instant) -> StoreResult<()> {
        let number = self.state.retained.next_attempt();
        let (change, announced) = Change::send(self, target, Effect::Invalidate, until).await?;
        self.count_invalidation();
        change.reaches_all(announced, until).await?;
        if self.settle(&target.name(), number) {
            self.state.count(GuardCount::invalidations_resent);
        }
        Ok(())
    }

    /// Called when the attempt with this number was confirmed. Returns whether the name was retained and is no longer.
    fn settle(&self, name: &ChangedName, attempt: u64) -> bool {
        let state = &self.state;
        let loads_end = |load_timeout: Duration| {
            let longest = load_timeout + LATEST;
            state.store.now().saturating_add(longest.as_millis().try_into().unwrap_or(u64::MAX))
        };
        state.retained.confirmed(name, attempt, loads_end)
    }

    /// The announcement of a change that begins. This process drops its copies first, even if the store cannot be reached.
    fn change(&self, name: ChangedName) -> AnnouncedChange<'_> {
        self.state.local.forget(&name);
        self.state.local.change(name, self.policy.local_elsewhere)
    }

    fn count_invalidation(&self) {
        self.state.count(GuardCount::invalidations);
        self.state.publish_regularly();
    }

    pub(super) fn count_errors<T>(&self, answer: StoreResult<T>) -> StoreResult<T> {
        answer.inspect_err(|_| self.state.count(GuardCount::store_errors))
    }

    /// Sends a command until it succeeds, with the pauses and within the time of [`Retries`].
    pub(super) async fn retry_until<T, F>(
        &self,
        key: &Key,
        until: Instant,
        mut command: impl FnMut(Duration) -> F,
    ) -> StoreResult<T>
    where
        F: Future<Output = StoreResult<T>>,
    {
        let mut retries = Retries::until(self, key, until);
        loop {
            match command(retries.next().await?).await {
                Ok(done) => return Ok(done),
                Err(error) => retries.pause_after(error).await?,
            }
        }
    }
}

/// The retries of a command about a key until a moment, beyond the coordination budget, because the caller needs nothing but this
/// change.
struct Retries<'a> {
    guard: &'a StampedeGuard,
    key: &'a Key,
    until: Instant,
    /// The time until `until` that was left when the latest attempt began.
    left: Duration,
    last_error: StoreError,
}

impl<'a> Retries<'a> {
    fn until(guard: &'a StampedeGuard, key: &'a Key, until: Instant) -> Self {
        let last_error = StoreError::new(StoreErrorKind::Unavailable);
        Self { guard, key, until, left: Duration::ZERO, last_error }
    }

    /// Waits until the command can be sent, because unlike a load, a change waits for a reconnect. Returns how long the command may
    /// take, or the last error if there is no time for another attempt.
    async fn next(&mut self) -> StoreResult<Duration> {
        loop {
            self.left = self.until.saturating_duration_since(Instant::now());
            if self.left.is_zero() {
                return Err(self.last_error.clone());
            }
            let reached = self.guard.state.store.reach(self.key.name(), self.left).await;
            match self.guard.count_errors(reached) {
                Ok(()) => return Ok(self.left.min(LONGEST / 4)),
                Err(error) => self.pause_after(error).await?,
            }
        }
    }

    /// Waits for a moment after an error; returns the error instead if a retry would get the same error.
    async fn pause_after(&mut self, error: StoreError) -> StoreResult<()> {
        if error.is_final() {
            return Err(error);
        }
        self.last_error = error;
        sleep(Duration::from_millis(fastrand::u64(5..50)).min(self.left)).await;
        Ok(())
    }
}

/// How many retained invalidations are sent at once.
const AT_ONCE: usize = 64;

/// How long one wait for the store lasts at most. The task may keep the state of a dropped guard alive for that long.
const REACHES: Duration = Duration::from_millis(500);

/// The pause after a round in which some invalidations were not confirmed. It doubles with each round in which none was, up to
/// [`LONGEST_PAUSE`].
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

/// The task that sends retained invalidations. Its reference to the guard is weak: dropping the guard ends the task.
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
        while let Some(state) = self.state.upgrade() {
            let round = send_all(&state, &mut pause).await;
            drop(state);
            match round {
                None => {
                    self.is_over = true;
                    return;
                }
                Some(Duration::ZERO) => {}
                Some(before_next) => sleep(before_next).await,
            }
        }
    }
}

/// Sends all retained invalidations once. Returns the pause before the next round; `None` if there is no need for one, because all are sent
/// or the store is closed. `pause` is the pause after a round without any confirmation; it grows with each such round.
async fn send_all(state: &Arc<GuardState>, pause: &mut Duration) -> Option<Duration> {
    let mut retained = state.retained.to_send();
    // In a cluster each key may be on a different server: prefer a key with a server that is not known to be down.
    let is_up = |retained: &&RetainedInvalidation| !state.store.is_down(retained.target.key.name());
    let first = retained.iter().find(is_up).or_else(|| retained.first())?;
    // Waits for a reconnect.
    if let Err(error) = state.store.reach(first.target.key.name(), REACHES).await {
        return (error.kind != StoreErrorKind::Closed).then_some(PAUSE);
    }
    if *pause > PAUSE {
        // No invalidation was confirmed in the last round: probe the store with one invalidation at a time, and not always the same.
        let one = retained.swap_remove(fastrand::usize(..retained.len()));
        retained = vec![one];
    }
    let all = retained.len();
    let sent = stream::iter(retained).map(|retained| send(state, retained)).buffer_unordered(AT_ONCE);
    let failed: Vec<_> = sent.filter_map(std::future::ready).collect().await;
    if failed.iter().any(|error| error.kind == StoreErrorKind::Closed) {
        return None;
    }
    *pause = if !failed.is_empty() && failed.len() == all { (*pause * 2).min(LONGEST_PAUSE) } else { PAUSE };
    Some(if failed.is_empty() { Duration::ZERO } else { *pause })
}

/// Sends one invalidation, unless its server is known to be down. Returns the error if the invalidation stays retained.
async fn send(state: &Arc<GuardState>, retained: RetainedInvalidation) -> Option<StoreError> {
    if state.store.is_down(retained.target.key.name()) {
        return Some(StoreError::new(StoreErrorKind::Unavailable));
    }
    let (state, policy) = (Arc::clone(state), Arc::clone(&retained.policy));
    let guard = StampedeGuard::with(state, policy);
    guard.send_retained(&retained.target, Instant::now() + LONGEST).await.err()
}
