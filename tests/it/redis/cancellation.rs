//! The drop matrix on a real server: a caller is dropped at each of its await points, alone or with others behind it. That does not disturb
//! other callers, and leaves no lease that the next caller would have to wait for.

use super::*;
use crate::support::gate::Counter;
use crate::support::probe::{DropAt, assert_nothing_left};

/// If a lease is never released, the next caller has to wait this long, and its test fails.
const LEASE: Duration = Duration::from_secs(60);

/// A load with one await point.
fn load(loads: &Counter) -> impl FnOnce() -> BoxFuture<'static, Result<u32, String>> + Send + use<> {
    let loads = loads.clone();
    move || {
        Box::pin(async move {
            let _running = loads.start();
            tokio::time::sleep(ms(20)).await;
            Ok(1)
        })
    }
}

/// Drops a caller at each of its polls, each time with a new key, until it completes before the drop. Returns the number of drops.
async fn matrix(
    followers: usize,
    server: &RedisServer,
    nodes: impl AsyncFn() -> [StampedeGuard; 2],
) -> usize {
    for n in 0.. {
        let guards = nodes().await;
        let (key, loads) = (format!("k{followers}-{n}"), Counter::default());
        let dropped = DropAt::new(n, guards[0].get_or_load(&*key, load(&loads)));
        let others =
            (0..followers).map(|follower| guards[(follower + 1) % 2].get_or_load(&*key, load(&loads)));
        let both = futures_util::future::join(dropped, join_all(others));
        let (done, others) = tokio::time::timeout(SOON, both).await.expect("no caller hangs");
        assert!(others.iter().all(|value| matches!(value, Ok(1))), "dropped at poll {n}: {others:?}");
        if followers > 0 {
            assert_eq!(loads.started(), 1, "dropped at poll {n}");
        }
        loads.idle().await;

        let next = tokio::time::timeout(SOON, guards[1].get_or_load(&*key, load(&loads))).await;
        assert_eq!(next.expect("no lease was left").expect("a value"), 1, "dropped at poll {n}");
        assert!(loads.started() <= 2, "dropped at poll {n}: {} loads", loads.started());
        settled(&guards).await;
        if done.is_some() {
            assert_nothing_left(server, SOON).await;
            return n;
        }
    }
    unreachable!("it completes at last");
}

#[tokio::test]
async fn a_caller_dropped_at_any_await_point_loses_nothing() {
    let server = RedisServer::start();
    let guards = [local(&server, lease_of(LEASE)).await, local(&server, lease_of(LEASE)).await];
    for followers in [0, 1, 4] {
        let points = matrix(followers, &server, async || guards.clone()).await;
        assert!(points >= 3, "{points} points are no matrix");
    }
}

/// The first call of a guard connects, and may be dropped during that, too.
#[tokio::test]
async fn a_caller_dropped_while_it_connects_loses_nothing() {
    let server = RedisServer::start();
    for followers in [0, 2] {
        let nodes = async || [0; 2].map(|_| unconnected(&server.minimal_user(), lease_of(LEASE)));
        let points = matrix(followers, &server, nodes).await;
        assert!(points >= 3, "{points} points are no matrix");
    }
}

/// The guard is dropped while its load runs. The task of the load keeps the connections until the load ends.
#[tokio::test]
async fn a_guard_dropped_during_its_load_leaves_nothing() {
    let server = RedisServer::start();
    for n in 0..4 {
        let guard = local(&server, lease_of(LEASE)).await;
        let loads = Counter::default();
        DropAt::new(n, guard.get_or_load("k", load(&loads))).await;
        drop(guard);
        loads.idle().await;
        eventually_eq("its connections are closed", SOON, 0, async || server.client_count()).await;
        assert_nothing_left(&server, SOON).await;
        server.flush_all();
    }
}

/// Callers of two nodes come and leave at random, while one key is loaded again and again.
#[tokio::test]
async fn callers_that_leave_at_random_leave_the_others_alone() {
    let server = RedisServer::start();
    let guards = [local(&server, lease_of(LEASE)).await, local(&server, lease_of(LEASE)).await];
    let loads = Counter::default();
    for round in 0..60 {
        let key = format!("r{round}");
        let callers = (0..12).map(|caller| {
            let (guard, key, load) = (&guards[caller % 2], &*key, load(&loads));
            let polls = if caller < 2 { usize::MAX } else { fastrand::usize(..5) };
            DropAt::new(polls, guard.get_or_load(key, load))
        });
        let values = tokio::time::timeout(SOON, join_all(callers)).await.expect("no caller hangs");
        for value in values.into_iter().flatten() {
            assert_eq!(value.expect("a value"), 1);
        }
        assert_eq!(loads.started(), round + 1, "one load per round, with any leader");
    }
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}
