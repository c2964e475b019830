//! The crate's mutex with its default settings, as two kinds of clients: one unlocks and locks, the other one bumps.

use stampede_guard::lock::{Locks, Mutex, MutexGuard};

use crate::way::Lock;

/// A client of `Mutex`, with two connections of its own: one for commands and one for messages.
pub(crate) struct Ours {
    mutex: Mutex,
    guard: Option<MutexGuard>,
}

impl Ours {
    pub(crate) async fn connect(redis: &str, name: &str) -> Self {
        let locks = Locks::new(redis::Client::open(redis).expect("an address"));
        locks.connect().await.expect("connects");
        let mutex = locks.mutex(name).build().expect("settings");
        Self { mutex, guard: None }
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

/// A client of `Mutex` that releases and acquires by one command, `bump`.
pub(crate) struct Bumped(Ours);

impl Bumped {
    pub(crate) async fn connect(redis: &str, name: &str) -> Self {
        Self(Ours::connect(redis, name).await)
    }
}

impl Lock for Bumped {
    async fn acquire(&mut self) -> u32 {
        let Some(guard) = &mut self.0.guard else { return self.0.acquire().await };
        assert!(guard.bump().await.expect("the lock in time"), "it was held");
        guard.attempts()
    }

    /// Sends nothing: the next acquire releases the lock, and reports whether it was held.
    async fn release(&mut self) -> bool {
        true
    }

    async fn leave(&mut self) {
        if self.0.guard.is_some() {
            assert!(self.0.release().await, "it was held");
        }
    }
}
