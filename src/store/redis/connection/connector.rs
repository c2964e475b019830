//! Opens connections to the server, and says how often they are checked.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
#[cfg(feature = "tls")]
use redis::ConnectionAddr;
use redis::aio::{MultiplexedConnection, PubSub};
use redis::{AsyncConnectionConfig, Client, RedisError, RedisResult};
#[cfg(feature = "tls")]
use rustls::crypto::CryptoProvider;

use crate::failure_text::panic_text;
#[cfg(feature = "cluster")]
use crate::store::redis::cluster::Atlas;
#[cfg(feature = "cluster")]
use crate::store::redis::errors::advice::on_refusal;
#[cfg(feature = "sentinel")]
use crate::store::redis::errors::advice::on_sentinel;
use crate::store::redis::errors::advice::{advised, on_connecting};
use crate::store::redis::errors::classify::{reason, unquoted};
use crate::store::redis::errors::reply::bounded;
#[cfg(feature = "sentinel")]
use crate::store::redis::topology::sentinel::{self, Sentinels};
use crate::store::redis::topology::server::{Reading, Server, read_clock};
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
pub(crate) struct Dial {
    door: Door,
    /// Whether it leads to a node of a cluster.
    pub(crate) is_node: bool,
    /// The deadline of one command; the other limits derive from it.
    pub(crate) answer: Duration,
    /// How long a connection may go without an answer before it is looked at.
    pub(crate) idle: Duration,
    /// How long one may be used without being checked.
    pub(crate) clock: Duration,
}

/// Knows where the server is.
#[derive(Clone)]
enum Door {
    /// The client's own address: one server, a name that stands for the primary, or one node of a cluster.
    Server(Arc<Server>),
    /// Those who watch over it, and are asked at each connect.
    #[cfg(feature = "sentinel")]
    Sentinels(Arc<Sentinels>),
    /// Any node of a cluster; for the inbox.
    #[cfg(feature = "cluster")]
    Any(Arc<Atlas>),
}

/// A connection for messages.
pub(crate) struct Inbound {
    pub(crate) messages: PubSub,
    /// The node of a cluster that it leads to.
    pub(crate) at: Option<String>,
}

impl Dial {
    pub(crate) fn new(client: &Client, answer: Duration) -> Self {
        Self::of(Door::Server(Arc::new(Server::new(client))), answer)
    }

    fn of(door: Door, answer: Duration) -> Self {
        Self { door, is_node: false, answer, idle: IDLE, clock: CLOCK_PERIOD }
    }

    #[cfg(feature = "sentinel")]
    pub(crate) fn through(sentinels: Sentinels, answer: Duration) -> Self {
        Self::of(Door::Sentinels(Arc::new(sentinels)), answer)
    }

    #[cfg(feature = "cluster")]
    pub(crate) fn node(client: &Client, answer: Duration) -> Self {
        Self { is_node: true, ..Self::new(client, answer) }
    }

    #[cfg(feature = "cluster")]
    pub(crate) fn any(atlas: &Arc<Atlas>, answer: Duration) -> Self {
        Self { is_node: true, ..Self::of(Door::Any(Arc::clone(atlas)), answer) }
    }

    /// Connects for the guard's commands, and checks that the server answers. Only the keeper calls this: with sentinels it
    /// connects to the primary that they name now, and all other connections follow.
    pub(crate) async fn anew(&self) -> RedisResult<(MultiplexedConnection, Option<Reading>)> {
        match &self.door {
            Door::Server(server) => self.connect(server, !self.is_node).await,
            #[cfg(feature = "sentinel")]
            Door::Sentinels(sentinels) => {
                let server = self.primary(sentinels).await?;
                let connected = self.connect(&server, true).await?;
                sentinels.found(server);
                Ok(connected)
            }
            #[cfg(feature = "cluster")]
            Door::Any(_) => self.commands().await,
        }
    }

    /// Connects for other commands than the guard's own, to the server that the guard's connection leads to.
    pub(crate) async fn commands(&self) -> RedisResult<(MultiplexedConnection, Option<Reading>)> {
        let server = match &self.door {
            Door::Server(server) => Arc::clone(server),
            #[cfg(feature = "sentinel")]
            Door::Sentinels(sentinels) => match sentinels.latest() {
                Some(server) => server,
                None => {
                    let server = self.primary(sentinels).await?;
                    sentinels.glimpsed(&server);
                    server
                }
            },
            #[cfg(feature = "cluster")]
            Door::Any(atlas) => Arc::new(Server::new(&atlas.next()?.0)),
        };
        self.connect(&server, self.may_be_demoted()).await
    }

    /// Connects to `server`; with `writes`, to replicas not.
    async fn connect(
        &self,
        server: &Server,
        writes: bool,
    ) -> RedisResult<(MultiplexedConnection, Option<Reading>)> {
        // No time-outs here: every caller bounds its command by the rest of its budget.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let opening = server.commands.get_multiplexed_async_connection_with_config(&config);
        let mut connection = self.open(self.opening(), opening).await?;
        // A server slower than the deadline of a command is as good as down: all its answers would come too late, and every
        // request would pay the deadline to learn it. The floor is for deadlines so short that a timer's tick or a busy
        // worker thread could exceed them.
        let probe = self.answer.max(Duration::from_millis(20));
        let reading = if writes {
            bounded(probe, self.look(&mut connection)).await?
        } else {
            bounded(probe, read_clock(&mut connection, false)).await?
        };
        Ok((connection, reading))
    }

    /// Connects for messages, to the server of the latest connection for commands.
    pub(crate) async fn inbox(&self) -> RedisResult<Inbound> {
        let (server, at) = match &self.door {
            Door::Server(server) => (Arc::clone(server), None),
            #[cfg(feature = "sentinel")]
            Door::Sentinels(sentinels) => match sentinels.latest() {
                Some(server) => (server, None),
                None => (self.primary(sentinels).await?, None),
            },
            #[cfg(feature = "cluster")]
            Door::Any(atlas) => {
                let (client, at) = atlas.next()?;
                (Arc::new(Server::new(&client)), Some(at))
            }
        };
        let messages = self.open(self.opening(), server.inbox.get_async_pubsub()).await?;
        Ok(Inbound { messages, at })
    }

    /// Whether messages no longer reach a connection that was opened while the commands' connection was `generation`.
    pub(crate) fn has_left(&self, at: Option<&str>, generation: u64, latest: u64) -> bool {
        #[cfg(feature = "cluster")]
        if let (Door::Any(atlas), Some(at)) = (&self.door, at) {
            return atlas.has_lost(at);
        }
        let _ = at;
        // The first connection for commands is opened beside this one, to the same server. A later one may lead to another:
        // the name stands for a new primary, and the old one would answer pings for ever.
        generation != 0 && latest != generation
    }

    /// Reads the server's clock, and checks that a server that may be demoted is still a primary. A cluster's replica
    /// redirects commands to its master, so it needs no check.
    pub(crate) async fn look(&self, connection: &mut MultiplexedConnection) -> RedisResult<Option<Reading>> {
        match &self.door {
            Door::Server(server) if !self.is_node => server.look(connection).await,
            _ => read_clock(connection, self.may_be_demoted()).await,
        }
    }

    /// Whether the sentinels name another primary now. They are asked now and then, and soon after a
    /// [`doubt`](Self::doubt).
    pub(crate) async fn has_been_replaced(&self) -> bool {
        #[cfg(feature = "sentinel")]
        if let Door::Sentinels(sentinels) = &self.door {
            return sentinels.name_another().await;
        }
        false
    }

    /// Records that the server has lost its replicas: it may be cut off from the sentinels, too.
    pub(crate) fn doubt(&self) {
        #[cfg(feature = "sentinel")]
        if let Door::Sentinels(sentinels) = &self.door {
            sentinels.doubt();
        }
    }

    /// How often a healthy connection is checked.
    pub(crate) fn look_period(&self) -> Duration {
        if self.may_be_demoted() { ROLE_PERIOD } else { self.idle }
    }

    pub(crate) fn may_be_demoted(&self) -> bool {
        match &self.door {
            Door::Server(_) => false,
            #[cfg(feature = "sentinel")]
            Door::Sentinels(_) => true,
            #[cfg(feature = "cluster")]
            Door::Any(_) => false,
        }
    }

    /// The text of an event about an error: what to do about it and what happened, with the node's address in a cluster.
    pub(crate) fn told(&self, error: &StoreError) -> String {
        match self.address().filter(|_| self.is_node) {
            Some(address) => format!("{address}: {}", reason(error)),
            None => reason(error),
        }
    }

    #[cfg(feature = "sentinel")]
    async fn primary(&self, sentinels: &Sentinels) -> RedisResult<Arc<Server>> {
        let limit = self.opening().max(sentinel::RESOLVING);
        let client = self.open(limit, sentinels.resolve()).await?;
        Ok(Arc::new(Server::new(&client)))
    }

    /// What a failed attempt to connect means, and what to do about it.
    pub(crate) fn failure(&self, error: RedisError) -> StoreError {
        let advice = self.advice(&error);
        StoreError { kind: StoreErrorKind::Unavailable, source: Some(advised(advice, unquoted(error))) }
    }

    /// What to do about the error, if that is known.
    pub(crate) fn advice(&self, error: &RedisError) -> Option<&'static str> {
        match &self.door {
            Door::Server(server) => on_connecting(server.info().addr(), error),
            #[cfg(feature = "sentinel")]
            Door::Sentinels(_) => on_sentinel(error),
            #[cfg(feature = "cluster")]
            Door::Any(atlas) => {
                atlas.example().map_or_else(|| on_refusal(error), |info| on_connecting(info.addr(), error))
            }
        }
    }

    /// Opens a connection within a bound, and turns a panic of the client into an error. redis-rs panics over TLS without a
    /// provider of cryptography; that would end the keeper's task, and each request would start another.
    async fn open<T>(
        &self,
        limit: Duration,
        opening: impl Future<Output = RedisResult<T>>,
    ) -> RedisResult<T> {
        #[cfg(feature = "tls")]
        if self.may_want_tls() {
            provide_cryptography();
        }
        let caught = AssertUnwindSafe(bounded(limit, opening)).catch_unwind();
        caught.await.unwrap_or_else(|panic| {
            let panic = panic_text(&*panic).as_ref().to_owned();
            Err(RedisError::from((redis::ErrorKind::Client, "connecting panicked", panic)))
        })
    }

    /// Whether connections may be by TLS. Sentinels do not show how they, and what they lead to, are connected to.
    #[cfg(feature = "tls")]
    fn may_want_tls(&self) -> bool {
        match &self.door {
            Door::Server(server) => matches!(server.info().addr(), ConnectionAddr::TcpTls { .. }),
            #[cfg(feature = "sentinel")]
            Door::Sentinels(_) => true,
            #[cfg(feature = "cluster")]
            Door::Any(atlas) => {
                atlas.example().is_some_and(|info| matches!(info.addr(), ConnectionAddr::TcpTls { .. }))
            }
        }
    }

    /// The user name of this node's connections; `None` for the default user, and while the server is not known.
    pub(crate) fn user(&self) -> Option<String> {
        Some(self.server()?.info().redis_settings().username()?.to_owned())
    }

    /// The database; 0 while the server is not known.
    pub(crate) fn db(&self) -> i64 {
        self.server().map_or(0, |server| server.info().redis_settings().db())
    }

    /// The server's address, if it is known.
    pub(crate) fn address(&self) -> Option<String> {
        Some(self.server()?.info().addr().to_string())
    }

    fn server(&self) -> Option<Arc<Server>> {
        match &self.door {
            Door::Server(server) => Some(Arc::clone(server)),
            #[cfg(feature = "sentinel")]
            Door::Sentinels(sentinels) => sentinels.known(),
            #[cfg(feature = "cluster")]
            Door::Any(_) => None,
        }
    }

    /// The sentinels, where there are some.
    #[cfg(feature = "sentinel")]
    pub(crate) fn sentinels(&self) -> Option<&Sentinels> {
        match &self.door {
            Door::Sentinels(sentinels) => Some(sentinels),
            _ => None,
        }
    }

    /// TCP, two rounds of TLS, AUTH: four rounds, each of which may take as long as a command. At least time to notice a
    /// lost SYN and try a new socket. (Before each TLS connection redis-rs reads the machine's certificate authorities,
    /// even if the client has its own: 2 ms of this thread, which cannot be bounded here.)
    fn opening(&self) -> Duration {
        self.answer.saturating_mul(4).max(Duration::from_millis(500))
    }
}

/// Sees to it that TLS finds its cryptography. rustls itself finds none where the program's crates bring two
/// providers, and panics.
#[cfg(feature = "tls")]
fn provide_cryptography() {
    if CryptoProvider::get_default().is_none() {
        // Refused if another thread has installed one: that one is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_while_connecting_is_an_ordinary_failure() {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        let dial = Dial::new(&client, Duration::from_millis(50));
        let opened = dial.open(Duration::from_secs(1), async { panic!("no provider of cryptography") });
        let error: RedisResult<()> = opened.await;
        let failure = dial.failure(error.expect_err("it panicked"));
        assert_eq!(failure.kind, StoreErrorKind::Unavailable);
        assert!(format!("{failure:?}").contains("no provider of cryptography"), "{failure:?}");
    }
}
