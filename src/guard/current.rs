//! The policy of a running guard, which [`StampedeGuard::set_policy`] replaces.
//!
//! A handle knows the policy that it was made with, and its version. All its clones share a slot for the newest one: each call compares the
//! versions, and looks for a newer policy only if they differ. So a call has one policy from its first step to its last.

use std::ops::Deref;
use std::sync::Arc;

use super::StampedeGuard;
use crate::error::Error;
use crate::key::CacheKey;
use crate::policy::Policy;
use crate::read_through::local::hit_at_once;
use crate::value::reader::EntryReader;

/// A handle that knows the newest policy, for one call.
pub(crate) enum Current<'a> {
    Same(&'a StampedeGuard),
    Newer(StampedeGuard),
}

impl Current<'_> {
    /// The handle itself, or a clone.
    pub(crate) fn into_owned(self) -> StampedeGuard {
        match self {
            Self::Same(guard) => guard.clone(),
            Self::Newer(guard) => guard,
        }
    }
}

impl Deref for Current<'_> {
    type Target = StampedeGuard;

    #[inline]
    fn deref(&self) -> &StampedeGuard {
        match self {
            Self::Same(guard) => guard,
            Self::Newer(guard) => guard,
        }
    }
}

impl StampedeGuard {
    /// The version of the newest policy, if the handle has an older one.
    #[inline]
    fn newer_version(&self) -> Option<u64> {
        let version = self.state.version();
        (version != self.version).then_some(version)
    }

    /// This handle, or one that knows the newest policy: a call uses it for all its steps.
    #[inline]
    pub(crate) fn current(&self) -> Current<'_> {
        match self.newer_version() {
            None => Current::Same(self),
            Some(version) => Current::Newer(self.renewed(version)),
        }
    }

    #[inline(never)]
    fn renewed(&self, version: u64) -> Self {
        let found = self.state.find(version);
        let (state, policy) = (Arc::clone(&self.state), Arc::clone(&found.policy));
        found.remember();
        Self { state, policy, version, route: self.route.clone() }
    }

    /// A hit from memory, before anything else is done; or whether a later hit is to be audited.
    #[inline]
    pub(super) fn hit_at_once<R: EntryReader>(&self, key: &CacheKey, reader: &R) -> Result<R::Value, bool> {
        let Some(version) = self.newer_version() else { return self.hit_under(&self.policy, key, reader) };
        let found = self.state.find(version);
        let hit = self.hit_under(&found.policy, key, reader);
        found.remember();
        hit
    }

    #[inline]
    fn hit_under<R: EntryReader>(
        &self,
        policy: &Policy,
        key: &CacheKey,
        reader: &R,
    ) -> Result<R::Value, bool> {
        let audits = policy.audit.draws();
        let hit = if audits { None } else { hit_at_once(&self.state, policy, key, reader) };
        hit.ok_or(audits)
    }

    /// Gives this guard another policy while it runs: this handle, all its clones, and the layers and services that were made of
    /// them. Each call that begins later has it; calls and loads that run end with the policy that they began with, except that
    /// [`warm`](Self::warm) takes the newest for each group. Handles that [`with_policy`](Self::with_policy) has made keep theirs:
    /// each of them can be set by itself.
    ///
    /// What is stored keeps the lifetimes and tags that it was stored with. A new
    /// [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) is another queue: until the loads of the old one have
    /// ended, both may run. The connections keep the `command_timeout` after which they are opened anew, as with `with_policy`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`](crate::ErrorKind::InvalidPolicy), and the policy stays, if a setting differs that cannot change
    /// at run time: `name`, under which counters count; `codec`; over HTTP what makes the keys (the kind of the policy, `scheme`,
    /// `authority`, `behind_proxy`, and in a private cache the credentials), because invalidations would miss what is stored under
    /// the old ones. Likewise if a function or type is missing (`audit_by`, `share_errors`, `key`, `personal_extension`), or if such
    /// a function is new: a policy that was read from a file has none.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let layer = guard.clone();
    /// let brief = guard.policy().to_builder().fresh_for(Duration::from_secs(5)).build()?;
    /// guard.set_policy(brief.clone())?;
    /// assert_eq!(*layer.policy(), brief);
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    pub fn set_policy(&self, policy: Policy) -> Result<(), Error> {
        self.state.replace(policy)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/guard/current_tests.rs"]
mod tests;
