//! The server closes connections again and again: messages and answers are lost, but every promise holds.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::stage::Stage;
use super::well::{CHANGERS, parts};
use super::{SLACK, TERM};
use crate::support::redis_server::RedisServer;

/// For how long the server closes connections.
const LASTS: Duration = Duration::from_secs(6);

/// How much longer a change may take because of closed connections. It is sent again on the next connection, which may be closed, too.
const REOPENED: Duration = Duration::from_secs(1);

async fn closes(
    scene: &'static str,
    pause_ms: std::ops::Range<u64>,
    close: impl Fn(&RedisServer) -> usize,
    reopened: Duration,
) {
    let server = RedisServer::start();
    let stage = Stage::start(parts(|_| server.minimal_user())).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 10);
    let (began, mut closed) = (Instant::now(), 0);
    while began.elapsed() < LASTS {
        sleep(Duration::from_millis(fastrand::u64(pause_ms.clone()))).await;
        closed += close(&server);
    }
    assert!(closed > 40, "{closed} connections were closed");
    stage.are_served_from_memory().await;
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    println!("{closed} connections were closed");
    let verdict = stage.evaluate(scene, &changes, &[]).await;
    verdict.keeps_the_promise(50).takes_at_most(reopened + TERM + SLACK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_while_inboxes_are_closed() {
    closes("inboxes are closed", 50..300, RedisServer::kill_pubsub, Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_while_all_connections_are_closed() {
    closes("all connections are closed", 100..800, RedisServer::kill_clients, REOPENED).await;
}
