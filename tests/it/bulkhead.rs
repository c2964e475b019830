//! The cap on concurrent loads of different keys: a fair queue in front of the origin, for the whole fleet.
//!
//! On the in-memory store with a paused clock. Its four guards stand for four processes.

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{
    ErrorKind, LoadError, MemoryStore, OnOverload, Policy, PolicyBuilder, StampedeGuard, Stats,
};
use tokio::time::{Instant, advance, sleep};

use crate::support::gate::{Counter, Gate};

const LOAD: Duration = Duration::from_secs(1);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn capped(loads: u32, timeout: Duration, then: OnOverload) -> PolicyBuilder {
    Policy::builder().max_concurrent_loads(loads).permit_timeout(timeout, then)
}

fn replicas(policy: PolicyBuilder) -> Vec<StampedeGuard> {
    let (store, policy) = (MemoryStore::new(), policy.build().expect("valid"));
    let guard = || StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid");
    (0..4).map(|_| guard()).collect()
}

fn total(guards: &[StampedeGuard], of: impl Fn(Stats) -> u64) -> u64 {
    guards.iter().map(|guard| of(guard.stats())).sum()
}

async fn load(guard: &StampedeGuard, key: usize, loads: &Counter) -> Result<usize, LoadError<String>> {
    let loads = loads.clone();
    let load = move || async move {
        let _running = loads.start();
        sleep(LOAD).await;
        Ok(key)
    };
    guard.get_or_load(("key", key), load).await
}

#[tokio::test(start_paused = true)]
async fn the_fleet_runs_no_more_loads_than_the_cap_and_all_get_their_turn() {
    let (guards, loads) = (replicas(capped(3, secs(60), OnOverload::Shed)), Counter::default());
    // Three callers request each of thirty keys: each key is loaded once, and three keys at a time.
    let calls = (0..90).map(|call| load(&guards[call % 4], call % 30, &loads));
    let started = Instant::now();
    for (call, value) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(value.expect("loaded"), call % 30);
    }
    assert_eq!((loads.started(), loads.most_at_once()), (30, 3));
    let took = started.elapsed();
    assert!((LOAD * 10..LOAD * 11).contains(&took), "the cap is used to the full: {took:?}");
}

/// The lease is renewed while the load waits for a permit, so no other caller loads the key meanwhile.
#[tokio::test(start_paused = true)]
async fn a_key_that_waits_for_longer_than_its_lease_is_still_loaded_once() {
    let (guards, loads) = (replicas(capped(1, secs(60), OnOverload::Shed)), Counter::default());
    let calls = (0..80).map(|call| load(&guards[call % 4], call % 10, &loads));
    assert!(join_all(calls).await.iter().all(Result::is_ok));
    assert_eq!((loads.started(), loads.most_at_once()), (10, 1));
    assert_eq!(total(&guards, |stats| stats.leases_lost), 0);
}

#[tokio::test(start_paused = true)]
async fn a_load_without_a_permit_in_time_is_shed_with_all_its_waiters() {
    let (guards, loads) = (replicas(capped(1, secs(5), OnOverload::Shed)), Counter::default());
    let gate = Gate::closed();
    let slow = tokio::spawn({
        let (guard, gate) = (guards[0].clone(), gate.clone());
        let load = move || async move {
            gate.pass().await;
            Ok::<_, String>(())
        };
        async move { guard.get_or_load("slow", load).await }
    });
    sleep(secs(1)).await;
    let started = Instant::now();
    let shed = join_all((0..8).map(|call| load(&guards[call % 4], 1, &loads))).await;
    for answer in shed {
        let error = answer.expect_err("shed");
        assert_eq!(error.guard().map(stampede_guard::Error::kind), Some(ErrorKind::Overloaded), "{error}");
    }
    let took = started.elapsed();
    assert!((secs(5)..secs(6)).contains(&took), "{took:?}");
    assert_eq!((loads.started(), total(&guards, |stats| stats.overloaded)), (0, 1));
    gate.open();
    slow.await.expect("joined").expect("loaded");
    assert_eq!(load(&guards[2], 1, &loads).await.ok(), Some(1), "and the next one has its turn");
}

#[tokio::test(start_paused = true)]
async fn a_stale_value_stands_in_for_a_load_that_is_shed() {
    let policy = capped(1, secs(5), OnOverload::Shed).fresh_for(secs(10)).stale_if_error(secs(600));
    let (guards, loads) = (replicas(policy), Counter::default());
    assert_eq!(load(&guards[0], 1, &loads).await.ok(), Some(1));
    advance(secs(11)).await;
    let slow = tokio::spawn({
        let guard = guards[0].clone();
        async move {
            let load = || async { std::future::pending::<Result<(), String>>().await };
            guard.get_or_load("slow", load).await
        }
    });
    sleep(secs(1)).await;
    assert_eq!(load(&guards[1], 1, &loads).await.ok(), Some(1));
    assert_eq!(loads.started(), 1);
    slow.abort();
}

#[tokio::test(start_paused = true)]
async fn a_load_without_a_permit_in_time_goes_on_if_the_policy_says_so() {
    let (guards, loads) = (replicas(capped(1, Duration::ZERO, OnOverload::LoadAnyway)), Counter::default());
    let calls = (0..8).map(|call| load(&guards[call % 4], call, &loads));
    assert!(join_all(calls).await.iter().all(Result::is_ok));
    assert_eq!((loads.started(), loads.most_at_once()), (8, 8));
    assert_eq!(total(&guards, |stats| stats.overloaded), 7);
}

/// A load that fails, panics or times out gives its permit back.
#[tokio::test(start_paused = true)]
async fn every_way_a_load_can_end_frees_its_permit() {
    let guards = replicas(capped(1, secs(60), OnOverload::Shed).load_timeout(secs(3)));
    for (round, guard) in guards.iter().enumerate() {
        let fails = guard.get_or_load(("fails", round), || async { Err::<u8, _>("no route".to_owned()) });
        let panics = guard.get_or_load(("panics", round), || async {
            assert_eq!(1, 2, "a panic");
            Ok::<u8, String>(1)
        });
        let hangs = guard
            .get_or_load(("hangs", round), || async { std::future::pending::<Result<u8, String>>().await });
        let (fails, panics, hangs) = tokio::join!(fails, panics, hangs);
        assert!(fails.is_err() && panics.is_err() && hangs.is_err());
    }
    let loads = Counter::default();
    assert_eq!(load(&guards[3], 7, &loads).await.ok(), Some(7));
}

/// Four pages load at once; the load of each page loads another key with the guards `inner`.
async fn nested(
    outer: &[StampedeGuard],
    inner: &[StampedeGuard],
    loads: &Counter,
) -> Vec<Result<usize, String>> {
    let pages = (0..4).map(|page| {
        let (inner, loads) = (inner[page % inner.len()].clone(), loads.clone());
        let load = move || async move { load(&inner, page, &loads).await.map_err(|error| error.to_string()) };
        let guard = &outer[page % outer.len()];
        async move { guard.get_or_load(("page", page), load).await.map_err(|error| error.to_string()) }
    });
    join_all(pages).await
}

/// Regression: the inner load queued for the permit that its outer load held until both were shed, and so were all
/// later loads.
#[tokio::test(start_paused = true)]
async fn a_load_inside_a_load_needs_no_second_permit() {
    let (guards, loads) = (replicas(capped(1, secs(5), OnOverload::Shed)), Counter::default());
    let started = Instant::now();
    assert_eq!(nested(&guards, &guards, &loads).await, [Ok(0), Ok(1), Ok(2), Ok(3)]);
    assert_eq!((loads.started(), loads.most_at_once()), (4, 1));
    assert!(started.elapsed() < secs(5), "{:?}", started.elapsed());
}

/// The outer load holds no permit of the inner load's cap.
#[tokio::test(start_paused = true)]
async fn a_load_inside_an_uncapped_load_waits_for_its_own_permit() {
    for outer in [Policy::builder(), capped(4, secs(5), OnOverload::Shed)] {
        let (inner, loads) = (replicas(capped(1, secs(5), OnOverload::Shed)), Counter::default());
        let policy = outer.build().expect("valid");
        let outer: Vec<_> = inner.iter().map(|guard| guard.with_policy(policy.clone())).collect();
        assert_eq!(nested(&outer, &inner, &loads).await, [Ok(0), Ok(1), Ok(2), Ok(3)]);
        assert_eq!((loads.started(), loads.most_at_once()), (4, 1));
    }
}

/// Loads four pages at once. Each page's load reloads a part that has an older value. Returns the counter of the
/// parts' loads, and how long the pages took.
async fn pages_of_stale_parts(policy: PolicyBuilder) -> (Counter, Duration) {
    let policy = policy.fresh_for(secs(1)).ttl_jitter(0.0).stale_if_error(secs(600));
    let guard = StampedeGuard::in_memory().with_policy(policy.build().expect("valid"));
    for part in 0..4 {
        guard
            .get_or_load(("part", part), move || async move { Ok::<_, String>(part) })
            .await
            .expect("loaded");
    }
    sleep(secs(2)).await;
    let (loads, began) = (Counter::default(), Instant::now());
    let pages = (0..4).map(|page| {
        let (inner, loads) = (guard.clone(), loads.clone());
        let part = move || async move {
            let _running = loads.start();
            sleep(LOAD).await;
            Ok::<_, String>(page)
        };
        let load = move || async move {
            inner.get_or_load(("part", page), part).await.map_err(|error| error.to_string())
        };
        guard.get_or_load(("page", page), load)
    });
    for page in join_all(pages).await {
        page.expect("an older part will do");
    }
    let took = began.elapsed();
    while guard.stats().tasks > 0 {
        sleep(LOAD / 100).await;
    }
    (loads, took)
}

/// A page that is served the older part ends before the load of the part does. The permit of the page then goes to another load.
#[tokio::test(start_paused = true)]
async fn a_load_that_outlives_its_outer_load_takes_its_own_permit() {
    let policy = capped(1, secs(20), OnOverload::Shed).soft_timeout(LOAD / 10);
    let (loads, _) = pages_of_stale_parts(policy).await;
    assert_eq!((loads.started(), loads.most_at_once()), (4, 1));
}

/// A page that waits for the reload of its part lends it its own permit.
#[tokio::test(start_paused = true)]
async fn a_reload_inside_a_load_needs_no_second_permit() {
    let (loads, took) = pages_of_stale_parts(capped(1, secs(20), OnOverload::Shed)).await;
    assert_eq!((loads.started(), loads.most_at_once()), (4, 1));
    assert!(took < LOAD * 5, "{took:?}");
}

/// Regression: the inner load was refused at once, because its outer load held the only permit of `max_fail_open_loads`.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_load_inside_a_fail_open_load_needs_no_second_permit() {
    let (chaos, loads) = (stampede_guard::testing::ChaosStore::new(1), Counter::default());
    let replica = chaos.replica();
    let policy = Policy::builder().max_fail_open_loads(1).build().expect("valid");
    let guard = [StampedeGuard::builder(replica.clone()).policy(policy).build().expect("valid")];
    replica.cut();
    let answers = nested(&guard, &guard, &loads).await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1, "{answers:?}");
    assert_eq!((loads.started(), loads.most_at_once()), (1, 1));
}

/// Regression: loads beyond `max_flights` ran without a permit.
#[tokio::test(start_paused = true)]
async fn keys_beyond_max_flights_do_not_go_past_the_cap() {
    for (then, most) in [(OnOverload::Shed, 1), (OnOverload::LoadAnyway, 8)] {
        let (policy, loads) = (capped(1, secs(60), then).build().expect("valid"), Counter::default());
        let builder = StampedeGuard::builder(MemoryStore::new()).policy(policy).max_flights(3);
        let guard = builder.build().expect("valid");
        let answers = join_all((0..10).map(|key| load(&guard, key, &loads))).await;
        assert_eq!(loads.most_at_once(), most, "{then:?}");
        let shed = answers.iter().filter_map(|answer| answer.as_ref().err()?.guard());
        let shed: Vec<_> = shed.map(stampede_guard::Error::kind).collect();
        assert_eq!(shed, vec![ErrorKind::Overloaded; if most == 1 { 7 } else { 0 }], "{then:?}");
        assert_eq!(guard.stats().overloaded, 7, "{then:?}");
    }
}

/// Sends many callers of one key at once. Returns how many of them loaded, and all results.
async fn load_many(callers: usize, guard: &StampedeGuard) -> (usize, Vec<Result<usize, LoadError<String>>>) {
    let (loads, gate) = (Counter::default(), Gate::closed());
    let calls = (0..callers).map(|_| {
        let (loads, gate) = (loads.clone(), gate.clone());
        guard.get_or_load("k", move || async move {
            let _running = loads.start();
            gate.pass().await;
            Ok::<_, String>(loads.started())
        })
    });
    let open = async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        gate.open();
    };
    let (answers, ()) = tokio::join!(join_all(calls), open);
    (loads.started(), answers)
}

fn with_ten_waiters(then: OnOverload) -> StampedeGuard {
    let policy = Policy::builder().max_waiters(10, then).fresh_for(secs(10)).stale_if_error(secs(600));
    replicas(policy).remove(0)
}

#[tokio::test(start_paused = true)]
async fn beyond_max_waiters_callers_are_shed_or_load_by_themselves() {
    let guard = with_ten_waiters(OnOverload::Shed);
    let (loads, answers) = load_many(30, &guard).await;
    let shed = answers.iter().filter(
        |answer| matches!(answer, Err(LoadError::Guard(error)) if error.kind() == ErrorKind::Overloaded),
    );
    assert_eq!((loads, shed.count()), (1, 20));
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 10);
    assert_eq!(guard.stats().overloaded, 20);
    let (loads, answers) = load_many(30, &with_ten_waiters(OnOverload::LoadAnyway)).await;
    assert_eq!((loads, answers.iter().filter(|answer| answer.is_ok()).count()), (21, 30));
}

#[tokio::test(start_paused = true)]
async fn beyond_max_waiters_callers_receive_a_stale_value() {
    let guard = with_ten_waiters(OnOverload::Shed);
    guard.insert("k", &77_usize).await.expect("stored");
    advance(secs(60)).await;
    let (loads, answers) = load_many(30, &guard).await;
    let values: Vec<_> = answers.into_iter().map(|answer| answer.expect("not shed")).collect();
    assert_eq!((loads, values.iter().filter(|value| **value == 77).count()), (1, 20));
}

#[test]
fn max_waiters_of_zero_is_refused_by_name() {
    let refused = Policy::builder().max_waiters(0, OnOverload::Shed).build().expect_err("none could wait");
    assert!(refused.to_string().contains("max_waiters"), "{refused}");
}

/// Regression: the error named `wait_timeout`, which was derived from `permit_timeout` and never set by the caller.
#[test]
fn an_endless_permit_timeout_is_refused_by_name() {
    let refused = capped(1, Duration::MAX, OnOverload::Shed).build().expect_err("too long");
    assert!(refused.to_string().contains("permit_timeout"), "{refused}");
}

/// Regression: when the task of a load vanished, its permit was released only once the store had answered.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_vanished_load_frees_its_permit_before_the_store_answers() {
    use stampede_guard::testing::{ChaosStore, Fault};

    // A single caller's lease is handed over; six callers are more than there may be takeovers.
    for callers in [1, 6] {
        let (chaos, gate) = (ChaosStore::new(1), Gate::closed());
        let policy = capped(1, secs(50), OnOverload::Shed).lease(secs(60)).build().expect("valid");
        let guard = StampedeGuard::builder(chaos.replica()).policy(policy).build().expect("valid");
        let ask = |key: &'static str, vanishes: bool| {
            let (guard, gate) = (guard.clone(), gate.clone());
            let load = move || async move {
                gate.pass().await;
                assert!(!vanishes, "scripted panic");
                Ok::<_, String>(1)
            };
            tokio::spawn(async move { guard.get_or_load(key, load).await })
        };
        let vanish: Vec<_> = (0..callers).map(|_| ask("a", true)).collect();
        sleep(LOAD).await;
        let waits = ask("b", false);
        sleep(LOAD).await;
        for _ in 0..2 {
            chaos.once(Fault::BlackHole);
        }
        let began = Instant::now();
        gate.open();
        assert_eq!(waits.await.expect("no panic").ok(), Some(1), "{callers}");
        assert!(began.elapsed() < secs(10), "{callers}: {:?}", began.elapsed());
        assert!(join_all(vanish).await.into_iter().all(|answer| answer.expect("no panic").is_err()));
    }
}
