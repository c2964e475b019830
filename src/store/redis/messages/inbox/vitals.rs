//! What the inbox knows about itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::{Inbox, Status};
use crate::health::LinkState;

/// When the inbox has asked and heard, in microseconds since it was made; 0 for never.
pub(crate) struct Vitals {
    born: Instant,
    heard_at: AtomicU64,
    /// Of the ping that is not answered yet.
    asked_at: AtomicU64,
    /// How long the latest answer took, in microseconds and one more; 0 before the first.
    lag: AtomicU64,
}

impl Vitals {
    pub(crate) fn new() -> Self {
        Self {
            born: Instant::now(),
            heard_at: AtomicU64::new(0),
            asked_at: AtomicU64::new(0),
            lag: AtomicU64::new(0),
        }
    }

    /// The server has given a sign of life.
    pub(crate) fn heard(&self) {
        self.heard_at.store(self.now(), Ordering::Relaxed);
    }

    /// It is asked for one.
    pub(crate) fn asked(&self) {
        self.asked_at.store(self.now(), Ordering::Relaxed);
    }

    /// It has answered.
    pub(crate) fn answered(&self) {
        let asked_at = self.asked_at.swap(0, Ordering::Relaxed);
        // Else it was given up meanwhile.
        if asked_at != 0 {
            let took = self.now().saturating_sub(asked_at);
            self.lag.store(took.saturating_add(1), Ordering::Relaxed);
        }
        self.heard();
    }

    /// The connection is another one, or gone: nothing is known of it.
    pub(crate) fn lost(&self) {
        self.asked_at.store(0, Ordering::Relaxed);
        self.lag.store(0, Ordering::Relaxed);
    }

    fn lag(&self) -> Option<Duration> {
        let latest = self.lag.load(Ordering::Relaxed).checked_sub(1);
        let under_way = match self.asked_at.load(Ordering::Relaxed) {
            0 => None,
            asked_at => Some(self.now().saturating_sub(asked_at)),
        };
        latest.max(under_way).map(Duration::from_micros)
    }

    fn last_heard(&self) -> Option<Duration> {
        let heard_at = self.heard_at.load(Ordering::Relaxed);
        (heard_at != 0).then(|| Duration::from_micros(self.now().saturating_sub(heard_at)))
    }

    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }
}

impl Inbox {
    /// How the subscription stands.
    pub(crate) fn link(&self) -> LinkState {
        if self.task().closed {
            return LinkState::Closed;
        }
        match *self.status.borrow() {
            Status::Confirmed => LinkState::Up,
            Status::Refused => LinkState::Refused,
            Status::Shut if self.last_heard().is_some() => LinkState::Down,
            Status::Shut if !self.running.load(Ordering::Acquire) => LinkState::Idle,
            Status::Shut if self.commands.down().is_some() => LinkState::Down,
            Status::Shut => LinkState::Connecting,
        }
    }

    /// How long ago anything was heard: a message, or the answer to a ping.
    pub(crate) fn last_heard(&self) -> Option<Duration> {
        self.vitals.last_heard()
    }

    /// How long the latest ping's answer took, or the next one's has by now, if that is longer.
    pub(crate) fn lag(&self) -> Option<Duration> {
        self.vitals.lag()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{CacheKey, Key};
    use crate::store::redis::RedisStore;

    #[tokio::test(start_paused = true)]
    async fn the_lag_is_that_of_the_latest_answer_or_of_one_that_is_later() {
        let (vitals, ms) = (Vitals::new(), Duration::from_millis);
        let pass = async |time| tokio::time::advance(time).await;
        pass(ms(1)).await;
        assert_eq!((vitals.lag(), vitals.last_heard()), (None, None));
        vitals.heard();
        vitals.asked();
        pass(ms(5)).await;
        assert_eq!((vitals.lag(), vitals.last_heard()), (Some(ms(5)), Some(ms(5))));
        vitals.answered();
        pass(ms(100)).await;
        assert_eq!((vitals.lag(), vitals.last_heard()), (Some(ms(5)), Some(ms(100))));
        vitals.asked();
        pass(ms(3)).await;
        assert_eq!(vitals.lag(), Some(ms(5)));
        pass(ms(3)).await;
        assert_eq!(vitals.lag(), Some(ms(6)));
        vitals.lost();
        assert_eq!(vitals.lag(), None);
        vitals.answered();
        assert_eq!(vitals.lag(), None, "it came too late");
        vitals.asked();
        vitals.answered();
        assert_eq!(vitals.lag(), Some(Duration::ZERO));
    }

    /// One that has heard nothing yet: nobody asked for it, it is on its way, or there is nowhere to go.
    #[tokio::test]
    async fn an_inbox_that_was_never_up_stands_as_the_commands_do() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let url = format!("redis://{}/", listener.local_addr().expect("bound"));
        let client = redis::Client::open(url).expect("an address");
        let store = RedisStore::new(client, Duration::from_secs(1));
        assert_eq!(store.inbox.link(), LinkState::Idle);
        store.inbox.open();
        assert_eq!(store.inbox.link(), LinkState::Connecting);
        drop(listener);
        let key = Key::new("ns", &CacheKey::from("k"));
        store.get(&key, Duration::from_secs(10)).await.expect_err("nobody listens");
        assert_eq!(store.inbox.link(), LinkState::Down);
        store.inbox.close();
        assert_eq!(store.inbox.link(), LinkState::Closed);
    }

    /// It is on its way again, and says that it was there: commands may well be answered meanwhile.
    #[tokio::test]
    async fn an_inbox_that_was_up_is_down_until_it_is_back() {
        let client = redis::Client::open("redis://127.0.0.1:1/").expect("an address");
        let store = RedisStore::new(client, Duration::from_secs(1));
        store.inbox.vitals.heard();
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(store.inbox.link(), LinkState::Down);
    }
}
