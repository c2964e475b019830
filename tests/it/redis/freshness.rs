//! The freshness that a policy and a loader decide holds for all nodes on a server: four nodes, each with its own
//! connections.

use stampede_guard::LoadContext;

use super::*;
use crate::support::gate::{Counter, Gate};

const FRESH: Duration = Duration::from_millis(150);

fn policy() -> PolicyBuilder {
    patient(Duration::from_secs(60)).fresh_for(FRESH).ttl_jitter(0.0)
}

/// Four nodes, the gate of the origin, and the counter of its loads. A value is the number of its load.
struct Fleet {
    _server: RedisServer,
    nodes: Vec<StampedeGuard>,
    loads: Counter,
    gate: Gate,
}

impl Fleet {
    async fn start(policy: PolicyBuilder) -> Self {
        let (server, policy) = (RedisServer::start(), policy.build().expect("valid"));
        let mut nodes = Vec::new();
        for _ in 0..4 {
            nodes.push(local(&server, policy.clone()).await);
        }
        let gate = Gate::closed();
        gate.open();
        Self { _server: server, nodes, loads: Counter::default(), gate }
    }

    async fn ask(&self, node: usize) -> usize {
        let (loads, gate) = (self.loads.clone(), self.gate.clone());
        let load = move || async move {
            let _running = loads.start();
            let number = loads.started();
            gate.pass().await;
            Ok::<_, String>(number)
        };
        self.nodes[node].get_or_load("k", load).await.expect("loaded")
    }

    async fn ask_all(&self) -> Vec<usize> {
        futures_util::future::join_all((0..40).map(|caller| self.ask(caller % 4))).await
    }

    fn total(&self, of: impl Fn(stampede_guard::Stats) -> u64) -> u64 {
        self.nodes.iter().map(|node| of(node.stats())).sum()
    }
}

/// Really sleeps, because the test cannot move the server's clock. The slack is for the nodes' readings of that clock, which differ by
/// milliseconds.
async fn stale_by_now() {
    tokio::time::sleep(FRESH + ms(100)).await;
}

#[tokio::test]
async fn after_the_soft_timeout_every_node_receives_the_stale_value_and_the_load_is_stored_for_all() {
    let mut fleet = Fleet::start(policy().stale_if_error(SOON).soft_timeout(ms(30))).await;
    assert_eq!(fleet.ask(0).await, 1);
    stale_by_now().await;
    fleet.gate = Gate::closed();
    assert_eq!(fleet.ask_all().await, [1; 40]);
    assert_eq!(fleet.loads.started(), 2, "one load behind all of them");
    assert_eq!(fleet.total(|stats| stats.soft_timeouts), 40);
    fleet.gate.open();
    for node in &fleet.nodes {
        eventually("the new value arrives", SOON, async || {
            node.get("k").await.expect("answered") == Some(2_usize)
        })
        .await;
    }
}

#[tokio::test]
async fn a_value_is_loaded_ahead_of_its_end_once_for_all_nodes() {
    let mut fleet = Fleet::start(policy().fresh_for(SOON).refresh_ahead(0.001)).await;
    assert_eq!(fleet.ask(0).await, 1);
    stale_by_now().await;
    fleet.gate = Gate::closed();
    assert_eq!(fleet.ask_all().await, [1; 40], "no caller waits");
    eventually("the refresh begins", SOON, async || fleet.loads.started() == 2).await;
    assert_eq!(fleet.ask_all().await, [1; 40]);
    assert_eq!(
        (fleet.loads.started(), fleet.total(|stats| stats.early_refreshes)),
        (2, 4),
        "each tries, one may"
    );
    fleet.gate.open();
}

#[tokio::test]
async fn a_loader_receives_the_value_and_validator_of_another_node() {
    let fleet = Fleet::start(policy().stale_if_error(SOON)).await;
    let load = |expected: Option<&'static str>| {
        move |mut cx: LoadContext<String>| async move {
            assert_eq!(cx.validator(), expected);
            cx.set_validator("\"v1\"");
            Ok::<_, String>(cx.take_previous().unwrap_or_else(|| "the report".into()))
        }
    };
    for (node, expected) in [(0, None), (1, Some("\"v1\"")), (2, Some("\"v1\""))] {
        let value = fleet.nodes[node].load("k").get(load(expected)).await;
        assert_eq!(value.expect("loaded").value, "the report", "not modified: the value stays");
        stale_by_now().await;
    }
}

#[tokio::test]
async fn negative_values_and_failures_keep_their_own_lifetimes_on_all_nodes() {
    // So long that eight calls fit into it on a busy machine.
    let lasts = ms(1_500);
    let fleet = Fleet::start(policy().fresh_for(SOON).negative_for(lasts).error_for(lasts)).await;
    let loads = Counter::default();
    let nothing = |node: usize, key: &'static str| {
        let loads = loads.clone();
        fleet.nodes[node].get_or_load(key, move || async move {
            let _running = loads.start();
            if key == "fails" { Err("no route".to_owned()) } else { Ok(None::<u32>) }
        })
    };
    for node in 0..4 {
        assert_eq!(nothing(node, "nothing").await.ok(), Some(None));
        assert!(nothing(node, "fails").await.is_err());
    }
    assert_eq!((loads.started(), fleet.total(|stats| stats.negatives)), (2, 1), "once each");
    tokio::time::sleep(lasts + ms(100)).await;
    assert!(nothing(1, "nothing").await.is_ok() && nothing(2, "fails").await.is_err());
    assert_eq!(loads.started(), 4, "and no longer than that");
}

/// Regression: a negative value that was stored directly lasted for `fresh_for`, and not for `negative_for` like a loaded one.
#[tokio::test]
async fn a_negative_value_stored_directly_keeps_its_own_lifetime_on_all_nodes() {
    let lasts = ms(300);
    let fleet = Fleet::start(policy().fresh_for(SOON).negative_for(lasts)).await;
    fleet.nodes[0].insert("nothing", &None::<u32>).await.expect("stored");
    fleet.nodes[0].insert("something", &Some(1_u32)).await.expect("stored");
    tokio::time::sleep(lasts + ms(100)).await;
    assert_eq!(fleet.nodes[1].get::<Option<u32>>("nothing").await.expect("answered"), None);
    assert_eq!(fleet.nodes[1].get::<Option<u32>>("something").await.expect("answered"), Some(Some(1)));
}

#[tokio::test]
async fn values_that_are_stored_together_expire_at_different_times() {
    let server = RedisServer::start();
    let node =
        local(&server, policy().fresh_for(Duration::from_secs(1000)).ttl_jitter(0.1).build().expect("valid"))
            .await;
    let mut ends = std::collections::BTreeSet::new();
    for key in 0..50 {
        node.insert(("k", key), &1_u32).await.expect("stored");
        let left = node.remaining_freshness(("k", key)).await.expect("answered").expect("stored");
        assert!(left <= Duration::from_secs(1000) && left > Duration::from_secs(890), "{left:?}");
        ends.insert(left.as_secs());
    }
    assert!(ends.len() > 20, "within 100 s: {ends:?}");
}
