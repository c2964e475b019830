//! A stored response that is still useful is not replaced or removed because of an answer that is not stored.

use stampede_guard::http::HttpPolicy;

use super::kit::{
    Boxed, Inner, Req, ask, get, policy, replicas, replicas_with, request, respond, secs, sent, settle, whole,
};

fn reload(headers: &[(&str, &str)]) -> Req {
    let mut all = vec![("cache-control", "no-cache")];
    all.extend_from_slice(headers);
    request("GET", "/", &all)
}

/// One client forces a reload, and the origin fails, or answers only that client's request. The other clients are still served the stored
/// response.
#[tokio::test(start_paused = true)]
async fn a_fresh_response_outlives_a_failed_or_refused_reload() {
    for (status, header) in [
        (503, ("cache-control", "no-store")),
        (406, ("content-type", "text/plain")),
        (403, ("cache-control", "private")),
    ] {
        let inner = Inner::with(move |n, _| {
            Ok(match n {
                1 => respond(200, &[("cache-control", "max-age=60")], whole("1")),
                n => respond(status, &[header], whole(n.to_string())),
            })
        });
        let shops = replicas(2, &inner);
        ask(&shops[0], get("/")).await;
        let reloaded = ask(&shops[1], reload(&[])).await;
        assert_eq!((reloaded.status, reloaded.text()), (status, "2"));
        for shop in &shops {
            let seen = ask(shop, get("/")).await;
            assert_eq!((seen.text(), inner.calls()), ("1", 2), "after {status} with {header:?}");
        }
    }
}

/// If a refresh brings an answer that cannot be shared, the stored response stays, and the origin is called again only after the back-off.
#[tokio::test(start_paused = true)]
async fn a_stale_response_outlives_a_refresh_with_an_unshareable_answer() {
    let inner = Inner::with(|n, _| {
        let stored = ("cache-control", "max-age=10, stale-while-revalidate=60");
        Ok(match n {
            1 => respond(200, &[stored], whole("1")),
            n => respond(429, &[], whole(n.to_string())),
        })
    });
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(12)).await;
    for back_offs in 1..=3 {
        for shop in shops.iter().cycle().take(8) {
            assert_eq!(ask(shop, get("/")).await.text(), "1");
            settle().await;
        }
        assert_eq!(inner.calls(), 1 + back_offs);
        tokio::time::sleep(secs(5)).await;
    }
}

/// All variants are found through the entry of one of them. An error that says nothing about the resource must not replace that entry.
#[tokio::test(start_paused = true)]
async fn the_other_variants_outlive_an_error_of_the_variant_stored_at_the_resource() {
    for status in [429, 500] {
        let inner = Inner::with(move |n, request| {
            let language = sent(request, "accept-language").to_owned();
            if n == 3 {
                return Ok(respond(status, &[("cache-control", "no-store")], whole("sorry")));
            }
            let control = if language == "de" { "max-age=10" } else { "max-age=600" };
            let headers = [("vary", "Accept-Language"), ("cache-control", control)];
            Ok(respond(200, &headers, whole(format!("{language} {n}"))))
        });
        let shops = replicas(2, &inner);
        let language = |language| request("GET", "/", &[("accept-language", language)]);
        ask(&shops[0], language("de")).await;
        ask(&shops[0], language("en")).await;
        tokio::time::sleep(secs(12)).await;
        assert_eq!(ask(&shops[0], language("de")).await.status, status);
        assert_eq!(ask(&shops[1], language("en")).await.text(), "en 2", "{status}");
        assert_eq!(ask(&shops[1], language("de")).await.text(), "de 4", "{status}");
    }
}

/// When a client reloads a part, the stored whole stays for other clients.
#[tokio::test(start_paused = true)]
async fn a_stored_whole_outlives_a_reload_of_a_part() {
    let inner = Inner::with(|_, request| {
        let common = [("cache-control", "max-age=60"), ("etag", "\"1\"")];
        if sent(request, "range").is_empty() {
            return Ok(respond(200, &common, whole("0123456789")));
        }
        let part = [common[0], common[1], ("content-range", "bytes 0-0/10")];
        Ok(respond(206, &part, whole("0")))
    });
    for settings in [HttpPolicy::default(), HttpPolicy::strict()] {
        let shops = replicas_with(2, &inner, policy().http(settings));
        let before = inner.calls();
        ask(&shops[0], get("/")).await;
        assert_eq!(ask(&shops[1], reload(&[("range", "bytes=0-0")])).await.status, 206);
        for shop in &shops {
            assert_eq!(ask(shop, get("/")).await.text(), "0123456789");
        }
        assert_eq!(inner.calls(), before + 2);
        // Even when the whole is stale, it is still validated.
        tokio::time::sleep(secs(61)).await;
        ask(&shops[1], request("GET", "/", &[("range", "bytes=0-0")])).await;
        ask(&shops[0], get("/")).await;
    }
}

/// A stale whole can be validated, or stand in for a failure. A part cannot, though it may have a single byte and any client may request
/// it, so it must not replace the whole.
#[tokio::test(start_paused = true)]
async fn a_stale_whole_outlives_a_part_that_can_not_be_joined_to_it() {
    let part = || request("GET", "/", &[("range", "bytes=0-0")]);
    for (control, tag) in [
        ("max-age=10, stale-if-error=3600", "W/\"1\""),
        ("max-age=10, stale-if-error=3600", ""),
        ("max-age=10, must-revalidate", "W/\"1\""),
    ] {
        let inner = Inner::with(move |n, request| {
            let common = [("cache-control", control), ("etag", tag), ("content-range", "bytes 0-0/10")];
            Ok(match n {
                1 => respond(200, &common[..2], whole("0123456789")),
                _ if !sent(request, "range").is_empty() => respond(206, &common, whole("0")),
                _ if sent(request, "if-none-match") == "W/\"1\"" && control.contains("must") => {
                    respond(304, &common[..2], Boxed::default())
                }
                _ => respond(503, &[], whole("sorry")),
            })
        });
        let shops = replicas(2, &inner);
        ask(&shops[0], get("/")).await;
        tokio::time::sleep(secs(12)).await;
        for shop in &shops {
            assert_eq!(ask(shop, part()).await.text(), "0", "{control} {tag}");
        }
        for shop in &shops {
            let seen = ask(shop, get("/")).await;
            assert_eq!((seen.status, seen.text()), (200, "0123456789"), "{control} {tag}");
        }
    }
}

/// A part of another representation shows that the whole is outdated: its parts are stored instead.
#[tokio::test(start_paused = true)]
async fn a_stale_whole_does_not_prevent_storing_parts_of_its_successor() {
    let inner = Inner::with(|n, _| {
        let tag = ["\"a\"", "\"b\""][usize::from(n > 1)];
        let common = [("cache-control", "max-age=10"), ("etag", tag), ("content-range", "bytes 0-4/10")];
        Ok(if n == 1 {
            respond(200, &common[..2], whole("0123456789"))
        } else {
            respond(206, &common, whole("abcde"))
        })
    });
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    // By then the stale whole may no longer stand in for a failure.
    tokio::time::sleep(secs(80)).await;
    for shop in &shops {
        for _ in 0..2 {
            assert_eq!(ask(shop, request("GET", "/", &[("range", "bytes=0-4")])).await.text(), "abcde");
        }
    }
    assert_eq!(inner.calls(), 2);
}
