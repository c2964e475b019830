//! Changes of stored entries, which the store has to confirm.

use std::time::Duration;

use tokio::time::Instant;

use super::StampedeGuard;
use super::entries::LONGEST;
use crate::error::{Error, ErrorKind};
use crate::key::Key;
use crate::observe::Count;
use crate::store::{Insert, Reply, StoreError, StoreErrorKind};

impl StampedeGuard {
    /// Invalidates the key, or replaces its value by `insert`.
    pub(super) async fn replace(
        &self,
        what: &str,
        key: &Key,
        until: Instant,
        insert: Option<Insert>,
    ) -> Result<(), Error> {
        let replace = |within| self.state.store.invalidate(key, insert.clone(), within);
        self.state.detach_resource(key);
        // First, so that replicas that have the later change have this one too.
        if let Some(reports) = key.of_reports(&self.state.namespace) {
            let forget = |within| self.counted(self.state.store.tags().forget_tag(&reports, within));
            let forgotten = self.tried(&reports, until, |within| Box::pin(forget(within))).await;
            forgotten.map_err(|error| unconfirmed(what, key, error))?;
        }
        self.confirmed(what, key, until, replace).await?;
        // A flight that began before the store had the change may hold an entry that was read before it.
        self.state.detach_resource(key);
        Ok(())
    }

    /// Makes a change, and waits until the server and, if the policy says so, its replicas have confirmed it.
    pub(super) async fn confirmed<'a>(
        &'a self,
        what: &str,
        key: &Key,
        until: Instant,
        command: impl Fn(Duration) -> Reply<'a, ()>,
    ) -> Result<(), Error> {
        match self.tried(key, until, |within| Box::pin(self.counted(command(within)))).await {
            Ok(()) => {
                self.state.count(Count::invalidations);
                self.replicated(what, key).await
            }
            Err(error) => Err(unconfirmed(what, key, error)),
        }
    }

    pub(super) async fn counted<T>(
        &self,
        reply: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        reply.await.inspect_err(|_| self.state.count(Count::store_errors))
    }

    /// Repeats a command until `until`, past the coordination budget, because the caller asked for this change only.
    pub(super) async fn tried<'a, T>(
        &'a self,
        key: &Key,
        until: Instant,
        command: impl Fn(Duration) -> Reply<'a, T>,
    ) -> Result<T, StoreError> {
        let mut tried = StoreError::new(StoreErrorKind::Unavailable);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(tried);
            }
            // Unlike a load, a change waits for a reconnect.
            let done = match self.counted(self.state.store.reach(key.name(), left)).await {
                Ok(()) => command(left.min(LONGEST / 4)).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(done) => return Ok(done),
                Err(error) => {
                    if error.is_final() {
                        return Err(error);
                    }
                    tried = error;
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50)).min(left)).await;
                }
            }
        }
    }

    /// Waits for the server's replicas, if the policy says so.
    pub(super) async fn replicated(&self, what: &str, key: &Key) -> Result<(), Error> {
        let Some((replicas, timeout)) = self.policy.replicas else { return Ok(()) };
        let have = self.state.store.tags().replicated(key, replicas, timeout).await;
        let have =
            have.map_err(|error| Error::store(&format!("not confirmed by replicas: {what}"), key, error))?;
        if have >= replicas {
            return Ok(());
        }
        let digest = key.digest();
        let text = format!("{what} of key #{digest}: {have} of {replicas} replicas have it");
        Err(Error::new(ErrorKind::Store, text))
    }
}

/// The error of a change that the store has refused or not confirmed.
fn unconfirmed(what: &str, key: &Key, error: StoreError) -> Error {
    if error.is_final() {
        return Error::store(what, key, error);
    }
    Error::store(&format!("not confirmed: {what}"), key, error)
}
