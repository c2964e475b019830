//! Sends a store's commands to one server or to a cluster, and calls scripts there.
#![cfg_attr(not(feature = "cluster"), allow(unused_variables, reason = "one server has all keys"))]

pub(crate) mod entry_steps;
pub(super) mod lock_queue;
pub(crate) mod lock_steps;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::connection::Supervisor;
use super::connection::connector::Connector;
use super::connection::send::SendMode;
use super::endpoint::host_ms;
use super::errors::{classify, reason, store_error, unexpected};
use super::scripts::{CallForm, Script};
use crate::health::{Breaker, ClockReading, LinkState};
use crate::store::{NamedServer, StoreError, StoreErrorKind};

/// The connections of one node for commands.
#[derive(Clone, Debug)]
pub(in crate::store) struct Commands {
    pub(super) route: Route,
    /// Whether the node has ended; other nodes may still use its connections.
    has_ended: Arc<AtomicBool>,
}

/// Where the commands go.
#[derive(Clone, Debug)]
pub(super) enum Route {
    One(Arc<Supervisor>),
    #[cfg(feature = "cluster")]
    Cluster(Arc<super::cluster::Cluster>),
}

/// The first expression for one server, the second for a cluster.
macro_rules! by_route {
    ($route:expr, |$server:ident| $one:expr, |$cluster:ident| $all:expr) => {
        match $route {
            $crate::store::redis::commands::Route::One($server) => $one,
            #[cfg(feature = "cluster")]
            $crate::store::redis::commands::Route::Cluster($cluster) => $all,
        }
    };
}
pub(super) use by_route;

impl Route {
    /// The connection to the server that has `key`; `None` while that is not known.
    fn connection(&self, key: &str) -> Result<Option<Arc<Supervisor>>, StoreError> {
        by_route!(self, |server| Ok(Some(Arc::clone(server))), |cluster| cluster.connection(key))
    }

    /// The connections to all servers; empty while these are not known.
    fn all(&self) -> Result<Vec<Arc<Supervisor>>, StoreError> {
        by_route!(self, |server| Ok(vec![Arc::clone(server)]), |cluster| cluster.all())
    }
}

impl Commands {
    /// Sends a command about `key` and waits for its reply, at most `within` in all. All its keys must be in the slot of `key`.
    pub(super) async fn send(
        &self,
        key: &str,
        cmd: &Cmd,
        within: Duration,
        mode: SendMode,
    ) -> Result<Value, StoreError> {
        self.is_usable()?;
        let sent = by_route!(
            &self.route,
            |server| server.send(cmd, within, mode).await,
            // Boxed, because otherwise every command's future would be as large as this one.
            |cluster| Box::pin(cluster.send(key, cmd, within, mode)).await
        );
        sent.map(|(reply, _)| reply)
    }

    /// Calls the script about `key` that `call` builds: by its digest, or by its text if the server does not know it, within one deadline.
    /// Returns what `read` makes of the answer, and the session of the connection on which it came.
    pub(super) async fn call<T>(
        &self,
        key: &str,
        call: impl Fn(CallForm) -> Cmd + Sync,
        within: Duration,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<(T, u64), StoreError> {
        let (sent, spread) = (Instant::now(), self.is_spread());
        let (mut sha1, mut left) = (true, within);
        loop {
            let cmd = call(CallForm { sha1, spread });
            self.is_usable()?;
            let sending =
                by_route!(&self.route, |server| server.send(&cmd, left, SendMode::Once).await, |cluster| {
                    Box::pin(cluster.send(key, &cmd, left, SendMode::Once)).await
                });
            match sending? {
                (Value::ServerError(error), _) if sha1 && error.code() == "NOSCRIPT" => {
                    (sha1, left) = (false, within.saturating_sub(sent.elapsed()));
                }
                (Value::ServerError(error), _) => return Err(refused(error.into())),
                (answer, session) => return Ok((read(answer).ok_or_else(not_understood)?, session)),
            }
        }
    }

    /// Calls a script that needs no more than these arguments, of about this `size`.
    pub(super) async fn run<T>(
        &self,
        script: &Script,
        name: &str,
        (size, args): (usize, impl Fn(&mut Cmd) + Sync),
        within: Duration,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<T, StoreError> {
        let call = |by| {
            let mut cmd = script.call(by, name, size);
            args(&mut cmd);
            cmd
        };
        self.call(name, call, within, read).await.map(|(answer, _)| answer)
    }

    /// Waits for `work` at most `within`. The error is then the reason why all commands fail, or of this kind.
    pub(super) async fn bounded<T>(
        &self,
        within: Duration,
        work: impl Future<Output = Result<T, StoreError>>,
        kind: StoreErrorKind,
    ) -> Result<T, StoreError> {
        let done = timeout(within, work).await;
        done.unwrap_or_else(|_| Err(self.down().unwrap_or_else(|| StoreError::new(kind))))
    }

    /// Whether keys are on several servers. A PUBLISH reaches subscribers of all, but counts those of one.
    pub(super) fn is_spread(&self) -> bool {
        !matches!(self.route, Route::One(_))
    }

    /// Waits until commands can be sent, even if attempts to connect fail.
    pub(super) async fn until_up(&self) -> Result<(), StoreError> {
        self.is_usable()?;
        by_route!(&self.route, |server| server.until_up().await, |cluster| cluster.until_up().await)
    }

    /// Waits until commands about `key` can be sent, even if attempts to connect fail.
    pub(super) async fn reach(&self, key: &str) -> Result<(), StoreError> {
        self.is_usable()?;
        by_route!(&self.route, |server| server.until_up().await, |cluster| cluster.reach(key).await)
    }

    /// The reason why all commands fail at present, if they do.
    pub(super) fn down(&self) -> Option<StoreError> {
        match self.is_usable().and_then(|()| self.route.all()) {
            Ok(all) => {
                let mut down = all.iter().map(|server| server.down());
                let first = down.next()??;
                down.all(|other| other.is_some()).then_some(first)
            }
            Err(why) => Some(why),
        }
    }

    /// Whether the connection was lost: the next one may lead to another server. The connection for messages to a cluster leads
    /// to any node and is independent of those for commands.
    pub(super) fn has_to_wait(&self) -> bool {
        self.down().is_some() || by_route!(&self.route, |server| server.is_reconnecting(), |_cluster| false)
    }

    /// The longest argument that all servers take; `usize::MAX` while no limit is known.
    pub(in crate::store) fn longest_argument(&self) -> usize {
        let all = self.route.all().unwrap_or_default();
        all.iter().map(|server| server.longest_argument()).min().unwrap_or(usize::MAX)
    }

    /// Whether commands about `key` fail at once at present.
    pub(in crate::store) fn is_down(&self, key: &str) -> bool {
        match self.is_usable().and_then(|()| self.route.connection(key)) {
            Ok(server) => server.is_some_and(|server| server.down().is_some()),
            Err(_) => true,
        }
    }

    /// Requests a check of the connections, because one may have broken.
    pub(in crate::store) fn suspect(&self) {
        by_route!(&self.route, |server| server.suspect(), |cluster| cluster.suspect());
    }

    /// Changes with each new connection; in a cluster at each change of its state.
    pub(super) fn generations(&self) -> watch::Receiver<u64> {
        by_route!(&self.route, |server| server.generations(), |cluster| cluster.changes())
    }

    /// What the server's clock showed at `moment`, in milliseconds; this machine's clock before the first reading.
    pub(super) fn clock_at(&self, moment: Instant) -> u64 {
        self.known_clock_at(moment).unwrap_or_else(host_ms)
    }

    /// As [`clock_at`](Self::clock_at), but `None` before the first reading.
    pub(super) fn known_clock_at(&self, moment: Instant) -> Option<u64> {
        by_route!(&self.route, |server| server.known_clock_at(moment), |cluster| cluster.clock_at(moment))
    }

    /// The server of the key with this name, and how long a reading of its clock took.
    pub(in crate::store) fn server_of(&self, name: &str) -> NamedServer {
        by_route!(
            &self.route,
            |server| NamedServer { number: 0, round_trip: server.round_trip() },
            |cluster| cluster.server_of(name)
        )
    }

    /// The latest reading of the clock that [`clock_at`](Self::clock_at) uses; `None` before the first.
    pub(super) fn clock(&self) -> Option<ClockReading> {
        self.route.all().ok()?.iter().find_map(|server| server.clock())
    }

    /// How to connect to the server that has `key`; `None` while that is not known.
    pub(super) fn connector(&self, key: &str) -> Option<Connector> {
        Some(self.route.connection(key).ok()??.connector.clone())
    }

    /// How many servers there are; 1 while that is not known.
    pub(super) fn count(&self) -> usize {
        self.route.all().map_or(1, |all| all.len().max(1))
    }

    /// The state of all connections together, whether commands are sent, and the reason if some are not.
    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        if let Err(error) = self.is_usable() {
            return (LinkState::Closed, Breaker::Open, Some(reason(&error)));
        }
        let one = |(link, why): (LinkState, Option<StoreError>)| {
            let refuses = matches!(link, LinkState::Down | LinkState::Closed);
            let breaker = if refuses { Breaker::Open } else { Breaker::Closed };
            (link, breaker, why.as_ref().map(reason))
        };
        by_route!(&self.route, |server| one(server.link()), |cluster| cluster.link())
    }

    /// The same connections, for another node.
    pub(super) fn of_another_node(&self) -> Self {
        self.route.clone().into()
    }

    /// Ends the node: each of its later commands fails at once. Returns false if it has ended already.
    pub(super) fn end(&self) -> bool {
        !self.has_ended.swap(true, Ordering::Relaxed)
    }

    #[inline]
    fn is_usable(&self) -> Result<(), StoreError> {
        match self.has_ended.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(StoreError::new(StoreErrorKind::Closed)),
        }
    }

    /// Closes the connections, for all nodes.
    pub(super) fn close(&self) {
        by_route!(&self.route, |server| server.close(), |cluster| cluster.close());
    }
}

impl From<Route> for Commands {
    fn from(route: Route) -> Self {
        Self { route, has_ended: Arc::default() }
    }
}

impl From<Arc<Supervisor>> for Commands {
    fn from(server: Arc<Supervisor>) -> Self {
        Route::One(server).into()
    }
}

/// The error for an answer that no command of ours has.
pub(crate) fn not_understood() -> StoreError {
    refused(unexpected())
}

/// The error for a reply that the guard cannot use.
pub(crate) fn refused(error: RedisError) -> StoreError {
    store_error(classify(&error).0, error)
}
