//! Nodes for the tests of the locks, on a machine that is busy with other tests: at times it stands still for a second
//! or two, and that says nothing about a lock.

use std::time::{Duration, Instant};

use stampede_guard::lock::{LockError, Locks, Mutex, MutexGuard};

use crate::support::PATIENCE;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;

/// What must happen, but not at any particular speed.
pub(super) const SOON: Duration = Duration::from_secs(10);

/// What must happen without anyone waiting for a time to live or a lease to end. Those are a minute where nothing is
/// said, and this is far from it.
pub(super) const AT_ONCE: Duration = Duration::from_secs(5);

/// The same, beside a time to live of three seconds: one is waited for, and not two.
pub(super) const A_MOMENT: Duration = Duration::from_millis(2_500);

/// How often a call is made again. What is wrong for good ends there.
const TRIES: usize = 200;

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(super) fn unconnected(url: &str) -> Locks {
    let client = redis::Client::open(url).expect("an address");
    // A command may take longer than it should.
    Locks::builder(client).command_timeout(SOON / 2).build().expect("valid")
}

/// Connects them: an attempt may take longer than it may.
pub(super) async fn connect(locks: &Locks) {
    eventually("it connects", PATIENCE, async || locks.connect().await.is_ok()).await;
}

pub(super) async fn connected(url: &str) -> Locks {
    let locks = unconnected(url);
    connect(&locks).await;
    locks
}

/// A connected node with the documented minimal rights, which hears its grants.
pub(super) async fn node(server: &RedisServer) -> Locks {
    connected(&server.minimal_user()).await
}

/// Acquires it.
pub(super) async fn locked(mutex: &Mutex) -> MutexGuard {
    for _ in 0..TRIES {
        match mutex.lock().await {
            // It came when its time was as good as over, and was given back.
            Err(LockError::GrantedTooLate { elapsed, ttl }) if elapsed >= ttl / 2 => {}
            granted => return granted.expect("acquired"),
        }
    }
    panic!("each grant comes too late");
}

/// What whoever waits for it is told, whose time may be too short for a server that paused: that is an error of the
/// store, and asked again.
pub(super) async fn refused(mutex: &Mutex) -> LockError {
    let mut refused = mutex.lock().await.expect_err("it is held");
    for _ in 0..3 {
        if refused.is_store() {
            refused = mutex.lock().await.expect_err("it is held");
        }
    }
    refused
}

/// Until the store is there again.
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
