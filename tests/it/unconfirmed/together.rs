//! One invalidation of many targets: what happens to the first loses none of the others.

use std::future::Future;

use stampede_guard::{CacheKey, Error, InvalidationTarget, MemoryStore};

use super::*;

const KEYS: [&str; 3] = ["a", "b", "c"];

fn key(key: impl Into<CacheKey>) -> InvalidationTarget {
    InvalidationTarget::Key(key.into())
}

/// Stores three values with these keys, and three values with one of these tags each.
async fn stored() -> Two {
    let two = Two::new(Policy::builder());
    for key in KEYS {
        load(&two.cut, key, 1).await;
        two.cut.insert_with_tags(("tagged", key), &1_u32, [("tag", key)]).await.expect("stored");
    }
    two
}

fn all(guard: &StampedeGuard) -> impl Future<Output = Result<(), Error>> + Send + 'static {
    KEYS.into_iter().fold(guard.invalidation().keys(KEYS), |all, key| all.tag(("tag", key))).send()
}

async fn assert_invalidated(two: &Two) {
    for key in KEYS {
        assert_eq!(get(&two.other, key).await, None, "{key}");
        assert_eq!(two.other.get::<u32>(("tagged", key)).await.expect("answered"), None, "{key}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_names_all_that_is_not_confirmed_after_one_deadline() {
    let two = stored().await;
    two.line.cut();
    let began = Instant::now();
    let error = all(&two.cut).await.expect_err("cut off");
    assert!(began.elapsed() <= Duration::from_millis(2_100), "{:?}", began.elapsed());
    let tags = KEYS.map(|key| InvalidationTarget::Tag(("tag", key).into()));
    assert_eq!(error.unconfirmed(), [KEYS.map(key), tags].concat());
    let text = error.to_string();
    assert!(error.is_store() && text.starts_with("not confirmed yet: 6 of 6 invalidations (key #"), "{text}");
    assert!(text.contains(", tag #") && text.contains("They are kept"), "{text}");
    assert_eq!(two.cut.stats().kept_invalidations, 6);

    two.heal().await;
    assert_eq!(get(&two.cut, "c").await, None, "this process serves none of them");
    two.eventually_sent().await;
    assert_invalidated(&two).await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_invalidation_loses_none() {
    for patience in [None, Some(Duration::ZERO), Some(Duration::from_millis(50))] {
        let two = stored().await;
        two.line.cut();
        let sending = all(&two.cut);
        match patience {
            // The future is not polled once.
            None => drop(sending),
            Some(patience) => drop(timeout(patience, sending).await.expect_err("it is dropped")),
        }
        assert_eq!(two.cut.stats().kept_invalidations, 6, "{patience:?}");
        two.heal().await;
        two.eventually_sent().await;
        assert_invalidated(&two).await;
    }
}

/// More targets than are sent at once: when the future is dropped, only the first ones have been sent.
#[tokio::test(start_paused = true)]
async fn a_cancellation_between_the_commands_loses_none_of_ten_thousand() {
    let chaos = ChaosStore::new(1);
    let guard = StampedeGuard::new(chaos.clone());
    chaos.latency(Duration::from_millis(200), Duration::from_millis(200));
    let sending = guard.invalidation().keys(0..10_000_u64).send();
    timeout(Duration::from_millis(700), sending).await.expect_err("it is dropped");
    let stats = guard.stats();
    assert!(stats.invalidations > 0 && stats.kept_invalidations > 5_000, "{stats:?}");
    assert_eq!(stats.invalidations + stats.kept_invalidations, 10_000);
    sleep(SENT * 10).await;
    assert_eq!((guard.stats().kept_invalidations, guard.stats().invalidations), (0, 10_000));
}

#[tokio::test(start_paused = true)]
async fn nothing_happens_before_send() {
    let two = stored().await;
    let before = two.cut.stats().invalidations;
    drop(two.cut.invalidation().keys(KEYS));
    two.cut.invalidation().send().await.expect("there is nothing to send");
    assert_eq!((get(&two.other, "a").await, two.cut.stats().invalidations), (Some(1), before));
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_named_twice_is_invalidated_once() {
    let two = stored().await;
    let before = two.cut.stats().invalidations;
    let twice = || two.cut.invalidation().key("a").keys(["a", "b"]).tag("a").tag("a").send();
    twice().await.expect("confirmed");
    assert_eq!(two.cut.stats().invalidations - before, 3);
    two.line.cut();
    let error = twice().await.expect_err("cut off");
    assert_eq!(error.unconfirmed(), [key("a"), key("b"), InvalidationTarget::Tag("a".into())]);
    assert!(error.to_string().contains("3 of 3 invalidations"), "{error}");
    let answers = two.cut.invalidate_many(["b", "b"]).await;
    let unconfirmed = answers.iter().map(|answer| answer.as_ref().expect_err("cut off").unconfirmed());
    assert_eq!(unconfirmed.collect::<Vec<_>>(), [[key("b")], [key("b")]]);
}

/// On the in-memory store, and on a store that is cut off, all other targets are invalidated or retained.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_none_is_an_error_and_keeps_back_no_other() {
    let guard = StampedeGuard::new(MemoryStore::new());
    guard.insert("a", &1_u32).await.expect("stored");
    let error = guard.invalidation().key("").key("a").tag("").send().await.expect_err("two are empty");
    assert_eq!((error.kind(), error.unconfirmed()), (ErrorKind::InvalidKey, &[][..]));
    assert_eq!(get(&guard, "a").await, None);

    let two = stored().await;
    two.line.cut();
    let error = two.cut.invalidation().key("a").key("").send().await.expect_err("cut off");
    assert_eq!(error.unconfirmed(), [key("a")]);
    let text = error.to_string();
    assert!(text.contains("1 of 2 invalidations") && text.contains("the cache key is empty"), "{text}");
    two.heal().await;
    two.eventually_sent().await;
    assert_eq!(get(&two.other, "a").await, None);
}

#[cfg(feature = "http")]
#[tokio::test(start_paused = true)]
async fn a_path_is_one_target_with_all_of_its_keys() {
    use stampede_guard::http::HttpPolicy;

    let http = HttpPolicy::default().authority("shop.example").key(|_| Some("cohort".to_owned()));
    let two = Two::new(Policy::builder().http(http));
    let request = http::Request::get("/p?a").body(()).expect("a request");
    let of_path = two.cut.http_key(&request).expect("a key");
    two.cut.insert(of_path.clone(), &1_u32).await.expect("stored");
    let without_headers = two.cut.invalidation().path("/p?a").key("a").path("no path");
    two.line.cut();
    let began = Instant::now();
    let error = without_headers.send().await.expect_err("cut off");
    assert!(began.elapsed() <= Duration::from_millis(2_100), "{:?}", began.elapsed());
    assert_eq!(error.unconfirmed(), [InvalidationTarget::Path("/p?a".into()), key("a")]);
    let text = error.to_string();
    assert!(
        text.contains("2 of 3 invalidations (path #") && text.contains("\"no path\" is no path"),
        "{text}"
    );
    let error = two.cut.invalidate_path("/p?a").await.expect_err("cut off");
    assert_eq!(error.unconfirmed(), [InvalidationTarget::Path("/p?a".into())]);
    assert!(error.to_string().starts_with("not confirmed yet: the invalidation of key #"), "{error}");
}

/// An unsafe request changes its target and its `Location`.
#[cfg(feature = "http")]
#[tokio::test(start_paused = true)]
async fn an_unsafe_method_during_an_outage_loses_none_of_its_resources() {
    use http::{Request, Response};
    use tower::{Layer as _, ServiceExt as _, service_fn};

    let two = Two::new(Policy::builder());
    let made = service_fn(|_: Request<String>| async {
        Ok::<_, std::convert::Infallible>(
            Response::builder().header("location", "/made").body(String::new()).expect("a response"),
        )
    });
    let request = |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).header("host", "shop.example");
        request.body(String::new()).expect("a request")
    };
    let keys = ["/all", "/made"].map(|path| two.cut.http_key(&request("GET", path)).expect("a key"));
    for key in &keys {
        two.cut.insert(key.clone(), &1_u32).await.expect("stored");
    }
    two.line.cut();
    let response = two.cut.layer(made).oneshot(request("POST", "/all")).await.expect("a response");
    assert_eq!(response.status(), 200);
    sleep(SENT).await;
    // Both resources have a key and the tag of their proxies' reports.
    assert_eq!(two.cut.stats().kept_invalidations, 4);
    two.heal().await;
    two.eventually_sent().await;
    for key in keys {
        assert_eq!(two.other.get::<u32>(key).await.expect("answered"), None);
    }
}
