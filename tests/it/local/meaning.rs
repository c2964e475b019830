//! A policy and a call mean the same with a local tier as without one.

use std::sync::Arc;
use std::time::Duration;

use stampede_guard::{ErrorKind, LoadContext, LoadError, Policy, StampedeGuard};
use tokio::time::sleep;

use super::{keeping, load, load_shared, replicas, warm};

#[tokio::test(start_paused = true)]
async fn each_change_reaches_the_copies_of_all_replicas() {
    let policy =
        || keeping().tags(["all of them"]).invalidate_all(true).stale_if_error(Duration::from_secs(60));
    let [one, two] = replicas(policy());
    let mut newest = 0;
    for change in ["invalidate", "insert", "expire", "refresh", "tag", "all"] {
        for guard in [&one, &two] {
            load(guard, "k", newest).await;
            warm(guard, "k").await;
            assert_eq!(load(guard, "k", 99).await, newest, "before {change}");
        }
        newest += 1;
        let value = newest;
        match change {
            "invalidate" => one.invalidate("k").await.expect("acknowledged"),
            "insert" => one.insert("k", &value).await.expect("acknowledged"),
            "expire" => one.expire("k").await.expect("acknowledged"),
            "refresh" => drop(one.load("k").refresh(move |_| async move { Ok::<_, String>(value) }).await),
            "tag" => one.invalidate_tag("all of them").await.expect("acknowledged"),
            _ => one.invalidate_all().await.expect("acknowledged"),
        }
        assert_eq!(load(&two, "k", newest).await, newest, "after {change}");
        assert_eq!(load(&one, "k", newest).await, newest, "after {change}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_values_own_tag_invalidates_its_copies() {
    let [one, two] = replicas(keeping());
    let tagged = |guard: StampedeGuard, value: u32| async move {
        let load = move |mut cx: LoadContext<u32>| async move {
            cx.tag(["user 7"]).await.map_err(|error| error.to_string())?;
            Ok::<_, String>(value)
        };
        guard.load("k").get(load).await.expect("loaded").value
    };
    assert_eq!(tagged(one.clone(), 1).await, 1);
    for guard in [&one, &two] {
        warm(guard, "k").await;
    }
    two.invalidate_tag("user 7").await.expect("acknowledged");
    assert_eq!(tagged(one.clone(), 2).await, 2);
    assert_eq!(tagged(two.clone(), 3).await, 2);
}

#[tokio::test(start_paused = true)]
async fn callers_share_one_decoded_value() {
    let [guard] = replicas(keeping());
    load_shared(&guard, "k", 5).await;
    warm(&guard, "k").await;
    let (a, b) = (load_shared(&guard, "k", 6).await, load_shared(&guard, "k", 7).await);
    assert!(Arc::ptr_eq(&a, &b));
    let c = guard.get_shared::<u32>("k").await.expect("answered").expect("a value");
    assert!(Arc::ptr_eq(&a, &c));
}

#[tokio::test(start_paused = true)]
async fn a_copy_of_another_type_is_a_miss() {
    let [guard] = replicas(keeping());
    load_shared(&guard, "k", 5).await;
    warm(&guard, "k").await;
    load_shared(&guard, "k", 5).await;
    assert_eq!(guard.get_shared::<String>("k").await.expect("answered"), None);
    let text = guard.load("k").get_shared(|_| async { Ok::<_, String>("text".to_owned()) }).await;
    assert_eq!(*text.expect("loaded").value, "text");
    // The older value was replaced.
    assert_eq!(*load_shared(&guard, "k", 6).await, 6);
}

#[tokio::test(start_paused = true)]
async fn a_copy_is_served_for_local_for_and_not_past_its_freshness() {
    let short = Duration::from_secs(3);
    let [guard] = replicas(keeping().local_for(short));
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    sleep(short).await;
    let hits = guard.stats().local_hits;
    assert_eq!(load(&guard, "k", 2).await, 1, "the store has it");
    assert_eq!(guard.stats().local_hits, hits);

    let [guard] = replicas(keeping().fresh_for(short));
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    sleep(short).await;
    assert_eq!(load(&guard, "k", 2).await, 2);
}

#[tokio::test(start_paused = true)]
async fn negative_values_have_their_own_lifetime() {
    let [guard] = replicas(keeping().negative_for(Duration::from_secs(2)));
    let nothing = || guard.get_or_load("k", || async { Ok::<_, String>(None::<u32>) });
    let something = || guard.get_or_load("k", || async { Ok::<_, String>(Some(1_u32)) });
    assert_eq!(nothing().await.expect("loaded"), None);
    sleep(Duration::from_millis(1_900)).await;
    assert_eq!(something().await.expect("loaded"), None);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(something().await.expect("loaded"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn an_aging_copy_is_refreshed_in_the_background() {
    let fresh = Duration::from_secs(10);
    let [guard] = replicas(keeping().fresh_for(fresh).refresh_ahead(0.5));
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    sleep(fresh * 6 / 10).await;
    assert_eq!(load(&guard, "k", 2).await, 1, "served while its new load runs");
    sleep(Duration::from_millis(10)).await;
    assert_eq!(load(&guard, "k", 3).await, 2);
    assert_eq!(guard.stats().early_refreshes, 1);
}

#[tokio::test(start_paused = true)]
async fn a_stale_value_is_served_by_the_stale_window() {
    let fresh = Duration::from_secs(10);
    let [guard] = replicas(keeping().fresh_for(fresh).stale_while_revalidate(Duration::from_secs(60)));
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    sleep(fresh).await;
    let stale = guard.stats().stale;
    assert_eq!(load(&guard, "k", 2).await, 1);
    assert_eq!(guard.stats().stale, stale + 1);
    sleep(Duration::from_millis(10)).await;
    assert_eq!(load(&guard, "k", 3).await, 2);
}

#[tokio::test(start_paused = true)]
async fn a_load_that_requests_its_own_key_fails_as_reentrant() {
    let [guard] = replicas(keeping());
    let inner = guard.clone();
    let load = move || async move {
        let again = inner.get_or_load("k", || async { Ok::<_, String>(1_u32) }).await;
        match again {
            Err(LoadError::Guard(error)) if error.kind() == ErrorKind::Reentrant => Ok::<_, String>(2_u32),
            other => Err(format!("{other:?}")),
        }
    };
    assert_eq!(guard.get_or_load("k", load).await.expect("loaded"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_policy_with_further_tags_does_not_use_a_copy_without_them() {
    let [guard] = replicas(keeping());
    let tagged = guard.with_policy(keeping().tags(["t"]).build().expect("valid"));
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    assert_eq!(
        load(&tagged, "k", 2).await,
        2,
        "an invalidation of the tag would not have reached that value"
    );
    tagged.invalidate_tag("t").await.expect("acknowledged");
    assert_eq!(load(&tagged, "k", 3).await, 3);
}

#[tokio::test(start_paused = true)]
async fn a_policy_without_copies_reads_the_store() {
    let [guard] = replicas(keeping());
    let plain = guard.with_policy(Policy::default());
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    let hits = guard.stats().local_hits;
    assert_eq!(load(&plain, "k", 2).await, 1);
    assert_eq!(guard.stats().local_hits, hits);
}

/// A value that calls the guard when it is dropped, which may happen while the guard removes its copy.
#[derive(serde::Serialize, serde::Deserialize)]
struct Calling(u32);

static KEEPS: std::sync::OnceLock<StampedeGuard> = std::sync::OnceLock::new();

impl Drop for Calling {
    fn drop(&mut self) {
        if let Some(guard) = KEEPS.get() {
            let _ = futures_util::FutureExt::now_or_never(guard.shutdown(Duration::ZERO));
        }
    }
}

#[test]
fn a_value_is_dropped_while_no_lock_of_the_guard_is_held() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let [keeps, other] = replicas(keeping());
            load(&keeps, "another key", 1).await;
            warm(&keeps, "another key").await;
            for _ in 0..2 {
                let load = || async { Ok::<_, String>(Calling(1)) };
                assert_eq!(keeps.load("k").get_shared(move |_| load()).await.expect("loaded").value.0, 1);
            }
            assert!(KEEPS.set(keeps).is_ok());
            other.invalidate("k").await.expect("acknowledged");
        });
        done.send(()).expect("the test waits");
    });
    ended.recv_timeout(Duration::from_secs(30)).expect("no lock is waited for");
}

/// A value that replaces an older one and cannot be stored ends the copies of the older one, like a value that is stored.
#[tokio::test(start_paused = true)]
async fn a_value_that_can_not_be_stored_reaches_the_copies_of_the_older_one() {
    let policy = || keeping().max_body(100).refresh_ahead(0.5);
    for change in ["do_not_store", "refresh", "insert", "early"] {
        let [one, two] = replicas(policy());
        let old = "old".to_owned();
        one.insert("k", &old).await.expect("stored");
        let ask = async |guard: &StampedeGuard| {
            let load = || async { Ok::<_, String>("loaded".to_owned()) };
            guard.get_or_load("k", load).await.expect("loaded")
        };
        for guard in [&one, &two] {
            for _ in 0..200 {
                let hits = guard.stats().local_hits;
                assert_eq!(ask(guard).await, old);
                if guard.stats().local_hits > hits {
                    break;
                }
                sleep(Duration::from_millis(5)).await;
            }
        }
        let long = "x".repeat(200);
        let not_stored = |mut cx: LoadContext<String>| async move {
            cx.do_not_store();
            Ok::<_, String>("new".to_owned())
        };
        match change {
            "do_not_store" => drop(one.load("k").refresh(not_stored).await.expect("loaded")),
            "refresh" => {
                let load = move || async move { Ok::<_, String>(long) };
                drop(one.load("k").refresh(move |_| load()).await.expect("loaded"));
            }
            "insert" => {
                let error = one.insert("k", &long).await.expect_err("too long");
                assert_eq!(error.kind(), ErrorKind::Encode);
            }
            _ => {
                // The fresh value is refreshed in the background, and no caller waits for that.
                sleep(Duration::from_secs(301)).await;
                assert_eq!(one.load("k").get(not_stored).await.expect("served").value, old);
                sleep(Duration::from_millis(50)).await;
            }
        }
        assert_eq!(two.get::<String>("k").await.expect("answered"), None, "{change}");
        assert_eq!(one.get::<String>("k").await.expect("answered"), None, "{change}");
        assert_eq!(ask(&two).await, "loaded", "{change}");
    }
}
