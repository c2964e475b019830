//! A process that is killed never acknowledges again: the first change waits until its right has ended, and the next one does not wait.

use std::time::Duration;

use super::changes::Change;
use super::stage::{Part, Stage};
use super::{SLACK, TERM, WELL};
use crate::support::redis_server::RedisServer;

fn took(change: &Change) -> Duration {
    Duration::from_nanos(change.acknowledged - change.began)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_change_waits_one_term_for_a_killed_process_and_the_next_does_not() {
    let server = RedisServer::start();
    let part = |keeps| Part { redis: server.minimal_user(), keeps, callers: 10, strict: true };
    let mut stage = Stage::start([true, false, true, true, true].map(part)).await;
    stage.read().await;
    let mut changes = Vec::new();
    // Of these two changers, the first one keeps copies, and the second one does not.
    for (changer, killed) in [(0, 2), (1, 3)] {
        let well = stage.invalidate(changer, 10).await;
        stage.kill(killed);
        let first = stage.invalidate(changer, 11).await;
        assert!(took(&well) <= WELL && took(&first) <= TERM + SLACK, "{:?}, {:?}", took(&well), took(&first));
        // Little may have been left of the killed process's right, but the announcer does not know how much.
        assert!(took(&first) >= TERM / 2, "{:?}", took(&first));
        // The first change makes the store remove the killed process from the registry, and does not wait for that.
        tokio::time::sleep(TERM / 5).await;
        let next = stage.invalidate(changer, 12).await;
        assert!(took(&next) <= WELL, "{:?}", took(&next));
        println!("well {:?}, killed {:?}, the next {:?}", took(&well), took(&first), took(&next));
        changes.extend([well, first, next]);
    }
    stage.are_served_from_memory().await;
    stage.evaluate("two are killed", &changes, &[]).await.keeps_the_promise(6);
}
