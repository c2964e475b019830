//! Acquiring the lease of a key: the first contender leads, or finds an entry that another process has stored meanwhile. Step 4.

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

/// How many unusable entries a contender may find before the load goes on without the store.
pub(super) const UNUSABLE_LIMIT: u8 = 3;

/// The outcome of contending for a key's lease.
pub(crate) enum Contended {
    /// This flight leads.
    Leased(Lease),
    /// Another flight's load has ended. The acquire that found this was sent at `asked`.
    Ended { ending: Ending, asked: Question },
    /// Another flight holds the lease for this long yet, and this flight does not queue.
    Busy(Duration),
    /// Other flights held the lease for longer than this flight waits.
    WaitedOut,
    /// The store does not answer, or gives no usable answer.
    StoreDown(StoreError),
    /// The guard is shutting down.
    Leaving,
}

/// The inputs of one flight's attempt to get the lease.
pub(crate) struct Contender<'a> {
    pub(crate) node: &'a Arc<Node>,
    pub(crate) key: &'a Key,
    pub(crate) policy: &'a Policy,
    pub(crate) queue: bool,
    /// The entry that was read and will not be served as it is.
    pub(crate) seen: &'a mut Option<Box<Seen>>,
    pub(crate) budget: &'a mut Budget,
    /// The tags that an entry must have.
    pub(crate) tags: &'a [Key],
    /// The time on the store's clock when the flight began.
    pub(crate) since: u64,
    pub(crate) deadline: Instant,
    /// Called at the deadline. Returns a later deadline if later callers still wait.
    pub(crate) goes_on: &'a (dyn Fn() -> Option<Instant> + Sync),
}

/// A [`Contender`] with the state of its attempt.
pub(super) struct Contention<'a> {
    pub(super) contender: Contender<'a>,
    pub(super) token: Token,
    pub(super) watch: Watch,
    /// When the last acquire was sent.
    pub(super) asked: Question,
    /// The lease holder that this flight waits behind.
    pub(super) behind: Option<Token>,
    /// How many loads of this wave have vanished.
    pub(super) hops: u8,
    /// When a hint said that the awaited load has ended, if that was before the deadline.
    pub(super) released: Option<Instant>,
    /// How many unusable entries it has found.
    pub(super) unusable: u8,
    /// The store may have granted this token the lease, or may yet do so: an acquire got no answer, or a hint told of a grant
    /// that no acquire has confirmed.
    pub(super) ghost: bool,
    /// Counts a lease that may be granted at any time from the first acquire on.
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
        // All waiters of the fleet read the new entry at the same moment, so this may be slow. The server was reachable just now.
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
        // A round trip that ends in `Held` ran while a live leader loaded, so it added no latency.
        if !matches!(acquired, Ok(Acquired::Held { .. })) {
            budget.spend(self.asked.at);
        }
        acquired
    }

    /// The acquire found an entry that this flight has not seen.
    pub(super) async fn found(&mut self, raw: Bytes, within: Duration) -> Result<(), Contended> {
        let Contender { node, key, tags, since, .. } = self.contender;
        let stored = current(node, raw, key, tags, within).await.map_err(Contended::StoreDown)?;
        let seen = match stored {
            Stored::Entry(entry) if entry.kind == Kind::Marker => {
                return Err(self.ended_with(Ending::Uncacheable));
            }
            Stored::Entry(entry) => match entry.serves(node.store.now()) {
                Serves::Fresh => return Err(self.ended_with(Ending::Value(entry))),
                // The load that this flight has waited for, or would have repeated, has failed; its leader stored the older value again.
                Serves::Resting => return Err(self.ended_with(Ending::Stale(entry))),
                // Stored while this flight waited, so it counts whatever its lifetime, unless `expire` has ended that meanwhile.
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

    /// The awaited load has ended, or the outcome of an earlier load is replayed to newcomers.
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
        // The value was invalidated. It is not stored, so asking for it again is useless: contend without it.
        self.behind = None;
        Ok(())
    }

    /// Turns the granted acquire into the held lease.
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

    /// Ends the attempt without a lease. Releases a lease that may have been granted too late for this flight to use it, else
    /// the key would stay leased until the lease expires. `gives_up`: the flight still has a place in the queue, and the release
    /// removes that too. Otherwise each flight that timed out behind one slow load would leave a place there.
    pub(super) fn leave(self, gives_up: bool) {
        let Contender { node, key, policy, .. } = self.contender;
        let hints = self.watch.close();
        outdate(node, key, &hints);
        if self.ghost || hints.granted.is_some() || gives_up {
            release_later(Arc::clone(node), key.clone(), self.token, policy.lease, self.doubtful);
        }
    }
}
