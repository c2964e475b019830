//! The right of a node to serve from its memory: a moment of its own monotonic clock, which only RENEW moves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// How long a right lasts, and how long an announcer waits, as parts of the term. Between the two is the margin for clocks that run at
/// different speeds: 3 of 64 parts.
const RIGHT_LASTS: (u32, u32) = (60, 64);
const ANNOUNCER_WAITS: (u32, u32) = (63, 64);

fn part(term: Duration, (numerator, denominator): (u32, u32)) -> Duration {
    term.mul_f64(f64::from(numerator) / f64::from(denominator))
}

/// For how long after the sending of a RENEW its node may serve from memory.
pub(super) fn right_lasts(term: Duration) -> Duration {
    part(term, RIGHT_LASTS)
}

/// For how long after its answer an announcer waits for a member that stays silent: longer than all rights that were set before.
pub(super) fn announcer_waits(term: Duration) -> Duration {
    part(term, ANNOUNCER_WAITS)
}

/// The moments of a node's clock as numbers, which threads share without a lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeClock(Instant);

/// Microseconds since the node began.
pub(super) type Moment = u64;

impl NodeClock {
    pub(super) fn new() -> Self {
        Self(Instant::now())
    }

    pub(super) fn at(self, instant: Instant) -> Moment {
        let since = instant.saturating_duration_since(self.0);
        since.as_secs() * 1_000_000 + u64::from(since.subsec_micros())
    }
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Takes a duty of the process until a moment, if it is free now. By the time and not by its task: that of a runtime that is not driven
/// never ends.
pub(super) fn take_duty(duty: &AtomicU64, now: Moment, until: Moment) -> bool {
    duty.fetch_update(Ordering::AcqRel, Ordering::Acquire, |before| (before <= now).then_some(until)).is_ok()
}

/// Until when a node may serve from memory.
#[derive(Debug, Default)]
pub(super) struct Right {
    until: AtomicU64,
    /// The latest end that the right has ever had.
    last: AtomicU64,
}

impl Right {
    /// To be read before the copy is looked up. (The other order would serve a copy that was filled under a later right.)
    pub(super) fn until(&self) -> Moment {
        self.until.load(Ordering::SeqCst)
    }

    /// When the last right ended or will end; zero if there never was one.
    pub(super) fn last(&self) -> Moment {
        self.last.load(Ordering::SeqCst)
    }

    /// To be called after everything that the RENEW named was dropped.
    pub(super) fn extend(&self, until: Moment) {
        self.last.fetch_max(until, Ordering::SeqCst);
        self.until.fetch_max(until, Ordering::SeqCst);
    }

    pub(super) fn give_up(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// As if there had never been one: nothing is served by it any more, not even while the store is down.
    pub(super) fn end(&self) {
        self.give_up();
        self.last.store(0, Ordering::SeqCst);
    }
}
