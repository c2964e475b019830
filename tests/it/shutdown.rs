//! What a process that ends leaves to the others: nothing that they would have to wait for. Most of it was found by the
//! simulation.

use std::time::Duration;

use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin, Replica};
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::asking::{arrived, ask};

/// Far longer than the tests: a lease that stays with nobody would be missed.
fn policy() -> Policy {
    Policy::builder().lease(Duration::from_secs(60)).build().expect("valid")
}

/// Each way takes so many milliseconds.
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

/// A node that loads without the lease, which it has and does not know of, and can not give back.
async fn unknowing(chaos: &ChaosStore, origin: &Origin) -> StampedeGuard {
    let guard = node(chaos);
    let asked = ask(&guard, origin);
    arrived(chaos, 1).await;
    chaos.once(Fault::ErrorAfter);
    arrived(chaos, 2).await;
    chaos.inject(Fault::ErrorBefore, 1.0);
    assert_eq!(asked.await.unwrap().unwrap(), 0);
    guard
}

/// Lets what is on its way arrive.
async fn a_moment() {
    sleep(Duration::from_millis(20)).await;
}

/// Without a store a shutdown said that it had handed over what it had.
#[tokio::test(start_paused = true)]
async fn a_shutdown_claims_nothing_that_the_store_has_not_confirmed() {
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
        let told = (shutdown.finished, shutdown.handed_over, shutdown.abandoned);
        assert_eq!(told, if cut { (false, 0, 1) } else { (false, 1, 0) }, "{cut}");
        assert!(started.elapsed() <= Duration::from_millis(1_110), "{cut}: {:?}", started.elapsed());
        leading.abort();
    }
}

/// It had two loads of the key: one that led, and one that waited for that, to begin after it. Both left, and the lease of the
/// first went to the second.
#[tokio::test(start_paused = true)]
async fn a_node_that_ends_gives_its_lease_to_another_and_not_to_its_own_waiter() {
    let (chaos, origin) = a_way_off(1);
    let (replica, other) = (chaos.replica(), node(&chaos));
    let ending = node_on(&replica);
    origin.hold();
    let first = ask(&ending, &origin);
    arrived(&chaos, 1).await;
    // The load that begins meanwhile may be older than this, so who comes later has one of their own.
    ending.invalidate("k").await.unwrap();
    origin.wait_for_loads("k", 1).await;
    let second = ask(&ending, &origin);
    a_moment().await;
    let waits = ask(&other, &origin);
    a_moment().await;
    assert_eq!((origin.loads("k"), ending.stats().tasks), (1, 2), "one leads, and two wait");
    let shutdown = ending.shutdown(Duration::ZERO).await;
    assert_eq!((shutdown.finished, shutdown.handed_over, shutdown.abandoned), (false, 1, 0));
    // Its process ends here.
    replica.kill();
    first.abort();
    second.abort();
    let ended = Instant::now();
    origin.release();
    assert!(waits.await.unwrap().is_ok());
    assert!(ended.elapsed() < Duration::from_secs(1), "{:?}", ended.elapsed());
    assert!(other.get::<u64>("k").await.unwrap().is_some(), "it is stored by the other one");
}

/// Its acquire was on its way at the deadline, and was granted to nobody.
#[tokio::test(start_paused = true)]
async fn a_node_that_ends_waits_for_the_answer_to_what_it_has_asked() {
    let (chaos, origin) = a_way_off(10);
    let (replica, other) = (chaos.replica(), node(&chaos));
    let ending = node_on(&replica);
    let asked = ask(&ending, &origin);
    arrived(&chaos, 2).await;
    let shutdown = ending.shutdown(Duration::from_millis(3)).await;
    assert_eq!((shutdown.finished, shutdown.abandoned), (false, 0));
    assert_eq!(chaos.commands(), 3, "a look-up, an acquire, and what gives the lease back");
    replica.kill();
    asked.abort();
    let began = Instant::now();
    assert!(ask(&other, &origin).await.unwrap().is_ok());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// Nobody told that it had the lease, and it ended before it had given it back.
#[tokio::test(start_paused = true)]
async fn a_node_that_ends_waits_until_what_it_may_have_is_given_back() {
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

/// The same where nothing helps: it says what may be left.
#[tokio::test(start_paused = true)]
async fn a_node_that_ends_says_what_it_may_have() {
    let (chaos, origin) = a_way_off(1);
    let ending = unknowing(&chaos, &origin).await;
    let shutdown = ending.shutdown(Duration::from_millis(500)).await;
    assert_eq!((shutdown.finished, shutdown.handed_over, shutdown.abandoned), (true, 0, 1));
}

/// It was given the lease just then, and never heard of it.
#[tokio::test(start_paused = true)]
async fn a_node_that_ends_while_it_waits_gives_back_what_it_is_given_unheard() {
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

/// What was loaded meanwhile was given to nobody until the store had answered, or the lease's time was over.
#[tokio::test(start_paused = true)]
async fn callers_are_answered_while_a_node_that_ends_hands_its_lease_over() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let guard = node(&chaos);
    origin.hold();
    let asked = [ask(&guard, &origin), ask(&guard, &origin)];
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
    for asked in asked {
        assert_eq!(asked.await.unwrap().unwrap(), 0);
    }
    assert!(loaded.elapsed() < Duration::from_millis(500), "{:?}", loaded.elapsed());
    assert_eq!(ends.await.unwrap().abandoned, 1);
}

/// All of them loaded at once when the deadline had passed: 500 loads for 500 callers, at each deployment.
#[tokio::test(start_paused = true)]
async fn callers_that_wait_in_a_node_that_ends_share_one_load() {
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
    // Callers that come now find the store closed.
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

/// A service that has begun to shut down still has requests, and its shutdown does not wait for what they begin.
#[tokio::test(start_paused = true)]
async fn a_guard_that_is_shut_down_loads_once_for_all_who_ask_at_once() {
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
