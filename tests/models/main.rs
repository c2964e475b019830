//! Models of the in-process coalescing and of the registry of lease waiters. The crate's own `flight/` and `store/wake_leases.rs` are
//! compiled against shuttle's locks and run through many thousands of schedules.
//!
//! A failing schedule is printed as a string. `shuttle::replay` runs it again.

/// Stands in for `crate::sync` in the modules under test.
mod sync {
    pub(crate) use shuttle::sync::atomic::{AtomicUsize, Ordering};
    pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard};

    pub(crate) use super::notify::Notify;

    std::thread_local! {
        /// How many locks were taken in this test.
        pub(crate) static LOCKED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        LOCKED.set(LOCKED.get() + 1);
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
mod journal;
mod notify;
mod registry;
mod take_over;
#[allow(dead_code, reason = "each module is more than its model uses")]
#[path = "../../src/store/wake_leases.rs"]
mod watch;
mod wave;

use std::pin::pin;
use std::task::Context;
use std::time::Duration;

use flight::shared_read::{BatchReader, ReadRole, SharedReads};
use flight::{Flights, Joined};
use futures_util::task::noop_waker_ref;
use shuttle::future::block_on;
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread;
use wave::{Hashing, Map, every_caller_is_answered};

const SCHEDULES: usize = 4_000;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let random = Arc::clone(&model);
    shuttle::check_random(move || random(), SCHEDULES);
    // Few preemptions at the worst points find races that random schedules seldom find.
    shuttle::check_pct(move || model(), SCHEDULES, 3);
}

/// Runs a model of one thread once: it has only one schedule.
fn alone(model: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(model, 1);
}

/// Invariants 1, 2 and 4 of `flight`: each caller is answered, and there is one leader per wave.
#[test]
fn every_waiter_receives_the_outcome() {
    check(|| every_caller_is_answered(4));
}

/// An announcement reaches each waiter that joined before or after it, and never the waiter with the running loader.
#[test]
fn every_waiter_receives_the_announcement() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(leader, own) = flights.join(&1, 0, "abandoned", 10) else {
            unreachable!("it is the first")
        };
        assert!(leader.next_loader().is_some());
        let callers: Vec<_> = (1..4)
            .map(|caller| {
                let flights = Arc::clone(&flights);
                thread::spawn(move || match flights.join(&1, caller, "abandoned", 10) {
                    Joined::Waiter(waiter) => assert_eq!(block_on(waiter), "announced"),
                    // The flight ended before this caller joined. The new flight may have waiters as well.
                    Joined::Leader(leader, _own) => {
                        leader.announce("announced");
                        leader.finish("done");
                    }
                    Joined::Full(_) | Joined::TooManyWaiters(_) => unreachable!("there is room"),
                })
            })
            .collect();
        leader.announce("announced");
        leader.announce("once");
        leader.finish("done");
        assert_eq!(block_on(own), "done");
        for caller in callers {
            caller.join().expect("no panic");
        }
    });
}

/// Invariant 4: a leader that vanishes ends its flight nevertheless.
#[test]
fn a_leader_that_vanishes_frees_its_followers() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let callers: Vec<_> = (0..3)
            .map(|caller| {
                let flights = Arc::clone(&flights);
                thread::spawn(move || match flights.join(&1, caller, "abandoned", 10) {
                    Joined::Leader(leader, waiter) => {
                        drop(leader);
                        assert_eq!(block_on(waiter), "abandoned");
                    }
                    Joined::Waiter(waiter) => assert_eq!(block_on(waiter), "abandoned"),
                    Joined::Full(_) | Joined::TooManyWaiters(_) => unreachable!("there is room"),
                })
            })
            .collect();
        for caller in callers {
            caller.join().expect("no panic");
        }
        assert_eq!(flights.len(), 0);
    });
}

/// A caller that joins while the leader finds no loader left must not join an ended flight. It would load alone, while the next flight
/// loads too.
#[test]
fn a_caller_that_joins_as_the_last_loader_leaves_gets_an_outcome() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(leader, own) = flights.join(&1, 0, "abandoned", 10) else {
            unreachable!("it is the first")
        };
        assert!(leader.next_loader().is_some());
        let joins = thread::spawn({
            let flights = Arc::clone(&flights);
            move || match flights.join(&1, 1, "abandoned", 10) {
                Joined::Waiter(waiter) => assert_eq!(block_on(waiter), "done"),
                Joined::Leader(leader, _own) => leader.finish("done"),
                Joined::Full(_) | Joined::TooManyWaiters(_) => unreachable!("there is room"),
            }
        });
        let outcome = if leader.next_loader().is_some() { "done" } else { "abandoned" };
        leader.finish(outcome);
        drop(own);
        joins.join().expect("no panic");
        assert_eq!(flights.len(), 0);
    });
}

/// Invariant 3, in a race that needs four threads: an old flight that ends must not remove a newer one.
#[test]
fn a_detached_flight_does_not_remove_its_successor() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(old, old_follower) = flights.join(&1, 0, "abandoned", 10) else {
            unreachable!("first")
        };
        let invalidate = thread::spawn({
            let flights = Arc::clone(&flights);
            move || flights.detach(&1)
        });
        let late = thread::spawn({
            let flights = Arc::clone(&flights);
            move || match flights.join(&1, 1, "abandoned", 10) {
                Joined::Leader(leader, waiter) => Some((leader, waiter)),
                Joined::Waiter(waiter) => {
                    assert_eq!(block_on(waiter), "old");
                    None
                }
                Joined::Full(_) | Joined::TooManyWaiters(_) => unreachable!("there is room"),
            }
        });
        old.finish("old");
        assert_eq!(block_on(old_follower), "old");
        invalidate.join().expect("no panic");
        if let Some((leader, waiter)) = late.join().expect("no panic")
            && flights.has_younger(&1, std::time::Duration::MAX)
        {
            leader.finish("new");
            assert_eq!(block_on(waiter), "new");
        }
        assert_eq!(flights.len(), 0);
    });
}

/// Invariant 5: a loader is used by its caller or by the leader, never by both, and a caller keeps its slot after the leader took
/// its loader.
#[test]
fn a_loader_is_taken_exactly_once() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(leader, first) = flights.join(&1, 0, "abandoned", 10) else {
            unreachable!("first")
        };
        let Joined::Waiter(second) = flights.join(&1, 1, "abandoned", 10) else { unreachable!("second") };
        let leaves = thread::spawn(move || drop(first));
        let takes = thread::spawn(move || {
            let own = second.take_loader();
            (own, second)
        });
        let used = std::iter::from_fn(|| leader.next_loader()).count();
        leaves.join().expect("no panic");
        let (own, second) = takes.join().expect("no panic");
        let rest = std::iter::from_fn(|| leader.next_loader()).count();
        let mine = usize::from(own.is_some());
        assert!(used + rest + mine <= 2, "two loaders");
        assert!(used + rest + mine >= 1, "the second one's loader is used");
        leader.finish("done");
        assert_eq!(block_on(second), "done");
    });
}

/// Invariant 6: of the callers that stop waiting before the first load, exactly one leaves its loader behind.
#[test]
fn a_flight_without_waiters_keeps_one_loader() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(leader, first) = flights.join(&1, 0, "abandoned", 3) else {
            unreachable!("first")
        };
        let follow = |caller| match flights.join(&1, caller, "abandoned", 3) {
            Joined::Waiter(waiter) => waiter,
            _ => unreachable!("there is room"),
        };
        let leaving = [first, follow(1), follow(2)].map(|slot| thread::spawn(move || slot.stop_waiting()));
        assert!(leader.next_loader().is_some(), "each of them would have been the last");
        for caller in leaving {
            caller.join().expect("no panic");
        }
        let again = follow(3);
        let next = leader.next_loader().map(|(loader, _)| loader);
        assert_eq!(next, Some(3), "a load has begun: the loaders that were left behind are dropped");
        assert!(leader.next_loader().is_none());
        leader.finish("done");
        assert_eq!(block_on(again), "done", "there is room for others");
    });
}

/// The leader stops when no caller awaits the flight. A caller that left, or took its loader back, does not await it.
#[test]
fn a_flight_is_not_awaited_once_its_waiters_have_left() {
    alone(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(leader, first) = flights.join(&1, 0, "abandoned", 3) else {
            unreachable!("first")
        };
        let Joined::Waiter(second) = flights.join(&1, 1, "abandoned", 3) else {
            unreachable!("there is room")
        };
        assert!(leader.is_awaited_by_first());
        drop(first);
        assert!(!leader.is_awaited_by_first());
        assert!(leader.is_awaited(), "by another one");
        assert!(second.amend_loader(|loader| *loader += 10));
        assert_eq!(second.take_loader(), Some(11));
        assert!(!leader.is_awaited());
        assert!(!second.amend_loader(|_| unreachable!("it has none")));
    });
}

/// `leave_first` answers the first caller alone and gives its loader back, so this caller does not keep the flight going.
#[test]
fn a_first_caller_that_is_answered_alone_no_longer_awaits_the_flight() {
    alone(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(leader, first) = flights.join(&1, 0, "abandoned", 3) else {
            unreachable!("first")
        };
        assert!(leader.is_awaited());
        leader.leave_first("waited out");
        assert!(!leader.is_awaited() && !leader.is_awaited_by_first());
        assert!(leader.next_loader().is_none());
        assert_eq!(first.take_loader(), Some(0));
        assert_eq!(block_on(first), "waited out");
    });
}

/// A caller whose look-up found nothing replaces a flight that lost the store, if a replacement may reach it, but does not replace a
/// replacement.
#[test]
fn a_flight_that_lost_the_store_is_replaced_once() {
    alone(|| {
        for may_another_do_better in [true, false] {
            let flights: Arc<Map> = Arc::new(Flights::new(10));
            let join = |caller| flights.join_after_look_up(&1, caller, "abandoned", 10, true);
            let Joined::Leader(one, _first) = join(0) else { unreachable!("first") };
            assert!(matches!(join(1), Joined::Waiter(_)), "it is not without the store yet");
            one.lose_store(may_another_do_better);
            let instead = match join(2) {
                Joined::Leader(another, _second) => {
                    another.lose_store(true);
                    Some(another)
                }
                _ => None,
            };
            assert_eq!(instead.is_some(), may_another_do_better);
            assert!(matches!(join(3), Joined::Waiter(_)), "another does no better");
        }
    });
}

/// The map's lock is shared with other keys. Neither a rejected caller nor one that joins and leaves walks through all waiters under it.
#[test]
fn the_locks_per_caller_do_not_grow_with_the_number_of_waiters() {
    const CALLERS: usize = 200;
    fn locks_per_call(waiters: usize) -> [usize; 2] {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let Joined::Leader(_leader, _own) = flights.join(&1, 0, "abandoned", waiters) else {
            unreachable!("it is the first")
        };
        let wait = |caller| match flights.join(&1, caller, "abandoned", waiters) {
            Joined::Waiter(waiter) => waiter,
            _ => unreachable!("there is room"),
        };
        let _waiting: Vec<_> = (1..waiters).map(wait).collect();
        [waiters, waiters + 1].map(|slots| {
            let before = sync::LOCKED.get();
            for caller in 0..CALLERS {
                let joined = flights.join(&1, caller, "abandoned", slots);
                assert_eq!(matches!(joined, Joined::TooManyWaiters(_)), slots == waiters);
            }
            (sync::LOCKED.get() - before) / CALLERS
        })
    }
    shuttle::check_random(
        || {
            // One less than the room for waiters: if the list does not grow, each new caller finds it full.
            let (few, many) = (locks_per_call(7), locks_per_call(127));
            assert!(many[0] <= few[0], "turned away: {} locks, and {}", few[0], many[0]);
            assert!(many[1] <= 2 * few[1], "come and left: {} locks, and {}", few[1], many[1]);
        },
        1,
    );
}

/// Reads for a queue as the guard does, with `read` instead of the store.
fn serve(mut reader: BatchReader<u8, usize, Hashing>, read: impl Fn() -> usize) {
    block_on(reader.first_ended());
    while let Some(batch) = reader.next() {
        batch.answer(read());
    }
}

/// `shared_read`, invariant 1: a read that answers a caller began after the caller arrived.
#[test]
fn a_shared_read_begins_after_its_last_caller_arrived() {
    check(|| {
        let look_ups: Arc<SharedReads<u8, usize, Hashing>> = Arc::new(SharedReads::new());
        // Counts the writes that were acknowledged before a caller came. A read returns it.
        let stored = Arc::new(AtomicUsize::new(0));
        let callers: Vec<_> = (0..4)
            .map(|_| {
                let (look_ups, stored) = (Arc::clone(&look_ups), Arc::clone(&stored));
                thread::spawn(move || {
                    let acknowledged = stored.fetch_add(1, Ordering::SeqCst) + 1;
                    let read = || stored.load(Ordering::SeqCst);
                    let read = match look_ups.enter(&1, Duration::ZERO) {
                        ReadRole::Solo(_first) => read(),
                        ReadRole::Queued(queued, _, reader) => {
                            if let Some(reader) = reader {
                                serve(reader, read);
                            }
                            block_on(queued).expect("there is a reader")
                        }
                    };
                    assert!(read >= acknowledged, "read {read} after {acknowledged} was acknowledged");
                })
            })
            .collect();
        for caller in callers {
            caller.join().expect("no panic");
        }
        assert_eq!(look_ups.len(), 0);
    });
}

/// `shared_read`, invariant 2: a dropped caller or reader leaves no caller waiting and no entry in the map.
#[test]
fn dropped_callers_and_readers_leave_no_caller_waiting() {
    check(|| {
        let look_ups: Arc<SharedReads<u8, usize, Hashing>> = Arc::new(SharedReads::new());
        let callers: Vec<_> = (0..4)
            .map(|caller| {
                let look_ups = Arc::clone(&look_ups);
                thread::spawn(move || match look_ups.enter(&1, Duration::ZERO) {
                    ReadRole::Solo(first) => drop(first),
                    ReadRole::Queued(queued, _, Some(reader)) if caller % 2 == 0 => {
                        drop(reader);
                        assert_eq!(block_on(queued), None);
                    }
                    ReadRole::Queued(queued, _, reader) => {
                        if let Some(reader) = reader {
                            serve(reader, || 7);
                        }
                        if caller == 3 {
                            // This caller is polled once, then dropped.
                            let mut queued = pin!(queued);
                            let _ = queued.as_mut().poll(&mut Context::from_waker(noop_waker_ref()));
                        } else {
                            block_on(queued);
                        }
                    }
                })
            })
            .collect();
        for caller in callers {
            caller.join().expect("no panic");
        }
        assert_eq!(look_ups.len(), 0);
    });
}

#[test]
fn no_wake_up_is_lost_between_registering_and_waiting() {
    check(|| registry::every_waiter_is_notified(3));
}

#[test]
fn a_grant_is_received_or_handed_on() {
    check(|| registry::a_grant_is_received_or_handed_on(3));
}
