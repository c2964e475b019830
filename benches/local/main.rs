//! Measures the local tier against the caches that keep values in memory, and on real processes and a real `redis-server`, and prints it
//! as a table.
//!
//! ```text
//! cargo bench --bench local                    everything, about ten minutes; needs redis-server, and wrk for `wrk`
//! cargo bench --bench local -- hit maps        some groups: hit alone hot layer maps raw wrk announced absent
//!                                              acknowledged commands memory scale
//! FULL=1 cargo bench --bench local -- ack      2,000 invalidations instead of 500
//! STRICT=1 cargo bench --bench local           also fails where a time or a ratio misses its `must`
//! ```
//!
//! This is a separate package, because the caches that it compares are dependencies of this bench alone.

#[path = "../fleet/groups.rs"]
mod groups;
#[path = "../fleet/table.rs"]
mod table;

mod absent;
mod acknowledged;
mod announced;
mod caches;
mod clock;
mod commands;
mod hits;
mod holders;
mod layer;
mod maps;
mod memory;
mod raw;
mod readers;
mod responses;
mod scale;
mod served;
mod support;
mod turns;
mod values;
mod versioned;

use groups::Group;

const GROUPS: &[Group] = &[
    ("hit", hits::concurrent_hits),
    ("alone", hits::alone),
    ("hot", hits::hot),
    ("layer", layer::rows),
    ("maps", maps::rows),
    ("raw", raw::rows),
    ("wrk", served::rows),
    ("announced", announced::rows),
    ("absent", absent::rows),
    ("acknowledged", acknowledged::rows),
    ("commands", commands::rows),
    ("memory", memory::rows),
    ("scale", scale::rows),
];

fn main() {
    if std::env::var_os("SG_ROLE").is_some() {
        let roles = [holders::ROLE, memory::ROLE, served::ROLE, versioned::ROLE];
        return support::processes::run_child(&roles);
    }
    groups::measure("local", METHOD, GROUPS);
}

const METHOD: &str = "\
Method. Sides take turns in one run, and a row is the median of its rounds, with the smallest and the largest; a time is that of one call \
of all readers together (so two busy threads halve it). Groups that need a server have a separate redis-server on this machine.
- hit, alone, hot, layer: nine rounds of 100 ms of each side. Readers are tasks; each lets the others run after 64 calls. The guard's \
store is in memory, because a local hit asks no store (`raw` and `wrk` have a real one). The maps are looked up by a text that is \
there already, the guard makes its key of it at each call. The control of `layer` clones eight headers with static values, and the body; a hit has \
ten headers, and their values are parts of what is stored.
- maps: the same for the maps alone; and their shares of hits on one trace.
- raw: the guard on Redis against GET on a multiplexed connection, 64 callers, one client thread.
- wrk: server and client are processes on the same machine, the server with two worker threads; seven pairs of two seconds.
- announced: 1,000 invalidations and as many fan-outs of the control, in turn; before each, all processes ask for the key. The \
control removes the key and publishes to each process in one script, and each process publishes its answer.
- absent: five rounds; a process is stopped, or a proxy passes nothing on.
- acknowledged: moments are those of the monotonic clock, which the processes share; a caller reads it before its call, the \
invalidating process after its own.
- commands: those that MONITOR shows from clients in 20 s, without PING and TIME, less those of a process without a tier.
- scale: 64 callers for each thread, on 1, 2, 4 .. threads up to the number of cores. Callers go through one sequence of draws by Zipf's law \
(skew 1) from different positions, or all read one key. Beside each time stand what the process did meanwhile, per call: its time in the \
kernel, and how often a thread went to sleep.
- memory: the largest resident memory while a million keys are asked for twice, less that of the connected process before it.

";
