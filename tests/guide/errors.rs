//! The code of `docs/errors.md`.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use stampede_guard::http::HttpPolicy;
use stampede_guard::{ErrorKind, LoadError, MemoryStore, OnWaitTimeout, Policy, StampedeGuard};

use crate::requests;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct User {
    id: u64,
    name: String,
}

#[derive(Debug)]
enum DbError {
    Down,
}

impl std::fmt::Display for DbError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the database is down")
    }
}

#[derive(Clone, Default)]
struct Database {
    loads: Arc<AtomicUsize>,
}

impl Database {
    /// User 7 there is, and user 13 breaks the database; there are no others.
    async fn user(&self, id: u64) -> Result<Option<User>, DbError> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(10)).await;
        match id {
            7 => Ok(Some(User { id, name: "Ada".to_owned() })),
            13 => Err(DbError::Down),
            _ => Ok(None),
        }
    }
}

#[derive(Clone)]
struct App {
    guard: StampedeGuard,
    db: Database,
}

async fn user(State(app): State<App>, Path(id): Path<u64>) -> Result<Response, LoadError<DbError>> {
    let db = app.db.clone();
    // `Ok(None)` is a value: stored and shared as any other, for `negative_for`.
    let loaded = app.guard.get_or_load(("user", id), move || async move { db.user(id).await }).await;
    Ok(match loaded.inspect_err(|error| eprintln!("{error}"))? {
        Some(user) => Json(user).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    })
}

fn service(guard: &StampedeGuard) -> (Router, Database) {
    let db = Database::default();
    let app = App { guard: guard.clone(), db: db.clone() };
    (Router::new().route("/user/{id}", get(user)).with_state(app), db)
}

#[tokio::test]
async fn not_found_is_a_value() {
    let (app, db) = service(&StampedeGuard::in_memory());
    for _ in 0..3 {
        assert_eq!(requests::get(&app, "/user/7").await.text(), r#"{"id":7,"name":"Ada"}"#);
        assert_eq!(requests::get(&app, "/user/8").await.status, 404);
    }
    assert_eq!(db.loads.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn a_failure_reaches_all_waiters_and_is_not_stored() {
    let (app, db) = service(&StampedeGuard::in_memory());
    let ask = || requests::get(&app, "/user/13");
    let (one, two, three) = tokio::join!(ask(), ask(), ask());
    assert_eq!((one.status, two.status, three.status), (502, 502, 502));
    assert_eq!((one.header("retry-after"), one.text()), ("1", "the load of this resource failed\n"));
    assert_eq!(db.loads.load(Ordering::Relaxed), 1);
    assert_eq!(ask().await.status, 502);
    assert_eq!(db.loads.load(Ordering::Relaxed), 2, "a later caller's load is another one");
}

enum AppError {
    NotFound,
    Database,                    // the load failed, here or in another process
    Busy(stampede_guard::Error), // the guard has no value: a time-out, an overload, a shutdown
}

impl From<LoadError<DbError>> for AppError {
    fn from(error: LoadError<DbError>) -> Self {
        match error {
            LoadError::Guard(error) => Self::Busy(error),
            _ => Self::Database,
        }
    }
}

async fn account(State(app): State<App>, Path(id): Path<u64>) -> Result<Json<User>, AppError> {
    let db = app.db.clone();
    let user = app.guard.get_or_load(("user", id), move || async move { db.user(id).await }).await?;
    user.map(Json).ok_or(AppError::NotFound)
}

impl IntoResponse for AppError {
    fn into_response(self) -> Response {
        match self {
            Self::NotFound => StatusCode::NOT_FOUND.into_response(),
            Self::Database => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
            Self::Busy(error) => error.into_response(),
        }
    }
}

#[tokio::test]
async fn a_load_error_becomes_the_applications_own() {
    let guard = StampedeGuard::in_memory();
    let app = App { guard: guard.clone(), db: Database::default() };
    let app = Router::new().route("/account/{id}", get(account)).with_state(app);
    for (id, status) in [(7, 200), (8, 404), (13, 500)] {
        assert_eq!(requests::get(&app, &format!("/account/{id}")).await.status, status);
    }
    let busy = AppError::from(LoadError::Guard(guard.get::<u8>("").await.expect_err("an empty key")));
    assert_eq!(busy.into_response().status(), 500, "the guard's own status: a bug of the caller");
}

#[derive(Debug, Serialize, Deserialize)]
enum ApiError {
    Forbidden,
    Busy { retry_after: u64 },
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the API refused")
    }
}

#[tokio::test(start_paused = true)]
async fn the_same_error_in_every_process() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().share_errors::<ApiError>().error_for(Duration::from_secs(1)).build()?;
    let store = MemoryStore::new();
    let [here, there] = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    let refuse = || async { Err::<u8, _>(ApiError::Busy { retry_after: 7 }) };
    for guard in [here, there] {
        let error = guard.get_or_load("key", refuse).await.expect_err("refused");
        let status = match error.loader() {
            Some(ApiError::Forbidden) => StatusCode::FORBIDDEN,
            Some(ApiError::Busy { retry_after }) => {
                println!("again after {retry_after} s");
                StatusCode::SERVICE_UNAVAILABLE
            }
            None => StatusCode::BAD_GATEWAY, // another process without the setting, a panic, the guard's own error
        };
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn failures_are_shared_for_error_for() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().error_for(Duration::from_millis(500)).build()?;
    let store = MemoryStore::new();
    let [here, there] = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    let fail = || async { Err::<u8, _>(DbError::Down) };
    let first = here.get_or_load("key", fail).await.expect_err("failed");
    assert!(matches!(first.loader(), Some(DbError::Down)));
    assert_eq!(first.to_string(), "the load failed: the database is down");
    // A moment later, in another process: shared, not loaded.
    let failure = there.get_or_load("key", fail).await.expect_err("failed");
    assert!(failure.is_remote());
    assert_eq!(failure.to_string(), "another caller's load failed: the database is down");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let again = there.get_or_load("key", fail).await.expect_err("failed");
    assert!(again.loader().is_some(), "loaded again");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn limits_of_time() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder()
        .load_timeout(Duration::from_secs(10)) // ends a load; all waiters receive the error
        .wait_timeout(Duration::from_secs(2), OnWaitTimeout::Fail) // a waiter gives up after 2 s; the load goes on
        .build()?;
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let hang = || async { std::future::pending::<Result<u8, DbError>>().await };
    let began = tokio::time::Instant::now();
    let ask = async || {
        let error = guard.get_or_load("key", hang).await.expect_err("too long");
        (error.guard().map(|error| error.kind()), began.elapsed().as_secs())
    };
    let (leader, waiter) = tokio::join!(ask(), ask());
    assert_eq!(leader, (Some(ErrorKind::Timeout), 10));
    assert_eq!(waiter, (Some(ErrorKind::Timeout), 2));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_retried_for_a_waiter() {
    let guard = StampedeGuard::in_memory();
    let tries = Arc::new(AtomicUsize::new(0));
    let ask = || {
        let tries = tries.clone();
        guard.get_or_load("key", move || async move {
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert!(tries.fetch_add(1, Ordering::Relaxed) > 0, "a bug of the first try");
            Ok::<_, DbError>(7)
        })
    };
    let (one, two) = tokio::join!(ask(), ask());
    assert!(matches!(one, Err(LoadError::Panicked(text)) if text == "a bug of the first try"));
    assert_eq!(two.ok(), Some(7));
}

/// The HTTP layer: the handler's own response, or one of the guard.
#[tokio::test(start_paused = true)]
async fn statuses_over_http() -> Result<(), Box<dyn Error>> {
    let loads = Arc::new(AtomicUsize::new(0));
    let count = || {
        let loads = loads.clone();
        async move || {
            loads.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let [missing, failing] = [count(), count()];
    let app = Router::new()
        .route(
            "/missing",
            get(async move || {
                missing().await;
                StatusCode::NOT_FOUND
            }),
        )
        .route(
            "/failing",
            get(async move || {
                failing().await;
                StatusCode::INTERNAL_SERVER_ERROR
            }),
        )
        .route("/panicking", get(async || -> StatusCode { panic!("a bug") }))
        .route("/hanging", get(async || -> StatusCode { std::future::pending().await }))
        .layer(StampedeGuard::in_memory());
    let twice = async |path: &'static str| {
        let (one, two) = tokio::join!(requests::get(&app, path), requests::get(&app, path));
        let later = requests::get(&app, path).await;
        (one.status, two.status, later.status, loads.swap(0, Ordering::Relaxed))
    };
    assert_eq!(twice("/missing").await, (404, 404, 404, 1), "stored");
    assert_eq!(twice("/failing").await, (500, 500, 500, 2), "shared with the waiter, not stored");
    for (path, status, remark) in
        [("/panicking", 502, "fwd=miss; detail=load-panicked"), ("/hanging", 504, "fwd=miss; detail=timeout")]
    {
        let seen = requests::get(&app, path).await;
        assert_eq!((seen.status, seen.remark(), seen.header("retry-after")), (status, remark, "1"));
        assert_eq!(seen.header("cache-control"), "no-store");
    }
    Ok(())
}

/// A pause that the origin asks for.
#[tokio::test(start_paused = true)]
async fn an_origin_asks_for_a_pause() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default().retry_after(Duration::from_secs(60));
    let policy = Policy::builder().http(http).build()?;
    let busy = || async { (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "10")]) };
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let app = Router::new().route("/report", get(busy)).layer(guard);
    for (left, detail) in [("10", "not-stored"), ("7", "retry-after"), ("4", "retry-after")] {
        let seen = requests::get(&app, "/report").await;
        assert_eq!((seen.status, seen.header("retry-after")), (503, left));
        assert_eq!(seen.remark(), format!("fwd=uri-miss; detail={detail}"));
        tokio::time::sleep(Duration::from_secs(3)).await;
    }
    Ok(())
}
