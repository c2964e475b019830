//! The read-through algorithm, from one caller's point of view. Knows no Redis and no HTTP.
//!
//! ```text
//! 1 key       request or caller -> CacheKey, or bypass straight to the loader
//! 2 look up   GET entry: fresh -> 8 | stale but servable -> 8 now, 3 to 7 in the background | else 3
//! 3 join      flight, this process: waiter awaits its leader -> 8 | leader -> 4
//! 4 lease     all processes, one script: entry meanwhile there -> 8 | granted -> 6 | held -> 5
//! 5 wait      sleep until wake, lease timer, disconnect or deadline; then 4 again
//! 6 load      the loader in a spawned task; the lease is renewed at a third of its time
//! 7 commit    one script: if the token is mine -> SET entry, DEL lease, wake every waiting process
//!             failed -> the failure goes to the waiting wave; vanished -> the lease goes to one waiter
//! 8 response  the value
//! ```
//!
//! `call` is the caller's state, which passes through the steps. `look_up` is step 2, and `read` is its read of the store. `miss` has
//! steps 3 to 8 from a caller's point of view, and starts background refreshes. Steps 4 to 7 run in the flight's own task,
//! `flight_task`, which also has step 6; `acquire` is the loop of steps 4 and 5, `lease` the held lease, and `commit` step 7. `batch`
//! joins the loads of one caller's many keys. `outside` has the loads outside the protocol: those of one caller alone, trials and audits.
//!
//! A look-up that finds a stale value begins a load in the background (`CallState::refresh`). A caller that must not share its load runs
//! it alone (`run_alone`). A caller whose process has a flight for the key joins it without a look-up (3 before 2): the flight
//! began with a look-up that found nothing, and joining saves one read per request.

pub(crate) mod acquire;
pub(crate) mod batch;
pub(crate) mod call;
pub(crate) mod commit;
pub(crate) mod flight_task;
pub(crate) mod lease;
pub(crate) mod look_up;
pub(crate) mod miss;
pub(crate) mod outside;
pub(crate) mod read;
