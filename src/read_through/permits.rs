//! Permits for loads: a limit of concurrent loads of different keys in the whole fleet, fixed or adaptive.
//!
//! The lease limits the loads of one key to one; a thousand cold keys are still a thousand loads. Under
//! [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) or
//! [`adaptive_loads`](crate::PolicyBuilder::adaptive_loads) each load takes a permit of the namespace's semaphore first. A flight takes
//! the lease before the permit, and renews the lease while it waits for the permit: so only one flight per key waits for a permit, and
//! all others wait for the key.
//!
//! Loads wait in the [`LoadQueue`] of this process, which decides which of them gets a permit; [`collect`] takes the permits from the
//! store, in a task for each permit, which gives it back when its load has ended.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::error::{Error, ErrorKind, Failure};
use crate::guard_state::GuardState;
use crate::guard_state::turns::{Admission, Callers, GrantedPermit, LoadQueue, PermitRequest};
use crate::key::{CacheKey, Key};
use crate::lock::{LimitedLoad, LockError, Locks, Semaphore, Wait};
use crate::observe::{Count, GuardCount, log, warn_if};
use crate::policy::{LoadLimitSettings, OnOverload, OnStoreDown, Policy};

/// How long a fixed limit's semaphore outlives the last load.
const IDLE: Duration = Duration::from_secs(60);
/// How long an adaptive limit's semaphore outlives the last load. Longer than [`IDLE`], because a new one has to find its limit again.
const LEARNT_FOR: Duration = Duration::from_secs(600);

/// The result of asking for a permit.
pub(crate) enum Admitted {
    /// The load may begin, with a permit, or without one if the policy says so.
    Yes(Option<GrantedPermit>),
    /// The load may begin if it gets one of the process's slots for loads without the store.
    WithoutStore,
    /// All callers of the load have left.
    Left,
    No(Failure),
}

/// Waits for a permit of `limit`. Admits the load without a permit if the policy says so or if the store does not answer and the policy
/// fails open: the guard must not take the service down.
pub(crate) async fn admit(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    limit: &LoadLimitSettings,
    key: &Key,
    callers: Callers,
) -> Admitted {
    let queue = state.load_queues.of(&limit.name);
    let (ticket, admission) = queue.wait(callers);
    request_permits(state, policy, limit, &queue);
    // Even if `permit_timeout` is shorter, the wait has the time of one command: a permit may be free.
    let started = Instant::now();
    let admission = timeout(policy.permit_timeout.max(policy.command_timeout), admission).await;
    drop(ticket);
    policy.counters.record("stampede_guard_permit_wait_seconds", started.elapsed());
    match admission {
        Ok(Ok(Admission::Granted(permit))) => {
            state.logs.permit.is_over();
            Admitted::Yes(Some(permit))
        }
        // The guard is shut down: remaining loads run outside the protocol.
        Ok(Ok(Admission::Closed) | Err(_)) => Admitted::Yes(None),
        Ok(Ok(Admission::Left)) => {
            policy.count(Count::loads_left);
            Admitted::Left
        }
        Ok(Ok(Admission::Failed(error))) => {
            state.count(GuardCount::store_errors);
            log_uncapped(state, key, &error);
            match policy.on_store_down {
                OnStoreDown::FailOpen if limit.bounds.is_some() => Admitted::WithoutStore,
                OnStoreDown::FailOpen => Admitted::Yes(None),
                OnStoreDown::FailClosed => {
                    let text = format!("asking for a permit to load key #{} failed", key.digest());
                    Admitted::No(Failure::Guard(Error::with_source(ErrorKind::Store, text, error)))
                }
            }
        }
        Err(_) => {
            policy.count(Count::overloaded);
            match policy.on_overload {
                OnOverload::LoadAnyway => Admitted::Yes(None),
                OnOverload::Shed => {
                    Admitted::No(Failure::Guard(overloaded(key, limit, policy.permit_timeout)))
                }
            }
        }
    }
}

/// Whether a load would get its permit at once; true if the store does not answer.
pub(crate) async fn has_room(state: &Arc<GuardState>, policy: &Policy) -> bool {
    let Some(limit) = policy.load_limit() else { return true };
    if state.load_queues.of(&limit.name).waiting() > 0 {
        return false;
    }
    match semaphore(state, policy, &limit, None) {
        Ok(semaphore) => semaphore.available_permits().await.map_or(true, |free| free > 0),
        Err(_) => true,
    }
}

/// Whether a refresh in the background may queue for a permit. Each load in the queue renews its lease, so if a thousand entries become stale
/// at one moment, most of them wait unqueued, for a later request.
pub(crate) fn has_short_queue(state: &GuardState, policy: &Policy) -> bool {
    const MOST_WAITING: usize = 32;
    let limit = policy.load_limit();
    limit.is_none_or(|limit| state.load_queues.of(&limit.name).waiting() < MOST_WAITING)
}

/// Warns once per outage of the store that loads run without a permit.
pub(crate) fn log_uncapped(state: &GuardState, key: &Key, error: &dyn fmt::Display) {
    warn_if!(log::GUARD, state.logs.permit.goes_on(), ?key, %error, "loads are not limited: no permit can be asked for");
}

/// Starts as many requests for permits as the waiting loads need.
fn request_permits(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    limit: &LoadLimitSettings,
    queue: &Arc<LoadQueue>,
) {
    while let Some(request) = queue.request() {
        let queue = Arc::clone(queue);
        tokio::spawn(collect(Arc::clone(state), Arc::clone(policy), limit.clone(), queue, request));
    }
}

/// Takes a permit from the store, gives it to the load that is next, and gives it back when that load has ended.
async fn collect(
    state: Arc<GuardState>,
    policy: Arc<Policy>,
    limit: LoadLimitSettings,
    queue: Arc<LoadQueue>,
    mut request: PermitRequest,
) {
    // A shutdown waits until the permit is given back.
    let _running = state.background.enter();
    let end = Arc::<OnceLock<_>>::default();
    let load =
        limit.bounds.map(|bounds| LimitedLoad { bounds, end: Arc::clone(&end), queue: Arc::clone(&queue) });
    let acquired = match semaphore(&state, &policy, &limit, load) {
        Ok(semaphore) => tokio::select! {
            biased;
            acquired = semaphore.acquire_unless_down(Wait::Forever) => acquired,
            () = request.unneeded() => return,
        },
        Err(error) => Err(error),
    };
    match acquired {
        Ok(Some(mut permit)) => {
            let load = request.grant();
            request_permits(&state, &policy, &limit, &queue);
            if let Some(load) = load
                && let Some(ended) = load.ended().await
            {
                let _ = end.set(ended);
            }
            // If this fails, dropping the permit tries again.
            let _ = permit.release().await;
        }
        Err(LockError::Closed) | Ok(None) => request.refuse(|| Admission::Closed),
        Err(error) => {
            let error = Arc::new(error);
            request.refuse(|| Admission::Failed(Arc::clone(&error) as Arc<_>));
        }
    }
}

/// Makes a new handle for each load: a handle stored in the guard state would keep that alive. Each limit has its own semaphore.
fn semaphore(
    state: &Arc<GuardState>,
    policy: &Policy,
    limit: &LoadLimitSettings,
    load: Option<LimitedLoad>,
) -> Result<Semaphore, LockError> {
    let idle = if limit.bounds.is_some() { LEARNT_FOR } else { IDLE };
    let builder = Locks::with_timeout(state, policy.command_timeout)
        .semaphore(CacheKey::reserved(&limit.name), limit.start)
        .lease(policy.lease)
        .idle_ttl(idle)
        .auto_renew(true);
    match load {
        Some(load) => builder.for_load(load).build(),
        None => builder.build(),
    }
}

fn overloaded(key: &Key, limit: &LoadLimitSettings, waited: Duration) -> Error {
    let digest = key.digest();
    let text = format!(
        "the loads that {} allows ran while key #{digest} waited permit_timeout ({waited:?})",
        limit.text()
    );
    Error::new(ErrorKind::Overloaded, text)
}
