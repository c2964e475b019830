//! One acquisition of a lock, from its grant to its release.
//!
//! [`HoldState`] has the acquisition's lease, the hints to its holder, and whether it was lost. [`Hold`] renews the lease,
//! and releases the lock when it is dropped. [`Release`] is a release in the background: of a dropped hold, or of a grant
//! that may have been made without a message.
//!
//! Times count from the moment the granting command was *sent*, because the store's count cannot start earlier.
//! Only the monotonic clock is read, here and in all of `lock`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::options::drift;
use super::{LockError, LockTarget, from_now, later, reached};
use crate::observe::log;
use crate::store::wake_locks::{LockHints, LockWaiter};
use crate::store::{StoreErrorKind, StoreResult, Token};
use crate::sync::lock;

/// One acquisition of a lock. Shared by its guard, the guard's views, and the renewal task.
pub(super) struct HoldState<T> {
    pub(super) target: Arc<T>,
    pub(super) token: Token,
    pub(super) grant: LockGrant,
    waiter: LockWaiter,
    /// Whether the lock may have been taken away without a message. A `watch` channel, because any of its listeners may
    /// be dropped.
    doubt: watch::Sender<PossibleLoss>,
    lease: watch::Sender<HoldLease>,
    longest: Mutex<LongestHold>,
}

/// The time that an acquisition has.
#[derive(Clone, Copy, Debug)]
pub(super) struct HoldLease {
    /// When the command that started the lease was sent.
    pub(super) since: Instant,
    pub(super) ttl: Option<Duration>,
    pub(super) state: AcquisitionState,
}

/// How many times the lock may have been taken away without a message (`raised`), and how many of those times a later
/// question to the store has settled.
#[derive(Clone, Copy, Debug, Default)]
struct PossibleLoss {
    raised: u64,
    settled: u64,
}

/// Until when the store may hold the lock for this token. The [`HoldLease`] is the lower bound, which the holder relies
/// on; this is the upper bound, during which the token may block others, even where an answer was lost.
#[derive(Debug)]
struct LongestHold {
    /// `None` for ever.
    until: Option<Instant>,
    /// How many extensions were sent: only the reply to the last one sets the time.
    extensions: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcquisitionState {
    Held,
    /// The holder has released the lock, or is releasing it.
    Ended,
    /// Another token holds the lock, the lock is free, or it is not known to be ours. This state is final.
    Lost,
}

impl HoldLease {
    /// When the lease ends by this process's own clock; `None` for never.
    pub(super) fn until(&self) -> Option<Instant> {
        let ttl = self.ttl?;
        self.since.checked_add(ttl.saturating_sub(drift(ttl)))
    }
}

impl<T: LockTarget> HoldState<T> {
    /// What remains of the lease; `None` if the lock has no time to live. Zero once the lease has ended, or the lock was released or
    /// lost.
    pub(super) fn remaining(&self) -> Option<Duration> {
        if let Some(hints) = self.waiter.notified().now_or_never() {
            self.note(&hints);
        }
        let lease = *self.lease.borrow();
        if lease.state != AcquisitionState::Held {
            return Some(Duration::ZERO);
        }
        lease.until().map(|until| until.saturating_duration_since(Instant::now()))
    }

    fn end(&self) {
        self.lease.send_modify(|lease| lease.state = AcquisitionState::Ended);
    }

    /// Marks the acquisition as lost, unless it was released.
    fn lose(&self, why: &'static str) {
        let lost = self.lease.send_if_modified(|lease| {
            let held = lease.state == AcquisitionState::Held;
            if held {
                lease.state = AcquisitionState::Lost;
            }
            held
        });
        if lost {
            tracing::debug!(target: log::LOCK, why, "a lock was lost");
        }
    }

    /// Resolves when the lease has ended by this process's clock, or the lock was released or lost.
    pub(super) async fn expired(self: Arc<Self>) {
        let mut lease = self.lease.subscribe();
        loop {
            let now = *lease.borrow_and_update();
            if now.state != AcquisitionState::Held || self.is_over_before_a_change(now, &mut lease).await {
                return;
            }
        }
    }

    /// Resolves when the lock is lost, or its lease has ended before its release. Never resolves after the release.
    pub(super) async fn lost(self: Arc<Self>) {
        let mut lease = self.lease.subscribe();
        loop {
            let now = *lease.borrow_and_update();
            match now.state {
                AcquisitionState::Lost => return,
                AcquisitionState::Ended => return std::future::pending().await,
                AcquisitionState::Held => {
                    if self.is_over_before_a_change(now, &mut lease).await {
                        self.lose("its time is over");
                    }
                }
            }
        }
    }

    /// Waits until the lease may have changed, or until the time that it has `now` is over.
    async fn is_over_before_a_change(
        &self,
        now: HoldLease,
        changes: &mut watch::Receiver<HoldLease>,
    ) -> bool {
        tokio::select! {
            biased;
            hints = self.waiter.notified() => self.note(&hints),
            _ = changes.changed() => {}
            () = reached(now.until()) => return true,
            () = self.settle_doubt() => {}
        }
        false
    }

    /// Records a message to the holder: the lock was taken away, or a message about that may have been missed.
    pub(super) fn note(&self, hints: &LockHints) {
        if hints.broken {
            self.lose("it was taken away by force");
        }
        if hints.missed {
            self.doubt.send_modify(|doubt| doubt.raised += 1);
        }
    }

    /// Asks the store once when the lock may have been taken away without a message. Polled together with the end of
    /// the lease, which a store that hangs must not delay.
    async fn settle_doubt(&self) {
        let mut doubt = self.doubt.subscribe();
        // The sender lives as long as `self`.
        let Ok(PossibleLoss { raised, .. }) =
            doubt.wait_for(|doubt| doubt.raised > doubt.settled).await.map(|doubt| *doubt)
        else {
            return;
        };
        let is_holder = self.ask().await;
        // A failed question settles the doubt too: the doubt is raised again once the connection is back.
        self.doubt.send_modify(|doubt| doubt.settled = doubt.settled.max(raised));
        if matches!(is_holder, Ok(false)) {
            self.lose("another holds it");
        }
    }

    /// Whether the store says that this token holds the lock. False without a command once the lock was released.
    async fn ask(&self) -> StoreResult<bool> {
        if self.lease.borrow().state == AcquisitionState::Ended {
            return Ok(false);
        }
        self.target
            .registry()
            .ask(self.target.name(), |within| self.target.is_holder(&self.token, within))
            .await
    }

    pub(super) async fn is_owned(&self) -> Result<bool, LockError> {
        self.ask().await.map_err(|error| self.target.error("looking at", error))
    }

    /// Restarts the lease with this time to live; false if the lock is lost or was released.
    pub(super) async fn extend(&self, ttl: Option<Duration>) -> StoreResult<bool> {
        if self.lease.borrow().state != AcquisitionState::Held {
            return Ok(false);
        }
        let sent = HoldLease { since: Instant::now(), ttl, state: AcquisitionState::Held };
        // An extension that may shorten the lease counts from now, because it may be executed even if its answer is
        // lost.
        self.update_deadline(sent, |old| match (sent.until(), old.until()) {
            (Some(new), Some(old)) => new < old,
            (new, _) => new.is_some(),
        });
        let number = self.note_sent(ttl);
        let extended = self
            .target
            .registry()
            .ask(self.target.name(), |within| self.target.extend(&self.token, ttl, within));
        if extended.await? {
            self.note_answered(number, ttl);
            // Of two concurrent extensions, the one sent last counts.
            self.update_deadline(sent, |old| old.since <= sent.since);
            return Ok(self.lease.borrow().state == AcquisitionState::Held);
        }
        self.lose("its extension was refused");
        Ok(false)
    }

    /// Records that an extension is sent and returns its number. The extension may be executed as late as its
    /// timeout allows, even if its answer is lost.
    fn note_sent(&self, ttl: Option<Duration>) -> u64 {
        let ttl = ttl.map(|ttl| ttl.saturating_add(self.target.registry().command_timeout));
        let mut longest = lock(&self.longest);
        longest.until = later(longest.until, from_now(ttl));
        longest.extensions += 1;
        longest.extensions
    }

    /// Records that extension `number` was executed. Ignored if another extension was sent since: the other one may have
    /// been executed later.
    fn note_answered(&self, number: u64, ttl: Option<Duration>) {
        let mut longest = lock(&self.longest);
        if longest.extensions == number {
            longest.until = from_now(ttl);
        }
    }

    fn update_deadline(&self, new: HoldLease, instead_of: impl FnOnce(&HoldLease) -> bool) {
        self.lease.send_if_modified(|lease| {
            let changes = lease.state == AcquisitionState::Held && instead_of(lease);
            if changes {
                *lease = new;
            }
            changes
        });
    }
}

/// A grant's fence, and the attempts and the time that it took.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockGrant {
    pub(super) fence: u64,
    pub(super) attempts: u32,
    pub(super) waited: Duration,
}

/// An acquisition that has to be released. Dropping this releases it in the background.
pub(super) struct Hold<T: LockTarget> {
    pub(super) hold_state: Arc<HoldState<T>>,
    watchdog: Option<JoinHandle<()>>,
    runtime: Option<Handle>,
    /// Whether a TAKE of this token may still be executed, even after the release.
    has_late_command: bool,
    pub(super) freed: bool,
    /// Whether the token still held the lock when it was released.
    pub(super) was_held: bool,
}

impl<T: LockTarget> Hold<T> {
    pub(super) fn new(
        target: Arc<T>,
        token: Token,
        waiter: LockWaiter,
        grant: LockGrant,
        since: Instant,
        runtime: Option<Handle>,
        has_late_command: bool,
    ) -> Self {
        // A holder leaves the waiting line: another waiter of this process now watches the clock.
        waiter.hold();
        let lease = HoldLease { since, ttl: target.ttl(), state: AcquisitionState::Held };
        // The grant has arrived, so the store started to count before now.
        let longest = Mutex::new(LongestHold { until: from_now(target.ttl()), extensions: 0 });
        let (doubt, lease) = (watch::Sender::default(), watch::Sender::new(lease));
        let hold_state = Arc::new(HoldState { target, token, grant, waiter, doubt, lease, longest });
        Self { hold_state, watchdog: None, runtime, has_late_command, freed: false, was_held: false }
    }

    /// Starts the renewal, at each third of the time to live; no effect if the lock was acquired outside a runtime.
    pub(super) fn renew(mut self) -> Self {
        if let Some(runtime) = &self.runtime {
            self.watchdog = Some(runtime.spawn(renew(Arc::clone(&self.hold_state))));
        }
        self
    }

    /// Releases the lock; `None` if it was released before. After an error this can be called again, but the renewal
    /// has stopped.
    pub(super) async fn free(&mut self) -> StoreResult<Option<T::Freed>> {
        if self.freed {
            return Ok(None);
        }
        self.stop_renewing().await;
        let target = &self.hold_state.target;
        let freed = target
            .registry()
            .ask(target.name(), |within| target.free(&self.hold_state.token, within))
            .await?;
        self.end();
        Ok(Some(freed))
    }

    pub(super) async fn stop_renewing(&mut self) {
        stop(&mut self.watchdog, self.hold_state.target.registry().command_timeout).await;
    }

    /// Records that a command other than [`free`](Self::free) released the lock, and whether that command found it still
    /// held.
    pub(super) fn mark_released(&mut self, was_held: bool) {
        self.was_held = was_held;
        self.end();
    }

    fn end(&mut self) {
        self.freed = true;
        self.hold_state.end();
        if self.has_late_command {
            self.release();
        }
    }

    fn release(&mut self) {
        let mut until = lock(&self.hold_state.longest).until;
        if self.has_late_command {
            // A TAKE that is executed late restarts the lease, with the time to live that it was sent with.
            until = later(until, from_now(self.hold_state.target.ttl()));
        }
        let release = Release {
            target: Arc::clone(&self.hold_state.target),
            token: self.hold_state.token.clone(),
            until,
            waits: false,
            has_late_command: self.has_late_command,
            watchdog: self.watchdog.take(),
        };
        release.later(self.runtime.as_ref());
    }
}

impl<T: LockTarget> Drop for Hold<T> {
    fn drop(&mut self) {
        if !self.freed {
            self.hold_state.end();
            self.release();
        }
    }
}

/// Renews an acquisition until it is released or lost.
async fn renew<T: LockTarget>(hold_state: Arc<HoldState<T>>) {
    /// The pause after a failed renewal.
    const AGAIN: Duration = Duration::from_millis(50);
    let mut lease = hold_state.lease.subscribe();
    let mut failed = None;
    loop {
        let now = *lease.borrow_and_update();
        let (AcquisitionState::Held, Some(ttl), Some(until)) = (now.state, now.ttl, now.until()) else {
            return;
        };
        let due = failed.map_or(now.since + ttl / 3, |failed: Instant| failed + AGAIN.min(ttl / 10));
        tokio::select! {
            biased;
            _ = lease.changed() => continue,
            () = sleep_until(due.min(until)) => {}
        }
        if Instant::now() >= until {
            return hold_state.lose("it could not be renewed in time");
        }
        match hold_state.extend(Some(ttl)).await {
            Ok(_) => failed = None,
            Err(error) => {
                tracing::debug!(target: log::LOCK, %error, "a lock was not renewed");
                failed = Some(Instant::now());
            }
        }
    }
}

/// How long after the first release an unanswered TAKE may still be executed: the server may read the last commands
/// of a broken connection after those of its successor.
const LATE_TAKE: Duration = Duration::from_millis(300);

/// For how long one release is retried at most, also if the lock has no time to live or a longer one.
const LONGEST: Duration = Duration::from_secs(3600);

/// One release in the background.
pub(super) struct Release<T> {
    pub(super) target: Arc<T>,
    pub(super) token: Token,
    /// Until when the store may hold the lock for this token: the release is retried until then. `None`: there is no such end.
    pub(super) until: Option<Instant>,
    /// Whether the token was never known to hold the lock: it may be in the queue.
    pub(super) waits: bool,
    /// Whether an unanswered TAKE of this token may still be executed.
    pub(super) has_late_command: bool,
    /// The renewal task, stopped before the release.
    pub(super) watchdog: Option<JoinHandle<()>>,
}

impl<T: LockTarget> Release<T> {
    /// Releases in the background: on the current runtime, else on `runtime`. If neither exists, or the one used is
    /// shut down, the lock expires by itself.
    pub(super) fn later(self, runtime: Option<&Handle>) {
        let present = self.target.registry().background.enter();
        let task = async move {
            self.run().await;
            drop(present);
        };
        match (Handle::try_current(), runtime) {
            (Ok(current), _) => drop(current.spawn(task)),
            (Err(_), Some(runtime)) => drop(runtime.spawn(task)),
            (Err(_), None) => {}
        }
    }

    async fn run(mut self) {
        let longest = Instant::now() + LONGEST;
        let expired = self.until.map_or(longest, |until| until.min(longest));
        stop(&mut self.watchdog, self.target.registry().command_timeout).await;
        self.until_answered(expired).await;
        if self.has_late_command && Instant::now() + LATE_TAKE < expired {
            sleep(LATE_TAKE).await;
            self.until_answered(expired).await;
        }
    }

    /// Retries until the store has answered or the lock has expired by itself.
    async fn until_answered(&self, expired: Instant) {
        loop {
            let within = self.target.registry().command_timeout;
            let released = if self.waits {
                self.target.leave(&self.token, within).await
            } else {
                self.target.free(&self.token, within).await.map(drop)
            };
            match released {
                Ok(()) => return,
                Err(error) if error.kind == StoreErrorKind::Closed || Instant::now() >= expired => {
                    tracing::debug!(target: log::LOCK, %error, "a lock was not released: it expires by itself");
                    return;
                }
                Err(_) => sleep(Duration::from_millis(fastrand::u64(20..100))).await,
            }
        }
    }
}

/// Stops the renewal task and returns when it has ended: a renewal must not be sent after the release. The wait is
/// bounded, because the task's runtime may stand still; a renewal that is sent later does no harm, because the
/// store compares its token.
async fn stop(watchdog: &mut Option<JoinHandle<()>>, within: Duration) {
    if let Some(task) = watchdog {
        task.abort();
        let _ = timeout(within, task).await;
    }
    *watchdog = None;
}
