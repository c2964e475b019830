//! The cheapest shared read. It has no deadline, checks no value, and cannot be cancelled.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use tokio::sync::oneshot;

/// Reads of one key that several callers share.
#[derive(Clone)]
pub(crate) struct Joined {
    connection: MultiplexedConnection,
    queue: Arc<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<oneshot::Sender<Bytes>>,
    is_read_for: bool,
}

impl Joined {
    pub(crate) fn new(connection: MultiplexedConnection) -> Self {
        Self { connection, queue: Arc::default() }
    }

    pub(crate) async fn get(&self, key: &str) -> Bytes {
        let (sender, value) = oneshot::channel();
        let begins = self.with(|queue| {
            queue.waiting.push(sender);
            !std::mem::replace(&mut queue.is_read_for, true)
        });
        if begins {
            tokio::spawn(self.clone().read(key.to_owned()));
        }
        value.await.expect("it is answered")
    }

    async fn read(mut self, key: String) {
        loop {
            let waiting = self.with(|queue| {
                queue.is_read_for = !queue.waiting.is_empty();
                std::mem::take(&mut queue.waiting)
            });
            if waiting.is_empty() {
                return;
            }
            // This read is sent after the last of these waiters came: the result of an earlier one could be older than a write that was
            // acknowledged.
            let value = get(&mut self.connection, &key).await;
            for sender in waiting {
                let _ = sender.send(value.clone());
            }
            tokio::task::yield_now().await;
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Queue) -> T) -> T {
        work(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(crate) async fn get(connection: &mut MultiplexedConnection, key: &str) -> Bytes {
    redis::cmd("GET").arg(key).query_async(connection).await.expect("GET")
}
