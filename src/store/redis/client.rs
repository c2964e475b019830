//! How connections to the server are opened, and how often.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
#[cfg(feature = "tls")]
use redis::ConnectionAddr;
use redis::aio::{MultiplexedConnection, PubSub};
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{AsyncConnectionConfig, Client, ProtocolVersion, RedisError, RedisResult, Value};
#[cfg(feature = "tls")]
use rustls::crypto::CryptoProvider;
use tokio::time::{Instant, sleep, timeout};

use super::advice::{advised, on_connecting};
use crate::error::panic_text;
use crate::store::{StoreError, StoreErrorKind};

/// A connection that broke sooner than this was never really there.
pub(super) const STABLE: Duration = Duration::from_secs(1);

/// How many commands wait to be written at once; more wait for a place. A burst of look-ups is then sent in
/// parts, and this process makes the second while the server answers the first. In one piece (redis-rs's own 50
/// are one for most bursts) both take turns at being idle, which cost a third of the throughput of 64 callers.
const BURST: usize = 32;

/// Opens connections for one node. Nothing in `redis` that may wait is called without a bound.
#[derive(Clone)]
pub(super) struct Dial {
    commands: Client,
    inbox: Client,
    /// The deadline of one command; the measure of all others.
    pub(super) answer: Duration,
}

/// The server's clock, read at `at`.
pub(super) struct Reading {
    pub(super) server_ms: u64,
    pub(super) at: Instant,
}

impl Dial {
    pub(super) fn new(client: Client, answer: Duration) -> Self {
        let inbox = rebuilt(&client, Some(ProtocolVersion::RESP2));
        Self { commands: rebuilt(&client, None), inbox, answer }
    }

    /// Connects for commands, and makes sure that the server answers some.
    pub(super) async fn commands(&self) -> RedisResult<(MultiplexedConnection, Option<Reading>)> {
        // Every command is timed by its caller, who knows how much is left of its budget.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(None)
            .set_pipeline_buffer_size(BURST);
        let opening = self.commands.get_multiplexed_async_connection_with_config(&config);
        let mut connection = self.open(opening).await?;
        // A server which is slower than the deadline of a command is as good as down: its answers
        // would all come too late, and every request would pay the deadline to learn it. The floor
        // is for deadlines so short that a timer's tick and a busy worker thread decide them.
        let probe = self.answer.max(Duration::from_millis(20));
        let reading = bounded(probe, read_clock(&mut connection)).await?;
        Ok((connection, reading))
    }

    /// Connects for messages. Always RESP2, where messages and answers can not be confused.
    pub(super) async fn inbox(&self) -> RedisResult<PubSub> {
        self.open(self.inbox.get_async_pubsub()).await
    }

    /// What a failed attempt to connect means, and what to do about it.
    pub(super) fn failure(&self, error: RedisError) -> StoreError {
        let advice = on_connecting(self.commands.get_connection_info().addr(), &error);
        StoreError { kind: StoreErrorKind::Unavailable, source: Some(advised(advice, error)) }
    }

    /// Opens a connection, within its bound and whatever happens: a panic of the client's, as over TLS without a
    /// provider of cryptography, would end the task that connects, and each request would start another.
    async fn open<T>(&self, opening: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        #[cfg(feature = "tls")]
        provide_cryptography(self.commands.get_connection_info().addr());
        let caught = AssertUnwindSafe(bounded(self.opening(), opening)).catch_unwind();
        caught.await.unwrap_or_else(|panic| {
            let panic = panic_text(&*panic).as_ref().to_owned();
            Err(RedisError::from((redis::ErrorKind::Client, "connecting panicked", panic)))
        })
    }

    /// Who this node is to the server; `None` for the user without a name.
    pub(super) fn user(&self) -> Option<&str> {
        self.commands.get_connection_info().redis_settings().username()
    }

    /// TCP, two rounds of TLS, AUTH: four rounds, each of which may take as long as a command; at
    /// least time for a lost SYN to be noticed and a new socket to be tried instead. (Before each TLS
    /// connection redis-rs reads the machine's authorities, also where the client has its own: 2 ms of
    /// this thread, which nothing here can bound.)
    fn opening(&self) -> Duration {
        self.answer.saturating_mul(4).max(Duration::from_millis(500))
    }
}

/// Sees to it that TLS finds its cryptography. rustls itself finds none where the program's crates bring two
/// providers, and panics.
#[cfg(feature = "tls")]
fn provide_cryptography(addr: &ConnectionAddr) {
    if matches!(addr, ConnectionAddr::TcpTls { .. }) && CryptoProvider::get_default().is_none() {
        // Refused if somebody was faster: theirs is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

/// `client` with a socket that notices a dead peer, and without CLIENT SETINFO.
fn rebuilt(client: &Client, protocol: Option<ProtocolVersion>) -> Client {
    let info = client.get_connection_info().clone();
    let mut tcp = info.tcp_settings().clone().set_nodelay(true);
    // What the user has chosen for the socket stays.
    if tcp.keepalive().is_none() {
        let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(2));
        #[cfg(any(target_os = "linux", target_os = "macos", target_os = "windows"))]
        let keepalive = keepalive.with_interval(Duration::from_secs(1)).with_retries(3);
        tcp = tcp.set_keepalive(keepalive);
    }
    // Keepalive does not speak while data is in flight; without this bound the kernel retransmits
    // to a dead peer for a quarter of an hour.
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    if tcp.user_timeout().is_none() {
        tcp = tcp.set_user_timeout(Duration::from_secs(2));
    }
    let mut settings = info.redis_settings().clone();
    if settings.lib_name().is_none() {
        // Not among the rights we document; refused, it would fill the server's ACL log.
        settings = settings.set_skip_set_lib_name();
    }
    if let Some(protocol) = protocol {
        settings = settings.set_protocol(protocol);
    }
    let info = info.set_tcp_settings(tcp).set_redis_settings(settings);
    Client::open(info).unwrap_or_else(|_| client.clone())
}

/// Reads the server's clock, by way of a PING that shows whether it serves data at all: TIME alone
/// is answered while a dump is loading, and by a replica that has lost its primary.
///
/// `None` if TIME is refused: that costs the common clock, not the connection.
pub(super) async fn read_clock(connection: &mut MultiplexedConnection) -> RedisResult<Option<Reading>> {
    let mut probe = redis::pipe();
    probe.cmd("PING").cmd("TIME");
    let sent = Instant::now();
    let answers = connection.send_packed_commands(&probe, 0, 2).await?;
    // Half of the round trip lies behind the server's answer.
    let at = sent + sent.elapsed() / 2;
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
    Ok(Some(Reading { server_ms, at }))
}

/// `work`, or the I/O error of a time-out.
pub(super) async fn bounded<T>(
    limit: Duration,
    work: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    match timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))),
    }
}

/// For an answer that no Redis gives.
pub(super) fn unexpected() -> RedisError {
    RedisError::from((redis::ErrorKind::UnexpectedReturnType, "unexpected answer"))
}

/// The pauses between attempts to connect.
///
/// Full jitter, from the process's own random state: a fleet that lost its server at one moment
/// must not return to it at one moment.
pub(super) struct Backoff {
    cap: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(20);
    const LAST: Duration = Duration::from_millis(500);

    pub(super) fn new() -> Self {
        Self { cap: Self::FIRST }
    }

    pub(super) async fn pause(&mut self) {
        let pause = self.cap.mul_f64(fastrand::f64());
        self.cap = (self.cap * 2).min(Self::LAST);
        sleep(pause).await;
    }

    /// Starts over, if the connection lived for a while: one that breaks again and again is not
    /// reconnected at full speed.
    pub(super) fn lived(&mut self, lifetime: Duration) {
        if lifetime >= STABLE {
            self.cap = Self::FIRST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_while_connecting_is_a_failure_like_others() {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        let dial = Dial::new(client, Duration::from_millis(50));
        let opened = dial.open(async { panic!("no provider of cryptography") });
        let error: RedisResult<()> = opened.await;
        let failure = dial.failure(error.expect_err("it panicked"));
        assert_eq!(failure.kind, StoreErrorKind::Unavailable);
        assert!(format!("{failure:?}").contains("no provider of cryptography"), "{failure:?}");
    }
}
