//! Connections to the primary that sentinels name.

use std::sync::Arc;
use std::time::Duration;

use super::Connections;
use crate::health::Topology;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::login::Login;
use crate::store::redis::sentinel::{SentinelClients, SentinelEndpoint};

impl Connections {
    /// As [`single`](Self::single), to the server that these sentinels report as the primary.
    pub(crate) fn watched(clients: &SentinelClients, command_timeout: Duration, login: Login) -> Self {
        // The client does not show its servers, so each call counts as a separate backend.
        let store_id = fastrand::u64(..);
        let endpoint = Arc::new(SentinelEndpoint::new(clients.clone(), login.clone()));
        Self::of(
            Connector::to(endpoint, command_timeout).logging_in(&login),
            None,
            Topology::Sentinel,
            store_id,
        )
    }
}
