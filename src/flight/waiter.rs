//! One flight and its waiters: their seats, their loaders, and their outcomes. No I/O; the only time is when the flight began.
//!
//! The invariants are listed in `flight`, which has the map.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::oneshot::Slot;
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering, lock};

/// One load in progress in this process, and its waiters.
#[derive(Debug)]
pub(crate) struct Flight<L, O> {
    begun: Instant,
    /// How many callers have a seat.
    taken: AtomicUsize,
    seats: Mutex<Seats<L, O>>,
}

#[derive(Debug)]
struct Seats<L, O> {
    /// In the order in which they were taken; closed seats are removed now and then.
    all: Vec<Arc<Seat<L, O>>>,
    /// The outcome that all waiters are given ahead of the end.
    announced: Option<O>,
    course: Course,
    spare: Spare<L, O>,
}

/// Whether the flight still learns of invalidations, hence whether a caller that has looked may join it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// The flight learns of invalidations.
    Kept,
    /// As [`Kept`](Self::Kept); the flight replaces one that lost the store.
    KeptInstead,
    /// The flight lost the store. A caller whose look-up found nothing replaces it.
    Adrift,
    /// The flight lost the store and a replacement would too, so callers join it anyway.
    AdriftAll,
}

/// The loader of a caller that stopped waiting, used only if no waiter has one (invariant 6).
#[derive(Debug)]
enum Spare<L, O> {
    /// The next caller that stops waiting leaves its loader here.
    Wanted,
    /// A loader was left, with its former seat.
    Kept(L, Arc<Seat<L, O>>),
    /// A load has begun, or the flight has ended.
    Unwanted,
}

/// One caller's place on a flight.
#[derive(Debug)]
pub(crate) struct Seat<L, O> {
    outcome: Slot<O>,
    loader: Mutex<Option<L>>,
}

impl<L, O: Clone> Flight<L, O> {
    pub(crate) fn new(course: Course) -> Self {
        let seats = Seats { all: Vec::new(), announced: None, course, spare: Spare::Wanted };
        Self { begun: Instant::now(), taken: AtomicUsize::new(0), seats: Mutex::new(seats) }
    }

    /// The time since the flight began.
    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// How many callers have a seat.
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    pub(crate) fn course(&self) -> Course {
        lock(&self.seats).course
    }

    pub(crate) fn take_seat(self: &Arc<Self>, loader: L) -> Follower<L, O> {
        let seat = Arc::new(Seat { outcome: Slot::new(), loader: Mutex::new(Some(loader)) });
        let mut seats = lock(&self.seats);
        let all = &mut seats.all;
        // Seats of callers that left during a long load must not pile up, so a full vector is cleared of them. It then gets room
        // for as many again; otherwise, when few seats are freed, each new caller would go through a long vector.
        if all.len() == all.capacity() {
            all.retain(|seat| !seat.outcome.is_closed());
            all.reserve(all.len());
        }
        all.push(Arc::clone(&seat));
        let announced = seats.announced.clone();
        drop(seats);
        self.taken.fetch_add(1, Ordering::Relaxed);
        if let Some(outcome) = announced {
            // The seat has not been polled, so this wakes no task under the map's lock.
            seat.tell(outcome);
        }
        Follower { seat, flight: Arc::clone(self) }
    }

    pub(crate) fn next_loader(&self) -> Option<(L, Arc<Seat<L, O>>)> {
        let mut seats = lock(&self.seats);
        let spare = std::mem::replace(&mut seats.spare, Spare::Unwanted);
        let waiting = seats.all.iter().filter(|seat| !seat.outcome.is_closed()).find_map(|seat| {
            let loader = seat.take_loader()?;
            Some((loader, Arc::clone(seat)))
        });
        drop(seats);
        // An unneeded spare loader is dropped here, outside all locks.
        match (waiting, spare) {
            (Some(waiting), _) => Some(waiting),
            (None, Spare::Kept(loader, seat)) => Some((loader, seat)),
            (None, Spare::Wanted | Spare::Unwanted) => None,
        }
    }

    /// Removes this seat and gives it an outcome.
    pub(crate) fn leave(&self, own: &Arc<Seat<L, O>>, outcome: O) {
        lock(&self.seats).all.retain(|seat| !Arc::ptr_eq(seat, own));
        own.tell(outcome);
    }

    /// Removes all seats whose loader matches, and gives them an outcome.
    pub(crate) fn leave_if(&self, outcome: &O, is_such: impl Fn(&L) -> bool) {
        // Removed before they are told, so that none of their loaders is the next one.
        let leave = |seat: &mut Arc<Seat<L, O>>| lock(&seat.loader).as_ref().is_some_and(&is_such);
        let left: Vec<_> = lock(&self.seats).all.extract_if(.., leave).collect();
        for seat in left {
            seat.tell(outcome.clone());
        }
    }

    pub(crate) fn is_awaited(&self) -> bool {
        let is_awaited = |seat: &Arc<Seat<L, O>>| !seat.outcome.is_closed() && lock(&seat.loader).is_some();
        lock(&self.seats).all.iter().any(is_awaited)
    }

    pub(crate) fn is_awaited_by(&self, own: &Arc<Seat<L, O>>) -> bool {
        let is_seated = lock(&self.seats).all.iter().any(|seat| Arc::ptr_eq(seat, own));
        is_seated && !own.outcome.is_closed()
    }

    pub(crate) fn go_adrift(&self, may_another_do_better: bool) {
        let mut seats = lock(&self.seats);
        let first = may_another_do_better && seats.course == Course::Kept;
        seats.course = if first { Course::Adrift } else { Course::AdriftAll };
    }

    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "of HTTP responses"))]
    pub(crate) fn announce(&self, outcome: O) {
        let all = {
            let mut seats = lock(&self.seats);
            if seats.announced.is_some() {
                return;
            }
            seats.announced = Some(outcome.clone());
            seats.all.clone()
        };
        for seat in all {
            if lock(&seat.loader).is_some() {
                seat.tell(outcome.clone());
            }
        }
    }

    /// Gives all waiters the outcome. The flight must be out of the map by then.
    pub(crate) fn end(&self, outcome: &O) {
        let (all, _spare) = {
            let mut seats = lock(&self.seats);
            (std::mem::take(&mut seats.all), std::mem::replace(&mut seats.spare, Spare::Unwanted))
        };
        for seat in all {
            seat.tell(outcome.clone());
        }
    }
}

impl<L, O> Seat<L, O> {
    /// Gives this seat alone an outcome, ahead of the flight's.
    pub(crate) fn tell(&self, outcome: O) {
        // This fails only for a seat that was left or has an outcome already.
        let _ = self.outcome.offer(outcome);
    }

    fn take_loader(&self) -> Option<L> {
        lock(&self.loader).take()
    }
}

/// One caller attached to a flight: a future of the outcome.
///
/// # Cancel safety
///
/// Dropping it leaves the seat; the flight goes on.
#[derive(Debug)]
pub(crate) struct Follower<L, O> {
    seat: Arc<Seat<L, O>>,
    flight: Arc<Flight<L, O>>,
}

impl<L, O> Follower<L, O> {
    pub(crate) fn seat(&self) -> Arc<Seat<L, O>> {
        Arc::clone(&self.seat)
    }

    /// Takes this caller's loader back, unless the flight has used it.
    pub(crate) fn take_loader(&self) -> Option<L> {
        self.seat.take_loader()
    }

    /// Changes this caller's loader and returns true, if the flight has not used it.
    pub(crate) fn amend_loader(&self, amend: impl FnOnce(&mut L)) -> bool {
        lock(&self.seat.loader).as_mut().map(amend).is_some()
    }

    /// Leaves the seat, but lets the flight use the loader if no waiter has one (invariant 6).
    pub(crate) fn stop_waiting(self) {
        let mut seats = lock(&self.flight.seats);
        if matches!(seats.spare, Spare::Wanted)
            && let Some(loader) = self.seat.take_loader()
        {
            seats.spare = Spare::Kept(loader, Arc::clone(&self.seat));
        }
    }
}

impl<L, O> Future for Follower<L, O> {
    type Output = O;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<O> {
        self.seat.outcome.poll_take(cx)
    }
}

impl<L, O> Drop for Follower<L, O> {
    fn drop(&mut self) {
        // Closed first: the leader skips closed seats, so the loader is dropped here, outside all locks.
        let _outcome = self.seat.outcome.close();
        self.flight.taken.fetch_sub(1, Ordering::Relaxed);
        drop(self.seat.take_loader());
    }
}
