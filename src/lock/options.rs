//! How mutexes and permits are taken, kept and waited for: valid by construction, each default with its reason.

use std::time::Duration;

use super::error::SHORTEST_HELD;
use super::{Fairness, LockError};

/// How a busy lock is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Waiting {
    /// In the lock's queue: whoever unlocks hands the lock to its head and says so. Nothing is sent while waiting,
    /// but by the first waiter of each process when the holder's time to live is over.
    #[default]
    Notify,
    /// By asking again, outside the queue: those who wait in it go first. For servers whose messages do not arrive.
    Poll {
        /// The pause between two attempts, 1 ms to a day.
        interval: Duration,
        /// Lengthens each pause by a random part of up to this fraction of it, from 0 to 1.
        jitter: f64,
    },
    /// As `Notify`, and also woken when the key is deleted or expires by other hands than this crate's. Has the
    /// server announce what happens to keys (`CONFIG SET notify-keyspace-events`, added to what is set there), which
    /// needs the right to; where it is refused, this is [`Poll`](Self::Poll), with one warning.
    Keyspace,
}

/// The settings of a [`Mutex`]; made by [`MutexBuilder`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MutexOptions {
    /// How long it is held if nobody unlocks or extends it; `None` for ever.
    pub ttl: Option<Duration>,
    /// How it is waited for.
    pub waiting: Waiting,
    /// Which of those that wait has it next.
    pub fairness: Fairness,
    /// How long it is waited for; `None` for ever.
    pub acquire_timeout: Option<Duration>,
    /// How often it is tried again after the first attempt; `None` as often as there is time for.
    pub retries: Option<u32>,
    /// The pause between two attempts where `waiting` is, or falls back to, polling.
    pub retry_interval: Duration,
    /// What may be added to that pause, as a fraction of it.
    pub jitter: f64,
    /// How much of its time has to be left when it is granted.
    pub min_remaining: Duration,
    /// Whether it is extended in the background until it is unlocked.
    pub auto_renew: bool,
    /// What its bare key begins with; `None` for a key of this crate's own.
    pub prefix: Option<String>,
}

impl Default for MutexOptions {
    fn default() -> Self {
        Self {
            // Of the sources one documents 60 s and has none (held for ever after a crash), one 10 s. What is
            // forgotten has to end by itself; work that is longer extends it.
            ttl: Some(Duration::from_secs(60)),
            waiting: Waiting::Notify,
            // No caller is overtaken, whatever others do: what a queue promises.
            fairness: Fairness::Fifo,
            // As Redis in Action has it. Without a bound a deadlock of two locks never shows.
            acquire_timeout: Some(Duration::from_secs(10)),
            // The time bounds it. redis_exp_lock's default is 0: it has no other bound.
            retries: None,
            // As redis_exp_lock has it: a hundred tries a second for each waiter is what a server can bear.
            retry_interval: Duration::from_millis(10),
            // Waiters that were turned away together would come back together.
            jitter: 0.1,
            min_remaining: Duration::ZERO,
            // A holder that hangs would keep it for ever: to be chosen, not to be found out.
            auto_renew: false,
            prefix: None,
        }
    }
}

/// A time to live in whole milliseconds, as stores count; never less than what was asked.
pub(super) fn whole_ttl(ttl: Duration) -> Result<Duration, LockError> {
    const MOST: Duration = Duration::from_secs(3650 * 86_400);
    if !(Duration::from_millis(1)..=MOST).contains(&ttl) {
        return Err(LockError::InvalidTtl { ttl });
    }
    let millis = ttl.as_nanos().div_ceil(1_000_000);
    Ok(Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)))
}

/// [`whole_ttl`] of what is to be held.
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

/// What of a time to live is not counted on: clocks drift, and answers travel.
pub(super) fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}
