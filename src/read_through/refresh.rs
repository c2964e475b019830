//! A load in the background, for a value that was served although it is stale or soon will be.

use std::sync::Arc;

use super::load::FlightTask;
use super::look_up::{Call, CallState};
use crate::guard_state::Joined;
use crate::key::flight::LoadMode;
use crate::loader::Loader;
use crate::observe::Count;
use crate::value::outcome::FlightOutcome;

/// A background load that is due, for a value that was served.
pub(crate) struct BackgroundLoad<'a> {
    pub(crate) caller: CallState<'a>,
}

impl BackgroundLoad<'_> {
    /// Steps 3 to 7 without a waiter: one load in the fleet, or none if another process is refreshing.
    /// `early` if the value is still fresh.
    pub(crate) fn start(self, loader: Loader, early: bool) {
        let CallState { ask: Call { state, policy, .. }, .. } = self.caller;
        let flight = self.caller.flight(LoadMode::BackgroundRefresh);
        // A flight in a runtime that is alive and not driven never ends.
        state.flights.detach_older(&flight, policy.longest_load());
        // If a refresh of the key already runs in this process, the loader is dropped.
        if let Joined::Leader(leader, slot) = state.flights.join(&flight, loader, FlightOutcome::Abandoned, 1)
        {
            state.count(Count::refreshes);
            if early {
                state.count(Count::early_refreshes);
            }
            let (state, policy) = (Arc::clone(state), Arc::clone(policy));
            let CallState { rejected: seen, budget, .. } = self.caller;
            // The caller does not wait for the refresh, so the refresh takes its own permit.
            let within = None;
            FlightTask {
                state,
                policy,
                flight,
                leader,
                rejected: seen,
                budget,
                within,
                _unattended: Some(slot),
            }
            .start();
        }
    }
}
