//! Settings of mutexes and permits, their checks, and each default with its reason; and [`LockError`], the error of all
//! lock operations.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::key::{CacheKey, Key};
use crate::store::{LockName, StoreError, StoreErrorKind};

/// How a caller waits for a busy lock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Waiting {
    /// The caller waits in the lock's queue: unlocking hands the lock to the first waiter and notifies it. Waiters send nothing,
    /// except that the first waiter of each process asks when the holder's time to live has ended.
    #[default]
    Notify,
    /// The caller asks again and again, outside the queue: waiters in the queue go first. For servers whose messages do not arrive.
    Poll {
        /// The pause between two attempts, 1 ms to a day.
        interval: Duration,
        /// Lengthens each pause by a random part of up to this fraction of it, from 0 to 1.
        jitter: f64,
    },
    /// Like `Notify`, and also woken when other programs delete the key or the key expires. Asks the server to announce
    /// key events (`CONFIG SET notify-keyspace-events`, added to the present value), which needs the right to do
    /// so; if the server refuses, the caller waits as with [`Poll`](Self::Poll), and one warning is logged.
    Keyspace,
}

/// The settings of a [`Mutex`](super::Mutex); made by [`MutexBuilder`](super::MutexBuilder).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MutexOptions {
    /// How long the mutex is held if it is neither unlocked nor extended; `None` for ever.
    pub ttl: Option<Duration>,
    /// How callers wait for the mutex.
    pub waiting: Waiting,
    /// How long a caller waits for the mutex; `None` for ever.
    pub acquire_timeout: Option<Duration>,
    /// How many attempts may follow the first; `None` for as many as the time allows.
    pub retries: Option<u32>,
    /// The pause between two attempts if `waiting` is, or falls back to, polling.
    pub retry_interval: Duration,
    /// The random part that may be added to that pause, as a fraction of it.
    pub jitter: f64,
    /// How much of the time to live must remain when the mutex is granted.
    pub min_remaining: Duration,
    /// Whether the mutex is extended in the background until it is unlocked.
    pub auto_renew: bool,
    /// If set, the mutex's key is this prefix and the name; `None` for a key in this crate's own format.
    pub prefix: Option<String>,
}

impl Default for MutexOptions {
    fn default() -> Self {
        Self {
            // Of the source libraries, one documents 60 s and has no limit (held for ever after a crash), one 10 s.
            // A lock that is never released has to end by itself; longer work extends it.
            ttl: Some(Duration::from_secs(60)),
            // The promise of a queue: no caller is overtaken.
            waiting: Waiting::Notify,
            // The value in the book "Redis in Action". Without a bound, a deadlock of two locks never shows.
            acquire_timeout: Some(Duration::from_secs(10)),
            // The attempts are bounded by `acquire_timeout`. redis_exp_lock's default is 0, because it has no other bound.
            retries: None,
            // The value of redis_exp_lock: a server can bear a hundred attempts a second of each waiter.
            retry_interval: Duration::from_millis(10),
            // Without jitter, waiters that were refused together would ask again together.
            jitter: 0.1,
            min_remaining: Duration::ZERO,
            // A holder that hangs would keep the lock for ever, so renewal is opt-in.
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

/// Like [`whole_ttl`], for a time to live of which time to hold the lock must remain after [`drift`].
pub(super) fn held_ttl(option: &'static str, ttl: Duration) -> Result<Duration, LockError> {
    let ttl = whole_ttl(ttl)?;
    if ttl < SHORTEST_HELD {
        let why = format!("nothing is left of {ttl:?} when it is granted: choose at least {SHORTEST_HELD:?}");
        return Err(LockError::option(option, why));
    }
    Ok(ttl)
}

/// The shortest time to live that can be renewed: a renewal must fit into a third of it.
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

/// The part of a time to live that a holder must not rely on, because clocks drift and replies take time.
pub(super) fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// The shortest time to live that is longer than its own [`drift`].
const SHORTEST_HELD: Duration = Duration::from_millis(3);

/// Why a mutex or a permit could not be acquired, extended, released or examined.
///
/// A busy lock is never a [`Store`](Self::Store) error, and a store that does not answer is never reported as a
/// busy lock. The texts carry a digest of the lock's key, never the key or a token.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LockError {
    /// The lock's name is empty, or its prefix is empty, too long or holds a brace.
    InvalidKey,
    /// A time to live of less than a millisecond, or of more than ten years.
    InvalidTtl {
        /// The time to live that the caller passed.
        ttl: Duration,
    },
    /// A setting is out of range, or contradicts another.
    InvalidOption {
        /// The setting's name.
        option: &'static str,
        /// What to choose instead.
        why: String,
    },
    /// This handle already holds the mutex, or is acquiring it. A clone of the handle can wait for the mutex.
    AlreadyAcquired,
    /// All attempts that [`retries`](super::MutexBuilder::retries) allows found the lock busy.
    TooManyAttempts {
        /// How many attempts were made.
        attempts: u32,
    },
    /// The lock was busy for longer than [`acquire_timeout`](super::MutexBuilder::acquire_timeout).
    AcquireTimeout {
        /// How many attempts were made.
        attempts: u32,
        /// How long the caller waited.
        waited: Duration,
    },
    /// The lock was granted, but the answer came so late that too little of its time to live remained. It was released again.
    GrantedTooLate {
        /// The time from the sending of the command until its answer was read.
        elapsed: Duration,
        /// The whole time to live.
        ttl: Duration,
    },
    /// This caller does not hold the lock any more: another holder has it by now, or it is free.
    NotHeld,
    /// The server does not announce key events.
    NotificationsUnavailable {
        /// The reason, for a log.
        why: &'static str,
    },
    /// The semaphore was deleted, or the locks were closed, or the guard that owns them was shut down.
    Closed,
    /// The semaphore was created with another number of permits.
    CapacityMismatch {
        /// The number that this handle asks for.
        expected: u32,
        /// The number that it was created with.
        actual: u32,
    },
    /// The store could not be reached, did not answer, or refused the command.
    Store(Error),
}

impl LockError {
    /// Whether the call failed because the lock was busy all the time.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::TooManyAttempts { .. } | Self::AcquireTimeout { .. })
    }

    /// Whether the store could not be reached, did not answer, or refused the command.
    pub fn is_store(&self) -> bool {
        matches!(self, Self::Store(_))
    }

    pub(super) fn option(option: &'static str, why: impl Into<String>) -> Self {
        Self::InvalidOption { option, why: why.into() }
    }

    /// Converts a store's failure into the error of a caller that was `doing` something with a lock.
    pub(super) fn store(doing: &str, name: &LockName, error: StoreError) -> Self {
        if error.kind == StoreErrorKind::Closed {
            return Self::Closed;
        }
        let digest = Key::new("", &CacheKey::from(&*name.tag)).digest();
        Self::Store(Error::with_source(
            ErrorKind::Store,
            format!("{doing} lock #{digest} failed"),
            Arc::new(error),
        ))
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidKey => f.write_str(
                "the lock's key is invalid: give it a name, and a prefix of 1 to 64 bytes without braces",
            ),
            Self::InvalidTtl { ttl } => {
                write!(
                    f,
                    "a time to live of {ttl:?} is not possible: choose from {SHORTEST_HELD:?} to 3650 days"
                )
            }
            Self::InvalidOption { option, why } => write!(f, "{option} is not possible: {why}"),
            Self::AlreadyAcquired => {
                f.write_str("this handle holds the mutex or is trying to: unlock first, or use a clone")
            }
            Self::TooManyAttempts { attempts } => {
                write!(f, "the lock was busy at all of {attempts} attempts")
            }
            Self::AcquireTimeout { attempts, waited } => {
                write!(f, "the lock was busy for {waited:?} ({attempts} attempts)")
            }
            Self::GrantedTooLate { elapsed, ttl } => {
                write!(f, "the lock was granted too late: {elapsed:?} of its {ttl:?} had passed")
            }
            Self::NotHeld => f.write_str("the lock is not held any more"),
            Self::NotificationsUnavailable { why } => write!(f, "the server announces no key events: {why}"),
            Self::Closed => f.write_str("the semaphore was deleted or the locks were closed"),
            Self::CapacityMismatch { expected, actual } => {
                write!(f, "the semaphore was created with {actual} permits, not with {expected}")
            }
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LockError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // `fmt` prints the text of `error` already.
            Self::Store(error) => error.source(),
            _ => None,
        }
    }
}
