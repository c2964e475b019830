//! Opens connections to the server, and says how often they are checked.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::{MultiplexedConnection, PubSub};
use redis::{AsyncConnectionConfig, Client, RedisError, RedisResult};

use super::outages::Outages;
use super::tls::provide_cryptography;
use crate::failure_text::panic_text;
use crate::store::redis::errors::advice::advised;
use crate::store::redis::errors::classify::{reason, unquoted};
use crate::store::redis::errors::reply::bounded;
use crate::store::redis::topology::endpoint::{Endpoint, Located};
use crate::store::redis::topology::server::{ServerAddress, TimedReading, read_clock};
use crate::store::redis::topology::single::SingleEndpoint;
use crate::store::{StoreError, StoreErrorKind};

/// How often an unused connection is checked. Idle connections are closed by the server's `timeout` or by a balancer,
/// mostly after longer; a closed one is noticed before it is needed.
const IDLE: Duration = Duration::from_secs(10);

/// The longest time between two readings of the server's clock. Each also asks whether the server is still a primary.
const CLOCK_PERIOD: Duration = Duration::from_secs(60);

/// How often a server that may be demoted is asked for its role. A primary that a sentinel demotes closes its connections;
/// one that was demoted by hand answers reads for ever.
const ROLE_PERIOD: Duration = Duration::from_secs(1);

/// Opens connections for one node. Every call into `redis` that may wait has a bound.
#[derive(Clone)]
pub(crate) struct Connector {
    endpoint: Arc<dyn Endpoint>,
    /// The deadline of one command; the measure of all others.
    pub(crate) answer: Duration,
    /// How long a connection may go without an answer before it is looked at.
    pub(crate) idle: Duration,
    /// How long one may be used without being checked.
    pub(crate) clock: Duration,
    pub(crate) outages: Arc<Outages>,
}

/// A connection for messages.
pub(crate) struct Inbound {
    pub(crate) messages: PubSub,
    /// The node of a cluster that it leads to.
    pub(crate) at: Option<String>,
}

impl Connector {
    /// Leads to one server.
    pub(crate) fn new(client: &Client, answer: Duration) -> Self {
        Self::to(Arc::new(SingleEndpoint::new(client)), answer)
    }

    pub(crate) fn to(endpoint: Arc<dyn Endpoint>, answer: Duration) -> Self {
        Self { endpoint, answer, idle: IDLE, clock: CLOCK_PERIOD, outages: Arc::default() }
    }

    /// The same, for another server of the same node.
    #[cfg(feature = "cluster")]
    pub(crate) fn sharing(self, outages: &Arc<Outages>) -> Self {
        Self { outages: Arc::clone(outages), ..self }
    }

    /// Connects for the guard's commands, and makes sure that the server answers some. For the keeper alone: where there
    /// are sentinels it goes to the server that they name now, and the others follow.
    pub(crate) async fn anew(&self) -> RedisResult<(MultiplexedConnection, Option<TimedReading>)> {
        let Located { server, .. } = self.open(self.locating(), self.endpoint.locate()).await?;
        let mut connection = self.connect(&server).await?;
        let reading = bounded(self.probing(), self.look(&mut connection)).await?;
        self.endpoint.found(&server);
        Ok((connection, reading))
    }

    /// Connects for commands that are not the guard's, to the server that has the guard's.
    pub(crate) async fn commands(&self) -> RedisResult<(MultiplexedConnection, Option<TimedReading>)> {
        let Located { server, .. } = self.open(self.locating(), self.endpoint.current()).await?;
        self.endpoint.glimpsed(&server);
        let mut connection = self.connect(&server).await?;
        let looked = read_clock(&mut connection, self.may_be_demoted());
        let reading = bounded(self.probing(), looked).await?;
        Ok((connection, reading))
    }

    async fn connect(&self, server: &ServerAddress) -> RedisResult<MultiplexedConnection> {
        // Every command is timed by its caller, which knows how much is left of its budget.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let opening = server.commands.get_multiplexed_async_connection_with_config(&config);
        self.open(self.opening(), opening).await
    }

    /// Connects for messages, to the server of the latest connection for commands.
    pub(crate) async fn inbox(&self) -> RedisResult<Inbound> {
        let Located { server, node } = self.open(self.locating(), self.endpoint.current()).await?;
        let messages = self.open(self.opening(), server.inbox.get_async_pubsub()).await?;
        Ok(Inbound { messages, at: node })
    }

    /// Whether a connection for messages must be replaced, because messages may no longer reach it. In a cluster: its node `at` has
    /// left the cluster. Elsewhere: the commands use another connection (`latest`) than when this one was opened (`generation`; 0
    /// means none yet).
    pub(crate) fn has_left(&self, at: Option<&str>, generation: u64, latest: u64) -> bool {
        match at {
            Some(node) => self.endpoint.has_lost(node),
            // The first connection for commands is opened beside this one, to the same server. A later one may lead to
            // another: the name stands for a new primary, and the old one would answer pings for ever.
            None => generation != 0 && latest != generation,
        }
    }

    /// As [`Endpoint::look`].
    pub(crate) async fn look(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> RedisResult<Option<TimedReading>> {
        self.endpoint.look(connection).await
    }

    /// As [`Endpoint::has_been_replaced`].
    pub(crate) async fn has_been_replaced(&self) -> bool {
        self.endpoint.has_been_replaced().await
    }

    /// As [`Endpoint::doubt`].
    pub(crate) fn doubt(&self) {
        self.endpoint.doubt();
    }

    /// As [`Endpoint::is_node`].
    pub(crate) fn is_node(&self) -> bool {
        self.endpoint.is_node()
    }

    /// As [`Endpoint::sentinel`].
    pub(crate) fn sentinel(&self) -> Option<BoxFuture<'_, RedisResult<Client>>> {
        self.endpoint.sentinel()
    }

    /// How often a healthy connection is checked.
    pub(crate) fn look_period(&self) -> Duration {
        if self.may_be_demoted() { ROLE_PERIOD } else { self.idle }
    }

    /// As [`Endpoint::may_be_demoted`].
    pub(crate) fn may_be_demoted(&self) -> bool {
        self.endpoint.may_be_demoted()
    }

    /// The text of an event about an error: what to do about it and what happened, with the node's address in a cluster.
    pub(crate) fn told(&self, error: &StoreError) -> String {
        match self.address().filter(|_| self.is_node()) {
            Some(address) => format!("{address}: {}", reason(error)),
            None => reason(error),
        }
    }

    /// What a failed attempt to connect means, and what to do about it.
    pub(crate) fn failure(&self, error: RedisError) -> StoreError {
        let advice = self.advice(&error);
        StoreError { kind: StoreErrorKind::Unavailable, source: Some(advised(advice, unquoted(error))) }
    }

    /// What to do about the error, if that is known.
    pub(crate) fn advice(&self, error: &RedisError) -> Option<&'static str> {
        self.endpoint.advice(error)
    }

    /// Opens a connection within a bound, and turns a panic of the client into an error. redis-rs panics over TLS without a
    /// provider of cryptography; that would end the keeper's task, and each request would start another.
    async fn open<T>(
        &self,
        limit: Duration,
        opening: impl Future<Output = RedisResult<T>>,
    ) -> RedisResult<T> {
        if self.endpoint.may_want_tls() {
            provide_cryptography();
        }
        let caught = AssertUnwindSafe(bounded(limit, opening)).catch_unwind();
        caught.await.unwrap_or_else(|panic| {
            let panic = panic_text(&*panic).as_ref().to_owned();
            Err(RedisError::from((redis::ErrorKind::Client, "connecting panicked", panic)))
        })
    }

    /// The user as which this node is known to the server; `None` for the user without a name, and where the server is not known yet.
    pub(crate) fn user(&self) -> Option<String> {
        Some(self.endpoint.known()?.info().redis_settings().username()?.to_owned())
    }

    /// The database; 0 while the server is not known.
    pub(crate) fn db(&self) -> i64 {
        self.endpoint.known().map_or(0, |server| server.info().redis_settings().db())
    }

    /// The server's address, if it is known.
    pub(crate) fn address(&self) -> Option<String> {
        Some(self.endpoint.known()?.info().addr().to_string())
    }

    /// A server which is slower than the deadline of a command is as good as down: its answers would all come too late, and
    /// every request would pay the deadline to learn it. The floor is for deadlines so short that a timer's tick and a busy
    /// worker thread decide them.
    fn probing(&self) -> Duration {
        self.answer.max(Duration::from_millis(20))
    }

    fn locating(&self) -> Duration {
        self.opening().max(self.endpoint.locating())
    }

    /// TCP, two rounds of TLS, AUTH: four rounds, each of which may take as long as a command. At least time to notice a
    /// lost SYN and try a new socket. (Before each TLS connection redis-rs reads the machine's certificate authorities,
    /// even if the client has its own: 2 ms of this thread, which cannot be bounded here.)
    fn opening(&self) -> Duration {
        self.answer.saturating_mul(4).max(Duration::from_millis(500))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_while_connecting_is_an_ordinary_failure() {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        let dial = Connector::new(&client, Duration::from_millis(50));
        let opened = dial.open(Duration::from_secs(1), async { panic!("no provider of cryptography") });
        let error: RedisResult<()> = opened.await;
        let failure = dial.failure(error.expect_err("it panicked"));
        assert_eq!(failure.kind, StoreErrorKind::Unavailable);
        assert!(format!("{failure:?}").contains("no provider of cryptography"), "{failure:?}");
    }
}
