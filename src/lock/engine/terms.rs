//! On what terms a lock is waited for, and the arithmetic of its moments.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::lock::options::Waiting;

/// How somebody wants to wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) waiting: Waiting,
    /// What `Keyspace` falls back to.
    pub(crate) fallback: (Duration, f64),
    /// How often it is asked for again; 0 for exactly one attempt.
    pub(crate) retries: Option<u32>,
    /// `None` waits for ever.
    pub(crate) timeout: Option<Duration>,
    pub(crate) min_remaining: Duration,
}

/// When a time that begins now ends; `None` for never, as of a time that is beyond all clocks.
pub(crate) fn from_now(ttl: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(ttl?)
}

/// The later of two moments, where `None` is never.
pub(crate) fn later(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.zip(other).map(|(one, other)| one.max(other))
}

/// Resolves at that moment; never, without one.
pub(crate) async fn reached(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
