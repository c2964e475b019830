//! I8 as the oracle counts it: how many loads of one key a node runs at once without the lease.
//!
//! Later callers join such a load, unless it was detached from them. A caller whose look-up reached the store may replace it, once.

use tokio::time::Instant;

use super::loads::{Load, Loads};
use crate::store::Token;

impl Loads {
    /// A flight that waits for another node's load may have replaced a flight that continues without the store. It may end without a load
    /// of its own, so the replacement is recorded now.
    pub(super) fn waits(&mut self, key: u8, token: &Token) {
        if let Some(node) = self.node_of(token) {
            self.claim(node, key, 0);
        }
    }

    fn detached_at(&self, node: usize, key: u8) -> Option<Instant> {
        self.at_node.get(&(node, key)).and_then(|at| at.detached)
    }

    /// Whether later callers join the flight of a caller that came at `came`.
    pub(super) fn is_joinable(&self, node: usize, key: u8, came: Instant) -> bool {
        self.detached_at(node, key).is_none_or(|at| at < came)
    }

    /// Whether a load of this key has begun, or even ended, that may have replaced the flight of a call for many keys, which came at
    /// `came`. Such a call begins to load only once each of its keys has a flight. Meanwhile another caller's flight may have replaced this
    /// key's flight, because that one had lost the store. It may also be the other way round: the oracle cannot tell which flight began
    /// first. Each load counts once.
    pub(super) fn was_overtaken(&mut self, node: usize, key: u8, came: Instant) -> bool {
        let may_be_the_other = |load: &&mut Load| {
            load.node == node
                && load.key == key
                && load.lease.is_none()
                && !load.replaced
                && !load.has_overtaken
                && load.at > came
        };
        self.all.iter_mut().find(may_be_the_other).map(|load| load.has_overtaken = true).is_some()
    }

    /// Makes room for one more load without a lease, among this many `lanes`. If none is free, the new load may replace a load that
    /// continues without the store; each load is replaced once. Returns whether it replaces a load, or `None` if there is no room.
    pub(super) fn claim(&mut self, node: usize, key: u8, lanes: usize) -> Option<bool> {
        let detached = self.detached_at(node, key);
        let is_one = |load: &&mut Load| {
            load.node == node
                && load.key == key
                && load.ended.is_none()
                && load.lease.is_none()
                && !load.replaced
                && detached.is_none_or(|at| at < load.came)
        };
        let mut joinable: Vec<_> = self.all.iter_mut().filter(is_one).collect();
        if joinable.len() < lanes {
            return Some(false);
        }
        let first = joinable.iter_mut().find(|load| !load.instead)?;
        first.replaced = true;
        Some(true)
    }
}
