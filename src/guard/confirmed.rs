//! Changes of stored entries, which the store has to confirm.

use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::StampedeGuard;
use super::entries::LONGEST;
use crate::error::{Error, ErrorKind};
use crate::guard_state::GuardState;
use crate::key::Key;
use crate::local::Change;
use crate::observe::GuardCount;
use crate::store::volume::{Announced, ChangedName};
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
        let attempt = ChangeAttempt::new(&self.state);
        self.state.detach_resource(key);
        // First, so that replicas that have the later change have this one too.
        let reports = key.of_reports(&self.state.namespace);
        let of_reports = match &reports {
            Some(tag) => Some(self.forgotten(what, tag, until).await?),
            None => None,
        };
        let change = self.change(ChangedName::value(key));
        let replace = |within| {
            let (announcement, insert) = (change.attempt(), insert.clone());
            let store = &self.state.store;
            answered(
                announcement.id,
                async move { store.invalidate(key, insert, &announcement, within).await },
            )
        };
        let answer = self.confirmed(what, key, until, replace).await?;
        let of_reports = async {
            match of_reports {
                Some((change, answer)) => change.reaches_all(answer, until).await,
                None => Ok(()),
            }
        };
        let (reached, of_reports) = tokio::join!(change.reaches_all(answer, until), of_reports);
        reached.and(of_reports).map_err(|error| unannounced(what, key, error))?;
        // A flight that began before the store had the change may hold an entry that was read before it.
        self.state.detach_resource(key);
        attempt.succeeded();
        Ok(())
    }

    /// Waits until no process serves a copy that is older than a refresh.
    pub(super) async fn announce_refresh(&self, key: &Key) -> Result<(), Error> {
        let attempt = ChangeAttempt::new(&self.state);
        let change = self.change(ChangedName::value(key));
        match change.announce_and_wait(Instant::now() + LONGEST).await {
            // As far as is known there are no copies, so the refresh does not depend on the store.
            Err(_) if !self.policy.local_elsewhere && !self.state.local.knows_of_copies() => {}
            announced => announced.map_err(|error| unannounced("the refresh", key, error))?,
        }
        attempt.succeeded();
        Ok(())
    }

    /// Removes the id of a tag, as a part of another change, which waits for the announcement.
    async fn forgotten(&self, what: &str, tag: &Key, until: Instant) -> Result<(Change<'_>, Answer), Error> {
        let change = self.change(ChangedName::tag(tag));
        let forget = |within| Box::pin(self.counted(self.forget_id(&change, tag, within))) as Reply<'_, _>;
        let answer = self.tried(tag, until, forget).await;
        let answer = answer.map_err(|error| unconfirmed(what, tag, error))?;
        Ok((change, answer))
    }

    /// Removes the id of a tag, and waits until no process serves a copy with it.
    pub(super) async fn forget_tagged(&self, what: &str, tag: &Key, until: Instant) -> Result<(), Error> {
        let attempt = ChangeAttempt::new(&self.state);
        let change = self.change(ChangedName::tag(tag));
        let answer = self.confirmed(what, tag, until, |within| self.forget_id(&change, tag, within)).await?;
        change.reaches_all(answer, until).await.map_err(|error| unannounced(what, tag, error))?;
        attempt.succeeded();
        Ok(())
    }

    fn forget_id<'a>(&'a self, change: &Change<'_>, tag: &'a Key, within: Duration) -> Reply<'a, Answer> {
        let (announcement, tags) = (change.attempt(), self.state.store.tags());
        answered(announcement.id, async move { tags.forget_tag(tag, &announcement, within).await })
    }

    /// Begins a change: this process drops its copies, even if the store cannot be reached.
    fn change(&self, name: ChangedName) -> Change<'_> {
        self.state.local.forget(&name);
        self.state.local.change(name, self.policy.local_elsewhere)
    }

    /// Makes a change, and waits until the server and, if the policy says so, its replicas have confirmed it.
    pub(super) async fn confirmed<'a, T>(
        &'a self,
        what: &str,
        key: &Key,
        until: Instant,
        command: impl Fn(Duration) -> Reply<'a, T>,
    ) -> Result<T, Error> {
        match self.tried(key, until, |within| Box::pin(self.counted(command(within)))).await {
            Ok(answer) => {
                self.state.count(GuardCount::invalidations);
                self.state.publish_regularly();
                self.replicated(what, key).await.map(|()| answer)
            }
            Err(error) => Err(unconfirmed(what, key, error)),
        }
    }

    pub(super) async fn counted<T>(
        &self,
        reply: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        reply.await.inspect_err(|_| self.state.count(GuardCount::store_errors))
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

/// The answer to one attempt at a change: the id of its announcement, and what became of that.
pub(super) type Answer = (Uuid, Announced);

/// A change on its way. It counts as not confirmed unless it succeeds: also if its caller, which may have a bound of its own, drops it.
struct ChangeAttempt<'a>(Option<&'a GuardState>);

impl<'a> ChangeAttempt<'a> {
    fn new(state: &'a GuardState) -> Self {
        Self(Some(state))
    }

    fn succeeded(mut self) {
        self.0 = None;
    }
}

impl Drop for ChangeAttempt<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.0 {
            state.count(GuardCount::invalidations_unconfirmed);
        }
    }
}

fn answered<'a>(
    id: Uuid,
    step: impl Future<Output = Result<Announced, StoreError>> + Send + 'a,
) -> Reply<'a, Answer> {
    Box::pin(async move { Ok((id, step.await?)) })
}

/// The error of a change that was made, and of which other processes could not be told.
fn unannounced(what: &str, key: &Key, error: StoreError) -> Error {
    Error::store(&format!("not announced to the other processes: {what}"), key, error)
}

/// The error of a change that the store has refused or not confirmed.
fn unconfirmed(what: &str, key: &Key, error: StoreError) -> Error {
    if error.is_final() {
        return Error::store(what, key, error);
    }
    Error::store(&format!("not confirmed: {what}"), key, error)
}
