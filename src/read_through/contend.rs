//! The loop of steps 4 and 5: contends for a lease until it is granted or no longer needed.

use super::acquire::{AcquireOutcome, AcquireRequest, Acquisition};
use crate::observe::Count;
use crate::store::{Acquired, StoreError, StoreErrorKind};

/// Step 4 and 5: acquires the lease, or waits behind its holder and tries again.
pub(crate) async fn contend(request: AcquireRequest<'_>) -> AcquireOutcome {
    let mut contention = Acquisition::of(request);
    match contention.run().await {
        Ok(()) => AcquireOutcome::Leased(contention.lead()),
        Err(contended) => {
            contention.leave(matches!(contended, AcquireOutcome::Leaving | AcquireOutcome::WaitedOut));
            contended
        }
    }
}

impl Acquisition<'_> {
    /// Runs until the lease is granted (`Ok`) or the attempt has another outcome.
    async fn run(&mut self) -> Result<(), AcquireOutcome> {
        loop {
            let turn = self.turn().await?;
            let Some(within) = self.within() else {
                self.request.policy.count(Count::budget_exceeded);
                return Err(AcquireOutcome::StoreDown(StoreError::new(StoreErrorKind::TimedOut)));
            };
            match self.acquire(within).await {
                Ok(Acquired::Granted) => {
                    self.note_expired();
                    return Ok(());
                }
                Ok(Acquired::Found(raw)) => self.found(raw, within).await?,
                Ok(Acquired::Ended(outcome)) => self.ended(&outcome, within).await?,
                Ok(Acquired::Held { remaining, .. }) if !self.request.queue => {
                    return Err(AcquireOutcome::Busy(remaining));
                }
                Ok(Acquired::Held { remaining, holder }) => {
                    drop(turn);
                    // The keys that its caller loads together do not wait for this one.
                    if let Some(attempt) = &self.request.batch {
                        attempt.rest();
                    }
                    self.wait(remaining, holder).await?;
                    // The ACQUIRE that reads a released load's outcome may take as long as a lease: the others do not wait for that either.
                    if self.released.is_none()
                        && let Some(attempt) = &mut self.request.batch
                    {
                        attempt.again();
                    }
                }
                Err(error) => {
                    drop(turn);
                    self.retry_after_disconnect(error).await?;
                }
            }
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/contend_tests.rs"]
mod tests;
