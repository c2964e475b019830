//! Which stored entries this process could not use, and why.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::value::entry::Unreadable;

/// How many entries were found that this process cannot use, by the reason.
#[derive(Debug, Default)]
pub(crate) struct UnusableEntries {
    compressed: AtomicU64,
    other_type: AtomicU64,
    other_version: AtomicU64,
    damaged: AtomicU64,
}

impl UnusableEntries {
    pub(super) fn count(&self, reason: &Unreadable) {
        let counter = match reason {
            Unreadable::Compressed { .. } => &self.compressed,
            Unreadable::OtherType => &self.other_type,
            Unreadable::Version(_) => &self.other_version,
            Unreadable::Foreign | Unreadable::Corrupt | Unreadable::OtherKey => &self.damaged,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// How many, and what to do, for each reason that there was.
    pub(crate) fn reasons(&self) -> Vec<(u64, &'static str, &'static str)> {
        let all = [
            (
                &self.compressed,
                "compressed",
                "turn the feature `lz4` on, and raise `max_body`, in every process",
            ),
            (
                &self.other_type,
                "of another type",
                "give keys of different types, or versions of one, different names",
            ),
            (&self.other_version, "in another version's layout", "end the rolling update"),
            (&self.damaged, "damaged, or no entries", "keep other programs out of the namespace"),
        ];
        let counted = all.map(|(counter, what, advice)| (counter.load(Ordering::Relaxed), what, advice));
        counted.into_iter().filter(|(count, ..)| *count > 0).collect()
    }
}
