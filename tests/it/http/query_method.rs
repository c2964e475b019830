//! `HttpPolicy::query_method`: QUERY (RFC 10008). ROWS.md names the section of each requirement.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use stampede_guard::http::{Guarded, HttpPolicy};
use stampede_guard::{MemoryStore, PolicyBuilder, StampedeGuard};
use tokio::sync::mpsc::{self, UnboundedSender};
use tower::util::BoxCloneSyncService;
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::kit::{Boxed, Down, Inner, Req, Seen, policy, read, request, respond, secs, sent, settle, whole};
use crate::support::warnings::Warnings;

pub(super) type Site = Guarded<BoxCloneSyncService<Request<Body>, Response<Boxed>, Down>>;

pub(super) const KIND: (&str, &str) = ("content-type", "application/sql");

/// The inner service behind one that reads the bodies of axum's requests. What comes besides the content becomes a field: `x-trailers`,
/// `x-error`.
pub(super) fn of_axum(inner: &Inner) -> BoxCloneSyncService<Request<Body>, Response<Boxed>, Down> {
    let inner = inner.clone();
    BoxCloneSyncService::new(service_fn(move |request: Request<Body>| {
        let inner = inner.clone();
        async move {
            let (mut head, mut body) = request.into_parts();
            let mut content = Vec::new();
            while let Some(frame) = body.frame().await {
                match frame.map(Frame::into_data) {
                    Ok(Ok(data)) => content.extend_from_slice(&data),
                    Ok(Err(frame)) => {
                        let trailers = frame.into_trailers().expect("data or trailers");
                        head.headers.insert("x-trailers", trailers["x-last"].clone());
                    }
                    Err(error) => {
                        head.headers.insert("x-error", error.to_string().parse().unwrap());
                        break;
                    }
                }
            }
            inner.oneshot(Request::from_parts(head, Full::from(content))).await
        }
    }))
}

pub(super) fn content(request: &Req) -> String {
    let content = request.body().clone().collect().now_or_never().expect("it is whole").unwrap().to_bytes();
    String::from_utf8(content.into()).unwrap()
}

fn answer(n: usize, request: &Req) -> Response<Boxed> {
    let fields = ["x-trailers", "x-error"].map(|name| (name, sent(request, name)));
    let mut headers = vec![("cache-control", "max-age=600"), ("location", sent(request, "see"))];
    headers.extend(fields);
    respond(200, &headers, whole(format!("{n} {} {}", request.uri(), content(request))))
}

pub(super) fn origin() -> Inner {
    Inner::with(|n, request| Ok(answer(n, request)))
}

pub(super) fn http() -> HttpPolicy {
    HttpPolicy::default().authority("shop.example").query_method(true).query_content_limit(8)
}

/// Two processes on one store.
pub(super) fn processes(inner: &Inner, policy: impl Fn() -> PolicyBuilder) -> [(StampedeGuard, Site); 2] {
    let store = MemoryStore::new();
    [(); 2].map(|()| {
        let guard = StampedeGuard::new(store.clone()).with_policy(policy().build().unwrap());
        let site = guard.layer(of_axum(inner));
        (guard, site)
    })
}

pub(super) fn pair(inner: &Inner, http: impl Fn() -> HttpPolicy) -> [Site; 2] {
    processes(inner, || policy().http(http())).map(|(_, site)| site)
}

pub(super) fn query_of(uri: &str, headers: &[(&str, &str)], body: impl Into<Body>) -> Request<Body> {
    request("QUERY", uri, headers).map(|_| body.into())
}

pub(super) fn query(content: &'static str) -> Request<Body> {
    query_of("/p", &[KIND], content)
}

fn empty(method: &str, uri: &str, headers: &[(&str, &str)]) -> Request<Body> {
    request(method, uri, headers).map(|_| Body::empty())
}

pub(super) async fn ask(site: &Site, request: Request<Body>) -> Seen {
    read(site.clone().oneshot(request).await.expect("a response")).await
}

pub(super) fn send(site: &Site, request: Request<Body>) -> tokio::task::JoinHandle<Seen> {
    let site = site.clone();
    tokio::spawn(async move { ask(&site, request).await })
}

async fn is_hit(site: &Site, request: Request<Body>) -> bool {
    let (mut head, body) = request.into_parts();
    head.headers.insert("cache-control", "only-if-cached".parse().unwrap());
    ask(site, Request::from_parts(head, body)).await.status == 200
}

/// Frames of a request's body, which the test sends. Dropping it ends the body.
pub(super) struct Frames(pub(super) UnboundedSender<Result<Frame<Bytes>, Down>>);

impl Frames {
    pub(super) fn new() -> (Self, Body) {
        let (sender, mut frames) = mpsc::unbounded_channel();
        let body = StreamBody::new(futures_util::stream::poll_fn(move |cx| frames.poll_recv(cx)));
        (Self(sender), Body::new(body))
    }

    pub(super) fn data(self, text: &'static str) -> Self {
        let _ = self.0.send(Ok(Frame::data(Bytes::from_static(text.as_bytes()))));
        self
    }

    pub(super) fn trailers(self, value: &'static str) -> Self {
        let trailers = HeaderMap::from_iter([("x-last".parse().unwrap(), value.parse().unwrap())]);
        let _ = self.0.send(Ok(Frame::trailers(trailers)));
        self
    }

    pub(super) fn fail(self) {
        let _ = self.0.send(Err(Down("reset".to_owned())));
    }
}

/// What a QUERY's handler got, and why it was not looked up; each twice, by two processes.
#[track_caller]
pub(super) fn passed(seen: &[Seen; 2], detail: &str, text: &str) {
    for (n, seen) in seen.iter().enumerate() {
        assert_eq!(seen.remark(), format!("fwd=bypass; detail={detail}"));
        assert_eq!(seen.text(), format!("{} /p {text}", n + 1), "{detail}");
    }
}

pub(super) async fn both(http: impl Fn() -> HttpPolicy, request: impl Fn() -> Request<Body>) -> [Seen; 2] {
    let [site, other] = pair(&origin(), http);
    [ask(&site, request()).await, ask(&other, request()).await]
}

pub(super) fn streamed(frames: &[&'static str]) -> Body {
    let (feed, body) = Frames::new();
    frames.iter().fold(feed, |feed, text| feed.data(text));
    body
}

/// E2, E3 (RFC 10008, 2.7): the content and its fields are in the key, and only a QUERY is answered.
#[tokio::test(start_paused = true)]
async fn a_stored_response_answers_equal_queries_only() {
    let inner = origin();
    let [site, other] = pair(&inner, http);
    let first = ask(&site, query("SELECT a")).await;
    assert_eq!((first.text(), &*first.remark()), ("1 /p SELECT a", "fwd=uri-miss; stored; ttl=600"));
    for site in [&site, &other] {
        let hit = ask(site, query("SELECT a")).await;
        assert_eq!((hit.text(), &*hit.remark()), ("1 /p SELECT a", "hit; ttl=600"));
    }
    let of = |headers: &[(&str, &str)]| query_of("/p", headers, "SELECT a");
    let others = [
        query("SELECT b"),
        query("select a"),
        query(""),
        query_of("/p?a", &[KIND], "SELECT a"),
        query_of("/q", &[KIND], "SELECT a"),
        of(&[("content-type", "application/SQL")]),
        of(&[("content-type", "application/sql;charset=utf-8")]),
        of(&[("content-type", "application/sql; charset=utf-8")]),
        of(&[KIND, ("content-encoding", "identity")]),
        of(&[KIND, ("content-language", "en")]),
        of(&[KIND, ("content-location", "/x")]),
        of(&[KIND, ("x-forwarded-proto", "https")]),
        query_of("/%70", &[KIND], "SELECT a"),
        empty("GET", "/p", &[KIND]),
    ];
    let count = others.len();
    for (at, another) in others.into_iter().enumerate() {
        let (head, body) = another.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let another = || Request::from_parts(head.clone(), Body::from(body.clone()));
        let miss = ask(&other, another()).await;
        assert!(miss.text().starts_with(&format!("{} ", at + 2)), "{at}: {}", miss.text());
        assert!(miss.text().ends_with(std::str::from_utf8(&body).unwrap()), "{at}: {}", miss.text());
        assert_eq!(ask(&site, another()).await.text(), miss.text(), "{at} is stored");
    }
    assert_eq!(ask(&site, query("SELECT a")).await.text(), first.text());
    // A HEAD finds the GET's response, and a QUERY stores none for it.
    let [site, _] = pair(&origin(), http);
    ask(&site, query("SELECT a")).await;
    assert!(!is_hit(&site, empty("GET", "/p", &[])).await);
    assert!(ask(&site, empty("HEAD", "/p", &[])).await.remark().starts_with("fwd="));
    assert_eq!(inner.calls(), count + 1);
}

#[tokio::test(start_paused = true)]
async fn equal_queries_at_once_are_one_load_in_the_fleet() {
    let inner = origin().held();
    let sites = pair(&inner, http);
    let waiting: Vec<_> = (0..40).map(|n| send(&sites[n % 2], query(["a", "b"][n / 20]))).collect();
    inner.loads.reach(2).await;
    settle().await;
    inner.gate.open();
    for (n, seen) in waiting.into_iter().enumerate() {
        assert!(seen.await.unwrap().text().ends_with(["a", "b"][n / 20]));
    }
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_rules_for_requests_are_those_for_a_get() {
    for (field, detail) in [
        (("authorization", "x"), "credentials"),
        (("cookie", "a=b"), "credentials"),
        (("x-http-method-override", "DELETE"), "unkeyed-header"),
        (("cache-control", "no-store"), "no-store"),
        (("if-match", "\"a\""), "conditional"),
        (("expect", "x"), "expect"),
    ] {
        passed(&both(http, || query_of("/p", &[KIND, field], "abc")).await, detail, "abc");
    }
    // What the key leaves out of the URI and the cookies, no load sees.
    let http = || http().ignore_query(["utm_*"]).cookies(["session"]);
    let inner = Inner::with(|n, request| {
        assert_eq!(sent(request, "cookie"), "");
        Ok(answer(n, request))
    });
    let [site, other] = pair(&inner, http);
    let seen = ask(&site, query_of("/p?utm_source=x", &[KIND, ("cookie", "_ga=1")], "a")).await;
    assert_eq!(seen.text(), "1 /p a");
    assert!(ask(&other, query_of("/p?utm_source=y", &[KIND], "a")).await.remark().starts_with("hit"));
}

/// E7 (RFC 9111, 4.4): all QUERYs of the URI, whatever their content, in each process, copies in memory included.
#[tokio::test(start_paused = true)]
async fn what_invalidates_the_get_of_a_uri_invalidates_its_queries() {
    for by in 0..6 {
        let inner = origin();
        let of = || policy().http(http()).local_for(Duration::MAX).fresh_for(secs(600));
        let [(guard, site), (second, other)] = processes(&inner, of);
        for guard in [&guard, &second] {
            guard.connect().await.unwrap();
        }
        let queries = || {
            let kinds = ["a/b", "c/d"].into_iter().flat_map(|kind| ["x", "y"].map(|content| (kind, content)));
            kinds.map(|(kind, content)| query_of("/p", &[("content-type", kind)], content))
        };
        let elsewhere = || [query_of("/p?q", &[KIND], "x"), query_of("/pq", &[KIND], "x")];
        let lone = || query_of("/p", &[KIND, ("x-forwarded-host", "evil.example")], "x");
        for request in queries().chain(elsewhere()).chain([lone(), empty("GET", "/p", &[])]) {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            for site in [&site, &other, &site, &other] {
                ask(site, Request::from_parts(head.clone(), Body::from(body.clone()))).await;
            }
        }
        assert_eq!(inner.calls(), 8);
        let key = guard.http_key(&empty("GET", "/p", &[])).unwrap();
        match by {
            0 => drop(ask(&site, empty("POST", "/p", &[])).await),
            1 => drop(ask(&site, empty("POST", "/all", &[("see", "/p")])).await),
            2 => drop(ask(&site, empty("PUT", "/%70", &[])).await),
            3 => guard.invalidate_path("/p").await.unwrap(),
            4 => guard.invalidation().path("/p").send().await.unwrap(),
            _ => guard.invalidate(key).await.unwrap(),
        }
        for site in [&site, &other] {
            for request in queries().chain([lone(), empty("GET", "/p", &[])]) {
                assert!(!is_hit(site, request).await, "{by}");
            }
            for request in elsewhere() {
                assert!(is_hit(site, request).await, "{by}");
            }
        }
    }
}

/// E7
#[tokio::test(start_paused = true)]
async fn an_invalidation_wins_over_the_running_load_of_a_query() {
    for by_method in [false, true] {
        let inner = origin().held_separately();
        inner.gate.open();
        let [(_, site), (guard, other)] = processes(&inner, || policy().http(http()));
        let running = send(&site, query("a"));
        inner.loads.reach(1).await;
        match by_method {
            true => drop(ask(&other, empty("DELETE", "/p", &[])).await),
            false => guard.invalidate_path("/p").await.unwrap(),
        }
        inner.open_first();
        running.await.unwrap();
        for site in [&site, &other] {
            assert!(!is_hit(site, query("a")).await);
        }
    }
}

/// E7: a QUERY is safe. Its response invalidates nothing, whatever its `Location` and `Content-Location` (RFC 10008, 2.3 and 2.4).
#[tokio::test(start_paused = true)]
async fn a_query_invalidates_nothing() {
    let [site, other] = pair(&origin(), http);
    ask(&site, empty("GET", "/p", &[])).await;
    ask(&site, empty("GET", "/q", &[])).await;
    for request in [query_of("/p", &[KIND, ("see", "/q")], "a"), query_of("/p", &[("see", "/q")], "a")] {
        ask(&site, request).await;
    }
    assert!(is_hit(&other, empty("GET", "/p", &[])).await && is_hit(&other, empty("GET", "/q", &[])).await);
}

/// As `bypass.rs` says for each method.
#[tokio::test(start_paused = true)]
async fn without_the_setting_a_query_passes_as_other_methods_do() {
    for http in [HttpPolicy::default, HttpPolicy::strict, HttpPolicy::private] {
        let [site, other] = pair(&origin(), http);
        for (n, site) in [&site, &other].into_iter().enumerate() {
            let seen = ask(site, query("abc")).await;
            assert_eq!((seen.text(), &*seen.remark()), (&*format!("{} /p abc", n + 1), "fwd=method"));
        }
    }
    // With it, each kind of policy stores.
    for http in [HttpPolicy::strict, HttpPolicy::private] {
        assert!(both(|| http().query_method(true), || query("abc")).await[1].remark().starts_with("hit"));
    }
}

/// A guard that is off or on trial must not delay a request by reading its content.
#[tokio::test(start_paused = true)]
async fn a_guard_that_is_off_or_on_trial_reads_no_content() {
    for shadow in [false, true] {
        let [(guard, site), _] = processes(&origin(), || policy().http(http()).shadow(shadow));
        guard.set_bypass(!shadow);
        for n in 1..=2 {
            let (feed, body) = Frames::new();
            drop(feed.data("abc"));
            let seen = ask(&site, query_of("/p", &[KIND], body)).await;
            assert_eq!(seen.text(), format!("{n} /p abc"), "{shadow}");
            let remark = if shadow { "fwd=method" } else { "fwd=bypass; detail=switched-off" };
            assert_eq!(seen.remark(), remark);
        }
    }
}

/// E4: the content goes with each load, in the background too.
#[tokio::test(start_paused = true)]
async fn a_refresh_in_the_background_has_the_content() {
    let inner = Inner::with(|n, request| {
        let headers = [("cache-control", "max-age=10, stale-while-revalidate=60")];
        Ok(respond(200, &headers, whole(format!("{n} {}", content(request)))))
    });
    let [site, other] = pair(&inner, http);
    ask(&site, query("abc")).await;
    tokio::time::sleep(secs(11)).await;
    assert_eq!(ask(&other, query("abc")).await.text(), "1 abc", "stale, at once");
    settle().await;
    let hit = ask(&site, query("abc")).await;
    assert_eq!((hit.text(), inner.calls()), ("2 abc", 2), "{}", hit.remark());
}

/// The audit of a hit loads with the content of its request, and finds the same response.
#[tokio::test(start_paused = true)]
async fn an_audit_has_the_content() {
    let inner = Inner::with(|_, request| Ok(respond(200, &[], whole(content(request)))));
    let [(guard, site), _] = processes(&inner, || policy().http(http()).audit(1.0));
    for _ in 0..2 {
        ask(&site, query("abc")).await;
    }
    // By then the audit has ended, with its grace.
    tokio::time::sleep(secs(3)).await;
    assert_eq!((inner.calls(), guard.stats().audits_matched), (2, 1));
}

/// E5, E6 (RFC 10008, 2.6 and 2.8): conditions and ranges as for a GET. A validation, and its repetition after a 304 about something else,
/// have the content.
#[tokio::test(start_paused = true)]
async fn conditions_and_ranges_are_answered_from_the_stored_response() {
    let inner = Inner::with(|n, request| {
        assert_eq!(content(request), "abc", "call {n}");
        let headers = |tag| [("etag", tag), ("cache-control", "max-age=10")];
        Ok(match (n, sent(request, "if-none-match")) {
            (1, "") => respond(200, &headers("\"a\""), whole("0123456789")),
            (2, "\"a\"") => respond(304, &headers("\"a\""), Boxed::default()),
            (3, "\"a\"") => respond(304, &headers("\"b\""), Boxed::default()),
            (4, "") => respond(200, &headers("\"b\""), whole("new")),
            call => panic!("{call:?}"),
        })
    });
    let [site, other] = pair(&inner, http);
    let of = |field| query_of("/p", &[KIND, field], "abc");
    ask(&site, query("abc")).await;
    assert_eq!(ask(&other, of(("if-none-match", "\"a\""))).await.status, 304);
    assert_eq!(ask(&other, of(("if-none-match", "\"x\""))).await.text(), "0123456789");
    let part = ask(&other, of(("range", "bytes=2-4"))).await;
    assert_eq!((part.status, part.text()), (206, "234"));
    assert_eq!(inner.calls(), 1);
    tokio::time::sleep(secs(11)).await;
    let validated = ask(&site, query("abc")).await;
    assert_eq!(
        (validated.text(), &*validated.remark()),
        ("0123456789", "fwd=stale; fwd-status=304; stored; ttl=10")
    );
    tokio::time::sleep(secs(11)).await;
    assert_eq!(ask(&other, query("abc")).await.text(), "new");
    assert_eq!(inner.calls(), 4);
}

/// Variants by `Vary`, tags and path tags are those of any response.
#[tokio::test(start_paused = true)]
async fn variants_and_path_tags_of_a_query_are_those_of_any_response() {
    let inner = Inner::with(|n, request| {
        let language = sent(request, "accept-language");
        let headers = [("vary", "accept-language"), ("cache-control", "max-age=600")];
        Ok(respond(200, &headers, whole(format!("{n} {language}"))))
    });
    let [(guard, site), (_, other)] = processes(&inner, || policy().http(http().path_tags(true)));
    let of = |language| query_of("/p?a=b", &[KIND, ("accept-language", language)], "abc");
    for (language, text) in [("de", "1 de"), ("en", "2 en"), ("de", "1 de"), ("en", "2 en")] {
        assert_eq!(ask(&site, of(language)).await.text(), text);
        assert_eq!(ask(&other, of(language)).await.text(), text);
    }
    guard.invalidate_path("/p").await.unwrap();
    for language in ["de", "en"] {
        assert!(!is_hit(&other, of(language)).await);
    }
}

/// E8 (RFC 10008, 4): the content is in no log, no field of the response and no metric.
#[tokio::test(start_paused = true)]
async fn the_content_is_in_no_log_and_no_field() {
    const SECRET: &str = "s3cr3t";
    let events = Warnings::up_to(tracing::Level::TRACE);
    let _listening = events.listen();
    let inner = Inner::with(|n, _| Ok(respond(if n == 3 { 500 } else { 200 }, &[], whole(n.to_string()))));
    let [(guard, site), _] = processes(&inner, || policy().http(http().expose_key(true)));
    for request in [
        query(SECRET),
        query(SECRET),
        query_of("/p", &[], SECRET),
        query_of("/e", &[KIND], SECRET),
        query_of("/p", &[KIND], streamed(&[SECRET, "0123456789"])),
        query_of("/p", &[KIND, ("content-length", "99")], SECRET),
    ] {
        let seen = ask(&site, request).await;
        assert!(!format!("{:?}", seen.headers).contains(SECRET), "{:?}", seen.headers);
        settle().await;
    }
    assert!(!format!("{:?} {events:?}", guard.stats()).contains(SECRET));
    assert!(format!("{events:?}").contains("content-too-long"), "the events are captured");
}

#[cfg(feature = "redis")]
mod on_redis {
    use super::*;
    use crate::support::monitor::Monitor;
    use crate::support::probe::eventually;
    use crate::support::redis_server::RedisServer;

    async fn on(server: &RedisServer, inner: &Inner) -> [(StampedeGuard, Site); 2] {
        let of = || policy().http(http()).lease(secs(120)).coordination_budget(secs(4));
        let mut both = Vec::new();
        for _ in 0..2 {
            let client = redis::Client::open(server.minimal_user()).unwrap();
            let guard = StampedeGuard::new(client).with_policy(of().build().unwrap());
            crate::redis::connects(&guard).await;
            let site = guard.layer(of_axum(inner));
            both.push((guard, site));
        }
        both.try_into().expect("two")
    }

    #[tokio::test]
    async fn on_redis_two_processes_share_the_responses_to_a_query_and_their_invalidation() {
        let (server, inner) = (RedisServer::start(), origin());
        let [(_, site), (guard, other)] = on(&server, &inner).await;
        for content in ["a", "b"] {
            let first = ask(&site, query(content)).await;
            let hit = ask(&other, query(content)).await;
            assert_eq!(hit.text(), first.text());
            assert!(hit.remark().starts_with("hit"), "{}", hit.remark());
        }
        ask(&site, query_of("/q", &[KIND], "a")).await;
        ask(&other, empty("POST", "/p", &[])).await;
        for site in [&site, &other] {
            assert!(!is_hit(site, query("a")).await && !is_hit(site, query("b")).await);
            assert!(is_hit(site, query_of("/q", &[KIND], "a")).await);
        }
        guard.invalidate_path("/q").await.unwrap();
        assert!(!is_hit(&site, query_of("/q", &[KIND], "a")).await);
    }

    #[tokio::test]
    async fn on_redis_equal_queries_of_two_processes_are_one_load() {
        let (server, inner) = (RedisServer::start(), origin().held());
        let both = on(&server, &inner).await;
        let waiting: Vec<_> = (0..20).map(|n| send(&both[n % 2].1, query("a"))).collect();
        inner.loads.reach(1).await;
        inner.gate.open();
        for seen in waiting {
            assert_eq!(seen.await.unwrap().text(), "1 /p a");
        }
        assert_eq!(inner.calls(), 1);
    }

    /// A hit is one command, and the content is in none.
    #[tokio::test]
    async fn on_redis_a_hit_is_one_command_without_the_content() {
        let (server, inner) =
            (RedisServer::start(), Inner::with(|n, _| Ok(respond(200, &[], whole(n.to_string())))));
        let [(guard, site), _] = on(&server, &inner).await;
        let monitor = Monitor::start(&server);
        ask(&site, query("s3cr3t")).await;
        eventually("nothing runs", secs(10), async || guard.stats().tasks == 0).await;
        let load = monitor.finish();
        assert!(!load.lines.iter().any(|line| line.contains("s3cr3t")), "{:?}", load.lines);
        let monitor = Monitor::start(&server);
        assert!(ask(&site, query("s3cr3t")).await.remark().starts_with("hit"));
        let hit = monitor.finish().without(["ping", "time"]);
        assert_eq!(hit.total, 1, "{:?}", hit.lines);
        assert!(hit.lines[0].contains("MGET"), "{:?}", hit.lines);
    }
}

#[cfg(feature = "reqwest")]
mod around_reqwest {
    use axum::Router;
    use axum::routing::any;
    use reqwest::Client;
    use reqwest_middleware::ClientBuilder;
    use stampede_guard::http::reqwest::ReqwestService;

    use super::super::sockets::serve;
    use super::*;
    use crate::support::gate::Counter;

    #[tokio::test]
    async fn both_forms_of_the_guard_around_reqwest_store_queries() {
        let calls = Counter::default();
        let counted = calls.clone();
        let echo = move |body: String| {
            drop(counted.start());
            async move { ([("cache-control", "max-age=60")], body) }
        };
        let url = format!("http://{}/p", serve(Router::new().route("/p", any(echo))).await);
        let http = HttpPolicy::private().query_method(true).query_content_limit(8);
        let guard = StampedeGuard::in_memory().with_policy(policy().http(http).build().unwrap());
        let client = ClientBuilder::new(Client::new()).with(guard.reqwest(Client::new()).unwrap()).build();
        let service = guard.layer(ReqwestService::new(Client::new()).unwrap());
        let method = || reqwest::Method::from_bytes(b"QUERY").unwrap();
        for (content, by_now) in
            [("abc", 1), ("abc", 1), ("def", 2), ("longer than 8", 4), ("longer than 8", 6)]
        {
            let built = || client.request(method(), &url).header(KIND.0, KIND.1).body(content);
            assert_eq!(built().send().await.unwrap().text().await.unwrap(), content);
            let request =
                Client::new().request(method(), &url).header(KIND.0, KIND.1).body(content).build().unwrap();
            let seen = read(service.clone().oneshot(request.try_into().unwrap()).await.unwrap()).await;
            assert_eq!((seen.text(), calls.started()), (content, by_now));
        }
    }
}
