//! Responses that depend on request headers (RFC 9111, 4.1): each kind of request has a separate response, also while
//! all of them wait for the first.

use http::header::{ACCEPT_LANGUAGE, HeaderName};
use stampede_guard::http::{HttpPolicy, cache_key};
use tower::Layer as _;

use super::kit::{
    Inner, Req, Seen, Shop, ask, get, guard, policy, replicas, replicas_with, request, respond, secs, send,
    sent, settle, shop, shop_with, whole,
};

pub(super) const LANGUAGES: [&str; 3] = ["de", "en", "fr"];

pub(super) fn in_language(language: &str) -> Req {
    request("GET", "/", &[("accept-language", language)])
}

/// Answers the `n`th call with the request's `Accept-Language` and `n`.
fn speaking(status: u16, control: &'static str) -> Inner {
    Inner::with(move |n, request| {
        let headers = [("vary", "Accept-Language"), ("cache-control", control)];
        Ok(respond(status, &headers, whole(format!("{} {n}", sent(request, "accept-language")))))
    })
}

/// Sends `n` requests in each language to each of `shops`, in turns.
fn send_in_languages(shops: &[Shop], n: usize) -> Vec<(&'static str, tokio::task::JoinHandle<Seen>)> {
    let turns = (0..n).flat_map(|_| LANGUAGES);
    let all = turns.flat_map(|language| shops.iter().map(move |shop| (language, shop)));
    all.map(|(language, shop)| (language, send(shop, in_language(language)))).collect()
}

/// Returns all responses. Each must be in the language of its request.
async fn each_in_its_own(clients: Vec<(&'static str, tokio::task::JoinHandle<Seen>)>) -> Vec<Seen> {
    let mut seen = Vec::new();
    for (language, one) in clients {
        let one = one.await.unwrap();
        assert!(one.text().starts_with(language), "{language} received: {}", one.text());
        seen.push(one);
    }
    seen
}

#[tokio::test(start_paused = true)]
async fn each_variant_is_stored_beside_the_others() {
    let inner = speaking(200, "max-age=60");
    for shop in &replicas(2, &inner) {
        for (n, language) in LANGUAGES.iter().enumerate() {
            let seen = ask(shop, in_language(language)).await;
            assert_eq!(seen.text(), format!("{language} {}", n + 1));
            assert_eq!(seen.header("vary"), Some("Accept-Language"));
        }
        let absent = ask(shop, get("/")).await;
        assert_eq!(absent.text(), " 4", "without the header it is a variant of its own");
    }
    assert_eq!(inner.calls(), 4, "the other process found them");
    let shop = shop(&inner);
    for (language, remark) in [
        ("de", "fwd=uri-miss; stored; ttl=60"),
        ("en", "fwd=vary-miss; stored; ttl=60"),
        ("fr", "fwd=vary-miss; stored; ttl=60"),
        ("de", "hit; ttl=60"),
        ("en", "hit; ttl=60"),
    ] {
        assert_eq!(ask(&shop, in_language(language)).await.remark(), remark, "{language}");
    }
}

#[tokio::test(start_paused = true)]
async fn equivalent_header_values_are_one_variant() {
    let alike: [(&str, &[&str]); 4] = [
        ("accept-language", &["de,en;q=0.5", "de, en;q=0.5", "de , en;q=0.5"]),
        ("accept-encoding", &["gzip,br", "br, gzip", "br;q=1.0,gzip"]),
        ("x-kind", &["a,b", "a , b", " a,b"]),
        ("user-agent", &["a, b", " a, b "]),
    ];
    for (name, values) in alike {
        let inner = Inner::with(move |n, _| Ok(respond(200, &[("vary", name)], whole(n.to_string()))));
        let shop = shop(&inner);
        for value in values {
            assert_eq!(
                ask(&shop, request("GET", "/", &[(name, value)])).await.text(),
                "1",
                "{name}: {value}"
            );
        }
        // Sent as several lines, which are one list.
        if name == "x-kind" {
            let lines = request("GET", "/", &[(name, "a"), (name, "b")]);
            assert_eq!(ask(&shop, lines).await.text(), "1");
        }
        let other = ask(&shop, request("GET", "/", &[(name, "b")])).await;
        assert_eq!(other.text(), "2", "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn several_headers_make_a_variant_for_each_combination() {
    let inner = Inner::with(|n, request| {
        let text = format!("{}/{} {n}", sent(request, "accept-language"), sent(request, "x-tier"));
        Ok(respond(200, &[("vary", "x-tier"), ("vary", "accept-language, X-Tier")], whole(text)))
    });
    let shop = shop(&inner);
    for _ in 0..2 {
        for language in ["de", "en"] {
            for tier in ["1", "2"] {
                let headers = [("accept-language", language), ("x-tier", tier)];
                let seen = ask(&shop, request("GET", "/", &headers)).await;
                assert!(seen.text().starts_with(&format!("{language}/{tier} ")), "{}", seen.text());
            }
        }
    }
    assert_eq!(inner.calls(), 4);
    // The value of one header is not taken for the value of another.
    ask(&shop, request("GET", "/", &[("accept-language", "1"), ("x-tier", "de")])).await;
    assert_eq!(inner.calls(), 5);
}

/// A4, A5: requests wait for each other before it is known that they want different variants.
#[tokio::test(start_paused = true)]
async fn on_a_cold_key_variants_coalesce_only_among_themselves() {
    let inner = speaking(200, "max-age=60").held();
    let shops = replicas(2, &inner);
    let clients = send_in_languages(&shops, 10);
    settle().await;
    assert_eq!(inner.calls(), 1, "the variants are unknown");
    inner.gate.open();
    let seen = each_in_its_own(clients).await;
    assert_eq!(seen.len(), 60);
    assert_eq!(inner.calls(), 3, "one load for each language in the fleet");
    // On a warm key, each variant is a separate flight.
    let mut clients = send_in_languages(&shops, 1);
    clients.extend(["it", "it"].map(|language| (language, send(&shops[0], in_language(language)))));
    each_in_its_own(clients).await;
    assert_eq!(inner.calls(), 4);
}

/// A4, A5: a `Vary` that contains `*`.
#[tokio::test(start_paused = true)]
async fn a_response_that_varies_on_everything_is_not_shared_and_replaces_no_variant() {
    let inner = Inner::with(|n, request| {
        let vary = if n == 2 { "accept-language, *" } else { "accept-language" };
        Ok(respond(200, &[("vary", vary)], whole(format!("{} {n}", sent(request, "accept-language")))))
    });
    let shop = shop(&inner);
    assert_eq!(ask(&shop, in_language("de")).await.text(), "de 1");
    let own = ask(&shop, in_language("en")).await;
    assert_eq!((own.text(), own.remark().as_str()), ("en 2", "fwd=vary-miss; detail=vary"));
    assert_eq!(ask(&shop, in_language("en")).await.text(), "en 3");
    assert_eq!(ask(&shop, in_language("de")).await.text(), "de 1", "the other variant is still there");
    assert_eq!(ask(&shop, in_language("en")).await.text(), "en 3");
}

#[tokio::test(start_paused = true)]
async fn a_response_that_varies_on_nine_headers_is_not_shared() {
    let names = |n: usize| (0..n).map(|n| format!("x-{n}")).collect::<Vec<_>>().join(", ");
    for (many, calls) in [(8, 1), (9, 2)] {
        let vary = names(many);
        let inner = Inner::with(move |n, _| Ok(respond(200, &[("vary", &vary)], whole(n.to_string()))));
        let shop = shop(&inner);
        for _ in 0..2 {
            ask(&shop, get("/")).await;
        }
        assert_eq!(inner.calls(), calls, "A5: {many} names");
    }
}

#[tokio::test(start_paused = true)]
async fn the_policy_can_vary_on_headers_that_responses_do_not_name() {
    let inner = Inner::with(|n, request| {
        let text = format!("{}/{} {n}", sent(request, "x-tenant"), sent(request, "accept-language"));
        let varied = sent(request, "x-varied").is_empty();
        let vary: &[_] = if varied { &[] } else { &[("vary", "accept-language")] };
        Ok(respond(200, vary, whole(text)))
    })
    .held();
    let http = HttpPolicy::default().vary_on(HeaderName::from_static("x-tenant"));
    let shops = replicas_with(2, &inner, policy().http(http));
    let tenants = ["a", "b"];
    let clients: Vec<_> = tenants
        .iter()
        .flat_map(|tenant| shops.iter().map(move |shop| (tenant, shop)))
        .map(|(tenant, shop)| (tenant, send(shop, request("GET", "/", &[("x-tenant", tenant)]))))
        .collect();
    settle().await;
    inner.gate.open();
    for (tenant, one) in clients {
        assert!(one.await.unwrap().text().starts_with(&format!("{tenant}/")));
    }
    assert_eq!(inner.calls(), 2);
    // The tenant separates responses in addition to the headers on which they vary.
    for tenant in tenants {
        for language in ["de", "en", "de"] {
            let headers = [("x-tenant", tenant), ("accept-language", language), ("x-varied", "1")];
            let seen = ask(&shops[0], request("GET", "/both", &headers)).await;
            assert!(seen.text().starts_with(&format!("{tenant}/{language} ")), "{}", seen.text());
        }
    }
    assert_eq!(inner.calls(), 6);
}

/// After a deploy of the origin, responses stored by the old list of names must not be found by it.
#[tokio::test(start_paused = true)]
async fn a_resource_with_a_changed_vary_begins_anew() {
    for (before, after) in [("accept-language", "accept-language, x-tier"), ("accept-language", "x-tier")] {
        let inner = Inner::with(move |n, request| {
            let vary = if n <= 2 { before } else { after };
            // A header that does not select is not in the answer.
            let part = |name: &'static str| if vary.contains(name) { sent(request, name) } else { "" };
            let text = format!("{}/{}", part("accept-language"), part("x-tier"));
            Ok(respond(200, &[("vary", vary)], whole(text)))
        });
        let shop = shop(&inner);
        let ask = async |language: &str, tier: &str| {
            let headers = [("accept-language", language), ("x-tier", tier)];
            ask(&shop, request("GET", "/", &headers)).await.text().to_owned()
        };
        for (language, tier) in [("de", "1"), ("en", "2"), ("fr", "3")] {
            ask(language, tier).await;
        }
        assert_eq!(inner.calls(), 3);
        let expected = |language: &str, tier: &str| {
            let part =
                |name, value: &str| if after.contains(name) { value.to_owned() } else { String::new() };
            format!("{}/{}", part("accept-language", language), part("x-tier", tier))
        };
        // The third response said that the names have changed, so nothing is found by the old ones.
        for _ in 0..2 {
            for language in ["de", "en", "fr"] {
                for tier in ["1", "2"] {
                    let case = format!("{before} -> {after}: {language}, {tier}");
                    assert_eq!(ask(language, tier).await, expected(language, tier), "{case}");
                }
            }
        }
        let variants = if after == "x-tier" { 2 } else { 6 };
        assert_eq!(inner.calls(), 3 + variants, "{before} -> {after}: each is stored again");
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_and_an_unsafe_request_remove_all_variants() {
    let (inner, guard) = (speaking(200, "max-age=60"), guard());
    let shop = guard.layer(inner.clone());
    for how in ["nothing", "invalidate", "post"] {
        match how {
            "invalidate" => {
                guard.invalidate(cache_key(&"http://shop.example/".parse().unwrap()).unwrap()).await.unwrap();
            }
            // The request does not say which variant it changes.
            "post" => drop(ask(&shop, request("POST", "/", &[("accept-language", "fr")])).await),
            _ => {}
        }
        let before = inner.calls();
        for _ in 0..2 {
            for language in LANGUAGES {
                assert!(ask(&shop, in_language(language)).await.text().starts_with(language));
            }
        }
        assert_eq!(inner.calls() - before, 3, "{how}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_is_answered_with_its_own_variant() {
    let inner = speaking(200, "max-age=60");
    let shop = shop(&inner);
    ask(&shop, in_language("de")).await;
    ask(&shop, in_language("fr, en")).await;
    let head = |language| request("HEAD", "/", &[("accept-language", language)]);
    for (language, length) in [("de", "4"), ("fr, en", "8")] {
        let seen = ask(&shop, head(language)).await;
        assert_eq!((seen.text(), seen.header("content-length")), ("", Some(length)), "{language}");
        assert_eq!(seen.remark(), "hit; ttl=60");
    }
    assert_eq!(ask(&shop, head("en")).await.remark(), "fwd=miss; detail=head");
    assert_eq!(inner.calls(), 3);
    assert_eq!(ask(&shop, in_language("de")).await.text(), "de 1", "which has changed nothing");
}

#[tokio::test(start_paused = true)]
async fn a_stale_variant_answers_at_once_and_is_loaded_again_in_its_own_language() {
    let inner = speaking(200, "max-age=10, stale-while-revalidate=30");
    let shops = replicas(2, &inner);
    each_in_its_own(send_in_languages(&shops[..1], 1)).await;
    tokio::time::sleep(secs(12)).await;
    inner.gate.close();
    let seen = each_in_its_own(send_in_languages(&shops, 5)).await;
    assert!(seen.iter().all(|seen| seen.remark() == "hit; ttl=-2"), "none waits");
    assert_eq!(inner.calls(), 6, "one background load for each language");
    inner.gate.open();
    settle().await;
    let seen = each_in_its_own(send_in_languages(&shops, 5)).await;
    assert!(seen.iter().all(|seen| seen.remark() == "hit; ttl=9"), "{}", seen[0].remark());
    assert_eq!(inner.calls(), 6);
}

/// A later variant outlives the one through which the variants are found.
#[tokio::test(start_paused = true)]
async fn a_fresh_variant_is_found_after_the_first_one_is_stale() {
    let inner = speaking(200, "max-age=10");
    let shop = shop(&inner);
    assert_eq!(ask(&shop, in_language("de")).await.text(), "de 1");
    tokio::time::sleep(secs(8)).await;
    assert_eq!(ask(&shop, in_language("en")).await.text(), "en 2");
    tokio::time::sleep(secs(8)).await;
    assert_eq!(ask(&shop, in_language("en")).await.text(), "en 2");
    assert_eq!(ask(&shop, in_language("de")).await.text(), "de 3");
    assert_eq!(ask(&shop, in_language("en")).await.text(), "en 2", "the first one's load left it alone");
    tokio::time::sleep(secs(3)).await;
    assert_eq!(ask(&shop, in_language("en")).await.text(), "en 4");
    assert_eq!(ask(&shop, in_language("de")).await.text(), "de 3");
}

#[tokio::test(start_paused = true)]
async fn failures_have_variants_too() {
    for (status, stored) in [(404, true), (500, false)] {
        let inner = speaking(status, "max-age=60").held();
        let shops = replicas(2, &inner);
        let clients = send_in_languages(&shops, 5);
        settle().await;
        inner.gate.open();
        for seen in each_in_its_own(clients).await {
            assert_eq!(seen.status, status);
        }
        assert_eq!(inner.calls(), 3, "{status}: a failure is shared with its waiters");
        each_in_its_own(send_in_languages(&shops[..1], 1)).await;
        assert_eq!(inner.calls(), if stored { 3 } else { 6 }, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn strictly_a_stored_language_answers_clients_that_prefer_it() {
    let inner = Inner::with(|n, _| {
        let headers =
            [("vary", "accept-language"), ("content-language", "de"), ("cache-control", "max-age=60")];
        Ok(respond(200, &headers, whole(n.to_string())))
    });
    for (http, calls) in [(HttpPolicy::strict(), 1), (HttpPolicy::default(), 2)] {
        let before = inner.calls();
        let shop = shop_with(&inner, policy().http(http));
        for language in ["de", "en;q=0.2, de;q=0.9"] {
            ask(&shop, request("GET", "/", &[(ACCEPT_LANGUAGE.as_str(), language)])).await;
        }
        assert_eq!(inner.calls() - before, calls);
    }
}

/// A5: a header that identifies clients, instead of selecting a representation, does not fill the store.
#[tokio::test(start_paused = true)]
async fn at_most_max_variants_are_stored_and_all_requests_are_answered() {
    let inner = speaking(200, "max-age=60");
    let replicas = replicas_with(2, &inner, policy().http(HttpPolicy::default().max_variants(3)));
    for (round, replica) in replicas.iter().enumerate() {
        for n in 0..6 {
            let seen = ask(replica, in_language(&format!("x-{n}"))).await;
            assert!(seen.text().starts_with(&format!("x-{n} ")), "{}", seen.text());
            let stored = seen.remark().starts_with("hit");
            assert_eq!(stored, round > 0 && n < 3, "{n}: {}", seen.remark());
        }
    }
    assert_eq!(inner.calls(), 6 + 3);
}

#[tokio::test(start_paused = true)]
async fn the_key_is_reported_if_the_policy_says_so() {
    let inner = speaking(200, "max-age=60");
    let shop = shop_with(&inner, policy().http(HttpPolicy::default().expose_key(true)));
    let key = "key=\"http:http:shop.example:/\"";
    assert_eq!(ask(&shop, get("/")).await.remark(), format!("fwd=uri-miss; stored; ttl=60; {key}"));
    assert_eq!(ask(&shop, get("/")).await.remark(), format!("hit; ttl=60; {key}"));
    assert_eq!(ask(&shop, in_language("de")).await.remark(), format!("fwd=vary-miss; stored; ttl=60; {key}"));
}
