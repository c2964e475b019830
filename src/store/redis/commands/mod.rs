//! Where a store sends its commands: one server, or a cluster.

pub(crate) mod acquire;
pub(crate) mod announce;
pub(crate) mod call;
pub(crate) mod deadline;
pub(crate) mod invalidate;
pub(crate) mod lease_end;
pub(super) mod lock_leaving;
pub(super) mod lock_losses;
pub(super) mod lock_replies;
pub(crate) mod lock_scripts;
pub(crate) mod lock_step;
pub(crate) mod renew_member;

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use super::cluster::Cluster;
use super::connection::Supervisor;
use super::connection::connector::Connector;
use super::errors::classify::reason;
use super::topology::server::host_ms;
use crate::health::{Breaker, ClockReading, LinkState};
use crate::store::StoreError;

#[derive(Clone, Debug)]
pub(super) enum Commands {
    One(Arc<Supervisor>),
    Cluster(Arc<Cluster>),
}

impl Commands {
    /// Sends a command about `key` and waits for its reply, at most `within` in all. All its keys must be in the slot
    /// of `key`.
    pub(super) async fn send(&self, key: &str, cmd: &Cmd, within: Duration) -> Result<Value, StoreError> {
        match self {
            Self::One(server) => server.send(cmd, within).await,
            // Boxed, because every command's future would have room for it.
            Self::Cluster(cluster) => Box::pin(cluster.send(key, cmd, within)).await,
        }
    }

    /// The same. Also returns the session of the connection that has brought the reply: all replies of one session are by one
    /// server, in the order of their commands.
    pub(super) async fn send_noting(
        &self,
        key: &str,
        cmd: &Cmd,
        within: Duration,
    ) -> Result<(Value, u64), StoreError> {
        match self {
            Self::One(server) => server.send_noting(cmd, within).await,
            Self::Cluster(cluster) => Box::pin(cluster.send_noting(key, cmd, within)).await,
        }
    }

    /// Whether keys are on several servers. A PUBLISH reaches subscribers of all, but counts those of one.
    pub(super) fn is_spread(&self) -> bool {
        match self {
            Self::One(_) => false,
            Self::Cluster(_) => true,
        }
    }

    /// Waits until commands can be sent, even if attempts to connect fail.
    pub(super) async fn until_up(&self) -> Result<(), StoreError> {
        match self {
            Self::One(server) => server.until_up().await,
            Self::Cluster(cluster) => cluster.until_up().await,
        }
    }

    /// Waits until commands about `key` can be sent, even if attempts to connect fail.
    pub(super) async fn reach(&self, key: &str) -> Result<(), StoreError> {
        match self {
            Self::One(server) => server.until_up().await,
            Self::Cluster(cluster) => cluster.reach(key).await,
        }
    }

    /// Why all commands fail at present, if they do.
    pub(super) fn down(&self) -> Option<StoreError> {
        match self {
            Self::One(server) => server.down(),
            Self::Cluster(cluster) => cluster.down(),
        }
    }

    /// Whether commands about `key` fail at once at present.
    pub(super) fn is_down(&self, key: &str) -> bool {
        match self {
            Self::One(server) => server.down().is_some(),
            Self::Cluster(cluster) => cluster.is_down(key),
        }
    }

    /// Has the connections checked, because one may be gone.
    pub(super) fn suspect(&self) {
        match self {
            Self::One(server) => server.suspect(),
            Self::Cluster(cluster) => cluster.suspect(),
        }
    }

    /// Changes with each new connection; in a cluster at each change of its state.
    pub(super) fn generations(&self) -> watch::Receiver<u64> {
        match self {
            Self::One(server) => server.generations(),
            Self::Cluster(cluster) => cluster.changes(),
        }
    }

    /// What the server's clock showed at `moment`, in milliseconds; this machine's clock before the first reading.
    pub(super) fn clock_at(&self, moment: Instant) -> u64 {
        self.known_clock_at(moment).unwrap_or_else(host_ms)
    }

    /// The same; `None` before the first reading.
    pub(super) fn known_clock_at(&self, moment: Instant) -> Option<u64> {
        match self {
            Self::One(server) => server.known_clock_at(moment),
            Self::Cluster(cluster) => cluster.clock_at(moment),
        }
    }

    /// The latest reading of that clock; `None` before the first.
    pub(super) fn clock(&self) -> Option<ClockReading> {
        match self {
            Self::One(server) => server.clock(),
            Self::Cluster(cluster) => cluster.clock(),
        }
    }

    /// How to connect to the server that has `key`; `None` while that is not known.
    pub(super) fn dial(&self, key: &str) -> Option<Connector> {
        match self {
            Self::One(server) => Some(server.dial.clone()),
            Self::Cluster(cluster) => cluster.dial(key),
        }
    }

    /// The user name of this node's connections; `None` for the default user, and while the server is not known.
    pub(super) fn user(&self) -> Option<String> {
        match self {
            Self::One(server) => server.dial.user(),
            Self::Cluster(cluster) => cluster.user(),
        }
    }

    /// The state of all connections together, whether commands are tried, and the reason if some are not.
    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        match self {
            Self::One(server) => {
                let (link, why) = server.link();
                let refuses = matches!(link, LinkState::Down | LinkState::Closed);
                let breaker = if refuses { Breaker::Open } else { Breaker::Closed };
                (link, breaker, why.as_ref().map(reason))
            }
            Self::Cluster(cluster) => cluster.link(),
        }
    }

    pub(super) fn close(&self) {
        match self {
            Self::One(server) => server.close(),
            Self::Cluster(cluster) => cluster.close(),
        }
    }
}

impl From<Arc<Supervisor>> for Commands {
    fn from(server: Arc<Supervisor>) -> Self {
        Self::One(server)
    }
}

impl From<Arc<Cluster>> for Commands {
    fn from(cluster: Arc<Cluster>) -> Self {
        Self::Cluster(cluster)
    }
}
