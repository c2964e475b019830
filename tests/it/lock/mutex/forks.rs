//! A process forks after `Locks::new` and before the first call: parent and child must be two nodes.
//!
//! Regression: both had the identity of the parent, so a release reported to both that the mutex was theirs, and 97 to 121 of 300 sections
//! overlapped.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fork::{Fork, fork, waitpid};

use super::*;
use crate::support::processes::Fleet;

const SECTIONS: usize = 150;

#[tokio::test]
async fn a_forked_process_excludes_its_parent() {
    let server = RedisServer::start();
    let config = Config { redis: server.url() };
    let fleet = Fleet::spawn(1, "mutex.forks", &config);
    let overlaps: Vec<[usize; 2]> = fleet.results().await;
    assert_eq!(overlaps, [[0, 0]], "sections in which parent or child was not alone");
    assert_eq!(server.run::<usize>(&["GET", "sections"]), 2 * SECTIONS);
}

/// Forks on a thread without a runtime, because the child has only the thread that forks.
pub(super) fn forks(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let worker = std::thread::spawn(move || {
            let client = ::redis::Client::open(redis).expect("a URL");
            let locks = Locks::new(client.clone());
            match fork().expect("a second process") {
                Fork::Child => {
                    let overlaps = catch_unwind(AssertUnwindSafe(|| overlaps(&locks, &client)));
                    // If the child panics, each of its sections counts as overlapping.
                    std::process::exit(overlaps.unwrap_or(SECTIONS) as i32);
                }
                Fork::Parent(pid) => {
                    let own = overlaps(&locks, &client);
                    let status = waitpid(pid).expect("its end");
                    [own, (status >> 8) as usize]
                }
            }
        });
        child.result(&worker.join().expect("no panic"));
    })
}

/// Counts the sections in which another process was inside, too.
fn overlaps(locks: &Locks, client: &::redis::Client) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mutex = mutex(locks);
        let mut counter = plain_connection(client).await;
        let mut overlaps = 0;
        for _ in 0..SECTIONS {
            let mut guard = locked(&mutex).await;
            let inside: usize =
                ::redis::cmd("INCR").arg("inside").query_async(&mut counter).await.expect("answered");
            tokio::task::yield_now().await;
            let _: usize =
                ::redis::cmd("INCR").arg("sections").query_async(&mut counter).await.expect("answered");
            let _: isize =
                ::redis::cmd("DECR").arg("inside").query_async(&mut counter).await.expect("answered");
            overlaps += usize::from(inside > 1);
            guard.unlock().await.expect("asks");
        }
        overlaps
    })
}
