//! Requests with different proxy reports (`Forwarded`, `X-Forwarded-Host` ..) share no response (C8).

use http::HeaderMap;
use stampede_guard::http::HttpPolicy;
use stampede_guard::{MemoryStore, StampedeGuard};
use tower::{Layer as _, ServiceExt as _};

use super::kit::{
    Down, Inner, Req, all, ask, get, policy, replicas, request, respond, secs, send, sent, settle, shop,
    shop_with, whole,
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
    // Each report is sent first once.
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

/// Clients send more different reports than the policy has room for variants.
#[tokio::test(start_paused = true)]
async fn invented_hosts_take_no_room_from_the_ordinary_one() {
    let ordinary = [("x-forwarded-proto", "https"), ("x-forwarded-host", "shop.example")];
    for behind_a_proxy in [false, true] {
        // The response also varies on a header of its own.
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
            // Within the same millisecond, so that an entry's time does not distinguish it from its successor.
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
        let conditional = if request.headers().contains_key("if-none-match") { "yes" } else { "no" };
        let fields = [
            ("cache-control", "max-age=10, stale-while-revalidate=60"),
            ("etag", "\"a\""),
            ("x-conditional", conditional),
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
    assert_eq!(ask(&shop, proxied()).await.header("x-conditional"), Some("yes"));
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

/// The proxy's own report has the plain key. Every other report, and no report, have separate keys.
#[tokio::test(start_paused = true)]
async fn the_report_of_the_policy_has_the_plain_key() {
    let report = HeaderMap::from_iter([("x-forwarded-proto".parse().unwrap(), "https".parse().unwrap())]);
    let http = || HttpPolicy::default().behind_proxy(report.clone()).expose_key(true);
    let shop = shop_with(&linking(), policy().http(http()));
    let key = |seen: &super::kit::Seen| seen.remark().split("key=").nth(1).unwrap_or_default().to_owned();
    let proxied = ask(&shop, by(&[("x-forwarded-proto", "https")])).await;
    let direct = ask(&shop, get("/")).await;
    assert_eq!((proxied.text(), direct.text()), ("||https| 1", "||| 2"));
    assert!(!key(&proxied).contains("~f") && key(&direct).contains("~f"), "{proxied:?} {direct:?}");
    ask(&shop, request("POST", "/", &[])).await;
    assert_eq!(ask(&shop, get("/")).await.text(), "||| 4");
    assert_eq!(ask(&shop, by(&[("x-forwarded-proto", "https")])).await.text(), "||https| 5");
    let refused = policy().http(HttpPolicy::default().behind_proxy(HeaderMap::new())).build().unwrap_err();
    assert!(refused.to_string().contains("X-Forwarded-Proto: https"), "{refused}");
}

/// An `expire` of the plain key also ends the responses of other reports, which were stored to stand in for a failed load.
#[tokio::test(start_paused = true)]
async fn an_expiry_reaches_the_responses_of_all_reports() {
    let inner = linking_with(&[("cache-control", "max-age=60, stale-if-error=60")]);
    let guard = StampedeGuard::in_memory().with_policy(policy().build().unwrap());
    let shop = guard.layer(inner.clone());
    let proxied = || by(&[("x-forwarded-proto", "https")]);
    for has_plain in [true, false] {
        if has_plain {
            ask(&shop, get("/")).await;
        }
        ask(&shop, proxied()).await;
        guard.expire(guard.http_key(&get("/")).unwrap()).await.unwrap();
        assert!(ask(&shop, proxied()).await.remark().starts_with("fwd="));
    }
}

const EVIL: (&str, &str) = ("x-forwarded-host", "evil.example");

fn is_evil(request: &Req) -> bool {
    sent(request, "x-forwarded-host") == "evil.example"
}

/// A handler may read only the first element, as one of axum's extractors does.
#[tokio::test(start_paused = true)]
async fn a_report_counts_by_its_elements() {
    let inner = Inner::with(|n, request| {
        let line = sent(request, "forwarded");
        let first = line.split(',').next().unwrap_or_default();
        let host = first.split(';').find_map(|pair| pair.trim().strip_prefix("host="));
        let host = host.unwrap_or_else(|| sent(request, "host"));
        Ok(respond(200, &[], whole(format!("https://{host}/ {n}"))))
    });
    let shop = shop(&inner);
    // The element that the client sent, followed by the proxy's.
    let evil =
        by(&[("host", "10.0.0.7:8080"), ("forwarded", "for=x, for=192.0.2.1;host=shop.example;proto=https")]);
    let usual =
        by(&[("host", "10.0.0.7:8080"), ("forwarded", "for=192.0.2.1;host=shop.example;proto=https")]);
    assert_eq!(ask(&shop, evil).await.text(), "https://10.0.0.7:8080/ 1");
    assert_eq!(ask(&shop, usual).await.text(), "https://shop.example/ 2");
}

/// A handler may read only the first line.
#[tokio::test(start_paused = true)]
async fn a_report_counts_by_its_lines() {
    let inner = Inner::with(|n, request| {
        // `HeaderMap::get` returns the first line.
        let line = sent(request, "forwarded");
        let text = if line.contains("proto=https") { "page" } else { "redirect to https" };
        Ok(respond(200, &[], whole(format!("{text} {n}"))))
    });
    let shop = shop(&inner);
    let evil = by(&[("forwarded", "for=x"), ("forwarded", "for=1;proto=https")]);
    let usual = by(&[("forwarded", "for=1;proto=https")]);
    assert_eq!(ask(&shop, evil).await.text(), "redirect to https 1");
    assert_eq!(ask(&shop, usual).await.text(), "page 2");
}

/// Regression: each such request removed the ordinary response.
#[tokio::test(start_paused = true)]
async fn an_invented_report_with_a_longer_vary_displaces_nothing() {
    let inner = Inner::with(|n, request| {
        let gzip = [("content-encoding", "gzip")];
        let takes = sent(request, "accept-encoding").contains("gzip");
        Ok(respond(200, if takes { &gzip[..] } else { &[] }, whole(format!("{n}"))))
    });
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    for _ in 0..5 {
        ask(&shop, by(&[EVIL, ("accept-encoding", "gzip")])).await;
        assert_eq!(ask(&shop, get("/")).await.remark(), "hit; ttl=60");
    }
}

/// Regression: the ordinary response was never stored.
#[tokio::test(start_paused = true)]
async fn an_invented_report_with_a_shorter_vary_does_not_prevent_storing() {
    let inner = Inner::with(|n, request| {
        if sent(request, "x-forwarded-proto") == "http" {
            return Ok(respond(301, &[("location", "https://shop.example/")], whole("")));
        }
        Ok(respond(200, &[("vary", "accept-encoding")], whole(format!("{n}"))))
    });
    let shop = shop(&inner);
    let usual = || by(&[("x-forwarded-proto", "https"), ("accept-encoding", "gzip")]);
    let mut remarks = Vec::new();
    for _ in 0..6 {
        ask(&shop, by(&[("x-forwarded-proto", "http")])).await;
        remarks.push(ask(&shop, usual()).await.remark());
    }
    assert!(remarks[1..].iter().all(|remark| remark.starts_with("hit")), "{remarks:#?}");
}

/// Regression: the invented report took the only slot.
#[tokio::test(start_paused = true)]
async fn an_invented_report_replaces_no_variant() {
    let inner = Inner::numbered(|_| ());
    let shop = shop_with(&inner, policy().http(HttpPolicy::default().max_variants(1)));
    ask(&shop, by(&[EVIL])).await;
    let first = ask(&shop, get("/")).await.remark();
    let second = ask(&shop, get("/")).await.remark();
    assert!(second.starts_with("hit"), "{first} {second}");
}

/// Regression: all 20 requests that waited for it loaded alone.
#[tokio::test(start_paused = true)]
async fn an_invented_report_that_is_refused_sends_no_stampede_to_the_handler() {
    let inner = Inner::with(move |n, request| {
        Ok(if is_evil(request) {
            respond(400, &[], whole("no such host"))
        } else {
            respond(200, &[], whole(format!("{n}")))
        })
    });
    let inner = inner.held_separately();
    let shop = shop(&inner);
    let evil = send(&shop, by(&[EVIL]));
    settle().await;
    let clients: Vec<_> = (0..20).map(|_| send(&shop, get("/"))).collect();
    settle().await;
    inner.open_first();
    settle().await;
    inner.gate.open();
    evil.await.unwrap();
    all(clients).await;
    assert_eq!(inner.calls(), 2, "the invented one, and one for all others");
}

/// Regression: the requests that waited for it failed with it.
#[tokio::test(start_paused = true)]
async fn an_invented_report_that_fails_fails_alone() {
    let inner = Inner::with(move |n, request| {
        if is_evil(request) {
            Err(Down("evil.example does not resolve".into()))
        } else {
            Ok(respond(200, &[], whole(format!("{n}"))))
        }
    });
    let inner = inner.held();
    let shop = shop_with(&inner, policy().error_for(secs(5)));
    let evil = {
        let shop = shop.clone();
        tokio::spawn(async move { shop.oneshot(by(&[EVIL])).await.map(|_| ()) })
    };
    settle().await;
    let clients: Vec<_> = (0..5).map(|_| send(&shop, get("/"))).collect();
    settle().await;
    inner.gate.open();
    assert!(evil.await.unwrap().is_err());
    let mut seen: Vec<_> =
        all(clients).await.iter().map(|seen| (seen.status, seen.text().to_owned())).collect();
    let later = ask(&shop, get("/")).await;
    seen.push((later.status, later.text().to_owned()));
    assert!(seen.iter().all(|(status, _)| *status == 200), "{seen:#?}");
}

/// Regression: the ordinary request waited for it, and got a 504.
#[tokio::test(start_paused = true)]
async fn an_invented_report_that_hangs_hangs_alone() {
    let inner = Inner::numbered(|_| ()).held_separately();
    inner.gate.open();
    let shop = shop(&inner);
    let evil = send(&shop, by(&[EVIL]));
    settle().await;
    let began = tokio::time::Instant::now();
    let seen = ask(&shop, get("/")).await;
    println!("{} after {:?}", seen.status, began.elapsed());
    drop(evil);
    assert_eq!(seen.status, 200, "{}", seen.remark());
}

/// Regression: 60 loads in a tenth of a lifetime.
#[tokio::test(start_paused = true)]
async fn an_invented_report_ends_no_ordinary_lifetime() {
    let inner = Inner::with(|n, request| {
        let (status, control) = if is_evil(request) { (404, "s-maxage=1") } else { (200, "s-maxage=600") };
        Ok(respond(status, &[("cache-control", control)], whole(format!("{n}"))))
    });
    let shop = shop(&inner);
    let mut loads = 0;
    for _ in 0..60 {
        ask(&shop, by(&[EVIL])).await;
        loads += usize::from(ask(&shop, get("/")).await.remark().starts_with("fwd"));
        tokio::time::sleep(secs(1)).await;
    }
    assert!(loads <= 2, "{loads} loads of the ordinary one in a tenth of its lifetime");
}

/// Regression: 137 loads instead of one.
#[tokio::test(start_paused = true)]
async fn an_invented_report_splits_no_ordinary_response() {
    let inner = Inner::with(|n, request| {
        let vary = [("vary", "user-agent")];
        Ok(respond(200, if is_evil(request) { &vary[..] } else { &[] }, whole(format!("{n}"))))
    });
    let shop = shop(&inner);
    ask(&shop, by(&[EVIL])).await;
    let mut loads = 0;
    for round in 0..2 {
        for agent in 0..100 {
            let seen = ask(&shop, by(&[("user-agent", &*format!("agent {agent}"))])).await;
            loads += usize::from(seen.remark().starts_with("fwd"));
        }
        println!("after round {round}: {loads} loads");
    }
    assert!(loads <= 1, "{loads} loads of one response that varies on nothing");
}

/// Regression: a request after the change waited for the older load.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_request_after_an_unsafe_method_joins_no_older_load_while_the_store_is_away() {
    let inner = linking().held_separately();
    let replica = stampede_guard::testing::ChaosStore::new(1).replica();
    let shop =
        StampedeGuard::new(replica.clone()).with_policy(policy().build().unwrap()).layer(inner.clone());
    let proxied = || by(&[("x-forwarded-proto", "https")]);
    let early = send(&shop, proxied());
    settle().await;
    inner.gate.open();
    replica.cut();
    ask(&shop, request("POST", "/", &[])).await;
    assert_eq!(ask(&shop, proxied()).await.text(), "||https| 3");
    inner.open_first();
    assert_eq!(early.await.unwrap().text(), "||https| 1");
}
