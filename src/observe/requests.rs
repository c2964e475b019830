//! The requests of one policy, or of one of its routes, by outcome.

#[cfg(feature = "metrics")]
use std::sync::atomic::AtomicU64;

use super::counter::Counter;
#[cfg(feature = "metrics")]
use super::counter::untold;
use super::outcome::Outcome;
use super::spread::SpreadCounter;

/// How requests were answered.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    hits: Counter,
    stale: Counter,
    led: Counter,
    coalesced: Counter,
    bypassed: Counter,
    failed: Counter,
    local_hits: SpreadCounter,
    #[cfg(feature = "metrics")]
    local_hits_told: AtomicU64,
}

impl Requests {
    /// Counts a hit from memory.
    #[inline]
    pub(crate) fn local_hit(&self) {
        self.local_hits.add();
    }

    pub(crate) fn add(&self, outcome: Outcome) {
        let counter = match outcome {
            Outcome::LocalHit => return self.local_hit(),
            Outcome::Hit => &self.hits,
            Outcome::Stale => &self.stale,
            Outcome::Led => &self.led,
            Outcome::Coalesced => &self.coalesced,
            Outcome::Bypassed => &self.bypassed,
            Outcome::Failed => &self.failed,
        };
        counter.add();
    }

    pub(super) fn local_hits(&self) -> u64 {
        self.local_hits.sum()
    }

    /// The requests of each outcome but local hits.
    pub(crate) fn answered(&self) -> [(Outcome, &Counter); 6] {
        [
            (Outcome::Hit, &self.hits),
            (Outcome::Stale, &self.stale),
            (Outcome::Led, &self.led),
            (Outcome::Coalesced, &self.coalesced),
            (Outcome::Bypassed, &self.bypassed),
            (Outcome::Failed, &self.failed),
        ]
    }

    /// As [`Counter::untold`], for each outcome.
    #[cfg(feature = "metrics")]
    pub(crate) fn untold(&self) -> impl Iterator<Item = (Outcome, u64)> {
        let local = untold(self.local_hits(), &self.local_hits_told);
        let stored = self.answered().map(|(outcome, counter)| (outcome, counter.untold()));
        std::iter::once((Outcome::LocalHit, local)).chain(stored)
    }
}
