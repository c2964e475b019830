//! `docs/locks.md`.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{Request, StatusCode};
use axum::{Router, routing::post};
use stampede_guard::StampedeGuard;
use stampede_guard::lock::{LockError, Locks, Mutex, Scope, Semaphore, Wait, Waiting};
use tower::ServiceExt as _;

#[derive(Clone)]
struct App {
    locks: Locks,
    reports: Semaphore,
}

async fn build_index() {
    tokio::time::sleep(Duration::from_millis(200)).await;
}

async fn rebuild(State(app): State<App>) -> Result<StatusCode, StatusCode> {
    let index = app.locks.mutex("search-index").ttl(Duration::from_secs(10)).auto_renew(true);
    let index = index.build().map_err(refused)?;
    let Some(mut held) = index.try_lock().await.map_err(refused)? else {
        return Ok(StatusCode::CONFLICT); // another request, here or in another process, rebuilds it
    };
    tokio::select! {
        () = build_index() => {}
        () = held.lost() => return Err(StatusCode::SERVICE_UNAVAILABLE), // another process may rebuild it by now
    }
    let was_held = held.unlock().await.map_err(refused)?;
    Ok(if was_held { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE })
}

fn refused(error: LockError) -> StatusCode {
    match error {
        error if error.is_busy() => StatusCode::TOO_MANY_REQUESTS, // other holders held it all the time
        error if error.is_store() => StatusCode::SERVICE_UNAVAILABLE, // Redis could not be reached
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

async fn report(State(app): State<App>, Path(id): Path<u64>) -> Result<String, StatusCode> {
    let permit = app.reports.acquire(Wait::For(Duration::from_secs(1))).await.map_err(refused)?;
    let Some(_permit) = permit else { return Err(StatusCode::SERVICE_UNAVAILABLE) };
    Ok(render(id).await) // at most five of these run, in all processes together
}

static RUNNING: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

async fn render(id: u64) -> String {
    MOST.fetch_max(RUNNING.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(20)).await;
    RUNNING.fetch_sub(1, Ordering::SeqCst);
    format!("report {id}")
}

fn app() -> Result<Router, LockError> {
    let guard = StampedeGuard::in_memory();
    let locks = guard.locks(); // or Locks::new(redis), without a guard
    let reports = Semaphore::new(&locks, "reports", 5)?;
    let app = App { locks, reports };
    Ok(Router::new().route("/rebuild", post(rebuild)).route("/report/{id}", post(report)).with_state(app))
}

async fn status(app: &Router, path: &str) -> StatusCode {
    let request = Request::post(path).body(Body::empty()).expect("a request");
    app.clone().oneshot(request).await.expect("never fails").status()
}

#[tokio::test]
async fn one_request_rebuilds() -> Result<(), Box<dyn Error>> {
    let app = app()?;
    let (one, two) = tokio::join!(status(&app, "/rebuild"), status(&app, "/rebuild"));
    assert_eq!((one, two), (StatusCode::OK, StatusCode::CONFLICT));
    assert_eq!(status(&app, "/rebuild").await, StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn reports_take_turns() -> Result<(), Box<dyn Error>> {
    let app = app()?;
    let mut all = tokio::task::JoinSet::new();
    for id in 0..20 {
        let app = app.clone();
        all.spawn(async move { status(&app, &format!("/report/{id}")).await });
    }
    assert!(all.join_all().await.iter().all(|status| *status == StatusCode::OK));
    assert_eq!(MOST.load(Ordering::SeqCst), 5);
    Ok(())
}

/// A database that compares fences.
#[derive(Default)]
struct Account {
    balance: i64,
    fence: u64,
}

impl Account {
    /// Refuses the late write of an earlier holder.
    fn write(&mut self, balance: i64, fence: u64) -> Result<(), &'static str> {
        if fence < self.fence {
            return Err("a later holder has written");
        }
        (self.balance, self.fence) = (balance, fence);
        Ok(())
    }
}

#[tokio::test]
async fn a_fence_refuses_late_writes() -> Result<(), Box<dyn Error>> {
    let locks = Locks::in_memory();
    let (id, mut account) = (7, Account::default());

    let mutex = Mutex::new(&locks, Scope::new("account").local(id))?;
    let first = mutex.synchronize(|held| async move { held.fence() }).await?.value;
    let done = mutex.synchronize(|held| async move { held.fence() }).await?;
    assert!(done.still_held);
    account.write(100, done.value)?;
    assert!(account.write(50, first).is_err()); // a process that was paused for longer than its time to live

    assert_eq!(account.balance, 100);
    Ok(())
}

#[tokio::test]
async fn in_steps() -> Result<(), Box<dyn Error>> {
    let (locks, pages) = (Locks::in_memory(), [1, 2, 3]);
    let mutex = Mutex::new(&locks, "import")?;
    let mut imported = 0;

    let mut held = mutex.lock().await?;
    for page in pages {
        imported += page;
        let was_held = held.bump().await?; // each waiter has a turn; then this caller has a new acquisition
        assert!(was_held);
    }
    held.unlock().await?;

    assert_eq!(imported, 6);
    Ok(())
}

#[tokio::test]
async fn settings_of_a_mutex() -> Result<(), Box<dyn Error>> {
    let locks = Locks::in_memory();

    let counter = locks
        .mutex("counter")
        .ttl(Duration::from_secs(5))
        .acquire_timeout(Duration::from_secs(2))
        .wait(Waiting::Notify)
        .build()?;
    let mut held = counter.lock().await?;
    assert!(held.unlock().await?);

    Ok(())
}

#[tokio::test]
async fn a_deployment_ends_the_waits() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::in_memory();
    let locks = guard.locks();
    let (one, two) = (Mutex::new(&locks, "import")?, Mutex::new(&locks, "import")?);
    let held = one.lock().await?;
    let waits = tokio::spawn(async move { two.lock().await.map(drop) });
    tokio::time::sleep(Duration::from_millis(50)).await;

    drop(held); // released in the background
    let ended = guard.shutdown(Duration::from_secs(5)).await; // loads, waits for locks, and releases in the background
    assert_eq!(ended.abandoned, 0);

    let _ = waits.await?;
    Ok(())
}

#[tokio::test]
async fn a_waiter_is_sent_away_when_the_locks_are_closed() -> Result<(), Box<dyn Error>> {
    let locks = Locks::in_memory();
    let (one, two) = (Mutex::new(&locks, "import")?, Mutex::new(&locks, "import")?);
    let _held = one.lock().await?;
    let waits = tokio::spawn(async move { two.lock().await.map(drop) });
    tokio::time::sleep(Duration::from_millis(50)).await;
    locks.close().await;
    assert!(matches!(waits.await?, Err(LockError::Closed)));
    Ok(())
}

#[tokio::test]
async fn readme_locks() -> Result<(), Box<dyn Error>> {
    let locks = Locks::in_memory();
    let mutex = Mutex::new(&locks, Scope::new("server_access").local(7))?;
    let done = mutex.synchronize(|held| async move { held.fence() }).await?;
    assert!(done.still_held);
    let mut guard = mutex.lock().await?;
    let fence = guard.fence();
    assert!(guard.bump().await?);
    assert!(guard.fence() > fence);
    assert!(guard.unlock().await?);
    Ok(())
}
