//! Processes that have one key in memory: each requests it when the bench says so, and answers the bare announcements of the control.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use stampede_guard::{PolicyBuilder, StampedeGuard};

use crate::support::processes::{Child, Fleet, Role};
use crate::values::lasting;

pub(crate) const ROLE: Role = ("holds", holds);

/// The key that all processes have in memory.
pub(crate) const KEY: &str = "held";
/// The channel on which the control's announcer receives answers.
pub(crate) const ANSWERS: &str = "bare:answers";
/// The length of a volume lease in these rows, which is the default.
pub(crate) const TERM: Duration = Duration::from_secs(2);

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    /// The address under which each process's guard reaches Redis.
    redis: Vec<String>,
    /// Whether the processes answer bare announcements.
    bare: bool,
}

/// A policy with time-outs that are long enough for two dozen processes on two processors, and under which each value is stored.
pub(crate) fn patient() -> PolicyBuilder {
    lasting()
        .coordination_budget(Duration::from_secs(4))
        .command_timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(4))
}

pub(crate) async fn connected(redis: &str) -> StampedeGuard {
    let client = redis::Client::open(redis).expect("an address");
    let policy = patient().build().expect("valid");
    let guard = StampedeGuard::builder(client).policy(policy).local_term(TERM).build().expect("valid");
    guard.connect().await.expect("connects");
    guard
}

/// Starts one process for each of these addresses of Redis.
pub(crate) async fn start(redis: Vec<String>, bare: bool) -> Fleet {
    let fleet = Fleet::spawn(redis.len(), "holds", &Config { redis, bare });
    fleet.wait_ready().await;
    fleet
}

/// Makes all processes request the key until each has it in memory.
pub(crate) async fn all_hold(fleet: &Fleet) {
    for member in fleet.members() {
        member.send("hold");
    }
    let held: Vec<bool> = fleet.results().await;
    assert!(held.iter().all(|held| *held), "each process has the key in memory");
}

fn holds(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis, bare } = child.config();
        let guard = connected(&redis[child.index()]).await;
        if bare {
            answer_bare(&redis[child.index()], child.index()).await;
        }
        child.ready();
        loop {
            child.recv_line().await;
            child.result(&hold(&guard).await);
        }
    })
}

/// Requests the key until it is served from memory.
async fn hold(guard: &StampedeGuard) -> bool {
    let (began, before) = (Instant::now(), guard.stats().local_hits);
    while began.elapsed() < Duration::from_secs(30) {
        let load = || async { Ok::<_, Infallible>("a value".to_owned()) };
        guard.load(KEY).get_shared(move |_| load()).await.expect("infallible");
        if guard.stats().local_hits > before {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    false
}

/// The channel on which the control publishes to this process.
pub(crate) fn channel(index: usize) -> String {
    format!("bare:{index}")
}

/// The part of the control that runs in this process: it answers each message on its channel by publishing. Like the guard, it has one
/// connection for messages and one for commands.
async fn answer_bare(redis: &str, index: usize) {
    let client = redis::Client::open(redis).expect("an address");
    let mut commands = bare(&client).await;
    let mut messages = client.get_async_pubsub().await.expect("connects");
    messages.subscribe(channel(index)).await.expect("subscribes");
    tokio::spawn(async move {
        let mut messages = messages.into_on_message();
        while let Some(message) = messages.next().await {
            let answer = redis::cmd("PUBLISH").arg(ANSWERS).arg(message.get_payload_bytes()).to_owned();
            answer.exec_async(&mut commands).await.expect("PUBLISH");
        }
    });
}

/// A bare connection with TCP_NODELAY.
pub(crate) async fn bare(client: &redis::Client) -> MultiplexedConnection {
    let info = client.get_connection_info().clone();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    let client = redis::Client::open(info.set_tcp_settings(tcp)).expect("a valid address");
    client.get_multiplexed_async_connection().await.expect("connects")
}
