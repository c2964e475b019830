//! The answer to a HEAD may update the stored response to a GET (RFC 9111, 4.3.5).

use http::Method;

use stampede_guard::http::HttpPolicy;

use super::kit::{
    Boxed, Inner, Shop, all, ask, get, policy, replicas, replicas_with, request, respond, secs, send,
    send_many, settle, shop, whole,
};

const TAG: &str = "\"a\"";

/// Answers GETs with the number of calls so far, and HEADs with these headers.
fn origin(status: u16, of_head: &'static [(&'static str, &'static str)]) -> Inner {
    Inner::with(move |n, request| {
        Ok(match *request.method() {
            Method::HEAD => respond(status, of_head, Boxed::default()),
            _ => respond(
                200,
                &[("etag", TAG), ("cache-control", "max-age=10"), ("x-a", "1")],
                whole(n.to_string()),
            ),
        })
    })
}

fn head() -> super::kit::Req {
    request("HEAD", "/", &[])
}

/// Two processes, and a stored response that is stale.
async fn stale(inner: &Inner) -> Vec<Shop> {
    let shops = replicas(2, inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(12)).await;
    shops
}

#[tokio::test(start_paused = true)]
async fn a_head_of_the_same_representation_freshens_the_stored_response() {
    let inner =
        origin(200, &[("etag", TAG), ("cache-control", "max-age=30"), ("x-a", "2"), ("content-length", "1")]);
    let shops = stale(&inner).await;
    assert_eq!(ask(&shops[0], head()).await.remark(), "fwd=miss; detail=head");
    let hit = ask(&shops[1], get("/")).await;
    assert_eq!((hit.text(), hit.remark().as_str(), hit.header("x-a")), ("1", "hit; ttl=30", Some("2")));
    assert_eq!(inner.calls(), 2);
}

/// Any client may send any number of HEADs. Only an answer whose validator matches the stored body's may make the body fresh again.
#[tokio::test(start_paused = true)]
async fn a_head_without_a_validator_prolongs_nothing() {
    for of_head in [&[("cache-control", "max-age=60")][..], &[("content-length", "1"), ("etag", "")]] {
        let inner = Inner::with(move |n, request| {
            Ok(match *request.method() {
                Method::HEAD => respond(200, of_head, Boxed::default()),
                _ => respond(200, &[("cache-control", "max-age=60")], whole(n.to_string())),
            })
        });
        let shops = replicas(2, &inner);
        ask(&shops[0], get("/")).await;
        for _ in 0..2 {
            tokio::time::sleep(secs(25)).await;
            ask(&shops[0], request("HEAD", "/", &[("cache-control", "no-cache")])).await;
            assert_eq!(ask(&shops[1], get("/")).await.text(), "1", "nor does it take anything away");
        }
        tokio::time::sleep(secs(15)).await;
        assert_eq!(ask(&shops[1], get("/")).await.text(), "4", "{of_head:?}");
    }
}

/// A stored 404 says that there is no resource. If a HEAD finds one, its headers do not belong to the 404.
#[tokio::test(start_paused = true)]
async fn a_head_of_a_resource_that_is_back_invalidates_a_stored_failure() {
    let inner = Inner::with(|n, request| {
        Ok(match (request.method(), n) {
            (&Method::HEAD, _) => respond(200, &[("cache-control", "max-age=3600")], Boxed::default()),
            (_, 1) => respond(404, &[("cache-control", "max-age=10")], whole("none")),
            _ => respond(200, &[], whole(n.to_string())),
        })
    });
    let shops = stale(&inner).await;
    ask(&shops[0], head()).await;
    let seen = ask(&shops[1], get("/")).await;
    assert_eq!((seen.status, seen.text()), (200, "3"));
}

/// A HEAD reports the length of the whole, which says nothing about a stored part.
#[tokio::test(start_paused = true)]
async fn a_head_leaves_a_stored_part_alone() {
    let inner = Inner::with(|_, request| {
        let common = [("etag", TAG), ("cache-control", "max-age=60")];
        Ok(match *request.method() {
            Method::HEAD => respond(200, &[common[0], common[1], ("content-length", "10")], Boxed::default()),
            _ => respond(206, &[common[0], common[1], ("content-range", "bytes 0-1/10")], whole("01")),
        })
    });
    let shops = replicas(2, &inner);
    let part = || request("GET", "/", &[("range", "bytes=0-1")]);
    ask(&shops[0], part()).await;
    ask(&shops[0], head()).await;
    assert_eq!((ask(&shops[1], part()).await.text(), inner.calls()), ("01", 2));
}

#[tokio::test(start_paused = true)]
async fn a_head_of_another_representation_invalidates_the_stored_response() {
    for other in
        [&[("etag", "\"b\"")][..], &[("content-length", "5")], &[("etag", TAG), ("content-length", "2")]]
    {
        let inner = origin(200, other);
        let shops = stale(&inner).await;
        ask(&shops[0], head()).await;
        let seen = ask(&shops[1], get("/")).await;
        assert_eq!((seen.text(), seen.remark().as_str()), ("3", "fwd=uri-miss; stored; ttl=10"), "{other:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_that_fails_changes_nothing() {
    let failures: [(u16, &[_]); 3] = [(500, &[]), (404, &[("etag", "\"b\"")]), (304, &[])];
    for (status, headers) in failures {
        let inner = origin(status, headers);
        let shops = stale(&inner).await;
        ask(&shops[0], head()).await;
        let seen =
            ask(&shops[1], request("GET", "/", &[("cache-control", "only-if-cached, max-stale")])).await;
        assert_eq!((seen.text(), seen.header("x-a")), ("1", Some("1")), "{status} {headers:?}");
    }
}

/// A user's headers are not merged into the response for others, and do not invalidate it.
#[tokio::test(start_paused = true)]
async fn a_head_with_credentials_changes_nothing_unless_its_answer_is_for_all() {
    let opened = || HttpPolicy::default().share_authorized(true).share_cookies(true);
    let cases: [(&'static [(&str, &str)], &str); 3] = [
        (&[("etag", TAG), ("cache-control", "max-age=30"), ("x-a", "alice")], "1"),
        (&[("etag", "\"of alice\""), ("cache-control", "max-age=30"), ("x-a", "alice")], "1"),
        (&[("etag", TAG), ("cache-control", "public, max-age=30"), ("x-a", "all")], "all"),
    ];
    // In strict mode a cookie is no credential.
    let policies =
        [(HttpPolicy::strict(), "authorization"), (opened(), "authorization"), (opened(), "cookie")];
    for (http, credentials) in policies {
        for (headers, left) in cases {
            let inner = origin(200, headers);
            let shops = replicas_with(2, &inner, policy().http(http.clone()));
            ask(&shops[0], get("/")).await;
            tokio::time::sleep(secs(12)).await;
            ask(&shops[0], request("HEAD", "/", &[(credentials, "alice")])).await;
            let stored = request("GET", "/", &[("cache-control", "only-if-cached, max-stale")]);
            let seen = ask(&shops[1], stored).await;
            assert_eq!(seen.header("x-a"), Some(left), "{credentials} {headers:?}");
        }
    }
}

/// A HEAD may be slow, and its client may leave: no other request may wait for it.
#[tokio::test(start_paused = true)]
async fn a_head_in_progress_or_abandoned_delays_no_get() {
    for abandoned in [false, true] {
        let inner = origin(200, &[("etag", TAG), ("cache-control", "max-age=30")]);
        let shops = stale(&inner).await;
        inner.gate.close();
        let head = send(&shops[0], head());
        settle().await;
        if abandoned {
            head.abort();
            settle().await;
        }
        let gets: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 5, "/")).collect();
        settle().await;
        assert_eq!(inner.calls(), 1 + 1 + 1, "the GETs' load waits for nothing; abandoned: {abandoned}");
        inner.gate.open();
        assert!(all(gets).await.iter().all(|seen| seen.text() == "3"));
        assert_eq!(ask(&shops[1], get("/")).await.text(), "3");
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_overtaken_by_an_invalidation_restores_nothing() {
    let inner = origin(200, &[("etag", TAG), ("cache-control", "max-age=30")]);
    let shops = stale(&inner).await;
    inner.gate.close();
    let head = send(&shops[0], head());
    settle().await;
    let post = send(&shops[1], request("POST", "/", &[]));
    settle().await;
    inner.gate.open();
    head.await.unwrap();
    post.await.unwrap();
    let seen = ask(&shops[0], request("GET", "/", &[("cache-control", "only-if-cached, max-stale")])).await;
    assert_eq!(seen.status, 504, "what was invalidated stays away");
}

#[tokio::test(start_paused = true)]
async fn a_head_on_a_cold_key_stores_nothing() {
    let inner = origin(200, &[("etag", TAG), ("cache-control", "max-age=30")]);
    let shop = shop(&inner);
    ask(&shop, head()).await;
    assert_eq!(ask(&shop, get("/")).await.text(), "2");
}
