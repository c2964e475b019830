//! Values that are no longer fresh: they are served while they are loaded again, and when that load fails.
//!
//! On the in-memory store with a paused clock; its four guards stand for replicas.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use stampede_guard::{
    LoadError, MemoryStore, OnOverload, OnWaitTimeout, Policy, PolicyBuilder, StampedeGuard, Stats,
};
use tokio::time::{Instant, advance, sleep};

use crate::support::gate::{Counter, Gate};

const LOAD: Duration = Duration::from_millis(200);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Values are fresh for exactly 10 s.
fn policy() -> PolicyBuilder {
    Policy::builder().fresh_for(secs(10)).ttl_jitter(0.0)
}

/// Four processes, and an origin that counts its loads and that can be down.
struct World {
    guards: Vec<StampedeGuard>,
    loads: Counter,
    down: Arc<AtomicBool>,
    load_time: Duration,
}

impl World {
    fn new(policy: PolicyBuilder) -> Self {
        let policy = policy.build().expect("valid");
        let store = MemoryStore::new();
        let guard = || StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid");
        Self {
            guards: (0..4).map(|_| guard()).collect(),
            loads: Counter::default(),
            down: Arc::default(),
            load_time: LOAD,
        }
    }

    /// Sends one caller to one process. The value is the number of the load.
    async fn ask(&self, replica: usize) -> Result<usize, LoadError<String>> {
        let (loads, down, load_time) = (self.loads.clone(), Arc::clone(&self.down), self.load_time);
        let load = move || async move {
            let _running = loads.start();
            let number = loads.started();
            sleep(load_time).await;
            if down.load(Ordering::SeqCst) { Err("no route".to_owned()) } else { Ok(number) }
        };
        self.guards[replica].get_or_load("key", load).await
    }

    /// Sends ten callers to each process at one moment. Returns their values, and how long the last one waited.
    async fn ask_all(&self) -> (Vec<usize>, Duration) {
        let started = Instant::now();
        let answers = join_all((0..40).map(|caller| self.ask(caller % 4))).await;
        (answers.into_iter().map(|answer| answer.expect("served")).collect(), started.elapsed())
    }

    fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    fn stats(&self) -> Vec<Stats> {
        self.guards.iter().map(StampedeGuard::stats).collect()
    }

    /// Lets background work end. The paused clock moves only while everything waits.
    async fn settle(&self) {
        sleep(self.load_time * 2).await;
        assert!(self.stats().iter().all(|stats| stats.tasks == 0), "{:?}", self.stats());
    }
}

#[tokio::test(start_paused = true)]
async fn stale_while_revalidate_answers_all_callers_at_once_and_loads_once_in_the_fleet() {
    let world = World::new(policy().stale_while_revalidate(secs(5)));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    for period in 1..=5 {
        advance(secs(11)).await;
        let (values, waited) = world.ask_all().await;
        assert_eq!(
            (values, waited),
            (vec![period; 40], Duration::ZERO),
            "no caller waits, not even the first"
        );
        world.settle().await;
        assert_eq!(world.loads.started(), period + 1, "one load per period");
        let (values, waited) = world.ask_all().await;
        assert_eq!((values, waited), (vec![period + 1; 40], Duration::ZERO));
    }
    let total = |of: fn(&Stats) -> u64| world.stats().iter().map(of).sum::<u64>();
    assert_eq!((total(|stats| stats.stale), total(|stats| stats.early_refreshes)), (5 * 40, 0));
    assert!((5..=5 * 4).contains(&total(|stats| stats.refreshes)), "at most one per replica");
}

#[tokio::test(start_paused = true)]
async fn past_the_window_all_callers_wait_for_one_load() {
    let world = World::new(policy().stale_while_revalidate(secs(5)));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    advance(secs(16)).await;
    let (values, waited) = world.ask_all().await;
    assert_eq!(values, [2; 40]);
    assert!(waited >= LOAD, "{waited:?}");
    assert_eq!(world.loads.started(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_failing_refresh_keeps_the_stale_value_and_backs_off_in_the_whole_fleet() {
    let world = World::new(policy().stale_while_revalidate(secs(60)).back_off(secs(5)));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    world.set_down(true);
    advance(secs(11)).await;
    // The origin is down for 20 s: it is tried once at first, and once after each back-off.
    for second in 0..20 {
        let (values, waited) = world.ask_all().await;
        assert_eq!((values, waited), (vec![1; 40], Duration::ZERO), "second {second}");
        sleep(secs(1)).await;
    }
    assert_eq!(world.loads.started(), 1 + 4);
    world.set_down(false);
    sleep(secs(5)).await;
    world.ask_all().await;
    world.settle().await;
    assert_eq!(world.ask_all().await.0, [6; 40], "the origin's recovery is noticed");
}

#[tokio::test(start_paused = true)]
async fn stale_if_error_stands_in_for_a_failed_load_and_loads_once_per_back_off() {
    let world = World::new(policy().stale_if_error(secs(60)).back_off(secs(5)));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    world.set_down(true);
    advance(secs(11)).await;
    let (values, waited) = world.ask_all().await;
    assert_eq!(values, [1; 40], "every waiter of the failed load receives the older value");
    assert!((LOAD..LOAD * 2).contains(&waited), "{waited:?}");
    assert_eq!(world.loads.started(), 2);
    assert_eq!(world.stats().iter().map(|stats| stats.stand_ins).sum::<u64>(), 1);
    for _ in 0..4 {
        let (values, waited) = world.ask_all().await;
        assert_eq!((values, waited), (vec![1; 40], Duration::ZERO), "during the back-off no caller waits");
        sleep(secs(1)).await;
    }
    assert_eq!(world.loads.started(), 2);
    sleep(secs(2)).await;
    assert_eq!(world.ask_all().await.0, [1; 40]);
    assert_eq!(world.loads.started(), 3);
    world.set_down(false);
    sleep(secs(6)).await;
    assert_eq!(world.ask_all().await.0, [4; 40]);
}

#[tokio::test(start_paused = true)]
async fn beyond_stale_if_error_callers_get_the_failure() {
    let world = World::new(policy().stale_if_error(secs(5)).back_off(secs(60)));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    world.set_down(true);
    advance(secs(12)).await;
    assert_eq!(world.ask(1).await.ok(), Some(1), "a back-off longer than the window does not prolong it");
    advance(secs(4)).await;
    assert!(matches!(world.ask(2).await, Err(LoadError::Loader(_))));
}

/// The callers no longer wait for the load, but its value is stored for all.
#[tokio::test(start_paused = true)]
async fn after_the_soft_timeout_callers_get_the_stale_value_and_the_load_is_committed() {
    let mut world = World::new(policy().stale_if_error(secs(60)).soft_timeout(Duration::from_millis(50)));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    world.load_time = secs(3);
    advance(secs(11)).await;
    let (values, waited) = world.ask_all().await;
    assert_eq!((values, waited), (vec![1; 40], Duration::from_millis(50)));
    world.settle().await;
    let (values, waited) = world.ask_all().await;
    assert_eq!((values, waited), (vec![2; 40], Duration::ZERO));
    assert_eq!(world.loads.started(), 2);
    assert_eq!(world.stats().iter().map(|stats| stats.soft_timeouts).sum::<u64>(), 40);
}

/// Regression: callers that had been answered stayed in the flight with their loaders until the load ended: loaders piled up, and
/// `max_waiters` shed callers although none waited. One loader must stay as long as the flight has used none, because it could not load
/// without it.
#[tokio::test(start_paused = true)]
async fn a_caller_answered_at_the_soft_timeout_waits_no_longer() {
    for elsewhere in [false, true] {
        let policy = policy().stale_if_error(secs(3_600)).soft_timeout(Duration::from_millis(10));
        let policy = policy.max_waiters(100, OnOverload::Shed).build().expect("valid");
        let (store, gate, loaders) = (MemoryStore::new(), Gate::closed(), Arc::new(()));
        let guard = || StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid");
        let (guard, other) = (guard(), guard());
        guard.insert("key", &1).await.expect("stored");
        advance(secs(11)).await;
        let ask = |guard: &StampedeGuard, held: Option<Arc<()>>| {
            let (guard, gate) = (guard.clone(), gate.clone());
            let load = move || async move {
                gate.pass().await;
                assert!(held.is_some(), "scripted panic");
                Ok::<_, String>(2)
            };
            async move { guard.get_or_load("key", load).await }
        };
        if elsewhere {
            assert_eq!(ask(&other, None).await.ok(), Some(1));
        }
        // The calls come one after the other, so never more than one of them waits.
        for _ in 0..150 {
            assert_eq!(ask(&guard, Some(Arc::clone(&loaders))).await.ok(), Some(1), "{elsewhere}");
        }
        assert_eq!(
            Arc::strong_count(&loaders) - 1,
            1,
            "{elsewhere}: the loader that runs, or will if it must"
        );
        let stats = guard.stats();
        assert_eq!((stats.soft_timeouts, stats.overloaded), (150, 0), "{elsewhere}");
        gate.open();
        sleep(secs(1)).await;
        assert_eq!(guard.get("key").await.expect("asks"), Some(2), "{elsewhere}: it is loaded all the same");
        assert_eq!(Arc::strong_count(&loaders), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_older_value_stands_in_for_a_load_that_times_out() {
    let policy = policy().stale_if_error(secs(60)).load_timeout(secs(1));
    let mut world = World::new(policy);
    assert_eq!(world.ask(0).await.ok(), Some(1));
    world.load_time = secs(100);
    advance(secs(11)).await;
    let (values, waited) = world.ask_all().await;
    assert_eq!(values, [1; 40]);
    assert!(waited < secs(2), "{waited:?}");
}

/// Regression: a waiter for another process's load got the timeout, or its own load's failure, although there was an
/// older value.
#[tokio::test(start_paused = true)]
async fn an_older_value_stands_in_for_a_wait_that_times_out() {
    let ends_in = [(OnWaitTimeout::Fail, 2), (OnWaitTimeout::Load, 3)];
    for (then, loads) in ends_in {
        let policy = policy().stale_if_error(secs(60)).wait_timeout(secs(1), then);
        let mut world = World::new(policy);
        assert_eq!(world.ask(0).await.ok(), Some(1));
        world.set_down(true);
        world.load_time = secs(20);
        advance(secs(11)).await;
        let mut leads = pin!(world.ask(0));
        assert!(poll!(&mut leads).is_pending());
        sleep(secs(1)).await;
        let waits = join_all((0..10).map(|_| world.ask(1))).await;
        assert!(waits.iter().all(|value| matches!(value, Ok(1))), "{then:?}: {waits:?}");
        assert_eq!(world.loads.started(), loads, "{then:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_soft_timeout_without_an_older_value_does_nothing() {
    let world = World::new(policy().stale_if_error(secs(60)).soft_timeout(Duration::from_millis(50)));
    let (values, waited) = world.ask_all().await;
    assert_eq!(values, [1; 40]);
    assert!(waited >= LOAD, "{waited:?}");
}

/// XFetch alone would load e^(1/beta) times; with the lease, exactly one of the callers that draw an early refresh
/// loads.
#[tokio::test(start_paused = true)]
async fn early_refresh_loads_once_per_period_and_no_caller_waits() {
    let world = World::new(policy().early_refresh(1.0));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    let mut last = 1;
    for _ in 0..2000 {
        let (values, waited) = world.ask_all().await;
        assert_eq!(waited, Duration::ZERO, "after {} loads", world.loads.started());
        assert!(values.iter().all(|&value| value == values[0] && value >= last), "{values:?}");
        last = values[0];
        sleep(Duration::from_millis(50)).await;
    }
    // In 100 s, values that live for less than 10 s are each loaded again a little before their end.
    assert!((10..=13).contains(&world.loads.started()), "{}", world.loads.started());
    assert_eq!(world.loads.most_at_once(), 1);
}

#[tokio::test(start_paused = true)]
async fn refresh_ahead_loads_once_after_its_fraction_of_the_lifetime() {
    let world = World::new(policy().refresh_ahead(0.5));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    advance(Duration::from_millis(4_700)).await;
    world.ask_all().await;
    assert_eq!(world.loads.started(), 1);
    advance(Duration::from_millis(300)).await;
    assert_eq!(world.ask_all().await, (vec![1; 40], Duration::ZERO));
    world.settle().await;
    assert_eq!(world.loads.started(), 2);
    assert_eq!(world.ask_all().await.0, [2; 40]);
}

#[tokio::test(start_paused = true)]
async fn an_invalidated_value_is_not_served_stale() {
    let world = World::new(policy().stale_while_revalidate(secs(60)).stale_if_error(secs(60)));
    assert_eq!(world.ask(0).await.ok(), Some(1));
    advance(secs(11)).await;
    world.guards[1].invalidate("key").await.expect("confirmed");
    world.set_down(true);
    assert!(world.ask(2).await.is_err());
}

/// Without jitter, keys that were stored together would expire together, and from then on be loaded together.
#[tokio::test(start_paused = true)]
async fn jitter_spreads_the_ends_of_values_that_were_stored_together() {
    let policy = Policy::builder().fresh_for(secs(100)).build().expect("valid");
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build().expect("valid");
    for key in 0..200 {
        guard.insert(("key", key), &key).await.expect("stored");
    }
    let mut alive = Vec::new();
    for _ in 0..12 {
        let mut fresh = 0;
        for key in 0..200 {
            fresh += usize::from(guard.get::<u64>(("key", key)).await.expect("answered").is_some());
        }
        alive.push(fresh);
        // The clock stops one second before nine tenths of the lifetime: timers count milliseconds, and one value in five hundred expires
        // in the two milliseconds after that moment.
        advance(if alive.len() == 1 { secs(89) } else { secs(1) }).await;
    }
    assert_eq!((alive[0], alive[1]), (200, 200), "none ends in the first nine tenths");
    let ends: Vec<_> = alive[1..].windows(2).map(|pair| pair[0] - pair[1]).collect();
    // 20 are expected in each tenth of the spread. 60 would be nine standard deviations above that.
    assert!(ends.iter().all(|&ends| ends < 60), "{ends:?}");
}
