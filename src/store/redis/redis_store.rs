//! The store of one node, and the connections that the nodes of one backend share.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use redis::Client;
use tokio::sync::Semaphore;

use super::channels::ChannelHub;
use super::commands::Commands;
use super::commands::lock_queue::LeaveBatches;
use super::connection::Supervisor;
use super::connection::connector::Connector;
use super::inbox::Inbox;
use super::keyspace::Keyspace;
use super::login::Login;
use super::subscriber::Subscriber;
use crate::health::Topology;
use crate::store::ConnectionSettings;
use crate::store::redis::login::CredentialsProvider;
use crate::store::wake_leases::LeaseWaiters;
use crate::store::wake_locks::LockWaiters;
use crate::sync::lock;

/// How many invalidations of one node wait for replicas at once. While a replica is down, each holds a connection for as
/// long as its caller allows; without a limit they could use up the server's connections.
const MOST_REPLICATING: usize = 4;

/// One node, on connections that it may share with other nodes.
pub(crate) struct RedisStore {
    pub(super) connections: Arc<Connections>,
    pub(in crate::store) commands: Commands,
    pub(in crate::store) inbox: Arc<Inbox>,
    pub(super) watches: Arc<LeaseWaiters>,
    pub(super) grants: Arc<LockWaiters>,
    pub(super) leaving: LeaveBatches,
    pub(super) keyspace: Arc<Keyspace>,
    /// Permits for callers that wait for replicas, each on its own connection. Not shared between nodes, because another node
    /// may wait for longer.
    pub(super) replicating: Semaphore,
    /// Whether the only server that this node knows has refused a script because its keys are in two slots.
    pub(super) splits_keys: AtomicBool,
}

impl RedisStore {
    /// A node with separate connections and the client's own credentials.
    #[cfg(test)]
    pub(crate) fn new(client: Client, settings: impl Into<ConnectionSettings>) -> Self {
        Self::on(Arc::new(Connections::single(&client, settings.into(), Login::default())))
    }

    /// A new node on `connections`, whose count of nodes already includes it.
    pub(crate) fn on(connections: Arc<Connections>) -> Self {
        let (connector, commands) = (connections.connector.clone(), connections.commands.of_another_node());
        let (watches, grants) = (Arc::<LeaseWaiters>::default(), Arc::<LockWaiters>::default());
        Self {
            inbox: Inbox::new(
                &connections.subscriber,
                commands.clone(),
                Arc::clone(&watches),
                Arc::clone(&grants),
            ),
            keyspace: Keyspace::new(connector, commands.clone(), Arc::clone(&grants)),
            connections,
            commands,
            watches,
            grants,
            leaving: LeaveBatches::default(),
            replicating: Semaphore::new(MOST_REPLICATING),
            splits_keys: AtomicBool::new(false),
        }
    }

    /// The deadline of one command.
    pub(crate) fn command_timeout(&self) -> Duration {
        self.connections.connector.answer
    }

    /// Ends the node, and its use of the connections.
    pub(crate) fn close(&self) {
        if self.commands.end() {
            self.inbox.close();
            self.keyspace.close();
            self.connections.leave();
        }
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        self.close();
    }
}

/// Servers, and the connections to them that all nodes share.
pub(crate) struct RedisServers {
    connect: Arc<Connect>,
    provider: Option<CredentialsProvider>,
    /// The connections that the present nodes share. Weak: they are closed with the last node.
    latest: Mutex<Weak<Connections>>,
}

/// Makes new connections, none of which is open yet.
type Connect = dyn Fn(ConnectionSettings, Login) -> Connections + Send + Sync;

impl RedisServers {
    pub(crate) fn new(connect: Arc<Connect>, provider: Option<CredentialsProvider>) -> Self {
        Self { connect, provider, latest: Mutex::default() }
    }

    /// The same servers, on separate connections, which log in with the provider's credentials.
    pub(crate) fn logging_in(&self, provider: CredentialsProvider) -> Self {
        Self::new(Arc::clone(&self.connect), Some(provider))
    }

    /// A new node, on the connections of the earlier nodes; on new connections if no earlier node is left.
    pub(crate) fn node(&self, settings: ConnectionSettings) -> RedisStore {
        let mut latest = lock(&self.latest);
        let shared = latest.upgrade().filter(|connections| connections.join());
        let connections =
            shared.unwrap_or_else(|| Arc::new((self.connect)(settings, Login::by(self.provider.clone()))));
        *latest = Arc::downgrade(&connections);
        RedisStore::on(connections)
    }
}

/// The connections for commands to each server, and one for messages, each opened when it is first needed.
pub(crate) struct Connections {
    /// Digest of the server's address and the database.
    pub(super) store_id: u64,
    pub(super) topology: Topology,
    /// The number of the database, where it is known.
    pub(super) database: i64,
    /// Opens connections for messages.
    pub(super) connector: Connector,
    commands: Commands,
    pub(super) subscriber: Arc<Subscriber>,
    pub(super) channels: ChannelHub,
    /// How many nodes use the connections; the last node closes them.
    nodes: AtomicUsize,
}

impl Connections {
    /// Connections to one server, for one node at first.
    pub(crate) fn single(client: &Client, settings: ConnectionSettings, login: Login) -> Self {
        let info = client.get_connection_info();
        let mut store_id = DefaultHasher::new();
        info.addr().to_string().hash(&mut store_id);
        info.redis_settings().db().hash(&mut store_id);
        let connector = Connector::new(client, settings).logging_in(&login);
        let database = info.redis_settings().db();
        Self { database, ..Self::of(connector, None, Topology::Single, store_id.finish()) }
    }

    /// As [`single`](Self::single), to the server that these sentinels report as the primary.
    #[cfg(feature = "sentinel")]
    pub(crate) fn watched(
        clients: &super::sentinel::SentinelClients,
        settings: ConnectionSettings,
        login: Login,
    ) -> Self {
        // The client does not show its servers, so each call counts as a separate backend.
        let store_id = fastrand::u64(..);
        let endpoint = super::sentinel::SentinelEndpoint::new(clients.clone(), login.clone());
        let connector = Connector::to(Arc::new(endpoint), settings).logging_in(&login);
        Self::of(connector, None, Topology::Sentinel, store_id)
    }

    /// As [`single`](Self::single), to the nodes of a cluster.
    #[cfg(feature = "cluster")]
    pub(crate) fn spread(
        client: redis::cluster::ClusterClient,
        settings: ConnectionSettings,
        login: Login,
    ) -> Self {
        let cluster = super::cluster::Cluster::logging_in(client, settings, login);
        let mut store_id = DefaultHasher::new();
        cluster.cluster_nodes().described().hash(&mut store_id);
        let inbox = cluster.any_node();
        Self::of(
            inbox,
            Some(super::commands::Route::Cluster(cluster).into()),
            Topology::Cluster,
            store_id.finish(),
        )
    }

    /// `connector` opens connections for messages; and for commands, if `commands` is `None`.
    fn of(connector: Connector, commands: Option<Commands>, topology: Topology, store_id: u64) -> Self {
        let commands = commands.unwrap_or_else(|| Supervisor::new(connector.clone()).into());
        Self {
            store_id,
            topology,
            database: 0,
            subscriber: Subscriber::new(connector.clone(), commands.clone()),
            connector,
            commands,
            channels: ChannelHub::default(),
            nodes: AtomicUsize::new(1),
        }
    }

    /// Counts one more node. Returns false if the connections are closed, because their last node has left.
    fn join(&self) -> bool {
        let more = |nodes| if nodes == 0 { None } else { Some(nodes + 1) };
        self.nodes.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Counts one node less, and closes the connections if it was the last.
    fn leave(&self) {
        if self.nodes.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.commands.close();
            self.subscriber.close();
        }
    }
}
