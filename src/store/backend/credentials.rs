//! Credentials from a provider, for any kind of server.

use std::error::Error;
use std::future::Future;

use super::Backend;
use crate::store::credentials::{Credentials, CredentialsProvider};

impl Backend {
    /// The same servers, with credentials from a provider: tokens that live for minutes (IAM, Entra ID), or a password from a
    /// file. They replace those of the client, on each connection, also on new ones and on those to all nodes of a cluster.
    ///
    /// The provider is called before the first connection, and again after about three quarters of the credentials'
    /// [life](Credentials::valid_for), once for all connections of the guard. Open connections then log in again by `AUTH`; none is
    /// closed, and no request waits. A call may take ten seconds.
    ///
    /// While the provider fails, the present credentials are used until they end, and it is called again after a pause of up to five
    /// seconds. The same happens if the server refuses new credentials: new connections log in with the previous ones. Both increment
    /// [`Health::credential_failures`](crate::health::Health::credential_failures) and are logged at most once a minute, with the
    /// provider's error and without the password. Once the credentials have ended, no connection is opened, and the guard
    /// behaves as while the store is [down](crate::PolicyBuilder::on_store_down); but a connection that is open is used until the server
    /// closes it.
    ///
    /// A store in memory needs none. A `SentinelClient` still uses the credentials that it was built with for its own queries, to
    /// the sentinels and for the role of a server: with `Backend::sentinels` (feature `sentinel`) these rotate too.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use stampede_guard::{Backend, Credentials, StampedeGuard};
    ///
    /// # async fn token() -> Result<String, std::io::Error> { Ok("..".to_owned()) }
    /// let redis = Backend::try_from("redis://redis.internal:6379/")?.credentials(|| async {
    ///     let token = token().await?;
    ///     Ok::<_, std::io::Error>(Credentials::new("guard", token).valid_for(Duration::from_secs(900)))
    /// });
    /// let guard = StampedeGuard::new(redis);
    /// # let _ = guard;
    /// # Ok::<(), redis::RedisError>(())
    /// ```
    #[must_use]
    pub fn credentials<F, Fut, E>(self, provider: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.kind.logging_in(CredentialsProvider::new(provider)).unwrap_or(self)
    }
}
