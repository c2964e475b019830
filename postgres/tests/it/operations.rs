//! The fleet with a log that `tests/ops/alerts.py` has a Prometheus scrape: a real Postgres, a real Redis, writers, and two processes, one of
//! which reads the log. The script makes the faults by lines on the standard input.

use std::time::Duration;

use futures_util::FutureExt as _;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use stampede_guard::{Policy, StampedeGuard};
use stampede_guard_postgres::{LogMessage, PostgresLog};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_postgres::{Client, NoTls};

use crate::support::postgres_server::PostgresServer;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const ROLES: &[Role] = &[("scraped-reader", |child| serve(child).boxed())];

/// `max_slot_wal_keep_size`: small enough to be filled at once.
const BOUND: &str = "16MB";
/// Of which so many bytes are left when a fault has filled the log. A quarter is 4 MB.
const LEFT: i64 = 3_000_000;
const WRITERS: usize = 10;
/// Between two commits of a writer.
const PAUSE: Duration = Duration::from_millis(500);

/// Reads the log if no other process does, and answers each request with its metrics, until it is killed.
async fn serve(child: Child) {
    let (redis, postgres): (String, String) = child.config();
    let mut exporter = PrometheusBuilder::new();
    for (name, bounds) in
        stampede_guard::metrics::BUCKETS.iter().chain(stampede_guard_postgres::metrics::BUCKETS)
    {
        exporter = exporter.set_buckets_for_metric(Matcher::Full((*name).to_owned()), bounds).unwrap();
    }
    let scraped = exporter.install_recorder().unwrap();
    let client = stampede_guard::redis::Client::open(redis).unwrap();
    let policy = Policy::builder().invalidate_all(true).build().unwrap();
    let guard = StampedeGuard::builder(client).namespace("log").policy(policy).build().unwrap();
    let _reading = PostgresLog::builder(&guard, [postgres]).slot("stampede_guard").build().unwrap().spawn();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    child.report().event_with("port", &listener.local_addr().unwrap().port());
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        tokio::spawn(answer(stream, scraped.clone()));
    }
}

async fn answer(mut stream: TcpStream, scraped: PrometheusHandle) {
    let (mut request, mut part) = (Vec::new(), [0; 1024]);
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read(&mut part).await {
            Ok(read @ 1..) => request.extend_from_slice(&part[..read]),
            _ => return,
        }
    }
    let body = scraped.render();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n";
    let response = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    // It fails if the Prometheus has ended.
    let _ = stream.write_all(response.as_bytes()).await;
}

/// Commits a message again and again, whatever the server does.
async fn write(config: tokio_postgres::Config) {
    let message = LogMessage::new().key("price").to_bytes();
    loop {
        sleep(PAUSE).await;
        let Ok((client, connection)) = config.connect(NoTls).await else { continue };
        tokio::spawn(connection);
        while client.execute(LogMessage::SQL, &[&message]).await.is_ok() {
            sleep(PAUSE).await;
        }
    }
}

/// Writes into the log until so little is left of its bound.
async fn fill(client: &Client) {
    let left = "select safe_wal_size from pg_replication_slots where slot_name = 'stampede_guard'";
    while client.query_one(left, &[]).await.unwrap().get::<_, i64>(0) > LEFT {
        let filler = "select pg_logical_emit_message(false, 'filler', repeat('-', 300000))";
        client.batch_execute(filler).await.unwrap();
    }
}

/// Whether commits wait for a synchronous standby, of which there is none.
async fn wait_for_standby(client: &Client, waits: bool) {
    let names = if waits { "absent" } else { "" };
    let set = format!("alter system set synchronous_standby_names = '{names}'");
    client.batch_execute(&set).await.unwrap();
    client.batch_execute("select pg_reload_conf()").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "tests/ops/alerts.py runs it"]
async fn serves_the_test_of_the_alerts() {
    let redis = RedisServer::start();
    let postgres = PostgresServer::with_settings([("max_slot_wal_keep_size", BOUND)]);
    let readers = Fleet::spawn(2, "scraped-reader", &(redis.url(), postgres.url()));
    let mut targets = Vec::new();
    for reader in readers.members() {
        targets.push(format!("127.0.0.1:{}", reader.wait_event("port").await));
    }
    for _ in 0..WRITERS {
        tokio::spawn(write(postgres.config()));
    }
    println!("the log: {}", targets.join(" "));
    let mut open = None;
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await.unwrap() {
        match &*line {
            "stop postgres" => postgres.kill(),
            "start postgres" => postgres.start_again(),
            // The slot keeps the log from the begin of the oldest transaction on.
            "open a transaction" => {
                let client = postgres.connect().await;
                client
                    .batch_execute("begin; select pg_logical_emit_message(true, 'open', '')")
                    .await
                    .unwrap();
                open = Some(client);
                fill(&postgres.connect().await).await;
            }
            "end the transaction" => open = None,
            "wait for a standby" => wait_for_standby(&postgres.connect().await, true).await,
            "wait for no standby" => wait_for_standby(&postgres.connect().await, false).await,
            line => panic!("unknown: {line}"),
        }
        println!("done: {line}");
    }
    drop(open);
}
