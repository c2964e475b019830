//! Calls with a loader for one key: [`StampedeGuard::get_or_load`], and the calls of [`Load`], whose loaders take a [`LoadContext`] and
//! which also return how the caller was answered and how old the value is ([`AnswerInfo`]).

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::StampedeGuard;
use super::memoize::{CacheableResponse, SharedError};
use super::typed::{LoadContext, loader, read_shared, read_typed, read_with_storage, with_storage};
use crate::error::LoadError;
use crate::key::{CacheKey, Key};
use crate::loader::Loader;
use crate::observe::Outcome;
use crate::read_through::call::passes_by;
use crate::read_through::{OwnResult, answer, reload};
use crate::store::protocol::ChangedName;
use crate::value::SharedValue;
use crate::value::entry::{Entry, Storage};

impl StampedeGuard {
    /// Returns the stored value of `key`, or loads it: once in the whole fleet, however many callers need it at
    /// once.
    ///
    /// One caller's `load` runs, in a separate task; all others, in every process, receive its value,
    /// or its failure. Their own `load` is used only if the first caller's process dies, if its `load`
    /// panics, or if [`wait_timeout`](crate::PolicyBuilder::wait_timeout) passes.
    ///
    /// So `load` outlives its caller and must own all it uses: clone an `Arc`, or a pool, into it. It has no task-locals. It must
    /// not block its thread for as long as the [`lease`](crate::PolicyBuilder::lease), which could not be renewed: use `spawn_blocking`.
    ///
    /// The value is stored for the policy's [`fresh_for`](crate::PolicyBuilder::fresh_for). `None`, `()` and
    /// `false` are values like any other. (`Some(None)` and `Some(())` are encoded as `None` is, and are decoded as `None`.)
    ///
    /// A value whose encoding is longer than [`max_body`](crate::PolicyBuilder::max_body), or that cannot be encoded or
    /// read back (a field that is skipped one way only, a NaN in JSON), goes only to the caller that loaded it:
    /// **all others load for themselves, at once.** It is counted in [`Stats::unshareable`](crate::Stats::unshareable),
    /// and logged as a warning, at most once a minute.
    ///
    /// # Errors
    ///
    /// [`LoadError::Loader`] and [`LoadError::Remote`] if the load failed, this caller's or another's;
    /// [`LoadError::Panicked`]; [`LoadError::Guard`] with the [`ErrorKind`](crate::ErrorKind)
    ///
    /// - `InvalidKey` for an empty key,
    /// - `Timeout` for a load longer than [`load_timeout`](crate::PolicyBuilder::load_timeout), or a wait longer than
    ///   [`wait_timeout`](crate::PolicyBuilder::wait_timeout) with [`OnWaitTimeout::Fail`](crate::OnWaitTimeout),
    /// - `Overloaded` if [`max_waiters`](crate::PolicyBuilder::max_waiters) wait for the key already (10,000 by default), and under
    ///   [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) and
    ///   [`max_fail_open_loads`](crate::PolicyBuilder::max_fail_open_loads),
    /// - `Reentrant` for a load that asks for its own key,
    /// - `Vanished` for a load whose runtime was shut down,
    /// - `Store` for a store that is down, with [`OnStoreDown::FailClosed`](crate::OnStoreDown) only.
    ///
    /// Failures are shared through the store: **the text of a loader's error, or of its panic, goes to the store and to waiters in
    /// other processes**, up to 1 KiB of it. Keep secrets out of it.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime with time: the load is a spawned task, and all waits have timers.
    ///
    /// # Cancel safety
    ///
    /// Dropping this ends only this caller's wait. A load that has begun goes on and is stored; if it
    /// has not begun, another caller leads it, if there is one. But a load that this caller runs for itself, outside the
    /// protocol (beyond [`max_flights`](crate::StampedeGuardBuilder::max_flights)), is cancelled.
    ///
    /// # Consistency
    ///
    /// The lease is for efficiency: when it is lost (its holder paused for longer, the server failed
    /// over) two loads may run, and only the one that still holds it is stored.
    pub async fn get_or_load<T, E, F, Fut>(
        &self,
        key: impl Into<CacheKey>,
        load: F,
    ) -> Result<T, LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let (key, reader) = (key.into(), read_typed::<T>);
        let audits = match self.hit_at_once(&key, &reader) {
            Ok(value) => return Ok(value),
            Err(audits) => audits,
        };
        let guard = self.current();
        let key = guard.key(key)?;
        let load = |mut context: LoadContext<T>| {
            // The validator of the previous value says nothing about the value of a loader that cannot see it.
            context.set_validator("");
            load()
        };
        let loader = |own: OwnResult<T, E>| loader(load, guard.call(&key), own);
        answer(guard.call(&key), (&reader, audits), loader, |own, _| own).await.1
    }

    /// Begins a call with a loader that takes a [`LoadContext`]: [`Load::get`], [`Load::get_shared`] or [`Load::refresh`].
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use stampede_guard::{LoadContext, Outcome, StampedeGuard};
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let load = |mut cx: LoadContext<u64>| async move {
    ///     cx.fresh_for(Duration::from_secs(5));
    ///     Ok::<_, std::io::Error>(499)
    /// };
    /// let price = guard.load(("price", 7)).get(load).await?;
    /// assert_eq!((price.value, price.info.outcome), (499, Outcome::Led));
    /// let price = guard.load(("price", 7)).get(load).await?;
    /// assert_eq!((price.value, price.info.outcome), (499, Outcome::Hit));
    /// // Clients may keep the price for as long as the guard does.
    /// let header = format!("max-age={}", price.info.fresh_for.as_secs());
    /// # let _ = header;
    /// # Ok(()) }
    /// ```
    pub fn load(&self, key: impl Into<CacheKey>) -> Load<'_> {
        Load { guard: self, key: key.into() }
    }
}

/// A call with a loader for one key, made by [`StampedeGuard::load`].
#[must_use = "nothing is loaded before `get`, `get_shared` or `refresh`"]
#[derive(Clone, Debug)]
pub struct Load<'a> {
    guard: &'a StampedeGuard,
    key: CacheKey,
}

/// A value, and how its caller was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loaded<T> {
    /// The value.
    pub value: T,
    /// Where the value came from, and how old it is.
    pub info: AnswerInfo,
}

impl Load<'_> {
    /// Like [`get_or_load`](StampedeGuard::get_or_load), with a [`LoadContext`] for the loader: the previous value and its validator, the
    /// deadline of the load, and setters for how long its value is stored. Also returns how the caller was answered and how old its value
    /// is, at no extra cost.
    ///
    /// # Errors
    ///
    /// See [`get_or_load`](StampedeGuard::get_or_load).
    ///
    /// # Cancel safety
    ///
    /// See [`get_or_load`](StampedeGuard::get_or_load).
    pub async fn get<T, E, F, Fut>(self, load: F) -> Result<Loaded<T>, LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce(LoadContext<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        self.answer(read_typed::<T>, load, |own| own).await
    }

    /// Like [`get`](Self::get), for values that are shared: the callers of this process receive one decoded value.
    ///
    /// A hit of the local tier (`PolicyBuilder::local_for`) neither decodes nor copies: all its callers have the
    /// same `Arc`.
    ///
    /// # Errors
    ///
    /// See [`get_or_load`](StampedeGuard::get_or_load).
    ///
    /// # Cancel safety
    ///
    /// See [`get_or_load`](StampedeGuard::get_or_load).
    ///
    /// # Consistency
    ///
    /// Like [`get_or_load`](StampedeGuard::get_or_load). A local hit is as current as a read of the store: once an invalidation has
    /// returned, no later caller in any process receives an older value.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::sync::Arc;
    /// use std::time::Duration;
    /// use stampede_guard::{MemoryStore, Policy, StampedeGuard};
    ///
    /// let policy = Policy::builder().local_for(Duration::from_secs(30)).build()?;
    /// let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;
    /// let load = async || Ok::<_, std::io::Error>(vec![1_u64, 2, 3]);
    /// let report: Arc<Vec<u64>> = guard.load("report").get_shared(move |_| load()).await?.value;
    /// assert_eq!(*report, [1, 2, 3]);
    /// # Ok(()) }
    /// ```
    pub async fn get_shared<T, E, F, Fut>(self, load: F) -> Result<Loaded<Arc<T>>, LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + Sync + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce(LoadContext<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        self.answer(read_shared::<T>, load, Arc::new).await
    }

    /// Loads the key now, even if the stored value is fresh: once in the whole fleet for all concurrent callers.
    ///
    /// A load of the key that is already running counts as this load, and so does a load that failed less than
    /// [`error_for`](crate::PolicyBuilder::error_for) ago; after a change at the origin, use
    /// [`invalidate`](StampedeGuard::invalidate) instead. Meanwhile other callers are served the stored value.
    ///
    /// # Errors
    ///
    /// The errors of [`get_or_load`](StampedeGuard::get_or_load); the stored value stays. No older value stands in for a load that fails,
    /// and no [`soft_timeout`](crate::PolicyBuilder::soft_timeout) ends the wait for the load. Where processes have local copies
    /// (`local_for`), also [`ErrorKind::Store`](crate::ErrorKind::Store), if the store was reachable and does not confirm within two
    /// seconds that they were notified.
    ///
    /// # Cancel safety
    ///
    /// See [`get_or_load`](StampedeGuard::get_or_load).
    ///
    /// # Consistency
    ///
    /// Once it has returned a value that was stored, no later caller in any process receives an older one, from the store or from
    /// memory: it waits until the store has the value, for a [`lease`](crate::PolicyBuilder::lease) at most, and then until all older
    /// copies are dropped. The same holds for a value that can not be stored, or must not be
    /// ([`do_not_store`](crate::LoadContext::do_not_store)): it removes the older one.
    ///
    /// A value is returned without an error even if it is not stored, because it was loaded without the store or its lease was lost, or
    /// if the store has not confirmed it by then. In these cases the older value may still be served.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert("rate", &107_u32).await?;
    /// guard.load("rate").refresh(|_| async { Ok::<_, std::io::Error>(108_u32) }).await?;
    /// assert_eq!(guard.get("rate").await?, Some(108_u32));
    /// # Ok(()) }
    /// ```
    pub async fn refresh<T, E, F, Fut>(self, load: F) -> Result<Loaded<T>, LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce(LoadContext<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let guard = self.guard.current();
        let key = guard.key(self.key)?;
        guard.load_anyway(&key, |own| loader(load, guard.call(&key), own).that_may_tag()).await
    }

    async fn answer<T: CacheableResponse, E: SharedError, F, Fut, V>(
        self,
        read: impl Fn(&Entry, u64, Option<&SharedValue>) -> Option<V>,
        load: F,
        own: impl FnOnce(T) -> V,
    ) -> Result<Loaded<V>, LoadError<E>>
    where
        F: FnOnce(LoadContext<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let (Self { guard, key }, reader) = (self, timed(read));
        let audits = match guard.hit_at_once(&key, &reader) {
            Ok((value, times)) => return Ok(Loaded { value, info: times.with(Outcome::LocalHit) }),
            Err(audits) => audits,
        };
        let guard = guard.current();
        let key = guard.key(key)?;
        let loader = |result: OwnResult<T, E>| loader(load, guard.call(&key), result).that_may_tag();
        let own = |value, entry: Option<&Entry>| (own(value), Times::of_loaded(entry));
        let (outcome, result) = answer(guard.call(&key), (&reader, audits), loader, own).await;
        result.map(|(value, times)| Loaded { value, info: times.with(outcome) })
    }
}

/// How one caller was answered, and how old its value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AnswerInfo {
    /// Where the value came from.
    pub outcome: Outcome,
    /// How long ago the value was stored, by the store's clock, to the millisecond. Zero for a value that its own caller has just loaded.
    pub age: Duration,
    /// For how much longer the value is fresh: zero for a stale value, and for a value that was not stored, such as one that was loaded
    /// without the store.
    pub fresh_for: Duration,
}

/// The age of a value, and the rest of its freshness.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    age: Duration,
    fresh_for: Duration,
}

impl Times {
    pub(crate) fn of(entry: &Entry, now: u64) -> Self {
        // A caller that waited for the load took its `now` before the value was stored, so `now` may be earlier than `stored_at`.
        let now = now.max(entry.stored_at);
        Self {
            age: Duration::from_millis(now.saturating_sub(entry.stored_at)),
            fresh_for: Duration::from_millis(entry.fresh_until().saturating_sub(now)),
        }
    }

    /// The times of a value that was just loaded; `None` if no other caller may have the value.
    fn of_loaded(entry: Option<&Entry>) -> Self {
        entry.map_or_else(Self::default, |entry| Self::of(entry, entry.stored_at))
    }

    /// The times of a value that its own caller has just loaded.
    pub(crate) fn just_loaded(fresh_for: Duration) -> Self {
        Self { age: Duration::ZERO, fresh_for }
    }

    pub(crate) fn with(self, outcome: Outcome) -> AnswerInfo {
        AnswerInfo { outcome, age: self.age, fresh_for: self.fresh_for }
    }
}

/// Makes `read` also return the times of the value.
fn timed<V>(
    read: impl Fn(&Entry, u64, Option<&SharedValue>) -> Option<V>,
) -> impl Fn(&Entry, u64, Option<&SharedValue>) -> Option<(V, Times)> {
    move |entry, now, shared| Some((read(entry, now, shared)?, Times::of(entry, now)))
}

impl StampedeGuard {
    /// Loads a value, whatever is stored, and announces the refresh to the other processes.
    async fn load_anyway<T, E>(
        &self,
        key: &Key,
        loader: impl FnOnce(OwnResult<T, E>) -> Loader,
    ) -> Result<Loaded<T>, LoadError<E>>
    where
        T: DeserializeOwned + 'static,
        E: Send + Sync + 'static,
    {
        let call = self.call(key);
        let own = |value, entry: Option<&Entry>| (with_storage(value, entry), Times::of_loaded(entry));
        let (outcome, result, is_away) = reload(call, timed(read_with_storage), loader, own).await;
        let loaded = |value, times: Times| Loaded { value, info: times.with(outcome) };
        let result = match result {
            // The store cannot be reached and has not stored the value: do not wait for the announcement.
            Ok(((value, storage), times))
                if storage == Storage::Unleased || is_away && passes_by(call.state, call.policy) =>
            {
                self.state.local.forget(&ChangedName::value(key));
                self.state.local.announce_later(ChangedName::value(key));
                Ok(loaded(value, times))
            }
            // The refresh is announced whichever flight has answered it: even if the store had no value, a process may have a copy. It is
            // announced even if the value is not stored: the change that ended the load's lease may still wait for older copies.
            Ok(((value, _), times)) => {
                self.state.late_commits.ended(key).await;
                self.announce_refresh(key).await.map(|()| loaded(value, times)).map_err(LoadError::Guard)
            }
            Err(error) => Err(error),
        };
        self.count_answer(key, if result.is_ok() { outcome } else { Outcome::Failed });
        result
    }
}
