//! The store on a Redis server: plain GETs, scripts, one Pub/Sub channel per node.
//!
//! The nodes of one backend share two connections, each opened when it is first needed: [`connection`] carries
//! commands, [`subscriber`] receives messages. Keys of one resource share a slot:
//!
//! | key | holds |
//! |---|---|
//! | `sg1:e:{name}` | the entry |
//! | `sg1:l:{name}` | the lease: its holder's token |
//! | `sg1:q:{name}` | the queue: tokens of the waiters in the order in which they came, and fences (`wake.lua`) |
//! | `sg1:t:{name}` | the id of a tag |
//! | `sg1:w:{name}:..` | an empty mark, written and removed to wait for replicas |
//! | `sg1:c:{name}:<node>` | the number of the node's latest attempt at a change that voids its earlier attempts (`attempt.lua`) |
//! | `sg1:o:{name}` | the last outcome: the lease holder's token, how long later callers may read it, the payload |
//! | `sg1:n:{namespace:}` | the registry of a volume: its id, its members (`volume.lua`) |
//! | `sg1:a:{namespace:}` | the log of its announcements |
//!
//! The keys of locks are listed in [`contract`]. Messages go to `sg1:i:<node>`: [`inbox`].
//! Channels with several listeners have names of the same form.

mod channels;
#[cfg(feature = "cluster")]
mod cluster;
mod commands;
mod connection;
mod contract;
#[cfg(test)]
#[path = "../../../tests/unit/store/redis/crowd_tests.rs"]
mod crowd_tests;
mod doctor;
mod endpoint;
mod errors;
#[cfg(any(test, fuzzing))]
#[path = "../../../tests/unit/store/redis/fuzzed.rs"]
pub(crate) mod fuzzed;
mod inbox;
mod keyspace;
pub(crate) mod login;
mod redis_store;
mod scripts;
#[cfg(feature = "sentinel")]
mod sentinel;
mod subscriber;

#[cfg(all(test, feature = "cluster"))]
pub(in crate::store) use cluster::slots::slot_of;
pub(crate) use contract::Write;
pub(crate) use login::Login;
pub(crate) use redis_store::{Connections, RedisServers, RedisStore};
#[cfg(feature = "sentinel")]
pub(crate) use sentinel::SentinelClients;
