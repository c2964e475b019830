//! The state that all clones of one guard share: the store, the flights, the counters. Knows no Redis, no HTTP.
//!
//! Three small parts are here too. [`Audits`] limits the audits of hits: few at once, and each key rarely. [`LateCommits`] has the commits
//! that go on after the callers of their loads were answered, because callers do not wait that long. [`UnusableEntries`] counts the
//! stored entries that this process could not use, by reason.

mod known_tags;
#[cfg(feature = "metrics")]
mod publish;
pub(crate) mod retained;
#[cfg(feature = "http")]
pub(crate) mod search_rules;
pub(crate) mod turns;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use self::known_tags::KnownTags;
use self::retained::RetainedInvalidations;
use self::turns::LoadQueues;
use self::turns::Turns;
use crate::flight;
use crate::flight::shared_read::SharedReads;
use crate::flight::{Flights, shared_read, waiter};
use crate::key::{FlightKey, Hashed, Key, KeyProbe, LoadMode, Prober};
use crate::loader::{LoadPermitId, Loader};
use crate::local::LocalTier;
use crate::observe::hot_keys::HotKeys;
use crate::observe::{
    Count, Counters, GuardCount, LogEveryMinute, LogOnce, Outcome, PolicyCounters, Requests, Spans, Stats,
    log, warn_if,
};
use crate::policy::Policy;
use crate::store::channels::ChannelListener;
use crate::store::protocol::{Announced, ChangedName};
use crate::store::{Store, StoreError, StoreResult};
use crate::sync::{lock, until};
use crate::task::{StoppableWaiters, Tracked, Tracker};
use crate::value::entry::{Lifetimes, TagId, Unreadable};
use crate::value::{FlightOutcome, Found, StoredEntry};

/// The longest payload to which an entry of another process is decompressed, whatever the policies of this process say. There is a
/// bound, because a few bytes can state any length.
const LONGEST_OF_OTHERS: usize = 64 * 1024 * 1024;

/// The state that all clones of one [`StampedeGuard`](crate::StampedeGuard) share.
pub(crate) struct GuardState {
    pub(crate) store: Store,
    /// Escaped, as it is written in key names.
    pub(crate) namespace: Box<str>,
    pub(crate) prober: Prober,
    pub(crate) flights: Arc<Flights<FlightKey, Loader, FlightOutcome, Hashed>>,
    pub(crate) reads: Arc<SharedReads<Key, SharedReadResult, Hashed>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) local: Arc<LocalTier>,
    /// Invalidations that the store has not confirmed.
    pub(crate) retained: RetainedInvalidations,
    pub(crate) late_commits: LateCommits,
    pub(crate) turns: Turns,
    /// The loads that wait for permits.
    pub(crate) load_queues: LoadQueues,
    pub(crate) known_tags: KnownTags,
    pub(crate) audits: Audits,
    pub(crate) unusable: UnusableEntries,
    pub(crate) spans: Spans,
    /// Running tasks of flights.
    pub(crate) tasks: Arc<Tracker>,
    /// Held leases.
    pub(crate) leases: Arc<Tracker>,
    /// Leases that this process may hold without knowing it: one of its flights waits for the lease, or is releasing it.
    pub(crate) possible_leases: Arc<Tracker>,
    /// Loads that run without the store because it cannot be reached.
    pub(crate) fail_open: Arc<Tracker>,
    pub(crate) logs: LogLimits,
    pub(crate) http: HttpState,
    /// Callers that wait for this guard's locks.
    pub(crate) waiters: StoppableWaiters,
    /// Releases of locks and permits that run in the background.
    pub(crate) background: Arc<Tracker>,
    /// Answers questions about this process, once it has an inspector.
    pub(crate) answerer: OnceLock<Arc<dyn ChannelListener>>,
    /// The hot keys, once it has an inspector.
    pub(crate) hot_keys: OnceLock<HotKeys>,
    /// Set by `shutdown`: from then on, calls send no look-up to the store and take no lease.
    closed: AtomicBool,
    /// Set by the operator (`set_bypass`): callers load for themselves.
    bypassed: Arc<AtomicBool>,
    /// Set when a shutdown's deadline has passed: leases are handed over.
    leaving: AtomicBool,
    /// Notified when `leaving` is set. Unlike a channel with many receivers, it wakes waiters in the order in which they came.
    left: Notify,
    longest_command_us: AtomicU64,
    longest_payload: AtomicUsize,
}

/// Limits of warnings, so that one cause is not reported by each request.
#[derive(Debug, Default)]
pub(crate) struct LogLimits {
    /// Limits warnings about values that cannot be shared.
    pub(crate) unshareable: LogEveryMinute,
    /// Limits warnings about stored bytes that are not a usable entry.
    unreadable: LogEveryMinute,
    /// Limits warnings about this process's commits that were refused because the lease was not renewed and expired.
    pub(crate) unrenewed: LogEveryMinute,
    /// Limits warnings about leases of other processes that expired because the holder died, hung or was cut off.
    pub(crate) expired: LogEveryMinute,
    /// Limits warnings about callers beyond `max_flights`.
    pub(crate) overload: LogEveryMinute,
    /// Limits warnings about loads that run without a permit of `max_concurrent_loads`, because the store cannot be reached.
    pub(crate) permit: LogOnce,
}

/// What the guard's HTTP layers share.
#[derive(Debug, Default)]
pub(crate) struct HttpState {
    /// Limits warnings about responses that arrive older than their lifetimes. Never reset, so there is one warning only.
    pub(crate) too_old_log: LogOnce,
    /// Limits warnings about failed invalidations by unsafe requests.
    pub(crate) invalidation_log: LogOnce,
    #[cfg(feature = "http")]
    pub(crate) search_rules: search_rules::SearchRules,
    /// Unsafe requests whose client has disconnected and whose responses are still awaited.
    pub(crate) abandoned_unsafe_requests: Arc<Tracker>,
}

pub(crate) type Leader = flight::Leader<FlightKey, Loader, FlightOutcome, Hashed>;
pub(crate) type Joined = flight::Joined<FlightKey, Loader, FlightOutcome, Hashed>;
pub(crate) type FlightWaiter = waiter::Waiter<Loader, FlightOutcome>;

/// One caller's own read. Callers that queue behind it wait until it is dropped.
pub(crate) type SoloRead<'a> = shared_read::SoloRead<'a, Key, SharedReadResult, Hashed>;

/// The result of a read.
#[derive(Clone, Debug)]
pub(crate) enum ReadResult<F = Found> {
    Found(F),
    Nothing,
    /// The read was skipped, because there is a flight to join.
    Skipped,
    /// The store did not answer.
    Failed(StoreError),
}

/// The result of a read, for all callers that share it.
pub(crate) type SharedReadResult = ReadResult<Arc<StoredEntry>>;

impl<F> ReadResult<F> {
    pub(crate) fn map<G>(self, found: impl FnOnce(F) -> G) -> ReadResult<G> {
        match self {
            Self::Found(entry) => ReadResult::Found(found(entry)),
            Self::Nothing => ReadResult::Nothing,
            Self::Skipped => ReadResult::Skipped,
            Self::Failed(error) => ReadResult::Failed(error),
        }
    }
}

impl GuardState {
    /// The id of the `limit` permits of this namespace. A load that holds one of these permits records this id.
    pub(crate) fn permit_id(&self, limit: Arc<str>) -> LoadPermitId {
        LoadPermitId::Permit { store_id: self.store.store_id(), namespace: self.namespace.clone(), limit }
    }

    /// The id of this node's slots for loads without the store. A load that holds one of these slots records this id.
    pub(crate) fn store_permit_id(&self) -> LoadPermitId {
        LoadPermitId::Store(self.store.node())
    }

    pub(crate) fn new(
        store: Store,
        namespace: Box<str>,
        max_flights: usize,
        most_retained: usize,
        (local_capacity, local_term): (u64, Duration),
        (spans, scrape_interval): (Spans, Duration),
        bypassed: Arc<AtomicBool>,
    ) -> Self {
        let counters = Arc::new(Counters::new(scrape_interval));
        Self {
            local: LocalTier::new(
                &namespace,
                store.clone(),
                Arc::clone(&counters),
                local_capacity,
                local_term,
            ),
            retained: RetainedInvalidations::new(&namespace, most_retained),
            late_commits: LateCommits::default(),
            turns: Turns::default(),
            load_queues: LoadQueues::default(),
            known_tags: KnownTags::default(),
            audits: Audits::default(),
            unusable: UnusableEntries::default(),
            prober: Prober::new(&namespace),
            store,
            namespace,
            flights: Arc::new(Flights::new(max_flights)),
            reads: Arc::new(SharedReads::new()),
            counters,
            spans,
            tasks: Arc::default(),
            leases: Arc::default(),
            possible_leases: Arc::default(),
            fail_open: Arc::default(),
            logs: LogLimits::default(),
            http: HttpState::default(),
            waiters: StoppableWaiters::default(),
            background: Arc::default(),
            answerer: OnceLock::new(),
            hot_keys: OnceLock::new(),
            closed: AtomicBool::new(false),
            bypassed,
            leaving: AtomicBool::new(false),
            left: Notify::new(),
            longest_command_us: AtomicU64::new(0),
            longest_payload: AtomicUsize::new(0),
        }
    }

    /// The longest `command_timeout` of all policies used so far.
    pub(crate) fn longest_command(&self) -> Duration {
        Duration::from_micros(self.longest_command_us.load(Ordering::Relaxed))
    }

    /// The longest payload to which a stored entry is decompressed: the longest that the policies used so far may store, and at least
    /// [`LONGEST_OF_OTHERS`], because other processes may have stored longer ones. If this process loaded those again, the two
    /// processes would replace each other's entries for ever.
    pub(crate) fn longest_payload(&self) -> usize {
        self.longest_payload.load(Ordering::Relaxed).max(LONGEST_OF_OTHERS)
    }

    pub(crate) fn stats(&self) -> Stats {
        self.counters.snapshot([self.flights.len(), self.tasks.count(), self.retained.count()])
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_bypassed(&self) -> bool {
        self.bypassed.load(Ordering::Relaxed)
    }

    pub(crate) fn set_bypass(&self, bypassed: bool) {
        self.bypassed.store(bypassed, Ordering::Relaxed);
    }

    /// Whether a shutdown's deadline has passed.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Called when a shutdown's deadline has passed: flights release or hand over their leases from now on.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        self.left.notify_waiters();
    }

    /// Waits until a shutdown's deadline has passed.
    pub(crate) async fn leaving(&self) {
        until(&self.left, || self.is_leaving()).await;
    }

    pub(crate) fn count(&self, count: GuardCount) {
        self.counters.guard.add(count);
    }

    /// Publishes the counters and gauges from now on, once a second.
    #[inline]
    pub(crate) fn publish_regularly(self: &Arc<Self>) {
        #[cfg(feature = "metrics")]
        self.begin_to_publish();
    }

    /// Publishes the increments since the last time, and the present gauges.
    pub(crate) fn publish(&self) {
        #[cfg(feature = "metrics")]
        self.publish_now(self.counters.scrape_interval);
    }

    /// Publishes for the last time: no count is withheld any more.
    pub(crate) fn publish_last(&self) {
        #[cfg(feature = "metrics")]
        self.publish_now(Duration::ZERO);
    }

    /// Prepares the counters, limits and local tier for a policy that is used from now on.
    pub(crate) fn takes(&self, policy: &mut Policy) {
        let (counters, is_new) = self.counters.of_policy(&policy.name);
        policy.counters = counters;
        if is_new {
            self.publish();
        }
        let command_us = policy.command_timeout.as_micros().try_into().unwrap_or(u64::MAX);
        self.longest_command_us.fetch_max(command_us, Ordering::Relaxed);
        self.longest_payload.fetch_max(policy.longest_payload(), Ordering::Relaxed);
        if policy.has_copies() {
            self.local.use_copies();
        }
    }

    /// Counts a value that cannot be shared; returns whether to warn.
    pub(crate) fn unshareable(&self, policy: &Policy) -> bool {
        policy.count(Count::unshareable);
        self.logs.unshareable.is_due()
    }

    /// Counts and logs an unusable entry. At most one warning a minute, because the cause usually affects many entries.
    pub(crate) fn unreadable(&self, key: &Key, reason: &Unreadable) {
        self.count(GuardCount::unreadable);
        self.unusable.count(reason);
        warn_if!(
            log::GUARD,
            self.logs.unreadable.is_due(),
            ?key,
            ?reason,
            "a stored entry is unreadable; it is loaded anew"
        );
    }

    /// Counts and logs how a request was answered.
    pub(crate) fn answered(self: &Arc<Self>, requests: &Requests, key: &Key, outcome: Outcome) {
        requests.add(outcome);
        self.publish_regularly();
        self.count_hot(|| key.clone());
        // The digest is computed only if a subscriber enables this event.
        tracing::trace!(target: log::GUARD, ?key, outcome = outcome.as_str(), "stampede_guard.answered");
    }

    /// Counts a request that the guard passed through without caching.
    pub(crate) fn passed(self: &Arc<Self>, requests: &Requests) {
        requests.add(Outcome::Bypassed);
        self.publish_regularly();
    }

    /// Counts and logs a hit from memory on the fast path, which makes no key.
    #[inline]
    pub(crate) fn hit_at_once(&self, counters: &PolicyCounters, probe: KeyProbe<'_>) {
        counters.requests().local_hit();
        self.count_hot(|| probe.key());
        let outcome = Outcome::LocalHit.as_str();
        // The key is made only if a subscriber enables this event.
        tracing::trace!(target: log::GUARD, key = ?probe.key(), outcome, "stampede_guard.answered");
    }

    /// Counts a request among those for hot keys, if an inspector wants to know and this one is in the sample.
    #[inline]
    fn count_hot(&self, key: impl FnOnce() -> Key) {
        #[cfg(feature = "inspector")]
        if let Some(hot_keys) = self.hot_keys.get()
            && HotKeys::samples()
        {
            hot_keys.count(key().name_within(&self.namespace));
        }
        #[cfg(not(feature = "inspector"))]
        let _ = key;
    }

    /// Reads the present ids of these tags; missing ids are created.
    pub(crate) async fn tagged(
        &self,
        tags: Vec<Key>,
        life: Duration,
        within: Duration,
    ) -> StoreResult<Vec<TagId>> {
        if tags.is_empty() {
            return Ok(Vec::new());
        }
        let ids = self.store.tag_ids(&tags, life, within).await?;
        Ok(tags.into_iter().zip(ids).map(|(tag, id)| TagId { tag, id }).collect())
    }

    /// What a load reads when it begins: the ids of its policy's tags, and, if it `may_tag`, its id in the journal of tags, in which it is
    /// noted.
    pub(crate) async fn tags_at_start(
        &self,
        policy: &Policy,
        key: &Key,
        may_tag: bool,
    ) -> (StoreResult<Vec<TagId>>, Option<Uuid>) {
        let tags = policy.tag_keys(&self.namespace, key);
        let ids = self.tagged(tags, policy.tag_life(), policy.command_timeout);
        let enter = async { if may_tag { self.enter_load(policy).await } else { None } };
        tokio::join!(ids, enter)
    }

    /// Notes a load in the journal of tags, and returns its id there. `None` if the store does not answer, or if no load of the policy has
    /// added tags yet and this is not one of the first.
    async fn enter_load(&self, policy: &Policy) -> Option<Uuid> {
        if !policy.counters.expects_tags() {
            return None;
        }
        let (load, within) = (Uuid::from_u128(fastrand::u128(..)), policy.command_timeout);
        // Long enough for the load and for its end.
        let life = policy.load_timeout * 2 + within * 8;
        match self.store.enter_load(self.local.volume(), load, life, within).await {
            Ok(()) => Some(load),
            Err(_) => {
                self.count(GuardCount::store_errors);
                None
            }
        }
    }

    /// Reads the ids of the tags that a load has added, at its end. It has entered the journal as `load`, and its value has these
    /// lifetimes. `None` if one of the tags may have been invalidated since the load began.
    pub(crate) async fn late_ids(
        &self,
        policy: &Policy,
        load: Option<Uuid>,
        tags: &[Key],
        lifetimes: Lifetimes,
    ) -> StoreResult<Option<Vec<TagId>>> {
        policy.counters.added_tags();
        let Some(load) = load else { return Ok(None) };
        let (life, within) = (policy.longer_tag_life(lifetimes), policy.command_timeout);
        let life = life.unwrap_or_else(|| policy.tag_life());
        // The ids first: an invalidation is noted in the journal before it removes the id. So one that came before this read of the ids is
        // found in the journal, and one that comes later makes these ids invalid.
        let ids = self.tagged(tags.to_vec(), life, within).await?;
        let is_current = self.store.no_tag_since(self.local.volume(), load, tags, within).await?;
        Ok(is_current.then_some(ids))
    }

    /// Takes the key's flights out of the map, so that later callers start new ones.
    pub(crate) fn detach(&self, key: &Key) {
        for mode in LoadMode::ALL {
            self.flights.detach(&FlightKey { key: key.clone(), mode });
        }
    }

    /// Invalidates a key without waiting for the copies of other processes. This process's copy is dropped once the store has confirmed.
    pub(crate) async fn invalidate_unawaited(&self, key: &Key, within: Duration) -> StoreResult<()> {
        let name = ChangedName::value(key);
        let announced = {
            let mut change = self.local.change(name.clone(), false);
            self.store.invalidate(key, None, &change.attempt(), within).await?
        };
        self.local.forget(&name);
        if matches!(announced, Announced::Separately) {
            self.local.announce_later(name);
        }
        Ok(())
    }

    /// The channel of this name in the namespace, in this database: channels are those of all databases of a server.
    pub(crate) fn channel(&self, name: &str) -> Uuid {
        let (_, database) = self.store.channel_connection();
        let digest = Sha256::digest(format!("stampede-guard {name} of {} in {database}", self.namespace));
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        // A UUID of version 8, whose bits the application defines (RFC 9562, 5.8).
        uuid::Builder::from_custom_bytes(bytes).into_uuid()
    }

    /// Detaches the flights of all keys of a changed resource.
    pub(crate) fn detach_resource(&self, key: &Key) {
        self.detach(key);
        if let Some(reports) = key.of_reports(&self.namespace) {
            self.flights.detach_if(|flight| flight.key.is_below(&reports));
        }
    }
}

impl Drop for GuardState {
    fn drop(&mut self) {
        // After a shutdown this has been logged already.
        if !self.is_closed() {
            self.retained.log_unsent();
        }
        self.store.close();
        self.publish_last();
    }
}

/// The least time between the beginnings of two audits of a key.
const PAUSE: Duration = Duration::from_secs(1);
/// How many audits a guard runs at once.
const MOST_AT_ONCE: usize = 8;
/// How many audits a guard begins within one [`PAUSE`].
const MOST_IN_A_PAUSE: usize = 1_024;

/// The audits of one guard.
#[derive(Debug, Default)]
pub(crate) struct Audits {
    /// When the last audit of a key began, by the hash of the key.
    begun: Mutex<HashMap<u64, Instant, Hashed>>,
    running: Arc<Tracker>,
    pub(crate) log: LogEveryMinute,
}

impl Audits {
    /// Begins an audit of this key, unless an audit of it began within the last [`PAUSE`], or too many audits run or began in that time.
    pub(crate) fn begin(&self, key: &Key) -> Option<Tracked> {
        let turn = self.running.try_enter(MOST_AT_ONCE)?;
        let (mut begun, now) = (lock(&self.begun), Instant::now());
        let is_recent = |at: &Instant| now.duration_since(*at) < PAUSE;
        if begun.len() >= MOST_IN_A_PAUSE {
            begun.retain(|_, at| is_recent(at));
        }
        if begun.len() >= MOST_IN_A_PAUSE || begun.get(&key.hash_of_name()).is_some_and(is_recent) {
            return None;
        }
        begun.insert(key.hash_of_name(), now);
        Some(turn)
    }
}

/// The running commits of loads whose callers were already answered. A refresh waits for the commits of its key.
#[derive(Debug, Default)]
pub(crate) struct LateCommits {
    commits: Mutex<CommitsByKey>,
}

#[derive(Debug, Default)]
struct CommitsByKey {
    by_key: HashMap<Key, Vec<UnansweredCommit>, Hashed>,
    /// The number of keys at which the keys without a running commit are removed.
    sweep_at: usize,
}

#[derive(Clone, Debug)]
struct UnansweredCommit {
    /// Counts the commit until it ends: 1, then 0.
    running: Arc<Tracker>,
    /// When refreshes stop waiting for the commit: it never ends if its runtime is not driven.
    deadline: Instant,
}

impl UnansweredCommit {
    fn is_over(&self) -> bool {
        self.running.count() == 0 || self.deadline <= Instant::now()
    }
}

impl LateCommits {
    /// Records that the commit of a load of `key` goes on. Must be called before the callers of the load are answered. The commit counts as
    /// running until the returned value is dropped, and for `within` at most.
    pub(crate) fn begin(&self, key: &Key, within: Duration) -> Tracked {
        let running = Arc::<Tracker>::default();
        let late = running.enter();
        let mut commits = lock(&self.commits);
        if commits.by_key.len() >= commits.sweep_at {
            commits.by_key.retain(|_, of_key| {
                of_key.retain(|commit| !commit.is_over());
                !of_key.is_empty()
            });
            commits.sweep_at = (2 * commits.by_key.len()).max(64);
        }
        let of_key = commits.by_key.entry(key.clone()).or_default();
        of_key.retain(|commit| !commit.is_over());
        of_key.push(UnansweredCommit { running, deadline: Instant::now() + within });
        late
    }

    /// Waits until the commits of this key that are running now have ended, for each at most until its deadline.
    pub(crate) async fn ended(&self, key: &Key) {
        let of_key = lock(&self.commits).by_key.get(key).cloned().unwrap_or_default();
        for commit in of_key {
            commit.running.empty(commit.deadline).await;
        }
    }
}

/// The kinds of stored entries that this process cannot use, each with advice for the operator.
const UNUSABLE: [(&str, &str); 4] = [
    ("compressed", "turn the feature `lz4` on, and raise `max_body`, in every process"),
    ("of another type", "give keys of different types, or versions of one, different names"),
    ("in another version's layout", "end the rolling update"),
    ("damaged, or no entries", "keep other programs out of the namespace"),
];

/// Counts the stored entries that this process cannot use, by reason.
#[derive(Debug, Default)]
pub(crate) struct UnusableEntries([AtomicU64; UNUSABLE.len()]);

impl UnusableEntries {
    fn count(&self, reason: &Unreadable) {
        let index = match reason {
            Unreadable::Compressed { .. } => 0,
            Unreadable::OtherType => 1,
            Unreadable::Version(_) => 2,
            Unreadable::Foreign | Unreadable::Corrupt | Unreadable::OtherKey => 3,
        };
        self.0[index].fetch_add(1, Ordering::Relaxed);
    }

    /// The reasons that have occurred since the guard was made: how many times each, its text, and the advice for the operator.
    pub(crate) fn reasons(&self) -> Vec<(u64, &'static str, &'static str)> {
        let counts = self.0.iter().map(|counter| counter.load(Ordering::Relaxed));
        let reasons = counts.zip(UNUSABLE).map(|(count, (what, advice))| (count, what, advice));
        reasons.filter(|(count, ..)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::CacheKey;

    const WITHIN: Duration = Duration::from_secs(2);

    #[tokio::test(start_paused = true)]
    async fn a_refresh_waits_for_the_commits_of_its_key_until_their_deadline() {
        let (commits, began) = (LateCommits::default(), Instant::now());
        let [k, other] = ["k", "other"].map(|text| Key::new("ns", &CacheKey::from(text)));
        let never_answered = commits.begin(&k, WITHIN);
        commits.ended(&other).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        commits.ended(&k).await;
        assert!(began.elapsed() >= WITHIN && began.elapsed() < WITHIN * 2, "{:?}", began.elapsed());
        drop(never_answered);
        let began = Instant::now();
        drop(commits.begin(&k, WITHIN));
        commits.ended(&k).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn keys_whose_commits_have_ended_are_removed() {
        let commits = LateCommits::default();
        for n in 0..10_000_u32 {
            drop(commits.begin(&Key::new("ns", &CacheKey::from(("k", n))), WITHIN));
        }
        assert!(lock(&commits.commits).by_key.len() <= 64);
    }
}
