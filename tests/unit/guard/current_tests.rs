use std::io;
use std::time::Duration;

use tokio::sync::oneshot;
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::*;
use crate::error::ErrorKind;
use crate::value::codec::Codec;

fn fresh_for(secs: u64) -> Policy {
    Policy::builder().fresh_for(Duration::from_secs(secs)).ttl_jitter(0.0).build().expect("valid")
}

fn guard(policy: Policy) -> StampedeGuard {
    StampedeGuard::in_memory().with_policy(policy)
}

async fn freshness(guard: &StampedeGuard, key: &str) -> u64 {
    // Rounds up, because a millisecond may have passed since the value was stored.
    guard
        .remaining_freshness(key)
        .await
        .expect("in memory")
        .map_or(0, |left| left.as_millis().div_ceil(1_000) as u64)
}

async fn load(guard: &StampedeGuard, key: &str) -> u8 {
    guard.get_or_load(key, || async { Ok::<_, io::Error>(1) }).await.expect("loaded")
}

#[tokio::test]
async fn all_clones_and_services_of_a_handle_get_its_new_policy() {
    let guard = guard(fresh_for(60));
    let clone = guard.clone();
    let service = clone
        .memoize(|key: &&'static str| CacheKey::from(*key))
        .layer(service_fn(|_: &'static str| async { Ok::<_, io::Error>(1_u8) }));
    let separate = guard.with_policy(fresh_for(7));

    guard.set_policy(fresh_for(5)).expect("set");

    assert_eq!(*clone.policy(), fresh_for(5));
    load(&clone, "by a clone").await;
    assert_eq!(freshness(&guard, "by a clone").await, 5);
    load(&clone.clone(), "by a later clone").await;
    assert_eq!(freshness(&guard, "by a later clone").await, 5);
    service.oneshot("by a service").await.expect("loaded");
    assert_eq!(freshness(&guard, "by a service").await, 5);
    let many = |keys: Vec<&'static str>| async {
        Ok::<_, io::Error>(keys.into_iter().map(|key| (key, 1_u8)).collect::<Vec<_>>())
    };
    guard.get_or_load_many(["of many"], many).await;
    assert_eq!(freshness(&guard, "of many").await, 5);
    guard.warm(["warmed"], 1, many).await;
    assert_eq!(freshness(&guard, "warmed").await, 5);
    guard.insert("inserted", &1_u8).await.expect("inserted");
    assert_eq!(freshness(&guard, "inserted").await, 5);

    // `with_policy` has made a separate handle, so `set_policy` on the first handle does not replace its policy.
    load(&separate, "separate").await;
    assert_eq!(freshness(&guard, "separate").await, 7);
    clone.set_policy(fresh_for(6)).expect("set once more");
    assert_eq!((guard.policy(), *separate.policy() == fresh_for(7)), (Arc::new(fresh_for(6)), true));
}

#[cfg(feature = "http")]
#[tokio::test]
async fn an_http_service_gets_the_new_policy() {
    use http::{Request, Response};
    use http_body_util::Full;

    let guard = guard(fresh_for(60));
    let inner = service_fn(|_: Request<Full<bytes::Bytes>>| async {
        Ok::<_, io::Error>(Response::new(Full::<bytes::Bytes>::from("page")))
    });
    let service = guard.layer(inner);
    let small_bodies = guard.policy().to_builder().max_body(3).build().expect("valid");
    guard.set_policy(small_bodies).expect("set");
    for _ in 0..2 {
        let request = Request::get("http://shop.example/").body(Full::default()).expect("a request");
        let response = service.clone().oneshot(request).await.expect("answered");
        http_body_util::BodyExt::collect(response.into_body()).await.expect("a body");
    }
    assert_eq!((guard.stats().unshareable, guard.stats().hits), (2, 0), "the new `max_body` holds");
}

#[tokio::test]
async fn a_load_that_runs_keeps_the_policy_that_it_began_with() {
    let guard = guard(fresh_for(60));
    let (began, has_begun) = oneshot::channel();
    let (go_on, may_go_on) = oneshot::channel();
    let caller = tokio::spawn({
        let guard = guard.clone();
        async move {
            let load = move || async move {
                began.send(()).expect("the test waits");
                may_go_on.await.map_err(io::Error::other)?;
                Ok::<_, io::Error>(1_u8)
            };
            guard.get_or_load("slow", load).await
        }
    });
    has_begun.await.expect("begun");
    guard.set_policy(fresh_for(5)).expect("set");
    go_on.send(()).expect("the load waits");
    caller.await.expect("no panic").expect("loaded");
    assert_eq!(freshness(&guard, "slow").await, 60);
    guard.invalidate("slow").await.expect("in memory");
    load(&guard, "slow").await;
    assert_eq!(freshness(&guard, "slow").await, 5);
}

#[tokio::test]
async fn the_new_policy_uses_the_counters_of_the_old_one() {
    let named = |secs| fresh_for(secs).to_builder().name("shop").build().expect("valid");
    let guard = guard(named(60));
    load(&guard, "a").await;
    guard.set_policy(named(5)).expect("set");
    load(&guard, "b").await;
    load(&guard, "b").await;
    assert!(Arc::ptr_eq(&guard.policy().counters, &guard.policy.counters));
    assert_eq!((guard.stats().loads, guard.stats().hits), (2, 1));
}

#[test]
fn a_setting_that_is_fixed_is_refused_by_name_and_nothing_changes() {
    let refused = |old: &Policy, new: Policy, name: &str| {
        let guard = guard(old.clone());
        let error = guard.set_policy(new).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
        assert!(error.to_string().starts_with(name), "{name}: {error}");
        assert_eq!(*guard.policy(), *old);
    };
    let old = fresh_for(60);
    let new = || old.to_builder();
    refused(&old, new().name("shop").build().expect("valid"), "name can not change");
    refused(&old, new().codec(Codec::Json).build().expect("valid"), "codec can not change");
    let by = new().audit_by(|a: &u8, b: &u8| a == b).build().expect("valid");
    refused(&old, by.clone(), "audit_by can not change");
    refused(&by, old.clone(), "audit_by can not change");
    let with_shared_errors = new().share_errors::<String>().build().expect("valid");
    refused(&with_shared_errors, old.clone(), "share_errors can not change");
    guard(old.clone()).set_policy(with_shared_errors).expect("a further type takes nothing away");
    guard(by.clone())
        .set_policy(by.to_builder().fresh_for(Duration::from_secs(5)).build().expect("valid"))
        .expect("set");
}

#[cfg(feature = "http")]
#[test]
fn an_http_setting_that_makes_keys_or_separates_clients_is_refused_by_name() {
    use http::HeaderName;

    use crate::http::HttpPolicy;

    let of = |http: HttpPolicy| Policy::builder().http(http).build().expect("valid");
    let mut report = http::HeaderMap::new();
    report.insert("x-forwarded-proto", http::HeaderValue::from_static("https"));
    let user = || HeaderName::from_static("x-user");
    for (old, new, name) in [
        (HttpPolicy::default(), HttpPolicy::strict(), "kind"),
        (HttpPolicy::default(), HttpPolicy::default().scheme(http::uri::Scheme::HTTPS), "scheme"),
        (HttpPolicy::default(), HttpPolicy::default().authority("shop.example"), "authority"),
        (HttpPolicy::default(), HttpPolicy::default().behind_proxy(report), "behind_proxy"),
        (HttpPolicy::private(), HttpPolicy::private().credential_header(user()), "credential_headers"),
        (HttpPolicy::private(), HttpPolicy::private().cookies(["session"]), "cookies"),
        (HttpPolicy::default().key(|_| None), HttpPolicy::default(), "key"),
        (HttpPolicy::default().personal_extension::<u8>(), HttpPolicy::default(), "personal_extension"),
    ] {
        let guard = guard(of(old.clone()));
        let error = guard.set_policy(of(new)).expect_err(name).to_string();
        assert!(error.starts_with(name), "{name}: {error}");
        assert_eq!(*guard.policy(), of(old));
    }
    let stricter = HttpPolicy::default().credential_header(user()).cookies(["session"]).expose_key(true);
    guard(of(HttpPolicy::default()))
        .set_policy(of(stricter))
        .expect("a shared cache may share less at any time");
    let keyed = |exposes_key: bool| of(HttpPolicy::default().expose_key(exposes_key).key(|_| None));
    guard(keyed(false)).set_policy(keyed(true)).expect("a function for a function");
}

#[test]
fn an_equal_policy_is_not_set_anew() {
    let guard = guard(fresh_for(60));
    guard.set_policy(fresh_for(60)).expect("equal");
    assert_eq!(guard.state.version(), 0);
}

#[test]
fn a_call_that_begins_after_the_last_change_has_the_last_policy() {
    let guard = guard(fresh_for(1));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let guard = &guard;
            scope.spawn(move || {
                for n in 1..500 {
                    guard.set_policy(fresh_for(1 + thread * 1_000 + n)).expect("set");
                    assert!(guard.current().policy.fresh_for >= Duration::from_secs(1));
                }
            });
        }
    });
    guard.set_policy(fresh_for(9)).expect("set");
    assert_eq!(guard.current().policy.fresh_for, Duration::from_secs(9));
    assert_eq!(guard.clone().current().policy.fresh_for, Duration::from_secs(9));
}

/// A guard whose copies are turned on while it runs gets the volume lease, like a guard whose builder turned them on.
#[tokio::test]
async fn copies_can_be_turned_on_and_off() {
    let guard = guard(fresh_for(60));
    let with = |local_for| guard.policy().to_builder().local_for(local_for).build().expect("valid");
    guard.set_policy(with(Duration::MAX)).expect("set");
    for _ in 0..3 {
        load(&guard, "key").await;
    }
    assert!(guard.stats().local_hits > 0);
    let hits = guard.stats().local_hits;
    guard.set_policy(with(Duration::ZERO)).expect("set");
    load(&guard, "key").await;
    assert_eq!(guard.stats().local_hits, hits);
}
