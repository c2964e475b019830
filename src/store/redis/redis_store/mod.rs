//! The store of one node: its connections to the servers, and how it is built.

#[cfg(feature = "cluster")]
mod cluster;
#[cfg(feature = "sentinel")]
mod sentinel;

use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::Client;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::commands::Commands;
use super::commands::announce::Announcing;
use super::commands::lock_leaving::LeaveBatches;
use super::connection::Supervisor;
use super::connection::connector::Connector;
use super::connection::outages::Outages;
use super::errors::classify::code_of;
use super::login::Login;
use super::messages::inbox::Inbox;
use super::messages::keyspace::Keyspace;
use crate::health::Topology;
use crate::store::volume::{Announced, Announcement};
use crate::store::wake::lease_waiters::LeaseWaiters;
use crate::store::wake::lock_waiters::LockWaiters;
use crate::store::{Store as _, StoreError};

/// How many invalidations wait for replicas at once. While a replica is down, each holds a connection for as long as its
/// caller allows; without a bound they could use up the server's connections.
const MOST_REPLICATING: usize = 4;

/// One node's connections to a Redis server.
pub(crate) struct RedisStore {
    /// Digest of the server's address and the database.
    pub(super) place: u64,
    pub(super) topology: Topology,
    /// The deadline of one command.
    pub(super) command_timeout: Duration,
    pub(super) commands: Commands,
    pub(super) inbox: Arc<Inbox>,
    pub(super) watches: Arc<LeaseWaiters>,
    pub(super) grants: Arc<LockWaiters>,
    pub(super) leaving: LeaveBatches,
    pub(super) keyspace: Arc<Keyspace>,
    pub(super) outages: Arc<Outages>,
    pub(super) login: Login,
    /// Permits for callers that wait for replicas, each with a connection.
    pub(super) replicating: Semaphore,
    /// The one server that this node knows has refused a script because its keys are in two slots.
    splits_keys: AtomicBool,
}

impl RedisStore {
    /// As [`single`](Self::single), with the client's own credentials.
    #[cfg(test)]
    pub(crate) fn new(client: Client, command_timeout: Duration) -> Self {
        Self::single(client, command_timeout, Login::default())
    }

    /// A new node on one server, not connected yet. `command_timeout` is the deadline of one command: a slower server
    /// counts as down.
    pub(crate) fn single(client: Client, command_timeout: Duration, login: Login) -> Self {
        let info = client.get_connection_info();
        let mut place = DefaultHasher::new();
        info.addr().to_string().hash(&mut place);
        info.redis_settings().db().hash(&mut place);
        let dial = Connector::new(&client, command_timeout).logging_in(&login);
        Self::of(dial, None, Topology::Single, place.finish())
    }

    /// `dial` leads to messages; and to commands, where those have no ways of their own.
    fn of(dial: Connector, commands: Option<Commands>, topology: Topology, place: u64) -> Self {
        let (command_timeout, outages, login) = (dial.answer, Arc::clone(&dial.outages), dial.login.clone());
        let watches = Arc::new(LeaseWaiters::default());
        let commands = commands.unwrap_or_else(|| Supervisor::new(dial.clone()).into());
        let grants = Arc::new(LockWaiters::default());
        let keyspace = Keyspace::new(dial.clone(), commands.clone(), Arc::clone(&grants));
        let inbox = Inbox::new(dial, commands.clone(), Arc::clone(&watches), Arc::clone(&grants));
        let replicating = Semaphore::new(MOST_REPLICATING);
        Self {
            place,
            topology,
            command_timeout,
            commands,
            inbox,
            watches,
            grants,
            leaving: LeaveBatches::default(),
            keyspace,
            outages,
            login,
            replicating,
            splits_keys: AtomicBool::new(false),
        }
    }

    /// Makes a change and announces it in the same script call. Where the volume may be on another server than the changed key,
    /// `change` is called without the announcement.
    pub(super) async fn announcing<'a, F>(
        &self,
        announcement: &'a Announcement,
        within: Duration,
        change: impl Fn(Option<Announcing<'a>>, Duration) -> F,
    ) -> Result<Announced, StoreError>
    where
        F: Future<Output = Result<Announced, StoreError>>,
    {
        let sent = Instant::now();
        if !self.commands.is_spread() && !self.splits_keys.load(Ordering::Relaxed) {
            let announcing = Announcing { announcement, announcer: self.node() };
            match change(Some(announcing), within).await {
                // A node of a cluster, or a proxy in front of one. It was refused before the script began.
                Err(error) if code_of(&error) == Some("CROSSSLOT") => {
                    self.splits_keys.store(true, Ordering::Relaxed);
                }
                changed => return changed,
            }
        }
        change(None, within.saturating_sub(sent.elapsed())).await
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The node's id is left out: it is half of every token, and a token is enough to end a lease.
        let Self {
            place: _,
            topology: _,
            command_timeout: _,
            commands,
            inbox,
            watches: _,
            grants: _,
            leaving: _,
            keyspace: _,
            outages: _,
            login: _,
            replicating: _,
            splits_keys: _,
        } = self;
        f.debug_struct("RedisStore").field("commands", commands).field("inbox", inbox).finish_non_exhaustive()
    }
}
