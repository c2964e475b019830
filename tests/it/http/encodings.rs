//! Encoded responses without `Vary: Accept-Encoding`, as servers of precompressed files send them.

use stampede_guard::http::HttpPolicy;

use super::kit::{
    Inner, Req, all, ask, get, policy, replicas, request, respond, send, sent, settle, shop, shop_with, whole,
};

/// Encodes for clients that accept gzip, without a `Vary` in the response.
fn precompressed() -> Inner {
    Inner::with(|n, request| {
        let headers = [("content-encoding", "gzip")];
        let takes = sent(request, "accept-encoding").contains("gzip");
        let (headers, text) = if takes { (&headers[..], "gzip") } else { (&[][..], "plain") };
        Ok(respond(200, headers, whole(format!("{text} {n}"))))
    })
}

fn takes(coding: &str) -> Req {
    request("GET", "/", &[("accept-encoding", coding)])
}

/// A5
#[tokio::test(start_paused = true)]
async fn an_encoded_response_is_returned_to_equal_requests() {
    let shops = replicas(2, &precompressed());
    let seen = ask(&shops[0], takes("gzip")).await;
    assert_eq!((seen.text(), seen.header("vary")), ("gzip 1", None));
    for shop in &shops {
        let seen = ask(shop, takes("gzip")).await;
        assert_eq!((seen.text(), seen.header("vary")), ("gzip 1", None), "as it came");
    }
    let unknown = ask(&shops[1], takes("br")).await;
    assert_eq!((unknown.text(), unknown.header("content-encoding")), ("plain 2", None));
    for shop in &shops {
        assert!(ask(shop, get("/")).await.text().starts_with("plain"));
    }
}

/// A5
#[tokio::test(start_paused = true)]
async fn a_waiter_receives_an_encoded_response_if_it_accepts_the_coding() {
    let inner = precompressed().held();
    let shop = shop(&inner);
    let mut gzip = vec![send(&shop, takes("gzip"))];
    settle().await;
    gzip.extend((0..3).map(|_| send(&shop, takes("gzip"))));
    let plain: Vec<_> = (0..3).map(|_| send(&shop, get("/"))).collect();
    settle().await;
    inner.gate.open();
    assert!(all(gzip).await.iter().all(|seen| seen.text() == "gzip 1"));
    assert!(all(plain).await.iter().all(|seen| seen.text().starts_with("plain")));
}

/// RFC 9111, 4.1: a response without `Vary` does not vary.
#[tokio::test(start_paused = true)]
async fn strictly_an_encoded_response_is_for_all_unless_it_says_otherwise() {
    let inner = Inner::with_headers(&[("content-encoding", "gzip"), ("cache-control", "max-age=60")]);
    let shop = shop_with(&inner, policy().http(HttpPolicy::strict()));
    assert_eq!(ask(&shop, takes("gzip")).await.text(), "1");
    assert_eq!(ask(&shop, get("/")).await.text(), "1");
}

/// Regression: sixty-four invented codings made sixty-four variants, and left no room for a browser's.
#[tokio::test(start_paused = true)]
async fn invented_codings_make_no_variants() {
    let inner = Inner::with_headers(&[("vary", "accept-encoding")]);
    let shop = shop(&inner);
    assert_eq!(ask(&shop, takes("invented-0")).await.text(), "1");
    for number in 1..100 {
        let seen = ask(&shop, takes(&format!("invented-{number};q=0.5, x{number}"))).await;
        assert_eq!((seen.text(), seen.remark().as_str()), ("1", "hit; ttl=60"), "{number}");
    }
    assert_eq!(ask(&shop, takes("gzip, br, invented-1")).await.text(), "2");
    assert_eq!(ask(&shop, takes("br, gzip")).await.text(), "2", "a browser's");
}

/// An origin that only searches the header for the letters also encodes for requests that do not accept the coding.
#[tokio::test(start_paused = true)]
async fn a_response_that_is_encoded_by_chance_is_its_own_clients_only() {
    let shop = shop(&precompressed());
    for number in 1..=2 {
        let seen = ask(&shop, takes("xgzip")).await;
        assert_eq!(seen.text(), format!("gzip {number}"));
        assert_eq!(seen.remark(), "fwd=bypass; detail=accept-encoding");
    }
    assert_eq!(ask(&shop, takes("invented")).await.text(), "plain 3");
    assert_eq!(ask(&shop, takes("other")).await.text(), "plain 3", "no marker is left for the resource");
}

/// Regression: six such requests ahead of many others sent all of them to the handler.
#[tokio::test(start_paused = true)]
async fn requests_with_misleading_codings_delay_no_others() {
    let inner = precompressed().held();
    let shop = shop(&inner);
    let mut requests: Vec<_> = (0..8).map(|n| send(&shop, takes(&format!("xgzip{n}")))).collect();
    settle().await;
    requests.extend((0..20).map(|_| send(&shop, takes("gzip"))));
    settle().await;
    inner.gate.open();
    all(requests).await;
    assert_eq!(inner.calls(), 8 + 1);
}

/// An origin encodes with a coding that is in no registry.
#[tokio::test(start_paused = true)]
async fn a_response_in_an_invented_coding_is_its_own_clients_only() {
    let inner = Inner::with(|n, request| {
        let takes = sent(request, "accept-encoding").contains("house");
        let headers: &[_] = if takes { &[("content-encoding", "house")] } else { &[] };
        Ok(respond(200, headers, whole(format!("{takes} {n}"))))
    });
    let shop = shop(&inner);
    for number in 1..=2 {
        let seen = ask(&shop, takes("house")).await;
        assert_eq!(seen.text(), format!("true {number}"));
        assert!(seen.remark().contains("detail=accept-encoding"), "{}", seen.remark());
    }
    assert_eq!(ask(&shop, takes("other")).await.text(), "false 3");
    assert_eq!(ask(&shop, takes("else")).await.text(), "false 3");
}
