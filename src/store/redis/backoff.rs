//! The pauses between attempts at an operation that fails.

use std::time::Duration;

use tokio::time::sleep;

/// A connection that broke sooner than this was never stable.
pub(crate) const STABLE: Duration = Duration::from_secs(1);

/// The pauses between attempts.
///
/// Full jitter, from the process's own random state: a fleet that lost its server at one moment must not
/// reconnect at one moment.
pub(crate) struct Backoff {
    first: Duration,
    last: Duration,
    cap: Duration,
}

impl Backoff {
    /// The pauses between attempts to connect.
    pub(crate) fn new() -> Self {
        Self::between(Duration::from_millis(20), Duration::from_millis(500))
    }

    /// Pauses below `first`, then below twice as much each time, up to `last`.
    pub(crate) fn between(first: Duration, last: Duration) -> Self {
        Self { first, last, cap: first }
    }

    pub(crate) async fn pause(&mut self) {
        sleep(self.next()).await;
    }

    /// The length of the next pause, for a caller that can be woken during it.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.cap.mul_f64(fastrand::f64());
        self.cap = (self.cap * 2).min(self.last);
        pause
    }

    /// Starts over if the connection was open for long enough: a connection that breaks again and again is not
    /// reopened at full speed.
    pub(crate) fn connected_for(&mut self, lifetime: Duration) {
        if lifetime >= STABLE {
            self.cap = self.first;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Checks each pause against its bound in milliseconds; the last bound holds for all later pauses.
    pub(crate) fn are_anywhere_below(backoff: impl Fn() -> Backoff, bounds: &[u64]) {
        let last = bounds.last().expect("a bound");
        for (before, most) in bounds.iter().chain([last; 5]).enumerate() {
            let most = Duration::from_millis(*most);
            let pauses: Vec<_> = (0..100)
                .map(|_| {
                    let mut backoff = backoff();
                    for _ in 0..before {
                        backoff.next();
                    }
                    backoff.next()
                })
                .collect();
            assert!(pauses.iter().all(|pause| *pause < most), "{pauses:?}");
            // Fails once in 2^100 runs.
            assert!(pauses.iter().any(|pause| *pause < most / 2), "{pauses:?}");
            assert!(pauses.iter().any(|pause| *pause > most / 2), "{pauses:?}");
        }
    }

    pub(crate) fn begins_anew_after_a_second(mut backoff: Backoff, first: u64, last: u64) {
        for _ in 0..9 {
            backoff.next();
        }
        backoff.connected_for(Duration::from_secs(1) - Duration::from_nanos(1));
        assert_eq!(backoff.cap, Duration::from_millis(last));
        backoff.connected_for(Duration::from_secs(1));
        assert_eq!(backoff.cap, Duration::from_millis(first));
    }

    #[test]
    fn pauses_between_attempts_to_connect_are_below_a_bound_that_doubles_up_to_half_a_second() {
        are_anywhere_below(Backoff::new, &[20, 40, 80, 160, 320, 500]);
    }

    #[test]
    fn a_connection_that_was_open_for_a_second_is_reopened_at_once() {
        begins_anew_after_a_second(Backoff::new(), 20, 500);
    }
}
