//! [`SearchRules`]: which queries of a path are equivalent, as far as this process knows.
//!
//! A rule is a guess: it chooses the query with which a request is looked up and loaded, and the response that is found must state that
//! it answers the request. So a rule that is out of date, or missing, costs a look-up or a load.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use quick_cache::UnitWeighter;
use quick_cache::sync::{Cache, DefaultLifecycle};
use tokio::time::Instant;

use crate::http_rules::search::SearchRule;
use crate::key::{Hashed, Key};

/// For how long a path whose responses contradict its rule has none.
const PAUSE: Duration = Duration::from_secs(60);

/// What this process knows of a path.
#[derive(Clone, Debug)]
pub(crate) enum KnownSearch {
    /// Nothing: the store may have a rule.
    Unknown,
    Rule(Arc<SearchRule>),
    /// The path has no rule for now, because it has changed its mind.
    Paused,
}

#[derive(Clone)]
enum Noted {
    Rule(Arc<SearchRule>),
    PausedUntil(Instant),
}

/// The rules of some paths, by the [tag of the path](Key::of_path). Without any in this process a look-up is one load of an atomic.
#[derive(Default)]
pub(crate) struct SearchRules(OnceLock<Cache<Key, Noted, UnitWeighter, Hashed>>);

impl SearchRules {
    /// How many paths there are at the most: some 8 MB by their fields, and several times that if these name hundreds of parameters.
    const MOST: usize = 4_096;

    #[inline]
    pub(crate) fn of(&self, path: &Key) -> KnownSearch {
        match self.0.get().and_then(|paths| paths.get(path)) {
            Some(Noted::Rule(rule)) => KnownSearch::Rule(rule),
            Some(Noted::PausedUntil(until)) if Instant::now() < until => KnownSearch::Paused,
            Some(Noted::PausedUntil(_)) | None => KnownSearch::Unknown,
        }
    }

    pub(crate) fn note(&self, path: &Key, rule: Arc<SearchRule>) {
        self.insert(path, Noted::Rule(rule));
    }

    pub(crate) fn pause(&self, path: &Key) {
        self.insert(path, Noted::PausedUntil(Instant::now() + PAUSE));
    }

    fn insert(&self, path: &Key, noted: Noted) {
        let most = (Self::MOST, Self::MOST as u64);
        let paths =
            || Cache::with(most.0, most.1, UnitWeighter, Hashed::default(), DefaultLifecycle::default());
        self.0.get_or_init(paths).insert(path.clone(), noted);
    }
}

impl fmt::Debug for SearchRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SearchRules").finish_non_exhaustive()
    }
}
