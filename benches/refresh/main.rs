//! Measures a hot key that expires again and again: how many loads the whole fleet makes per period, and what callers notice of them.
//!
//! ```text
//! cargo bench --bench refresh             a minute; needs redis-server
//! cargo bench --bench refresh -- tags     some groups: stale early failing tags
//! STRICT=1 cargo bench --bench refresh    also fails where a ratio misses its `must`
//! ```
//!
//! Eight processes with 25 callers each, on one redis-server of this machine. A caller asks, waits 20 to 30 ms and
//! asks again, for twenty periods. The origin counts the loads and when they began and ended, by the wall clock that
//! all processes share.

#[path = "../../tests/support/mod.rs"]
mod support;

#[path = "../fleet/groups.rs"]
mod groups;

#[path = "../fleet/table.rs"]
#[allow(dead_code, reason = "shared with the `fleet` bench, which uses all of it")]
mod table;

mod callers;
mod tags;

use std::time::Duration;

use callers::{BACK_OFF, Call, FRESH_FOR, LOAD, Mode, Ran, run};
use groups::Group;
use table::{Limit, Row, Spread, Table, Unit};

const PERIODS: u32 = 20;
/// Tolerance for two clocks: keys expire by the server's clock, in whole milliseconds, and loads are timed by that of this machine.
const CLOCKS: u64 = 3_000_000;

fn main() {
    if std::env::var_os("SG_ROLE").is_some() {
        return support::processes::run_child(callers::ROLES);
    }
    groups::measure("refresh", METHOD, GROUPS);
}

const GROUPS: &[Group] = &[
    ("stale", |table| on_runtime(revalidating(table))),
    ("early", |table| on_runtime(early(table))),
    ("failing", |table| on_runtime(failing(table))),
    ("tags", |table| {
        on_runtime(async {
            tags::many(table).await;
            tags::racing(table).await;
            tags::expired(table).await;
        });
    }),
];

const METHOD: &str = "\
Method. Eight processes with 25 callers each, on a redis-server of this machine; the origin counts the loads and records \
when they began and ended, by the wall clock that all processes share.

";

fn on_runtime(rows: impl Future<Output = ()>) {
    tokio::runtime::Runtime::new().expect("a runtime").block_on(rows);
}

/// The longest series of loads in which each load began less than `rest` after the end of the load before it, so its value was still fresh;
/// 1 if there is no such series.
fn loads_per_period(ran: &Ran, rest: Duration) -> f64 {
    let rest = rest.as_nanos() as u64;
    let (mut most, mut row) = (1, 1);
    for pair in ran.loads.windows(2) {
        row = if pair[1].0 + CLOCKS < pair[0].1 + rest { row + 1 } else { 1 };
        most = most.max(row);
    }
    f64::from(most)
}

fn periods(ran: &Ran) -> String {
    format!("{} loads, {} calls", ran.loads.len(), ran.calls.len())
}

async fn revalidating(table: &mut Table) {
    let ran = run(Mode::Revalidate, (FRESH_FOR + LOAD) * PERIODS * 2).await;
    assert!(ran.loads.len() > PERIODS as usize, "{} loads", ran.loads.len());
    table.add(Row {
        what: "stale while revalidate: loads per period, 8x25".into(),
        unit: Unit::Count,
        must: Limit::Exactly(1.0),
        aim: Limit::None,
        measured: loads_per_period(&ran, FRESH_FOR),
        detail: periods(&ran),
    });
    // The first load fills the cold key, and its callers have to wait.
    let begun = ran.loads[0].1;
    let during = |call: &Call| ran.loads[1..].iter().any(|load| call.begun < load.1 && load.0 < call.ended);
    let (refreshing, plain): (Vec<_>, Vec<_>) =
        ran.calls.iter().filter(|call| call.begun > begun).partition(|call| during(call));
    let (refreshing, plain) = (p99(&refreshing), p99(&plain));
    table.add(Row {
        what: "the same: callers' p99 during a refresh / p99 of plain hits".into(),
        unit: Unit::Ratio,
        must: Limit::AtMost(2.0),
        aim: Limit::AtMost(1.5),
        measured: refreshing / plain,
        detail: format!("{refreshing:.2} ms / {plain:.2} ms"),
    });
}

fn p99(calls: &[&Call]) -> f64 {
    let mut times: Vec<_> = calls.iter().map(|call| (call.ended - call.begun) as f64 / 1e6).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() * 99 / 100]
}

async fn early(table: &mut Table) {
    let ran = run(Mode::Early, FRESH_FOR * PERIODS * 2).await;
    assert!(ran.loads.len() > PERIODS as usize, "{} loads", ran.loads.len());
    let waited: Vec<_> = ran.calls.iter().filter(|call| call.begun > ran.loads[0].1).collect();
    let waited = waited.iter().filter(|call| call.ended - call.begun >= LOAD.as_nanos() as u64).count();
    table.add(Row {
        what: "early refresh (XFetch, beta 1): loads per period, 8x25".into(),
        unit: Unit::Count,
        must: Limit::Exactly(1.0),
        aim: Limit::None,
        measured: loads_per_period(&ran, Duration::ZERO),
        detail: format!("{}; {waited} calls waited for a load", periods(&ran)),
    });
}

async fn failing(table: &mut Table) {
    let ran = run(Mode::Down, BACK_OFF * PERIODS).await;
    assert!(ran.loads.len() > PERIODS as usize / 2, "{} loads", ran.loads.len());
    let served = ran.calls.iter().all(|call| call.served);
    assert!(served, "every caller is served the older value");
    table.add(Row {
        what: "origin down, stale if error: loads per back-off, 8x25".into(),
        unit: Unit::Count,
        must: Limit::AtMost(1.0),
        aim: Limit::None,
        measured: loads_per_period(&Ran { loads: ran.loads[1..].to_vec(), calls: Vec::new() }, BACK_OFF),
        detail: periods(&ran),
    });
    let gaps: Vec<_> = ran.loads[1..].windows(2).map(|pair| (pair[1].0 - pair[0].1) as f64 / 1e6).collect();
    println!("  between two tries: {} ms", Spread::of(&gaps));
}
