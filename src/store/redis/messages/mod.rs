//! Messages from the server to this node: those of other nodes, and announcements of keys.

pub(crate) mod inbox;
pub(crate) mod keyspace;
pub(crate) mod message;
