//! Hits in a real server: over real sockets, `wrk` requests from an axum server a response that its local tier has, and a constant body.
//! The server is a process with two worker threads, on half of the available processors; `wrk` uses the other half. Both paths are measured
//! in turn, and a row is the median of these pairs.

use std::process::Command;
use std::time::Duration;

use axum::{Router, routing::get};
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::StampedeGuard;
use tokio::net::TcpListener;

use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};
use crate::values::lasting;

pub(crate) const ROLE: Role = ("serves", serves);

const PAIRS: usize = 7;
const BODY: &str = "a report that took two seconds to make\n";
const ADDRESS: &str = "address";

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    redis: String,
}

pub(crate) fn rows(table: &mut Table) {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (fleet, address) = runtime.block_on(async {
        let fleet = Fleet::spawn(1, "serves", &Config { redis: server.url() });
        let address = fleet.member(0).wait_event(ADDRESS).await;
        let address = address.as_str().expect("an address").to_owned();
        (fleet, address)
    });
    for threads in [2, 1] {
        let (ratios, rates) = pairs(&address, threads);
        let (must, aim) = match threads {
            2 => (Limit::AtLeast(0.85), Limit::AtLeast(0.95)),
            _ => (Limit::None, Limit::None),
        };
        table.add(Row {
            what: format!("wrk -t{threads}, 64 connections: local hits of an axum server / the same server, a constant body"),
            unit: Unit::Ratio,
            must,
            aim,
            measured: ratios.median,
            detail: format!("{ratios}; {:.0} k/s, control {:.0} k/s", rates[0].median, rates[1].median),
        });
    }
    let [local, hits] = runtime.block_on(async {
        fleet.member(0).send("counts");
        fleet.member(0).result::<[u64; 2]>().await
    });
    println!("({:.2}% of the hits from memory)", local as f64 / hits as f64 * 100.0);
}

/// Measures in pairs. Returns the ratios of requests per second, and for each of both paths thousands of requests per second.
fn pairs(address: &str, threads: u32) -> (Spread, [Spread; 2]) {
    let (mut ratios, mut rates) = (Vec::new(), [Vec::new(), Vec::new()]);
    // The first pair only warms up.
    for pair in 0..=PAIRS {
        let mut pair_rates = [0.0; 2];
        for turn in 0..2 {
            let side = (pair + turn) % 2;
            let path = ["guarded", "constant"][side];
            pair_rates[side] = wrk(threads, &format!("http://{address}/{path}"));
        }
        if pair > 0 {
            ratios.push(pair_rates[0] / pair_rates[1]);
            rates.iter_mut().zip(pair_rates).for_each(|(rates, rate)| rates.push(rate / 1e3));
        }
    }
    (Spread::of(&ratios), rates.map(|rates| Spread::of(&rates)))
}

/// The process of the server. Its runtime, like that of each role, has two worker threads.
fn serves(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let policy =
            lasting().coordination_budget(Duration::from_secs(4)).command_timeout(Duration::from_secs(1));
        let policy = policy.lease(Duration::from_secs(4)).build().expect("valid");
        let client = redis::Client::open(redis.as_str()).expect("an address");
        let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
        guard.connect().await.expect("connects");
        let app = Router::new()
            .route("/guarded", get(|| async { BODY }))
            .layer(guard.clone())
            .route("/constant", get(|| async { BODY }));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        tokio::spawn(async move { axum::serve(listener, app).await });
        child.report().event_with(ADDRESS, &address);
        loop {
            child.recv_line().await;
            let stats = guard.stats();
            child.result(&[stats.local_hits, stats.local_hits + stats.hits]);
        }
    })
}

/// Runs `wrk`, and returns the requests per second that it reports.
fn wrk(threads: u32, url: &str) -> f64 {
    let run = Command::new("wrk").args([&format!("-t{threads}"), "-c64", "-d2s", url]).output();
    let run = run.unwrap_or_else(|error| panic!("wrk: {error}; install it: apt-get install -y wrk"));
    let text = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success() && !text.contains("Non-2xx"), "{text}");
    let rate = text.lines().find_map(|line| line.strip_prefix("Requests/sec:"));
    rate.and_then(|rate| rate.trim().parse().ok()).unwrap_or_else(|| panic!("no rate in {text}"))
}
