//! Calls for many keys at once.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::Hash;

use futures_util::StreamExt as _;
use futures_util::stream;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::StampedeGuard;
use super::deadline::{CHANGES, SharedDeadline};
use super::load_many::paired;
use super::typed::TypedReader;
use crate::error::{Error, LoadError};
use crate::key::{CacheKey, Key};
use crate::read_through::call::Call;
use crate::read_through::look_up_many::peek_many;

impl StampedeGuard {
    /// Returns the stored values of many keys, and loads those that are missing by one call of `load` for each thousand: each key once
    /// in the whole fleet.
    ///
    /// The answers are in the order of `keys`; a key that occurs twice is answered twice. All keys are looked for together, many by one
    /// command. Then each missing key has its own lease: `load` is called with exactly the keys that this call is to load, those of the
    /// leases that it was given, and returns their values in any order. The other keys are awaited from the callers that load them, in
    /// this process or in another, while the call runs.
    /// A value is stored under its own key, with its own lifetime, so [`get_or_load`](Self::get_or_load) of an `Option<T>`,
    /// [`invalidate`](Self::invalidate) and [`get`](Self::get) find it.
    ///
    /// A key for which `load` returns no value is answered with `None`, which is stored for the policy's
    /// [`negative_for`](crate::PolicyBuilder::negative_for); or with an error, under
    /// [`OnAbsent::Fail`](crate::OnAbsent::Fail). A pair with a key that was not asked for is ignored.
    ///
    /// `load` is called again only for keys that another caller was to load and did not: its process died, its load panicked, or its
    /// value could not be stored. Under [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) each call of `load` takes
    /// one permit, for all its keys; its [`load_timeout`](crate::PolicyBuilder::load_timeout) is that of one load.
    /// [`Stats::loads`](crate::Stats::loads) counts keys.
    ///
    /// # Errors
    ///
    /// As [`get_or_load`](Self::get_or_load), for each key. An error of `load` is that of all its keys; where keys fail
    /// apart, see [`get_or_load_many_each`](Self::get_or_load_many_each). For the first error of all:
    /// `answers.into_iter().collect::<Result<Vec<_>, _>>()?`.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime with time.
    ///
    /// # Cancel safety
    ///
    /// As [`get_or_load`](Self::get_or_load), for each key: a call of `load` that has begun goes on and its values are stored.
    ///
    /// # Consistency
    ///
    /// As [`get_or_load`](Self::get_or_load), for each key. The values of several keys are not of one moment.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::collections::HashMap;
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert(("price", 1), &499_u32).await?;
    /// let prices = guard
    ///     .get_or_load_many([("price", 1), ("price", 2), ("price", 3)], |missing| async move {
    ///         // SELECT id, price FROM prices WHERE id IN (..)
    ///         let rows: HashMap<_, u32> = missing.into_iter().filter(|(_, id)| *id < 3).map(|key| (key, 250)).collect();
    ///         Ok::<_, std::io::Error>(rows)
    ///     })
    ///     .await;
    /// let prices = prices.into_iter().collect::<Result<Vec<_>, _>>()?;
    /// assert_eq!(prices, [Some(499), Some(250), None]);
    /// # Ok(()) }
    /// ```
    pub async fn get_or_load_many<K, T, E, F, Fut, V>(
        &self,
        keys: impl IntoIterator<Item = K>,
        load: F,
    ) -> Vec<Result<Option<T>, LoadError<E>>>
    where
        K: Into<CacheKey> + Clone + Eq + Hash + Send + Sync + 'static,
        T: Serialize + DeserializeOwned + Clone + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: Fn(Vec<K>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<V, E>> + Send + 'static,
        V: IntoIterator<Item = (K, T)>,
    {
        let answers = self.load_many(keys.into_iter().collect(), paired(load)).await;
        answers.into_iter().map(|answer| answer.result).collect()
    }

    /// As [`get_or_load_many`](Self::get_or_load_many), for a loader that fails key by key.
    ///
    /// # Errors
    ///
    /// As [`get_or_load_many`](Self::get_or_load_many).
    ///
    /// # Panics
    ///
    /// As [`get_or_load_many`](Self::get_or_load_many).
    ///
    /// # Cancel safety
    ///
    /// As [`get_or_load_many`](Self::get_or_load_many).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let answers = guard
    ///     .get_or_load_many_each(["a", "b"], |missing| async move {
    ///         missing.into_iter().map(|key| (key, if key == "a" { Ok(1_u32) } else { Err("refused") })).collect::<Vec<_>>()
    ///     })
    ///     .await;
    /// assert_eq!(answers[0].as_ref().ok(), Some(&Some(1)));
    /// assert!(answers[1].is_err());
    /// # }
    /// ```
    pub async fn get_or_load_many_each<K, T, E, F, Fut, V>(
        &self,
        keys: impl IntoIterator<Item = K>,
        load: F,
    ) -> Vec<Result<Option<T>, LoadError<E>>>
    where
        K: Into<CacheKey> + Clone + Eq + Hash + Send + Sync + 'static,
        T: Serialize + DeserializeOwned + Clone + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: Fn(Vec<K>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = V> + Send + 'static,
        V: IntoIterator<Item = (K, Result<T, E>)>,
    {
        let load = move |keys| {
            let loading = load(keys);
            async move { Ok(loading.await.into_iter().collect()) }
        };
        let answers = self.load_many(keys.into_iter().collect(), load).await;
        answers.into_iter().map(|answer| answer.result).collect()
    }

    /// Returns the stored values of many keys, in their order; never loads. One read looks for all keys.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get), for each key.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{Error, StampedeGuard};
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert("a", &1_u32).await?;
    /// let found: Result<Vec<Option<u32>>, Error> = guard.get_many(["a", "b"]).await.into_iter().collect();
    /// assert_eq!(found?, [Some(1), None]);
    /// # Ok(()) }
    /// ```
    pub async fn get_many<T, K>(&self, keys: impl IntoIterator<Item = K>) -> Vec<Result<Option<T>, Error>>
    where
        T: DeserializeOwned + 'static,
        K: Into<CacheKey>,
    {
        let guard = self.current();
        let keys: Vec<Result<Key, Error>> = keys.into_iter().map(|key| guard.key(key)).collect();
        let call = |key| Call { state: &guard.state, policy: &guard.policy, key };
        let calls = keys.iter().flatten().map(call).collect();
        let mut found = peek_many(calls, &TypedReader::new()).await.into_iter();
        let answers = keys.iter().filter_map(|key| match key {
            Ok(key) => found
                .next()
                .map(|found| found.map_err(|error| Error::store("looking up the entry", key, error))),
            Err(error) => Some(Err(error.clone())),
        });
        answers.collect()
    }

    /// Stores many values, as [`insert`](Self::insert) does with each; in their order. Of a key that occurs twice the last value is
    /// stored, and its answer is that of both.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert), for each key. Once the store has confirmed none for two seconds, those that are left are not tried.
    /// For the first error of all: `.into_iter().collect::<Result<(), _>>()?`.
    ///
    /// # Cancel safety
    ///
    /// Dropped, some may have happened.
    pub async fn insert_many<K, T>(&self, values: impl IntoIterator<Item = (K, T)>) -> Vec<Result<(), Error>>
    where
        K: Into<CacheKey>,
        T: Serialize + Sync + 'static,
    {
        let guard = self.current();
        let deadline = SharedDeadline::new(&guard.policy);
        let (keys, values): (Vec<Result<Key, Error>>, Vec<T>) =
            values.into_iter().map(|(key, value)| (guard.key(key), value)).unzip();
        // The changes are under way at once and are repeated, so two of one key would end in any order.
        let places = keys.iter().enumerate();
        let last: HashMap<_, _> =
            places.clone().filter_map(|(at, key)| Some((key.as_ref().ok()?.name(), at))).collect();
        let places: Vec<_> = places
            .map(|(at, key)| key.as_ref().ok().and_then(|key| last.get(key.name())).copied().unwrap_or(at))
            .collect();
        let insert = async |(at, (key, value)): (usize, (&Result<Key, Error>, &T))| {
            let key = match key {
                Ok(key) => key,
                Err(error) => return (at, Err(error.clone())),
            };
            let insert = async |until| guard.insert_until(key, value, Vec::new(), until).await;
            (at, Box::pin(deadline.holds(guard.state.store.is_down(key.name()), insert)).await)
        };
        let inserts = keys.iter().zip(&values).enumerate().filter(|(at, _)| places[*at] == *at);
        let answers: HashMap<_, _> = stream::iter(inserts.map(insert)).buffered(CHANGES).collect().await;
        places.iter().filter_map(|at| answers.get(at).cloned()).collect()
    }

    /// Removes many keys, as [`invalidate`](Self::invalidate) does with each; in their order.
    ///
    /// # Errors
    ///
    /// As [`invalidate`](Self::invalidate), for each key. Once the store has confirmed none for two seconds, those that are left are not
    /// tried in this call: they are kept, as those that were. For the first error of all: `.into_iter().collect::<Result<(), _>>()?`.
    ///
    /// # Cancel safety
    ///
    /// Dropped, some may have happened in the store; all that were not confirmed are kept, as after an error.
    ///
    /// # Consistency
    ///
    /// As [`invalidate`](Self::invalidate), for each key. Values that are always removed together have a tag in common:
    /// [`invalidate_tag`](Self::invalidate_tag) is one command.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert_many([("a", 1_u32), ("b", 2)]).await.into_iter().collect::<Result<(), _>>()?;
    /// guard.invalidate_many(["a", "b"]).await.into_iter().collect::<Result<(), _>>()?;
    /// assert_eq!(guard.get::<u32>("a").await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn invalidate_many<K: Into<CacheKey>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Vec<Result<(), Error>> {
        let made = self.invalidation().keys(keys).begin().make_each().await;
        made.into_iter().map(|made| made.map_err(|failed| failed.error)).collect()
    }
}
