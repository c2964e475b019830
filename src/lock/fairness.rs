//! [`Fairness`]: which waiter gets a mutex next.

use std::time::Duration;

use super::LockError;

/// Which of the callers that want a mutex gets it next.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_guard::lock::{Fairness, Locks};
///
/// let locks = Locks::in_memory();
/// let counter = locks.mutex("counter").fairness(Fairness::Eventual(Duration::from_millis(1))).build()?;
/// for _ in 0..3 {
///     let mut guard = counter.lock().await?;
///     assert!(guard.unlock().await?);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fairness {
    /// The caller that has waited longest: the unlocking script hands the mutex to the head of the queue. No other
    /// caller gets it before.
    #[default]
    Fifo,
    /// The caller that asks first, until the head of the queue has waited for this bound, at most a day; then the
    /// head, as with `Fifo`. `parking_lot` does the same. A caller that unlocks and locks again need not wait for
    /// another process to wake up, so throughput is higher. No caller waits longer than the bound plus one turn of
    /// each caller before it.
    ///
    /// Unlocking leaves the mutex free and tells the head of the queue, which then asks for it. If the head comes
    /// too late, it keeps its place and is told again; that counts as one of its [attempts](super::Held::attempts)
    /// and retries. No caller polls. [`bump`](super::MutexGuard::bump) hands the mutex over in the queue's order
    /// here too.
    ///
    /// Callers of one mutex may differ in this setting: a caller with `Fifo` is handed the mutex as soon as it is
    /// the head of the queue, but may be overtaken by one with `Eventual` when a holder's time to live has run out.
    Eventual(Duration),
}

impl Fairness {
    /// Refuses a bound of zero or of more than a day.
    pub(super) fn check(self) -> Result<(), LockError> {
        const MOST: Duration = Duration::from_secs(86_400);
        match self {
            Self::Eventual(bound) if bound.is_zero() || bound > MOST => {
                let why =
                    format!("a bound of {bound:?}: choose more than zero and at most {MOST:?}, or Fifo");
                Err(LockError::option("fairness", why))
            }
            _ => Ok(()),
        }
    }
}
