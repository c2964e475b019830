//! Promise 6: a server that is down or hangs costs a request at most the coordination budget, and later requests nothing. Callers of one
//! process still share one load. When the server is back, values are stored again.

use stampede_guard::{Error, ErrorKind, LoadContext, LoadError, OnStoreDown};

use super::*;
use crate::support::gate::Counter;
use crate::support::probe::assert_nothing_left;
use crate::support::proxy::{Mode, Proxy};
pub(super) use crate::support::rounds::SLACK;

/// Slack for a stall of the machine. Waiting for a reply that never comes takes much longer than this.
pub(super) const STANDSTILL: Duration = Duration::from_secs(8);
/// What a request may cost in the median while the server is known to be down.
pub(super) const NOTHING: Duration = Duration::from_millis(20);
/// The default `coordination_budget`: the time that Redis may add to a request.
pub(super) const BUDGET: Duration = Duration::from_millis(100);
/// How long it may take, from the server's return, until values are stored again.
pub(super) const RECOVERY: Duration = Duration::from_secs(1);

/// A server behind a proxy, and a guard with the default policy: a budget of 100 ms.
pub(super) struct Line {
    pub(super) server: RedisServer,
    pub(super) proxy: Proxy,
    pub(super) guard: StampedeGuard,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Outage {
    /// The port refuses connections.
    Dead,
    /// The kernel accepts connections, but the server does not reply.
    Stopped,
    /// The server works, but the network does not.
    Network(Mode),
}

impl Line {
    pub(super) async fn new(policy: Policy) -> Self {
        let server = RedisServer::start();
        let proxy = Proxy::start(server.port()).await;
        let guard = unconnected(&proxy.url(), policy);
        Self { server, proxy, guard }
    }

    /// Connects without the proxy, for outages of the server itself: a proxy would accept connections although the server is dead.
    async fn direct(policy: Policy) -> Self {
        let line = Self::new(policy.clone()).await;
        let guard = unconnected(&line.server.minimal_user(), policy);
        Self { guard, ..line }
    }

    pub(super) async fn with(outage: Outage, policy: Policy) -> Self {
        match outage {
            Outage::Dead | Outage::Stopped => Self::direct(policy).await,
            Outage::Network(_) => Self::new(policy).await,
        }
    }

    pub(super) fn begin(&self, outage: Outage) {
        match outage {
            Outage::Dead => self.server.kill(),
            Outage::Stopped => self.server.pause(),
            Outage::Network(mode) => self.proxy.set(mode),
        }
    }

    pub(super) fn end(&self, outage: Outage) {
        match outage {
            Outage::Dead => self.server.start_again(),
            Outage::Stopped => self.server.resume(),
            Outage::Network(_) => self.proxy.set(Mode::Pass),
        }
    }
}

/// Sends requests one after another, each for a new key, and returns how long each took. The loads take no time.
pub(super) async fn requests(guard: &StampedeGuard, name: &str, n: usize) -> Vec<Duration> {
    let mut added = Vec::new();
    for request in 0..n {
        let started = Instant::now();
        assert_eq!(answer(guard, &format!("{name}-{request}"), 7).await, 7);
        added.push(started.elapsed());
    }
    added
}

/// Checks that requests lose at most the default budget to an unreachable server. On a machine that runs other tests at the same time, one
/// request in five may be late, but none by more than a stall. Of fewer than five requests, each may be late by a stall.
#[track_caller]
pub(super) fn keep_to_the_budget(added: &[Duration], what: impl std::fmt::Debug) {
    let late = added.iter().filter(|added| **added > BUDGET + SLACK).count();
    assert!(added.len() < 5 || late <= added.len().div_ceil(5), "{what:?}: {late} late: {added:?}");
    assert!(added.iter().all(|added| *added <= BUDGET + SLACK + STANDSTILL), "{what:?}: {added:?}");
}

pub(super) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Twenty callers of one key, each with a loader that takes `load`.
pub(super) async fn load_together(guard: &StampedeGuard, key: &str, load: Duration, loads: &Counter) {
    let callers = (0..20).map(|_| {
        let loads = loads.clone();
        guard.get_or_load(key, move || async move {
            let _running = loads.start();
            tokio::time::sleep(load).await;
            Ok::<_, String>(1)
        })
    });
    assert!(join_all(callers).await.into_iter().all(|value| value.is_ok_and(|value| value == 1)));
}

/// Checks that callers of one key share one load.
pub(super) async fn still_coalesces(guard: &StampedeGuard) {
    let loads = Counter::default();
    load_together(guard, "shared", ms(500), &loads).await;
    assert_eq!(loads.started(), 1);
}

/// Waits until a loaded value is stored again. Returns how long that took.
pub(super) async fn stores_again(guard: &StampedeGuard) -> Duration {
    stores_again_as(guard, "again").await
}

/// Like [`stores_again`], with a name for the keys, so that it can be used several times on one server.
pub(super) async fn stores_again_as(guard: &StampedeGuard, name: &str) -> Duration {
    let back = Instant::now();
    for attempt in 0.. {
        let key = format!("{name}-{attempt}");
        answer(guard, &key, 9).await;
        if guard.get::<u32>(&*key).await.ok().flatten() == Some(9) {
            return back.elapsed();
        }
        assert!(back.elapsed() < RECOVERY + SLACK + STANDSTILL, "not within {:?}", back.elapsed());
        tokio::time::sleep(ms(10)).await;
    }
    unreachable!("the loop returns");
}

async fn survives(outage: Outage, connected: bool) {
    let line = Line::with(outage, Policy::default()).await;
    let guard = &line.guard;
    if connected {
        connects(guard).await;
        requests(guard, "before", 3).await;
    }
    line.begin(outage);

    let first = requests(guard, "first", 5).await;
    keep_to_the_budget(&first, outage);
    let later = requests(guard, "later", 60).await;
    keep_to_the_budget(&later, outage);
    assert!(median(later.clone()) <= NOTHING, "{outage:?}: {later:?}");
    still_coalesces(guard).await;
    let stats = guard.stats();
    assert!(stats.fail_open_loads >= 60 && stats.failed == 0, "{stats:?}");

    line.end(outage);
    stores_again(guard).await;
    settled(std::slice::from_ref(guard)).await;
    assert_nothing_left(&line.server, SOON).await;
}

#[tokio::test]
async fn a_server_that_was_never_there_costs_nothing_for_long() {
    survives(Outage::Dead, false).await;
}

#[tokio::test]
async fn a_server_that_dies_costs_nothing_for_long() {
    survives(Outage::Dead, true).await;
}

#[tokio::test]
async fn a_server_that_is_stopped_from_the_start_costs_nothing_for_long() {
    survives(Outage::Stopped, false).await;
}

#[tokio::test]
async fn a_server_that_is_stopped_costs_nothing_for_long() {
    survives(Outage::Stopped, true).await;
}

#[tokio::test]
async fn a_network_that_swallows_everything_from_the_start_costs_nothing_for_long() {
    survives(Outage::Network(Mode::BlackHole), false).await;
}

#[tokio::test]
async fn a_network_that_swallows_everything_costs_nothing_for_long() {
    survives(Outage::Network(Mode::BlackHole), true).await;
}

#[tokio::test]
async fn a_network_that_swallows_answers_costs_nothing_for_long() {
    survives(Outage::Network(Mode::NoReplies), true).await;
}

/// The open connections are dead without a sign, as behind a firewall that has lost its state. New connections work.
#[tokio::test]
async fn connections_that_died_without_a_sign_are_replaced() {
    let line = Line::new(Policy::default()).await;
    connects(&line.guard).await;
    requests(&line.guard, "before", 3).await;
    line.proxy.set(Mode::BlackHoleOld);
    let first = requests(&line.guard, "first", 5).await;
    keep_to_the_budget(&first, "first");
    stores_again(&line.guard).await;
    assert!(line.proxy.connections() >= 3, "{}", line.proxy.connections());
}

/// The budgets of concurrent requests run at the same time, not one after the other.
#[tokio::test]
async fn a_hung_server_costs_concurrent_requests_one_budget_in_all() {
    let line = Line::new(Policy::default()).await;
    connects(&line.guard).await;
    line.begin(Outage::Network(Mode::BlackHole));
    let started = Instant::now();
    let keys: Vec<_> = (0..200).map(|key| format!("k{key}")).collect();
    join_all(keys.iter().map(|key| answer(&line.guard, key, 1))).await;
    // One after the other they would take at least ten seconds.
    assert!(started.elapsed() <= ms(100) + SLACK + STANDSTILL, "{:?}", started.elapsed());
}

/// Regression: when a hung server continues, it executes old commands. It granted leases to callers that had long given up, and all other
/// callers waited for these leases.
#[tokio::test]
async fn a_hung_server_grants_no_lease_to_a_caller_that_gave_up() {
    let policy = hurried_lease_of(ms(500));
    let line = Line::direct(policy.clone()).await;
    connects(&line.guard).await;
    // The server learns the script.
    assert_eq!(answer(&line.guard, "before", 1).await, 1);
    line.begin(Outage::Stopped);
    assert_eq!(answer(&line.guard, "k", 1).await, 1);
    // Longer than a lease, plus the time by which an acquire may be late: the guard no longer looks for a grant that it did not receive.
    tokio::time::sleep(ms(2_000)).await;
    line.end(Outage::Stopped);
    let lease = line.server.run::<Option<String>>(&["GET", "sg1:l:{default:k}"]);
    assert_eq!(lease, None);
    assert_eq!(line.guard.stats().fail_open_loads, 1);
}

fn fail_closed() -> Policy {
    Policy::builder().on_store_down(OnStoreDown::FailClosed).build().expect("valid")
}

async fn fails_closed(outage: Outage) {
    let line = Line::with(outage, fail_closed()).await;
    let guard = &line.guard;
    connects(guard).await;
    line.begin(outage);
    let loads = Counter::default();
    let mut added = Vec::new();
    for request in 0..60 {
        let (started, loads) = (Instant::now(), loads.clone());
        let load = move || async move {
            let _running = loads.start();
            Ok::<_, String>(1)
        };
        let error = guard.get_or_load(("k", request), load).await.expect_err("closed");
        assert!(matches!(&error, LoadError::Guard(error) if error.kind() == ErrorKind::Store), "{error:?}");
        added.push(started.elapsed());
    }
    keep_to_the_budget(&added, outage);
    assert!(median(added.clone()) <= NOTHING, "{outage:?}: {added:?}");
    assert_eq!(loads.started(), 0, "the origin is spared");

    line.end(outage);
    let back = Instant::now();
    while !matches!(guard.get::<i32>("back").await, Ok(Some(1))) {
        let _ = guard.get_or_load("back", || async { Ok::<_, String>(1) }).await;
        assert!(back.elapsed() < RECOVERY + SLACK + STANDSTILL, "not within {:?}", back.elapsed());
        tokio::time::sleep(ms(10)).await;
    }
}

#[tokio::test]
async fn failing_closed_is_fast_when_the_server_is_dead() {
    fails_closed(Outage::Dead).await;
}

#[tokio::test]
async fn failing_closed_is_fast_when_the_network_swallows_everything() {
    fails_closed(Outage::Network(Mode::BlackHole)).await;
}

#[tokio::test]
async fn a_refresh_while_the_server_is_dead_loads_or_fails_as_the_policy_says() {
    let line = Line::direct(Policy::default()).await;
    let (open, closed) = (&line.guard, line.guard.with_policy(fail_closed()));
    connects(open).await;
    line.begin(Outage::Dead);
    let loads = Counter::default();
    let load = || {
        let loads = loads.clone();
        move |_: LoadContext<u64>| async move {
            let _running = loads.start();
            Ok::<_, String>(2)
        }
    };
    for _ in 0..2 {
        let began = Instant::now();
        assert_eq!(open.load("k").refresh(load()).await.expect("loaded").value, 2);
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    }
    let error = closed.load("k").refresh(load()).await.expect_err("closed");
    assert!(matches!(&error, LoadError::Guard(error) if error.kind() == ErrorKind::Store), "{error:?}");
    assert_eq!(loads.started(), 2, "the origin is spared by the other");
}

/// The budget does not bound an invalidation. It may take longer, and returns an error if it is not confirmed within its own bound.
#[tokio::test]
async fn an_invalidation_that_is_not_confirmed_says_so_within_its_bound() {
    let line = Line::new(Policy::default()).await;
    connects(&line.guard).await;
    line.begin(Outage::Network(Mode::BlackHole));
    let started = Instant::now();
    let error = line.guard.invalidate("k").await.expect_err("not confirmed");
    assert!(error.is_store() && error.to_string().contains("not confirmed"), "{error}");
    assert!(started.elapsed() <= Duration::from_secs(2) + STANDSTILL, "{:?}", started.elapsed());
}

/// Begins a change while the server is dead, and then starts the server.
async fn rides_out_a_restart(line: &Line, change: &'static str) -> Result<(), Error> {
    line.server.kill();
    // The read fails, because the breaker is open.
    assert!(line.guard.get::<u32>("k").await.is_err());
    let changed = tokio::spawn({
        let guard = line.guard.clone();
        async move {
            match change {
                "invalidate" => guard.invalidate("k").await,
                "expire" => guard.expire("k").await,
                "insert" => guard.insert("k", &1_u32).await,
                _ => guard.insert_with_tags("k", &1_u32, ["tag"]).await,
            }
        }
    });
    tokio::task::yield_now().await;
    line.server.start_again();
    changed.await.expect("joined")
}

/// The reads before each write succeed, too. A change is retried for two seconds. On a busy machine a server may need as long to start, but
/// not three times in a row.
#[tokio::test]
async fn changes_ride_out_a_restart_of_the_server() {
    let line = Line::direct(lease_of(ms(2_000))).await;
    answer(&line.guard, "k", 1).await;
    for change in ["invalidate", "expire", "insert", "tagged"] {
        let mut changed = rides_out_a_restart(&line, change).await;
        for _ in 0..2 {
            if changed.is_err() {
                changed = rides_out_a_restart(&line, change).await;
            }
        }
        changed.unwrap_or_else(|error| panic!("{change}: {error}"));
    }
}
