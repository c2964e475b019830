//! Advice for the operator about a server that cannot be reached, or refuses this user.
//!
//! Most such failures are mistakes of the set-up, and the symptoms (a closed socket, silence, a TLS alert) do
//! not tell an operator what to change.

use std::error::Error;
use std::sync::Arc;
use std::{fmt, io};

use redis::{ConnectionAddr, ErrorKind, RedisError};

use super::reply::{is_protocol, is_replica};

/// A failure and the advice about it; the failure is its source.
#[derive(Debug)]
pub(crate) struct AdvisedError {
    advice: &'static str,
    cause: Cause,
}

pub(crate) type Cause = Arc<dyn Error + Send + Sync>;

impl AdvisedError {
    pub(crate) fn advice(&self) -> &'static str {
        self.advice
    }
}

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

/// What to do about an error while connecting to `addr`, if that is known.
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

/// Whether the server that was asked does not know this user, or knows another password.
pub(crate) fn is_login(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed || matches!(error.code(), Some("WRONGPASS" | "NOAUTH"))
}

/// What to do about a sentinel that refuses this client.
pub(crate) const THEIR_PASSWORD: &str = "the sentinels refuse this client: they have users and passwords of their own, which the \
     SentinelClientBuilder is given by set_client_to_sentinel_username and set_client_to_sentinel_password";

/// The advice for a server that takes no more connections.
const FULL: &str = "the server has as many connections as it takes (its setting `maxclients`): raise that limit, or close connections";

/// The error for a value that the server does not take.
pub(crate) const TOO_LONG: &str =
    "a value is longer than the server takes (its setting `proto-max-bulk-len`), or broke the connection";

/// The advice for a value that the server does not take.
const RAISE_OR_CACHE_LESS: &str = "a value is longer than the server takes: raise its setting `proto-max-bulk-len`, or lower the policy's \
     max_body below it; it is not stored, and for a while nothing as long is sent";

/// Whether the server has no room for another connection. It says so to the first command of each, and closes it.
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

/// The same for refusals without a code of their own.
fn on_words(text: &str) -> Option<&'static str> {
    if text.contains("cluster support disabled") {
        return Some("this server is not part of a cluster: give the guard a redis::Client");
    }
    if text.contains("refused to switch database") {
        return Some(
            "this database can not be had: the server needs that many, and the user the right +select",
        );
    }
    // Such a command is not named. Redis: `Unknown Redis command called from script`; Redict has its own name there, Valkey none.
    let in_script = text.contains("unknown") && text.contains("command called from");
    // Before 7.0, the server quotes commands in backticks.
    const QUOTES: [char; 2] = ['\'', '`'];
    let quoted = text.split_once("unknown command ").and_then(|(_, rest)| rest.strip_prefix(QUOTES));
    match quoted.and_then(|rest| rest.split(QUOTES).next()) {
        // The first command of ours that a sentinel does not know.
        Some("time") => Some(
            "this server does not know TIME: if it is a Sentinel, give the guard a redis::sentinel::SentinelClient (feature \
             `sentinel`)",
        ),
        Some("eval" | "evalsha") => Some(
            "this server runs no scripts (EVALSHA, EVAL), which leases are made of: use one that does, as Redis 6.2 and later \
             and Valkey do",
        ),
        // Used only by optional features, beyond loads and locks.
        Some("config" | "wait") => None,
        None if !in_script => None,
        Some(_) | None => Some(
            "this server lacks a command that the guard needs, which doctor() names: use Redis 6.2 or later, or Valkey, and \
             rename no commands",
        ),
    }
}

fn on_tcp(error: &RedisError) -> Option<&'static str> {
    // A TLS port takes the first command for a broken handshake: it closes the connection, or first sends an
    // alert, which is not valid RESP.
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

/// The resolver's errors have no kind; this is the prefix that the standard library gives them.
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
    #[cfg(feature = "tls")]
    if let Some(error) = rustls_error(error) {
        return on_rustls(error);
    }
    #[cfg(not(feature = "tls"))]
    if error.kind() == ErrorKind::Client {
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

/// The error of rustls, if the error is one.
#[cfg(feature = "tls")]
pub(super) fn rustls_error(error: &RedisError) -> Option<&rustls::Error> {
    io_error(error)?.get_ref()?.downcast_ref()
}

#[cfg(feature = "tls")]
pub(super) fn on_rustls(error: &rustls::Error) -> Option<&'static str> {
    use rustls::CertificateError as Refused;
    use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage};
    match error {
        InvalidCertificate(Refused::NotValidForName | Refused::NotValidForNameContext { .. }) => Some(
            "the server's certificate is for other hosts: connect by a name in it, or have it name this host",
        ),
        InvalidCertificate(Refused::Expired | Refused::ExpiredContext { .. }) => {
            Some("the server's certificate has expired: renew it, or set this machine's clock")
        }
        InvalidCertificate(Refused::NotValidYet | Refused::NotValidYetContext { .. }) => {
            Some("the server's certificate is not valid yet: set this machine's clock")
        }
        // A bad signature is by another authority with a trusted name, such as one that was created anew.
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
    }
}

/// Whether the other side has closed the connection.
pub(super) fn closed(error: &RedisError) -> bool {
    let closing = [
        io::ErrorKind::UnexpectedEof,
        io::ErrorKind::BrokenPipe,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::ConnectionAborted,
    ];
    // The kind of an I/O error decides: `is_connection_dropped` is also true for a refused connection, which needs other advice.
    io_error(error).map_or_else(|| error.is_connection_dropped(), |error| closing.contains(&error.kind()))
}

/// The I/O error; redis-rs keeps it in an `Arc`, which it returns as its source.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Advice about TLS would send an operator in the wrong direction.
    #[test]
    fn advice_tells_a_closed_port_from_a_tls_port() {
        let told = |kind: io::ErrorKind, tls: bool| {
            let (host, port) = ("h".to_owned(), 1);
            let addr = match tls {
                true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
                false => ConnectionAddr::Tcp(host, port),
            };
            on_connecting(&addr, &RedisError::from(io::Error::from(kind))).expect("advice")
        };
        for tls in [false, true] {
            assert_eq!(told(io::ErrorKind::ConnectionRefused, tls), NOT_LISTENING);
            assert!(told(io::ErrorKind::UnexpectedEof, tls).contains("TLS"));
        }
        // A server that requires client certificates closes, too, mostly before its alert is read.
        assert!(told(io::ErrorKind::BrokenPipe, true).contains("client_tls"));
    }

    #[test]
    fn advice_names_an_unresolvable_host() {
        let words = "failed to lookup address information: Name or service not known";
        let error = RedisError::from(io::Error::other(words));
        assert_eq!(on_tcp(&error), Some(UNRESOLVED));
        assert_eq!(on_tls(&error), Some(UNRESOLVED));
    }
}
