//! Connections to the masters of a cluster.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use redis::cluster::ClusterClient;

use super::Connections;
use crate::health::Topology;
use crate::store::redis::cluster::Cluster;
use crate::store::redis::commands::Route;
use crate::store::redis::login::Login;

impl Connections {
    /// As [`single`](Self::single), to the nodes of a cluster.
    pub(crate) fn spread(client: ClusterClient, command_timeout: Duration, login: Login) -> Self {
        let cluster = Cluster::logging_in(client, command_timeout, login);
        let mut store_id = DefaultHasher::new();
        cluster.cluster_nodes().described().hash(&mut store_id);
        let inbox = cluster.any_node(command_timeout);
        Self::of(inbox, Some(Route::Cluster(cluster).into()), Topology::Cluster, store_id.finish())
    }
}
