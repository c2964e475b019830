//! The loop that acquires a lock, for mutexes and permits, in the queue or by polling.
//!
//! A [`PendingClaim`] owns everything that a waiting token may have at the store: a position in the queue, or the lock. If
//! the wait ends without a hold, also by a drop at any await, the claim releases both in the background.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::hold::{AcquisitionState, Hold, HoldLease, LockGrant, Release};
use super::{LockError, LockRegistry, LockTarget, StoreResult, WaitTerms, Waiting, from_now, reached};
use crate::observe::log;
use crate::store::wake_locks::{ClockRole, LockHints, LockWaiter};
use crate::store::{KeyspaceAnswer, MutexTaken, StoreErrorKind, Take, Taken, Token};

/// While grants may get lost, the first waiter of a process sends a TAKE at least this often.
const UNSURE_WAIT: Duration = Duration::from_millis(500);
/// How often a TAKE is sent if the holder has no time to live: a foreign client may release the lock without an announcement.
const ENDLESS_WAIT: Duration = Duration::from_secs(1);
/// Waiters that may all have missed a message spread their TAKEs over this time.
const SPREAD: Duration = Duration::from_millis(50);
/// The least timeout of the commands of the first attempt, also if the caller has less time: they may have to connect.
const FIRST_COMMAND: Duration = Duration::from_millis(250);
/// The least timeout of the commands of later attempts.
const LATER_COMMAND: Duration = Duration::from_millis(50);

/// Acquires the lock on these terms. Fails with [`LockError::TooManyAttempts`] or [`LockError::AcquireTimeout`] if, and
/// only if, the lock was busy all the time.
///
/// `instead` is a hold of the same lock that is released in the command that queues behind the present waiters. After an error,
/// `Hold::freed` says whether it was released.
pub(super) async fn acquire<T: LockTarget>(
    target: &Arc<T>,
    terms: &WaitTerms,
    instead: Option<&mut Hold<T>>,
) -> Result<Hold<T>, LockError> {
    let started = Instant::now();
    // Outlives `acquire_loop`, whose drop starts its background release: `close` waits for both.
    let _waiting = target.registry().wait();
    let mut acquire_loop = AcquireLoop {
        claim: PendingClaim::new(Arc::clone(target), terms.waiting),
        instead,
        waiting: terms.waiting,
        deadline: terms.timeout.and_then(|timeout| started.checked_add(timeout)),
        started,
        requested_at: started,
        claims: 0,
        attempts: 1,
        retried: 0,
        terms,
    };
    let mut taken = acquire_loop.take().await?;
    loop {
        match taken {
            Taken::Granted { fence } => {
                let requested_at = acquire_loop.requested_at;
                if T::IS_EXCLUSIVE {
                    acquire_loop
                        .claim
                        .waiter
                        .learn(requested_at, end(requested_at, acquire_loop.claim.pending.target.ttl()));
                }
                return acquire_loop.granted(fence, requested_at);
            }
            Taken::Busy { remaining } => {
                let ends = end(acquire_loop.requested_at, remaining);
                acquire_loop.claim.waiter.is_busy(acquire_loop.requested_at, ends);
                match acquire_loop.wait(ends).await? {
                    WakeReason::Granted(fence) if acquire_loop.is_sure() => {
                        return acquire_loop.granted(fence, started);
                    }
                    // The lock may be this token's. Another TAKE finds out, and restarts the lease.
                    WakeReason::Granted(_) => {}
                    woken => {
                        acquire_loop.attempts += 1;
                        acquire_loop.retried += u32::from(woken == WakeReason::Again);
                    }
                }
            }
        }
        taken = acquire_loop.take().await?;
    }
}

/// One token's attempt to get a lock.
struct AcquireLoop<'a, T: LockTarget> {
    claim: PendingClaim<T>,
    /// The hold that TAKE releases, until a reply confirms the release.
    instead: Option<&'a mut Hold<T>>,
    /// How this caller waits: as the terms say, until the server refuses to announce key events.
    waiting: Waiting,
    deadline: Option<Instant>,
    started: Instant,
    /// When the last TAKE was sent.
    requested_at: Instant,
    /// How many TAKEs may have queued the token.
    claims: u32,
    attempts: u32,
    /// How many of the attempts count as retries.
    retried: u32,
    terms: &'a WaitTerms,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WakeReason {
    /// A message says that the lock was granted to this token, with this fence.
    Granted(u64),
    /// Send another TAKE, which counts as a retry.
    Again,
    /// Send another TAKE, which does not count as a retry: messages before this moment may have been missed.
    Anew,
}

impl<T: LockTarget> AcquireLoop<'_, T> {
    /// Sends TAKE. An unanswered TAKE may have been granted, so it is repeated with the same token: once, or twice if the
    /// token is in the queue. A caller that may wait for the lock also waits for a connection.
    async fn take(&mut self) -> Result<Taken, LockError> {
        let queue = self.may_wait() && !matches!(self.waiting, Waiting::Poll { .. });
        // A connection that does not answer is abandoned after two commands, so the third uses another.
        let mut again = if self.claim.pending.queued { 2 } else { 1 };
        loop {
            let within = self.within();
            self.requested_at = Instant::now();
            self.claim.waiter.asks();
            self.claims += u32::from(queue);
            let old = self.instead.as_deref().map(|hold| &hold.hold_state.token);
            let error = match self.claim.take(old, queue, within).await {
                Ok(MutexTaken { taken, was_held }) => {
                    if let Some(hold) = self.instead.take() {
                        hold.mark_released(was_held);
                    }
                    return Ok(taken);
                }
                Err(error) => error,
            };
            let cut_short = within < self.command_timeout() && error.kind == StoreErrorKind::TimedOut;
            if cut_short && self.attempts > 1 {
                // The lock was busy at the last answer, so the caller's time ended on a busy lock.
                return Err(self.timed_out());
            }
            let passing =
                error.kind.is_ambiguous() || (error.kind == StoreErrorKind::Unavailable && self.may_wait());
            let last = again == 0 || !passing || self.is_over();
            again -= u8::from(!last);
            let name = &self.claim.pending.target.name().key;
            self.claim.waiter.asks();
            if last || self.registry().store.reach(name, self.within()).await.is_err() {
                return Err(self.claim.pending.target.error("acquiring", error));
            }
        }
    }

    /// Fails if this caller may make no further attempt.
    fn check_limits(&self) -> Result<(), LockError> {
        if self.terms.retries.is_some_and(|retries| self.retried >= retries) {
            return Err(LockError::TooManyAttempts { attempts: self.attempts });
        }
        if self.is_over() { Err(self.timed_out()) } else { Ok(()) }
    }

    /// Waits behind the holder. `ends` is when its lease ends according to the last reply; `None` for never.
    async fn wait(&mut self, ends: Option<Instant>) -> Result<WakeReason, LockError> {
        self.check_limits()?;
        if self.waiting == Waiting::Keyspace && self.announce().await {
            // Key events before this moment were not announced, so the lock may be free already.
            return Ok(WakeReason::Anew);
        }
        let polls = matches!(self.waiting, Waiting::Poll { .. });
        let ((mut look, mut silence_check), mut soon, mut again) =
            (self.next_look(ends), None, WakeReason::Again);
        // No deadline while polling: the pause ends at the deadline, and a last attempt follows it.
        let deadline = if polls { None } else { self.deadline };
        let registry = Arc::clone(self.registry());
        let closed = registry.closed();
        tokio::pin!(closed);
        loop {
            let hints = tokio::select! {
                biased;
                () = &mut closed => return Err(LockError::Closed),
                hints = self.claim.waiter.notified() => hints,
                () = reached(earlier(look, soon)) => return Ok(again),
                () = reached(deadline) => return Err(self.timed_out()),
                () = reached(silence_check) => {
                    if self.claim.waiter.stands_in() {
                        return Ok(WakeReason::Anew);
                    }
                    (look, silence_check) = self.next_look(ends);
                    continue;
                }
            };
            match hints {
                // The lock was granted, and then taken away by force before this waiter read the grant.
                LockHints { broken: true, .. } => return Ok(WakeReason::Again),
                LockHints { closed: true, granted, .. } => {
                    self.claim.pending.queued = granted.is_some();
                    return Err(LockError::Closed);
                }
                LockHints { granted: Some(fence), .. } => return Ok(WakeReason::Granted(fence)),
                _ if polls => {}
                LockHints { missed: true, is_silent, .. } => {
                    again = if is_silent { WakeReason::Anew } else { again };
                    if self.claim.waiter.is_first() {
                        return Ok(again);
                    }
                    let spread = Instant::now() + SPREAD.mul_f64(fastrand::f64());
                    soon = earlier(soon, Some(spread));
                }
                LockHints { .. } => (look, silence_check) = self.next_look(ends),
            }
        }
    }

    /// Returns when to ask again if no message comes, `None` if another waiter of this process watches the clock;
    /// and when to check whether that waiter was silent.
    fn next_look(&self, own: Option<Instant>) -> (Option<Instant>, Option<Instant>) {
        let now = Instant::now();
        if let Waiting::Poll { interval, jitter } = self.waiting {
            let pause = now + interval.mul_f64(1.0 + jitter * fastrand::f64());
            return (earlier(Some(pause), self.deadline), None);
        }
        // Spreads the waiters of a dead holder, which would otherwise all ask in one millisecond.
        let jitter = Duration::from_micros(fastrand::u64(500..5_000));
        // Ask again when our own estimate ends, even if another waiter knows a later end: if Redis lost the queue,
        // only a new TAKE enters it again.
        let mut own = own.unwrap_or(now + ENDLESS_WAIT);
        let arrive = self.registry().store.grants_arrive();
        if !arrive {
            own = own.min(now + UNSURE_WAIT);
        }
        let (look, silence_check) = match self.claim.waiter.watch(own, self.claim.pending.target.ttl()) {
            ClockRole::Look(at) => (Some(at + jitter), None),
            ClockRole::Stand(at) => (None, at.map(|at| at + jitter)),
        };
        (look, silence_check)
    }

    /// Asks the server to announce key events. False if it does not: the caller then polls, or waits for this
    /// crate's own messages.
    async fn announce(&mut self) -> bool {
        let name = self.claim.pending.target.name();
        self.claim.waiter.asks();
        let announced = self.registry().store.announce_key_changes(name, self.within()).await;
        let yes = matches!(announced, Ok(KeyspaceAnswer::Yes));
        self.waiting = match announced {
            Ok(KeyspaceAnswer::Yes) => Waiting::Notify,
            Ok(KeyspaceAnswer::No { why }) => {
                if !self.registry().warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(target: log::LOCK, why, "the server announces no key events: locks are polled for");
                }
                let (interval, jitter) = self.terms.fallback;
                // Leaves the line, as a polling waiter: another waiter watches the clock for the queue.
                self.claim.waiter.hold();
                Waiting::Poll { interval, jitter }
            }
            Err(error) => {
                tracing::debug!(target: log::LOCK, %error, "key events were not asked for: waiting for this crate's own");
                Waiting::Notify
            }
        };
        yes
    }

    /// Whether a grant that came as a message can be used without another TAKE. The message may be older than the last
    /// TAKE, or late because this process was paused, so that the lease is over. Its time is therefore measured from
    /// before the first TAKE, and enough must remain of it. Where the store cannot know whether its message
    /// arrived, the grant ends soon unless the waiter confirms it.
    fn is_sure(&self) -> bool {
        if self.registry().store.grants_are_claims() {
            return false;
        }
        let Some(ttl) = self.claim.pending.target.ttl() else { return self.claims == 1 };
        self.left(self.started) >= (ttl / 4 * 3).max(self.terms.min_remaining)
    }

    /// Makes the hold for a grant that was made at `since` or later; an error if the locks are closed or too little of its time remains.
    fn granted(self, fence: u64, since: Instant) -> Result<Hold<T>, LockError> {
        if self.registry().is_closed() {
            return Err(LockError::Closed);
        }
        if let Some(ttl) = self.claim.pending.target.ttl() {
            let left = self.left(since);
            if left.is_zero() || left < self.terms.min_remaining {
                return Err(LockError::GrantedTooLate { elapsed: since.elapsed(), ttl });
            }
        }
        let granted = LockGrant { fence, attempts: self.attempts, waited: self.started.elapsed() };
        Ok(self.claim.hold(granted, since))
    }

    /// What would remain of the lease if it began at `since`.
    fn left(&self, since: Instant) -> Duration {
        let lease = HoldLease { since, ttl: self.claim.pending.target.ttl(), state: AcquisitionState::Held };
        lease.until().map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Whether the terms allow more than the first attempt.
    fn may_wait(&self) -> bool {
        self.terms.retries != Some(0) && self.terms.timeout != Some(Duration::ZERO)
    }

    /// Whether the caller's time is up.
    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// The timeout of the next command.
    fn within(&self) -> Duration {
        let Some(deadline) = self.deadline else { return self.command_timeout() };
        let least = if self.attempts == 1 { FIRST_COMMAND } else { LATER_COMMAND };
        let left = deadline.saturating_duration_since(Instant::now());
        self.command_timeout().min(left.max(least))
    }

    fn registry(&self) -> &Arc<LockRegistry> {
        self.claim.pending.target.registry()
    }

    fn command_timeout(&self) -> Duration {
        self.registry().command_timeout
    }

    fn timed_out(&self) -> LockError {
        LockError::AcquireTimeout { attempts: self.attempts, waited: self.started.elapsed() }
    }
}

/// The end of a time that began at `since`; `None` for never.
fn end(since: Instant, ttl: Option<Duration>) -> Option<Instant> {
    since.checked_add(ttl?)
}

/// The earlier of two moments, either of which may never come.
fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

/// A token that waits, or holds the lock without knowing it yet.
struct PendingClaim<T: LockTarget> {
    /// Dropped first: the connection task that receives a later grant then gives it back.
    waiter: LockWaiter,
    pending: ReleaseOnDrop<T>,
}

/// What a waiting token may have at the store. Dropping this releases it in the background, unless it became a hold.
struct ReleaseOnDrop<T: LockTarget> {
    target: Arc<T>,
    token: Token,
    /// Whether the token may be in the queue, or hold the lock.
    queued: bool,
    /// Whether a TAKE was sent and neither answered nor given up.
    has_pending_take: bool,
    /// Whether a TAKE was given up without an answer: it may still be executed.
    has_late_command: bool,
    runtime: Option<Handle>,
}

impl<T: LockTarget> PendingClaim<T> {
    /// Registers before the first TAKE: invariant 4 of locks in [`store`](crate::store).
    fn new(target: Arc<T>, waiting: Waiting) -> Self {
        let token = target.registry().mint(target.ttl());
        let waiter = target.registry().store.await_grant(target.name(), &token);
        if matches!(waiting, Waiting::Poll { .. }) {
            // A polling waiter sends TAKE at its own times, whatever hints it receives. As the first in line it would not
            // watch the clock for the other waiters, so it leaves the line.
            waiter.hold();
        }
        let (runtime, [queued, has_pending_take, has_late_command]) =
            (Handle::try_current().ok(), [false; 3]);
        let pending = ReleaseOnDrop { target, token, queued, has_pending_take, has_late_command, runtime };
        Self { waiter, pending }
    }

    async fn take(
        &mut self,
        instead: Option<&Token>,
        queue: bool,
        within: Duration,
    ) -> StoreResult<MutexTaken> {
        let pending = &mut self.pending;
        pending.has_pending_take = true;
        let take = Take { token: &pending.token, ttl: pending.target.ttl(), queue, instead };
        let taken = pending.target.take(take, within).await;
        pending.has_pending_take = false;
        match &taken {
            Ok(MutexTaken { taken, .. }) => pending.queued |= queue || matches!(taken, Taken::Granted { .. }),
            Err(error) => pending.has_late_command |= error.kind.is_ambiguous(),
        }
        taken
    }

    /// Turns the claim into a hold.
    fn hold(self, granted: LockGrant, since: Instant) -> Hold<T> {
        let Self { waiter, mut pending } = self;
        let (target, token, runtime) =
            (Arc::clone(&pending.target), pending.token.clone(), pending.runtime.take());
        let has_late_command = std::mem::take(&mut pending.has_late_command);
        pending.queued = false;
        Hold::new(target, token, waiter, granted, since, runtime, has_late_command)
    }
}

impl<T: LockTarget> Drop for ReleaseOnDrop<T> {
    fn drop(&mut self) {
        let has_late_command = self.has_late_command || self.has_pending_take;
        if self.queued || has_late_command {
            let (target, token) = (Arc::clone(&self.target), self.token.clone());
            // A grant whose message did not arrive was made before now, so it ends within a time to live from now.
            let until = from_now(target.ttl());
            Release { target, token, until, waits: true, has_late_command, watchdog: None }
                .later(self.runtime.as_ref());
        }
    }
}
