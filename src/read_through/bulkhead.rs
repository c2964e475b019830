//! A fleet-wide cap on concurrent loads of different keys: a fair queue in front of the origin.
//!
//! The lease makes one load of one key; a thousand cold keys are still a thousand loads. With
//! [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) each load takes a permit of the namespace's
//! semaphore first. A flight takes the lease before the permit, and renews the lease while it waits for the permit: so
//! only one flight per key waits for a permit, and all others wait for the key.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Failure};
use crate::guard_state::GuardState;
use crate::key::{CacheKey, Key};
use crate::lock::{LockError, Locks, Permit, Semaphore, Wait};
use crate::observe::{Count, GuardCount, log, warn_if};
use crate::policy::{OnOverload, OnStoreDown, Policy};

/// How long the semaphore outlives the last load.
const IDLE: Duration = Duration::from_secs(60);

/// Waits for one of `limit` permits to load. Returns `None`, which admits the load without a permit, if the policy says so
/// or if the store cannot be asked and the policy fails open: the guard must not take the service down.
pub(crate) async fn admit(
    state: &Arc<GuardState>,
    policy: &Policy,
    limit: u32,
    key: &Key,
) -> Result<Option<Permit>, Failure> {
    let admitted = match semaphore(state, policy, limit) {
        Ok(semaphore) => semaphore.acquire_unless_down(Wait::For(policy.permit_timeout)).await,
        Err(error) => Err(error),
    };
    match admitted {
        Ok(Some(permit)) => {
            state.permit_log.is_over();
            Ok(Some(permit))
        }
        // The guard is shut down: remaining loads run outside the protocol.
        Err(LockError::Closed) => Ok(None),
        Ok(None) => {
            policy.count(Count::overloaded);
            match policy.on_overload {
                OnOverload::LoadAnyway => Ok(None),
                OnOverload::Shed => Err(Failure::Guard(overloaded(key, limit, policy.permit_timeout))),
            }
        }
        Err(error) => {
            state.count(GuardCount::store_errors);
            tell_uncapped(state, key, &error);
            match policy.on_store_down {
                OnStoreDown::FailOpen => Ok(None),
                OnStoreDown::FailClosed => {
                    let text = format!("asking for a permit to load key #{} failed", key.digest());
                    let error = Error::with_source(ErrorKind::Store, text, Arc::new(error));
                    Err(Failure::Guard(error))
                }
            }
        }
    }
}

/// Whether a load would have its permit at once, as far as the store can be asked.
pub(crate) async fn has_room(state: &Arc<GuardState>, policy: &Policy) -> bool {
    let Some(limit) = policy.max_concurrent_loads else { return true };
    match semaphore(state, policy, limit) {
        Ok(semaphore) => semaphore.available_permits().await.map_or(true, |free| free > 0),
        Err(_) => true,
    }
}

/// A new handle for each load: stored in the node it would keep the node alive. Each limit has its own semaphore.
fn semaphore(state: &Arc<GuardState>, policy: &Policy, limit: u32) -> Result<Semaphore, LockError> {
    Locks::with_timeout(state, policy.command_timeout)
        .semaphore(CacheKey::reserved(&format!("loads:{limit}")), limit)
        .lease(policy.lease)
        .idle_ttl(IDLE)
        .auto_renew(true)
        .build()
}

/// Warns once per outage of the store that loads run without a permit.
pub(crate) fn tell_uncapped(state: &GuardState, key: &Key, error: &dyn fmt::Display) {
    warn_if!(log::GUARD, state.permit_log.goes_on(), ?key, %error, "max_concurrent_loads is not kept: no permit can be asked for");
}

fn overloaded(key: &Key, limit: u32, waited: Duration) -> Error {
    let digest = key.digest();
    let text = format!(
        "max_concurrent_loads ({limit}) other loads ran while key #{digest} waited permit_timeout ({waited:?})"
    );
    Error::new(ErrorKind::Overloaded, text)
}
