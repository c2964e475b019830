//! What the connection knows of a node.

/// The part of a node that its messages are for.
pub(in crate::store::redis::messages) trait Recipient: Send + Sync {
    /// Changes the status, under the subscriber's lock. Returns whether it is another one; `Closed` stays.
    fn set(&self, status: InboxStatus) -> bool;

    /// Whether the status is `Closed`.
    fn has_ended(&self) -> bool;

    /// Takes a message.
    fn deliver(&self, payload: &[u8]);

    /// Messages were lost or will be: wakes each waiter for a lease and the first waiter of each lock.
    fn tell_missed(&self);

    /// Asks the server in a background task which other waiters of locks have missed a message. The status is a new one.
    fn look_for_losses(&self, status: InboxStatus);
}

/// Whether a node's messages arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::redis::messages) enum InboxStatus {
    /// No subscription, or not yet.
    Shut,
    /// The subscription was confirmed, and every ping since then was answered in time.
    Confirmed,
    /// The server does not allow it.
    Refused,
    /// The node has ended.
    Closed,
}
