//! What one checkup goes by, and what it has found so far.

use crate::health::Finding;
use crate::store::Examine;
use crate::store::redis::RedisStore;

pub(super) struct Checkup<'a> {
    pub(super) store: &'a RedisStore,
    pub(super) ask: Examine,
    pub(super) findings: Vec<Finding>,
}

impl Checkup<'_> {
    /// The user as which the guard is known to the server.
    pub(super) fn user(&self) -> String {
        self.store.commands.user().unwrap_or_else(|| "default".to_owned())
    }
}
