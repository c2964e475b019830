//! Measures what callers notice of a deploy: the p99 of the first window after it, with a warm-up before the traffic, beside the
//! traffic, and without one.
//!
//! ```text
//! cargo bench --bench warm                 five minutes; needs redis-server
//! cargo bench --bench warm -- crowds       only the rows about many keys at once
//! WINDOW=60 cargo bench --bench warm       one round with windows of a whole minute: seven minutes
//! STRICT=1 cargo bench --bench warm        also fails where a ratio misses its `must`
//! ```

#[path = "../../tests/support/mod.rs"]
mod support;

#[path = "../fleet/groups.rs"]
mod groups;

#[path = "../fleet/table.rs"]
#[allow(dead_code, reason = "shared with the `fleet` bench, which uses all of it")]
mod table;

mod many_keys;
mod service;

use std::time::Duration;

use groups::Group;
use service::{KEYS, Steady, WarmUp, Window};
use support::redis_server::RedisServer;
use table::{Limit, Row, Spread, Table, Unit};

/// The length of a window in seconds and, below, the number of rounds with windows as short as this.
const WINDOW: u64 = 10;
const ROUNDS: usize = 5;

fn main() {
    if std::env::var_os("SG_ROLE").is_some() {
        return support::processes::run_child(&[service::ROLE, many_keys::ROLE]);
    }
    groups::measure("warm", METHOD, GROUPS);
}

const GROUPS: &[Group] = &[
    ("deploys", |table| tokio::runtime::Runtime::new().expect("a runtime").block_on(deploys(table))),
    ("crowds", |table| {
        tokio::runtime::Runtime::new().expect("a runtime").block_on(many_keys::measure(table))
    }),
];

const METHOD: &str = "\
Method. A deploy is two new processes on one redis-server of this machine. Each sends 250 requests a second from its first moment on, at \
fixed times whether earlier ones were answered or not (open loop), for 10,000 keys by Zipf's law (s = 1), values of 1 KiB that are fresh for \
ten minutes. A query at the origin takes 20 ms, for one key or for a hundred; at most 4 loads run in the fleet. A request's time is from its \
call to its answer. The control is two processes with the same traffic on a second server, which has all values: the steady state in \
the same seconds, so that other programs on the machine disturb both. Ratios are of the p99 of a deploy's first window to the control's, \
medians of five rounds. A round has five deploys: cold; cold, warming beside the traffic; cold, warmed before the traffic; a second deploy warmed before the \
traffic; a third, warming beside it. The server is emptied before the first three. A window has ten seconds instead of a minute: a \
deploy costs at its beginning, so a shorter window has a larger share of requests that pay for it, and a ratio that holds in it holds in a minute.

A crowd is three processes that ask for the same 20,000 keys at once, with default settings, of an empty server, while this process asks for one stored value \
each millisecond: medians of five rounds.

";

/// The five deploys of a round.
struct Round {
    cold: Window,
    beside: Window,
    before: Window,
    again: Window,
    again_beside: Window,
}

async fn round(server: &RedisServer, control: &Steady) -> Round {
    server.flush_all();
    let cold = control.beside(server, WarmUp::None).await;
    server.flush_all();
    let beside = control.beside(server, WarmUp::Beside).await;
    server.flush_all();
    let before = control.beside(server, WarmUp::Before).await;
    let again = control.beside(server, WarmUp::Before).await;
    let again_beside = control.beside(server, WarmUp::Beside).await;
    Round { cold, beside, before, again, again_beside }
}

async fn deploys(table: &mut Table) {
    let seconds = std::env::var("WINDOW").map_or(WINDOW, |text| text.parse().expect("a number of seconds"));
    let (window, how_many) = (Duration::from_secs(seconds), if seconds > WINDOW { 1 } else { ROUNDS });
    let control = Steady::start(window).await;
    let server = RedisServer::start();
    let mut rounds = Vec::new();
    for _ in 0..how_many {
        rounds.push(round(&server, &control).await);
    }
    let must = Limit::AtMost(1.2);
    ratio(table, &rounds, "cold, warmed before the traffic", must, |round| &round.before);
    ratio(table, &rounds, "cold, warming beside the traffic", Limit::None, |round| &round.beside);
    ratio(table, &rounds, "cold, without a warm-up", Limit::None, |round| &round.cold);
    ratio(table, &rounds, "a second deploy, warmed before the traffic", must, |round| &round.again);
    ratio(table, &rounds, "a third, warming beside the traffic", must, |round| &round.again_beside);
    let gain: Vec<_> = rounds.iter().map(|round| round.beside.new.p99() / round.cold.new.p99()).collect();
    let spread = Spread::of(&gain);
    table.add(Row {
        what: "p99 of the first window, cold: warming beside the traffic / without a warm-up".into(),
        unit: Unit::Ratio,
        must: Limit::AtMost(1.0),
        aim: Limit::None,
        measured: spread.median,
        detail: spread.to_string(),
    });
    warmed(table, &rounds, "the first deploy's warm-up loads", KEYS as f64, |round| {
        [&round.before, &round.beside]
    });
    warmed(table, &rounds, "a later deploy's warm-up loads", 0.0, |round| {
        [&round.again, &round.again_beside]
    });
    let failed = |of: fn(&Round) -> &Window| rounds.iter().map(|round| of(round).new.failed).sum::<u64>();
    table.add(Row {
        what: "requests that failed after a warm-up".into(),
        unit: Unit::Count,
        must: Limit::Exactly(0.0),
        aim: Limit::None,
        measured: (failed(|round| &round.before) + failed(|round| &round.again)) as f64,
        detail: format!("cold: {}", failed(|round| &round.cold)),
    });
}

/// Adds a row: the 99th percentile of the first window after a deploy, divided by the control's in the same seconds.
fn ratio(table: &mut Table, rounds: &[Round], how: &str, must: Limit, of: impl Fn(&Round) -> &Window) {
    let spread = |number: fn(&Window) -> f64| {
        Spread::of(&rounds.iter().map(|round| number(of(round))).collect::<Vec<_>>())
    };
    let (ratio, new) = (spread(Window::ratio), spread(|window| window.new.p99()));
    let (steady, loads) =
        (spread(|window| window.steady.p99()), spread(|window| window.new.live_loads as f64));
    table.add(Row {
        what: format!("p99 of the first window / of the steady state: {how}"),
        unit: Unit::Ratio,
        must,
        aim: Limit::None,
        measured: ratio.median,
        detail: format!(
            "{ratio}; {:.2} / {:.2} ms; requests load {} keys",
            new.median, steady.median, loads.median
        ),
    });
}

/// Adds a row: how many keys a warm-up before the traffic loads, and how long it takes, compared with one beside the traffic.
fn warmed(table: &mut Table, rounds: &[Round], what: &str, must: f64, of: impl Fn(&Round) -> [&Window; 2]) {
    let time = |at: usize| {
        let times: Vec<_> = rounds.iter().map(|round| of(round)[at].new.warmed_in).collect();
        let Spread { median, min, max } = Spread::of(&times);
        format!("{median:.0} ms ({min:.0} to {max:.0})")
    };
    table.add(Row {
        what: format!("keys that {what}, all processes together"),
        unit: Unit::Count,
        must: Limit::Exactly(must),
        aim: Limit::None,
        measured: rounds.iter().map(|round| of(round)[0].new.warm_loads).max().unwrap_or(0) as f64,
        detail: format!("in {}; beside the traffic in {}", time(0), time(1)),
    });
}
