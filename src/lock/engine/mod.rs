//! The lock engine: waiting, holding and releasing, the same for mutexes and permits.

pub(super) mod acquisition;
pub(super) mod claim;
pub(super) mod hold;
pub(super) mod home;
pub(super) mod release;
pub(super) mod target;
pub(super) mod terms;
pub(super) mod wait;
