//! `HttpPolicy::no_vary_search`: a response answers the queries that its own `No-Vary-Search` makes equivalent, and no client's query gets
//! into what others receive (B8). The clients are axum's, because only such a request can be repeated with another query.

use axum::body::Body;
use stampede_guard::http::HttpPolicy;
use stampede_guard::{MemoryStore, PolicyBuilder, StampedeGuard};
use tower::util::BoxCloneSyncService;
use tower::{Layer as _, ServiceExt as _};

use super::kit::{
    Down, Inner, Req, Seen, all, ask, get, policy, request, respond, secs, send, sent, settle, whole,
};

type Shop = BoxCloneSyncService<Req, http::Response<stampede_guard::http::GuardedBody>, Down>;

const RULE: &str = r#"key-order, params=("utm_source" "gclid")"#;

fn fields(rule: &str) -> Vec<(&'static str, &str)> {
    vec![("cache-control", "max-age=60"), ("no-vary-search", rule)]
}

/// A page that contains its own URI, with this rule.
fn echo(rule: &'static str) -> Inner {
    Inner::with(move |n, request| {
        Ok(respond(200, &fields(rule), whole(format!("{n} {} {}", request.method(), request.uri()))))
    })
}

fn http() -> HttpPolicy {
    HttpPolicy::default().authority("shop.example").no_vary_search(true)
}

fn of(http: HttpPolicy) -> PolicyBuilder {
    policy().http(http)
}

/// The inner service behind this guard, as an axum service.
fn shop_of(guard: &StampedeGuard, inner: &Inner) -> Shop {
    let inner = inner.clone().map_request(|request: http::Request<Body>| request.map(|_| Default::default()));
    let shop = guard.layer(inner).map_request(|request: Req| request.map(Body::new));
    BoxCloneSyncService::new(shop)
}

fn guard_on(store: &MemoryStore, http: HttpPolicy) -> StampedeGuard {
    StampedeGuard::new(store.clone()).with_policy(of(http).build().unwrap())
}

fn shop_with(inner: &Inner, http: HttpPolicy) -> Shop {
    shop_of(&guard_on(&MemoryStore::new(), http), inner)
}

async fn text(shop: &Shop, uri: &str) -> (String, bool) {
    let seen = ask(shop, get(uri)).await;
    (seen.text().to_owned(), seen.remark().starts_with("hit"))
}

async fn is_stored(shop: &Shop, uri: &str) -> bool {
    ask(shop, request("GET", uri, &[("cache-control", "only-if-cached")])).await.status == 200
}

/// The first load sees the whole query, so its response is for that URI. From then on loads see what the rule leaves.
#[tokio::test(start_paused = true)]
async fn a_path_learns_its_rule_from_its_first_response() {
    let inner = echo(RULE);
    let shop = shop_with(&inner, http());
    for (uri, expected, is_hit) in [
        ("/a?b=2&a=1&utm_source=x", "1 GET /a?b=2&a=1&utm_source=x", false),
        ("/a?utm_source=y&a=1&b=2", "2 GET /a?a=1&b=2", false),
        ("/a?b=2&gclid=7&a=1&", "2 GET /a?a=1&b=2", true),
        ("/a?%61=%31&b=2", "2 GET /a?a=1&b=2", true),
        ("/a?a=1&b=2", "2 GET /a?a=1&b=2", true),
        ("/a?a=1&b=3", "3 GET /a?a=1&b=3", false),
        ("/a?utm_source=z", "4 GET /a", false),
        ("/a", "4 GET /a", true),
        ("/other?a=1&utm_source=x", "5 GET /other?a=1&utm_source=x", false),
    ] {
        assert_eq!(text(&shop, uri).await, (expected.to_owned(), is_hit), "{uri}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_setting_the_field_has_no_effect() {
    let inner = echo("except=()");
    let shop = shop_with(&inner, HttpPolicy::default());
    for (n, uri) in ["/a?b=1", "/a?b=2", "/a", "/a?"].iter().enumerate() {
        assert_eq!(text(&shop, uri).await, (format!("{} GET {uri}", n + 1), false));
    }
    let strict = shop_with(&echo("except=()"), HttpPolicy::strict());
    text(&strict, "/a?b=1").await;
    assert_eq!(text(&strict, "/a?b=2").await, ("2 GET /a".to_owned(), false), "strict follows it");
    assert_eq!(text(&strict, "/a?b=3").await, ("2 GET /a".to_owned(), true));
}

/// B8: what one client sends reaches another client only if the key has it, in one form.
#[tokio::test(start_paused = true)]
async fn a_parameter_of_one_client_is_in_no_page_of_the_others() {
    const EVIL: &[&str] = &[
        "/a?utm_source=evil",
        "/a?utm%5Fsource=evil&b=1",
        "/a?b=1&gclid=evil&gclid=evil",
        "/a?utm_source=evil;b=2",
        "/a?&b=1&&utm_source=evil&",
        "/a?utm_source=%3Cscript%3Eevil",
        "/a?b=1&utm_source=evil%26b=2",
        "http://shop.example/a?utm_source=evil",
    ];
    for rule in [RULE, r#"except=("b")"#, r#"params=("utm_source" "gclid" "%25")"#] {
        for first in EVIL {
            let shop = shop_with(&echo(rule), http());
            for uri in [*first, "/a?b=1&gclid=2", *first, "/a?gclid=3", "/a?b=1", "/a", "/a?utm_source=3&b=1"]
            {
                let (page, _) = text(&shop, uri).await;
                assert!(
                    uri == *first || !page.contains("evil"),
                    "B8: {rule}: {page} for {uri} after {first}"
                );
            }
        }
    }
}

/// B8: a form that the key does not distinguish is none that the load sees.
#[tokio::test(start_paused = true)]
async fn a_load_sees_one_form_of_equivalent_queries() {
    let shop = shop_with(&echo("key-order"), http());
    text(&shop, "/a?learn").await;
    for (evil, plain) in [
        ("/a?q=%F6", "/a?q=%EF%BF%BD"),
        ("/a?q=%3cevil", "/a?q=%3Cevil"),
        ("/a?q=a+b", "/a?q=a%20b"),
        ("/a?flag", "/a?flag="),
        ("/a?z=1&y=2", "/a?y=2&z=1"),
        ("/a?q='", "/a?q=%27"),
    ] {
        let (first, _) = text(&shop, evil).await;
        assert!(first.ends_with(&format!("GET {plain}")), "{first}");
        assert_eq!(text(&shop, plain).await, (first, true));
    }
}

#[tokio::test(start_paused = true)]
async fn another_replica_finds_the_rule_and_the_response() {
    let (store, inner) = (MemoryStore::new(), echo(RULE));
    let shops = [(); 2].map(|()| shop_of(&guard_on(&store, http()), &inner));
    text(&shops[0], "/a?utm_source=x&b=1").await;
    let (page, _) = text(&shops[0], "/a?utm_source=y&b=1").await;
    assert_eq!(
        text(&shops[1], "/a?gclid=z&b=1").await,
        (page.clone(), true),
        "its first request to the path"
    );
    assert_eq!(text(&shops[1], "/a?b=1&gclid=y").await, (page, true));
    assert_eq!(text(&shops[1], "/a?utm_source=y&b=2").await.0, "3 GET /a?b=2");
}

#[tokio::test(start_paused = true)]
async fn requests_with_equivalent_queries_share_one_load() {
    let (store, inner) = (MemoryStore::new(), echo(RULE));
    let shops = [(); 2].map(|()| shop_of(&guard_on(&store, http()), &inner));
    text(&shops[0], "/a?x").await;
    inner.gate.close();
    let uris = ["/a?c=2&b=1&utm_source=x", "/a?b=1&c=2", "/a?utm_source=y&b=1&c=2", "/a?gclid=1&c=2&b=1&"];
    let clients = shops.iter().flat_map(|shop| uris.map(|uri| send(shop, get(uri)))).collect();
    settle().await;
    inner.gate.open();
    for seen in all(clients).await {
        assert_eq!(seen.text(), "2 GET /a?b=1&c=2");
    }
    assert_eq!(inner.calls(), 2);
}

/// An origin whose rule depends on the path's query or on the call. Each page names the parameters that it depends on.
fn fickle(rule: impl Fn(usize, &Req) -> (u16, &'static str) + Send + Sync + 'static) -> Inner {
    Inner::with(move |n, request| {
        let (status, rule) = rule(n, request);
        let headers: Vec<_> = fields(rule).into_iter().filter(|(_, value)| !value.is_empty()).collect();
        Ok(respond(status, &headers, whole(format!("{n} {}", request.uri()))))
    })
}

#[tokio::test(start_paused = true)]
async fn a_client_gets_the_answer_to_its_own_query_if_the_origin_has_changed_its_mind() {
    for (status, now, paused) in [
        (200, "", true),
        (200, r#"params=("gclid")"#, true),
        (200, "params=?1", true),
        (404, "", false),
        (301, "", false),
    ] {
        let inner = fickle(move |n, _| if n == 1 { (200, RULE) } else { (status, now) });
        let shop = shop_with(&inner, http());
        text(&shop, "/a?utm_source=x&b=1").await;
        let seen = ask(&shop, get("/a?utm_source=y&b=1")).await;
        assert_eq!((seen.status, seen.text()), (status, "3 /a?utm_source=y&b=1"), "{now}");
        // The answer to the canonical query is stored for that query, and only for that.
        assert_eq!(text(&shop, "/a?b=1").await, ("2 /a?b=1".to_owned(), true), "{now}");
        assert_eq!(text(&shop, "/a?utm_source=y&b=1").await, ("3 /a?utm_source=y&b=1".to_owned(), true));
        let calls = inner.calls();
        text(&shop, "/a?utm_source=z&b=2").await;
        assert_eq!(inner.calls() - calls, if paused { 1 } else { 2 }, "{status} {now}: loads of one request");
    }
}

/// Between two rules: for a minute the path has none, then the one that it states now.
#[tokio::test(start_paused = true)]
async fn a_path_that_changes_its_rule_has_none_for_a_minute_and_then_the_new_one() {
    let inner = fickle(|n, _| (200, if n == 1 { RULE } else { r#"params=("gclid" "ref")"# }));
    let (store, lives) = (MemoryStore::new(), http());
    let shops = [(); 2].map(|()| shop_of(&guard_on(&store, lives.clone()), &inner));
    text(&shops[0], "/a?utm_source=x").await;
    assert_eq!(text(&shops[0], "/a?utm_source=y&ref=1").await.0, "3 /a?utm_source=y&ref=1");
    assert_eq!(text(&shops[0], "/a?gclid=1&ref=2").await.0, "4 /a?gclid=1&ref=2", "no rule");
    tokio::time::sleep(secs(61)).await;
    for shop in &shops {
        assert_eq!(text(shop, "/a?gclid=1&ref=3").await.0, "5 /a", "both read the new rule");
    }
}

/// A failure says nothing about the rule, and is shared by all that wait for it.
#[tokio::test(start_paused = true)]
async fn a_failure_is_one_load_for_all_equivalent_queries() {
    let inner = fickle(|n, _| if n == 1 { (200, RULE) } else { (503, "") });
    let shop = shop_with(&inner, http());
    text(&shop, "/a?utm_source=x").await;
    inner.gate.close();
    let clients: Vec<_> = (0..20).map(|n| send(&shop, get(&format!("/a?b=1&utm_source={n}")))).collect();
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.status == 503));
    assert_eq!(inner.calls(), 2);
}

/// The waiters of a load whose response contradicts the rule get the answers to their own queries.
#[tokio::test(start_paused = true)]
async fn waiters_get_no_answer_that_is_not_theirs() {
    let inner = fickle(|n, _| if n == 1 { (200, RULE) } else { (200, "") });
    let shop = shop_with(&inner, http());
    text(&shop, "/a?utm_source=x").await;
    inner.gate.close();
    let uris: Vec<_> = (0..8).map(|n| format!("/a?b=1&utm_source={n}")).collect();
    let clients = uris.iter().map(|uri| send(&shop, get(uri))).collect();
    settle().await;
    inner.gate.open();
    for (seen, uri) in all(clients).await.iter().zip(&uris) {
        assert!(seen.text().ends_with(uri), "{} for {uri}", seen.text());
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_of_any_equivalent_uri_reaches_the_shared_response() {
    let (store, inner) = (MemoryStore::new(), echo(RULE));
    let guards = [(); 3].map(|()| guard_on(&store, http()));
    let shops = [&guards[0], &guards[1]].map(|guard| shop_of(guard, &inner));
    let other = Inner::with(|_, request| Ok(respond(201, &[("location", sent(request, "see"))], whole(""))));
    // This process has loaded nothing, and knows no rule.
    let (writer, editor) = (&guards[2], shop_of(&guards[2], &other));
    text(&shops[0], "/a?learn").await;
    for by in 0..6 {
        for uri in ["/a?b=1&c=2", "/a?gclid=7&c=2&b=1", "/a?c=2&b=1&utm_source=never%20sent"] {
            text(&shops[0], "/a?c=2&utm_source=x&b=1").await;
            for shop in &shops {
                assert!(text(shop, "/a?gclid=x&b=1&c=2").await.1, "{by}: {uri}");
            }
            let key = || writer.http_key(&get(uri)).unwrap();
            match by {
                0 => drop(ask(&editor, request("PUT", uri, &[])).await),
                1 => drop(ask(&editor, request("POST", "/all", &[("see", uri)])).await),
                2 => writer.invalidate_path(uri).await.unwrap(),
                3 => writer.invalidation().key(key()).send().await.unwrap(),
                4 => writer.invalidate_many([key()]).await.into_iter().for_each(Result::unwrap),
                _ => writer.invalidate(key()).await.unwrap(),
            }
            for shop in &shops {
                for uri in ["/a?b=1&c=2", "/a?b=1&c=2&utm_source=x"] {
                    assert!(!is_stored(shop, uri).await, "A7: {by}: {uri}");
                }
            }
        }
    }
}

/// The load of the canonical query began before the invalidation of another URI.
#[tokio::test(start_paused = true)]
async fn a_load_that_an_invalidation_overtakes_is_not_stored() {
    let (store, inner) = (MemoryStore::new(), echo(RULE));
    let guards = [(); 2].map(|()| guard_on(&store, http()));
    let shop = shop_of(&guards[0], &inner);
    for uri in ["/a?learn", "/a?learn=2&utm_source=x"] {
        text(&shop, uri).await;
    }
    inner.gate.close();
    let late = send(&shop, get("/a?b=1&utm_source=x"));
    settle().await;
    guards[1].invalidate(guards[1].http_key(&get("/a?b=1&gclid=other")).unwrap()).await.unwrap();
    inner.gate.open();
    late.await.unwrap();
    assert!(!is_stored(&shop, "/a?b=1&gclid=1").await, "A7");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_bypasses_keeps_its_query() {
    let shop = shop_with(&echo("except=()"), http().cookies(["session"]));
    text(&shop, "/a?learn").await;
    let uri = "/a?z=1&utm_source=x&b=%41";
    for field in [("authorization", "Bearer 7f3a"), ("cookie", "session=1"), ("cache-control", "no-store")] {
        assert!(ask(&shop, request("GET", uri, &[field])).await.text().ends_with(uri), "{field:?}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "QUERY"] {
        assert!(ask(&shop, request(method, uri, &[])).await.text().ends_with(uri), "{method}");
    }
    let guard = guard_on(&MemoryStore::new(), http());
    let shop = shop_of(&guard, &echo("except=()"));
    text(&shop, "/a?learn").await;
    guard.set_bypass(true);
    assert!(text(&shop, uri).await.0.ends_with(uri));
}

#[tokio::test(start_paused = true)]
async fn conditions_ranges_and_head_are_answered_from_the_shared_response() {
    let inner = Inner::with(|_, request| {
        let mut headers = fields(RULE);
        headers.push(("etag", "\"a\""));
        Ok(respond(200, &headers, whole(format!("page of {}", request.uri()))))
    });
    let shop = shop_with(&inner, http());
    let of = async |method: &str, uri: &str, field: (&str, &str)| -> Seen {
        ask(&shop, request(method, uri, &[field])).await
    };
    text(&shop, "/a?x").await;
    text(&shop, "/a?b=1&utm_source=x").await;
    let calls = inner.calls();
    assert_eq!(of("GET", "/a?utm_source=1&b=1", ("if-none-match", "\"a\"")).await.status, 304);
    let part = of("GET", "/a?gclid=1&b=1", ("range", "bytes=0-3")).await;
    assert_eq!((part.status, part.text()), (206, "page"));
    assert!(of("HEAD", "/a?gclid=2&b=1", ("accept", "*/*")).await.remark().starts_with("hit"));
    assert_eq!(inner.calls(), calls);
    of("HEAD", "/a?gclid=2&b=2", ("accept", "*/*")).await;
    assert_eq!(inner.calls(), calls + 1, "a HEAD that nothing stored answers goes on as it was sent");
}

/// A 304 may state the rule anew; a stale response is validated with the canonical query.
#[tokio::test(start_paused = true)]
async fn a_validation_updates_the_rule() {
    let inner = Inner::with(|n, request| {
        let status = if sent(request, "if-none-match").is_empty() { 200 } else { 304 };
        let mut headers = fields(if n < 4 { RULE } else { r#"params=("gclid")"# });
        headers.push(("etag", "\"a\""));
        Ok(respond(
            status,
            &headers,
            whole(if status == 200 { request.uri().to_string() } else { String::new() }),
        ))
    });
    let shop = shop_with(&inner, http());
    text(&shop, "/a?x").await;
    text(&shop, "/a?b=1&utm_source=x").await;
    for (n, expected) in [(3, "/a?b=1"), (5, "/a?b=1&utm_source=y")] {
        tokio::time::sleep(secs(61)).await;
        assert_eq!(text(&shop, "/a?b=1&utm_source=y").await.0, expected);
        assert_eq!(inner.calls(), n);
    }
}

#[tokio::test(start_paused = true)]
async fn variants_and_other_rules_for_queries_go_together_with_it() {
    let inner = Inner::with(|n, request| {
        let mut headers = fields(RULE);
        headers.push(("vary", "accept-language"));
        let language = sent(request, "accept-language");
        Ok(respond(200, &headers, whole(format!("{n} {language} {}", request.uri()))))
    });
    let shop = shop_with(&inner, http().ignore_query(["ref"]).sort_query(true));
    let of = async |language: &str, uri: &str| {
        ask(&shop, request("GET", uri, &[("accept-language", language)])).await.text().to_owned()
    };
    of("de", "/a?x").await;
    assert_eq!(of("de", "/a?c=1&ref=1&utm_source=x&b=2").await, "2 de /a?b=2&c=1");
    assert_eq!(of("en", "/a?b=2&gclid=x&c=1").await, "3 en /a?b=2&c=1");
    for (language, page) in [("de", "2 de /a?b=2&c=1"), ("en", "3 en /a?b=2&c=1")] {
        assert_eq!(of(language, "/a?ref=2&c=1&b=2&utm_source=z").await, page);
    }
}

/// A router may answer `/a` and `/%61` differently, so their responses stay apart whatever the query.
#[tokio::test(start_paused = true)]
async fn another_form_of_a_path_has_its_own_responses() {
    let shop = shop_with(&echo(RULE), http());
    text(&shop, "/a?x").await;
    assert_eq!(text(&shop, "/%61?b=1&utm_source=evil").await.0, "2 GET /%61?b=1");
    assert_eq!(text(&shop, "/a?b=1&utm_source=x").await.0, "3 GET /a?b=1");
    assert_eq!(text(&shop, "/%61?b=1").await, ("2 GET /%61?b=1".to_owned(), true));
}

/// Guards whose requests cannot be copied load as the client asked, and use what is stored for the canonical query.
#[tokio::test(start_paused = true)]
async fn a_request_that_cannot_be_repeated_is_loaded_as_it_was_sent() {
    let inner = echo(RULE);
    let shop: super::kit::Shop = guard_on(&MemoryStore::new(), http()).layer(inner.clone());
    for (uri, expected) in [
        ("/a?b=1&utm_source=x", "1 GET /a?b=1&utm_source=x"),
        ("/a?b=1&utm_source=y", "2 GET /a?b=1&utm_source=y"),
        ("/a?b=1", "3 GET /a?b=1"),
        ("/a?b=1&utm_source=z", "3 GET /a?b=1"),
        ("/a?b=1&utm_source=y", "3 GET /a?b=1"),
    ] {
        assert_eq!(ask(&shop, get(uri)).await.text(), expected, "{uri}");
    }
}

/// A client cannot make the guard keep more than the origin's own rules, or send more than one load for one request of it.
#[tokio::test(start_paused = true)]
async fn an_endless_list_of_rules_costs_two_loads_for_a_request_at_most() {
    let inner = Inner::with(|n, request| {
        let rule = format!("params=(\"x{n}\" \"utm_source\")");
        Ok(respond(200, &fields(&rule), whole(request.uri().to_string())))
    });
    let shop = shop_with(&inner, http());
    for n in 0..50 {
        let uri = format!("/a?b={n}&utm_source={n}&x{n}=1");
        let calls = inner.calls();
        let (page, _) = text(&shop, &uri).await;
        assert!(inner.calls() - calls <= 2);
        assert!(page == uri || page == format!("/a?b={n}"), "{page}");
    }
    assert!(inner.calls() <= 53, "the rule that changed is not followed for a minute: {}", inner.calls());
}

#[cfg(feature = "redis")]
mod redis_tests {
    use super::*;
    use crate::support::redis_server::RedisServer;

    async fn shops(server: &RedisServer, inner: &Inner) -> Vec<(StampedeGuard, Shop)> {
        let policy = of(http()).lease(secs(120)).coordination_budget(secs(4)).build().unwrap();
        let mut shops = Vec::new();
        for _ in 0..2 {
            let client = redis::Client::open(server.minimal_user()).unwrap();
            let guard =
                StampedeGuard::builder(client).namespace("search").policy(policy.clone()).build().unwrap();
            crate::redis::connects(&guard).await;
            let shop = shop_of(&guard, inner);
            shops.push((guard, shop));
        }
        shops
    }

    #[tokio::test]
    async fn on_redis_two_replicas_share_the_rule_the_response_and_its_invalidation() {
        let server = RedisServer::start();
        let inner = echo(RULE);
        let shops = shops(&server, &inner).await;
        let (one, other) = (&shops[0].1, &shops[1].1);
        assert_eq!(text(one, "/a?b=1&utm_source=x").await.0, "1 GET /a?b=1&utm_source=x");
        assert_eq!(text(one, "/a?b=1&utm_source=y").await.0, "2 GET /a?b=1");
        assert_eq!(text(other, "/a?gclid=z&b=1").await, ("2 GET /a?b=1".to_owned(), true));
        ask(other, request("DELETE", "/a?b=1&gclid=another", &[])).await;
        for shop in [one, other] {
            assert!(!is_stored(shop, "/a?b=1").await);
        }
        assert_eq!(inner.calls(), 3, "the DELETE is the third");
        assert_eq!(text(other, "/a?gclid=z&b=1").await.0, "4 GET /a?b=1");
        assert_eq!(text(one, "/a?b=1&utm_source=w").await, ("4 GET /a?b=1".to_owned(), true));
    }

    /// The rule is a hint: without it each URI has its own response, and the next response states it again.
    #[tokio::test]
    async fn on_redis_a_rule_that_is_lost_is_learned_again() {
        let server = RedisServer::start();
        let inner = echo(RULE);
        let shops = shops(&server, &inner).await;
        text(&shops[0].1, "/a?b=1&utm_source=x").await;
        server.flush_all();
        assert_eq!(text(&shops[1].1, "/a?b=1&utm_source=y").await.0, "2 GET /a?b=1&utm_source=y");
        assert_eq!(text(&shops[1].1, "/a?b=1&utm_source=z").await.0, "3 GET /a?b=1");
        assert_eq!(text(&shops[0].1, "/a?b=1&utm_source=w").await, ("3 GET /a?b=1".to_owned(), true));
    }
}
