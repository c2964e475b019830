//! The adaptive limit of concurrent loads, and the order in which waiting loads get their permits.
//!
//! On the in-memory store with a paused clock; the guards stand for replicas.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use stampede_guard::{AdaptiveLoads, MemoryStore, OnOverload, Policy, PolicyBuilder, StampedeGuard};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::support::gate::{Counter, Gate};
use crate::support::overload::Origin;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn replicas(number: usize, policy: PolicyBuilder) -> (MemoryStore, Vec<StampedeGuard>) {
    let (store, policy) = (MemoryStore::new(), policy.build().expect("valid"));
    let guard = || StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid");
    (store.clone(), (0..number).map(|_| guard()).collect())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("not poisoned")
}

/// Lets a fleet lose its cache. Returns the share of requests that were answered within two seconds, and the most loads at once.
async fn surge(policy: PolicyBuilder, processes: usize) -> (f64, usize) {
    const RATE: u64 = 250;
    const KEYS: f64 = 7_500.0;
    const SPAN: Duration = Duration::from_secs(30);
    let policy = policy.fresh_for(secs(300)).load_timeout(secs(10));
    let (_, guards) = replicas(processes, policy);
    let (origin, answered) = (Origin::new(51.0), Arc::new(Mutex::new(0_u64)));
    let started = Instant::now();
    let mut requests = 0;
    while started.elapsed() < SPAN {
        sleep(ms(1000 / RATE)).await;
        requests += 1;
        // Zipf with an exponent of 0.8.
        let key = (KEYS * fastrand::f64().powi(5)) as u64;
        let (guards, origin, answered) = (guards.clone(), origin.clone(), Arc::clone(&answered));
        tokio::spawn(async move {
            for attempt in 0..3 {
                let (guard, origin) = (&guards[fastrand::usize(..guards.len())], origin.clone());
                let load = move || async move {
                    origin.load(1.0).await;
                    Ok::<_, std::io::Error>(key)
                };
                if let Ok(Ok(_)) = timeout(secs(2), guard.get_or_load(key, load)).await {
                    *lock(&answered) += u64::from(attempt == 0);
                    return;
                }
            }
        });
    }
    let answered = *lock(&answered);
    let most = origin.take_most_at_once();
    (answered as f64 / requests as f64, most)
}

#[tokio::test(start_paused = true)]
async fn a_fleet_that_lost_its_cache_finds_what_its_origin_can_do() {
    fastrand::seed(7);
    let shed = |policy: PolicyBuilder| policy.permit_timeout(secs(2), OnOverload::Shed);
    let (none, most) = surge(Policy::builder(), 4).await;
    eprintln!("no limit: {none:.3} of the requests, {most} loads at once");
    let (right, _) = surge(shed(Policy::builder().max_concurrent_loads(24)), 4).await;
    let (adaptive, most) = surge(shed(Policy::builder().adaptive_loads(true)), 4).await;
    eprintln!("24 loads: {right:.3}; adaptive: {adaptive:.3}, {most} loads at once");
    assert!(none < 0.3, "{none}");
    assert!(adaptive > right * 0.9 && most < 75, "{adaptive} of {right}, {most} loads at once");
}

/// A guard with one permit, which a first load holds until the gate opens, so that other loads wait for it in line.
struct Line {
    guard: StampedeGuard,
    gate: Gate,
    /// The keys in the order of their loads.
    loaded: Arc<Mutex<Vec<u32>>>,
}

impl Line {
    async fn begin(guard: StampedeGuard) -> Self {
        let line = Self { guard, gate: Gate::closed(), loaded: Arc::default() };
        drop(line.call(0));
        sleep(ms(100)).await;
        line
    }

    /// Calls for `key` in a task. The caller leaves if the task is aborted.
    fn call(&self, key: u32) -> JoinHandle<bool> {
        let (guard, gate, loaded) = (self.guard.clone(), self.gate.clone(), Arc::clone(&self.loaded));
        let load = move || async move {
            lock(&loaded).push(key);
            if key == 0 {
                gate.pass().await;
            }
            sleep(ms(100)).await;
            Ok::<_, std::io::Error>(key)
        };
        tokio::spawn(async move { guard.get_or_load(key, load).await.is_ok() })
    }

    /// Opens the gate, and returns the order in which the other keys were loaded.
    async fn order(&self) -> Vec<u32> {
        sleep(ms(100)).await;
        self.gate.open();
        sleep(secs(30)).await;
        lock(&self.loaded)[1..].to_vec()
    }
}

fn one_at_a_time() -> PolicyBuilder {
    Policy::builder().max_concurrent_loads(1).permit_timeout(secs(60), OnOverload::Shed)
}

fn replica(policy: PolicyBuilder) -> StampedeGuard {
    replicas(1, policy).1.remove(0)
}

#[tokio::test(start_paused = true)]
async fn the_load_with_most_callers_gets_the_next_permit_and_of_equals_the_newest() {
    let line = Line::begin(replica(one_at_a_time())).await;
    for key in [1, 2, 2, 3, 3, 3, 4, 5] {
        drop(line.call(key));
        sleep(ms(1)).await;
    }
    assert_eq!(line.order().await, [3, 2, 5, 4, 1]);
}

#[tokio::test(start_paused = true)]
async fn every_eighth_permit_goes_to_the_oldest_load() {
    let line = Line::begin(replica(one_at_a_time())).await;
    for key in 1..=20 {
        drop(line.call(key));
        sleep(ms(1)).await;
    }
    // The first permit of eight went to the load that held it, so the oldest load comes seventh here.
    assert_eq!(line.order().await[..8], [20, 19, 18, 17, 16, 15, 1, 14]);
}

#[tokio::test(start_paused = true)]
async fn a_load_that_all_callers_have_left_is_not_run_and_its_key_is_free() {
    let line = Line::begin(replica(one_at_a_time())).await;
    let (left, stays) = (line.call(1), line.call(2));
    sleep(ms(10)).await;
    left.abort();
    assert_eq!(line.order().await, [2]);
    assert!(stays.await.expect("joined"));
    let guard = &line.guard;
    let again = guard.get_or_load(1_u32, || async { Ok::<_, std::io::Error>(1) }).await;
    assert_eq!(again.ok(), Some(1));
}

#[tokio::test(start_paused = true)]
async fn refreshes_in_the_background_wait_behind_callers() {
    let policy = one_at_a_time().fresh_for(secs(10)).ttl_jitter(0.0).stale_while_revalidate(secs(600));
    let guard = replica(policy);
    for key in 1..=3_u32 {
        guard.get_or_load(key, move || async move { Ok::<_, std::io::Error>(key) }).await.expect("loaded");
    }
    sleep(secs(11)).await;
    let line = Line::begin(guard).await;
    // The first three callers receive the stale value, and each of them begins a refresh.
    for key in [1, 2, 3, 4, 5] {
        drop(line.call(key));
        sleep(ms(1)).await;
    }
    let order = line.order().await;
    assert_eq!(order[..2], [5, 4], "{order:?}");
    assert_eq!(order.len(), 5, "{order:?}");
}

/// When loads fail in most processes, the limit falls to its least, and no more loads run at once.
#[tokio::test(start_paused = true)]
async fn an_origin_that_fails_is_asked_less_and_a_fixed_cap_is_the_ceiling() {
    let limit = AdaptiveLoads::new().start(40).min(3);
    let policy = |cap: u32| {
        Policy::builder()
            .adaptive_loads(limit.clone())
            .max_concurrent_loads(cap)
            .permit_timeout(secs(20), OnOverload::Shed)
    };
    let fail = async |guards: &[StampedeGuard], loads: &Counter, calls: u64| {
        let calls = (0..calls).map(|call| {
            let (guard, loads) = (guards[call as usize % guards.len()].clone(), loads.clone());
            async move {
                let load = move || async move {
                    let _running = loads.start();
                    sleep(ms(100)).await;
                    Err::<(), _>("no route".to_owned())
                };
                guard.get_or_load(("call", call), load).await
            }
        });
        futures_util::future::join_all(calls).await
    };
    let (_, guards) = replicas(3, policy(10));
    let loads = Counter::default();
    fail(&guards, &loads, 400).await;
    assert_eq!(loads.most_at_once(), 10, "the fixed cap");
    let after = Counter::default();
    fail(&guards, &after, 100).await;
    assert_eq!(after.most_at_once(), 3, "the least");
}

/// As in a rolling update, processes with different bounds share the limit. The process that closes a window keeps the limit within its own
/// bounds. Processes of a version without the limit load without a permit.
#[tokio::test(start_paused = true)]
async fn processes_with_other_settings_share_a_limit_within_the_widest_bounds() {
    let (store, _) = replicas(0, Policy::builder());
    let guard = |policy: PolicyBuilder| {
        let policy = policy.permit_timeout(secs(60), OnOverload::Shed).build().expect("valid");
        StampedeGuard::builder(store.clone()).policy(policy).build().expect("valid")
    };
    let limit = |max| AdaptiveLoads::new().name("db").start(6).min(2).max(max);
    let narrow = guard(Policy::builder().adaptive_loads(limit(8)));
    let wide = guard(Policy::builder().name("new").adaptive_loads(limit(30)));
    let without = guard(Policy::builder());
    let load = async |guard: &StampedeGuard, loads: &Counter, calls: std::ops::Range<u64>| {
        let calls = calls.map(|call| {
            let loads = loads.clone();
            let load = move || async move {
                let _running = loads.start();
                sleep(ms(100)).await;
                Ok::<_, std::io::Error>(call)
            };
            guard.get_or_load(("call", call), load)
        });
        let answers = futures_util::future::join_all(calls).await;
        assert!(answers.iter().all(Result::is_ok));
    };
    let (limited, unlimited) = (Counter::default(), Counter::default());
    tokio::join!(
        load(&narrow, &limited, 0..400),
        load(&wide, &limited, 1_000..1_400),
        load(&without, &unlimited, 2_000..2_100),
    );
    assert!((7..=30).contains(&limited.most_at_once()), "{}", limited.most_at_once());
    assert_eq!(unlimited.most_at_once(), 100);
    // The process with the lower bound now runs alone, so it closes the next window, and applies its bound.
    load(&narrow, &Counter::default(), 3_000..3_100).await;
    let alone = Counter::default();
    load(&narrow, &alone, 4_000..4_200).await;
    assert_eq!(alone.most_at_once(), 8);
}

#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn without_the_store_a_process_runs_its_share() {
    let replica = stampede_guard::testing::ChaosStore::new(7).replica();
    let policy = Policy::builder().adaptive_loads(AdaptiveLoads::new().start(6)).build().expect("valid");
    let guard = StampedeGuard::builder(replica.clone()).policy(policy).build().expect("valid");
    replica.cut();
    let loads = Counter::default();
    let calls = (0..20).map(|call| {
        let (guard, loads) = (guard.clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                sleep(secs(1)).await;
                Ok::<_, std::io::Error>(call)
            };
            guard.get_or_load(("call", call), load).await
        }
    });
    let answers = futures_util::future::join_all(calls).await;
    assert_eq!(loads.most_at_once(), 6);
    let refused = answers.into_iter().filter_map(Result::err);
    let refused: Vec<_> = refused.map(|error| error.guard().map(stampede_guard::Error::kind)).collect();
    assert_eq!(refused, [Some(stampede_guard::ErrorKind::Overloaded); 14]);
}
