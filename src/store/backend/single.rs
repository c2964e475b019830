//! One server.

use std::time::Duration;

use redis::{Client, ConnectionInfo, RedisError};

use super::{Backend, IntoStore};
use crate::store::StoreHandle;
use crate::store::redis::RedisStore;

impl IntoStore for Client {
    fn into_store(self: Box<Self>, command_timeout: Duration) -> StoreHandle {
        StoreHandle::redis(RedisStore::new(*self, command_timeout))
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
impl From<Client> for Backend {
    fn from(client: Client) -> Self {
        Self::of(client)
    }
}

macro_rules! from_address {
    ($($address:ty),*) => {$(
        /// The server at this address. Does no I/O. A URL may name user, password and database.
        #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
        impl TryFrom<$address> for Backend {
            type Error = RedisError;

            fn try_from(address: $address) -> Result<Self, RedisError> {
                Client::open(address).map(Self::of)
            }
        }
    )*};
}
from_address!(&str, String, ConnectionInfo);
