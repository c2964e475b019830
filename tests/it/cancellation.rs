//! Promise 4: a caller may leave at any point. The other callers lose nothing, and nothing is left over.

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{LoadError, MemoryStore, OnWaitTimeout, Policy, StampedeGuard};
use tokio::time::{Instant, timeout};

use crate::support::gate::{Counter, Gate};
use crate::support::probe::DropAt;

const LOAD: Duration = Duration::from_millis(300);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A loader that counts its runs and sleeps.
fn sleeper(
    loads: &Counter,
) -> impl FnOnce() -> std::pin::Pin<Box<dyn Future<Output = Result<u8, String>> + Send>> + Send + use<> {
    let loads = loads.clone();
    move || {
        Box::pin(async move {
            let _running = loads.start();
            tokio::time::sleep(LOAD).await;
            Ok(1)
        })
    }
}

async fn settle(guard: &StampedeGuard) {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(ms(1)).await;
    let stats = guard.stats();
    assert_eq!((stats.flights, stats.tasks), (0, 0), "{stats:?}");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_leader_costs_its_waiters_nothing() {
    let (guard, loads) = (StampedeGuard::in_memory(), Counter::default());
    let started = Instant::now();
    let leader = tokio::spawn({
        let (guard, load) = (guard.clone(), sleeper(&loads));
        async move { guard.get_or_load("key", load).await }
    });
    loads.reach(1).await;
    let followers: Vec<_> = (0..50)
        .map(|_| {
            tokio::spawn({
                let (guard, load) = (guard.clone(), sleeper(&loads));
                async move { guard.get_or_load("key", load).await }
            })
        })
        .collect();
    tokio::time::sleep(ms(71)).await;
    leader.abort();
    for value in join_all(followers).await {
        assert_eq!(value.expect("joined").expect("loaded"), 1);
    }
    assert_eq!(loads.started(), 1);
    assert!(started.elapsed() < LOAD + ms(20), "{:?}", started.elapsed());
    settle(&guard).await;
}

#[tokio::test(start_paused = true)]
async fn a_load_without_callers_is_finished_and_stored() {
    let (guard, loads) = (StampedeGuard::in_memory(), Counter::default());
    timeout(ms(50), guard.get_or_load("key", sleeper(&loads))).await.expect_err("cancelled");
    loads.idle().await;
    settle(&guard).await;
    assert_eq!(guard.get::<u8>("key").await.expect("store"), Some(1));
    assert_eq!((loads.started(), loads.ended()), (1, 1));
}

/// The drop matrix: one caller is dropped at each of its polls, alone and with other callers behind it.
#[tokio::test(start_paused = true)]
async fn a_caller_dropped_at_any_await_point_loses_nothing() {
    for followers in [0, 3] {
        for n in 0.. {
            let store = MemoryStore::new();
            let guards = [StampedeGuard::new(store.clone()), StampedeGuard::new(store)];
            let loads = Counter::default();
            let dropped = DropAt::new(n, guards[0].get_or_load("key", sleeper(&loads)));
            let others = join_all((0..followers).map(|follower| {
                let (guard, load) = (&guards[follower % 2], sleeper(&loads));
                guard.get_or_load("key", load)
            }));
            let (done, others) =
                timeout(LOAD * 3, futures_util::future::join(dropped, others)).await.expect("none hangs");
            assert!(others.iter().all(|value| matches!(value, Ok(1))), "dropped at poll {n}: {others:?}");
            loads.idle().await;
            for guard in &guards {
                settle(guard).await;
            }
            // The next call works, and does not have to wait until a lease that was left over has ended.
            let started = Instant::now();
            assert_eq!(guards[1].get_or_load("key", sleeper(&loads)).await.expect("loaded"), 1);
            assert!(started.elapsed() <= LOAD + ms(1), "dropped at poll {n}: waited {:?}", started.elapsed());
            assert!(loads.started() <= 2, "dropped at poll {n}: {} loads", loads.started());
            if followers > 0 {
                assert_eq!(loads.started(), 1, "dropped at poll {n}");
            }
            if done.is_some() {
                assert!(n > 1, "the matrix has more than one point");
                break;
            }
        }
    }
}

/// S2.10
#[tokio::test(start_paused = true)]
async fn waiting_longer_than_wait_timeout_loads_once_per_process() {
    let store = MemoryStore::new();
    let policy = Policy::builder().wait_timeout(ms(500), OnWaitTimeout::Load).build().expect("valid");
    let (slow, fast) = (StampedeGuard::new(store.clone()), StampedeGuard::new(store).with_policy(policy));
    let gate = Gate::closed();
    let leader = tokio::spawn({
        let gate = gate.clone();
        async move {
            let load = move || async move {
                gate.pass().await;
                Ok::<_, String>(1u8)
            };
            slow.get_or_load("key", load).await
        }
    });
    tokio::time::sleep(ms(1)).await;
    let loads = Counter::default();
    let started = Instant::now();
    let values = join_all((0..20).map(|_| fast.get_or_load("key", sleeper(&loads)))).await;
    assert!(values.iter().all(Result::is_ok));
    assert_eq!(loads.started(), 1, "one load for all of this process");
    assert!(started.elapsed() < ms(500) + LOAD + ms(30), "{:?}", started.elapsed());
    gate.open();
    assert_eq!(leader.await.expect("joined").expect("loaded"), 1);
    settle(&fast).await;
}

/// S2.10
#[tokio::test(start_paused = true)]
async fn waiting_longer_than_wait_timeout_fails_if_the_policy_says_so() {
    let store = MemoryStore::new();
    let policy = Policy::builder().wait_timeout(ms(500), OnWaitTimeout::Fail).build().expect("valid");
    let (slow, fast) = (StampedeGuard::new(store.clone()), StampedeGuard::new(store).with_policy(policy));
    let leader = tokio::spawn(async move {
        let load = || async {
            tokio::time::sleep(ms(5_000)).await;
            Ok::<_, String>(1u8)
        };
        slow.get_or_load("key", load).await
    });
    tokio::time::sleep(ms(1)).await;
    let loads = Counter::default();
    let started = Instant::now();
    for value in join_all((0..20).map(|_| fast.get_or_load("key", sleeper(&loads)))).await {
        let error = value.expect_err("waited too long");
        assert!(matches!(&error, LoadError::Guard(error) if error.is_timeout()), "{error:?}");
    }
    assert_eq!(loads.started(), 0);
    assert!(started.elapsed() < ms(520));
    assert_eq!(leader.await.expect("joined").expect("loaded"), 1);
}

/// Regression: a caller that joined another caller's flight was timed out together with that caller.
#[tokio::test(start_paused = true)]
async fn a_late_waiter_has_its_own_wait_timeout() {
    for (takes, first, second) in [(5_000, (None, 500), (None, 900)), (700, (None, 500), (Some(1), 700))] {
        let store = MemoryStore::new();
        let policy = Policy::builder().wait_timeout(ms(500), OnWaitTimeout::Fail).build().expect("valid");
        let (slow, fast) = (StampedeGuard::new(store.clone()), StampedeGuard::new(store).with_policy(policy));
        let leader = tokio::spawn(async move {
            let load = move || async move {
                tokio::time::sleep(ms(takes)).await;
                Ok::<_, String>(1u8)
            };
            slow.get_or_load("key", load).await
        });
        tokio::task::yield_now().await;
        let (loads, started) = (Counter::default(), Instant::now());
        let ask = |after| {
            let (fast, load) = (fast.clone(), sleeper(&loads));
            async move {
                tokio::time::sleep(ms(after)).await;
                (fast.get_or_load("key", load).await.ok(), started.elapsed())
            }
        };
        let answers = tokio::join!(ask(0), ask(400), ask(450));
        for ((value, at), (expected, after)) in [(answers.0, first), (answers.1, second)] {
            assert_eq!(value, expected);
            assert!((ms(after)..ms(after + 20)).contains(&at), "{at:?}, not {after} ms");
        }
        assert_eq!(answers.2.0, second.0);
        assert_eq!(leader.await.expect("joined").expect("loaded"), 1);
        assert_eq!(loads.started(), 0);
        settle(&fast).await;
    }
}

/// A flight whose waiters have all left sends no further acquire.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_flight_without_waiters_stops_asking_for_the_lease() {
    let chaos = stampede_guard::testing::ChaosStore::new(1);
    let policy = Policy::builder().wait_timeout(ms(5), OnWaitTimeout::Load).build().expect("valid");
    let slow = StampedeGuard::new(chaos.clone());
    let hasty = StampedeGuard::new(chaos.clone()).with_policy(policy);
    let load = || async {
        tokio::time::sleep(ms(10_000)).await;
        Ok::<_, String>(1u8)
    };
    let calls = [(&slow, 0), (&hasty, 1), (&hasty, 4)].map(|(guard, after)| {
        let guard = guard.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ms(after)).await;
            guard.get_or_load("key", load).await
        })
    });
    tokio::time::sleep(ms(100)).await;
    let before = chaos.commands();
    tokio::time::sleep(ms(4_000)).await;
    let sent = chaos.commands() - before;
    assert!(sent < 20, "{sent} commands, and the leader renews twice a second at the most");
    for call in calls {
        assert_eq!(call.await.expect("joined").expect("loaded"), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn load_timeout_ends_a_hanging_load_for_all() {
    let store = MemoryStore::new();
    let policy = Policy::builder().load_timeout(ms(3_000)).build().expect("valid");
    let guards: Vec<_> =
        (0..2).map(|_| StampedeGuard::new(store.clone()).with_policy(policy.clone())).collect();
    let loads = Counter::default();
    let started = Instant::now();
    let calls = (0..10).map(|caller| {
        let (guard, loads) = (&guards[caller % 2], loads.clone());
        guard.get_or_load("key", move || async move {
            let _running = loads.start();
            std::future::pending::<Result<u8, String>>().await
        })
    });
    for value in join_all(calls).await {
        assert!(matches!(value.expect_err("timed out"), LoadError::Guard(error) if error.is_timeout()));
    }
    assert_eq!(loads.started(), 1);
    loads.idle().await;
    assert!(started.elapsed() < ms(3_050), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_loads_and_then_hands_them_over() {
    let store = MemoryStore::new();
    let (leaver, stayer) = (StampedeGuard::new(store.clone()), StampedeGuard::new(store));
    let loads = Counter::default();
    let quick = tokio::spawn({
        let (guard, load) = (leaver.clone(), sleeper(&loads));
        async move { guard.get_or_load("quick", load).await }
    });
    let endless = tokio::spawn({
        let guard = leaver.clone();
        async move {
            guard.get_or_load("slow", || async { std::future::pending::<Result<u8, String>>().await }).await
        }
    });
    loads.reach(1).await;
    tokio::time::sleep(ms(1)).await;
    let waiter = tokio::spawn({
        let (guard, load) = (stayer.clone(), sleeper(&loads));
        async move { guard.get_or_load("slow", load).await }
    });
    tokio::time::sleep(ms(1)).await;

    let started = Instant::now();
    let shutdown = leaver.shutdown(ms(1_000)).await;
    assert_eq!((shutdown.finished, shutdown.handed_over), (false, 1));
    assert_eq!(quick.await.expect("joined").expect("loaded"), 1);
    assert_eq!(waiter.await.expect("joined").expect("taken over"), 1);
    assert!(started.elapsed() < ms(1_000) + LOAD + ms(50), "the waiter did not wait for a lease to expire");
    endless.abort();

    let before = leaver.stats();
    assert_eq!(leaver.get_or_load("quick", sleeper(&loads)).await.expect("loaded"), 1);
    assert_eq!(
        leaver.stats().loads,
        before.loads + 1,
        "after a shutdown the process loads without the store"
    );
}

#[tokio::test(start_paused = true)]
async fn shutdown_of_an_idle_guard_is_immediate() {
    let guard = StampedeGuard::in_memory();
    let started = Instant::now();
    assert!(guard.shutdown(ms(60_000)).await.finished);
    assert!(guard.shutdown(Duration::MAX).await.finished);
    assert_eq!(started.elapsed(), Duration::ZERO);
}
