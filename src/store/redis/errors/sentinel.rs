//! Advice about a primary that cannot be reached through its sentinels.

use redis::{ErrorKind, RedisError};

use super::is_replica;
use super::{THEIR_PASSWORD, closed, is_login, on_refusal};
#[cfg(feature = "tls")]
use super::{on_rustls, rustls_error};

/// The beginning of an error that is known to come from a sentinel.
pub(crate) const AT_SENTINELS: &str = "at the sentinels";
/// The beginning of an error that is known to come from the primary.
pub(crate) const AT_PRIMARY: &str = "at the primary that they name";

/// What to do about an error while connecting through sentinels, if anything is known to help.
pub(crate) fn on_sentinel(error: &RedisError) -> Option<&'static str> {
    if error.kind() == ErrorKind::MasterNameNotFoundBySentinel {
        return Some(
            "no sentinel knows a primary of this name that is up: in a failover that passes; else see the name that was given to \
             the SentinelClient, and what SENTINEL MASTERS says",
        );
    }
    if is_replica(error) {
        return Some(
            "this server is not a primary: in a failover that passes; else the SentinelClient must be one for \
             SentinelServerType::Master",
        );
    }
    if error.to_string().starts_with(AT_SENTINELS) {
        return Some(if is_login(error) { THEIR_PASSWORD } else { NO_SENTINEL });
    }
    if error.to_string().starts_with(AT_PRIMARY) {
        return Some(if is_login(error) { PRIMARYS_PASSWORD } else { NO_PRIMARY });
    }
    if let Some(refusal) = on_refusal(error) {
        return Some(refusal);
    }
    #[cfg(feature = "tls")]
    if let Some(advice) = rustls_error(error).and_then(on_rustls) {
        return Some(advice);
    }
    if closed(error) || error.kind() == ErrorKind::Parse {
        return Some(
            "a sentinel, or the primary that they name, does not answer as Redis does: if they want TLS, name the \
             sentinels as ConnectionAddr::TcpTls and set the SentinelClient's TLS mode for Redis (feature `tls`)",
        );
    }
    if error.is_timeout() {
        return Some(
            "no sentinel, or not the primary that they name, has answered in time: see their addresses, and, for a client \
             that speaks TLS, that these are the ports for TLS",
        );
    }
    error.is_io_error().then_some(
        "a sentinel, or the primary that they name, can not be reached: see their addresses, and \
         SENTINEL GET-MASTER-ADDR-BY-NAME",
    )
}

/// Whether the error may come from a sentinel or from the primary, and the advice depends on which.
pub(crate) fn may_be_of_either(error: &RedisError) -> bool {
    #[cfg(feature = "tls")]
    if rustls_error(error).is_some() {
        return false;
    }
    is_login(error) || (error.is_io_error() && !error.is_timeout() && !closed(error))
}

const PRIMARYS_PASSWORD: &str = "the primary that the sentinels name refuses this user name and password: the SentinelClientBuilder is \
     given the present ones by set_client_to_redis_username and set_client_to_redis_password";

const NO_SENTINEL: &str = "no sentinel can be reached: see that they run, and their addresses";

const NO_PRIMARY: &str = "the primary that the sentinels name can not be reached: in a failover that passes; else see \
     SENTINEL GET-MASTER-ADDR-BY-NAME";
