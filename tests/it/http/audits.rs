//! Audits of responses, and trials, in which the layer runs beside a service.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::header::{IF_NONE_MATCH, RANGE};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use stampede_guard::{MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::sleep;
use tower::{Layer as _, Service, ServiceExt as _};

/// A page, and how many times the service was called for it.
#[derive(Clone, Default)]
struct Shop {
    page: Arc<AtomicU64>,
    calls: Arc<AtomicU64>,
}

impl Shop {
    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, Infallible> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let page = self.page.load(Ordering::SeqCst);
        // The body contains the number of the call only if the query asks for it.
        let body = match request.uri().query() {
            Some("numbered") => format!("{{\"page\":{page},\"call\":{call}}}"),
            _ => format!("page {page}"),
        };
        let status = if request.uri().path() == "/broken" && call > 0 { 500 } else { 200 };
        let response =
            Response::builder().status(status).header("cache-control", "max-age=600").header("etag", "\"1\"");
        Ok(response.body(Body::from(body)).expect("a response"))
    }
}

fn guard(policy: PolicyBuilder) -> StampedeGuard {
    let policy = policy.build().expect("valid");
    StampedeGuard::builder(MemoryStore::new()).policy(policy).build().expect("valid")
}

async fn ask(guard: &StampedeGuard, shop: &Shop, uri: &str, headers: HeaderMap) -> (StatusCode, String) {
    let shop = shop.clone();
    let inner = tower::service_fn(move |request: Request<Body>| shop.clone().answer(request));
    let mut request = Request::get(uri).body(Body::empty()).expect("a request");
    *request.headers_mut() = headers;
    let mut layered = guard.layer(inner);
    let response = layered.ready().await.expect("ready").call(request).await.expect("answered");
    let status = response.status();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    (status, String::from_utf8(body.to_vec()).expect("text"))
}

async fn page(guard: &StampedeGuard, shop: &Shop, uri: &str) -> String {
    ask(guard, shop, uri, HeaderMap::new()).await.1
}

async fn audits(guard: &StampedeGuard) -> (u64, u64, u64) {
    // By then audits have ended, including their grace.
    sleep(Duration::from_secs(3)).await;
    let stats = guard.stats();
    (stats.audits_matched, stats.audits_differed, stats.audits_failed)
}

#[tokio::test(start_paused = true)]
async fn a_page_that_has_changed_differs() {
    for local_for in [Duration::ZERO, Duration::MAX] {
        let (guard, shop) = (guard(Policy::builder().audit(1.0).local_for(local_for)), Shop::default());
        page(&guard, &shop, "http://shop/a").await;
        assert_eq!(page(&guard, &shop, "http://shop/a").await, "page 0");
        assert_eq!(audits(&guard).await, (1, 0, 0));
        shop.page.store(1, Ordering::SeqCst);
        assert_eq!(page(&guard, &shop, "http://shop/a").await, "page 0");
        assert_eq!(audits(&guard).await, (1, 1, 0));
        assert_eq!(shop.calls.load(Ordering::SeqCst), 3, "a load and two audits");
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_that_fails_cannot_be_compared() {
    let (guard, shop) = (guard(Policy::builder().audit(1.0)), Shop::default());
    page(&guard, &shop, "http://shop/broken").await;
    assert_eq!(page(&guard, &shop, "http://shop/broken").await, "page 0");
    assert_eq!(audits(&guard).await, (0, 0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_part_and_a_confirmation_are_not_audited() {
    let (guard, shop) = (guard(Policy::builder().audit(1.0)), Shop::default());
    page(&guard, &shop, "http://shop/a").await;
    let part = HeaderMap::from_iter([(RANGE, "bytes=0-3".parse().expect("a value"))]);
    assert_eq!(ask(&guard, &shop, "http://shop/a", part).await.1, "page");
    let known = HeaderMap::from_iter([(IF_NONE_MATCH, "\"1\"".parse().expect("a value"))]);
    assert_eq!(ask(&guard, &shop, "http://shop/a", known).await.0, StatusCode::NOT_MODIFIED);
    assert_eq!(audits(&guard).await, (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn bodies_are_compared_as_the_program_says() {
    use serde_json::Value;
    let same = |served: &Value, loaded: &Value| served["page"] == loaded["page"];
    let (guard, shop) = (guard(Policy::builder().audit(1.0).audit_by(same)), Shop::default());
    page(&guard, &shop, "http://shop/a?numbered").await;
    page(&guard, &shop, "http://shop/a?numbered").await;
    assert_eq!(audits(&guard).await, (1, 0, 0));
    shop.page.store(1, Ordering::SeqCst);
    page(&guard, &shop, "http://shop/a?numbered").await;
    assert_eq!(audits(&guard).await, (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn in_a_trial_the_service_answers_and_the_guard_counts() {
    let (guard, shop) = (guard(Policy::builder().shadow(true)), Shop::default());
    for number in 0..3 {
        shop.page.store(number, Ordering::SeqCst);
        assert_eq!(page(&guard, &shop, "http://shop/a").await, format!("page {number}"));
        sleep(Duration::from_secs(1)).await;
    }
    let stats = guard.stats();
    if cfg!(feature = "axum") {
        assert_eq!((stats.led, stats.hits, stats.bypassed), (1, 2, 0));
        assert_eq!(shop.calls.load(Ordering::SeqCst), 4, "one of each client, and the guard's one");
    }
}
