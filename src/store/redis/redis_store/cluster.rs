//! A node on the masters of a cluster.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use redis::cluster::ClusterClient;

use super::RedisStore;
use crate::health::Topology;
use crate::store::redis::cluster::Cluster;
use crate::store::redis::connection::connector::Connector;

impl RedisStore {
    /// As [`new`](Self::new), on the nodes of a cluster.
    pub(crate) fn spread(client: ClusterClient, command_timeout: Duration) -> Self {
        let cluster = Cluster::new(client, command_timeout);
        let mut place = DefaultHasher::new();
        cluster.atlas().described().hash(&mut place);
        let inbox =
            Connector::to(Arc::clone(cluster.atlas()) as _, command_timeout).sharing(cluster.outages());
        Self::of(inbox, Some(cluster.into()), Topology::Cluster, place.finish())
    }
}
