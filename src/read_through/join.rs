//! Step 3: a caller takes a seat on the flight of its key, or leads it, and waits.

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::load::Lead;
use super::look_up::{Ask, Caller};
use crate::error::{Error, ErrorKind, Failure};
use crate::guard_state::{Follower, Joined};
use crate::key::flight::Lane;
use crate::loader::Loader;
use crate::observe::{Count, log, warn_if};
use crate::policy::OnOverload;
use crate::value::outcome::Ending;
use crate::value::reader::Open;

impl Caller<'_> {
    /// Step 3: a seat, and whether this caller leads.
    pub(super) fn join(&self, lane: Lane, mut loader: Loader) -> Result<(Follower, bool), NoSeat> {
        let Ask { node, policy, .. } = self.ask;
        (loader.came, loader.since) = (self.came, Some(Instant::now()));
        let flight = self.flight(lane);
        // Who is given an older value after a while does not wait for the load, which then needs a turn of its own.
        let leaves =
            policy.soft_timeout.is_some() && self.seen.as_ref().is_some_and(|seen| seen.value.is_some());
        let within = loader.within.clone().filter(|_| !leaves);
        // A caller that is not followed does not wait either.
        let most = if lane == Lane::Heal { usize::MAX } else { policy.max_waiters };
        let if_dropped = Ending::Abandoned;
        match node.flights.join_having_looked(&flight, loader, if_dropped, most, self.looked) {
            Joined::Leader(leader, follower) => {
                let (node, policy) = (Arc::clone(node), Arc::clone(policy));
                let (seen, budget) = (self.seen.clone(), self.budget);
                Lead { node, policy, flight, leader, seen, budget, within, _unattended: None }.start();
                Ok((follower, true))
            }
            Joined::Follower(follower) => Ok((follower, false)),
            Joined::Full(loader) => Err(NoSeat::TooManyFlights(loader)),
            Joined::Crowded(loader) => Err(NoSeat::TooManyWaiters(loader)),
        }
    }

    /// Waits for the flight's end, or until this caller has waited long enough for somebody else's load; and its own loader, if
    /// nobody has used that.
    pub(super) async fn await_ending(
        &self,
        follower: &mut Follower,
        to_the_end: bool,
    ) -> (Ending, Option<Loader>) {
        tokio::select! {
            biased;
            ending = &mut *follower => return (ending, follower.take_loader()),
            // The flight's own bounds end that of who leads, of waiting for the lease and of the load; and that outside the lease.
            () = sleep_until(self.started + self.ask.policy.wait_timeout), if !to_the_end => {}
        }
        // Who has its own loader used is not waiting for somebody else. (Taken in one step: it may be used now.)
        match follower.take_loader() {
            Some(own) => (Ending::WaitedOut, Some(own)),
            None => (follower.await, None),
        }
    }

    pub(super) fn waited_out(&self) -> Failure {
        let Ask { policy, key, .. } = self.ask;
        let text = format!(
            "somebody else's load of key #{} took longer than wait_timeout ({:?})",
            key.digest(),
            policy.wait_timeout
        );
        Failure::Guard(Error::new(ErrorKind::Timeout, text))
    }
}

/// Why there is no seat; with the loader.
pub(crate) enum NoSeat {
    TooManyFlights(Loader),
    TooManyWaiters(Loader),
}

/// What such a caller is answered.
pub(crate) enum Crowded<V> {
    Stale(V, Loader),
    /// It loads for itself.
    Alone(Loader),
    Shed(Failure),
}

impl Caller<'_> {
    /// There are as many waiters, or flights, as there may be: a stale value, else what the policy says.
    pub(crate) async fn crowded_out<O: Open>(&self, open: &O, no_seat: NoSeat) -> Crowded<O::Value> {
        let Ask { node, policy, key } = self.ask;
        node.count(Count::overloaded);
        let (loader, then, text) = match (no_seat, policy.max_concurrent_loads) {
            (NoSeat::TooManyWaiters(loader), _) => {
                (loader, policy.on_crowd, format!("{} callers (max_waiters) wait for it", policy.max_waiters))
            }
            // Alone it would go past the whole fleet's cap, but inside a load that has a permit.
            (NoSeat::TooManyFlights(loader), Some(cap))
                if policy.on_overload == OnOverload::Shed && !loader.is_within(&node.permit_turn(cap)) =>
            {
                (
                    loader,
                    policy.on_overload,
                    format!("under max_concurrent_loads ({cap}) max_flights others wait"),
                )
            }
            (NoSeat::TooManyFlights(loader), _) => {
                warn_if!(
                    log::GUARD,
                    node.crowded.is_due(),
                    ?key,
                    "max_flights keys are being loaded: callers of others load for themselves"
                );
                return Crowded::Alone(loader);
            }
        };
        match (Box::pin(self.find_stand_in(open)).await, then) {
            (Some(value), _) => Crowded::Stale(value, loader),
            (None, OnOverload::LoadAnyway) => Crowded::Alone(loader),
            (None, OnOverload::Shed) => {
                let text = format!("no room for key #{}: {text}", key.digest());
                Crowded::Shed(Failure::Guard(Error::new(ErrorKind::Overloaded, text)))
            }
        }
    }
}
