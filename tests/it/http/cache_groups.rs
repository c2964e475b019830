//! `HttpPolicy::cache_groups`: RFC 9875. ROWS.md names the section of each requirement.

use stampede_guard::http::HttpPolicy;

use super::kit::{Boxed, Inner, Shop, ask, get, policy, replicas_with, request, respond, send, sent, whole};

/// A response with the fields that the request's `x-fields` lists, each as `name=value`, separated by `|`.
fn origin() -> Inner {
    Inner::with(|n, request| {
        let fields = sent(request, "x-fields").to_owned();
        let mut headers = vec![("cache-control", "max-age=600")];
        headers.extend(fields.split('|').filter_map(|field| field.split_once('=')));
        let status = match sent(request, "x-status") {
            "" => 200,
            status => status.parse().unwrap(),
        };
        Ok(respond(status, &headers, if status == 304 { Boxed::default() } else { whole(n.to_string()) }))
    })
}

fn processes_of(inner: &Inner, http: impl Fn() -> HttpPolicy) -> [Shop; 2] {
    replicas_with(2, inner, policy().http(http())).try_into().ok().expect("two")
}

fn processes(http: impl Fn() -> HttpPolicy) -> [Shop; 2] {
    processes_of(&origin(), http)
}

fn groups() -> HttpPolicy {
    HttpPolicy::default().cache_groups(true)
}

async fn stored(shop: &Shop, uri: &str, fields: &str) {
    ask(shop, request("GET", uri, &[("x-fields", fields)])).await;
    assert!(is_stored(shop, uri).await, "{uri}: {fields}");
}

async fn is_stored(shop: &Shop, uri: &str) -> bool {
    ask(shop, request("GET", uri, &[("cache-control", "only-if-cached")])).await.status == 200
}

/// D1, D3 (RFC 9875, 2.1 and 3): of the same origin, with the same string, compared with case, in any position and whatever the parameters.
#[tokio::test(start_paused = true)]
async fn an_unsafe_response_invalidates_the_groups_that_it_names() {
    for (invalidates, gone) in [
        (r#""a""#, &["/a", "/ab"][..]),
        (r#""x", "b";p=1"#, &["/b", "/ab"]),
        (r#""A""#, &["/A"]),
        (r#""~p", "a:b""#, &["/odd"]),
        ("a", &[]),
        (r#""a", 1"#, &[]),
    ] {
        let [shop, other] = processes(groups);
        let all = [
            ("/a", r#""a""#),
            ("/b", r#""b";q="a""#),
            ("/ab", r#""x", "a", "b""#),
            ("/A", r#""A""#),
            ("/odd", r#""a:b", "~p""#),
            ("/malformed", r#""a", b"#),
            ("/none", ""),
        ];
        for (uri, groups) in all {
            stored(&shop, uri, &format!("cache-groups={groups}")).await;
        }
        let elsewhere =
            request("GET", "/a", &[("host", "other.example"), ("x-fields", r#"cache-groups="a""#)]);
        ask(&shop, elsewhere).await;
        let fields = format!("cache-group-invalidation={invalidates}");
        ask(&shop, request("POST", "/upload", &[("x-fields", &fields)])).await;
        for (uri, _) in all {
            assert_eq!(!is_stored(&other, uri).await, gone.contains(&uri), "{invalidates}: {uri}");
        }
        let elsewhere = [("host", "other.example"), ("cache-control", "only-if-cached")];
        assert_eq!(ask(&other, request("GET", "/a", &elsewhere)).await.status, 200, "of another origin");
    }
}

/// D6 (RFC 9875, 3): the field must be ignored in responses to safe methods. D4: responses of groups do not invalidate one another (2.2.1).
#[tokio::test(start_paused = true)]
async fn a_safe_method_invalidates_no_group() {
    for method in ["GET", "HEAD", "OPTIONS"] {
        let [shop, other] = processes(groups);
        stored(&shop, "/a", r#"cache-groups="a""#).await;
        stored(&shop, "/ab", r#"cache-groups="a", "b""#).await;
        let fields = [("x-fields", r#"cache-group-invalidation="b"|cache-control=no-store"#)];
        ask(&shop, request(method, "/other", &fields)).await;
        assert!(is_stored(&other, "/ab").await, "{method}");
        ask(&shop, request("PUT", "/ab", &[])).await;
        assert_eq!(
            [is_stored(&other, "/ab").await, is_stored(&other, "/a").await],
            [false, true],
            "no cascade"
        );
    }
}

/// D2 (RFC 9875, 2): at least 32 groups of 32 characters.
#[tokio::test(start_paused = true)]
async fn a_response_may_belong_to_32_groups_of_32_characters() {
    let group = |n: usize| format!("\"{n:032}\"");
    let [shop, other] = processes(groups);
    let list = (0..32).map(group).collect::<Vec<_>>().join(", ");
    for n in [0, 31] {
        stored(&shop, "/a", &format!("cache-groups={list}")).await;
        let last =
            (0..32).rev().map(|at| group(if at == 0 { n } else { 100 + at })).collect::<Vec<_>>().join(", ");
        ask(&shop, request("DELETE", "/x", &[("x-fields", &format!("cache-group-invalidation={last}"))]))
            .await;
        assert!(!is_stored(&other, "/a").await, "{n}");
    }
    // More than max_tags: not stored, and never stored without some of its groups.
    let list = (0..65).map(group).collect::<Vec<_>>().join(", ");
    ask(&shop, request("GET", "/a", &[("x-fields", &format!("cache-groups={list}"))])).await;
    assert!(!is_stored(&other, "/a").await);
}

/// D5: a load that began before the invalidation is not stored.
#[tokio::test(start_paused = true)]
async fn an_invalidation_wins_over_a_running_load() {
    let inner = origin().held_separately();
    inner.gate.open();
    let [shop, other] = processes_of(&inner, groups);
    let running = send(&shop, request("GET", "/a", &[("x-fields", r#"cache-groups="a""#)]));
    inner.loads.reach(1).await;
    ask(&other, request("POST", "/upload", &[("x-fields", r#"cache-group-invalidation="a""#)])).await;
    inner.open_first();
    running.await.unwrap();
    assert!(!is_stored(&other, "/a").await);
}

#[tokio::test(start_paused = true)]
async fn without_the_setting_the_fields_have_no_effect() {
    let [shop, other] = processes(HttpPolicy::default);
    stored(&shop, "/a", r#"cache-groups="a""#).await;
    assert_eq!(ask(&shop, get("/a")).await.header("cache-groups"), Some(r#""a""#), "clients see the field");
    ask(&shop, request("POST", "/upload", &[("x-fields", r#"cache-group-invalidation="a""#)])).await;
    assert!(is_stored(&other, "/a").await);
}

/// D5: as for the target's own URI (RFC 9111, 4.4): after an error no change is known.
#[tokio::test(start_paused = true)]
async fn a_refused_change_invalidates_no_group() {
    for (status, stays) in [("403", true), ("500", true), ("303", false)] {
        let [shop, other] = processes(groups);
        stored(&shop, "/a", r#"cache-groups="a""#).await;
        let fields = [("x-fields", r#"cache-group-invalidation="a""#), ("x-status", status)];
        ask(&shop, request("POST", "/upload", &fields)).await;
        assert_eq!(is_stored(&other, "/a").await, stays, "{status}");
    }
}
