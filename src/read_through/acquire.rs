//! Contending for a lease: who is first leads, the others wait behind the holder. Steps 4 and 5.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, sleep_until};

use super::lease::{Lease, outdate, release_later};
use super::tag_check::{current, unless_invalidated};
use crate::flight::order::Question;
use crate::guard_state::{Node, Seen, Stored};
use crate::key::Key;
use crate::observe::Count;
use crate::policy::Policy;
use crate::policy::budget::Budget;
use crate::store::wake::lease_waiters::Hints;
use crate::store::{Acquire, Acquired, StoreError, StoreErrorKind, Token, Watch};
use crate::tracker::Present;
use crate::value::entry::Kind;
use crate::value::freshness::Serves;
use crate::value::outcome::Ending;

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
    /// Another flight's load has ended, as an acquire has found that was sent at this moment.
    Ended { ending: Ending, asked: Question },
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
    let mut contention = Contention::of(contender);
    match contention.run().await {
        Ok(()) => Contended::Leased(contention.lead()),
        Err(contended) => {
            contention.leave(matches!(contended, Contended::Leaving | Contended::WaitedOut));
            contended
        }
    }
}

/// A contender under way.
struct Contention<'a> {
    contender: Contender<'a>,
    token: Token,
    watch: Watch,
    /// When it last sent an acquire.
    asked: Question,
    /// The holder that it has waited for, and how many loads of this wave have vanished.
    behind: Option<Token>,
    hops: u8,
    /// When it was told that the load it waits behind has ended, if it had not waited for long enough by then.
    released: Option<Instant>,
    /// How many entries it has met that can not be used.
    unusable: u8,
    /// An acquire without an answer may have been granted, or may be granted later. So may one that comes after a grant
    /// that was heard, if it gets no further.
    ghost: bool,
    /// From when it has asked it may be given the lease at any time.
    doubtful: Present,
}

impl<'a> Contention<'a> {
    fn of(contender: Contender<'a>) -> Self {
        let node = contender.node;
        let token = Token::mint_for(node.store.node(), contender.policy.lease);
        Self {
            // Registered before the first acquire: invariant 3 of the store.
            watch: node.store.watch(contender.key, &token),
            doubtful: node.doubtful.enter(),
            contender,
            token,
            asked: Question::now(),
            behind: None,
            hops: 0,
            released: None,
            unusable: 0,
            ghost: false,
        }
    }

    /// Until the lease is granted, or it has come to something else.
    async fn run(&mut self) -> Result<(), Contended> {
        loop {
            let node = self.contender.node;
            if node.is_leaving() {
                return Err(Contended::Leaving);
            }
            let Some(within) = self.within() else {
                node.count(Count::budget_exceeded);
                return Err(Contended::StoreDown(StoreError::new(StoreErrorKind::TimedOut)));
            };
            match self.acquire(within).await {
                Ok(Acquired::Granted) => return Ok(()),
                Ok(Acquired::Found(raw)) => self.found(raw, within).await?,
                Ok(Acquired::Ended(ending)) => self.ended(&ending, within).await?,
                Ok(Acquired::Held { remaining, .. }) if !self.contender.queue => {
                    return Err(Contended::Busy(remaining));
                }
                Ok(Acquired::Held { remaining, holder }) => self.wait(remaining, holder).await?,
                Err(error) => self.ride_out(error).await?,
            }
        }
    }

    /// How long the next acquire may take, if there is time for one.
    fn within(&mut self) -> Option<Duration> {
        let within = self.contender.budget.next()?;
        let Some(released) = self.released else { return Some(within) };
        // All who wait in the fleet read what was stored at one moment, and the server was there just now.
        Some(within.max(self.contender.policy.lease.saturating_sub(released.elapsed())))
    }

    async fn acquire(&mut self, within: Duration) -> Result<Acquired, StoreError> {
        self.asked = Question::now();
        let Contender { node, key, policy, queue, seen, budget, .. } = &mut self.contender;
        let ask = Acquire {
            token: &self.token,
            lease: policy.lease,
            seen: seen.as_ref().map(|seen| &seen.raw),
            behind: self.behind.as_ref(),
            queue: *queue,
        };
        let acquired = node.store.acquire(key, ask, within).await;
        // A round trip that ends in waiting ran beside a live leader's own work: it added nothing.
        if !matches!(acquired, Ok(Acquired::Held { .. })) {
            budget.spend(self.asked.at);
        }
        acquired
    }

    /// There is an entry that it has not seen.
    async fn found(&mut self, raw: Bytes, within: Duration) -> Result<(), Contended> {
        let Contender { node, key, tags, since, .. } = self.contender;
        let stored = current(node, raw, key, tags, within).await.map_err(Contended::StoreDown)?;
        let seen = match stored {
            Stored::Entry(entry) if entry.kind == Kind::Marker => {
                return Err(self.ended_with(Ending::Uncacheable));
            }
            Stored::Entry(entry) => match entry.serves(node.store.now()) {
                Serves::Fresh => return Err(self.ended_with(Ending::Value(entry))),
                // The load that this flight has waited for, or would have repeated, has failed.
                Serves::Resting => return Err(self.ended_with(Ending::Stale(entry))),
                // Stored while this flight waited: made for it, whatever its lifetime. (Not what was expired meanwhile.)
                _ if !entry.times.is_expired() && (self.behind.is_some() || entry.stored_at >= since) => {
                    return Err(self.ended_with(Ending::Value(entry)));
                }
                _ => Seen::entry(entry, key),
            },
            unusable => Seen::of(unusable, key),
        };
        if self.unusable == UNUSABLE_LIMIT {
            return Err(Contended::StoreDown(StoreError::new(StoreErrorKind::Transient)));
        }
        self.unusable += 1;
        *self.contender.seen = Some(Box::new(seen));
        Ok(())
    }

    fn ended_with(&self, ending: Ending) -> Contended {
        Contended::Ended { ending, asked: self.asked }
    }

    /// The load that it has waited for has ended, or one whose outcome is replayed to newcomers.
    async fn ended(&mut self, ending: &Bytes, within: Duration) -> Result<(), Contended> {
        let Contender { node, key, tags, .. } = self.contender;
        let entry = match Ending::decode(ending, key) {
            Ending::Value(entry) => entry,
            ending => return Err(self.ended_with(ending)),
        };
        let checked = unless_invalidated(node, entry, key, tags, within).await;
        if let Stored::Entry(entry) = checked.map_err(Contended::StoreDown)? {
            return Err(self.ended_with(Ending::Value(entry)));
        }
        // What is only shared is not looked up; by now it is nobody's.
        self.behind = None;
        Ok(())
    }

    /// Sleeps until this holder's load has ended, as far as can be told, or its lease has.
    async fn wait(&mut self, remaining: Duration, holder: Token) -> Result<(), Contended> {
        let Contender { node, policy, .. } = self.contender;
        (self.behind, self.released) = (Some(holder), None);
        let wakes = Instant::now() + patience(remaining, policy.lease, node.store.hints_arrive());
        loop {
            tokio::select! {
                biased;
                hints = self.watch.hints() => {
                    self.ghost |= hints.granted.is_some();
                    let now = Instant::now();
                    let in_time = hints.finished.is_some() && now < self.contender.deadline;
                    self.released = in_time.then_some(now);
                    self.heed(hints);
                    return Ok(());
                }
                () = sleep_until(wakes) => return Ok(()),
                () = sleep_until(self.contender.deadline) => match (self.contender.goes_on)() {
                    Some(later) => self.contender.deadline = later,
                    None => return Err(Contended::WaitedOut),
                },
                () = node.leaving() => return Err(Contended::Leaving),
            }
        }
    }

    /// A flight that has waited for a live leader rides out a short break of the connection on what is left of its budget,
    /// rather than load what is being loaded.
    async fn ride_out(&mut self, error: StoreError) -> Result<(), Contended> {
        let Contender { node, key, budget, .. } = &mut self.contender;
        node.count(Count::store_errors);
        // It was given what was left, which is less than a command has.
        if error.kind == StoreErrorKind::TimedOut && budget.left().is_zero() {
            node.count(Count::budget_exceeded);
        }
        let rides_out = self.behind.is_some() && error.kind != StoreErrorKind::Refused;
        let mut is_back = false;
        if rides_out && !budget.left().is_zero() {
            let since = Instant::now();
            // A server that has refused is connected all the same, and would be asked as fast as it answers.
            sleep(SHORTEST_WAIT.min(budget.left())).await;
            is_back = node.store.reach(key.name(), budget.left()).await.is_ok();
            budget.spend(since);
        }
        if !is_back {
            self.ghost |= error.kind.is_ambiguous();
            return Err(Contended::StoreDown(error));
        }
        if error.kind.is_ambiguous() {
            self.ask_anew();
        }
        Ok(())
    }

    /// What was sent may yet run, at any time. Under the same token it would bring back a lease that an invalidation has
    /// ended, and the older load would be stored.
    fn ask_anew(&mut self) {
        let Contender { node, key, policy, .. } = self.contender;
        let token = Token::mint_for(node.store.node(), policy.lease);
        let before = std::mem::replace(&mut self.watch, node.store.watch(key, &token)).close();
        self.heed(before);
        let old = std::mem::replace(&mut self.token, token);
        release_later(Arc::clone(node), key.clone(), old, policy.lease, node.doubtful.enter());
    }

    /// What a waiter makes of what it was told.
    fn heed(&mut self, hints: Hints) {
        outdate(self.contender.node, self.contender.key, &hints);
        self.hops = hints.granted.unwrap_or(self.hops);
        // A wake may name a later holder, whose ending is then the one to ask for.
        self.behind = hints.finished.or_else(|| self.behind.take());
        if hints.invalidated {
            // It may stand in for nothing any more.
            *self.contender.seen = None;
        }
    }

    /// The lease that was granted.
    fn lead(self) -> Lease {
        let Self { contender: Contender { node, key, policy, .. }, token, watch, asked, hops, .. } = self;
        Lease {
            _held: node.leases.enter(),
            node: Arc::clone(node),
            key: key.clone(),
            token,
            watch,
            ttl: policy.lease,
            hops,
            waited_until: self.behind.is_some().then(Instant::now),
            confirmed: Mutex::new(asked),
        }
    }

    /// Ends it without a lease. A grant that came too late to be looked at would leave the lease to nobody; so would one that
    /// is on its way to a node that ends. `gives_up`: it ends while it has a place in the queue, which the release gives up as
    /// well: without that, each flight that waited for long enough behind one slow load would leave a place there.
    fn leave(self, gives_up: bool) {
        let Contender { node, key, policy, .. } = self.contender;
        let hints = self.watch.close();
        outdate(node, key, &hints);
        if self.ghost || hints.granted.is_some() || gives_up {
            release_later(Arc::clone(node), key.clone(), self.token, policy.lease, self.doubtful);
        }
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

/// How long to sleep on a lease that has `remaining` left, in case no hint comes.
fn patience(remaining: Duration, lease: Duration, hints_arrive: bool) -> Duration {
    let longest = if hints_arrive { lease } else { lease.min(UNSURE_WAIT) };
    let remaining = remaining.clamp(SHORTEST_WAIT.min(longest), longest);
    // The waiters of a dead leader should not all ask in one millisecond; one of them must ask
    // just after it.
    remaining + Duration::from_micros(fastrand::u64(1_000..10_000))
}

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/acquire_tests.rs"]
mod tests;
