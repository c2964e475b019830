//! Calls that read and store entries directly, without a loader, one or many at once; and [`SharedDeadline`], which bounds a call that
//! makes many changes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::StampedeGuard;
use super::change::{Change, LONGEST};
use super::typed::{read_shared, read_typed};
use crate::error::{Error, ErrorKind};
use crate::guard_state::retained::ChangeTarget;
use crate::key::{CacheKey, Key};
use crate::policy::Policy;
use crate::read_through::look_up::{peek, peek_many, read_entry};
use crate::store::Insert;
use crate::sync::lock;
use crate::value::entry::{self, Entry, Packed, TagList};

impl StampedeGuard {
    /// Returns the stored value of `key`; never loads. `None` if there is no value, if it may not be served, or if it is
    /// not a `T`. A stale value is returned within
    /// [`stale_while_revalidate`](crate::PolicyBuilder::stale_while_revalidate).
    ///
    /// # Errors
    ///
    /// An empty key; a store that did not answer within the coordination budget; a guard that was shut down.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn get<T>(&self, key: impl Into<CacheKey>) -> Result<Option<T>, Error>
    where
        T: DeserializeOwned + 'static,
    {
        let guard = self.current();
        let key = guard.key(key)?;
        peek(guard.call(&key), &read_typed)
            .await
            .map_err(|error| Error::store("looking up the entry", &key, error))
    }

    /// Like [`get`](Self::get), for values that are shared: a hit of the local tier neither decodes nor copies.
    ///
    /// # Errors
    ///
    /// See [`get`](Self::get).
    ///
    /// # Cancel safety
    ///
    /// Safe.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert("names", &vec!["a".to_owned()]).await?;
    /// let names = guard.get_shared::<Vec<String>>("names").await?;
    /// assert_eq!(names.map(|names| names.len()), Some(1));
    /// # Ok(()) }
    /// ```
    pub async fn get_shared<T>(&self, key: impl Into<CacheKey>) -> Result<Option<Arc<T>>, Error>
    where
        T: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let guard = self.current();
        let key = guard.key(key)?;
        peek(guard.call(&key), &read_shared)
            .await
            .map_err(|error| Error::store("looking up the entry", &key, error))
    }

    /// Whether there is a value of `key` that may be served.
    ///
    /// # Errors
    ///
    /// See [`get`](Self::get).
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn contains(&self, key: impl Into<CacheKey>) -> Result<bool, Error> {
        let entry = self.entry(&self.key(key)?).await?;
        let now = self.state.store.now();
        Ok(entry.is_some_and(|entry| entry.serves(now).is_at_once()))
    }

    /// For how much longer the value of `key` is fresh; `None` if there is no value, zero if it is stale.
    ///
    /// # Errors
    ///
    /// See [`get`](Self::get).
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn remaining_freshness(&self, key: impl Into<CacheKey>) -> Result<Option<Duration>, Error> {
        let entry = self.entry(&self.key(key)?).await?;
        let now = self.state.store.now();
        Ok(entry.map(|entry| Duration::from_millis(entry.fresh_until().saturating_sub(now))))
    }

    async fn entry(&self, key: &Key) -> Result<Option<Entry>, Error> {
        let guard = self.current();
        let stored = read_entry(guard.call(key)).await;
        let stored = stored.map_err(|error| Error::store("looking up the entry", key, error))?;
        Ok(stored.and_then(|stored| stored.value().cloned()))
    }

    /// Stores `value` under `key` now, for as long as the policy says; `None` and `()` for its
    /// [`negative_for`](crate::PolicyBuilder::negative_for). Like [`invalidate`](Self::invalidate), it wins over loads that are
    /// running: their values are not stored.
    ///
    /// For another lifetime, on a handle with another policy:
    /// `guard.with_policy(guard.policy().to_builder().fresh_for(..).build()?).insert(..)`.
    ///
    /// # Errors
    ///
    /// An empty key; a value that can not be encoded, or is longer than `max_body`: the older value is then
    /// [invalidated](Self::invalidate), and if that is not confirmed, its error is returned instead; a store that did not confirm the
    /// insertion within two seconds, in which case it may or may not have happened. Unlike an invalidation it is not sent again.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the insertion may or may not have happened.
    pub async fn insert<T>(&self, key: impl Into<CacheKey>, value: &T) -> Result<(), Error>
    where
        T: Serialize + Sync + 'static,
    {
        self.insert_with_tags(key, value, None::<CacheKey>).await
    }

    /// Like [`insert`](Self::insert), with tags for this value besides the policy's.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert); an empty tag, or more than [`max_tags`](crate::PolicyBuilder::max_tags) besides the policy's.
    ///
    /// # Cancel safety
    ///
    /// See [`insert`](Self::insert).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert_with_tags(("price", 7), &499_u32, ["catalog", "sale"]).await?;
    /// guard.invalidate_tag("sale").await?;
    /// assert_eq!(guard.get::<u32>(("price", 7)).await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn insert_with_tags<T, K>(
        &self,
        key: impl Into<CacheKey>,
        value: &T,
        tags: impl IntoIterator<Item = K>,
    ) -> Result<(), Error>
    where
        T: Serialize + Sync + 'static,
        K: Into<CacheKey>,
    {
        let guard = self.current();
        let key = guard.key(key)?;
        let mut own = Vec::new();
        entry::add_tags(&mut own, &guard.state.namespace, tags, guard.policy.max_tags)?;
        guard.insert_until(&key, value, own, Instant::now() + LONGEST).await
    }

    /// Stores a value with these tags besides the policy's, under this handle's policy.
    async fn insert_until<T>(&self, key: &Key, value: &T, tags: Vec<Key>, until: Instant) -> Result<(), Error>
    where
        T: Serialize + Sync + 'static,
    {
        let Self { state, policy, .. } = self;
        // The program has a newer value, so the older one is outdated even if the newer one can not be stored.
        let not_stored = async |error: Error| {
            let removal = Change::invalidation(self, ChangeTarget::value(key.clone()));
            removal.run(until, None).await?;
            Err(error)
        };
        let (encoding, payload) = match policy.codec.encode(value) {
            Ok(encoded) => encoded,
            Err(error) => return not_stored(error).await,
        };
        if payload.len() > policy.max_body {
            return not_stored(too_long(payload.len(), "max_body", policy.max_body)).await;
        }
        let tags = self.tag_list(key, until, tags).await?;
        let now = state.store.now();
        let mut lifetimes = policy.lifetimes();
        if policy.is_negative(encoding, &payload) {
            lifetimes.fresh_for = policy.negative_for();
        }
        let (times, keep) = policy.jittered(lifetimes).from(now, Duration::ZERO);
        let packed = Packed::of(&payload, policy.compress_from);
        let entry = Entry::value(encoding, (payload, packed), (now, times), tags).encode(key);
        let length = entry.len();
        let over = || Some(state.store.longest_entry()).filter(|most| length > *most);
        let over_limit = |most| too_long(length, "the server's `proto-max-bulk-len`", most);
        if let Some(most) = over() {
            return not_stored(over_limit(most)).await;
        }
        // A failed insertion is not retained as an invalidation: the program may have no loader that could load the value again.
        let change = Change::of_value(self, key, "the insertion", false);
        change.detach_flights();
        let inserted = change.run(until, Some(Insert { entry, keep, over: None })).await;
        match over() {
            // The limit of the server became known only by this command.
            Some(most) if inserted.is_err() => not_stored(over_limit(most)).await,
            _ => inserted,
        }
    }

    /// Marks the value of `key` stale: the next caller loads, and the values of loads that are running are not stored. The old
    /// value stays stored and is served if that next load fails, for the rest of the value's
    /// [`stale_if_error`](crate::PolicyBuilder::stale_if_error) window; without such a window this is
    /// [`invalidate`](Self::invalidate).
    ///
    /// # Errors
    ///
    /// See [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// See [`invalidate`](Self::invalidate).
    ///
    /// # Consistency
    ///
    /// Like [`invalidate`](Self::invalidate); after an error the guard retains an invalidation and sends that. A value that is stored
    /// between this call's read and its write is invalidated, and a value that is invalidated in between stays invalidated.
    pub async fn expire(&self, key: impl Into<CacheKey>) -> Result<(), Error> {
        let guard = self.current();
        let key = guard.key(key)?;
        let until = Instant::now() + LONGEST;
        // The change begins before the read. So this change, which may store the entry that it read, does not settle an invalidation
        // that is retained after the read.
        let change = Change::of_value(&guard, &key, "the expiry", true);
        // The read itself counts its errors.
        let read = guard.retry_until(&key, until, |_| read_entry(guard.call(&key))).await;
        let read = read.map_err(|error| change.unconfirmed(error))?;
        let now = self.state.store.now();
        let expired = match read.as_ref().and_then(|stored| stored.value()) {
            Some(entry) if entry.times().stands_in(now) => {
                let (times, over) = (entry.times().expired(), Some(entry.encode(&key)));
                let keep = Duration::from_millis(times.error_until - now);
                Some(Insert { entry: Entry { expiry: times, ..entry.clone() }.encode(&key), keep, over })
            }
            _ => None,
        };
        change.detach_flights();
        change.run(until, expired).await
    }

    /// The policy's tags and a value's own tags, with their ids, for a value that is stored directly.
    async fn tag_list(&self, key: &Key, until: Instant, own: Vec<Key>) -> Result<TagList, Error> {
        let Self { state, policy, .. } = self;
        let mut tags = policy.tag_keys(&state.namespace, key);
        tags.extend(own);
        // Without tags no command is needed here. If the store is down, the insertion itself reports that.
        if tags.is_empty() {
            return Ok(TagList::new(&[]));
        }
        let life = policy.tag_life();
        let ids = async |within| self.count_errors(state.tagged(tags.clone(), life, within).await);
        let tagged = self.retry_until(key, until, ids).await;
        let tagged = tagged.map_err(|error| Error::store("reading the ids of the tags", key, error))?;
        Ok(TagList::new(&tagged))
    }
}

fn too_long(length: usize, setting: &str, most: usize) -> Error {
    let text = format!(
        "the value has {length} bytes, more than {setting} ({most}): it is not stored, and the older value is removed"
    );
    Error::new(ErrorKind::Encode, text)
}

impl StampedeGuard {
    /// Returns the stored values of many keys, in the order of the keys; never loads. The keys are looked up together, many by one
    /// command.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get), for each key.
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
        let calls = keys.iter().flatten().map(|key| guard.call(key)).collect();
        let mut found = peek_many(calls, &read_typed).await.into_iter();
        let answers = keys.iter().filter_map(|key| match key {
            Ok(key) => found
                .next()
                .map(|found| found.map_err(|error| Error::store("looking up the entry", key, error))),
            Err(error) => Some(Err(error.clone())),
        });
        answers.collect()
    }

    /// Stores many values, as [`insert`](Self::insert) does with each; the answers are in the order of the values. If a key occurs twice,
    /// its last value is stored, and both have the answer of that insertion.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert), for each key. Once the store has confirmed no insertion for two seconds, the rest is not
    /// sent.
    /// For the first error of all: `.into_iter().collect::<Result<(), _>>()?`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, some insertions may have happened.
    pub async fn insert_many<K, T>(&self, values: impl IntoIterator<Item = (K, T)>) -> Vec<Result<(), Error>>
    where
        K: Into<CacheKey>,
        T: Serialize + Sync + 'static,
    {
        let guard = self.current();
        let deadline = SharedDeadline::new(&guard.policy);
        let (keys, values): (Vec<Result<Key, Error>>, Vec<T>) =
            values.into_iter().map(|(key, value)| (guard.key(key), value)).unzip();
        // The changes run concurrently and are retried, so two changes of one key could end in either order: only the last is sent.
        let positions = keys.iter().enumerate();
        let last: HashMap<_, _> =
            positions.clone().filter_map(|(at, key)| Some((key.as_ref().ok()?.name(), at))).collect();
        let positions: Vec<_> = positions
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
        let inserts = keys.iter().zip(&values).enumerate().filter(|(at, _)| positions[*at] == *at);
        let answers: HashMap<_, _> = stream::iter(inserts.map(insert)).buffered(CHANGES).collect().await;
        positions.iter().filter_map(|at| answers.get(at).cloned()).collect()
    }
}

/// How many changes of one call run at once. A hit of another caller waits behind that many commands at most.
pub(super) const CHANGES: usize = 32;

/// Until when the changes of one call are retried. While the store is away, all of them together take no longer than one change would.
pub(super) struct SharedDeadline {
    /// Whether changes wait for replicas. A change that the store has made may then fail later, because replicas lack it: such a
    /// failure says nothing about the store.
    asks_replicas: bool,
    state: Mutex<DeadlineState>,
}

struct DeadlineState {
    /// Each change that succeeds, or that fails before this moment, moves the moment on.
    until: Instant,
    /// Whether a change has failed at or after `until`.
    has_passed: bool,
}

impl SharedDeadline {
    pub(super) fn new(policy: &Policy) -> Self {
        let state = DeadlineState { until: Instant::now() + LONGEST, has_passed: false };
        Self { asks_replicas: policy.replicas.is_some(), state: Mutex::new(state) }
    }

    /// Calls `change` with its deadline. `is_down`: the change's server is known to be down.
    pub(super) async fn holds(
        &self,
        is_down: bool,
        change: impl AsyncFnOnce(Instant) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let until = {
            let (state, now) = (lock(&self.state), Instant::now());
            match state.has_passed && is_down {
                true => now,
                false if self.asks_replicas => now + LONGEST,
                false => state.until,
            }
        };
        let changed = change(until).await;
        let (mut state, now) = (lock(&self.state), Instant::now());
        if changed.is_ok() || now < until {
            state.until = now + LONGEST;
        } else {
            state.has_passed = true;
        }
        drop(state);
        changed
    }
}
