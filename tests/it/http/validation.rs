//! Validation (RFC 9111, 4.3): a stored response is validated instead of a reload, once for all requests, and a
//! client that has the representation is answered 304.

use std::sync::{Arc, Mutex};

use http::HeaderMap;
use stampede_guard::http::{DoNotStore, HttpPolicy};
use tower::ServiceExt as _;

use super::kit::{
    Boxed, Down, Inner, Req, all, ask, get, policy, read, replicas, request, respond, secs, send, send_many,
    sent, settle, shop, shop_with, whole,
};

const CHANGED: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
const TAG: &str = "\"a\"";

/// An origin with one representation, `body`, whose tag is `"a"`: it answers 304 to requests with that tag.
fn tagged(control: &'static str) -> Inner {
    Inner::with(move |n, request| {
        let number = n.to_string();
        let headers = [("etag", TAG), ("cache-control", control), ("x-call", &number)];
        Ok(match sent(request, "if-none-match") {
            TAG => respond(304, &headers, Boxed::default()),
            _ => respond(200, &headers, whole("body")),
        })
    })
}

#[tokio::test(start_paused = true)]
async fn a_validation_is_the_triggering_request_with_our_conditions() {
    let received = Arc::new(Mutex::new(Vec::<HeaderMap>::new()));
    let inner = Inner::with({
        let received = received.clone();
        move |n, request| {
            received.lock().unwrap().push(request.headers().clone());
            let headers = [("etag", TAG), ("last-modified", CHANGED), ("cache-control", "max-age=10")];
            Ok(match n {
                1 => respond(200, &headers, whole("body")),
                _ => respond(304, &headers, Boxed::default()),
            })
        }
    });
    let shop = shop(&inner);
    // A9: a client's own conditions are about the client's copy, so they are not forwarded.
    ask(&shop, request("GET", "/", &[("if-none-match", "\"mine\""), ("x-trace", "1")])).await;
    tokio::time::sleep(secs(12)).await;
    ask(&shop, request("GET", "/", &[("if-none-match", "\"mine\""), ("x-trace", "2")])).await;
    let received = received.lock().unwrap();
    let line = |n: usize, name: &str| received[n].get(name).map(|value| value.to_str().unwrap().to_owned());
    for (n, trace, tag, since) in [(0, "1", None, None), (1, "2", Some(TAG), Some(CHANGED))] {
        assert_eq!(line(n, "x-trace").as_deref(), Some(trace));
        assert_eq!(line(n, "if-none-match").as_deref(), tag, "A9");
        assert_eq!(line(n, "if-modified-since").as_deref(), since);
    }
}

#[tokio::test(start_paused = true)]
async fn a_304_updates_the_headers_and_restarts_the_freshness() {
    let inner = Inner::in_turn([
        respond(
            200,
            &[
                ("etag", TAG),
                ("cache-control", "max-age=10"),
                ("x-a", "1"),
                ("x-b", "1"),
                ("content-type", "a/b"),
            ],
            whole("body"),
        ),
        respond(
            304,
            &[
                ("etag", TAG),
                ("cache-control", "max-age=20"),
                ("x-a", "2"),
                ("connection", "x-hop"),
                ("x-hop", "1"),
            ],
            Boxed::default(),
        ),
    ]);
    let shop = shop(&inner);
    assert_eq!(ask(&shop, get("/")).await.remark(), "fwd=uri-miss; stored; ttl=10");
    tokio::time::sleep(secs(12)).await;
    let validated = ask(&shop, get("/")).await;
    assert_eq!(validated.remark(), "fwd=stale; fwd-status=304; stored; ttl=20");
    tokio::time::sleep(secs(19)).await;
    let hit = ask(&shop, get("/")).await;
    assert_eq!((hit.remark().as_str(), hit.header("age")), ("hit; ttl=1", Some("19")));
    for seen in [validated, hit] {
        assert_eq!((seen.status, seen.text()), (200, "body"));
        let headers = ["x-a", "x-b", "content-type", "cache-control", "x-hop"].map(|name| seen.header(name));
        assert_eq!(headers, [Some("2"), Some("1"), Some("a/b"), Some("max-age=20"), None]);
    }
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn many_clients_of_two_replicas_cause_one_validation() {
    let inner = tagged("max-age=10");
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(12)).await;
    inner.gate.close();
    let mut clients = send_many(&shops[0], 20, "/");
    clients.extend(send_many(&shops[1], 20, "/"));
    settle().await;
    assert_eq!(inner.calls(), 2, "one validation in the fleet");
    inner.gate.open();
    for seen in all(clients).await {
        assert_eq!((seen.status, seen.text(), seen.header("x-call")), (200, "body", Some("2")));
    }
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_changed_representation_replaces_the_stored_one() {
    let inner = Inner::with(|n, request| {
        assert_eq!(sent(request, "if-none-match"), ["", "\"1\""][n - 1]);
        let tag = format!("\"{n}\"");
        Ok(respond(200, &[("etag", &tag), ("cache-control", "max-age=10")], whole(n.to_string())))
    });
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(12)).await;
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.text(), seen.remark().as_str()), ("2", "fwd=stale; stored; ttl=10"));
    assert_eq!(ask(&shop, get("/")).await.text(), "2");
}

/// A6: such a response must never be reused without validation, but may be stored in order to be validated.
#[tokio::test(start_paused = true)]
async fn no_cache_is_stored_and_validated_each_time() {
    let inner = tagged("no-cache");
    let shops = replicas(2, &inner);
    for n in 1..=4 {
        let seen = ask(&shops[n % 2], get("/")).await;
        assert_eq!((seen.status, seen.text()), (200, "body"));
        assert_eq!(seen.header("x-call"), Some(n.to_string().as_str()), "validated each time");
        let expected =
            if n == 1 { "fwd=uri-miss; stored; ttl=0" } else { "fwd=stale; fwd-status=304; stored; ttl=0" };
        assert_eq!(seen.remark(), expected);
    }
    // Concurrent requests share one validation.
    inner.gate.close();
    let mut clients = send_many(&shops[0], 10, "/");
    clients.extend(send_many(&shops[1], 10, "/"));
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| (seen.status, seen.text()) == (200, "body")));
    assert_eq!(inner.calls(), 5);
}

/// nginx gives a compressed 200 a weak tag, and its 304 the strong form of it. After a deployment that adds tags, a validation by date may
/// receive a 304 with a tag.
#[tokio::test(start_paused = true)]
async fn a_304_with_the_strong_form_of_a_weak_tag_confirms() {
    for stored in [("etag", "W/\"a\""), ("last-modified", CHANGED)] {
        let inner = Inner::with(move |n, request| {
            let lasting = ("cache-control", "max-age=10");
            let asks = n > 1
                && sent(request, if stored.0 == "etag" { "if-none-match" } else { "if-modified-since" })
                    == stored.1;
            assert_eq!(asks, n > 1, "what is stored is what came with the body: {stored:?}, call {n}");
            Ok(match asks {
                true => respond(304, &[("etag", TAG), lasting], Boxed::default()),
                false => respond(200, &[stored, lasting], whole("body")),
            })
        });
        let shops = replicas(2, &inner);
        ask(&shops[0], get("/")).await;
        for _ in 0..2 {
            tokio::time::sleep(secs(12)).await;
            let seen = ask(&shops[0], get("/")).await;
            assert_eq!((seen.status, seen.text(), seen.header(stored.0)), (200, "body", Some(stored.1)));
            assert_eq!(seen.remark(), "fwd=stale; fwd-status=304; stored; ttl=10");
            assert_ne!(
                ask(&shops[1], get("/")).await.header("etag"),
                Some(TAG),
                "no weak one becomes a strong one"
            );
        }
    }
}

/// Whether a stored response with these directives is served after a failed validation.
async fn survives(control: &'static str, failure: u16, after: u64) -> bool {
    let inner = Inner::with(move |n, _| match (n, failure) {
        (1, _) => Ok(respond(200, &[("etag", TAG), ("cache-control", control)], whole("old"))),
        (_, 0) => Err(Down("no route".into())),
        (_, status) => Ok(respond(status, &[], whole("sorry"))),
    });
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(after)).await;
    let served = match shop.clone().oneshot(get("/")).await {
        Ok(response) => read(response).await.text() == "old",
        Err(Down(_)) => false,
    };
    assert_eq!(inner.calls(), 2, "{control}: it was called");
    served
}

#[tokio::test(start_paused = true)]
async fn stale_if_error_decides_about_a_validation_that_fails() {
    for status in [500, 502, 503, 504] {
        assert!(survives("max-age=10, stale-if-error=60", status, 12).await, "{status}");
        assert!(!survives("max-age=10, stale-if-error=60", status, 71).await, "{status}: too old");
        assert!(!survives("max-age=10", status, 12).await, "{status}: not requested");
        assert!(!survives("max-age=10, must-revalidate", status, 12).await, "{status}");
        let both = "max-age=10, must-revalidate, stale-if-error=60";
        assert!(!survives(both, status, 12).await, "{status}: RFC 9111, 5.2.2.2");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stored_response_stands_in_for_an_unreachable_origin_unless_it_forbids_it() {
    assert!(survives("max-age=10", 0, 12).await);
    assert!(survives("max-age=10", 0, 69).await);
    assert!(!survives("max-age=10", 0, 71).await, "stale_on_disconnect is 60 s");
    for forbidden in ["must-revalidate", "proxy-revalidate", "s-maxage=10", "no-cache"] {
        let control: &'static str = format!("max-age=10, {forbidden}").leak();
        assert!(!survives(control, 0, 12).await, "{forbidden}");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_stands_in_for_an_unreachable_origin_if_the_policy_says_so() {
    let inner = Inner::with(|n, _| match n {
        1 => Ok(respond(200, &[("etag", TAG), ("cache-control", "max-age=10")], whole("old"))),
        _ => Err(Down("no route".into())),
    });
    let http = HttpPolicy::default().stale_on_disconnect(secs(0));
    let shop = shop_with(&inner, policy().http(http));
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(12)).await;
    shop.clone().oneshot(get("/")).await.expect_err("its own error");
}

/// Conditional requests, and whether the client has the current representation.
fn conditions() -> [(Req, bool); 8] {
    let conditional = |name, value| request("GET", "/", &[(name, value)]);
    [
        (conditional("if-none-match", TAG), true),
        (conditional("if-none-match", "\"x\", W/\"a\""), true),
        (conditional("if-none-match", "*"), true),
        (conditional("if-none-match", "\"x\""), false),
        (conditional("if-modified-since", CHANGED), true),
        (conditional("if-modified-since", "Sun, 06 Nov 1994 08:49:36 GMT"), false),
        (conditional("if-modified-since", "yesterday"), false),
        // The tag takes precedence (RFC 9110, 13.2.2).
        (request("GET", "/", &[("if-none-match", "\"x\""), ("if-modified-since", CHANGED)]), false),
    ]
}

/// An origin with always the same representation, whose requests must contain no conditions.
fn unconditional(control: &'static str) -> Inner {
    Inner::with(move |_, request| {
        for name in ["if-none-match", "if-modified-since"] {
            assert_eq!(sent(request, name), "", "A9: a 304 would be stored as the resource");
        }
        let headers =
            [("etag", TAG), ("last-modified", CHANGED), ("cache-control", control), ("content-type", "a/b")];
        Ok(respond(200, &headers, whole("body")))
    })
}

fn assert_is(seen: &super::kit::Seen, not_modified: bool, case: &str) {
    let expected = if not_modified { (304, "") } else { (200, "body") };
    assert_eq!((seen.status, seen.text()), expected, "{case}");
    assert_eq!(seen.header("etag"), Some(TAG), "{case}");
    assert_eq!(seen.header("content-type").is_none(), not_modified, "{case}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_has_a_stored_response_is_answered_304() {
    let inner = unconditional("max-age=60");
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    for (request, not_modified) in conditions() {
        let case = format!("{:?}", request.headers());
        let seen = ask(&shop, request).await;
        assert_is(&seen, not_modified, &case);
        assert_eq!(seen.remark(), "hit; ttl=60", "{case}");
    }
    assert_eq!(inner.calls(), 1);
}

/// A9
#[tokio::test(start_paused = true)]
async fn waiters_for_a_load_get_the_answer_to_their_own_condition() {
    for (leading, leader_has_it) in conditions() {
        let inner = unconditional("max-age=60").held();
        let shops = replicas(2, &inner);
        let leader = send(&shops[0], leading);
        settle().await;
        let followers: Vec<_> = shops
            .iter()
            .flat_map(|shop| conditions().map(|(request, has_it)| (send(shop, request), has_it)))
            .collect();
        let plain = send_many(&shops[1], 2, "/");
        settle().await;
        inner.gate.open();
        assert_is(&leader.await.unwrap(), leader_has_it, "the leader");
        for (follower, has_it) in followers {
            assert_is(&follower.await.unwrap(), has_it, "a follower");
        }
        for seen in all(plain).await {
            assert_is(&seen, false, "without a copy");
        }
        assert_eq!(inner.calls(), 1);
        assert_is(&ask(&shops[0], get("/")).await, false, "the next");
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_has_a_private_response_is_answered_304_too() {
    for (request, not_modified) in conditions() {
        let shop = shop(&unconditional("private"));
        let case = format!("{:?}", request.headers());
        assert_is(&ask(&shop, request).await, not_modified, &case);
    }
}

/// The handler confirms the representation by a 304, and adds fields for this client only.
#[tokio::test(start_paused = true)]
async fn an_unshareable_304_is_for_its_own_client_only() {
    let inner = Inner::with(|n, request| {
        let headers = [("etag", TAG), ("cache-control", "max-age=10")];
        let user = ("x-user", sent(request, "x-session"));
        Ok(match (sent(request, "if-none-match"), n) {
            (TAG, _) => {
                let mut confirmed = respond(304, &[headers[0], headers[1], user], Boxed::default());
                confirmed.extensions_mut().insert(DoNotStore);
                confirmed
            }
            _ => respond(200, &headers, whole("body")),
        })
    });
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(12)).await;
    let inner = inner.held();
    let of = |session| request("GET", "/", &[("x-session", session)]);
    let alice = send(&shops[0], of("alice"));
    settle().await;
    let others: Vec<_> = shops.iter().map(|shop| send(shop, of("bob"))).collect();
    settle().await;
    inner.gate.open();
    let alice = alice.await.unwrap();
    assert_eq!((alice.text(), alice.header("x-user")), ("body", Some("alice")));
    for bob in all(others).await {
        assert_eq!((bob.text(), bob.header("x-user").unwrap_or("bob")), ("body", "bob"));
    }
    assert_ne!(ask(&shops[1], get("/")).await.header("x-user"), Some("alice"));
}
