//! The commands that the local tier sends while nothing changes, and those of an invalidation if no process has a local tier.
//!
//! Counted are the commands that clients send, as MONITOR shows them, without PING and TIME; calls inside scripts are not counted.

use std::convert::Infallible;
use std::time::Duration;

use stampede_guard::{Policy, StampedeGuard};
use tokio::task::JoinHandle;
use tokio::time::{interval, sleep};

use crate::holders::{KEY, TERM, patient};
use crate::support::monitor::{Commands, Monitor};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Table, Unit};

/// For how long commands are recorded. There are many renewals in this time.
const MONITORED: Duration = Duration::from_secs(20);
/// By this time the tier has given its right back, because it has had no caller for fifteen terms.
const RESTS: Duration = Duration::from_secs(36);
/// By this time the process is connected, has renewed for the first time, and the server knows the scripts.
const SETTLES: Duration = Duration::from_secs(4);
const INVALIDATIONS: usize = 20;

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        // All four run at once, each on its own server. The control is a process without a tier and without callers.
        let (active, idle, rested, control) = tokio::join!(
            monitored(true, true, SETTLES),
            monitored(true, false, SETTLES),
            monitored(true, false, RESTS),
            monitored(false, false, RESTS)
        );
        let what = "commands per second that the tier adds, a caller each 100 ms that hits";
        table.add(added(what, &active, &control));
        let what = "the same, without callers, before the right is given back (fifteen terms)";
        table.add(added(what, &idle, &control));
        table.add(added("the same, after that", &rested, &control));
        table.add(plain_invalidations().await);
    });
}

fn added(what: &str, with: &Commands, without: &Commands) -> Row {
    let per_second = |commands: &Commands| commands.total as f64 / MONITORED.as_secs_f64();
    Row {
        what: what.into(),
        unit: Unit::Ratio,
        must: Limit::AtMost(1.6),
        aim: Limit::AtMost(1.0),
        measured: per_second(with) - per_second(without),
        detail: format!("{} in {} s; without the tier {}", list(with), MONITORED.as_secs(), list(without)),
    }
}

fn list(commands: &Commands) -> String {
    let kinds: Vec<_> = commands.by_name.iter().map(|(name, count)| format!("{count} {name}")).collect();
    if kinds.is_empty() { "none".into() } else { kinds.join(", ") }
}

/// Records the commands of one process, with a tier or without one.
async fn monitored(tier: bool, is_active: bool, settles: Duration) -> Commands {
    let server = RedisServer::start();
    let policy = patient().local_for(if tier { Duration::MAX } else { Duration::ZERO });
    let guard = guard(&server, policy.build().expect("valid")).await;
    ask(&guard).await;
    let caller = is_active.then(|| calls(guard.clone()));
    sleep(settles).await;
    let (monitor, before) = (Monitor::start(&server), guard.stats());
    sleep(MONITORED).await;
    let commands = monitor.finish().without(["ping", "time"]);
    let after = guard.stats();
    if let Some(caller) = caller {
        caller.abort();
        assert_eq!(
            after.local_hits - before.local_hits,
            after.loads_saved() - before.loads_saved(),
            "all hit"
        );
    }
    commands
}

async fn guard(server: &RedisServer, policy: Policy) -> StampedeGuard {
    let guard = StampedeGuard::builder(server.client()).policy(policy).local_term(TERM).build();
    let guard = guard.expect("valid");
    guard.connect().await.expect("connects");
    guard
}

fn calls(guard: StampedeGuard) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut each = interval(Duration::from_millis(100));
        loop {
            each.tick().await;
            ask(&guard).await;
        }
    })
}

async fn ask(guard: &StampedeGuard) {
    let load = || async { Ok::<_, Infallible>("a value".to_owned()) };
    guard.load(KEY).get_shared(move |_| load()).await.expect("infallible");
}

/// Counts the commands of an invalidation by a process without a tier, in a namespace in which no process has one.
async fn plain_invalidations() -> Row {
    let server = RedisServer::start();
    let guard = guard(&server, patient().local_for(Duration::ZERO).build().expect("valid")).await;
    // The server learns the script from the first one.
    guard.invalidate(KEY).await.expect("acknowledged");
    let monitor = Monitor::start(&server);
    for number in 0..INVALIDATIONS {
        guard.invalidate(("other", number)).await.expect("acknowledged");
    }
    let commands = monitor.finish().without(["ping", "time"]);
    Row {
        what: "commands of an `invalidate` in a fleet without local tiers".into(),
        unit: Unit::Count,
        must: Limit::Exactly(1.0),
        aim: Limit::Exactly(1.0),
        measured: commands.total as f64 / INVALIDATIONS as f64,
        detail: format!("{} in {INVALIDATIONS} invalidations", list(&commands)),
    }
}
