//! The nodes of a cluster: the client's addresses, how to connect to each node, and which node has which slot.

pub(crate) mod nodes;
pub(crate) mod slots;
