//! The processes of a deploy: each warms, or does not, and sends its requests at fixed times. The processes of the control run all the
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;
use crate::support::zipf::Zipf;

pub(crate) const ROLE: Role = ("service", service);

pub(crate) const KEYS: usize = 10_000;
const PROCESSES: usize = 2;
/// The time between two requests of a process, which thus sends 250 a second.
const EVERY: Duration = Duration::from_millis(4);
const QUERY: Duration = Duration::from_millis(20);
const AT_ONCE: usize = 100;
const MOST_LOADS: u32 = 4;

/// When the processes of a deploy warm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WarmUp {
    None,
    /// The process warms before its first request.
    Before,
    Beside,
}

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    redis: String,
    warm_up: WarmUp,
    window_ms: u64,
}

/// What one process, or all of a deploy, measured in one window.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// The times of all requests, in milliseconds.
    times: Vec<f64>,
    /// How many keys were loaded by requests.
    pub(crate) live_loads: u64,
    pub(crate) failed: u64,
    /// How many keys the warm-up loaded, and how many milliseconds it took.
    pub(crate) warm_loads: u64,
    pub(crate) warmed_in: f64,
}

impl Seen {
    pub(crate) fn p99(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        times[times.len() * 99 / 100]
    }

    fn add(mut self, other: Self) -> Self {
        self.times.extend(other.times);
        self.live_loads += other.live_loads;
        self.failed += other.failed;
        self.warm_loads += other.warm_loads;
        self.warmed_in = self.warmed_in.max(other.warmed_in);
        self
    }
}

/// The first window of a deploy, and the control's measurements in the same seconds.
pub(crate) struct Window {
    pub(crate) new: Seen,
    pub(crate) steady: Seen,
}

impl Window {
    pub(crate) fn ratio(&self) -> f64 {
        self.new.p99() / self.steady.p99()
    }
}

/// The control: a service with the same traffic, on a server that no other service uses, which has all values.
pub(crate) struct Steady {
    fleet: Fleet,
    window: Duration,
    _server: RedisServer,
}

impl Steady {
    /// Starts the control, and lets it work for two windows.
    pub(crate) async fn start(window: Duration) -> Self {
        let server = RedisServer::start();
        let fleet = start(&server, WarmUp::Before, window).await;
        let steady = Self { fleet, window, _server: server };
        for _ in 0..2 {
            steady.fleet.go();
            seen(&steady.fleet, window).await;
        }
        steady
    }

    /// Starts new processes on `server`. They and the control have traffic for one window, and then the new processes end.
    pub(crate) async fn beside(&self, server: &RedisServer, warm_up: WarmUp) -> Window {
        let fleet = start(server, warm_up, self.window).await;
        fleet.go();
        self.fleet.go();
        let new = seen(&fleet, self.window).await;
        Window { new, steady: seen(&self.fleet, Duration::ZERO).await }
    }
}

async fn start(server: &RedisServer, warm_up: WarmUp, window: Duration) -> Fleet {
    let config = Config { redis: server.url(), warm_up, window_ms: window.as_millis() as u64 };
    let fleet = Fleet::spawn(PROCESSES, "service", &config);
    fleet.wait_ready().await;
    fleet
}

/// What the processes measured in the window that begins at this moment.
async fn seen(fleet: &Fleet, window: Duration) -> Seen {
    // The harness waits for less than a long window, so the window has to end first.
    sleep(window).await;
    let seen: Vec<Seen> = fleet.results().await;
    seen.into_iter().fold(Seen::default(), Seen::add)
}

fn policy() -> Policy {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(600))
        .max_concurrent_loads(MOST_LOADS)
        // As in the fleet bench: some processes on a few cores stall for longer than the default budget.
        .coordination_budget(Duration::from_secs(1))
        .command_timeout(Duration::from_millis(500));
    policy.build().expect("valid")
}

fn key(rank: usize) -> (&'static str, u64) {
    ("product", rank as u64)
}

fn value() -> String {
    "v".repeat(1_024)
}

fn service(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let client = redis::Client::open(config.redis.as_str()).expect("an address");
        let guard = StampedeGuard::builder(client).policy(policy()).build().expect("valid");
        guard.connect().await.expect("connects");
        let (mut warm_loads, mut warmed_in) = (0, 0.0);
        if config.warm_up == WarmUp::Before {
            (warm_loads, warmed_in) = warm(guard.clone()).await;
        }
        child.ready();
        loop {
            child.wait_go().await;
            let beside = (config.warm_up == WarmUp::Beside).then(|| tokio::spawn(warm(guard.clone())));
            let mut seen = traffic(&guard, Duration::from_millis(config.window_ms)).await;
            if let Some(beside) = beside {
                (warm_loads, warmed_in) = beside.await.expect("no panic");
            }
            (seen.warm_loads, seen.warmed_in) = (warm_loads, warmed_in);
            child.result(&seen);
        }
    })
}

/// Returns how many keys were loaded, and how long it took.
async fn warm(guard: StampedeGuard) -> (u64, f64) {
    let began = Instant::now();
    let load = |missing: Vec<(&'static str, u64)>| async move {
        sleep(QUERY).await;
        Ok::<_, String>(missing.into_iter().map(|key| (key, value())).collect::<Vec<_>>())
    };
    let warmed = guard.warm((0..KEYS).map(key), AT_ONCE, load).await;
    assert_eq!((warmed.stored + warmed.found, warmed.failed), (KEYS as u64, 0));
    (warmed.stored, began.elapsed().as_secs_f64() * 1e3)
}

async fn traffic(guard: &StampedeGuard, window: Duration) -> Seen {
    let (zipf, mut random) = (Zipf::new(KEYS, 1.0), fastrand::Rng::new());
    let loads = Arc::new(AtomicU64::new(0));
    let mut tick = interval(EVERY);
    // All requests are sent, whatever the delay: a rate that yields to a slow service would hide its waits.
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut requests = Vec::new();
    for _ in 0..window.as_micros() / EVERY.as_micros() {
        tick.tick().await;
        let rank = zipf.draw(&mut random);
        let (guard, loads) = (guard.clone(), Arc::clone(&loads));
        requests.push(tokio::spawn(async move {
            let begun = Instant::now();
            let load = || async move {
                loads.fetch_add(1, Ordering::Relaxed);
                sleep(QUERY).await;
                Ok::<_, String>(value())
            };
            let answer = guard.get_or_load(key(rank), load).await;
            (begun.elapsed().as_secs_f64() * 1e3, answer.is_ok())
        }));
    }
    let mut seen = Seen::default();
    for request in requests {
        let (took, served) = request.await.expect("no panic");
        seen.times.push(took);
        seen.failed += u64::from(!served);
    }
    seen.live_loads = loads.load(Ordering::Relaxed);
    seen
}
