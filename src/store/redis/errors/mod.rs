//! Errors of servers and connections: what they mean for a command, and what an operator is told.

pub(crate) mod advice;
pub(crate) mod classify;
pub(crate) mod outage_log;
pub(crate) mod reply;
#[cfg(feature = "sentinel")]
pub(crate) mod sentinel;
