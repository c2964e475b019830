//! The processes that request one key repeatedly.

use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::sleep;

use crate::support::origin::{self, Answer, Origin};
use crate::support::os::wall_ns;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const FRESH_FOR: Duration = Duration::from_millis(200);
pub(crate) const LOAD: Duration = Duration::from_millis(30);
pub(crate) const BACK_OFF: Duration = Duration::from_millis(500);

pub(crate) const ROLES: &[Role] = &[("callers", callers)];

const PROCESSES: usize = 8;
const CALLERS: usize = 25;
pub(crate) const KEY: &str = "hot";
pub(crate) const TAG: &str = "catalog";

/// The setting of the policy by which callers need not wait.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Mode {
    Revalidate,
    Early,
    /// `stale_if_error`. The origin fails after its first answer.
    Down,
    /// No such setting, so callers wait. The values are versions, and have a tag.
    Tagged,
}

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    redis: String,
    origin: String,
    mode: Mode,
    for_ms: u64,
}

/// One call; times are `wall_ns`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    pub(crate) served: bool,
    /// The value that the call returned, in the mode whose values are versions.
    pub(crate) version: Option<u32>,
}

/// The loads and calls of all processes.
pub(crate) struct Ran {
    /// When each load began and ended, in order of their beginnings.
    pub(crate) loads: Vec<(u64, u64)>,
    pub(crate) calls: Vec<Call>,
}

pub(crate) async fn run(mode: Mode, time: Duration) -> Ran {
    run_with(mode, time, async |_, _| ()).await
}

/// Like [`run`], while `meanwhile` acts on the server and the origin.
pub(crate) async fn run_with(
    mode: Mode,
    time: Duration,
    meanwhile: impl AsyncFnOnce(&RedisServer, &Origin),
) -> Ran {
    let (server, origin) = (RedisServer::start(), Origin::start().await);
    let value = Answer::value("v".repeat(1024)).after(LOAD);
    match mode {
        Mode::Revalidate | Mode::Early => origin.script(KEY, [value]),
        Mode::Tagged => origin.script(KEY, [version(0)]),
        Mode::Down => origin.script(KEY, [value, Answer::failure("no route").after(LOAD)]),
    }
    let config = Config { redis: server.url(), origin: origin.addr(), mode, for_ms: time.as_millis() as u64 };
    let fleet = Fleet::spawn(PROCESSES, "callers", &config);
    fleet.wait_ready().await;
    fleet.go();
    meanwhile(&server, &origin).await;
    let calls: Vec<Vec<Call>> = fleet.results().await;
    let mut loads: Vec<_> =
        origin.history(KEY).into_iter().filter_map(|load| Some((load.started, load.ended?.0))).collect();
    loads.sort_unstable();
    Ran { loads, calls: calls.into_iter().flatten().collect() }
}

/// The answer of the origin with this version, for all loads from now on.
pub(crate) fn version(number: u32) -> Answer {
    Answer::value(number.to_string()).after(Duration::from_millis(5))
}

pub(crate) fn policy(mode: Mode) -> Policy {
    let long = Duration::from_secs(600);
    // As in the fleet bench: eight processes on a few cores stall for longer than the default budget.
    let policy = Policy::builder()
        .fresh_for(FRESH_FOR)
        .ttl_jitter(0.0)
        .coordination_budget(Duration::from_secs(1))
        .command_timeout(Duration::from_millis(500));
    let policy = match mode {
        Mode::Revalidate => policy.stale_while_revalidate(long),
        Mode::Early => policy.early_refresh(1.0),
        Mode::Down => policy.stale_if_error(long).back_off(BACK_OFF),
        Mode::Tagged => policy.fresh_for(long).tags([TAG]),
    };
    policy.build().expect("valid")
}

fn callers(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let client = redis::Client::open(config.redis.as_str()).expect("an address");
        let guard = StampedeGuard::builder(client).policy(policy(config.mode)).build().expect("valid");
        guard.connect().await.expect("connects");
        child.ready();
        child.wait_go().await;
        let until = wall_ns() + config.for_ms * 1_000_000;
        let calls = join_all((0..CALLERS).map(|_| call_until(&guard, &config.origin, until))).await;
        child.result(&calls.into_iter().flatten().collect::<Vec<_>>());
    })
}

async fn call_until(guard: &StampedeGuard, origin: &str, until: u64) -> Vec<Call> {
    let mut calls = Vec::new();
    loop {
        let begun = wall_ns();
        if begun >= until {
            return calls;
        }
        let origin = origin.to_owned();
        let load = move || async move { origin::load(&origin, KEY).await };
        let value = guard.get_or_load(KEY, load).await;
        let version = value.as_ref().ok().and_then(|value| value.parse().ok());
        calls.push(Call { begun, ended: wall_ns(), served: value.is_ok(), version });
        sleep(Duration::from_micros(fastrand::u64(20_000..30_000))).await;
    }
}
