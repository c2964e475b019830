//! The code of `docs/stack.md`.

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use stampede_guard::http::HttpPolicy;
use stampede_guard::{AnswerInfo, Outcome, Policy, StampedeGuard};
use tower::{Service, ServiceBuilder, ServiceExt as _, service_fn};
use tower_http::compression::CompressionLayer;
use tower_http::cors::{Any, CorsLayer};
use tower_http::request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer};
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;
use tower_sessions::{MemoryStore, Session, SessionManagerLayer};

use crate::requests::{self, send};

#[derive(Clone)]
struct User(String);

/// Takes the token off the request, and says that the response is one user's.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let Some(token) = request.headers_mut().remove("authorization") else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    request.extensions_mut().insert(User(token.to_str().unwrap_or_default().to_owned()));
    let mut response = next.run(request).await;
    response.headers_mut().insert("cache-control", "private".parse().expect("a header's value"));
    response
}

async fn mails(Extension(User(name)): Extension<User>) -> String {
    format!("mails of {name}")
}

/// A form with the token of its visitor's session.
async fn form(session: Session) -> Result<String, StatusCode> {
    static VISITORS: AtomicUsize = AtomicUsize::new(0);
    let known = session.get("csrf").await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let token: usize = known.unwrap_or_else(|| VISITORS.fetch_add(1, Ordering::Relaxed) + 1);
    session.insert("csrf", token).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(format!("csrf {token}"))
}

/// A report of some length, which takes a second.
async fn report() -> String {
    tokio::time::sleep(Duration::from_secs(1)).await;
    "all is well\n".repeat(100)
}

fn app() -> Result<(Router, StampedeGuard), stampede_guard::Error> {
    let http = HttpPolicy::default().personal_extension::<Session>().personal_extension::<User>();
    let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build()?);

    let id = axum::http::HeaderName::from_static("x-request-id");
    let app = Router::new()
        .route("/mails", get(mails).layer(from_fn(authenticate))) // removes credentials: inside
        .route("/form", get(form))
        .route("/report", get(report))
        .layer(SessionManagerLayer::new(MemoryStore::default())) // reads and sets cookies: inside
        .layer(guard.clone()) // wraps all of these; what follows is outside, and runs for hits too
        .layer(CompressionLayer::new())
        .layer(CorsLayer::new().allow_origin(Any))
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(10)))
        .layer(PropagateRequestIdLayer::new(id.clone()))
        .layer(TraceLayer::new_for_http())
        .layer(SetRequestIdLayer::new(id, MakeRequestUuid));
    Ok((app, guard))
}

#[tokio::test(start_paused = true)]
async fn outside_layers_run_for_hits_too() -> Result<(), Box<dyn Error>> {
    let (app, guard) = app()?;
    let browser = [("accept-encoding", "gzip"), ("origin", "https://other.example")];
    let miss = send(&app, "GET", "/report", &browser).await;
    let hit = send(&app, "GET", "/report", &browser).await;
    assert!(hit.is_hit(), "{}", hit.remark());
    for seen in [&miss, &hit] {
        assert_eq!(seen.header("content-encoding"), "gzip");
        assert_eq!(seen.header("access-control-allow-origin"), "*");
    }
    assert_eq!(miss.header("x-request-id").len(), 36);
    assert_ne!(miss.header("x-request-id"), hit.header("x-request-id"), "each response has an id of its own");
    // The stored response is neither compressed nor marked with another client's id.
    let plain = requests::get(&app, "/report").await;
    assert!(plain.is_hit());
    assert_eq!((plain.header("content-encoding"), plain.text()), ("", &*"all is well\n".repeat(100)));
    assert_eq!(guard.stats().loads, 1);
    Ok(())
}

#[tokio::test]
async fn inside_layers_separate_clients() -> Result<(), Box<dyn Error>> {
    let (app, _) = app()?;
    for user in ["ada", "bob", "ada"] {
        let seen = send(&app, "GET", "/mails", &[("authorization", user)]).await;
        assert_eq!(
            (seen.text(), seen.remark()),
            (&*format!("mails of {user}"), "fwd=bypass; detail=credentials")
        );
        assert_eq!(requests::get(&app, "/mails").await.status, 401);
    }
    let [one, two] = [requests::get(&app, "/form").await, requests::get(&app, "/form").await];
    assert_ne!(one.text(), two.text(), "each visitor has a token");
    assert_eq!(one.remark(), "fwd=uri-miss; detail=set-cookie");
    let cookie = one.header("set-cookie").split(';').next().unwrap_or_default();
    assert_eq!(send(&app, "GET", "/form", &[("cookie", cookie)]).await.text(), one.text());
    Ok(())
}

#[tokio::test]
async fn on_the_wrong_side_sessions_are_detected_by_their_declared_type() -> Result<(), Box<dyn Error>> {
    let stack = |http| {
        let policy = Policy::builder().http(http).build()?;
        let guard = StampedeGuard::in_memory().with_policy(policy);
        let sessions = SessionManagerLayer::new(MemoryStore::default());
        Ok::<_, stampede_guard::Error>(Router::new().route("/form", get(form)).layer(guard).layer(sessions))
    };
    let unnoticed = stack(HttpPolicy::default())?;
    let [one, two] = [requests::get(&unnoticed, "/form").await, requests::get(&unnoticed, "/form").await];
    assert_eq!(one.text(), two.text(), "another visitor's token");
    let declared = stack(HttpPolicy::default().personal_extension::<Session>())?;
    let [one, two] = [requests::get(&declared, "/form").await, requests::get(&declared, "/form").await];
    assert_ne!(one.text(), two.text());
    assert_eq!(one.remark(), "fwd=bypass; detail=extension");
    Ok(())
}

#[tokio::test]
async fn on_the_wrong_side_one_users_page_is_stored() {
    let app = Router::new()
        .route("/mails", get(mails))
        .layer(StampedeGuard::in_memory())
        .layer(from_fn(authenticate));
    assert_eq!(send(&app, "GET", "/mails", &[("authorization", "ada")]).await.text(), "mails of ada");
    assert_eq!(send(&app, "GET", "/mails", &[("authorization", "bob")]).await.text(), "mails of ada");
}

#[tokio::test]
async fn on_the_wrong_side_request_ids_and_compression_are_stored() {
    let id = axum::http::HeaderName::from_static("x-request-id");
    let app = Router::new()
        .route("/", get(|| async { "all is well\n".repeat(100) }))
        .layer(CompressionLayer::new())
        .layer(PropagateRequestIdLayer::new(id.clone()))
        .layer(SetRequestIdLayer::new(id, MakeRequestUuid))
        .layer(StampedeGuard::in_memory());
    let one = send(&app, "GET", "/", &[("accept-encoding", "gzip")]).await;
    let two = send(&app, "GET", "/", &[("accept-encoding", "gzip")]).await;
    assert!(two.is_hit(), "{}", two.remark());
    assert_eq!(one.header("x-request-id"), two.header("x-request-id"), "another client's id");
    // Compression names `Accept-Encoding` in `Vary`, so each coding is a stored variant, with a load.
    assert!(!requests::get(&app, "/").await.is_hit());
}

/// CORS names `Origin` in `Vary`: inside, each origin is a stored variant, with a load.
#[tokio::test]
async fn cors_is_right_on_both_sides_and_inside_it_costs_loads() {
    let mirror = || CorsLayer::new().allow_origin(tower_http::cors::AllowOrigin::mirror_request());
    let home = || Router::new().route("/", get(|| async { "home" }));
    let outside = home().layer(StampedeGuard::in_memory()).layer(mirror());
    let inside = home().layer(mirror()).layer(StampedeGuard::in_memory());
    for (app, hits) in [(outside, [false, true]), (inside, [false, false])] {
        for (origin, hit) in ["https://a.example", "https://b.example"].into_iter().zip(hits) {
            let seen = send(&app, "GET", "/", &[("origin", origin)]).await;
            assert_eq!((seen.header("access-control-allow-origin"), seen.is_hit()), (origin, hit));
        }
    }
}

/// A time-out outside bounds the client's wait, not the load: the next client finds its response.
#[tokio::test(start_paused = true)]
async fn a_timeout_outside_ends_the_wait_and_inside_the_load() {
    let loads = Arc::new(AtomicUsize::new(0));
    let slow = |loads: &Arc<AtomicUsize>| {
        let loads = Arc::clone(loads);
        Router::new().route(
            "/",
            get(async move || {
                loads.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_secs(5)).await;
                "slow"
            }),
        )
    };
    let limit = || TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(1));
    let outside = slow(&loads).layer(StampedeGuard::in_memory()).layer(limit());
    assert_eq!(requests::get(&outside, "/").await.status, 504);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let seen = requests::get(&outside, "/").await;
    assert!(seen.is_hit(), "{seen:?}");
    assert_eq!(loads.swap(0, Ordering::Relaxed), 1);

    let inside = slow(&loads).layer(limit()).layer(StampedeGuard::in_memory());
    let (one, two) = tokio::join!(requests::get(&inside, "/"), requests::get(&inside, "/"));
    assert_eq!((one.status, two.status), (504, 504), "all waiters receive the error");
    assert_eq!(loads.load(Ordering::Relaxed), 1);
    let later = requests::get(&inside, "/").await;
    assert_eq!((later.status, later.is_hit()), (504, false), "and nothing is stored");
}

/// Admits by a header that is no credential of the list.
async fn admit(request: Request, next: Next) -> Response {
    match request.headers().get("x-office") {
        Some(_) => next.run(request).await,
        None => StatusCode::FORBIDDEN.into_response(),
    }
}

#[tokio::test]
async fn a_layer_that_refuses_clients_belongs_outside_or_is_declared() -> Result<(), Box<dyn Error>> {
    let plan = || Router::new().route("/plan", get(|| async { "the plan" }));
    let office = axum::http::HeaderName::from_static("x-office");
    let declared = HttpPolicy::default().credential_header(office);
    let declared = StampedeGuard::in_memory().with_policy(Policy::builder().http(declared).build()?);
    let right = [
        plan().layer(StampedeGuard::in_memory()).layer(from_fn(admit)), // outside: called for hits too
        plan().layer(from_fn(admit)).layer(declared), // declared: a request with the header bypasses
    ];
    for app in right {
        assert_eq!(send(&app, "GET", "/plan", &[("x-office", "1")]).await.status, 200);
        assert_eq!(requests::get(&app, "/plan").await.status, 403);
    }
    let wrong = plan().layer(from_fn(admit)).layer(StampedeGuard::in_memory());
    assert_eq!(send(&wrong, "GET", "/plan", &[("x-office", "1")]).await.status, 200);
    assert_eq!(requests::get(&wrong, "/plan").await.text(), "the plan", "the wrong side");
    Ok(())
}

/// With the feature `axum`, which this package turns on.
#[tokio::test]
async fn nested_routers() {
    let guard = StampedeGuard::in_memory();
    let list = |name: &'static str| Router::new().route("/list", get(move || async move { name }));

    // Around the outermost router: always right.
    let app =
        Router::new().nest("/users", list("users")).nest("/orders", list("orders")).layer(guard.clone());
    both(&app).await;

    // Inside nested routers: right with the feature `axum`.
    let guard = StampedeGuard::in_memory();
    let app = Router::new()
        .nest("/users", list("users").layer(guard.clone()))
        .nest("/orders", list("orders").layer(guard.clone()));
    both(&app).await;
    assert_eq!((guard.stats().loads, guard.stats().hits), (2, 2));
}

async fn both(app: &Router) {
    for _ in 0..2 {
        assert_eq!(requests::get(app, "/users/list").await.text(), "users");
        assert_eq!(requests::get(app, "/orders/list").await.text(), "orders");
    }
}

#[tokio::test]
async fn some_routes_only() {
    let app = Router::new()
        .route("/report", get(report))
        .layer(StampedeGuard::in_memory()) // the routes above are guarded
        .route("/health", get(|| async { "up" })); // added later: not guarded
    assert_eq!(requests::get(&app, "/health").await.header("cache-status"), "");
}

async fn render(request: Request) -> Result<Response, Infallible> {
    Ok(format!("a page at {}", request.uri().path()).into_response())
}

/// The bounds of a service that `Router::route_service` takes, as one name.
trait Page:
    Service<Request, Response: IntoResponse, Error = Infallible, Future: Send> + Clone + Send + Sync
{
}

impl<S> Page for S where
    S: Service<Request, Response: IntoResponse, Error = Infallible, Future: Send> + Clone + Send + Sync
{
}

fn reports(guard: &StampedeGuard) -> Router {
    Router::new().route("/report", get(report)).layer(guard.clone())
}

/// Without `use<>` its caller could not drop or move `guard`.
fn plan(guard: &StampedeGuard) -> impl Page + use<> {
    ServiceBuilder::new().layer(guard.clone()).service(service_fn(render))
}

/// A handler that passes its request through a guard: one guard for all requests, and a service for each.
async fn map(State(guard): State<StampedeGuard>, request: Request) -> impl IntoResponse {
    ServiceBuilder::new().layer(guard).service(service_fn(render)).oneshot(request).await
}

#[tokio::test]
async fn a_function_returns_what_is_behind_a_layer_and_borrows_nothing() {
    let app = {
        let guard = StampedeGuard::in_memory();
        let (reports, plan) = (reports(&guard), plan(&guard));
        reports.route_service("/plan", plan).route("/map", get(map).with_state(guard))
    };
    for path in ["/report", "/plan", "/map"] {
        assert!(!requests::get(&app, path).await.is_hit(), "{path}");
        assert!(requests::get(&app, path).await.is_hit(), "{path}");
    }
}

/// A layer outside that wraps bodies hides from the guard that a GET has none.
#[tokio::test]
async fn a_layer_that_wraps_request_bodies_belongs_inside() {
    let stream =
        |request: Request| request.map(|body| axum::body::Body::from_stream(body.into_data_stream()));
    let home = || Router::new().route("/", get(|| async { "home" }));
    let wrapped = tower::util::MapRequestLayer::new(stream);
    let wrong = home().layer(StampedeGuard::in_memory()).layer(wrapped.clone());
    assert_eq!(requests::get(&wrong, "/").await.remark(), "fwd=bypass; detail=body");
    let right = home().layer(wrapped).layer(StampedeGuard::in_memory());
    requests::get(&right, "/").await;
    assert!(requests::get(&right, "/").await.is_hit());
}

/// One line for each response, by a layer outside of the guard.
async fn log(response: Response) -> Response {
    if let Some(AnswerInfo { outcome, age, fresh_for, .. }) = response.extensions().get() {
        println!("{} age={age:?} fresh_for={fresh_for:?}", outcome.as_str());
    }
    response
}

#[tokio::test]
async fn a_layer_outside_receives_the_outcome_of_the_guard() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default().answer_info(true);
    let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build()?);
    let app: Router =
        Router::new().route("/report", get(report)).layer(guard).layer(axum::middleware::map_response(log));
    for outcome in [Outcome::Led, Outcome::Hit] {
        let request = Request::builder().uri("/report").header("host", "shop.example").body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        let info = response.extensions().get::<AnswerInfo>().map(|info| info.outcome);
        assert_eq!(info, Some(outcome));
    }
    Ok(())
}

#[derive(Clone)]
struct Problem(&'static str);

/// Writes an error in JSON from the handler's extension.
async fn in_json(response: Response) -> Response {
    let Some(Problem(text)) = response.extensions().get().cloned() else { return response };
    (response.status(), format!("{{\"title\":\"{text}\"}}")).into_response()
}

#[tokio::test]
async fn a_layer_that_reads_response_extensions_belongs_inside() {
    let missing = || {
        Router::new().route("/", get(|| async { (StatusCode::NOT_FOUND, Extension(Problem("no report"))) }))
    };
    let layer = || axum::middleware::map_response(in_json);
    let right = missing().layer(layer()).layer(StampedeGuard::in_memory());
    let wrong = missing().layer(StampedeGuard::in_memory()).layer(layer());
    for (n, hit) in [r#"{"title":"no report"}"#, ""].into_iter().enumerate() {
        assert_eq!(requests::get(&right, "/").await.text(), r#"{"title":"no report"}"#);
        assert_eq!(requests::get(&wrong, "/").await.text(), hit, "request {n}");
    }
}
