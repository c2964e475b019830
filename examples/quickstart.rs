//! A thousand requests for one report that is not cached, on three replicas of a service: first without
//! the guard, then with it, then once more.
//!
//! ```text
//! cargo run --example quickstart
//! REDIS_URL=redis://127.0.0.1/ cargo run --example quickstart
//! ```
//!
//! Without `REDIS_URL` the replicas share a store in memory, so there is nothing to install. With it they share
//! Redis, as a fleet does, and the last column shows the number of commands. Change the constants below to try a
//! slower origin, a larger capacity, more requests or more replicas.

mod support;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Path;
use axum::http::{Request, StatusCode};
use axum::{Router, routing::get};
use futures_util::StreamExt as _;
use stampede_guard::{Backend, MemoryStore, Policy, StampedeGuard};
use support::{exit, unusable};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tower::ServiceExt as _;

const REPLICAS: usize = 3;
/// The origin answers in `LOAD_TIME`, and runs `CAPACITY` queries at once; the others queue, as in a database.
const LOAD_TIME: Duration = Duration::from_millis(200);
const CAPACITY: usize = 100;
const REQUESTS: usize = 1_000;
/// How much Redis may add to a request. The default of 100 ms is for a service; here a thousand clients, three replicas and the origin
/// share one process, which may be built without optimisation and share its machine.
const BUDGET: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> ExitCode {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    exit(compare().await)
}

/// Sends the same requests without and with the guard.
async fn compare() -> Result<(), Box<dyn Error>> {
    // A new namespace makes every run start cold; a real service has a fixed name.
    let namespace = format!("quickstart-{:08x}", fastrand::u32(..));
    let redis = std::env::var("REDIS_URL").map(redis::Client::open).ok().transpose()?;
    let shared = MemoryStore::new();
    let origin = Origin { capacity: Arc::new(Semaphore::new(CAPACITY)), loads: Arc::default() };

    let unguarded: Vec<Router> = (0..REPLICAS).map(|_| service(&origin)).collect();
    let mut guarded = Vec::new();
    for _ in 0..REPLICAS {
        let backend: Backend = match &redis {
            Some(client) => client.clone().into(),
            None => shared.clone().into(),
        };
        let policy = Policy::builder().coordination_budget(BUDGET).build()?;
        let guard = StampedeGuard::builder(backend).namespace(&*namespace).policy(policy).build()?;
        guard.connect().await.map_err(|error| unusable(&error, "a store in memory"))?;
        // The one line that the service changes:
        guarded.push(service(&origin).layer(guard));
    }

    let meeting = if redis.is_some() { "on Redis" } else { "in memory (set REDIS_URL for Redis)" };
    println!("{REQUESTS} requests at once for one cold key; {REPLICAS} replicas that meet {meeting}.");
    println!("The origin needs {LOAD_TIME:?} for it, and takes {CAPACITY} queries at a time.\n");
    println!("{:18}{:>8}{:>10}{:>10}{:>18}", "", "loads", "p50", "p99", "Redis commands");
    wave("without the guard", &unguarded, &origin, None, "-").await?;
    let watch = redis.as_ref().map(|client| (client, &*namespace));
    let loads = wave("guarded, cold", &guarded, &origin, watch, "n/a in memory").await?;
    if loads != 1 {
        // The warnings above have the reason: a request does without a store that is slower than the budget.
        let late =
            "Redis took longer than coordination_budget (1 s) for some requests, which went on without it";
        return Err(format!("{loads} loads instead of one: {late}. Is this machine, or Redis, busy?").into());
    }
    let loads = wave("guarded, again", &guarded, &origin, watch, "n/a in memory").await?;
    assert_eq!(loads, 0, "all from the store");
    let build = if cfg!(debug_assertions) { "a build without optimisation" } else { "an optimised build" };
    println!(
        "\nThe last row is {REQUESTS} hits at once, in {build}: what they take is mostly their wait for the processor."
    );
    Ok(())
}

/// A slow origin that breaks under a stampede.
#[derive(Clone)]
struct Origin {
    capacity: Arc<Semaphore>,
    loads: Arc<AtomicUsize>,
}

impl Origin {
    async fn report(&self, id: u64) -> Result<String, StatusCode> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        let _connection = self.capacity.acquire().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
        tokio::time::sleep(LOAD_TIME).await;
        Ok(format!("report {id}: all is well\n"))
    }
}

/// One replica.
fn service(origin: &Origin) -> Router {
    let origin = origin.clone();
    Router::new()
        .route("/report/{id}", get(move |Path(id): Path<u64>| async move { origin.report(id).await }))
}

/// Sends all requests at once, and prints and returns how many loads they caused.
async fn wave(
    name: &str,
    replicas: &[Router],
    origin: &Origin,
    watch: Option<(&redis::Client, &str)>,
    unwatched: &str,
) -> Result<usize, Box<dyn Error>> {
    let before = origin.loads.load(Ordering::Relaxed);
    let commands = match watch {
        Some((client, namespace)) => Some(Commands::count(client, namespace).await),
        None => None,
    };

    let mut requests = Vec::new();
    for number in 0..REQUESTS {
        let replica = replicas[number % replicas.len()].clone();
        requests.push(tokio::spawn(async move {
            let request = Request::get("/report/7").header("host", "shop.example").body(Body::empty())?;
            let sent = Instant::now();
            let response = replica.oneshot(request).await?;
            let body = axum::body::to_bytes(response.into_body(), usize::MAX).await?;
            assert_eq!(body, "report 7: all is well\n");
            Ok::<_, Box<dyn Error + Send + Sync>>(sent.elapsed())
        }));
    }
    let mut times = Vec::new();
    for request in requests {
        times.push(request.await?.map_err(|error| error.to_string())?);
    }
    times.sort();

    let loads = origin.loads.load(Ordering::Relaxed) - before;
    let commands = match commands {
        Some(commands) => commands.finish().await,
        None => unwatched.to_owned(),
    };
    let [p50, p99] = [REQUESTS / 2, REQUESTS * 99 / 100].map(|at| times[at].as_secs_f64() * 1e3);
    println!("{name:18}{loads:8}{p50:7.1} ms{p99:7.1} ms{commands:>18}");
    Ok(loads)
}

/// Counts the commands of the replicas (without those that scripts call), if the user may use MONITOR.
struct Commands {
    monitor: Option<(Arc<AtomicUsize>, JoinHandle<()>)>,
}

impl Commands {
    async fn count(client: &redis::Client, namespace: &str) -> Self {
        let Ok(monitor) = client.get_async_monitor().await else { return Self { monitor: None } };
        let (seen, namespace) = (Arc::new(AtomicUsize::new(0)), namespace.to_owned());
        let counting = seen.clone();
        let task = tokio::spawn(async move {
            let mut lines = monitor.into_on_message::<String>();
            while let Some(line) = lines.next().await {
                if line.contains(&namespace) && !line.contains(" lua] ") {
                    counting.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self { monitor: Some((seen, task)) }
    }

    async fn finish(self) -> String {
        let Some((seen, task)) = self.monitor else { return "MONITOR refused".to_owned() };
        // The last lines may still be on their way.
        tokio::time::sleep(Duration::from_millis(100)).await;
        task.abort();
        seen.load(Ordering::Relaxed).to_string()
    }
}
