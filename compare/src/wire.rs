//! The protocol between the harness and a replica: one JSON object per line, over the replica's stdin and stdout.
//!
//! `python/replica.py` and `node/replica.mjs` speak the same. The harness sends [`Setup`], the replica answers [`Ready`], then commands
//! follow. Each has an id, and commands run side by side.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The first line to a replica.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Which library, as `subjects::rust`, `python/subjects` or `node/subjects` know it.
    pub(crate) subject: String,
    pub(crate) redis: String,
    /// The port of the origin.
    pub(crate) origin: u16,
    pub(crate) ttl_ms: u64,
    /// How long a value is served after that while it is loaded anew; zero for no stale window.
    pub(crate) stale_ms: u64,
    /// Whether the origin's answers say that they may not be stored.
    pub(crate) uncacheable: bool,
}

/// A replica that is set up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Names and versions of what was compared.
    pub(crate) version: String,
    /// Scenario features that the library lacks, each with the reason that the table gives.
    pub(crate) lacks: BTreeMap<String, String>,
}

/// One line to a replica that is set up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) id: u64,
    #[serde(flatten)]
    pub(crate) command: Command,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(crate) enum Command {
    /// So many callers at once, at a moment of the wall clock. Caller `n` asks for key `n % keys`.
    Burst {
        keys: Vec<String>,
        callers: usize,
        at_ms: f64,
        timeout_ms: u64,
        /// The first caller begins 20 ms earlier and goes away after this time.
        cancel_first_after_ms: Option<u64>,
    },
    /// Callers at a constant rate, whether or not earlier ones have been answered.
    Rate { key: String, per_second: u64, seconds: f64, at_ms: f64, timeout_ms: u64 },
    /// Removes a key, as the library does.
    Invalidate { key: String },
    /// Loads `<prefix><n>` for each n, 64 callers at a time.
    Fill { prefix: String, keys: usize },
    /// Callers that ask again and again for keys that were filled.
    Hits { prefix: String, keys: usize, callers: usize, ms: u64 },
}

/// One call of a burst or of a rate: microseconds from the moment at which it was due, then its duration, then what it returned:
/// `=` and the id of the value, or `!` and the text of the error.
pub(crate) type Call = (i64, u64, String);

/// The answer to an order; the fields that its command has.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Reply {
    pub(crate) id: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) calls: Vec<Call>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hits: Option<Hits>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hits {
    pub(crate) per_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Calls that returned anything but the value.
    pub(crate) wrong: u64,
}

/// The id of a value that the origin made: what stands before its padding.
pub(crate) fn value_id(value: &[u8]) -> String {
    let end = value.iter().position(|&byte| byte == b'.').unwrap_or(value.len().min(40));
    String::from_utf8_lossy(&value[..end]).into_owned()
}
