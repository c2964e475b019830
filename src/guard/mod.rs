//! [`StampedeGuard`], the handle to all functions of the crate; and the policy of a running guard, which [`StampedeGuard::set_policy`]
//! replaces.
//!
//! A handle has the policy that it was made with, and the version of that policy. All its clones share a [`PolicySlot`] with the newest
//! policy: each call compares the versions, and reads the newest policy only if they differ. So a call has one policy from its first step
//! to its last.
//!
//! Handles that are older than the newest policy stay in use, in layers and in the program's state. Their hits must neither lock nor
//! write to memory that processors share, so each thread caches the policies that it has read from slots.

pub(crate) mod builder;
mod change;
mod entries;
#[cfg(feature = "macros")]
pub(crate) mod function;
pub(crate) mod invalidation;
pub(crate) mod load;
pub(crate) mod load_many;
pub(crate) mod memoize;
pub(crate) mod messages;
#[cfg(test)]
#[path = "../../tests/unit/guard/current_tests.rs"]
mod tests;
pub(crate) mod typed;

use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use crate::error::{Error, ErrorKind};
use crate::guard_state::GuardState;
use crate::health::{Finding, Health, LocalTierHealth, Report};
use crate::key::{CacheKey, Key};
use crate::lock::{LAST_RELEASES, Locks};
use crate::observe::{Outcome, Requests, Stats};
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::hit_at_once;
use crate::store::{Examine, StoreError};
use crate::sync::lock;
use crate::value::EntryReader;

/// The namespace of a guard for which none was set.
const DEFAULT_NAMESPACE: &str = "default";

/// Cache-stampede protection for a whole fleet: one load per cold key across all processes that share a
/// store.
///
/// It is a handle: cheap to clone, all clones share connections, running loads and counters. It is
/// a [`tower_layer::Layer`] for HTTP services and clients (feature `http`), wraps any tower service through
/// [`memoize`](Self::memoize), and any async function through [`get_or_load`](Self::get_or_load).
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use stampede_guard::StampedeGuard;
///
/// // In production: StampedeGuard::new(redis::Client::open("redis://127.0.0.1/")?)
/// let guard = StampedeGuard::in_memory();
/// let id = 7;
/// let name: String = guard
///     .get_or_load(("user", id), move || async move { Ok::<_, std::io::Error>(format!("user {id}")) })
///     .await?;
/// assert_eq!(name, "user 7");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct StampedeGuard {
    state: Arc<PolicySlot>,
    /// The policy that this handle knows. A call looks for a newer one before it begins: [`current`](Self::current).
    policy: Arc<Policy>,
    /// How many times the policy had been replaced when the handle was made.
    version: u64,
    /// The counters for the requests of this handle, if they have a route.
    route: Option<Arc<Requests>>,
}

/// The result of a [`shutdown`](StampedeGuard::shutdown).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Whether every load ended before the deadline.
    pub finished: bool,
    /// Leases of loads that were still running at the deadline and that were then handed to another process or freed.
    pub handed_over: usize,
    /// Leases whose end the store has not confirmed, within the second after the deadline or at the end of their load, and leases
    /// that this process may hold without knowing it. Waiters in other processes wait for such a lease until its TTL ends.
    pub abandoned: usize,
    /// Keys and tags with a retained invalidation that the store has not confirmed. Other processes may serve the values that they
    /// invalidate until those expire. An invalidation that another task is still sending is not counted: that task receives the error.
    pub unsent_invalidations: usize,
}

impl StampedeGuard {
    fn from_parts(state: Arc<GuardState>, mut policy: Policy) -> Self {
        state.takes(&mut policy);
        Self::with(state, Arc::new(policy))
    }

    /// A handle with a policy that is in use already.
    fn with(state: Arc<GuardState>, policy: Arc<Policy>) -> Self {
        let state = Arc::new(PolicySlot::new(state, Arc::clone(&policy)));
        Self { state, policy, version: 0, route: None }
    }

    /// The present policy of this handle: the last one that was [set](Self::set_policy), or else the one that it was made with.
    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.current().policy)
    }

    /// The same guard with another policy: connections, running loads and counters are shared.
    ///
    /// No setting of the old policy stays, not even those that keep one user's answers from other users: to change some settings,
    /// begin with [`policy().to_builder()`](Policy::to_builder).
    ///
    /// If callers with two policies share one load, the leader's policy decides how the load is led and its value stored. The
    /// connections keep the policy that the guard was [built](Self::builder) with: after two commands without an answer within
    /// that policy's [`command_timeout`](crate::PolicyBuilder::command_timeout) they are opened anew.
    #[must_use]
    pub fn with_policy(&self, policy: Policy) -> Self {
        Self::from_parts(Arc::clone(&**self.state), policy)
    }

    /// Switches the guard off, or on again, for all its clones and policies, and for all guards that are made from
    /// [its builder](crate::StampedeGuardBuilder) or a clone of that: each caller loads for itself and is counted in
    /// [`Stats::bypassed`], and over HTTP each request passes through. Stored values stay, loads that are running are stored, and changes
    /// are made as usual: [`invalidate`](Self::invalidate), unsafe methods. A [`refresh`](crate::Load::refresh) returns the value of its
    /// own load, and stores it if the lease of its key is free.
    ///
    /// For a flag that an operator can change without a restart. [`get`](Self::get) still returns the stored value.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// guard.insert("rate", &107_u32).await?;
    /// guard.set_bypass(true);
    /// assert_eq!(guard.get_or_load("rate", || async { Ok::<_, std::io::Error>(108_u32) }).await?, 108);
    /// guard.set_bypass(false);
    /// assert_eq!(guard.get_or_load("rate", || async { Ok::<_, std::io::Error>(108_u32) }).await?, 107);
    /// # Ok(()) }
    /// ```
    pub fn set_bypass(&self, bypassed: bool) {
        self.state.set_bypass(bypassed);
    }

    /// The digest of a key, as logs and errors of this namespace name it: `#` and 16 hexadecimal digits.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::StampedeGuard;
    ///
    /// let digest = StampedeGuard::in_memory().digest(("user", 7));
    /// assert!(digest.starts_with('#') && digest.len() == 17);
    /// ```
    pub fn digest(&self, key: impl Into<CacheKey>) -> String {
        format!("#{}", Key::new(&self.state.namespace, &key.into()).digest())
    }

    /// Opens the connections, so that the first request need not wait for them, and tests with a script whether the server
    /// supports loads. The script leaves no key behind. If the policy has local copies, gets the volume lease.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) after [`shutdown`](Self::shutdown).
    ///
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) if the connections are not up within the policy's coordination budget or one
    /// second, whichever is longer: the guard goes on connecting in the background. Also if the server runs no scripts or lacks a
    /// command that loads need, or if this user lacks the right to one; the causes name these commands. (On a cluster each master that
    /// can be reached is tested; if all of them say that the cluster is down, that is an error too, as it is for a single server that
    /// is loading or busy.) The guard then behaves as while the store is [down](crate::PolicyBuilder::on_store_down). Other findings
    /// of [`doctor`](Self::doctor) are no errors here. The text says what to change, as in "no server listens there: see that host and
    /// port are right, and that the server runs".
    ///
    /// # Cancel safety
    ///
    /// Safe: connecting goes on in the background.
    pub async fn connect(&self) -> Result<(), Error> {
        let within = self.policy().coordination_budget.max(Duration::from_secs(1));
        let began = Instant::now();
        let failed = |what: &'static str| move |source: StoreError| Error::unusable(what, source);
        let (store, key) = (&self.state.store, self.unused_key("connect"));
        self.state.publish_regularly();
        store.connect(within).await.map_err(failed("connecting to the store failed"))?;
        let left = || within.saturating_sub(began.elapsed());
        store.probe(&key, left()).await.map_err(failed("the store does not do what loads need"))?;
        if self.state.local.is_in_use() {
            let leased = self.state.local.connect(left()).await;
            leased.map_err(failed("the store does not do what the local tier needs: no hits from memory"))?;
        }
        Ok(())
    }

    /// Mutexes and semaphores on this guard's connections, in its namespace.
    pub fn locks(&self) -> Locks {
        Locks::of(&self.state)
    }

    /// The counters of this guard and its clones since it was made.
    pub fn stats(&self) -> Stats {
        self.state.stats()
    }

    /// Ends the guard. Later calls with a loader look nothing up in the store, take no lease, and share one load of their key in this
    /// process.
    ///
    /// Loads that are running are awaited until `deadline` from now. Then their leases are handed to other processes, or freed,
    /// which takes a round trip each, and at most one second more than `deadline`. If all loads end before `deadline`, this call
    /// waits until leases that were acquired without an answer are released, for two seconds at most and within the deadline.
    ///
    /// Then callers that wait for one of its [`locks`](Self::locks) receive an error, and their releases in the background
    /// are awaited: within the deadline and for two seconds at most, or within that second. Locks that are still held stay held
    /// until their TTL ends. Retained invalidations, which the store has not confirmed, are sent in the same time; a warning says how
    /// many remain. So before this call, end the requests whose handlers hold locks or invalidate. Calls without a loader
    /// then fail with [`ErrorKind::Closed`](crate::ErrorKind::Closed); a store in
    /// memory, which has no connections to close, answers them as before.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the shutdown stops at its present step; the steps before are not undone.
    pub async fn shutdown(&self, deadline: Duration) -> Shutdown {
        self.state.close();
        self.state.local.give_up();
        self.send_retained_later();
        // Cap the deadline: timers cannot represent `Duration::MAX`.
        let deadline = Instant::now() + deadline.min(Duration::from_secs(365 * 86_400));
        let finished = self.state.tasks.empty(deadline).await;
        let held = self.state.leases.count();
        let end = if finished {
            // Once the store is closed, an unreleased lease ends only by its TTL, so wait briefly for releases.
            deadline.min(Instant::now() + LAST_RELEASES)
        } else {
            self.state.leave();
            // The hand-over takes one script for each lease. The time for it is bounded, because the process is to end. Loads that
            // end here release their permits in the background, within the rest of the same second.
            Instant::now() + Duration::from_secs(1)
        };
        let left = end.saturating_duration_since(Instant::now());
        // Waits for possible leases first: a possible lease that turns out to be granted counts as held from then on.
        let freed = async {
            self.state.possible_leases.empty(end).await;
            self.state.leases.empty(end).await;
        };
        let (left, sent) = (self.state.local.leave(left), self.state.retained.until_sent(end));
        let ((), (), unsent_invalidations) = tokio::join!(freed, left, sent);
        // The waits for locks end after the loads, which may wait for locks themselves; then the background releases, because a waiter
        // that stays in a lock's queue delays the waiters behind it by a TTL.
        self.state.waiters.send_away(end).await;
        self.state.background.empty(end).await;
        let (still_held, doubtful) = (self.state.leases.count(), self.state.possible_leases.count());
        self.state.store.close();
        self.state.publish_last();
        self.state.retained.log_unsent();
        Shutdown {
            finished,
            handed_over: if finished { 0 } else { held.saturating_sub(still_held) },
            abandoned: still_held + doubtful,
            unsent_invalidations,
        }
    }

    /// The guard state and the policy.
    pub(crate) fn parts(&self) -> (&Arc<GuardState>, &Arc<Policy>) {
        (&self.state, &self.policy)
    }

    fn call<'a>(&'a self, key: &'a Key) -> Call<'a> {
        Call { state: &self.state, policy: &self.policy, key }
    }

    /// Counts and logs how a request was answered.
    pub(crate) fn count_answer(&self, key: &Key, outcome: Outcome) {
        self.state.answered(self.requests(), key, outcome);
    }

    /// Like [`count_answer`](Self::count_answer), for a request that this route, if there is one, has matched.
    pub(crate) fn count_answer_on(&self, route: Option<&str>, key: &Key, outcome: Outcome) {
        match route {
            Some(route) => self.state.answered(&self.policy.counters.routes.of(route), key, outcome),
            None => self.count_answer(key, outcome),
        }
    }

    /// Counts a request that the guard passed through without caching.
    pub(crate) fn count_pass(&self) {
        self.state.passed(self.requests());
    }

    fn requests(&self) -> &Requests {
        self.route.as_ref().unwrap_or_else(|| self.policy.counters.requests())
    }

    /// The same handle, with the counters for requests that this route has matched.
    pub(crate) fn on_route(mut self, route: &str) -> Self {
        self.route = Some(self.policy.counters.routes.of(route));
        self
    }

    pub(crate) fn key(&self, key: impl Into<CacheKey>) -> Result<Key, Error> {
        let key = key.into();
        if key.is_empty() {
            return Err(Error::empty_key());
        }
        // The runtime of the task that sends retained invalidations may have ended. Each call that may use the store comes here.
        if self.state.retained.any() {
            self.send_retained_later();
        }
        Ok(Key::new(&self.state.namespace, &key))
    }
}

debug_as!(self: StampedeGuard { namespace: self.state.namespace, policy: self.policy() });

/// A handle with the newest policy, for one call.
pub(crate) type Current<'a> = Cow<'a, StampedeGuard>;

impl StampedeGuard {
    /// The version of the newest policy, if the handle has an older one.
    #[inline]
    fn newer_version(&self) -> Option<u64> {
        let version = self.state.version();
        (version != self.version).then_some(version)
    }

    /// This handle, or one with the newest policy: a call uses it for all its steps.
    #[inline]
    pub(crate) fn current(&self) -> Current<'_> {
        match self.newer_version() {
            None => Cow::Borrowed(self),
            Some(version) => Cow::Owned(self.renewed(version)),
        }
    }

    #[inline(never)]
    fn renewed(&self, version: u64) -> Self {
        let found = self.state.find(version);
        let (state, policy) = (Arc::clone(&self.state), Arc::clone(&found.policy));
        found.remember();
        Self { state, policy, version, route: self.route.clone() }
    }

    /// A hit from memory on the fast path. Otherwise `Err` says whether a hit of the following look-up is to be audited.
    #[inline]
    fn hit_at_once<R: EntryReader>(&self, key: &CacheKey, reader: &R) -> Result<R::Value, bool> {
        let Some(version) = self.newer_version() else { return self.hit_under(&self.policy, key, reader) };
        let found = self.state.find(version);
        let hit = self.hit_under(&found.policy, key, reader);
        found.remember();
        hit
    }

    #[inline]
    fn hit_under<R: EntryReader>(
        &self,
        policy: &Policy,
        key: &CacheKey,
        reader: &R,
    ) -> Result<R::Value, bool> {
        let audits = policy.audit.is_due();
        let hit = if audits { None } else { hit_at_once(&self.state, policy, key, reader) };
        hit.ok_or(audits)
    }

    /// Replaces the policy of this guard while it runs: of this handle, all its clones, and the layers and services that were made
    /// from them. Each call that begins later has the new policy; running calls and loads end with the policy that they began with,
    /// except that [`warm`](Self::warm) takes the newest for each group. Handles that [`with_policy`](Self::with_policy) has made keep
    /// their own policies, which can be replaced separately.
    ///
    /// Stored values keep the lifetimes and tags that they were stored with. A new
    /// [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) is a new queue: until the loads of the old one have
    /// ended, loads of both may run. The connections keep the `command_timeout` after which they are opened anew, as with `with_policy`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`](crate::ErrorKind::InvalidPolicy), and the policy stays, if a setting differs that cannot change
    /// at run time: `name`, under which counters count; `codec`; over HTTP the settings that make the keys (the kind of the policy,
    /// `scheme`, `authority`, `behind_proxy`, and in a private cache the credentials), because invalidations would miss the values that
    /// are stored under the old keys. Likewise if a function or type is missing (`audit_by`, `share_errors`, `key`,
    /// `personal_extension`), or if such a function is new: a policy that was read from a file has none.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let layer = guard.clone();
    /// let changed = guard.policy().to_builder().fresh_for(Duration::from_secs(5)).build()?;
    /// guard.set_policy(changed.clone())?;
    /// assert_eq!(*layer.policy(), changed);
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    pub fn set_policy(&self, policy: Policy) -> Result<(), Error> {
        self.state.replace(policy)
    }
}

/// The part that all clones of one handle share: the guard state and the newest policy.
struct PolicySlot {
    state: Arc<GuardState>,
    /// Unlike an address, an id is never reused by another slot.
    id: u64,
    /// How many times the policy was replaced since this slot was made.
    version: AtomicU64,
    newest: Mutex<Arc<Policy>>,
}

/// A policy that a thread has read from a slot.
struct FoundPolicy {
    slot: u64,
    /// The version, read before the policy. If the policy is newer than this version, the only cost is that it is read once more.
    version: u64,
    policy: Arc<Policy>,
}

/// The size of a thread's cache of policies. Slots with the same index in the cache replace each other's policies.
const SLOTS: usize = 8;

thread_local! {
    static REMEMBERED: [Cell<Option<FoundPolicy>>; SLOTS] = const { [const { Cell::new(None) }; SLOTS] };
}

impl PolicySlot {
    fn new(state: Arc<GuardState>, policy: Arc<Policy>) -> Self {
        static SLOTS: AtomicU64 = AtomicU64::new(0);
        let id = SLOTS.fetch_add(1, Ordering::Relaxed);
        Self { state, id, version: AtomicU64::new(0), newest: Mutex::new(policy) }
    }

    /// The newest version.
    #[inline]
    fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The policy of this version, or a newer policy.
    #[inline]
    fn find(&self, version: u64) -> FoundPolicy {
        // The policy is taken out of the cache, and put back by `remember`: a clone would write to the reference count.
        let found = with_cached(self.id, Cell::take).flatten();
        match found {
            Some(found) if (found.slot, found.version) == (self.id, version) => found,
            _ => self.read(version),
        }
    }

    /// Replaces the policy, if the difference is allowed.
    fn replace(&self, mut policy: Policy) -> Result<(), Error> {
        let mut newest = lock(&self.newest);
        if let Some(text) = policy.refusal_after(&newest) {
            return Err(Error::new(ErrorKind::InvalidPolicy, text));
        }
        if policy != **newest {
            // The policy's name has counters already, so nothing is published under this lock.
            self.state.takes(&mut policy);
            *newest = Arc::new(policy);
            self.version.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    #[cold]
    fn read(&self, version: u64) -> FoundPolicy {
        FoundPolicy { slot: self.id, version, policy: Arc::clone(&lock(&self.newest)) }
    }
}

impl FoundPolicy {
    #[inline]
    fn remember(self) {
        with_cached(self.slot, |cell| cell.set(Some(self)));
    }
}

/// Calls `change` with this thread's cache cell for a slot; returns `None` while the thread ends.
#[inline]
fn with_cached<R>(slot: u64, change: impl FnOnce(&Cell<Option<FoundPolicy>>) -> R) -> Option<R> {
    let change_cell = |cells: &[_; SLOTS]| change(&cells[slot as usize % SLOTS]);
    REMEMBERED.try_with(change_cell).ok()
}

impl Deref for PolicySlot {
    type Target = Arc<GuardState>;

    #[inline]
    fn deref(&self) -> &Arc<GuardState> {
        &self.state
    }
}

impl StampedeGuard {
    /// The state of the store as this guard knows it. Sends nothing, does not wait, may be called outside a
    /// runtime.
    ///
    /// A guard whose store is down still answers, with one load per process and key: do not take a process out of service
    /// because its store is down.
    pub fn health(&self) -> Health {
        Health { local: self.state.local.health(), ..self.state.store.health() }
    }

    /// Examines the deployment: connection, version, rights, notifications, clock, latency, memory, eviction, replicas,
    /// persistence, and this guard's settings against them.
    ///
    /// On Redis it opens two extra connections for a moment, so that it does not disturb the guard's. It
    /// uses one key of this guard's namespace, and removes it before it returns. It works with the rights that its user has: for the
    /// documented minimal user `INFO` and `CONFIG` are refused (a line each in the server's `ACL LOG`), and the checks that
    /// need them are reported as not permitted. It never fails: a server that cannot be reached is a finding. It
    /// takes ten seconds at the most; on a sound server, milliseconds.
    ///
    /// # Cancel safety
    ///
    /// Safe: its connections are closed, its key expires by itself.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let report = StampedeGuard::in_memory().doctor().await;
    /// println!("{report}");
    /// assert!(report.is_healthy());
    /// # }
    /// ```
    pub async fn doctor(&self) -> Report {
        let policy = self.policy();
        let mut findings = self
            .state
            .store
            .examine(Examine {
                key: self.unused_key("doctor"),
                coordination_budget: policy.coordination_budget,
                lease: policy.lease,
                replicas: policy.replicas.map_or(0, |(replicas, _)| replicas),
            })
            .await;
        findings.push(self.namespace());
        findings.extend(self.local_tier());
        findings.extend(self.unusable_entries());
        if self.state.is_closed() {
            let found = Finding::problem("guard", "it was shut down");
            findings.push(found.cost("every call loads for itself").advice("make a new guard"));
        }
        Report::new(findings)
    }

    /// An unused key of this guard's namespace.
    fn unused_key(&self, purpose: &str) -> Key {
        let name = CacheKey::from(format!("{purpose}-{}", Uuid::new_v4().simple()));
        Key::new(&self.state.namespace, &name)
    }

    /// The finding about the local tier, if a policy of this guard uses it.
    fn local_tier(&self) -> Option<Finding> {
        let LocalTierHealth { copies, bytes, lease_remaining, .. } = self.state.local.health()?;
        let found = format!("{copies} copies in {bytes} bytes");
        Some(if lease_remaining.is_zero() {
            Finding::note("local tier", format!("{found}; no lease at present"))
                .cost("hits are read from the store")
                .advice("none where no caller has asked lately; else see the findings about the connection and the rights")
        } else {
            Finding::ok("local tier", found)
        })
    }

    /// The finding about entries that this process could not use: this process and others may replace each other's entries.
    fn unusable_entries(&self) -> Option<Finding> {
        let reasons = self.state.unusable.reasons();
        let (_, _, advice) = reasons.iter().max_by_key(|(count, ..)| *count)?;
        let found: Vec<_> = reasons.iter().map(|(count, what, _)| format!("{count} {what}")).collect();
        let found = format!("reads of entries that this process can not use: {}", found.join(", "));
        let cost = "each is a load, and may replace what other processes read";
        Some(Finding::warning("entries", found).cost(cost).advice(*advice))
    }

    fn namespace(&self) -> Finding {
        let namespace = &self.state.namespace;
        if **namespace == *DEFAULT_NAMESPACE {
            Finding::note("namespace", format!("`{namespace}`, the default"))
                .cost("two services that share this store would be given each other's values")
                .advice("StampedeGuard::builder(..).namespace(\"your service\")")
        } else {
            Finding::ok("namespace", format!("`{namespace}`"))
        }
    }
}

#[cfg(test)]
mod doctor_tests {
    use std::time::Duration;

    use super::*;
    use crate::health::{Breaker, LinkState, Severity, Topology};

    #[tokio::test]
    async fn an_in_memory_guard_is_healthy_and_reports_that_there_is_no_fleet() {
        let guard = StampedeGuard::in_memory();
        let health = guard.health();
        assert_eq!((health.commands, health.inbox), (LinkState::Up, LinkState::Up));
        assert_eq!((health.topology, health.breaker), (Topology::Memory, Breaker::Closed));
        assert_eq!((health.clock, health.silent_for, health.reason), (None, None, None));
        let report = guard.doctor().await;
        assert!(report.is_healthy() && report.worst() == Severity::Note, "{report}");
        assert!(report.to_string().contains("no fleet"), "{report}");
    }

    #[tokio::test]
    async fn a_guard_that_was_shut_down_reports_it() {
        let guard = StampedeGuard::in_memory();
        guard.shutdown(Duration::ZERO).await;
        assert_eq!(guard.health().commands, LinkState::Closed);
        assert_eq!(guard.health().breaker, Breaker::Open);
        let report = guard.doctor().await;
        assert!(!report.is_healthy() && report.to_string().contains("shut down"), "{report}");
    }

    #[tokio::test]
    async fn a_namespace_other_than_the_default_is_ok() {
        let guard =
            StampedeGuard::builder(crate::MemoryStore::new()).namespace("shop").build().expect("valid");
        let report = guard.doctor().await;
        let namespace =
            report.findings.iter().find(|finding| finding.check == "namespace").expect("it is looked at");
        assert_eq!(namespace.severity, Severity::Ok);
    }
}
