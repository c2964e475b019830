//! A node on the primary that sentinels name.

use std::sync::Arc;
use std::time::Duration;

use redis::sentinel::SentinelClient;

use super::RedisStore;
use crate::health::Topology;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::topology::sentinel::SentinelEndpoint;

impl RedisStore {
    /// As [`new`](Self::new), on whichever server these sentinels call the primary.
    pub(crate) fn watched(client: SentinelClient, command_timeout: Duration) -> Self {
        // The client does not show what it leads to, so each guard is taken for one of its own.
        let place = fastrand::u64(..);
        let dial = Connector::to(Arc::new(SentinelEndpoint::new(client)), command_timeout);
        Self::of(dial, None, Topology::Sentinel, place)
    }
}
