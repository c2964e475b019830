//! A trial: each caller is answered by its own load, and the guard goes its way beside it, with what that load returns. Knows no Redis and
//! no HTTP.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::audit::Audit;
use super::call::Call;
use super::look_up::{Lookup, look};
use super::miss::MissOutcome;
use crate::error::{Error, Failure};
use crate::failure_text::panic_text;
use crate::loader::nesting::LoadScope;
use crate::loader::{LeaseState, LoadInput, LoadResult, Loader};
use crate::observe::Outcome;
use crate::policy::audit::Encoded;
use crate::value::entry::Entry;
use crate::value::reader::{EntryReader, SharedValue};

/// Runs the caller's own load in the caller's task. Returns the failure for a caller whose loader has left no result.
pub(crate) async fn shadow(call: Call<'_>, loader: Loader) -> Failure {
    let Call { state, policy, key } = call;
    let Loader { run, within, .. } = loader;
    let given = LoadInput {
        // The result is encoded for the guard, which may store it.
        mode: LeaseState::Leased,
        ..LoadInput::alone(policy.load_timeout)
    };
    let (loaded, guarded) = oneshot::channel();
    {
        let (state, policy, key) = (state.clone(), policy.clone(), key.clone());
        tokio::spawn(async move {
            guard_beside(Call { state: &state, policy: &policy, key: &key }, guarded).await;
        });
    }
    let load = LoadScope::scope(state.store.place(), key, within, async move { run(given).await.settle() });
    match timeout(policy.load_timeout, AssertUnwindSafe(load).catch_unwind()).await {
        Ok(Ok(result)) => {
            // The guard may have had a value, and not wait for this one.
            let _ = loaded.send(result);
            Failure::vanished()
        }
        Ok(Err(panic)) => Failure::Panicked(panic_text(&*panic)),
        Err(_) => Failure::Guard(Error::load_timeout(key, policy.load_timeout)),
    }
}

/// The guard's way with the result of the caller's load: counts how it would have answered, and compares what it would have served.
async fn guard_beside(call: Call<'_>, loaded: oneshot::Receiver<LoadResult>) {
    let outcome = match look(call, &WholeEntry).await {
        Lookup::LocalHit(entry) => hit(call, entry, loaded, Outcome::LocalHit).await,
        Lookup::Hit { value, stale: false, .. } => hit(call, value, loaded, Outcome::Hit).await,
        Lookup::Hit { stale: true, refresh, .. } => {
            if let Some(caller) = refresh {
                caller.refresh(loader_of(loaded), false);
            }
            Outcome::Stale
        }
        Lookup::Failed(_) => Outcome::Failed,
        Lookup::Miss(caller) => match caller.load(&WholeEntry, loader_of(loaded)).await {
            MissOutcome::Led(_) => Outcome::Led,
            MissOutcome::Coalesced(..) => Outcome::Coalesced,
            MissOutcome::Stale(..) => Outcome::Stale,
            MissOutcome::Failed(_) => Outcome::Failed,
            MissOutcome::Alone(_) => Outcome::Bypassed,
        },
    };
    call.state.answered(call.policy.counters.requests(), call.key, outcome);
}

/// Compares what the guard would have served with what its caller has loaded.
async fn hit(
    call: Call<'_>,
    served: Entry,
    loaded: oneshot::Receiver<LoadResult>,
    outcome: Outcome,
) -> Outcome {
    let Call { policy, .. } = call;
    if let Some(audit) = Audit::begin(call) {
        let same = match loaded.await {
            Ok(LoadResult::Value { encoding, payload, .. }) => {
                let of_guard = Encoded { encoding: served.encoding, payload: &served.payload };
                policy.audit.is_same([of_guard, Encoded { encoding, payload: &payload }])
            }
            _ => None,
        };
        audit.conclude_later(served, same);
    }
    outcome
}

/// A loader that waits for the caller's own load.
fn loader_of(loaded: oneshot::Receiver<LoadResult>) -> Loader {
    Loader::new(|_| async { loaded.await.unwrap_or_else(|_| LoadResult::Failed(Failure::vanished())).into() })
}

/// A caller that wants the entry as it is.
struct WholeEntry;

impl EntryReader for WholeEntry {
    type Value = Entry;

    fn open(&self, entry: &Entry, _now: u64, _shared: Option<&SharedValue>) -> Option<Entry> {
        Some(entry.clone())
    }
}
