//! The connections that the nodes of one backend share.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::Client;

use crate::health::Topology;
use crate::store::redis::commands::Commands;
use crate::store::redis::connection::Supervisor;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::login::Login;
use crate::store::redis::messages::subscriber::Subscriber;

/// One connection for commands (in a cluster one to each master) and one for messages, each opened when it is first needed.
pub(crate) struct Connections {
    /// Digest of the server's address and the database.
    pub(in crate::store::redis) place: u64,
    pub(in crate::store::redis) topology: Topology,
    /// Leads to messages.
    pub(in crate::store::redis) dial: Connector,
    pub(in crate::store::redis) commands: Commands,
    pub(in crate::store::redis) subscriber: Arc<Subscriber>,
    /// How many nodes use them; with the last they are closed.
    nodes: AtomicUsize,
}

impl Connections {
    /// Connections to one server, for one node at first. `command_timeout` is the deadline of one command: a slower server counts as
    /// down.
    pub(crate) fn single(client: &Client, command_timeout: Duration, login: Login) -> Self {
        let info = client.get_connection_info();
        let mut place = DefaultHasher::new();
        info.addr().to_string().hash(&mut place);
        info.redis_settings().db().hash(&mut place);
        let dial = Connector::new(client, command_timeout).logging_in(&login);
        Self::of(dial, None, Topology::Single, place.finish())
    }

    /// `dial` leads to messages; and to commands, where those have no ways of their own.
    pub(super) fn of(dial: Connector, commands: Option<Commands>, topology: Topology, place: u64) -> Self {
        let commands = commands.unwrap_or_else(|| Supervisor::new(dial.clone()).into());
        Self {
            place,
            topology,
            subscriber: Subscriber::new(dial.clone(), commands.clone()),
            dial,
            commands,
            nodes: AtomicUsize::new(1),
        }
    }

    /// Counts one more node. False if they are closed: their last node has left.
    pub(crate) fn join(&self) -> bool {
        let more = |nodes| if nodes == 0 { None } else { Some(nodes + 1) };
        self.nodes.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Counts one node less, and closes the connections with the last.
    pub(super) fn leave(&self) {
        if self.nodes.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.commands.close();
            self.subscriber.close();
        }
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { commands, subscriber, nodes, .. } = self;
        f.debug_struct("Connections")
            .field("commands", commands)
            .field("messages", subscriber)
            .field("nodes", nodes)
            .finish_non_exhaustive()
    }
}
