//! Opens connections to the server for commands and for messages, decides how often they are checked, and counts the
//! outages: how many there were, for how long, and how many loads ran without the store meanwhile.
//!
//! A connection for messages uses RESP2 if the credentials do not change, because there messages and replies cannot be
//! confused. While a RESP2 connection is subscribed it accepts no AUTH, so with credentials that rotate it would have to be
//! replaced for each of them, and messages would be lost in between: with such credentials it uses RESP3, in which messages
//! are pushes.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::{join_all, select_ok};
use futures_util::{FutureExt as _, StreamExt as _};
use redis::aio::{MultiplexedConnection, PubSubSink, PubSubStream};
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::SockRef;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, Msg, ProtocolVersion, PushInfo,
    PushKind, RedisConnectionInfo, RedisError, RedisResult, Value,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::observe::log;
use crate::observe::panic_text;
use crate::store::ConnectionSettings;
use crate::store::redis::endpoint::{
    Endpoint, Located, ServerAddress, SingleEndpoint, TimedReading, read_clock,
};
use crate::store::redis::errors::{advised, bounded, is_about_room, is_login, reason, unquoted};
use crate::store::redis::login::{Issue, Login, OWN, is_not_provided};
use crate::store::{StoreError, StoreErrorKind};

/// How often an unused connection is checked. The server's `timeout` or a load balancer closes idle connections, mostly
/// after a longer time; the check notices that before the connection is needed.
const IDLE: Duration = Duration::from_secs(10);

/// The longest time between two readings of the server's clock. Each reading also checks that the server is still a
/// primary.
const CLOCK_PERIOD: Duration = Duration::from_secs(60);

/// How often the role of a server that may be demoted is checked. A primary that a sentinel demotes closes its
/// connections; a primary that an operator demotes answers reads for ever.
const ROLE_PERIOD: Duration = Duration::from_secs(1);

/// Opens connections to one endpoint. Every call into `redis` that may wait has a time limit.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) endpoint: Arc<dyn Endpoint>,
    /// The deadline of one command; the other time limits are derived from it.
    pub(crate) answer: Duration,
    /// How many connections to open for commands.
    pub(crate) connections: usize,
    /// How long a connection may be without an answer before it is checked.
    pub(crate) idle: Duration,
    /// How long a connection may be in use without being checked.
    pub(crate) clock: Duration,
    pub(crate) outages: Arc<Outages>,
    pub(crate) login: Login,
}

/// A connection for the guard's commands.
pub(crate) struct OpenedConnection {
    pub(crate) connection: MultiplexedConnection,
    /// `None` if redis-rs has spawned it.
    pub(crate) driver: Option<Driver>,
    pub(crate) reading: Option<TimedReading>,
    /// The number of the credentials with which the connection is logged in.
    pub(crate) login: u64,
}

impl Connector {
    /// Leads to one server.
    pub(crate) fn new(client: &Client, settings: impl Into<ConnectionSettings>) -> Self {
        Self::to(Arc::new(SingleEndpoint::new(client, false)), settings)
    }

    pub(crate) fn to(endpoint: Arc<dyn Endpoint>, settings: impl Into<ConnectionSettings>) -> Self {
        let settings = settings.into();
        Self {
            endpoint,
            answer: settings.command_timeout,
            connections: settings.connections,
            idle: IDLE,
            clock: CLOCK_PERIOD,
            outages: Arc::default(),
            login: Login::default(),
        }
    }

    /// Returns a copy with these credentials.
    pub(crate) fn logging_in(self, login: &Login) -> Self {
        Self { login: login.clone(), ..self }
    }

    /// Connects for the guard's commands, and checks that the server answers PING and TIME. Only for the reconnect task: with
    /// sentinels, it connects to the server that they name now, and later additional connections go to the same server.
    pub(crate) async fn anew(&self) -> RedisResult<Vec<OpenedConnection>> {
        let Located { server, .. } = self.open(self.locating(), self.endpoint.locate()).await?;
        let began = Instant::now();
        let first = self.probed(&server, None).await?;
        self.endpoint.found(&server);
        Ok(self.with_further(first, &server, began.elapsed() * 2 + self.probing()).await)
    }

    /// Connects and checks that the server answers: it accepts a connection for which it has no room, and closes it then.
    async fn probed(
        &self,
        server: &ServerAddress,
        address: Option<SocketAddr>,
    ) -> RedisResult<OpenedConnection> {
        let is_one_of_several = self.connections > 1;
        let open =
            async |client: &Client, config| Driver::connect(client, config, address, is_one_of_several).await;
        let ((mut connection, driver), login) = self.connect(server, open).await?;
        let reading = bounded(self.probing(), self.endpoint.look(&mut connection)).await?;
        Ok(OpenedConnection { connection, driver, reading, login })
    }

    /// Opens the further connections, all at once and each in this time, to the address of the first. If some cannot be opened, the
    /// commands share the others.
    async fn with_further(
        &self,
        first: OpenedConnection,
        server: &ServerAddress,
        within: Duration,
    ) -> Vec<OpenedConnection> {
        // Where redis-rs has opened the first, its address is not known.
        let Some(Driver { address, .. }) = first.driver else { return vec![first] };
        let mut connections = vec![first];
        let opening = (1..self.connections).map(|_| bounded(within, self.probed(server, address)));
        let mut failed = None;
        for opened in join_all(opening).await {
            match opened {
                Ok(opened) => connections.push(opened),
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            let (reason, open) = (self.text_of(&self.failure(error)), connections.len());
            tracing::warn!(
                target: log::REDIS, %reason, open, of = self.connections, "can not open all connections to redis"
            );
        }
        connections
    }

    /// Opens a separate connection for commands, to the server that the guard's connection leads to.
    pub(crate) async fn commands(&self) -> RedisResult<(MultiplexedConnection, Option<TimedReading>)> {
        let Located { server, .. } = self.open(self.locating(), self.endpoint.current()).await?;
        self.endpoint.glimpsed(&server);
        let open = async |client: &Client, config| {
            client.get_multiplexed_async_connection_with_config(&config).await
        };
        let (mut connection, _) = self.connect(&server, open).await?;
        let probe = read_clock(&mut connection, self.endpoint.may_be_demoted());
        let reading = bounded(self.probing(), probe).await?;
        Ok((connection, reading))
    }

    async fn connect<T>(
        &self,
        server: &ServerAddress,
        open: impl AsyncFnOnce(&Client, AsyncConnectionConfig) -> RedisResult<T>,
    ) -> RedisResult<(T, u64)> {
        let issue = self.login.present().await?;
        let rotating = issue.as_ref().map(|issue| issue.client_of(&server.commands, None)).transpose()?;
        let client = rotating.as_ref().unwrap_or(&server.commands);
        // Every caller limits the time of its command, because it knows the rest of its budget.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let opened = self.open(self.opening(), open(client, config)).await;
        let opened = self.explained(client, opened).await;
        self.logged_in(issue.as_ref(), opened)
    }

    /// If a login is refused because the server accepts no more connections, returns that reason instead of the login's error:
    /// such a server refuses any command, and redis-rs hides its answer to AUTH.
    async fn explained<T>(&self, client: &Client, opened: RedisResult<T>) -> RedisResult<T> {
        match opened {
            Err(error) if is_login(&error) => Err(self.is_full(client).await.unwrap_or(error)),
            opened => opened,
        }
    }

    /// The server's refusal, if it accepts no more connections: then it also refuses a connection that does not log in.
    async fn is_full(&self, client: &Client) -> Option<RedisError> {
        let settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        let info = client.get_connection_info().clone().set_redis_settings(settings);
        let client = Client::open(info).ok()?;
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let pinged = async {
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            connection.send_packed_command(&redis::cmd("PING")).await
        };
        let refusal = self.open(self.opening(), pinged).await.and_then(Value::extract_error).err()?;
        is_about_room(&refusal).then_some(refusal)
    }

    /// Connects for messages, to the server of the latest connection for commands.
    pub(crate) async fn inbox(&self) -> RedisResult<Inbound> {
        let Located { server, node } = self.open(self.locating(), self.endpoint.current()).await?;
        let Some(issue) = self.login.present().await? else {
            let opened = self.open(self.opening(), server.inbox.get_async_pubsub()).await;
            let (sink, messages) = self.explained(&server.inbox, opened).await?.split();
            let (sink, messages) = (MessageSink::Resp2(sink), MessageStream::Resp2(messages));
            return Ok(Inbound { sink, messages, at: node, login: OWN });
        };
        let client = issue.client_of(&server.commands, Some(ProtocolVersion::RESP3))?;
        let opened = self.open(self.opening(), open_in_resp3(&client)).await;
        let opened = self.explained(&client, opened).await;
        let ((sink, messages), login) = self.logged_in(Some(&issue), opened)?;
        Ok(Inbound { sink, messages, at: node, login })
    }

    /// Returns the connection with the number of the credentials with which it was opened. Records it if the server has
    /// refused these credentials.
    fn logged_in<T>(&self, issue: Option<&Issue>, opened: RedisResult<T>) -> RedisResult<(T, u64)> {
        let number = issue.map_or(OWN, |issue| issue.number);
        match opened {
            Ok(opened) => Ok((opened, number)),
            Err(error) => {
                if is_login(&error) {
                    self.login.refused(number);
                }
                Err(error)
            }
        }
    }

    /// Logs an open connection in again; `sending` sends the command of [`Issue::auth`]. Returns whether the server has
    /// accepted the credentials; if it has refused them, the connection stays logged in as before.
    pub(crate) async fn log_in(
        &self,
        number: u64,
        sending: impl Future<Output = RedisResult<Value>>,
    ) -> RedisResult<bool> {
        match bounded(self.probing(), sending).await.and_then(Value::extract_error) {
            Ok(_) => Ok(true),
            Err(error) if error.code().is_some() => {
                self.login.refused(number);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Logs an open connection for messages in again; until now it has the credentials of number `login`. Returns the number
    /// of the credentials that it has then.
    pub(crate) async fn log_in_for_messages(
        &self,
        sink: &mut MessageSink,
        login: u64,
        issue: &Issue,
    ) -> RedisResult<u64> {
        let auth = issue.auth();
        match self.log_in(issue.number, sink.auth(&auth)).await {
            Ok(true) => Ok(issue.number),
            Ok(false) => Ok(login),
            // AUTH is sent again later; a ping finds out whether the connection is dead.
            Err(error) if error.is_timeout() => Ok(login),
            Err(error) => Err(error),
        }
    }

    /// Whether a connection for messages must be replaced, because messages may no longer reach it. In a cluster it must if its node
    /// `at` has left the cluster; else if the commands use another connection (of generation `latest`) than when this one was opened
    /// (of `generation`; 0 means that there was none yet).
    pub(crate) fn has_left(&self, at: Option<&str>, generation: u64, latest: u64) -> bool {
        match at {
            Some(node) => self.endpoint.has_lost(node),
            // The first connection for commands is opened beside this one, to the same server. A later one may lead to
            // another server, if the name resolves to a new primary; the old one would answer pings for ever.
            None => generation != 0 && latest != generation,
        }
    }

    /// How often a healthy connection is checked.
    pub(crate) fn look_period(&self) -> Duration {
        if self.endpoint.may_be_demoted() { ROLE_PERIOD } else { self.idle }
    }

    /// The text of an event about an error: what to do about it and what happened, with the node's address in a cluster.
    pub(crate) fn text_of(&self, error: &StoreError) -> String {
        match self.address().filter(|_| self.endpoint.is_node()) {
            Some(address) => format!("{address}: {}", reason(error)),
            None => reason(error),
        }
    }

    /// Converts the error of a failed attempt to connect, and adds advice on what to do about it.
    pub(crate) fn failure(&self, error: RedisError) -> StoreError {
        let advice = self.advice(&error);
        StoreError { kind: StoreErrorKind::Unavailable, source: Some(advised(advice, unquoted(error))) }
    }

    /// Advice on what to do about the error, if there is any.
    pub(crate) fn advice(&self, error: &RedisError) -> Option<&'static str> {
        if is_not_provided(error) {
            return Some("the provider of credentials fails: see its error; it is asked again by itself");
        }
        if self.login.rotates() && is_login(error) {
            return Some(
                "the server refuses the credentials that the provider gave: see that it knows this user, and takes such tokens",
            );
        }
        self.endpoint.advice(error)
    }

    /// Opens a connection within `limit`, and converts a panic of the client into an error. redis-rs panics over TLS without
    /// a provider of cryptography; that would end the reconnect task, and each request would start another.
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

    /// The user name of this node's connections; `None` for the default user, and while the server is not known.
    pub(crate) fn user(&self) -> Option<String> {
        self.login.user().or_else(|| self.endpoint.username())
    }

    /// The database; 0 while the server is not known.
    pub(crate) fn db(&self) -> i64 {
        self.endpoint.known().map_or(0, |server| server.info().redis_settings().db())
    }

    /// The server's address, if it is known.
    pub(crate) fn address(&self) -> Option<String> {
        Some(self.endpoint.known()?.info().addr().to_string())
    }

    /// How long a check may take. A server that is slower than the deadline of a command counts as down: all its answers
    /// would come too late, and every request would wait for its whole deadline. The minimum is for deadlines so short that
    /// they depend on a timer's tick and a busy worker thread.
    fn probing(&self) -> Duration {
        self.answer.max(Duration::from_millis(20))
    }

    fn locating(&self) -> Duration {
        self.opening().max(self.endpoint.locating())
    }

    /// How long it may take to open a connection: TCP, two round trips of TLS, AUTH are four round trips, each of which may
    /// take as long as a command. At least long enough to notice a lost SYN and open a new socket. (Before each TLS
    /// connection redis-rs reads the machine's certificate authorities, even if the client has its own: 2 ms of this thread,
    /// which cannot be limited here.)
    fn opening(&self) -> Duration {
        self.answer.saturating_mul(4).max(Duration::from_millis(500))
    }
}

/// The task that drives a connection of [`Driver::connect`]. Ends when this is dropped.
pub(crate) struct Driver {
    task: AbortHandle,
    /// The server's address; `None` for a Unix socket.
    address: Option<SocketAddr>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Driver {
    /// Connects to `address`, or else to the client's, and drives the connection in a task of this runtime so that its writes carry many
    /// commands ([`BatchedStream`]). Without a driver, redis-rs has opened the connection and drives it: over TLS, and for a single
    /// connection on a runtime of one thread, which runs tasks in the order in which they were woken.
    async fn connect(
        client: &Client,
        config: AsyncConnectionConfig,
        address: Option<SocketAddr>,
        is_one_of_several: bool,
    ) -> RedisResult<(MultiplexedConnection, Option<Self>)> {
        let info = client.get_connection_info();
        let is_threaded = Handle::current().runtime_flavor() != RuntimeFlavor::CurrentThread;
        let has_driver = is_threaded || is_one_of_several;
        match info.addr() {
            ConnectionAddr::Tcp(host, port) if has_driver => {
                let addresses = match address {
                    Some(address) => vec![address],
                    None => lookup_host((host.as_str(), *port)).await?.collect(),
                };
                let stream = connect_tcp(addresses, info.tcp_settings()).await?;
                let address = stream.peer_addr().ok();
                Self::drive(info, (stream, address), config).await
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) if has_driver => {
                Self::drive(info, (UnixStream::connect(path).await?, None), config).await
            }
            _ => Ok((client.get_multiplexed_async_connection_with_config(&config).await?, None)),
        }
    }

    async fn drive(
        info: &ConnectionInfo,
        (stream, address): (impl AsyncRead + AsyncWrite + Unpin + Send + 'static, Option<SocketAddr>),
        config: AsyncConnectionConfig,
    ) -> RedisResult<(MultiplexedConnection, Option<Self>)> {
        let stream = BatchedStream { stream, has_read: false };
        let (connection, driver) =
            MultiplexedConnection::new_with_config(info.redis_settings(), stream, config).await?;
        Ok((connection, Some(Self { task: tokio::spawn(driver).abort_handle(), address })))
    }
}

/// Connects to the first of these addresses that accepts.
async fn connect_tcp(addresses: Vec<SocketAddr>, settings: &TcpSettings) -> io::Result<TcpStream> {
    if addresses.is_empty() {
        return Err(io::Error::other("the name of the host has no address"));
    }
    let attempts = addresses.into_iter().map(|address| Box::pin(TcpStream::connect(address)));
    let (stream, _) = select_ok(attempts).await?;
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    socket.set_tcp_user_timeout(settings.user_timeout())?;
    Ok(stream)
}

/// A stream to a server. When the driver has read replies from it, the callers of these replies run before the driver runs again.
///
/// Tokio runs the task next that a running task wakes. So the first of these callers would wake the driver by its next command, and the
/// driver would write that one command, and so on for each of them. Here the driver is already waiting for its turn, behind all of them: it
/// wakes itself when it has read all that there is.
struct BatchedStream<S> {
    stream: S,
    /// Whether the driver has read anything since it last woke itself.
    has_read: bool,
}

impl<S: AsyncRead + Unpin> AsyncRead for BatchedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if polled.is_ready() {
            self.has_read = true;
        } else if std::mem::take(&mut self.has_read) {
            cx.waker().wake_by_ref();
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BatchedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Installs a provider of cryptography for TLS if there is none. rustls selects none by itself if the program's crates
/// contain two providers, and panics. Without the feature `tls`, TLS connections use the program's provider, or fail.
fn provide_cryptography() {
    #[cfg(feature = "tls")]
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Fails if another thread has installed a provider meanwhile, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

/// A connection for messages, and the server that it leads to.
pub(crate) struct Inbound {
    pub(crate) sink: MessageSink,
    pub(crate) messages: MessageStream,
    /// In a cluster, the address of the node that the connection leads to.
    pub(crate) at: Option<String>,
    /// The number of the credentials with which the connection is logged in.
    pub(crate) login: u64,
}

/// The side that sends commands.
#[derive(Clone)]
pub(crate) enum MessageSink {
    Resp2(PubSubSink),
    Resp3(MultiplexedConnection),
}

/// The side that receives messages.
pub(crate) enum MessageStream {
    Resp2(PubSubStream),
    Resp3(UnboundedReceiver<PushInfo>),
}

/// Opens a connection for messages in RESP3, which the client must speak.
async fn open_in_resp3(client: &Client) -> RedisResult<(MessageSink, MessageStream)> {
    let (pushes, stream) = unbounded_channel();
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    let config = config.set_push_sender(pushes);
    let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    Ok((MessageSink::Resp3(connection), MessageStream::Resp3(stream)))
}

impl MessageSink {
    pub(crate) async fn subscribe(&mut self, channels: impl redis::ToRedisArgs) -> RedisResult<()> {
        match self {
            Self::Resp2(sink) => sink.subscribe(channels).await,
            Self::Resp3(connection) => connection.subscribe(channels).await,
        }
    }

    pub(crate) async fn unsubscribe(&mut self, channels: impl redis::ToRedisArgs) -> RedisResult<()> {
        match self {
            Self::Resp2(sink) => sink.unsubscribe(channels).await,
            Self::Resp3(connection) => connection.unsubscribe(channels).await,
        }
    }

    pub(crate) async fn ping(&mut self) -> RedisResult<()> {
        match self {
            Self::Resp2(sink) => sink.ping::<Value>().await.map(drop),
            Self::Resp3(connection) => redis::cmd("PING").query_async(connection).await,
        }
    }

    /// Sends AUTH. Only for a connection with credentials that rotate.
    async fn auth(&mut self, auth: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Resp2(_) => {
                Err(RedisError::from((redis::ErrorKind::Client, "no AUTH while subscribed in RESP2")))
            }
            Self::Resp3(connection) => connection.send_packed_command(auth).await,
        }
    }
}

impl MessageStream {
    /// The next message; `None` when the connection has ended. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Msg> {
        match self {
            Self::Resp2(stream) => stream.next().await,
            Self::Resp3(pushes) => loop {
                let push = pushes.recv().await?;
                if push.kind == PushKind::Disconnection {
                    return None;
                }
                // Confirmations of subscriptions are pushes, too.
                if let Some(message) = Msg::from_push_info(push) {
                    return Some(message);
                }
            },
        }
    }
}

/// The outages of the connections for commands; those of all masters of a cluster share one.
#[derive(Debug, Default)]
pub(crate) struct Outages {
    begun: AtomicU64,
    loads: AtomicU64,
}

impl Outages {
    /// How many times, since the start, a connection was lost, or could not be opened without an outage in progress.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Counts a load that runs without the store, for the log at the end of the outage.
    pub(crate) fn load(&self) {
        self.loads.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the loss of a connection; begins an outage unless one is in progress. A connection that broke before it was stable has
    /// not ended its outage.
    pub(super) fn begin(&self, outage: &mut Option<Outage>) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let began = || Outage { since: Instant::now(), loads_before: self.loads.load(Ordering::Relaxed) };
        outage.get_or_insert_with(began);
    }
}

/// An outage of one connection.
#[derive(Debug)]
pub(super) struct Outage {
    since: Instant,
    loads_before: u64,
}

impl Outage {
    /// Logs that the connection that was opened at `back` has ended the outage.
    pub(super) fn log_end(&self, outages: &Outages, back: Instant, node: Option<String>) {
        let loads = outages.loads.load(Ordering::Relaxed).saturating_sub(self.loads_before);
        let took = back.saturating_duration_since(self.since).as_secs_f64();
        tracing::info!(target: log::REDIS, node, "redis is back after {took:.1} s; {loads} loads went without it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_while_connecting_is_an_ordinary_failure() {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        let connector = Connector::new(&client, Duration::from_millis(50));
        let opened = connector.open(Duration::from_secs(1), async { panic!("no provider of cryptography") });
        let error: RedisResult<()> = opened.await;
        let failure = connector.failure(error.expect_err("it panicked"));
        assert_eq!(failure.kind, StoreErrorKind::Unavailable);
        assert!(format!("{failure:?}").contains("no provider of cryptography"), "{failure:?}");
    }
}
