//! Callers of one guard in several runtimes, one of which is not driven: its thread is busy, or does other work. On
//! the in-memory store behind a wire of one millisecond; `redis::runtimes` has the same on a server.
//!
//! Both runtimes use the machine's clock, because the wire orders commands by one clock.

use std::pin::Pin;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use stampede_guard::testing::ChaosStore;
use stampede_guard::{Error, MemoryStore, Policy, StampedeGuard};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

const SOON: Duration = Duration::from_secs(10);
/// How long a command may take: half of a call's budget, as by default, because a caller waits for one read and then makes its own.
const COMMAND: Duration = Duration::from_millis(500);
/// A call that takes longer has waited for the other runtime.
const BUDGET: Duration = Duration::from_secs(5);
/// This many callers, one after the other, take a tenth of this time if none of them waits for the other runtime.
const LATER: (usize, Duration) = (50, Duration::from_secs(2));
const CALLERS: usize = 20;

/// A caller's future. If it was not polled in time, it may return an error.
type Call = Pin<Box<dyn Future<Output = Result<Option<u64>, Error>> + Send>>;

fn undriven() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn driven() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn get(guard: &StampedeGuard) -> Call {
    let guard = guard.clone();
    Box::pin(async move { guard.get::<u64>("k").await })
}

async fn stored(value: u64) -> (ChaosStore, StampedeGuard) {
    let chaos = ChaosStore::new(1);
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    let policy =
        Policy::builder().command_timeout(COMMAND).coordination_budget(COMMAND * 2).build().expect("valid");
    let guard = StampedeGuard::builder(chaos.clone()).policy(policy).build().expect("valid");
    guard.insert("k", &value).await.expect("stored");
    (chaos, guard)
}

/// Polls this many callers once each.
async fn begun(guard: &StampedeGuard, callers: usize) -> Vec<Call> {
    let mut calls: Vec<_> = (0..callers).map(|_| get(guard)).collect();
    for call in &mut calls {
        assert!(poll!(call).is_pending());
    }
    calls
}

/// The answer to a caller of this runtime, and how long the caller waited.
async fn timed(guard: &StampedeGuard) -> (Option<u64>, Duration) {
    let began = Instant::now();
    let found = timeout(SOON, get(guard)).await.expect("answered without the other runtime").expect("read");
    (found, began.elapsed())
}

/// Checks that callers of this runtime receive `value`: a first one and concurrent ones within the budget, later ones at once.
async fn are_answered(guard: &StampedeGuard, value: u64) {
    for (found, took) in join_all((0..CALLERS).map(|_| timed(guard))).await {
        assert_eq!(found, Some(value));
        assert!(took <= BUDGET, "{took:?}");
    }
    let began = Instant::now();
    for _ in 0..LATER.0 {
        assert_eq!(timed(guard).await.0, Some(value));
    }
    assert!(began.elapsed() < LATER.1, "{:?}", began.elapsed());
    let loads = || async { Err::<u64, _>("it is a hit") };
    assert_eq!(guard.get_or_load("k", loads).await.expect("a hit"), value);
    let stats = guard.stats();
    assert_eq!((stats.store_errors, stats.loads), (0, 0));
}

/// Checks that callers that were not polled for a while receive a value of at least this version, or an error because their time is over.
fn all_return(found: Vec<Result<Option<u64>, Error>>, least: u64) {
    assert!(
        found.iter().all(|found| found.as_ref().is_ok_and(|found| *found >= Some(least)) || found.is_err()),
        "{found:?}"
    );
}

/// The read of the first caller makes no progress. Regression: each caller of the other runtime waited for it as long as one command may
/// take.
#[test]
fn a_read_in_an_undriven_runtime_delays_the_callers_of_another_once() {
    let undriven = undriven();
    let (guard, calls) = undriven.block_on(async {
        let (_, guard) = stored(7).await;
        let calls = begun(&guard, 1).await;
        (guard, calls)
    });
    driven().block_on(are_answered(&guard, 7));
    all_return(undriven.block_on(join_all(calls)), 7);
}

/// The reader of the queue was spawned on the runtime that is not driven, and has never run. Regression: callers of the other runtime
/// waited for ever.
#[test]
fn a_reader_in_an_undriven_runtime_that_never_ran_is_replaced() {
    let undriven = undriven();
    let (guard, calls) = undriven.block_on(async {
        let (_, guard) = stored(7).await;
        let calls = begun(&guard, 3).await;
        (guard, calls)
    });
    driven().block_on(are_answered(&guard, 7));
    all_return(undriven.block_on(join_all(calls)), 7);
    assert_eq!(undriven.block_on(get(&guard)).expect("read"), Some(7));
}

/// The reader has closed its queue and begun its read, and makes no progress. Later callers must not receive the result of that read, which
/// may be older than a value that they know of.
#[test]
fn a_reader_in_an_undriven_runtime_that_has_begun_a_read_is_replaced() {
    let undriven = undriven();
    let (guard, calls) = undriven.block_on(async {
        let (chaos, guard) = stored(7).await;
        let before = chaos.commands();
        let first = tokio::spawn(get(&guard));
        while chaos.commands() < before + 1 {
            yield_now().await;
        }
        let calls = begun(&guard, 3).await;
        while chaos.commands() < before + 2 {
            yield_now().await;
        }
        assert_eq!(first.await.expect("joined").expect("read"), Some(7));
        (guard, calls)
    });
    driven().block_on(async {
        guard.insert("k", &8_u64).await.expect("stored");
        are_answered(&guard, 8).await;
    });
    all_return(undriven.block_on(join_all(calls)), 7);
    assert_eq!(undriven.block_on(get(&guard)).expect("read"), Some(8));
}

/// Regression: a thread that computed for three seconds delayed the hits of another runtime by as much.
#[test]
fn a_busy_thread_delays_the_hits_of_its_own_runtime_only() {
    let (sends, hears) = std::sync::mpsc::channel();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let busy = std::thread::spawn(move || {
        undriven().block_on(async move {
            let (_, guard) = stored(7).await;
            let calls = begun(&guard, 2).await;
            sends.send(guard).expect("received");
            // Blocks its runtime, as a computation would, until the other callers have been answered.
            let _ = is_done.recv_timeout(SOON);
            join_all(calls).await
        })
    });
    let guard = hears.recv().expect("a guard");
    driven().block_on(are_answered(&guard, 7));
    done.send(()).expect("it is busy until then");
    all_return(busy.join().expect("no panic"), 7);
}

/// As in a service that connects in one runtime and answers in another.
#[test]
fn copies_are_served_although_the_runtime_that_renewed_their_lease_stands_still() {
    const TERM: Duration = Duration::from_millis(200);
    let policy = Policy::builder().local_for(Duration::MAX).build().expect("valid");
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).local_term(TERM);
    let guard = guard.build().expect("valid");
    let asks_until_memory_answers = async || {
        let before = guard.stats().local_hits;
        while guard.stats().local_hits == before {
            let load = || async { Err::<u64, _>("it is a hit") };
            assert_eq!(guard.get_or_load("k", load).await.expect("a hit"), 7);
            sleep(TERM / 20).await;
        }
    };
    let (undriven, driven) = (undriven(), driven());
    undriven.block_on(async {
        guard.insert("k", &7_u64).await.expect("stored");
        asks_until_memory_answers().await;
    });
    driven.block_on(async {
        // The lease ends, because the task that renews it is in the runtime that is not driven.
        sleep(TERM * 2).await;
        timeout(SOON, asks_until_memory_answers()).await.expect("another task renews it");
    });
}
