//! The read-through algorithm, from one caller's point of view. Knows no Redis and no HTTP.
//!
//! ```text
//! 1 key       request or caller -> CacheKey, or bypass straight to the loader
//! 2 look up   GET entry: fresh -> 8 | stale but servable -> 8 now, 3 to 7 in the background | else 3
//! 3 join      flight, this process: waiter awaits its leader -> 8 | leader -> 4
//! 4 lease     all processes, one script: entry meanwhile there -> 8 | granted -> 6 | held -> 5
//! 5 wait      sleep until wake, lease timer, disconnect or deadline; then 4 again
//! 6 load      the loader in a spawned task; the lease is renewed at a third of its time
//! 7 commit    one script: if the token is mine -> SET entry, DEL lease, wake every waiting process
//!             failed -> the failure goes to the waiting wave; vanished -> the lease goes to one waiter
//! 8 response  the value
//! ```
//!
//! [`answer`] takes a caller with a loader through all steps. `call` is the caller's state. `look_up` is step 2, and `read` is its read of
//! the store. `miss` is step 3 and the caller's wait for step 8; it also starts background refreshes. Steps 4 to 7 run in the flight's
//! own task, `flight_task`, which also has step 6; `lease` has the loop of steps 4 and 5, and `commit` step 7.
//! `batch` joins the loads of one caller's many keys. `outside` has the loads outside the protocol: those of one caller alone, trials and
//! audits.
//!
//! A look-up that finds a stale value begins a load in the background (`CallState::refresh`). A caller that must not share its load runs
//! it alone (`run_alone`). A caller whose process has a flight for the key joins it without a look-up (3 before 2): the flight
//! began with a look-up that found nothing, and joining saves one read per request.

pub(crate) mod batch;
pub(crate) mod call;
pub(crate) mod commit;
pub(crate) mod flight_task;
pub(crate) mod lease;
pub(crate) mod look_up;
pub(crate) mod miss;
pub(crate) mod outside;
pub(crate) mod permits;
pub(crate) mod read;

use std::pin::pin;

use call::{Call, LookUpState, passes_by};
use look_up::{Lookup, look, look_past};
use miss::MissOutcome;
use outside::{Audit, run_alone, shadow};

use crate::error::{Failure, LoadError};
use crate::loader::{Loader, OwnAnswer, OwnSender};
use crate::observe::{Outcome, panic_text};
use crate::value::entry::Entry;
use crate::value::{EntryReader, ForcedReader};

/// The loader's end of a typed caller's [`OwnAnswer`].
pub(crate) type OwnResult<T, E> = OwnSender<Result<T, LoadError<E>>>;

/// Steps 2 to 8 for a caller with a loader. Also returns how the caller was answered. The loader is boxed only if it is needed. `own`
/// converts the value of the caller's own load, with the entry that was made from it, to the caller's value. With `audits`, a fresh hit
/// is audited.
pub(crate) async fn answer<T, E: Send + Sync + 'static, R: EntryReader>(
    call: Call<'_>,
    (reader, audits): (&R, bool),
    loader: impl FnOnce(OwnResult<T, E>) -> Loader,
    own: impl FnOnce(T, Option<&Entry>) -> R::Value,
) -> (Outcome, Result<R::Value, LoadError<E>>) {
    // 2 look up
    let lookup = if passes_by(call.state, call.policy) { None } else { Some(pin!(look(call, reader)).await) };
    answer_lookup(call, lookup, (reader, audits), loader, own).await
}

/// Steps 3 to 8. Without a `lookup` the caller receives the value of its own load, whatever is stored.
pub(crate) async fn answer_lookup<T, E: Send + Sync + 'static, R: EntryReader>(
    call: Call<'_>,
    lookup: Option<Lookup<'_, R::Value>>,
    (reader, audits): (&R, bool),
    loader: impl FnOnce(OwnResult<T, E>) -> Loader,
    own: impl FnOnce(T, Option<&Entry>) -> R::Value,
) -> (Outcome, Result<R::Value, LoadError<E>>) {
    // Called only where a loader is needed: most hits need neither the loader nor the channel.
    let with_answer = || {
        let (sender, answer) = OwnAnswer::at_the_end();
        (loader(sender), answer)
    };
    let audit = || audits.then(|| Audit::begin(call)).flatten();
    let (outcome, result) = match lookup {
        None if call.policy.shadow => {
            let (loader, mut answer) = with_answer();
            let failure = shadow(call, loader).await;
            let result = answer.take().unwrap_or_else(|| Err(call.load_error(failure)));
            return (Outcome::Bypassed, result.map(|value| own(value, None)));
        }
        None => {
            let (loader, answer) = with_answer();
            call.conclude(MissOutcome::Alone(loader), answer, own).await
        }
        // 8: the caller has its value. Its loader is used for a load in the background, whose result no caller takes.
        Some(Lookup::LocalHit(value)) => {
            if let Some(audit) = audit() {
                audit.of_loader(with_answer().0);
            }
            (Outcome::LocalHit, Ok(value))
        }
        Some(Lookup::Hit { value, stale, refresh }) => {
            if let Some(caller) = refresh {
                caller.refresh(with_answer().0, !stale);
            } else if !stale && let Some(audit) = audit() {
                audit.of_loader(with_answer().0);
            }
            (if stale { Outcome::Stale } else { Outcome::Hit }, Ok(value))
        }
        Some(Lookup::Failed(failure)) => (Outcome::Failed, Err(call.load_error(failure))),
        // 3 join, 4 lease, 5 wait, 6 load, 7 commit: the last four in the task of the flight.
        Some(Lookup::Miss(caller)) => {
            let (loader, mut answer) = with_answer();
            let loaded = caller.load(reader, loader, &mut answer).await;
            call.conclude(loaded, answer, own).await
        }
    };
    // 8 response
    call.count_answer(if result.is_ok() { outcome } else { Outcome::Failed });
    (outcome, result)
}

/// Steps 2 to 8 for a caller that loads whatever is stored: step 2 reads the entry, but never serves it. Where the caller
/// [passes by](passes_by), it waits for no other caller; its load is stored if the lease is free. The flag is true if the look-up
/// failed. This function does not count the outcome; its caller does.
pub(crate) async fn reload<T, E: Send + Sync + 'static, R: EntryReader>(
    call: Call<'_>,
    reader: R,
    loader: impl FnOnce(OwnResult<T, E>) -> Loader,
    own: impl FnOnce(T, Option<&Entry>) -> R::Value,
) -> (Outcome, Result<R::Value, LoadError<E>>, bool) {
    let (sender, mut answer) = OwnAnswer::at_the_end();
    let (reader, loader) = (ForcedReader(reader), loader(sender));
    let lookup = look_past(call).await;
    let is_away = lookup.as_ref().map_or(true, |caller| caller.look_up == LookUpState::Failed);
    let loaded = match (lookup, passes_by(call.state, call.policy)) {
        (Ok(caller), false) => caller.load(&reader, loader, &mut answer).await,
        (Ok(caller), true) if !is_away => {
            caller.unattended().load(&reader, loader, &mut answer).await.by_own_load()
        }
        (_, true) => MissOutcome::Alone(loader),
        (Err(failure), false) => MissOutcome::Failed(failure),
    };
    let (outcome, result) = call.conclude(loaded, answer, own).await;
    (outcome, result, is_away)
}

impl Call<'_> {
    /// Step 8 for a caller with a loader. `answer` receives the result of its own load.
    async fn conclude<V, T, E: Send + Sync + 'static>(
        self,
        loaded: MissOutcome<V, Result<T, LoadError<E>>>,
        mut answer: OwnAnswer<Result<T, LoadError<E>>>,
        own: impl FnOnce(T, Option<&Entry>) -> V,
    ) -> (Outcome, Result<V, LoadError<E>>) {
        match loaded {
            MissOutcome::Coalesced(value, _) => (Outcome::Coalesced, Ok(value)),
            MissOutcome::Stale(value, _) => (Outcome::Stale, Ok(value)),
            MissOutcome::Failed(failure) => (Outcome::Failed, Err(self.load_error(failure))),
            MissOutcome::Led(result, entry) => (Outcome::Led, result.map(|value| own(value, entry.as_ref()))),
            MissOutcome::Alone(loader) => {
                let ran = run_alone(self, loader, &mut answer).await;
                let ran = ran.unwrap_or_else(|panic| Err(Failure::Panicked(panic_text(&*panic))));
                let result = ran.unwrap_or_else(|failure| Err(self.load_error(failure)));
                (Outcome::Bypassed, result.map(|value| own(value, None)))
            }
        }
    }

    fn load_error<E: Send + Sync + 'static>(self, failure: Failure) -> LoadError<E> {
        failure.into_load_error(|error| self.policy.errors.decode(error))
    }
}
