//! One server.

use std::time::Duration;

use redis::{Client, ConnectionInfo, RedisError};

use super::{Backend, IntoStore};
use crate::store::StoreHandle;
use crate::store::credentials::CredentialsProvider;
use crate::store::redis::{Login, RedisStore};

#[derive(Debug)]
struct Single {
    client: Client,
    provider: Option<CredentialsProvider>,
}

impl IntoStore for Single {
    fn into_store(self: Box<Self>, command_timeout: Duration) -> StoreHandle {
        let Self { client, provider } = *self;
        StoreHandle::redis(RedisStore::single(client, command_timeout, Login::by(provider)))
    }

    fn log_in_with(&mut self, provider: CredentialsProvider) {
        self.provider = Some(provider);
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
impl From<Client> for Backend {
    fn from(client: Client) -> Self {
        Self::of(Single { client, provider: None })
    }
}

macro_rules! from_address {
    ($($address:ty),*) => {$(
        /// The server at this address. Does no I/O. A URL may name user, password and database.
        #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
        impl TryFrom<$address> for Backend {
            type Error = RedisError;

            fn try_from(address: $address) -> Result<Self, RedisError> {
                Client::open(address).map(Self::from)
            }
        }
    )*};
}
from_address!(&str, String, ConnectionInfo);
