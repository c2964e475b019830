//! The inputs of one examination, and its findings so far.

use crate::health::Finding;
use crate::store::Examine;
use crate::store::redis::RedisStore;
use crate::store::redis::connection::connector::Connector;

pub(super) struct Examination<'a> {
    pub(super) store: &'a RedisStore,
    pub(super) ask: Examine,
    pub(super) findings: Vec<Finding>,
}

/// Where to look further.
pub(super) struct GuideLink {
    pub(super) dial: Connector,
    /// Leads to messages.
    pub(super) inbox: Connector,
    /// A name with its keys there.
    pub(super) name: String,
    /// The masters of a cluster that can be reached.
    pub(super) reached: Vec<String>,
}

impl Examination<'_> {
    /// The user name of the guard's connections.
    pub(super) fn user(&self) -> String {
        self.store.commands.user().unwrap_or_else(|| "default".to_owned())
    }
}
