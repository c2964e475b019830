//! `HttpPolicy::path_tags`: one invalidation of a path reaches the responses to each of its queries.

use http::Response;
use stampede_guard::http::HttpPolicy;
use stampede_guard::{MemoryStore, PolicyBuilder, StampedeGuard};
use tower::Layer as _;

use super::kit::{Boxed, Inner, Req, Shop, ask, get, policy, request, respond, sent, whole};
use crate::support::monitor::Monitor;
use crate::support::redis_server::RedisServer;

fn origin() -> Inner {
    Inner::with(|n, request| Ok(answer(n, request)))
}

fn answer(n: usize, request: &Req) -> Response<Boxed> {
    let location = [("location", sent(request, "see"))];
    let vary = [("vary", "accept-language")];
    respond(200, if *request.method() == "POST" { &location } else { &vary }, whole(n.to_string()))
}

fn http() -> HttpPolicy {
    HttpPolicy::default().authority("shop.example")
}

fn of(http: HttpPolicy) -> PolicyBuilder {
    policy().http(http)
}

/// One process, with its guard and its service, on this store.
fn process(store: &MemoryStore, inner: &Inner, policy: PolicyBuilder) -> (StampedeGuard, Shop) {
    let guard = StampedeGuard::new(store.clone()).with_policy(policy.build().unwrap());
    let shop = guard.layer(inner.clone());
    (guard, shop)
}

async fn is_stored(shop: &Shop, uri: &str) -> bool {
    ask(shop, request("GET", uri, &[("cache-control", "only-if-cached")])).await.status == 200
}

const OF_THE_PATH: [&str; 5] = ["/p", "/p?utm=1", "/p?a=b", "/%70?c", "/p?a=b:c?~d"];
const OTHERS: [&str; 5] = ["/", "/p/", "/pq", "/q?a=b", "/P"];

#[tokio::test(start_paused = true)]
async fn one_invalidation_of_a_path_reaches_each_query_of_it() {
    for path in ["/p", "/p?utm=1", "/p?none", "/%70"] {
        for by in 0..3 {
            let (store, inner) = (MemoryStore::new(), origin());
            let (guard, shop) = process(&store, &inner, of(http().path_tags(true)));
            let (_, other) = process(&store, &inner, of(http().path_tags(true)));
            for uri in OF_THE_PATH.into_iter().chain(OTHERS) {
                ask(&shop, get(uri)).await;
                assert!(is_stored(&other, uri).await, "{uri}");
            }
            // Each of these requests has another variant, or another report of a proxy.
            for field in [("accept-language", "de"), ("x-forwarded-proto", "https")] {
                ask(&shop, request("GET", "/p?utm=1", &[field])).await;
            }
            match by {
                0 => guard.invalidate_path(path).await.unwrap(),
                1 => drop(ask(&shop, request("POST", path, &[])).await),
                _ => drop(ask(&shop, request("POST", "/all", &[("see", path)])).await),
            }
            for uri in OF_THE_PATH {
                assert!(!is_stored(&other, uri).await, "{path}, {by}: {uri}");
            }
            for field in [("accept-language", "de"), ("x-forwarded-proto", "https")] {
                let seen = ask(&other, request("GET", "/p?utm=1", &[field])).await;
                assert!(seen.remark().starts_with("fwd="), "{path}, {by}: {field:?}");
            }
            for uri in OTHERS {
                assert!(is_stored(&other, uri).await, "{path}, {by}: {uri}");
            }
            // A response that was loaded after the change is served.
            ask(&shop, get("/p?a=b")).await;
            assert!(is_stored(&other, "/p?a=b").await);
        }
    }
}

/// docs/invalidation.md says this.
#[tokio::test(start_paused = true)]
async fn without_path_tags_an_invalidation_reaches_its_own_query_only() {
    let (guard, shop) = process(&MemoryStore::new(), &origin(), of(http()));
    for uri in OF_THE_PATH {
        ask(&shop, get(uri)).await;
    }
    guard.invalidate_path("/p").await.unwrap();
    for uri in OF_THE_PATH {
        assert_eq!(is_stored(&shop, uri).await, uri != "/p", "{uri}");
    }
}

/// A change invalidates for all users (RFC 9111, 4.4), so the tag of a path contains no cohort and no credentials.
#[tokio::test(start_paused = true)]
async fn an_unsafe_method_reaches_other_cohorts_and_users_of_the_path() {
    let keyed = |http: HttpPolicy| {
        http.path_tags(true).key(|parts| Some(parts.headers.get("x-cohort")?.to_str().ok()?.to_owned()))
    };
    for (http, field) in [(HttpPolicy::default(), "x-cohort"), (HttpPolicy::private(), "authorization")] {
        let http = if field == "x-cohort" { keyed(http) } else { http.path_tags(true) };
        let (_, shop) = process(&MemoryStore::new(), &origin(), of(http));
        let of = |method, value| request(method, "/p?a=b", &[(field, value)]);
        ask(&shop, of("GET", "a")).await;
        assert!(ask(&shop, of("GET", "a")).await.remark().starts_with("hit"), "{field}");
        ask(&shop, of("POST", "b")).await;
        assert!(ask(&shop, of("GET", "a")).await.remark().starts_with("fwd="), "{field}");
    }
}

/// As during a deployment that turns `path_tags` on, when only some processes have it.
#[tokio::test(start_paused = true)]
async fn in_a_mixed_fleet_nothing_untagged_is_served_as_tagged() {
    let (store, inner) = (MemoryStore::new(), origin());
    let (_, without) = process(&store, &inner, of(http()));
    let (guard, with) = process(&store, &inner, of(http().path_tags(true)));
    ask(&without, get("/p?a")).await;
    assert!(!is_stored(&with, "/p?a").await, "it may have been invalidated without a trace");
    ask(&with, get("/p?a")).await;
    ask(&with, get("/p?b")).await;
    assert!(is_stored(&without, "/p?a").await, "what has the tag is a hit for both");
    // The process without it invalidates its own query only ..
    ask(&without, request("POST", "/p", &[])).await;
    assert!(is_stored(&with, "/p?a").await);
    // .. and the other one reaches all that have the tag, in both, and its own query without the tag.
    for uri in ["/p", "/p?c"] {
        ask(&without, get(uri)).await;
    }
    guard.invalidate_path("/p").await.unwrap();
    for (shop, has_own) in [(&without, true), (&with, false)] {
        for uri in ["/p", "/p?a", "/p?b"] {
            assert!(!is_stored(shop, uri).await, "{uri}");
        }
        // .. but not what the process without it has stored under another query, which that process alone serves.
        assert_eq!(is_stored(shop, "/p?c").await, has_own);
    }
}

/// A load that began before the invalidation is not stored.
#[tokio::test(start_paused = true)]
async fn an_invalidation_of_the_path_wins_over_a_running_load_of_a_query() {
    let (store, inner) = (MemoryStore::new(), origin().held());
    let (_, shop) = process(&store, &inner, of(http().path_tags(true)));
    let (guard, other) = process(&store, &inner, of(http().path_tags(true)));
    let running = super::kit::send(&shop, get("/p?a"));
    inner.loads.reach(1).await;
    guard.invalidate_path("/p").await.unwrap();
    inner.gate.open();
    running.await.unwrap();
    assert!(!is_stored(&other, "/p?a").await);
}

/// A change of one path must not make the loads of other paths run twice. This is tested in an outage, in which requests coalesce only
/// within the process.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_change_of_one_path_leaves_the_running_loads_of_others() {
    for (changed, more) in [("/other", 0), ("/p/x", 0), ("/p", 1), ("/p?b", 1)] {
        let (store, inner) = (stampede_guard::testing::ChaosStore::new(1).replica(), origin().held());
        let policy = of(http().path_tags(true)).build().unwrap();
        let guard = StampedeGuard::new(store.clone()).with_policy(policy);
        let shop: Shop = guard.layer(inner.clone());
        store.cut();
        let mut waiting = Vec::new();
        let mut ask_once_more = async || {
            waiting.push(super::kit::send(&shop, get("/p?a")));
            // This is longer than a look-up takes.
            tokio::time::sleep(super::kit::secs(1)).await;
            inner.calls()
        };
        // The second caller knows from the beginning that the store is away, and later ones join its load.
        let mut calls = 0;
        for _ in 0..3 {
            calls = ask_once_more().await;
        }
        let changed_in_outage = guard.invalidate_path(changed).await;
        assert!(changed_in_outage.is_err());
        assert_eq!(ask_once_more().await, calls + more, "{changed}");
        inner.gate.open();
        for answer in waiting {
            answer.await.unwrap();
        }
    }
}

/// A key or a path this long is stored as a digest.
#[tokio::test(start_paused = true)]
async fn a_path_reaches_the_longest_queries_and_the_longest_path_its_queries() {
    let (guard, shop) = process(&MemoryStore::new(), &origin(), of(http().path_tags(true)));
    let long = "a".repeat(5_000);
    for (path, query) in [("/p", &*long), (&*format!("/{long}"), "a")] {
        let uri = format!("{path}?{query}");
        ask(&shop, get(&uri)).await;
        assert!(is_stored(&shop, &uri).await);
        guard.invalidate_path(path).await.unwrap();
        assert!(!is_stored(&shop, &uri).await);
    }
}

#[tokio::test(start_paused = true)]
async fn copies_in_memory_of_each_query_are_dropped_in_each_process() {
    let (store, inner) = (MemoryStore::new(), Inner::numbered(|_| ()));
    let local =
        || of(http().path_tags(true)).fresh_for(super::kit::secs(600)).local_for(std::time::Duration::MAX);
    let (guard, one) = process(&store, &inner, local());
    let (other, two) = process(&store, &inner, local());
    for guard in [&guard, &other] {
        guard.connect().await.unwrap();
    }
    for _ in 0..3 {
        for shop in [&one, &two] {
            ask(shop, get("/p?a")).await;
        }
    }
    assert!(other.stats().local_hits > 0, "{:?}", other.stats());
    let calls = inner.calls();
    guard.invalidate_path("/p").await.unwrap();
    ask(&two, get("/p?a")).await;
    assert_eq!(inner.calls(), calls + 1);
}

/// What the tags cost: one more key in the read of a hit, two more reads of the tag's id (before a load and before its commit), and one
/// more script for an invalidation.
#[tokio::test]
async fn a_hit_reads_the_tag_of_its_path_in_the_same_command() {
    let server = RedisServer::start();
    let mut costs = Vec::new();
    for tagged in [false, true] {
        let client = redis::Client::open(server.minimal_user()).unwrap();
        let policy = of(http().path_tags(tagged)).lease(super::kit::secs(120));
        let policy = policy.coordination_budget(super::kit::secs(4)).build().unwrap();
        let namespace = format!("tagged-{tagged}");
        let guard = StampedeGuard::builder(client).namespace(namespace).policy(policy).build().unwrap();
        crate::redis::connects(&guard).await;
        let shop = guard.layer(Inner::numbered(|_| ()));
        // Runs each script once.
        ask(&shop, get("/warm")).await;
        guard.invalidate_path("/warm").await.unwrap();
        let count = async |request: Option<Req>| {
            let monitor = Monitor::start(&server);
            match request {
                Some(request) => drop(ask(&shop, request).await),
                None => guard.invalidate_path("/p").await.unwrap(),
            }
            crate::support::probe::eventually("nothing runs", super::kit::secs(10), async || {
                guard.stats().tasks == 0
            })
            .await;
            monitor.finish().without(["ping", "time"])
        };
        let load = count(Some(get("/p?a"))).await;
        let hit = count(Some(get("/p?a"))).await;
        let invalidation = count(None).await;
        if tagged {
            let read = hit.lines.first().unwrap();
            assert!(read.contains("MGET") && read.contains("/p~p}"), "{read}");
            assert_eq!(read.matches("sg1:").count(), 2, "the entry and the tag: {read}");
        }
        costs.push([load.total, hit.total, invalidation.total]);
    }
    // Until sixteen have ended, the loads of a process enter the journal of tags, in case their responses get some: one command of these loads.
    assert_eq!(costs, [[4, 1, 2], [6, 1, 3]], "load, hit, invalidation; without and with path_tags");
}
