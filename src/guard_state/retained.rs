//! Retained invalidations: the list of the invalidations that the store has not confirmed. Each stays in the list until the store has
//! confirmed it, and until then this process serves nothing that it invalidates.
//!
//! An invalidation *ends unconfirmed* when its caller receives an error or drops the call. The invariants:
//!
//! 1. *None is lost.* An invalidation that ends unconfirmed is retained, by its name and with the number of the latest attempt, until an
//!    attempt with a higher number is confirmed. An attempt takes its number before it sends its command, so the command of a higher
//!    number ran after all retained attempts had begun. (By name alone, a change that ran before the retained attempt would settle it.)
//! 2. *Bounded.* Beyond the bound all names become one: the tag of everything, with the number of the latest attempt.
//! 3. *A read that is sent while a name is retained serves nothing with that name*, whenever its answer comes. So a key and the tags of
//!    a policy are looked up in the list before the read is sent. An entry's own tags are known only after the read: they are looked up
//!    before their ids are read. If the invalidation of a tag is sent between the two reads, its new id differs from the entry's.
//! 4. *No local copy of a retained name is made.* A reader takes its ticket first and looks up the name after that; a writer retains the
//!    name first and voids its tickets after that. So either the ticket is void or the name is found. The same holds at the end: sending
//!    an invalidation voids the tickets before its name is removed from the list.
//! 5. *No later caller joins an older flight*: when a name is retained, its flights are detached, after the name is in the list.
//! 6. *One task sends them* for all clones of a guard. It ends only if the list is empty, and decides that under the lock.
//! 7. *A pending invalidation hides its names* in the same way, from its beginning, before the origin's change, until it was confirmed,
//!    retained or withdrawn. Its numbers are taken when it is sent or dropped: an attempt that began before the origin's change must not
//!    settle it (1). Its names are not counted in the bound (2): they become one name only when they are retained.
//!
//! The list is in this process's memory: it is lost if the process dies.

use std::collections::{HashMap, hash_map};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::key::Key;
use crate::observe::{LogEveryMinute, log, warn_if};
use crate::policy::Policy;
use crate::store::protocol::ChangedName;
use crate::sync::{lock, until};
use crate::value::entry;
use crate::value::entry::Entry;

/// How many names are retained unless the builder says otherwise.
pub(crate) const DEFAULT_MOST_RETAINED: usize = 10_000;
/// How many keys `RetainedNames::reloaded` has at most.
const MOST_RELOADED: usize = 10_000;

/// The invalidations of one guard that the store has not confirmed.
#[derive(Debug)]
pub(crate) struct RetainedInvalidations {
    /// Whether a read has to check the list. Relaxed, because a caller that knows that an invalidation has failed also sees this flag.
    any: AtomicBool,
    /// The number of the latest attempt at a change.
    attempts: AtomicU64,
    most: usize,
    /// The tag of everything in the namespace.
    everything: Key,
    names: Mutex<RetainedNames>,
    /// Notified when the list becomes empty.
    all_sent: Notify,
    begin_log: LogEveryMinute,
    overflow_log: LogEveryMinute,
}

#[derive(Debug, Default)]
struct RetainedNames {
    by_name: HashMap<ChangedName, RetainedInvalidation>,
    /// The names of pending invalidations, and how many of these each is in.
    hidden: HashMap<ChangedName, usize>,
    /// Set if there were too many names: the tag of everything then replaces all of them.
    overflowed: Option<Overflow>,
    /// A moment of the store's clock. An entry that was stored earlier may be older than an invalidation that was retained as the tag of
    /// everything, unless the entry has that tag. Zero if there was no such invalidation.
    served_since: u64,
    /// When the invalidation that has set `served_since` was confirmed.
    overflow_confirmed: Option<Instant>,
    /// The keys that this process has loaded since `overflow_confirmed`, each with the time at which the value was stored. Such a load
    /// began after the invalidation, so the value is served although it was stored before `served_since`.
    reloaded: HashMap<ChangedName, u64>,
    is_being_sent: bool,
    /// Whether a warning about retained invalidations was logged, and their confirmation is not logged yet.
    is_logged: bool,
}

/// The state after the names became too many, and the tag of everything has replaced them.
#[derive(Clone, Copy, Debug, Default)]
struct Overflow {
    /// Whether one of the replaced names was retained under a policy whose values do not have the tag of everything.
    misses_values: bool,
    /// The longest `load_timeout` of the policies under which the replaced names were retained.
    longest_load: Duration,
}

impl Overflow {
    fn stands_for(&mut self, policy: &Policy) {
        self.misses_values |= !policy.invalidate_all;
        self.longest_load = self.longest_load.max(policy.load_timeout);
    }
}

/// The target of a change: the value of a key, or all values with a tag.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChangeTarget {
    pub(crate) key: Key,
    pub(crate) is_tag: bool,
}

impl ChangeTarget {
    pub(crate) fn value(key: Key) -> Self {
        Self { key, is_tag: false }
    }

    pub(crate) fn tag(key: Key) -> Self {
        Self { key, is_tag: true }
    }

    /// For an HTTP resource: the tag of the responses to requests with reports of proxies, which is invalidated with the resource.
    pub(crate) fn of_reports(&self, namespace: &str) -> Option<Self> {
        if self.is_tag { None } else { self.key.of_reports(namespace).map(Self::tag) }
    }

    /// What a change of this target invalidates.
    pub(crate) fn with_reports(&self, namespace: &str) -> impl Iterator<Item = Self> + use<> {
        self.of_reports(namespace).into_iter().chain([self.clone()])
    }

    pub(crate) fn name(&self) -> ChangedName {
        if self.is_tag { ChangedName::tag(&self.key) } else { ChangedName::value(&self.key) }
    }
}

/// An invalidation that is sent again as soon as the store answers.
#[derive(Clone, Debug)]
pub(crate) struct RetainedInvalidation {
    pub(crate) target: ChangeTarget,
    /// The number of the latest attempt that has ended unconfirmed.
    pub(crate) attempt: u64,
    /// The policy of that attempt.
    pub(crate) policy: Arc<Policy>,
}

/// Which entries a read may serve, computed before the read is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Servable {
    /// Whether any entry may be served: neither the key nor a tag of the policy is retained.
    is_any: bool,
    /// An entry must have been stored at this moment of the store's clock or later, or have the tag of everything.
    since: u64,
}

impl Servable {
    const ALL: Self = Self { is_any: true, since: 0 };
}

impl RetainedInvalidations {
    pub(super) fn new(namespace: &str, most: usize) -> Self {
        Self {
            any: AtomicBool::new(false),
            attempts: AtomicU64::new(0),
            most,
            everything: entry::tag_of_everything(namespace),
            names: Mutex::default(),
            all_sent: Notify::new(),
            begin_log: LogEveryMinute::default(),
            overflow_log: LogEveryMinute::default(),
        }
    }

    /// A number for an attempt at a change. Call this before the command is sent.
    pub(crate) fn next_attempt(&self) -> u64 {
        self.attempts.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Whether reads have to check: the list may have a name, or an overflow has set `RetainedNames::served_since`.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// How many names are retained.
    pub(crate) fn count(&self) -> usize {
        if self.any() { lock(&self.names).by_name.len() } else { 0 }
    }

    /// Retains an invalidation that has ended unconfirmed. Returns whether it made the list overflow: from now on the tag of everything is
    /// retained.
    pub(crate) fn keep(&self, retained: RetainedInvalidation) -> bool {
        let mut names = lock(&self.names);
        let (is_first, policy) = (names.by_name.is_empty(), Arc::clone(&retained.policy));
        let is_known = names.by_name.contains_key(&retained.target.name());
        let overflows = names.overflowed.is_none() && !is_known && names.by_name.len() >= self.most;
        if overflows {
            let mut overflow = Overflow::default();
            names.by_name.drain().for_each(|(_, retained)| overflow.stands_for(&retained.policy));
            names.overflowed = Some(overflow);
        }
        let retained = match &mut names.overflowed {
            Some(overflow) => {
                overflow.stands_for(&policy);
                RetainedInvalidation { target: ChangeTarget::tag(self.everything.clone()), ..retained }
            }
            None => retained,
        };
        let name = retained.target.name();
        let latest = names.by_name.get(&name).map_or(0, |known| known.attempt);
        names
            .by_name
            .insert(name, RetainedInvalidation { attempt: retained.attempt.max(latest), ..retained });
        self.any.store(true, Ordering::Relaxed);
        let is_news = is_first && self.begin_log.is_due();
        names.is_logged |= is_news;
        let misses_values = names.overflowed.is_some_and(|overflow| overflow.misses_values);
        drop(names);
        if is_first {
            warn_if!(
                log::GUARD,
                is_news,
                "the store has not confirmed an invalidation. It is kept, and sent as soon as the store answers; until then this \
                 process serves nothing that it invalidates"
            );
        }
        if overflows && self.overflow_log.is_due() {
            self.log_overflow(misses_values);
        }
        overflows
    }

    fn log_overflow(&self, misses_values: bool) {
        let text = if misses_values {
            "more invalidations than most_kept_invalidations are not confirmed: everything in the namespace is invalidated instead, \
             except for what was stored under a policy without invalidate_all(true). This process serves none of that either; other \
             processes may serve it until it expires: delete this namespace's keys (sg1:*{namespace:*) in the store once it answers, \
             and build the policies with invalidate_all(true)"
        } else {
            "more invalidations than most_kept_invalidations are not confirmed: everything in the namespace is invalidated instead"
        };
        tracing::error!(target: log::GUARD, most = self.most, "{text}");
    }

    /// Hides what the names of a pending invalidation stand for, until [`show`](Self::show).
    pub(crate) fn hide(&self, names: &[ChangedName]) {
        let mut all = lock(&self.names);
        names.iter().for_each(|name| *all.hidden.entry(name.clone()).or_default() += 1);
        self.any.store(all.any(), Ordering::Relaxed);
    }

    /// Called when a pending invalidation has ended: if it was not confirmed, after its names were retained.
    pub(crate) fn show(&self, names: &[ChangedName]) {
        let mut all = lock(&self.names);
        for name in names {
            if let hash_map::Entry::Occupied(mut count) = all.hidden.entry(name.clone()) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        self.any.store(all.any(), Ordering::Relaxed);
    }

    /// Called when the store has confirmed the attempt with this number. `until` returns, for a `load_timeout`, the moment of the store's
    /// clock by which all loads that began before now have ended. Returns whether the name was retained and is no longer.
    pub(crate) fn confirmed(
        &self,
        name: &ChangedName,
        attempt: u64,
        until: impl FnOnce(Duration) -> u64,
    ) -> bool {
        if !self.any() {
            return false;
        }
        let mut names = lock(&self.names);
        if names.by_name.get(name).is_none_or(|retained| retained.attempt > attempt) {
            return false;
        }
        names.by_name.remove(name);
        if *name == ChangedName::tag(&self.everything)
            && let Some(overflow) = names.overflowed.take()
        {
            names.reloaded.clear();
            if overflow.misses_values {
                names.served_since = names.served_since.max(until(overflow.longest_load));
                names.overflow_confirmed = Some(Instant::now());
            }
        }
        if names.by_name.is_empty() {
            self.any.store(names.any(), Ordering::Relaxed);
            let is_logged = std::mem::take(&mut names.is_logged);
            drop(names);
            self.all_sent.notify_waiters();
            if is_logged {
                tracing::info!(target: log::GUARD, "all invalidations that were kept are confirmed");
            }
        }
        true
    }

    /// The invalidations to send, the oldest first. If there are none, the caller, which is the task that sends, must end.
    pub(crate) fn to_send(&self) -> Vec<RetainedInvalidation> {
        let mut names = lock(&self.names);
        if names.by_name.is_empty() {
            names.is_being_sent = false;
        }
        let mut all: Vec<_> = names.by_name.values().cloned().collect();
        all.sort_unstable_by_key(|retained| (retained.attempt, retained.target.is_tag));
        all
    }

    /// Whether the caller must start the task that sends: the list is not empty, and there is no such task.
    pub(crate) fn begin_to_send(&self) -> bool {
        let mut names = lock(&self.names);
        !names.by_name.is_empty() && !std::mem::replace(&mut names.is_being_sent, true)
    }

    /// Called when the task that sends has ended with its runtime.
    pub(crate) fn sends_no_more(&self) {
        lock(&self.names).is_being_sent = false;
    }

    /// Waits until all retained invalidations are confirmed, at most until `end`; returns how many remain.
    pub(crate) async fn until_sent(&self, end: Instant) -> usize {
        let _ = timeout_at(end, until(&self.all_sent, || self.count() == 0)).await;
        self.count()
    }

    /// Logs that the invalidations that are still retained are lost with this process, if there are any.
    pub(crate) fn log_unsent(&self) {
        let left = self.count();
        if left > 0 {
            tracing::warn!(
                target: log::GUARD,
                left,
                "the guard ends with invalidations that the store has not confirmed: what they invalidate may be served by other \
                 processes until it expires; invalidate it again"
            );
        }
    }

    /// Which entries a read of this key may serve. Call this before the read is sent: invariant 3.
    pub(crate) fn servable(&self, key: &Key, tags: &[Key]) -> Servable {
        if !self.any() {
            return Servable::ALL;
        }
        let names = lock(&self.names);
        let is_any = names.overflowed.is_none()
            && !names.has(&ChangedName::value(key))
            && !names.has_tag(tags.iter().map(Key::name));
        let since = match names.reloaded.is_empty() {
            true => names.served_since,
            false => names.reloaded.get(&ChangedName::value(key)).copied().unwrap_or(names.served_since),
        };
        Servable { is_any, since }
    }

    /// Called when the store has confirmed the commit of a value that this process began to load at `began`. Must be called before the
    /// load's callers are answered, so that their next read may serve the value.
    pub(crate) fn reloaded(&self, key: &Key, began: Instant, stored_at: u64) {
        if !self.any() {
            return;
        }
        let mut names = lock(&self.names);
        let began_after = names.overflow_confirmed.is_some_and(|confirmed| confirmed < began);
        let is_needed = stored_at < names.served_since && names.reloaded.len() < MOST_RELOADED;
        if began_after && is_needed && names.overflowed.is_none() {
            names.reloaded.insert(ChangedName::value(key), stored_at);
        }
    }

    /// Whether one of an entry's own tags is retained. Call this before their ids are read: invariant 3.
    pub(crate) fn has_tag(&self, tags: &[Key]) -> bool {
        self.any() && lock(&self.names).has_tag(tags.iter().map(Key::name))
    }

    /// Whether an entry that a read has found may be served.
    pub(crate) fn may_serve(&self, servable: Servable, entry: &Entry) -> bool {
        servable.is_any && (entry.stored_at >= servable.since || entry.tags.id_of(&self.everything).is_some())
    }

    /// Whether a local copy may be made of a value that is stored now. Call this after its ticket was taken: invariant 4.
    pub(crate) fn may_copy(&self, key: &Key, entry: &Entry) -> bool {
        if !self.any() {
            return true;
        }
        let servable = self.servable(key, &[]);
        self.may_serve(servable, entry) && !lock(&self.names).has_tag(entry.tags.iter().map(|(name, _)| name))
    }
}

impl RetainedNames {
    /// Whether reads have to check.
    fn any(&self) -> bool {
        !self.by_name.is_empty() || !self.hidden.is_empty() || self.served_since > 0
    }

    fn has(&self, name: &ChangedName) -> bool {
        self.by_name.contains_key(name) || self.hidden.contains_key(name)
    }

    fn has_tag<'a>(&self, mut tags: impl Iterator<Item = &'a str>) -> bool {
        self.overflowed.is_some() || tags.any(|tag| self.has(&ChangedName::Tag(tag.into())))
    }
}

#[cfg(test)]
#[path = "../../tests/unit/guard_state/retained_tests.rs"]
mod tests;
