//! The changes that a process makes, of every kind. Each change first makes a new version.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stampede_guard::{StampedeGuard, Stats};
use tokio::sync::Mutex;

use super::process::Config;
use super::truth::{Guards, INSERTED, KEYS, Subject, TAGS, Truth, Value};
use crate::support::os::wall_ns;

/// One change: when its version was raised, and when it was acknowledged.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Change {
    pub(super) kind: String,
    pub(super) process: usize,
    /// For each subject, the least version that callers may receive once the change was acknowledged.
    pub(super) claims: Vec<(Subject, u64)>,
    pub(super) began: u64,
    pub(super) acknowledged: u64,
    pub(super) error: Option<String>,
}

/// The kinds of changes. A kind that is named several times is drawn as many times as often.
const KINDS: [&str; 20] = [
    "invalidate",
    "invalidate",
    "invalidate",
    "invalidate",
    "invalidate",
    "invalidate",
    "invalidate",
    "insert",
    "insert",
    "insert",
    "insert",
    "invalidate_tag",
    "invalidate_tag",
    "invalidate_tag",
    "refresh",
    "refresh",
    "refresh",
    "expire",
    "expire",
    "invalidate_all",
];

/// Whether an inserted key may be changed. After an insertion without an answer, the key must not be changed until that insertion has run
/// or can no longer run.
type Turn = Mutex<u64>;

const LATE_INSERTION: Duration = Duration::from_secs(4);

#[derive(Clone)]
pub(super) struct Changer {
    guards: Guards,
    truth: Truth,
    process: usize,
    turns: Arc<[Turn; INSERTED]>,
}

/// Makes changes until there are `most` of them, or until the parent says halt.
pub(super) async fn make(
    changer: Changer,
    most: usize,
    pause: Duration,
    halt: Arc<AtomicBool>,
) -> Vec<Change> {
    let mut made = Vec::new();
    while made.len() < most && !halt.load(Ordering::SeqCst) {
        made.extend(changer.change().await);
        tokio::time::sleep(pause).await;
    }
    made
}

impl Changer {
    pub(super) fn new(guards: Guards, truth: Truth, config: Config) -> Self {
        let turns = Arc::new(std::array::from_fn(|_| Turn::default()));
        Self { guards, truth, process: config.process, turns }
    }

    pub(super) async fn invalidate(&self, key: usize) -> Change {
        self.of_key("invalidate", key).await
    }

    async fn change(&self) -> Option<Change> {
        let kind = KINDS[fastrand::usize(..KINDS.len())];
        match kind {
            "invalidate_tag" => {
                let tag = fastrand::usize(..TAGS);
                let subject = Subject::Tag(tag);
                let version = self.truth.raise(subject).await;
                let began = wall_ns();
                let done = self.guards.tagged(tag).invalidate_tag(("tag", tag)).await;
                Some(self.made(kind, vec![(subject, version)], began, done.err()))
            }
            "invalidate_all" => {
                let version = self.truth.raise(Subject::Everything).await;
                let began = wall_ns();
                let done = self.guards.tagged(0).invalidate_all().await;
                Some(self.made(kind, vec![(Subject::Everything, version)], began, done.err()))
            }
            // This key belongs to this process alone: one of the changers has even keys, the other one odd keys.
            _ if kind == "insert" || fastrand::u8(..4) == 0 => {
                let key = fastrand::usize(..INSERTED / 2) * 2 + self.process % 2;
                let mut not_before = self.turns[key].lock().await;
                if wall_ns() < *not_before {
                    return None;
                }
                let change = self.of_key(kind, key).await;
                if kind == "insert" && change.error.is_some() {
                    *not_before = wall_ns() + LATE_INSERTION.as_nanos() as u64;
                }
                Some(change)
            }
            _ => Some(self.of_key(kind, fastrand::usize(INSERTED..KEYS)).await),
        }
    }

    async fn of_key(&self, kind: &str, key: usize) -> Change {
        let (guard, of) = (self.guards.of(key), ("k", key));
        let subject = Subject::Key(key);
        let version = self.truth.raise(subject).await;
        let mut claims = vec![(subject, version)];
        let began = wall_ns();
        let error = match kind {
            "invalidate" => guard.invalidate(of).await.err().map(|error| error.to_string()),
            "expire" => guard.expire(of).await.err().map(|error| error.to_string()),
            "insert" => {
                let value = self.truth.value(key).await;
                guard.insert(of, &value).await.err().map(|error| error.to_string())
            }
            _ => {
                let (truth, before) = (self.truth.clone(), unstored(guard));
                // If a load is running already, this refresh may join it, so only the versions that it returned are acknowledged.
                let refreshed = guard.load(of).refresh(move |_| truth.load(key)).await;
                // The versions of tags are not acknowledged by it, because the change of a tag may be on its way.
                let mut claimed = |Value { versions, .. }| {
                    claims = versions;
                    claims.retain(|(of, _)| *of == subject);
                };
                let error =
                    refreshed.map(|loaded| claimed(loaded.value)).err().map(|error| error.to_string());
                if unstored(guard) != before {
                    // This load may have run without the store, which then still has the older value.
                    claims.clear();
                }
                error
            }
        };
        self.made(kind, claims, began, error)
    }

    fn made(
        &self,
        kind: &str,
        claims: Vec<(Subject, u64)>,
        began: u64,
        error: Option<impl ToString>,
    ) -> Change {
        let acknowledged = wall_ns();
        let error = error.map(|error| error.to_string());
        Change { kind: kind.to_owned(), process: self.process, claims, began, acknowledged, error }
    }
}

/// How many loaded values were not stored.
fn unstored(guard: &StampedeGuard) -> u64 {
    let Stats { fail_open_loads, leases_lost, commits_refused, store_errors, .. } = guard.stats();
    fail_open_loads + leases_lost + commits_refused + store_errors
}
