//! One process of the fleet: its callers, and the changes that it makes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, Stats};
use tokio::task::JoinSet;

use super::TERM;
use super::changes::{self, Changer};
use super::readers::{self, Received};
use super::truth::{Guards, Truth};
use crate::support::os::wall_ns;
use crate::support::processes::Child;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Config {
    /// The server that the guard uses, and the server of the versions.
    pub(super) redis: String,
    pub(super) truth: String,
    pub(super) process: usize,
    /// Whether the process keeps copies.
    pub(super) keeps: bool,
    pub(super) callers: usize,
    /// The store has no faults, so callers that join a running load count for the oracle, too.
    pub(super) strict: bool,
}

/// What the callers of a process have seen.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) reads: u64,
    pub(super) failures: Vec<String>,
    /// How many callers joined a load that was running in their process.
    pub(super) joined: u64,
    pub(super) received: Vec<Received>,
    /// How many hits came from memory; `None` if the process keeps no copies.
    pub(super) local_hits: Option<u64>,
    pub(super) fail_open: u64,
    /// By how much the wall clock has advanced further than the monotonic clock since the process started.
    pub(super) skew_ns: i64,
}

/// The counts that the parent asks for during a run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Counts {
    pub(super) local_hits: u64,
    pub(super) local_waits: u64,
    pub(super) local_lapses: u64,
}

/// A policy with long budgets: on a busy machine a late command would otherwise make a process load for itself.
pub(super) fn policy(keeps: bool, tag: Option<usize>) -> Policy {
    let builder = Policy::builder()
        .lease(Duration::from_secs(4))
        .command_timeout(Duration::from_secs(1))
        .coordination_budget(Duration::from_secs(4))
        .load_timeout(Duration::from_secs(60))
        .fresh_for(Duration::from_secs(600))
        .stale_if_error(Duration::from_secs(600));
    let builder = if keeps { builder.local_for(Duration::MAX) } else { builder };
    let builder = match tag {
        Some(tag) => builder.tags([("tag", tag)]).invalidate_all(true),
        None => builder,
    };
    builder.build().expect("valid")
}

pub(super) fn play(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let monotonic = Instant::now();
        let skew = clock_skew(monotonic);
        let of = |tag| policy(config.keeps, tag);
        let builder = crate::redis::builder(&config.redis).policy(of(None)).local_term(TERM);
        let guards = Guards::new(builder.build().expect("valid"), of);
        let truth = Truth::connect(&config).await;
        crate::redis::connects(guards.any()).await;
        child.ready();
        let report = child.report();
        let (mut callers, mut changing) = (JoinSet::new(), JoinSet::new());
        let (over, halt) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let changer = Changer::new(guards.clone(), truth.clone(), config.clone());
        loop {
            let line = child.recv_line().await;
            match *line.split(' ').collect::<Vec<_>>() {
                ["read"] => {
                    for _ in 0..config.callers {
                        callers.spawn(readers::read(
                            guards.clone(),
                            truth.clone(),
                            config.clone(),
                            over.clone(),
                        ));
                    }
                }
                ["counts"] => {
                    let Stats { local_hits, local_waits, local_lapses, .. } = guards.any().stats();
                    report.event_with("counts", &Counts { local_hits, local_waits, local_lapses });
                }
                // This many tasks make this many changes each, with pauses of this many milliseconds.
                ["change", tasks, most, pause] => {
                    halt.store(false, Ordering::SeqCst);
                    let pause = Duration::from_millis(pause.parse().expect("a number"));
                    let most: usize = most.parse().expect("a number");
                    for _ in 0..tasks.parse().expect("a number") {
                        changing.spawn(changes::make(changer.clone(), most, pause, halt.clone()));
                    }
                }
                ["halt"] => halt.store(true, Ordering::SeqCst),
                ["changed"] => {
                    let mut all = Vec::new();
                    while let Some(made) = changing.join_next().await {
                        all.extend(made.expect("no panic"));
                    }
                    report.event_with("changed", &all);
                }
                ["invalidate", key] => {
                    let key = key.parse().expect("a number");
                    report.event_with("invalidated", &changer.invalidate(key).await);
                }
                ["stop"] => {
                    over.store(true, Ordering::SeqCst);
                    let mut totals = Report::default();
                    while let Some(read) = callers.join_next().await {
                        totals.add(read.expect("no panic"));
                    }
                    let stats = guards.any().stats();
                    totals.local_hits = config.keeps.then_some(stats.local_hits);
                    totals.fail_open = stats.fail_open_loads;
                    totals.skew_ns = clock_skew(monotonic) - skew;
                    child.result(&totals);
                    guards.any().shutdown(Duration::from_secs(2)).await;
                    return;
                }
                _ => panic!("unknown command `{line}`"),
            }
        }
    })
}

/// The wall clock less the time since `began`, in nanoseconds. It is read several times, because the system may interrupt the process
/// between the two clocks, which makes the difference larger.
fn clock_skew(began: Instant) -> i64 {
    let read = || {
        let elapsed = i64::try_from(began.elapsed().as_nanos()).expect("minutes");
        wall_ns().cast_signed() - elapsed
    };
    (0..32).map(|_| read()).min().expect("some")
}
