//! A Redis Cluster: a supervisor for each master, and a slot map.
//!
//! A command goes to the master of its key's slot and to no other node. So a master that hangs opens only its own breaker,
//! and costs the callers of its keys as much as a single server that hangs; other keys are not affected. The cluster
//! connection of redis-rs is not used: it has one task for all nodes, which waits for the slowest of them whenever slots
//! have moved. The client of redis-rs only supplies the nodes and how to connect to them ([`ClusterNodes`]).
//!
//! A background task refreshes the slot map ([`refresh`]). If the map is out of date, the node that receives a command
//! redirects it (MOVED, ASK), and the command follows the redirections within the caller's deadline.

mod nodes;
mod refresh;
pub(super) mod slots;
#[cfg(test)]
#[path = "../../../../tests/unit/store/redis/cluster/tests/mod.rs"]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::cluster::ClusterClient;
use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use self::nodes::ClusterNodes;
use self::slots::{Address, Redirect, SlotMap, redirect, slot_of};
pub(super) use self::slots::{Coverage, MasterNode};
use super::connection::Supervisor;
use super::connection::connector::{Connector, Outages};
use super::connection::send::SendMode;
use super::endpoint::{Endpoint, SingleEndpoint};
use super::errors::{OutageLog, store_error};
use super::login::Login;
use crate::health::{Breaker, LinkState};
use crate::store::ConnectionSettings;
use crate::store::{NamedServer, StoreError, StoreErrorKind, StoreResult};
use crate::sync::lock;
use crate::task::OwnedTask;

pub(super) struct Cluster {
    cluster_nodes: Arc<ClusterNodes>,
    settings: ConnectionSettings,
    state: Mutex<ClusterState>,
    /// The refresh task.
    task: OwnedTask,
    /// Increases at every change that may concern a waiting caller.
    changes: watch::Sender<u64>,
    /// Wakes the refresh task: the map may be out of date.
    looks: Arc<DiscoveryWake>,
    /// The outages of all masters.
    outages: Arc<Outages>,
    /// The credentials for all nodes.
    login: Login,
}

struct ClusterState {
    slot_map: SlotMap,
    /// The logged reasons why there is no map.
    outage_log: OutageLog,
    /// The nodes that are in the map or were recently sent a command.
    servers: HashMap<Address, NodeEntry>,
}

struct NodeEntry {
    server: Arc<Supervisor>,
    used: Instant,
}

/// Wakes the refresh task before its next regular refresh.
#[derive(Default)]
struct DiscoveryWake {
    /// A node has redirected a command: the map is out of date.
    news: Notify,
    /// A command has failed. Every command reports that while the failure lasts.
    trouble: Notify,
}

impl Cluster {
    #[cfg(test)]
    fn new(client: ClusterClient, settings: impl Into<ConnectionSettings>) -> Arc<Self> {
        Self::logging_in(client, settings.into(), Login::default())
    }

    pub(super) fn logging_in(client: ClusterClient, settings: ConnectionSettings, login: Login) -> Arc<Self> {
        Arc::new(Self {
            cluster_nodes: Arc::new(ClusterNodes::new(client)),
            settings,
            state: Mutex::new(ClusterState {
                slot_map: SlotMap::Blank,
                outage_log: OutageLog::default(),
                servers: HashMap::new(),
            }),
            task: OwnedTask::default(),
            changes: watch::Sender::new(0),
            looks: Arc::default(),
            outages: Arc::default(),
            login,
        })
    }

    /// A connector that leads to any of the nodes.
    pub(super) fn any_node(&self) -> Connector {
        self.connector(Arc::clone(&self.cluster_nodes) as _)
    }

    fn connector(&self, endpoint: Arc<dyn Endpoint>) -> Connector {
        let mut connector = Connector::to(endpoint, self.settings).logging_in(&self.login);
        connector.outages = Arc::clone(&self.outages);
        connector
    }

    pub(super) fn cluster_nodes(&self) -> &Arc<ClusterNodes> {
        &self.cluster_nodes
    }

    /// Records in the map that `address` serves the slot, until the next refresh replaces the map.
    fn moved(&self, slot: u16, address: Address) -> StoreResult<CommandTarget> {
        let target = self.target(address, false)?;
        let mut state = self.state();
        if let SlotMap::Known(layout) = &state.slot_map
            && layout.master(slot).is_none_or(|master| master.address != target.address)
        {
            state.slot_map = SlotMap::Known(Arc::new(layout.with(slot, &target.address, &target.server)));
        }
        drop(state);
        self.looks.news.notify_one();
        Ok(target)
    }

    fn target(&self, address: Address, is_asking: bool) -> StoreResult<CommandTarget> {
        let unreachable = |error| store_error(StoreErrorKind::Unavailable, error);
        let server = self.server(&address).map_err(unreachable)?;
        Ok(CommandTarget { address, server, is_asking })
    }

    /// The supervisor of a node; a new one is not connected yet.
    fn server(&self, address: &Address) -> RedisResult<Arc<Supervisor>> {
        if let Some(node) = self.state().servers.get_mut(address) {
            node.used = Instant::now();
            return Ok(Arc::clone(&node.server));
        }
        // The lock is not held here, because this runs code of redis-rs and of the application that has built the client.
        let endpoint = Arc::new(SingleEndpoint::new(&self.cluster_nodes.client_of(address)?, true));
        let server = Supervisor::new(self.connector(endpoint));
        let mut state = self.state();
        if matches!(state.slot_map, SlotMap::Closed) {
            // A command that was in flight at the close was redirected. Its new connection would never be closed.
            server.close();
            return Ok(server);
        }
        let node = state.servers.entry(address.clone()).or_insert(NodeEntry { server, used: Instant::now() });
        Ok(Arc::clone(&node.server))
    }

    /// The connection to the master of `key`'s slot; `None` before the first map, and for a slot without a master.
    pub(super) fn connection(&self, key: &str) -> StoreResult<Option<Arc<Supervisor>>> {
        let layout = self.state().slot_map.layout()?;
        Ok(layout.and_then(|layout| Some(Arc::clone(&layout.master(slot_of(key))?.server))))
    }

    /// The connections to all masters; empty before the first map.
    pub(super) fn all(&self) -> StoreResult<Vec<Arc<Supervisor>>> {
        let layout = self.state().slot_map.layout()?;
        let masters = layout.iter().flat_map(|layout| &layout.masters);
        Ok(masters.map(|master| Arc::clone(&master.server)).collect())
    }

    /// Requests a check of all connections and of the map.
    pub(super) fn suspect(&self) {
        for server in self.all().unwrap_or_default() {
            server.suspect();
        }
        self.looks.trouble.notify_one();
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The reading, at `moment`, of the clock that decides the age of entries. All processes use that of slot 0's master; if its clock was
    /// not read yet, that of the first master, in the order of slots, whose clock was.
    pub(super) fn clock_at(&self, moment: Instant) -> Option<u64> {
        let layout = self.state().slot_map.layout().ok()??;
        layout.masters.iter().find_map(|master| master.server.known_clock_at(moment))
    }

    pub(super) fn server_of(&self, name: &str) -> NamedServer {
        let layout = self.state().slot_map.layout().ok().flatten();
        let server = layout.as_ref().and_then(|layout| {
            let number = layout.master_index(slot_of(name))?;
            Some(NamedServer { number, round_trip: layout.masters.get(number)?.server.round_trip() })
        });
        server.unwrap_or_default()
    }

    /// The state of all connections together, and the first failure if some are down.
    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        self.state().slot_map.link()
    }

    /// The masters of the map, and how many slots they leave unserved.
    pub(super) fn coverage(&self) -> Option<Coverage> {
        Some(self.state().slot_map.layout().ok()??.coverage())
    }

    /// For each master of the map, a name similar to this one in a slot of that master.
    pub(super) fn samples(&self, name: &str) -> Vec<(MasterNode, String)> {
        let layout = self.state().slot_map.layout();
        layout.ok().flatten().map_or_else(Vec::new, |layout| layout.samples(name))
    }

    pub(super) fn close(&self) {
        self.task.close();
        let (before, servers) = {
            let mut state = self.state();
            let before = std::mem::replace(&mut state.slot_map, SlotMap::Closed);
            (before, std::mem::take(&mut state.servers))
        };
        for node in servers.values() {
            node.server.close();
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

debug_as!(self: Cluster { masters: self.coverage().map_or(0, |coverage| coverage.masters.len()) });

/// How many redirections in a row a command follows without a pause. If the map lacks one change, it is correct after the first
/// redirection.
const REDIRECTIONS: usize = 5;
/// The first and the longest pause before a command is repeated because its keys are migrating, so that each may be on either node.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LAST_PAUSE: Duration = Duration::from_millis(40);

/// Replaces a timeout whose end no `Instant` can represent.
const ENDLESS: Duration = Duration::from_secs(86_400);

/// The node that a command goes to next.
struct CommandTarget {
    address: Address,
    server: Arc<Supervisor>,
    /// Whether the slot is migrating to this node.
    is_asking: bool,
}

impl Cluster {
    /// Sends a command to the master of `key`'s slot, and waits for its reply, at most `within` in all. Also returns the
    /// session of the connection on which the reply came; after a redirection that connection leads to another node.
    pub(crate) async fn send(
        self: &Arc<Self>,
        key: &str,
        cmd: &Cmd,
        within: Duration,
        mut mode: SendMode,
    ) -> StoreResult<(Value, u64)> {
        // The caller's deadline may be beyond what an `Instant` can represent.
        let until = Instant::now().checked_add(within).unwrap_or_else(|| Instant::now() + ENDLESS);
        let slot = slot_of(key);
        let mut target = self.master_of(slot, within).await?;
        let (mut pause, mut redirections) = (FIRST_PAUSE, 0);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let once = if target.is_asking { SendMode::Asking } else { SendMode::Once };
            let (error, session) = match target.server.send(key, cmd, left, once).await {
                Ok((Value::ServerError(error), session)) => (error, session),
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    if !error.is_final() {
                        // Another node may serve the slot by now; a node that hangs does not redirect.
                        self.looks.trouble.notify_one();
                    }
                    if error.kind != StoreErrorKind::Broken || mode != SendMode::Repeat {
                        return Err(error);
                    }
                    mode = SendMode::Once;
                    // The node is looked up in the map again, because another may serve the slot by now.
                    target = self.master_of(slot, Duration::ZERO).await?;
                    continue;
                }
            };
            let Some(redirect) = redirect(error.code(), error.details(), &target.address) else {
                return Ok((Value::ServerError(error), session));
            };
            redirections += 1;
            target = match redirect {
                Redirect::Moved(slot, address) if redirections <= REDIRECTIONS => {
                    self.moved(slot, address)?
                }
                Redirect::Ask(address) if redirections <= REDIRECTIONS => self.target(address, true)?,
                // Some of the keys are on this node and some on the other, or nodes with different views redirect the
                // command back and forth. Both states are temporary, so the command starts again from the map while the
                // caller has time.
                _ => {
                    if Instant::now() + pause >= until {
                        let source = Some(Arc::new(RedisError::from(error)) as _);
                        return Err(StoreError { kind: StoreErrorKind::Transient, source });
                    }
                    sleep(pause).await;
                    (pause, redirections) = ((pause * 2).min(LAST_PAUSE), 0);
                    self.master_of(slot, Duration::ZERO).await?
                }
            };
        }
    }

    /// The master of the slot. Waits for the first map if there is none.
    async fn master_of(self: &Arc<Self>, slot: u16, within: Duration) -> StoreResult<CommandTarget> {
        let layout = match self.layout()? {
            Some(layout) => layout,
            None => {
                let known_layout = timeout(within, self.known_layout()).await;
                known_layout.map_err(|_| StoreError::new(StoreErrorKind::Unavailable))??
            }
        };
        match layout.master(slot) {
            Some(MasterNode { address, server, .. }) => {
                Ok(CommandTarget { address: address.clone(), server: Arc::clone(server), is_asking: false })
            }
            None => {
                // No need to wake the refresh task: it refreshes again and again while a slot is unserved.
                let unserved =
                    redis::make_extension_error("CLUSTERDOWN".to_owned(), Some(UNSERVED.to_owned()));
                Err(store_error(StoreErrorKind::Transient, unserved))
            }
        }
    }
}

/// The error for a slot without a master.
const UNSERVED: &str = "no node serves the slot of this key";
