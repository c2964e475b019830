//! A process is stopped or cut off: a change waits for it, for at most one term, and after that the process serves nothing older.

use tokio::time::sleep;

use super::stage::Stage;
use super::well::{CHANGERS, parts};
use super::{SLACK, TERM};
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::RedisServer;

/// For how many terms a process is silent.
const SILENT: u32 = 3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_waits_one_term_for_a_stopped_process_that_serves_nothing_older_when_it_continues() {
    let server = RedisServer::start();
    let stage = Stage::start(parts(|_| server.minimal_user())).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 20);
    for process in 2..6 {
        stage.is_served_from_memory(process).await;
        let before = stage.counts(process).await;
        stage.member(process).pause();
        sleep(SILENT * TERM).await;
        stage.member(process).resume();
        stage.is_served_from_memory(process).await;
        assert!(stage.counts(process).await.local_hits > before.local_hits);
    }
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    let waits = stage.counts(CHANGERS[0]).await.local_waits + stage.counts(CHANGERS[1]).await.local_waits;
    assert!(waits >= 4, "{waits} waits for four silences");
    let verdict = stage.evaluate("one is stopped in turn", &changes, &[]).await;
    verdict.keeps_the_promise(200).takes_at_most(TERM + SLACK).acknowledges_all();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_waits_one_term_for_a_process_that_is_cut_off_and_serves_nothing_older() {
    /// The processes that are behind a proxy, and the fault of each one's network.
    const ILL: [(usize, Mode); 4] = [
        (2, Mode::BlackHole),
        (3, Mode::NoReplies),
        (2, Mode::BlackHoleSubscriptions),
        (3, Mode::BlackHoleOld),
    ];
    let server = RedisServer::start();
    let proxies = [Proxy::start(server.port()).await, Proxy::start(server.port()).await];
    let url = |process: usize| match process.checked_sub(2).and_then(|at| proxies.get(at)) {
        Some(proxy) => format!("redis://minimal:pw@127.0.0.1:{}/", proxy.port()),
        None => server.minimal_user(),
    };
    let stage = Stage::start(parts(url)).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 20);
    for (process, mode) in ILL {
        stage.is_served_from_memory(process).await;
        let lapses = stage.counts(process).await.local_lapses;
        proxies[process - 2].set(mode);
        sleep(SILENT * TERM).await;
        if matches!(mode, Mode::BlackHole | Mode::NoReplies) {
            assert!(stage.counts(process).await.local_lapses > lapses, "{mode:?}: its right has not ended");
        }
        proxies[process - 2].set(Mode::Pass);
        stage.is_served_from_memory(process).await;
    }
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    let verdict = stage.evaluate("one is cut off in turn", &changes, &[]).await;
    verdict.keeps_the_promise(100).takes_at_most(TERM + SLACK).acknowledges_all();
}
