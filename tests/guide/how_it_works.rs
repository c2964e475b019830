//! The measurements behind docs/pictures/stampede.svg (a thousand requests for one cold key, without and with the guard) and
//! docs/pictures/redis-down.svg (what one request takes while Redis hangs). To repeat them, with a server of your own:
//!
//! ```text
//! redis-server --port 7001 --save '' --daemonize yes --pidfile /tmp/redis-7001.pid
//! export REDIS_URL=redis://127.0.0.1:7001/ REDIS_PID=$(cat /tmp/redis-7001.pid) PICTURES=$PWD/docs/pictures
//! cargo test --release -p stampede-guard-guide how_it_works -- --include-ignored --test-threads 1
//! scripts/pictures
//! ```
//!
//! Without `REDIS_URL` the replicas share a store in memory, and without `PICTURES` nothing is written.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Path;
use axum::http::Request;
use axum::{Router, routing::get};
use stampede_guard::{Backend, MemoryStore, StampedeGuard};
use tokio::sync::Semaphore;
use tower::ServiceExt as _;

type Error = Box<dyn std::error::Error + Send + Sync>;

const REPLICAS: usize = 3;
const REQUESTS: usize = 1_000;
const LOAD_TIME: Duration = Duration::from_millis(200);
const CAPACITY: usize = 100;
/// The distance between two lines of the data.
const STEP: Duration = Duration::from_millis(10);

/// One load, as the origin sees it.
#[derive(Clone, Copy)]
struct Load {
    requested: Instant,
    begun: Instant,
    ended: Instant,
}

/// A database that runs `CAPACITY` queries at once; the others queue.
#[derive(Clone)]
struct Origin {
    capacity: Arc<Semaphore>,
    loads: Arc<Mutex<Vec<Load>>>,
}

impl Origin {
    fn new() -> Self {
        Self { capacity: Arc::new(Semaphore::new(CAPACITY)), loads: Arc::default() }
    }

    async fn report(&self, id: u64) -> String {
        let requested = Instant::now();
        let _connection = self.capacity.acquire().await.expect("never closed");
        let begun = Instant::now();
        tokio::time::sleep(LOAD_TIME).await;
        let ended = Instant::now();
        self.loads.lock().expect("not poisoned").push(Load { requested, begun, ended });
        format!("report {id}: all is well\n")
    }
}

fn service(origin: &Origin) -> Router {
    let origin = origin.clone();
    Router::new()
        .route("/report/{id}", get(move |Path(id): Path<u64>| async move { origin.report(id).await }))
}

/// Sends all requests at once. Returns the number of loads and appends the lines of the data.
async fn wave(run: &str, replicas: &[Router], origin: &Origin, csv: &mut String) -> Result<usize, Error> {
    let start = Instant::now();
    let mut requests = Vec::new();
    for number in 0..REQUESTS {
        let replica = replicas[number % REPLICAS].clone();
        requests.push(tokio::spawn(async move {
            let request = Request::get("/report/7").header("host", "shop.example").body(Body::empty())?;
            let response = replica.oneshot(request).await?;
            let body = axum::body::to_bytes(response.into_body(), usize::MAX).await?;
            assert_eq!(body, "report 7: all is well\n");
            Ok::<_, Error>(Instant::now())
        }));
    }
    let mut answers = Vec::new();
    for request in requests {
        answers.push(request.await??);
    }
    let loads = std::mem::take(&mut *origin.loads.lock().expect("not poisoned"));
    let last = answers.iter().max().expect("some requests");
    let mut at = start;
    while at < *last + STEP {
        let queued = loads.iter().filter(|load| load.requested <= at && at < load.begun).count();
        let running = loads.iter().filter(|load| load.begun <= at && at < load.ended).count();
        let finished = loads.iter().filter(|load| load.ended <= at).count();
        let answered = answers.iter().filter(|&&answer| answer <= at).count();
        let ms = (at - start).as_millis();
        writeln!(csv, "{run},{ms},{queued},{running},{finished},{answered}")?;
        at += STEP;
    }
    Ok(loads.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stampede_is_one_load_with_the_guard() -> Result<(), Error> {
    let redis = std::env::var("REDIS_URL").map(redis::Client::open).ok().transpose()?;
    let shared = MemoryStore::new();
    let namespace = format!("stampede-{}", std::process::id());
    let origin = Origin::new();
    let unguarded: Vec<Router> = (0..REPLICAS).map(|_| service(&origin)).collect();
    let mut guarded = Vec::new();
    for _ in 0..REPLICAS {
        let backend: Backend = match &redis {
            Some(client) => client.clone().into(),
            None => shared.clone().into(),
        };
        let guard = StampedeGuard::builder(backend).namespace(&*namespace).build()?;
        guard.connect().await?;
        guarded.push(service(&origin).layer(guard));
    }

    let mut csv = "run,ms,queued,running,finished,answered\n".to_owned();
    assert_eq!(wave("without", &unguarded, &origin, &mut csv).await?, REQUESTS);
    assert_eq!(wave("with", &guarded, &origin, &mut csv).await?, 1);
    write_data("stampede.csv", &csv)
}

/// Writes the data of a picture, if `PICTURES` names the folder.
fn write_data(name: &str, csv: &str) -> Result<(), Error> {
    if let Ok(folder) = std::env::var("PICTURES") {
        std::fs::write(format!("{folder}/{name}"), csv)?;
    }
    Ok(())
}

fn signal(name: &str, pid: &str) -> Result<(), Error> {
    assert!(std::process::Command::new("kill").args([name, pid]).status()?.success());
    Ok(())
}

/// One caller asks for a new key each 20 ms, before, while and after the server hangs.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "stops the server with the id REDIS_PID for three seconds"]
async fn a_server_that_hangs_costs_its_first_requests_the_budget() -> Result<(), Error> {
    const BEFORE: Duration = Duration::from_millis(1_000);
    const HANGS: Duration = Duration::from_millis(3_000);
    const AFTER: Duration = Duration::from_millis(1_000);
    let pid = std::env::var("REDIS_PID")?;
    let guard = StampedeGuard::new(redis::Client::open(std::env::var("REDIS_URL")?)?);
    guard.connect().await?;
    let run = std::process::id();
    let mut csv = "ms,added_ms,answer\n".to_owned();
    // The first calls open the inbox and send the scripts' texts.
    for number in 0..10 {
        guard.get_or_load(("warm", run, number), || async { Ok::<_, std::io::Error>(7) }).await?;
    }

    let start = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let (mut stopped, mut resumed) = (false, false);
    for number in 0.. {
        ticks.tick().await;
        let at = start.elapsed();
        if !stopped && at >= BEFORE {
            stopped = true;
            signal("-STOP", &pid)?;
            writeln!(csv, "{:.1},0,stopped", at.as_secs_f64() * 1e3)?;
        }
        if !resumed && at >= BEFORE + HANGS {
            resumed = true;
            signal("-CONT", &pid)?;
            writeln!(csv, "{:.1},0,resumed", at.as_secs_f64() * 1e3)?;
        }
        if at >= BEFORE + HANGS + AFTER {
            break;
        }
        let alone = guard.stats().fail_open_loads;
        let requested = Instant::now();
        guard.get_or_load(("key", run, number), || async { Ok::<_, std::io::Error>(7) }).await?;
        let took = requested.elapsed().as_secs_f64() * 1e3;
        let answer = if guard.stats().fail_open_loads > alone { "alone" } else { "redis" };
        writeln!(csv, "{:.1},{took:.3},{answer}", at.as_secs_f64() * 1e3)?;
    }
    write_data("redis-down.csv", &csv)
}
