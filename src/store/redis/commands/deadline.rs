//! Commands that must not run late: held back on the way (a server that hangs runs what it was sent once it goes on, for
//! clients that have long left), an insertion would be stored over what others have stored since, and an acquire would
//! give a lease to nobody.
//!
//! So they have a last moment, by the clock of the server that runs them. One that comes later changes nothing, and is
//! answered with what that clock shows: it may only have been set.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::Commands;
use crate::store::redis::scripts::millis;
use crate::store::{LATEST, StoreError, StoreErrorKind};

/// What became of one attempt.
pub(crate) enum Ran<T> {
    InTime(T),
    /// Not at all; what the server's clock shows.
    TooLate(u64),
}

/// Has `attempt` run, which is told its last moment and the time that it has.
pub(crate) async fn in_time<T, F>(
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use redis::Client;

    use super::*;
    use crate::store::redis::connection::Supervisor;
    use crate::store::redis::connection::connector::Dial;

    const WITHIN: Duration = Duration::from_secs(2);

    /// What each of these attempts took, and what the server's clock showed to those that came too late. Which moment and how
    /// long each was given.
    async fn tried(
        attempts: &[(Duration, Option<u64>)],
    ) -> (Result<(), StoreError>, Vec<(Option<u64>, Duration)>) {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        let commands = Supervisor::new(Dial::new(&client, WITHIN)).into();
        let told = Mutex::new(Vec::new());
        let done = in_time(&commands, WITHIN, |last, left| {
            let mut told = told.lock().expect("one task");
            let (takes, shown) = attempts[told.len()];
            told.push((last, left));
            async move {
                tokio::time::sleep(takes).await;
                Ok(shown.map_or(Ran::InTime(()), Ran::TooLate))
            }
        });
        let done = done.await;
        (done, told.into_inner().expect("one task"))
    }

    #[tokio::test(start_paused = true)]
    async fn who_came_too_late_has_the_rest_of_the_time_by_the_clock_that_was_shown() {
        let half = WITHIN / 2;
        let (done, told) = tried(&[(half, Some(5_000)), (half, None)]).await;
        done.expect("in time");
        assert_eq!(told, [(None, WITHIN), (Some(5_000 + millis(half + LATEST)), half)]);
    }

    /// It would be sent with no time to hear the answer, and run: a lease for nobody.
    #[tokio::test(start_paused = true)]
    async fn who_came_too_late_is_not_sent_again_once_the_time_is_up() {
        let (done, told) = tried(&[(WITHIN, Some(5_000)), (Duration::ZERO, None)]).await;
        assert_eq!(done.expect_err("too late").kind, StoreErrorKind::TimedOut);
        assert_eq!(told.len(), 1);
    }
}
