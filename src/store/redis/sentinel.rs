//! Where the primary is: the sentinels that watch over it are asked at each connect.
//!
//! redis-rs asks up to three of them at once, takes the answers in the order in which they were given to its
//! client, and sees to it that who they name says of itself that it is a primary.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::sentinel::SentinelClient;
use redis::{Client, RedisResult};

use super::server::Server;
use crate::sync::lock;

/// How long the sentinels may take together. redis-rs gives one that has stopped answering half a second, and a new
/// connection to it one more, before it takes the answer of the next: with less, a sentinel that went down with the
/// primary's host would keep everyone from hearing of the new one.
pub(super) const RESOLVING: Duration = Duration::from_secs(4);

pub(super) struct Sentinels {
    /// Under a lock, because it keeps its connections to the sentinels. Whoever waits for it waits within a bound.
    client: tokio::sync::Mutex<SentinelClient>,
    /// The primary that the latest connection for commands leads to.
    latest: Mutex<Option<Arc<Server>>>,
}

impl Sentinels {
    pub(super) fn new(client: SentinelClient) -> Self {
        Self { client: tokio::sync::Mutex::new(client), latest: Mutex::new(None) }
    }

    /// A client of the primary.
    pub(super) async fn resolve(&self) -> RedisResult<Client> {
        self.client.lock().await.async_get_client().await
    }

    /// A client of the first sentinel that answers.
    pub(super) async fn any(&self) -> RedisResult<Client> {
        self.client.lock().await.async_get_sentinel_client().await
    }

    pub(super) fn found(&self, server: Arc<Server>) {
        *lock(&self.latest) = Some(server);
    }

    pub(super) fn latest(&self) -> Option<Arc<Server>> {
        lock(&self.latest).clone()
    }
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels").finish_non_exhaustive()
    }
}
