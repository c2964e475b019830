//! The way of a caller with a loader through the steps, and the conversion of its outcome to the caller's result.

use serde::de::DeserializeOwned;

use super::StampedeGuard;
use super::load::{Loaded, TimedReader, Times};
use super::typed::{ForcedReader, OwnResult, StorageReader, TypedReader};
use crate::error::{Failure, LoadError};
use crate::key::Key;
use crate::loader::Loader;
use crate::observe::Outcome;
use crate::observe::panic_text;
use crate::read_through::call::{Call, LookUpState};
use crate::read_through::look_up::{Lookup, look, look_past};
use crate::read_through::miss::MissOutcome;
use crate::read_through::outside::Audit;
use crate::read_through::outside::run_alone;
use crate::read_through::outside::shadow;
use crate::store::volume::ChangedName;
use crate::sync::lock;
use crate::value::EntryReader;
use crate::value::FlightOutcome;
use crate::value::entry::Entry;
use crate::value::entry::Storage;

/// A value that a caller has loaded, and whether it is stored. `entry` is the one that the caller's flight ended with, if any.
pub(super) fn with_storage<T>(own: T, entry: Option<&Entry>) -> (T, Storage) {
    (own, entry.map_or(Storage::Forbidden, |entry| entry.expiry.storage()))
}

impl StampedeGuard {
    /// Steps 2 to 8. Returns also how the caller was answered. The loader is boxed only if it is needed. `own` converts the value of the
    /// caller's own loader, with the entry that was made from it, to the caller's value. `audits`: a hit is to be audited.
    pub(super) async fn answer<T, E, R>(
        &self,
        key: &Key,
        reader: &R,
        audits: bool,
        loader: impl FnOnce(&OwnResult<T, E>) -> Loader,
        own: impl FnOnce(T, Option<&Entry>) -> R::Value,
    ) -> (Outcome, Result<R::Value, LoadError<E>>)
    where
        R: EntryReader,
        E: Send + Sync + 'static,
    {
        let call = Call { state: &self.state, policy: &self.policy, key };
        if self.passes_by() {
            return self.pass_by(call, loader, own).await;
        }
        let lookup = look(call, reader).await;
        self.answer_lookup(call, lookup, (reader, audits), loader, own).await
    }

    /// Whether each caller receives the value of its own load: on trial, or while the guard is bypassed.
    pub(super) fn passes_by(&self) -> bool {
        self.policy.shadow || self.state.is_bypassed()
    }

    /// The answer to a caller that receives the value of its own load, whatever is stored.
    pub(super) async fn pass_by<T, E, V>(
        &self,
        call: Call<'_>,
        loader: impl FnOnce(&OwnResult<T, E>) -> Loader,
        own: impl FnOnce(T, Option<&Entry>) -> V,
    ) -> (Outcome, Result<V, LoadError<E>>)
    where
        E: Send + Sync + 'static,
    {
        let result = OwnResult::default();
        if self.policy.shadow {
            let failure = shadow(call, loader(&result)).await;
            let result = lock(&result).take();
            let result = result.unwrap_or_else(|| Err(self.load_error(failure)));
            return (Outcome::Bypassed, result.map(|value| own(value, None)));
        }
        let answer = MissOutcome::Alone(loader(&result));
        let (outcome, result) = self.conclude(call.key, answer, &result, own).await;
        (outcome, self.answered(call.key, outcome, result))
    }

    /// Steps 3 to 8 after the look-up.
    pub(super) async fn answer_lookup<T, E, R>(
        &self,
        call: Call<'_>,
        lookup: Lookup<'_, R::Value>,
        (reader, audits): (&R, bool),
        loader: impl FnOnce(&OwnResult<T, E>) -> Loader,
        own: impl FnOnce(T, Option<&Entry>) -> R::Value,
    ) -> (Outcome, Result<R::Value, LoadError<E>>)
    where
        R: EntryReader,
        E: Send + Sync + 'static,
    {
        let key = call.key;
        let audit = || audits.then(|| Audit::begin(call)).flatten();
        // If the caller has its value already, its loader is used for a load in the background. No caller then takes the result from
        // `OwnResult`.
        let (outcome, result) = match lookup {
            Lookup::LocalHit(value) => {
                if let Some(audit) = audit() {
                    audit.of_loader(loader(&OwnResult::default()));
                }
                (Outcome::LocalHit, Ok(value))
            }
            Lookup::Hit { value, stale, refresh } => {
                if let Some(caller) = refresh {
                    caller.refresh(loader(&OwnResult::default()), !stale);
                } else if !stale && let Some(audit) = audit() {
                    audit.of_loader(loader(&OwnResult::default()));
                }
                (if stale { Outcome::Stale } else { Outcome::Hit }, Ok(value))
            }
            Lookup::Failed(failure) => (Outcome::Failed, Err(self.load_error(failure))),
            Lookup::Miss(caller) => {
                let result = OwnResult::default();
                let answer = caller.load(reader, loader(&result)).await;
                self.conclude(key, answer, &result, own).await
            }
        };
        (outcome, self.answered(key, outcome, result))
    }

    /// Steps 2 to 8 for a caller that loads whatever is stored: step 2 reads the entry, but never serves it. Where
    /// [`passes_by`](Self::passes_by), it waits for no other caller; its load is stored if the lease is free.
    pub(super) async fn load_anyway<T, E>(
        &self,
        key: &Key,
        loader: impl FnOnce(&OwnResult<T, E>) -> Loader,
    ) -> Result<Loaded<T>, LoadError<E>>
    where
        T: DeserializeOwned + 'static,
        E: Send + Sync + 'static,
    {
        let call = Call { state: &self.state, policy: &self.policy, key };
        let own = OwnResult::default();
        let reader = TimedReader(ForcedReader(StorageReader(TypedReader::new())));
        let lookup = look_past(call).await;
        let is_away = lookup.as_ref().map_or(true, |caller| caller.look_up == LookUpState::Failed);
        let answer = match (lookup, self.passes_by()) {
            (Ok(caller), false) => caller.load(&reader, loader(&own)).await,
            (Ok(caller), true) if !is_away => {
                caller.unattended().load(&reader, loader(&own)).await.by_own_load()
            }
            (_, true) => MissOutcome::Alone(loader(&own)),
            (Err(failure), false) => MissOutcome::Failed(failure),
        };
        let with_times = |value, entry: Option<&Entry>| (with_storage(value, entry), Times::of_loaded(entry));
        let (outcome, result) = self.conclude(key, answer, &own, with_times).await;
        let loaded = |value, times: Times| Loaded { value, info: times.with(outcome) };
        let result = match result {
            // The store cannot be reached and has not stored the value: do not wait for it.
            Ok(((value, storage), times)) if storage == Storage::Unleased || is_away && self.passes_by() => {
                self.state.local.forget(&ChangedName::value(key));
                self.state.local.announce_later(ChangedName::value(key));
                Ok(loaded(value, times))
            }
            // The refresh is announced whichever flight has answered it: even if the store had no value, a process may have a copy. It is
            // announced even if the value is not stored: the change that ended its lease may still wait for copies of the older one.
            Ok(((value, _), times)) => {
                self.state.late_commits.ended(key).await;
                self.announce_refresh(key).await.map(|()| loaded(value, times)).map_err(LoadError::Guard)
            }
            Err(error) => Err(error),
        };
        self.answered(key, outcome, result)
    }

    fn load_error<E: Send + Sync + 'static>(&self, failure: Failure) -> LoadError<E> {
        failure.into_load_error(|error| self.policy.errors.decode(error))
    }

    fn answered<T, E>(
        &self,
        key: &Key,
        outcome: Outcome,
        result: Result<T, LoadError<E>>,
    ) -> Result<T, LoadError<E>> {
        self.count_answer(key, if result.is_ok() { outcome } else { Outcome::Failed });
        result
    }

    /// Step 8 for a caller with a loader.
    async fn conclude<V, T, E>(
        &self,
        key: &Key,
        answer: MissOutcome<V>,
        result: &OwnResult<T, E>,
        own: impl FnOnce(T, Option<&Entry>) -> V,
    ) -> (Outcome, Result<V, LoadError<E>>)
    where
        E: Send + Sync + 'static,
    {
        let own =
            |entry: Option<&Entry>| lock(result).take().map(|result| result.map(|value| own(value, entry)));
        match answer {
            MissOutcome::Coalesced(value, _) => (Outcome::Coalesced, Ok(value)),
            MissOutcome::Stale(value, _) => (Outcome::Stale, Ok(value)),
            MissOutcome::Failed(failure) => (Outcome::Failed, Err(self.load_error(failure))),
            MissOutcome::Led(ending) => {
                let entry = if let FlightOutcome::Value(entry) = &ending { Some(entry) } else { None };
                (Outcome::Led, own(entry).unwrap_or_else(|| Err(self.load_error(ending.into_failure()))))
            }
            MissOutcome::Alone(loader) => {
                let call = Call { state: &self.state, policy: &self.policy, key };
                let failure = match run_alone(call, loader).await {
                    Ok(ran) => ran.err().unwrap_or_else(Failure::vanished),
                    Err(panic) => Failure::Panicked(panic_text(&*panic)),
                };
                let result = own(None).unwrap_or_else(|| Err(self.load_error(failure)));
                (Outcome::Bypassed, result)
            }
        }
    }
}
