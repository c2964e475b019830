//! A process that shuts down leaves nothing that other processes would have to wait for. Most of these cases were found by the simulation.

use std::time::Duration;

use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin, Replica};
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::asking::{arrived, ask};

/// A lease that outlasts every test, so that a test fails if a lease is not released.
fn policy() -> Policy {
    Policy::builder().lease(Duration::from_secs(60)).build().expect("valid")
}

/// A store whose commands and replies take this many milliseconds each way, and an origin.
fn a_way_off(ms: u64) -> (ChaosStore, Origin) {
    let (chaos, way) = (ChaosStore::new(1), Duration::from_millis(ms));
    chaos.latency(way, way);
    (chaos, Origin::new())
}

fn node(chaos: &ChaosStore) -> StampedeGuard {
    node_on(&chaos.replica())
}

fn node_on(replica: &Replica) -> StampedeGuard {
    StampedeGuard::builder(replica.clone()).policy(policy()).build().expect("valid")
}

/// A node that does not know that it has the lease, and loads without it: the answer to its acquire was lost. It cannot release the lease
/// either, because from then on its commands fail.
async fn unknowing(chaos: &ChaosStore, origin: &Origin) -> StampedeGuard {
    let guard = node(chaos);
    let call = ask(&guard, origin);
    arrived(chaos, 1).await;
    chaos.once(Fault::ErrorAfter);
    arrived(chaos, 2).await;
    chaos.inject(Fault::ErrorBefore, 1.0);
    assert_eq!(call.await.unwrap().unwrap(), 0);
    guard
}

/// Lets commands and messages in flight arrive.
async fn a_moment() {
    sleep(Duration::from_millis(20)).await;
}

/// Regression: without a store, a shutdown reported its leases as handed over.
#[tokio::test(start_paused = true)]
async fn a_shutdown_reports_only_confirmed_hand_overs() {
    for cut in [false, true] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let replica = chaos.replica();
        let guard = StampedeGuard::new(replica.clone());
        origin.hold();
        let leading = ask(&guard, &origin);
        origin.wait_for_loads("k", 1).await;
        if cut {
            replica.cut();
        }
        let started = Instant::now();
        let shutdown = guard.shutdown(Duration::from_millis(100)).await;
        let outcome = (shutdown.finished, shutdown.handed_over, shutdown.abandoned);
        assert_eq!(outcome, if cut { (false, 0, 1) } else { (false, 1, 0) }, "{cut}");
        assert!(started.elapsed() <= Duration::from_millis(1_110), "{cut}: {:?}", started.elapsed());
        leading.abort();
    }
}

/// The node has two loads of the key: one has the lease, and one waits for the first to end. Both leave at shutdown. Regression: the lease
/// of the first load went to the second.
#[tokio::test(start_paused = true)]
async fn a_shutdown_gives_the_lease_to_another_node_and_not_to_its_own_waiter() {
    let (chaos, origin) = a_way_off(1);
    let (replica, other) = (chaos.replica(), node(&chaos));
    let ending = node_on(&replica);
    origin.hold();
    let first = ask(&ending, &origin);
    arrived(&chaos, 1).await;
    // The running load may be older than this invalidation, so later callers begin another load.
    ending.invalidate("k").await.unwrap();
    origin.wait_for_loads("k", 1).await;
    let second = ask(&ending, &origin);
    a_moment().await;
    let waits = ask(&other, &origin);
    a_moment().await;
    assert_eq!((origin.loads("k"), ending.stats().tasks), (1, 2), "one leads, and two wait");
    let shutdown = ending.shutdown(Duration::ZERO).await;
    assert_eq!((shutdown.finished, shutdown.handed_over, shutdown.abandoned), (false, 1, 0));
    // The process ends here.
    replica.kill();
    first.abort();
    second.abort();
    let ended = Instant::now();
    origin.release();
    assert!(waits.await.unwrap().is_ok());
    assert!(ended.elapsed() < Duration::from_secs(1), "{:?}", ended.elapsed());
    assert!(other.get::<u64>("k").await.unwrap().is_some(), "it is stored by the other one");
}

/// Regression: an acquire that was in flight at the deadline ran after it, and its lease belonged to no process.
#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_the_answer_to_its_acquire() {
    let (chaos, origin) = a_way_off(10);
    let (replica, other) = (chaos.replica(), node(&chaos));
    let ending = node_on(&replica);
    let call = ask(&ending, &origin);
    arrived(&chaos, 2).await;
    let shutdown = ending.shutdown(Duration::from_millis(3)).await;
    assert_eq!((shutdown.finished, shutdown.abandoned), (false, 0));
    assert_eq!(chaos.commands(), 3, "a look-up, an acquire, and what gives the lease back");
    replica.kill();
    call.abort();
    let began = Instant::now();
    assert!(ask(&other, &origin).await.unwrap().is_ok());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// Regression: since no answer said that the node had the lease, the shutdown ended before the lease was released.
#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_until_a_possible_lease_is_released() {
    let (chaos, origin) = a_way_off(1);
    let (ending, other) = (unknowing(&chaos, &origin).await, node(&chaos));
    let ends = tokio::spawn({
        let ending = ending.clone();
        async move { ending.shutdown(Duration::from_secs(1)).await }
    });
    sleep(Duration::from_millis(300)).await;
    assert!(!ends.is_finished(), "the lease may be its own");
    chaos.calm();
    let shutdown = ends.await.unwrap();
    assert_eq!((shutdown.finished, shutdown.abandoned), (true, 0));
    let began = Instant::now();
    assert!(ask(&other, &origin).await.unwrap().is_ok());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// As above, but the store never returns: the shutdown reports the lease as abandoned.
#[tokio::test(start_paused = true)]
async fn a_shutdown_reports_a_possible_lease_as_abandoned() {
    let (chaos, origin) = a_way_off(1);
    let ending = unknowing(&chaos, &origin).await;
    let shutdown = ending.shutdown(Duration::from_millis(500)).await;
    assert_eq!((shutdown.finished, shutdown.handed_over, shutdown.abandoned), (true, 0, 1));
}

/// The node was granted the lease just before the shutdown, and the message was lost, so the node does not know that it has the lease.
#[tokio::test(start_paused = true)]
async fn a_shutdown_gives_back_a_lease_with_a_lost_grant() {
    let (chaos, origin) = a_way_off(1);
    let (leading, replica, other) = (node(&chaos), chaos.replica(), node(&chaos));
    let ending = node_on(&replica);
    origin.answer("k", [Answer::Panic]);
    origin.hold();
    let leads = ask(&leading, &origin);
    origin.wait_for_loads("k", 1).await;
    let waits = ask(&ending, &origin);
    a_moment().await;
    chaos.inject(Fault::WakeLost, 1.0);
    origin.release();
    assert!(leads.await.unwrap().is_err());
    a_moment().await;
    assert_eq!(origin.loads("k"), 1, "it does not know that it leads");
    chaos.calm();
    let shutdown = ending.shutdown(Duration::ZERO).await;
    assert_eq!((shutdown.finished, shutdown.abandoned), (false, 0));
    assert!(waits.await.unwrap().is_ok(), "its callers are answered all the same");
    replica.kill();
    let began = Instant::now();
    assert!(ask(&other, &origin).await.unwrap().is_ok());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// Regression: the callers of a load received its value only when the store had answered, or when the lease had ended.
#[tokio::test(start_paused = true)]
async fn callers_are_answered_while_a_shutdown_hands_the_lease_over() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let guard = node(&chaos);
    origin.hold();
    let calls = [ask(&guard, &origin), ask(&guard, &origin)];
    origin.wait_for_loads("k", 1).await;
    chaos.once(Fault::BlackHole);
    let ends = tokio::spawn({
        let guard = guard.clone();
        async move { guard.shutdown(Duration::ZERO).await }
    });
    a_moment().await;
    assert_eq!(chaos.struck(Fault::BlackHole), 1, "the hand-over is on its way");
    let loaded = Instant::now();
    origin.release();
    for calls in calls {
        assert_eq!(calls.await.unwrap().unwrap(), 0);
    }
    assert!(loaded.elapsed() < Duration::from_millis(500), "{:?}", loaded.elapsed());
    assert_eq!(ends.await.unwrap().abandoned, 1);
}

/// Regression: after the deadline, all waiting callers loaded at once: 500 loads for 500 callers, at each deployment.
#[tokio::test(start_paused = true)]
async fn callers_waiting_at_a_shutdown_share_one_load() {
    let (chaos, origin, elsewhere) = (ChaosStore::new(1), Origin::new(), Origin::new());
    let (leading, ending) = (node(&chaos), node(&chaos));
    elsewhere.hold();
    let leads = ask(&leading, &elsewhere);
    elsewhere.wait_for_loads("k", 1).await;
    origin.hold();
    let mut waiting: Vec<_> = (0..500).map(|_| ask(&ending, &origin)).collect();
    a_moment().await;
    let shutdown = ending.shutdown(Duration::from_millis(100)).await;
    assert_eq!((shutdown.finished, shutdown.abandoned), (false, 0));
    // These callers come after the shutdown, and find the store closed.
    waiting.extend((0..100).map(|_| ask(&ending, &origin)));
    a_moment().await;
    assert_eq!(origin.loads("k"), 1);
    origin.release();
    for waiting in waiting {
        assert_eq!(waiting.await.unwrap().unwrap(), 0);
    }
    assert_eq!(origin.loads("k"), 1);
    elsewhere.release();
    assert!(leads.await.unwrap().is_ok());
}

/// A service receives requests even while it shuts down. The shutdown does not wait for the loads that these start.
#[tokio::test(start_paused = true)]
async fn a_guard_that_is_shut_down_loads_once_for_concurrent_callers() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let ended = node(&chaos);
    origin.hold();
    let leads = ask(&ended, &origin);
    origin.wait_for_loads("k", 1).await;
    let ends = tokio::spawn({
        let ended = ended.clone();
        async move { ended.shutdown(Duration::from_secs(30)).await }
    });
    a_moment().await;
    let others: Vec<_> = (0..50).map(|_| ask(&ended, &origin)).collect();
    a_moment().await;
    assert_eq!(origin.loads("k"), 1, "they join the load that is on its way");
    origin.release();
    assert!(leads.await.unwrap().is_ok());
    assert!(ends.await.unwrap().finished);
    for other in others {
        assert!(other.await.unwrap().is_ok());
    }
    origin.hold();
    let later: Vec<_> = (0..50).map(|_| ask(&ended, &origin)).collect();
    a_moment().await;
    origin.release();
    for later in later {
        assert!(later.await.unwrap().is_ok());
    }
    assert_eq!(origin.loads("k"), 2);
    assert!(ended.shutdown(Duration::ZERO).await.finished);
}
