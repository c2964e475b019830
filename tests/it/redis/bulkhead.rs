//! `max_concurrent_loads` over Redis: while the server answers, all processes together keep within it. Otherwise the limit costs nothing,
//! is not enforced, and a warning says so.

use stampede_guard::{ErrorKind, LoadError, OnOverload, OnStoreDown};

use super::*;
use crate::support::probe::assert_nothing_left;
use crate::support::warnings::Warnings;

const LOADS: u32 = 3;

fn capped() -> PolicyBuilder {
    patient(Duration::from_secs(60)).max_concurrent_loads(LOADS)
}

#[tokio::test]
async fn the_cap_holds_for_several_guards_and_all_get_their_turn() {
    let (server, loads) = (RedisServer::start(), Counter::default());
    let mut guards = Vec::new();
    for _ in 0..4 {
        guards.push(local(&server, capped().build().expect("valid")).await);
    }
    // Each of eighteen keys has two callers, at different guards.
    let calls = (0..36).map(|call| {
        let (guard, loads, key) = (&guards[call % 4], loads.clone(), call / 2);
        let load = move || async move {
            let _running = loads.start();
            tokio::time::sleep(ms(40)).await;
            Ok::<_, String>(key)
        };
        async move { (key, guard.get_or_load(("key", key), load).await) }
    });
    for (key, value) in join_all(calls).await {
        assert_eq!(value.expect("loaded"), key);
    }
    assert_eq!((loads.started(), loads.most_at_once()), (18, LOADS as usize));
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}

/// Regression: the caller read again, and queued behind its own first read for a whole `command_timeout`.
#[tokio::test]
async fn a_caller_beyond_max_flights_is_turned_away_without_a_wait() {
    let server = RedisServer::start();
    let policy = Policy::builder().max_concurrent_loads(1).permit_timeout(PATIENCE, OnOverload::Shed);
    let policy = policy.command_timeout(2 * PATIENCE).coordination_budget(4 * PATIENCE).lease(10 * PATIENCE);
    let builder = StampedeGuard::builder(server.client()).policy(policy.build().expect("valid"));
    let guard = builder.max_flights(1).build().expect("valid");
    connects(&guard).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let first = held_call_of(&guard, "first", 1, &gate, &loads);
    loads.reach(1).await;
    let second = guard.get_or_load("second", async || Ok::<_, String>(2));
    let second = tokio::time::timeout(PATIENCE, second).await.expect("it is turned away at once");
    let error = second.expect_err("there is no room");
    assert_eq!(error.guard().map(stampede_guard::Error::kind), Some(ErrorKind::Overloaded));
    gate.open();
    assert_eq!(first.await.expect("no panic"), 1);
}

#[tokio::test]
async fn the_cap_costs_nothing_while_the_server_is_dead_and_one_warning_says_so() {
    let server = RedisServer::start();
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard = local(&server, Policy::builder().max_concurrent_loads(LOADS).build().expect("valid")).await;
    requests(&guard, "before", 3).await;
    server.kill();
    let first = requests(&guard, "first", 5).await;
    keep_to_the_budget(&first, "first");
    let later = requests(&guard, "later", 40).await;
    assert!(median(later.clone()) <= NOTHING, "{later:?}");
    assert_eq!(warnings.about("loads are not limited").len(), 1, "{warnings:?}");
}

/// The server refuses only the command that counts loads: the limit is not enforced, and one warning says so.
#[tokio::test]
async fn a_cap_that_can_not_be_enforced_warns_once_and_is_enforced_again_later() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let server = RedisServer::start();
    let one = capped().max_concurrent_loads(1);
    let guard = local(&server, one.clone().build().expect("valid")).await;
    let closed = guard.with_policy(one.on_store_down(OnStoreDown::FailClosed).build().expect("valid"));
    let warned = || warnings.about("loads are not limited").len();
    for outage in 1..=2 {
        server.run::<()>(&["ACL", "SETUSER", "minimal", "-zadd"]);
        let (gate, loads) = (Gate::closed(), Counter::default());
        let calls = (0..5).map(|key| {
            let (gate, loads) = (gate.clone(), loads.clone());
            guard.get_or_load(("open", outage, key), move || async move {
                let _running = loads.start();
                gate.pass().await;
                Ok::<_, String>(1)
            })
        });
        let together = async {
            loads.reach(5).await;
            gate.open();
        };
        let (values, ()) = tokio::join!(join_all(calls), together);
        assert!(values.iter().all(Result::is_ok), "{values:?}");
        assert_eq!(warned(), outage);
        // With `FailClosed` the call fails instead, and the origin is not called.
        let spared = Counter::default();
        let load = {
            let spared = spared.clone();
            move || async move {
                let _running = spared.start();
                Ok::<u32, String>(1)
            }
        };
        let error = closed.get_or_load(("closed", outage), load).await.expect_err("closed");
        assert_eq!(spared.started(), 0);
        assert!(matches!(&error, LoadError::Guard(error) if error.kind() == ErrorKind::Store), "{error:?}");
        server.run::<()>(&["ACL", "SETUSER", "minimal", "+zadd"]);
        let loads = Counter::default();
        let calls = (0..4).map(|key| {
            let loads = loads.clone();
            guard.get_or_load(("stored", outage, key), move || async move {
                let _running = loads.start();
                tokio::time::sleep(ms(20)).await;
                Ok::<_, String>(1)
            })
        });
        assert!(join_all(calls).await.iter().all(Result::is_ok));
        assert_eq!((loads.most_at_once(), warned()), (1, outage));
    }
}
