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
//! Each step is the file of its name; step 4 is `acquire`, and steps 3 to 8 from a caller's point of view are `miss`. Steps 4 to 7
//! run in the flight's own task, `leader`; `contend` is the loop of steps 4 and 5, `lease` the held lease. `call` is the caller's
//! state, which goes down the steps. A look-up that finds a stale value begins the load in the background by `refresh`; a caller
//! that must not share its load runs it `alone`. A caller whose process has a flight for the key joins it without a look-up (3 before 2): the flight
//! began with a look-up that found nothing, and it exists to save one read per request.

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
