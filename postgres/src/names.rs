//! [`Names`]: what transactions have changed, collected until it is invalidated.

use std::collections::BTreeSet;

use stampede_guard::{CacheKey, Error, ErrorKind, StampedeGuard};

/// More names than this are invalidated as everything: one command, and a bound for a transaction that changes a whole table.
const MOST: usize = 10_000;

/// Keys, tags and paths, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) keys: BTreeSet<CacheKey>,
    pub(crate) tags: BTreeSet<CacheKey>,
    pub(crate) paths: BTreeSet<String>,
    pub(crate) all: bool,
}

impl Names {
    /// Everything.
    pub(crate) fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len() + self.tags.len() + self.paths.len() + usize::from(self.all)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.all |= other.all;
        self.keys.extend(other.keys);
        self.tags.extend(other.tags);
        self.paths.extend(other.paths);
        if self.len() > MOST {
            *self = Self::all();
        }
    }

    /// Invalidates the names once, for all processes.
    ///
    /// # Errors
    ///
    /// Those of `Invalidation::send`.
    pub(crate) async fn invalidate(&self, guard: &StampedeGuard) -> Result<(), Error> {
        let invalidation = guard.invalidation().keys(self.keys.iter().cloned());
        let invalidation = self.tags.iter().cloned().fold(invalidation, |all, tag| all.tag(tag));
        match self.with_paths(invalidation) {
            Some(invalidation) => match invalidation.send().await {
                // A text that is no path, or a policy without an authority: what it stands for is not known.
                Err(error) if is_not_accepted(&error) => guard.invalidate_all().await,
                // The names too: they may be of values under a policy that `invalidate_all` does not reach.
                Ok(()) if self.all => guard.invalidate_all().await,
                sent => sent,
            },
            None => guard.invalidate_all().await,
        }
    }

    #[cfg(feature = "http")]
    fn with_paths(&self, invalidation: stampede_guard::Invalidation) -> Option<stampede_guard::Invalidation> {
        Some(self.paths.iter().fold(invalidation, |all, path| all.path(path)))
    }

    #[cfg(not(feature = "http"))]
    fn with_paths(&self, invalidation: stampede_guard::Invalidation) -> Option<stampede_guard::Invalidation> {
        self.paths.is_empty().then_some(invalidation)
    }
}

/// Whether repeating the call would give the same error, although the store answers.
fn is_not_accepted(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidKey | ErrorKind::InvalidPolicy)
}
