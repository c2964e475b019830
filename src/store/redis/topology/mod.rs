//! Where servers are: one address, the primary that sentinels name, the nodes and slots of a cluster.

#[cfg(feature = "cluster")]
pub(crate) mod cluster;
pub(crate) mod endpoint;
#[cfg(feature = "sentinel")]
pub(crate) mod sentinel;
