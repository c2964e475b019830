//! Which of the callers that want a mutex has it next.

use std::time::Duration;

use super::LockError;

/// Which of the callers that want a mutex has it next.
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
    /// The one that has waited for longest: the unlocking script hands the mutex to the head of the queue. No other caller
    /// has it before.
    #[default]
    Fifo,
    /// The one that asks first, until the head of the queue has waited for this bound, at most a day; then the head, as with
    /// `Fifo`. As `parking_lot` has it: while a caller that unlocks and locks again need not wait for another process to
    /// wake up, more is done, and no caller waits for longer than the bound and a turn of each caller before it.
    ///
    /// An unlocked mutex is left free, and the head of the queue is told, which asks for it. If it comes too late, it keeps its
    /// place and is told again; that counts as one of its [attempts](super::Held::attempts) and retries. No caller polls.
    /// [`bump`](super::MutexGuard::bump) hands the mutex over in the queue's order also here.
    ///
    /// Callers of one mutex may differ in this: one with `Fifo` is handed the mutex as soon as it is the head of the queue, but
    /// may be overtaken by one with `Eventual` where a holder's time to live has run out.
    Eventual(Duration),
}

impl Fairness {
    /// Refuses a bound that is none.
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
