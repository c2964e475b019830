//! Promises 2 and 7: the number of commands on the wire. A hit is one GET. A load is three commands, however many callers
//! wait for it. A waiting process adds three commands, however many of its callers wait.

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::monitor::{Commands, Monitor};
use crate::support::probe::assert_nothing_left;

/// The lease is so long that neither a renewal nor a timer occurs during a test.
const LEASE: Duration = Duration::from_secs(120);

/// Connected nodes on a server that knows their scripts, so that later loads do not send the scripts' text.
async fn nodes(n: usize) -> (RedisServer, Vec<StampedeGuard>) {
    let server = RedisServer::start();
    let mut guards = Vec::new();
    for _ in 0..n {
        guards.push(local(&server, lease_of(LEASE)).await);
    }
    let (gate, loads) = (Gate::closed(), Counter::default());
    let first = held(&guards[0], "first", &gate, &loads);
    loads.reach(1).await;
    let second = held(&guards[n - 1], "first", &gate, &loads);
    gate.open();
    let failed = guards[0].get_or_load("failed", || async { Err::<u8, _>("no".to_owned()) }).await;
    assert!(failed.is_err());
    guards[0].invalidate("failed").await.expect("confirmed");
    for caller in [first, second] {
        assert_eq!(caller.await.expect("joined"), Ok(1));
    }
    settled(&guards).await;
    (server, guards)
}

/// Sends one caller, whose load waits at `gate`.
fn held(
    guard: &StampedeGuard,
    key: &'static str,
    gate: &Gate,
    loads: &Counter,
) -> tokio::task::JoinHandle<Result<u8, String>> {
    let (guard, gate, loads) = (guard.clone(), gate.clone(), loads.clone());
    tokio::spawn(async move {
        let load = move || async move {
            let _running = loads.start();
            gate.pass().await;
            Ok::<_, String>(1)
        };
        guard.get_or_load(key, load).await.map_err(|error| error.to_string())
    })
}

/// The commands of the nodes, without PING and TIME, whose number depends on how long the test ran.
fn sent(monitor: Monitor<'_>) -> Commands {
    monitor.finish().without(["ping", "time"])
}

#[tokio::test]
async fn a_hit_is_exactly_one_get() {
    let (server, guards) = nodes(2).await;
    answer(&guards[0], "k", 1).await;
    let monitor = Monitor::start(&server);
    for hit in 0..10 {
        assert_eq!(answer(&guards[hit % 2], "k", 2).await, 1);
    }
    let commands = sent(monitor);
    assert_eq!((commands.total, commands.of("get")), (10, 10), "{commands:#?}");
    assert!(
        commands.lines.iter().all(|line| line.ends_with(r#""GET" "sg1:e:{default:k}""#)),
        "{commands:#?}"
    );
}

#[tokio::test]
async fn a_cold_key_is_a_get_an_acquire_and_a_commit() {
    let (server, guards) = nodes(1).await;
    let monitor = Monitor::start(&server);
    assert_eq!(answer(&guards[0], "k", 1).await, 1);
    settled(&guards).await;
    let commands = sent(monitor);
    assert_eq!((commands.total, commands.of("get"), commands.of("evalsha")), (3, 1, 2), "{commands:#?}");
}

#[tokio::test]
async fn a_failing_load_is_a_get_an_acquire_and_a_fail() {
    let (server, guards) = nodes(1).await;
    let monitor = Monitor::start(&server);
    guards[0].get_or_load("k", || async { Err::<u8, _>("no".to_owned()) }).await.expect_err("fails");
    settled(&guards).await;
    let commands = sent(monitor);
    assert_eq!((commands.total, commands.of("get"), commands.of("evalsha")), (3, 1, 2), "{commands:#?}");
}

#[tokio::test]
async fn callers_that_start_together_share_one_get() {
    let (server, guards) = nodes(1).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let monitor = Monitor::start(&server);
    let callers: Vec<_> = (0..200).map(|_| held(&guards[0], "k", &gate, &loads)).collect();
    loads.reach(1).await;
    // The load is held until the last caller has joined its flight.
    tokio::time::sleep(ms(300)).await;
    gate.open();
    for caller in callers {
        assert_eq!(caller.await.expect("joined"), Ok(1));
    }
    settled(&guards).await;
    let commands = sent(monitor);
    assert_eq!((commands.total, loads.started()), (3, 1), "{commands:#?}");
}

#[tokio::test]
async fn newcomers_during_a_load_send_nothing() {
    let (server, guards) = nodes(2).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let mut callers = vec![held(&guards[0], "k", &gate, &loads)];
    loads.reach(1).await;
    // A caller of the other node waits, too.
    callers.push(held(&guards[1], "k", &gate, &loads));
    queued(&server, "k", 1).await;

    let monitor = Monitor::start(&server);
    for newcomer in 0..200 {
        callers.push(held(&guards[newcomer % 2], "k", &gate, &loads));
        tokio::time::sleep(ms(2)).await;
    }
    let commands = sent(monitor);
    assert_eq!(commands.total, 0, "{commands:#?}");
    gate.open();
    for caller in callers {
        assert_eq!(caller.await.expect("joined"), Ok(1));
    }
    assert_eq!(loads.started(), 1);
}

/// There are 24 commands in all. If all waiters were woken to read the entry, there would be 37.
#[tokio::test]
async fn a_waiting_process_is_a_get_and_two_acquires() {
    let (server, guards) = nodes(8).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let monitor = Monitor::start(&server);
    let mut callers = vec![held(&guards[0], "k", &gate, &loads)];
    loads.reach(1).await;
    for caller in 1..200 {
        callers.push(held(&guards[caller % 8], "k", &gate, &loads));
    }
    queued(&server, "k", 7).await;
    gate.open();
    for caller in callers {
        assert_eq!(caller.await.expect("joined"), Ok(1));
    }
    settled(&guards).await;
    let commands = sent(monitor);
    assert_eq!((commands.of("get"), commands.of("evalsha")), (8, 2 + 2 * 7), "{commands:#?}");
    assert_eq!((commands.total, loads.started()), (24, 1), "{commands:#?}");
    assert_nothing_left(&server, SOON).await;
}

/// A long load costs its own process three renewals per lease, and each other process one or two acquires per lease, whether one caller or
/// a hundred wait there.
#[tokio::test]
async fn a_long_load_costs_a_constant_number_of_commands_per_process_and_lease() {
    const PERIODS: u32 = 2;
    let server = RedisServer::start();
    let lease = ms(3_000);
    let guards = [local(&server, lease_of(lease)).await, local(&server, lease_of(lease)).await];
    let (gate, loads) = (Gate::closed(), Counter::default());
    let mut callers = vec![held(&guards[0], "k", &gate, &loads)];
    loads.reach(1).await;
    callers.extend((0..200).map(|caller| held(&guards[caller % 2], "k", &gate, &loads)));
    queued(&server, "k", 1).await;

    let monitor = Monitor::start(&server);
    let started = Instant::now();
    tokio::time::sleep(lease * PERIODS).await;
    let commands = sent(monitor);
    let periods = started.elapsed().as_secs_f64() / lease.as_secs_f64();
    let allowed = ((3.0 + 2.0) * periods).ceil() as usize + 2;
    assert!(commands.total <= allowed, "{allowed} are allowed in {periods:.1} leases: {commands:#?}");
    assert!(commands.total >= 2 * PERIODS as usize, "it was renewed: {commands:#?}");
    gate.open();
    for caller in callers {
        assert_eq!(caller.await.expect("joined"), Ok(1));
    }
    assert_eq!(loads.started(), 1);
}
