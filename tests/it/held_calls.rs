//! Calls of `get_or_load` with loads that wait at a gate.

use std::fmt::{Debug, Display};

use serde::Serialize;
use serde::de::DeserializeOwned;
use stampede_guard::{LoadError, StampedeGuard};
use tokio::task::JoinHandle;

use crate::support::gate::{Counter, Gate};

/// Calls with a load of `value` that waits at `gate`, in a task.
pub(crate) fn held_call_of(
    guard: &StampedeGuard,
    key: &str,
    value: u32,
    gate: &Gate,
    loads: &Counter,
) -> JoinHandle<u32> {
    let load = held_load(guard, key, Ok::<_, String>(value), gate, loads);
    tokio::spawn(async move { load.await.expect("a value") })
}

/// Calls with a load that waits at `gate` and has this result. Returns the answer.
pub(crate) fn held_load<T, E>(
    guard: &StampedeGuard,
    key: &str,
    result: Result<T, E>,
    gate: &Gate,
    loads: &Counter,
) -> impl Future<Output = Result<T, LoadError<E>>> + Send + 'static
where
    T: Serialize + DeserializeOwned + Send + 'static,
    E: Display + Debug + Send + Sync + 'static,
{
    let (guard, key, gate, loads) = (guard.clone(), key.to_owned(), gate.clone(), loads.clone());
    async move {
        let load = move || async move {
            let _running = loads.start();
            gate.pass().await;
            result
        };
        guard.get_or_load(key, load).await
    }
}
