//! The programs of the public contract, as a user writes them: they compile and work.

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::IntoResponse;
use axum::routing::get;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Empty};
use serde::{Deserialize, Serialize};
use stampede_guard::http::{CacheTerms, DoNotStore, Guarded, GuardedBody, GuardedFuture};
use stampede_guard::{
    Backend, CacheKey, Codec, Error, ErrorKind, LoadError, Memoize, MemoizeFuture, MemoizeLayer, MemoryStore,
    OnStoreDown, OnWaitTimeout, Policy, PolicyBuilder, Shutdown, StampedeGuard, StampedeGuardBuilder, Stats,
};
use tower::{Service, ServiceBuilder, ServiceExt as _};

use super::sockets::{client, serve};

type Calls = Arc<AtomicUsize>;

async fn report(State(calls): State<Calls>, Path(id): Path<u64>) -> String {
    format!("report {id}, call {}", calls.fetch_add(1, Ordering::SeqCst) + 1)
}

async fn text<S, B>(service: &S, uri: &str) -> String
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
    B: http_body::Body<Data = Bytes, Error: Debug>,
{
    let request = Request::builder().uri(uri).header("host", "shop.example").body(Body::empty()).unwrap();
    let Ok(response) = service.clone().oneshot(request).await;
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().into()).unwrap()
}

/// (a), with Redis: created synchronously and lazily, outside a runtime.
#[cfg(feature = "redis")]
#[test]
fn a_guard_is_made_and_layered_without_a_runtime_and_without_a_server()
-> Result<(), Box<dyn std::error::Error>> {
    let redis = redis::Client::open("redis://127.0.0.1:1/")?;
    let _app: Router =
        Router::new().route("/report/{id}", get(|| async { "x" })).layer(StampedeGuard::new(redis));
    Ok(())
}

#[tokio::test]
async fn an_axum_router_takes_the_guard_in_one_line() {
    let calls = Calls::default();
    let app = Router::new().route("/report/{id}", get(report)).layer(StampedeGuard::in_memory());
    let app: Router = app.with_state(calls.clone());
    for _ in 0..3 {
        assert_eq!(text(&app, "/report/7").await, "report 7, call 1");
        assert_eq!(text(&app, "/report/8").await, "report 8, call 2");
    }
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    assert_eq!(text(&app, "/nothing").await, "");
}

#[tokio::test]
async fn a_guard_fits_nested_routers_single_routes_fallbacks_and_a_whole_app() {
    let calls = Calls::default();
    let guard = StampedeGuard::in_memory();
    let reports = Router::new().route("/{id}", get(report)).with_state(calls.clone());
    let app: Router = Router::new()
        .nest("/report", reports)
        .route("/one", get(|| async { "one" }).layer(guard.clone()))
        .route_layer(guard.clone())
        .merge(Router::new().route("/merged", get(|| async { "merged" })))
        .fallback(|| async { (http::StatusCode::NOT_FOUND, "not found") })
        .layer(ServiceBuilder::new().layer(guard.clone()).into_inner());
    for _ in 0..2 {
        assert_eq!(text(&app, "/report/7").await, "report 7, call 1");
        assert_eq!(text(&app, "/one").await, "one");
        assert_eq!(text(&app, "/merged").await, "merged");
        assert_eq!(text(&app, "/else").await, "not found");
    }
    let whole = ServiceBuilder::new().layer(StampedeGuard::in_memory()).service(app);
    assert_eq!(text(&whole, "/report/7").await, "report 7, call 1");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_guarded_service_can_be_the_make_service_of_a_real_server() {
    let app = Router::new().route("/{id}", get(report)).with_state(Calls::default());
    let app = app.layer(StampedeGuard::in_memory());
    let addr = serve(app).await;
    for _ in 0..2 {
        let response = client().get(format!("http://{addr}/7").parse().unwrap()).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "report 7, call 1");
    }
}

/// (c)
#[tokio::test]
async fn a_hyper_client_is_memoized_by_the_same_layer() {
    let calls = Calls::default();
    let addr = serve(Router::new().route("/{id}", get(report)).with_state(calls.clone())).await;
    let guard = StampedeGuard::in_memory();
    let hyper_client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .build_http::<Empty<Bytes>>();
    let client = ServiceBuilder::new().layer(guard.clone()).service(hyper_client);
    let mut responses = Vec::new();
    for _ in 0..50 {
        let request = Request::get(format!("http://{addr}/7")).body(Empty::new()).unwrap();
        responses.push(tokio::spawn(client.clone().oneshot(request)));
    }
    for one in responses {
        let body = one.await.unwrap().unwrap().into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "report 7, call 1");
    }
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let key = stampede_guard::http::cache_key(&format!("http://{addr}/7").parse().unwrap()).unwrap();
    guard.invalidate(key).await.unwrap();
    let request = Request::get(format!("http://{addr}/7")).body(Empty::new()).unwrap();
    let body = client.oneshot(request).await.unwrap().into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "report 7, call 2");
}

/// Neither `Clone` nor `PartialEq`.
#[derive(Debug, Serialize, Deserialize)]
struct User {
    name: String,
}

/// (b)
#[tokio::test]
async fn a_loader_needs_no_clone_and_its_error_goes_up_with_a_question_mark() -> anyhow::Result<()> {
    let guard = StampedeGuard::in_memory();
    let id = 7;
    let load = move || async move { anyhow::Ok(User { name: format!("user {id}") }) };
    let user: User = guard.get_or_load(("user", id), load).await?;
    assert_eq!(user.name, "user 7");
    let failed: Result<User, LoadError<String>> =
        guard.get_or_load("other", || async { Err("no route".to_owned()) }).await;
    let error: Box<dyn std::error::Error> = failed.unwrap_err().into();
    assert!(error.to_string().contains("no route"), "{error}");
    for key in [CacheKey::from("a"), String::from("b").into(), b"c".as_slice().into(), vec![1].into()] {
        let _: u8 = guard.get_or_load(key, || async { anyhow::Ok(1) }).await?;
    }
    let empty: Result<u8, LoadError<String>> = guard.get_or_load("", || async { Ok(1) }).await;
    assert_eq!(empty.unwrap_err().guard().map(Error::kind), Some(ErrorKind::InvalidKey));
    Ok(())
}

#[derive(Clone)]
struct Query {
    id: u64,
}

/// (d)
#[tokio::test]
async fn any_tower_service_is_memoized_by_a_key_function() {
    let (guard, calls) = (StampedeGuard::in_memory(), Calls::default());
    let counter = calls.clone();
    let inner = tower::service_fn(move |query: Query| {
        let calls = counter.clone();
        async move {
            calls.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            Ok::<_, String>(User { name: format!("user {}", query.id) })
        }
    });
    let inner = ServiceBuilder::new().concurrency_limit(1).service(inner);
    let service = ServiceBuilder::new()
        .layer(guard.memoize(|query: &Query| CacheKey::from(("query", query.id))))
        .service(inner);
    let answers: Vec<_> =
        (0..50).map(|n| tokio::spawn(service.clone().oneshot(Query { id: n % 2 }))).collect();
    for (n, one) in answers.into_iter().enumerate() {
        assert_eq!(one.await.unwrap().unwrap().name, format!("user {}", n % 2));
    }
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

const fn mins(mins: u64) -> Duration {
    Duration::from_secs(mins * 60)
}

/// (e)
#[tokio::test(start_paused = true)]
async fn another_policy_is_another_lifetime_on_the_same_flights_and_counters() -> Result<(), Error> {
    let policy = Policy::builder().fresh_for(mins(5)).ttl_jitter(0.0).build()?;
    let guard = StampedeGuard::builder(MemoryStore::new()).namespace("shop").policy(policy).build()?;
    let short = guard.with_policy(Policy::builder().fresh_for(mins(1)).ttl_jitter(0.0).build()?);
    let load = || async { Ok::<_, String>(1u8) };
    let (_, _) = (guard.get_or_load("long", load).await, short.get_or_load("short", load).await);
    tokio::time::advance(mins(2)).await;
    assert_eq!((guard.get::<u8>("long").await?, guard.get::<u8>("short").await?), (Some(1), None));
    assert_eq!((guard.stats().loads, short.stats().loads), (2, 2));
    Ok(())
}

/// (f), with and without a running load.
#[tokio::test]
async fn an_invalidated_key_is_loaded_again() -> Result<(), Box<dyn std::error::Error>> {
    let guard = StampedeGuard::in_memory();
    for n in 1..=3u8 {
        let loaded = guard.get_or_load(("user", 7), move || async move { Ok::<_, String>(n) }).await?;
        assert_eq!(loaded, n);
        guard.invalidate(("user", 7)).await?;
    }
    Ok(())
}

#[test]
fn every_public_type_can_be_sent_shared_moved_and_printed() {
    fn value<T: Send + Sync + Unpin + Debug + 'static>() {}
    fn future<T: Send + Unpin + Debug>() {}
    type Key = fn(&Query) -> CacheKey;
    type Inner = Empty<Bytes>;
    value::<StampedeGuard>();
    value::<StampedeGuardBuilder>();
    value::<Shutdown>();
    value::<Backend>();
    value::<CacheKey>();
    value::<Codec>();
    value::<Error>();
    value::<ErrorKind>();
    value::<LoadError<String>>();
    value::<MemoryStore>();
    value::<Memoize<Key, Inner>>();
    value::<MemoizeLayer<Key, Query>>();
    value::<OnStoreDown>();
    value::<OnWaitTimeout>();
    value::<Policy>();
    value::<PolicyBuilder>();
    value::<Stats>();
    value::<CacheTerms>();
    value::<DoNotStore>();
    value::<Guarded<Inner>>();
    value::<GuardedBody>();
    #[cfg(feature = "reqwest")]
    {
        value::<stampede_guard::http::reqwest::GuardMiddleware>();
        value::<stampede_guard::http::reqwest::ReqwestService>();
        future::<stampede_guard::http::reqwest::ReqwestFuture<String>>();
    }
    // Polled by one task at a time, so `Sync` would be an empty promise.
    future::<GuardedFuture<String>>();
    future::<MemoizeFuture<u8, String>>();
    // An error type that is itself neither `Send` nor `Debug` does not spread to the guarded types.
    fn response<T: IntoResponse>() {}
    response::<Response<GuardedBody>>();
}

#[test]
fn a_guard_prints_its_namespace_and_no_secret() {
    let guard = StampedeGuard::builder(MemoryStore::new()).namespace("shop").build().unwrap();
    let text = format!("{guard:?}");
    assert!(text.contains("shop"), "{text}");
    #[cfg(feature = "redis")]
    {
        let client = redis::Client::open("redis://user:secret@127.0.0.1:1/").unwrap();
        for text in [
            format!("{:?}", StampedeGuard::new(client.clone())),
            format!("{:?}", StampedeGuard::builder(client.clone())),
            format!("{:?}", Backend::from(client.clone())),
        ] {
            assert!(!text.contains("secret"), "{text}");
        }
    }
}
