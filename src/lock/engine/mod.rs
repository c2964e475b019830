//! The lock engine: waiting, holding and releasing, the same for mutexes and permits.

pub(super) mod acquisition;
pub(super) mod claim;
pub(super) mod hold;
pub(super) mod registry;
pub(super) mod release;
pub(super) mod target;
pub(super) mod wait;
pub(super) mod wait_terms;
