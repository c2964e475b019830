//! How long an invalidation takes while one of the processes that have the key in memory cannot receive it: it is stopped by SIGSTOP, or
//! cut off by a proxy that passes no byte. The invalidation waits until that process must have lost its right.

use std::time::{Duration, Instant};

use stampede_guard::StampedeGuard;

use crate::holders::{KEY, TERM, all_hold, connected, start};
use crate::support::processes::Fleet;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit, millis};

const PROCESSES: usize = 4;
const ROUNDS: usize = 5;
/// After this time the silent process is no longer a member.
const LATER: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Absence {
    Stopped,
    CutOff,
}

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for absence in [Absence::Stopped, Absence::CutOff] {
        let [first, next, later] = runtime.block_on(measure(absence)).map(|times| Spread::of(&times));
        let name = match absence {
            Absence::Stopped => "stopped (SIGSTOP)",
            Absence::CutOff => "cut off",
        };
        let mut row = |what: String, must, aim, measured, detail| {
            table.add(Row { what, unit: Unit::Millis, must, aim, measured, detail });
        };
        row(
            format!(
                "invalidate while one of {PROCESSES} processes is {name}, term 2 s, the longest of {ROUNDS}"
            ),
            Limit::Between(1_000.0, 2_100.0),
            Limit::AtMost(2_000.0),
            first.max,
            format!("median {:.0}", first.median),
        );
        row(
            "the same, the shortest".into(),
            Limit::Between(1_000.0, 2_100.0),
            Limit::AtMost(2_000.0),
            first.min,
            format!(
                "the invalidation that begins at once after it: median {:.1}, at most {:.1} ms; one {} ms after that: {:.1}, {:.1} ms",
                next.median,
                next.max,
                LATER.as_millis(),
                later.median,
                later.max
            ),
        );
    }
}

/// How many milliseconds three invalidations took: the first one, the next one, and a later one.
async fn measure(absence: Absence) -> [Vec<f64>; 3] {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    // Only the process that will be cut off is behind the proxy.
    let mut redis = vec![server.url(); PROCESSES];
    redis[0] = proxy.url();
    let (fleet, guard) = (start(redis, false).await, connected(&server.url()).await);
    all_hold(&fleet).await;
    guard.invalidate(KEY).await.expect("acknowledged");
    // By now the registry is mature, and this process knows that.
    tokio::time::sleep(2 * TERM).await;
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        all_hold(&fleet).await;
        match absence {
            Absence::Stopped => fleet.member(0).pause(),
            Absence::CutOff => proxy.set(Mode::BlackHole),
        }
        let [first, next, later] = &mut times;
        first.push(invalidation(&guard).await);
        next.push(invalidation(&guard).await);
        tokio::time::sleep(LATER).await;
        later.push(invalidation(&guard).await);
        match absence {
            Absence::Stopped => fleet.member(0).resume(),
            Absence::CutOff => proxy.set(Mode::Pass),
        }
        comes_back(&fleet).await;
    }
    times
}

async fn invalidation(guard: &StampedeGuard) -> f64 {
    let began = Instant::now();
    guard.invalidate(KEY).await.expect("acknowledged");
    millis(began.elapsed())
}

/// Waits until the process has its connections and its right again.
async fn comes_back(fleet: &Fleet) {
    all_hold(fleet).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
}
