//! The nodes of a cluster: what the client was given, how each is connected to, and which of them has which slot.

pub(crate) mod nodes;
pub(crate) mod slots;
