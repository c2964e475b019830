//! One flight, as those see it who are seated on it: their seats, their loaders, and what they are told. No I/O, and no time but
//! that of its beginning.
//!
//! The invariants are those of `flight`, which has the map.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::oneshot::Slot;
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering, lock};

/// One load on its way, and those who wait for it.
#[derive(Debug)]
pub(crate) struct Flight<L, O> {
    begun: Instant,
    /// How many have a seat.
    taken: AtomicUsize,
    seats: Mutex<Seats<L, O>>,
}

#[derive(Debug)]
struct Seats<L, O> {
    /// In the order in which they were taken; those that were left are cleared now and then.
    all: Vec<Arc<Seat<L, O>>>,
    /// What everyone is told who waits, ahead of the end.
    announced: Option<O>,
    course: Course,
    spare: Spare<L, O>,
}

/// Whether what a flight will end with is what its callers would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// It follows what happens to its key.
    Kept,
    /// The same, and it was begun instead of one that is adrift.
    KeptInstead,
    /// It does not, so who can look for himself begins another one.
    Adrift,
    /// Nor does this, and another one has done no better: who finds nothing takes a seat.
    AdriftAll,
}

/// A loader that was left behind, for a flight that nobody else gives one (invariant 6).
#[derive(Debug)]
enum Spare<L, O> {
    /// Whoever leaves now may be the last one.
    Wanted,
    /// With the seat that it was left on.
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

    /// For how long it has been there.
    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// How many have a seat.
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
        // Callers that come and leave during one long load must not pile up: where there is no room it is cleared of them. If that
        // makes little, there is room for as many again, or each who comes to a long line would go through it.
        if all.len() == all.capacity() {
            all.retain(|seat| !seat.outcome.is_closed());
            all.reserve(all.len());
        }
        all.push(Arc::clone(&seat));
        let announced = seats.announced.clone();
        drop(seats);
        self.taken.fetch_add(1, Ordering::Relaxed);
        if let Some(outcome) = announced {
            // Nobody has polled it yet, so this wakes nobody under the map's lock.
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
        // Where it is not needed it is dropped here, outside all locks.
        match (waiting, spare) {
            (Some(waiting), _) => Some(waiting),
            (None, Spare::Kept(loader, seat)) => Some((loader, seat)),
            (None, Spare::Wanted | Spare::Unwanted) => None,
        }
    }

    /// Takes this one's seat away, and gives it an outcome of its own.
    pub(crate) fn leave(&self, own: &Arc<Seat<L, O>>, outcome: O) {
        lock(&self.seats).all.retain(|seat| !Arc::ptr_eq(seat, own));
        own.tell(outcome);
    }

    /// The same for all who wait and whose loader is such a one.
    pub(crate) fn leave_if(&self, outcome: &O, is_such: impl Fn(&L) -> bool) {
        // Out of the line before they are told: the next loader must not be one of theirs.
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

    /// Everyone seated is given the outcome. Whoever does this has taken the flight out of the map.
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
        // Nobody is lost where this fails: the seat was left, or has an outcome.
        let _ = self.outcome.offer(outcome);
    }

    fn take_loader(&self) -> Option<L> {
        lock(&self.loader).take()
    }
}

/// A seat on a flight, as its caller holds it: a future of the outcome.
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

    /// Takes this caller's own loader back, unless the flight has used it.
    pub(crate) fn take_loader(&self) -> Option<L> {
        self.seat.take_loader()
    }

    /// Changes this caller's loader, if the flight has not used it; whether that is so.
    pub(crate) fn amend_loader(&self, amend: impl FnOnce(&mut L)) -> bool {
        lock(&self.seat.loader).as_mut().map(amend).is_some()
    }

    /// Leaves the seat as one whose loader may be used all the same (invariant 6).
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
        // Closed first: from here on the leader does not take the loader, so it is dropped here,
        // outside all locks.
        let _outcome = self.seat.outcome.close();
        self.flight.taken.fetch_sub(1, Ordering::Relaxed);
        drop(self.seat.take_loader());
    }
}
