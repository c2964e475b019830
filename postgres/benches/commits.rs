//! From the return of a commit until no process serves what was there before.
//!
//! Real servers, three processes with copies in memory that ask for all keys all the time, of which one reads the log, and a writer of 100
//! transactions a second. A transaction is final when a fourth process is answered that its position is passed, so the question and the
//! answer are in the time. Beside it the commit itself, as a measure of the machine.
//!
//! `cargo bench -p stampede-guard-postgres`
#![allow(clippy::unwrap_used)] // A program for measurements: a panic is the report.

#[path = "../tests/it/support/mod.rs"]
mod support;

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use stampede_guard::{Policy, StampedeGuard};
use stampede_guard_postgres::{LogMessage, LogPosition, PostgresLog};
use support::postgres_server::PostgresServer;
use support::redis_server::RedisServer;
use tokio::task::JoinSet;

const PROCESSES: usize = 3;
const KEYS: u32 = 50;
const PER_SECOND: u32 = 100;
const SECONDS: u32 = 20;
/// The URLs of Redis and Postgres, for a child.
const CHILD: &str = "COMMITS_CHILD";

fn guard(redis: &str) -> StampedeGuard {
    let client = stampede_guard::redis::Client::open(redis).unwrap();
    let policy = Policy::builder().invalidate_all(true).local_for(Duration::from_secs(600)).build().unwrap();
    StampedeGuard::builder(client).namespace("commits").policy(policy).build().unwrap()
}

/// Asks for all keys, again and again, until its parent ends.
async fn ask(redis: &str, postgres: &str) {
    let guard = guard(redis);
    PostgresLog::builder(&guard, [postgres]).build().unwrap().spawn();
    let mut turn = tokio::time::interval(Duration::from_millis(10));
    let asking = async {
        loop {
            turn.tick().await;
            for key in 0..KEYS {
                let _ = guard.get_or_load(("key", key), || async { Ok::<_, String>(1_u32) }).await;
            }
        }
    };
    let parent = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    tokio::select! { () = asking => {}, _ = parent => {} }
}

fn spawn_child(redis: &str, postgres: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .env(CHILD, format!("{redis} {postgres}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    println!("{what:<48} p50 {:7.2} ms   p99 {:7.2} ms   most {:7.2} ms", at(0.5), at(0.99), at(1.0));
}

async fn measure() {
    let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
    let children: Vec<_> = (0..PROCESSES).map(|_| spawn_child(&redis.url(), &postgres.url())).collect();
    let guard = guard(&redis.url());
    let log =
        PostgresLog::builder(&guard, [postgres.url()]).patience(Duration::from_secs(60)).build().unwrap();
    let db = postgres.connect().await;
    db.batch_execute("create table prices (id int primary key, cents int)").await.unwrap();
    let (mut commits, mut waits) = (Vec::new(), JoinSet::new());
    let mut turn = tokio::time::interval(Duration::from_secs(1) / PER_SECOND);
    for number in 0..PER_SECOND * SECONDS {
        turn.tick().await;
        let message = LogMessage::new().key(("key", number % KEYS)).to_bytes();
        let began = Instant::now();
        db.batch_execute("begin").await.unwrap();
        db.execute("insert into prices values ($1, 1)", &[&i32::try_from(number).unwrap()]).await.unwrap();
        db.execute(LogMessage::SQL, &[&message]).await.unwrap();
        db.batch_execute("commit").await.unwrap();
        let committed = Instant::now();
        let position: String = db.query_one(LogPosition::SQL, &[]).await.unwrap().get(0);
        let position: LogPosition = position.parse().unwrap();
        // The first ones wait for the first reader.
        if number >= PER_SECOND * 2 {
            commits.push(committed - began);
            let log = log.clone();
            waits.spawn(async move {
                assert!(log.wait_for(position).await);
                committed.elapsed()
            });
        }
    }
    let finals = waits.join_all().await;
    println!(
        "{} transactions, {PER_SECOND} a second, {PROCESSES} processes with copies, one reads",
        finals.len()
    );
    print("the transaction itself", commits);
    print("from its commit until it is final", finals);
    for mut child in children {
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}

#[tokio::main]
async fn main() {
    match std::env::var(CHILD) {
        Ok(urls) => {
            let (redis, postgres) = urls.split_once(' ').unwrap();
            ask(redis, postgres).await;
        }
        Err(_) => measure().await,
    }
}
