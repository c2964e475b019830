//! Which hits may be audited now: few at once, and each key rarely.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::key::{Hashed, Key};
use crate::observe::LogEveryMinute;
use crate::sync::lock;
use crate::tracker::{Tracked, Tracker};

/// How often a key is audited at most.
const PAUSE: Duration = Duration::from_secs(1);
/// How many audits a guard runs at once, and how many it begins in a second.
const MOST_AT_ONCE: usize = 8;
const MOST_IN_A_PAUSE: usize = 1_024;

/// The audits of one guard.
#[derive(Debug, Default)]
pub(crate) struct Audits {
    /// When a key was audited last, by its hash.
    begun: Mutex<HashMap<u64, Instant, Hashed>>,
    running: Arc<Tracker>,
    pub(crate) log: LogEveryMinute,
}

impl Audits {
    /// A turn to audit this key, unless it was audited a moment ago or too many audits run.
    pub(crate) fn begin(&self, key: &Key) -> Option<Tracked> {
        let turn = self.running.try_enter(MOST_AT_ONCE)?;
        let (mut begun, now) = (lock(&self.begun), Instant::now());
        let is_recent = |at: &Instant| now.duration_since(*at) < PAUSE;
        if begun.len() >= MOST_IN_A_PAUSE {
            begun.retain(|_, at| is_recent(at));
        }
        if begun.len() >= MOST_IN_A_PAUSE || begun.get(&key.hash_of_name()).is_some_and(is_recent) {
            return None;
        }
        begun.insert(key.hash_of_name(), now);
        Some(turn)
    }
}
