//! The store on a Redis server: plain GETs, scripts, one channel per node.
//!
//! Two connections per node, both opened when they are first needed: [`connection`] carries
//! commands, [`inbox`] brings messages. Keys of one resource share a slot:
//!
//! | key | holds |
//! |---|---|
//! | `sg1:e:{name}` | the entry |
//! | `sg1:l:{name}` | the lease: its holder's token |
//! | `sg1:q:{name}` | the queue: tokens of the waiters, first come first, and fences between waves (`wake.lua`) |
//! | `sg1:t:{name}` | the id of a tag |
//! | `sg1:w:{name}:..` | nothing: what is waited for where replicas are to have a change |
//! | `sg1:o:{name}` | the last outcome: its holder's token, until when newcomers get it, what it was |
//!
//! Locks have keys of their own, named in [`locks`]. Messages go to `sg1:i:<node>`: [`message`].

#[cfg(feature = "cluster")]
mod cluster;
#[cfg(not(feature = "cluster"))]
#[path = "no_cluster.rs"]
mod cluster;
mod commands;
mod connection;
#[cfg(test)]
mod crowd_tests;
mod doctor;
mod errors;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzed;
mod leases;
mod locks;
mod messages;
mod redis_store;
mod scripts;
mod tags;
mod topology;

#[cfg(all(test, feature = "cluster"))]
pub(in crate::store) use cluster::slot_of;
pub(crate) use redis_store::RedisStore;
