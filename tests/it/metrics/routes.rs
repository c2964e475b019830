//! The label `route`: what axum's router has matched.

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::Request;
use stampede_guard::{Policy, StampedeGuard};
use tower::{Layer as _, ServiceExt as _};

use super::recorder::Recorded;

async fn ask(app: &Router, path: &str) {
    let request =
        Request::builder().uri(path).header("host", "shop.example").body(Body::empty()).expect("a request");
    app.clone().oneshot(request).await.expect("infallible");
}

fn users() -> Router {
    Router::new().route("/users/{id}", get(|| async { "a user" }))
}

#[test]
fn requests_are_recorded_by_the_route_that_matched_them() {
    let recorded = Recorded::default();
    recorded.during(async {
        let guard =
            StampedeGuard::in_memory().with_policy(Policy::builder().name("web").build().expect("valid"));
        let broken = get(|| async { http::StatusCode::INTERNAL_SERVER_ERROR });
        let nested = Router::new().route("/orders/{id}", get(|| async { "an order" }));
        let app = users().route("/broken", broken).nest("/api", nested).layer(guard.clone());
        for path in ["/users/1", "/users/1", "/users/2", "/api/orders/1", "/broken", "/nowhere"] {
            ask(&app, path).await;
        }
        // As `route_layer` it is called for matched requests only.
        ask(&users().route_layer(guard.clone()), "/users/3").await;
        assert_eq!((guard.stats().led, guard.stats().hits, guard.stats().load_errors), (6, 1, 1));
    });
    let count = |rest: &str| recorded.count(&format!("stampede_guard_requests_total{{{rest}}}"));
    assert_eq!(count("outcome=led,policy=web,route=/users/{id}"), Some(3));
    assert_eq!(count("outcome=hit,policy=web,route=/users/{id},tier=store"), Some(1));
    assert_eq!(count("outcome=led,policy=web,route=/api/orders/{id}"), Some(1));
    // No route has matched.
    assert_eq!(count("outcome=led,policy=web"), Some(1));
    assert_eq!(recorded.count("stampede_guard_loads_saved_total{policy=web}"), Some(1));
    assert_eq!(recorded.count("stampede_guard_load_failures_total{policy=web,reason=error}"), Some(1));
}

/// A service around the whole router is called before a route is matched.
#[test]
fn a_guard_around_the_whole_router_knows_no_route() {
    let recorded = Recorded::default();
    recorded.during(async {
        let guard = StampedeGuard::in_memory();
        let app = Router::new().fallback_service(guard.layer(users()));
        ask(&app, "/users/1").await;
    });
    assert_eq!(recorded.count("stampede_guard_requests_total{outcome=led,policy=default}"), Some(1));
}

#[test]
fn further_routes_are_recorded_as_other() {
    let recorded = Recorded::default();
    recorded.during(async {
        let guard = StampedeGuard::in_memory();
        let routes =
            (0..250).fold(Router::new(), |app, n| app.route(&format!("/r{n}"), get(|| async { "x" })));
        let app = routes.layer(guard);
        for n in 0..250 {
            ask(&app, &format!("/r{n}")).await;
        }
    });
    let other = "stampede_guard_requests_total{outcome=led,policy=default,route=other}";
    assert_eq!(recorded.count(other), Some(50));
    assert_eq!(recorded.total("stampede_guard_requests_total"), 250);
}
