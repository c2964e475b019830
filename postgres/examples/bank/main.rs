//! A bank: a service that transfers money, and a service that shows balances from caches that follow the log of the database. A client
//! that sends the position of its transfer in the log receives no older balance, on any replica.
//!
//! ```text
//! cargo run -p stampede-guard-postgres --example bank
//! REDIS_URL=redis://127.0.0.1/ DATABASE_URL=postgres://postgres@127.0.0.1/postgres cargo run -p stampede-guard-postgres --example bank
//! ```
//!
//! The second line has the defaults. Postgres needs `wal_level = logical`. Each service has two replicas, on free ports. From another
//! terminal, with the URLs that the example prints:
//!
//! ```text
//! curl -i -X POST '<transfers 0>/transfer?from=1&to=2&cents=250'
//! curl -i -H 'log-position: <that of the transfer>' <statements 1>/account/2
//! curl -i <statements 0>/total
//! ```
//!
//! With `RUN_ONCE=1` the example sends itself such requests and ends.

mod database;
mod services;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use database::{Database, Error};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use services::{LOG_POSITION, Replica, statements, transfers};
use stampede_guard::{Policy, StampedeGuard};
use stampede_guard_postgres::PostgresLog;
use tokio::net::TcpListener;

const REPLICAS: usize = 2;

#[tokio::main]
async fn main() -> ExitCode {
    // Prints the warnings of the guard and of the reader.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    let variable = |name, otherwise: &str| std::env::var(name).unwrap_or_else(|_| otherwise.to_owned());
    let redis = variable("REDIS_URL", "redis://127.0.0.1/");
    let postgres = variable("DATABASE_URL", "postgres://postgres@127.0.0.1/postgres");
    let start = "`postgres -c wal_level=logical`, and set DATABASE_URL";
    let database = Database::open(&postgres).await.map_err(|error| unusable("Postgres", &*error, start))?;
    let database = Arc::new(database);
    let policy = Policy::builder()
        // Each change of a balance is in the log, so no balance has to expire.
        .fresh_for(Duration::from_secs(24 * 3600))
        .local_for(Duration::MAX)
        // The reader's answer to a lost slot.
        .invalidate_all(true)
        .build()?;
    let (mut urls, mut guards) = (Vec::new(), Vec::new());
    for (name, service) in [("transfers", transfers as fn() -> _), ("statements", statements)] {
        for number in 0..REPLICAS {
            // Both services cache the same entries, so they have the same namespace.
            let guard = StampedeGuard::builder(redis::Client::open(&*redis)?).namespace("bank");
            let guard = guard.policy(policy.clone()).build()?;
            let start = "`redis-server`, and set REDIS_URL";
            guard.connect().await.map_err(|error| unusable("Redis", &error, start))?;
            let log = PostgresLog::builder(&guard, [&*postgres]).slot("bank").build()?;
            // One replica of all reads the log; the others wait to take over.
            log.spawn();
            let replica = Replica { database: Arc::clone(&database), guard: guard.clone(), log };
            let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
            let url = format!("http://{}", listener.local_addr()?);
            println!("{name} {number}: {url}");
            let app = service().with_state(replica);
            tokio::spawn(async move { axum::serve(listener, app).await });
            urls.push(url);
            guards.push(guard);
        }
    }
    if std::env::var_os("RUN_ONCE").is_some() {
        visit(&urls).await?;
    } else {
        tokio::signal::ctrl_c().await?;
    }
    for guard in guards {
        guard.shutdown(Duration::from_secs(5)).await;
    }
    Ok(())
}

/// The message for a server that can not be used: the error with all its causes, and the remedy.
fn unusable(server: &str, error: &(dyn std::error::Error + 'static), start: &str) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let text = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
    format!("{server} can not be used ({text}): start {start} to its URL.")
}

/// Transfers money and reads balances, with and without the position of the transfer.
async fn visit(urls: &[String]) -> Result<(), Error> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let send = async |method: &str, service: usize, path: &str, after: Option<&str>| {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", urls[service]));
        if let Some(position) = after {
            request = request.header(LOG_POSITION, position);
        }
        let response = client.request(request.body(Body::empty())?).await?;
        let position = response.headers().get(LOG_POSITION).and_then(|value| value.to_str().ok());
        let (status, position) = (response.status(), position.map(str::to_owned));
        let body = to_bytes(Body::new(response.into_body()), 10_000).await?;
        let sent = after.map(|position| format!(" after {position}")).unwrap_or_default();
        println!("  {method} {path}{sent}: {status}, {}", String::from_utf8_lossy(&body).trim_end());
        Ok::<_, Error>(position)
    };
    println!("\nThe statements, at first from the database, then from the cache of each replica:");
    for (service, path) in [(2, "/account/1"), (3, "/account/1"), (3, "/account/1"), (2, "/total")] {
        send("GET", service, path, None).await?;
    }
    println!("\nA transfer, and both accounts on other replicas after its position in the log:");
    let position = send("POST", 0, "/transfer?from=1&to=2&cents=250", None).await?;
    let position = Some(&*position.ok_or("the transfer was not made")?);
    for (service, path) in [(2, "/account/1"), (3, "/account/2"), (1, "/account/1"), (3, "/total")] {
        send("GET", service, path, position).await?;
    }
    println!("\nA transfer that is refused changes and invalidates nothing:");
    send("POST", 1, "/transfer?from=1&to=2&cents=100000000", None).await?;
    send("GET", 2, "/account/1", None).await.map(drop)
}
