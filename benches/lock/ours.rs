//! The crate's mutex, with its defaults, as a client of the contest.

use stampede_guard::lock::{Locks, Mutex, MutexGuard};

use crate::contest::Lock;

/// Has connections of its own: one for commands, one for messages.
pub(crate) struct Ours {
    mutex: Mutex,
    guard: Option<MutexGuard>,
}

impl Ours {
    pub(crate) async fn connect(redis: &str, name: &str) -> Self {
        let locks = Locks::new(redis::Client::open(redis).expect("an address"));
        locks.connect().await.expect("connects");
        Self { mutex: Mutex::new(&locks, name).expect("a name"), guard: None }
    }
}

impl Lock for Ours {
    async fn acquire(&mut self) -> u32 {
        let guard = self.mutex.lock().await.expect("the lock in time");
        self.guard.insert(guard).attempts()
    }

    async fn release(&mut self) -> bool {
        let mut guard = self.guard.take().expect("it is held");
        guard.unlock().await.expect("an answer")
    }
}
