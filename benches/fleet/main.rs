//! Measures what README.md, docs/performance.md, docs/measurements.md and docs/lock-speed.md state, on real processes and a real
//! `redis-server`, and prints it as a table.
//!
//! ```text
//! cargo bench --bench fleet                    everything, about four minutes; needs redis-server, and wrk for `wrk`
//! cargo bench --bench fleet -- hit wake        some groups: hit (hit-loader hit-layer hit-large hit-hot) wrk wave
//!                                              failing killed down wake
//! STRICT=1 cargo bench --bench fleet           also fails where a time or a ratio misses its `must`
//! ```
//!
//! Counts are exact on any machine, so a missed one always fails the run. Times and ratios are medians of
//! interleaved rounds against a control of the same run; each module says how. A busy machine shows in them, so the
//! load is printed before and after.

#[path = "../../tests/support/mod.rs"]
mod support;

mod calls;
mod down;
mod failure;
mod groups;
mod hit;
mod joined;
mod served;
mod sides;
mod table;
mod wake;
mod wave;

use groups::Group;

const GROUPS: &[Group] = &[
    ("hit-loader", hit::loads),
    ("hit-layer", hit::layer),
    ("hit-large", hit::large),
    ("hit-hot", hit::hot),
    ("wrk", served::rows),
    ("wave", wave::rows),
    ("failing", failure::failing),
    ("killed", failure::killed),
    ("down", down::rows),
    ("wake", wake::rows),
];

fn main() {
    if std::env::var_os("SG_ROLE").is_some() {
        return support::processes::run_child(&[calls::ROLE, sides::ROLE]);
    }
    groups::measure("fleet", METHOD, GROUPS);
}

const METHOD: &str = "\
Method. Every group has a separate redis-server on this machine, without persistence; processes are real ones, and \
their guards were connected before, as by a service that calls `connect()`.
- hit: one client thread (current_thread), 64 callers, 1 KiB values, TCP_NODELAY on both sides; guard and control, in \
separate processes, take turns, 9 pairs after a warm-up pair; the row has the median ratio of throughputs and its spread. The guard has a \
connection for commands and one for messages, the control is a redis-rs MultiplexedConnection with its default response timeout. \
\"CPU per call\" is the CPU time of the guard's client thread less that of the control's.
- wave: commands are those that MONITOR shows from clients, not those inside scripts, nor HELLO, AUTH and CLIENT. The \
measured number is that of the steady state (scripts loaded), the largest of 3 waves without the periodic PING and TIME; the \
number with them, and that of the first wave with all commands, stand beside it.
- wave, failing, killed: from the moment the loader returned (or was killed) to the last caller's return, by the wall \
clock that all processes share.
- down: the default policy, and a loader that answers at once, so all the time is the guard's; five outages of each kind, of \
three seconds each; a proxy simulates those of the network.
- wake: the time from the loader's return in one process to the caller's in another, less the EVALSHA by which the woken \
process reads the entry (estimated by one on a busy bare connection), over one EVALSHA of the commit script with an \
empty queue on an idle connection.

";
