//! A trial: each caller is answered by its own load, and the guard goes its way beside it, with what that load returns. Knows no Redis and
//! no HTTP.
//!
//! The guard's loader does not take the result of a load that has begun: it lets its caller's load begin. So what it returns to a flight
//! began after the flight had its lease and the ids of its tags, as every load of a flight does. The caller waits for that, for no longer
//! than [`LONGEST_DELAY`]; a load that begins without being asked for is its caller's alone.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::audit::Audit;
use super::call::Call;
use super::look_up::{Lookup, look};
use super::miss::MissOutcome;
use crate::error::{Error, Failure};
use crate::failure_text::panic_text;
use crate::key::flight::FlightKey;
use crate::loader::nesting::LoadScope;
use crate::loader::{LeaseState, LoadInput, LoadOutput, LoadResult, Loader};
use crate::observe::Outcome;
use crate::policy::audit::Encoded;
use crate::value::entry::Entry;
use crate::value::reader::{EntryReader, SharedValue};

/// How long a caller's load waits for the guard's look-up and lease: some round trips to a store nearby.
const LONGEST_DELAY: Duration = Duration::from_millis(20);

/// Runs the caller's own load in the caller's task. Returns the failure for a caller whose loader has left no result.
pub(crate) async fn shadow(call: Call<'_>, loader: Loader) -> Failure {
    let Call { state, policy, key } = call;
    let Loader { run, within, .. } = loader;
    let (start, started) = oneshot::channel();
    {
        let (state, policy, key) = (state.clone(), policy.clone(), key.clone());
        tokio::spawn(async move {
            guard_beside(Call { state: &state, policy: &policy, key: &key }, OwnLoad(start)).await;
        });
    }
    let wanted = timeout(LONGEST_DELAY, started).await;
    let given = LoadInput {
        // The result is encoded for the guard, which may store it.
        mode: LeaseState::Leased,
        ..LoadInput::alone(policy.load_timeout)
    };
    let load = LoadScope::scope(state.store.place(), key, within, async move { run(given).await.settle() });
    match timeout(policy.load_timeout, AssertUnwindSafe(load).catch_unwind()).await {
        Ok(Ok(result)) => {
            if let Ok(Ok(loaded)) = wanted {
                // A flight that has timed out does not wait for it.
                let _ = loaded.send(result);
            }
            Failure::vanished()
        }
        Ok(Err(panic)) => Failure::Panicked(panic_text(&*panic)),
        Err(_) => Failure::Guard(Error::load_timeout(key, policy.load_timeout)),
    }
}

/// The load of a caller on trial, which begins when this is used or dropped.
struct OwnLoad(oneshot::Sender<oneshot::Sender<LoadResult>>);

impl OwnLoad {
    /// Lets the load begin, and waits for its result. `None` if it had begun before, or its caller has left it.
    async fn begin(self) -> Option<LoadResult> {
        let (result, loaded) = oneshot::channel();
        self.0.send(result).ok()?;
        loaded.await.ok()
    }

    /// The guard's loader. Another caller loads in place of one whose load cannot be used.
    fn into_loader(self) -> Loader {
        Loader::new(|_| async { LoadOutput::from(self.begin().await.unwrap_or(LoadResult::OnlyForCaller)) })
    }

    /// The loader of a caller that waits for another one's load: its own begins now.
    fn begun(self) -> Loader {
        drop(self);
        Loader::new(|_| async { LoadResult::OnlyForCaller.into() })
    }
}

/// The guard's way with the result of the caller's load: counts how it would have answered, and compares what it would have served.
async fn guard_beside(call: Call<'_>, own: OwnLoad) {
    let outcome = match look(call, &WholeEntry).await {
        Lookup::LocalHit(entry) => hit(call, entry, own, Outcome::LocalHit).await,
        Lookup::Hit { value, stale: false, .. } => hit(call, value, own, Outcome::Hit).await,
        Lookup::Hit { stale: true, refresh, .. } => {
            if let Some(caller) = refresh {
                caller.refresh(own.into_loader(), false);
            }
            Outcome::Stale
        }
        Lookup::Failed(_) => Outcome::Failed,
        Lookup::Miss(caller) => {
            let flight = FlightKey { key: call.key.clone(), mode: caller.mode };
            let waits = call.state.flights.has_connected(&flight);
            let loader = if waits { own.begun() } else { own.into_loader() };
            match caller.load(&WholeEntry, loader).await {
                MissOutcome::Led(_) => Outcome::Led,
                MissOutcome::Coalesced(..) => Outcome::Coalesced,
                MissOutcome::Stale(..) => Outcome::Stale,
                MissOutcome::Failed(_) => Outcome::Failed,
                MissOutcome::Alone(_) => Outcome::Bypassed,
            }
        }
    };
    call.state.answered(call.policy.counters.requests(), call.key, outcome);
}

/// Compares what the guard would have served with what its caller loads.
async fn hit(call: Call<'_>, served: Entry, own: OwnLoad, outcome: Outcome) -> Outcome {
    let Call { policy, .. } = call;
    if let Some(audit) = Audit::begin(call) {
        let same = match own.begin().await {
            Some(LoadResult::Value { encoding, payload, .. }) => {
                let of_guard = Encoded { encoding: served.encoding, payload: &served.payload };
                policy.audit.is_same([of_guard, Encoded { encoding, payload: &payload }])
            }
            _ => None,
        };
        audit.conclude_later(served, same);
    }
    outcome
}

/// A caller that wants the entry as it is.
struct WholeEntry;

impl EntryReader for WholeEntry {
    type Value = Entry;

    fn open(&self, entry: &Entry, _now: u64, _shared: Option<&SharedValue>) -> Option<Entry> {
        Some(entry.clone())
    }
}
