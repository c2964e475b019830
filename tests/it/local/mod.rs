//! The local tier: promises 15 to 18, and that everything else means the same through it.

#[cfg(feature = "redis")]
pub(crate) mod fleet;
#[cfg(feature = "http")]
mod http;
mod meaning;
#[cfg(feature = "testing")]
mod promises;
mod settings;

use std::sync::Arc;
use std::time::Duration;

use stampede_guard::{MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::sleep;

/// A policy under which a process keeps copies for as long as they are fresh.
fn keeping() -> PolicyBuilder {
    Policy::builder().local_for(Duration::MAX).fresh_for(Duration::from_secs(600)).ttl_jitter(0.0)
}

/// Guards with this policy on one store.
fn replicas<const N: usize>(policy: PolicyBuilder) -> [StampedeGuard; N] {
    let (store, policy) = (MemoryStore::new(), policy.build().expect("valid"));
    std::array::from_fn(|_| {
        StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid")
    })
}

async fn load(guard: &StampedeGuard, key: &str, value: u32) -> u32 {
    guard.get_or_load(key, move || async move { Ok::<_, String>(value) }).await.expect("loaded")
}

async fn load_shared(guard: &StampedeGuard, key: &str, value: u32) -> Arc<u32> {
    guard.load(key).get_shared(move |_| async move { Ok::<_, String>(value) }).await.expect("loaded").value
}

/// Requests the key until it is served from memory, which needs a first RENEW.
async fn warm(guard: &StampedeGuard, key: &str) {
    for _ in 0..200 {
        let before = guard.stats().local_hits;
        let _ = guard.get_or_load(key, || async { Ok::<_, String>(0_u32) }).await;
        if guard.stats().local_hits > before {
            return;
        }
        sleep(Duration::from_millis(5)).await;
    }
    panic!("{key} is never served from memory: {}", guard.health());
}
