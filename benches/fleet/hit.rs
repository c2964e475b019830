//! What a hit costs, compared with a plain GET, which is the least that a hit needs.
//!
//! One thread has 64 callers at once, for values of 1 KiB. The CPU of the client is the limit, so a ratio of throughputs is a ratio of CPU
//! times. Guard and control take turns on the same server, in separate processes ([`sides`](crate::sides)). In one process, each would find
//! the heap as the other one has left it, which for 100 KiB decides whether the allocator fetches memory from the kernel for each body. The
//! order alternates, and a row is the median of its pairs.

use crate::sides::{Config, Kind, Rate, Side};
use crate::support::processes::Fleet;
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

const PAIRS: usize = 9;

/// The program that starts both sides.
type Program = &'static [&'static str];

const AS_IT_IS: Program = &[];
/// By default, glibc returns pages to the kernel as soon as some bodies are freed, and each later body fetches them again. That dominates
/// the cost of a call on either side. So the row about large bodies is measured with an allocator that keeps freed pages, which is the
/// default of other allocators, and again with glibc's defaults.
const KEEPS_MEMORY: Program = &["env", "MALLOC_TRIM_THRESHOLD_=100000000"];

pub(crate) fn loads(table: &mut Table) {
    let what = "hit: `get_or_load` of `Bytes` / raw GET, 1 KiB, 64 callers, distinct keys";
    row(table, Kind::Loader, AS_IT_IS, what, 0.85, 0.93);
}

pub(crate) fn layer(table: &mut Table) {
    let what = "hit: `guard.layer(service_fn)`, 8 headers / a `service_fn` that does the raw GET";
    row(table, Kind::Layer, AS_IT_IS, what, 0.80, 0.92);
}

pub(crate) fn large(table: &mut Table) {
    let what = "hit: the same with 100 KiB, freed memory kept";
    row(table, Kind::Large, KEEPS_MEMORY, what, 0.90, 0.95);
    let what = "hit: the same with 100 KiB, freed memory given back (glibc's default)";
    row(table, Kind::Large, AS_IT_IS, what, 0.90, 0.95);
}

pub(crate) fn hot(table: &mut Table) {
    let what = "hit: one hot key through the layer / the same control on that key";
    row(table, Kind::Hot, AS_IT_IS, what, 2.0, 3.0);
}

fn row(table: &mut Table, kind: Kind, program: Program, what: &str, must: f64, aim: f64) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (measured, detail) = runtime.block_on(measure(kind, program));
    let (must, aim) = (Limit::AtLeast(must), Limit::AtLeast(aim));
    table.add(Row { what: what.into(), unit: Unit::Ratio, must, aim, measured, detail });
}

/// Measures a row. Returns the median ratio of throughputs, and the details to print.
async fn measure(kind: Kind, program: Program) -> (f64, String) {
    let server = RedisServer::start();
    let sides = Side::of(kind);
    let fleet = Fleet::spawn_by(program, sides.len(), "side", &Config { redis: server.url(), kind });
    fleet.wait_ready().await;
    let mut rounds: Vec<Vec<Rate>> = Vec::new();
    // The first round only warms up caches, allocators and the server's own tables.
    for round in 0..=PAIRS {
        let mut rates = vec![Rate::default(); sides.len()];
        for turn in 0..sides.len() {
            let side = if round % 2 == 0 { turn } else { sides.len() - 1 - turn };
            fleet.member(side).send("go");
            rates[side] = fleet.member(side).result().await;
        }
        if round > 0 {
            rounds.push(rates);
        }
    }
    let of = |number: &dyn Fn(&[Rate]) -> f64| {
        Spread::of(&rounds.iter().map(|rates| number(rates)).collect::<Vec<_>>())
    };
    let at = |side: Side| sides.iter().position(|other| *other == side).expect("it is one of them");
    let (guard, control) = (at(Side::Guard), at(Side::Control));
    let ratios = of(&|rates| rates[guard].calls / rates[control].calls);
    let rate = of(&|rates| rates[guard].calls / 1e3).median;
    let cpu = of(&|rates| rates[guard].cpu - rates[control].cpu).median;
    let mut detail = format!("{ratios}; {rate:.0} k/s; CPU per call {cpu:+.0} ns");
    if kind == Kind::Large {
        let faults = |side: usize| of(&|rates| rates[side].faults).median;
        detail += &format!("; page faults {:.1} and {:.1}", faults(guard), faults(control));
    }
    if sides.contains(&Side::Joined) {
        let joined = at(Side::Joined);
        let ratios = of(&|rates| rates[joined].calls / rates[control].calls);
        let Spread { median, min, max } = ratios;
        detail += &format!("; one GET for all of them and no guard {median:.2}, {min:.2} to {max:.2}");
    }
    (ratios.median, detail)
}
