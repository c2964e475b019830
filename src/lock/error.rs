//! Why a lock is not held: one type for all of the toolkit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::key::{CacheKey, Key};
use crate::store::names::LockName;
use crate::store::{StoreError, StoreErrorKind};

/// The shortest time of which anything is left when [`drift`] is kept back.
pub(super) const SHORTEST_HELD: Duration = Duration::from_millis(3);

/// Why a mutex or a permit could not be had, kept or asked about.
///
/// That a lock is busy is never a [`Store`](Self::Store) error, and a store that does not answer never looks
/// like a busy lock. The texts carry a digest of the lock's key, never the key or a token.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LockError {
    /// The lock's name is empty, or its prefix is empty, too long or holds a brace.
    InvalidKey,
    /// A time to live of less than a millisecond, or of more than ten years.
    InvalidTtl {
        /// What was asked for.
        ttl: Duration,
    },
    /// A setting is out of range, or contradicts another.
    InvalidOption {
        /// The setting's name.
        option: &'static str,
        /// What to choose instead.
        why: String,
    },
    /// This very handle holds the mutex, or is trying to; another clone of it may try as well.
    AlreadyAcquired,
    /// All tries that [`retries`](super::MutexBuilder::retries) allows found it busy.
    TooManyAttempts {
        /// How many tries there were.
        attempts: u32,
    },
    /// It was busy for longer than [`acquire_timeout`](super::MutexBuilder::acquire_timeout).
    AcquireTimeout {
        /// How many tries there were.
        attempts: u32,
        /// For how long.
        waited: Duration,
    },
    /// It was granted, but the answer was so late that too little of its time was left. It was given back.
    GrantedTooLate {
        /// From the sending of the command until its answer was read.
        elapsed: Duration,
        /// The whole time to live.
        ttl: Duration,
    },
    /// By now the lock is another's, or nobody's.
    NotHeld,
    /// The server does not announce what happens to keys.
    NotificationsUnavailable {
        /// Why not, for a log.
        why: &'static str,
    },
    /// The semaphore was deleted by somebody, or this handle's store was closed.
    Closed,
    /// The semaphore was created with another number of permits.
    CapacityMismatch {
        /// What this handle asks for.
        expected: u32,
        /// What it was created with.
        actual: u32,
    },
    /// The store could not be asked, or refused.
    Store(Error),
}

impl LockError {
    /// Whether somebody else had it all the time.
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

    /// What a store's failure is for whoever was `doing` something with a lock.
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
            // Its text is printed above already.
            Self::Store(error) => error.source(),
            _ => None,
        }
    }
}
