//! What the server tells this node: messages of other nodes, and announcements of keys.

pub(crate) mod inbox;
pub(crate) mod keyspace;
pub(crate) mod message;
