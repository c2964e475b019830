//! Commands that must not run late. A server that hangs runs the commands it was sent once it continues, for clients
//! that have given up: an insertion would overwrite newer entries, and an acquire would give the lease to a client that
//! does not want it any more.
//!
//! So these commands carry the latest moment to run, by the clock of the server that runs them. A later command changes
//! nothing and is answered with the server's time, because the clock may only have been set.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::Commands;
use crate::store::redis::scripts::millis;
use crate::store::{LATEST, StoreError, StoreErrorKind};

/// The result of one attempt.
pub(crate) enum Executed<T> {
    InTime(T),
    /// It was not executed; the server's clock showed this time.
    TooLate(u64),
}

/// Runs `attempt` with its latest moment and its time-out, until it was in time.
pub(crate) async fn with_deadline<T, F>(
    commands: &Commands,
    within: Duration,
    attempt: impl Fn(Option<u64>, Duration) -> F,
) -> Result<T, StoreError>
where
    F: Future<Output = Result<Executed<T>, StoreError>>,
{
    let sent = Instant::now();
    // If the guard may not read the clock, the script may not either.
    let mut now = commands.known_clock_at(sent);
    loop {
        let left = within.saturating_sub(sent.elapsed());
        let last = now.map(|now| now.saturating_add(millis(left.saturating_add(LATEST))));
        match attempt(last, left).await? {
            Executed::InTime(done) => return Ok(done),
            Executed::TooLate(_) if sent.elapsed() >= within => {
                return Err(StoreError::new(StoreErrorKind::TimedOut));
            }
            Executed::TooLate(shown) => now = Some(shown),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use redis::Client;

    use super::*;
    use crate::store::redis::connection::Supervisor;
    use crate::store::redis::connection::connector::Connector;

    const WITHIN: Duration = Duration::from_secs(2);

    /// Runs attempts with these durations; `Some` is the time that the server's clock shows to an attempt that came too
    /// late. Returns the latest moment and time-out of each attempt.
    async fn tried(
        attempts: &[(Duration, Option<u64>)],
    ) -> (Result<(), StoreError>, Vec<(Option<u64>, Duration)>) {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        let commands = Supervisor::new(Connector::new(&client, WITHIN)).into();
        let told = Mutex::new(Vec::new());
        let done = with_deadline(&commands, WITHIN, |last, left| {
            let mut told = told.lock().expect("one task");
            let (takes, shown) = attempts[told.len()];
            told.push((last, left));
            async move {
                tokio::time::sleep(takes).await;
                Ok(shown.map_or(Executed::InTime(()), Executed::TooLate))
            }
        });
        let done = done.await;
        (done, told.into_inner().expect("one task"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_repeated_with_the_remaining_time_by_the_servers_clock() {
        let half = WITHIN / 2;
        let (done, told) = tried(&[(half, Some(5_000)), (half, None)]).await;
        done.expect("in time");
        assert_eq!(told, [(None, WITHIN), (Some(5_000 + millis(half + LATEST)), half)]);
    }

    /// It would be sent with no time left for the answer, and run: no client would know of the lease.
    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_not_repeated_after_its_deadline() {
        let (done, told) = tried(&[(WITHIN, Some(5_000)), (Duration::ZERO, None)]).await;
        assert_eq!(done.expect_err("too late").kind, StoreErrorKind::TimedOut);
        assert_eq!(told.len(), 1);
    }
}
