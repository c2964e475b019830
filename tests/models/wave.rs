//! A wave of callers on one flight, for whichever scheduler the model runs under.

use std::hash::{BuildHasherDefault, DefaultHasher};

use super::flight::{Flights, Joined};
use super::sync::{Arc, AtomicUsize, Ordering};
use super::{block_on, thread};

/// A fixed hasher, because a schedule must not depend on the process's random state.
pub(crate) type Hashing = BuildHasherDefault<DefaultHasher>;
pub(crate) type Map = Flights<u8, usize, &'static str, Hashing>;

/// Joins the flight and receives its outcome, as its leader or as a waiter.
pub(crate) fn call(flights: &Arc<Map>, caller: usize, led: &AtomicUsize) {
    match flights.join(&1, caller, "abandoned", 10) {
        Joined::Leader(leader, waiter) => {
            led.fetch_add(1, Ordering::SeqCst);
            assert!(leader.next_loader().is_some());
            leader.finish("done");
            assert_eq!(block_on(waiter), "done");
        }
        Joined::Waiter(waiter) => assert_eq!(block_on(waiter), "done"),
        Joined::Full(_) | Joined::TooManyWaiters(_) => unreachable!("there is room"),
    }
}

/// Each of `callers` is answered. There is one leader per wave.
pub(crate) fn every_caller_is_answered(callers: usize) {
    let flights: Arc<Map> = Arc::new(Flights::new(10));
    let led = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..callers)
        .map(|caller| {
            let (flights, led) = (Arc::clone(&flights), Arc::clone(&led));
            thread::spawn(move || call(&flights, caller, &led))
        })
        .collect();
    for caller in callers {
        caller.join().expect("no panic");
    }
    assert!(led.load(Ordering::SeqCst) >= 1);
    assert_eq!(flights.len(), 0);
}
