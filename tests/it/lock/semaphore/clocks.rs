//! Only the server's clock counts. The clients' clocks are not read.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::redis::clock::Relay;

/// S3.18, S4.26: to one client the server's clock looks 5 s slow, to another client 5 s fast; in a second run the shift is an hour.
/// Waiters are served in the order of their requests, and no holder loses its permit.
#[tokio::test]
async fn clients_with_different_clocks_are_served_in_order_of_request() {
    for skew in [5, 3_600] {
        let server = RedisServer::start();
        let (late, early) = (Relay::start(&server, -skew).await, Relay::start(&server, skew).await);
        let (late, early, right) =
            (connected(&late.url).await, connected(&early.url).await, node(&server).await);
        let [late, early, right] = [late, early, right].map(|locks| semaphore(&locks, 2));
        let mut held = [free(&late).await, free(&early).await];
        assert!(none_is_free(&right).await, "nothing is stale");
        let in_order = [&early, &late, &right, &late, &early, &right];
        let mut waiters = Vec::new();
        for semaphore in in_order {
            waiters.push(waiter(semaphore));
            queued(&right, waiters.len() as u32).await;
            assert_eq!(semaphore.release_stale().await.expect("asks"), 0);
        }
        for holder in right.holders().await.expect("asks") {
            assert!(holder.remaining > Duration::from_secs(30), "{holder:?}");
        }
        assert!(held[0].release().await.expect("asks").was_held);
        for waiter in waiters {
            let mut permit = granted(waiter).await;
            assert!(held[1].is_held().await.expect("asks"), "it was not displaced");
            assert!(permit.release().await.expect("asks").was_held);
        }
    }
}

/// Every file below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of the sources");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// S3.6, S4.26: if a wall clock that is set were read, a wait could time out, or a permit look stale. A test cannot set this machine's
/// clock, but a clock that is never read cannot do harm.
#[test]
fn no_lock_reads_a_wall_clock() {
    let source = crate::support::root().join("src");
    let mut seen = 0;
    for file in files(&source.join("lock")).into_iter().chain(files(&source.join("store"))) {
        // The path is relative to `src`, because the path of the checkout may contain any word.
        let path = file.strip_prefix(&source).expect("in it").display().to_string();
        if !(path.contains("lock") || path.contains("mutex_") || path.contains("semaphore_")) {
            continue;
        }
        let text = fs::read_to_string(&file).expect("text");
        for clock in ["SystemTime", "UNIX_EPOCH", "os.time", "os.clock", "server_now"] {
            assert!(!text.contains(clock), "{path} reads {clock}");
        }
        seen += 1;
    }
    assert!(seen > 15, "{seen} files are not all");
}
