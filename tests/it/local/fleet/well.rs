//! A fleet without faults: eight processes, two of which make changes. One of these two keeps no copies.

use super::WELL;
use super::stage::{Part, Stage};
use crate::support::redis_server::RedisServer;

pub(super) const PROCESSES: usize = 8;
const CALLERS: usize = 25;

/// The processes that make changes. The second one has no copies.
pub(super) const CHANGERS: [usize; 2] = [0, 1];

/// The parts that eight processes have, with the URL of each one's server.
pub(super) fn parts(url: impl Fn(usize) -> String) -> Vec<Part> {
    let part = |process| Part {
        redis: url(process),
        keeps: process != CHANGERS[1],
        callers: if process == CHANGERS[1] { 0 } else { CALLERS },
        strict: false,
    };
    (0..PROCESSES).map(part).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_after_an_acknowledged_change() {
    const CHANGES: usize = 2_000;
    let server = RedisServer::start();
    let parts = parts(|_| server.minimal_user()).into_iter().map(|part| Part { strict: true, ..part });
    let stage = Stage::start(parts).await;
    stage.read().await;
    stage.change(&CHANGERS, 4, CHANGES / 8, 15);
    let changes = stage.changed(&CHANGERS).await;
    let verdict = stage.evaluate("all are well", &changes, &[]).await;
    verdict.keeps_the_promise(CHANGES).takes_at_most(WELL).acknowledges_all();
}
