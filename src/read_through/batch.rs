//! Many keys that one caller loads by one call of its loader. Knows no Redis and no HTTP.
//!
//! Each missing key has its own flight, lease and commit, as if it were requested alone. Only the loaders of these keys act together:
//! each joins a round, and one call loads all keys of the round. Invariants:
//!
//! 1. A round is called when no member attempts to get its lease. A member attempts from its creation, or from [`Attempt::again`], until
//!    it leads, rests or is dropped.
//! 2. An attempt lasts for round trips that have time limits, and for the turns before them, which wait for such round trips. It never
//!    lasts while another load is awaited: a flight rests before it waits for another holder's lease, and a caller rests while it waits
//!    for another caller's flight. Nor does it last while a permit is awaited: the flight is queued then, and all that wait for the same
//!    permit attempt again when it is granted. So batches do not wait for each other in a circle.
//! 3. Each member leads at most once. A member that leads after the first round is called in a later one.
//! 4. A call has one permit, and one slot for loads without the store: the members of a round share it. A later round has its own
//!    share, and so has a flight that runs another caller's loader, which is another call. The share is freed with the last flight
//!    that uses it: a batch that waits for other holders has none.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tokio::time::sleep;
use tracing::{Instrument as _, Span};

use crate::error::Failure;
use crate::guard_state::turns::GrantedPermit;
use crate::loader::{BatchId, LoadScope, Loader};
use crate::sync::lock;
use crate::task::Tracked;

/// How long a later round collects members. The leases of a process that died expire together, and the flights that waited for them
/// acquire within their jitter.
pub(crate) const LATER: Duration = Duration::from_millis(15);

/// Loads the members of one round, which are identified by their indices.
type Call = Box<dyn Fn(Vec<usize>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// One caller's keys that are loaded together.
pub(crate) struct LoadBatch {
    id: BatchId,
    members: Mutex<Members>,
    call: Call,
    /// The runtime that the rounds run in: the change that makes a round due may come from another runtime, or from none.
    runtime: Handle,
    span: Span,
}

struct Members {
    slots: Vec<Slot>,
    attempting: usize,
    /// Members that lead and are not called yet, each with the chain of loads that it runs inside.
    leading: Vec<(usize, Option<Arc<LoadScope>>)>,
    /// Whether a round is about to be called.
    is_calling: bool,
    rounds: usize,
    /// The share that the flights of the next round have, while one of them holds it.
    share: Weak<BatchShare>,
    /// Whether the permit of the next round's share was granted or refused.
    is_admitted: bool,
}

/// The state of one member, with the number of its latest attempt: the end of an older attempt does not change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Attempting(u64),
    /// The member waits for the permit of the next round's share.
    Queued(u64),
    Resting(u64),
    /// The member leads, or was dropped.
    Done,
}

/// The permit and the slot that the flights of one round share: invariant 4.
#[derive(Debug, Default)]
pub(crate) struct BatchShare {
    pub(super) permit: OnceCell<Result<Option<GrantedPermit>, Failure>>,
    pub(super) slot: OnceLock<Option<Tracked>>,
}

impl LoadBatch {
    /// Makes a batch and returns its members. Each member attempts until its [`Attempt`] rests, or until the member leads or is dropped.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime.
    pub(crate) fn of<F, Fut>(size: usize, call: F) -> Vec<BatchMember>
    where
        F: Fn(Vec<usize>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let members = Members {
            slots: vec![Slot::Attempting(0); size],
            attempting: size,
            leading: Vec::new(),
            is_calling: false,
            rounds: 0,
            share: Weak::new(),
            is_admitted: false,
        };
        let batch = Arc::new(Self {
            id: BatchId::new(),
            members: Mutex::new(members),
            call: Box::new(move |round| Box::pin(call(round))),
            runtime: Handle::current(),
            span: Span::current(),
        });
        (0..size).map(|index| BatchMember { batch: Arc::clone(&batch), index }).collect()
    }

    /// The share of the flights with members in the next round.
    fn share(&self) -> Arc<BatchShare> {
        let mut members = lock(&self.members);
        members.share.upgrade().unwrap_or_else(|| {
            let share = Arc::default();
            (members.share, members.is_admitted) = (Arc::downgrade(&share), false);
            share
        })
    }

    /// Called when the permit of the share was granted or refused: all members that are queued for it attempt again.
    fn admitted(&self) {
        let mut members = lock(&self.members);
        members.is_admitted = true;
        let Members { slots, attempting, .. } = &mut *members;
        for slot in slots {
            if let Slot::Queued(number) = *slot {
                *slot = Slot::Attempting(number);
                *attempting += 1;
            }
        }
    }

    /// Changes a member's state, and calls a round if this was the last change that it waited for.
    fn change(self: &Arc<Self>, index: usize, change: impl FnOnce(&mut Members, Slot) -> Slot) {
        let mut members = lock(&self.members);
        let before = members.slots[index];
        let after = change(&mut members, before);
        let is_attempt = |slot| usize::from(matches!(slot, Slot::Attempting(_)));
        members.attempting = members.attempting + is_attempt(after) - is_attempt(before);
        members.slots[index] = after;
        let calls = members.is_due() && !members.is_calling;
        members.is_calling |= calls;
        let is_first = members.rounds == 0;
        drop(members);
        if calls {
            let round = Arc::clone(self).round(is_first).instrument(self.span.clone());
            self.runtime.spawn(round);
        }
    }

    async fn round(self: Arc<Self>, is_first: bool) {
        if !is_first {
            sleep(LATER).await;
        }
        let round = {
            let mut members = lock(&self.members);
            members.is_calling = false;
            // A member has begun another attempt meanwhile: the end of that attempt calls the round.
            if !members.is_due() {
                return;
            }
            members.rounds += 1;
            // The next round has a new share. But if flights are queued, they wait for the permit of the present share, so it stays.
            if !members.slots.iter().any(|slot| matches!(slot, Slot::Queued(_))) {
                (members.share, members.is_admitted) = (Weak::new(), false);
            }
            std::mem::take(&mut members.leading)
        };
        let (round, scopes): (Vec<_>, Vec<_>) = round.into_iter().unzip();
        let call = (self.call)(round);
        // The call has its own references. Dropped here, so that only the members keep the batch alive during the call.
        drop(self);
        match LoadScope::joined(scopes.into_iter().flatten()) {
            Some(scope) => scope.run(call).await,
            None => call.await,
        }
    }
}

impl Members {
    fn is_due(&self) -> bool {
        self.attempting == 0 && !self.leading.is_empty()
    }
}

/// One key's membership in a batch, held by the key's loader, which leads or is dropped.
pub(crate) struct BatchMember {
    batch: Arc<LoadBatch>,
    index: usize,
}

impl BatchMember {
    /// The first attempt of this member, for the caller that looks for its value.
    pub(crate) fn attempt(&self) -> Attempt {
        Attempt::new(&self.batch, self.index)
    }

    /// The id of this member's batch.
    pub(crate) fn batch(&self) -> BatchId {
        self.batch.id
    }

    /// Called when the member's loader runs: the next round loads the member's key. `scope` is the chain of loads that the loader runs
    /// inside.
    pub(crate) fn lead(self, scope: Option<Arc<LoadScope>>) {
        let index = self.index;
        self.batch.change(index, |members, _| {
            members.leading.push((index, scope));
            Slot::Done
        });
    }
}

impl Drop for BatchMember {
    fn drop(&mut self) {
        self.batch.change(self.index, |_, _| Slot::Done);
    }
}

/// One member's attempt to get the lease of its key, or to join a flight.
pub(crate) struct Attempt {
    batch: Arc<LoadBatch>,
    index: usize,
    number: u64,
}

impl Attempt {
    fn new(batch: &Arc<LoadBatch>, index: usize) -> Self {
        let mut attempt = Self { batch: Arc::clone(batch), index, number: 0 };
        attempt.again();
        attempt
    }

    /// The attempt of the flight that this member's caller has begun; the caller's own attempt no longer counts.
    pub(super) fn of_flight(&self) -> Self {
        Self::new(&self.batch, self.index)
    }

    /// Begins the member's next attempt; no effect if the member leads or was dropped.
    pub(super) fn again(&mut self) {
        let number = &mut self.number;
        self.batch.change(self.index, |_, slot| match slot {
            Slot::Attempting(latest) | Slot::Queued(latest) | Slot::Resting(latest) => {
                *number = latest + 1;
                Slot::Attempting(*number)
            }
            Slot::Done => Slot::Done,
        });
    }

    /// Ends this attempt: the member waits for another load.
    pub(super) fn rest(&self) {
        self.batch.change(self.index, |_, slot| match slot {
            Slot::Attempting(latest) | Slot::Queued(latest) if latest == self.number => Slot::Resting(latest),
            other => other,
        });
    }

    /// Called when the flight waits for the permit of its share; no effect if that permit was already granted or refused.
    pub(super) fn queue(&self) {
        self.batch.change(self.index, |members, slot| match slot {
            Slot::Attempting(latest) if latest == self.number && !members.is_admitted => Slot::Queued(latest),
            other => other,
        });
    }

    /// Called when the permit of the share was granted or refused.
    pub(super) fn admitted(&self) {
        self.batch.admitted();
    }

    /// Whether the loader belongs to this batch.
    pub(super) fn calls(&self, loader: &Loader) -> bool {
        loader.batch == Some(self.batch.id)
    }

    pub(super) fn share(&self) -> Arc<BatchShare> {
        self.batch.share()
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.rest();
    }
}

#[cfg(test)]
#[path = "../../tests/unit/read_through/batch_tests.rs"]
mod tests;
