//! P1 to P9, Z1 to Z4: a process that is killed, or stopped, at each point of a load's way. The points are reached, not
//! slept for: what the origin, the server and the network have seen says where the process is.

use super::*;
use crate::support::origin::Answer;
use crate::support::proxy::{Mode, Proxy};

/// Long enough to be kept, also on a machine that stands still for a moment.
const LEASE: Duration = Duration::from_secs(4);
/// For a machine that runs other tests beside this one, or stands still.
const SLOW: Duration = Duration::from_secs(8);

/// One node behind a proxy that something will happen to, and two that go on.
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
        // Scripts are known, so that what the network holds back is one command and not the second half of two.
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

    /// The victim leads a load that is held at the origin.
    async fn leads(&self, tell: &str) {
        self.victim().send(tell);
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

    /// All callers of the others are given `value` within a lease; there were so many loads; and afterwards they work
    /// as on the first day.
    async fn others_get(&self, value: &str, loads: usize) {
        let since = Instant::now();
        self.others.all_get(0..2, "k", value).await;
        assert!(since.elapsed() < LEASE + SLOW, "{:?}", since.elapsed());
        assert_eq!(self.others.origin.loads("k"), loads);
        // What the network has held back arrives now, and is too late.
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
    eventually_eq("its subscription is gone", SOON, 2, async || marked.others.server.pubsub_clients()).await;
}

/// P2: the lease is the dead process's, who did not even know.
#[tokio::test]
async fn a_process_killed_when_it_has_acquired_costs_one_lease() {
    let marked = Marked::new().await;
    marked.proxy.set(Mode::NoReplies);
    marked.victim().send("load k 1");
    marked.key("l", 1).await;
    marked.victim().kill();
    let already = marked.others.origin.loads("k");
    assert_eq!(already, 0, "it can not know that it may load");
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

/// P4: it has the value, and the commit is on its way when it dies; it arrives when somebody else's is stored.
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

/// P5: the commit has run, and nobody was told there.
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

/// The grant has left, its sender does not hear of it.
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

/// Z1, Z2: stopped with its commit on the way, for longer than its lease.
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
    assert_eq!(own[0]["result"]["Ok"], "first", "its own callers have what it loaded");
    marked.others.node(1).send("get k");
    assert_eq!(marked.others.node(1).wait_event("get").await, "second");
}

/// Z4: who waited is answered as soon as it runs again: with what is stored, or, where it was stopped in the middle of a
/// command, whose time is then over, by a load without the server.
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
    // Past every timer of its own.
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

/// A host of all of them that stands still: nobody renews, and the first to go on leads.
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
