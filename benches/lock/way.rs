//! The operations of a client on any of the compared locks.

/// A client of one of the locks.
pub(crate) trait Lock {
    /// Waits for the lock. Returns how many tries that took.
    async fn acquire(&mut self) -> u32;

    /// Releases the lock. Returns whether it was still held.
    async fn release(&mut self) -> bool;

    /// Called at the end of the measurement: a client that would only release the lock with its next acquire releases it now.
    async fn leave(&mut self) {}
}
