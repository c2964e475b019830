//! Concurrent look-ups of one key: their commands, and the answer that each caller gets. On the in-memory store behind
//! a wire of one millisecond, with a paused clock; `redis::wire` counts the same on a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin};
use stampede_guard::{OnStoreDown, Policy, StampedeGuard};
use tokio::time::Instant;

const CALLERS: usize = 100;

fn chaos() -> ChaosStore {
    let chaos = ChaosStore::new(1);
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    chaos
}

/// Calls `get_or_load` on all guards at once, each with its own loader. Returns the values.
async fn ask(guards: &[&StampedeGuard], origin: &Origin) -> Vec<u64> {
    let calls = guards.iter().map(|guard| {
        let (guard, origin) = ((*guard).clone(), origin.clone());
        tokio::spawn(async move {
            guard.get_or_load("k", move || async move { origin.load("k").await }).await.expect("an answer")
        })
    });
    join_all(calls).await.into_iter().map(|call| call.expect("joined")).collect()
}

#[tokio::test(start_paused = true)]
async fn callers_at_one_moment_share_one_read_behind_the_first_callers_own() {
    let (chaos, origin) = (chaos(), Origin::new());
    for tags in [vec![], vec!["t"]] {
        let policy =
            Policy::builder().tags(tags).on_store_down(OnStoreDown::FailClosed).build().expect("valid");
        let guard = StampedeGuard::builder(chaos.clone()).policy(policy).build().expect("valid");
        guard.insert("k", &7_u64).await.expect("stored");
        let before = chaos.commands();
        assert_eq!(ask(&[&guard; CALLERS], &origin).await, [7; CALLERS]);
        assert_eq!(chaos.commands() - before, 2);
        let stats = guard.stats();
        assert_eq!((stats.hits, stats.store_errors), (CALLERS as u64, 0));
    }
    assert_eq!(origin.loads("k"), 0);
}

/// A read that several callers share must not be older than any of these calls, and no caller may wait for ever.
#[tokio::test(start_paused = true)]
async fn repeated_callers_receive_no_value_older_than_they_know() {
    const CALLS: u64 = 300;
    let chaos = chaos();
    let guard = StampedeGuard::new(chaos.clone());
    guard.insert("k", &0_u64).await.expect("stored");
    let known = Arc::<AtomicU64>::default();
    let before = chaos.commands();
    let callers = (0..CALLERS).map(|_| {
        let (guard, known) = (guard.clone(), Arc::clone(&known));
        tokio::spawn(async move {
            for _ in 0..CALLS {
                let at_least = known.load(Ordering::SeqCst);
                let found = guard.get::<u64>("k").await.expect("answered").expect("stored");
                assert!(found >= at_least, "{found} where {at_least} was known");
            }
        })
    });
    let callers: Vec<_> = callers.collect();
    for version in 1..=20 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        guard.insert("k", &version).await.expect("stored");
        known.store(version, Ordering::SeqCst);
    }
    let callers = tokio::time::timeout(Duration::from_secs(60), join_all(callers));
    callers.await.expect("all are notified").into_iter().for_each(|caller| caller.expect("joined"));
    let reads = chaos.commands() - before - 20;
    assert!((CALLS..CALLS * 2).contains(&reads), "{reads} for {} calls", CALLS * CALLERS as u64);
}

/// All callers that a read would be for have left, or all but one.
#[tokio::test(start_paused = true)]
async fn no_read_is_made_for_callers_that_left() {
    let (chaos, origin) = (chaos(), Origin::new());
    let guard = StampedeGuard::new(chaos.clone());
    guard.insert("k", &7_u64).await.expect("stored");
    for staying in [0, 1] {
        let before = chaos.commands();
        let first = tokio::spawn({
            let (guard, origin) = (guard.clone(), origin.clone());
            async move { ask(&[&guard], &origin).await }
        });
        while chaos.commands() == before {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        let look = || {
            let guard = guard.clone();
            Box::pin(async move { guard.get::<u64>("k").await })
        };
        let mut callers: Vec<_> = (0..CALLERS).map(|_| look()).collect();
        for ask in &mut callers {
            assert!(poll!(ask).is_pending());
        }
        callers.drain(staying..);
        // The callers are now polled by another task than the one that polled them first.
        for answer in tokio::spawn(join_all(callers)).await.expect("joined") {
            assert_eq!(answer.expect("answered"), Some(7));
        }
        assert_eq!(first.await.expect("joined"), [7]);
        // A reader for the queue has started by now.
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(chaos.commands() - before, 1 + staying as u64);
    }
}

/// The first caller's read finds nothing and starts a flight, which the queued callers join.
#[tokio::test(start_paused = true)]
async fn callers_at_one_moment_that_find_nothing_read_once() {
    let (chaos, origin) = (chaos(), Origin::new());
    let guard = StampedeGuard::new(chaos.clone());
    assert_eq!(ask(&[&guard; CALLERS], &origin).await, [0; CALLERS]);
    assert_eq!(origin.loads("k"), 1);
    assert_eq!(chaos.commands(), 3, "a look, an acquire and a commit");
}

/// A load is running. Callers that come meanwhile join it without a look-up.
#[tokio::test(start_paused = true)]
async fn a_caller_that_joins_a_load_reads_nothing() {
    let (chaos, origin) = (chaos(), Origin::new());
    let guard = StampedeGuard::new(chaos.clone());
    origin.hold();
    let first = tokio::spawn({
        let (guard, origin) = (guard.clone(), origin.clone());
        async move { ask(&[&guard], &origin).await }
    });
    origin.wait_for_loads("k", 1).await;
    let before = chaos.commands();
    let callers = [&guard; CALLERS];
    let (joined, ()) = tokio::join!(ask(&callers, &origin), async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(chaos.commands(), before);
        origin.release();
    });
    assert_eq!((joined, first.await.expect("joined")), (vec![0; CALLERS], vec![0]));
}

/// A value that lacks a caller's tags is a miss for that caller, no matter which caller read it.
#[tokio::test(start_paused = true)]
async fn callers_of_a_shared_read_check_it_against_their_own_tags() {
    let (chaos, origin) = (chaos(), Origin::new());
    let plain = StampedeGuard::new(chaos.clone());
    let tagged = plain.with_policy(Policy::builder().tags(["t"]).build().expect("valid"));
    let version = origin.change("k");
    // Two reads are made: one for the first caller, and one for the queue. If a value was read without tags, its own tags are checked by
    // another command, but only once: the process knows them then. A caller with more tags reads the value again.
    let cases = [
        ([&plain, &plain, &tagged, &tagged, &plain], 2 + 1 + 1 + 1),
        ([&tagged, &tagged, &plain, &plain, &tagged], 1 + 1),
    ];
    for (guards, reads) in cases {
        plain.insert("k", &0_u64).await.expect("stored, without a tag");
        let loads = origin.loads("k");
        for (guard, value) in guards.iter().zip(ask(&guards, &origin).await) {
            if std::ptr::eq(*guard, &raw const tagged) {
                assert_eq!(value, version, "loaded");
            }
        }
        assert_eq!(origin.loads("k"), loads + 1);
        // The value has the tag now, so every caller accepts it.
        let before = chaos.commands();
        assert_eq!(ask(&guards, &origin).await, [version; 5]);
        assert_eq!(chaos.commands() - before, reads);
        tagged.invalidate_tag("t").await.expect("confirmed");
        assert_eq!(plain.get::<u64>("k").await.expect("answered"), None);
        plain.invalidate("k").await.expect("confirmed");
    }
}

/// While another process refreshes a stale value, a process asks the store once, not once per caller, whether it may refresh.
#[tokio::test(start_paused = true)]
async fn a_process_served_stale_asks_once_whether_to_refresh() {
    let (chaos, origin) = (chaos(), Origin::new());
    let policy = Policy::builder().fresh_for(Duration::from_secs(1)).ttl_jitter(0.0);
    let policy = policy.stale_while_revalidate(Duration::from_secs(600)).build().expect("valid");
    let guards = [(); 2].map(|()| StampedeGuard::new(chaos.clone()).with_policy(policy.clone()));
    assert_eq!(ask(&[&guards[0]], &origin).await, [0]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    origin.hold();
    assert_eq!(ask(&[&guards[0]], &origin).await, [0], "and it is loaded in the background");
    origin.wait_for_loads("k", 2).await;
    let before = chaos.commands();
    for _ in 0..10 {
        assert_eq!(ask(&[&guards[1]], &origin).await, [0]);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(chaos.commands() - before, 10 + 1);
    assert_eq!(origin.loads("k"), 2);
}

/// The first caller is not polled while its read runs, as in a large buffer of futures, and its policy would let it wait for seconds. The
/// callers that are queued behind it must wait for neither.
#[tokio::test(start_paused = true)]
async fn an_unpolled_first_read_delays_the_others_by_one_commands_time() {
    let chaos = chaos();
    let guard = StampedeGuard::new(chaos.clone());
    let patient =
        Policy::builder().coordination_budget(Duration::from_secs(10)).lease(Duration::from_secs(60));
    let _patient = guard.with_policy(patient.build().expect("valid"));
    guard.insert("k", &7_u64).await.expect("stored");
    let mut first = Box::pin(guard.get::<u64>("k"));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let began = tokio::time::Instant::now();
    for call in [(); 10].map(|()| guard.get::<u64>("k")).map(Box::pin) {
        assert_eq!(call.await.expect("answered"), Some(7));
    }
    assert!(began.elapsed() < Duration::from_millis(100), "{:?}", began.elapsed());
    assert_eq!(first.await.expect("answered"), Some(7));
    assert_eq!(guard.stats().store_errors, 0);
}

/// Regression: a queued caller waited for the read before its own, and then for its own, and for each as long as its whole budget.
#[tokio::test(start_paused = true)]
async fn a_caller_queued_for_a_read_waits_no_longer_than_its_budget() {
    for then in [OnStoreDown::FailOpen, OnStoreDown::FailClosed] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let budget = Duration::from_millis(100);
        let policy =
            Policy::builder().coordination_budget(budget).command_timeout(budget).on_store_down(then);
        let policy = policy.build().expect("valid");
        let guard = StampedeGuard::builder(chaos.clone()).policy(policy).build().expect("valid");
        chaos.inject(Fault::BlackHole, 1.0);
        let took = |after| {
            let (guard, origin) = (guard.clone(), origin.clone());
            async move {
                tokio::time::sleep(Duration::from_millis(after)).await;
                let began = Instant::now();
                let answer = guard.get_or_load("k", move || async move { origin.load("k").await }).await;
                assert_eq!(answer.is_ok(), then == OnStoreDown::FailOpen);
                began.elapsed()
            }
        };
        let took = tokio::join!(took(0), took(1), took(2));
        for took in [took.0, took.1, took.2] {
            assert!(took <= budget + Duration::from_millis(5), "{then:?}: {took:?}");
        }
    }
}

/// A caller whose look-up failed has found nothing. A value that is loaded while it waits is newer than any value that it could have found.
#[tokio::test(start_paused = true)]
async fn a_refresh_with_a_failed_look_up_shares_a_concurrent_load() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let guard = StampedeGuard::new(chaos.clone());
    let refresh = || {
        let origin = origin.clone();
        guard.load("k").refresh(move |_| async move { origin.load("k").await })
    };
    for round in 1..=3 {
        // Both look-ups fail: that of the first caller, and that of the queued callers.
        for _ in 0..2 {
            chaos.once(Fault::ErrorBefore);
        }
        let (one, other) = tokio::join!(refresh(), refresh());
        assert!(one.is_ok() && other.is_ok());
        assert_eq!((guard.stats().store_errors, guard.stats().fail_open_loads), (2 * round, 0));
        assert_eq!(origin.loads("k"), round, "time stands still: it was stored at their look-up");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// After a failed refresh the value backs off in the whole fleet. A caller that could not read it is served it, too, without a load.
#[tokio::test(start_paused = true)]
async fn a_caller_with_a_failed_look_up_is_served_a_value_that_backs_off() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let policy = Policy::builder().fresh_for(Duration::from_secs(1)).ttl_jitter(0.0);
    let policy = policy.stale_while_revalidate(Duration::from_secs(600)).back_off(Duration::from_secs(60));
    let policy = policy.build().expect("valid");
    let guards = [(); 2].map(|()| StampedeGuard::new(chaos.clone()).with_policy(policy.clone()));
    assert_eq!(ask(&[&guards[0]], &origin).await, [0]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let fails = || async { Err::<u64, _>("no route") };
    assert_eq!(guards[0].get_or_load("k", fails).await.ok(), Some(0), "and its refresh fails");
    tokio::time::sleep(Duration::from_secs(1)).await;
    for guard in [&guards[1], &guards[0]] {
        chaos.once(Fault::ErrorBefore);
        assert_eq!(ask(&[guard], &origin).await, [0]);
        assert_eq!((guard.stats().store_errors, guard.stats().fail_open_loads), (1, 0));
    }
    assert_eq!(origin.loads("k"), 1, "the first");
}

/// A refresh always loads. The policy decides whether it may load without the store.
#[tokio::test(start_paused = true)]
async fn a_refresh_with_a_failed_look_up_loads_or_fails_as_the_policy_says() {
    for then in [OnStoreDown::FailOpen, OnStoreDown::FailClosed] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let policy = Policy::builder().on_store_down(then).build().expect("valid");
        let guard = StampedeGuard::builder(chaos.clone()).policy(policy).build().expect("valid");
        let refresh = async || {
            let origin = origin.clone();
            guard.load("k").refresh(move |_| async move { origin.load("k").await }).await
        };
        assert!(refresh().await.is_ok());
        tokio::time::sleep(Duration::from_secs(1)).await;
        chaos.once(Fault::ErrorBefore);
        let loads = u64::from(then == OnStoreDown::FailOpen);
        assert_eq!((u64::from(refresh().await.is_ok()), origin.loads("k")), (loads, 1 + loads), "{then:?}");
    }
}

/// A caller waits in the queue for a read. The read is dropped, because there is a flight to join, and then that flight loses the store.
/// Regression: the caller was treated like one whose look-up found nothing, and loaded beside the flight. So there were occasionally two
/// loads of a key when the server died.
#[tokio::test(start_paused = true)]
async fn a_queued_caller_joins_a_flight_that_lost_the_store() {
    let (chaos, origin) = (chaos(), Origin::new());
    chaos.inject(Fault::BlackHole, 1.0);
    let guard = StampedeGuard::new(chaos.clone());
    origin.answer("k", [Answer::Hang]);
    let call = || {
        let (guard, origin) = (guard.clone(), origin.clone());
        async move { guard.get_or_load("k", move || async move { origin.load("k").await }).await }
    };
    let leads = tokio::spawn(call());
    tokio::time::sleep(Duration::from_millis(1)).await;
    let mut queues = Box::pin(call());
    assert!(poll!(&mut queues).is_pending());
    origin.wait_for_loads("k", 1).await;
    assert!(poll!(&mut queues).is_pending());
    // By then another flight would have asked the store for a lease, and loaded.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((origin.loads("k"), guard.stats().loads), (1, 1));
    leads.abort();
}
