//! Sends a store's commands to one server or to a cluster, and calls scripts there.
//!
//! Two steps on leases take several calls and are here: HAND OVER, and WAKE REST, which continues a script that could not notify all
//! waiters of an ended lease in one call. [`Deadline`] limits the calls that must not run late.
#![cfg_attr(not(feature = "cluster"), allow(unused_variables, reason = "one server has all keys"))]

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
use crate::store::redis::scripts;
use crate::store::redis::scripts::{millis, push_number};
use crate::store::{HandedOver, LATEST, NamedServer, StoreError, StoreErrorKind, StoreResult, Token};

pub(super) mod lock_queue;
pub(crate) mod lock_steps;

/// The connections of one node for commands.
#[derive(Clone)]
pub(in crate::store) struct Commands {
    pub(super) route: Route,
    /// Whether the node has ended; other nodes may still use its connections.
    has_ended: Arc<AtomicBool>,
}

/// Where the commands go.
#[derive(Clone)]
pub(super) enum Route {
    One(Arc<Supervisor>),
    #[cfg(feature = "cluster")]
    Cluster(Arc<super::cluster::Cluster>),
}

/// Evaluates the first expression if there is one server, the second for a cluster.
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
    fn connection(&self, key: &str) -> StoreResult<Option<Arc<Supervisor>>> {
        by_route!(self, |server| Ok(Some(Arc::clone(server))), |cluster| cluster.connection(key))
    }

    /// The connections to all servers; empty while these are not known.
    fn all(&self) -> StoreResult<Vec<Arc<Supervisor>>> {
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
    ) -> StoreResult<Value> {
        self.is_usable()?;
        let sent = by_route!(
            &self.route,
            |server| server.send(key, cmd, within, mode).await,
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
    ) -> StoreResult<(T, u64)> {
        let (sent, spread) = (Instant::now(), self.is_spread());
        let (mut sha1, mut left) = (true, within);
        loop {
            let cmd = call(CallForm { sha1, spread });
            self.is_usable()?;
            let sending = by_route!(
                &self.route,
                |server| server.send(key, &cmd, left, SendMode::Once).await,
                |cluster| { Box::pin(cluster.send(key, &cmd, left, SendMode::Once)).await }
            );
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
    ) -> StoreResult<T> {
        let call = |by| {
            let mut cmd = script.call(by, name, size);
            args(&mut cmd);
            cmd
        };
        self.call(name, call, within, read).await.map(|(answer, _)| answer)
    }

    /// Waits for `work` at most `within`. After that, returns the reason why all commands fail at present, or else an error of `kind`.
    pub(super) async fn bounded<T>(
        &self,
        within: Duration,
        work: impl Future<Output = StoreResult<T>>,
        kind: StoreErrorKind,
    ) -> StoreResult<T> {
        let done = timeout(within, work).await;
        done.unwrap_or_else(|_| Err(self.down().unwrap_or_else(|| StoreError::new(kind))))
    }

    /// Whether keys are on several servers. There a PUBLISH reaches the subscribers at all servers, but its reply counts those at one.
    pub(in crate::store) fn is_spread(&self) -> bool {
        !matches!(self.route, Route::One(_))
    }

    /// Waits until commands can be sent, even if attempts to connect fail.
    pub(super) async fn until_up(&self) -> StoreResult<()> {
        self.is_usable()?;
        by_route!(&self.route, |server| server.until_up().await, |cluster| cluster.until_up().await)
    }

    /// Waits until commands about `key` can be sent, even if attempts to connect fail.
    pub(super) async fn reach(&self, key: &str) -> StoreResult<()> {
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

    /// Whether a new connection for messages has to wait, because the connection for commands was lost and its successor may lead to
    /// another server. In a cluster it waits only while all connections for commands are down, because it may lead to any node.
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

    /// Changes with each new connection; in a cluster at each change that may concern a waiting caller.
    pub(super) fn generations(&self) -> watch::Receiver<u64> {
        by_route!(&self.route, |server| server.generations(), |cluster| cluster.changes())
    }

    /// What the server's clock showed at `moment`, in milliseconds; this machine's clock before the first reading.
    pub(super) fn clock_at(&self, moment: Instant) -> u64 {
        self.known_clock_at(moment).unwrap_or_else(host_ms)
    }

    /// As [`clock_at`](Self::clock_at), but `None` before the first reading.
    fn known_clock_at(&self, moment: Instant) -> Option<u64> {
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

    /// How many connections for commands are open.
    pub(super) fn open(&self) -> usize {
        self.route.all().map_or(0, |all| all.iter().map(|server| server.open()).sum())
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

    /// Returns the same connections for another node, which ends independently of this one.
    pub(super) fn of_another_node(&self) -> Self {
        self.route.clone().into()
    }

    /// Ends the node: each of its later commands fails at once. Returns false if it has ended already.
    pub(super) fn end(&self) -> bool {
        !self.has_ended.swap(true, Ordering::Relaxed)
    }

    #[inline]
    fn is_usable(&self) -> StoreResult<()> {
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

pub(crate) fn int(answer: Value) -> Option<i64> {
    if let Value::Int(number) = answer { Some(number) } else { None }
}

/// The error for an answer that no command of this crate has.
pub(crate) fn not_understood() -> StoreError {
    refused(unexpected())
}

/// The error for a server's refusal, or for a reply that this crate cannot use.
pub(crate) fn refused(error: RedisError) -> StoreError {
    store_error(classify(&error).0, error)
}

/// A script that ends a lease adds this to its answer if it has notified only some of the waiters, so that
/// [`wake_rest`](Commands::wake_rest) must continue.
pub(crate) const REST: i64 = 10;

impl Commands {
    /// Notifies the remaining waiters of an ended lease, a bounded number per call. `ended` is the token in the fence behind the last of
    /// these waiters; each receives `message`. Gives up after `within` or at an error: a waiter that is not notified retries when the
    /// lease would have expired.
    pub(crate) async fn wake_rest(&self, name: &str, ended: &Token, message: &str, within: Duration) {
        let until = Instant::now() + within;
        let args = |cmd: &mut Cmd| {
            cmd.arg(ended.as_str()).arg(message);
        };
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.run(&scripts::WAKE_REST, name, (160, args), left, Some).await {
                Ok(Value::Int(done)) if done > REST => {}
                _ => return,
            }
        }
    }

    /// HAND OVER, repeated while the script requests it, because each call passes over a bounded number of waiters. If `lease` is `None`
    /// (a waiter has left before its grant arrived), the lease retains its remaining time.
    pub(crate) async fn hand_over(
        &self,
        name: &str,
        token: &Token,
        lease: Option<Duration>,
        (hops, is_leaving): (u8, bool),
        within: Duration,
    ) -> StoreResult<HandedOver> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str());
            push_number(cmd, lease.map(millis));
            cmd.arg(hops).arg(u8::from(is_leaving));
        };
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let read = |answer| match answer {
                Value::Int(0) => Some(Some(HandedOver::NotMine)),
                Value::Int(1) => Some(Some(HandedOver::Freed)),
                Value::Int(2) => Some(Some(HandedOver::ToWaiter)),
                Value::Int(3) => Some(None),
                _ => None,
            };
            if let Some(done) = self.run(&scripts::HAND_OVER, name, (96, args), left, read).await? {
                return Ok(done);
            }
        }
    }
}

/// The calls of a command that must not run late: each carries the latest moment at which it may run, by the clock of the server that
/// runs it, until one was in time.
///
/// A server that hangs runs the commands it was sent once it continues, even if their clients have timed out: an insertion would
/// overwrite newer entries, and an acquire would grant the lease to a client that does not want it any more. A call that comes after its
/// latest moment changes nothing and is answered with the server's time, because the clock may only have been set.
pub(crate) struct Deadline {
    began: Instant,
    within: Duration,
    /// What the server's clock shows; if the guard may not read it, the script may not either.
    server_clock: Option<u64>,
}

impl Deadline {
    pub(crate) fn new(commands: &Commands, within: Duration) -> Self {
        let began = Instant::now();
        Self { began, within, server_clock: commands.known_clock_at(began) }
    }

    pub(crate) fn left(&self) -> Duration {
        self.within.saturating_sub(self.began.elapsed())
    }

    /// The latest moment for the next call, and how long it may take.
    pub(crate) fn next_call(&self) -> (Option<u64>, Duration) {
        let left = self.left();
        (self.server_clock.map(|now| now.saturating_add(millis(left.saturating_add(LATEST)))), left)
    }

    /// A call came too late, at this time of the server's clock. Returns an error if there is no time for another.
    pub(crate) fn was_late(&mut self, server_clock: u64) -> StoreResult<()> {
        if self.left().is_zero() {
            return Err(StoreError::new(StoreErrorKind::TimedOut));
        }
        self.server_clock = Some(server_clock);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use redis::Client;

    use super::*;
    use crate::store::redis::connection::Supervisor;
    use crate::store::redis::connection::connector::Connector;

    const WITHIN: Duration = Duration::from_secs(2);

    fn deadline() -> Deadline {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        Deadline::new(&Supervisor::new(Connector::new(&client, WITHIN)).into(), WITHIN)
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_repeated_with_the_remaining_time_by_the_servers_clock() {
        let (mut deadline, half) = (deadline(), WITHIN / 2);
        assert_eq!(deadline.next_call(), (None, WITHIN));
        tokio::time::advance(half).await;
        deadline.was_late(5_000).expect("there is time");
        assert_eq!(deadline.next_call(), (Some(5_000 + millis(half + LATEST)), half));
    }

    /// A repeated command would be sent with no time left for its answer, and run: no client would know of the lease.
    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_not_repeated_after_its_deadline() {
        let mut deadline = deadline();
        tokio::time::advance(WITHIN).await;
        assert_eq!(deadline.was_late(5_000).expect_err("too late").kind, StoreErrorKind::TimedOut);
    }
}
