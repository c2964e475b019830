//! One attempt at a change: it is counted, and kept if it invalidates something, unless the store confirms it.

use std::sync::Arc;

use super::StampedeGuard;
use crate::error::{Error, InvalidationTarget};
use crate::guard_state::kept::{ChangeTarget, KeptInvalidation};
use crate::key::Key;
use crate::observe::GuardCount;
use crate::store::{StoreError, StoreErrorKind};

/// A change on its way. It counts as not confirmed unless it succeeds: also if its caller, which may have a bound of its own, drops it.
pub(super) struct ChangeAttempt {
    pub(super) guard: StampedeGuard,
    pub(super) target: ChangeTarget,
    /// The name of the operation in errors.
    pub(super) what: &'static str,
    number: u64,
    /// It is kept if it ends now.
    is_kept: bool,
    succeeded: bool,
}

impl ChangeAttempt {
    /// An invalidation of the target. This process drops its copies and detaches its flights at once, independent of the store.
    pub(super) fn invalidation(guard: &StampedeGuard, target: ChangeTarget) -> Self {
        let what = if target.is_tag { "the invalidation by the tag" } else { "the invalidation" };
        let attempt = Self::new(guard, target, what, true);
        attempt.drop_copies();
        attempt.detach_flights();
        attempt
    }

    /// Another change of this key's value, which is kept as an invalidation if it `invalidates`.
    pub(super) fn of_value(guard: &StampedeGuard, key: &Key, what: &'static str, invalidates: bool) -> Self {
        Self::new(guard, ChangeTarget::value(key.clone()), what, invalidates)
    }

    fn new(guard: &StampedeGuard, target: ChangeTarget, what: &'static str, is_kept: bool) -> Self {
        let number = guard.state.kept.next_attempt();
        Self { guard: guard.clone(), target, what, number, is_kept, succeeded: false }
    }

    /// Whether the target's server is known to be down. In a cluster each key may be on another one.
    pub(super) fn is_unreachable(&self) -> bool {
        self.guard.state.store.is_down(self.target.key.name())
    }

    /// The store has made the change, and no process serves an older copy: nothing is left to send.
    pub(super) fn made(&mut self) {
        self.is_kept = false;
        for target in self.targets() {
            self.guard.settle(&target.name(), self.number);
        }
    }

    /// How the change ends for its caller.
    pub(super) fn succeeds(mut self, replicated: Result<(), Error>) -> Result<(), Error> {
        self.succeeded = replicated.is_ok();
        replicated
    }

    /// The error of a change that the store has refused or not confirmed.
    pub(super) fn unconfirmed(&self, error: StoreError) -> Error {
        self.failed("not confirmed yet", error)
    }

    /// The error of a change that was made, and of which other processes could not be told.
    pub(super) fn unannounced(&self, error: StoreError) -> Error {
        self.failed("not announced yet to the other processes", error)
    }

    fn failed(&self, how: &str, error: StoreError) -> Error {
        let Self { guard, target: ChangeTarget { key, is_tag }, what, .. } = self;
        if !self.is_kept {
            return match error.is_final() {
                true => Error::store(what, key, error),
                false => Error::store(&format!("{}: {what}", how.replace(" yet", "")), key, error),
            };
        }
        let target = match (key.cache_key(&guard.state.namespace), is_tag) {
            (key, false) => InvalidationTarget::Key(key),
            (tag, true) => InvalidationTarget::Tag(tag),
        };
        if error.kind == StoreErrorKind::Closed {
            return Error::store(what, key, error).with_unconfirmed(vec![target]);
        }
        let digest = key.digest();
        let text = format!(
            "{how}: {what} of key #{digest} failed. It is kept, and sent as soon as the store answers; until then this process \
             serves nothing that it invalidates"
        );
        Error::with_source(Error::kind_of(&error), text, Arc::new(error)).with_unconfirmed(vec![target])
    }

    /// Keeps what it invalidates. The order is part of the proof: the name, the copies, the flights.
    fn keep(&self) {
        let (state, policy) = (&self.guard.state, &self.guard.policy);
        for target in self.targets() {
            let kept = KeptInvalidation { target, attempt: self.number, policy: Arc::clone(policy) };
            if state.kept.keep(kept) {
                state.count(GuardCount::invalidations_overflowed);
                state.local.forget_all();
                state.flights.detach_all();
            }
        }
        self.drop_copies();
        self.detach_flights();
        self.guard.send_kept_later();
    }

    fn drop_copies(&self) {
        for target in self.targets() {
            self.guard.state.local.forget(&target.name());
        }
    }

    pub(super) fn detach_flights(&self) {
        let (state, ChangeTarget { key, is_tag }) = (&self.guard.state, &self.target);
        match is_tag {
            true if key.is_path() => state.detach_path(key),
            // A loader sets tags until its load ends, so any flight may have the tag: detach all, and later callers begin new ones.
            true => state.flights.detach_all(),
            false => state.detach_resource(key),
        }
    }

    /// What the change invalidates: the target and, for an HTTP resource, the responses to requests with reports of proxies.
    fn targets(&self) -> impl Iterator<Item = ChangeTarget> {
        [self.of_reports(), Some(self.target.clone())].into_iter().flatten()
    }

    /// The tag of the responses to requests with reports of proxies, if the target is an HTTP resource.
    pub(super) fn of_reports(&self) -> Option<ChangeTarget> {
        let ChangeTarget { key, is_tag } = &self.target;
        let reports = (!is_tag).then(|| key.of_reports(&self.guard.state.namespace)).flatten();
        reports.map(ChangeTarget::tag)
    }
}

impl Drop for ChangeAttempt {
    fn drop(&mut self) {
        if self.succeeded {
            return;
        }
        self.guard.state.count(GuardCount::invalidations_unconfirmed);
        if self.is_kept {
            self.keep();
        }
    }
}
