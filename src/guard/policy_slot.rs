//! The newest policy of a handle and its clones, and what each thread remembers of it.
//!
//! Handles that are older than the newest policy stay in use, in layers and in the program's state. So that their hits neither lock nor
//! write to memory that processors share, each thread remembers the policies that it has found.

use std::cell::Cell;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::{Error, ErrorKind};
use crate::guard_state::GuardState;
use crate::policy::Policy;
use crate::sync::lock;

/// What the clones of one handle share: the guard state, and their newest policy.
#[derive(Debug)]
pub(super) struct PolicySlot {
    state: Arc<GuardState>,
    /// Unlike an address, never that of another slot.
    id: u64,
    /// How often the policy was replaced.
    version: AtomicU64,
    newest: Mutex<Arc<Policy>>,
}

/// A policy that a thread has found in a slot.
pub(super) struct Found {
    slot: u64,
    /// The version before the policy was read: a policy that is newer than that is only looked for once more.
    version: u64,
    pub(super) policy: Arc<Policy>,
}

/// Of this many slots a thread remembers the policies. Slots that share a place displace each other.
const PLACES: usize = 8;

thread_local! {
    static REMEMBERED: [Cell<Option<Found>>; PLACES] = const { [const { Cell::new(None) }; PLACES] };
}

impl PolicySlot {
    pub(super) fn new(state: Arc<GuardState>, policy: Arc<Policy>) -> Self {
        static SLOTS: AtomicU64 = AtomicU64::new(0);
        let id = SLOTS.fetch_add(1, Ordering::Relaxed);
        Self { state, id, version: AtomicU64::new(0), newest: Mutex::new(policy) }
    }

    /// The newest version.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The policy of this version, or a newer one.
    #[inline]
    pub(super) fn find(&self, version: u64) -> Found {
        // Taken out of its place, so that no count of owners changes.
        let found = place_of(self.id, Cell::take).flatten();
        match found {
            Some(found) if (found.slot, found.version) == (self.id, version) => found,
            _ => self.read(version),
        }
    }

    /// Replaces the policy, if it allows that.
    pub(super) fn replace(&self, mut policy: Policy) -> Result<(), Error> {
        let mut newest = lock(&self.newest);
        if let Some(text) = policy.refusal_after(&newest) {
            return Err(Error::new(ErrorKind::InvalidPolicy, text));
        }
        if policy != **newest {
            // Its name is known, so no recorder is told of new counters under this lock.
            self.state.takes(&mut policy);
            *newest = Arc::new(policy);
            self.version.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    #[cold]
    fn read(&self, version: u64) -> Found {
        Found { slot: self.id, version, policy: Arc::clone(&lock(&self.newest)) }
    }
}

impl Found {
    #[inline]
    pub(super) fn remember(self) {
        place_of(self.slot, |place| place.set(Some(self)));
    }
}

/// Where this thread remembers the policy of a slot; `None` while the thread ends.
#[inline]
fn place_of<R>(slot: u64, change: impl FnOnce(&Cell<Option<Found>>) -> R) -> Option<R> {
    let remembered = |places: &[_; PLACES]| change(&places[slot as usize % PLACES]);
    REMEMBERED.try_with(remembered).ok()
}

impl Deref for PolicySlot {
    type Target = Arc<GuardState>;

    #[inline]
    fn deref(&self) -> &Arc<GuardState> {
        &self.state
    }
}
