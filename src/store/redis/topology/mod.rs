//! Where servers are: one address, the primary that sentinels name, the nodes and slots of a cluster.

#[cfg(feature = "cluster")]
pub(crate) mod cluster_endpoint;
#[cfg(feature = "cluster")]
pub(crate) mod cluster_info;
#[cfg(feature = "cluster")]
pub(crate) mod cluster_nodes;
pub(crate) mod endpoint;
#[cfg(feature = "sentinel")]
pub(crate) mod sentinel;
pub(crate) mod server;
pub(crate) mod single;
#[cfg(feature = "cluster")]
pub(crate) mod slots;
