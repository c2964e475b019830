//! The loop of steps 4 and 5: contends for a lease until it is granted or no longer needed.

use std::sync::Arc;

use tokio::time::Instant;

use super::acquire::{Contended, Contender, Contention};
#[cfg(feature = "http")]
use super::lease::Lease;
use crate::guard_state::{Node, Seen};
use crate::key::Key;
use crate::observe::Count;
use crate::policy::Policy;
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

/// Acquires the lease of a key if it is free, for a caller that stores an entry without a flight. A commit under this lease
/// is refused once the key was invalidated.
#[cfg(feature = "http")]
pub(crate) async fn lease_if_free(
    node: &Arc<Node>,
    key: &Key,
    policy: &Policy,
    seen: Option<Seen>,
) -> Option<Lease> {
    let contender = Contender {
        node,
        key,
        policy,
        queue: false,
        seen: &mut seen.map(Box::new),
        budget: &mut policy.budget(),
        tags: &[],
        since: u64::MAX,
        // Without `queue` the attempt never waits.
        deadline: Instant::now(),
        goes_on: &|| None,
    };
    match contend(contender).await {
        Contended::Leased(lease) => Some(lease),
        _ => None,
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/contend_tests.rs"]
mod tests;
