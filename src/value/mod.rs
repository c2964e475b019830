//! Values: the stored entry, how long it may be served, its tags and encoding, and the outcome of a flight.

pub(crate) mod codec;
pub(crate) mod entry;
pub(crate) mod freshness;
pub(crate) mod outcome;
pub(crate) mod reader;
pub(crate) mod stored;
pub(crate) mod tags;
