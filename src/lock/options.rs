//! Settings of mutexes and permits, their checks, and each default with its reason.

use std::time::Duration;

use super::error::SHORTEST_HELD;
use super::{Fairness, LockError};

/// How a caller waits for a busy lock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Waiting {
    /// In the lock's queue: unlocking hands the lock to its head and tells that waiter. Waiters send nothing,
    /// except that the first waiter of each process asks when the holder's time to live has ended.
    #[default]
    Notify,
    /// By asking again, outside the queue: waiters in the queue go first. For servers whose messages do not arrive.
    Poll {
        /// The pause between two attempts, 1 ms to a day.
        interval: Duration,
        /// Lengthens each pause by a random part of up to this fraction of it, from 0 to 1.
        jitter: f64,
    },
    /// As `Notify`, and also woken when other programs delete the key or it expires. Asks the server to announce
    /// key events (`CONFIG SET notify-keyspace-events`, added to the present value), which needs the right to do
    /// so; if the server refuses, this is [`Poll`](Self::Poll), with one warning.
    Keyspace,
}

/// The settings of a [`Mutex`](crate::lock::Mutex); made by [`MutexBuilder`](crate::lock::MutexBuilder).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MutexOptions {
    /// The time to live if it is neither unlocked nor extended; `None` for ever.
    pub ttl: Option<Duration>,
    /// How callers wait for it.
    pub waiting: Waiting,
    /// Which waiter gets it next.
    pub fairness: Fairness,
    /// How long a caller waits; `None` for ever.
    pub acquire_timeout: Option<Duration>,
    /// How many attempts may follow the first; `None` for as many as the time allows.
    pub retries: Option<u32>,
    /// The pause between two attempts if `waiting` is, or falls back to, polling.
    pub retry_interval: Duration,
    /// The random part that may be added to that pause, as a fraction of it.
    pub jitter: f64,
    /// How much of the time to live must remain when it is granted.
    pub min_remaining: Duration,
    /// Whether it is extended in the background until it is unlocked.
    pub auto_renew: bool,
    /// The prefix of its bare key; `None` for a key in this crate's own format.
    pub prefix: Option<String>,
}

impl Default for MutexOptions {
    fn default() -> Self {
        Self {
            // Of the source libraries, one documents 60 s and has no limit (held for ever after a crash), one 10 s.
            // A forgotten lock has to end by itself; longer work extends it.
            ttl: Some(Duration::from_secs(60)),
            waiting: Waiting::Notify,
            // The promise of a queue: no caller is overtaken.
            fairness: Fairness::Fifo,
            // The value of Redis in Action. Without a bound, a deadlock of two locks never shows.
            acquire_timeout: Some(Duration::from_secs(10)),
            // Bounded by `acquire_timeout`. redis_exp_lock's default is 0, because it has no other bound.
            retries: None,
            // The value of redis_exp_lock: a server can bear a hundred attempts a second of each waiter.
            retry_interval: Duration::from_millis(10),
            // Waiters that were refused together would ask again together.
            jitter: 0.1,
            min_remaining: Duration::ZERO,
            // A holder that hangs would keep the lock for ever, so renewal has to be chosen.
            auto_renew: false,
            prefix: None,
        }
    }
}

/// A time to live in whole milliseconds, the unit of stores, rounded up.
pub(super) fn whole_ttl(ttl: Duration) -> Result<Duration, LockError> {
    const MOST: Duration = Duration::from_secs(3650 * 86_400);
    if !(Duration::from_millis(1)..=MOST).contains(&ttl) {
        return Err(LockError::InvalidTtl { ttl });
    }
    let millis = ttl.as_nanos().div_ceil(1_000_000);
    Ok(Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)))
}

/// [`whole_ttl`] for a time to live that must leave time to hold the lock.
pub(super) fn held_ttl(option: &'static str, ttl: Duration) -> Result<Duration, LockError> {
    let ttl = whole_ttl(ttl)?;
    if ttl < SHORTEST_HELD {
        let why = format!("nothing is left of {ttl:?} when it is granted: choose at least {SHORTEST_HELD:?}");
        return Err(LockError::option(option, why));
    }
    Ok(ttl)
}

/// The shortest time to live that can be kept alive: a renewal must fit into a third of it.
const SHORTEST_RENEWED: Duration = Duration::from_millis(30);

pub(super) fn check_auto_renew(auto_renew: bool, ttl: Option<Duration>) -> Result<(), LockError> {
    match ttl {
        None if auto_renew => Err(LockError::option("auto_renew", "what does not expire is not renewed")),
        Some(ttl) if auto_renew && ttl < SHORTEST_RENEWED => {
            let why =
                format!("a time to live of {ttl:?} can not be renewed: choose at least {SHORTEST_RENEWED:?}");
            Err(LockError::option("auto_renew", why))
        }
        _ => Ok(()),
    }
}

pub(super) fn check_pace(option: &'static str, waiting: Waiting) -> Result<(), LockError> {
    let Waiting::Poll { interval, jitter } = waiting else { return Ok(()) };
    let (least, most) = (Duration::from_millis(1), Duration::from_secs(86_400));
    if !(least..=most).contains(&interval) {
        let why = format!("an interval of {interval:?}: choose from {least:?} to {most:?}");
        return Err(LockError::option(option, why));
    }
    if !(0.0..=1.0).contains(&jitter) {
        return Err(LockError::option("jitter", format!("it is {jitter}: choose from 0 to 1")));
    }
    Ok(())
}

/// The part of a time to live that is not counted on, because clocks drift and answers travel.
pub(super) fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}
