//! Measures for how long one script call blocks the server when there are many waiters, most of them dead.
//!
//! ```text
//! cargo bench --bench scripts                 everything, two minutes; needs redis-server
//! cargo bench --bench scripts -- commit locks some groups: hand_over commit acquire locks crowds
//! STRICT=1 cargo bench --bench scripts        also fails where a time misses its `must`
//! ```
//!
//! The bench itself writes the queues, because 10,000 real processes do not fit on one machine.

#[path = "../fleet/groups.rs"]
mod groups;
#[path = "../../tests/support/mod.rs"]
mod support;
#[path = "../fleet/table.rs"]
#[allow(dead_code, reason = "shared with the `fleet` bench, which uses all of it")]
mod table;

mod entries;
mod leases;
mod locks;
mod stage;
mod waiters;

use groups::Group;

const GROUPS: &[Group] = &[
    ("hand_over", leases::hand_over),
    ("commit", leases::commit),
    ("acquire", entries::acquire),
    ("locks", locks::rows),
    ("crowds", waiters::rows),
];

fn main() {
    groups::measure("scripts", METHOD, GROUPS);
}

const METHOD: &str = "\
Method. One redis-server on this machine, without persistence, and one guard. The bench writes a queue of n places, each of \
a different process that does not exist, lets the guard take the step, and reads the server's times of the scripts \
(SLOWLOG, all commands). Five rounds, each with a new key; the number is the median of the longest single call. In \
brackets: the time of all calls of a step together, their number, and the longest call in round trips of a PING in the same run.
In `crowds` the waiters are real ones of the guard: one round measures the time of all scripts (INFO commandstats) and the worst \
PING of another client, sent each millisecond meanwhile.

";
