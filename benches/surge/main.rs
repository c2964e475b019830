//! Measures what a limit of loads is worth when the origin cannot keep up: goodput after a fleet has lost its cache, in a brown-out, and
//! in other scenarios, with real processes and a real Redis.
//!
//! ```text
//! cargo bench --bench surge                  all scenarios, about 16 minutes; needs redis-server
//! cargo bench --bench surge -- flush-8       some of them, by name
//! SECONDS=1 cargo bench --bench surge -- flush-8 controls     prints the rows of docs/pictures/surge.csv, too
//! STRICT=1 cargo bench --bench surge         also fails where a ratio misses its `must`
//! ```

#[path = "../../tests/support/mod.rs"]
mod support;

#[path = "../fleet/groups.rs"]
mod groups;

#[path = "../fleet/table.rs"]
#[allow(dead_code, reason = "shared with the `fleet` bench, which uses all of it")]
mod table;

mod origin;
mod service;

use std::time::Duration;

use groups::Group;
use origin::BEST;
use service::{Ailment, Config, Limit, Seen};
use support::processes::Fleet;
use support::redis_server::RedisServer;
use table::{Limit as Must, Row, Table, Unit};
use tokio::time::sleep;

/// How many seconds there are before the event, and for how many after it the goodput is measured.
const EVENT: u64 = 5;
const AFTER: u64 = 60;
/// How many requests per second the fleet receives.
const RATE: f64 = 1_000.0;
/// The fixed limit that is right in hindsight: the origin does nearly its most with so few loads at once.
const RIGHT: Limit = Limit::Fixed(24);

fn main() {
    if std::env::var_os("SG_ROLE").is_some() {
        return support::processes::run_child(&[origin::ROLE, service::ROLE]);
    }
    groups::measure("surge", METHOD, GROUPS);
}

const METHOD: &str = "\
Method. A fleet of real processes with a redis-server; 1,000 requests a second at fixed times, whether earlier ones were answered or not, for 30,000 keys \
by Zipf's law (s = 0.8), fresh for 300 s and of all ages at the start. Clients give up after 2 s and ask twice more. The origin is a process that shares its \
capacity among its loads: 205 a second with 25 at once, less beyond (Gunther's law); a load of random length is given up after 10 s, and the origin goes on \
with it. Goodput is the share of the requests in the 60 s after the event that are answered within 2 s, at the first attempt. Back: seconds from the event \
until 99 % are for five seconds. The limit and its control, each a fleet with its own redis-server and origin, run in the same seconds.

";

/// A scenario: what happens, and to which fleet.
#[derive(Clone, Copy)]
struct Scenario {
    what: &'static str,
    processes: usize,
    flush: bool,
    brown_out: bool,
    outage: bool,
    heavy: bool,
    ailment: Ailment,
    /// The factor by which the rate of requests rises at the event.
    step: f64,
    /// The least goodput that is allowed, as a part of the goodput with the right fixed limit.
    least: f64,
}

const FLUSH: Scenario = Scenario {
    what: "the cache is lost, 8 processes",
    processes: 8,
    flush: true,
    brown_out: false,
    outage: false,
    heavy: false,
    ailment: Ailment::None,
    step: 1.0,
    least: 0.95,
};
const CALM: Scenario = Scenario { flush: false, ..FLUSH };

const GROUPS: &[Group] = &[
    ("flush-8", |table| compare(table, FLUSH)),
    ("flush-2", |table| {
        compare(table, Scenario { what: "the cache is lost, 2 processes", processes: 2, ..FLUSH });
    }),
    ("flush-24", |table| {
        compare(table, Scenario { what: "the cache is lost, 24 processes", processes: 24, ..FLUSH });
    }),
    ("controls", controls),
    ("brown-out", |table| {
        let what = "the origin has a quarter of its capacity for 20 s";
        compare(table, Scenario { what, brown_out: true, ..CALM });
    }),
    ("both", |table| {
        let what = "the cache is lost, and the origin has a quarter of its capacity for 20 s";
        compare(table, Scenario { what, brown_out: true, ..FLUSH });
    }),
    ("heavy", |table| {
        let what = "the cache is lost, and one load in a hundred is 60 times as long";
        compare(table, Scenario { what, heavy: true, ..FLUSH });
    }),
    ("one-fails", |table| {
        let what = "the cache is lost, and one process's loads fail at once";
        compare(table, Scenario { what, ailment: Ailment::Fails, ..FLUSH });
    }),
    ("one-slow", |table| {
        let what = "the cache is lost, and one process's network adds 400 ms";
        compare(table, Scenario { what, ailment: Ailment::Slow, ..FLUSH });
    }),
    ("outage", |table| {
        let what = "the origin fails altogether for 20 s";
        compare(table, Scenario { what, outage: true, least: 0.9, ..CALM });
    }),
    ("step", |table| compare(table, Scenario { what: "2.5 times as many requests", step: 2.5, ..CALM })),
    ("quiet", |table| compare(table, Scenario { what: "nothing happens", ..CALM })),
];

/// What a fleet achieved in a scenario.
struct Outcome {
    goodput: f64,
    back: Option<u64>,
    most_at_once: usize,
    loads: u64,
    hits: u64,
    commands: u64,
}

impl Outcome {
    fn text(&self, limit: Limit) -> String {
        let back =
            self.back.map_or_else(|| "not back".to_owned(), |seconds| format!("back after {seconds} s"));
        let Self { goodput, most_at_once, loads, .. } = self;
        format!("{limit:?}: goodput {goodput:.3}, {back}, {most_at_once} loads at once, {loads} loads")
    }
}

async fn run(scenario: Scenario, limit: Limit) -> Outcome {
    let Scenario { processes, flush, brown_out, outage, heavy, ailment, step, .. } = scenario;
    let (server, origin) = (RedisServer::start(), Fleet::spawn(1, "origin", &()));
    let port: u16 = origin.member(0).result().await;
    let rate = RATE / processes as f64;
    let (redis, rates, seconds) = (server.url(), [rate, rate * step], EVENT + AFTER);
    let config = Config { redis, origin: port, limit, ailment, heavy, rates, event: EVENT, seconds };
    let fleet = Fleet::spawn(processes, "service", &config);
    fleet.wait_ready().await;
    let before = commands(&server);
    fleet.go();
    sleep(Duration::from_secs(EVENT)).await;
    origin.member(0).send("most");
    let _: usize = origin.member(0).result().await;
    if flush {
        server.flush_all();
    }
    if brown_out {
        origin.member(0).send(&format!("best {}", BEST / 4.0));
    }
    if outage {
        origin.member(0).send("fail");
    }
    sleep(Duration::from_secs(20)).await;
    origin.member(0).send(&format!("best {BEST}"));
    origin.member(0).send("work");
    sleep(Duration::from_secs(AFTER - 20)).await;
    let seen: Vec<Seen> = fleet.results().await;
    origin.member(0).send("most");
    let most_at_once = origin.member(0).result().await;
    let second = |second: u64| {
        seen.iter().fold((0, 0), |(all, good), seen| {
            let of = seen.seconds[second as usize];
            (all + of.0, good + of.1)
        })
    };
    let share = |from: u64, to: u64| {
        let (all, good) = (from..to).map(second).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        good as f64 / f64::max(all as f64, 1.0)
    };
    if std::env::var_os("SECONDS").is_some() {
        for at in 0..EVENT + AFTER {
            println!("surge.csv {limit:?},{at},{:.3}", share(at, at + 1));
        }
    }
    Outcome {
        goodput: share(EVENT, EVENT + AFTER),
        back: (0..=AFTER - 5).find(|at| share(EVENT + at, EVENT + at + 5) >= 0.99),
        most_at_once,
        loads: seen.iter().map(|seen| seen.loads).sum(),
        hits: seen.iter().map(|seen| seen.hits).sum(),
        commands: commands(&server) - before,
    }
}

fn commands(server: &RedisServer) -> u64 {
    let info: String = server.run(&["INFO", "stats"]);
    let line = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    line.and_then(|text| text.trim().parse().ok()).expect("a number")
}

fn both(scenario: Scenario, limits: [Limit; 2]) -> [Outcome; 2] {
    tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let (first, second) = tokio::join!(run(scenario, limits[0]), run(scenario, limits[1]));
        [first, second]
    })
}

fn row(table: &mut Table, what: String, unit: Unit, must: Must, measured: f64, detail: String) {
    table.add(Row { what, unit, must, aim: Must::None, measured, detail });
}

/// Adds rows that compare the adaptive limit with the right fixed one.
fn compare(table: &mut Table, scenario: Scenario) {
    let what = scenario.what;
    let [right, adaptive] = both(scenario, [RIGHT, Limit::Adaptive]);
    let detail = format!("{}; {}", adaptive.text(Limit::Adaptive), right.text(RIGHT));
    let ratio = adaptive.goodput / right.goodput;
    row(
        table,
        format!("{what}: goodput, of the right fixed limit's"),
        Unit::Ratio,
        Must::AtLeast(scenario.least),
        ratio,
        detail,
    );
    let back = |outcome: &Outcome| outcome.back.map_or(f64::INFINITY, |seconds| seconds.max(1) as f64);
    if back(&right).is_finite() {
        let ratio = back(&adaptive) / back(&right);
        row(
            table,
            format!("{what}: time until it is back, of the right limit's"),
            Unit::Ratio,
            Must::AtMost(1.3),
            ratio,
            String::new(),
        );
    }
    let at_once = adaptive.most_at_once as f64 / right.most_at_once.max(1) as f64;
    row(
        table,
        format!("{what}: loads at once, of the right limit's"),
        Unit::Ratio,
        Must::AtMost(3.0),
        at_once,
        String::new(),
    );
    let per =
        |outcome: &Outcome| (outcome.commands as f64 - outcome.hits as f64) / outcome.loads.max(1) as f64;
    row(
        table,
        format!("{what}: commands per load (all but hits), of the fixed limit's"),
        Unit::Ratio,
        Must::None,
        per(&adaptive) / per(&right),
        format!("{:.1} and {:.1}, those within scripts included", per(&adaptive), per(&right)),
    );
}

/// Adds rows for the other limits, in the scenario of a lost cache.
fn controls(table: &mut Table) {
    for limits in [[Limit::None, Limit::Fixed(6)], [Limit::Fixed(96), Limit::Gradient]] {
        let outcomes = both(FLUSH, limits);
        for (limit, outcome) in limits.into_iter().zip(outcomes) {
            row(
                table,
                format!("{}: goodput with {limit:?}", FLUSH.what),
                Unit::Ratio,
                Must::None,
                outcome.goodput,
                outcome.text(limit),
            );
        }
    }
}
