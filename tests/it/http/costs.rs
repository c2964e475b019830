//! What a request costs the store: a constant number of commands (C14), and no key without a TTL (C12).

use http::Response;
use stampede_guard::StampedeGuard;
use stampede_guard::http::HttpPolicy;
use tower::Layer as _;

use super::kit::{
    Boxed, Inner, Req, Shop, all, ask, get, policy, request, respond, secs, send, send_many, sent, whole,
};
use crate::support::monitor::Monitor;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;

/// Connected services on a server that knows their scripts.
async fn shops(server: &RedisServer, inner: &Inner, n: usize) -> Vec<(StampedeGuard, Shop)> {
    let http = HttpPolicy::default().share_authorized(true);
    let mut shops = Vec::new();
    for _ in 0..n {
        let client = redis::Client::open(server.minimal_user()).unwrap();
        let policy =
            policy().lease(secs(120)).coordination_budget(secs(4)).http(http.clone()).build().unwrap();
        let guard = StampedeGuard::builder(client).policy(policy).build().unwrap();
        crate::redis::connects(&guard).await;
        let shop = guard.layer(inner.clone());
        // Runs each script once: a load, an abandoned load, an invalidation, and a second variant.
        ask(&shop, get("/warm")).await;
        // The first loads of a process enter the journal of tags.
        for n in 0..16 {
            ask(&shop, get(&format!("/first/{n}"))).await;
        }
        ask(&shop, request("GET", "/private", &[])).await;
        ask(&shop, request("POST", "/warm", &[])).await;
        for language in ["de", "en"] {
            ask(&shop, request("GET", "/varied?warm", &[("accept-language", language)])).await;
        }
        ask(&shop, request("GET", "/warm", &[("authorization", "a")])).await;
        ask(&shop, request("GET", "/warm", &[("x-forwarded-proto", "https")])).await;
        shops.push((guard, shop));
    }
    settled(&shops).await;
    shops
}

async fn settled(shops: &[(StampedeGuard, Shop)]) {
    eventually("nothing runs", secs(10), async || shops.iter().all(|(guard, _)| guard.stats().tasks == 0))
        .await;
}

fn answer(n: usize, request: &Req) -> Response<Boxed> {
    let headers: &[_] = match request.uri().path() {
        "/private" => &[("cache-control", "private")],
        "/varied" => &[("vary", "accept-language")],
        "/tagged" => &[("etag", "\"a\""), ("cache-control", "no-cache")],
        "/public" => &[("cache-control", "public, max-age=60")],
        _ => &[],
    };
    match sent(request, "if-none-match") {
        "" => respond(200, headers, whole(n.to_string())),
        _ => respond(304, headers, Boxed::default()),
    }
}

/// C14
#[tokio::test]
async fn a_request_costs_the_store_a_constant_number_of_commands() {
    let (server, inner) = (RedisServer::start(), Inner::with(|n, request| Ok(answer(n, request))));
    let shops = shops(&server, &inner, 1).await;
    let shop = &shops[0].1;
    let in_language = |language| request("GET", "/varied", &[("accept-language", language)]);
    let authorized = |uri| request("GET", uri, &[("authorization", "a")]);
    let reported = |method| request(method, "/reported", &[("x-forwarded-proto", "https")]);
    let steps: [(&str, Req, usize); 18] = [
        ("a miss: look up, acquire, commit", get("/a"), 3),
        ("a hit", get("/a"), 1),
        ("a HEAD's hit", request("HEAD", "/a", &[]), 1),
        ("a condition's hit", request("GET", "/a", &[("if-none-match", "\"x\"")]), 1),
        ("a part's hit", request("GET", "/a", &[("range", "bytes=0-0")]), 1),
        ("a first variant", in_language("de"), 3),
        ("its hit", in_language("de"), 1),
        (
            "another variant: where the resource is, where it is itself, and on the list of them",
            in_language("en"),
            5,
        ),
        ("its hit", in_language("en"), 2),
        ("a private one", get("/private?a"), 3),
        ("one that is known to be private", get("/private?a"), 3),
        ("a validation", get("/tagged"), 3),
        ("one with credentials, in both entries", authorized("/public"), 6),
        ("its hit", authorized("/public"), 1),
        ("a report: the tag's id before the load, and again before the commit", reported("GET"), 5),
        ("its hit", reported("GET"), 1),
        ("an unsafe method: the tag and the resource", request("POST", "/reported", &[]), 2),
        ("the report's next load", reported("GET"), 5),
    ];
    for (what, request, expected) in steps {
        let monitor = Monitor::start(&server);
        ask(shop, request).await;
        settled(&shops).await;
        let commands = monitor.finish().without(["ping", "time"]);
        assert_eq!(commands.total, expected, "C14: {what}: {:#?}", commands.lines);
    }
    // C12: every key that is left has a TTL.
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
}

/// C14: the number of commands depends on the number of processes, not of clients.
#[tokio::test]
async fn many_clients_at_once_cost_the_store_no_more_than_one() {
    let (server, inner) = (RedisServer::start(), Inner::with(|n, request| Ok(answer(n, request))));
    let shops = shops(&server, &inner, 2).await;
    inner.gate.close();
    let started = inner.calls();
    let monitor = Monitor::start(&server);
    let leading = send_many(&shops[0].1, 50, "/popular");
    inner.loads.reach(started + 1).await;
    let waiting = send_many(&shops[1].1, 50, "/popular");
    let queued = async || server.keys().iter().any(|key| key.starts_with("sg1:q:"));
    eventually("the other process waits", secs(10), queued).await;
    inner.gate.open();
    for seen in all(leading).await.into_iter().chain(all(waiting).await) {
        assert_eq!(seen.status, 200);
    }
    settled(&shops).await;
    let commands = monitor.finish().without(["ping", "time"]);
    assert!(commands.total <= 4 + 4, "C14: {:#?}", commands.lines);
    // Concurrent hits share their reads.
    let monitor = Monitor::start(&server);
    let hits: Vec<_> = (0..50).map(|_| send(&shops[0].1, get("/popular"))).collect();
    all(hits).await;
    let commands = monitor.finish().without(["ping", "time"]);
    assert!(commands.total <= 50, "C14: {:#?}", commands.lines);
}

/// C12: requests for URIs that are never requested again leave no key that stays for ever.
#[tokio::test]
async fn a_flood_of_distinct_uris_leaves_no_key_without_a_ttl() {
    let (server, inner) = (RedisServer::start(), Inner::with(|n, request| Ok(answer(n, request))));
    let shops = shops(&server, &inner, 1).await;
    let paths = ["/a", "/private", "/varied", "/tagged", "/public"];
    let flood: Vec<_> =
        (0..500).map(|n| send(&shops[0].1, get(&format!("{}?{n}", paths[n % paths.len()])))).collect();
    all(flood).await;
    settled(&shops).await;
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "C12");
    assert_eq!(shops[0].0.stats().flights, 0, "C12");
}
