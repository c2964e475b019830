//! Stale values across processes: the whole fleet starts one background load, and no process sends another request to a failing origin for
//! a while.

use futures_util::future::join_all;

use super::*;
use crate::support::gate::Counter;
use crate::support::origin::Answer;

const LEASE: Duration = Duration::from_secs(30);

/// Four processes, and a stale value of `k`, which one of them has loaded. The next load is answered with `then`.
async fn stale(windows: Windows, then: Answer) -> Nodes {
    let nodes = Nodes::start_with(4, LEASE, Some(windows)).await;
    nodes.origin.script("k", [Answer::value("first"), then]);
    nodes.node(0).send("load k 1");
    nodes.all_get([0], "k", "first").await;
    nodes.nothing_left(0..4).await;
    // This really waits, because the test cannot move the server's clock. The slack is for the processes' different readings of that clock.
    tokio::time::sleep(ms(windows.fresh_ms + 100)).await;
    nodes
}

const REVALIDATING: Windows = Windows { fresh_ms: 100, revalidate_ms: 600_000, error_ms: 0 };
const ERROR_WINDOW: Windows = Windows { fresh_ms: 100, revalidate_ms: 0, error_ms: 600_000 };

async fn ask_all(nodes: &Nodes, value: &str) {
    for index in 0..4 {
        nodes.node(index).send("load k 10");
    }
    nodes.all_get(0..4, "k", value).await;
}

#[tokio::test]
async fn every_process_serves_the_stale_value_while_one_of_them_loads() {
    let nodes = stale(REVALIDATING, Answer::value("second").held()).await;
    // The load is held, so a caller that waited for it would not be answered.
    for _ in 0..5 {
        ask_all(&nodes, "first").await;
    }
    nodes.origin.wait_for_loads("k", 1).await;
    assert_eq!(nodes.origin.loads("k"), 2, "one background load in the fleet");
    nodes.origin.release("k");
    nodes.origin.wait_for_ends("k", 2).await;
    // Each process may find the new value stale again, and serves it while it is refreshed.
    eventually("the new value arrives", SOON, async || {
        nodes.node(3).send("get k");
        nodes.node(3).wait_event("get").await == "second"
    })
    .await;
}

#[tokio::test]
async fn no_process_repeats_a_failed_background_load_for_a_while() {
    let nodes = stale(REVALIDATING, Answer::failure("no route")).await;
    ask_all(&nodes, "first").await;
    nodes.origin.wait_for_ends("k", 2).await;
    crate::support::probe::assert_nothing_left(&nodes.server, SOON).await;
    for _ in 0..5 {
        ask_all(&nodes, "first").await;
    }
    assert_eq!(nodes.origin.loads("k"), 2);
}

#[tokio::test]
async fn a_stale_value_stands_in_for_a_failed_load_in_every_process() {
    let nodes = stale(ERROR_WINDOW, Answer::failure("no route").held()).await;
    for index in 0..4 {
        nodes.node(index).send("load k 10");
        if index == 0 {
            nodes.origin.wait_for_loads("k", 2).await;
        } else {
            queued(&nodes.server, "k", index).await;
        }
    }
    nodes.origin.release("k");
    nodes.all_get(0..4, "k", "first").await;
    for _ in 0..5 {
        ask_all(&nodes, "first").await;
    }
    assert_eq!(nodes.origin.loads("k"), 2, "the origin is left alone");
    nodes.nothing_left(0..4).await;
}

#[tokio::test]
async fn an_invalidated_value_stands_in_for_nothing() {
    let nodes = stale(ERROR_WINDOW, Answer::failure("no route")).await;
    nodes.node(2).send("invalidate k");
    assert_eq!(nodes.node(2).wait_event("invalidate").await, true);
    nodes.node(1).send("load k 5");
    let replies = nodes.replies(1, "k").await;
    assert!(replies.iter().all(|reply| reply.result.is_err()), "{replies:?}");
}

#[tokio::test]
async fn processes_that_refresh_at_once_load_once() {
    let nodes = Nodes::start(4, LEASE).await;
    nodes.origin.script("k", [Answer::value("first"), Answer::value("second").held()]);
    nodes.node(0).send("load k 1");
    nodes.all_get([0], "k", "first").await;
    for index in 0..4 {
        nodes.node(index).send("refresh k 5");
        if index == 0 {
            nodes.origin.wait_for_loads("k", 2).await;
        } else {
            queued(&nodes.server, "k", index).await;
        }
    }
    nodes.node(1).send("get k");
    assert_eq!(nodes.node(1).wait_event("get").await, "first", "the older value is served meanwhile");
    nodes.origin.release("k");
    nodes.all_get(0..4, "k", "second").await;
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.nothing_left(0..4).await;
}

/// Regression: with the default budget, 50 nodes made 24 loads instead of one. Some of them could not read the megabyte in time, and each
/// of these loaded without the store. The budget has to be longer than all the reads together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_of_a_megabyte_is_refreshed_once_where_the_budget_lets_all_read_it() {
    const FRESH_FOR: Duration = Duration::from_secs(2);
    let server = RedisServer::start();
    let policy = patient(SOON).fresh_for(FRESH_FOR).ttl_jitter(0.0).stale_while_revalidate(SOON * 6);
    let policy = policy.build().expect("valid");
    let guards = join_all((0..50).map(|_| local(&server, policy.clone()))).await;
    let loads = Counter::default();
    let get = |guard: &StampedeGuard| {
        let (guard, loads) = (guard.clone(), loads.clone());
        let load = move || async move {
            let _running = loads.start();
            Ok::<_, String>("v".repeat((1 << 20) - 64))
        };
        tokio::spawn(async move { guard.get_or_load("k", load).await.expect("a value").len() })
    };
    get(&guards[0]).await.expect("joined");
    tokio::time::sleep(FRESH_FOR + ms(100)).await;
    let began = Instant::now();
    for read in join_all(guards.iter().map(get)).await {
        assert_eq!(read.expect("joined"), (1 << 20) - 64);
    }
    settled(&guards).await;
    let found_stale: u64 = guards.iter().map(|guard| guard.stats().stale).sum();
    assert!(
        found_stale > 0 && guards.iter().all(|guard| guard.stats().fail_open_loads == 0),
        "{found_stale} found it stale"
    );
    // A stalled machine allows one more refresh for each time that the value became stale again.
    let periods = began.elapsed().as_millis() / FRESH_FOR.as_millis();
    let refreshes = loads.started() - 1;
    assert!((1..=1 + periods as usize).contains(&refreshes), "{refreshes} in {periods} periods");
}
