//! A Redis Cluster: a supervisor for each master, and a map of the slots.
//!
//! A command goes to the master of its key's slot and nowhere else. So a master that hangs opens its own breaker and costs
//! the callers of its keys what a hanging single server costs; other keys are not affected. redis-rs's cluster connection
//! is not used: it has one task for all nodes, which waits for the slowest of them whenever slots have moved. The client
//! only tells how to connect ([`locate`]).
//!
//! The map is kept in the background ([`survey`]). Where it is out of date, the node that receives a command redirects it
//! (MOVED, ASK), and the command follows within its deadline.

mod discovery;
mod readiness;
mod send;
mod slot_map;
#[cfg(test)]
#[path = "../../../../tests/unit/store/redis/cluster/tests/mod.rs"]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::RedisResult;
use redis::cluster::ClusterClient;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use slot_map::SlotMap;
pub(super) use slot_map::{Coverage, MasterNode};

use super::connection::Supervisor;
use super::connection::connector::Connector;
use super::connection::outages::Outages;
use super::errors::outage_log::OutageLog;
use super::login::Login;
use super::topology::cluster::endpoint::ClusterEndpoint;
use super::topology::cluster::nodes::ClusterNodes;
use super::topology::cluster::slots::{Address, slot_of};
#[cfg(any(test, fuzzing))]
pub(super) use super::topology::cluster::slots::{read_redirect, read_slots};
use crate::health::{Breaker, ClockReading, LinkState};
use crate::store::{NamedServer, StoreError};
use crate::sync::lock;

pub(super) struct Cluster {
    atlas: Arc<ClusterNodes>,
    /// The deadline of one command.
    answer: Duration,
    state: Mutex<ClusterState>,
    /// Whether there is a surveyor; outside the lock, because every command checks it.
    running: AtomicBool,
    /// Sent at every change that may concern a waiting caller.
    changes: watch::Sender<u64>,
    /// Wakes the surveyor: the map may be out of date.
    looks: Arc<DiscoveryWake>,
    /// The outages of all masters.
    outages: Arc<Outages>,
    /// The credentials for all nodes.
    login: Login,
}

struct ClusterState {
    chart: SlotMap,
    /// Which reasons for having no map were logged.
    told: OutageLog,
    /// One for each node that is in the map, or was recently sent a command.
    servers: HashMap<Address, IdleNode>,
    /// Counts surveyors: one that was replaced must not change the state any more.
    surveyors: u64,
    surveyor: Option<AbortHandle>,
}

struct IdleNode {
    server: Arc<Supervisor>,
    used: Instant,
}

/// Wakes the surveyor before its time.
#[derive(Default)]
struct DiscoveryWake {
    /// A node has redirected a command: the map is out of date.
    news: Notify,
    /// A command has failed. Every command reports that while the failure lasts.
    trouble: Notify,
}

impl DiscoveryWake {
    fn news(&self) {
        self.news.notify_one();
    }

    fn trouble(&self) {
        self.trouble.notify_one();
    }
}

impl Cluster {
    #[cfg(test)]
    pub(super) fn new(client: ClusterClient, answer: Duration) -> Arc<Self> {
        Self::logging_in(client, answer, Login::default())
    }

    pub(super) fn logging_in(client: ClusterClient, answer: Duration, login: Login) -> Arc<Self> {
        Arc::new(Self {
            atlas: Arc::new(ClusterNodes::new(client)),
            answer,
            state: Mutex::new(ClusterState {
                chart: SlotMap::Blank,
                told: OutageLog::default(),
                servers: HashMap::new(),
                surveyors: 0,
                surveyor: None,
            }),
            running: AtomicBool::new(false),
            changes: watch::Sender::new(0),
            looks: Arc::default(),
            outages: Arc::default(),
            login,
        })
    }

    /// A way to any of the nodes.
    pub(super) fn any_node(&self, answer: Duration) -> Connector {
        Connector::to(Arc::clone(&self.atlas) as _, answer).sharing(&self.outages).logging_in(&self.login)
    }

    pub(super) fn atlas(&self) -> &Arc<ClusterNodes> {
        &self.atlas
    }

    /// Records that `address` serves the slot, until the next refresh.
    fn moved(&self, slot: u16, address: &Address) -> RedisResult<Arc<Supervisor>> {
        let server = self.server(address)?;
        let mut state = self.state();
        if let SlotMap::Drawn(layout) = &state.chart
            && layout.master(slot).is_none_or(|master| master.address != *address)
        {
            state.chart = SlotMap::Drawn(Arc::new(layout.with(slot, address, &server)));
        }
        drop(state);
        self.looks.news();
        Ok(server)
    }

    /// The supervisor of a node; a new one is not connected yet.
    fn server(&self, address: &Address) -> RedisResult<Arc<Supervisor>> {
        if let Some(kept) = self.state().servers.get_mut(address) {
            kept.used = Instant::now();
            return Ok(Arc::clone(&kept.server));
        }
        // Outside the lock: it runs code of the client, and its maker's.
        let endpoint = Arc::new(ClusterEndpoint::new(&self.atlas.client_of(address)?));
        let dial = Connector::to(endpoint, self.answer).sharing(&self.outages).logging_in(&self.login);
        let server = Supervisor::new(dial);
        let mut state = self.state();
        if matches!(state.chart, SlotMap::Closed) {
            // For a command that was under way at the close and is redirected: its connection would never be closed.
            server.close();
            return Ok(server);
        }
        let kept = state.servers.entry(address.clone()).or_insert(IdleNode { server, used: Instant::now() });
        Ok(Arc::clone(&kept.server))
    }

    /// Why all commands fail at present, if they do.
    pub(super) fn down(&self) -> Option<StoreError> {
        match self.state().chart.layout() {
            Ok(Some(layout)) => {
                let mut down = layout.masters.iter().map(|master| master.server.down());
                let first = down.next()??;
                down.all(|other| other.is_some()).then_some(first)
            }
            Ok(None) => None,
            Err(why) => Some(why),
        }
    }

    /// Whether commands about `key` fail at once at present.
    pub(super) fn is_down(&self, key: &str) -> bool {
        let layout = self.state().chart.layout();
        layout.map_or(true, |layout| {
            let master = layout.as_ref().and_then(|layout| layout.master(slot_of(key)));
            master.is_some_and(|master| master.server.down().is_some())
        })
    }

    /// Has all connections and the map checked.
    pub(super) fn suspect(&self) {
        if let Ok(Some(layout)) = self.state().chart.layout() {
            for master in &layout.masters {
                master.server.suspect();
            }
        }
        self.looks.trouble();
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// What the clock showed by which entries are judged: that of slot 0's master, so that all processes use the same
    /// clock.
    pub(super) fn clock_at(&self, moment: Instant) -> Option<u64> {
        let layout = self.state().chart.layout().ok()??;
        layout.masters.iter().find_map(|master| master.server.known_clock_at(moment))
    }

    pub(super) fn server_of(&self, name: &str) -> NamedServer {
        let layout = self.state().chart.layout().ok().flatten();
        let server = layout.as_ref().and_then(|layout| {
            let number = layout.place(slot_of(name))?;
            Some(NamedServer { number, round_trip: layout.masters.get(number)?.server.round_trip() })
        });
        server.unwrap_or_default()
    }

    /// The latest reading of that clock.
    pub(super) fn clock(&self) -> Option<ClockReading> {
        let layout = self.state().chart.layout().ok()??;
        layout.masters.iter().find_map(|master| master.server.clock())
    }

    /// The user that this node is to the servers; `None` for the user without a name, and where the client does not show it.
    pub(super) fn user(&self) -> Option<String> {
        let own = || Some(self.atlas.example()?.redis_settings().username()?.to_owned());
        self.login.user().or_else(own)
    }

    /// How the connections stand as one, and what is wrong with some of them.
    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        self.state().chart.link()
    }

    /// How to connect to the master of `key`'s slot; `None` before the first map.
    pub(super) fn dial(&self, key: &str) -> Option<Connector> {
        let layout = self.state().chart.layout().ok()??;
        Some(layout.master(slot_of(key))?.server.dial.clone())
    }

    /// How many masters the chart has; 1 before there is one.
    pub(super) fn count(&self) -> usize {
        self.coverage().map_or(1, |coverage| coverage.masters.len())
    }

    /// The longest argument that all masters take.
    pub(super) fn longest_argument(&self) -> usize {
        let Ok(Some(layout)) = self.state().chart.layout() else { return usize::MAX };
        layout.masters.iter().map(|master| master.server.longest_argument()).min().unwrap_or(usize::MAX)
    }

    /// The masters of the chart, and how far they cover the slots.
    pub(super) fn coverage(&self) -> Option<Coverage> {
        Some(self.state().chart.layout().ok()??.coverage())
    }

    /// For each master of the map, a name similar to this one in a slot of that master.
    pub(super) fn samples(&self, name: &str) -> Vec<(MasterNode, String)> {
        let layout = self.state().chart.layout();
        layout.ok().flatten().map_or_else(Vec::new, |layout| layout.samples(name))
    }

    pub(super) fn close(&self) {
        let (before, servers, surveyor) = {
            let mut state = self.state();
            let before = std::mem::replace(&mut state.chart, SlotMap::Closed);
            (before, std::mem::take(&mut state.servers), state.surveyor.take())
        };
        if let Some(surveyor) = surveyor {
            surveyor.abort();
        }
        for kept in servers.values() {
            kept.server.close();
        }
        drop(before);
        self.changed();
    }

    fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    fn state(&self) -> MutexGuard<'_, ClusterState> {
        lock(&self.state)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(surveyor) = self.state().surveyor.take() {
            surveyor.abort();
        }
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masters = self.coverage().map_or(0, |coverage| coverage.masters.len());
        f.debug_struct("Cluster").field("masters", &masters).finish_non_exhaustive()
    }
}
