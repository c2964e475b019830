//! Measures what the guard's own work costs, without a network: making keys, and hits on the in-memory store.
//!
//! ```text
//! cargo bench --bench micro                    everything, ten seconds; needs no server
//! cargo bench --bench micro -- keys layer      some groups: keys loader layer
//! ```
//!
//! The calls are made one at a time on a current-thread runtime, so these are the costs of a lone caller, except in the row of 64 tasks.
//! `fleet -- hit` measures hits against a real server.

#[path = "../fleet/groups.rs"]
mod groups;
#[path = "../fleet/table.rs"]
#[allow(dead_code, reason = "shared with the `fleet` bench, which uses all of it")]
mod table;

mod keys;
mod layer;
mod loader;
mod turns;

use groups::Group;

const GROUPS: &[Group] = &[("keys", keys::rows), ("loader", loader::rows), ("layer", layer::rows)];

fn main() {
    groups::measure("micro", METHOD, GROUPS);
}

const METHOD: &str = "\
Method. The guard's call and a control, one after the other on one thread, in seven rounds of 50 ms each, in changing order. The \
number is the time of the guard's call over that of the control in the same round: the median, then the smallest and the largest. \
There is no promise about it; the nanoseconds depend on the machine, and the ratio shows the guard's share of them.
- keys: against a copy of the text, or the same parts by `format!`.
- loader: against a map behind a lock with the same bytes under a text key, and the guard's decoding of a struct.
- layer: against the same service without the guard, which makes each response anew.

";
