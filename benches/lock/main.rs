//! Measures the lock toolkit against ports of the locks of *Redis in Action* (section 11.2) in the same run, and prints
//! the book's table 11.2 and the ratios that follow from it.
//!
//! ```text
//! cargo bench --bench lock                     everything, two minutes; needs redis-server
//! cargo bench --bench lock -- tasks hold       some groups: tasks processes hold trips waiters
//! STRICT=1 cargo bench --bench lock            also fails where a time or a ratio misses its `must`
//! ```
//!
//! Clients of `Mutex` and of the controls run in two ways. As *processes*, as in the book: each client is a process with
//! one thread. If processes outnumber processors, that is also a test of the scheduler. And as *tasks* of one thread,
//! where all costs are those of this library, the client library and the server.
//!
//! The `must` of the ratios over the SETNX control is the ratio of the book's Lua lock.

#[path = "../fleet/groups.rs"]
mod groups;
#[path = "../../tests/support/mod.rs"]
mod support;
#[path = "../fleet/table.rs"]
mod table;

mod acquirer;
mod book;
mod clients;
mod cost;
mod hold;
mod ours;
mod rates;
mod way;

use groups::Group;

const GROUPS: &[Group] = &[
    ("tasks", rates::one_process),
    ("processes", rates::processes),
    ("hold", hold::rows),
    ("trips", cost::trips),
    ("waiters", cost::waiters),
];

fn main() {
    if std::env::var_os("SG_ROLE").is_some() {
        return support::processes::run_child(clients::ROLES);
    }
    groups::measure("lock", METHOD, GROUPS);
}

const METHOD: &str = "\
Method. Every group has a separate redis-server on this machine, without persistence, and clients that have held the \
lock before: connections are open, scripts loaded. A client acquires and releases one lock repeatedly, with an \
empty critical section; a bumping client does both in one command, `MutexGuard::bump`. It begins no acquire after the end; an \
acquire that completes later does not count, but its wait does. Clients share no connections: a control has one \
(MultiplexedConnection, TCP_NODELAY), a `Mutex` with its defaults two, for commands and for messages. Tasks check mutual \
exclusion at each acquire, and all clients check at each release that the lock was still held.
- tasks, processes: 1, 2, 5 and 10 clients for 0.3 s (ten: 0.8 s), the locks one after another in changing order, \
7 rounds; ratios are of one round, the number is the median, then the smallest and the largest. `tasks` \
are all on one thread (current_thread), `processes` have one each. The controls pause for 1 ms between two tries.
- CPU: the CPU time of the server's thread and of the clients' threads in the whole stretch, per acquire; a busy machine \
changes the rates, but not these times.
- p99 wait: over all acquires of all clients, so that a client that gets the lock ten times while others starve has ten short waits.
- hold: ten tasks that keep the lock for a sleep of 5 ms (Tokio's: 5 to 6.5 ms), 5 rounds of 1.5 s.
- trips: the commands of one client in MONITOR, without PING and TIME.
- waiters: 500 tasks with one `Locks` wait for a holder; connections are those with a subscription in CLIENT LIST.

";
