//! Requests with different reports of proxies (`Forwarded`, `X-Forwarded-Host` ..) share no response (C8).

use http::HeaderMap;
use stampede_guard::http::HttpPolicy;
use stampede_guard::{MemoryStore, StampedeGuard};
use tower::Layer as _;

use super::kit::{
    Inner, Req, all, ask, get, policy, replicas, request, respond, secs, send, settle, shop, shop_with, whole,
};

const SAID: [&str; 4] = ["forwarded", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-prefix"];

/// A handler that builds a link from the proxies' report, and numbers its responses.
fn linking() -> Inner {
    linking_with(&[])
}

fn linking_with(headers: &'static [(&'static str, &'static str)]) -> Inner {
    Inner::with(move |n, request| {
        Ok(respond(200, headers, whole(format!("{} {n}", link(request.headers())))))
    })
}

fn link(headers: &HeaderMap) -> String {
    let said = |name| headers.get(name).map_or("", |value| value.to_str().unwrap());
    SAID.map(said).join("|")
}

fn by(headers: &[(&str, &str)]) -> Req {
    request("GET", "/", headers)
}

#[tokio::test(start_paused = true)]
async fn each_report_has_its_own_response() {
    let ways: [&[(&str, &str)]; 7] = [
        &[],
        &[("x-forwarded-proto", "https")],
        &[("x-forwarded-proto", "http")],
        &[("x-forwarded-host", "evil.example")],
        &[("x-forwarded-prefix", "/shop")],
        &[("forwarded", "for=1;host=evil.example")],
        &[("forwarded", "proto=http")],
    ];
    // Whichever comes first.
    for first in 0..ways.len() {
        let inner = linking();
        let fleet = replicas(2, &inner);
        let in_turn = || (first..ways.len()).chain(0..first).map(|at| ways[at]);
        for (n, way) in in_turn().enumerate() {
            assert_eq!(
                ask(&fleet[0], by(way)).await.text(),
                format!("{} {}", link(by(way).headers()), n + 1)
            );
        }
        for (n, way) in in_turn().enumerate() {
            let seen = ask(&fleet[1], by(way)).await;
            assert_eq!(seen.text(), format!("{} {}", link(by(way).headers()), n + 1), "{way:?} is stored");
            assert_eq!(seen.remark(), "hit; ttl=60");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn clients_behind_one_proxy_share_one_response() {
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    for client in 0..10 {
        let forwarded = format!("for=192.0.2.{client};by=10.0.0.{client};host=shop.example;proto=https");
        let address = format!("192.0.2.{client}");
        let one =
            by(&[("forwarded", &forwarded), ("x-forwarded-for", &address), ("x-forwarded-proto", "https")]);
        assert_eq!(ask(&shop, one).await.text(), "1");
        let bare = by(&[("forwarded", &format!("for={address}"))]);
        assert_eq!(ask(&shop, bare).await.text(), "2", "no report");
    }
    assert_eq!(ask(&shop, get("/")).await.text(), "2");
}

/// More than the policy has room for variants.
#[tokio::test(start_paused = true)]
async fn invented_hosts_take_no_room_from_the_ordinary_one() {
    let ordinary = [("x-forwarded-proto", "https"), ("x-forwarded-host", "shop.example")];
    for behind_a_proxy in [false, true] {
        // Beside variants that the response names.
        let inner = linking_with(&[("vary", "accept-language")]);
        let shop = shop_with(&inner, policy().http(HttpPolicy::default().max_variants(3)));
        let usual = |language: &str| {
            let way = if behind_a_proxy { &ordinary[..] } else { &[] };
            by(&[way, &[("accept-language", language)]].concat())
        };
        let invented = |number: usize| {
            let host = format!("evil{number}.example");
            by(&[ordinary[0], ("x-forwarded-host", &host), ("accept-language", "de")])
        };
        ask(&shop, usual("de")).await;
        for number in 0..20 {
            assert!(ask(&shop, invented(number)).await.text().contains("evil"));
        }
        let before = inner.calls();
        for language in ["de", "en", "fr"] {
            ask(&shop, usual(language)).await;
            assert!(ask(&shop, usual(language)).await.remark().starts_with("hit"), "{language}");
        }
        assert_eq!(inner.calls(), before + 2, "the first was stored all the time");
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_reaches_the_variants_of_all_reports() {
    let ways: [&[(&str, &str)]; 3] =
        [&[], &[("x-forwarded-proto", "https")], &[("x-forwarded-host", "evil.example")]];
    for first in 0..3 {
        for changing in 0..4 {
            let inner = linking();
            let guard = StampedeGuard::new(MemoryStore::new()).with_policy(policy().build().unwrap());
            let shop = guard.layer(inner.clone());
            for at in [first, 0, 1, 2] {
                ask(&shop, by(ways[at])).await;
            }
            match ways.get(changing) {
                Some(way) => drop(ask(&shop, request("POST", "/", way)).await),
                None => guard.invalidate(guard.http_key(&get("/")).unwrap()).await.unwrap(),
            }
            let before = inner.calls();
            // Within the same millisecond, so an entry's time would not tell it from its successor.
            for way in ways {
                assert!(ask(&shop, by(way)).await.remark().starts_with("fwd="), "{first} {changing} {way:?}");
            }
            assert_eq!(inner.calls(), before + 3, "RFC 9111, 4.4");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gets_no_response_of_another_report() {
    let not_stored = [("cache-control", "max-age=0, public")];
    for headers in [&[][..], &not_stored] {
        let inner = Inner::with({
            let headers = headers.to_vec();
            move |_, request| Ok(respond(200, &headers, whole(link(request.headers()))))
        });
        let inner = inner.held();
        let shop = shop(&inner);
        let mut waiting = vec![send(&shop, by(&[("x-forwarded-host", "evil.example")]))];
        settle().await;
        waiting.extend((0..20).map(|_| send(&shop, get("/"))));
        waiting.extend((0..20).map(|_| send(&shop, by(&[("x-forwarded-proto", "https")]))));
        settle().await;
        inner.gate.open();
        let seen = all(waiting).await;
        assert_eq!(seen[0].text(), "|evil.example||");
        assert!(seen[1..21].iter().all(|seen| seen.text() == "|||"));
        assert!(seen[21..].iter().all(|seen| seen.text() == "||https|"));
        assert!(inner.calls() <= 4, "{} calls", inner.calls());
    }
}

#[tokio::test(start_paused = true)]
async fn a_stale_variant_is_refreshed_and_validated_by_its_own_report_only() {
    let inner = Inner::with(|n, request| {
        let asked = if request.headers().contains_key("if-none-match") { "yes" } else { "no" };
        let fields = [
            ("cache-control", "max-age=10, stale-while-revalidate=60"),
            ("etag", "\"a\""),
            ("x-asked", asked),
        ];
        Ok(respond(200, &fields, whole(format!("{} {n}", link(request.headers())))))
    });
    let shop = shop(&inner);
    let proxied = || by(&[("x-forwarded-proto", "https")]);
    ask(&shop, get("/")).await;
    ask(&shop, proxied()).await;
    tokio::time::sleep(secs(15)).await;
    assert_eq!(ask(&shop, proxied()).await.text(), "||https| 2", "stale");
    settle().await;
    assert_eq!(ask(&shop, proxied()).await.text(), "||https| 3", "it was loaded in the background");
    assert_eq!(ask(&shop, get("/")).await.text(), "||| 1");
    settle().await;
    assert_eq!(ask(&shop, get("/")).await.text(), "||| 4");
    // The refresh drew a new generation. The entry under the resource's key has another report, so no validator of it is sent.
    assert_eq!(ask(&shop, proxied()).await.header("x-asked"), Some("no"));
}

#[tokio::test(start_paused = true)]
async fn a_head_request_updates_no_response_of_another_report() {
    let inner = linking_with(&[("etag", "\"a\"")]);
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    let head = request("HEAD", "/", &[("x-forwarded-host", "evil.example")]);
    assert!(ask(&shop, head).await.remark().starts_with("fwd="), "it is not answered with that");
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.text(), seen.remark().as_str()), ("||| 1", "hit; ttl=60"), "and changes nothing of it");
    assert_eq!(ask(&shop, request("HEAD", "/", &[])).await.remark(), "hit; ttl=60");
}
