//! Connected nodes for the lock tests. Other tests keep the machine busy, so that it stands still for a second or two at times, which says
//! nothing about a lock.

use std::time::{Duration, Instant};

use stampede_guard::lock::{LockError, Locks, Mutex, MutexGuard};

use crate::support::PATIENCE;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;

/// The limit for an event that must happen, however slowly.
pub(super) const SOON: Duration = Duration::from_secs(10);

/// The limit for an event that must not wait for the end of a TTL or a lease. Both are a minute by default, far above this limit.
pub(super) const AT_ONCE: Duration = Duration::from_secs(5);

/// What may be added to a TTL of three seconds. It is too short for the event to have waited for a second TTL.
pub(super) const A_MOMENT: Duration = Duration::from_millis(2_500);

/// How many times a call is repeated before its failure counts as permanent.
const TRIES: usize = 200;

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(super) fn unconnected(url: &str) -> Locks {
    let client = redis::Client::open(url).expect("an address");
    // On a busy machine a command may take longer than the default timeout.
    Locks::builder(client).command_timeout(SOON / 2).build().expect("valid")
}

/// Connects the node. On a busy machine an attempt may exceed its timeout, so it is repeated.
pub(super) async fn connect(locks: &Locks) {
    eventually("it connects", PATIENCE, async || locks.connect().await.is_ok()).await;
}

pub(super) async fn connected(url: &str) -> Locks {
    let locks = unconnected(url);
    connect(&locks).await;
    locks
}

/// A connected node with the documented minimal rights, subscribed to its grants.
pub(super) async fn node(server: &RedisServer) -> Locks {
    connected(&server.minimal_user()).await
}

/// Acquires the mutex.
pub(super) async fn locked(mutex: &Mutex) -> MutexGuard {
    for _ in 0..TRIES {
        match mutex.lock().await {
            // The grant arrived when most of its TTL had passed, and was released.
            Err(LockError::GrantedTooLate { elapsed, ttl }) if elapsed >= ttl / 2 => {}
            granted => return granted.expect("acquired"),
        }
    }
    panic!("each grant comes too late");
}

/// The error of acquiring a mutex that is held. If the server stalls for longer than the timeout, the error is a store error, and the call
/// is repeated.
pub(super) async fn refused(mutex: &Mutex) -> LockError {
    let mut refused = mutex.lock().await.expect_err("it is held");
    for _ in 0..3 {
        if refused.is_store() {
            refused = mutex.lock().await.expect_err("it is held");
        }
    }
    refused
}

/// Repeats the call until the store answers.
pub(super) async fn retried<T>(mut call: impl AsyncFnMut() -> Result<T, LockError>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        match call().await {
            Ok(value) => return value,
            Err(error) => assert!(error.is_store() && Instant::now() < until, "{error}"),
        }
        tokio::time::sleep(ms(20)).await;
    }
}
