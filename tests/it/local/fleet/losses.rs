//! A server that loses its data, only the registry or only the log, or that is restarted.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::oracle::Loss;
use super::stage::Stage;
use super::well::{CHANGERS, parts};
use super::{SLACK, TERM};
use crate::support::os::wall_ns;
use crate::support::redis_server::RedisServer;
use crate::support::scratch::Scratch;

const REGISTRY: &str = "sg1:n:{default:}";
const LOG: &str = "sg1:a:{default:}";

/// How much longer a change may take while a server is down: it waits for two seconds at most.
const DOWN: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_after_the_registry_or_the_log_was_lost() {
    const LASTS: Duration = Duration::from_secs(9);
    let server = RedisServer::start();
    let stage = Stage::start(parts(|_| server.minimal_user())).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 10);
    let (began, mut lost) = (Instant::now(), 0);
    while began.elapsed() < LASTS {
        // The loss comes before the registry is mature in some rounds, and after that in others.
        sleep(Duration::from_millis(fastrand::u64(30..1_500))).await;
        match lost % 4 {
            0 => server.flush_all(),
            1 => server.run::<()>(&["DEL", REGISTRY]),
            2 => server.run::<()>(&["DEL", LOG]),
            _ => server.run::<()>(&["DEL", REGISTRY, LOG]),
        }
        lost += 1;
    }
    sleep(2 * TERM).await;
    stage.are_served_from_memory().await;
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    println!("{lost} losses");
    let verdict = stage.evaluate("registry and log are lost", &changes, &[]).await;
    verdict.keeps_the_promise(100).takes_at_most(TERM + SLACK).acknowledges_all();
}

async fn restarts(scene: &'static str, server: &RedisServer) {
    let stage = Stage::start(parts(|_| server.minimal_user())).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 10);
    for _ in 0..3 {
        sleep(Duration::from_millis(fastrand::u64(500..1_500))).await;
        server.kill();
        sleep(Duration::from_millis(fastrand::u64(..400))).await;
        server.start_again();
        stage.are_served_from_memory().await;
    }
    sleep(2 * TERM).await;
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    let verdict = stage.evaluate(scene, &changes, &[]).await;
    verdict.keeps_the_promise(50).takes_at_most(DOWN + TERM + SLACK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_after_a_restart_with_all_data() {
    let files = Scratch::new();
    // Without fsync, the file is still written before each answer. That is enough, because only the process is killed, not the machine.
    let arguments = ["--appendonly", "yes", "--appendfsync", "no", "--dir", &files.text("")];
    restarts("restarted with its data", &RedisServer::with_args(arguments)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_after_a_restart_without_data() {
    restarts("restarted without data", &RedisServer::start()).await;
}

/// The server is set back to a registry and a log of an earlier moment. At that moment two of the processes were no members, and one was
/// stopped. The older log contains the mark of the stopped process, but not what was announced between that moment and the loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_a_term_after_the_registry_was_set_back() {
    const STOPPED: usize = 2;
    let files = Scratch::new();
    let server = RedisServer::with_args(["--dir", &files.text("")]);
    let mut all = parts(|_| server.minimal_user());
    let late = all.split_off(6);
    let mut stage = Stage::start(all).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 10);
    sleep(TERM).await;
    stage.is_served_from_memory(STOPPED).await;
    stage.member(STOPPED).pause();
    // Otherwise the stopped process, when it continues, would read from its socket what was announced after the dump.
    server.kill_pubsub();
    let dumps = [REGISTRY, LOG].map(|name| (name, server.run::<Vec<u8>>(&["DUMP", name])));
    for part in late {
        let process = stage.join(part);
        stage.member(process).wait_event("ready").await;
        stage.member(process).send("read");
        stage.is_served_from_memory(process).await;
    }
    sleep(2 * TERM).await;
    // Another server makes the file. On this one, processes would renew between its start and the change of its keys.
    {
        let maker = RedisServer::with_args(["--dir", &files.text("")]);
        for (name, dump) in dumps {
            let restored = redis::cmd("RESTORE").arg(name).arg(0).arg(dump).query::<()>(&mut maker.conn());
            restored.expect("restored");
        }
        maker.run::<()>(&["SAVE"]);
    }
    let from = wall_ns();
    server.kill();
    server.start_again();
    stage.member(STOPPED).resume();
    assert!(server.keys().iter().any(|key| key == REGISTRY), "{:?}", server.keys());
    // By then every right comes from before the loss, or from the server as it is now.
    let loss = Loss::OfRegistry { from, until: from + TERM.as_nanos() as u64 };
    sleep(3 * TERM).await;
    stage.are_served_from_memory().await;
    sleep(2 * TERM).await;
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    let verdict = stage.evaluate("the registry is set back", &changes, &[loss]).await;
    verdict.keeps_the_promise(100).takes_at_most(DOWN + TERM + SLACK);
}
