//! The local tier: copies of values in this process's memory, under a volume lease.
//!
//! A node serves a copy only under its *right*, a moment of its own monotonic clock that RENEW alone moves. A change is announced to all
//! nodes that may have a right, and is acknowledged to its caller when each of them has dropped its copies or must have lost its
//! right. No step needs a message to arrive; messages only make it fast. DESIGN.md ("The local tier") has the steps and the proof.
//!
//! Every guard announces its changes, also one that keeps no copies.

mod announcing;
mod births;
#[cfg(feature = "local")]
mod copies;
#[cfg(not(feature = "local"))]
#[path = "no_copies.rs"]
mod copies;
mod copy;
mod pending;
mod renewal;
mod right;
mod tickets;
mod tier;

pub(crate) use announcing::Change;
pub(crate) use copy::LocalCopy;
pub(crate) use tickets::Ticket;
pub(crate) use tier::{DEFAULT_CAPACITY, DEFAULT_TERM, LocalTier};
