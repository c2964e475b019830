//! Where servers are: one address, the primary that sentinels name, the nodes and slots of a cluster.

#[cfg(feature = "cluster")]
pub(crate) mod cluster_nodes;
#[cfg(feature = "cluster")]
pub(crate) mod connection_info;
#[cfg(feature = "sentinel")]
pub(crate) mod sentinel;
pub(crate) mod server;
#[cfg(feature = "cluster")]
pub(crate) mod slots;
