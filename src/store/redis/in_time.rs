//! Commands that must not run late: held back on the way (a server that hangs runs what it was sent once it goes on, for
//! clients that have long left), an insertion would be stored over what others have stored since, and an acquire would
//! give a lease to nobody.
//!
//! So they have a last moment, by the clock of the server that runs them. One that comes later changes nothing, and is
//! answered with what that clock shows: it may only have been set.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::scripts::millis;
use super::topology::Commands;
use crate::store::{LATEST, StoreError, StoreErrorKind};

/// What became of one attempt.
pub(super) enum Ran<T> {
    InTime(T),
    /// Not at all; what the server's clock shows.
    TooLate(u64),
}

/// Has `attempt` run, which is told its last moment and the time that it has.
pub(super) async fn in_time<T, F>(
    commands: &Commands,
    within: Duration,
    attempt: impl Fn(Option<u64>, Duration) -> F,
) -> Result<T, StoreError>
where
    F: Future<Output = Result<Ran<T>, StoreError>>,
{
    let sent = Instant::now();
    // Where the clock can not be read here, the server may not read it either.
    let mut now = commands.known_clock_at(sent);
    loop {
        let left = within.saturating_sub(sent.elapsed());
        let last = now.map(|now| now.saturating_add(millis(left.saturating_add(LATEST))));
        match attempt(last, left).await? {
            Ran::InTime(done) => return Ok(done),
            Ran::TooLate(_) if sent.elapsed() >= within => {
                return Err(StoreError::new(StoreErrorKind::TimedOut));
            }
            Ran::TooLate(shown) => now = Some(shown),
        }
    }
}
