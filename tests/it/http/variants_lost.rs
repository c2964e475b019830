//! Which events remove the stored variants of a resource, and which do not.

use stampede_guard::StampedeGuard;
use stampede_guard::http::{HttpPolicy, cache_key};
use tower::{Layer as _, ServiceExt as _};

use super::kit::{
    Down, Inner, Req, all, ask, get, guard, policy, replicas, request, respond, secs, send, sent, settle,
    shop_with, whole,
};
use super::variants::{LANGUAGES, in_language};

fn by(headers: &[(&str, &str)]) -> Req {
    request("GET", "/", headers)
}

/// An error page seldom has a `Vary`. Regression: one error removed all variants, although they could have stood in for it.
#[tokio::test(start_paused = true)]
async fn an_error_says_nothing_about_the_variants_that_are_stored() {
    let inner = Inner::with(|n, request| {
        let language = sent(request, "accept-language").to_owned();
        if language == "xx" {
            return Ok(respond(500, &[], whole("sorry")));
        }
        let headers = [("vary", "Accept-Language"), ("cache-control", "max-age=60")];
        Ok(respond(200, &headers, whole(format!("{language} {n}"))))
    });
    let shops = replicas(2, &inner);
    for language in LANGUAGES {
        ask(&shops[0], in_language(language)).await;
    }
    assert_eq!(ask(&shops[1], in_language("xx")).await.status, 500);
    for (n, language) in LANGUAGES.iter().enumerate() {
        assert_eq!(ask(&shops[1], in_language(language)).await.text(), format!("{language} {}", n + 1));
    }
}

/// A request that comes during a load makes no look-up, because the load began when nothing was found. But if the resource has variants,
/// only one of them was not found, and the others may be stored.
#[tokio::test(start_paused = true)]
async fn a_request_for_a_fresh_variant_waits_for_no_other() {
    for ill in [None, Some(503)] {
        let inner = Inner::with(move |n, request| {
            let language = sent(request, "accept-language").to_owned();
            Ok(match ill {
                Some(status) if n > 2 => respond(status, &[], whole("sorry")),
                _ => {
                    let headers = [("vary", "Accept-Language"), ("cache-control", "max-age=10")];
                    respond(200, &headers, whole(format!("{language} {n}")))
                }
            })
        });
        let shops = replicas(2, &inner);
        ask(&shops[0], in_language("de")).await;
        tokio::time::sleep(secs(8)).await;
        ask(&shops[0], in_language("en")).await;
        tokio::time::sleep(secs(4)).await;
        inner.gate.close();
        let stale = send(&shops[0], in_language("de"));
        settle().await;
        for shop in &shops {
            let fresh = send(shop, in_language("en"));
            settle().await;
            assert!(fresh.is_finished(), "it waits for the other, {ill:?}");
            assert_eq!(fresh.await.unwrap().text(), "en 2");
        }
        inner.gate.open();
        stale.await.unwrap();
        assert_eq!(ask(&shops[0], in_language("en")).await.text(), "en 2");
    }
}

/// If a validation names a new header in `Vary`, its response is only for requests with the same value of that header.
#[tokio::test(start_paused = true)]
async fn a_validation_with_a_longer_vary_is_for_equal_requests_only() {
    let inner = Inner::with(|n, request| {
        let (language, tenant) = (sent(request, "accept-language"), sent(request, "x-tenant"));
        let dated = ("last-modified", "Tue, 15 Nov 1994 12:45:26 GMT");
        let vary = ("vary", if n < 3 { "Accept-Language" } else { "Accept-Language, X-Tenant" });
        let headers = [vary, dated, ("cache-control", "max-age=10")];
        Ok(match sent(request, "if-modified-since") {
            "" => respond(200, &headers, whole(format!("{language} of {tenant}, {n}"))),
            _ => respond(304, &headers, whole("")),
        })
    });
    let shops = replicas(2, &inner);
    let of = |language, tenant| request("GET", "/", &[("accept-language", language), ("x-tenant", tenant)]);
    ask(&shops[0], of("de", "1")).await;
    assert_eq!(ask(&shops[0], of("en", "1")).await.text(), "en of 1, 2");
    tokio::time::sleep(secs(12)).await;
    assert_eq!(ask(&shops[0], of("en", "1")).await.text(), "en of 1, 2", "it was confirmed for this one");
    assert_eq!(inner.calls(), 3);
    for shop in &shops {
        assert_eq!(ask(shop, of("en", "2")).await.text(), "en of 2, 4");
        assert!(ask(shop, of("en", "1")).await.text().starts_with("en of 1, "));
        assert!(ask(shop, of("de", "1")).await.text().starts_with("de of 1, "));
    }
}

/// The variants are found through the entry of the resource. Regression: a load had read this entry, and got the lease only after an
/// invalidation. Its commit brought all variants back.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn an_invalidation_between_look_up_and_lease_invalidates_all_variants() {
    use std::time::Duration;

    use stampede_guard::StampedeGuard;
    use stampede_guard::testing::ChaosStore;
    use tower::Layer as _;

    use super::kit::Shop;

    let inner = Inner::with(|n, request| {
        let language = sent(request, "accept-language").to_owned();
        let control = if language == "de" { "max-age=10" } else { "max-age=600" };
        let headers = [("vary", "Accept-Language"), ("cache-control", control)];
        Ok(respond(200, &headers, whole(format!("{language} {n}"))))
    });
    let chaos = ChaosStore::new(1);
    let shop: Shop = StampedeGuard::new(chaos.clone()).layer(inner.clone());
    let other: Shop = StampedeGuard::new(chaos.store()).layer(inner.clone());
    for language in ["de", "en"] {
        ask(&shop, in_language(language)).await;
    }
    tokio::time::sleep(secs(12)).await;
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    let before = chaos.commands();
    let stale = send(&shop, in_language("de"));
    while chaos.commands() == before {
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
    ask(&other, request("POST", "/", &[])).await;
    assert_eq!(stale.await.unwrap().text(), "de 4");
    assert_eq!(ask(&shop, in_language("en")).await.text(), "en 5", "not what was there before");
    assert_eq!(ask(&shop, in_language("de")).await.text(), "de 4");
}

/// An expiry of the resource also expires each of its variants, under whichever key it is stored.
#[tokio::test(start_paused = true)]
async fn an_expiry_reaches_all_variants() {
    for control in
        ["max-age=60, stale-if-error=60", "max-age=60, stale-while-revalidate=60, stale-if-error=60"]
    {
        let inner = Inner::with(move |n, request| {
            let language = sent(request, "accept-language").to_owned();
            let headers = [("vary", "Accept-Language"), ("cache-control", control)];
            Ok(respond(200, &headers, whole(format!("{language} {n}"))))
        });
        let guard = guard();
        let shop = guard.layer(inner.clone());
        for language in LANGUAGES {
            ask(&shop, in_language(language)).await;
        }
        guard.expire(cache_key(&"http://shop.example/".parse().unwrap()).unwrap()).await.unwrap();
        // Begins with a variant that is not the one stored with the resource: a load of the latter decides about all others.
        for (n, language) in ["en", "fr", "de"].iter().enumerate() {
            let seen = ask(&shop, in_language(language)).await;
            assert_eq!(seen.text(), format!("{language} {}", n + 4), "{control}");
        }
    }
}

/// Regression: each answer in the other format removed the stored responses of all languages, and was not stored
/// itself.
#[tokio::test(start_paused = true)]
async fn an_answer_with_a_shorter_vary_leaves_the_other_variants_stored() {
    let inner = Inner::with(|n, request| {
        let (format, coding) = (sent(request, "accept"), sent(request, "accept-encoding"));
        let headers: &[_] = match (format, coding) {
            ("html", _) => &[("vary", "accept, accept-language, accept-encoding")],
            (_, "gzip") => &[("vary", "accept, accept-encoding"), ("content-encoding", "gzip")],
            _ => &[],
        };
        Ok(respond(200, headers, whole(format!("{format} {coding} {n}"))))
    });
    let shops = replicas(2, &inner);
    let of = |format, coding, language| {
        let headers = [("accept", format), ("accept-encoding", coding), ("accept-language", language)];
        request("GET", "/", &headers)
    };
    let all = [("html", "gzip", "de"), ("json", "gzip", "de"), ("html", "gzip", "en"), ("json", "br", "de")];
    for round in 0..3 {
        for (n, (format, coding, language)) in all.into_iter().enumerate() {
            let seen = ask(&shops[round % 2], of(format, coding, language)).await;
            assert_eq!(seen.text(), format!("{format} {coding} {}", n + 1), "round {round}");
        }
    }
    assert_eq!(inner.calls(), all.len());
}

/// The entry of the resource says on which headers it depends. If the origin now depends on fewer headers, that counts from the next load
/// on.
#[tokio::test(start_paused = true)]
async fn a_resource_with_a_shorter_vary_uses_it_from_its_next_load_on() {
    let inner = Inner::with(|n, _| {
        let lasting = ("cache-control", "max-age=10");
        let headers: &[_] = if n <= 2 { &[("vary", "x-tier"), lasting] } else { &[lasting] };
        Ok(respond(200, headers, whole(n.to_string())))
    });
    let shops = replicas(2, &inner);
    let of = |tier| request("GET", "/", &[("x-tier", tier)]);
    for (tier, text) in [("1", "1"), ("2", "2"), ("3", "3"), ("1", "1"), ("2", "2"), ("3", "3")] {
        assert_eq!(ask(&shops[0], of(tier)).await.text(), text, "stored, and fresh");
    }
    tokio::time::sleep(secs(11)).await;
    for tier in ["1", "2", "3", "4"] {
        assert_eq!(ask(&shops[1], of(tier)).await.text(), "4", "{tier}");
    }
}

/// Regression: each of these requests loaded, because their responses replaced the first one's.
#[tokio::test(start_paused = true)]
async fn requests_with_credentials_behind_another_variant_share_a_load() {
    let inner = Inner::with(|n, request| {
        let language = sent(request, "accept-language");
        let headers = [("cache-control", "public, max-age=60"), ("vary", "accept-language")];
        Ok(respond(200, &headers, whole(format!("{language} {n}"))))
    });
    let inner = inner.held();
    let shop = shop_with(&inner, policy().http(HttpPolicy::default().share_cookies(true)));
    let evil = send(&shop, by(&[("accept-language", "de"), ("cookie", "a=1")]));
    settle().await;
    let clients: Vec<_> = (0..10).map(|_| send(&shop, by(&[("cookie", "a=1")]))).collect();
    settle().await;
    inner.gate.open();
    evil.await.unwrap();
    all(clients).await;
    assert_eq!(inner.calls(), 2);
}

/// Regression: after a failed load, the expired variants were hits again.
#[tokio::test(start_paused = true)]
async fn an_expiry_holds_for_other_variants_once_the_load_has_failed() {
    let inner = Inner::with(|n, request| {
        if n == 3 {
            return Err(Down("away".into()));
        }
        let control = if sent(request, "accept-language") == "en" {
            "max-age=60, must-revalidate"
        } else {
            "max-age=60, stale-if-error=60"
        };
        Ok(respond(200, &[("cache-control", control), ("vary", "accept-language")], whole(format!("{n}"))))
    });
    let guard = StampedeGuard::in_memory().with_policy(policy().build().unwrap());
    let shop = guard.layer(inner.clone());
    let english = || by(&[("accept-language", "en")]);
    ask(&shop, get("/")).await;
    ask(&shop, english()).await;
    guard.expire(guard.http_key(&get("/")).unwrap()).await.unwrap();
    let _ = shop.clone().oneshot(get("/")).await;
    let seen = ask(&shop, english()).await;
    assert!(seen.remark().starts_with("fwd="), "{} {}", seen.text(), seen.remark());
}

/// Regression: such a request was answered with a 502.
#[tokio::test(start_paused = true)]
async fn a_value_that_stands_in_is_never_another_variant() {
    let inner = Inner::with_headers(&[("cache-control", "max-age=10"), ("vary", "accept-language")]);
    let guard = StampedeGuard::in_memory()
        .with_policy(policy().soft_timeout(std::time::Duration::from_millis(100)).build().unwrap());
    let shop = guard.layer(inner.clone());
    ask(&shop, by(&[("accept-language", "de")])).await;
    guard.expire(guard.http_key(&get("/")).unwrap()).await.unwrap();
    inner.gate.close();
    let english = send(&shop, by(&[("accept-language", "en")]));
    tokio::time::sleep(secs(1)).await;
    inner.gate.open();
    let seen = english.await.unwrap();
    assert_eq!(seen.status, 200, "{}", seen.remark());
}
