//! The guard among the layers of a real service, on both sides of each: outside of layers for sessions, cookies, authentication and nonces,
//! and inside layers that stamp each response. On the wrong side it would give one client what such a layer made for another. The extension
//! that the layer adds to each request reveals that.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Extension, Router};
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, HeaderValue};
use http::{HeaderMap, StatusCode};
use stampede_guard::StampedeGuard;
use stampede_guard::http::HttpPolicy;
use tower_cookies::{Cookie, CookieManagerLayer, Cookies};
use tower_sessions::{MemoryStore, Session, SessionManagerLayer};

use super::kit::{Seen, policy, read};

async fn ask(app: &Router, path: &str, headers: &[(&str, &str)]) -> Seen {
    let mut request = http::Request::builder().uri(path).header("host", "shop.example");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::empty()).unwrap();
    read(tower::ServiceExt::oneshot(app.clone(), request).await.unwrap()).await
}

fn guard(http: HttpPolicy) -> StampedeGuard {
    StampedeGuard::in_memory().with_policy(policy().http(http).build().unwrap())
}

/// A form that contains the token of the visitor's session.
fn form() -> Router {
    let visitors = Arc::new(AtomicUsize::new(0));
    Router::new().route(
        "/form",
        get(async move |session: Session| {
            let known: Option<usize> = session.get("csrf").await.unwrap();
            let token = known.unwrap_or_else(|| visitors.fetch_add(1, Ordering::SeqCst) + 1);
            session.insert("csrf", token).await.unwrap();
            format!("csrf {token}")
        }),
    )
}

fn sessions() -> SessionManagerLayer<MemoryStore> {
    SessionManagerLayer::new(MemoryStore::default()).with_secure(false)
}

#[tokio::test]
async fn inside_the_guard_sessions_keep_each_visitors_form_from_the_others() {
    let app = form().layer(sessions()).layer(guard(HttpPolicy::default()));
    for n in 1..=3 {
        let seen = ask(&app, "/form", &[]).await;
        assert_eq!(
            (seen.text(), seen.remark().as_str()),
            (&*format!("csrf {n}"), "fwd=uri-miss; detail=set-cookie")
        );
        let cookie = seen.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
        assert_eq!(ask(&app, "/form", &[("cookie", &cookie)]).await.text(), format!("csrf {n}"), "A2");
    }
}

#[tokio::test]
async fn outside_the_guard_sessions_are_detected_by_their_extension() {
    let stack = |http| form().layer(guard(http)).layer(sessions());
    let unnoticed = stack(HttpPolicy::default());
    assert_eq!(ask(&unnoticed, "/form", &[]).await.text(), "csrf 1");
    assert_eq!(
        ask(&unnoticed, "/form", &[]).await.text(),
        "csrf 1",
        "the wrong side: another visitor's token"
    );
    let app = stack(HttpPolicy::default().personal_extension::<Session>());
    for n in 1..=3 {
        let seen = ask(&app, "/form", &[]).await;
        assert_eq!(
            (seen.text(), seen.remark().as_str()),
            (&*format!("csrf {n}"), "fwd=bypass; detail=extension")
        );
    }
}

/// A page that sets a new cart for each visitor without one.
fn cart() -> Router {
    let carts = Arc::new(AtomicUsize::new(0));
    Router::new().route(
        "/cart",
        get(async move |cookies: Cookies| {
            let known = cookies.get("cart").map(|cookie| cookie.value().to_owned());
            let cart = known.unwrap_or_else(|| (carts.fetch_add(1, Ordering::SeqCst) + 1).to_string());
            cookies.add(Cookie::new("cart", cart.clone()));
            format!("cart {cart}")
        }),
    )
}

#[tokio::test]
async fn inside_the_guard_cookies_keep_each_visitors_cart_from_the_others() {
    let app = cart().layer(CookieManagerLayer::new()).layer(guard(HttpPolicy::default()));
    for n in 1..=3 {
        assert_eq!(ask(&app, "/cart", &[]).await.text(), format!("cart {n}"), "A3");
    }
    assert_eq!(ask(&app, "/cart", &[("cookie", "cart=7")]).await.text(), "cart 7", "A2");
}

#[tokio::test]
async fn outside_the_guard_cookies_are_detected_by_their_extension() {
    let stack = |http| cart().layer(guard(http)).layer(CookieManagerLayer::new());
    let unnoticed = stack(HttpPolicy::default());
    assert_eq!(ask(&unnoticed, "/cart", &[]).await.text(), "cart 1");
    assert_eq!(
        ask(&unnoticed, "/cart", &[]).await.text(),
        "cart 1",
        "the wrong side: another visitor's cart"
    );
    let app = stack(HttpPolicy::default().personal_extension::<Cookies>());
    for n in 1..=3 {
        let seen = ask(&app, "/cart", &[]).await;
        assert_eq!(
            (seen.text(), seen.remark().as_str()),
            (&*format!("cart {n}"), "fwd=bypass; detail=extension")
        );
    }
}

#[derive(Clone)]
struct User(String);

/// Authenticates: removes the request's credentials, and marks the response as one user's.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let Some(user) = request.headers_mut().remove(AUTHORIZATION) else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    request.extensions_mut().insert(User(user.to_str().unwrap().to_owned()));
    let mut response = next.run(request).await;
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("private, no-store"));
    response
}

fn mails() -> Router {
    Router::new()
        .route("/mails", get(async |Extension(User(user)): Extension<User>| format!("mails of {user}")))
}

#[tokio::test]
async fn inside_the_guard_authentication_keeps_each_users_mails_from_the_others() {
    let app = mails().layer(from_fn(authenticate)).layer(guard(HttpPolicy::default()));
    for user in ["alice", "bob", "alice"] {
        let seen = ask(&app, "/mails", &[("authorization", user)]).await;
        assert_eq!(seen.text(), format!("mails of {user}"), "A1");
        assert_eq!(ask(&app, "/mails", &[]).await.status, 401);
    }
}

/// If credentials are removed, or headers written, outside of the guard, the guard does not see that. Only the right order of layers helps,
/// or a declared extension.
#[tokio::test]
async fn outside_the_guard_authentication_is_detected_by_a_declared_extension_only() {
    let stack = |http| mails().layer(guard(http)).layer(from_fn(authenticate));
    let unnoticed = stack(HttpPolicy::default());
    for _ in 0..2 {
        let seen = ask(&unnoticed, "/mails", &[("authorization", "alice")]).await;
        assert_eq!(seen.text(), "mails of alice");
    }
    let bobs = ask(&unnoticed, "/mails", &[("authorization", "bob")]).await;
    assert_eq!(bobs.text(), "mails of alice", "the wrong side");
    let app = stack(HttpPolicy::default().personal_extension::<User>());
    for user in ["alice", "bob"] {
        let seen = ask(&app, "/mails", &[("authorization", user)]).await;
        assert_eq!(
            (seen.text(), seen.remark().as_str()),
            (&*format!("mails of {user}"), "fwd=bypass; detail=extension")
        );
    }
}

#[derive(Clone, Copy)]
struct Nonce(usize);

/// A layer that allows only scripts with the nonce that it has made for this response.
fn nonces<S: Clone + Send + Sync + 'static>(app: Router<S>) -> Router<S> {
    let made = Arc::new(AtomicUsize::new(0));
    app.layer(from_fn(move |mut request: Request, next: Next| {
        let nonce = made.fetch_add(1, Ordering::SeqCst) + 1;
        request.extensions_mut().insert(Nonce(nonce));
        async move {
            let mut response = next.run(request).await;
            let text = format!("script-src 'nonce-{nonce}'");
            response.headers_mut().insert(CONTENT_SECURITY_POLICY, text.parse().unwrap());
            response
        }
    }))
}

fn page() -> Router {
    Router::new()
        .route("/", get(async |Extension(Nonce(nonce)): Extension<Nonce>| format!("'nonce-{nonce}'")))
}

fn runs(seen: &Seen) -> bool {
    seen.header("content-security-policy").unwrap().ends_with(seen.text())
}

#[tokio::test]
async fn inside_the_guard_a_nonce_is_stored_with_the_page_that_names_it() {
    let app = nonces(page()).layer(guard(HttpPolicy::default()));
    for remark in ["fwd=uri-miss; stored; ttl=60", "hit; ttl=60"] {
        let seen = ask(&app, "/", &[]).await;
        assert!(runs(&seen), "{seen:?}");
        assert!(seen.remark().starts_with(remark.split(';').next().unwrap()), "{}", seen.remark());
    }
}

#[tokio::test]
async fn outside_the_guard_a_nonce_is_detected_by_a_declared_extension_only() {
    let unnoticed = nonces(page().layer(guard(HttpPolicy::default())));
    assert!(runs(&ask(&unnoticed, "/", &[]).await));
    assert!(!runs(&ask(&unnoticed, "/", &[]).await), "the wrong side: the scripts of a hit do not run");
    let app = nonces(page().layer(guard(HttpPolicy::default().personal_extension::<Nonce>())));
    for _ in 0..2 {
        let seen = ask(&app, "/", &[]).await;
        assert!(runs(&seen) && seen.remark().ends_with("detail=extension"), "{}", seen.remark());
    }
}

fn stamped(app: Router) -> Router {
    let stamps = Arc::new(AtomicUsize::new(0));
    app.layer(from_fn(move |request: Request, next: Next| {
        let stamp = stamps.fetch_add(1, Ordering::SeqCst) + 1;
        async move {
            let mut response = next.run(request).await;
            response.headers_mut().insert("x-request-id", stamp.to_string().parse().unwrap());
            response
        }
    }))
}

#[tokio::test]
async fn stamps_outside_the_guard_are_each_responses_own_and_inside_they_are_stored() {
    let home = || Router::new().route("/", get(async || "home"));
    let outside = stamped(home().layer(guard(HttpPolicy::default())));
    let inside = stamped(home()).layer(guard(HttpPolicy::default()));
    for n in ["1", "2", "3"] {
        assert_eq!(ask(&outside, "/", &[]).await.header("x-request-id"), Some(n));
        assert_eq!(ask(&inside, "/", &[]).await.header("x-request-id"), Some("1"), "the wrong side");
    }
}

/// Admits a request by a header that is not in the list of credentials.
async fn admit(request: Request, next: Next) -> Response {
    match request.headers().get("x-office") {
        Some(_) => next.run(request).await,
        None => StatusCode::FORBIDDEN.into_response(),
    }
}

#[tokio::test]
async fn a_refused_client_never_receives_a_hit() {
    let plan = |cache_control: &'static str| {
        let headers = [(CACHE_CONTROL, cache_control)];
        Router::new().route("/plan", get(async move || (headers, "secret plan")))
    };
    let http = HttpPolicy::default;
    let office = HeaderName::from_static("x-office");
    let stacks = [
        ("admission outside", plan("max-age=60").layer(guard(http())).layer(from_fn(admit))),
        ("private", plan("private").layer(from_fn(admit)).layer(guard(http()))),
        ("declared", plan("max-age=60").layer(from_fn(admit)).layer(guard(http().credential_header(office)))),
    ];
    for (what, app) in stacks {
        for _ in 0..2 {
            assert_eq!(ask(&app, "/plan", &[("x-office", "1")]).await.text(), "secret plan", "{what}");
            let refused = ask(&app, "/plan", &[]).await;
            assert_eq!((refused.status, refused.text()), (403, ""), "{what}");
        }
    }
    // This is why the rule has a limit: a layer inside the guard whose header is not declared is not called again for a hit.
    let app = plan("max-age=60").layer(from_fn(admit)).layer(guard(http()));
    ask(&app, "/plan", &[("x-office", "1")]).await;
    assert_eq!(ask(&app, "/plan", &[]).await.text(), "secret plan");
}

/// If the policy lists the relevant cookies, other cookies, such as those for analytics, do not make a request bypass. None of them reaches
/// a handler whose answer is sent to other clients.
#[tokio::test]
async fn cookies_that_are_not_listed_neither_bypass_nor_reach_a_shared_answer() {
    let app = |http| {
        let greet = async |headers: HeaderMap| {
            let cookies = headers.get_all("cookie").iter().map(|line| line.to_str().unwrap());
            ([("vary", "cookie")], format!("cookies: {}", cookies.collect::<Vec<_>>().join("|")))
        };
        Router::new().route("/", get(greet).post(greet)).layer(guard(http))
    };
    let listed = app(HttpPolicy::default().cookies(["session"]));
    for (n, cookies) in ["_ga=alice", "_ga=bob; theme=dark", "", "Session=x"].into_iter().enumerate() {
        let seen = ask(&listed, "/", &[("cookie", cookies)]).await;
        assert_eq!(seen.text(), "cookies: ", "{cookies}");
        assert_eq!(seen.remark().starts_with("hit"), n > 0, "{}", seen.remark());
    }
    assert!(ask(&listed, "/", &[]).await.remark().starts_with("hit"), "as without any");
    let own = ask(&listed, "/", &[("cookie", "_ga=alice; session=7")]).await;
    assert_eq!(
        (own.text(), own.remark().as_str()),
        ("cookies: _ga=alice; session=7", "fwd=bypass; detail=credentials")
    );
    assert_eq!(ask(&listed, "/", &[]).await.text(), "cookies: ");
    // A request that is not looked up is forwarded unchanged.
    let post = http::Request::post("/").header("host", "shop.example").header("cookie", "_ga=alice");
    let posted = tower::ServiceExt::oneshot(listed, post.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(read(posted).await.text(), "cookies: _ga=alice");
    let unlisted = app(HttpPolicy::default());
    let seen = ask(&unlisted, "/", &[("cookie", "_ga=alice")]).await;
    assert_eq!(
        (seen.text(), seen.remark().as_str()),
        ("cookies: _ga=alice", "fwd=bypass; detail=credentials")
    );
}
