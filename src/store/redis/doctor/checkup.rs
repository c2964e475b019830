//! The inputs of one examination, and its findings so far.

use crate::health::Finding;
use crate::store::Examine;
use crate::store::redis::RedisStore;

pub(super) struct Checkup<'a> {
    pub(super) store: &'a RedisStore,
    pub(super) ask: Examine,
    pub(super) findings: Vec<Finding>,
}

impl Checkup<'_> {
    /// The user name of the guard's connections.
    pub(super) fn user(&self) -> String {
        self.store.commands.user().unwrap_or_else(|| "default".to_owned())
    }
}
