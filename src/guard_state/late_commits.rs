//! The commits that go on after their loads have answered their callers, because they take longer than callers wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::key::{Hashed, Key};
use crate::sync::lock;
use crate::tracker::{Tracked, Tracker};

/// The commits that are on their way although their callers were answered. A refresh waits for those of its key.
#[derive(Debug, Default)]
pub(crate) struct LateCommits {
    commits: Mutex<CommitsByKey>,
}

#[derive(Debug, Default)]
struct CommitsByKey {
    by_key: HashMap<Key, Vec<UnansweredCommit>, Hashed>,
    /// The number of keys at which those without a running commit are removed.
    sweep_at: usize,
}

#[derive(Clone, Debug)]
struct UnansweredCommit {
    /// Counts the commit until it ends.
    running: Arc<Tracker>,
    /// When no refresh waits for it any more: in a runtime that is not driven it never ends.
    deadline: Instant,
}

impl UnansweredCommit {
    fn is_over(&self) -> bool {
        self.running.count() == 0 || self.deadline <= Instant::now()
    }
}

impl LateCommits {
    /// To be called before the callers of the load are answered. The commit is on its way until what is returned is dropped, and
    /// `within` this time at most.
    pub(crate) fn begin(&self, key: &Key, within: Duration) -> Tracked {
        let running = Arc::<Tracker>::default();
        let late = running.enter();
        let mut commits = lock(&self.commits);
        if commits.by_key.len() >= commits.sweep_at {
            commits.by_key.retain(|_, of_key| {
                of_key.retain(|commit| !commit.is_over());
                !of_key.is_empty()
            });
            commits.sweep_at = (2 * commits.by_key.len()).max(64);
        }
        let of_key = commits.by_key.entry(key.clone()).or_default();
        of_key.retain(|commit| !commit.is_over());
        of_key.push(UnansweredCommit { running, deadline: Instant::now() + within });
        late
    }

    /// Waits until the commits of this key that are on their way now have ended.
    pub(crate) async fn ended(&self, key: &Key) {
        let of_key = lock(&self.commits).by_key.get(key).cloned().unwrap_or_default();
        for commit in of_key {
            commit.running.empty(commit.deadline).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::CacheKey;

    const WITHIN: Duration = Duration::from_secs(2);

    #[tokio::test(start_paused = true)]
    async fn a_refresh_waits_for_the_commits_of_its_key_until_their_deadline() {
        let (commits, began) = (LateCommits::default(), Instant::now());
        let [k, other] = ["k", "other"].map(|text| Key::new("ns", &CacheKey::from(text)));
        let never_answered = commits.begin(&k, WITHIN);
        commits.ended(&other).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        commits.ended(&k).await;
        assert!(began.elapsed() >= WITHIN && began.elapsed() < WITHIN * 2, "{:?}", began.elapsed());
        drop(never_answered);
        let began = Instant::now();
        drop(commits.begin(&k, WITHIN));
        commits.ended(&k).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn keys_whose_commits_have_ended_are_removed() {
        let commits = LateCommits::default();
        for n in 0..10_000_u32 {
            drop(commits.begin(&Key::new("ns", &CacheKey::from(("k", n))), WITHIN));
        }
        assert!(lock(&commits.commits).by_key.len() <= 64);
    }
}
