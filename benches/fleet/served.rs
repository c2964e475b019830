//! What a hit costs in a real server: over real sockets, `wrk` requests from an axum server in this process a response that is stored in a
//! real Redis, and a constant body. Both are measured in turn, and a row is the median of these pairs. Unlike in a deployment, the server,
//! Redis and `wrk` share the processors.

use std::process::Command;
use std::time::Duration;

use axum::{Router, routing::get};
use stampede_guard::{Policy, StampedeGuard};
use tokio::net::TcpListener;

use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

const PAIRS: usize = 5;
const BODY: &str = "a report that took two seconds to make\n";

/// Adds the row of the group `wrk`.
pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let address = runtime.block_on(serve(&server));
    let (mut ratios, mut rates) = (Vec::new(), Vec::new());
    // The first pair only warms up.
    for pair in 0..=PAIRS {
        let [guarded, constant] =
            ["guarded", "constant"].map(|path| wrk(&format!("http://{address}/{path}")));
        if pair > 0 {
            ratios.push(guarded / constant);
            rates.push(guarded / 1e3);
        }
    }
    let (ratios, rates) = (Spread::of(&ratios), Spread::of(&rates));
    table.add(Row {
        what: "wrk, 64 connections: an axum server's hits / the same server with a constant body".into(),
        unit: Unit::Ratio,
        must: Limit::AtLeast(0.6),
        aim: Limit::AtLeast(0.8),
        measured: ratios.median,
        detail: format!("{ratios}; {:.0} k/s", rates.median),
    });
}

async fn serve(server: &RedisServer) -> std::net::SocketAddr {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(3600))
        .coordination_budget(Duration::from_secs(4))
        .command_timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(4))
        .build()
        .expect("valid");
    let guard = StampedeGuard::builder(server.client()).policy(policy).build().expect("valid");
    guard.connect().await.expect("connects");
    let app = Router::new()
        .route("/guarded", get(|| async { BODY }))
        .layer(guard)
        .route("/constant", get(|| async { BODY }));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Runs `wrk`, and returns the requests per second that it reports.
fn wrk(url: &str) -> f64 {
    let run = Command::new("wrk").args(["-t1", "-c64", "-d2s", url]).output();
    let run = run.unwrap_or_else(|error| panic!("wrk: {error}; install it: apt-get install -y wrk"));
    let text = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success() && !text.contains("Non-2xx"), "{text}");
    let rate = text.lines().find_map(|line| line.strip_prefix("Requests/sec:"));
    rate.and_then(|rate| rate.trim().parse().ok()).unwrap_or_else(|| panic!("no rate in {text}"))
}
