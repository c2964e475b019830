//! Values: the stored entry, how long it may be served, its tags and encoding, and the outcome of a flight.

pub(crate) mod codec;
pub(crate) mod entry;
pub(crate) mod freshness;
#[cfg(feature = "lz4")]
pub(crate) mod lz4;
#[cfg(not(feature = "lz4"))]
#[path = "no_lz4.rs"]
pub(crate) mod lz4;
pub(crate) mod outcome;
pub(crate) mod reader;
pub(crate) mod stored;
pub(crate) mod tags;
