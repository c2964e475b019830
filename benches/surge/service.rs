//! A process of the fleet, with its clients. They send requests at fixed times, give up after two seconds, and try twice more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt as _};
use serde::{Deserialize, Serialize};
use stampede_guard::{OnOverload, Policy, PolicyBuilder, StampedeGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::origin::OriginClient;
use crate::support::processes::{Child, Role};
use crate::support::zipf::Zipf;

pub(crate) const ROLE: Role = ("service", service);

const KEYS: usize = 30_000;
const SKEW: f64 = 0.8;
const FRESH: Duration = Duration::from_secs(300);
/// How long a client waits for an answer before it gives up.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a client pauses after an error before it tries again.
const PAUSE: Duration = Duration::from_secs(1);
const ATTEMPTS: usize = 3;

/// How the loads of the fleet are limited.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Limit {
    None,
    Fixed(u32),
    Adaptive,
    /// Each process limits its own loads, by the gradient of their latencies (Netflix' Gradient2).
    Gradient,
}

/// What is wrong with the first process of the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Ailment {
    None,
    /// The loads of the first process fail at once.
    Fails,
    /// The network of the first process adds 400 ms to each load.
    Slow,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) redis: String,
    pub(crate) origin: u16,
    pub(crate) limit: Limit,
    pub(crate) ailment: Ailment,
    /// One load in a hundred takes 60 times as long.
    pub(crate) heavy: bool,
    /// How many requests per second this process receives before the event, and how many after it.
    pub(crate) rates: [f64; 2],
    /// At which second the event is, and, below, how many seconds the run has.
    pub(crate) event: u64,
    pub(crate) seconds: u64,
}

/// For each second of the run, how many requests began in it, and how many of these were answered in time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    pub(crate) seconds: Vec<(u64, u64)>,
    pub(crate) loads: u64,
    pub(crate) hits: u64,
}

fn policy(limit: Limit) -> PolicyBuilder {
    let policy = Policy::builder()
        .load_timeout(Duration::from_secs(10))
        // As in the fleet bench: some processes on a few cores stall for longer than the default budget.
        .coordination_budget(Duration::from_secs(1))
        .command_timeout(Duration::from_millis(500))
        .permit_timeout(PATIENCE, OnOverload::Shed);
    match limit {
        Limit::None | Limit::Gradient => policy,
        Limit::Fixed(loads) => policy.max_concurrent_loads(loads),
        Limit::Adaptive => policy.adaptive_loads(true),
    }
}

struct Service {
    guard: StampedeGuard,
    origin: OriginClient,
    config: Config,
    ailment: Ailment,
    gradient: Option<Gradient>,
    loads: AtomicU64,
}

fn service(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let client = redis::Client::open(config.redis.as_str()).expect("an address");
        let policy = policy(config.limit).fresh_for(FRESH).build().expect("valid");
        let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
        guard.connect().await.expect("connects");
        let ailment = if child.index() == 0 { config.ailment } else { Ailment::None };
        let gradient = (config.limit == Limit::Gradient).then(Gradient::default);
        let origin = OriginClient::connect(config.origin).await;
        let service = Service { guard, origin, config, ailment, gradient, loads: AtomicU64::new(0) };
        if child.index() == 0 {
            service.fill().await;
        }
        child.ready();
        child.wait_go().await;
        child.result(&traffic(Arc::new(service)).await);
    })
}

impl Service {
    /// Stores all values, so that they are of all ages.
    async fn fill(&self) {
        const AGES: usize = 30;
        let guards: Vec<_> = (1..=AGES)
            .map(|age| {
                let fresh_for = FRESH * age as u32 / AGES as u32;
                let policy = policy(self.config.limit).fresh_for(fresh_for).build().expect("valid");
                self.guard.with_policy(policy)
            })
            .collect();
        stream::iter(0..KEYS)
            .for_each_concurrent(64, |key| {
                let guard = &guards[key % AGES];
                async move { guard.insert(("product", key as u64), &value(key)).await.expect("stored") }
            })
            .await;
    }

    async fn load(&self, key: usize) -> Result<String, String> {
        let _admitted = match &self.gradient {
            Some(gradient) => Some(gradient.admit().await.ok_or("shed")?),
            None => None,
        };
        self.loads.fetch_add(1, Ordering::Relaxed);
        if self.ailment == Ailment::Slow {
            sleep(Duration::from_millis(400)).await;
        }
        let times = if self.config.heavy && fastrand::u32(0..100) == 0 { 60.0 } else { 1.0 };
        if self.ailment != Ailment::Fails && self.origin.load(times).await {
            return Ok(value(key));
        }
        Err("the origin has failed".to_owned())
    }

    /// Sends a client's request. Returns whether its first attempt was answered in time.
    async fn request(self: Arc<Self>, key: usize) -> bool {
        for attempt in 0..ATTEMPTS {
            let service = Arc::clone(&self);
            let call = self
                .guard
                .get_or_load(("product", key as u64), move || async move { service.load(key).await });
            match timeout(PATIENCE, call).await {
                Ok(Ok(_)) => return attempt == 0,
                Ok(Err(_)) => sleep(PAUSE).await,
                Err(_) => {}
            }
        }
        false
    }
}

fn value(key: usize) -> String {
    format!("{key:0>256}")
}

async fn traffic(service: Arc<Service>) -> Seen {
    let (zipf, mut random) = (Zipf::new(KEYS, SKEW), fastrand::Rng::new());
    let (mut requests, started) = (Vec::new(), Instant::now());
    let Config { event, seconds, rates, .. } = service.config;
    for (rate, until) in [(rates[0], event), (rates[1], seconds)] {
        let mut tick = interval(Duration::from_secs_f64(1.0 / rate));
        // All requests are sent, whatever the delay: a rate that yields to a slow service would hide its waits.
        tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
        while started.elapsed() < Duration::from_secs(until) {
            tick.tick().await;
            let second = started.elapsed().as_secs();
            let request = Arc::clone(&service).request(zipf.draw(&mut random));
            requests.push((second, tokio::spawn(request)));
        }
    }
    let mut seen = Seen { seconds: vec![(0, 0); seconds as usize + 1], ..Seen::default() };
    for (second, request) in requests {
        let all = &mut seen.seconds[second as usize];
        all.0 += 1;
        all.1 += u64::from(request.await.expect("no panic"));
    }
    (seen.loads, seen.hits) = (service.loads.load(Ordering::Relaxed), service.guard.stats().hits);
    seen
}

/// A limit of this process's loads. It follows the ratio of the long-term latency to that of the latest load, as Netflix' Gradient2 does:
/// `limit = limit * max(0.5, min(1, 1.5 * long / short)) + sqrt(limit)`, a fifth of which enters the limit at each load.
#[derive(Default)]
struct Gradient {
    state: Mutex<GradientState>,
    freed: Notify,
}

struct GradientState {
    limit: f64,
    running: u32,
    long: f64,
}

impl Default for GradientState {
    fn default() -> Self {
        Self { limit: 20.0, running: 0, long: 0.0 }
    }
}

impl Gradient {
    async fn admit(&self) -> Option<Admitted<'_>> {
        let wait = async {
            loop {
                let freed = self.freed.notified();
                {
                    let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                    if f64::from(state.running) < state.limit {
                        state.running += 1;
                        return;
                    }
                }
                freed.await;
            }
        };
        timeout(PATIENCE, wait).await.ok()?;
        Some(Admitted { gradient: self, began: Instant::now() })
    }
}

struct Admitted<'a> {
    gradient: &'a Gradient,
    began: Instant,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        let short = self.began.elapsed().as_secs_f64();
        let mut state = self.gradient.state.lock().unwrap_or_else(PoisonError::into_inner);
        let GradientState { limit, running, long } = &mut *state;
        *long = if *long == 0.0 { short } else { *long * 0.998 + short * 0.002 };
        let gradient = (1.5 * *long / short).clamp(0.5, 1.0);
        // If less than half of the limit is used, the latency says nothing about the limit, which stays as it is.
        if f64::from(*running) * 2.0 >= *limit {
            let new = *limit * gradient + limit.sqrt();
            *limit = (*limit * 0.8 + new * 0.2).clamp(1.0, 1_000.0);
        }
        *running -= 1;
        drop(state);
        self.gradient.freed.notify_one();
    }
}
