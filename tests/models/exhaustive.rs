//! Every schedule of four threads with up to two preemptions, for the flight and the registry of lease waiters, which are compiled against
//! loom's locks. (With three threads, no schedule shows the defect of a removal that is not by identity.)

/// Stands in for `crate::sync` in the modules under test.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    // Loom's `Arc` does not fit: methods take `self: &Arc<Self>`, and only the standard `Arc` is allowed there.
    pub(crate) use std::sync::Arc;

    pub(crate) use super::notify::Notify;

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
#[allow(dead_code, reason = "each module is more than its model uses")]
#[path = "../../src/flight/mod.rs"]
mod flight;
/// Stands in for `crate::store` in the registry.
mod store {
    pub(crate) use crate::registry::Token;
}
mod notify;
mod registry;
#[allow(dead_code, reason = "the module is more than its model uses")]
#[path = "../../src/store/wake_leases.rs"]
mod watch;
mod wave;

use flight::{Flights, Joined};
use loom::future::block_on;
use loom::thread;
use sync::{Arc, AtomicUsize};
use wave::{Map, call, every_caller_is_answered};

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn every_waiter_receives_the_outcome() {
    check(|| every_caller_is_answered(3));
}

/// A detached flight ends while others begin new ones. It removes only itself from the map.
#[test]
fn an_older_flight_removes_no_newer_one() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let led = Arc::new(AtomicUsize::new(0));
        let Joined::Leader(older, slot) = flights.join(&1, 0, "abandoned", 10) else {
            unreachable!("it is the first")
        };
        let detaches = {
            let flights = Arc::clone(&flights);
            thread::spawn(move || flights.detach(&1))
        };
        let callers: Vec<_> = (1..3)
            .map(|caller| {
                let (flights, led) = (Arc::clone(&flights), Arc::clone(&led));
                thread::spawn(move || call(&flights, caller, &led))
            })
            .collect();
        older.finish("done");
        assert_eq!(block_on(slot), "done");
        detaches.join().expect("no panic");
        for caller in callers {
            caller.join().expect("no panic");
        }
        assert_eq!(flights.len(), 0);
    });
}

#[test]
fn no_wake_up_is_lost_between_registering_and_waiting() {
    check(|| registry::every_waiter_is_notified(2));
}

#[test]
fn a_grant_is_received_or_handed_on() {
    check(|| registry::a_grant_is_received_or_handed_on(2));
}
