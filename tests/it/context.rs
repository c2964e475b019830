//! `LoadContext` and direct calls: lifetimes set by the loader, validators, refresh and expire.
//!
//! The tests run on the in-memory store with a paused clock.

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{Codec, LoadContext, MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::task::yield_now;
use tokio::time::{advance, sleep};

use crate::support::gate::{Counter, Gate};

const LOAD: Duration = Duration::from_millis(200);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Values are fresh for exactly 10 s.
fn policy() -> PolicyBuilder {
    Policy::builder().fresh_for(secs(10)).ttl_jitter(0.0)
}

fn guard(policy: PolicyBuilder) -> StampedeGuard {
    StampedeGuard::builder(MemoryStore::new()).policy(policy.build().expect("valid")).build().expect("valid")
}

async fn fresh(guard: &StampedeGuard) -> Option<u64> {
    guard.remaining_freshness("key").await.expect("answered").map(|left| left.as_secs())
}

#[tokio::test(start_paused = true)]
async fn a_loader_decides_the_lifetimes_of_its_value() {
    let guard = guard(policy());
    let load = |mut cx: LoadContext<u8>| async move {
        cx.fresh_for(secs(3));
        cx.stale_while_revalidate(secs(2));
        Ok::<_, String>(1)
    };
    assert_eq!(guard.load("key").get(load).await.ok().map(|loaded| loaded.value), Some(1));
    assert_eq!(fresh(&guard).await, Some(3));
    advance(secs(4)).await;
    assert_eq!(fresh(&guard).await, Some(0));
    assert!(guard.contains("key").await.expect("answered"), "stale, and servable");
    advance(secs(2)).await;
    assert!(!guard.contains("key").await.expect("answered"));
    assert_eq!(fresh(&guard).await, None, "nothing is stored past its windows");
}

#[tokio::test(start_paused = true)]
async fn do_not_store_shares_a_value_with_waiters_and_no_later_caller() {
    let (guard, loads, gate) = (guard(policy()), Counter::default(), Gate::closed());
    let ask = || {
        let (guard, loads, gate) = (guard.clone(), loads.clone(), gate.clone());
        async move {
            let load = move |mut cx: LoadContext<u8>| async move {
                let _running = loads.start();
                gate.pass().await;
                cx.do_not_store();
                Ok::<_, String>(1)
            };
            guard.load("key").get(load).await.ok().map(|loaded| loaded.value)
        }
    };
    let wave = tokio::spawn(join_all((0..10).map(|_| ask())));
    sleep(secs(1)).await;
    gate.open();
    assert_eq!(wave.await.expect("joined"), [Some(1); 10]);
    assert_eq!(loads.started(), 1);
    assert_eq!(ask().await, Some(1));
    assert_eq!(loads.started(), 2);
}

/// Regression: a loader that set a stale window after `do_not_store` had its value stored, and served for a failed load.
#[tokio::test(start_paused = true)]
async fn do_not_store_wins_over_every_lifetime() {
    let guard = guard(policy());
    let says: [fn(&mut LoadContext<u8>); 4] = [
        |cx| cx.fresh_for(secs(60)),
        |cx| cx.stale_while_revalidate(secs(60)),
        |cx| cx.stale_if_error(secs(60)),
        |cx| cx.negative(),
    ];
    for say in says {
        for before in [true, false] {
            let load = move |mut cx: LoadContext<u8>| async move {
                if before {
                    say(&mut cx);
                }
                cx.do_not_store();
                if !before {
                    say(&mut cx);
                }
                Ok::<_, String>(1)
            };
            assert_eq!(guard.load("key").get(load).await.ok().map(|loaded| loaded.value), Some(1));
            let fails = guard.get_or_load("key", || async { Err::<u8, _>("down") }).await;
            assert!(fails.is_err(), "{fails:?}");
            sleep(secs(60)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_conditional_load_keeps_the_previous_value_and_restarts_its_freshness() {
    let guard = guard(policy().stale_if_error(secs(60)));
    let load = |case: &'static str, expected: Option<&'static str>| {
        move |mut cx: LoadContext<String>| async move {
            assert_eq!(cx.validator(), expected, "{case}");
            match cx.take_previous() {
                Some(previous) => Ok::<_, String>(previous),
                None => {
                    cx.set_validator("\"v1\"");
                    Ok("the report".to_owned())
                }
            }
        }
    };
    let ask = |case, expected| guard.load("key").get(load(case, expected));
    assert_eq!(ask("first", None).await.expect("loaded").value, "the report");
    for _ in 0..3 {
        advance(secs(11)).await;
        assert_eq!(ask("again", Some("\"v1\"")).await.expect("loaded").value, "the report");
        assert_eq!(fresh(&guard).await, Some(10));
    }
}

/// A validator without its value would turn "not modified" into a value.
#[tokio::test(start_paused = true)]
async fn a_previous_value_of_another_type_is_dropped_with_its_validator() {
    let guard = guard(policy().stale_if_error(secs(60)));
    let load = |mut cx: LoadContext<String>| async move {
        cx.set_validator("v1");
        Ok::<_, String>("text".to_owned())
    };
    guard.load("key").get(load).await.expect("loaded");
    advance(secs(11)).await;
    let load = |cx: LoadContext<u32>| async move {
        assert_eq!((cx.previous(), cx.validator()), (None, None));
        Ok::<_, String>(7)
    };
    assert_eq!(guard.load("key").get(load).await.ok().map(|loaded| loaded.value), Some(7));
}

#[tokio::test(start_paused = true)]
async fn a_loader_learns_of_its_lost_lease_and_its_deadline() {
    let guard = guard(policy().load_timeout(secs(20)));
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let load = move |cx: LoadContext<u8>| async move {
        sender.send(cx.deadline()).expect("received");
        cx.lost().await;
        sender.send(tokio::time::Instant::now()).expect("received");
        Ok::<_, String>(1)
    };
    let started = tokio::time::Instant::now();
    let call = tokio::spawn({
        let guard = guard.clone();
        async move { guard.load("key").get(load).await.ok().map(|loaded| loaded.value) }
    });
    assert_eq!(receiver.recv().await, Some(started + secs(20)));
    guard.invalidate("key").await.expect("confirmed");
    let lost = receiver.recv().await.expect("sent");
    assert!(lost - started < secs(1), "{:?}", lost - started);
    assert_eq!(call.await.expect("joined"), Some(1));
    assert_eq!(fresh(&guard).await, None, "it was not stored");
}

#[tokio::test(start_paused = true)]
async fn a_negative_value_is_stored_for_negative_for() {
    let guard = guard(policy().negative_for(secs(2)));
    let found = guard.get_or_load("key", || async { Ok::<_, String>(None::<u8>) }).await;
    assert_eq!(found.ok(), Some(None));
    assert_eq!(fresh(&guard).await, Some(2));
    let load = |mut cx: LoadContext<String>| async move {
        cx.negative();
        Ok::<_, String>("no such user".to_owned())
    };
    guard.load("key").refresh(load).await.expect("loaded");
    assert_eq!(fresh(&guard).await, Some(2));
    guard.load("key").refresh(|_| async { Ok::<_, String>(Some(1_u8)) }).await.expect("loaded");
    assert_eq!(fresh(&guard).await, Some(10));
    assert_eq!(guard.stats().negatives, 2);
}

#[tokio::test(start_paused = true)]
async fn refresh_loads_once_for_all_its_callers_and_others_are_served_meanwhile() {
    let (guard, loads) = (guard(policy()), Counter::default());
    guard.insert("key", &0_usize).await.expect("stored");
    let refresh = || {
        let (guard, loads) = (guard.clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                sleep(LOAD).await;
                Ok::<_, String>(loads.started())
            };
            guard.load("key").refresh(move |_| load()).await.ok().map(|loaded| loaded.value)
        }
    };
    let all = tokio::spawn(join_all((0..20).map(|_| refresh())));
    sleep(LOAD / 2).await;
    assert_eq!(guard.get("key").await.expect("answered"), Some(0_usize));
    assert_eq!(all.await.expect("joined"), [Some(1); 20]);
    assert_eq!(guard.get("key").await.expect("answered"), Some(1_usize));
}

#[tokio::test(start_paused = true)]
async fn a_failed_refresh_is_an_error_and_leaves_the_stored_value() {
    for policy in [policy(), policy().stale_if_error(secs(60)).soft_timeout(LOAD / 4)] {
        let guard = guard(policy.load_timeout(secs(5)));
        guard.insert("key", &0_u8).await.expect("stored");
        let fails = || async {
            sleep(LOAD).await;
            Err::<u8, _>("no route".to_owned())
        };
        let refresh = || guard.load("key").refresh(move |_| fails());
        let (one, other) = tokio::join!(refresh(), refresh());
        assert_eq!(one.expect_err("fails").loader().map(String::as_str), Some("no route"));
        assert!(other.is_err(), "nothing stands in for a refresh");
        assert_eq!(guard.stats().loads, 1);
        let panics = guard.load("key").refresh(|_| async { panic!("scripted panic") as Result<u8, String> });
        assert!(panics.await.is_err());
        let hangs = guard.load("key").refresh(|_| std::future::pending::<Result<u8, String>>());
        assert!(hangs.await.is_err());
        assert_eq!(guard.get("key").await.expect("answered"), Some(0_u8));
    }
}

#[tokio::test(start_paused = true)]
async fn an_expired_value_is_loaded_again_and_stands_in_if_that_fails() {
    let guard = guard(policy().stale_if_error(secs(60)).stale_while_revalidate(secs(60)));
    guard.insert("key", &1_u8).await.expect("stored");
    guard.expire("key").await.expect("confirmed");
    assert_eq!(guard.get::<u8>("key").await.expect("answered"), None);
    let ask = |answer: Result<u8, String>| guard.get_or_load("key", move || async move { answer });
    assert_eq!(ask(Err("no route".into())).await.ok(), Some(1), "it stands in");
    guard.expire("key").await.expect("confirmed");
    assert_eq!(ask(Ok(2)).await.ok(), Some(2));
}

/// Regression: if the value was longer than 64 KiB, all waiters in other processes loaded for themselves at once.
#[tokio::test(start_paused = true)]
async fn a_long_value_that_is_not_stored_is_shared_with_all_waiters() {
    let (store, loads) = (MemoryStore::new(), Counter::default());
    let guards = [(); 2].map(|()| StampedeGuard::new(store.clone()));
    let calls = (0..20).map(|caller| {
        let loads = loads.clone();
        guards[caller % 2].load("key").get(move |mut cx: LoadContext<String>| async move {
            let _running = loads.start();
            cx.fresh_for(Duration::ZERO);
            sleep(LOAD).await;
            Ok::<_, String>("x".repeat(200_000))
        })
    });
    let values = join_all(calls).await;
    assert!(values.iter().all(|value| value.as_ref().is_ok_and(|loaded| loaded.value.len() == 200_000)));
    assert_eq!(loads.started(), 1);
}

/// Regression: the waiter received the older value, which the second `expire` had retained for failed loads.
#[tokio::test(start_paused = true)]
async fn a_waiter_does_not_receive_an_expired_value() {
    let store = MemoryStore::new();
    let policy = policy().stale_if_error(secs(60)).build().expect("valid");
    let guards = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    guards[0].insert("key", &1_u8).await.expect("stored");
    guards[0].expire("key").await.expect("confirmed");
    let load = |replica: usize, value: u8| {
        let load = move || async move {
            sleep(secs(1)).await;
            Ok::<_, String>(value)
        };
        guards[replica].get_or_load("key", load)
    };
    let expires = async {
        sleep(secs(1) / 2).await;
        guards[0].expire("key").await.expect("confirmed");
    };
    let first = async {
        yield_now().await;
        load(0, 3).await
    };
    let (leads, waits, ()) = tokio::join!(load(1, 2), first, expires);
    assert_eq!((leads.ok(), waits.ok()), (Some(2), Some(3)));
}

#[tokio::test(start_paused = true)]
async fn expire_without_a_stale_window_invalidates() {
    let guard = guard(policy());
    guard.insert("key", &1_u8).await.expect("stored");
    guard.expire("key").await.expect("confirmed");
    assert_eq!(fresh(&guard).await, None);
    guard.expire("key").await.expect("nothing there is no error");
}

/// The policy's `negative_for` applies only if the loader has set no lifetime.
#[tokio::test(start_paused = true)]
async fn a_loaders_lifetime_of_a_negative_value_stands() {
    let guard = guard(policy().negative_for(secs(60)));
    let unsure = |mut cx: LoadContext<Option<u8>>| async move {
        cx.do_not_store();
        Ok::<_, String>(None)
    };
    assert_eq!(guard.load("key").get(unsure).await.ok().map(|loaded| loaded.value), Some(None));
    assert_eq!(fresh(&guard).await, None, "it was not to be stored");
    let short_lived = |mut cx: LoadContext<Option<u8>>| async move {
        cx.fresh_for(secs(3));
        Ok::<_, String>(None)
    };
    assert_eq!(guard.load("key").get(short_lived).await.ok().map(|loaded| loaded.value), Some(None));
    assert_eq!(fresh(&guard).await, Some(3));
}

/// Regression: an empty value that was stored directly lasted for `fresh_for` instead of `negative_for`.
#[tokio::test(start_paused = true)]
async fn an_inserted_negative_value_is_stored_for_negative_for() {
    for codec in [Codec::MessagePack, Codec::Json] {
        let guard = guard(policy().negative_for(secs(2)).codec(codec));
        guard.insert("key", &None::<u8>).await.expect("stored");
        assert_eq!(fresh(&guard).await, Some(2), "{codec:?}");
        guard.insert_with_tags("key", &(), ["tag"]).await.expect("stored");
        assert_eq!(fresh(&guard).await, Some(2), "{codec:?}");
        guard.insert("key", &Some(1_u8)).await.expect("stored");
        assert_eq!(fresh(&guard).await, Some(10), "{codec:?}");
    }
    let guard = guard(policy());
    guard.insert("key", &None::<u8>).await.expect("stored");
    assert_eq!(fresh(&guard).await, Some(10), "no lifetime of its own was requested");
}

/// Regression: such a lifetime panicked in the flight, so all waiters loaded for themselves, and nothing was stored.
#[tokio::test(start_paused = true)]
async fn an_endless_lifetime_is_accepted() {
    for jitter in [0.0, 0.1, 0.9] {
        let guard = guard(policy().ttl_jitter(jitter));
        let load = |mut cx: LoadContext<u8>| async move {
            cx.fresh_for(Duration::MAX);
            cx.stale_if_error(Duration::MAX);
            Ok::<_, String>(1)
        };
        assert_eq!(guard.load("key").get(load).await.ok().map(|loaded| loaded.value), Some(1));
        assert!(fresh(&guard).await.is_some_and(|left| left > 1 << 30), "jitter {jitter}");
    }
}
