//! [`SideCommit`]: stores a response under another key than that of its flight. Requests with credentials have a separate flight,
//! because only the head shows whether their response may be shared.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::Span;
use uuid::Uuid;

use crate::guard_state::GuardState;
use crate::key::Key;
use crate::loader::LoadResult;
use crate::observe::GuardCount;
use crate::policy::Policy;
use crate::read_through::lease::{AcquireOutcome, AcquireRequest, contend};
use crate::read_through::lease::{Lease, LeaseEvent};
use crate::store::TokenCheck;
use crate::value::StoredEntry;
use crate::value::entry::{Encoding, Entry, Lifetimes, Packed, TagId, TagList, Unstored};

/// Whether a response may be stored under another key than that of its flight.
#[derive(Default)]
pub(crate) enum SideCommit {
    /// No: the flight stores it under its own key.
    #[default]
    No,
    /// No: the lease of that key is not free, or the store did not answer.
    Refused,
    /// Yes, under that key's lease.
    Granted(Box<SideLease>),
}

pub(crate) struct SideLease {
    lease: RenewedLease,
    key: Key,
    policy: Arc<Policy>,
    state: Arc<GuardState>,
    tagged: Vec<TagId>,
    /// The load's id in the journal of tags, if it has entered it.
    journal_entry: Option<Uuid>,
}

impl SideCommit {
    /// Takes the lease of `key`, if it is free. A caller that takes it before its load begins does not store a response that an
    /// invalidation has overtaken.
    ///
    /// `rejected` is the stored entry that the response replaces. A response that gets tags is stored only if the load `may_tag`: it begins
    /// after this.
    pub(crate) async fn begin(
        state: &Arc<GuardState>,
        policy: &Arc<Policy>,
        key: &Key,
        (rejected, may_tag): (Option<Arc<StoredEntry>>, bool),
    ) -> Self {
        let Some(lease) = lease_if_free(state, key, policy, rejected).await else { return Self::Refused };
        let (tagged, journal_entry) = state.tags_at_start(policy, key, may_tag).await;
        let Ok(tagged) = tagged else {
            lease.hand_over(0).await;
            return Self::Refused;
        };
        let lease = RenewedLease::new(lease, Instant::now() + policy.load_timeout);
        let (key, policy, state) = (key.clone(), Arc::clone(policy), Arc::clone(state));
        Self::Granted(Box::new(SideLease { lease, key, policy, state, tagged, journal_entry }))
    }

    /// Gives the response these tags with these ids, which the entry has that it replaces.
    pub(crate) fn keep_tags(&mut self, tags: Vec<TagId>) {
        if let Self::Granted(granted) = self {
            granted.tagged.extend(tags);
        }
    }

    /// Stores the response if that is allowed. The result shares the response with the waiters of its own flight only if the
    /// lease proves that no invalidation intervened: a waiter may have come after an invalidation that this flight
    /// does not see. A failure is always shared. With [`No`](Self::No) the result is unchanged.
    pub(crate) async fn store(&mut self, result: LoadResult, is_failure: bool) -> LoadResult {
        match (std::mem::take(self), result) {
            (Self::No, result) => result,
            (
                Self::Granted(granted),
                LoadResult::Value { encoding, payload, packed, lifetimes, tags, .. },
            ) => {
                let stored = granted.store(encoding, (payload.clone(), packed), lifetimes, &tags).await;
                unstored(encoding, payload, tags, stored || is_failure)
            }
            (Self::Refused, LoadResult::Value { encoding, payload, tags, .. }) => {
                unstored(encoding, payload, tags, is_failure)
            }
            (mut side_commit, result) => {
                side_commit.leave().await;
                result
            }
        }
    }

    /// Stores nothing, and releases the lease, if there is one, for another load.
    pub(crate) async fn leave(&mut self) {
        if let Self::Granted(granted) = std::mem::take(self)
            && let Some(lease) = granted.lease.take().await
        {
            lease.hand_over(0).await;
        }
    }
}

impl SideLease {
    /// Stores the response, and returns whether that succeeded.
    async fn store(
        self,
        encoding: Encoding,
        (payload, packed): (Bytes, Packed),
        lifetimes: Lifetimes,
        late: &[Key],
    ) -> bool {
        let Self { lease, key, policy, state, mut tagged, journal_entry } = self;
        let Some(lease) = lease.take().await else { return false };
        let now = state.store.now();
        let (times, keep) = policy.jittered(lifetimes).from(now, Duration::ZERO);
        if journal_entry.is_some() && late.is_empty() {
            policy.counters.added_no_tags();
        }
        let is_current = late.is_empty() || {
            let ids = state.late_ids(&policy, journal_entry, late, lifetimes).await;
            ids.ok().flatten().map(|ids| tagged.extend(ids)).is_some()
        };
        if keep.is_zero() || !is_current {
            lease.hand_over(0).await;
            return false;
        }
        let entry = Entry::value(encoding, (payload, packed), (now, times), TagList::new(&tagged));
        let prolong = async {
            // If this fails, a tag's id ends before the entry does, and the entry is a miss from then on.
            if let Some(life) = policy.longer_tag_life(lifetimes) {
                let tags = tagged.into_iter().map(|tagged| tagged.tag).collect();
                if state.tagged(tags, life, policy.command_timeout).await.is_err() {
                    state.count(GuardCount::store_errors);
                }
            }
        };
        tokio::join!(prolong, lease.commit(entry.encode(&key), keep)).1 == Some(TokenCheck::Held)
    }
}

/// A lease that a task renews until `end`. If this is dropped, the task stops and the lease expires.
struct RenewedLease {
    stop: oneshot::Sender<()>,
    renewal: JoinHandle<Option<Lease>>,
}

impl RenewedLease {
    fn new(lease: Lease, end: Instant) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let renewal = tokio::spawn(async move {
            let mut in_doubt = false;
            loop {
                tokio::select! {
                    biased;
                    _ = &mut stopped => return Some(lease),
                    event = lease.keep(end, in_doubt) => match event {
                        LeaseEvent::Invalidated => in_doubt = true,
                        LeaseEvent::Lost => return None,
                        LeaseEvent::Leaving => {
                            // The caller of `take` must answer its client, and cannot wait for a store that hangs.
                            tokio::spawn(lease.hand_over(0));
                            return None;
                        }
                    },
                }
            }
        });
        Self { stop, renewal }
    }

    /// Stops the renewal and returns the lease, unless it was lost.
    async fn take(self) -> Option<Lease> {
        let Self { stop, renewal } = self;
        drop(stop);
        renewal.await.ok().flatten()
    }
}

/// A result that is not stored under the flight's key: if it is `shared`, its waiters receive it, otherwise only the client that loaded it.
fn unstored(encoding: Encoding, payload: Bytes, tags: Vec<Key>, shared: bool) -> LoadResult {
    if !shared {
        return LoadResult::says_nothing();
    }
    let (packed, lifetimes, validator) = (Packed::default(), Lifetimes::default(), Bytes::new());
    // `SaysNothing` has no effect here: no entry is stored under the key of this flight.
    let (status_only, unstored) = (None, Unstored::SaysNothing);
    LoadResult::Value { encoding, payload, packed, lifetimes, validator, tags, status_only, unstored }
}

/// Acquires the lease of a key if it is free, for a caller that stores an entry without a flight. A commit under this lease
/// is refused once the key was invalidated.
async fn lease_if_free(
    state: &Arc<GuardState>,
    key: &Key,
    policy: &Policy,
    mut rejected: Option<Arc<StoredEntry>>,
) -> Option<Lease> {
    let request = AcquireRequest {
        state,
        key,
        policy,
        queue: false,
        rejected: &mut rejected,
        budget: &mut policy.budget(),
        tags: &[],
        span: &Span::none(),
        waits_for: &mut None,
        batch: None,
        since: u64::MAX,
        // Without `queue` the attempt waits only for its turn.
        deadline: Instant::now() + policy.coordination_budget,
        goes_on: &|| None,
    };
    match contend(request).await {
        AcquireOutcome::Leased(lease) => Some(lease),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::task::yield_now;

    use super::*;
    use crate::guard::StampedeGuard;
    use crate::key::CacheKey;

    #[tokio::test(start_paused = true)]
    async fn lease_if_free_returns_the_lease_or_nothing() {
        let guard = StampedeGuard::in_memory();
        let (key, (state, policy)) = (guard.key(CacheKey::from("k")).expect("a key"), guard.parts());
        let lease = lease_if_free(state, &key, policy, None).await.expect("free");
        assert!(lease_if_free(state, &key, policy, None).await.is_none(), "it is the other's");
        lease.hand_over(0).await;
        lease_if_free(state, &key, policy, None).await.expect("free again").hand_over(0).await;
    }

    #[tokio::test(start_paused = true)]
    async fn lease_if_free_waits_for_its_turn() {
        let guard = StampedeGuard::in_memory();
        let (key, (state, policy)) = (guard.key(CacheKey::from("k")).expect("a key"), guard.parts());
        let turn = || state.turns.flight(&state.store, &key, false);
        let mut held_turns = Vec::new();
        while let Some(Some(turn)) = turn().now_or_never() {
            held_turns.push(turn);
        }
        let release_turns = async {
            yield_now().await;
            held_turns.clear();
        };
        let (lease, ()) = tokio::join!(lease_if_free(state, &key, policy, None), release_turns);
        lease.expect("free").hand_over(0).await;
    }
}
