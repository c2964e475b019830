//! Warm-up: the values of many keys are loaded before callers ask for them.

use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::sleep;

use super::StampedeGuard;
use super::load_many::{LoadFuture, paired};
use crate::error::{ErrorKind, LoadError};
use crate::key::{CacheKey, Key};
use crate::observe::Outcome;
use crate::read_through::bulkhead::has_room;
use crate::value::freshness::Storage;

/// How long a warm-up waits, in milliseconds, before it looks again for a free permit, or for the store.
const LOOK_AGAIN: std::ops::RangeInclusive<u64> = 50..=150;

/// How long one wait for a connection lasts.
const REACHES: Duration = Duration::from_millis(500);

/// How often a warm-up loads a key until the store has its value.
const TRIES: usize = 3;

/// What a warm-up has done: each key is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Warmed {
    /// Keys that this warm-up has loaded, and that the store has confirmed.
    pub stored: u64,
    /// Keys with a value that was there, or that another caller or process has loaded.
    pub found: u64,
    /// Keys with a value that was loaded and may not be stored, as one that is longer than
    /// [`max_body`](crate::PolicyBuilder::max_body).
    pub unstorable: u64,
    /// Keys that the store has not confirmed in three tries: it failed each time, or the key was invalidated during each load.
    pub unconfirmed: u64,
    /// Keys that were not loaded, because the guard is [bypassed](StampedeGuard::set_bypass) or on
    /// [trial](crate::PolicyBuilder::shadow): its loads answer their own callers.
    pub bypassed: u64,
    /// Keys with a load that failed, or that were left out because the guard was shut down.
    pub failed: u64,
}

impl StampedeGuard {
    /// Loads the values of many keys before callers ask for them, as at the start of a process.
    ///
    /// Takes the keys in groups of `at_once`, one group after the other, each by one call of `load`, as
    /// [`get_or_load_many`](Self::get_or_load_many) does. Values that are there are not loaded again. Replicas that warm the same keys
    /// share the work: each takes the groups in its own order, and each key is loaded once in the fleet. So a process that starts
    /// again loads only what no replica has loaded.
    ///
    /// It yields to live traffic: under [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) a group begins only while a permit
    /// is free. While the store is away it waits, because values that are not stored warm nothing; a value that the store has not taken
    /// is loaded again, twice at most. **Neither wait has a bound**: put
    /// `tokio::time::timeout` around it, or an outage of Redis keeps new processes from starting. After
    /// [`set_policy`](Self::set_policy) the groups that are left have the new policy.
    ///
    /// Await it before the process says that it is ready, or spawn it beside the traffic. Errors are counted in [`Warmed`]; the
    /// metrics and logs of loads have their causes.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime with time.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it begins no further group; the call that runs goes on and its values are stored.
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
        let load = Arc::new(paired(load));
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

    /// Loads the keys of a group once. Returns those that the store has not confirmed.
    async fn warm_group<K, T, E, L>(&self, keys: Vec<K>, load: &Arc<L>, warmed: &mut Warmed) -> Vec<K>
    where
        K: Into<CacheKey> + Clone + Eq + Hash + Send + Sync + 'static,
        T: Serialize + DeserializeOwned + Clone + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        L: Fn(Vec<K>) -> LoadFuture<K, T, E> + Send + Sync + 'static,
    {
        if keys.is_empty() {
            return keys;
        }
        if self.current().passes_by() {
            warmed.bypassed += keys.len() as u64;
            return Vec::new();
        }
        if !self.may_begin(&keys).await {
            warmed.failed += keys.len() as u64;
            return Vec::new();
        }
        let load = Arc::clone(load);
        let answers = self.load_many(keys.clone(), move |keys| load(keys)).await;
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
    async fn may_begin<K: Into<CacheKey> + Clone>(&self, group: &[K]) -> bool {
        let guard = self.current();
        let (state, policy) = (&guard.state, &guard.policy);
        // In a cluster each key may be on another server. A key that is refused has none.
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
