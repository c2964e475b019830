//! Errors of servers and connections: classifies them by their effect on a command, and adds advice for the operator. Also
//! creates this crate's own errors, for an unexpected answer or for none.
//!
//! The advice is about a server that cannot be reached, or refuses this user. Most such failures are mistakes of the
//! set-up, and the symptoms (a closed socket, silence, a TLS alert) do not show an operator what to change.
//!
//! [`OutageLog`] records which reasons of one outage were logged, so that each is logged once. The first reason is seldom
//! the cause: after a password change, the first error is a closed connection, and only the next attempt to connect gets
//! the reason.
//!
//! [`RefusalLog`] decides which refusals are logged: each once while it lasts, and at most once a second if it comes and goes. A refusal
//! that still lasts after a minute is logged again, because its cause may be another.

use std::borrow::Cow;
use std::error::Error;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fmt, io};

use redis::{Arg, Cmd, ConnectionAddr, ErrorKind, RedisError, RedisResult};
use tokio::time::{Instant, timeout};

use crate::store::redis::scripts::sha1_hex;
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::lock;

/// A failure and the advice about it; the failure is its source.
#[derive(Debug)]
struct AdvisedError {
    advice: &'static str,
    cause: Cause,
}

pub(crate) type Cause = Arc<dyn Error + Send + Sync>;

impl fmt::Display for AdvisedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.advice)
    }
}

impl Error for AdvisedError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.cause)
    }
}

/// What to do about an error while connecting to `addr`; `None` if nothing is known to help.
pub(crate) fn on_connecting(addr: &ConnectionAddr, error: &RedisError) -> Option<&'static str> {
    if is_replica(error) {
        return Some("this server is not a primary: have the name or the address lead to the one that is");
    }
    on_refusal(error).or_else(|| match addr {
        ConnectionAddr::TcpTls { .. } => on_tls(error),
        ConnectionAddr::Unix(_) => on_unix(error),
        _ => on_tcp(error),
    })
}

/// Whether the server does not know this user, or knows another password.
pub(crate) fn is_login(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed || matches!(error.code(), Some("WRONGPASS" | "NOAUTH"))
}

/// What to do about a sentinel that refuses this client.
pub(crate) const THEIR_PASSWORD: &str = "the sentinels refuse this client: they have users and passwords of their own, which the \
     SentinelClientBuilder is given by set_client_to_sentinel_username and set_client_to_sentinel_password";

/// The advice for a server that takes no more connections.
const FULL: &str = "the server has as many connections as it takes (its setting `maxclients`): raise that limit, or close connections";

/// The error for a value that is longer than the server takes.
pub(crate) const TOO_LONG: &str =
    "a value is longer than the server takes (its setting `proto-max-bulk-len`), or broke the connection";

/// The advice for a value that is longer than the server takes.
const RAISE_OR_CACHE_LESS: &str = "a value is longer than the server takes: raise its setting `proto-max-bulk-len`, or lower the policy's \
     max_body below it; it is not stored, and for a while nothing as long is sent";

/// Whether the server accepts no more connections. It answers the first command of a new connection with this error, and closes it.
pub(crate) fn is_about_room(error: &RedisError) -> bool {
    error.to_string().contains("max number of clients")
}

/// What to do about the server's refusal of a user or a command.
pub(crate) fn on_refusal(error: &RedisError) -> Option<&'static str> {
    if error.to_string().contains("proto-max-bulk-len") || is_protocol(error) {
        return Some(RAISE_OR_CACHE_LESS);
    }
    if is_about_room(error) {
        return Some(FULL);
    }
    // redis-rs hides the server's answer to AUTH.
    if error.kind() == ErrorKind::AuthenticationFailed || error.code() == Some("WRONGPASS") {
        return Some("the server refuses this user name and password: put the present ones into the URL");
    }
    match error.code()? {
        "MOVED" | "ASK" | "CROSSSLOT" => Some(
            "this is a node of a Redis Cluster: give the guard a redis::cluster::ClusterClient (feature `cluster`)",
        ),
        "CLUSTERDOWN" => Some(
            "slots of this cluster are served by no node, and by default it takes no commands then: see redis-cli --cluster check",
        ),
        "NOAUTH" => {
            Some("the server wants a password: put it into the URL, as in redis://user:password@host")
        }
        "NOPERM" => Some(
            "this user may not do what the guard does: give it the rights that docs/redis.md lists; doctor() names \
             those that are missing",
        ),
        _ => on_words(&error.to_string().to_lowercase()),
    }
}

/// Advice about a refusal whose code says too little, by the text of the error.
fn on_words(text: &str) -> Option<&'static str> {
    if text.contains("cluster support disabled") {
        return Some("this server is not part of a cluster: give the guard a redis::Client");
    }
    if text.contains("refused to switch database") {
        return Some(
            "this database can not be had: the server needs that many, and the user the right +select",
        );
    }
    // The error for an unknown command inside a script does not name the command. Redis answers `Unknown Redis command called from
    // script`; Redict has its own name in place of `Redis`, Valkey none.
    let in_script = text.contains("unknown") && text.contains("command called from");
    // Redis before 7.0 quotes commands in backticks.
    const QUOTES: [char; 2] = ['\'', '`'];
    let quoted = text.split_once("unknown command ").and_then(|(_, rest)| rest.strip_prefix(QUOTES));
    match quoted.and_then(|rest| rest.split(QUOTES).next()) {
        // The first command that this crate sends and a sentinel does not know.
        Some("time") => Some(
            "this server does not know TIME: if it is a Sentinel, give the guard a redis::sentinel::SentinelClient (feature \
             `sentinel`)",
        ),
        Some("eval" | "evalsha") => Some(
            "this server runs no scripts (EVALSHA, EVAL), which leases are made of: use one that does, as Redis 6.2 and later \
             and Valkey do",
        ),
        // Only optional features use these commands; loads and locks work without them.
        Some("config" | "wait") => None,
        None if !in_script => None,
        Some(_) | None => Some(
            "this server lacks a command that the guard needs, which doctor() names: use Redis 6.2 or later, or Valkey, and \
             rename no commands",
        ),
    }
}

fn on_tcp(error: &RedisError) -> Option<&'static str> {
    // A TLS port takes the first command for an invalid handshake: it closes the connection, or sends an
    // alert before, which is not valid RESP.
    if closed(error) || error.kind() == ErrorKind::Parse {
        return Some(
            "this port does not answer as Redis does: if it wants TLS, use rediss:// (feature `tls`)",
        );
    }
    if error.is_connection_refusal() {
        return Some(NOT_LISTENING);
    }
    if is_unresolved(error) {
        return Some(UNRESOLVED);
    }
    error
        .is_timeout()
        .then_some("no answer in time: see that host and port are right, and that nothing blocks the way")
}

/// Whether the host name could not be resolved. Such errors have no kind, but the standard library gives them this prefix.
fn is_unresolved(error: &RedisError) -> bool {
    io_error(error).is_some_and(|error| error.to_string().contains("failed to lookup address"))
}

const UNRESOLVED: &str = "this host name can not be resolved: see its spelling, and this machine's resolver";

/// The advice for a closed port.
const NOT_LISTENING: &str =
    "no server listens there: see that host and port are right, and that the server runs";

fn on_unix(error: &RedisError) -> Option<&'static str> {
    match io_error(error)?.kind() {
        io::ErrorKind::NotFound => Some("there is no such socket: see the server's setting `unixsocket`"),
        io::ErrorKind::PermissionDenied => {
            Some("this process may not open the socket: see the server's setting `unixsocketperm`")
        }
        _ => None,
    }
}

fn on_tls(error: &RedisError) -> Option<&'static str> {
    if let Some(advice) = on_rustls(error) {
        return advice;
    }
    if cfg!(not(feature = "tls")) && error.kind() == ErrorKind::Client {
        return Some(
            "TLS wants a provider of cryptography: turn on stampede-guard's feature `tls`, or install one",
        );
    }
    if error.is_connection_refusal() {
        return Some(NOT_LISTENING);
    }
    if is_unresolved(error) {
        return Some(UNRESOLVED);
    }
    if closed(error) {
        return Some(
            "the server ended the TLS handshake: see its log, whether it has as many connections as `maxclients` allows, whether \
             this is the port for TLS, and whether it wants certificates of its clients (`client_tls` in the \
             redis::TlsCertificates of the client)",
        );
    }
    // A plain server waits for the end of a line, which a handshake does not contain.
    error.is_timeout().then_some(
        "no answer to the TLS handshake in time: see that this is the port for TLS, not the plain one",
    )
}

/// What to do about an error of rustls, `Some(None)` if nothing is known to help; `None` for an error that is not from rustls.
pub(crate) fn on_rustls(error: &RedisError) -> Option<Option<&'static str>> {
    #[cfg(not(feature = "tls"))]
    {
        let _ = error;
        None
    }
    #[cfg(feature = "tls")]
    {
        use rustls::CertificateError as Refused;
        use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage};
        let error: &rustls::Error = io_error(error)?.get_ref()?.downcast_ref()?;
        Some(match error {
            InvalidCertificate(Refused::NotValidForName | Refused::NotValidForNameContext { .. }) => Some(
                "the server's certificate is for other hosts: connect by a name in it, or have it name this host",
            ),
            InvalidCertificate(Refused::Expired | Refused::ExpiredContext { .. }) => {
                Some("the server's certificate has expired: renew it, or set this machine's clock")
            }
            InvalidCertificate(Refused::NotValidYet | Refused::NotValidYetContext { .. }) => {
                Some("the server's certificate is not valid yet: set this machine's clock")
            }
            // A bad signature comes from another authority with a trusted name, such as one that was created anew.
            InvalidCertificate(Refused::UnknownIssuer | Refused::BadSignature) => Some(
                "the server's certificate is signed by no authority that this machine trusts: install that authority, or name \
                 it as `root_cert` in the redis::TlsCertificates of the client",
            ),
            InvalidMessage(_) => {
                Some("the server does not speak TLS on this port: use its port for TLS, or redis://")
            }
            AlertReceived(_) => Some(
                "the server refuses this client: if it wants certificates, give one as `client_tls` in the \
                 redis::TlsCertificates of the client",
            ),
            _ => None,
        })
    }
}

/// Whether the other side has closed the connection.
pub(crate) fn closed(error: &RedisError) -> bool {
    let closing = [
        io::ErrorKind::UnexpectedEof,
        io::ErrorKind::BrokenPipe,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::ConnectionAborted,
    ];
    // The kind of an I/O error decides: `is_connection_dropped` is also true for a refused connection, which needs other advice.
    io_error(error).map_or_else(|| error.is_connection_dropped(), |error| closing.contains(&error.kind()))
}

/// The I/O error inside this one. The source that redis-rs returns may be an `Arc` of an error, which is the I/O error.
fn io_error(error: &RedisError) -> Option<&io::Error> {
    let source = error.source()?;
    source.downcast_ref().or_else(|| source.downcast_ref::<Cause>()?.downcast_ref())
}

/// `cause` with the advice about it.
pub(crate) fn advised(advice: Option<&'static str>, cause: RedisError) -> Cause {
    match advice {
        Some(advice) => Arc::new(AdvisedError { advice, cause: Arc::new(cause) }),
        None => Arc::new(cause),
    }
}

/// What happens to the connection that returned an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionFate {
    Keep,
    /// It is broken, its user has lost the rights, or it leads to a server that is not the primary.
    Drop,
}

/// Classifies an error: transport, not the primary, rights lost, transient, permanent.
pub(crate) fn classify(error: &RedisError) -> (StoreErrorKind, ConnectionFate) {
    if is_protocol(error) {
        // The same command would break the next connection, too.
        return (StoreErrorKind::Refused, ConnectionFate::Drop);
    }
    match code(error) {
        // A demoted primary answers reads for ever: only a new connection helps, to the server that the name now leads
        // to. After a changed password only a new connection helps, too.
        Some("READONLY" | "MASTERDOWN" | "NOAUTH" | "WRONGPASS") => {
            (StoreErrorKind::Unavailable, ConnectionFate::Drop)
        }
        Some(
            "BUSY" | "LOADING" | "OOM" | "TRYAGAIN" | "CLUSTERDOWN" | "MISCONF" | "NOREPLICAS" | "UNKILLABLE",
        ) => (StoreErrorKind::Transient, ConnectionFate::Keep),
        Some(_) => (StoreErrorKind::Refused, ConnectionFate::Keep),
        None if error.kind() == ErrorKind::UnexpectedReturnType => {
            (StoreErrorKind::Refused, ConnectionFate::Keep)
        }
        None => (StoreErrorKind::Unavailable, ConnectionFate::Drop),
    }
}

/// An error for the guard, with the server's text unless that quotes the command.
pub(crate) fn store_error(kind: StoreErrorKind, error: RedisError) -> StoreError {
    let advice = on_refusal(&error);
    StoreError { kind, source: Some(advised(advice, unquoted(error))) }
}

/// Removes the server's text from an error if it quotes a command: keys and passwords must not reach a log or an error.
pub(crate) fn unquoted(error: RedisError) -> RedisError {
    let text = error.to_string();
    if !text.contains("sg1:") && !text.contains("args beginning with") {
        return error;
    }
    // redis-rs treats any first word as the code.
    let code = code(&error).filter(|code| code.bytes().all(|byte| byte.is_ascii_uppercase()));
    redis::make_extension_error(code.unwrap_or("ERR").to_owned(), None)
}

/// The text of an event about an error: what to do, if that is known, and what happened.
pub(crate) fn reason(error: &StoreError) -> String {
    let Some(first) = &error.source else { return error.to_string() };
    match first.downcast_ref::<AdvisedError>().and_then(Error::source) {
        Some(cause) => format!("{first}: {cause}"),
        None => first.to_string(),
    }
}

/// The code of the server's error that is the source of this one; `None` if the source is no server's error.
pub(crate) fn code_of(error: &StoreError) -> Option<&str> {
    let source = error.source.as_ref()?;
    let cause: &(dyn Error + 'static) = match source.downcast_ref::<AdvisedError>() {
        Some(advised) => advised.source()?,
        None => &**source,
    };
    code(cause.downcast_ref()?)
}

/// The code of a server's error; `None` for an error of the transport or of the client.
pub(crate) fn code(error: &RedisError) -> Option<&str> {
    let code = error.code()?;
    if code != "ERR" {
        return Some(code);
    }
    // Redis before 7.0 wraps the error of a command inside a script:
    // `ERR Error running script (call to f_..): @user_script:3: -OOM command not allowed ..`.
    let inner = error.detail().filter(|detail| detail.starts_with("Error running script"));
    let inner =
        inner.and_then(|detail| detail.rsplit_once(": -")).and_then(|(_, rest)| rest.split(' ').next());
    Some(inner.unwrap_or(code))
}

/// How many reasons of one outage are logged at most. An outage has few; a server that invents codes must not be logged for ever.
const MOST: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct OutageLog(Vec<Cow<'static, str>>);

impl OutageLog {
    /// Whether no reason of this kind was logged in this outage. Records it.
    pub(crate) fn is_news(&mut self, why: &StoreError) -> bool {
        let kind = kind(why);
        let is_news = self.0.len() < MOST && !self.0.contains(&kind);
        if is_news {
            self.0.push(kind);
        }
        is_news
    }

    /// Records that the outage is over: the next outage logs its reasons again.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }
}

/// The key by which reasons are compared, independent of their text: the advice, else the error's code or kind.
fn kind(why: &StoreError) -> Cow<'static, str> {
    let Some(source) = &why.source else { return Cow::Borrowed("unknown") };
    if let Some(advised) = source.downcast_ref::<AdvisedError>() {
        return Cow::Borrowed(advised.advice);
    }
    let Some(error) = source.downcast_ref::<RedisError>() else { return Cow::Borrowed("unknown") };
    match code(error) {
        Some(code) => Cow::Owned(code.to_owned()),
        None if error.is_timeout() => Cow::Borrowed("timed out"),
        // Closed, reset, cut off: which of these occurs is chance, and they are of one kind.
        None => Cow::Owned(format!("{:?}", error.kind())),
    }
}

/// The result of `work`, or an I/O error of kind `TimedOut` after `limit`.
pub(crate) async fn bounded<T>(
    limit: Duration,
    work: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    match timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(io_error_of(io::ErrorKind::TimedOut)),
    }
}

/// An I/O error of this kind, for a connection that is silent or closed.
pub(crate) fn io_error_of(kind: io::ErrorKind) -> RedisError {
    RedisError::from(io::Error::from(kind))
}

/// The error for an answer that Redis never sends.
pub(crate) fn unexpected() -> RedisError {
    RedisError::from((redis::ErrorKind::UnexpectedReturnType, "unexpected answer"))
}

/// The error for an answer to ROLE by a server that is not a primary.
pub(crate) fn replica() -> RedisError {
    RedisError::from((redis::ErrorKind::Client, REPLICA))
}

pub(crate) fn is_replica(error: &RedisError) -> bool {
    error.to_string().starts_with(REPLICA)
}

/// Whether the server refuses a command of this length, and closes the connection.
pub(crate) fn is_protocol(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.starts_with("Protocol error"))
}

/// The error's text for a server that is not, or no longer, a primary.
const REPLICA: &str = "this server is a replica";

/// A refusal that lasts is logged again after this time.
const AGAIN: Duration = Duration::from_secs(60);
/// The least time between two logs of a refusal that comes and goes.
const AT_LEAST: Duration = Duration::from_secs(1);

/// How many codes are remembered at most. Servers send few; a server that invents codes must not fill the memory.
const MOST_REFUSALS: usize = 16;

#[derive(Debug, Default)]
pub(super) struct RefusalLog {
    /// Whether any refusal lasts: if not, [`carried_out`](Self::carried_out) checks only this.
    some: AtomicBool,
    refusals: Mutex<Vec<LoggedRefusal>>,
}

#[derive(Debug)]
struct LoggedRefusal {
    code: String,
    /// The refused command. The refusal lasts until this command succeeds, not any other: a server without memory answers reads
    /// all the time.
    command: Option<String>,
    lasts: bool,
    at: Instant,
}

impl RefusalLog {
    /// Records a refusal; returns whether it must be logged.
    pub(super) fn is_news(&self, code: &str, cmd: Option<&Cmd>) -> bool {
        let mut refusals = lock(&self.refusals);
        let before = refusals.iter().position(|refusal| refusal.code == code);
        if let Some(before) = before {
            let since = refusals[before].at.elapsed();
            if since < AT_LEAST || (refusals[before].lasts && since < AGAIN) {
                return false;
            }
            refusals.remove(before);
        } else if refusals.len() == MOST_REFUSALS {
            refusals.remove(0);
        }
        let command = cmd.and_then(name);
        refusals.push(LoggedRefusal { code: code.to_owned(), command, lasts: true, at: Instant::now() });
        self.some.store(true, Ordering::Relaxed);
        true
    }

    /// Records that a command succeeded.
    pub(super) fn carried_out(&self, cmd: &Cmd) {
        if !self.some.load(Ordering::Relaxed) {
            return;
        }
        let mut refusals = lock(&self.refusals);
        let command = name(cmd);
        for refusal in refusals.iter_mut().filter(|refusal| refusal.command == command) {
            refusal.lasts = false;
        }
        self.some.store(refusals.iter().any(|refusal| refusal.lasts), Ordering::Relaxed);
    }
}

/// The name of the command, or the digest of its script.
fn name(cmd: &Cmd) -> Option<String> {
    let mut args = cmd.args_iter().map(|arg| match arg {
        Arg::Simple(bytes) => bytes,
        _ => &[],
    });
    match args.next()? {
        b"EVALSHA" => args.next().map(|sha1| String::from_utf8_lossy(sha1).into_owned()),
        b"EVAL" => args.next().map(sha1_hex),
        command => Some(String::from_utf8_lossy(command).into_owned()),
    }
}

#[cfg(test)]
mod advice_tests {
    use super::*;

    /// For a closed port, advice about TLS would send an operator in the wrong direction.
    #[test]
    fn advice_distinguishes_a_closed_port_from_a_tls_port() {
        let advice = |kind: io::ErrorKind, tls: bool| {
            let (host, port) = ("h".to_owned(), 1);
            let addr = match tls {
                true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
                false => ConnectionAddr::Tcp(host, port),
            };
            on_connecting(&addr, &RedisError::from(io::Error::from(kind))).expect("advice")
        };
        for tls in [false, true] {
            assert_eq!(advice(io::ErrorKind::ConnectionRefused, tls), NOT_LISTENING);
            assert!(advice(io::ErrorKind::UnexpectedEof, tls).contains("TLS"));
        }
        // A server that requires client certificates also closes the connection, mostly before its alert is read.
        assert!(advice(io::ErrorKind::BrokenPipe, true).contains("client_tls"));
    }

    #[test]
    fn advice_names_an_unresolvable_host() {
        let words = "failed to lookup address information: Name or service not known";
        let error = RedisError::from(io::Error::other(words));
        assert_eq!(on_tcp(&error), Some(UNRESOLVED));
        assert_eq!(on_tls(&error), Some(UNRESOLVED));
    }
}

#[cfg(test)]
mod classify_tests {
    use super::*;

    fn server(line: &str) -> RedisError {
        let reply = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("one error line");
        reply.extract_error().expect_err("it is an error")
    }

    #[test]
    fn each_class_of_error_has_its_consequence() {
        use StoreErrorKind::{Refused, Transient, Unavailable};
        for (line, verdict) in [
            ("READONLY You can't write against a read only replica.", (Unavailable, ConnectionFate::Drop)),
            ("MASTERDOWN Link with MASTER is down", (Unavailable, ConnectionFate::Drop)),
            ("NOAUTH Authentication required.", (Unavailable, ConnectionFate::Drop)),
            ("OOM command not allowed when used memory > 'maxmemory'.", (Transient, ConnectionFate::Keep)),
            ("LOADING Redis is loading the dataset in memory", (Transient, ConnectionFate::Keep)),
            ("BUSY Redis is busy running a script.", (Transient, ConnectionFate::Keep)),
            ("NOPERM this user has no permissions", (Refused, ConnectionFate::Keep)),
            ("CROSSSLOT Keys in request don't hash to the same slot", (Refused, ConnectionFate::Keep)),
            ("ERR unknown command 'EVALSHA'", (Refused, ConnectionFate::Keep)),
            ("ERR Protocol error: invalid bulk length", (Refused, ConnectionFate::Drop)),
            (
                "ERR Error running script (call to f_1): @user_script:3: @user_script: 3: -OOM command not",
                (Transient, ConnectionFate::Keep),
            ),
        ] {
            assert_eq!(classify(&server(line)), verdict, "{line}");
        }
        let broken = RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!(classify(&broken), (Unavailable, ConnectionFate::Drop));
        // A server that gives an unexpected answer is up, so the connection stays.
        assert_eq!(classify(&super::unexpected()), (Refused, ConnectionFate::Keep));
    }

    #[test]
    fn an_error_does_not_quote_keys_nor_passwords() {
        for (line, expected_advice) in [
            ("unknown command 'EVALSHA', with args beginning with: 'sg1:e:{ns:secret}'", "runs no scripts"),
            ("unknown command `EVAL`, with args beginning with: `1`, `lock:secret`, ", "runs no scripts"),
            ("unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'u' 'secret'", "doctor() names"),
            ("unknown command `TIME`, with args beginning with: ", "SentinelClient"),
            ("Unknown Redis command called from script script: on @user_script:79.", "doctor() names"),
            ("Unknown Redict command called from script script: 4951, on @user_script:79.", "doctor() names"),
            ("Unknown command called from script script: on @user_script:79.", "doctor() names"),
        ] {
            let error = store_error(StoreErrorKind::Refused, server(&format!("ERR {line}")));
            let source = error.source.clone().expect("there is a cause");
            assert!(source.to_string().contains(expected_advice), "{source}");
            assert!(!format!("{source:?} {}", reason(&error)).contains("secret"), "{source:?}");
        }
        let optional =
            store_error(StoreErrorKind::Refused, server("ERR unknown command 'CONFIG', with args"));
        assert!(!reason(&optional).contains("doctor"), "{optional:?}");
    }
}

#[cfg(test)]
mod outage_log_tests {
    use std::io;

    use redis::make_extension_error;

    use super::store_error;
    use super::unexpected;
    use super::*;
    use crate::store::StoreErrorKind;

    fn failed(error: RedisError) -> StoreError {
        store_error(StoreErrorKind::Unavailable, error)
    }

    fn refused(code: &str, text: &str) -> StoreError {
        failed(make_extension_error(code.to_owned(), Some(text.to_owned())))
    }

    fn transport(kind: io::ErrorKind) -> StoreError {
        failed(RedisError::from(io::Error::from(kind)))
    }

    #[test]
    fn each_reason_is_logged_once_per_outage_in_any_order() {
        let mut outage_log = OutageLog::default();
        assert!(outage_log.is_news(&transport(io::ErrorKind::BrokenPipe)));
        assert!(!outage_log.is_news(&transport(io::ErrorKind::ConnectionReset)), "the same by another name");
        assert!(outage_log.is_news(&transport(io::ErrorKind::TimedOut)));
        assert!(outage_log.is_news(&failed(unexpected())), "it is not lost");
        assert!(outage_log.is_news(&refused("WRONGPASS", "invalid username-password pair")));
        assert!(outage_log.is_news(&refused("NOPERM", "no permissions to run 'time'")));
        for _ in 0..3 {
            assert!(!outage_log.is_news(&transport(io::ErrorKind::BrokenPipe)));
            assert!(!outage_log.is_news(&refused("WRONGPASS", "or the user is disabled")));
            assert!(!outage_log.is_news(&refused("NOPERM", "no permissions to run 'ping'")));
        }
        outage_log.forget();
        assert!(outage_log.is_news(&refused("WRONGPASS", "invalid username-password pair")));
    }

    #[test]
    fn the_number_of_logged_codes_is_bounded() {
        let mut outage_log = OutageLog::default();
        let news = (0..100).filter(|n| outage_log.is_news(&refused(&format!("CODE{n}"), ""))).count();
        assert_eq!(news, MOST);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_logged_again_after_it_had_ended_or_a_minute_later() {
        let (refusals, set, get) = (RefusalLog::default(), redis::cmd("SET"), redis::cmd("GET"));
        assert!(refusals.is_news("OOM", Some(&set)));
        assert!(refusals.is_news("BUSY", Some(&get)), "another");
        for _ in 0..10 {
            advance(Duration::from_secs(5)).await;
            refusals.carried_out(&get);
            assert!(!refusals.is_news("OOM", Some(&set)), "reads are answered all the time");
        }
        refusals.carried_out(&set);
        assert!(refusals.is_news("OOM", Some(&set)));
        refusals.carried_out(&set);
        assert!(!refusals.is_news("OOM", Some(&set)), "it comes and goes");
        advance(AT_LEAST).await;
        assert!(refusals.is_news("OOM", Some(&set)));
        advance(AGAIN).await;
        assert!(refusals.is_news("OOM", Some(&set)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_remembered_codes_is_bounded() {
        let refusals = RefusalLog::default();
        for number in 0..1_000 {
            assert!(refusals.is_news(&number.to_string(), None));
        }
        assert_eq!(lock(&refusals.refusals).len(), MOST_REFUSALS);
    }
}
