//! The guard around reqwest, in both of its forms and against a real server. Both must keep the layer's promises about leaks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Redirect, Response};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http_body_util::{BodyExt as _, Full};
use reqwest::{Body, Client, Method};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use stampede_guard::http::reqwest::ReqwestService;
use stampede_guard::http::{Guarded, HttpPolicy};
use stampede_guard::{ErrorKind, MemoryStore, StampedeGuard};
use tower::{Layer as _, ServiceBuilder, ServiceExt as _};

use super::kit::{policy, secs};
use super::sockets::serve;
use crate::support::gate::{Counter, Gate};
use crate::support::probe::eventually;

/// `a text that is compressed on the way`, by gzip.
const GZIP: &[u8] = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\x4b\x54\x28\x49\xad\x28\x51\x28\xc9\x48\x2c\x51\xc8\x2c\x56\x48\xce\xcf\
    \x2d\x28\x4a\x2d\x2e\x4e\x4d\x51\xc8\xcf\x03\x8a\xa6\x2a\x94\x27\x56\x02\x00\x1a\xe0\xa5\xf0\x24\x00\x00\x00";

/// An API that counts its requests by method and path. A path that begins with `/held` waits at the gate.
#[derive(Clone)]
struct Api {
    counts: Arc<Mutex<HashMap<String, usize>>>,
    started: Counter,
    gate: Gate,
    url: String,
}

impl Api {
    async fn start() -> Self {
        let mut api = Self {
            counts: Arc::default(),
            started: Counter::default(),
            gate: Gate::closed(),
            url: String::new(),
        };
        let served = api.clone();
        let answer = move |request: Request| served.clone().answer(request);
        api.url = format!("http://{}", serve(Router::new().fallback(answer)).await);
        api
    }

    async fn answer(self, request: Request) -> Response {
        let (head, body) = request.into_parts();
        let n = {
            let mut counts = self.counts.lock().unwrap();
            let count = counts.entry(format!("{} {}", head.method, head.uri.path())).or_default();
            *count += 1;
            *count
        };
        let text = |name: HeaderName| {
            head.headers.get(name).map_or(String::new(), |value| value.to_str().unwrap().to_owned())
        };
        let fresh = (header::CACHE_CONTROL, "max-age=60");
        match head.uri.path() {
            // As with a careless API: no header says that this response is one user's.
            "/me" => ([fresh], format!("{}{} {n}", text(header::AUTHORIZATION), text(header::COOKIE)))
                .into_response(),
            "/language" => {
                let headers = [fresh, (header::VARY, "accept-language")];
                (headers, format!("{} {n}", text(header::ACCEPT_LANGUAGE))).into_response()
            }
            "/private" => ([(header::CACHE_CONTROL, "private, max-age=60")], n.to_string()).into_response(),
            "/no-store" => ([(header::CACHE_CONTROL, "no-store")], n.to_string()).into_response(),
            "/cookie" => ([fresh, (header::SET_COOKIE, "session=7f3a")], n.to_string()).into_response(),
            "/moved" => ([fresh], Redirect::temporary("/price")).into_response(),
            "/stale" => ([(header::CACHE_CONTROL, "max-age=0, stale-while-revalidate=60")], n.to_string())
                .into_response(),
            "/gzip" if text(header::ACCEPT_ENCODING).contains("gzip") => {
                let coded = (header::CONTENT_ENCODING, "gzip");
                ([fresh, coded, (header::VARY, "accept-encoding")], GZIP).into_response()
            }
            "/echo" => ([fresh], body).into_response(),
            "/query" => ([fresh], head.uri.query().unwrap_or("none").to_owned()).into_response(),
            path if path.starts_with("/held") => {
                let running = self.started.start();
                self.gate.pass().await;
                drop(running);
                ([fresh], n.to_string()).into_response()
            }
            _ => ([fresh], n.to_string()).into_response(),
        }
    }

    fn requests(&self, line: &str) -> usize {
        self.counts.lock().unwrap().get(line).copied().unwrap_or(0)
    }

    fn request(&self, method: Method, path: &str, headers: &[(HeaderName, &str)]) -> reqwest::Request {
        let url = format!("{}{path}", self.url).parse().unwrap();
        let mut request = reqwest::Request::new(method, url);
        for (name, value) in headers {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        request
    }

    fn get(&self, path: &str) -> reqwest::Request {
        self.request(Method::GET, path, &[])
    }
}

#[derive(Clone)]
enum Form {
    Tower(Guarded<ReqwestService>),
    Middleware(ClientWithMiddleware),
}

impl Form {
    fn name(&self) -> &'static str {
        match self {
            Self::Tower(_) => "tower",
            Self::Middleware(_) => "middleware",
        }
    }

    async fn send(&self, request: reqwest::Request) -> reqwest_middleware::Result<reqwest::Response> {
        match self {
            Self::Tower(service) => {
                let response = service.clone().oneshot(request.try_into()?).await?;
                Ok(response.map(Body::wrap).into())
            }
            Self::Middleware(client) => client.execute(request).await,
        }
    }

    /// Sends a request. Returns the text of the response, and what the guard says about the response in `Cache-Status`.
    async fn ask(&self, request: reqwest::Request) -> (String, String) {
        let response = self.send(request).await.unwrap();
        let status = response.headers()[header::CACHE_STATUS].to_str().unwrap();
        let remark = status.strip_prefix("stampede-guard; ").unwrap().to_owned();
        (response.text().await.unwrap(), remark)
    }

    async fn text(&self, request: reqwest::Request) -> String {
        self.ask(request).await.0
    }
}

/// Both forms around this client. Each has its own store.
fn both_with(client: &Client, http: HttpPolicy) -> [Form; 2] {
    let guard = || StampedeGuard::in_memory().with_policy(policy().http(http.clone()).build().unwrap());
    let tower = guard().layer(ReqwestService::new(client.clone()).unwrap());
    let middleware =
        ClientBuilder::new(client.clone()).with(guard().reqwest(client.clone()).unwrap()).build();
    [Form::Tower(tower), Form::Middleware(middleware)]
}

fn both() -> [Form; 2] {
    both_with(&Client::new(), HttpPolicy::default())
}

#[tokio::test]
async fn requests_at_once_are_one_load_and_later_ones_are_hits() {
    for form in both() {
        let api = Api::start().await;
        let clients: Vec<_> = (0..20)
            .map(|_| {
                let (form, request) = (form.clone(), api.get("/held/price"));
                tokio::spawn(async move { form.text(request).await })
            })
            .collect();
        api.started.reach(1).await;
        api.gate.open();
        for one in clients {
            assert_eq!(one.await.unwrap(), "1", "{}", form.name());
        }
        let (text, remark) = form.ask(api.get("/held/price")).await;
        assert!(text == "1" && remark.starts_with("hit; ttl="), "{}: {text}, {remark}", form.name());
        assert_eq!(api.requests("GET /held/price"), 1);
    }
}

/// In the tower form a hit has no URL, as no response of `http` has one.
#[tokio::test]
async fn the_middleware_gives_each_response_the_url_of_its_request() {
    let ([_, form], api) = (both(), Api::start().await);
    for _ in 0..2 {
        let response = form.send(api.get("/price?a=b#c")).await.unwrap();
        assert_eq!(response.url().as_str(), format!("{}/price?a=b#c", api.url), "as without the guard");
    }
}

#[tokio::test]
async fn the_api_sees_the_query_of_the_key() {
    for form in both_with(&Client::new(), HttpPolicy::default().ignore_query(["utm_*"]).sort_query(true)) {
        let api = Api::start().await;
        for path in ["/query?b=2&utm_source=x&a=1", "/query?a=1&b=2&utm%5Fsource=y"] {
            assert_eq!(form.text(api.get(path)).await, "a=1&b=2", "{}", form.name());
        }
        assert_eq!(api.requests("GET /query"), 1, "{}", form.name());
        let bypassing = api.request(Method::GET, "/query?utm_source=x", &[(header::AUTHORIZATION, "ann")]);
        assert_eq!(form.text(bypassing).await, "utm_source=x", "{}", form.name());
    }
}

#[tokio::test]
async fn a_response_to_credentials_goes_to_its_own_caller_only() {
    for form in both() {
        let api = Api::start().await;
        for (n, (name, user)) in
            [(header::AUTHORIZATION, "ann"), (header::COOKIE, "bob"), (header::AUTHORIZATION, "ann")]
                .into_iter()
                .enumerate()
        {
            let (text, remark) = form.ask(api.request(Method::GET, "/me", &[(name, user)])).await;
            assert_eq!((text, &*remark), (format!("{user} {}", n + 1), "fwd=bypass; detail=credentials"));
        }
        assert_eq!(form.text(api.get("/me")).await, " 4", "{}", form.name());
    }
}

#[tokio::test]
async fn a_private_policy_separates_users() {
    for form in both_with(&Client::new(), HttpPolicy::private()) {
        let api = Api::start().await;
        for (user, n) in [("ann", 1), ("ann", 1), ("bob", 2), ("ann", 1)] {
            let request = api.request(Method::GET, "/me", &[(header::AUTHORIZATION, user)]);
            assert_eq!(form.text(request).await, format!("{user} {n}"), "{}", form.name());
        }
        assert_eq!(form.text(api.get("/me")).await, " 3", "{}", form.name());
    }
}

#[tokio::test]
async fn a_response_that_is_one_users_is_not_stored() {
    for form in both() {
        let api = Api::start().await;
        for path in ["/private", "/no-store", "/cookie"] {
            for n in 1..=2 {
                assert_eq!(form.text(api.get(path)).await, n.to_string(), "{}: {path}", form.name());
            }
        }
    }
}

#[test]
fn a_client_that_adds_credentials_behind_the_guard_is_refused() {
    let account = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static("Bearer 1234"))]);
    let clients = [
        (Client::builder().default_headers(account), "authorization"),
        (Client::builder().cookie_store(true), "cookie"),
    ];
    for (client, named) in clients {
        let client = client.build().unwrap();
        let chain = ClientWithMiddleware::from(client.clone());
        let refusals = [
            ReqwestService::new(client.clone()).unwrap_err(),
            ReqwestService::new(chain.clone()).unwrap_err(),
            StampedeGuard::in_memory().reqwest(client).unwrap_err(),
            StampedeGuard::in_memory().reqwest(chain).unwrap_err(),
        ];
        for error in refusals {
            assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
            let text = error.to_string();
            assert!(text.contains(named) && text.contains("before they reach the guard"), "{text}");
            assert!(!text.contains("1234"), "{text}");
        }
    }
}

/// Services with different default request headers share one store, as processes do. The middleware sets its own default headers; with
/// `tower`, a layer outside of the guard sets them.
#[tokio::test]
async fn default_headers_before_the_guard_are_part_of_keys_and_of_variants() {
    for (path, name, http) in [
        ("/me", header::AUTHORIZATION, HttpPolicy::private()),
        ("/language", header::ACCEPT_LANGUAGE, HttpPolicy::default()),
    ] {
        let (api, store, client) = (Api::start().await, MemoryStore::new(), Client::new());
        let policy = policy().http(http).build().unwrap();
        for (value, n) in [("de", 1), ("fr", 3), ("de", 1)] {
            let guard = StampedeGuard::new(store.clone()).with_policy(policy.clone());
            let headers = HeaderMap::from_iter([(name.clone(), HeaderValue::from_static(value))]);
            let middleware = guard.reqwest(client.clone()).unwrap().default_headers(headers.clone());
            let middleware = ClientBuilder::new(client.clone()).with(middleware).build();
            assert_eq!(
                Form::Middleware(middleware.clone()).text(api.get(path)).await,
                format!("{value} {n}")
            );
            let own = Form::Middleware(middleware)
                .text(api.request(Method::GET, path, &[(name.clone(), "own")]))
                .await;
            assert!(own.starts_with("own "), "the request's header counts: {own}");
        }
        for (value, n) in [("es", 4), ("it", 5), ("es", 4), ("de", 1)] {
            let guard = StampedeGuard::new(store.clone()).with_policy(policy.clone());
            let name = name.clone();
            let client = ServiceBuilder::new()
                .map_request(move |mut request: http::Request<Body>| {
                    request.headers_mut().insert(name.clone(), HeaderValue::from_static(value));
                    request
                })
                .layer(guard)
                .service(ReqwestService::new(client.clone()).unwrap());
            let response = client.oneshot(api.get(path).try_into().unwrap()).await.unwrap();
            let text = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(text, format!("{value} {n}"));
        }
    }
}

/// RFC 9111, 2: a response belongs to its target URI, which is the one at the end of the redirects.
#[tokio::test]
async fn a_response_behind_a_redirect_is_neither_stored_nor_shared() {
    for form in both() {
        let api = Api::start().await;
        for n in 1..=2 {
            let response = form.send(api.get("/moved")).await.unwrap();
            assert_eq!(response.url().path(), "/price", "{}", form.name());
            let remark = response.headers()[header::CACHE_STATUS].to_str().unwrap().to_owned();
            assert!(remark.ends_with("; detail=do-not-store"), "{remark}");
            assert_eq!(response.text().await.unwrap(), n.to_string(), "{}", form.name());
        }
        assert_eq!((api.requests("GET /moved"), api.requests("GET /price")), (2, 2));
        for _ in 0..2 {
            assert_eq!(form.text(api.get("/price")).await, "3", "{}: stored under its own URI", form.name());
        }
        // A HEAD that was redirected does not update the stored response either.
        form.send(api.request(Method::HEAD, "/moved", &[])).await.unwrap();
        assert_eq!(form.text(api.get("/price")).await, "3");
    }
}

#[tokio::test]
async fn a_redirect_that_the_client_does_not_follow_is_a_response_like_any_other() {
    let client = Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    for form in both_with(&client, HttpPolicy::default()) {
        let api = Api::start().await;
        for _ in 0..2 {
            let response = form.send(api.get("/moved")).await.unwrap();
            assert_eq!(
                (response.status().as_u16(), &response.headers()[header::LOCATION]),
                (307, &HeaderValue::from_static("/price"))
            );
        }
        assert_eq!((api.requests("GET /moved"), api.requests("GET /price")), (1, 0), "{}", form.name());
    }
}

/// reqwest asks for gzip by itself, and removes `Content-Encoding` and `Content-Length`.
#[tokio::test]
async fn a_body_that_the_client_decompresses_is_stored_as_it_is_read() {
    for form in both() {
        let api = Api::start().await;
        for start in ["fwd=uri-miss; stored", "hit"] {
            let response = form.send(api.get("/gzip")).await.unwrap();
            assert!(!response.headers().contains_key(header::CONTENT_ENCODING));
            let remark = response.headers()[header::CACHE_STATUS].to_str().unwrap().to_owned();
            assert!(remark.starts_with(&format!("stampede-guard; {start}")), "{}: {remark}", form.name());
            assert_eq!(response.text().await.unwrap(), "a text that is compressed on the way");
        }
        // reqwest also decodes for a caller that sets `Accept-Encoding: gzip`: that is another variant with the same text.
        let coded = api.request(Method::GET, "/gzip", &[(header::ACCEPT_ENCODING, "gzip")]);
        assert_eq!(form.text(coded).await, "a text that is compressed on the way", "{}", form.name());
        assert_eq!(api.requests("GET /gzip"), 2);
    }
}

#[tokio::test]
async fn a_request_with_a_body_reaches_the_api_whole_and_unsafe_methods_invalidate() {
    for form in both() {
        let api = Api::start().await;
        for n in 1..=2 {
            // The body of this request cannot be sent twice.
            let mut request = api.request(Method::GET, "/echo", &[]);
            *request.body_mut() = Some(Body::wrap(Full::new(bytes::Bytes::from("once"))));
            let (text, remark) = form.ask(request).await;
            assert_eq!((&*text, &*remark), ("once", "fwd=bypass; detail=body"), "{}", form.name());
            assert_eq!(api.requests("GET /echo"), n);
        }
        assert_eq!(form.text(api.get("/price")).await, "1");
        let mut change = api.request(Method::PUT, "/price", &[]);
        *change.body_mut() = Some("42 coins".into());
        form.send(change).await.unwrap();
        assert_eq!(form.text(api.get("/price")).await, "2", "{}", form.name());
    }
}

#[tokio::test]
async fn the_request_that_led_a_load_gets_the_clients_error_and_waiters_a_502() {
    for form in both() {
        let api = Api::start().await;
        let mut leads = api.get("/held");
        *leads.timeout_mut() = Some(secs(10));
        let leader = tokio::spawn({
            let form = form.clone();
            async move { form.send(leads).await }
        });
        api.started.reach(1).await;
        // The waiter joins before the leader's time is up: a paused clock goes on only when all tasks wait.
        tokio::time::pause();
        let waiter = form.send(api.get("/held")).await.unwrap();
        tokio::time::resume();
        let error = leader.await.unwrap().unwrap_err();
        assert!(error.is_timeout() && error.url().is_some(), "{}: {error:?}", form.name());
        assert_eq!(waiter.status().as_u16(), 502, "{}", form.name());
        assert!(waiter.headers().contains_key(header::RETRY_AFTER));
    }
}

#[tokio::test]
async fn a_request_waits_no_longer_for_anothers_load_than_its_own_time_out() {
    let [_, form] = both();
    let api = Api::start().await;
    let leader = tokio::spawn({
        let (form, request) = (form.clone(), api.get("/held"));
        async move { form.text(request).await }
    });
    api.started.reach(1).await;
    let mut waits = api.get("/held");
    *waits.timeout_mut() = Some(Duration::from_millis(50));
    let error = form.send(waits).await.unwrap_err();
    assert!(error.is_middleware() && error.to_string().contains("time-out (50ms)"), "{error}");
    api.gate.open();
    assert_eq!(leader.await.unwrap(), "1");
}

#[tokio::test]
async fn a_load_goes_on_without_the_request_that_began_it() {
    for form in both() {
        let api = Api::start().await;
        let leader = tokio::spawn({
            let (form, request) = (form.clone(), api.get("/held"));
            async move { form.text(request).await }
        });
        api.started.reach(1).await;
        leader.abort();
        assert!(leader.await.unwrap_err().is_cancelled());
        api.gate.open();
        assert_eq!(form.text(api.get("/held")).await, "1");
        assert_eq!(api.requests("GET /held"), 1, "{}", form.name());
    }
}

#[tokio::test]
async fn a_stale_response_is_refreshed_after_it_was_served() {
    for form in both() {
        let api = Api::start().await;
        assert_eq!(form.text(api.get("/stale")).await, "1");
        assert_eq!(form.text(api.get("/stale")).await, "1", "{}", form.name());
        eventually("the refresh", secs(10), async || form.text(api.get("/stale")).await != "1").await;
    }
}

/// Counts the requests that pass it.
#[derive(Clone, Default)]
struct Counting(Counter);

impl Middleware for Counting {
    fn handle<'life0, 'life1, 'life2, 'future>(
        &'life0 self,
        request: reqwest::Request,
        extensions: &'life1 mut http::Extensions,
        next: Next<'life2>,
    ) -> std::pin::Pin<Box<dyn Future<Output = reqwest_middleware::Result<reqwest::Response>> + Send + 'future>>
    where
        'life0: 'future,
        'life1: 'future,
        'life2: 'future,
        Self: 'future,
    {
        drop(self.0.start());
        Box::pin(next.run(request, extensions))
    }
}

#[tokio::test]
async fn middleware_before_the_guard_runs_for_all_requests_and_that_of_the_origin_for_loads() {
    let (api, before, behind) = (Api::start().await, Counting::default(), Counting::default());
    let origin = ClientBuilder::new(Client::new()).with(behind.clone()).build();
    let guard = StampedeGuard::in_memory().reqwest(origin).unwrap();
    let client = ClientBuilder::new(Client::new()).with(before.clone()).with(guard).build();
    for _ in 0..3 {
        assert_eq!(client.get(format!("{}/price", api.url)).send().await.unwrap().text().await.unwrap(), "1");
    }
    assert_eq!((before.0.started(), behind.0.started()), (3, 1));
}
