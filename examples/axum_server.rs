//! A slow route behind the guard, in a real server.
//!
//! ```text
//! cargo run --example axum_server                                             one process
//! REDIS_URL=redis://127.0.0.1/ PORT=8081 cargo run --example axum_server      a replica of a fleet
//! SENTINELS=127.0.0.1:26379 cargo run --example axum_server --features sentinel   behind Sentinel (`make sentinel`)
//! CLUSTER=127.0.0.1:6379 cargo run --example axum_server --features cluster        on a Redis Cluster (`make cluster`)
//! ```
//!
//! Then, from another terminal (the second and third line cause the stampede):
//!
//! ```text
//! curl -i http://127.0.0.1:8080/report/7
//! hey -n 2000 -c 200 http://127.0.0.1:8080/report/8
//! wrk -t2 -c200 -d10s http://127.0.0.1:8080/report/9
//! curl -X DELETE http://127.0.0.1:8080/report/7
//! ```
//!
//! With `--features inspector` and an `INSPECTOR_TOKEN` of 16 characters, `/_cache` shows the fleet, by the `NAME` of each process, and may
//! act.
//!
//! Watch the `Cache-Status` header and the server's output, which has a line per load. With `RUN_ONCE=1` the server sends
//! itself a few requests and ends. Ctrl-C and SIGTERM end it as in a deployment: running requests are answered, and loads
//! that take longer than `DEADLINE_MS` are handed to another replica. `LOAD_MS` is how long a report takes. Raise
//! `BUDGET_MS` and `LEASE_MS` (100 ms and 2 s) on a slow machine or network.

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
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let once = std::env::var_os("RUN_ONCE").is_some();
    let policy = Policy::builder()
        .coordination_budget(millis("BUDGET_MS", 100))
        .lease(millis("LEASE_MS", 2_000))
        .build()?;
    let guard = StampedeGuard::builder(backend()?).policy(policy).build()?;
    // Optional: the first request then need not wait for the connection. The server also starts while Redis is down.
    if let Err(error) = guard.connect().await {
        println!("{error}; requests are answered all the same");
    }

    let app = Router::new()
        .route("/report/{id}", routing::get(report))
        .layer(guard.clone())
        // Outside the guard, because the handler calls the guard.
        .route("/report/{id}", routing::delete(forget))
        .with_state(guard.clone());
    #[cfg(feature = "inspector")]
    let app = match std::env::var("INSPECTOR_TOKEN") {
        Ok(token) => {
            let inspector = guard.inspector().token(token).name(std::env::var("NAME").unwrap_or_default());
            app.nest_service("/_cache", inspector.allow_actions(true).into_service()?)
        }
        Err(_) => app,
    };

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
            shutdown_signal().await;
        }
        let _ = stopping.send(());
    };
    let serving = axum::serve(listener, app).with_graceful_shutdown(stop).into_future();
    let ending = async {
        let _ = stopped.await;
        // In parallel to the server, which waits for its requests without a limit. (A service whose handlers hold locks, or call the
        // guard without a loader, ends its requests first: docs/service.md. Here a DELETE that comes now gets a 503.) Abandoned loads are still worth
        // storing; a load past the deadline is handed to another replica, and its clients are disconnected.
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
                // All loads have ended, so all responses are on their way.
                serving.await?;
            }
            shutdown
        }
    };
    println!("{shutdown:?}");
    println!("{:?}", guard.stats());
    Ok(())
}

/// Waits for Ctrl-C or, on Unix, SIGTERM.
async fn shutdown_signal() {
    let interrupted = async {
        if tokio::signal::ctrl_c().await.is_err() {
            // Without a signal handler there is no graceful shutdown; continue to serve.
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
    let configured = std::env::var(name).ok().and_then(|text| text.parse().ok());
    Duration::from_millis(configured.unwrap_or(otherwise))
}

/// The backend that the environment names.
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

/// A slow handler. `max-age` is how long the guard serves the report.
async fn report(Path(id): Path<u64>) -> ([(header::HeaderName, &'static str); 1], String) {
    static LOADS: AtomicU64 = AtomicU64::new(0);
    println!("load {} (report {id})", LOADS.fetch_add(1, Ordering::Relaxed) + 1);
    tokio::time::sleep(millis("LOAD_MS", 1_000)).await;
    ([(header::CACHE_CONTROL, "max-age=30")], format!("report {id}: all is well\n"))
}

/// Invalidates a report in the whole fleet, also one that is being loaded.
async fn forget(
    State(guard): State<StampedeGuard>,
    request: Request<Body>,
) -> Result<&'static str, StatusCode> {
    // The key of a GET of the same report, by the guard's policy. The GET has none of this request's other headers, such
    // as the sender's credentials.
    let mut get = Request::new(());
    *get.uri_mut() = request.uri().clone();
    get.headers_mut().extend(request.headers().get(header::HOST).map(|host| (header::HOST, host.clone())));
    let key = guard.http_key(&get).ok_or(StatusCode::BAD_REQUEST)?;
    guard.invalidate(key).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok("forgotten\n")
}

/// Sends the requests of the commands above, for `RUN_ONCE`.
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
