//! Messages from the server to the nodes of this process: those of other nodes, and announcements of keys.

pub(crate) mod inbox;
pub(crate) mod keyspace;
pub(crate) mod message;
pub(crate) mod subscriber;
