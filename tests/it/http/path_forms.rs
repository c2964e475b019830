//! Different spellings of a path share no response, and an invalidation under any spelling reaches all of them (RFC 3986, 6.2.2).

use stampede_guard::http::{HttpPolicy, cache_key};
use stampede_guard::{MemoryStore, StampedeGuard};
use tower::Layer as _;

use super::kit::{Inner, Shop, ask, get, policy, request, respond, whole};

fn guarded(inner: &Inner) -> (StampedeGuard, Shop) {
    let policy = policy().http(HttpPolicy::default().authority("shop.example")).build().unwrap();
    let guard = StampedeGuard::new(MemoryStore::new()).with_policy(policy);
    let shop = guard.layer(inner.clone());
    (guard, shop)
}

/// A path that a text stands for, and the spellings in which clients may request it.
const PATHS: [(&str, &[&str]); 13] = [
    ("/caf\u{e9}", &["/caf%C3%A9", "/caf%c3%a9", "/c%61f%c3%A9"]),
    ("/gr\u{f6}\u{df}e/7", &["/gr%C3%B6%C3%9Fe/7", "/gr%c3%b6%c3%9fe/%37"]),
    ("/100%", &["/100%25", "/100%"]),
    ("/q\"uote", &["/q%22uote"]),
    ("/\u{65e5}\u{672c}", &["/%E6%97%A5%E6%9C%AC"]),
    ("/pipe|", &["/pipe|", "/pipe%7C", "/pipe%7c"]),
    ("/caf%c3%a9", &["/caf%C3%A9", "/caf%c3%a9"]),
    ("/%70", &["/p", "/%70"]),
    ("/product/0", &["/product/0", "/product/%30"]),
    ("/a-b", &["/a-b", "/a%2Db", "/a%2db"]),
    ("/x~y", &["/x~y", "/x%7Ey"]),
    ("/p", &["/p", "/p?", "/./p", "/q/../p"]),
    ("/p?a[]=\u{e9}", &["/p?a[]=%C3%A9", "/p?a%5B%5D=%c3%a9"]),
];

#[tokio::test(start_paused = true)]
async fn an_invalidation_reaches_all_spellings_of_a_path() {
    for (text, spellings) in PATHS {
        for by in 0..3 {
            let inner = Inner::numbered(|_| ());
            let (guard, shop) = guarded(&inner);
            for spelling in spellings {
                ask(&shop, get(spelling)).await;
                assert!(ask(&shop, get(spelling)).await.remark().starts_with("hit"), "{spelling}");
            }
            match by {
                0 => guard.invalidate_path(text).await.unwrap(),
                // Any spelling of the path reaches all of them.
                1 => drop(ask(&shop, request("POST", spellings[spellings.len() - 1], &[])).await),
                _ => guard.invalidate(guard.http_key(&get(spellings[0])).unwrap()).await.unwrap(),
            }
            let before = inner.calls();
            for spelling in spellings {
                assert!(
                    ask(&shop, get(spelling)).await.remark().starts_with("fwd="),
                    "{text}: {spelling} ({by})"
                );
            }
            assert_eq!(inner.calls(), before + spellings.len(), "{text}");
        }
    }
}

/// As in axum, where `/p` may have a route and `/%70` has none.
#[tokio::test(start_paused = true)]
async fn spellings_of_a_path_share_no_response() {
    let inner = Inner::with(|_, request| {
        let status =
            if request.uri().path_and_query().is_some_and(|path| path.as_str() == "/p") { 200 } else { 404 };
        Ok(respond(status, &[("cache-control", "max-age=60")], whole(request.uri().to_string())))
    });
    let (_, shop) = guarded(&inner);
    for first in ["/%70", "/p?", "/./p", "/p"] {
        assert_eq!(ask(&shop, get(first)).await.text(), first);
    }
    for spelling in ["/p", "/./p", "/p?", "/%70"] {
        let seen = ask(&shop, get(spelling)).await;
        assert_eq!((seen.text(), seen.status == 200), (spelling, spelling == "/p"));
        assert!(seen.remark().starts_with("hit"), "{spelling}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_location_reaches_all_spellings_of_its_path() {
    let inner = Inner::with(|n, request| {
        let headers: &[_] = match request.method().as_str() {
            "GET" => &[("cache-control", "max-age=60")],
            _ => &[("location", "/caf%c3%a9")],
        };
        Ok(respond(200, headers, whole(n.to_string())))
    });
    let (_, shop) = guarded(&inner);
    for spelling in ["/caf%C3%A9", "/c%61f%c3%a9"] {
        ask(&shop, get(spelling)).await;
        assert!(ask(&shop, get(spelling)).await.remark().starts_with("hit"), "{spelling}");
    }
    ask(&shop, request("POST", "/menu", &[])).await;
    for spelling in ["/caf%C3%A9", "/c%61f%c3%a9"] {
        assert!(ask(&shop, get(spelling)).await.remark().starts_with("fwd="), "{spelling}");
    }
}

#[test]
fn the_spellings_of_a_uri_have_one_key() {
    let key = |uri: &str| cache_key(&uri.parse().unwrap()).unwrap();
    assert_eq!(key("http://h/caf%c3%a9?"), key("http://h/c%61f%C3%A9"));
    for (one, other) in [("/a/", "/a"), ("/a%2Fb", "/a/b"), ("/a?x=1&y=2", "/a?y=2&x=1"), ("/a?x", "/a")] {
        assert_ne!(
            key(&format!("http://h{one}")),
            key(&format!("http://h{other}")),
            "{one} and {other} stay distinct"
        );
    }
}
