//! One acquisition while it lasts: what is left of it, what it was told, whether it was lost.
//!
//! Time is reckoned from the moment the granting command was *sent*: the store can not have begun to count before.
//! No wall clock is asked, here or anywhere in the toolkit.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::watch;
use tokio::time::Instant;

use super::target::Target;
use super::terms::{from_now, later, reached};
use crate::lock::LockError;
use crate::lock::options::drift;
use crate::observe::log;
use crate::store::wake::lock_waiters::{Await, Told};
use crate::store::{StoreError, Token};
use crate::sync::lock;

/// One acquisition. Shared by its guard, the views of it, and what renews it.
pub(crate) struct Grip<T> {
    pub(crate) target: Arc<T>,
    pub(crate) token: Token,
    pub(crate) fence: u64,
    pub(crate) attempts: u32,
    pub(crate) waited: Duration,
    heard: Await,
    /// Whether it may have been taken away unheard. Watched by all who listen: whoever heard of it may be dropped.
    doubt: watch::Sender<Doubt>,
    lease: watch::Sender<Lease>,
    kept: Mutex<Kept>,
}

/// The time an acquisition has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    /// When the command that started its time was sent.
    pub(crate) since: Instant,
    pub(crate) ttl: Option<Duration>,
    pub(crate) state: State,
}

/// How often it may have been taken away unheard, and up to which of those times the store was asked since.
#[derive(Clone, Copy, Debug, Default)]
struct Doubt {
    raised: u64,
    settled: u64,
}

/// The time that the store may have it for this token. A lease is what is counted on at the least; this is what may be
/// in others' way at the most, whatever became of the answers.
#[derive(Debug)]
struct Kept {
    /// `None` for ever.
    until: Option<Instant>,
    /// How many extensions were sent: only the answer to the last one tells what the time is.
    extensions: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Held,
    /// Given back.
    Ended,
    /// Known to be another's, or nobody's, or not known to be ours. It stays lost.
    Lost,
}

impl Lease {
    /// When it is over by this process's own clock; `None` for never.
    pub(crate) fn until(&self) -> Option<Instant> {
        let ttl = self.ttl?;
        self.since.checked_add(ttl.saturating_sub(drift(ttl)))
    }
}

impl<T: Target> Grip<T> {
    pub(crate) fn new(
        target: Arc<T>,
        token: Token,
        heard: Await,
        granted: Granted,
        since: Instant,
    ) -> Arc<Self> {
        // From now on others of this process watch the clock for those who wait.
        heard.hold();
        let lease = Lease { since, ttl: target.ttl(), state: State::Held };
        // It is known by now, so the store has begun to count.
        let kept = Mutex::new(Kept { until: from_now(target.ttl()), extensions: 0 });
        let Granted { fence, attempts, waited } = granted;
        Arc::new(Self {
            target,
            token,
            fence,
            attempts,
            waited,
            heard,
            doubt: watch::Sender::default(),
            lease: watch::Sender::new(lease),
            kept,
        })
    }

    /// What is left of it; `None` where it does not expire. Zero once it is over in any way.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        if let Some(told) = self.heard.told().now_or_never() {
            self.note(&told);
        }
        let lease = *self.lease.borrow();
        if lease.state != State::Held {
            return Some(Duration::ZERO);
        }
        lease.until().map(|until| until.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn lease(&self) -> watch::Receiver<Lease> {
        self.lease.subscribe()
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.lease.borrow().state == State::Ended
    }

    /// It was given back.
    pub(crate) fn end(&self) {
        self.lease.send_modify(|lease| lease.state = State::Ended);
    }

    /// It is lost, unless it was given back.
    pub(crate) fn lose(&self, why: &'static str) {
        let lost = self.lease.send_if_modified(|lease| {
            let held = lease.state == State::Held;
            if held {
                lease.state = State::Lost;
            }
            held
        });
        if lost {
            tracing::debug!(target: log::LOCK, why, "a lock was lost");
        }
    }

    /// Resolves when it is over by this process's own clock, given back or lost.
    pub(crate) async fn expired(&self) {
        let mut lease = self.lease();
        loop {
            let now = *lease.borrow_and_update();
            if now.state != State::Held {
                return;
            }
            tokio::select! {
                biased;
                told = self.heard.told() => self.note(&told),
                _ = lease.changed() => {}
                () = reached(now.until()) => return,
                () = self.settle_doubt() => {}
            }
        }
    }

    /// Resolves when it is lost, or over without having been given back. Never, once it was given back.
    pub(crate) async fn lost(&self) {
        let mut lease = self.lease();
        loop {
            let now = *lease.borrow_and_update();
            match now.state {
                State::Lost => return,
                State::Ended => return std::future::pending().await,
                State::Held => {}
            }
            tokio::select! {
                biased;
                told = self.heard.told() => self.note(&told),
                _ = lease.changed() => {}
                () = reached(now.until()) => self.lose("its time is over"),
                () = self.settle_doubt() => {}
            }
        }
    }

    /// What a holder is told: that it holds no more, or that it may have missed that.
    pub(crate) fn note(&self, told: &Told) {
        if told.broken {
            self.lose("it was taken away by force");
        }
        if told.missed {
            self.doubt.send_modify(|doubt| doubt.raised += 1);
        }
    }

    /// Asks the store once it may have been taken away unheard. Polled beside the end of its time, which a store that hangs
    /// must not put off.
    async fn settle_doubt(&self) {
        let mut doubt = self.doubt.subscribe();
        // The sender lives as long as this.
        let Ok(Doubt { raised, .. }) =
            doubt.wait_for(|doubt| doubt.raised > doubt.settled).await.map(|doubt| *doubt)
        else {
            return;
        };
        let asked = self.ask().await;
        // Without an answer too: once the store is heard again, it is doubtful again.
        self.doubt.send_modify(|doubt| doubt.settled = doubt.settled.max(raised));
        if matches!(asked, Ok(false)) {
            self.lose("another holds it");
        }
    }

    /// Whether the store says that this token holds it.
    pub(crate) async fn ask(&self) -> Result<bool, StoreError> {
        if self.is_ended() {
            return Ok(false);
        }
        self.target.home().ask(self.target.name(), |within| self.target.is_holder(&self.token, within)).await
    }

    pub(crate) async fn is_owned(&self) -> Result<bool, LockError> {
        self.ask().await.map_err(|error| self.target.error("looking at", error))
    }

    /// Starts its time anew, with this time to live; false if it is lost or was given back.
    pub(crate) async fn extend(&self, ttl: Option<Duration>) -> Result<bool, StoreError> {
        if self.lease.borrow().state != State::Held {
            return Ok(false);
        }
        let sent = Lease { since: Instant::now(), ttl, state: State::Held };
        // What may make the time shorter may have done so whatever becomes of the answer.
        self.reckon(sent, |old| match (sent.until(), old.until()) {
            (Some(new), Some(old)) => new < old,
            (new, _) => new.is_some(),
        });
        let number = self.note_sent(ttl);
        let extended =
            self.target.home().ask(self.target.name(), |within| self.target.extend(&self.token, ttl, within));
        if extended.await? {
            self.note_answered(number, ttl);
            // Of two extensions that are under way, the one that was sent last counts.
            self.reckon(sent, |old| old.since <= sent.since);
            return Ok(self.lease.borrow().state == State::Held);
        }
        self.lose("its extension was refused");
        Ok(false)
    }

    /// Until when the store may have it for this token at the most; `None` for ever.
    pub(crate) fn may_be_kept_until(&self) -> Option<Instant> {
        lock(&self.kept).until
    }

    /// An extension is sent, which may be made whatever becomes of its answer, as late as its timeout allows. Its number.
    fn note_sent(&self, ttl: Option<Duration>) -> u64 {
        let ttl = ttl.map(|ttl| ttl.saturating_add(self.target.home().command_timeout));
        let mut kept = lock(&self.kept);
        kept.until = later(kept.until, from_now(ttl));
        kept.extensions += 1;
        kept.extensions
    }

    /// It was made. If another was sent since, that one may have been made after it.
    fn note_answered(&self, number: u64, ttl: Option<Duration>) {
        let mut kept = lock(&self.kept);
        if kept.extensions == number {
            kept.until = from_now(ttl);
        }
    }

    fn reckon(&self, new: Lease, instead_of: impl FnOnce(&Lease) -> bool) {
        self.lease.send_if_modified(|lease| {
            let changes = lease.state == State::Held && instead_of(lease);
            if changes {
                *lease = new;
            }
            changes
        });
    }
}

/// What a grant came with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) fence: u64,
    pub(crate) attempts: u32,
    pub(crate) waited: Duration,
}
