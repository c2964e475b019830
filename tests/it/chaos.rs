//! Minimal reproductions of defects that the simulation has found.

use std::time::Duration;

use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin};
use stampede_guard::{LoadContext, OnStoreDown, OnWaitTimeout, Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::asking::{arrived, ask, load};

/// A waiter has read a stale value and waits for a load. The value is invalidated, the waiter is not notified, and its own load fails.
/// Regression: the waiter stored the stale value again, and from then on all callers were served it.
#[tokio::test(start_paused = true)]
async fn an_invalidated_value_is_not_stored_again_for_a_failed_load() {
    for is_notified in [true, false] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let policy = Policy::builder()
            .fresh_for(Duration::from_secs(1))
            .ttl_jitter(0.0)
            .stale_if_error(Duration::from_secs(600))
            .build()
            .unwrap();
        let guards = [(); 3].map(|()| StampedeGuard::new(chaos.clone()).with_policy(policy.clone()));
        assert_eq!(guards[0].get_or_load("k", load(&origin)).await.unwrap(), 0);
        sleep(Duration::from_millis(1_500)).await;

        origin.hold();
        let leading = ask(&guards[0], &origin);
        origin.wait_for_loads("k", 2).await;
        let waiting = ask(&guards[1], &origin);
        sleep(Duration::from_millis(10)).await;
        origin.always("k", Answer::Fail);
        chaos.inject(Fault::WakeLost, if is_notified { 0.0 } else { 1.0 });
        guards[2].invalidate("k").await.unwrap();
        origin.wait_for_loads("k", 3).await;
        origin.release();
        let _ = (leading.await.unwrap(), waiting.await.unwrap());

        assert_eq!(guards[2].get::<u64>("k").await.unwrap(), None);
        assert!(guards[2].get_or_load("k", load(&origin)).await.is_err(), "is_notified={is_notified}");
    }
}

/// The same situation without an invalidation: the stale value stands in.
#[tokio::test(start_paused = true)]
async fn a_value_that_was_not_invalidated_stands_in_for_a_failed_load() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let window = Duration::from_secs(600);
    let policy = Policy::builder().fresh_for(Duration::from_secs(1)).stale_if_error(window).build().unwrap();
    let guard = StampedeGuard::new(chaos.clone()).with_policy(policy);
    assert_eq!(guard.get_or_load("k", load(&origin)).await.unwrap(), 0);
    sleep(Duration::from_secs(2)).await;
    origin.always("k", Answer::Fail);
    for _ in 0..3 {
        assert_eq!(guard.get_or_load("k", load(&origin)).await.unwrap(), 0);
    }
    assert_eq!(origin.loads("k"), 2, "the failure was sent to the fleet, for the back-off");
}

/// No caller waits for a background refresh. If refreshes continued without the store, every process would load.
#[tokio::test(start_paused = true)]
async fn a_background_refresh_does_not_go_on_without_the_store() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let window = Duration::from_secs(600);
    let policy = Policy::builder().fresh_for(Duration::from_secs(1)).stale_while_revalidate(window);
    let guard = StampedeGuard::new(chaos.clone()).with_policy(policy.build().unwrap());
    assert_eq!(ask(&guard, &origin).await.unwrap().unwrap(), 0);
    sleep(Duration::from_secs(2)).await;
    origin.change("k");
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    let before = chaos.commands();
    let call = ask(&guard, &origin);
    arrived(&chaos, before + 1).await;
    chaos.inject(Fault::ErrorBefore, 1.0);
    assert_eq!(call.await.unwrap().unwrap(), 0, "served stale");
    sleep(Duration::from_millis(100)).await;
    assert_eq!(origin.loads("k"), 1);
    chaos.calm();
    assert_eq!(ask(&guard, &origin).await.unwrap().unwrap(), 0);
    origin.wait_for_loads("k", 2).await;
}

/// Regression: after its failed look-up, the refresh returned the fresh value that its acquire found, instead of loading.
#[tokio::test(start_paused = true)]
async fn a_refresh_with_a_failed_look_up_is_not_served_a_fresh_value() {
    for (policy, loads) in [(OnStoreDown::FailOpen, 2), (OnStoreDown::FailClosed, 1)] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let policy = Policy::builder().on_store_down(policy).build().unwrap();
        let guard = StampedeGuard::new(chaos.clone()).with_policy(policy);
        assert_eq!(guard.get_or_load("k", load(&origin)).await.unwrap(), 0);
        sleep(Duration::from_secs(1)).await;
        let version = origin.change("k");
        chaos.once(Fault::ErrorBefore);
        let load = load(&origin);
        let refreshed = guard.load("k").refresh(move |_| load()).await.map(|loaded| loaded.value);
        assert_eq!(origin.loads("k"), loads, "{refreshed:?}");
        assert_eq!(refreshed.ok(), (loads == 2).then_some(version));
    }
}

/// Refreshes beyond `max_flights` load alone, but not while the store is down and the policy is `FailClosed`.
#[tokio::test(start_paused = true)]
async fn fail_closed_refreshes_beyond_max_flights_do_not_reach_the_origin() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let policy = Policy::builder().on_store_down(OnStoreDown::FailClosed).build().unwrap();
    let guard = StampedeGuard::builder(chaos.clone()).policy(policy).max_flights(2).build().unwrap();
    chaos.inject(Fault::BlackHole, 1.0);
    let refreshes = (0..20).map(|n| {
        let (guard, load) = (guard.clone(), load(&origin));
        async move { guard.load(format!("k{n}")).refresh(move |_| load()).await.map(|loaded| loaded.value) }
    });
    assert!(futures_util::future::join_all(refreshes).await.iter().all(Result::is_err));
    assert_eq!(origin.loads("k"), 0);
}

/// Regression: such a caller was recorded only as a store error, and callers that had budget left were recorded instead.
#[tokio::test(start_paused = true)]
async fn a_caller_that_continues_after_its_budget_is_recorded() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let ms = Duration::from_millis;
    chaos.latency(ms(60), ms(60));
    let policy = Policy::builder().coordination_budget(ms(100)).command_timeout(ms(100)).build().unwrap();
    let guard = StampedeGuard::new(chaos).with_policy(policy);
    assert_eq!(guard.get_or_load("k", load(&origin)).await.unwrap(), 0);
    let stats = guard.stats();
    assert_eq!((stats.budget_exceeded, stats.fail_open_loads, stats.store_errors), (1, 1, 1));
}

/// There are two policies in one process. A caller with a short budget does not wait as long as a look-up of a caller with a long budget
/// may take, and the latter does not receive the timeout of the former.
#[tokio::test(start_paused = true)]
async fn a_shared_look_up_keeps_each_callers_budget() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let with = |budget| Policy::builder().coordination_budget(Duration::from_millis(budget)).build().unwrap();
    let patient = StampedeGuard::new(chaos.clone()).with_policy(with(1_000));
    let hurried = patient.with_policy(with(20));
    let ask = |guard: &StampedeGuard| {
        let (guard, load) = (guard.clone(), load(&origin));
        let began = tokio::time::Instant::now();
        tokio::spawn(async move { (guard.get_or_load("k", load).await.unwrap(), began.elapsed()) })
    };
    assert_eq!(ask(&patient).await.unwrap().0, 0);

    // The latency is longer than the short budget allows, and short enough for the long one. A caller in the queue also waits for the read
    // before its own.
    for guards in [[&hurried, &hurried, &patient, &patient], [&patient, &patient, &hurried, &hurried]] {
        chaos.latency(Duration::from_millis(200), Duration::from_millis(200));
        let calls = guards.map(|guard| (std::ptr::eq(guard, &patient), ask(guard)));
        for (patient, call) in calls {
            let (_, took) = call.await.unwrap();
            let most = Duration::from_millis(if patient { 420 } else { 25 });
            assert!(took <= most, "{took:?}, patient={patient}");
        }
        chaos.latency(Duration::ZERO, Duration::ZERO);
        sleep(Duration::from_secs(5)).await;
        assert_eq!(ask(&patient).await.unwrap().0, 0);
    }
    assert_eq!(origin.loads("k"), 3, "the hurried load once each, and no other caller");
}

/// A server that refuses commands (out of memory, loading) is still connected. Regression: a waiter that was retrying after a disconnect
/// repeated its command as fast as the server answered, until its budget was used up.
#[tokio::test(start_paused = true)]
async fn a_refusing_server_is_retried_with_pauses() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    let guards = [(); 2].map(|()| StampedeGuard::new(chaos.clone()));
    origin.hold();
    for guard in &guards {
        ask(guard, &origin);
        sleep(Duration::from_millis(50)).await;
    }
    let before = chaos.commands();
    chaos.inject(Fault::OutOfMemory, 1.0);
    // The waiter takes again when the lease that it knows of would have ended, and then loads without the store.
    origin.wait_for_loads("k", 2).await;
    assert!(chaos.commands() - before < 25, "{} commands", chaos.commands() - before);
}

/// Regression: each message to a leader restarted its renewal timer of a third of the lease, so with enough messages
/// it never renewed.
#[tokio::test(start_paused = true)]
async fn a_leader_renews_in_time_whatever_messages_it_gets() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let policy = Policy::builder().load_timeout(Duration::from_secs(600)).build().unwrap();
    let guard = StampedeGuard::new(chaos.clone()).with_policy(policy);
    let other = StampedeGuard::new(chaos.clone());
    origin.hold();
    let leading = ask(&guard, &origin);
    origin.wait_for_loads("k", 1).await;
    chaos.inject(Fault::WakeForged, 1.0);
    for _ in 0..300 {
        // Each of its commands triggers forged messages, just before a third of the lease has passed. (A forged
        // "invalidated" causes a renewal, so several others in a row are needed.)
        let _ = other.get::<u64>("k").await;
        sleep(Duration::from_millis(600)).await;
    }
    chaos.calm();
    origin.release();
    assert_eq!(leading.await.unwrap().unwrap(), 0);
    assert_eq!((guard.stats().leases_lost, other.get::<u64>("k").await.unwrap()), (0, Some(0)));
}

/// A waiter's acquire has no answer, so the waiter sends another one, and leads. The key is invalidated, and then the first acquire runs.
/// Regression: that acquire restored the lease, because it had the same token, and the older value was stored.
#[tokio::test(start_paused = true)]
async fn a_late_acquire_does_not_restore_a_lease_after_an_invalidation() {
    // The seed determines when the late command runs, which is within three seconds.
    for seed in 0..40 {
        let (chaos, origin) = (ChaosStore::new(seed), Origin::new());
        let leader = chaos.replica();
        let leading = StampedeGuard::new(leader.clone());
        let [waiting, other] = [(); 2].map(|()| StampedeGuard::new(chaos.clone()));
        origin.hold();
        for guard in [&leading, &waiting] {
            ask(guard, &origin);
            sleep(Duration::from_millis(10)).await;
        }
        leader.kill();
        sleep(Duration::from_millis(1_900)).await;
        chaos.once(Fault::Ghost);
        origin.wait_for_loads("k", 2).await;
        assert_eq!(chaos.struck(Fault::Ghost), 1, "the waiter's acquire");
        chaos.inject(Fault::WakeLost, 1.0);
        other.invalidate("k").await.unwrap();
        // The former waiter leads now, and the message about the invalidation is lost: the waiter learns of it from its first renewal, a
        // third of the lease after its grant. Its load ends just before that.
        sleep(Duration::from_millis(600)).await;
        origin.release();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(other.get::<u64>("k").await.unwrap(), None, "seed {seed}");
    }
}

/// Regression: `expire` read the value, the value was invalidated, and `expire` stored it again as stale, to stand in
/// for a failed load.
#[tokio::test(start_paused = true)]
async fn an_expiry_does_not_restore_a_value_invalidated_meanwhile() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    let policy = Policy::builder().stale_if_error(Duration::from_secs(600)).build().unwrap();
    for (meanwhile, stands_in) in
        [("nothing", true), ("invalidated", false), ("replaced", false), ("lost", true)]
    {
        let guard = StampedeGuard::new(chaos.clone()).with_policy(policy.clone());
        let other = StampedeGuard::new(chaos.store()).with_policy(policy.clone());
        guard.insert("k", &7_u64).await.unwrap();
        let before = chaos.commands();
        let (expired, ()) = tokio::join!(guard.expire("k"), async {
            // `expire` has read the value, and not written it yet.
            while chaos.commands() == before {
                sleep(Duration::from_micros(100)).await;
            }
            match meanwhile {
                "invalidated" => other.invalidate("k").await.unwrap(),
                "replaced" => other.insert("k", &8_u64).await.unwrap(),
                "lost" => chaos.once(Fault::ErrorAfter),
                _ => {}
            }
        });
        expired.unwrap();
        origin.always("k", Answer::Fail);
        let received = guard.get_or_load("k", load(&origin)).await;
        assert_eq!(received.ok(), stands_in.then_some(7), "{meanwhile}");
    }
    assert_eq!(chaos.struck(Fault::ErrorAfter), 1);
}

/// A command that failed and was retried counts as one error. Regression: a failed read of `expire` was counted twice.
#[tokio::test(start_paused = true)]
async fn each_failed_command_counts_once() {
    let chaos = ChaosStore::new(1);
    let policy = Policy::builder().stale_if_error(Duration::from_secs(600)).build().unwrap();
    let guard = StampedeGuard::new(chaos.clone()).with_policy(policy);
    for (errors, what) in (1..).zip(["insert", "insert with tags", "expire", "invalidate", "invalidate tag"])
    {
        chaos.once(Fault::ErrorBefore);
        match what {
            "insert" => guard.insert("k", &7_u64).await.unwrap(),
            "insert with tags" => guard.insert_with_tags("k", &7_u64, ["t"]).await.unwrap(),
            "expire" => guard.expire("k").await.unwrap(),
            "invalidate" => guard.invalidate("k").await.unwrap(),
            _ => guard.invalidate_tag("t").await.unwrap(),
        }
        assert_eq!(
            (chaos.struck(Fault::ErrorBefore), guard.stats().store_errors),
            (errors, errors),
            "{what}"
        );
    }
}

/// Later callers joined a load without the lease, and made no look-up. Regression: while it ran, no caller of its process received a value
/// that another process had stored, and callers received values that another process had invalidated.
#[tokio::test(start_paused = true)]
async fn callers_that_can_ask_the_store_join_no_load_without_the_lease() {
    for what in ["stored", "invalidated", "refused"] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let replica = chaos.replica();
        let (other, guard) = (StampedeGuard::new(chaos.store()), StampedeGuard::new(replica.clone()));
        origin.hold();
        replica.cut();
        let first = ask(&guard, &origin);
        origin.wait_for_loads("k", 1).await;
        let cut = ask(&guard, &origin);
        sleep(Duration::from_secs(1)).await;
        assert_eq!((guard.stats().flights, origin.loads("k")), (1, 1), "without the store it joins");
        replica.resume();
        let version = origin.change("k");
        if what == "stored" {
            other.insert("k", &version).await.unwrap();
            let began = Instant::now();
            assert_eq!(ask(&guard, &origin).await.unwrap().unwrap(), version);
            assert!(began.elapsed() < Duration::from_millis(50), "{:?}", began.elapsed());
        } else {
            // If the store answers and refuses, these callers share one more load, instead of loading once each.
            chaos.inject(Fault::OutOfMemory, if what == "refused" { 1.0 } else { 0.0 });
            other.invalidate("k").await.unwrap();
            let later: Vec<_> = (0..10).map(|_| ask(&guard, &origin)).collect();
            origin.wait_for_loads("k", 2).await;
            sleep(Duration::from_secs(1)).await;
            let latest = ask(&guard, &origin);
            sleep(Duration::from_secs(1)).await;
            assert_eq!((guard.stats().flights, origin.loads("k")), (1, 2), "{what}");
            origin.release();
            for later in later.into_iter().chain([latest]) {
                assert_eq!(later.await.unwrap().unwrap(), version, "{what}");
            }
        }
        origin.release();
        assert_eq!((first.await.unwrap().unwrap(), cut.await.unwrap().unwrap()), (0, 0));
    }
}

/// Regression: callers joined, after their `wait_timeout`, a load of their process that had begun before the invalidation.
#[tokio::test(start_paused = true)]
async fn after_an_invalidation_callers_join_no_older_load_beside_the_lease() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let replica = chaos.replica();
    let [leading, next, other] = [(); 3].map(|()| StampedeGuard::new(chaos.clone()));
    let policy =
        Policy::builder().wait_timeout(Duration::from_millis(500), OnWaitTimeout::Load).build().unwrap();
    let waiting = StampedeGuard::new(replica.clone()).with_policy(policy);
    origin.hold();
    let mut older = vec![ask(&leading, &origin)];
    origin.wait_for_loads("k", 1).await;
    older.push(ask(&waiting, &origin));
    origin.wait_for_loads("k", 2).await;
    // This caller waits behind the leader like the first one, and is notified of the invalidation. Another process gets the lease.
    let later = ask(&waiting, &origin);
    sleep(Duration::from_millis(100)).await;
    replica.stop();
    let version = origin.change("k");
    other.invalidate("k").await.unwrap();
    let newer = ask(&next, &origin);
    origin.wait_for_loads("k", 3).await;
    replica.resume();
    origin.wait_for_loads("k", 4).await;
    origin.release();
    assert_eq!((later.await.unwrap().unwrap(), newer.await.unwrap().unwrap()), (version, version));
    for older in older {
        assert_eq!(older.await.unwrap().unwrap(), 0);
    }
}

/// A value that is shared with waiters without being stored follows the same rules as a stored one: a waiter that
/// receives it after its tag was invalidated loads. A waiter with a tag that the leader's policy lacks loads, too: nothing
/// shows whether that tag was invalidated.
#[tokio::test(start_paused = true)]
async fn a_shared_value_reaches_no_waiter_after_its_tag_is_invalidated() {
    for leader_has_it in [true, false] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let replica = chaos.replica();
        let tagged = Policy::builder().tags(["t"]).build().unwrap();
        let leads = if leader_has_it { tagged.clone() } else { Policy::default() };
        let guards = [
            StampedeGuard::new(chaos.clone()).with_policy(leads),
            StampedeGuard::new(replica.clone()).with_policy(tagged),
        ];
        let ask = |guard: &StampedeGuard| {
            let (guard, origin) = (guard.clone(), origin.clone());
            tokio::spawn(async move {
                let load = move |mut cx: LoadContext<u64>| async move {
                    cx.do_not_store();
                    origin.load("k").await
                };
                guard.load("k").get(load).await.map(|loaded| loaded.value)
            })
        };
        origin.hold();
        let leading = ask(&guards[0]);
        origin.wait_for_loads("k", 1).await;
        let waiting = ask(&guards[1]);
        sleep(Duration::from_millis(10)).await;
        replica.stop();
        origin.release();
        assert_eq!(leading.await.unwrap().unwrap(), 0);
        let changed = origin.change("k");
        guards[0].invalidate_tag("t").await.unwrap();
        replica.resume();
        assert_eq!(waiting.await.unwrap().unwrap(), changed, "leader_has_it={leader_has_it}");
    }
}
