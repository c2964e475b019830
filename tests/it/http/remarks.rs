//! `Cache-Status` (RFC 9211) is truthful for answers that are neither plainly stored nor plainly the origin's.

use std::collections::BTreeMap;

use super::kit::{
    Down, Feed, Inner, Seen, all, ask, get, policy, replicas_with, respond, secs, send, send_many, settle,
    shop, whole,
};

/// A header line.
type Line = (&'static str, &'static str);

/// How many times each remark was made.
fn tally(seen: &[Seen]) -> BTreeMap<String, usize> {
    let mut tally = BTreeMap::new();
    for seen in seen {
        *tally.entry(seen.remark()).or_default() += 1;
    }
    tally
}

fn tallied(remarks: &[(&str, usize)]) -> BTreeMap<String, usize> {
    remarks.iter().map(|(remark, times)| ((*remark).to_owned(), *times)).collect()
}

/// RFC 9211, 2.1: a hit is a request that was not forwarded. Regression: all clients received `hit`, also the one whose request was
/// forwarded.
#[tokio::test(start_paused = true)]
async fn a_stand_in_is_no_hit_for_clients_that_waited_for_the_answer() {
    for (failure, leader) in
        [(503, "fwd=stale; fwd-status=503; ttl=-2"), (0, "fwd=stale; ttl=-2; detail=no-answer")]
    {
        let inner = Inner::with(move |n, _| match (n, failure) {
            (1, _) => Ok(respond(200, &[("cache-control", "max-age=10, stale-if-error=60")], whole("old"))),
            (_, 0) => Err(Down("no route".into())),
            _ => Ok(respond(failure, &[], whole("sorry"))),
        });
        let shops = replicas_with(2, &inner, policy().back_off(secs(5)));
        ask(&shops[0], get("/")).await;
        tokio::time::sleep(secs(12)).await;
        inner.gate.close();
        let waiting: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 5, "/")).collect();
        settle().await;
        inner.gate.open();
        let seen = all(waiting).await;
        assert!(seen.iter().all(|seen| seen.text() == "old"));
        assert_eq!(tally(&seen), tallied(&[(leader, 1), ("fwd=stale; collapsed; ttl=-2", 9)]));
        for shop in &shops {
            assert_eq!(ask(shop, get("/")).await.remark(), "hit; ttl=-2", "while the origin rests");
        }
        assert_eq!(inner.calls(), 2);
    }
}

/// The request of the leader was forwarded, even if its answer takes too long and a stored response stands in.
#[tokio::test(start_paused = true)]
async fn a_stand_in_for_a_slow_answer_is_no_hit_for_the_leaders_client() {
    let inner = Inner::with(|n, _| {
        Ok(respond(200, &[("cache-control", "max-age=10, stale-if-error=60")], whole(n.to_string())))
    });
    let shop = super::kit::shop_with(&inner, policy().load_timeout(secs(5)));
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(12)).await;
    inner.gate.close();
    let waiting = send_many(&shop, 5, "/");
    let seen = all(waiting).await;
    assert!(seen.iter().all(|seen| seen.text() == "1"));
    let expected = [("fwd=stale; ttl=-2; detail=no-answer", 1), ("fwd=stale; collapsed; ttl=-2", 4)];
    let seen = tally(&seen);
    assert_eq!(seen.values().sum::<usize>(), 5);
    assert_eq!(seen, tallied(&expected));
}

/// Regression: a response that must always be validated had a positive `ttl` for a waiter, after it had waited for a second.
#[tokio::test(start_paused = true)]
async fn a_waiter_receives_no_freshness_that_the_response_lacks() {
    let cases = [
        ("no-cache", "0", "fwd=uri-miss; stored; ttl=0", "fwd=miss; collapsed"),
        ("max-age=0", "0", "fwd=uri-miss; stored; ttl=0", "fwd=miss; collapsed"),
        ("max-age=10", "30", "fwd=uri-miss; stored; ttl=0; detail=too-old", "fwd=miss; collapsed"),
        ("max-age=10", "0", "fwd=uri-miss; stored; ttl=10", "fwd=miss; collapsed; ttl=10"),
    ];
    for (control, age, leader, others) in cases {
        let (feed, body) = Feed::new();
        let headers = [("etag", "\"a\""), ("cache-control", control), ("age", age)];
        let inner = Inner::in_turn([respond(200, &headers, body)]);
        let shops = replicas_with(2, &inner, policy());
        let waiting: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 3, "/")).collect();
        tokio::time::sleep(secs(2)).await;
        feed.data("body");
        drop(feed);
        let mut seen = tally(&all(waiting).await);
        // The load took two seconds, which are no longer left of the lifetime.
        let others = others.replace("=10", "=8");
        assert_eq!(seen.remove(leader), Some(1), "{control}, {age}");
        assert_eq!(seen, tallied(&[(&others, 5)]), "{control}, {age}");
    }
}

/// Regression: the responses that can not be stored said `stored` nevertheless, and each request loaded them again.
#[tokio::test(start_paused = true)]
async fn a_response_that_can_not_be_stored_is_not_reported_as_stored() {
    let long: &'static str = "x".repeat(60_000).leak();
    let lasting = ("cache-control", "max-age=60");
    let cases: [(u16, Vec<Line>, &'static str, bool); 7] = [
        (200, vec![lasting, ("x-a", long), ("x-b", long)], "body", false),
        (200, vec![lasting, ("x-a", long)], "body", true),
        (200, [vec![lasting], vec![("x-many", "1"); 128]].concat(), "body", false),
        (200, [vec![lasting], vec![("x-many", "1"); 120]].concat(), "body", true),
        (205, vec![lasting], "body", false),
        (205, vec![lasting], "", true),
        (204, vec![lasting], "", true),
    ];
    for (status, headers, body, stored) in cases {
        let inner = Inner::with(move |_, _| Ok(respond(status, &headers, whole(body))));
        let shop = shop(&inner);
        let expected =
            if stored { "fwd=uri-miss; stored; ttl=60" } else { "fwd=uri-miss; detail=not-stored" };
        assert_eq!(ask(&shop, get("/")).await.remark(), expected, "{status}");
        let again = ask(&shop, get("/")).await.remark();
        assert_eq!(again.starts_with("hit"), stored, "{status}: {again}");
    }
    // The same holds for a validation whose headers are too long.
    let inner = Inner::with(move |n, _| {
        let more = if n == 1 { "x" } else { long };
        let headers = [("etag", "\"a\""), ("cache-control", "max-age=10"), ("x-a", more), ("x-b", more)];
        Ok(respond(if n == 1 { 200 } else { 304 }, &headers, whole(if n == 1 { "body" } else { "" })))
    });
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(12)).await;
    let validated = send(&shop, get("/")).await.unwrap();
    assert_eq!((validated.text(), validated.remark().as_str()), ("body", "fwd=stale; fwd-status=304"));
}

/// A failed look-up says nothing about the store, whereas "uri-miss" claims that nothing is stored (RFC 9211, 2.2).
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_failed_look_up_is_not_reported_as_a_uri_miss() {
    use stampede_guard::StampedeGuard;
    use stampede_guard::testing::{ChaosStore, Fault};

    for (fault, remark) in [
        (Fault::ErrorBefore, "fwd=miss; detail=uncoordinated"),
        // If the look-up found nothing, nothing was stored, even if the lease cannot be acquired.
        (Fault::OutOfMemory, "fwd=uri-miss; detail=uncoordinated"),
    ] {
        let (inner, chaos) = (Inner::numbered(|_| ()), ChaosStore::new(1));
        let shop: super::kit::Shop = tower::Layer::layer(&StampedeGuard::new(chaos.clone()), inner);
        chaos.inject(fault, 1.0);
        assert_eq!(ask(&shop, get("/")).await.remark(), remark, "{fault}");
        chaos.calm();
        assert_eq!(ask(&shop, get("/")).await.remark(), "fwd=uri-miss; stored; ttl=60", "{fault}");
    }
    // If only the look-up fails, the grant of the lease shows whether anything was stored.
    let (inner, chaos) = (Inner::numbered(|_| ()), ChaosStore::new(1));
    let shop: super::kit::Shop = tower::Layer::layer(&StampedeGuard::new(chaos.clone()), inner);
    chaos.once(Fault::ErrorBefore);
    assert_eq!(ask(&shop, get("/")).await.remark(), "fwd=uri-miss; stored; ttl=60");
}
