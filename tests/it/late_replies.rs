//! Promise 5 where the store's replies reach one process later than another: no caller receives a value older than an invalidation that was
//! confirmed to any process before the call.
//!
//! Regression: a caller joined a flight on which the commit or the last acquire had already run, and received a value
//! that another process had invalidated since: 20 of 20 callers, with replies 20 ms late.

use std::time::Duration;

use stampede_guard::testing::ChaosStore;
use stampede_guard::{MemoryStore, StampedeGuard};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::support::gate::Gate;

const WAY: Duration = Duration::from_millis(10);

/// A process with commands that take 10 ms each way, and one close to the store.
fn slow_and_near() -> (StampedeGuard, StampedeGuard) {
    let store = MemoryStore::new();
    let chaos = ChaosStore::over(store.clone(), 1);
    chaos.latency(WAY * 2, WAY * 2);
    (StampedeGuard::new(chaos.replica()), StampedeGuard::new(store))
}

fn call(guard: &StampedeGuard, value: u32, gate: &Gate) -> JoinHandle<u32> {
    let (guard, gate) = (guard.clone(), gate.clone());
    tokio::spawn(async move {
        let load = move || async move {
            gate.pass().await;
            Ok::<_, String>(value)
        };
        guard.get_or_load("k", load).await.expect("answered")
    })
}

fn open() -> Gate {
    let gate = Gate::closed();
    gate.open();
    gate
}

#[tokio::test(start_paused = true)]
async fn a_caller_between_a_commit_and_its_reply_receives_no_older_value() {
    let (slow, near) = slow_and_near();
    // The commands are a look-up, an acquire, and a commit, which arrives after 50 ms.
    let first = call(&slow, 1, &open());
    sleep(WAY * 11 / 2).await;
    assert_eq!(near.get::<u32>("k").await.expect("read"), Some(1), "the commit has run");
    near.invalidate("k").await.expect("confirmed");
    let later = call(&slow, 2, &open());
    assert_eq!(first.await.expect("joined"), 1, "it came first");
    assert_eq!(later.await.expect("joined"), 2, "invalidated before its request");
}

#[tokio::test(start_paused = true)]
async fn a_caller_between_an_acquire_and_its_reply_receives_no_older_value() {
    let (slow, near) = slow_and_near();
    // The commands are a look-up and an acquire, which arrives after 30 ms.
    let first = call(&slow, 9, &open());
    sleep(WAY * 5 / 2).await;
    assert_eq!(call(&near, 1, &open()).await.expect("joined"), 1);
    sleep(WAY).await;
    near.invalidate("k").await.expect("confirmed");
    let later = call(&slow, 2, &open());
    assert_eq!(first.await.expect("joined"), 1, "it came first");
    assert_eq!(later.await.expect("joined"), 2, "invalidated before its request");
}

/// The rule costs nothing in the common case: a commit takes one round trip, and callers that come during it share one look-up.
#[tokio::test(start_paused = true)]
async fn callers_between_a_commit_and_its_reply_share_a_look_up() {
    let chaos = ChaosStore::new(1);
    chaos.latency(WAY * 2, WAY * 2);
    let slow = StampedeGuard::new(chaos.replica());
    let first = call(&slow, 1, &open());
    sleep(WAY * 11 / 2).await;
    let later: Vec<_> = (0..50).map(|_| call(&slow, 2, &open())).collect();
    assert_eq!(first.await.expect("joined"), 1);
    for later in later {
        assert_eq!(later.await.expect("joined"), 1);
    }
    // There were two look-ups, an acquire and a commit, and one look-up for the callers that queued behind the second look-up.
    assert_eq!((chaos.commands(), slow.stats().loads), (5, 1));
}
