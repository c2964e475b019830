//! Answers that cannot be stored: whether the stored response ends with them, and until when it is served.

use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use stampede_guard::http::{DoNotStore, HttpPolicy, cache_key};
use tower::ServiceExt as _;

use super::kit::{
    Boxed, Down, Inner, Req, Seen, Shop, all, ask, get, policy, replicas, replicas_with, request, respond,
    secs, send, send_many, settle, whole,
};

type Answer = Arc<dyn Fn() -> Result<Response<Boxed>, Down> + Send + Sync>;

fn answer(make: impl Fn() -> Result<Response<Boxed>, Down> + Send + Sync + 'static) -> Answer {
    Arc::new(make)
}

fn with(status: u16, headers: &'static [(&'static str, &'static str)]) -> Answer {
    answer(move || Ok(respond(status, headers, whole("new"))))
}

/// The first call is answered with "old" under this `Cache-Control`, and all later ones with `then`.
fn origin(control: &'static str, then: Answer) -> Inner {
    Inner::with(move |n, _| match n {
        1 => Ok(respond(200, &[("cache-control", control), ("etag", "\"a\"")], whole("old"))),
        _ => then(),
    })
}

/// Answers that are about the resource, and are stored by no policy of these tests.
fn about_the_resource() -> Vec<(&'static str, Answer)> {
    let marked = || {
        let mut response = respond(200, &[], whole("new"));
        response.extensions_mut().insert(DoNotStore);
        Ok(response)
    };
    let long = |declared: bool| {
        answer(move || {
            let (text, length) = ("n".repeat(200), [("content-length", "200")]);
            let streamed = http_body_util::StreamBody::new(futures_util::stream::iter(
                text.into_bytes()
                    .chunks(50)
                    .map(|part| Ok::<_, Down>(http_body::Frame::data(Bytes::copy_from_slice(part))))
                    .collect::<Vec<_>>(),
            ));
            let body = http_body_util::BodyExt::boxed_unsync(streamed);
            Ok(respond(200, if declared { &length } else { &[] }, body))
        })
    };
    vec![
        ("no-store", with(200, &[("cache-control", "no-store")])),
        ("private", with(200, &[("cache-control", "private, max-age=60")])),
        ("set-cookie", with(200, &[("set-cookie", "a=b")])),
        ("vary", with(200, &[("vary", "*")])),
        ("302", with(302, &[("location", "/login")])),
        ("401", with(401, &[])),
        ("403", with(403, &[])),
        ("404 no-store", with(404, &[("cache-control", "no-store")])),
        ("410 private", with(410, &[("cache-control", "private")])),
        ("409", with(409, &[])),
        ("a long body, as its length says", long(true)),
        ("a long body", long(false)),
        ("DoNotStore", answer(marked)),
        ("max-age=0", with(200, &[("cache-control", "max-age=0")])),
        ("expires", with(200, &[("expires", "0")])),
    ]
}

/// Two processes that keep bodies of 100 bytes.
fn shops(inner: &Inner) -> Vec<Shop> {
    replicas_with(2, inner, policy().max_body(100).back_off(secs(20)))
}

fn reload(value: &str) -> Req {
    request("GET", "/", &[("cache-control", value)])
}

async fn sleep(time: u64) {
    tokio::time::sleep(secs(time)).await;
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_is_answered_about_the_resource_ends_the_stored_response() {
    for (case, then) in about_the_resource() {
        let inner = origin("max-age=1, stale-while-revalidate=60, stale-if-error=60", then);
        let shops = shops(&inner);
        ask(&shops[0], get("/")).await;
        sleep(2).await;
        assert_eq!(ask(&shops[0], get("/")).await.text(), "old", "{case}: it is served during the refresh");
        settle().await;
        for shop in shops.iter().rev() {
            let seen = ask(shop, get("/")).await;
            assert_ne!(seen.text(), "old", "{case}: {}", seen.remark());
        }
    }
}

/// Beyond `stale-while-revalidate` the stored response only stands in for failures, but not for a failure that follows such an answer.
#[tokio::test(start_paused = true)]
async fn a_load_that_is_answered_about_the_resource_leaves_no_stand_in() {
    for (case, then) in about_the_resource() {
        let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let failing = answer(move || match calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => then(),
            _ => Ok(respond(503, &[], whole("sorry"))),
        });
        let inner = origin("max-age=1, stale-if-error=60", failing);
        let shops = shops(&inner);
        ask(&shops[0], get("/")).await;
        sleep(2).await;
        assert_ne!(ask(&shops[0], get("/")).await.text(), "old", "{case}");
        assert_eq!(ask(&shops[1], get("/")).await.text(), "sorry", "{case}");
    }
}

/// Until which age of the stored response it is served, with one request a second from each of two processes.
async fn served_for(inner: &Inner, most: u64) -> u64 {
    let shops = shops(inner);
    ask(&shops[0], get("/")).await;
    let mut last = 0;
    for age in 1..=most {
        sleep(1).await;
        for shop in &shops {
            let response = shop.clone().oneshot(get("/")).await;
            let Ok(response) = response else { continue };
            if super::kit::read(response).await.text() == "old" {
                last = age;
            }
        }
        settle().await;
    }
    last
}

/// The windows are the response's own: `back_off` paces loads and extends nothing. Regression: 21 seconds instead of 3.
#[tokio::test(start_paused = true)]
async fn a_back_off_extends_no_window() {
    for status in [429, 408, 500, 501, 503] {
        let inner = origin("max-age=1, stale-while-revalidate=2", with(status, &[]));
        assert_eq!(served_for(&inner, 30).await, 2, "{status}");
        let inner = origin("max-age=1, stale-while-revalidate=2, stale-if-error=9", with(status, &[]));
        let is_error = [408, 500, 503].contains(&status);
        assert_eq!(served_for(&inner, 30).await, if is_error { 9 } else { 2 }, "{status}");
    }
    let no_store = &[("cache-control", "no-store")];
    for (status, headers) in [(200, &no_store[..]), (503, no_store), (403, &[])] {
        let inner = origin("max-age=1, stale-while-revalidate=2", with(status, headers));
        let expected = if status == 503 { 2 } else { 1 };
        assert_eq!(served_for(&inner, 30).await, expected, "{status} {headers:?}");
    }
    // If there is no answer at all, `stale_on_disconnect` counts, which is a minute.
    let inner = origin("max-age=1, stale-while-revalidate=2", answer(|| Err(Down("no route".into()))));
    assert_eq!(served_for(&inner, 90).await, 60);
}

/// Regression: each failure wrote a shorter window.
#[tokio::test(start_paused = true)]
async fn failures_one_after_another_leave_the_window_as_it_is() {
    let inner = origin("max-age=1, stale-while-revalidate=2, stale-if-error=9", with(503, &[]));
    let shop = replicas_with(1, &inner, policy().back_off(secs(2))).remove(0);
    ask(&shop, get("/")).await;
    for age in 1..=9 {
        sleep(1).await;
        assert_eq!(ask(&shop, get("/")).await.text(), "old", "at {age}");
        settle().await;
    }
    sleep(2).await;
    assert_eq!(ask(&shop, get("/")).await.status, 503);
}

#[tokio::test(start_paused = true)]
async fn an_answer_ends_what_is_served_because_none_came() {
    for status in [429, 503] {
        let inner = Inner::with(move |n, _| match n {
            1 => Ok(respond(200, &[("cache-control", "max-age=1, stale-while-revalidate=2")], whole("old"))),
            2 => Err(Down("no route".into())),
            _ => Ok(respond(status, &[], whole("sorry"))),
        });
        let shops = shops(&inner);
        ask(&shops[0], get("/")).await;
        for age in 1..=20 {
            sleep(1).await;
            assert_eq!(
                ask(&shops[1], get("/")).await.text(),
                "old",
                "{status}: nothing is received, at {age}"
            );
            settle().await;
        }
        for _ in 0..40 {
            sleep(1).await;
            assert_eq!(ask(&shops[1], get("/")).await.text(), "sorry", "{status}");
        }
    }
}

/// Otherwise one client that is limited or malformed could empty the cache for all others.
#[tokio::test(start_paused = true)]
async fn a_refresh_that_is_answered_about_one_request_ends_nothing_and_is_paced() {
    let of_one_request = [400, 405, 406, 407, 408].into_iter().chain(411..=417);
    for status in of_one_request.chain([421, 425, 426, 428, 429, 431]) {
        let inner = Inner::with(move |n, _| {
            let fresh = [("cache-control", "max-age=1, stale-while-revalidate=60")];
            Ok(match n {
                1 => respond(200, &fresh, whole("old")),
                2..=4 => respond(status, &[], whole("not you")),
                _ => respond(200, &fresh, whole("newer")),
            })
        });
        let shops = replicas_with(2, &inner, policy().back_off(secs(5)));
        ask(&shops[0], get("/")).await;
        for age in 2..=16 {
            sleep(1).await;
            for shop in &shops {
                assert_eq!(ask(shop, get("/")).await.text(), "old", "{status} at {age}");
            }
            settle().await;
            let most = 2 + (age as usize - 2) / 5;
            assert!(inner.calls() <= most, "{status}: {} calls at {age}", inner.calls());
        }
        sleep(5).await;
        ask(&shops[0], get("/")).await;
        settle().await;
        assert_eq!(
            ask(&shops[1], get("/")).await.text(),
            "newer",
            "{status}: another client's request is answered"
        );
    }
}

/// Regression: each answer with the stored response began a load that yielded none, up to 74 a second.
#[tokio::test(start_paused = true)]
async fn a_resource_that_has_become_uncacheable_is_loaded_once_per_wave() {
    for headers in [&[("cache-control", "max-age=0")], &[("expires", "0")]] {
        let inner = origin("max-age=1, stale-while-revalidate=60", with(200, headers));
        let shops = replicas(2, &inner);
        ask(&shops[0], get("/")).await;
        sleep(2).await;
        ask(&shops[0], get("/")).await;
        settle().await;
        assert_eq!(inner.calls(), 2);
        for wave in 1..=10 {
            inner.gate.close();
            let waiting: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 20, "/")).collect();
            settle().await;
            inner.gate.open();
            for seen in all(waiting).await {
                assert_eq!(seen.text(), "new", "{}", seen.remark());
            }
            settle().await;
            assert_eq!(inner.calls(), 2 + wave, "{headers:?}: no load behind an answer, one before forty");
        }
    }
}

/// RFC 9111, 4.3.3: a full response says that the stored one is not suitable any more.
#[tokio::test(start_paused = true)]
async fn a_clients_reload_that_is_answered_about_the_resource_ends_the_stored_response() {
    for (case, then) in about_the_resource() {
        let inner = origin("max-age=60", then);
        let shops = shops(&inner);
        ask(&shops[0], get("/")).await;
        assert_ne!(ask(&shops[0], reload("no-cache")).await.text(), "old", "{case}");
        let seen = ask(&shops[1], get("/")).await;
        let is_refused = ["401", "403"].contains(&case);
        assert_eq!(seen.text() == "old", is_refused, "{case}: {}", seen.remark());
    }
}

#[tokio::test(start_paused = true)]
async fn a_clients_reload_that_is_refused_or_fails_ends_nothing() {
    let (of_client, of_server) = ([400, 401, 403, 407, 408, 416, 429, 431], [500, 501, 503, 511]);
    for (status, reloads) in of_client
        .into_iter()
        .chain(of_server)
        .flat_map(|status| ["no-cache", "max-age=0", "min-fresh=600"].map(move |reloads| (status, reloads)))
    {
        for control in ["max-age=60", "max-age=1, stale-while-revalidate=60, stale-if-error=60"] {
            let inner = origin(control, with(status, &[]));
            let shops = shops(&inner);
            ask(&shops[0], get("/")).await;
            sleep(2).await;
            let seen = ask(&shops[0], reload(reloads)).await;
            // Only `no-cache` refuses an older response instead of a failure.
            let may_stand_in = reloads != "no-cache" && control.contains("stale-if-error");
            assert!(seen.status == status || may_stand_in, "{status} {reloads} {control}: {}", seen.remark());
            assert_eq!(ask(&shops[1], get("/")).await.text(), "old", "{status} {reloads} {control}");
        }
    }
}

/// The stored response is for anonymous clients, and a response to credentials says nothing about it.
#[tokio::test(start_paused = true)]
async fn a_refresh_with_credentials_that_is_answered_for_its_user_ends_nothing() {
    let inner = Inner::with(|n, request| {
        let control = match request.headers().contains_key("authorization") {
            true => "private",
            false => "public, max-age=1, stale-while-revalidate=60",
        };
        Ok(respond(200, &[("cache-control", control)], whole(n.to_string())))
    });
    let http = HttpPolicy::default().share_authorized(true);
    let shops = replicas_with(2, &inner, policy().back_off(secs(5)).http(http));
    ask(&shops[0], get("/")).await;
    sleep(2).await;
    let user = || request("GET", "/", &[("authorization", "ann")]);
    for _ in 0..10 {
        assert_eq!(ask(&shops[0], user()).await.text(), "1");
        settle().await;
    }
    assert_eq!(inner.calls(), 2, "the refresh is paced");
    assert_eq!(ask(&shops[1], get("/")).await.text(), "1");
    sleep(5).await;
    ask(&shops[1], get("/")).await;
    settle().await;
    assert_eq!(ask(&shops[0], get("/")).await.text(), "3", "refreshed by an anonymous request");
}

#[tokio::test(start_paused = true)]
async fn a_head_that_may_not_be_stored_ends_the_stored_response() {
    for (headers, ends) in [
        (&[("cache-control", "no-store")][..], true),
        (&[("cache-control", "private"), ("etag", "\"a\"")], true),
        (&[("set-cookie", "a=b")], true),
        (&[], false),
    ] {
        let inner = Inner::with(move |n, request| {
            Ok(match (n, request.method()) {
                (1, _) => respond(200, &[("cache-control", "max-age=60"), ("etag", "\"a\"")], whole("old")),
                (_, &http::Method::HEAD) => respond(200, headers, Boxed::default()),
                _ => respond(200, headers, whole("new")),
            })
        });
        let shops = replicas(2, &inner);
        ask(&shops[0], get("/")).await;
        ask(&shops[0], request("HEAD", "/", &[("cache-control", "no-cache")])).await;
        assert_eq!(ask(&shops[1], get("/")).await.text(), if ends { "new" } else { "old" }, "{headers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_variant_that_can_not_be_stored_any_more_leaves_the_others() {
    let inner = Inner::with(|n, request| {
        let language = super::kit::sent(request, "accept-language").to_owned();
        let control = match (&*language, n) {
            ("fr", 3..) => "no-store",
            _ => "max-age=1, stale-while-revalidate=60",
        };
        let headers = [("vary", "accept-language"), ("cache-control", control)];
        Ok(respond(200, &headers, whole(format!("{language} {n}"))))
    });
    let shops = replicas(2, &inner);
    let in_language = |language| request("GET", "/", &[("accept-language", language)]);
    let ask_in = async |shop: &Shop, language| -> Seen { ask(shop, in_language(language)).await };
    assert_eq!(ask_in(&shops[0], "de").await.text(), "de 1");
    assert_eq!(ask_in(&shops[0], "fr").await.text(), "fr 2");
    sleep(2).await;
    assert_eq!(ask_in(&shops[0], "fr").await.text(), "fr 2");
    settle().await;
    assert_eq!(ask_in(&shops[1], "fr").await.text(), "fr 4");
    assert_eq!(ask_in(&shops[1], "de").await.text(), "de 1");
}

/// A load that began before another process's answer has the lease, so neither overtakes the other; an invalidation ends the lease of
/// a load, whose answer then removes nothing.
#[tokio::test(start_paused = true)]
async fn a_late_answer_ends_no_newer_response() {
    let inner = Inner::with(|n, _| {
        let control = if n == 2 { "no-store" } else { "max-age=1, stale-while-revalidate=60" };
        Ok(respond(200, &[("cache-control", control)], whole(n.to_string())))
    });
    let guard = super::kit::guard();
    let shop = tower::Layer::layer(&guard, inner.clone());
    ask(&shop, get("/")).await;
    sleep(2).await;
    inner.gate.close();
    let stale = send(&shop, get("/"));
    settle().await;
    assert_eq!(inner.calls(), 2);
    guard.invalidate(cache_key(&"http://shop.example/".parse().unwrap()).unwrap()).await.unwrap();
    let newer = send(&shop, get("/"));
    settle().await;
    inner.gate.open();
    settle().await;
    assert_eq!(stale.await.unwrap().text(), "1");
    assert_eq!(newer.await.unwrap().text(), "3");
    assert!(ask(&shop, get("/")).await.remark().starts_with("hit"));
}

/// A shared cache of one user's own ([`HttpPolicy::private`]) knows no anonymous clients: its 403 is about the resource as well.
#[tokio::test(start_paused = true)]
async fn a_private_cache_ends_what_its_user_may_not_have_any_more() {
    let inner = origin("private, max-age=1, stale-while-revalidate=60", with(403, &[]));
    let shops = replicas_with(2, &inner, policy().http(HttpPolicy::private()));
    ask(&shops[0], get("/")).await;
    sleep(2).await;
    assert_eq!(ask(&shops[0], get("/")).await.text(), "old");
    settle().await;
    assert_eq!(ask(&shops[1], get("/")).await.status, 403);
}
