//! Calls for many keys under `max_concurrent_loads`: each call of a loader has a permit, and none waits for itself.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use stampede_guard::{MemoryStore, OnOverload, Policy, StampedeGuard};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::support::gate::{Counter, Gate};

/// A time after which everything has happened that can: the paused clock moves only when all tasks wait.
const SETTLED: Duration = Duration::from_millis(100);
/// How long each load takes.
const LOAD: Duration = Duration::from_secs(1);

type Values = HashMap<u64, u64>;

/// The callers of one guard, whose loads share one permit.
#[derive(Clone)]
struct Callers {
    guard: StampedeGuard,
    loads: Counter,
    calls: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl Callers {
    fn on(store: &MemoryStore) -> Self {
        let policy = Policy::builder().max_concurrent_loads(1).permit_timeout(secs(30), OnOverload::Shed);
        let policy = policy.build().expect("valid");
        let guard = StampedeGuard::builder(store.clone()).policy(policy).build().expect("valid");
        Self { guard, loads: Counter::default(), calls: Arc::default() }
    }

    fn one(&self, key: u64) -> JoinHandle<Option<u64>> {
        let (guard, loads) = (self.guard.clone(), self.loads.clone());
        tokio::spawn(async move {
            let load = move || async move {
                let _running = loads.start();
                sleep(LOAD).await;
                Ok::<_, String>(Some(key * 10))
            };
            guard.get_or_load(key, load).await.expect("loaded")
        })
    }

    fn many(&self, keys: impl IntoIterator<Item = u64> + Send + 'static) -> JoinHandle<Vec<Option<u64>>> {
        let Self { guard, loads, calls } = self.clone();
        tokio::spawn(async move {
            let load = move |keys: Vec<u64>| {
                calls.lock().expect("no panic").push(keys.clone());
                let loads = loads.clone();
                async move {
                    let _running = loads.start();
                    sleep(LOAD).await;
                    Ok::<_, String>(keys.into_iter().map(|key| (key, key * 10)).collect::<Values>())
                }
            };
            let answers = guard.get_or_load_many(keys, load).await;
            answers.into_iter().map(|answer| answer.expect("loaded")).collect()
        })
    }

    /// Starts a load that holds the only permit until the gate opens.
    async fn hold(&self) -> (Gate, impl Future<Output = ()>) {
        let gate = Gate::closed();
        let (guard, opened) = (self.guard.clone(), gate.clone());
        let held = tokio::spawn(async move {
            let load = move || async move {
                opened.pass().await;
                Ok::<_, String>(0_u64)
            };
            guard.get_or_load("the permit", load).await.expect("loaded");
        });
        sleep(SETTLED).await;
        (gate, held.map(|ended| ended.expect("no panic")))
    }
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// The flight of key 1 gets the permit, and runs the loader of the call for both keys. That call has the lease of key 2, and key 2 waits
/// for the same permit.
#[tokio::test(start_paused = true)]
async fn a_call_does_not_wait_for_its_key_that_waits_for_the_permit_of_that_call() {
    let callers = Callers::on(&MemoryStore::new());
    let (gate, held) = callers.hold().await;
    let single = callers.one(1);
    sleep(SETTLED).await;
    let many = callers.many([1, 2]);
    sleep(SETTLED).await;
    single.abort();
    sleep(SETTLED).await;

    let began = Instant::now();
    gate.open();
    held.await;
    assert_eq!(many.await.expect("no panic"), [Some(10), Some(20)]);
    assert!(began.elapsed() < LOAD * 3, "two calls, one after the other, took {:?}", began.elapsed());
    assert_eq!((callers.loads.started(), callers.loads.most_at_once()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_loader_of_another_caller_takes_a_permit_of_its_own() {
    let callers = Callers::on(&MemoryStore::new());
    let (gate, held) = callers.hold().await;
    let many = callers.many(1..=5);
    sleep(SETTLED).await;
    let singles: Vec<_> = (1..=5).map(|key| callers.one(key)).collect();
    sleep(SETTLED).await;
    many.abort();
    gate.open();
    held.await;
    for (single, key) in singles.into_iter().zip(1..) {
        assert_eq!(single.await.expect("no panic"), Some(key * 10));
    }
    assert_eq!((callers.loads.started(), callers.loads.most_at_once()), (5, 1));
}

#[tokio::test(start_paused = true)]
async fn a_later_call_takes_a_permit_of_its_own() {
    let store = MemoryStore::new();
    let (callers, gate) = (Callers::on(&store), Gate::closed());
    // Another process, without a bound, has the lease of key 2, and its load vanishes.
    let elsewhere = StampedeGuard::builder(store.clone()).build().expect("valid");
    let vanishes = gate.clone();
    let vanished = tokio::spawn(async move {
        let load = move || async move {
            vanishes.pass().await;
            panic!("planned");
        };
        elsewhere.get_or_load::<Option<u64>, String, _, _>(2_u64, load).await.expect_err("panicked");
    });
    sleep(SETTLED).await;
    let many = callers.many([1, 2]);
    callers.loads.reach(1).await;
    gate.open();
    vanished.await.expect("no panic of the caller");
    assert_eq!(many.await.expect("no panic"), [Some(10), Some(20)]);
    assert_eq!(*callers.calls.lock().expect("no panic"), [[1], [2]]);
    assert_eq!(callers.loads.most_at_once(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_loader_is_not_called_without_keys() {
    let callers = Callers::on(&MemoryStore::new());
    callers.guard.set_bypass(true);
    let many = callers.many([1, 2]);
    tokio::task::yield_now().await;
    // The call has begun, and has not called its loader yet.
    many.abort();
    sleep(SETTLED).await;
    let calls = callers.calls.lock().expect("no panic");
    assert!(calls.iter().all(|keys| !keys.is_empty()), "{calls:?}");
}
