//! [`SpreadCounter`]: a count that many threads add to.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A counter that many threads add to at once: each to a place in a cache line of its own.
#[derive(Debug, Default)]
pub(super) struct SpreadCounter([CounterPlace; PLACES]);

const PLACES: usize = 16;

#[derive(Debug, Default)]
#[repr(align(128))]
struct CounterPlace(AtomicU64);

thread_local! {
    /// The place of this thread.
    static PLACE: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % PLACES
    };
}

impl SpreadCounter {
    #[inline]
    pub(super) fn add(&self) {
        // A thread that is being ended adds to the first place.
        let place = PLACE.try_with(|place| *place).unwrap_or_default();
        self.0[place].0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn sum(&self) -> u64 {
        self.0.iter().map(|place| place.0.load(Ordering::Relaxed)).sum()
    }
}
