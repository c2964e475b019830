//! The loop of steps 4 and 5: contends for a lease until it is granted or no longer needed.

use super::acquire::{Contended, Contender, Contention};
use crate::observe::Count;
use crate::store::{Acquired, StoreError, StoreErrorKind};

/// Step 4 and 5: acquires the lease, or waits behind its holder and tries again.
pub(crate) async fn contend(contender: Contender<'_>) -> Contended {
    let mut contention = Contention::of(contender);
    match contention.run().await {
        Ok(()) => Contended::Leased(contention.lead()),
        Err(contended) => {
            contention.leave(matches!(contended, Contended::Leaving | Contended::WaitedOut));
            contended
        }
    }
}

impl Contention<'_> {
    /// Runs until the lease is granted (`Ok`) or the attempt has another outcome.
    async fn run(&mut self) -> Result<(), Contended> {
        loop {
            let node = self.contender.node;
            if node.is_leaving() {
                return Err(Contended::Leaving);
            }
            let Some(within) = self.within() else {
                node.count(Count::budget_exceeded);
                return Err(Contended::StoreDown(StoreError::new(StoreErrorKind::TimedOut)));
            };
            match self.acquire(within).await {
                Ok(Acquired::Granted) => return Ok(()),
                Ok(Acquired::Found(raw)) => self.found(raw, within).await?,
                Ok(Acquired::Ended(ending)) => self.ended(&ending, within).await?,
                Ok(Acquired::Held { remaining, .. }) if !self.contender.queue => {
                    return Err(Contended::Busy(remaining));
                }
                Ok(Acquired::Held { remaining, holder }) => self.wait(remaining, holder).await?,
                Err(error) => self.ride_out(error).await?,
            }
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/contend_tests.rs"]
mod tests;
