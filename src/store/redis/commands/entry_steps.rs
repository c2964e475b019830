//! Steps on leases that take several calls: HAND OVER, and WAKE REST, which continues a script that could not notify all waiters of an
//! ended lease in one call. And [`Deadline`], of the calls that must not run late.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::Instant;

use super::Commands;
use crate::store::redis::scripts;
use crate::store::redis::scripts::millis;
use crate::store::{HandedOver, LATEST, StoreError, StoreErrorKind, Token};

/// A script that ends a lease adds this to its answer if it has notified only some of the waiters, so that
/// [`wake_rest`](Commands::wake_rest) must continue.
pub(crate) const REST: i64 = 10;

impl Commands {
    /// Notifies the remaining waiters of an ended lease, a bounded number per call. `ended` is the token in the fence behind the last of
    /// them; `message` is theirs. Gives up after `within` or at an error: a waiter that is not notified retries when the lease would
    /// have ended.
    pub(crate) async fn wake_rest(&self, name: &str, ended: &Token, message: &str, within: Duration) {
        let until = Instant::now() + within;
        let args = |cmd: &mut Cmd| {
            cmd.arg(ended.as_str()).arg(message);
        };
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.run(&scripts::WAKE_REST, name, (160, args), left, Some).await {
                Ok(Value::Int(done)) if done > REST => {}
                _ => return,
            }
        }
    }

    /// HAND OVER, repeated while the script requests it, because each call passes over a bounded number of waiters. With
    /// `lease` `None`, for the grant of a waiter that has left, the lease retains its remaining time.
    pub(crate) async fn hand_over(
        &self,
        name: &str,
        token: &Token,
        lease: Option<Duration>,
        (hops, is_leaving): (u8, bool),
        within: Duration,
    ) -> Result<HandedOver, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str());
            match lease {
                Some(lease) => cmd.arg(millis(lease)),
                None => cmd.arg(""),
            };
            cmd.arg(hops).arg(u8::from(is_leaving));
        };
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let read = |answer| match answer {
                Value::Int(0) => Some(Some(HandedOver::NotMine)),
                Value::Int(1) => Some(Some(HandedOver::Freed)),
                Value::Int(2) => Some(Some(HandedOver::ToWaiter)),
                Value::Int(3) => Some(None),
                _ => None,
            };
            if let Some(done) = self.run(&scripts::HAND_OVER, name, (96, args), left, read).await? {
                return Ok(done);
            }
        }
    }
}

/// The calls of a command that must not run late: each carries the latest moment at which it may run, by the clock of the server that
/// runs it, until one was in time.
///
/// A server that hangs runs the commands it was sent once it continues, even if their clients have timed out: an insertion would
/// overwrite newer entries, and an acquire would grant the lease to a client that does not want it any more. A call that comes after its
/// latest moment changes nothing and is answered with the server's time, because the clock may only have been set.
pub(crate) struct Deadline {
    began: Instant,
    within: Duration,
    /// What the server's clock shows; if the guard may not read it, the script may not either.
    server_clock: Option<u64>,
}

impl Deadline {
    pub(crate) fn new(commands: &Commands, within: Duration) -> Self {
        let began = Instant::now();
        Self { began, within, server_clock: commands.known_clock_at(began) }
    }

    pub(crate) fn left(&self) -> Duration {
        self.within.saturating_sub(self.began.elapsed())
    }

    /// The latest moment for the next call, and how long it may take.
    pub(crate) fn next_call(&self) -> (Option<u64>, Duration) {
        let left = self.left();
        (self.server_clock.map(|now| now.saturating_add(millis(left.saturating_add(LATEST)))), left)
    }

    /// A call came too late, at this time of the server's clock. Returns an error if there is no time for another.
    pub(crate) fn was_late(&mut self, server_clock: u64) -> Result<(), StoreError> {
        if self.left().is_zero() {
            return Err(StoreError::new(StoreErrorKind::TimedOut));
        }
        self.server_clock = Some(server_clock);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use redis::Client;

    use super::*;
    use crate::store::redis::connection::Supervisor;
    use crate::store::redis::connection::connector::Connector;

    const WITHIN: Duration = Duration::from_secs(2);

    fn deadline() -> Deadline {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        Deadline::new(&Supervisor::new(Connector::new(&client, WITHIN)).into(), WITHIN)
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_repeated_with_the_remaining_time_by_the_servers_clock() {
        let (mut deadline, half) = (deadline(), WITHIN / 2);
        assert_eq!(deadline.next_call(), (None, WITHIN));
        tokio::time::advance(half).await;
        deadline.was_late(5_000).expect("there is time");
        assert_eq!(deadline.next_call(), (Some(5_000 + millis(half + LATEST)), half));
    }

    /// It would be sent with no time left for the answer, and run: no client would know of the lease.
    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_not_repeated_after_its_deadline() {
        let mut deadline = deadline();
        tokio::time::advance(WITHIN).await;
        assert_eq!(deadline.was_late(5_000).expect_err("too late").kind, StoreErrorKind::TimedOut);
    }
}
