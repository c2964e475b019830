//! A caller for whom there is no seat: too many wait for its key, or too many keys are being loaded. Step 3.

use super::look_up::{Ask, Caller};
use crate::error::{Error, ErrorKind, Failure};
use crate::loader::Loader;
use crate::observe::{Count, log, warn_if};
use crate::policy::OnOverload;
use crate::value::reader::Open;

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
