//! `HttpPolicy::ignore_query`, `only_query` and `sort_query`: the inner service sees no more of a query than the key has, so no client's
//! parameter gets into the response that all clients receive (B8).

use stampede_guard::http::{HttpPolicy, TRACKING_PARAMETERS};
use stampede_guard::{ErrorKind, MemoryStore, PolicyBuilder, StampedeGuard};
use tower::Layer as _;

use super::kit::{
    Inner, Req, Shop, all, ask, get, policy, replicas_with, request, respond, secs, send, sent, settle,
    shop_with, whole,
};

const EVIL: &str = "/a?utm_source=%3Cscript%3E";

/// A page that contains its own URI, as a link to itself does.
fn echo() -> Inner {
    echo_with(&[("cache-control", "max-age=60")])
}

fn echo_with(headers: &'static [(&'static str, &'static str)]) -> Inner {
    Inner::with(|_, request| {
        Ok(respond(200, headers, whole(format!("{} {}", request.method(), request.uri()))))
    })
}

fn http() -> HttpPolicy {
    HttpPolicy::default().authority("shop.example").ignore_query(TRACKING_PARAMETERS)
}

fn of(http: HttpPolicy) -> PolicyBuilder {
    policy().http(http)
}

async fn is_stored(shop: &Shop, uri: &str) -> bool {
    ask(shop, request("GET", uri, &[("cache-control", "only-if-cached")])).await.status == 200
}

/// B8: the first client's value is in no page, in whatever form the client writes the name.
#[tokio::test(start_paused = true)]
async fn an_ignored_parameter_of_one_client_is_in_no_page_of_the_others() {
    for uri in [
        EVIL,
        "/a?utm%5Fsource=%3Cscript%3E",
        "/a?%75tm_source=evil",
        "/a?gclid=evil&utm_source",
        "/a?&utm_source=evil&",
        "/a?utm_source=x;b=evil",
        "http://shop.example/a?utm_source=evil",
    ] {
        for http in [http(), http().sort_query(true), HttpPolicy::default().only_query(["page"])] {
            let inner = echo();
            let shop = shop_with(&inner, of(http));
            let first = ask(&shop, get(uri)).await;
            let expected = if uri.starts_with('/') { "GET /a" } else { "GET http://shop.example/a" };
            assert_eq!(first.text(), expected, "B8: {uri}");
            let hit = ask(&shop, get("/a")).await;
            assert_eq!((hit.text(), &hit.remark()[..3]), (expected, "hit"), "B8: {uri}");
            assert_eq!(inner.calls(), 1, "{uri}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_key_distinguishes_the_inner_service_sees() {
    let shop = shop_with(&echo(), of(http().sort_query(true)));
    for (uri, seen) in [
        ("/a?size=42&utm_x=1", "/a?size=42"),
        ("/a?size=4%32&utm_x=1", "/a?size=4%32"),
        ("/a?tag=b&gclid=1&tag=a", "/a?tag=b&tag=a"),
        ("/a?tag=a&tag=b", "/a?tag=a&tag=b"),
        ("/a?b=2&a=1", "/a?a=1&b=2"),
        ("/a?page", "/a?page"),
        ("/a?page=", "/a?page="),
        ("/a?Utm_source=1", "/a?Utm_source=1"),
    ] {
        for _ in 0..2 {
            assert_eq!(ask(&shop, get(uri)).await.text(), format!("GET {seen}"), "{uri}");
        }
        assert!(ask(&shop, get(seen)).await.remark().starts_with("hit"), "{uri} and {seen} are one resource");
    }
}

/// As `path_forms` without a rule for queries: a router may answer `/a` and `/%61` differently.
#[tokio::test(start_paused = true)]
async fn another_form_of_a_path_has_its_own_key_without_ignored_parameters() {
    let inner = echo();
    let shop = shop_with(&inner, of(http()));
    for uri in ["/%61?utm_source=1", "/a?utm_source=1", "/./a?gclid=1", "/a?b=%41&gclid=1"] {
        ask(&shop, get(uri)).await;
    }
    for (uri, seen) in
        [("/a", "/a"), ("/%61?gclid=2", "/%61"), ("/./a?", "/./a"), ("/a?gclid=2&b=%41", "/a?b=%41")]
    {
        let hit = ask(&shop, get(uri)).await;
        assert_eq!((hit.text(), &hit.remark()[..3]), (&*format!("GET {seen}"), "hit"), "{uri}");
    }
    assert_eq!(inner.calls(), 4);
}

#[tokio::test(start_paused = true)]
async fn requests_with_different_ignored_parameters_share_one_load() {
    let inner = echo().held();
    let shops = replicas_with(2, &inner, of(http().sort_query(true)));
    let uris = ["/a?c=2&b=1&utm_source=x", "/a?b=1&c=2", "/a?utm_source=y&b=1&c=2", "/a?gclid=1&c=2&b=1&"];
    let clients = shops.iter().flat_map(|shop| uris.map(|uri| send(shop, get(uri))));
    let clients: Vec<_> = clients.collect();
    settle().await;
    inner.gate.open();
    for seen in all(clients).await {
        assert_eq!(seen.text(), "GET /a?b=1&c=2");
    }
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_bypasses_keeps_its_query() {
    let uri = "/a?z=1&utm_source=x&b=2&";
    let shop = shop_with(&echo(), of(http().sort_query(true).cookies(["session"])));
    for field in [
        ("authorization", "Bearer 7f3a"),
        ("cookie", "session=7f3a"),
        ("cache-control", "no-store"),
        ("content-length", "1"),
        ("x-rewrite-url", "/b"),
        ("if-match", "\"a\""),
    ] {
        let seen = ask(&shop, request("GET", uri, &[field])).await;
        assert_eq!(seen.text(), format!("GET {uri}"), "{field:?}");
        assert!(seen.remark().starts_with("fwd=bypass"), "{field:?}: {}", seen.remark());
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "QUERY"] {
        assert_eq!(ask(&shop, request(method, uri, &[])).await.text(), format!("{method} {uri}"));
    }
    let hook = http().key(|parts| (parts.uri.path() != "/a").then(String::new));
    let excluded = shop_with(&echo(), of(hook));
    assert_eq!(ask(&excluded, get(uri)).await.text(), format!("GET {uri}"));
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_is_switched_off_passes_the_whole_query() {
    let uri = "/a?utm_source=x&b=2";
    let inner = echo();
    let guard = StampedeGuard::in_memory().with_policy(of(http()).build().unwrap());
    let shop: Shop = guard.layer(inner.clone());
    guard.set_bypass(true);
    let seen = ask(&shop, get(uri)).await;
    assert_eq!((seen.text(), &*seen.remark()), (&*format!("GET {uri}"), "fwd=bypass; detail=switched-off"));
    guard.set_bypass(false);
    assert_eq!(ask(&shop, get(uri)).await.text(), "GET /a?b=2");
}

#[tokio::test(start_paused = true)]
async fn a_refresh_and_a_validation_see_the_query_of_the_key() {
    let inner = Inner::with(|_, request| {
        let status = if sent(request, "if-none-match").is_empty() { 200 } else { 304 };
        assert_eq!(request.uri().query(), Some("b=1"), "{status}");
        let headers = [("cache-control", "max-age=10, stale-while-revalidate=30"), ("etag", "\"a\"")];
        Ok(respond(
            status,
            &headers,
            whole(if status == 200 { request.uri().to_string() } else { String::new() }),
        ))
    });
    let shop = shop_with(&inner, of(http()));
    for (wait, remark) in [(0, "fwd=uri-miss"), (12, "hit; ttl=-"), (45, "fwd=stale")] {
        tokio::time::sleep(secs(wait)).await;
        let seen = ask(&shop, get("/a?utm_source=x&b=1")).await;
        assert_eq!(seen.text(), "/a?b=1");
        assert!(seen.remark().starts_with(remark), "{wait}: {}", seen.remark());
        settle().await;
    }
    assert_eq!(inner.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn an_audit_loads_with_the_query_of_the_key() {
    let inner = echo();
    let guard = StampedeGuard::in_memory().with_policy(of(http()).audit(1.0).build().unwrap());
    let shop: Shop = guard.layer(inner.clone());
    for uri in ["/a?utm_source=x", "/a?utm_source=y"] {
        ask(&shop, get(uri)).await;
        // By then the audit has ended, including its grace.
        tokio::time::sleep(secs(3)).await;
    }
    let stats = guard.stats();
    assert_eq!((inner.calls(), stats.audits_matched, stats.audits_differed), (2, 1, 0), "{stats:?}");
}

#[tokio::test(start_paused = true)]
async fn a_head_finds_and_updates_the_response_without_ignored_parameters() {
    let inner = Inner::with(|_, request| {
        assert_eq!(request.uri().query(), None, "{}", request.method());
        Ok(respond(200, &[("cache-control", "max-age=10"), ("etag", "\"a\"")], whole("page")))
    });
    let shop = shop_with(&inner, of(http()));
    let head = || request("HEAD", "/a?utm_source=x", &[]);
    assert_eq!(ask(&shop, head()).await.remark(), "fwd=miss; detail=head");
    ask(&shop, get("/a?gclid=1")).await;
    assert!(ask(&shop, head()).await.remark().starts_with("hit"));
    tokio::time::sleep(secs(12)).await;
    assert_eq!(ask(&shop, head()).await.remark(), "fwd=miss; detail=head");
    assert_eq!(ask(&shop, get("/a")).await.remark(), "hit; ttl=10", "the HEAD freshened it");
    assert_eq!(inner.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_reaches_the_response_under_any_ignored_parameters() {
    let (store, inner) = (MemoryStore::new(), echo());
    let other = Inner::with(|_, request| Ok(respond(201, &[("location", sent(request, "see"))], whole(""))));
    let policy = of(http().sort_query(true)).build().unwrap();
    let guards = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    let shop: Shop = guards[0].layer(inner.clone());
    let editor: Shop = guards[1].layer(other);
    for by in 0..5 {
        for uri in ["/a?b=1&c=2", "/a?gclid=7&c=2&b=1"] {
            ask(&shop, get("/a?c=2&utm_source=x&b=1")).await;
            assert!(is_stored(&shop, uri).await, "{by}: {uri}");
            match by {
                0 => drop(ask(&editor, request("PUT", uri, &[])).await),
                1 => drop(ask(&editor, request("POST", "/all", &[("see", uri)])).await),
                2 => guards[1].invalidate_path(uri).await.unwrap(),
                3 => guards[1].invalidation().path(uri).send().await.unwrap(),
                _ => guards[1].invalidate(guards[1].http_key(&get(uri)).unwrap()).await.unwrap(),
            }
            assert!(!is_stored(&shop, "/a?b=1&c=2").await, "{by}: {uri}");
        }
    }
    assert_eq!(guards[0].http_key(&get("/a?utm_source=x&?")), guards[0].http_key(&get("/a??")));
}

/// A strict policy stores the response to a POST for GETs if the response says so. The POST passes with its whole query.
#[tokio::test(start_paused = true)]
async fn the_response_to_a_post_with_an_ignored_parameter_is_not_stored() {
    let inner = echo_with(&[("cache-control", "max-age=60"), ("content-location", "/a")]);
    let strict = || HttpPolicy::strict().ignore_query(["utm_*"]);
    let shop = shop_with(&inner, of(strict()));
    assert_eq!(ask(&shop, request("POST", EVIL, &[])).await.text(), format!("POST {EVIL}"));
    assert_eq!(ask(&shop, get("/a")).await.text(), "GET /a", "B8");
    ask(&shop, request("POST", "/a", &[])).await;
    settle().await;
    assert_eq!(ask(&shop, get("/a?utm_source=x")).await.text(), "POST /a");
}

/// The name of the setting says that these values are not in the key.
#[tokio::test(start_paused = true)]
async fn pass_unkeyed_query_lets_the_inner_service_see_the_first_clients_parameters() {
    let inner = echo();
    let shop = shop_with(&inner, of(http().sort_query(true).pass_unkeyed_query(true)));
    let uri = "/a?c=1&utm_source=x&b=2";
    assert_eq!(ask(&shop, get(uri)).await.text(), format!("GET {uri}"));
    assert_eq!(
        ask(&shop, get("/a?b=2&c=1")).await.text(),
        format!("GET {uri}"),
        "as its documentation warns"
    );
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_invents_parameters_causes_no_loads_if_only_some_are_in_the_key() {
    let inner = echo();
    let shop = shop_with(&inner, of(HttpPolicy::default().only_query(["page"])));
    for n in 0..50 {
        assert_eq!(ask(&shop, get(&format!("/a?x{n}=1&page=2&{n}"))).await.text(), "GET /a?page=2");
    }
    assert_eq!(inner.calls(), 1);
}

/// The hook reads a parameter; it sees no other parameters than the load.
#[tokio::test(start_paused = true)]
async fn a_key_hook_sees_the_query_of_the_key() {
    let inner = echo();
    let shop =
        shop_with(&inner, of(http().key(|parts| Some(parts.uri.query().unwrap_or("none").to_owned()))));
    for uri in ["/a?utm_source=x", "/a?utm_source=y", "/a"] {
        assert_eq!(ask(&shop, get(uri)).await.text(), "GET /a");
    }
    assert_eq!(inner.calls(), 1);
    ask(&shop, request("POST", "/a?utm_source=z", &[])).await;
    assert!(!is_stored(&shop, "/a").await, "an unsafe method has the same addition");
}

#[tokio::test(start_paused = true)]
async fn a_running_guard_refuses_other_rules_for_the_key() {
    let guard = StampedeGuard::in_memory().with_policy(of(http()).build().unwrap());
    for (http, setting) in [
        (http().ignore_query(["ref"]), "ignore_query"),
        (HttpPolicy::default().authority("shop.example"), "ignore_query"),
        (http().only_query(["a"]), "only_query"),
        (http().sort_query(true), "sort_query"),
    ] {
        let error = guard.set_policy(of(http).build().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
        assert!(error.to_string().starts_with(&format!("{setting} can not change")), "{error}");
    }
    guard.set_policy(of(http().pass_unkeyed_query(true)).build().unwrap()).unwrap();
}

/// An origin that is loaded while the store is away answers all waiters of the process.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_load_without_the_store_sees_the_query_of_the_key() {
    let (store, inner) = (stampede_guard::testing::ChaosStore::new(1).replica(), echo().held());
    let guard = StampedeGuard::new(store.clone()).with_policy(of(http()).build().unwrap());
    let shop: Shop = guard.layer(inner.clone());
    store.cut();
    let clients = [EVIL, "/a?utm_source=x", "/a"].map(|uri| send(&shop, get(uri)));
    tokio::time::sleep(secs(1)).await;
    inner.gate.open();
    for seen in all(clients.into()).await {
        assert_eq!(seen.text(), "GET /a");
    }
}

/// Two processes on one Redis, of which one loads.
#[cfg(feature = "redis")]
#[tokio::test]
async fn on_redis_two_processes_share_the_response_without_ignored_parameters() {
    let server = crate::support::redis_server::RedisServer::start();
    let inner = echo();
    let policy = of(http().sort_query(true)).lease(secs(120)).coordination_budget(secs(4)).build().unwrap();
    let mut shops = Vec::new();
    for _ in 0..2 {
        let client = redis::Client::open(server.minimal_user()).unwrap();
        let guard = StampedeGuard::builder(client).namespace("query").policy(policy.clone()).build().unwrap();
        crate::redis::connects(&guard).await;
        let shop: Shop = guard.layer(inner.clone());
        shops.push((guard, shop));
    }
    let ask_of = async |n: usize, request: Req| ask(&shops[n].1, request).await;
    assert_eq!(ask_of(0, get("/a?c=1&utm_source=x&b=2")).await.text(), "GET /a?b=2&c=1");
    let hit = ask_of(1, get("/a?b=2&gclid=1&c=1")).await;
    assert_eq!((hit.text(), &hit.remark()[..3]), ("GET /a?b=2&c=1", "hit"));
    ask_of(1, request("DELETE", "/a?utm_source=y&c=1&b=2", &[])).await;
    assert!(!is_stored(&shops[0].1, "/a?b=2&c=1").await);
}

/// Without the feature, the guard does not know of `OriginalUri`.
#[cfg(feature = "axum")]
mod with_axum {
    use axum::extract::{OriginalUri, Query, RawQuery};
    use axum::routing::get as route;
    use axum::{Router, body::Body};
    use bytes::Bytes;
    use http::Version;
    use http_body_util::Full;
    use tower::ServiceExt as _;

    use super::super::kit::{Seen, read};
    use super::*;

    async fn ask_app(app: &Router, request: http::request::Builder) -> Seen {
        read(app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()).await
    }

    /// What the extractors of axum see of the query.
    async fn extracted(
        OriginalUri(original): OriginalUri,
        RawQuery(raw): RawQuery,
        Query(pairs): Query<Vec<(String, String)>>,
    ) -> String {
        format!("{original} {raw:?} {pairs:?}")
    }

    #[tokio::test]
    async fn the_extractors_of_axum_see_the_query_of_the_key_around_and_in_nested_routers() {
        let guarded = || StampedeGuard::in_memory().with_policy(of(http().sort_query(true)).build().unwrap());
        let leaf = || Router::new().route("/list", route(extracted));
        let guards = [(); 3].map(|()| guarded());
        let apps = [
            Router::new().nest("/api", leaf()).layer(guards[0].clone()),
            Router::new().nest("/api", leaf().layer(guards[1].clone())),
            Router::new()
                .nest("/api", Router::new().route("/list", route(extracted).layer(guards[2].clone()))),
        ];
        for (n, (app, guard)) in apps.into_iter().zip(guards).enumerate() {
            for uri in ["/api/list?b=2&utm_source=%3Cscript%3E&a=1", "/api/list?a=1&b=2&gclid=2"] {
                let request = http::Request::get(uri).header("host", "shop.example");
                let seen = ask_app(&app, request).await;
                let expected = r#"/api/list?a=1&b=2 Some("a=1&b=2") [("a", "1"), ("b", "2")]"#;
                assert_eq!(seen.text(), expected, "{n}: {uri}");
            }
            assert_eq!((guard.stats().loads, guard.stats().hits), (1, 1), "{n}");
            let key = guard.http_key(&get("/api/list?b=2&a=1")).unwrap();
            assert!(guard.contains(key).await.unwrap(), "{n}");
            let bypassing = http::Request::get("/api/list?b=2&gclid=x").header("authorization", "x");
            let seen = ask_app(&app, bypassing).await;
            let expected = r#"/api/list?b=2&gclid=x Some("b=2&gclid=x") [("b", "2"), ("gclid", "x")]"#;
            assert_eq!(seen.text(), expected, "{n}");
        }
    }

    /// HTTP/2 has the host in the URI, and no `Host`.
    #[tokio::test]
    async fn over_http2_the_handler_sees_the_query_of_the_key() {
        let guard = StampedeGuard::in_memory().with_policy(of(http()).build().unwrap());
        let app = Router::new().fallback(extracted).layer(guard.clone());
        let addr = super::super::sockets::serve(app).await;
        let http2 = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new());
        let http2 = http2.clone().http2_only(true).build_http::<Full<Bytes>>();
        for client in [http2, super::super::sockets::client()] {
            let uri = format!("http://{addr}/a?utm_source=evil&b=1").parse().unwrap();
            let response = client.get(uri).await.unwrap();
            let version = response.version();
            let seen = read(response).await;
            assert!(
                seen.text().contains("/a?b=1 ") && !seen.text().contains("evil"),
                "{version:?}: {}",
                seen.text()
            );
            assert_eq!(guard.stats().loads, 1, "{version:?}");
            assert!(version == Version::HTTP_2 || seen.remark().starts_with("hit"), "{}", seen.remark());
        }
    }

    /// On trial the client gets the answer to its own request, and the guard's copy of the request has the query of the key.
    #[tokio::test(start_paused = true)]
    async fn on_trial_the_client_has_its_query_and_the_guards_copy_that_of_the_key() {
        let (seen, mut queries) = tokio::sync::mpsc::unbounded_channel();
        let inner = tower::service_fn(move |request: http::Request<Body>| {
            let _ = seen.send(request.uri().to_string());
            async move {
                Ok::<_, std::convert::Infallible>(http::Response::new(Body::from(request.uri().to_string())))
            }
        });
        let policy = of(http()).shadow(true).build().unwrap();
        let guard = StampedeGuard::in_memory().with_policy(policy);
        for uri in ["/a?utm_source=x", "/a?utm_source=y"] {
            let request = http::Request::get(uri).header("host", "shop.example").body(Body::empty()).unwrap();
            let answer = read(guard.layer(inner.clone()).oneshot(request).await.unwrap()).await;
            assert_eq!(answer.text(), uri);
            settle().await;
        }
        let mut all = Vec::new();
        while let Ok(uri) = queries.try_recv() {
            all.push(uri);
        }
        all.sort();
        assert_eq!(
            all,
            ["/a", "/a?utm_source=x", "/a?utm_source=y"],
            "the guard's copy is a hit the second time"
        );
    }
}
