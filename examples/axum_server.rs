//! A slow route behind the guard, in a real server.
//!
//! ```text
//! cargo run --example axum_server                                             one process
//! REDIS_URL=redis://127.0.0.1/ PORT=8081 cargo run --example axum_server      a replica of a fleet
//! SENTINELS=127.0.0.1:26379 cargo run --example axum_server --features sentinel   behind Sentinel (`make sentinel`)
//! CLUSTER=127.0.0.1:6379 cargo run --example axum_server --features cluster        on a Redis Cluster (`make cluster`)
//! ```
//!
//! Then, from another terminal; the second and third line are the stampede:
//!
//! ```text
//! curl -i http://127.0.0.1:8080/report/7
//! hey -n 2000 -c 200 http://127.0.0.1:8080/report/8
//! wrk -t2 -c200 -d10s http://127.0.0.1:8080/report/9
//! curl -X DELETE http://127.0.0.1:8080/report/7
//! ```
//!
//! Watch the `Cache-Status` header and the lines that the server prints: one per load. `RUN_ONCE=1` sends itself
//! a few requests and ends. Ctrl-C and SIGTERM end it as a deployment does: what runs is answered, what takes longer
//! than `DEADLINE_MS` is handed to another replica. `LOAD_MS` is how long a report takes. `BUDGET_MS` and
//! `LEASE_MS` are for a machine or a network that is slower than the defaults of 100 ms and 2 s are made for.

use std::error::Error;
use std::future::IntoFuture as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{Request, StatusCode, header};
use axum::{Router, routing};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use stampede_guard::{Backend, MemoryStore, Policy, StampedeGuard};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // What keeps the guard from its server, and what to do about it, is a warning.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let once = std::env::var_os("RUN_ONCE").is_some();
    let policy = Policy::builder()
        .coordination_budget(millis("BUDGET_MS", 100))
        .lease(millis("LEASE_MS", 2_000))
        .build()?;
    let guard = StampedeGuard::builder(backend()?).policy(policy).build()?;
    // Not required: connected here, the first request does not wait for it. A Redis that is down stops nothing.
    if let Err(error) = guard.connect().await {
        println!("{error}; requests are answered all the same");
    }

    let app = Router::new()
        .route("/report/{id}", routing::get(report))
        .layer(guard.clone())
        // Outside the guard, because it is about the guard.
        .route("/report/{id}", routing::delete(forget))
        .with_state(guard.clone());

    let port = match std::env::var("PORT") {
        Ok(port) => port.parse()?,
        Err(_) if once => 0,
        Err(_) => 8080,
    };
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}; try\n");
    println!("  curl -i {url}/report/7");
    println!("  hey -n 2000 -c 200 {url}/report/8");
    println!("  wrk -t2 -c200 -d10s {url}/report/9");
    println!("  curl -X DELETE {url}/report/7\n");

    let (stopping, stopped) = tokio::sync::oneshot::channel();
    let stop = async move {
        if once {
            if let Err(error) = visit(&url).await {
                println!("{error}");
            }
        } else {
            asked_to_end().await;
        }
        let _ = stopping.send(());
    };
    let serving = axum::serve(listener, app).with_graceful_shutdown(stop).into_future();
    let ending = async {
        let _ = stopped.await;
        // Beside the server, which waits for its requests, however long they take. Loads that nobody waits for any
        // more still deserve to be stored; what takes longer goes to another replica, and its clients are cut.
        guard.shutdown(millis("DEADLINE_MS", 5_000)).await
    };
    tokio::pin!(serving, ending);
    let shutdown = tokio::select! {
        served = &mut serving => {
            served?;
            ending.await
        }
        shutdown = &mut ending => {
            if shutdown.finished {
                // Its loads have ended, so its answers are on their way.
                serving.await?;
            }
            shutdown
        }
    };
    println!("{shutdown:?}");
    println!("{:?}", guard.stats());
    Ok(())
}

/// Waits for Ctrl-C or, where there is such a thing, SIGTERM.
async fn asked_to_end() {
    let interrupted = async {
        if tokio::signal::ctrl_c().await.is_err() {
            // Without the signal there is no graceful end; serving goes on.
            std::future::pending().await
        }
    };
    #[cfg(unix)]
    if let Ok(mut terminated) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        tokio::select! {
            () = interrupted => {}
            _ = terminated.recv() => {}
        }
        return;
    }
    interrupted.await;
}

/// A time in milliseconds from the environment.
fn millis(name: &str, otherwise: u64) -> Duration {
    let given = std::env::var(name).ok().and_then(|given| given.parse().ok());
    Duration::from_millis(given.unwrap_or(otherwise))
}

/// Where the fleet meets, by the environment.
fn backend() -> Result<Backend, Box<dyn Error>> {
    #[cfg(feature = "sentinel")]
    if let Ok(sentinels) = std::env::var("SENTINELS") {
        use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
        let addresses = sentinels.split(',').map(|sentinel| {
            let (host, port) = sentinel.rsplit_once(':').ok_or("SENTINELS=host:port,host:port")?;
            Ok(redis::ConnectionAddr::Tcp(host.to_owned(), port.parse()?))
        });
        let addresses = addresses.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        let name = std::env::var("SENTINEL_NAME").unwrap_or_else(|_| "mymaster".to_owned());
        return Ok(SentinelClientBuilder::new(addresses, name, SentinelServerType::Master)?.build()?.into());
    }
    #[cfg(feature = "cluster")]
    if let Ok(nodes) = std::env::var("CLUSTER") {
        let nodes = nodes.split(',').map(|node| format!("redis://{node}/"));
        return Ok(redis::cluster::ClusterClient::new(nodes)?.into());
    }
    Ok(match std::env::var("REDIS_URL") {
        Ok(url) => redis::Client::open(url)?.into(),
        Err(_) => MemoryStore::new().into(),
    })
}

/// Takes its time, as a report does. `max-age` is how long the guard keeps it.
async fn report(Path(id): Path<u64>) -> ([(header::HeaderName, &'static str); 1], String) {
    static LOADS: AtomicU64 = AtomicU64::new(0);
    println!("load {} (report {id})", LOADS.fetch_add(1, Ordering::Relaxed) + 1);
    tokio::time::sleep(millis("LOAD_MS", 1_000)).await;
    ([(header::CACHE_CONTROL, "max-age=30")], format!("report {id}: all is well\n"))
}

/// Forgets a report in the whole fleet, also one that is being loaded.
async fn forget(
    State(guard): State<StampedeGuard>,
    request: Request<Body>,
) -> Result<&'static str, StatusCode> {
    // What a GET of the same report is stored under, by the guard's policy: without what only this request has, such as
    // its sender's credentials.
    let mut get = Request::new(());
    *get.uri_mut() = request.uri().clone();
    get.headers_mut().extend(request.headers().get(header::HOST).map(|host| (header::HOST, host.clone())));
    let key = guard.http_key(&get).ok_or(StatusCode::BAD_REQUEST)?;
    guard.invalidate(key).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok("forgotten\n")
}

/// What the commands above do, for a run without a terminal beside it.
async fn visit(url: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let send = async |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(format!("{url}{path}")).body(Body::empty())?;
        let sent = Instant::now();
        let response = client.request(request).await?;
        let status = response.headers().get(header::CACHE_STATUS).and_then(|value| value.to_str().ok());
        let (ms, status) = (sent.elapsed().as_millis(), status.unwrap_or("-"));
        println!("{method:6} {path}: {} in {ms} ms, cache-status: {status}", response.status());
        Ok::<_, Box<dyn Error + Send + Sync>>(())
    };
    let (one, two) = tokio::join!(send("GET", "/report/7"), send("GET", "/report/7"));
    one.and(two)?;
    send("GET", "/report/7").await?;
    send("HEAD", "/report/7").await?;
    send("DELETE", "/report/7").await?;
    send("GET", "/report/7").await
}
