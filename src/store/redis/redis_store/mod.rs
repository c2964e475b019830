//! The store of one node, and the connections that nodes share.

#[cfg(feature = "cluster")]
mod cluster;
mod connections;
#[cfg(feature = "sentinel")]
mod sentinel;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[cfg(test)]
use redis::Client;
use tokio::sync::Semaphore;
use tokio::time::Instant;

pub(crate) use connections::Connections;

use super::commands::Commands;
use super::commands::change::Attempt;
use super::commands::lock_leaving::LeaveBatches;
use super::errors::classify::code_of;
#[cfg(test)]
use super::login::Login;
use super::messages::inbox::Inbox;
use super::messages::keyspace::Keyspace;
use crate::store::volume::{Announced, Announcement};
use crate::store::wake::lease_waiters::LeaseWaiters;
use crate::store::wake::lock_waiters::LockWaiters;
use crate::store::{Store as _, StoreError};

/// How many invalidations of one node wait for replicas at once. While a replica is down, each holds a connection for as long as its
/// caller allows; without a bound they could use up the server's connections.
const MOST_REPLICATING: usize = 4;

/// One node, on connections that it may share with others.
pub(crate) struct RedisStore {
    pub(super) connections: Arc<Connections>,
    pub(super) commands: Commands,
    pub(super) inbox: Arc<Inbox>,
    pub(super) watches: Arc<LeaseWaiters>,
    pub(super) grants: Arc<LockWaiters>,
    pub(super) leaving: LeaveBatches,
    pub(super) keyspace: Arc<Keyspace>,
    /// Permits for callers that wait for replicas, each with a connection. Not shared: another node may wait for longer.
    pub(super) replicating: Semaphore,
    /// The one server that this node knows has refused a script because its keys are in two slots.
    splits_keys: AtomicBool,
}

impl RedisStore {
    /// A node with connections of its own, with the client's own credentials.
    #[cfg(test)]
    pub(crate) fn new(client: Client, command_timeout: Duration) -> Self {
        Self::on(Arc::new(Connections::single(&client, command_timeout, Login::default())))
    }

    /// A new node on connections that it is counted in.
    pub(crate) fn on(connections: Arc<Connections>) -> Self {
        let (dial, commands) = (connections.dial.clone(), connections.commands.of_another_node());
        let (watches, grants) = (Arc::<LeaseWaiters>::default(), Arc::<LockWaiters>::default());
        Self {
            inbox: Inbox::new(
                &connections.subscriber,
                commands.clone(),
                Arc::clone(&watches),
                Arc::clone(&grants),
            ),
            keyspace: Keyspace::new(dial, commands.clone(), Arc::clone(&grants)),
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
    pub(super) fn command_timeout(&self) -> Duration {
        self.connections.dial.answer
    }

    /// Ends this node's part in its connections.
    pub(super) fn leave(&self) {
        if self.commands.end() {
            self.inbox.close();
            self.keyspace.close();
            self.connections.leave();
        }
    }

    /// Makes a change and announces it in the same script call. Where the volume may be on another server than the changed key,
    /// `change` is called without the announcement.
    pub(super) async fn changing<'a, F>(
        &self,
        announcement: &'a Announcement,
        within: Duration,
        change: impl Fn(Attempt<'a>, Duration) -> F,
    ) -> Result<Announced, StoreError>
    where
        F: Future<Output = Result<Announced, StoreError>>,
    {
        let sent = Instant::now();
        let mut attempt = Attempt { announcement, node: self.node(), announces: true };
        if !self.commands.is_spread() && !self.splits_keys.load(Ordering::Relaxed) {
            match change(attempt, within).await {
                // A node of a cluster, or a proxy in front of one. It was refused before the script began.
                Err(error) if code_of(&error) == Some("CROSSSLOT") => {
                    self.splits_keys.store(true, Ordering::Relaxed);
                }
                changed => return changed,
            }
        }
        attempt.announces = false;
        change(attempt, within.saturating_sub(sent.elapsed())).await
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The node's id is left out: it is half of every token, and a token is enough to end a lease.
        f.debug_struct("RedisStore")
            .field("connections", &self.connections)
            .field("inbox", &self.inbox)
            .finish_non_exhaustive()
    }
}
