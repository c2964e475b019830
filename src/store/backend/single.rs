//! One server.

use std::time::Duration;

use redis::Client;

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
