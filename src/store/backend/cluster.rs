//! A Redis Cluster as a [`Backend`].

use std::time::Duration;

use redis::cluster::ClusterClient;

use super::Backend;
use super::servers::ServerSource;
use crate::store::redis::{Connections, Login};

impl ServerSource for ClusterClient {
    fn connections(&self, command_timeout: Duration, login: Login) -> Connections {
        Connections::spread(self.clone(), command_timeout, login)
    }
}

/// A Redis Cluster. Credentials, TLS, database, settings of the sockets and the map of addresses are the client's own. Its
/// time-outs, retries, push sender, resolver of names and setting to read from replicas are not used: the guard follows its
/// policy, and sends commands to masters only. [`connect`](crate::StampedeGuard::connect) returns as soon as one master takes
/// commands; [`health`](crate::StampedeGuard::health) says which one does not.
///
/// ```no_run
/// use redis::cluster::ClusterClient;
/// use stampede_guard::StampedeGuard;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let nodes = ["redis://guard:secret@10.0.0.1/", "redis://guard:secret@10.0.0.2/"];
/// let guard = StampedeGuard::new(ClusterClient::new(nodes)?);
/// # let _ = guard;
/// # Ok(()) }
/// ```
impl From<ClusterClient> for Backend {
    fn from(client: ClusterClient) -> Self {
        Self::on(client, None)
    }
}
