//! `doctor()` and `health()` report the truth about the deployment, with any rights and in bounded time.

use stampede_guard::health::{Breaker, Finding, LinkState, Report, Severity, Topology};

use super::clock::Relay;
use super::*;
use crate::support::probe::assert_nothing_left;

mod rights;

/// The doctor's own bound, and slack for a busy machine.
const BOUND: Duration = Duration::from_secs(12);

/// A policy with bounds that a busy machine does not exceed.
fn patient() -> Policy {
    lease_of(Duration::from_secs(60))
}

/// A complete report. Retries up to twice, because on a busy machine a reply may take longer than the doctor waits.
pub(super) async fn examined(guard: &StampedeGuard) -> Report {
    let examine = async || tokio::time::timeout(BOUND, guard.doctor()).await.expect("it is bounded");
    let mut report = examine().await;
    for _ in 0..2 {
        if report.to_string().contains("broke off") {
            report = examine().await;
        }
    }
    report
}

async fn doctor(guard: &StampedeGuard) -> Report {
    let report = examined(guard).await;
    for finding in &report.findings {
        let text = format!("{finding}");
        assert!(!text.contains("sg1:e:{") && !text.contains("pw"), "no key and no password: {text}");
    }
    report
}

/// The report for the default user, which has all rights.
async fn as_full_user(server: &RedisServer) -> Report {
    let guard = unconnected(&server.url(), patient());
    connects(&guard).await;
    doctor(&guard).await
}

async fn as_minimal_user(server: &RedisServer) -> Report {
    let guard = unconnected(&server.minimal_user(), patient());
    opens(&guard).await;
    doctor(&guard).await
}

#[track_caller]
fn of<'r>(report: &'r Report, check: &str) -> &'r Finding {
    let found = report.findings.iter().find(|finding| finding.check == check);
    found.unwrap_or_else(|| panic!("nothing about {check}:\n{report}"))
}

#[tokio::test]
async fn health_follows_the_connections() {
    let server = RedisServer::start();
    let guard = unconnected(&server.minimal_user(), patient());
    let idle = guard.health();
    assert_eq!(
        (idle.commands, idle.inbox, idle.breaker),
        (LinkState::Idle, LinkState::Idle, Breaker::Closed)
    );
    assert_eq!((idle.topology, idle.clock, idle.silent_for), (Topology::Single, None, None));

    connects(&guard).await;
    let up = guard.health();
    assert_eq!((up.commands, up.inbox, up.breaker), (LinkState::Up, LinkState::Up, Breaker::Closed), "{up}");
    let clock = up.clock.expect("read with the connection");
    assert!(clock.ahead_ms.abs() < 1_000 && clock.age < SOON, "{up}");
    assert!(up.silent_for.expect("the subscription was confirmed") < SOON, "{up}");

    server.kill();
    eventually("the breaker opens", SOON, async || {
        let health = guard.health();
        health.breaker == Breaker::Open
            && health.commands == LinkState::Down
            && health.inbox == LinkState::Down
    })
    .await;
    assert!(guard.health().reason.is_some(), "{}", guard.health());

    server.start_again();
    eventually("and closes", SOON, async || {
        let health = guard.health();
        (health.breaker, health.inbox) == (Breaker::Closed, LinkState::Up)
    })
    .await;
    assert_eq!(guard.health().reason, None);

    guard.shutdown(Duration::ZERO).await;
    let report = doctor(&guard).await;
    assert_eq!(of(&report, "guard").found, "it was shut down", "{report}");
    let closed = guard.health();
    assert_eq!(
        (closed.commands, closed.inbox, closed.breaker),
        (LinkState::Closed, LinkState::Closed, Breaker::Open)
    );
}

#[tokio::test]
async fn an_inbox_that_is_up_hears_something_each_second() {
    let server = RedisServer::start();
    let guard = local(&server, patient()).await;
    // By then the confirmation of the subscription is older than a second.
    tokio::time::sleep(ms(2_500)).await;
    eventually("pings are answered", SOON, async || {
        let health = guard.health();
        health.silent_for.is_some_and(|silence| silence < ms(1_000))
            && health.inbox_lag.is_some_and(|lag| lag < ms(1_000))
    })
    .await;
    server.pause();
    eventually("no answer comes", SOON, async || {
        let health = guard.health();
        health.inbox_lag.is_some_and(|lag| lag >= ms(500)) || health.inbox == LinkState::Down
    })
    .await;
    server.resume();
}

#[tokio::test]
async fn the_full_user_sees_everything() {
    let server = RedisServer::with_args(["--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"]);
    let report = as_full_user(&server).await;
    assert!(report.is_healthy(), "{report}");
    for check in
        ["guard", "connection", "version", "topology", "clock", "rights", "notifications", "slots", "memory"]
    {
        assert_eq!(of(&report, check).severity, Severity::Ok, "{report}");
    }
    assert!(of(&report, "memory").found.contains("64 MiB"), "{report}");
    assert!(of(&report, "notifications").found.contains("heard"), "{report}");
    for check in ["eviction", "replicas", "persistence", "namespace"] {
        assert_eq!(of(&report, check).severity, Severity::Note, "{report}");
    }
    assert_nothing_left(&server, SOON).await;
}

#[tokio::test]
async fn the_minimal_user_sees_what_it_may_and_the_report_names_the_rest() {
    let server = RedisServer::start();
    let report = as_minimal_user(&server).await;
    assert!(report.is_healthy(), "{report}");
    for check in ["guard", "connection", "version", "topology", "clock", "rights", "notifications"] {
        assert_eq!(of(&report, check).severity, Severity::Ok, "{report}");
    }
    for check in ["info", "memory"] {
        assert_eq!(of(&report, check).severity, Severity::Note, "{report}");
        assert!(of(&report, check).found.contains("not permitted"), "{report}");
    }
    assert_nothing_left(&server, SOON).await;
}

#[tokio::test]
async fn config_stands_in_where_info_is_not_permitted() {
    let server = RedisServer::with_args(["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]);
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+config|get"]);
    let report = as_minimal_user(&server).await;
    assert!(of(&report, "memory").found.contains("64 MiB"), "{report}");
    assert!(of(&report, "eviction").found.contains("allkeys-lru"), "{report}");
}

#[tokio::test]
async fn each_policy_of_eviction_has_its_cost() {
    for (policy, severity, cost) in [
        ("noeviction", Severity::Warning, "writes are refused"),
        ("allkeys-lru", Severity::Note, "a second load"),
        ("volatile-lru", Severity::Note, "a second load"),
        ("volatile-ttl", Severity::Warning, "leases, queues and locks before any entry"),
    ] {
        let server = RedisServer::with_args(["--maxmemory", "64mb", "--maxmemory-policy", policy]);
        let report = as_full_user(&server).await;
        let eviction = of(&report, "eviction");
        assert_eq!(eviction.severity, severity, "{report}");
        assert!(eviction.cost.contains(cost) && eviction.found.contains(policy), "{report}");
        assert!(report.is_healthy(), "{report}");
    }
}

#[tokio::test]
async fn memory_without_a_bound_is_warned_of() {
    let server = RedisServer::start();
    let report = as_full_user(&server).await;
    assert_eq!(of(&report, "memory").severity, Severity::Warning, "{report}");
}

#[tokio::test]
async fn a_server_that_refuses_writes_is_a_problem() {
    let server = RedisServer::with_args(["--maxmemory", "1"]);
    let report = as_minimal_user(&server).await;
    assert!(of(&report, "writes").found.contains("OOM"), "{report}");
    assert!(!report.is_healthy(), "{report}");

    let server = RedisServer::start();
    server.run::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
    let guard = unconnected(&server.url(), patient());
    let report = doctor(&guard).await;
    assert!(!report.is_healthy(), "{report}");
}

#[tokio::test]
async fn a_missing_right_to_subscribe_is_reported_with_its_cost() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-subscribe"]);
    let guard = local(&server, patient()).await;
    assert_eq!(guard.health().inbox, LinkState::Refused);
    let report = doctor(&guard).await;
    let notifications = of(&report, "notifications");
    assert_eq!(notifications.severity, Severity::Warning, "{report}");
    assert!(notifications.cost.contains("timers") && notifications.advice.contains("+subscribe"), "{report}");
    assert!(report.is_healthy(), "{report}");
}

/// Regression: for a silent middlebox, the report advised to grant a right.
#[tokio::test]
async fn a_subscription_without_an_answer_is_distinguished_from_one_that_is_refused() {
    let server = RedisServer::start();
    let proxy = crate::support::proxy::Proxy::start(server.port()).await;
    proxy.set(crate::support::proxy::Mode::BlackHoleSubscriptions);
    let report = doctor(&unconnected(&proxy.url(), patient())).await;
    let notifications = of(&report, "notifications");
    assert_eq!(notifications.severity, Severity::Warning, "{report}");
    assert!(notifications.found.contains("timed out") && !notifications.advice.contains("ACL"), "{report}");
}

/// PUBLISH counts a subscriber to all channels, so a grant to a dead waiter would look as if it was received.
#[tokio::test]
async fn a_subscriber_to_all_channels_is_reported() {
    let server = RedisServer::start();
    let mut listens = server.conn();
    let mut listens = listens.as_pubsub();
    listens.psubscribe("*").expect("subscribed");
    let report = as_minimal_user(&server).await;
    assert!(report.is_healthy(), "{report}");
    let notifications = of(&report, "notifications");
    assert_eq!(notifications.severity, Severity::Warning, "{report}");
    assert!(
        notifications.found.contains("went to 2") && notifications.advice.contains("PSUBSCRIBE"),
        "{report}"
    );
    listens.punsubscribe("*").expect("unsubscribed");
    assert_eq!(of(&as_minimal_user(&server).await, "notifications").severity, Severity::Ok);
}

#[tokio::test]
async fn without_the_right_to_time_the_report_names_the_local_clock() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-time"]);
    let guard = local(&server, patient()).await;
    assert_eq!(guard.health().clock, None);
    let report = doctor(&guard).await;
    assert!(of(&report, "clock").cost.contains("own clock"), "{report}");
}

#[tokio::test]
async fn a_server_under_another_clock_is_noted() {
    let server = RedisServer::start();
    let relay = Relay::start(&server, 3_600).await;
    let guard = unconnected(&relay.url, patient());
    connects(&guard).await;
    let ahead = guard.health().clock.expect("read").ahead_ms;
    assert!((3_590_000..3_610_000).contains(&ahead), "{ahead}");
    let report = doctor(&guard).await;
    assert_eq!(of(&report, "clock").severity, Severity::Note, "{report}");
    assert!(report.is_healthy(), "freshness goes by the server's clock: {report}");
}

/// The guard uses the clock that it read when it connected. Since then the server's clock has jumped by an hour.
#[tokio::test]
async fn a_clock_that_has_jumped_since_it_was_read_is_warned_of() {
    let server = RedisServer::start();
    let relay = Relay::start(&server, 0).await;
    let guard = unconnected(&relay.url, patient());
    connects(&guard).await;
    relay.set(3_600);
    let report = doctor(&guard).await;
    let jumped = |finding: &Finding| finding.check == "clock" && finding.severity == Severity::Warning;
    assert!(report.findings.iter().any(jumped), "{report}");

    server.kill_clients();
    eventually("the next reading shows the jump", SOON, async || {
        guard.health().clock.is_some_and(|clock| clock.largest_jump > Duration::from_secs(3_590))
    })
    .await;
}

#[tokio::test]
async fn a_wrong_password_is_a_finding() {
    let server = RedisServer::start();
    let guard = unconnected(&format!("redis://minimal:no@127.0.0.1:{}/", server.port()), patient());
    let report = doctor(&guard).await;
    let connection = of(&report, "connection");
    assert_eq!(connection.severity, Severity::Problem, "{report}");
    assert!(connection.advice.contains("put the present ones into the URL"), "{report}");
}

/// Regression: the finding contained only the bare cause, without the advice that the guard's own warning has.
#[tokio::test]
async fn an_unconnected_guard_reports_advice_about_the_connection() {
    let free = crate::support::redis_server::free_port();
    let report = doctor(&unconnected(&format!("redis://127.0.0.1:{free}/"), patient())).await;
    assert!(of(&report, "connection").advice.contains("no server listens there"), "{report}");
    assert!(of(&report, "connection").found.contains("refused"), "{report}");
}

#[tokio::test]
async fn a_server_that_is_down_is_a_finding_and_comes_at_once() {
    let server = RedisServer::start();
    let guard = local(&server, patient()).await;
    server.kill();
    let started = Instant::now();
    let report = doctor(&guard).await;
    assert_eq!(of(&report, "connection").severity, Severity::Problem, "{report}");
    assert!(!report.is_healthy() && started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_server_that_is_stopped_is_a_finding_in_bounded_time() {
    let server = RedisServer::start();
    let guard = local(&server, patient()).await;
    server.pause();
    let started = Instant::now();
    let report = doctor(&guard).await;
    assert_eq!(of(&report, "connection").severity, Severity::Problem, "{report}");
    assert!(!report.is_healthy() && started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    server.resume();
    // Commands that were sent before the timeout have left nothing either.
    assert_nothing_left(&server, SOON).await;
}

#[tokio::test]
async fn settings_that_the_latency_does_not_fit_into_are_found() {
    let server = RedisServer::start();
    let proxy = crate::support::proxy::Proxy::start(server.port()).await;
    let guard = unconnected(&proxy.url(), Policy::default());
    proxy.set(crate::support::proxy::Mode::Delay(ms(80)));
    let report = doctor(&guard).await;
    assert_eq!(of(&report, "latency").severity, Severity::Problem, "{report}");
    assert_eq!(of(&report, "settings").severity, Severity::Problem, "{report}");
    let advice = &of(&report, "latency").advice;
    assert!(advice.contains("command_timeout"), "{report}");
    // The policy is built exactly as the report advises. If the advice names no lease, the default lease must fit.
    let numbers: Vec<_> =
        advice.split_whitespace().filter_map(|word| word.trim_end_matches(',').parse().ok()).collect();
    let (command, budget) = (ms(numbers[0]), ms(numbers[1]));
    let policy = Policy::builder().command_timeout(command).coordination_budget(budget);
    let policy = match numbers.get(2) {
        Some(lease) => policy.lease(ms(*lease)),
        None => policy,
    };
    policy.build().unwrap_or_else(|error| panic!("{advice}: {error}"));
}

#[tokio::test]
async fn a_dropped_examination_leaves_nothing() {
    let server = RedisServer::start();
    let guard = local(&server, patient()).await;
    let before = server.client_count();
    for wait in [0, 1, 2, 4, 8] {
        let _ = tokio::time::timeout(ms(wait), guard.doctor()).await;
    }
    eventually_eq("its connections are closed", SOON, before, async || server.client_count()).await;
    assert_nothing_left(&server, SOON).await;
}

/// Each test that these pages cite exists.
#[test]
fn the_runbook_cites_tests_that_exist() {
    let texts = [
        include_str!("../../../docs/faults.md"),
        include_str!("../../../docs/metrics.md"),
        include_str!("../../../docs/operations.md"),
        include_str!("../../../docs/rolling-updates.md"),
        include_str!("../../../docs/sizing.md"),
        include_str!("../../../SECURITY.md"),
    ];
    let mut cited = 0;
    for path in texts.iter().flat_map(|text| text.split('`')) {
        let parts: Vec<_> = path.split("::").collect();
        let is_path = parts.iter().all(|part| part.chars().all(|c| c.is_ascii_lowercase() || c == '_'));
        if parts.len() < 2 || !is_path {
            continue;
        }
        let file = |parts: &[&str]| {
            let path = format!("tests/it/{}.rs", parts.join("/"));
            std::fs::read_to_string(crate::support::root().join(path))
        };
        let (name, folder) = parts.split_last().expect("two at least");
        let function = file(folder).is_ok_and(|text| text.contains(&format!("fn {name}()")));
        assert!(function || file(&parts).is_ok(), "there is no test {path}");
        cited += 1;
    }
    assert!(cited > 30, "{cited}");
}
