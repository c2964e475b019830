//! What a guard is made from: one type that every kind of store converts into.

use std::time::Duration;

use crate::store::NodeStore;
use crate::store::memory::MemoryStore;
#[cfg(feature = "redis")]
use crate::store::redis::RedisStore;
#[cfg(feature = "testing")]
use crate::testing::{ChaosStore, Replica};

/// Where the fleet meets: made from a `redis::Client` or a [`MemoryStore`] by `into()`.
#[derive(Debug)]
pub struct Backend {
    kind: BackendKind,
}

#[derive(Debug)]
enum BackendKind {
    Memory(MemoryStore),
    #[cfg(feature = "redis")]
    // Boxed, because with TLS it holds certificates.
    Redis(Box<redis::Client>),
    #[cfg(feature = "testing")]
    Chaos(Replica),
}

impl Backend {
    pub(crate) fn into_store(self, command_timeout: Duration) -> NodeStore {
        match self.kind {
            BackendKind::Memory(store) => {
                // There is no wire to wait for.
                let _ = command_timeout;
                NodeStore::memory(store)
            }
            #[cfg(feature = "redis")]
            BackendKind::Redis(client) => NodeStore::redis(RedisStore::new(*client, command_timeout)),
            #[cfg(feature = "testing")]
            BackendKind::Chaos(replica) => replica.into_store(),
        }
    }
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self { kind: BackendKind::Memory(store) }
    }
}

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
impl From<redis::Client> for Backend {
    fn from(client: redis::Client) -> Self {
        Self { kind: BackendKind::Redis(Box::new(client)) }
    }
}

#[cfg(feature = "testing")]
#[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
impl From<ChaosStore> for Backend {
    fn from(chaos: ChaosStore) -> Self {
        chaos.replica().into()
    }
}

#[cfg(feature = "testing")]
#[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
impl From<Replica> for Backend {
    fn from(replica: Replica) -> Self {
        Self { kind: BackendKind::Chaos(replica) }
    }
}
