//! Calls without a loader: they read and replace stored values directly.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::StampedeGuard;
use super::attempt::ChangeAttempt;
use super::typed::{SharedReader, TypedReader};
use crate::error::{Error, ErrorKind};
use crate::guard_state::kept::ChangeTarget;
use crate::key::{CacheKey, Key};
use crate::read_through::call::Call;
use crate::read_through::look_up::{peek, read_entry};
use crate::store::Insert;
use crate::value::entry::{Entry, EntryKind};
use crate::value::lz4::Packed;
use crate::value::tags::{self, TagList};

/// How long a change is repeated until the store confirms it.
pub(super) const LONGEST: Duration = Duration::from_secs(2);

impl StampedeGuard {
    /// Returns the stored value of `key`; never loads. `None` if there is no value that may be served and is
    /// a `T`. A stale value is returned within
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
        let ask = Call { state: &guard.state, policy: &guard.policy, key: &key };
        peek(ask, &TypedReader::new())
            .await
            .map_err(|error| Error::store("looking up the entry", &key, error))
    }

    /// As [`get`](Self::get), for values that are shared: a hit of the local tier neither decodes nor copies.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
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
        let ask = Call { state: &guard.state, policy: &guard.policy, key: &key };
        peek(ask, &SharedReader(TypedReader::new()))
            .await
            .map_err(|error| Error::store("looking up the entry", &key, error))
    }

    /// Whether there is a value of `key` that may be served.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn contains(&self, key: impl Into<CacheKey>) -> Result<bool, Error> {
        let entry = self.entry(&self.key(key)?).await?;
        let now = self.state.store.now();
        Ok(entry.is_some_and(|entry| entry.serves(now).is_at_once()))
    }

    /// How long the value of `key` will be fresh; `None` if there is none, zero if it is stale.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn remaining_freshness(&self, key: impl Into<CacheKey>) -> Result<Option<Duration>, Error> {
        let entry = self.entry(&self.key(key)?).await?;
        let now = self.state.store.now();
        Ok(entry.map(|entry| Duration::from_millis(entry.expiry.fresh_until.saturating_sub(now))))
    }

    async fn entry(&self, key: &Key) -> Result<Option<Entry>, Error> {
        let guard = self.current();
        let ask = Call { state: &guard.state, policy: &guard.policy, key };
        let stored =
            read_entry(ask).await.map_err(|error| Error::store("looking up the entry", key, error))?;
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
    /// Dropped, it may or may not have happened.
    pub async fn insert<T>(&self, key: impl Into<CacheKey>, value: &T) -> Result<(), Error>
    where
        T: Serialize + Sync + 'static,
    {
        self.insert_with_tags(key, value, None::<CacheKey>).await
    }

    /// As [`insert`](Self::insert), with tags for this value besides the policy's.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert); an empty tag, or more than 16 besides the policy's.
    ///
    /// # Cancel safety
    ///
    /// As [`insert`](Self::insert).
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
        let tags = tags::keys(&guard.state.namespace, tags, 0)?;
        guard.insert_until(&key, value, tags, Instant::now() + LONGEST).await
    }

    /// Stores a value with these tags besides the policy's, under this handle's policy.
    pub(super) async fn insert_until<T>(
        &self,
        key: &Key,
        value: &T,
        tags: Vec<Key>,
        until: Instant,
    ) -> Result<(), Error>
    where
        T: Serialize + Sync + 'static,
    {
        let Self { state, policy, .. } = self;
        // The program has a newer value, so the older one is outdated also if the newer one can not be stored.
        let not_stored = async |error: Error| {
            let removal = ChangeAttempt::invalidation(self, ChangeTarget::value(key.clone()));
            removal.make(until, None).await?;
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
        let (kind, validator) = (EntryKind::Value, Box::default());
        let packed = Packed::of(&payload, policy.compress_from);
        let entry = Entry { kind, encoding, stored_at: now, expiry: times, validator, tags, payload, packed };
        let entry = entry.encode(key);
        let length = entry.len();
        let over = || Some(state.store.longest_entry()).filter(|most| length > *most);
        let over_limit = |most| too_long(length, "the server's `proto-max-bulk-len`", most);
        if let Some(most) = over() {
            return not_stored(over_limit(most)).await;
        }
        // An insertion that fails is not kept: the program may have no loader that makes the value again.
        let attempt = ChangeAttempt::of_value(self, key, "the insertion", false);
        attempt.detach_flights();
        let inserted = attempt.make(until, Some(Insert { entry, keep, over: None })).await;
        match over() {
            // The attempt has learned the limit.
            Some(most) if inserted.is_err() => not_stored(over_limit(most)).await,
            _ => inserted,
        }
    }

    /// Removes `key`, also against loads that are running: their values are not stored. For several keys, tags and paths at once:
    /// [`invalidation`](Self::invalidation).
    ///
    /// Where processes keep copies (`local_for`), it then waits until each of them has dropped its copy: a round trip or so, and for one
    /// `local_term` (two seconds) at most for a process that is dead, hung, paused or cut off.
    ///
    /// # Errors
    ///
    /// An empty key, or a store that did not confirm it within two seconds, in which case it may or may not
    /// have happened. It is kept then, and sent again as soon as the store answers: no need to repeat it.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may or may not have happened in the store; it is kept as after an error. In this process running loads are detached
    /// at once.
    ///
    /// # Consistency
    ///
    /// After an error, or once it is dropped, this process serves no value that was stored before, from the store or from memory. Other
    /// processes may until it is sent; a process that dies before forgets it
    /// ([`most_kept_invalidations`](crate::StampedeGuardBuilder::most_kept_invalidations)).
    ///
    /// Once it has returned `Ok`, no later caller in this process is given a value that was loaded before. Nor is one in another process:
    /// a caller that joined a load there after its lease was last known to be held asks again when the store refuses the load's
    /// value. There are two exceptions: a store that cannot be reached then, and clients that read an HTTP response while it arrives,
    /// until that process has been told (about a round trip later, or, if that message is lost, at the next renewal of the lease).
    pub async fn invalidate(&self, key: impl Into<CacheKey>) -> Result<(), Error> {
        self.invalidation().key(key).send().await
    }

    /// Marks the value of `key` stale, also against loads that are running: the next caller loads. The value is
    /// kept to stand in should that load fail, for as long as it had within
    /// [`stale_if_error`](crate::PolicyBuilder::stale_if_error); without such a window this is
    /// [`invalidate`](Self::invalidate).
    ///
    /// # Errors
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Consistency
    ///
    /// As [`invalidate`](Self::invalidate); what is kept after an error is sent as an invalidation. A value that is stored between this
    /// call's read and its write is invalidated, and a value that is invalidated in between stays invalidated.
    pub async fn expire(&self, key: impl Into<CacheKey>) -> Result<(), Error> {
        let guard = self.current();
        let key = guard.key(key)?;
        let until = Instant::now() + LONGEST;
        // Begins before the read: an invalidation that is kept after it is not settled by this change, which may store what was read.
        let attempt = ChangeAttempt::of_value(&guard, &key, "the expiry", true);
        let ask = Call { state: &guard.state, policy: &guard.policy, key: &key };
        // A read counts its own errors.
        let read = guard.tried(&key, until, |_| Box::pin(read_entry(ask))).await;
        let read = read.map_err(|error| attempt.unconfirmed(error))?;
        let now = self.state.store.now();
        let kept = match read.as_ref().and_then(|stored| stored.value()) {
            Some(entry) if entry.expiry.stands_in(now) => {
                let (times, over) = (entry.expiry.expired(), Some(entry.encode(&key)));
                let keep = Duration::from_millis(times.error_until - now);
                Some(Insert { entry: Entry { expiry: times, ..entry.clone() }.encode(&key), keep, over })
            }
            _ => None,
        };
        attempt.detach_flights();
        attempt.make(until, kept).await
    }

    /// Removes every value with this tag, also against loads that are running: one command, however many values
    /// there are. Values have the tags of their policy ([`PolicyBuilder::tags`](crate::PolicyBuilder::tags)) and
    /// those that their loader gave them ([`LoadContext::tag`](crate::LoadContext::tag)).
    ///
    /// # Errors
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Consistency
    ///
    /// Once it has returned, no later caller in any process is given a value that was loaded before. It stays invalidated:
    /// no late load or eviction brings it back. A failover to a replica that has not heard of it, or a restart from an
    /// older data set, can; [`PolicyBuilder::invalidate_replicas`](crate::PolicyBuilder::invalidate_replicas) waits for
    /// replicas.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{MemoryStore, Policy, StampedeGuard};
    ///
    /// let policy = Policy::builder().tags(["catalog"]).build()?;
    /// let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;
    /// guard.insert(("price", 7), &499_u32).await?;
    /// guard.invalidate_tag("catalog").await?;
    /// assert_eq!(guard.get::<u32>(("price", 7)).await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn invalidate_tag(&self, tag: impl Into<CacheKey>) -> Result<(), Error> {
        self.invalidation().tag(tag).send().await
    }

    /// Removes every value of this namespace that is stored under a policy with
    /// [`PolicyBuilder::invalidate_all`](crate::PolicyBuilder::invalidate_all), this guard's among them: as
    /// [`invalidate_tag`](Self::invalidate_tag), with a tag that all of them have.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`] if this guard's policy lacks that setting: its own values would stay. Otherwise as
    /// [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// As [`invalidate`](Self::invalidate).
    pub async fn invalidate_all(&self) -> Result<(), Error> {
        let guard = self.current();
        if !guard.policy.invalidate_all {
            let text = "invalidate_all does not reach this guard's own values: build its policy with \
                        Policy::builder().invalidate_all(true); what was stored without that is then a miss";
            return Err(Error::new(ErrorKind::InvalidPolicy, text));
        }
        guard.invalidation().tag(CacheKey::reserved(tags::EVERYTHING)).send().await
    }

    /// The policy's tags and a value's own, for a value that is stored directly.
    async fn tag_list(&self, key: &Key, until: Instant, own: Vec<Key>) -> Result<TagList, Error> {
        let Self { state, policy, .. } = self;
        let mut tags = policy.tag_keys(&state.namespace, key);
        tags.extend(own);
        // No command is needed. If the store is down, the change itself reports that.
        if tags.is_empty() {
            return Ok(TagList::new(&[]));
        }
        let life = policy.tag_life();
        let ids = |within| self.counted(state.tagged(tags.clone(), life, within));
        let tagged = self.tried(key, until, |within| Box::pin(ids(within))).await;
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
