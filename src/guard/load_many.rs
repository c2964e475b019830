//! Loads of many keys: the caller's `load` is called once for each round of a batch, and each flight has a loader of one key, which waits
//! for its part of that call. Also the warm-up, which loads the values of many keys before callers need them.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::StampedeGuard;
use super::memoize::{CacheableResponse, SharedError};
use super::typed::{LoadSettings, concluded, read_with_storage, with_storage};
use crate::error::{Error, ErrorKind, Failure, LoadError};
use crate::key::{CacheKey, Key};
use crate::loader::{LoadOutput, LoadResult, LoadScope, Loader};
use crate::observe::{Outcome, panic_text};
use crate::policy::OnAbsent;
use crate::read_through::batch::{BatchMember, LoadBatch};
use crate::read_through::call::{Call, passes_by};
use crate::read_through::look_up::{Lookup, look_many};
use crate::read_through::permits::has_room;
use crate::read_through::{OwnResult, answer_lookup};
use crate::sync::lock;
use crate::value::entry::Storage;

/// The result of one call of a caller's `load`.
type RoundResult<K, T, E> = Result<HashMap<K, Result<T, E>>, E>;
type LoadFuture<K, T, E> = Pin<Box<dyn Future<Output = RoundResult<K, T, E>> + Send>>;
type RoundLoader<K, T, E> = Arc<dyn Fn(Vec<K>) -> LoadFuture<K, T, E> + Send + Sync>;

/// A key in a call for many keys.
trait BatchKey: Into<CacheKey> + Clone + Eq + Hash + Send + Sync + 'static {}
impl<K: Into<CacheKey> + Clone + Eq + Hash + Send + Sync + 'static> BatchKey for K {}

/// How many keys one call of a caller's `load` receives at most. Even a slow server grants this many leases, and stores this many values,
/// in much less time than the shortest lease.
const MOST_TOGETHER: usize = 1_000;

/// How one key's caller was answered.
struct KeyAnswer<T, E> {
    outcome: Outcome,
    /// Whether the value is stored, if this caller has loaded it.
    storage: Storage,
    result: Result<Option<T>, LoadError<E>>,
}

// Not derived: a derived implementation would require `E: Clone`.
impl<T: Clone, E> Clone for KeyAnswer<T, E> {
    fn clone(&self) -> Self {
        Self { result: self.result.clone(), ..*self }
    }
}

impl<T, E> KeyAnswer<T, E> {
    fn refused(error: &Error) -> Self {
        let result = Err(LoadError::Guard(error.clone()));
        Self { outcome: Outcome::Failed, storage: Storage::NotStored, result }
    }
}

/// One key's part of the result of a call.
type LoadedPart<T, E> = Result<Option<T>, LoadError<E>>;

/// The sender to the loader of one key, which waits for its part of the call's result.
type Awaits<T, E> = oneshot::Sender<LoadedPart<T, E>>;

/// The keys of one batch, and the loaders that wait for their parts of a call.
struct Parts<K, T, E> {
    keys: Vec<K>,
    awaited: Vec<Mutex<Option<Awaits<T, E>>>>,
    load: RoundLoader<K, T, E>,
}

/// Makes a loader that each round of the batch calls. `load` is called in an async block: a panic of the call itself is then handled
/// like a panic of its future.
fn round_loader<K, T, E, F, Fut>(load: F) -> RoundLoader<K, T, E>
where
    K: Send + 'static,
    F: Fn(Vec<K>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = RoundResult<K, T, E>> + Send + 'static,
{
    let load = Arc::new(load);
    Arc::new(move |keys| {
        let load = Arc::clone(&load);
        Box::pin(async move { load(keys).await })
    })
}

/// Converts a loader that returns pairs to one that returns a result for each key.
fn paired<K, T, E, F, Fut, V>(load: F) -> RoundLoader<K, T, E>
where
    K: Eq + Hash + Send + 'static,
    F: Fn(Vec<K>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<V, E>> + Send + 'static,
    V: IntoIterator<Item = (K, T)>,
{
    round_loader(move |keys| {
        let loading = load(keys);
        async move { Ok(loading.await?.into_iter().map(|(key, value)| (key, Ok(value))).collect()) }
    })
}

impl StampedeGuard {
    /// Returns the stored values of many keys, and loads the missing ones, by one call of `load` for each thousand: each key once
    /// in the whole fleet.
    ///
    /// The answers are in the order of `keys`; a key that occurs twice has two answers. All keys are looked up together, many by one
    /// command. Then each missing key has its own lease: `load` receives exactly the keys for which this call got the lease, and returns
    /// their values in any order. Meanwhile the call waits for the values of the other keys, which other callers load, in this process
    /// or in another.
    /// A value is stored under its own key, with its own lifetime, so [`get_or_load`](Self::get_or_load) of an `Option<T>`,
    /// [`invalidate`](Self::invalidate) and [`get`](Self::get) find it.
    ///
    /// A key for which `load` returns no value is answered with `None`, which is stored for the policy's
    /// [`negative_for`](crate::PolicyBuilder::negative_for); or with an error, under
    /// [`OnAbsent::Fail`](crate::OnAbsent::Fail). A pair with a key that was not requested is ignored.
    ///
    /// `load` is called again only for keys that another caller began to load without success: its process died, its load panicked, or
    /// its value could not be stored. Under [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) each call of `load` takes
    /// one permit, for all its keys; its [`load_timeout`](crate::PolicyBuilder::load_timeout) is that of one load.
    /// [`Stats::loads`](crate::Stats::loads) counts keys.
    ///
    /// # Errors
    ///
    /// The errors of [`get_or_load`](Self::get_or_load), for each key. All keys of a call of `load` have its error; for keys that fail
    /// separately, see [`get_or_load_many_each`](Self::get_or_load_many_each). For the first error of all:
    /// `answers.into_iter().collect::<Result<Vec<_>, _>>()?`.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime with time.
    ///
    /// # Cancel safety
    ///
    /// Like [`get_or_load`](Self::get_or_load), for each key: a call of `load` that has begun goes on and its values are stored.
    ///
    /// # Consistency
    ///
    /// Like [`get_or_load`](Self::get_or_load), for each key. The values of several keys may be of different moments.
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

    /// Like [`get_or_load_many`](Self::get_or_load_many), for a loader that fails key by key.
    ///
    /// # Errors
    ///
    /// See [`get_or_load_many`](Self::get_or_load_many).
    ///
    /// # Panics
    ///
    /// See [`get_or_load_many`](Self::get_or_load_many).
    ///
    /// # Cancel safety
    ///
    /// See [`get_or_load_many`](Self::get_or_load_many).
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
        let load = round_loader(move |keys| {
            let loading = load(keys);
            async move { Ok(loading.await.into_iter().collect()) }
        });
        let answers = self.load_many(keys.into_iter().collect(), load).await;
        answers.into_iter().map(|answer| answer.result).collect()
    }

    /// Steps 2 to 8 for many keys. Returns the answers in the order of the keys; a key that occurs twice has two answers.
    async fn load_many<K: BatchKey, T: CacheableResponse + Clone, E: SharedError>(
        &self,
        keys: Vec<K>,
        load: RoundLoader<K, T, E>,
    ) -> Vec<KeyAnswer<T, E>> {
        let mut positions = HashMap::with_capacity(keys.len());
        let mut distinct = Vec::with_capacity(keys.len());
        let order: Vec<usize> = keys
            .into_iter()
            .map(|key| {
                *positions.entry(key.clone()).or_insert_with(|| {
                    distinct.push(key);
                    distinct.len() - 1
                })
            })
            .collect();
        let mut answers = Vec::with_capacity(distinct.len());
        for keys in distinct.chunks(MOST_TOGETHER) {
            let loaded = Box::pin(self.current().load_distinct(keys.to_vec(), &load)).await;
            answers.extend(loaded.into_iter().map(Some));
        }
        let mut uses = vec![0_usize; answers.len()];
        order.iter().for_each(|&index| uses[index] += 1);
        let in_order = order.into_iter().filter_map(|index| {
            uses[index] -= 1;
            if uses[index] == 0 { answers[index].take() } else { answers[index].clone() }
        });
        in_order.collect()
    }

    async fn load_distinct<K: BatchKey, T: CacheableResponse, E: SharedError>(
        &self,
        keys: Vec<K>,
        load: &RoundLoader<K, T, E>,
    ) -> Vec<KeyAnswer<T, E>> {
        let names: Vec<Result<Key, Error>> = keys.iter().map(|key| self.key(key.clone())).collect();
        let asks = self.look_at(keys, &names).await;
        let loading = asks.iter().filter(|ask| ask.may_load()).map(|ask| ask.key.clone()).collect();
        let (parts, members) = Parts::batch(loading, load);
        let mut members = members.into_iter().enumerate();
        let mut answers = Vec::with_capacity(asks.len());
        for mut ask in asks {
            let member = ask.may_load().then(|| members.next()).flatten();
            if let (Some((_, member)), Some(lookup)) = (&member, &mut ask.lookup) {
                lookup.join_batch(member);
            }
            answers.push(Box::pin(self.answer_one(ask, member, &parts)));
        }
        let mut answers = join_all(answers).await.into_iter();
        let all = names.iter().filter_map(|name| match name {
            Ok(_) => answers.next(),
            Err(error) => Some(KeyAnswer::refused(error)),
        });
        all.collect()
    }

    /// Step 2 for the valid keys; invalid keys are left out.
    async fn look_at<'a, K, T: DeserializeOwned + 'static>(
        &'a self,
        keys: Vec<K>,
        names: &'a [Result<Key, Error>],
    ) -> Vec<Ask<'a, K, T>> {
        let ask = |(key, name): (K, &'a Result<Key, Error>)| {
            Some(Ask { key, call: self.call(name.as_ref().ok()?), lookup: None })
        };
        let mut asks: Vec<_> = keys.into_iter().zip(names).filter_map(ask).collect();
        if !passes_by(&self.state, &self.policy) {
            let calls = asks.iter().map(|ask| ask.call).collect();
            for (ask, lookup) in asks.iter_mut().zip(look_many(calls, &read_with_storage).await) {
                ask.lookup = Some(lookup);
            }
        }
        asks
    }

    async fn answer_one<K: BatchKey, T: CacheableResponse, E: SharedError>(
        &self,
        Ask { key, call, lookup }: Ask<'_, K, T>,
        member: Option<(usize, BatchMember)>,
        parts: &Arc<Parts<K, T, E>>,
    ) -> KeyAnswer<T, E> {
        // A hit is not in the batch: it needs a loader only for its audit, which loads alone.
        let loader = move |own: OwnResult<Option<T>, E>| match member {
            Some(member) => parts.loader(member, call, own),
            None => parts.alone(key, call, own),
        };
        let audits = lookup.is_some() && self.policy.audit.is_due();
        let (outcome, answer) =
            answer_lookup(call, lookup, (&read_with_storage, audits), loader, with_storage).await;
        let (storage, result) = match answer {
            Ok((value, storage)) => (storage, Ok(value)),
            Err(error) => (Storage::NotStored, Err(error)),
        };
        KeyAnswer { outcome, storage, result }
    }
}

/// One key of a caller, after step 2.
struct Ask<'a, K, T> {
    key: K,
    call: Call<'a>,
    /// `None` if the caller receives the value of its own load.
    lookup: Option<Lookup<'a, (Option<T>, Storage)>>,
}

impl<K, T> Ask<'_, K, T> {
    /// Whether the key may be loaded: it is missing, or due for a background refresh.
    fn may_load(&self) -> bool {
        match &self.lookup {
            None | Some(Lookup::Miss(_) | Lookup::Hit { refresh: Some(_), .. }) => true,
            Some(Lookup::LocalHit(_) | Lookup::Hit { refresh: None, .. } | Lookup::Failed(_)) => false,
        }
    }
}

impl<K: BatchKey, T: CacheableResponse, E: SharedError> Parts<K, T, E> {
    /// Makes the batch of these keys, with a member for each.
    fn batch(keys: Vec<K>, load: &RoundLoader<K, T, E>) -> (Arc<Self>, Vec<BatchMember>) {
        let size = keys.len();
        let awaited = keys.iter().map(|_| Mutex::default()).collect();
        let parts = Arc::new(Self { keys, awaited, load: Arc::clone(load) });
        let members = {
            let parts = Arc::clone(&parts);
            LoadBatch::of(size, move |round| Arc::clone(&parts).call(round))
        };
        (parts, members)
    }

    /// The loader of one key that is loaded alone.
    fn alone(&self, key: K, call: Call<'_>, own: OwnResult<Option<T>, E>) -> Loader {
        let (parts, members) = Self::batch(vec![key], &self.load);
        let mut members = members.into_iter().enumerate();
        match members.next() {
            Some(member) => parts.loader(member, call, own),
            None => Loader::new(|_| async { LoadResult::failed(Failure::vanished()).into() }),
        }
    }

    /// The loader of one key: joins the next round, and waits for its part.
    fn loader(
        self: &Arc<Self>,
        (index, member): (usize, BatchMember),
        call: Call<'_>,
        own: OwnResult<Option<T>, E>,
    ) -> Loader {
        let (parts, key) = (Arc::clone(self), call.key.clone());
        let (state, policy) = (Arc::clone(call.state), Arc::clone(call.policy));
        let batch = Some(member.batch());
        let loader = Loader::new(move |input| async move {
            let (sender, part) = oneshot::channel();
            *lock(&parts.awaited[index]) = Some(sender);
            drop(parts);
            member.lead(LoadScope::current());
            let loaded = match part.await {
                Ok(Ok(None)) if policy.on_absent == OnAbsent::Fail => return absent(&key, own),
                Ok(Ok(value)) => Ok(value),
                Ok(Err(LoadError::Loader(error))) => Err(error),
                // This task panics with the text of the call's panic, without a second report of it.
                Ok(Err(LoadError::Panicked(text))) => resume_unwind(Box::new(text)),
                Ok(Err(_)) | Err(_) => {
                    resume_unwind(Box::new("the runtime of the call of many keys was shut down"))
                }
            };
            let settings = Mutex::new(LoadSettings::new(&policy, Bytes::new()));
            let (result, own_result) =
                concluded(Call { state: &state, policy: &policy, key: &key }, loaded, input.mode, &settings);
            // A caller that has left needs no answer.
            let _ = own.send(own_result);
            result.into()
        });
        Loader { batch, ..loader }
    }

    /// One call for the members of a round. It is dropped as soon as no member waits for it any more.
    async fn call(self: Arc<Self>, round: Vec<usize>) {
        let mut awaited: Vec<(K, Awaits<T, E>)> = round
            .into_iter()
            .filter_map(|index| Some((self.keys[index].clone(), lock(&self.awaited[index]).take()?)))
            .filter(|(_, sender)| !sender.is_closed())
            .collect();
        if awaited.is_empty() {
            return;
        }
        let keys: Vec<K> = awaited.iter().map(|(key, _)| key.clone()).collect();
        let call = AssertUnwindSafe((self.load)(keys)).catch_unwind();
        drop(self);
        let loaded = tokio::select! {
            biased; // Keeps the simulation deterministic, and prefers a result to an end without one.
            loaded = call => loaded,
            _ = join_all(awaited.iter_mut().map(|(_, sender)| sender.closed())) => return,
        };
        let mut ended = match loaded {
            Ok(Ok(values)) => Ok(values),
            Ok(Err(error)) => Err(LoadError::Loader(Arc::new(error))),
            Err(panic) => Err(LoadError::Panicked(panic_text(&*panic).to_string())),
        };
        for (key, sender) in awaited {
            let part = match &mut ended {
                Ok(values) => {
                    values.remove(&key).transpose().map_err(|error| LoadError::Loader(Arc::new(error)))
                }
                Err(failure) => Err(failure.clone()),
            };
            // A loader that was aborted meanwhile has dropped its receiver.
            let _ = sender.send(part);
        }
    }
}

/// The result for a key for which the loader returned no value, under [`OnAbsent::Fail`].
fn absent<T, E>(key: &Key, own: OwnResult<T, E>) -> LoadOutput {
    let error = Error::of_key(ErrorKind::Absent, "the loader returned no value for", key, "(OnAbsent::Fail)");
    let _ = own.send(Err(LoadError::Guard(error.clone())));
    LoadResult::failed(Failure::Guard(error)).into()
}

/// How long a warm-up waits, in milliseconds, before it checks again for a free permit and the store.
const LOOK_AGAIN: std::ops::RangeInclusive<u64> = 50..=150;

/// How long one wait for a connection lasts at most.
const REACHES: Duration = Duration::from_millis(500);

/// How many times a warm-up loads a key at most, until the store has its value.
const TRIES: usize = 3;

/// The result of a warm-up: each key is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Warmed {
    /// Keys that this warm-up has loaded, and that the store has confirmed.
    pub stored: u64,
    /// Keys with a value that was stored already, or that another caller or process has loaded.
    pub found: u64,
    /// Keys with a value that was loaded and may not be stored, for instance because it is longer than
    /// [`max_body`](crate::PolicyBuilder::max_body).
    pub unstorable: u64,
    /// Keys with a value that the store has not confirmed in three loads: it failed each time, or the key was invalidated during each load.
    pub unconfirmed: u64,
    /// Keys that were not loaded, because the guard is [bypassed](StampedeGuard::set_bypass) or on
    /// [trial](crate::PolicyBuilder::shadow): the results of its loads are for their own callers.
    pub bypassed: u64,
    /// Keys with a load that failed, or that were not loaded because the guard was shut down.
    pub failed: u64,
}

impl StampedeGuard {
    /// Loads the values of many keys before callers need them, for instance at the start of a process.
    ///
    /// Takes the keys in groups of `at_once`, one group after the other, each by one call of `load`, as
    /// [`get_or_load_many`](Self::get_or_load_many) does. Values that are stored already are not loaded again. Replicas that warm the same
    /// keys share the work: each takes the groups in a random order, and each key is loaded once in the fleet. So a process that
    /// restarts loads only the keys that no replica has loaded.
    ///
    /// It yields to live traffic: under [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) a group begins only while
    /// a permit is free. While the store is away it waits, because values that are not stored warm nothing; a value that the store has
    /// not confirmed is loaded again, twice at most. **Neither wait has a bound**: put
    /// `tokio::time::timeout` around it, or an outage of Redis prevents new processes from starting. After
    /// [`set_policy`](Self::set_policy) the remaining groups have the new policy.
    ///
    /// Await it before the process reports that it is ready, or spawn it and serve traffic meanwhile. Errors are counted in [`Warmed`]; the
    /// metrics and logs of loads have their causes.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime with time.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no further group begins; a running call goes on and its values are stored.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let popular = (0..1_000_u64).map(|id| ("product", id));
    /// let warmed = guard
    ///     .warm(popular, 100, |missing| async move {
    ///         // SELECT .. WHERE id IN (..)
    ///         Ok::<_, std::io::Error>(missing.into_iter().map(|key| (key, key.1 * 2)).collect::<Vec<_>>())
    ///     })
    ///     .await;
    /// assert_eq!((warmed.stored, warmed.failed), (1_000, 0));
    /// # }
    /// ```
    pub async fn warm<K, T, E, F, Fut, V>(
        &self,
        keys: impl IntoIterator<Item = K>,
        at_once: usize,
        load: F,
    ) -> Warmed
    where
        K: Into<CacheKey> + Clone + Eq + Hash + Send + Sync + 'static,
        T: Serialize + DeserializeOwned + Clone + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: Fn(Vec<K>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<V, E>> + Send + 'static,
        V: IntoIterator<Item = (K, T)>,
    {
        let keys: Vec<K> = keys.into_iter().collect();
        let mut groups: Vec<&[K]> = keys.chunks(at_once.max(1)).collect();
        fastrand::shuffle(&mut groups);
        let load = paired(load);
        let mut warmed = Warmed::default();
        for group in groups {
            let mut left = group.to_vec();
            for _ in 0..TRIES {
                left = self.warm_group(left, &load, &mut warmed).await;
            }
            warmed.unconfirmed += left.len() as u64;
        }
        warmed
    }

    /// Loads the keys of a group once. Returns the keys whose values the store has not confirmed.
    async fn warm_group<K: BatchKey, T: CacheableResponse + Clone, E: SharedError>(
        &self,
        keys: Vec<K>,
        load: &RoundLoader<K, T, E>,
        warmed: &mut Warmed,
    ) -> Vec<K> {
        if keys.is_empty() {
            return keys;
        }
        let guard = self.current();
        let (state, policy) = guard.parts();
        if passes_by(state, policy) {
            warmed.bypassed += keys.len() as u64;
            return Vec::new();
        }
        if !self.may_begin(&keys).await {
            warmed.failed += keys.len() as u64;
            return Vec::new();
        }
        let answers = self.load_many(keys.clone(), Arc::clone(load)).await;
        let mut left = Vec::new();
        for (key, answer) in keys.into_iter().zip(answers) {
            match (answer.result, answer.outcome, answer.storage) {
                (Err(LoadError::Guard(error)), ..) if error.kind() == ErrorKind::Store => left.push(key),
                (Err(_), ..) => warmed.failed += 1,
                (Ok(_), Outcome::Led, Storage::Stored) => warmed.stored += 1,
                (Ok(_), Outcome::Led, Storage::Forbidden) => warmed.unstorable += 1,
                (Ok(_), Outcome::Led | Outcome::Bypassed, _) => left.push(key),
                (Ok(_), ..) => warmed.found += 1,
            }
        }
        left
    }

    /// Waits until a group may begin; false if the guard is shut down.
    async fn may_begin<K: BatchKey>(&self, group: &[K]) -> bool {
        let guard = self.current();
        let (state, policy) = (&guard.state, &guard.policy);
        // All keys, because in a cluster each may be on a different server. Invalid keys are left out.
        let keys: Vec<Key> = group.iter().filter_map(|key| guard.key(key.clone()).ok()).collect();
        while !state.is_closed() {
            if guard.reaches(&keys).await && has_room(state, policy).await {
                return true;
            }
            sleep(Duration::from_millis(fastrand::u64(LOOK_AGAIN))).await;
        }
        false
    }

    /// Whether the servers of these keys can be reached. Also waits for the first connections.
    async fn reaches(&self, keys: &[Key]) -> bool {
        let store = &self.state.store;
        for key in keys {
            if store.is_down(key.name()) || store.reach(key.name(), REACHES).await.is_err() {
                return false;
            }
        }
        true
    }
}
