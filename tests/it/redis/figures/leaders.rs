//! How long waiters wait for a lost leader: for the rest of its lease, a moment, and the next leader's load, which takes no time here.
//! (`leaders`, `markers` and `partitions` test the other promises about lost leaders.)

use tokio::task::JoinHandle;

use super::*;
use crate::support::origin::Answer;
use crate::support::rounds::{Rounds, Timing};

const LEASE: Duration = Duration::from_secs(1);
/// How long after the end of the lease the waiters may be answered.
const MOMENT: Duration = Duration::from_millis(100);

/// Two waiting nodes, with two callers each.
struct Waiting {
    server: RedisServer,
    guards: [StampedeGuard; 2],
}

impl Waiting {
    async fn new() -> Self {
        let server = RedisServer::start();
        let guards = [local(&server, lease_of(LEASE)).await, local(&server, lease_of(LEASE)).await];
        Self { server, guards }
    }

    /// Sends the callers, and waits until both nodes are in the queue behind the leader. Returns `None` if a command came too late, so that
    /// a caller continued without the server.
    async fn callers(&self, key: &str) -> Option<Vec<JoinHandle<u32>>> {
        let (open, loads) = (Gate::closed(), Counter::default());
        open.open();
        let guards = self.guards.iter().chain(&self.guards);
        let callers: Vec<_> = guards.map(|guard| held_call_of(guard, key, 2, &open, &loads)).collect();
        let queue = format!("sg1:q:{{default:{key}}}");
        let queued = eventually_eq("nodes wait", SOON, true, async || {
            self.server.run::<usize>(&["LLEN", &queue]) == 2 || callers.iter().any(JoinHandle::is_finished)
        });
        queued.await;
        callers.iter().all(|caller| !caller.is_finished()).then_some(callers)
    }
}

/// Waits until all callers are answered. Their time counts from `lost`.
async fn answered(callers: Vec<JoinHandle<u32>>, lost: Instant) -> Timing {
    for caller in join_all(callers).await {
        assert_eq!(caller.expect("joined"), 2);
    }
    Timing::once("answered", lost.elapsed(), LEASE + MOMENT)
}

async fn a_lost_leader_costs_one_lease(how: &str, lose: impl Fn(&Member)) {
    let (waiting, origin) = (Waiting::new().await, Origin::start().await);
    let lease_ms = LEASE.as_millis() as u64;
    let config =
        Config { redis: waiting.server.minimal_user(), origin: origin.addr(), lease_ms, windows: None };
    let mut rounds = Rounds::of(how);
    while let Some(round) = rounds.next() {
        let key = format!("k-{round}");
        origin.script(&key, [Answer::value("1").held()]);
        let leader = Fleet::spawn(1, "node", &config);
        leader.wait_ready().await;
        leader.member(0).send(&format!("load {key} 3"));
        origin.wait_for_loads(&key, 1).await;
        let Some(callers) = waiting.callers(&key).await else {
            rounds.spoil();
            continue;
        };
        let lost = Instant::now();
        lose(leader.member(0));
        rounds.note([answered(callers, lost).await]);
    }
}

#[tokio::test]
async fn a_killed_leader_costs_one_lease_and_a_moment() {
    a_lost_leader_costs_one_lease("killed", Member::kill).await;
}

#[tokio::test]
async fn a_stopped_leader_costs_one_lease_and_a_moment() {
    a_lost_leader_costs_one_lease("stopped", Member::pause).await;
}

#[tokio::test]
async fn a_leader_that_is_cut_off_costs_one_lease_and_a_moment() {
    let waiting = Waiting::new().await;
    let proxy = Proxy::start(waiting.server.port()).await;
    let behind = unconnected(&proxy.url(), lease_of(LEASE));
    let mut rounds = Rounds::of("cut off");
    while let Some(round) = rounds.next() {
        connects(&behind).await;
        let (key, gate, loads) = (format!("k-{round}"), Gate::closed(), Counter::default());
        let leader = held_call_of(&behind, &key, 1, &gate, &loads);
        loads.reach(1).await;
        match waiting.callers(&key).await {
            Some(callers) => {
                let lost = Instant::now();
                proxy.set(Mode::BlackHole);
                rounds.note([answered(callers, lost).await]);
            }
            None => rounds.spoil(),
        }
        gate.open();
        assert_eq!(leader.await.expect("joined"), 1);
        proxy.set(Mode::Pass);
    }
}
