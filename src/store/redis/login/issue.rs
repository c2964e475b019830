//! Credentials that a provider has given, and the error if it gives none.

use std::sync::Arc;

use redis::{Client, Cmd, ProtocolVersion, RedisError, RedisResult};
use tokio::time::Instant;

use crate::store::credentials::Credentials;

/// Credentials that the provider has given, and when.
#[derive(Clone)]
pub(crate) struct Issue {
    /// Grows with each: later credentials have a higher number.
    pub(crate) number: u64,
    pub(crate) credentials: Arc<Credentials>,
    /// When to ask for the next; `None` for credentials without an end.
    pub(super) renew_at: Option<Instant>,
    pub(super) ends_at: Option<Instant>,
}

impl Issue {
    /// A client that connects as `client` does, with these credentials.
    pub(crate) fn client_of(
        &self,
        client: &Client,
        protocol: Option<ProtocolVersion>,
    ) -> RedisResult<Client> {
        let info = client.get_connection_info().clone();
        let (username, password) = (self.credentials.username(), self.credentials.password());
        let mut settings = info.redis_settings().clone().set_username(username).set_password(password);
        if let Some(protocol) = protocol {
            settings = settings.set_protocol(protocol);
        }
        Client::open(info.set_redis_settings(settings))
    }

    /// The command that logs an open connection in.
    pub(crate) fn auth(&self) -> Cmd {
        let mut auth = redis::cmd("AUTH");
        auth.arg(self.credentials.username()).arg(self.credentials.password());
        auth
    }
}

/// The beginning of the error for a provider that has failed.
const NOT_PROVIDED: &str = "the provider of credentials failed";

/// Whether the provider of credentials has failed.
pub(crate) fn is_not_provided(error: &RedisError) -> bool {
    error.to_string().starts_with(NOT_PROVIDED)
}

/// The error for a provider that has failed.
pub(super) fn not_provided(why: String) -> RedisError {
    RedisError::from((redis::ErrorKind::Client, NOT_PROVIDED, why))
}
