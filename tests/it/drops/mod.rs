//! Every public future is dropped at each of its polls, in each situation that it may meet (C1 to C9). After every drop a new caller is
//! served at once, and no flight, task, lease, permit or position in a queue is left.
//!
//! Most tests run on the in-memory store under a paused clock. `on_redis` runs on a real server, where futures have more await
//! points. (`tests/unit/read_through/leader_tests.rs` tests the task of a flight.)

/// Declares an enum, and a list of all its variants.
macro_rules! listed {
    ($(#[$doc:meta])* enum $name:ident, $all:ident: $($item:ident)+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        enum $name { $($item),+ }

        const $all: &[$name] = &[$($name::$item),+];
    };
}

#[path = "../../simulation/dropped.rs"]
mod dropped;
#[cfg(feature = "testing")]
mod guards;
#[cfg(feature = "http")]
mod http;
mod locks;
#[cfg(feature = "redis")]
mod on_redis;
#[cfg(feature = "testing")]
mod origins;

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use dropped::{Drop, dropped};
use tokio::time::timeout;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Runs `scenario` with a drop at the first poll, at the second, and so on, until its future completes before the drop. Returns the number
/// of drops. No scenario takes longer than two minutes on its clock.
async fn at_every_poll(name: &str, scenario: impl AsyncFn(Drop) -> bool) -> usize {
    let mut drops = 0;
    for drop in [Drop::AtPoll, Drop::AtWake] {
        for n in 1.. {
            assert!(n < 200, "{name}: it is polled again and again");
            let drop = drop(n);
            let done = timeout(Duration::from_secs(120), scenario(drop)).await;
            if done.unwrap_or_else(|_| panic!("{name}, {drop:?}: a task hangs")) {
                break;
            }
            drops += 1;
        }
    }
    drops
}
