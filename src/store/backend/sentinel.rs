//! A primary that is found through sentinels, as a [`Backend`].

use std::error::Error;
use std::future::Future;
use std::time::Duration;

use redis::RedisResult;
use redis::sentinel::SentinelClient;

use super::Backend;
use super::servers::ServerSource;
use crate::store::credentials::{Credentials, CredentialsProvider};
use crate::store::redis::{Connections, Login, SentinelClients};

impl ServerSource for SentinelClients {
    fn connections(&self, command_timeout: Duration, login: Login) -> Connections {
        Connections::watched(self, command_timeout, login)
    }
}

impl Backend {
    /// As from a `SentinelClient`, with credentials from a provider, as in [`credentials`](Self::credentials). The client itself
    /// uses them, too: to query the sentinels, and the server that they name for its role. The credentials of a `SentinelClient`
    /// cannot change, so `build` makes one for each of the provider's credentials.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use redis::ConnectionAddr;
    /// use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
    /// use stampede_guard::{Backend, Credentials, StampedeGuard};
    ///
    /// # async fn token() -> Result<String, std::io::Error> { Ok("..".to_owned()) }
    /// let provider = || async {
    ///     let token = token().await?;
    ///     Ok::<_, std::io::Error>(Credentials::new("guard", token).valid_for(Duration::from_secs(900)))
    /// };
    /// let redis = Backend::sentinels(provider, |credentials| {
    ///     let sentinels = ["10.0.0.1", "10.0.0.2"].map(|host| ConnectionAddr::Tcp(host.into(), 26379));
    ///     SentinelClientBuilder::new(sentinels, "mymaster", SentinelServerType::Master)?
    ///         .set_client_to_redis_username(credentials.username())
    ///         .set_client_to_redis_password(credentials.password())
    ///         .build()
    /// });
    /// let guard = StampedeGuard::new(redis);
    /// # let _ = guard;
    /// ```
    pub fn sentinels<F, Fut, E, B>(provider: F, build: B) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
        B: Fn(&Credentials) -> RedisResult<SentinelClient> + Send + Sync + 'static,
    {
        Self::on(SentinelClients::built(build), Some(CredentialsProvider::new(provider)))
    }
}

/// The server that these sentinels report as the primary. They are queried at each connect, and again when the server turns
/// out not to be the primary any more. Credentials, TLS and database are the client's own. No command goes to replicas.
///
/// ```no_run
/// use redis::ConnectionAddr;
/// use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
/// use stampede_guard::StampedeGuard;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let sentinels = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|host| ConnectionAddr::Tcp(host.into(), 26379));
/// let client = SentinelClientBuilder::new(sentinels, "mymaster", SentinelServerType::Master)?
///     .set_client_to_redis_username("guard")
///     .set_client_to_redis_password("secret")
///     .build()?;
/// let guard = StampedeGuard::new(client);
/// # let _ = guard;
/// # Ok(()) }
/// ```
impl From<SentinelClient> for Backend {
    fn from(client: SentinelClient) -> Self {
        Self::on(SentinelClients::own(client), None)
    }
}
