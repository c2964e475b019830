//! Waiters in this process: how hints and grants reach them.

pub(crate) mod lease_waiters;
pub(crate) mod lock_waiters;
