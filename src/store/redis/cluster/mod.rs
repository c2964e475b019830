//! Many servers, each with some of the slots: a supervisor for each master, and a chart of who has which slot.
//!
//! A key's command goes to its slot's master and nowhere else, so a master that hangs costs its own keys what a single
//! server that hangs costs, by its own breaker, and the others nothing. redis-rs's own cluster connection is not used: it
//! has one task for all nodes, which waits for the slowest of them whenever the slots have changed. It only tells how to
//! connect ([`locate`]).
//!
//! The chart is drawn in the background ([`survey`]). Where it is behind, the node that is asked says so (MOVED, ASK), and
//! the command goes on from there, within its deadline.

mod discovery;
mod layout;
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

use slot_map::Chart;
pub(super) use slot_map::{Coverage, Master};

use super::connection::connector::Dial;
use super::connection::{Supervisor, Told};
use super::topology::cluster::endpoint::Node;
pub(super) use super::topology::cluster::nodes::Atlas;
use super::topology::cluster::slots::Address;
pub(crate) use super::topology::cluster::slots::slot_of;
#[cfg(any(test, fuzzing))]
pub(super) use super::topology::cluster::slots::{read_redirect, read_slots};
use crate::health::{Breaker, ClockReading, LinkState};
use crate::store::StoreError;
use crate::sync::lock;

pub(super) struct Cluster {
    atlas: Arc<Atlas>,
    /// The deadline of one command.
    answer: Duration,
    state: Mutex<State>,
    /// Whether the surveyor is there; in front of the lock, because every command asks.
    running: AtomicBool,
    /// Sent whenever the answer to those who wait may have changed.
    changes: watch::Sender<u64>,
    /// Has the surveyor look: there is reason to think that the chart is behind.
    looks: Arc<Looks>,
}

struct State {
    chart: Chart,
    /// Why there is none.
    told: Told,
    /// One per node that is in the chart, or was sent to a moment ago.
    servers: HashMap<Address, Kept>,
    /// Counts surveyors: one that was given up must not touch the state any more.
    surveyors: u64,
    surveyor: Option<AbortHandle>,
}

struct Kept {
    server: Arc<Supervisor>,
    used: Instant,
}

/// What has the surveyor look before its time.
#[derive(Default)]
struct Looks {
    /// A node has said who has a slot now: the chart is behind.
    news: Notify,
    /// A command has failed. Every command says so for as long as that lasts.
    trouble: Notify,
}

impl Looks {
    fn news(&self) {
        self.news.notify_one();
    }

    fn trouble(&self) {
        self.trouble.notify_one();
    }
}

impl Cluster {
    pub(super) fn new(client: ClusterClient, answer: Duration) -> Arc<Self> {
        Arc::new(Self {
            atlas: Arc::new(Atlas::new(client)),
            answer,
            state: Mutex::new(State {
                chart: Chart::Blank,
                told: Told::default(),
                servers: HashMap::new(),
                surveyors: 0,
                surveyor: None,
            }),
            running: AtomicBool::new(false),
            changes: watch::Sender::new(0),
            looks: Arc::default(),
        })
    }

    pub(super) fn atlas(&self) -> &Arc<Atlas> {
        &self.atlas
    }

    /// Enters that `address` has the slot, until the next survey says it better.
    fn moved(&self, slot: u16, address: &Address) -> RedisResult<Arc<Supervisor>> {
        let server = self.server(address)?;
        let mut state = self.state();
        if let Chart::Drawn(layout) = &state.chart
            && layout.master(slot).is_none_or(|master| master.address != *address)
        {
            state.chart = Chart::Drawn(Arc::new(layout.with(slot, address, &server)));
        }
        drop(state);
        self.looks.news();
        Ok(server)
    }

    /// The supervisor for a node, not connected yet if it is a new one.
    fn server(&self, address: &Address) -> RedisResult<Arc<Supervisor>> {
        if let Some(kept) = self.state().servers.get_mut(address) {
            kept.used = Instant::now();
            return Ok(Arc::clone(&kept.server));
        }
        // Outside the lock: it runs code of the client, and its maker's.
        let server =
            Supervisor::new(Dial::to(Arc::new(Node::new(&self.atlas.client_of(address)?)), self.answer));
        let mut state = self.state();
        if matches!(state.chart, Chart::Closed) {
            // Of a command that was under way then, and is sent on: it would open a connection that nobody closes.
            server.close();
            return Ok(server);
        }
        let kept = state.servers.entry(address.clone()).or_insert(Kept { server, used: Instant::now() });
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

    /// Has everything looked at.
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

    /// What the clock showed by which entries are judged: that of slot 0's master, so that all processes go by one.
    pub(super) fn clock_at(&self, moment: Instant) -> Option<u64> {
        let layout = self.state().chart.layout().ok()??;
        layout.masters.iter().find_map(|master| master.server.known_clock_at(moment))
    }

    /// What is known of that clock.
    pub(super) fn clock(&self) -> Option<ClockReading> {
        let layout = self.state().chart.layout().ok()??;
        layout.masters.iter().find_map(|master| master.server.clock())
    }

    /// The user that this node is to the servers; `None` for the user without a name, and where the client does not show it.
    pub(super) fn user(&self) -> Option<String> {
        Some(self.atlas.example()?.redis_settings().username()?.to_owned())
    }

    /// How the connections stand as one, and what is wrong with some of them.
    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        self.state().chart.link()
    }

    /// How to connect to the master that has the slot of `key`, once there is a chart.
    pub(super) fn dial(&self, key: &str) -> Option<Dial> {
        let layout = self.state().chart.layout().ok()??;
        Some(layout.master(slot_of(key))?.server.dial.clone())
    }

    /// How many masters the chart has; 1 before there is one.
    pub(super) fn count(&self) -> usize {
        self.coverage().map_or(1, |coverage| coverage.masters.len())
    }

    /// The masters of the chart, and how far they cover the slots.
    pub(super) fn coverage(&self) -> Option<Coverage> {
        Some(self.state().chart.layout().ok()??.coverage())
    }

    /// For each master of the chart a name like this one, whose keys are there.
    pub(super) fn samples(&self, name: &str) -> Vec<(Master, String)> {
        let layout = self.state().chart.layout();
        layout.ok().flatten().map_or_else(Vec::new, |layout| layout.samples(name))
    }

    pub(super) fn close(&self) {
        let (before, servers, surveyor) = {
            let mut state = self.state();
            let before = std::mem::replace(&mut state.chart, Chart::Closed);
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

    fn state(&self) -> MutexGuard<'_, State> {
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
