//! The birth ids of registries that this process knows, and since when.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use crate::store::volume::RegistryState;
use crate::sync::lock;

/// Older registries are gone; one is kept in case that a server comes back with it.
const MOST: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Births {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    births: Vec<(Uuid, Instant)>,
    /// The longest term that a registry of the volume has told.
    term: Duration,
}

impl Births {
    /// Notes the registry of an answer. Returns since when its birth is known, and the longest term.
    pub(super) fn learn(&self, registry: &RegistryState) -> (Instant, Duration) {
        let mut known = lock(&self.known);
        known.term = known.term.max(registry.term);
        let term = known.term;
        if let Some((_, since)) = known.births.iter().find(|(birth, _)| *birth == registry.birth) {
            return (*since, term);
        }
        if known.births.len() == MOST {
            known.births.remove(0);
        }
        let now = Instant::now();
        known.births.push((registry.birth, now));
        (now, term)
    }

    /// The newest birth that was known a term ago: rights that were set before that registry existed have ended.
    pub(super) fn vouched(&self, term: Duration) -> Option<Uuid> {
        let known = lock(&self.known);
        let term = known.term.max(term);
        known.births.iter().rev().find(|(_, since)| since.elapsed() >= term).map(|(birth, _)| *birth)
    }

    /// Whether a registry was ever seen here.
    pub(super) fn any(&self) -> bool {
        !lock(&self.known).births.is_empty()
    }
}
