//! [`LockError`]: why a lock is not held, for the whole toolkit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::key::{CacheKey, Key};
use crate::store::names::LockName;
use crate::store::{StoreError, StoreErrorKind};

/// The shortest time to live that is longer than its own [`drift`].
pub(super) const SHORTEST_HELD: Duration = Duration::from_millis(3);

/// Why a mutex or a permit could not be acquired, kept or examined.
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
    /// This handle already holds the mutex, or is acquiring it; another clone of it may acquire it too.
    AlreadyAcquired,
    /// All attempts that [`retries`](super::MutexBuilder::retries) allows found it busy.
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
    /// It was granted, but the answer came so late that too little of its time to live remained. It was given back.
    GrantedTooLate {
        /// From the sending of the command until its answer was read.
        elapsed: Duration,
        /// The whole time to live.
        ttl: Duration,
    },
    /// Another holds the lock by now, or it is free.
    NotHeld,
    /// The server does not announce key events.
    NotificationsUnavailable {
        /// The reason, for a log.
        why: &'static str,
    },
    /// The semaphore was deleted, or this handle's store was closed.
    Closed,
    /// The semaphore was created with another number of permits.
    CapacityMismatch {
        /// The number that this handle asks for.
        expected: u32,
        /// The number that it was created with.
        actual: u32,
    },
    /// The store could not be asked, or refused.
    Store(Error),
}

impl LockError {
    /// Whether other holders kept it busy all the time.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::TooManyAttempts { .. } | Self::AcquireTimeout { .. })
    }

    /// Whether the store could not be asked, or refused.
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
