//! Numbers the attempts at changes, in the order in which a process sends them, so that a late attempt cannot undo a newer
//! change.
//!
//! A process sends a change again if an attempt has no answer. That attempt may still run later: after another attempt at the
//! same change was confirmed, and after newer changes were acknowledged. So attempts are numbered, and an attempt *voids* the
//! earlier ones of its node at the same name: it leaves its number in the store, and an attempt with a lower number changes
//! nothing.
//!
//! Invariant: *if an attempt A has ended without an answer, and an attempt B at the same name was sent after that and is
//! confirmed, then A changes nothing from then on.* Proof: A has the lower number, because a number is taken before the
//! attempt is sent. A was noted as unanswered when it ended, so B was sent as one that voids earlier attempts; B ran, and left
//! its number in the same step. If A comes after that, it finds the number for [`VOIDED_FOR`]. On a server each attempt also
//! has a latest moment at which it may run, and that moment is before the number expires.
//!
//! A voided attempt gets the same answer as one that came too late, so a change that is still needed is sent again under a
//! higher number. Therefore it does not matter which change the later attempt was for.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::lock;

/// For how long an attempt voids earlier ones, and for how long after an attempt without an answer the next ones do so. Longer than an
/// attempt can be late: it has the deadline of one command and [`LATEST`](super::LATEST).
pub(crate) const VOIDED_FOR: Duration = Duration::from_secs(60);

/// The number of an attempt among those of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttemptNumber {
    pub(crate) number: u64,
    /// It voids the attempts with lower numbers. False if each of them had an answer: then there is nothing to void, and nothing is
    /// written for it.
    pub(crate) voids_earlier: bool,
}

/// The attempts of one node.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    latest: AtomicU64,
    /// Attempts that are sent before this moment must void earlier ones.
    void_until: Mutex<Option<Instant>>,
}

impl Attempts {
    /// The next attempt, to be called before it is sent.
    pub(crate) fn next(&self) -> AttemptNumber {
        // The number is taken first: what is noted as unanswered by now has a lower one.
        let number = self.latest.fetch_add(1, Ordering::SeqCst) + 1;
        let voids_earlier = lock(&self.void_until).is_some_and(|until| Instant::now() < until);
        AttemptNumber { number, voids_earlier }
    }

    /// Begins to track an attempt that is sent now.
    pub(crate) fn sent(&self) -> SentAttempt<'_> {
        SentAttempt { of: self, is_answered: false }
    }
}

/// An attempt that is on its way. If it is dropped before it is answered, it may run later.
#[derive(Debug)]
pub(crate) struct SentAttempt<'a> {
    of: &'a Attempts,
    is_answered: bool,
}

impl SentAttempt<'_> {
    pub(crate) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for SentAttempt<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            *lock(&self.of.void_until) = Some(Instant::now() + VOIDED_FOR);
        }
    }
}
