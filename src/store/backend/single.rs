//! One server.

use std::sync::Arc;
use std::time::Duration;

use redis::Client;

use super::{Backend, IntoStore};
use crate::error::{Error, ErrorKind};
use crate::store::StoreHandle;
use crate::store::redis::RedisStore;

impl IntoStore for Client {
    fn into_store(self: Box<Self>, command_timeout: Duration) -> StoreHandle {
        StoreHandle::redis(RedisStore::new(*self, command_timeout))
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
impl Backend {
    /// The server at this URL, or with this `redis::ConnectionInfo`. Does no I/O. The URL may name user, password, database and, with
    /// the feature `tls`, `rediss://`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidAddress`] for what is no address of a server.
    pub fn open(address: impl redis::IntoConnectionInfo) -> Result<Self, Error> {
        let client = Client::open(address).map_err(|error| {
            // The text has no part of the URL, which may hold a password.
            let text = "this is no address of a Redis server: write redis://user:password@host:port/database, rediss:// for TLS \
                        (feature `tls`), or unix:///path/to/socket";
            Error::with_source(ErrorKind::InvalidAddress, text, Arc::new(error))
        })?;
        Ok(Self::of(client))
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
impl From<Client> for Backend {
    fn from(client: Client) -> Self {
        Self::of(client)
    }
}
