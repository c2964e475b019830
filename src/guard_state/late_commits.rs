//! The commits that go on after their loads have answered their callers, because they take longer than callers wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::key::{Hashed, Key};
use crate::sync::lock;

/// The commits that are on their way although their callers were answered. A refresh waits for those of its key.
#[derive(Debug, Default)]
pub(crate) struct LateCommits {
    commits: Mutex<CommitsByKey>,
}

#[derive(Debug, Default)]
struct CommitsByKey {
    by_key: HashMap<Key, Vec<UnansweredCommit>, Hashed>,
    /// The number of keys at which those are removed whose commits have ended.
    sweep_at: usize,
}

#[derive(Clone, Debug)]
struct UnansweredCommit {
    /// It has no permits, and is closed at the end: unlike a `watch`, that wakes its waiters in their order.
    ends: Arc<Semaphore>,
    /// Also of a commit whose runtime is not driven.
    deadline: Instant,
}

/// A commit that is on its way, until it is dropped.
#[derive(Debug)]
pub(crate) struct LateCommit {
    ends: Arc<Semaphore>,
}

impl Drop for LateCommit {
    fn drop(&mut self) {
        self.ends.close();
    }
}

impl UnansweredCommit {
    fn is_over(&self) -> bool {
        self.ends.is_closed() || self.deadline <= Instant::now()
    }
}

impl LateCommits {
    /// To be called before the callers of the load are answered. The commit has its answer, or none, `within` this time.
    pub(crate) fn begin(&self, key: &Key, within: Duration) -> LateCommit {
        let ends = Arc::new(Semaphore::new(0));
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
        of_key.push(UnansweredCommit { ends: Arc::clone(&ends), deadline: Instant::now() + within });
        LateCommit { ends }
    }

    /// Waits until the commits of this key that are on their way now have ended.
    pub(crate) async fn ended(&self, key: &Key) {
        let of_key = lock(&self.commits).by_key.get(key).cloned().unwrap_or_default();
        for commit in of_key {
            let _ = timeout_at(commit.deadline, commit.ends.acquire()).await;
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
