//! Where connections lead to: [`Endpoint`] for all kinds of deployments, and [`SingleEndpoint`] for one server at a fixed address
//! or name.
//!
//! [`ServerAddress`] is one server: its clients, its clock, and whether it is a primary.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{Client, ConnectionAddr, ConnectionInfo, ProtocolVersion, RedisError, RedisResult, Value};
use tokio::time::Instant;

use crate::store::redis::errors::{is_replica, on_connecting, replica, unexpected};

/// Where the connections of one node lead to. Called while connecting and between commands, never on the path of a command.
pub(crate) trait Endpoint: Send + Sync {
    /// Finds the server for the guard's commands from now on.
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>>;

    /// The server that receives the guard's commands, for an additional connection.
    fn current(&self) -> BoxFuture<'_, RedisResult<Located>> {
        self.locate()
    }

    /// How much time a caller must at least allow [`locate`](Self::locate).
    fn locating(&self) -> Duration {
        Duration::ZERO
    }

    /// Records that the guard's commands go to `server` now.
    fn found(&self, _server: &Arc<ServerAddress>) {}

    /// Records the server of an additional connection. The connections for the guard's commands do not move to it.
    fn glimpsed(&self, _server: &Arc<ServerAddress>) {}

    /// The server, if it is known without a request.
    fn known(&self) -> Option<Arc<ServerAddress>>;

    /// Reads the server's clock. Where the role may change, returns an error unless the server is still a primary.
    fn look<'a>(
        &'a self,
        connection: &'a mut MultiplexedConnection,
    ) -> BoxFuture<'a, RedisResult<Option<TimedReading>>> {
        read_clock(connection, self.may_be_demoted()).boxed()
    }

    /// Whether another server may become the primary while this one answers.
    fn may_be_demoted(&self) -> bool {
        false
    }

    /// Whether another server is the primary now, according to the sentinels. Called from time to time; the sentinels are queried
    /// sooner after a [`doubt`](Self::doubt).
    fn has_been_replaced(&self) -> BoxFuture<'_, bool> {
        ready(false).boxed()
    }

    /// Records that the server has lost its replicas: it may be cut off from the sentinels too.
    fn doubt(&self) {}

    /// Whether this leads to a node of a cluster.
    fn is_node(&self) -> bool {
        false
    }

    /// Whether the node at `address` is no longer part of the cluster. A subscription there would receive no messages.
    fn has_lost(&self, _address: &str) -> bool {
        false
    }

    /// The user name in the client's settings; `None` for the default user, and while the server is not known.
    fn username(&self) -> Option<String> {
        Some(self.known()?.info().redis_settings().username()?.to_owned())
    }

    /// Whether connections may use TLS.
    fn may_want_tls(&self) -> bool {
        self.known().is_some_and(|server| is_by_tls(server.info()))
    }

    /// What to do about a failure to connect, if anything is known to help.
    fn advice(&self, error: &RedisError) -> Option<&'static str> {
        on_connecting(self.known()?.info().addr(), error)
    }

    /// A client of one of the sentinels that watch over the server, if there are any.
    fn sentinel(&self) -> Option<BoxFuture<'_, RedisResult<Client>>> {
        None
    }
}

/// A server to connect to.
pub(crate) struct Located {
    pub(crate) server: Arc<ServerAddress>,
    /// The server's address, if it was chosen among several nodes of a cluster.
    pub(crate) node: Option<String>,
}

impl From<Arc<ServerAddress>> for Located {
    fn from(server: Arc<ServerAddress>) -> Self {
        Self { server, node: None }
    }
}

pub(crate) struct SingleEndpoint {
    server: Arc<ServerAddress>,
    /// Whether the server is a node of a cluster. Its role is not checked then: a replica redirects a command for a key to its master.
    is_node: bool,
}

impl SingleEndpoint {
    pub(crate) fn new(client: &Client, is_node: bool) -> Self {
        Self { server: Arc::new(ServerAddress::new(client)), is_node }
    }
}

impl Endpoint for SingleEndpoint {
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>> {
        ready(Ok(Arc::clone(&self.server).into())).boxed()
    }

    fn known(&self) -> Option<Arc<ServerAddress>> {
        Some(Arc::clone(&self.server))
    }

    fn look<'a>(
        &'a self,
        connection: &'a mut MultiplexedConnection,
    ) -> BoxFuture<'a, RedisResult<Option<TimedReading>>> {
        match self.is_node {
            true => read_clock(connection, false).boxed(),
            false => self.server.look(connection).boxed(),
        }
    }

    fn is_node(&self) -> bool {
        self.is_node
    }
}

/// A server, with a client for each kind of connection.
pub(crate) struct ServerAddress {
    pub(crate) commands: Client,
    /// The client for messages, in RESP2, where messages and replies cannot be confused. Not used if credentials rotate: see
    /// `connector.rs`.
    pub(crate) inbox: Client,
    /// Whether the server has refused ROLE.
    hides_role: AtomicBool,
}

/// The server's clock, read at `at`.
pub(crate) struct TimedReading {
    pub(crate) server_ms: u64,
    pub(crate) at: Instant,
    /// How long the reading took.
    pub(crate) round_trip: Duration,
}

impl ServerAddress {
    pub(crate) fn new(client: &Client) -> Self {
        Self {
            commands: rebuilt(client, None),
            inbox: rebuilt(client, Some(ProtocolVersion::RESP2)),
            hides_role: AtomicBool::new(false),
        }
    }

    /// Reads the server's clock. Returns an error if ROLE says that the server is a replica: it would answer reads for ever.
    /// Without the right to ROLE, only the first write shows that.
    async fn look(&self, connection: &mut MultiplexedConnection) -> RedisResult<Option<TimedReading>> {
        let (answers, role, at) = ask(connection, !self.hides_role.load(Ordering::Relaxed)).await?;
        match role.map_or(Ok(()), is_primary) {
            Err(error) if is_replica(&error) => return Err(error),
            // A second ROLE would be refused again, and fill the server's ACL log. `ERR`: the server does not know ROLE.
            Err(error) if matches!(error.code(), Some("NOPERM" | "ERR")) => {
                self.hides_role.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
        reading(answers, at)
    }

    pub(crate) fn info(&self) -> &ConnectionInfo {
        self.commands.get_connection_info()
    }
}

/// `client`, changed to use sockets that detect a dead peer, and no CLIENT SETINFO.
fn rebuilt(client: &Client, protocol: Option<ProtocolVersion>) -> Client {
    let info = client.get_connection_info().clone();
    let mut tcp = info.tcp_settings().clone().set_nodelay(true);
    // A keepalive that the user has set stays.
    if tcp.keepalive().is_none() {
        let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(2));
        #[cfg(any(target_os = "linux", target_os = "macos", target_os = "windows"))]
        let keepalive = keepalive.with_interval(Duration::from_secs(1)).with_retries(3);
        tcp = tcp.set_keepalive(keepalive);
    }
    // Keepalive is not sent while sent data is unacknowledged; without this bound the kernel retransmits to a dead peer for a
    // quarter of an hour.
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    if tcp.user_timeout().is_none() {
        tcp = tcp.set_user_timeout(Duration::from_secs(2));
    }
    let mut settings = info.redis_settings().clone();
    if settings.lib_name().is_none() {
        // CLIENT SETINFO is not among the rights we document; a refusal would fill the server's ACL log.
        settings = settings.set_skip_set_lib_name();
    }
    if let Some(protocol) = protocol {
        settings = settings.set_protocol(protocol);
    }
    let info = info.set_tcp_settings(tcp).set_redis_settings(settings);
    Client::open(info).unwrap_or_else(|_| client.clone())
}

/// Reads the server's clock, together with a PING that shows whether it serves data: TIME alone is answered while a dump
/// is loading, and by a replica that has lost its primary.
///
/// `None` if TIME is refused: then there is no common clock, but the connection stays open. With `role`, returns an error
/// unless the server is a primary.
pub(crate) async fn read_clock(
    connection: &mut MultiplexedConnection,
    role: bool,
) -> RedisResult<Option<TimedReading>> {
    let (answers, role, sent) = ask(connection, role).await?;
    role.map_or(Ok(()), is_primary)?;
    reading(answers, sent)
}

/// Sends PING, TIME and, if `role`, ROLE. Returns the answers to PING and TIME, that to ROLE, and when they were sent and how long
/// they took.
async fn ask(
    connection: &mut MultiplexedConnection,
    role: bool,
) -> RedisResult<(Vec<Value>, Option<Value>, (Instant, Duration))> {
    let mut probe = redis::pipe();
    probe.cmd("TIME");
    if role {
        probe.cmd("ROLE");
    }
    let sent = Instant::now();
    // PING is sent separately: a server that refuses a connection gives the reason in its first answer, and closes.
    let (ping, mut first) = (redis::cmd("PING"), connection.clone());
    let (ping, answers) = tokio::join!(
        first.send_packed_command(&ping),
        connection.send_packed_commands(&probe, 0, probe.len())
    );
    let ping = ping?;
    let mut answers = match (answers, &ping) {
        (Err(_), Value::ServerError(refusal)) => return Err(refusal.clone().into()),
        (answers, _) => answers?,
    };
    let sent = (sent, sent.elapsed());
    let role = if role { answers.pop() } else { None };
    answers.insert(0, ping);
    Ok((answers, role, sent))
}

/// The reading of commands that were sent at this moment and took so long.
pub(crate) fn reading(
    answers: Vec<Value>,
    (sent, round_trip): (Instant, Duration),
) -> RedisResult<Option<TimedReading>> {
    let [ping, time] = <[Value; 2]>::try_from(answers).map_err(|_| unexpected())?;
    match ping.extract_error() {
        Err(error) if error.code() != Some("NOPERM") => return Err(error),
        _ => {}
    }
    let server_ms = match time.extract_error() {
        Ok(time) => {
            let (secs, micros): (u64, u64) = redis::from_redis_value(time)?;
            secs.saturating_mul(1000).saturating_add(micros / 1000)
        }
        Err(error) if error.code() == Some("NOPERM") => return Ok(None),
        Err(error) => return Err(error),
    };
    // The server is assumed to have answered after half of the round trip.
    Ok(Some(TimedReading { server_ms, at: sent + round_trip / 2, round_trip }))
}

/// Reads the answer to ROLE. Returns an error unless the server is a primary.
pub(crate) fn is_primary(role: Value) -> RedisResult<()> {
    let parts: Vec<Value> = redis::from_redis_value(role.extract_error()?)?;
    let role = parts.first().and_then(|role| redis::from_redis_value_ref::<String>(role).ok());
    match role.as_deref() {
        Some("master") => Ok(()),
        Some("slave") => Err(replica()),
        _ => Err(unexpected()),
    }
}

/// The time of this host's clock, in milliseconds.
pub(crate) fn host_ms() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64)
}

/// Whether connections to this address use TLS.
pub(crate) fn is_by_tls(info: &ConnectionInfo) -> bool {
    matches!(info.addr(), ConnectionAddr::TcpTls { .. })
}
