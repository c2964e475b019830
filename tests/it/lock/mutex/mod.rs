//! The mutex on real Redis servers, and in real processes if a test needs them: each file tests one promise.
//!
//! A *node* is a separate `Locks`. Nodes in this process stand for processes that are connected only by the store. All have the documented
//! minimal rights, unless a test says that a user has more. Pure arithmetic is tested beside the code, on the memory store and with a
//! paused clock.

mod arguments;
mod bumps;
mod drops;
mod expiry;
mod fairness;
mod faults;
mod foreign;
mod forks;
mod keyspace;
mod kills;
mod late_answers;
mod many_waiters;
mod names;
mod polling;
mod processes;
mod races;
mod silent;
mod spec;
mod synchronize;
mod tokens;
mod waiting;

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::lock::{LockError, Locks, Mutex, MutexBuilder, MutexGuard};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::support::PATIENCE;
use crate::support::os::wall_ns;
use crate::support::probe::{eventually, eventually_eq};
use crate::support::processes::{Child, Member, Role};
use crate::support::redis_server::{RedisServer, plain_connection};

use super::nodes::{
    A_MOMENT, AT_ONCE, SOON, connect, connected, locked, ms, node, refused, retried, unconnected,
};

pub(crate) const ROLES: &[Role] = &[
    ("mutex.holder", holder),
    ("mutex.increments", processes::increments),
    ("mutex.acquisitions", processes::acquisitions),
    ("mutex.acquirers", kills::acquirers),
    ("mutex.forks", forks::forks),
];

/// A TTL whose end no test waits for.
const LONG: Duration = Duration::from_secs(60);

/// Loads the scripts into the server, so that each later call is one command, which runs even if its answer does not arrive.
async fn warm(locks: &Locks) {
    let mutex = locks.mutex("warm").build().expect("valid");
    let mut guard = locked(&mutex).await;
    assert!(guard.extend(LONG).await.expect("asks") && guard.is_owned().await.expect("asks"));
    assert!(guard.unlock().await.expect("asks"));
}

/// Like [`warm`], by a node that leaves again, for tests whose nodes have a short command timeout.
async fn warmed(server: &RedisServer) {
    let (before, locks) = (server.client_count(), node(server).await);
    warm(&locks).await;
    locks.close().await;
    eventually("it has left", SOON, async || server.client_count() <= before).await;
}

/// How many script calls the server has run so far.
fn scripts_run(server: &RedisServer) -> usize {
    commands(server, "evalsha")
}

/// How many calls of this command the server has received so far.
fn commands(server: &RedisServer, command: &str) -> usize {
    let stats: String = server.run(&["INFO", "commandstats"]);
    let calls = stats.lines().find_map(|line| line.strip_prefix(&*format!("cmdstat_{command}:calls=")));
    calls.and_then(|calls| calls.split_once(',')?.0.parse().ok()).unwrap_or(0)
}

/// A handle on the mutex that most tests use.
fn mutex(locks: &Locks) -> Mutex {
    with(locks, |builder| builder)
}

fn with(locks: &Locks, set: impl FnOnce(MutexBuilder) -> MutexBuilder) -> Mutex {
    set(locks.mutex("m")).build().expect("valid")
}

/// A task that waits for the mutex without a time limit.
fn waiter(locks: &Locks) -> JoinHandle<Result<MutexGuard, LockError>> {
    let mutex = with(locks, |builder| builder.acquire_timeout(Duration::MAX));
    tokio::spawn(async move { mutex.lock().await })
}

/// A task that acquires the mutex, checks that it owns it, and unlocks it. Returns its number of attempts.
fn visitor(mutex: Mutex) -> JoinHandle<u32> {
    tokio::spawn(async move {
        let mut guard = locked(&mutex).await;
        assert!(guard.is_owned().await.expect("asks"));
        assert!(guard.unlock().await.expect("asks"));
        guard.attempts()
    })
}

/// Waits for all visitors. Returns the sum of their attempts.
async fn visited(visitors: Vec<JoinHandle<u32>>) -> u32 {
    let all = futures_util::future::join_all(visitors);
    let all = tokio::time::timeout(PATIENCE, all).await.expect("each gets it");
    all.into_iter().map(|attempts| attempts.expect("joined")).sum()
}

/// The guard that a waiter acquires, and how long that takes from now on.
async fn granted(waiter: JoinHandle<Result<MutexGuard, LockError>>) -> (MutexGuard, Duration) {
    let started = Instant::now();
    let granted = tokio::time::timeout(PATIENCE, waiter).await.expect("the wait has an end");
    (granted.expect("joined").expect("acquired"), started.elapsed())
}

/// Waits until the mutex's queue has this many waiters.
async fn queued(server: &RedisServer, waiters: usize) {
    queued_for(server, "sg1:mq:{default:m}", waiters).await;
}

async fn queued_for(server: &RedisServer, queue: &str, waiters: usize) {
    eventually_eq("they wait", SOON, waiters, async || server.run::<usize>(&["LLEN", queue])).await;
}

/// The key's TTL in milliseconds as Redis answers it: -1 for no TTL, -2 for no key.
fn pttl(server: &RedisServer, key: &str) -> i64 {
    server.run(&["PTTL", key])
}

/// Waits until the mutex is free and its queue is empty, for at most `within`.
async fn free(server: &RedisServer, within: Duration) {
    eventually_eq("the mutex is free", within, Vec::<String>::new(), async || {
        let mut keys = server.keys();
        keys.retain(|key| !key.starts_with("sg1:mf:") && !key.starts_with("sg1:pf:"));
        keys
    })
    .await;
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
}

#[derive(Serialize, Deserialize)]
struct Config {
    redis: String,
}

/// A child that obeys commands, one per line:
///
/// - `lock <ttl in ms>`: acquires; answered by an event `locked` with the moment, by [`wall_ns`]
/// - `renewed <ttl in ms>`: like `lock`, with automatic renewal
/// - `unlock`: answered by an event `unlocked`, which says whether the mutex was still held
fn holder(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let locks = connected(&redis).await;
        let mut guard = None;
        child.ready();
        loop {
            let line = child.recv_line().await;
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["lock" | "renewed", ttl] => {
                    let renews = line.starts_with("renewed");
                    let ttl = ms(ttl.parse().expect("milliseconds"));
                    let mutex = with(&locks, |builder| {
                        builder.ttl(ttl).auto_renew(renews).acquire_timeout(Duration::MAX)
                    });
                    guard = Some(locked(&mutex).await);
                    child.report().event_with("locked", &wall_ns());
                }
                ["unlock"] => {
                    let guard = guard.as_mut().expect("locked before");
                    child.report().event_with("unlocked", &guard.unlock().await.expect("asks"));
                }
                _ => panic!("unknown command `{line}`"),
            }
        }
    })
}

/// Makes a child in the role `mutex.holder` acquire the mutex.
async fn held_by(member: &Member, command: &str) {
    member.send(command);
    member.wait_event("locked").await;
}
