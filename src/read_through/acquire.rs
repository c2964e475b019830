//! Acquiring the lease of a key: the first contender leads, or finds what another has stored meanwhile. Step 4.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::lease::{Lease, outdate, release_later};
use super::tag_check::{current, unless_invalidated};
use crate::flight::order::Question;
use crate::guard_state::{Node, Seen, Stored};
use crate::key::Key;
use crate::policy::Policy;
use crate::policy::budget::Budget;
use crate::store::{Acquire, Acquired, StoreError, StoreErrorKind, Token, Watch};
use crate::tracker::Present;
use crate::value::entry::Kind;
use crate::value::freshness::Serves;
use crate::value::outcome::Ending;

/// How often an entry that can not be used may be met before the load goes on without the store.
pub(super) const UNUSABLE_LIMIT: u8 = 3;

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

/// A contender under way.
pub(super) struct Contention<'a> {
    pub(super) contender: Contender<'a>,
    pub(super) token: Token,
    pub(super) watch: Watch,
    /// When it last sent an acquire.
    pub(super) asked: Question,
    /// The holder that it has waited for, and how many loads of this wave have vanished.
    pub(super) behind: Option<Token>,
    pub(super) hops: u8,
    /// When it was told that the load it waits behind has ended, if it had not waited for long enough by then.
    pub(super) released: Option<Instant>,
    /// How many entries it has met that can not be used.
    pub(super) unusable: u8,
    /// An acquire without an answer may have been granted, or may be granted later. So may one that comes after a grant
    /// that was heard, if it gets no further.
    pub(super) ghost: bool,
    /// From when it has asked it may be given the lease at any time.
    pub(super) doubtful: Present,
}

impl<'a> Contention<'a> {
    pub(super) fn of(contender: Contender<'a>) -> Self {
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

    /// How long the next acquire may take, if there is time for one.
    pub(super) fn within(&mut self) -> Option<Duration> {
        let within = self.contender.budget.next()?;
        let Some(released) = self.released else { return Some(within) };
        // All who wait in the fleet read what was stored at one moment, and the server was there just now.
        Some(within.max(self.contender.policy.lease.saturating_sub(released.elapsed())))
    }

    pub(super) async fn acquire(&mut self, within: Duration) -> Result<Acquired, StoreError> {
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
    pub(super) async fn found(&mut self, raw: Bytes, within: Duration) -> Result<(), Contended> {
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
    pub(super) async fn ended(&mut self, ending: &Bytes, within: Duration) -> Result<(), Contended> {
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

    /// The lease that was granted.
    pub(super) fn lead(self) -> Lease {
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
    pub(super) fn leave(self, gives_up: bool) {
        let Contender { node, key, policy, .. } = self.contender;
        let hints = self.watch.close();
        outdate(node, key, &hints);
        if self.ghost || hints.granted.is_some() || gives_up {
            release_later(Arc::clone(node), key.clone(), self.token, policy.lease, self.doubtful);
        }
    }
}
