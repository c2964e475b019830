//! Every public future, dropped at each of its polls, in each situation that it may meet (C1 to C9). Whatever was dropped:
//! a newcomer is served at once, and no flight, task, lease, permit or place in a queue is left.
//!
//! On a store in memory under a paused clock, and on a real server (`on_redis`), where futures wait for more. (A flight's own
//! task is `src/read_through/leader_tests.rs`.)

/// An enum and the list of all that it can be.
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

/// Runs `scenario` with a drop at each poll, until its future is done before it is dropped; how many drops there were.
/// No scenario takes longer than two minutes on its own clock.
async fn at_every_poll(name: &str, scenario: impl AsyncFn(Drop) -> bool) -> usize {
    let mut drops = 0;
    for drop in [Drop::AtPoll, Drop::AtWake] {
        for n in 1.. {
            assert!(n < 200, "{name}: it is polled again and again");
            let drop = drop(n);
            let done = timeout(Duration::from_secs(120), scenario(drop)).await;
            if done.unwrap_or_else(|_| panic!("{name}, {drop:?}: somebody hangs")) {
                break;
            }
            drops += 1;
        }
    }
    drops
}
