//! A load in the background, for a value that was served although it is stale or soon will be.

use std::sync::Arc;

use super::load::Lead;
use super::look_up::{Ask, Caller};
use crate::guard_state::Joined;
use crate::key::flight::Lane;
use crate::loader::Loader;
use crate::observe::Count;
use crate::value::outcome::Ending;

/// A background load that is due, for a value that was served.
pub(crate) struct Refresh<'a> {
    pub(crate) caller: Caller<'a>,
}

impl Refresh<'_> {
    /// Steps 3 to 7 without a waiter: one load in the fleet, or none if another process is refreshing.
    /// `early` if the value is still fresh.
    pub(crate) fn start(self, loader: Loader, early: bool) {
        let Caller { ask: Ask { node, policy, .. }, .. } = self.caller;
        let flight = self.caller.flight(Lane::Refresh);
        // A flight in a runtime that is alive and not driven never ends.
        node.flights.detach_older(&flight, policy.longest_load());
        // If a refresh of the key already runs in this process, the loader is dropped.
        if let Joined::Leader(leader, seat) = node.flights.join(&flight, loader, Ending::Abandoned, 1) {
            node.count(Count::refreshes);
            if early {
                node.count(Count::early_refreshes);
            }
            let (node, policy) = (Arc::clone(node), Arc::clone(policy));
            let Caller { seen, budget, .. } = self.caller;
            // The caller does not wait for the refresh, so the refresh takes its own permit.
            let within = None;
            Lead { node, policy, flight, leader, seen, budget, within, _unattended: Some(seat) }.start();
        }
    }
}
