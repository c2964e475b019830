//! `CacheTags` and `CacheTagger`: a response is invalidated by what it shows.

use http::{HeaderName, Response, StatusCode};
use stampede_guard::http::{CacheTagger, CacheTags, HttpPolicy};
use stampede_guard::{MemoryStore, PolicyBuilder, StampedeGuard};
use tower::Layer as _;

use super::kit::{
    Boxed, Inner, Req, Shop, add, ask, get, policy, request, respond, secs, send, sent, settle, whole,
};
use crate::support::monitor::Monitor;
use crate::support::redis_server::RedisServer;

/// Each page shows the articles that its query names, and has a tag for each of them.
fn pages() -> Inner {
    Inner::with(|n, request| Ok(page(n, request)))
}

fn page(n: usize, request: &Req) -> Response<Boxed> {
    let mut response = respond(200, &[("cache-control", "max-age=60")], whole(n.to_string()));
    let articles = request.uri().query().unwrap_or_default().split('&').filter(|article| !article.is_empty());
    let tags: Vec<_> = articles.map(|article| ("article", article.to_owned())).collect();
    if !tags.is_empty() {
        response.extensions_mut().insert(CacheTags::new(tags));
    }
    response
}

fn process(guard: StampedeGuard, inner: &Inner, policy: PolicyBuilder) -> (StampedeGuard, Shop) {
    let guard = guard.with_policy(policy.build().unwrap());
    let shop = guard.layer(inner.clone());
    (guard, shop)
}

fn processes(inner: &Inner, policy: impl Fn() -> PolicyBuilder) -> [(StampedeGuard, Shop); 2] {
    let store = MemoryStore::new();
    [(); 2].map(|()| process(StampedeGuard::new(store.clone()), inner, policy()))
}

async fn is_stored(shop: &Shop, uri: &str) -> bool {
    ask(shop, request("GET", uri, &[("cache-control", "only-if-cached")])).await.status == 200
}

async fn each_tag_invalidates_the_pages_that_have_it(
    [(one, shop), (two, other)]: &[(StampedeGuard, Shop); 2],
) {
    let uris = ["/?7", "/?8", "/?7&8", "/?none", "/"];
    for (guard, tag, gone) in [(one, "7", [0, 2]), (two, "8", [1, 2])] {
        for uri in uris {
            ask(shop, get(uri)).await;
            assert!(is_stored(other, uri).await, "{uri}");
        }
        guard.invalidate_tag(("article", tag)).await.unwrap();
        for shop in [shop, other] {
            for (number, uri) in uris.into_iter().enumerate() {
                assert_eq!(is_stored(shop, uri).await, !gone.contains(&number), "{tag}: {uri}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_tag_of_a_response_invalidates_it() {
    each_tag_invalidates_the_pages_that_have_it(&processes(&pages(), policy)).await;
    // With copies in memory, and beside the tags of the policy.
    each_tag_invalidates_the_pages_that_have_it(&processes(&pages(), || policy().local_for(secs(60)))).await;
    each_tag_invalidates_the_pages_that_have_it(&processes(&pages(), || policy().tags(["pages"]))).await;
}

/// The page is stale from the expiry on: it is served at once, with its age, and loaded anew once in the fleet.
#[tokio::test(start_paused = true)]
async fn an_expired_tag_makes_its_pages_stale() {
    let inner = Inner::with(|n, request| {
        let mut page = page(n, request);
        let fresh = "max-age=60, stale-while-revalidate=30".parse().unwrap();
        page.headers_mut().insert("cache-control", fresh);
        Ok(page)
    });
    let [(one, shop), (_, other)] = &processes(&inner, || policy().local_for(secs(60)));
    for uri in ["/?7", "/?8"] {
        ask(shop, get(uri)).await;
        ask(other, get(uri)).await;
    }
    tokio::time::advance(secs(10)).await;
    one.expire_tag(("article", "7")).await.unwrap();
    let stale = ask(other, get("/?7")).await;
    assert_eq!((stale.body.as_ref(), stale.headers["age"].as_bytes()), (&b"1"[..], &b"10"[..]));
    assert!(stale.headers["cache-status"].to_str().unwrap().contains("hit; ttl=0"), "{:?}", stale.headers);
    settle().await;
    assert_eq!(inner.calls(), 3, "one load for both processes");
    for shop in [shop, other] {
        assert_eq!(ask(shop, get("/?7")).await.body.as_ref(), b"3");
        assert_eq!(ask(shop, get("/?8")).await.body.as_ref(), b"2");
    }
    // Beyond the page's own stale window, which begins with the expiry, a request waits.
    one.expire_tag(("article", "7")).await.unwrap();
    tokio::time::advance(secs(31)).await;
    assert_eq!(ask(other, get("/?7")).await.body.as_ref(), b"4");
}

#[tokio::test]
async fn each_tag_of_a_response_invalidates_it_on_redis() {
    let server = RedisServer::start();
    for local_for in [0, 60] {
        let namespace = format!("shop{local_for}");
        let inner = pages();
        let process = async || {
            let guard = StampedeGuard::builder(server.client()).namespace(&*namespace).build().unwrap();
            guard.connect().await.unwrap();
            process(guard, &inner, policy().local_for(secs(local_for)))
        };
        let processes = [process().await, process().await];
        each_tag_invalidates_the_pages_that_have_it(&processes).await;
    }
}

/// The handler reads the article, the article changes and is invalidated, and then the response comes with the tag.
#[tokio::test(start_paused = true)]
async fn a_tag_that_comes_with_the_response_is_as_safe_as_an_early_one() {
    for (tag, stored) in [("7", false), ("8", true)] {
        let inner = pages().held();
        let [(_, shop), (other, elsewhere)] = processes(&inner, policy);
        let before = send(&shop, get("/?7"));
        inner.loads.reach(1).await;
        other.invalidate_tag(("article", tag)).await.unwrap();
        let after = [send(&shop, get("/?7")), send(&elsewhere, get("/?7"))];
        settle().await;
        inner.gate.open();
        assert_eq!(before.await.unwrap().text(), "1", "it came before the change");
        for after in after {
            assert_eq!(after.await.unwrap().text() == "1", stored, "{tag}");
        }
        assert!(is_stored(&elsewhere, "/?7").await, "now, at least");
        assert_eq!(ask(&elsewhere, get("/?7")).await.text() == "1", stored, "{tag}");
    }
}

/// Waiters get a response with tags at its end, when it is known whether they may have it.
#[tokio::test(start_paused = true)]
async fn a_change_during_the_body_reaches_its_waiters() {
    let (feed, body) = super::kit::Feed::new();
    let body = std::sync::Mutex::new(Some(body));
    let inner = Inner::with(move |n, request| {
        let mut response = page(n, request);
        if let Some(body) = body.lock().unwrap().take() {
            *response.body_mut() = body;
        }
        add(&mut response, &[("content-length", "1")]);
        Ok(response)
    });
    let [(_, shop), (other, _)] = processes(&inner, policy);
    let first = send(&shop, get("/?7"));
    inner.loads.reach(1).await;
    settle().await;
    other.invalidate_tag(("article", "7")).await.unwrap();
    let second = send(&shop, get("/?7"));
    settle().await;
    feed.data("0");
    drop(feed);
    assert_eq!(first.await.unwrap().text(), "0");
    assert_eq!(second.await.unwrap().text(), "2");
    assert_eq!(ask(&shop, get("/?7")).await.text(), "2");
}

#[tokio::test(start_paused = true)]
async fn a_handler_tags_while_it_runs() {
    let inner = Inner::with(|n, request| {
        let tagger = request.extensions().get::<CacheTagger>().expect("of the guard").clone();
        tagger.tag([("article", 7)]);
        tagger.tag([("author", 3)]);
        Ok(page(n, request))
    });
    for tag in [("article", 7), ("article", 8), ("author", 3)] {
        let [(guard, shop), (_, other)] = processes(&inner, policy);
        ask(&shop, get("/?8")).await;
        assert!(is_stored(&other, "/?8").await);
        guard.invalidate_tag(tag).await.unwrap();
        assert!(!is_stored(&other, "/?8").await, "{tag:?}");
    }
}

/// A 304 without tags, a HEAD and a part say nothing about the tags of the stored response.
#[tokio::test(start_paused = true)]
async fn a_validated_response_keeps_its_tags_or_gets_those_of_the_304() {
    for (confirms_with, gone) in [("", "7"), ("9", "9")] {
        let inner = Inner::with(move |n, request| {
            let mut response = match sent(request, "if-none-match") {
                "" => page(n, request),
                _ => respond(304, &[("cache-control", "max-age=60")], Boxed::default()),
            };
            add(&mut response, &[("etag", "\"a\"")]);
            if response.status() == StatusCode::NOT_MODIFIED && !confirms_with.is_empty() {
                response.extensions_mut().insert(CacheTags::new([("article", confirms_with)]));
            }
            Ok(response)
        });
        let [(guard, shop), (_, other)] = processes(&inner, policy);
        ask(&shop, get("/?7")).await;
        let again = ask(&other, request("GET", "/?7", &[("cache-control", "no-cache")])).await;
        assert_eq!((again.status, again.text(), inner.calls()), (200, "1", 2), "it was validated");
        for (article, is_gone) in [("7", gone == "7"), ("9", gone == "9")] {
            ask(&shop, request("HEAD", "/?7", &[])).await;
            guard.invalidate_tag(("article", article)).await.unwrap();
            assert_eq!(is_stored(&shop, "/?7").await, !is_gone, "{confirms_with:?}, {article}");
            if is_gone {
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_with_tags_that_are_refused_is_not_stored() {
    let inner = Inner::with(|n, request| {
        let mut response = page(n, request);
        let tags = match request.uri().path() {
            "/many" => CacheTags::new((0..65).map(|n| ("article", n))),
            "/most" => CacheTags::new((0..64).map(|n| ("article", n))),
            _ => CacheTags::new([""]),
        };
        response.extensions_mut().insert(tags);
        Ok(response)
    });
    let [(_, shop), (_, other)] = processes(&inner, policy);
    for (uri, stored) in [("/many", false), ("/most", true), ("/empty", false)] {
        assert_eq!(ask(&shop, get(uri)).await.status, 200);
        assert_eq!(is_stored(&other, uri).await, stored, "{uri}");
    }
}

/// A response to a request with credentials that says `public` is stored for all, under the key without credentials.
#[tokio::test(start_paused = true)]
async fn a_response_to_credentials_has_its_tags_too() {
    for invalidates in [false, true] {
        let inner = Inner::with(|n, request| {
            let mut response = page(n, request);
            response.headers_mut().insert("cache-control", "public, max-age=60".parse().unwrap());
            Ok(response)
        })
        .held();
        let http = || policy().http(HttpPolicy::default().share_authorized(true));
        let [(guard, shop), (_, other)] = processes(&inner, http);
        let running = send(&shop, request("GET", "/?7", &[("authorization", "Basic x")]));
        inner.loads.reach(1).await;
        if invalidates {
            guard.invalidate_tag(("article", "7")).await.unwrap();
        }
        inner.gate.open();
        running.await.unwrap();
        assert_eq!(is_stored(&other, "/?7").await, !invalidates);
        guard.invalidate_tag(("article", "7")).await.unwrap();
        assert!(!is_stored(&other, "/?7").await);
    }
}

/// The first loads of a process are noted in case they get tags; after that only the loads of a policy of which one had tags. So the
/// seventeenth load, the first with tags, is answered and not stored.
#[tokio::test(start_paused = true)]
async fn tags_that_come_first_after_many_loads_without_tags_cost_one_load_more() {
    let inner = pages();
    let [(_, shop), (_, other)] = processes(&inner, policy);
    for n in 0..16 {
        ask(&shop, get(&format!("/{n}"))).await;
    }
    for is_known in [false, true, true] {
        ask(&shop, get("/?7")).await;
        assert_eq!(is_stored(&other, "/?7").await, is_known);
    }
}

/// The process knows which tags a key's value had, and reads their ids together with the entry. Another process learns that by its first
/// hit.
#[tokio::test]
async fn a_hit_on_a_response_with_tags_costs_one_round_trip() {
    let (server, inner) = (RedisServer::start(), pages());
    let process = async || {
        let guard = StampedeGuard::builder(server.client()).build().unwrap();
        guard.connect().await.unwrap();
        process(guard, &inner, policy())
    };
    let [(guard, shop), (_, other)] = [process().await, process().await];
    ask(&shop, get("/?7&8")).await;
    for (shop, commands) in [(&shop, 1), (&other, 2), (&other, 1)] {
        let monitor = Monitor::start(&server);
        assert!(ask(shop, get("/?7&8")).await.remark().starts_with("hit"));
        let seen = monitor.finish().without(["ping", "time"]);
        assert_eq!(seen.total, commands, "{seen:?}");
    }
    guard.invalidate_tag(("article", "8")).await.unwrap();
    assert!(!is_stored(&other, "/?7&8").await);
    // Without the feature, a hit is the GET that it was.
    ask(&shop, get("/")).await;
    let monitor = Monitor::start(&server);
    assert!(ask(&other, get("/")).await.remark().starts_with("hit"));
    let seen = monitor.finish().without(["ping", "time"]);
    assert_eq!((seen.total, seen.by_name.get("get")), (1, Some(&1)), "{seen:?}");
}

/// As a proxy in front of an origin, or a client. Clients do not see the field, whether the response was loaded, stored or passed on.
#[tokio::test(start_paused = true)]
async fn headers_of_the_origin_are_tags_if_the_policy_names_them() {
    let inner = || {
        Inner::with(|n, _| {
            let mut response = respond(200, &[("cache-control", "max-age=60")], whole(n.to_string()));
            add(&mut response, &[("cache-tag", "article-7,author-3"), ("cache-tag", "a b"), ("xkey", "x")]);
            Ok(response)
        })
    };
    let named = || HttpPolicy::default().tag_headers([HeaderName::from_static("cache-tag")]);
    for (http, shows, tags) in [
        (
            named(),
            false,
            &[("article-7", true), ("author-3", true), ("a", true), ("b", true), ("x", false)][..],
        ),
        (named().pass_tag_headers(true), true, &[("article-7", true), ("article-7,author-3", false)]),
        (HttpPolicy::default(), true, &[("article-7", false)]),
    ] {
        for (tag, reaches) in tags {
            let [(guard, shop), (_, other)] = processes(&inner(), || policy().http(http.clone()));
            for request in [get("/"), get("/"), request("HEAD", "/x", &[]), request("POST", "/y", &[])] {
                let seen = ask(&shop, request).await;
                assert_eq!(seen.header("cache-tag").is_some(), shows);
                assert_eq!(seen.header("xkey"), Some("x"));
            }
            guard.invalidate_tag(*tag).await.unwrap();
            assert_eq!(is_stored(&other, "/").await, !reaches, "{tag}");
        }
    }
    // More tags than max_tags: not stored.
    let [(_, shop), (_, other)] = processes(&inner(), || policy().http(named()).max_tags(3));
    ask(&shop, get("/")).await;
    assert!(!is_stored(&other, "/").await);
}

/// A response with the fields of Cache Groups. Its 304 and its other part do not repeat the tags of the handler.
fn grouped(calls_with_tags: usize) -> Inner {
    Inner::with(move |n, request| {
        let fields = [("cache-control", "max-age=60"), ("etag", "\"a\""), ("cache-groups", "\"g\"")];
        let mut response = match (sent(request, "if-none-match"), sent(request, "range")) {
            ("", "") => respond(200, &fields, whole("abcd")),
            ("", range) => {
                let (first, text) = if range == "bytes=0-1" { (0, "ab") } else { (2, "cd") };
                let part = format!("bytes {first}-{}/4", first + 1);
                let mut response = respond(206, &fields, whole(text));
                add(&mut response, &[("content-range", &part)]);
                response
            }
            _ => respond(304, &fields[..2], Boxed::default()),
        };
        if n <= calls_with_tags {
            response.extensions_mut().insert(CacheTags::new([("article", 7)]));
        }
        Ok(response)
    })
}

#[tokio::test(start_paused = true)]
async fn a_validated_response_and_a_joined_part_keep_their_tags_beside_their_groups() {
    for parts in [false, true] {
        for (invalidates, is_gone) in [("article:7", true), ("article:8", false)] {
            let inner = grouped(1);
            let [(guard, shop), (_, other)] =
                processes(&inner, || policy().http(HttpPolicy::default().cache_groups(true)));
            let requests = match parts {
                true => ["bytes=0-1", "bytes=2-3"].map(|range| request("GET", "/", &[("range", range)])),
                false => [get("/"), request("GET", "/", &[("cache-control", "no-cache")])],
            };
            for request in requests {
                ask(&shop, request).await;
            }
            assert_eq!((ask(&other, get("/")).await.text(), inner.calls()), ("abcd", 2), "{parts}");
            let (name, id) = invalidates.split_once(':').unwrap();
            guard.invalidate_tag((name, id.parse::<u64>().unwrap())).await.unwrap();
            assert_eq!(is_stored(&other, "/").await, !is_gone, "{parts}, {invalidates}");
        }
    }
}

/// The tag of a path this long is a digest. It is not among the response's own tags, however often that is validated.
#[tokio::test(start_paused = true)]
async fn validations_do_not_add_tags() {
    let uri = format!("/{}", "a".repeat(500));
    let http = HttpPolicy::default().authority("shop.example").path_tags(true);
    let [(guard, shop), (_, other)] = processes(&grouped(1), || policy().max_tags(1).http(http.clone()));
    ask(&shop, get(&uri)).await;
    for n in 0..4 {
        let again = ask(&shop, request("GET", &uri, &[("cache-control", "no-cache")])).await;
        assert_eq!(again.status, 200);
        assert!(is_stored(&other, &uri).await, "{n}: max_tags(1) has room for the tag of the handler");
    }
    guard.invalidate_path(&uri).await.unwrap();
    assert!(!is_stored(&other, &uri).await);
}

#[tokio::test(start_paused = true)]
async fn a_head_extends_the_life_of_a_response_with_tags() {
    let [(guard, shop), (_, other)] = processes(&grouped(1), policy);
    ask(&shop, get("/")).await;
    tokio::time::advance(secs(59)).await;
    let head = request("HEAD", "/", &[("cache-control", "no-cache")]);
    assert_eq!(ask(&shop, head).await.status, 200);
    settle().await;
    tokio::time::advance(secs(10)).await;
    assert!(is_stored(&other, "/").await);
    guard.invalidate_tag(("article", 7)).await.unwrap();
    assert!(!is_stored(&other, "/").await);
}

#[tokio::test(start_paused = true)]
async fn a_tag_that_is_named_many_times_counts_once() {
    let inner = Inner::with(|n, request| {
        let tagger = request.extensions().get::<CacheTagger>().expect("of the guard").clone();
        (0..1_000).for_each(|row| tagger.tag([("author", row % 2)]));
        Ok(page(n, request))
    });
    let [(guard, shop), (_, other)] = processes(&inner, || policy().max_tags(2));
    ask(&shop, get("/")).await;
    assert!(is_stored(&other, "/").await);
    guard.invalidate_tag(("author", 1)).await.unwrap();
    assert!(!is_stored(&other, "/").await);
}
