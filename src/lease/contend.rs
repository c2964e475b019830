//! Contending for a lease: who is first leads, the others wait behind the holder. Steps 4 and 5.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, sleep_until};

use super::{Lease, release_later};
use crate::ending::Ending;
use crate::entry::{Entry, Kind};
use crate::key::Key;
use crate::node::{Budget, FlightKey, Lane, Node, Seen, Stored};
use crate::observe::Count;
use crate::policy::Policy;
use crate::store::watch::Hints;
use crate::store::{Acquire, Acquired, StoreError, StoreErrorKind, Token};
use crate::times::Serves;

/// While hints may be lost, nobody sleeps longer than this between two looks.
const UNSURE_WAIT: Duration = Duration::from_millis(500);
/// The shortest sleep on a lease that is about to expire: a look each so often is no busy loop.
const SHORTEST_WAIT: Duration = Duration::from_millis(5);
/// How often an entry that can not be used may be met before the load goes on without the store.
const UNUSABLE_LIMIT: u8 = 3;

/// What contending for a key came to.
pub(crate) enum Contended {
    /// This flight leads.
    Leased(Lease),
    /// Somebody else's load has ended.
    Ended(Ending),
    /// Somebody leads, with so much left of the lease, and this flight does not queue.
    Busy(Duration),
    /// Somebody led for longer than this flight waits.
    WaitedOut,
    /// The store does not answer, or not usefully.
    StoreDown(StoreError),
    /// The guard is shutting down.
    Leaving,
}

/// What a flight brings to the contention.
pub(crate) struct Contender<'a> {
    pub(crate) node: &'a Arc<Node>,
    pub(crate) key: &'a Key,
    pub(crate) policy: &'a Policy,
    pub(crate) queue: bool,
    /// What was read and will not be served as it is.
    pub(crate) seen: &'a mut Option<Box<Seen>>,
    pub(crate) budget: &'a mut Budget,
    /// The tags that an entry must have.
    pub(crate) tags: &'a [Key],
    /// What the store's clock showed when the flight began.
    pub(crate) since: u64,
    pub(crate) deadline: Instant,
    /// Asked at the deadline, whether there is another one: somebody else waits, who came later.
    pub(crate) goes_on: &'a (dyn Fn() -> Option<Instant> + Sync),
}

/// Step 4 and 5: acquires the lease, or waits behind its holder and tries again.
pub(crate) async fn contend(contender: Contender<'_>) -> Contended {
    let Contender { node, key, policy, queue, seen, budget, tags, since, mut deadline, goes_on } = contender;
    let mut token = Token::mint(node.store.node());
    // Registered before the first acquire: invariant 3 of the store.
    let mut watch = node.store.watch(key, &token);
    let (mut behind, mut hops, mut unusable) = (None, 0, 0);
    // When this flight was told that the load it waits behind has ended.
    let mut released: Option<Instant> = None;
    // An acquire without an answer may have been granted, or may be granted later. So may one that comes after a grant
    // that was heard, if it gets no further.
    let mut ghost = false;
    // From when it has asked it may be given the lease at any time.
    let doubtful = node.doubtful.enter();

    let contended = 'contending: loop {
        if node.is_leaving() {
            break Contended::Leaving;
        }
        let Some(within) = budget.next() else {
            node.count(Count::budget_exceeded);
            break Contended::StoreDown(StoreError::new(StoreErrorKind::TimedOut));
        };
        let ask = Acquire {
            token: &token,
            lease: policy.lease,
            seen: seen.as_ref().map(|seen| &seen.raw),
            behind: behind.as_ref(),
            queue,
        };
        // All who wait in the fleet read what was stored at one moment, and the server was there just now.
        let within = released.map_or(within, |at| within.max(policy.lease.saturating_sub(at.elapsed())));
        let asked = Instant::now();
        let acquired = node.store.acquire(key, ask, within).await;
        // A round trip that ends in waiting ran beside a live leader's own work: it added nothing.
        if !matches!(acquired, Ok(Acquired::Held { .. })) {
            budget.spend(asked);
        }
        let (remaining, holder) = match acquired {
            Ok(Acquired::Granted) => {
                let (node, key, ttl) = (Arc::clone(node), key.clone(), policy.lease);
                let _held = node.leases.enter();
                let waited_until = behind.is_some().then(Instant::now);
                let confirmed = Mutex::new(asked);
                return Contended::Leased(Lease {
                    node,
                    key,
                    token,
                    watch,
                    ttl,
                    hops,
                    waited_until,
                    confirmed,
                    _held,
                });
            }
            Ok(Acquired::Found(raw)) => {
                let stored = match current(node, raw, key, tags, within).await {
                    Ok(stored) => stored,
                    Err(error) => break Contended::StoreDown(error),
                };
                let unusable_now = match stored {
                    Stored::Entry(entry) if entry.kind == Kind::Marker => {
                        break Contended::Ended(Ending::Uncacheable);
                    }
                    Stored::Entry(entry) => match entry.serves(node.store.now()) {
                        Serves::Fresh => break Contended::Ended(Ending::Value(entry)),
                        // The load that this flight has waited for, or would have repeated, has failed.
                        Serves::Resting => break Contended::Ended(Ending::Stale(entry)),
                        // Stored while this flight waited: made for it, whatever its lifetime. (Not what was expired meanwhile.)
                        _ if !entry.times.is_expired() && (behind.is_some() || entry.stored_at >= since) => {
                            break Contended::Ended(Ending::Value(entry));
                        }
                        _ => Seen::entry(entry, key),
                    },
                    unusable => Seen::of(unusable, key),
                };
                if unusable == UNUSABLE_LIMIT {
                    break Contended::StoreDown(StoreError::new(StoreErrorKind::Transient));
                }
                unusable += 1;
                *seen = Some(Box::new(unusable_now));
                continue;
            }
            Ok(Acquired::Ended(ending)) => match Ending::decode(&ending, key) {
                Ending::Value(entry) if !entry.tags.is_empty() => {
                    match unless_invalidated(node, entry, key, tags, within).await {
                        Ok(Stored::Entry(entry)) => break Contended::Ended(Ending::Value(entry)),
                        // What is only shared is not looked up; by now it is nobody's.
                        Ok(_) => {
                            behind = None;
                            continue;
                        }
                        Err(error) => break Contended::StoreDown(error),
                    }
                }
                ending => break Contended::Ended(ending),
            },
            Ok(Acquired::Held { remaining, .. }) if !queue => break Contended::Busy(remaining),
            Ok(Acquired::Held { remaining, holder }) => (remaining, holder),
            Err(error) => {
                node.count(Count::store_errors);
                // A flight that has waited for a live leader rides out a short break of the connection
                // on what is left of its budget, rather than load what is being loaded.
                let rides_out = behind.is_some() && error.kind != StoreErrorKind::Refused;
                if rides_out && !budget.left().is_zero() {
                    let since = Instant::now();
                    // A server that has refused is connected all the same, and would be asked as fast as it answers.
                    sleep(SHORTEST_WAIT.min(budget.left())).await;
                    let back = node.store.reach(key.name(), budget.left()).await.is_ok();
                    budget.spend(since);
                    if back {
                        if error.kind.is_ambiguous() {
                            // What was sent may yet run, at any time. Under the same token it would bring back a
                            // lease that an invalidation has ended, and the older load would be stored.
                            let next = Token::mint(node.store.node());
                            let before = std::mem::replace(&mut watch, node.store.watch(key, &next)).close();
                            outdate(node, key, &before);
                            heed(before, &mut behind, &mut hops, seen);
                            let old = std::mem::replace(&mut token, next);
                            release_later(
                                Arc::clone(node),
                                key.clone(),
                                old,
                                policy.lease,
                                node.doubtful.enter(),
                            );
                        }
                        continue;
                    }
                }
                ghost |= error.kind.is_ambiguous();
                break Contended::StoreDown(error);
            }
        };
        (behind, released) = (Some(holder), None);
        let wakes = Instant::now() + patience(remaining, policy.lease, node.store.hints_arrive());
        loop {
            tokio::select! {
                biased;
                hints = watch.hints() => {
                    ghost |= hints.granted.is_some();
                    outdate(node, key, &hints);
                    released = hints.finished.is_some().then(Instant::now);
                    heed(hints, &mut behind, &mut hops, seen);
                    break;
                }
                () = sleep_until(wakes) => break,
                () = sleep_until(deadline) => match goes_on() {
                    Some(later) => deadline = later,
                    None => break 'contending Contended::WaitedOut,
                },
                () = node.leaving() => break 'contending Contended::Leaving,
            }
        }
    };
    // A grant that came too late to be looked at would leave the lease to nobody; so would one that is on its way to a node
    // that ends. (It stays in the queue: a grant that comes later still is passed on while the node hears of it.)
    let hints = watch.close();
    outdate(node, key, &hints);
    ghost |= hints.granted.is_some() || matches!(contended, Contended::Leaving);
    if ghost {
        release_later(Arc::clone(node), key.clone(), token, policy.lease, doubtful);
    }
    contended
}

/// Loads beside the lease hear of nothing: who comes later must not join one that is older than an invalidation.
pub(super) fn outdate(node: &Node, key: &Key, hints: &Hints) {
    if hints.invalidated {
        node.flights.detach(&FlightKey { key: key.clone(), lane: Lane::Beside });
    }
}

/// What a waiter makes of what it was told.
fn heed(hints: Hints, behind: &mut Option<Token>, hops: &mut u8, seen: &mut Option<Box<Seen>>) {
    *hops = hints.granted.unwrap_or(*hops);
    if hints.finished.is_some() {
        // A wake may name a later holder, whose ending is then the one to ask for.
        *behind = hints.finished;
    }
    if hints.invalidated {
        // It may stand in for nothing any more.
        *seen = None;
    }
}

/// The lease of a key if it is free, for one who does something there beside its loads: what it commits is refused
/// once somebody has invalidated the key.
#[cfg(feature = "http")]
pub(crate) async fn lease_if_free(
    node: &Arc<Node>,
    key: &Key,
    policy: &Policy,
    seen: Option<Seen>,
) -> Option<Lease> {
    let contender = Contender {
        node,
        key,
        policy,
        queue: false,
        seen: &mut seen.map(Box::new),
        budget: &mut policy.budget(),
        tags: &[],
        since: u64::MAX,
        // Who does not queue does not wait.
        deadline: Instant::now(),
        goes_on: &|| None,
    };
    match contend(contender).await {
        Contended::Leased(lease) => Some(lease),
        _ => None,
    }
}

/// An entry that an acquire or a plain GET has found. Its tags' ids were not read with it, so they are now.
pub(crate) async fn current(
    node: &Node,
    raw: Bytes,
    key: &Key,
    tags: &[Key],
    within: Duration,
) -> Result<Stored, StoreError> {
    match Stored::decode(node, raw, key) {
        Stored::Entry(entry) => unless_invalidated(node, entry, key, tags, within).await,
        unreadable => Ok(unreadable),
    }
}

async fn unless_invalidated(
    node: &Node,
    entry: Entry,
    key: &Key,
    tags: &[Key],
    within: Duration,
) -> Result<Stored, StoreError> {
    if entry.kind != Kind::Value || (tags.is_empty() && entry.tags.is_empty()) {
        return Ok(Stored::Entry(entry));
    }
    // Who comes after this look at the ids must not be given what it finds current.
    node.detach(key);
    let ids = match tags {
        [] => Vec::new(),
        tags => node.store.tags().present_ids(tags, within).await?,
    };
    node.unless_invalidated(key, entry, tags, &ids, within).await
}

/// How long to sleep on a lease that has `remaining` left, in case no hint comes.
fn patience(remaining: Duration, lease: Duration, hints_arrive: bool) -> Duration {
    #[cfg(all(test, feature = "testing"))]
    if crate::simulation::mutated(crate::simulation::Mutant::NoTimer) {
        return Duration::from_secs(3600);
    }
    let longest = if hints_arrive { lease } else { lease.min(UNSURE_WAIT) };
    let remaining = remaining.clamp(SHORTEST_WAIT.min(longest), longest);
    // The waiters of a dead leader should not all ask in one millisecond; one of them must ask
    // just after it.
    remaining + Duration::from_micros(fastrand::u64(1_000..10_000))
}

#[cfg(all(test, feature = "testing"))]
#[path = "contend_tests.rs"]
mod tests;
