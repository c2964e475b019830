//! One Redis server as a [`Backend`].

use std::time::Duration;

use redis::{Client, ConnectionInfo, RedisError};

use super::Backend;
use super::servers::ServerSource;
use crate::store::redis::{Connections, Login};

impl ServerSource for Client {
    fn connections(&self, command_timeout: Duration, login: Login) -> Connections {
        Connections::single(self, command_timeout, login)
    }
}

impl From<Client> for Backend {
    fn from(client: Client) -> Self {
        Self::on(client, None)
    }
}

macro_rules! from_address {
    ($($address:ty),*) => {$(
        /// The server at this address. Does no I/O. A URL may name user, password and database.
        impl TryFrom<$address> for Backend {
            type Error = RedisError;

            fn try_from(address: $address) -> Result<Self, RedisError> {
                Client::open(address).map(Self::from)
            }
        }
    )*};
}
from_address!(&str, String, ConnectionInfo);
