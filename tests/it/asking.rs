//! Helpers for nodes on a store with faults: load one key from the scripted origin.

use std::pin::Pin;
use std::time::Duration;

use stampede_guard::testing::{ChaosStore, Origin, OriginError};
use stampede_guard::{LoadError, StampedeGuard};
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Calls `get_or_load` in a new task.
pub(crate) fn ask(guard: &StampedeGuard, origin: &Origin) -> JoinHandle<Result<u64, LoadError<OriginError>>> {
    let (guard, load) = (guard.clone(), load(origin));
    tokio::spawn(async move { guard.get_or_load("k", load).await })
}

/// Waits until the store has received this many commands: the first one is a look-up, the second one an acquire.
pub(crate) async fn arrived(chaos: &ChaosStore, commands: u64) {
    while chaos.commands() < commands {
        sleep(Duration::from_micros(100)).await;
    }
}

/// A loader of the key `k`.
pub(crate) fn load(origin: &Origin) -> impl FnOnce() -> Load + Send + use<> {
    let origin = origin.clone();
    move || Box::pin(async move { origin.load("k").await })
}

pub(crate) type Load = Pin<Box<dyn Future<Output = Result<u64, OriginError>> + Send>>;
