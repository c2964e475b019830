//! The commits that go on after their loads have answered their callers, because they take longer than callers wait.

use std::sync::Mutex;

use tokio::sync::watch;

use crate::key::Key;
use crate::sync::lock;

/// The commits that are on their way although their callers were answered. A refresh waits for those of its key.
#[derive(Debug, Default)]
pub(crate) struct LateCommits {
    commits: Mutex<Vec<(Key, watch::Receiver<()>)>>,
}

/// A commit that is on its way, until it is dropped.
#[derive(Debug)]
pub(crate) struct LateCommit {
    _ends: watch::Sender<()>,
}

impl LateCommits {
    /// To be called before the callers of the load are answered.
    pub(crate) fn begin(&self, key: &Key) -> LateCommit {
        let (ends, ended) = watch::channel(());
        let mut commits = lock(&self.commits);
        commits.retain(|(_, ended)| is_under_way(ended));
        commits.push((key.clone(), ended));
        LateCommit { _ends: ends }
    }

    /// Waits until the commits of this key that are on their way now have been answered, or have failed.
    pub(crate) async fn ended(&self, key: &Key) {
        let of_key: Vec<_> = {
            let commits = lock(&self.commits);
            commits.iter().filter(|(of, _)| of == key).map(|(_, ended)| ended.clone()).collect()
        };
        for mut ended in of_key {
            // Nothing is ever sent: this is the end of the sender.
            let _ = ended.changed().await;
        }
    }
}

/// Whether the sender is still there.
fn is_under_way(ended: &watch::Receiver<()>) -> bool {
    ended.has_changed().is_ok()
}
