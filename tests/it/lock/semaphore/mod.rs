//! The semaphore on real Redis servers, and in real processes if a test needs them: each file tests one promise.
//!
//! A *node* is a separate `Locks`. Nodes in this process stand for processes that are connected only by the store. All have the documented
//! minimal rights.

/// Makes two tests of each case: one on a server, and one on the memory store with a paused clock.
macro_rules! cases {
    ($($case:ident,)+) => {
        mod on_redis {
            $(#[tokio::test] async fn $case() { super::$case(super::Stage::on_redis().await).await; })+
        }
        mod in_memory {
            $(#[tokio::test(start_paused = true)] async fn $case() { super::$case(super::Stage::in_memory()).await; })+
        }
    };
}

mod bookkeeping;
mod clocks;
mod crashes;
mod fairness;
mod leases;
mod leaving;
mod spec;
mod storm;
mod transcript;
mod waiting;

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::MemoryStore;
use stampede_guard::lock::{LockError, Locks, Permit, Semaphore, SemaphoreBuilder, Wait};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::support::PATIENCE;
use crate::support::os::wall_ns;
use crate::support::probe::{eventually, eventually_eq};
use crate::support::processes::{Child, Fleet, Member, Role};
use crate::support::redis_server::{RedisServer, plain_connection};

use super::nodes::{A_MOMENT, AT_ONCE, SOON, connect, connected, ms, node, retried};

pub(crate) const ROLES: &[Role] = &[("permits", permits), ("permits.storm", storm::clients)];

async fn nodes<const N: usize>(server: &RedisServer) -> [Locks; N] {
    let mut nodes = Vec::new();
    for _ in 0..N {
        nodes.push(node(server).await);
    }
    nodes.try_into().expect("so many")
}

/// A handle on the semaphore that most tests use. Its lease is longer than any test, so a test fails if it waits for the end of the lease.
fn semaphore(locks: &Locks, permits: u32) -> Semaphore {
    with(locks, permits, |builder| builder)
}

fn with(locks: &Locks, permits: u32, set: impl FnOnce(SemaphoreBuilder) -> SemaphoreBuilder) -> Semaphore {
    set(locks.semaphore("s", permits)).build().expect("valid")
}

/// Acquires a permit that is free.
async fn free(semaphore: &Semaphore) -> Permit {
    for _ in 0..100 {
        match semaphore.acquire(Wait::Now).await {
            // The grant arrived when most of its lease had passed, and was released.
            Err(LockError::GrantedTooLate { elapsed, ttl }) if elapsed >= ttl / 2 => {
                tokio::time::sleep(ms(50)).await;
            }
            granted => return granted.expect("asks").expect("one is free"),
        }
    }
    panic!("each grant comes too late");
}

async fn none_is_free(semaphore: &Semaphore) -> bool {
    semaphore.acquire(Wait::Now).await.expect("asks").is_none()
}

async fn available(semaphore: &Semaphore) -> u32 {
    semaphore.available_permits().await.expect("asks")
}

type Waiter = JoinHandle<Result<Option<Permit>, LockError>>;

/// A task that waits for a permit without a time limit.
fn waiter(semaphore: &Semaphore) -> Waiter {
    let semaphore = semaphore.clone();
    tokio::spawn(async move { semaphore.acquire(Wait::Forever).await })
}

/// A task that waits for a permit and releases it at once, for tests in which the order of the waiters does not
/// matter.
fn passer(semaphore: &Semaphore) -> JoinHandle<bool> {
    let waiter = waiter(semaphore);
    tokio::spawn(async move { granted(waiter).await.release().await.expect("asks").was_held })
}

/// Waits until the queue has this many waiters. A waiter that stops waiting leaves the queue in the background.
async fn queued(semaphore: &Semaphore, waiters: u32) {
    eventually_eq("they wait", SOON, waiters, async || semaphore.waiting().await.expect("asks")).await;
}

/// The result of a wait, which must end within [`SOON`].
async fn ended(waiter: Waiter) -> Result<Option<Permit>, LockError> {
    tokio::time::timeout(PATIENCE, waiter).await.expect("the wait has an end").expect("joined")
}

async fn granted(waiter: Waiter) -> Permit {
    ended(waiter).await.expect("asks").expect("it waits for ever")
}

/// Two nodes on one store.
struct Stage {
    one: Locks,
    other: Locks,
    server: Option<RedisServer>,
}

impl Stage {
    async fn on_redis() -> Self {
        let server = RedisServer::start();
        let [one, other] = nodes(&server).await;
        Self { one, other, server: Some(server) }
    }

    fn in_memory() -> Self {
        let store = MemoryStore::new();
        Self { one: Locks::new(store.clone()), other: Locks::new(store), server: None }
    }

    /// A handle on the semaphore in each node.
    fn handles(&self, permits: u32) -> [Semaphore; 2] {
        self.handles_with(permits, |builder| builder)
    }

    fn handles_with(
        &self,
        permits: u32,
        set: impl Fn(SemaphoreBuilder) -> SemaphoreBuilder,
    ) -> [Semaphore; 2] {
        [&self.one, &self.other].map(|locks| with(locks, permits, &set))
    }

    /// Checks that a step took `expected`, and no more in addition than the machine may.
    fn took(&self, since: Instant, expected: Duration) {
        let slack = if self.server.is_some() { AT_ONCE } else { ms(10) };
        let took = since.elapsed();
        assert!((expected..=expected + slack).contains(&took), "{took:?} instead of {expected:?}");
    }

    /// On a server, checks that these keys exist and no others.
    fn keys(&self, expected: &[&str]) {
        if let Some(server) = &self.server {
            assert_eq!(server.keys(), expected);
            assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Config {
    redis: String,
}

/// How an acquisition that a child made has ended.
#[derive(Debug, Serialize, Deserialize)]
struct Taken {
    token: Option<String>,
    error: Option<String>,
    /// When it ended, by [`wall_ns`].
    at: u64,
}

/// A child that obeys commands, one per line:
///
/// - `take <as> <semaphore> <permits> <lease in ms> forever|now|<ms> [renewing]`: acquires a permit in a separate task; answered by an
///   event `<as>` with [`Taken`]
/// - `leave <as>`: aborts that task
/// - `give <as>`: releases; answered by an event `gave`, which says whether the permit was held and how many are available
/// - `ensure <semaphore> <permits>`: answered by an event `ensured`, with the error if there is one
fn permits(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let locks = connected(&redis).await;
        let report = child.report();
        let mut tasks: HashMap<String, JoinHandle<Option<Permit>>> = HashMap::new();
        child.ready();
        loop {
            let line = child.recv_line().await;
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["take", name, semaphore, permits, lease, wait, ref more @ ..] => {
                    let semaphore = locks
                        .semaphore(semaphore, permits.parse().expect("a number"))
                        .lease(ms(lease.parse().expect("milliseconds")))
                        .auto_renew(more == ["renewing"])
                        .build()
                        .expect("valid");
                    let wait = match wait {
                        "forever" => Wait::Forever,
                        "now" => Wait::Now,
                        wait => Wait::For(ms(wait.parse().expect("milliseconds"))),
                    };
                    let event = name.to_owned();
                    let task = async move {
                        let acquired = semaphore.acquire(wait).await;
                        let error = acquired.as_ref().err().map(ToString::to_string);
                        let permit = acquired.ok().flatten();
                        let token = permit.as_ref().map(|permit| permit.token().to_owned());
                        report.event_with(&event, &Taken { token, error, at: wall_ns() });
                        permit
                    };
                    tasks.insert(name.to_owned(), tokio::spawn(task));
                }
                ["leave", name] => tasks.remove(name).expect("taken before").abort(),
                ["give", name] => {
                    let permit = tasks.remove(name).expect("taken before").await.expect("joined");
                    let released = permit.expect("acquired").release().await.expect("asks");
                    report.event_with("gave", &(released.was_held, released.available));
                }
                ["ensure", semaphore, permits] => {
                    let semaphore = locks.semaphore(semaphore, permits.parse().expect("a number"));
                    let ensured = semaphore.build().expect("valid").ensure_created().await;
                    report.event_with("ensured", &ensured.map_err(|error| error.to_string()));
                }
                _ => panic!("unknown command `{line}`"),
            }
        }
    })
}

/// Child processes in the role `permits`.
async fn processes(server: &RedisServer, n: usize) -> Fleet {
    let fleet = Fleet::spawn(n, "permits", &Config { redis: server.minimal_user() });
    fleet.wait_ready().await;
    fleet
}

/// The outcome of an acquisition that a child made on command.
async fn taken(member: &Member, name: &str) -> Taken {
    serde_json::from_value(member.wait_event(name).await).expect("what the role sends")
}
