//! The locks on a memory store, with a paused clock, so that times are exact.

mod api;
mod bump;
mod closing;
mod doubts;
mod faults;
mod faulty;
mod held;
mod mutex;
mod options;
mod semaphore;
mod silent;
mod waiting;
mod watching;

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::{Locks, Mutex, MutexBuilder, MutexGuard};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A handle on the mutex that all tests here use.
fn mutex(locks: &Locks) -> Mutex {
    with(locks, |builder| builder)
}

fn with(locks: &Locks, set: impl FnOnce(MutexBuilder) -> MutexBuilder) -> Mutex {
    set(locks.mutex("door")).build().expect("valid")
}

async fn locked(mutex: &Mutex) -> MutexGuard {
    mutex.lock().await.expect("free, or about to be")
}

/// Runs all tasks that can run: spawned tasks, tasks in the background, and woken ones.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// Starts a task that has to wait, and runs it until it waits.
async fn waiting<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    let task = tokio::spawn(work);
    settle().await;
    assert!(!task.is_finished(), "it has to wait");
    task
}

/// How long a future takes on the paused clock, and its result.
async fn timed<T>(work: impl Future<Output = T>) -> (Duration, T) {
    let started = Instant::now();
    let value = work.await;
    (started.elapsed(), value)
}

/// Lets this much time pass, and runs all tasks that it wakes.
async fn pass(duration: Duration) {
    sleep(duration).await;
    settle().await;
}
