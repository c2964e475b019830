//! Calls whose answer says how the value was had, and how old it is.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::StampedeGuard;
use super::typed::{OwnResult, SharedReader, TypedReader, loader};
use crate::error::LoadError;
use crate::key::CacheKey;
use crate::observe::Outcome;
use crate::value::entry::Entry;
use crate::value::freshness::Freshness;
use crate::value::reader::{EntryReader, SharedValue};

/// How one caller was answered, and how old its value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AnswerInfo {
    /// From where the value came.
    pub outcome: Outcome,
    /// How long ago the value was stored, in milliseconds of the store's clock. Zero for a value that its own caller has just loaded.
    pub age: Duration,
    /// For how much longer the value is fresh: zero for a stale value, and for one that was not stored, as after a load without the
    /// store.
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
        // A caller that waited for the load came before its value was stored.
        let now = now.max(entry.stored_at);
        Self {
            age: Duration::from_millis(now.saturating_sub(entry.stored_at)),
            fresh_for: Duration::from_millis(entry.expiry.fresh_until.saturating_sub(now)),
        }
    }

    /// Of a value that was just loaded; `None` if no other caller may have it.
    fn of_loaded(entry: Option<&Entry>) -> Self {
        entry.map_or_else(Self::default, |entry| Self::of(entry, entry.stored_at))
    }

    /// Of a value that its own caller has just loaded.
    #[cfg(feature = "http")]
    pub(crate) fn just_loaded(fresh_for: Duration) -> Self {
        Self { age: Duration::ZERO, fresh_for }
    }

    pub(crate) fn with(self, outcome: Outcome) -> AnswerInfo {
        AnswerInfo { outcome, age: self.age, fresh_for: self.fresh_for }
    }
}

/// Reads a value with its times.
struct TimedReader<R>(R);

impl<R: EntryReader> EntryReader for TimedReader<R> {
    type Value = (R::Value, Times);

    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<Self::Value> {
        Some((self.0.open(entry, now, shared)?, Times::of(entry, now)))
    }

    fn serves(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Freshness {
        self.0.serves(entry, now, shared)
    }
}

impl StampedeGuard {
    /// As [`get_or_load`](Self::get_or_load), with how the caller was answered and how old its value is. Costs nothing more.
    ///
    /// # Errors
    ///
    /// As [`get_or_load`](Self::get_or_load).
    ///
    /// # Cancel safety
    ///
    /// As [`get_or_load`](Self::get_or_load).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{Outcome, StampedeGuard};
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let load = || async { Ok::<_, std::io::Error>(499_u32) };
    /// let (_, info) = guard.get_or_load_with_outcome("price", load).await?;
    /// assert_eq!(info.outcome, Outcome::Led);
    /// let (price, info) = guard.get_or_load_with_outcome("price", load).await?;
    /// assert_eq!((price, info.outcome), (499, Outcome::Hit));
    /// // Clients may keep the price for as long as the guard does.
    /// let header = format!("max-age={}", info.fresh_for.as_secs());
    /// # let _ = header;
    /// # Ok(()) }
    /// ```
    pub async fn get_or_load_with_outcome<T, E, F, Fut>(
        &self,
        key: impl Into<CacheKey>,
        load: F,
    ) -> Result<(T, AnswerInfo), LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let reader = TypedReader::new();
        self.with_outcome(key.into(), TimedReader(reader), load, |own| own).await
    }

    /// As [`get_or_load_shared`](Self::get_or_load_shared), with how the caller was answered and how old its value is.
    ///
    /// # Errors
    ///
    /// As [`get_or_load`](Self::get_or_load).
    ///
    /// # Cancel safety
    ///
    /// As [`get_or_load`](Self::get_or_load).
    pub async fn get_or_load_shared_with_outcome<T, E, F, Fut>(
        &self,
        key: impl Into<CacheKey>,
        load: F,
    ) -> Result<(Arc<T>, AnswerInfo), LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + Sync + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let reader = SharedReader(TypedReader::new());
        self.with_outcome(key.into(), TimedReader(reader), load, Arc::new).await
    }

    async fn with_outcome<T, E, F, Fut, R>(
        &self,
        key: CacheKey,
        reader: TimedReader<R>,
        load: F,
        own: impl FnOnce(T) -> R::Value,
    ) -> Result<(R::Value, AnswerInfo), LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        R: EntryReader,
    {
        let audits = match self.hit_at_once(&key, &reader) {
            Ok((value, times)) => return Ok((value, times.with(Outcome::LocalHit))),
            Err(audits) => audits,
        };
        let guard = self.current();
        let key = guard.key(key)?;
        let loader = |result: &OwnResult<T, E>| loader(load, &guard.state, &guard.policy, &key, result);
        let own = |value, entry: Option<&Entry>| (own(value), Times::of_loaded(entry));
        let (outcome, result) = guard.answer(&key, &reader, audits, loader, own).await;
        result.map(|(value, times)| (value, times.with(outcome)))
    }
}
