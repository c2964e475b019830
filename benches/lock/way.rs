//! What a client does with a lock, whichever it is.

/// A client's way to a lock.
pub(crate) trait Lock {
    /// Waits for the lock; how often the server was asked for it.
    async fn acquire(&mut self) -> u32;

    /// Whether it was still held.
    async fn release(&mut self) -> bool;

    /// Asks no more: a client that gives the lock back with its next question does it now.
    async fn leave(&mut self) {}
}
