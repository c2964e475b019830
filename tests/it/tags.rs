//! Invalidation of many values at once, by a tag or of a whole namespace. Once a value was invalidated, it never returns.
//!
//! On the in-memory store with a paused clock; its four guards stand for processes. `redis::tags` runs the same cases on a server.

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{ErrorKind, LoadContext, MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{advance, sleep};

use crate::support::gate::{Counter, Gate};

fn tagged() -> PolicyBuilder {
    Policy::builder().tags(["catalog", "prices"])
}

pub(crate) fn replicas(policy: PolicyBuilder) -> Vec<StampedeGuard> {
    let (store, policy) = (MemoryStore::new(), policy.build().expect("valid"));
    let guard = || StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid");
    (0..4).map(|_| guard()).collect()
}

pub(crate) async fn load(guard: &StampedeGuard, key: &str, value: u32) -> u32 {
    guard.get_or_load(key, move || async move { Ok::<_, String>(value) }).await.expect("loaded")
}

pub(crate) async fn get(guard: &StampedeGuard, key: &str) -> Option<u32> {
    guard.get(key).await.expect("answered")
}

#[tokio::test(start_paused = true)]
async fn a_tag_invalidates_every_value_that_has_it_and_no_other() {
    let guards = replicas(tagged());
    let other = guards[0].with_policy(Policy::builder().tags(["users"]).build().expect("valid"));
    let plain = guards[0].with_policy(Policy::default());
    for (key, value) in [("a", 1), ("b", 2)] {
        load(&guards[0], key, value).await;
    }
    load(&other, "u", 3).await;
    load(&plain, "p", 4).await;
    guards[1].invalidate_tag("prices").await.expect("confirmed");
    for guard in &guards {
        assert_eq!((get(guard, "a").await, get(guard, "b").await), (None, None));
    }
    assert_eq!((get(&other, "u").await, get(&plain, "p").await), (Some(3), Some(4)));
    assert_eq!(load(&guards[2], "a", 5).await, 5);
    assert_eq!(get(&guards[3], "a").await, Some(5));
    guards[3].invalidate_tag("nobody has this one").await.expect("confirmed");
    assert_eq!(get(&guards[0], "a").await, Some(5));
    assert_eq!((guards[1].stats().invalidations, guards[3].stats().invalidations), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn invalidate_all_reaches_every_value_of_a_policy_that_allows_it() {
    let reached = replicas(Policy::builder().invalidate_all(true));
    let beyond = reached[0].with_policy(Policy::default());
    load(&reached[0], "a", 1).await;
    reached[1].insert("b", &2_u32).await.expect("stored");
    load(&beyond, "c", 3).await;
    assert_eq!(get(&reached[2], "b").await, Some(2));
    // Regression: `invalidate_all` had no effect on the guard's own values, and reported success.
    let refused = beyond.invalidate_all().await.expect_err("its own values would stay");
    assert_eq!(refused.kind(), ErrorKind::InvalidPolicy);
    assert!(refused.to_string().contains("Policy::builder().invalidate_all(true)"), "{refused}");
    assert_eq!((get(&reached[2], "a").await, beyond.stats().invalidations), (Some(1), 0));
    reached[3].invalidate_all().await.expect("confirmed");
    assert_eq!((get(&reached[2], "a").await, get(&reached[2], "b").await), (None, None));
    assert_eq!(get(&beyond, "c").await, Some(3));
}

/// A value that was stored without the tag may be older than any invalidation of it.
#[tokio::test(start_paused = true)]
async fn a_value_without_the_policys_tag_is_a_miss_and_one_with_another_is_checked() {
    let guards = replicas(tagged());
    let plain = guards[0].with_policy(Policy::default());
    load(&plain, "k", 1).await;
    assert_eq!(get(&guards[1], "k").await, None);
    assert_eq!(load(&guards[1], "k", 2).await, 2);
    assert_eq!(get(&plain, "k").await, Some(2), "with tags that this policy does not name");
    guards[2].invalidate_tag("catalog").await.expect("confirmed");
    assert_eq!(get(&plain, "k").await, None);
}

/// Regression: such a caller joined the load of a policy without the tag. It received a value from before the acknowledged invalidation:
/// that of the load or, if the load failed, the older value that stands in.
#[tokio::test(start_paused = true)]
async fn a_caller_with_a_tag_accepts_nothing_from_a_load_that_was_not_checked_for_it() {
    const SECOND: Duration = Duration::from_secs(1);
    for (loaded, is_set) in [(Ok(1), false), (Ok(1), true), (Err("down"), false), (Err("down"), true)] {
        let policy = || Policy::builder().fresh_for(SECOND).stale_if_error(SECOND * 60).ttl_jitter(0.0);
        let mut guards = replicas(policy());
        let plain = guards.remove(0);
        let with_tag = policy().tags(["prices"]).build().expect("valid");
        load(&plain, "k", 1).await;
        advance(SECOND * 2).await;
        let (loads, gate) = (Counter::default(), Gate::closed());
        let first = tokio::spawn({
            let (plain, loads, gate) = (plain.clone(), loads.clone(), gate.clone());
            async move {
                let load = move || async move {
                    let _running = loads.start();
                    gate.pass().await;
                    loaded.map_err(str::to_owned)
                };
                plain.get_or_load("k", load).await
            }
        });
        loads.reach(1).await;
        // Another process invalidates, because the process that loads would detach its own flights.
        guards[0].invalidate_tag("prices").await.expect("confirmed");
        let later = if is_set {
            plain.set_policy(with_tag).expect("replaced");
            plain
        } else {
            plain.with_policy(with_tag)
        };
        let second = tokio::spawn({
            let later = later.clone();
            async move { load(&later, "k", 2).await }
        });
        // After this sleep both callers wait, because the paused clock moves only then.
        sleep(Duration::from_millis(1)).await;
        gate.open();
        assert_eq!(first.await.expect("no panic").ok(), Some(1), "{loaded:?} {is_set}");
        assert_eq!(second.await.expect("no panic"), 2, "{loaded:?} {is_set}");
        assert_eq!(get(&later, "k").await, Some(2), "stored for later callers of both policies");
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_joins_the_load_of_a_policy_with_more_tags() {
    let guards = replicas(tagged());
    let fewer = guards[0].with_policy(Policy::builder().tags(["catalog"]).build().expect("valid"));
    let (loads, gate) = (Counter::default(), Gate::closed());
    let callers = [&guards[0], &fewer, &guards[0].with_policy(Policy::default())].map(|guard| {
        let (guard, loads, gate) = (guard.clone(), loads.clone(), gate.clone());
        tokio::spawn(async move {
            let load = move || async move {
                let _running = loads.start();
                gate.pass().await;
                Ok::<_, String>(1)
            };
            guard.get_or_load("k", load).await
        })
    });
    loads.reach(1).await;
    sleep(Duration::from_millis(1)).await;
    gate.open();
    for caller in callers {
        assert_eq!(caller.await.expect("no panic").ok(), Some(1));
    }
    assert_eq!(loads.started(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_loader_adds_tags_to_its_value() {
    let guards = replicas(Policy::builder());
    let load = |mut cx: LoadContext<u32>| async move {
        cx.tag([("user", 7), ("group", 1)]).await.expect("tagged");
        Ok::<_, String>(1)
    };
    assert_eq!(guards[0].load("k").get(load).await.ok().map(|loaded| loaded.value), Some(1));
    assert_eq!(get(&guards[1], "k").await, Some(1));
    guards[2].invalidate_tag(("user", 8)).await.expect("confirmed");
    assert_eq!(get(&guards[1], "k").await, Some(1));
    guards[2].invalidate_tag(("group", 1)).await.expect("confirmed");
    assert_eq!(get(&guards[1], "k").await, None);
}

/// The loader reads its origin, the origin changes and is invalidated, and only then the loader learns the tag.
#[tokio::test(start_paused = true)]
async fn a_tag_that_a_loader_adds_at_its_end_is_as_safe_as_an_early_one() {
    for (invalidated, is_current) in [(("user", 7), false), (("user", 8), true)] {
        let (guards, loads, gate) = (replicas(Policy::builder()), Counter::default(), Gate::closed());
        let ask = |replica: usize| {
            let (guard, loads, gate) = (guards[replica].clone(), loads.clone(), gate.clone());
            let load = move |mut cx: LoadContext<u32>| async move {
                let _running = loads.start();
                let read = loads.started() as u32;
                gate.pass().await;
                cx.tag([("user", 7)]).await.map_err(|error| error.to_string())?;
                Ok::<_, String>(read)
            };
            tokio::spawn(async move { guard.load("k").get(load).await.expect("loaded").value })
        };
        let before = ask(0);
        loads.reach(1).await;
        guards[3].invalidate_tag(invalidated).await.expect("confirmed");
        let after = [ask(0), ask(1)];
        sleep(Duration::from_millis(10)).await;
        gate.open();
        assert_eq!(before.await.expect("joined"), 1, "it came before the change");
        for after in after {
            assert_eq!(after.await.expect("joined") == 1, is_current, "{invalidated:?}");
        }
        assert_eq!(get(&guards[2], "k").await.map(|value| value == 1), Some(is_current), "{invalidated:?}");
    }
}

/// A new process begins many loads at once. Regression: beyond the first sixteen, their values were not stored.
#[tokio::test(start_paused = true)]
async fn a_burst_of_first_loads_is_stored_with_the_tags_that_they_add() {
    let guards = replicas(Policy::builder());
    let loads = (0..100_u32).map(|key| {
        let load = move |mut cx: LoadContext<u32>| async move {
            sleep(Duration::from_millis(5)).await;
            cx.tag([("user", key)]).await.map_err(|error| error.to_string())?;
            Ok::<_, String>(key)
        };
        guards[0].load(key).get(load)
    });
    assert!(join_all(loads).await.into_iter().all(|loaded| loaded.is_ok()));
    for key in 0..100_u32 {
        assert_eq!(guards[1].get::<u32>(key).await.expect("answered"), Some(key));
    }
}

#[tokio::test(start_paused = true)]
async fn an_inserted_value_has_its_own_tags_and_its_policys() {
    for tag in ["catalog", "sale"] {
        let guards = replicas(Policy::builder().tags(["catalog"]));
        guards[0].insert_with_tags("k", &1_u32, ["sale"]).await.expect("confirmed");
        assert_eq!(get(&guards[1], "k").await, Some(1));
        guards[2].invalidate_tag("other").await.expect("confirmed");
        assert_eq!(get(&guards[1], "k").await, Some(1));
        guards[2].invalidate_tag(tag).await.expect("confirmed");
        assert_eq!(get(&guards[1], "k").await, None, "{tag}");
    }
}

/// Regression: tag ids were kept for a day, or for twice the policy's lifetimes, so a value with a longer lifetime was a miss from then on.
#[tokio::test(start_paused = true)]
async fn a_tagged_value_is_stored_for_as_long_as_its_loader_says() {
    const DAY: Duration = Duration::from_secs(86_400);
    const TAGS: [&str; 2] = ["catalog", "sale"];
    for (of_policy, own, invalidated) in [(1, 0, 0), (0, 2, 1), (1, 1, 0), (1, 1, 1)] {
        let guards = replicas(Policy::builder().ttl_jitter(0.0).tags(TAGS.into_iter().take(of_policy)));
        let load = |days: u32| {
            move |mut cx: LoadContext<u32>| async move {
                cx.tag(TAGS.into_iter().skip(of_policy).take(own)).await.expect("tagged");
                cx.fresh_for(DAY * days);
                Ok::<_, String>(days)
            }
        };
        let case = format!("{of_policy} of the policy, {own} of its own");
        assert_eq!(guards[0].load("k").get(load(30)).await.ok().map(|loaded| loaded.value), Some(30));
        // The clock moves in one step, because a task that runs once a second would make 120 days take a minute.
        advance(DAY * 2).await;
        // A later value with a shorter lifetime does not shorten the life of the tag ids.
        assert_eq!(guards[1].load("other").get(load(3)).await.ok().map(|loaded| loaded.value), Some(3));
        advance(DAY * 28 - Duration::from_secs(1)).await;
        assert_eq!((get(&guards[2], "k").await, get(&guards[2], "other").await), (Some(30), None), "{case}");
        guards[3].invalidate_tag(TAGS[invalidated]).await.expect("confirmed");
        assert_eq!(get(&guards[2], "k").await, None, "{case}: invalidated all the same");
    }
}

/// Runs an invalidation while a gate holds a load of one replica, for which callers of all replicas wait.
async fn invalidated_while_loading(invalidate: impl AsyncFnOnce(&StampedeGuard)) {
    let (guards, loads, gate) = (replicas(tagged().invalidate_all(true)), Counter::default(), Gate::closed());
    let ask = |replica: usize| {
        let (guard, loads, gate) = (guards[replica].clone(), loads.clone(), gate.clone());
        tokio::spawn(async move {
            let load = move || async move {
                let _running = loads.start();
                let number = loads.started();
                gate.pass().await;
                Ok::<_, String>(number)
            };
            guard.get_or_load("k", load).await.expect("loaded")
        })
    };
    let leads = ask(0);
    sleep(Duration::from_millis(10)).await;
    let before: Vec<_> = (0..8).map(|caller| ask(caller % 4)).collect();
    sleep(Duration::from_millis(10)).await;
    assert_eq!(loads.started(), 1);
    invalidate(&guards[3]).await;
    let after: Vec<_> = (0..8).map(|caller| ask(caller % 4)).collect();
    sleep(Duration::from_millis(10)).await;
    gate.open();
    assert_eq!(leads.await.expect("joined"), 1, "it came before the invalidation");
    for caller in join_all(before).await.into_iter().chain(join_all(after).await) {
        assert!(caller.expect("joined") > 1, "later callers get no older value");
    }
    assert_eq!(get(&guards[1], "k").await, Some(loads.started() as u32));
    assert!(loads.started() <= 3, "{} loads", loads.started());
}

#[tokio::test(start_paused = true)]
async fn a_load_during_a_tag_invalidation_is_neither_stored_nor_returned_to_later_callers() {
    invalidated_while_loading(async |guard| guard.invalidate_tag("prices").await.expect("confirmed")).await;
}

#[tokio::test(start_paused = true)]
async fn a_load_during_invalidate_all_is_neither_stored_nor_returned_to_later_callers() {
    invalidated_while_loading(async |guard| guard.invalidate_all().await.expect("confirmed")).await;
}

#[tokio::test(start_paused = true)]
async fn an_invalidated_value_is_not_served_stale_and_stands_in_for_nothing() {
    let windows = tagged().fresh_for(Duration::from_secs(1)).ttl_jitter(0.0);
    let windows =
        windows.stale_while_revalidate(Duration::from_secs(60)).stale_if_error(Duration::from_secs(60));
    let guards = replicas(windows);
    load(&guards[0], "k", 1).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(get(&guards[1], "k").await, Some(1), "stale, and served");
    guards[2].invalidate_tag("catalog").await.expect("confirmed");
    assert_eq!(get(&guards[1], "k").await, None);
    let failed = guards[1].get_or_load("k", || async { Err::<u32, _>("no route".to_owned()) }).await;
    assert!(failed.is_err());
}

/// A caller of another process joins a load, which began before an invalidation that its process does not know of. When the load fails, the
/// older value does not stand in for that caller.
#[tokio::test(start_paused = true)]
async fn a_value_invalidated_during_a_failed_load_stands_in_for_nothing() {
    let windows = tagged().fresh_for(Duration::from_secs(1)).ttl_jitter(0.0);
    for by in ["catalog", "its own"] {
        let guards = replicas(windows.clone().stale_if_error(Duration::from_secs(600)));
        let own = |mut cx: LoadContext<u32>| async move {
            cx.tag(["its own"]).await.map_err(|error| error.to_string())?;
            Ok::<_, String>(1)
        };
        assert_eq!(guards[0].load("k").get(own).await.ok().map(|loaded| loaded.value), Some(1));
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (gate, loads) = (Gate::closed(), Counter::default());
        let failing = || {
            let (guard, gate, loads) = (guards[0].clone(), gate.clone(), loads.clone());
            let load = move || async move {
                let _running = loads.start();
                gate.pass().await;
                Err::<u32, _>("no route".to_owned())
            };
            tokio::spawn(async move { guard.get_or_load("k", load).await })
        };
        let first = failing();
        loads.reach(1).await;
        guards[1].invalidate_tag(by).await.expect("confirmed");
        let later = failing();
        tokio::time::sleep(Duration::from_millis(1)).await;
        gate.open();
        let _ = first.await.expect("joined");
        let received = later.await.expect("joined");
        assert!(received.is_err(), "{received:?}: invalidated before its request");
        assert_eq!(get(&guards[1], "k").await, None, "and it is not stored again");
    }
}

/// If the ids of the tags could not be read when the load began, nothing shows whether a tag was invalidated during the load.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_value_is_not_stored_if_its_tags_were_unreadable_as_its_load_began() {
    use stampede_guard::testing::{ChaosStore, Fault};

    for breaks in [false, true] {
        let chaos = ChaosStore::new(1);
        chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
        let policy = tagged().build().expect("valid");
        let guard = StampedeGuard::builder(chaos.clone()).policy(policy).build().expect("valid");
        let (loaded, ()) = tokio::join!(load(&guard, "k", 1), async {
            // After a look-up and an acquire, the next command reads the ids of the tags.
            while chaos.commands() < 2 {
                sleep(Duration::from_micros(100)).await;
            }
            if breaks {
                chaos.once(Fault::ErrorBefore);
            }
        });
        assert_eq!(loaded, 1);
        assert_eq!(guard.stats().store_errors, u64::from(breaks));
        assert_eq!(get(&guard, "k").await, (!breaks).then_some(1));
    }
}

/// Regression: a caller that came after a confirmed invalidation and joined the load without a look-up received the older value if the
/// store was down at the end of the load. It must load once more instead, unless the store returns soon.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_caller_after_an_invalidation_receives_no_older_value_even_if_the_store_goes_down() {
    use stampede_guard::testing::{ChaosStore, Fault};

    for (invalidated, outage, loads) in
        [(true, None, 2), (false, None, 2), (false, Some(1), 1), (true, Some(1), 2)]
    {
        let chaos = ChaosStore::new(1);
        let policy = tagged().build().expect("valid");
        let guards = [(); 2]
            .map(|()| StampedeGuard::builder(chaos.clone()).policy(policy.clone()).build().expect("valid"));
        let (counter, gate) = (Counter::default(), Gate::closed());
        let call = |value: u32| {
            let (guard, counter, gate) = (guards[0].clone(), counter.clone(), gate.clone());
            tokio::spawn(async move {
                let load = move || async move {
                    let _running = counter.start();
                    gate.pass().await;
                    Ok::<_, String>(value)
                };
                guard.get_or_load("k", load).await.expect("loaded")
            })
        };
        let first = call(1);
        counter.reach(1).await;
        if invalidated {
            guards[1].invalidate_tag("prices").await.expect("confirmed");
        }
        let later: Vec<_> = (0..20).map(|_| call(2)).collect();
        sleep(Duration::from_millis(1)).await;
        match outage {
            None => chaos.inject(Fault::ErrorBefore, 1.0),
            Some(commands) => (0..commands).for_each(|_| chaos.once(Fault::ErrorBefore)),
        }
        gate.open();
        assert_eq!(first.await.expect("joined"), 1, "it came first");
        for received in join_all(later).await {
            let received = received.expect("joined");
            assert!(!invalidated || received == 2, "{received}: invalidated before its request");
        }
        assert_eq!(counter.started(), loads, "invalidated: {invalidated}, outage of {outage:?}");
    }
}

/// The value has sixteen tags of its own, beside the fifteen tags of the policy and the tag of `invalidate_all`: each of them invalidates
/// the value.
#[tokio::test(start_paused = true)]
async fn a_value_has_up_to_sixteen_tags_beside_its_policys() {
    let tags = |what: &'static str, most: usize| (0..most).map(move |number| format!("{what} {number}"));
    for tag in ["own 0", "own 15", "policy 0", "policy 14", ""] {
        let guards = replicas(Policy::builder().max_tags(16).tags(tags("policy", 15)).invalidate_all(true));
        guards[0].insert_with_tags("inserted", &1_u32, tags("own", 16)).await.expect("stored");
        let load = move |mut cx: LoadContext<u32>| async move {
            cx.tag(tags("own", 16)).await.expect("tagged");
            Ok::<_, String>(2)
        };
        let one_more = move |mut cx: LoadContext<u32>| async move {
            cx.tag(tags("own", 16)).await.expect("tagged");
            assert!(cx.tag(["one more"]).await.is_err());
            Ok::<_, String>(3)
        };
        assert_eq!(guards[1].load("too many").get(one_more).await.ok().map(|loaded| loaded.value), Some(3));
        assert_eq!(get(&guards[1], "too many").await, None, "an invalidation would miss it");
        assert_eq!(guards[1].load("loaded").get(load).await.ok().map(|loaded| loaded.value), Some(2));
        assert_eq!((get(&guards[2], "inserted").await, get(&guards[2], "loaded").await), (Some(1), Some(2)));
        match tag {
            "" => guards[3].invalidate_all().await.expect("confirmed"),
            tag => guards[3].invalidate_tag(tag).await.expect("confirmed"),
        }
        assert_eq!(
            (get(&guards[2], "inserted").await, get(&guards[2], "loaded").await),
            (None, None),
            "{tag}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn bad_tags_are_refused_by_name() {
    let refused = Policy::builder().tags([""]).build().expect_err("empty");
    assert!(refused.to_string().contains("tags"), "{refused}");
    assert!(Policy::builder().tags((0..16).map(|tag| tag.to_string())).build().is_err());
    let guard = StampedeGuard::in_memory();
    assert!(guard.invalidate_tag("").await.is_err());
    let refused = guard.insert_with_tags("k", &1_u32, [""]).await.expect_err("empty");
    assert_eq!(refused.kind(), ErrorKind::InvalidKey);
    assert!(refused.to_string().contains("give it at least one character"), "{refused}");
    let refused = guard.insert_with_tags("k", &1_u32, (0..65).map(|tag| tag.to_string())).await;
    let refused = refused.expect_err("too many");
    assert_eq!(refused.kind(), ErrorKind::InvalidKey);
    assert!(
        refused.to_string().contains("max_tags, which is 64") && refused.to_string().contains("65"),
        "{refused}"
    );
    let load = |mut cx: LoadContext<u32>| async move {
        assert!(cx.tag([""]).await.is_err());
        assert!(cx.tag((0..65).map(|tag| tag.to_string())).await.is_err());
        cx.tag(["fine"]).await.map_err(|error| error.to_string())?;
        Ok::<_, String>(1)
    };
    assert_eq!(guard.load("k").get(load).await.ok().map(|loaded| loaded.value), Some(1));
}
