//! One attempt at a change: it is counted, and kept if it invalidates something, unless the store confirms it.

use std::sync::Arc;

use super::StampedeGuard;
use crate::error::Error;
use crate::guard_state::kept::KeptInvalidation;
use crate::key::Key;
use crate::observe::GuardCount;
use crate::store::{StoreError, StoreErrorKind};

/// A change on its way. It counts as not confirmed unless it succeeds: also if its caller, which may have a bound of its own, drops it.
pub(super) struct ChangeAttempt<'a> {
    guard: &'a StampedeGuard,
    key: &'a Key,
    is_tag: bool,
    number: u64,
    /// It is kept if it ends now.
    is_kept: bool,
    succeeded: bool,
}

impl<'a> ChangeAttempt<'a> {
    /// A change of this key's value.
    pub(super) fn of_value(guard: &'a StampedeGuard, key: &'a Key, invalidates: bool) -> Self {
        Self::new(guard, key, false, invalidates)
    }

    /// An invalidation of this tag.
    pub(super) fn of_tag(guard: &'a StampedeGuard, tag: &'a Key) -> Self {
        Self::new(guard, tag, true, true)
    }

    fn new(guard: &'a StampedeGuard, key: &'a Key, is_tag: bool, invalidates: bool) -> Self {
        let number = guard.state.kept.next_attempt();
        Self { guard, key, is_tag, number, is_kept: invalidates, succeeded: false }
    }

    /// The store has made the change, and no process serves an older copy: nothing is left to send.
    pub(super) fn made(&mut self) {
        self.is_kept = false;
        for name in self.names() {
            self.guard.settle(&name.name(), self.number);
        }
    }

    /// How the change ends for its caller.
    pub(super) fn succeeds(mut self, replicated: Result<(), Error>) -> Result<(), Error> {
        self.succeeded = replicated.is_ok();
        replicated
    }

    /// The error of a change that the store has refused or not confirmed.
    pub(super) fn unconfirmed(&self, what: &str, error: StoreError) -> Error {
        self.failed("not confirmed yet", what, error)
    }

    /// The error of a change that was made, and of which other processes could not be told.
    pub(super) fn unannounced(&self, what: &str, error: StoreError) -> Error {
        self.failed("not announced yet to the other processes", what, error)
    }

    fn failed(&self, how: &str, what: &str, error: StoreError) -> Error {
        if self.is_kept && error.kind != StoreErrorKind::Closed {
            let digest = self.key.digest();
            let text = format!(
                "{how}: {what} of key #{digest} failed. It is kept, and sent as soon as the store answers; until then this process \
                 serves nothing that it invalidates"
            );
            return Error::with_source(Error::kind_of(&error), text, Arc::new(error));
        }
        if error.is_final() {
            return Error::store(what, self.key, error);
        }
        Error::store(&format!("{}: {what}", how.replace(" yet", "")), self.key, error)
    }

    /// Keeps what it invalidates. The order is part of the proof: the name, the copies, the flights.
    fn keep(&self) {
        let state = &self.guard.state;
        for kept in self.names() {
            let name = kept.name();
            if state.kept.keep(kept) {
                state.count(GuardCount::invalidations_overflowed);
                state.local.forget_all();
                state.flights.detach_all();
            }
            state.local.forget(&name);
        }
        if self.is_tag {
            state.flights.detach_all();
        } else {
            state.detach_resource(self.key);
        }
        self.guard.send_kept_later();
    }

    /// What the change invalidates: the value and, over HTTP, the responses to requests with reports of proxies.
    fn names(&self) -> impl Iterator<Item = KeptInvalidation> {
        let Self { guard, key, is_tag, number: attempt, .. } = *self;
        let kept = |key, is_tag| KeptInvalidation { key, is_tag, attempt, policy: Arc::clone(&guard.policy) };
        let reports = if is_tag { None } else { key.of_reports(&guard.state.namespace) };
        [Some(kept(key.clone(), is_tag)), reports.map(|tag| kept(tag, true))].into_iter().flatten()
    }
}

impl Drop for ChangeAttempt<'_> {
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

impl StampedeGuard {
    /// Keeps an invalidation that is not even tried, because the store is known to be down.
    #[cfg(feature = "http")]
    pub(crate) fn forget_later(&self, key: &Key) {
        drop(ChangeAttempt::of_value(self, key, true));
    }
}
