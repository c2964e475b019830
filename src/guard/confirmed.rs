//! Changes of stored entries, which the store has to confirm.

use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::StampedeGuard;
use super::attempt::ChangeAttempt;
use super::entries::LONGEST;
use crate::error::{Error, ErrorKind};
use crate::guard_state::kept::{ChangeTarget, KeptInvalidation};
use crate::key::Key;
use crate::local::Change;
use crate::observe::GuardCount;
use crate::store::attempt::SentAttempt;
use crate::store::volume::{Announced, ChangedName};
use crate::store::{Insert, LATEST, Reply, StoreError, StoreErrorKind};

impl ChangeAttempt {
    /// Makes the change: invalidates the target, or replaces its value by `insert`.
    pub(super) async fn make(mut self, until: Instant, insert: Option<Insert>) -> Result<(), Error> {
        let replicated = self.reaches_all(until, insert).await?;
        // A flight that began before the store had the change may hold an entry that was read before it.
        self.detach_flights();
        self.made();
        self.succeeds(replicated)
    }

    /// Waits until the store has the change and no process serves an older copy. `Err` inside: the replicas lack it.
    async fn reaches_all(&self, until: Instant, insert: Option<Insert>) -> Result<Result<(), Error>, Error> {
        let Self { guard, target, .. } = self;
        // First, so that replicas that have the later change have this one too.
        let of_reports = match self.of_reports() {
            Some(tag) => {
                let change = guard.change(tag.name());
                let answer = guard.forgotten(&change, &tag.key, until).await;
                Some((change, answer.map_err(|error| self.unconfirmed(error))?))
            }
            None => None,
        };
        let change = guard.change(target.name());
        let answer = guard.confirmed(&change, target, until, insert).await;
        let answer = answer.map_err(|error| self.unconfirmed(error))?;
        let of_reports = async {
            match of_reports {
                Some((change, answer)) => change.reaches_all(answer, until).await,
                None => Ok(()),
            }
        };
        let reached = async { tokio::try_join!(change.reaches_all(answer, until), of_reports) };
        let (reached, replicated) = tokio::join!(reached, self.replicated());
        reached.map_err(|error| self.unannounced(error))?;
        Ok(replicated)
    }

    /// Waits for the server's replicas, if the policy says so.
    async fn replicated(&self) -> Result<(), Error> {
        let Self { guard, target: ChangeTarget { key, .. }, what, .. } = self;
        let Some((replicas, timeout)) = guard.policy.replicas else { return Ok(()) };
        let have = guard.state.store.tags().replicated(key, replicas, timeout).await;
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

impl StampedeGuard {
    /// Makes a change, and waits until the server has confirmed it.
    async fn confirmed(
        &self,
        change: &Change<'_>,
        target: &ChangeTarget,
        until: Instant,
        insert: Option<Insert>,
    ) -> Result<Answer, StoreError> {
        let (store, key) = (&self.state.store, &target.key);
        let command = |within| {
            if target.is_tag {
                return self.forget_id(change, key, within);
            }
            let (announcement, insert) = (change.attempt(), insert.clone());
            answered(self.state.local.attempt_sent(), announcement.id, async move {
                store.invalidate(key, insert, &announcement, within).await
            })
        };
        let answer = self.tried(key, until, |within| Box::pin(self.counted(command(within)))).await?;
        self.state.count(GuardCount::invalidations);
        self.state.publish_regularly();
        Ok(answer)
    }

    /// Waits until no process serves a copy that is older than a refresh.
    pub(super) async fn announce_refresh(&self, key: &Key) -> Result<(), Error> {
        let attempt = ChangeAttempt::of_value(self, key, "the refresh", false);
        let change = self.change(ChangedName::value(key));
        match change.announce_and_wait(Instant::now() + LONGEST).await {
            // As far as is known there are no copies, so the refresh does not depend on the store.
            Err(_) if !self.policy.local_elsewhere && !self.state.local.knows_of_copies() => {}
            announced => announced.map_err(|error| attempt.unannounced(error))?,
        }
        attempt.succeeds(Ok(()))
    }

    /// Removes the id of a tag, as a part of another change, which waits for the announcement.
    async fn forgotten(&self, change: &Change<'_>, tag: &Key, until: Instant) -> Result<Answer, StoreError> {
        let forget = |within| Box::pin(self.counted(self.forget_id(change, tag, within))) as Reply<'_, _>;
        self.tried(tag, until, forget).await
    }

    /// Sends a kept invalidation, and waits until no process serves a copy of what it invalidates. It detaches no flights: they were
    /// detached when it was kept, and flights that began after that hold nothing that it invalidates.
    pub(super) async fn send_kept(&self, kept: &KeptInvalidation, until: Instant) -> Result<(), StoreError> {
        let (attempt, target) = (self.state.kept.next_attempt(), &kept.target);
        let change = self.change(target.name());
        let answer = self.confirmed(&change, target, until, None).await?;
        change.reaches_all(answer, until).await?;
        if self.settle(&target.name(), attempt) {
            self.state.count(GuardCount::invalidations_resent);
        }
        Ok(())
    }

    /// An attempt with this number was confirmed. Returns whether that settles a kept invalidation.
    pub(super) fn settle(&self, name: &ChangedName, attempt: u64) -> bool {
        let state = &self.state;
        let loads_end = |load_timeout: Duration| {
            let longest = load_timeout + LATEST;
            state.store.now().saturating_add(longest.as_millis().try_into().unwrap_or(u64::MAX))
        };
        state.kept.confirmed(name, attempt, loads_end)
    }

    fn forget_id<'a>(&'a self, change: &Change<'_>, tag: &'a Key, within: Duration) -> Reply<'a, Answer> {
        let (announcement, tags) = (change.attempt(), self.state.store.tags());
        let id = announcement.id;
        answered(self.state.local.attempt_sent(), id, async move {
            tags.forget_tag(tag, &announcement, within).await
        })
    }

    /// Begins a change: this process drops its copies, even if the store cannot be reached.
    fn change(&self, name: ChangedName) -> Change<'_> {
        self.state.local.forget(&name);
        self.state.local.change(name, self.policy.local_elsewhere)
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
}

/// The answer to one attempt at a change: the id of its announcement, and what became of that.
pub(super) type Answer = (Uuid, Announced);

fn answered<'a>(
    sent: SentAttempt<'a>,
    id: Uuid,
    step: impl Future<Output = Result<Announced, StoreError>> + Send + 'a,
) -> Reply<'a, Answer> {
    Box::pin(async move {
        let announced = step.await?;
        sent.answered();
        Ok((id, announced))
    })
}
