//! The operations of a client on any of the compared locks.

/// A client of a lock.
pub(crate) trait Lock {
    /// Waits for the lock and returns the number of tries.
    async fn acquire(&mut self) -> u32;

    /// Releases the lock and returns whether it was still held.
    async fn release(&mut self) -> bool;

    /// Ends the measurement: a client that would release the lock with its next acquire releases it now.
    async fn leave(&mut self) {}
}
