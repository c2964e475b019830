//! What the simulation has found, in as few steps as it takes.

use std::time::Duration;

use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin};
use stampede_guard::{LoadContext, OnStoreDown, OnWaitTimeout, Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::asking::{arrived, ask, load};

/// A waiter has read a stale value and waits for a load; meanwhile the value is invalidated, of which the waiter is not
/// told; then its own load fails. What it has read was stored again, and served to everyone from then on.
#[tokio::test(start_paused = true)]
async fn what_was_invalidated_is_not_stored_again_for_a_load_that_fails() {
    for is_told in [true, false] {
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
        chaos.inject(Fault::WakeLost, if is_told { 0.0 } else { 1.0 });
        guards[2].invalidate("k").await.unwrap();
        origin.wait_for_loads("k", 3).await;
        origin.release();
        let _ = (leading.await.unwrap(), waiting.await.unwrap());

        assert_eq!(guards[2].get::<u64>("k").await.unwrap(), None);
        assert!(guards[2].get_or_load("k", load(&origin)).await.is_err(), "is_told={is_told}");
    }
}

/// And what was not invalidated still is.
#[tokio::test(start_paused = true)]
async fn what_is_still_there_stands_in_for_a_load_that_fails() {
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
    assert_eq!(origin.loads("k"), 2, "the failure was told to the fleet, for the back-off");
}

/// Nobody waits for it, and every process would load for itself.
#[tokio::test(start_paused = true)]
async fn what_can_not_be_refreshed_with_the_store_is_not_refreshed_without() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let window = Duration::from_secs(600);
    let policy = Policy::builder().fresh_for(Duration::from_secs(1)).stale_while_revalidate(window);
    let guard = StampedeGuard::new(chaos.clone()).with_policy(policy.build().unwrap());
    assert_eq!(ask(&guard, &origin).await.unwrap().unwrap(), 0);
    sleep(Duration::from_secs(2)).await;
    origin.change("k");
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    let before = chaos.commands();
    let asked = ask(&guard, &origin);
    arrived(&chaos, before + 1).await;
    chaos.inject(Fault::ErrorBefore, 1.0);
    assert_eq!(asked.await.unwrap().unwrap(), 0, "served stale");
    sleep(Duration::from_millis(100)).await;
    assert_eq!(origin.loads("k"), 1);
    chaos.calm();
    assert_eq!(ask(&guard, &origin).await.unwrap().unwrap(), 0);
    origin.wait_for_loads("k", 2).await;
}

/// What was there was not seen, so the acquire found it, fresh, and it was served instead of a load.
#[tokio::test(start_paused = true)]
async fn a_refresh_whose_look_up_fails_loads_or_fails_all_the_same() {
    for (policy, loads) in [(OnStoreDown::FailOpen, 2), (OnStoreDown::FailClosed, 1)] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let policy = Policy::builder().on_store_down(policy).build().unwrap();
        let guard = StampedeGuard::new(chaos.clone()).with_policy(policy);
        assert_eq!(guard.get_or_load("k", load(&origin)).await.unwrap(), 0);
        sleep(Duration::from_secs(1)).await;
        let version = origin.change("k");
        chaos.once(Fault::ErrorBefore);
        let refreshed = guard.refresh("k", load(&origin)).await;
        assert_eq!(origin.loads("k"), loads, "{refreshed:?}");
        assert_eq!(refreshed.ok(), (loads == 2).then_some(version));
    }
}

/// Who refreshes more keys at once than there may be flights loads the others alone; not where the store is down and
/// nothing may be loaded without it.
#[tokio::test(start_paused = true)]
async fn refreshes_that_may_not_go_on_without_the_store_spare_the_origin_however_many_they_are() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let policy = Policy::builder().on_store_down(OnStoreDown::FailClosed).build().unwrap();
    let guard = StampedeGuard::builder(chaos.clone()).policy(policy).max_flights(2).build().unwrap();
    chaos.inject(Fault::BlackHole, 1.0);
    let refreshes = (0..20).map(|n| {
        let (guard, load) = (guard.clone(), load(&origin));
        async move { guard.refresh(format!("k{n}"), load).await }
    });
    assert!(futures_util::future::join_all(refreshes).await.iter().all(Result::is_err));
    assert_eq!(origin.loads("k"), 0);
}

/// It was counted as an error of the store alone, and what was counted here were those whose budget had sufficed.
#[tokio::test(start_paused = true)]
async fn who_goes_on_without_the_store_because_its_budget_is_used_up_is_counted() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let ms = Duration::from_millis;
    chaos.latency(ms(60), ms(60));
    let policy = Policy::builder().coordination_budget(ms(100)).command_timeout(ms(100)).build().unwrap();
    let guard = StampedeGuard::new(chaos).with_policy(policy);
    assert_eq!(guard.get_or_load("k", load(&origin)).await.unwrap(), 0);
    let stats = guard.stats();
    assert_eq!((stats.budget_exceeded, stats.fail_open_loads, stats.store_errors), (1, 1, 1));
}

/// One process, two policies: who has little time does not wait for the answer to who has much, and who has much is
/// not told that it was too late for another.
#[tokio::test(start_paused = true)]
async fn a_shared_look_up_has_each_callers_own_time() {
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

    // Slower than the one has time for, and as fast as the other needs. Who queues waits for the read before, too.
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
    assert_eq!(origin.loads("k"), 3, "the hurried load for themselves, all of them once, and nobody else");
}

/// A server that refuses (out of memory, loading) is connected. A waiter that rides out a break asked it again as fast as it
/// answered, until its budget was used up.
#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_is_not_asked_as_fast_as_it_answers() {
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
    // The waiter asks when the lease that it was told of would have ended, and then loads for itself.
    origin.wait_for_loads("k", 2).await;
    assert!(chaos.commands() - before < 25, "{} commands", chaos.commands() - before);
}

/// A leader that is told something, whatever it be, began its third of a lease anew; told often enough, it never renewed.
#[tokio::test(start_paused = true)]
async fn a_leader_renews_in_time_whatever_it_is_told() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let policy = Policy::builder().load_timeout(Duration::from_secs(600)).build().unwrap();
    let guard = StampedeGuard::new(chaos.clone()).with_policy(policy);
    let other = StampedeGuard::new(chaos.clone());
    origin.hold();
    let leading = ask(&guard, &origin);
    origin.wait_for_loads("k", 1).await;
    chaos.inject(Fault::WakeForged, 1.0);
    for _ in 0..300 {
        // Its command is what the forged messages come with: just before a third of the lease is over. (Those that say
        // "invalidated" do renew it, so it takes a few others in a row.)
        let _ = other.get::<u64>("k").await;
        sleep(Duration::from_millis(600)).await;
    }
    chaos.calm();
    origin.release();
    assert_eq!(leading.await.unwrap().unwrap(), 0);
    assert_eq!((guard.stats().leases_lost, other.get::<u64>("k").await.unwrap()), (0, Some(0)));
}

/// A waiter asks for the lease, is not answered, asks again and leads; the key is invalidated; then the first of the two
/// commands runs. Under the same token it brought the lease back, and the older value was stored.
#[tokio::test(start_paused = true)]
async fn an_acquire_that_runs_late_does_not_bring_back_what_an_invalidation_has_ended() {
    // The seed says when the late one runs: within three seconds.
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
        assert_eq!(chaos.struck(Fault::Ghost), 1, "the waiter's second question");
        chaos.inject(Fault::WakeLost, 1.0);
        other.invalidate("k").await.unwrap();
        // Until just before the renewal that tells the waiter.
        sleep(Duration::from_millis(600)).await;
        origin.release();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(other.get::<u64>("k").await.unwrap(), None, "seed {seed}");
    }
}

/// It read the value, which was then invalidated, and put it back, marked stale: to stand in for a load that fails.
#[tokio::test(start_paused = true)]
async fn an_expiry_does_not_bring_back_what_is_invalidated_meanwhile() {
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
            // It has read, and not yet written.
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
        let given = guard.get_or_load("k", load(&origin)).await;
        assert_eq!(given.ok(), stands_in.then_some(7), "{meanwhile}");
    }
    assert_eq!(chaos.struck(Fault::ErrorAfter), 1);
}

/// A command that failed and was tried again is one error; of an expiry the read was two.
#[tokio::test(start_paused = true)]
async fn each_command_that_failed_is_counted_once() {
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

/// It went on without the lease, and whoever came later joined it without a look: as long as it ran, nobody in its process was
/// given what others had stored meanwhile, or was kept from what they had invalidated.
#[tokio::test(start_paused = true)]
async fn a_load_without_the_lease_is_joined_by_nobody_who_can_ask_the_store() {
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
        assert_eq!((guard.stats().flights, origin.loads("k")), (1, 1), "who can not ask joins it");
        replica.resume();
        let version = origin.change("k");
        if what == "stored" {
            other.insert("k", &version).await.unwrap();
            let began = Instant::now();
            assert_eq!(ask(&guard, &origin).await.unwrap().unwrap(), version);
            assert!(began.elapsed() < Duration::from_millis(50), "{:?}", began.elapsed());
        } else {
            // A store that answers and takes nothing: its callers share one more load, and not each has its own.
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

/// Those who had waited for too long joined a load of their process that had begun before the key was invalidated.
#[tokio::test(start_paused = true)]
async fn a_load_beside_the_lease_is_joined_by_nobody_who_comes_after_an_invalidation() {
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
    // It waits behind the leader as the first did, and is told of the invalidation; another is granted the lease.
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

/// What is given to those who wait and stored for nobody is as old as what is stored: one who hears of it late, and has the
/// tag of which it was invalidated meanwhile, loads. So does one with a tag that the load has not, of which nobody knows.
#[tokio::test(start_paused = true)]
async fn what_is_only_shared_is_given_to_nobody_once_its_tag_is_invalidated() {
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
                guard.get_or_load_with("k", load).await
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
