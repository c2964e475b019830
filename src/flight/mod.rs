//! In-process coalescing: the first caller of a key leads, the others follow. No I/O; the only time is when a flight began.
//!
//! A flight is in the map while it can be joined. It ends with one outcome, which all its waiters receive. Invariants:
//!
//! 1. At most one joinable flight per key. A caller that finds none in the map starts one, under the map's lock.
//! 2. No caller joins a flight that has ended: a flight leaves the map before its outcome is published, and slots are
//!    taken under the map's lock.
//! 3. A flight is removed by identity: a detached flight that ends late does not remove its successor.
//! 4. Every flight ends. Dropping the [`Leader`] publishes an outcome: the one it was made with, unless [`Leader::finish`] sets
//!    another. Before that, [`Flight::announce`] may publish an outcome to the callers that wait then, and to those that join later.
//! 5. Each slot keeps its own loader. Either its caller takes it, to load alone, or the leader, to go on; exactly one of them can.
//! 6. A caller that stops waiting leaves its loader behind only before the first load and only if no other caller has left one.
//!    That loader is used if no caller waits. It no longer has a slot.
//!
//! Locks nest in the order map, flight, slot. No waker and no user code (a loader's drop) runs under any of them. The slots are
//! not iterated under the map's lock, except now and then to remove closed ones. A single flight is implemented in `waiter`.

pub(crate) mod shared_read;
pub(crate) mod waiter;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::ops::Deref;
use std::time::Duration;

use tokio::time::Instant;
use waiter::{Flight, FlightProgress, StoreLink, Waiter, WaiterSlot};

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

/// The result of joining a key's flight.
pub(crate) enum Joined<K: Hash + Eq, L, O: Clone, S: BuildHasher> {
    /// There was no flight: this caller leads a new flight, and has its first slot.
    Leader(Leader<K, L, O, S>, Waiter<L, O>),
    /// There was a flight, and this caller has taken a slot on it.
    Waiter(Waiter<L, O>),
    /// There was no flight, and the limit on flights is reached.
    Full(L),
    /// There is a flight, and all its slots are taken.
    TooManyWaiters(L),
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

    /// Takes a slot on the key's flight, or starts one. A leader that is dropped before it finishes the flight ends it with
    /// `abandoned`. A flight has at most `slots` slots.
    pub(crate) fn join(
        self: &Arc<Self>,
        key: &K,
        loader: L,
        abandoned: O,
        slots: usize,
    ) -> Joined<K, L, O, S> {
        self.join_after_look_up(key, loader, abandoned, slots, false)
    }

    /// Like [`join`](Self::join). If `has_looked_up` is set, the caller's own look-up found nothing: the caller does not join a flight that
    /// has lost its connection to the store, but starts another in its place. The replacement is not itself replaced.
    pub(crate) fn join_after_look_up(
        self: &Arc<Self>,
        key: &K,
        loader: L,
        abandoned: O,
        slots: usize,
        has_looked_up: bool,
    ) -> Joined<K, L, O, S> {
        let mut map = lock(self.shard(key));
        let is_lost = |flight: &&Arc<Flight<L, O>>| has_looked_up && flight.store_link() == StoreLink::Lost;
        let lost = map.get(key).filter(is_lost).cloned();
        if let Some(flight) = map.get(key).filter(|_| lost.is_none()) {
            if flight.is_full(slots) {
                return Joined::TooManyWaiters(loader);
            }
            return Joined::Waiter(flight.attach(loader));
        }
        // The limit only bounds memory, so it may be exceeded by a few flights that begin at the same moment.
        if lost.is_none() && self.joinable.load(Ordering::Relaxed) >= self.limit {
            return Joined::Full(loader);
        }
        let store_link = if lost.is_some() { StoreLink::Replacement } else { StoreLink::Connected };
        let flight = Arc::new(Flight::new(store_link));
        let waiter = flight.attach(loader);
        if map.insert(key.clone(), Arc::clone(&flight)).is_none() {
            self.joinable.fetch_add(1, Ordering::Relaxed);
        }
        drop((map, lost));
        let own = waiter.slot();
        let leader = Leader { flights: Arc::clone(self), key: key.clone(), flight, outcome: abandoned, own };
        Joined::Leader(leader, waiter)
    }

    /// Whether any key has a flight that can be joined.
    pub(crate) fn any(&self) -> bool {
        self.joinable.load(Ordering::Acquire) > 0
    }

    /// Whether the key has a flight that can be joined and is not as old as `age`.
    pub(crate) fn has_younger(&self, key: &K, age: Duration) -> bool {
        lock(self.shard(key)).get(key).is_some_and(|flight| flight.age() < age)
    }

    /// Takes the key's flight out of the map if it is as old as `age`.
    pub(crate) fn detach_older(&self, key: &K, age: Duration) {
        let flight = lock(self.shard(key)).get(key).filter(|flight| flight.age() >= age).cloned();
        if let Some(flight) = flight {
            self.remove(key, &flight);
        }
    }

    /// Whether the key has a flight that a caller can join without a look-up.
    pub(crate) fn has_connected(&self, key: &K) -> bool {
        let store_link = lock(self.shard(key)).get(key).map(|flight| flight.store_link());
        matches!(store_link, Some(StoreLink::Connected | StoreLink::Replacement))
    }

    /// Takes the key's flight out of the map: it goes on for its waiters, later callers start another.
    pub(crate) fn detach(&self, key: &K) -> bool {
        let removed = lock(self.shard(key)).remove(key);
        if removed.is_some() {
            self.joinable.fetch_sub(1, Ordering::Relaxed);
        }
        removed.is_some()
    }

    /// Detaches the flights of all keys.
    pub(crate) fn detach_all(&self) {
        self.detach_if(|_| true);
    }

    /// Detaches the flights of the keys that match.
    pub(crate) fn detach_if(&self, matches: impl Fn(&K) -> bool) {
        for shard in &*self.shards {
            // Collected, to drop the flights after the lock is released: dropping a flight without a leader drops its slots.
            let removed: Vec<_> = lock(shard).extract_if(|key, _| matches(key)).collect();
            self.joinable.fetch_sub(removed.len(), Ordering::Relaxed);
        }
    }

    /// The progress of the key's flight, if it has one that can be joined.
    pub(crate) fn progress_of(&self, key: &K) -> Option<FlightProgress> {
        lock(self.shard(key)).get(key).map(|flight| flight.progress())
    }

    /// The keys of the `most` flights that began first, with their progress.
    pub(crate) fn oldest(&self, most: usize) -> Vec<(K, FlightProgress)> {
        let mut oldest = Vec::new();
        let sort = |all: &mut Vec<(K, FlightProgress)>| {
            all.sort_by_key(|(_, progress)| std::cmp::Reverse(progress.age));
            all.truncate(most);
        };
        for shard in &*self.shards {
            for (key, flight) in &*lock(shard) {
                oldest.push((key.clone(), flight.progress()));
                if oldest.len() >= 4 * most {
                    sort(&mut oldest);
                }
            }
        }
        sort(&mut oldest);
        oldest
    }

    /// How many flights can be joined.
    pub(crate) fn len(&self) -> usize {
        self.joinable.load(Ordering::Relaxed)
    }
}

impl<K: Hash + Eq, L, O, S: BuildHasher> Flights<K, L, O, S> {
    fn shard(&self, key: &K) -> &Shard<K, L, O, S> {
        // The high bits of the hash, because the map inside the shard uses the low bits.
        &self.shards[(self.hasher.hash_one(key) >> 48) as usize % self.shards.len()]
    }

    fn remove(&self, key: &K, flight: &Arc<Flight<L, O>>) {
        self.remove_from(&mut lock(self.shard(key)), key, flight);
    }

    /// Invariant 3. The caller holds the flight's `Arc`, so removing it drops no slots under the map's lock.
    fn remove_from(&self, map: &mut HashMap<K, Arc<Flight<L, O>>, S>, key: &K, flight: &Arc<Flight<L, O>>) {
        if map.get(key).is_some_and(|current| Arc::ptr_eq(current, flight)) {
            map.remove(key);
            self.joinable.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The leader of a flight: dropping it ends the flight. (`Drop` needs the type bounds.)
pub(crate) struct Leader<K: Hash + Eq, L, O: Clone, S: BuildHasher> {
    flights: Arc<Flights<K, L, O, S>>,
    key: K,
    flight: Arc<Flight<L, O>>,
    /// The outcome that the flight ends with, unless [`finish`](Self::finish) replaces it.
    outcome: O,
    /// The slot of the caller that began the flight.
    own: Arc<WaiterSlot<L, O>>,
}

impl<K: Hash + Eq, L, O: Clone, S: BuildHasher> Leader<K, L, O, S> {
    /// Takes the loader of the first caller that still waits, with its slot; else the one that a caller has left behind. If there
    /// is none, takes the flight out of the map: a caller that joins is either found here or starts a flight.
    pub(crate) fn next_loader(&self) -> Option<(L, Arc<WaiterSlot<L, O>>)> {
        self.flight.next_loader().or_else(|| {
            // Under the map's lock, because a caller may have joined since.
            let mut map = lock(self.flights.shard(&self.key));
            let next = self.flight.next_loader();
            if next.is_none() {
                self.flights.remove_from(&mut map, &self.key, &self.flight);
            }
            next
        })
    }

    /// The flight, through which a load can announce an outcome to the waiters before the flight ends.
    pub(crate) fn flight(&self) -> Arc<Flight<L, O>> {
        Arc::clone(&self.flight)
    }

    /// Ends the wait of the caller that began the flight, with this outcome. The caller keeps its loader.
    pub(crate) fn leave_first(&self, outcome: O) {
        self.flight.leave(&self.own, outcome);
    }

    /// Whether the caller that began the flight still waits for it.
    pub(crate) fn is_awaited_by_first(&self) -> bool {
        self.flight.is_awaited_by(&self.own)
    }

    /// Whether later callers join the flight.
    pub(crate) fn is_joinable(&self) -> bool {
        let map = lock(self.flights.shard(&self.key));
        map.get(&self.key).is_some_and(|current| Arc::ptr_eq(current, &self.flight))
    }

    /// Takes the flight out of the map, if it is still there.
    pub(crate) fn detach(&self) {
        self.flights.remove(&self.key, &self.flight);
    }

    /// Ends the flight: all its waiters receive the outcome.
    pub(crate) fn finish(mut self, outcome: O) {
        self.outcome = outcome;
    }
}

impl<K: Hash + Eq, L, O: Clone, S: BuildHasher> Deref for Leader<K, L, O, S> {
    type Target = Flight<L, O>;

    fn deref(&self) -> &Flight<L, O> {
        &self.flight
    }
}

/// Invariants 2 and 4. Also runs when the leader's task panics or is dropped by its runtime.
impl<K: Hash + Eq, L, O: Clone, S: BuildHasher> Drop for Leader<K, L, O, S> {
    fn drop(&mut self) {
        self.detach();
        self.flight.end(&self.outcome);
    }
}

/// How many questions this process has sent to the store, since its start, whose answers may be older than a caller accepts. A counter
/// gives the order of callers and questions; a clock cannot, because two instants may be equal.
static QUESTIONS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// When a caller came, in the order of callers and questions. Costs one read of a counter that only misses change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerOrder(u64);

/// When a question was sent to the store: its position among callers and questions, and the time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentAt {
    order: u64,
    pub(crate) at: Instant,
}

impl CallerOrder {
    pub(crate) fn now() -> Self {
        Self(QUESTIONS.load(std::sync::atomic::Ordering::SeqCst))
    }

    /// Whether the caller came after the question was sent, so that it may know of a change that the answer does not include.
    pub(crate) fn is_after(self, question: SentAt) -> bool {
        self.0 >= question.order
    }
}

impl SentAt {
    pub(crate) fn now() -> Self {
        Self { order: QUESTIONS.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1, at: Instant::now() }
    }
}

#[cfg(test)]
mod order_tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn callers_and_questions_at_one_instant_are_ordered() {
        let (before, question, after) = (CallerOrder::now(), SentAt::now(), CallerOrder::now());
        assert!(!before.is_after(question) && after.is_after(question));
        let next = SentAt::now();
        assert!(!after.is_after(next));
    }
}
