//! Promise 9: however a load ends, it leaves no key without a TTL, no lease, no queue, no outcome beyond its time, no
//! flight, no task, no connection and no subscription.

use stampede_guard::{LoadError, OnWaitTimeout};

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::probe::assert_nothing_left;

/// The outcome of a load is kept for two leases, for readers that come late.
const LEASE: Duration = Duration::from_millis(1_600);
const FRESH_FOR: Duration = Duration::from_secs(30);

fn policy() -> PolicyBuilder {
    patient(LEASE).fresh_for(FRESH_FOR).load_timeout(Duration::from_secs(3))
}

/// The number of tasks in this test's runtime.
fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Two nodes on one server; the first one leads.
struct Pair {
    server: RedisServer,
    guards: [StampedeGuard; 2],
}

impl Pair {
    async fn start() -> Self {
        let server = RedisServer::start();
        let policy = policy().build().expect("valid");
        let guards = [local(&server, policy.clone()).await, local(&server, policy).await];
        Self { server, guards }
    }

    /// Sends one caller from each node, for a load that ends with `end`. Returns both answers.
    async fn wave<F, Fut>(&self, key: &'static str, end: F) -> [Result<String, LoadError<String>>; 2]
    where
        F: FnOnce() -> Fut + Clone + Send + 'static,
        Fut: Future<Output = Result<String, String>> + Send + 'static,
    {
        let (gate, loads) = (Gate::closed(), Counter::default());
        let [first, second] = [&self.guards[0], &self.guards[1]].map(|guard| {
            let (guard, gate, loads, end) = (guard.clone(), gate.clone(), loads.clone(), end.clone());
            async move {
                let load = move || async move {
                    let _running = loads.start();
                    gate.pass().await;
                    end().await
                };
                guard.get_or_load(key, load).await
            }
        });
        let first = tokio::spawn(first);
        loads.reach(1).await;
        let second = tokio::spawn(second);
        queued(&self.server, key, 1).await;
        gate.open();
        [first.await.expect("joined"), second.await.expect("joined")]
    }

    /// Checks that only entries and connections are left while the guards live, and that neither connections nor tasks are left after their
    /// drop.
    async fn leaves_nothing(self, tasks_before: usize) {
        let Self { server, guards } = self;
        settled(&guards).await;
        assert_nothing_left(&server, SOON).await;
        for key in server.keys() {
            let life: i64 = server.run(&["PTTL", &key]);
            assert!(life <= FRESH_FOR.as_millis() as i64, "{key} lives for {life} ms");
        }
        eventually_eq("two connections per node", SOON, (4, 2), async || {
            (server.client_count(), server.pubsub_clients())
        })
        .await;
        drop(guards);
        eventually_eq("none when they have left", SOON, (0, 0), async || {
            (server.client_count(), server.pubsub_clients())
        })
        .await;
        assert_eq!(server.run::<Vec<String>>(&["PUBSUB", "CHANNELS"]), Vec::<String>::new());
        eventually_eq("their tasks have ended", SOON, tasks_before, async || tasks()).await;
    }
}

#[tokio::test]
async fn a_value_leaves_nothing_but_its_entry() {
    let (before, pair) = (tasks(), Pair::start().await);
    let values = pair.wave("k", || async { Ok("v".to_owned()) }).await;
    assert!(values.iter().all(|value| value.as_ref().is_ok_and(|value| value == "v")), "{values:?}");
    assert_eq!(pair.server.keys(), ["sg1:e:{default:k}"]);
    pair.leaves_nothing(before).await;
}

/// Regression: flights that each waited 20 ms behind a load of 20 s left 44 entries a second in the queue, and each end of a load had to
/// pass over them.
#[tokio::test]
async fn flights_that_waited_for_long_enough_leave_no_entries_in_the_queue() {
    let server = RedisServer::start();
    let leads = local(&server, lease_of(SOON * 2)).await;
    let hurried = patient(SOON * 2).wait_timeout(Duration::from_millis(20), OnWaitTimeout::Load);
    let hurried = hurried.build().expect("valid");
    let waits = local(&server, hurried).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let leading = tokio::spawn({
        let (gate, loads) = (gate.clone(), loads.clone());
        let load = move || async move {
            let _running = loads.start();
            gate.pass().await;
            Ok::<_, String>(1)
        };
        async move { leads.get_or_load("k", load).await }
    });
    loads.reach(1).await;
    for number in 2..8 {
        assert_eq!(answer(&waits, "k", number).await, number, "it loads for itself");
    }
    eventually_eq("no entry is left", SOON, 0, async || server.run::<usize>(&["LLEN", "sg1:q:{default:k}"]))
        .await;
    gate.open();
    assert_eq!(leading.await.expect("joined").expect("a value"), 1);
}

#[tokio::test]
async fn a_failure_leaves_nothing() {
    let (before, pair) = (tasks(), Pair::start().await);
    let values = pair.wave("k", || async { Err("no".to_owned()) }).await;
    assert!(values.iter().all(Result::is_err), "{values:?}");
    pair.leaves_nothing(before).await;
}

#[tokio::test]
async fn a_panic_leaves_nothing() {
    let (before, pair) = (tasks(), Pair::start().await);
    let values = pair.wave("k", || async { panic!("scripted") }).await;
    assert!(values.iter().all(|value| matches!(value, Err(LoadError::Panicked(_)))), "{values:?}");
    pair.leaves_nothing(before).await;
}

#[tokio::test]
async fn a_load_without_an_end_leaves_nothing() {
    let (before, pair) = (tasks(), Pair::start().await);
    let values = pair.wave("k", std::future::pending).await;
    assert!(
        values.iter().all(|value| matches!(value, Err(LoadError::Guard(error)) if error.is_timeout())),
        "{values:?}"
    );
    pair.leaves_nothing(before).await;
}

#[tokio::test]
async fn an_uncacheable_value_leaves_nothing_but_its_marker() {
    let (before, mut pair) = (tasks(), Pair::start().await);
    let policy = policy().max_body(100).build().expect("valid");
    pair.guards = pair.guards.map(|guard| guard.with_policy(policy.clone()));
    for key in ["k", "l"] {
        let values = pair.wave(key, || async { Ok("v".repeat(1_000)) }).await;
        assert!(values.iter().all(Result::is_ok), "{values:?}");
    }
    // This call reads the marker, and starts the probe that may remove it.
    for guard in &pair.guards {
        guard.get_or_load("k", || async { Ok::<_, String>("v".repeat(1_000)) }).await.expect("a value");
    }
    pair.leaves_nothing(before).await;
}

#[tokio::test]
async fn waiters_that_gave_up_leave_nothing() {
    for then in [OnWaitTimeout::Load, OnWaitTimeout::Fail] {
        let (before, pair) = (tasks(), Pair::start().await);
        let (gate, loads) = (Gate::closed(), Counter::default());
        let leader = tokio::spawn({
            let (guard, gate, loads) = (pair.guards[0].clone(), gate.clone(), loads.clone());
            async move {
                let load = move || async move {
                    let _running = loads.start();
                    gate.pass().await;
                    Ok::<_, String>(1u8)
                };
                guard.get_or_load("k", load).await
            }
        });
        loads.reach(1).await;
        let impatient =
            pair.guards[1].with_policy(policy().wait_timeout(ms(200), then).build().expect("valid"));
        let values =
            join_all((0..5).map(|_| impatient.get_or_load("k", || async { Ok::<_, String>(2u8) }))).await;
        assert_eq!(values.iter().all(Result::is_ok), then == OnWaitTimeout::Load, "{values:?}");
        drop(impatient);
        gate.open();
        assert_eq!(leader.await.expect("joined").expect("a value"), 1);
        pair.leaves_nothing(before).await;
    }
}

#[tokio::test]
async fn callers_that_left_leave_nothing() {
    let (before, pair) = (tasks(), Pair::start().await);
    for guard in &pair.guards {
        let endless = guard.get_or_load("k", || async { std::future::pending::<Result<u8, String>>().await });
        tokio::time::timeout(ms(100), endless).await.expect_err("it has no end");
    }
    pair.leaves_nothing(before).await;
}

#[tokio::test]
async fn an_invalidated_load_leaves_nothing() {
    for invalidating in 0..2 {
        let (before, pair) = (tasks(), Pair::start().await);
        let other = pair.guards[invalidating].clone();
        let values = pair
            .wave("k", move || async move {
                other.invalidate("k").await.map_err(|error| error.to_string())?;
                Ok("v".to_owned())
            })
            .await;
        assert!(values.iter().all(Result::is_ok), "{values:?}");
        pair.leaves_nothing(before).await;
    }
}

#[tokio::test]
async fn a_shutdown_leaves_nothing() {
    let (before, pair) = (tasks(), Pair::start().await);
    let guard = pair.guards[0].clone();
    let loads = Counter::default();
    let endless = tokio::spawn({
        let loads = loads.clone();
        async move {
            let load = move || async move {
                let _running = loads.start();
                std::future::pending::<Result<u8, String>>().await
            };
            guard.get_or_load("k", load).await
        }
    });
    loads.reach(1).await;
    let shutdown = pair.guards[0].shutdown(ms(100)).await;
    assert_eq!((shutdown.finished, shutdown.handed_over), (false, 1));
    assert_eq!(pair.server.keys(), Vec::<String>::new());
    eventually_eq("its connections are closed", SOON, 2, async || pair.server.client_count()).await;
    assert!(endless.await.expect("joined").is_err(), "its load ends by its bound");
    let Pair { server, guards: [closed, other] } = pair;
    drop(closed);
    let pair = Pair { guards: [local(&server, policy().build().expect("valid")).await, other], server };
    pair.leaves_nothing(before).await;
}
