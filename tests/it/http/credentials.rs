//! Requests and responses with credentials: a response is for its own client only, unless it says that it is for all.

use std::time::Duration;

use stampede_guard::http::HttpPolicy;
use tokio::task::JoinHandle;
use tower::Layer as _;

use super::kit::{
    Feed, Inner, Req, Seen, Shop, all, ask, get, guard, policy, replicas_with, request, respond, send,
    send_many, sent, settle, shop_with, whole,
};

const SHAREABLE: [&str; 3] = ["public, max-age=60", "s-maxage=60", "max-age=60, must-revalidate"];

fn authorized(user: &str) -> Req {
    request("GET", "/", &[("authorization", user)])
}

fn opened() -> HttpPolicy {
    HttpPolicy::default().share_authorized(true).share_cookies(true)
}

/// Answers the `n`th call with the request's user and `n`.
fn personal(control: &'static str) -> Inner {
    Inner::with(move |n, request| {
        let (user, session) = (sent(request, "authorization"), sent(request, "cookie"));
        let headers = [("cache-control", control)];
        Ok(respond(200, &headers[..usize::from(!control.is_empty())], whole(format!("{user}{session} {n}"))))
    })
}

/// A1: the cases are three directives and none of them, with and without the option, and in strict mode.
#[tokio::test(start_paused = true)]
async fn an_authorized_response_is_for_others_if_the_policy_and_the_response_say_so() {
    let policies = [
        ("default", HttpPolicy::default(), false),
        ("opened", opened(), true),
        ("strict", HttpPolicy::strict(), true),
    ];
    for (name, http, opened) in policies {
        for control in SHAREABLE.into_iter().chain(["max-age=60", ""]) {
            let inner = personal(control);
            let shop = shop_with(&inner, policy().http(http.clone()));
            assert_eq!(ask(&shop, authorized("ann")).await.text(), "ann 1");
            let shared = opened && SHAREABLE.contains(&control);
            let case = format!("A1: {name}, {control}");
            for (request, own) in [(authorized("bob"), "bob 2"), (get("/"), " 3")] {
                let seen = ask(&shop, request).await;
                assert_eq!(seen.text(), if shared { "ann 1" } else { own }, "{case}");
            }
        }
    }
}

/// Regression: tag ids were kept for a day, whatever the origin said, so the response was loaded again after that. This holds both for a
/// load that others share, and for a load that is separate until the response allows sharing.
#[tokio::test(start_paused = true)]
async fn a_tagged_response_is_stored_for_its_lifetime() {
    const DAY: Duration = Duration::from_secs(86_400);
    for (first, text) in [(get("/"), " 1"), (authorized("ann"), "ann 1")] {
        let inner = personal("public, max-age=604800");
        let shop = shop_with(&inner, policy().tags(["catalog"]).http(opened()));
        assert_eq!(ask(&shop, first).await.text(), text);
        settle().await;
        tokio::time::sleep(DAY * 7 - Duration::from_secs(1)).await;
        assert_eq!(ask(&shop, authorized("bob")).await.text(), text);
        assert_eq!(inner.calls(), 1);
    }
}

/// A1: a response stored for all is sent to a client with credentials only if it permits that: this client may need another response.
#[tokio::test(start_paused = true)]
async fn a_response_stored_without_credentials_is_for_users_if_it_says_so() {
    for (http, control, is_served) in [
        (opened(), "max-age=60", false),
        (opened(), "public, max-age=60", true),
        (HttpPolicy::strict(), "max-age=60", true),
        (HttpPolicy::default(), "public, max-age=60", false),
    ] {
        let inner = personal(control);
        let shop = shop_with(&inner, policy().http(http));
        assert_eq!(ask(&shop, get("/")).await.text(), " 1");
        let seen = ask(&shop, authorized("ann")).await;
        assert_eq!(seen.text(), if is_served { " 1" } else { "ann 2" }, "{control}");
        assert_eq!(ask(&shop, get("/")).await.text(), " 1", "which has changed nothing");
    }
}

/// A2
#[tokio::test(start_paused = true)]
async fn a_response_to_a_cookie_is_for_others_if_the_policy_and_the_response_say_so() {
    let policies =
        [("default", HttpPolicy::default()), ("opened", opened()), ("strict", HttpPolicy::strict())];
    for (name, http) in policies {
        for control in SHAREABLE.into_iter().chain(["max-age=60"]) {
            let inner = personal(control);
            let shop = shop_with(&inner, policy().http(http.clone()));
            let with = |cookie| request("GET", "/", &[("cookie", cookie)]);
            assert_eq!(ask(&shop, with("a=1")).await.text(), "a=1 1");
            let shared = match name {
                "default" => false,
                "opened" => SHAREABLE.contains(&control),
                // RFC 9111, 7.3: cookies do not inhibit caching.
                _ => true,
            };
            let case = format!("A2: {name}, {control}");
            for (request, own) in [(with("a=2"), "a=2 2"), (get("/"), " 3")] {
                let seen = ask(&shop, request).await;
                assert_eq!(seen.text(), if shared { "a=1 1" } else { own }, "{case}");
            }
        }
    }
}

/// A3: of two clients, the second must not receive the first one's cookie.
#[tokio::test(start_paused = true)]
async fn a_cookie_that_is_set_is_for_others_if_the_policy_and_the_response_say_so() {
    for (http, control, shared) in [
        (HttpPolicy::default(), "public, max-age=60", false),
        (HttpPolicy::default(), "max-age=60", false),
        (opened(), "max-age=60", false),
        (opened(), "public, max-age=60", true),
        (HttpPolicy::strict(), "max-age=60", true),
        (HttpPolicy::strict().share_cookies(false), "public, max-age=60", false),
    ] {
        let inner = Inner::with(move |n, _| {
            let cookie = format!("client={n}");
            Ok(respond(200, &[("set-cookie", &cookie), ("cache-control", control)], whole(n.to_string())))
        });
        let shop = shop_with(&inner, policy().http(http));
        assert_eq!(ask(&shop, get("/")).await.header("set-cookie"), Some("client=1"));
        let second = ask(&shop, get("/")).await;
        let expected = if shared { "client=1" } else { "client=2" };
        assert_eq!(second.header("set-cookie"), Some(expected), "A3: {control}");
    }
}

/// Sends requests of users with either kind of credentials. All of them are in flight at once.
fn mixed(shops: &[Shop], users: usize) -> Vec<(String, JoinHandle<Seen>)> {
    let mut waiting = Vec::new();
    for n in 0..users {
        for (at, shop) in shops.iter().enumerate() {
            let (user, cookie) = (format!("u{n}.{at}"), format!("c{n}.{at}"));
            waiting.push((user.clone(), send(shop, authorized(&user))));
            waiting.push((cookie.clone(), send(shop, request("GET", "/", &[("cookie", &cookie)]))));
        }
    }
    waiting
}

/// A1, A2, A4: a user's response reaches no waiter, and costs clients without credentials nothing.
#[tokio::test(start_paused = true)]
async fn a_users_response_reaches_no_other_client_and_lets_the_others_coalesce() {
    let inner = personal("").held_separately();
    let shops = replicas_with(2, &inner, policy().http(opened()));
    let users = mixed(&shops, 3);
    settle().await;
    let plain: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 10, "/")).collect();
    settle().await;
    assert_eq!(inner.calls(), 1, "A4: one of them finds out whether it is for all");
    inner.open_first();
    settle().await;
    assert_eq!(inner.loads.running(), 11 + 1, "each user's own, and one for all others");
    inner.gate.open();
    for (user, seen) in users {
        let seen = seen.await.unwrap();
        assert!(seen.text().starts_with(&format!("{user} ")), "{user} received: {}", seen.text());
    }
    let seen = all(plain).await;
    assert!(seen.iter().all(|one| one.text() == seen[0].text() && one.text().starts_with(' ')));
    assert_eq!(inner.calls(), 12 + 1);
    // No marker delays these clients: they coalesce in this wave, and hit in the next.
    for shop in &shops {
        assert!(ask(shop, get("/")).await.remark().starts_with("hit"));
    }
    a_later_wave_without_credentials_is_one_load(&inner, &shops).await;
}

/// After users' requests, clients without credentials still cost one load.
async fn a_later_wave_without_credentials_is_one_load(inner: &Inner, shops: &[Shop]) {
    tokio::time::sleep(super::kit::secs(61)).await;
    ask(&shops[0], authorized("ann")).await;
    let before = inner.calls();
    inner.gate.close();
    let plain: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 10, "/")).collect();
    settle().await;
    assert_eq!(inner.calls() - before, 1);
    inner.gate.open();
    all(plain).await;
    assert_eq!(inner.calls() - before, 1);
}

/// Clients of two replicas, with credentials and without, come while a load runs, which takes `took`; others come later.
async fn one_load_for_all(took: Duration) {
    for control in SHAREABLE {
        let inner = personal(control).held();
        let shops = replicas_with(2, &inner, policy().http(opened()));
        let users = mixed(&shops, 5);
        settle().await;
        tokio::time::sleep(took).await;
        assert_eq!(inner.calls(), 1, "{control}");
        inner.gate.open();
        for (_, seen) in users {
            assert!(seen.await.unwrap().text().ends_with(" 1"));
        }
        for shop in &shops {
            for request in [get("/"), authorized("zoe")] {
                let seen = ask(shop, request).await;
                assert!(seen.text().ends_with(" 1") && seen.remark().starts_with("hit"), "{}", seen.remark());
            }
        }
        assert_eq!(inner.calls(), 1, "{control}");
    }
}

/// A1, A4
#[tokio::test(start_paused = true)]
async fn a_public_response_to_credentials_is_one_load_and_stored_for_all() {
    one_load_for_all(Duration::ZERO).await;
}

/// For such a load the lease of the resource is renewed, too, for as long as the load takes.
#[tokio::test(start_paused = true)]
async fn a_load_longer_than_the_lease_is_stored_for_all() {
    one_load_for_all(Duration::from_secs(5)).await;
}

/// A client that comes after an invalidation must not read a response whose load began before it. Readers with credentials wait under the
/// key of the leader's credentials, which an invalidation of the resource does not reach.
#[tokio::test(start_paused = true)]
async fn an_incomplete_response_to_credentials_is_not_for_clients_after_an_invalidation() {
    let (feed, body) = Feed::new();
    let headers = [("cache-control", "public, max-age=60"), ("content-length", "3")];
    let inner = Inner::in_turn([respond(200, &headers, body), respond(200, &headers, whole("new"))]);
    let guard = guard().with_policy(policy().http(opened()).build().unwrap());
    let shop = guard.layer(inner.clone());
    let ann = send(&shop, authorized("ann"));
    settle().await;
    feed.data("o");
    settle().await;
    let key = stampede_guard::http::cache_key(&"http://shop.example/".parse().unwrap()).unwrap();
    guard.invalidate(key).await.unwrap();
    let bob = send(&shop, authorized("bob"));
    settle().await;
    feed.data("ld");
    drop(feed);
    assert_eq!(ann.await.unwrap().text(), "old");
    assert_eq!(bob.await.unwrap().text(), "new");
}

/// A load for a user must not be stored if the resource was invalidated since it began.
#[tokio::test(start_paused = true)]
async fn a_users_load_is_not_stored_after_an_invalidation() {
    let inner = personal("public, max-age=60").held();
    let guard = guard().with_policy(policy().http(opened()).build().unwrap());
    let shop = guard.layer(inner.clone());
    let user = send(&shop, authorized("ann"));
    settle().await;
    let key = stampede_guard::http::cache_key(&"http://shop.example/".parse().unwrap()).unwrap();
    guard.invalidate(key).await.unwrap();
    inner.gate.open();
    assert_eq!(user.await.unwrap().text(), "ann 1");
    assert_eq!(ask(&shop, get("/")).await.text(), " 2");
}

/// A private cache keeps private responses, separately for each user.
#[tokio::test(start_paused = true)]
async fn a_private_cache_separates_users() {
    for control in ["private, max-age=60", "max-age=60", "public, max-age=60"] {
        let inner = personal(control).held();
        let shop = shop_with(&inner, policy().http(HttpPolicy::private()));
        let of = |user: &str| request("GET", "http://api.example/me", &[("authorization", user)]);
        let clients: Vec<_> =
            (0..20).map(|n| ["ann", "bob"][n % 2]).map(|user| (user, send(&shop, of(user)))).collect();
        settle().await;
        inner.gate.open();
        for (user, seen) in clients {
            assert!(seen.await.unwrap().text().starts_with(user), "{control}");
        }
        assert_eq!(inner.calls(), 2, "{control}: each user's clients share one load");
        let hit = ask(&shop, of("ann")).await;
        assert!(hit.text().starts_with("ann ") && hit.remark().starts_with("hit"), "{}", hit.remark());
        let seen = ask(&shop, get("http://api.example/me")).await;
        assert!(seen.text().starts_with(' '), "{control}: and so is one without credentials");
        // A change by a user removes the response that is stored for that user.
        ask(&shop, request("PUT", "http://api.example/me", &[("authorization", "ann")])).await;
        assert!(ask(&shop, of("ann")).await.remark().starts_with("fwd=uri-miss"), "{control}");
        assert!(ask(&shop, of("bob")).await.remark().starts_with("hit"), "{control}");
    }
}

#[tokio::test(start_paused = true)]
async fn credentials_that_were_not_opened_still_bypass() {
    for http in [opened(), HttpPolicy::strict()] {
        for name in ["proxy-authorization", "x-api-key", "x-auth-token", "x-amz-security-token"] {
            let shop = shop_with(&personal("public, max-age=60"), policy().http(http.clone()));
            for n in 1..=2 {
                let seen = ask(&shop, request("GET", "/", &[(name, "1")])).await;
                assert_eq!(
                    (seen.text(), seen.remark()),
                    (format!(" {n}").as_str(), "fwd=bypass; detail=credentials".into())
                );
            }
        }
    }
}
