//! The processes of the fleet. Each has one guard, and calls it once per round, when the bench says so.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard};

use crate::support::origin::{self, Origin};
use crate::support::os::wall_ns;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const ROLE: Role = ("calls", calls);

/// The event by which a process reports that its loader has started.
pub(crate) const LOADING: &str = "loading";

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    redis: String,
    origin: String,
    callers: usize,
    lease_ms: u64,
}

/// What one process saw in one round. Times are `wall_ns`, a clock that all processes of a machine share.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// For each caller, when it was answered, and whether with a value.
    pub(crate) answers: Vec<(u64, bool)>,
    /// When the load began and ended, if this process led.
    pub(crate) load: Option<(u64, u64)>,
}

/// One round of the whole fleet.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) seen: Vec<Seen>,
    pub(crate) loads: usize,
}

/// A fleet of guards on one server, all connected.
pub(crate) struct Guards {
    pub(crate) origin: Origin,
    pub(crate) fleet: Fleet,
    callers: usize,
}

impl Guards {
    pub(crate) async fn start(
        server: &RedisServer,
        processes: usize,
        callers: usize,
        lease: Duration,
    ) -> Self {
        let origin = Origin::start().await;
        let (redis, addr) = (server.url(), origin.addr());
        let config = Config { redis, origin: addr, callers, lease_ms: lease.as_millis() as u64 };
        let fleet = Fleet::spawn(processes, "calls", &config);
        fleet.wait_ready().await;
        Self { origin, fleet, callers }
    }

    /// Makes all callers of all processes request `key` at once.
    pub(crate) fn call(&self, key: &str) {
        for member in self.fleet.members() {
            member.send(key);
        }
    }

    /// Collects what the processes that are still alive saw in this round.
    pub(crate) async fn seen(&self, key: &str) -> Round {
        let seen: Vec<Seen> = self.fleet.results().await;
        assert!(seen.iter().all(|seen| seen.answers.len() == self.callers), "every caller was answered");
        Round { seen, loads: self.origin.loads(key) }
    }

    pub(crate) async fn round(&self, key: &str) -> Round {
        self.call(key);
        self.seen(key).await
    }
}

impl Round {
    pub(crate) fn answers(&self) -> impl Iterator<Item = (u64, bool)> + '_ {
        self.seen.iter().flat_map(|seen| seen.answers.iter().copied())
    }

    pub(crate) fn last_answer(&self) -> u64 {
        self.answers().map(|(at, _)| at).max().expect("there were calls")
    }

    /// When the load whose value was returned began and ended.
    pub(crate) fn load(&self) -> (u64, u64) {
        self.seen.iter().filter_map(|seen| seen.load).max().expect("there was a load")
    }

    /// How many milliseconds after the end of the load the last caller was answered.
    pub(crate) fn last_waiter(&self) -> f64 {
        ms_between(self.load().1, self.last_answer())
    }
}

pub(crate) fn ms_between(from: u64, to: u64) -> f64 {
    (to as f64 - from as f64) / 1e6
}

/// A process of the fleet.
fn calls(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        // The default policy with longer time-outs: two dozen processes on a few cores stall for longer than the
        // default, and these rows measure the work when no command times out.
        let policy = Policy::builder()
            .coordination_budget(Duration::from_secs(4))
            .command_timeout(Duration::from_millis(config.lease_ms / 4))
            .lease(Duration::from_millis(config.lease_ms))
            .build()
            .expect("valid");
        let client = redis::Client::open(config.redis.as_str()).expect("an address");
        let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
        guard.connect().await.expect("connects");
        child.ready();
        loop {
            let key = child.recv_line().await;
            let seen = round(&guard, &config, &key, child.report()).await;
            child.result(&seen);
        }
    })
}

async fn round(
    guard: &StampedeGuard,
    config: &Config,
    key: &str,
    report: crate::support::processes::Report,
) -> Seen {
    let loaded = Arc::new(Mutex::new(None));
    let calls = (0..config.callers).map(|_| {
        let (guard, loaded) = (guard.clone(), Arc::clone(&loaded));
        let (origin, key) = (config.origin.clone(), key.to_owned());
        async move {
            let load = {
                let key = key.clone();
                move || async move {
                    let started = wall_ns();
                    report.event(LOADING);
                    let value = origin::load(&origin, &key).await;
                    let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
                    *loaded = Some((started, wall_ns()));
                    value
                }
            };
            let answer = guard.get_or_load(key, load).await;
            (wall_ns(), answer.is_ok())
        }
    });
    let answers = join_all(calls).await;
    // Callers are answered a moment before the tasks of the wave end, so this waits.
    while guard.stats().tasks > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let load = *loaded.lock().unwrap_or_else(PoisonError::into_inner);
    Seen { answers, load }
}
