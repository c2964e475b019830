//! A load in the background, for a value that was served although it is stale or soon will be.

use super::call::{Call, CallState};
use super::load::FlightTask;
use crate::guard_state::Joined;
use crate::key::flight::LoadMode;
use crate::loader::Loader;
use crate::observe::Count;
use crate::value::outcome::FlightOutcome;

impl CallState<'_> {
    /// Steps 3 to 7 without a waiter: one load in the fleet, or none if another process is refreshing.
    /// `early` if the value is still fresh.
    pub(crate) fn refresh(self, loader: Loader, early: bool) {
        let Call { state, policy, .. } = self.call;
        let flight = self.flight(LoadMode::BackgroundRefresh);
        // A flight in a runtime that is alive and not driven never ends.
        state.flights.detach_older(&flight, policy.longest_load());
        // If a refresh of the key already runs in this process, the loader is dropped.
        if let Joined::Leader(leader, slot) = state.flights.join(&flight, loader, FlightOutcome::Abandoned, 1)
        {
            policy.count(Count::refreshes);
            if early {
                policy.count(Count::early_refreshes);
            }
            // The caller does not wait for the refresh, so the refresh takes its own permit.
            FlightTask { _unattended: Some(slot), ..FlightTask::new(&self, flight, leader) }.start();
        }
    }
}
