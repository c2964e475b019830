//! In-process coalescing: the first to join a key leads, the others follow. No time, no I/O.
//!
//! A flight lives in the map while it can be joined and ends by one outcome, which everyone seated on it is given. Invariants:
//!
//! 1. At most one joinable flight per key. Who finds none in the map starts one, under the map's lock.
//! 2. Nobody is seated on a flight that has ended: a flight leaves the map before its outcome is given out, and seats are
//!    taken under the map's lock.
//! 3. A flight is removed by identity: a detached flight that ends late does not remove its successor.
//! 4. Every flight ends. Dropping the [`Leader`] gives out the outcome it was made with. Only those who still wait may be told
//!    ahead of it, by an [`Announcer`]: whoever is seated then, or later.
//! 5. Each seat keeps its own loader, which its caller or the leader can take exactly once: to load alone, or to go on.
//!
//! Locks nest in the order map, flight, seat. No waker and no user code (a loader's drop) runs under any of them.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, Hash};
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::slot::Slot;
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering, lock};

/// All joinable flights of one node.
pub(crate) struct Flights<K, L, O, S> {
    shards: Box<[Shard<K, L, O, S>]>,
    hasher: S,
    /// Flights in the maps.
    joinable: AtomicUsize,
    limit: usize,
}

type Shard<K, L, O, S> = Mutex<HashMap<K, Arc<Flight<L, O>>, S>>;

/// One load on its way, and those who wait for it.
#[derive(Debug)]
struct Flight<L, O> {
    seats: Mutex<Seats<L, O>>,
}

#[derive(Debug)]
struct Seats<L, O> {
    all: Vec<Arc<Seat<L, O>>>,
    /// What everyone is told who waits, ahead of the end.
    announced: Option<O>,
    course: Course,
}

/// Whether what a flight will end with is what its callers would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// It follows what happens to its key.
    Kept,
    /// The same, and it was begun instead of one that is adrift.
    KeptInstead,
    /// It does not, so who can look for himself begins another one.
    Adrift,
    /// Nor does this, and another one has done no better: who finds nothing takes a seat.
    AdriftAll,
}

/// One caller's place on a flight.
#[derive(Debug)]
pub(crate) struct Seat<L, O> {
    outcome: Slot<O>,
    loader: Mutex<Option<L>>,
}

/// What joining a key came to.
pub(crate) enum Joined<K: Hash + Eq, L, O: Clone, S: BuildHasher> {
    /// There was no flight: this caller leads a new one, and is the first one seated on it.
    Leader(Leader<K, L, O, S>, Follower<L, O>),
    /// There was a flight.
    Follower(Follower<L, O>),
    /// There are too many flights.
    Full(L),
    /// There is a flight, and as many wait for it as may.
    Crowded(L),
}

impl<K, L, O, S> Flights<K, L, O, S>
where
    K: Hash + Eq + Clone,
    O: Clone,
    S: BuildHasher + Default,
{
    pub(crate) fn new(limit: usize) -> Self {
        const SHARDS: usize = 16;
        let shards = (0..SHARDS).map(|_| Mutex::new(HashMap::with_hasher(S::default()))).collect();
        Self { shards, hasher: S::default(), joinable: AtomicUsize::new(0), limit }
    }

    fn shard(&self, key: &K) -> &Shard<K, L, O, S> {
        // The map takes its index from the low bits.
        &self.shards[(self.hasher.hash_one(key) >> 48) as usize % self.shards.len()]
    }

    /// Takes a seat on the key's flight, or starts one. A leader that is dropped before it ends the flight gives out
    /// `abandoned`. A flight has so many `seats`.
    pub(crate) fn join(
        self: &Arc<Self>,
        key: &K,
        loader: L,
        abandoned: O,
        seats: usize,
    ) -> Joined<K, L, O, S> {
        self.join_having_looked(key, loader, abandoned, seats, false)
    }

    /// The same; a caller that has `looked` and found nothing leaves a flight alone that is adrift, and starts another in
    /// its place, once.
    pub(crate) fn join_having_looked(
        self: &Arc<Self>,
        key: &K,
        loader: L,
        abandoned: O,
        seats: usize,
        looked: bool,
    ) -> Joined<K, L, O, S> {
        let mut map = lock(self.shard(key));
        let is_left = |flight: &&Arc<Flight<L, O>>| looked && lock(&flight.seats).course == Course::Adrift;
        let left = map.get(key).filter(is_left).cloned();
        if let Some(flight) = map.get(key).filter(|_| left.is_none()) {
            if flight.taken(seats) >= seats {
                return Joined::Crowded(loader);
            }
            return Joined::Follower(Follower { seat: flight.seat(loader) });
        }
        // Only a bound on memory: a few more do no harm.
        if left.is_none() && self.joinable.load(Ordering::Relaxed) >= self.limit {
            return Joined::Full(loader);
        }
        let course = if left.is_some() { Course::KeptInstead } else { Course::Kept };
        let seats = Seats { all: Vec::new(), announced: None, course };
        let flight = Arc::new(Flight { seats: Mutex::new(seats) });
        let follower = Follower { seat: flight.seat(loader) };
        if map.insert(key.clone(), Arc::clone(&flight)).is_none() {
            self.joinable.fetch_add(1, Ordering::Relaxed);
        }
        drop((map, left));
        let own = Arc::clone(&follower.seat);
        let leader = Leader { flights: Arc::clone(self), key: key.clone(), flight, outcome: abandoned, own };
        Joined::Leader(leader, follower)
    }

    /// Whether any key has a flight that can be joined.
    pub(crate) fn any(&self) -> bool {
        self.joinable.load(Ordering::Acquire) > 0
    }

    /// Whether the key has a flight that can be joined.
    pub(crate) fn has(&self, key: &K) -> bool {
        lock(self.shard(key)).contains_key(key)
    }

    /// Whether the key has a flight that can be joined without a look of one's own.
    pub(crate) fn has_kept(&self, key: &K) -> bool {
        let course = lock(self.shard(key)).get(key).map(|flight| lock(&flight.seats).course);
        matches!(course, Some(Course::Kept | Course::KeptInstead))
    }

    /// Takes the key's flight out of the map: it goes on for those seated, later callers start another.
    pub(crate) fn detach(&self, key: &K) -> bool {
        let removed = lock(self.shard(key)).remove(key);
        if removed.is_some() {
            self.joinable.fetch_sub(1, Ordering::Relaxed);
        }
        removed.is_some()
    }

    /// The same for all keys.
    pub(crate) fn detach_all(&self) {
        for shard in &*self.shards {
            let removed = std::mem::take(&mut *lock(shard));
            self.joinable.fetch_sub(removed.len(), Ordering::Relaxed);
        }
    }

    /// How many flights can be joined.
    pub(crate) fn len(&self) -> usize {
        self.joinable.load(Ordering::Relaxed)
    }
}

impl<K: Hash + Eq, L, O, S: BuildHasher> Flights<K, L, O, S> {
    /// Invariant 3.
    fn remove(&self, key: &K, flight: &Arc<Flight<L, O>>) {
        let shard = &self.shards[(self.hasher.hash_one(key) >> 48) as usize % self.shards.len()];
        let mut map = lock(shard);
        if map.get(key).is_some_and(|current| Arc::ptr_eq(current, flight)) {
            let removed = map.remove(key);
            self.joinable.fetch_sub(1, Ordering::Relaxed);
            drop((map, removed));
        }
    }
}

impl<K, L, O, S> fmt::Debug for Flights<K, L, O, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { joinable, limit, shards: _, hasher: _ } = self;
        f.debug_struct("Flights").field("joinable", joinable).field("limit", limit).finish_non_exhaustive()
    }
}

impl<L, O: Clone> Flight<L, O> {
    /// How many seats are taken; exact where there are as many as `most`.
    fn taken(&self, most: usize) -> usize {
        let mut seats = lock(&self.seats);
        if seats.all.len() >= most {
            seats.all.retain(|seat| !seat.outcome.is_closed());
        }
        seats.all.len()
    }

    fn seat(&self, loader: L) -> Arc<Seat<L, O>> {
        let seat = Arc::new(Seat { outcome: Slot::new(), loader: Mutex::new(Some(loader)) });
        let mut seats = lock(&self.seats);
        // Callers that come and leave during one long load must not pile up: before it grows it is cleared of them.
        if seats.all.len() == seats.all.capacity() {
            seats.all.retain(|seat| !seat.outcome.is_closed());
        }
        seats.all.push(Arc::clone(&seat));
        let announced = seats.announced.clone();
        drop(seats);
        if let Some(outcome) = announced {
            // Nobody has polled it yet, so this wakes nobody under the map's lock.
            seat.tell(outcome);
        }
        seat
    }
}

impl<L, O> Seat<L, O> {
    /// Gives this seat alone an outcome, ahead of the flight's.
    pub(crate) fn tell(&self, outcome: O) {
        // Nobody is lost where this fails: the seat was left, or has an outcome.
        let _ = self.outcome.offer(outcome);
    }

    #[cfg(all(test, feature = "testing"))]
    #[allow(dead_code, reason = "the models compile this file too")]
    pub(crate) fn is_left(&self) -> bool {
        self.outcome.is_closed()
    }

    fn take_loader(&self) -> Option<L> {
        lock(&self.loader).take()
    }
}

/// The duty to end a flight. (The bounds are those that `Drop` needs.)
pub(crate) struct Leader<K: Hash + Eq, L, O: Clone, S: BuildHasher> {
    flights: Arc<Flights<K, L, O, S>>,
    key: K,
    flight: Arc<Flight<L, O>>,
    /// What the flight ends with if nothing better comes.
    outcome: O,
    /// Of the caller that began it.
    own: Arc<Seat<L, O>>,
}

impl<K: Hash + Eq, L, O: Clone, S: BuildHasher> Leader<K, L, O, S> {
    /// Takes the loader of the first caller who still waits, with its seat. `None` if nobody is left whose was not used.
    pub(crate) fn next_loader(&self) -> Option<(L, Arc<Seat<L, O>>)> {
        let seats = lock(&self.flight.seats);
        seats.all.iter().filter(|seat| !seat.outcome.is_closed()).find_map(|seat| {
            let loader = seat.take_loader()?;
            Some((loader, Arc::clone(seat)))
        })
    }

    #[cfg(all(test, feature = "testing"))]
    #[allow(dead_code, reason = "the models compile this file too")]
    pub(crate) fn first_seat(&self) -> Option<Arc<Seat<L, O>>> {
        lock(&self.flight.seats).all.first().cloned()
    }

    /// Tells those who wait ahead of the end.
    pub(crate) fn announcer(&self) -> Announcer<L, O> {
        Announcer { flight: Arc::clone(&self.flight) }
    }

    /// Gives the caller that began the flight its loader back, and an outcome of its own.
    pub(crate) fn leave_first(&self, outcome: O) {
        lock(&self.flight.seats).all.retain(|seat| !Arc::ptr_eq(seat, &self.own));
        self.own.tell(outcome);
    }

    /// Whether anybody waits for the flight. Who has taken its loader back does not.
    pub(crate) fn is_awaited(&self) -> bool {
        let is_awaited = |seat: &Arc<Seat<L, O>>| !seat.outcome.is_closed() && lock(&seat.loader).is_some();
        lock(&self.flight.seats).all.iter().any(is_awaited)
    }

    /// Whether the caller that began the flight still waits for it.
    pub(crate) fn is_awaited_by_first(&self) -> bool {
        let is_seated = lock(&self.flight.seats).all.iter().any(|seat| Arc::ptr_eq(seat, &self.own));
        is_seated && !self.own.outcome.is_closed()
    }

    /// From now on the flight does not follow what happens to its key.
    pub(crate) fn go_adrift(&self, may_another_do_better: bool) {
        let mut seats = lock(&self.flight.seats);
        let first = may_another_do_better && seats.course == Course::Kept;
        seats.course = if first { Course::Adrift } else { Course::AdriftAll };
    }

    /// Takes the flight out of the map, if it is still there.
    pub(crate) fn detach(&self) {
        self.flights.remove(&self.key, &self.flight);
    }

    /// Ends the flight: everyone seated is given the outcome.
    pub(crate) fn finish(mut self, outcome: O) {
        self.outcome = outcome;
    }
}

/// Tells those seated on a flight something ahead of its end, but for the one whose loader runs.
pub(crate) struct Announcer<L, O> {
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "of HTTP responses"))]
    flight: Arc<Flight<L, O>>,
}

impl<L, O> fmt::Debug for Announcer<L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Announcer").finish_non_exhaustive()
    }
}

impl<L, O: Clone> Announcer<L, O> {
    /// Whoever is seated now or later is given the outcome instead of the flight's. Once.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "of HTTP responses"))]
    pub(crate) fn announce(&self, outcome: O) {
        let seats = {
            let mut seats = lock(&self.flight.seats);
            if seats.announced.is_some() {
                return;
            }
            seats.announced = Some(outcome.clone());
            seats.all.clone()
        };
        for seat in seats {
            if lock(&seat.loader).is_some() {
                seat.tell(outcome.clone());
            }
        }
    }
}

/// Invariants 2 and 4. Also runs when the leader's task panics or is dropped by its runtime.
impl<K: Hash + Eq, L, O: Clone, S: BuildHasher> Drop for Leader<K, L, O, S> {
    fn drop(&mut self) {
        self.detach();
        let seats = std::mem::take(&mut lock(&self.flight.seats).all);
        for seat in seats {
            seat.tell(self.outcome.clone());
        }
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
}

impl<L, O> Follower<L, O> {
    /// Takes this caller's own loader back, unless the flight has used it.
    pub(crate) fn take_loader(&self) -> Option<L> {
        self.seat.take_loader()
    }

    /// Changes this caller's loader, if the flight has not used it; whether that is so.
    pub(crate) fn amend_loader(&self, amend: impl FnOnce(&mut L)) -> bool {
        lock(&self.seat.loader).as_mut().map(amend).is_some()
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
        drop(self.seat.outcome.close());
        drop(self.seat.take_loader());
    }
}
