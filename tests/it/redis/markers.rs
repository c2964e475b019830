//! P1 to P9, Z1 to Z4: a process is killed, or stopped, at each step of a load. To know that a step is reached, the tests do not sleep, but
//! observe the origin, the server and the network.

use super::*;
use crate::support::origin::Answer;
use crate::support::proxy::{Mode, Proxy};

/// The lease is so long that a process keeps it even if the machine stalls for a moment.
const LEASE: Duration = Duration::from_secs(4);
/// Slack for a machine that runs other tests at the same time, or stalls.
const SLOW: Duration = Duration::from_secs(8);

/// The process that is killed or stopped (the victim), which is behind a proxy, and two other nodes.
struct Marked {
    victim: Fleet,
    proxy: Proxy,
    others: Nodes,
}

impl Marked {
    async fn new() -> Self {
        let others = Nodes::start(2, LEASE).await;
        let proxy = Proxy::start(others.server.port()).await;
        let (redis, origin) = (proxy.url(), others.origin.addr());
        let config = Config { redis, origin, lease_ms: LEASE.as_millis() as u64, windows: None };
        let victim = Fleet::spawn(1, "node", &config);
        victim.wait_ready().await;
        // The server learns the scripts first, so that the proxy holds back one EVALSHA, and not the EVAL that follows an unknown script.
        for member in others.fleet.members().iter().chain(victim.members()) {
            member.send("load warm 1");
            member.wait_event("warm").await;
        }
        others.origin.script("k", [Answer::value("first").held(), Answer::value("second")]);
        Self { victim, proxy, others }
    }

    fn victim(&self) -> &Member {
        self.victim.member(0)
    }

    fn keys(&self, kind: &str) -> usize {
        let name = format!("sg1:{kind}:{{default:k}}");
        self.others.server.keys().into_iter().filter(|key| *key == name).count()
    }

    async fn key(&self, kind: &str, n: usize) {
        eventually_eq(format!("a key of kind {kind}"), SOON, n, async || self.keys(kind)).await;
    }

    /// Makes the victim lead a load by `command`, which the origin holds.
    async fn leads(&self, command: &str) {
        self.victim().send(command);
        self.others.origin.wait_for_loads("k", 1).await;
    }

    async fn others_wait(&self) {
        for (waiting, member) in self.others.fleet.members().iter().enumerate() {
            member.send("load k 5");
            queued(&self.others.server, "k", waiting + 1).await;
        }
    }

    fn others_ask(&self) {
        self.others.fleet.members().iter().for_each(|member| member.send("load k 5"));
    }

    /// Checks that all callers of the other nodes receive `value` within a lease, that there were `loads` loads, and that these nodes still
    /// work afterwards.
    async fn others_get(&self, value: &str, loads: usize) {
        let since = Instant::now();
        self.others.all_get(0..2, "k", value).await;
        assert!(since.elapsed() < LEASE + SLOW, "{:?}", since.elapsed());
        assert_eq!(self.others.origin.loads("k"), loads);
        // The commands that were held back arrive now, too late.
        self.proxy.set(Mode::Pass);
        self.others.nothing_left(0..2).await;
        self.others.node(0).send("get k");
        assert_eq!(self.others.node(0).wait_event("get").await, value);
        self.others.work(0..2).await;
    }
}

#[tokio::test]
async fn a_process_killed_when_it_has_subscribed_costs_nothing() {
    let marked = Marked::new().await;
    marked.others.origin.release("k");
    marked.victim().kill();
    marked.others_ask();
    marked.others_get("first", 1).await;
    eventually_eq("its subscription has ended", SOON, 2, async || marked.others.server.pubsub_clients())
        .await;
}

/// P2: the dead process has the lease, although the grant has not reached it.
#[tokio::test]
async fn a_process_killed_when_it_has_acquired_costs_one_lease() {
    let marked = Marked::new().await;
    marked.proxy.set(Mode::NoReplies);
    marked.victim().send("load k 1");
    marked.key("l", 1).await;
    marked.victim().kill();
    let already = marked.others.origin.loads("k");
    assert_eq!(already, 0, "it has not received the grant");
    marked.others.origin.release("k");
    marked.others_ask();
    marked.others_get("first", 1).await;
}

#[tokio::test]
async fn a_process_killed_while_it_loads_costs_one_lease_and_one_load() {
    let marked = Marked::new().await;
    marked.leads("load k 3").await;
    marked.others_wait().await;
    marked.victim().kill();
    marked.others_get("second", 2).await;
}

#[tokio::test]
async fn a_process_killed_between_two_renewals_costs_one_lease_and_one_load() {
    let marked = Marked::new().await;
    marked.leads("load k 3").await;
    marked.others_wait().await;
    let left = || marked.others.server.run::<i64>(&["PTTL", "sg1:l:{default:k}"]);
    let mut before = left();
    eventually("a renewal", SOON, || {
        let now = left();
        std::future::ready(std::mem::replace(&mut before, now) < now)
    })
    .await;
    marked.victim().kill();
    marked.others_get("second", 2).await;
}

/// P4: the process dies while its commit is on its way. The commit arrives after another process's value is stored.
#[tokio::test]
async fn a_process_killed_when_it_has_loaded_costs_one_lease_and_one_load() {
    let marked = Marked::new().await;
    marked.leads("load k 3").await;
    marked.others_wait().await;
    marked.proxy.set(Mode::BlackHole);
    marked.others.origin.release("k");
    marked.others.origin.wait_for_ends("k", 1).await;
    marked.victim().kill();
    marked.others_get("second", 2).await;
}

/// P5: the commit has run when the victim dies, but the victim's callers were not answered.
#[tokio::test]
async fn a_process_killed_while_it_commits_costs_nothing() {
    let marked = Marked::new().await;
    marked.leads("load k 3").await;
    marked.others_wait().await;
    marked.proxy.set(Mode::NoReplies);
    marked.others.origin.release("k");
    marked.key("e", 1).await;
    marked.victim().kill();
    marked.others_get("first", 1).await;
}

#[tokio::test]
async fn a_process_killed_when_it_has_committed_costs_nothing() {
    let marked = Marked::new().await;
    marked.leads("load k 3").await;
    marked.others.origin.release("k");
    marked.victim().wait_event("k").await;
    marked.victim().kill();
    marked.others_ask();
    marked.others_get("first", 1).await;
}

#[tokio::test]
async fn a_process_killed_while_it_waits_costs_nothing() {
    let marked = Marked::new().await;
    marked.others.node(0).send("load k 5");
    marked.others.origin.wait_for_loads("k", 1).await;
    marked.victim().send("load k 3");
    queued(&marked.others.server, "k", 1).await;
    marked.others.node(1).send("load k 5");
    queued(&marked.others.server, "k", 2).await;
    marked.victim().kill();
    marked.others.origin.release("k");
    marked.others_get("first", 1).await;
}

/// The hand-over has run when the victim dies, but the victim has not received the reply.
#[tokio::test]
async fn a_process_killed_while_it_hands_over_costs_nothing_more() {
    let marked = Marked::new().await;
    marked.leads("panic k").await;
    marked.others_wait().await;
    marked.proxy.set(Mode::NoReplies);
    marked.others.origin.release("k");
    marked.others.origin.wait_for_loads("k", 2).await;
    marked.victim().kill();
    marked.others_get("second", 2).await;
}

/// Z1, Z2: a process is stopped for longer than its lease, while its commit is on its way.
#[tokio::test]
async fn a_commit_that_arrives_after_a_stop_past_the_lease_is_refused() {
    let marked = Marked::new().await;
    marked.leads("load k 3").await;
    marked.others_wait().await;
    marked.proxy.set(Mode::BlackHole);
    marked.others.origin.release("k");
    marked.others.origin.wait_for_ends("k", 1).await;
    marked.victim().pause();
    marked.others_get("second", 2).await;
    marked.victim().resume();
    let own = marked.victim().wait_event("k").await;
    assert_eq!(own[0]["result"]["Ok"], "first", "its own callers receive its load");
    marked.others.node(1).send("get k");
    assert_eq!(marked.others.node(1).wait_event("get").await, "second");
}

/// Z4: a stopped waiter is answered as soon as it runs again: with the stored value or, if it was stopped during a command, which has timed
/// out by then, by a load without the server.
#[tokio::test]
async fn a_waiter_stopped_past_its_lease_is_answered_when_it_goes_on() {
    let marked = Marked::new().await;
    marked.others.node(0).send("load k 5");
    marked.others.origin.wait_for_loads("k", 1).await;
    marked.victim().send("load k 3");
    queued(&marked.others.server, "k", 1).await;
    marked.others.node(1).send("load k 5");
    queued(&marked.others.server, "k", 2).await;
    marked.victim().pause();
    // Longer than any timer of the victim.
    tokio::time::sleep(LEASE + LEASE / 2).await;
    marked.others.origin.release("k");
    marked.others_get("first", 1).await;
    marked.victim().resume();
    let own = marked.victim().wait_event("k").await;
    marked.victim().send("stats");
    let stats: Counts = serde_json::from_value(marked.victim().wait_event("stats").await).expect("counts");
    assert_eq!(marked.others.origin.loads("k") as u64, 1 + stats.fail_open_loads, "{stats:?}");
    let value = if stats.fail_open_loads == 0 { "first" } else { "second" };
    for reply in own.as_array().expect("replies") {
        assert_eq!(reply["result"]["Ok"], value, "{own}");
    }
    marked.others.node(1).send("get k");
    assert_eq!(marked.others.node(1).wait_event("get").await, "first");
}

/// The machine that runs all processes stalls: no process renews the lease, and the process that first runs again leads.
#[tokio::test]
async fn a_fleet_that_is_stopped_past_its_lease_loads_once_more() {
    let marked = Marked::new().await;
    marked.leads("load k 3").await;
    marked.others_wait().await;
    marked.others.fleet.members().iter().chain(marked.victim.members()).for_each(Member::pause);
    marked.key("l", 0).await;
    marked.others.fleet.members().iter().for_each(Member::resume);
    marked.others_get("second", 2).await;
    marked.victim().resume();
    marked.others.origin.release("k");
    let own = marked.victim().wait_event("k").await;
    assert_eq!(own[0]["result"]["Ok"], "first", "{own}");
    marked.others.node(0).send("get k");
    assert_eq!(marked.others.node(0).wait_event("get").await, "second");
}
