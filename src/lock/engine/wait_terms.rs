//! The terms on which a caller waits for a lock, and the arithmetic of its moments.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::lock::options::Waiting;

/// How a caller waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitTerms {
    pub(crate) waiting: Waiting,
    /// Interval and jitter of the polling to which `Keyspace` falls back.
    pub(crate) fallback: (Duration, f64),
    /// How many attempts may follow the first.
    pub(crate) retries: Option<u32>,
    /// `None` waits for ever.
    pub(crate) timeout: Option<Duration>,
    pub(crate) min_remaining: Duration,
}

/// The end of a time that begins now; `None` for never, or if no `Instant` can represent it.
pub(crate) fn from_now(ttl: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(ttl?)
}

/// The later of two moments, where `None` is never.
pub(crate) fn later(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.zip(other).map(|(one, other)| one.max(other))
}

/// Resolves at that moment; never, if there is none.
pub(crate) async fn reached(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
