//! A primary that sentinels watch over.

use std::fmt;
use std::time::Duration;

use redis::sentinel::SentinelClient;

use super::{Backend, IntoStore};
use crate::store::StoreHandle;
use crate::store::redis::RedisStore;

/// The client shows nothing of itself.
struct Watched(SentinelClient);

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sentinel").finish_non_exhaustive()
    }
}

impl IntoStore for Watched {
    fn into_store(self: Box<Self>, command_timeout: Duration) -> StoreHandle {
        StoreHandle::redis(RedisStore::watched(self.0, command_timeout))
    }
}

/// The server that these sentinels call the primary, whichever that is: they are asked at each connect, and again when it
/// turns out to be one no longer. Credentials, TLS and database are the client's own. Its replicas are never asked.
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
#[cfg_attr(docsrs, doc(cfg(feature = "sentinel")))]
impl From<SentinelClient> for Backend {
    fn from(client: SentinelClient) -> Self {
        Self::of(Watched(client))
    }
}
