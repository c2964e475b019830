//! Bounds the commands that callers and flights send to a server at once.
//!
//! A server answers commands one after the other. If thousands of callers of different keys came together without turns, each would
//! wait for the commands of all others within its own budget, time out, and load without the lease. So a flight waits for a turn, and so
//! does a single caller's look-up unless few look-ups run; the time limit of a command begins with its turn. A turn lasts for commands of
//! at most `command_timeout` each, and never while another load is awaited: turns do not wait for each other in a circle. If the server
//! hangs, its connection is closed after the time limits of two commands; then commands fail at once, and callers wait for no turn.
//!
//! [`LoadQueue`]: the loads of this process that wait for a permit of one load limit, and the order in which they get one.
//!
//! The permits of this process belong to no particular load: a permit that is granted goes to the load with the most callers. So the
//! queue in the store, which is first come first served, knows only how many permits this process asks for, and a load that gains a
//! caller costs no command. Of loads with equally many callers the newest is first: at an overload the callers of the oldest are about to
//! give up. Every eighth permit goes to the oldest load with callers, so that no load starves while its callers still wait. Loads without
//! callers (refreshes in the background, audits) come last, the oldest of them first.
//!
//! Invariants:
//!
//! 1. While loads wait, at least one request for a permit runs ([`PermitRequest`]). A request stops counting before it answers loads, so
//!    a load that comes meanwhile starts another request. After a grant, requests are started for the loads that still wait.
//! 2. A load that all its callers have left gets no permit.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout};

use crate::key::Key;
use crate::store::Store;
use crate::store::load_limit::{LimitState, LoadEnd};
use crate::sync::{lock, until};

/// How many look-ups run at once without turns, to all servers. Callers of one key share a look-up.
const FREE_LOOK_UPS: usize = 128;

/// How many further look-ups run at once to one server, each with a turn.
const LOOK_UPS: Width = Width { least: 128, per_millisecond: 128.0, most: 16_384 };

/// How many flights of single callers send commands at once. A hit of another caller waits behind that many commands of each process. The
/// least number already keeps a nearby server busy.
const SINGLE: Width = Width { least: 2, per_millisecond: 4.0, most: 512 };

/// How many flights of calls for many keys send commands at once.
const BATCHED: Width = Width { least: 1, per_millisecond: 4.0, most: 512 };

/// How many servers of a cluster have their own turns. If there are more servers, some share turns, and a slow one delays the others.
const SERVERS: usize = 16;

/// After this wait for a turn, the server is suspected and its round trip is read again: it may have become longer.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// How many turns there are at once: `per_millisecond` for each millisecond of the round trip, within the bounds, because it takes more
/// commands to keep a distant server busy. If `per_millisecond` were larger, fewer processes would suffice to fill the server's queue,
/// whose delay looks like a longer round trip.
#[derive(Clone, Copy, Debug)]
struct Width {
    least: usize,
    per_millisecond: f64,
    most: usize,
}

/// The turns of one guard, for each server.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// The number of running look-ups without turns.
    free_look_ups: AtomicUsize,
    servers: [ServerTurns; SERVERS],
}

#[derive(Debug)]
struct ServerTurns {
    look_ups: Queue,
    single: Queue,
    batched: Queue,
}

/// Turns in the order in which they are requested.
#[derive(Debug)]
struct Queue {
    permits: Arc<Semaphore>,
    size: Mutex<usize>,
    width: Width,
}

/// A caller or flight may send commands until this is dropped.
pub(crate) type Turn = OwnedSemaphorePermit;

/// A look-up that need not wait may send its commands until this is dropped.
#[derive(Debug)]
pub(crate) struct FreeTurn<'a>(&'a AtomicUsize);

impl Drop for FreeTurn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for ServerTurns {
    fn default() -> Self {
        let [look_ups, single, batched] = [LOOK_UPS, SINGLE, BATCHED].map(Queue::new);
        Self { look_ups, single, batched }
    }
}

impl Queue {
    fn new(width: Width) -> Self {
        Self { permits: Arc::new(Semaphore::new(width.least)), size: Mutex::new(width.least), width }
    }

    fn resize(&self, round_trip: Duration) {
        let Width { least, per_millisecond, most } = self.width;
        let size = (round_trip.as_secs_f64() * 1e3 * per_millisecond) as usize;
        let size = size.clamp(least, most);
        let mut present = lock(&self.size);
        if size > *present {
            self.permits.add_permits(size - *present);
            *present = size;
        } else {
            // Turns that are taken at present cannot be removed yet.
            *present -= self.permits.forget_permits(*present - size);
        }
    }
}

impl Turns {
    /// Lets a look-up begin without a turn if few enough run. All hits in the store pass here: one counter costs less than a turn.
    pub(crate) fn look_up_at_once(&self) -> Option<FreeTurn<'_>> {
        let turn = FreeTurn(&self.free_look_ups);
        (self.free_look_ups.fetch_add(1, Ordering::Relaxed) < FREE_LOOK_UPS).then_some(turn)
    }

    /// Waits for the turn of a look-up of this key, like [`flight`](Self::flight) for a flight.
    pub(crate) async fn look_up(&self, store: &Store, key: &Key) -> Option<Turn> {
        self.take(store, key, |server| &server.look_ups).await
    }

    /// Waits for the turn of a flight of this key. `None` if the connection to the key's server is down, so that commands fail at once.
    ///
    /// # Cancel safety
    ///
    /// Safe; the caller loses its position in the queue.
    pub(crate) async fn flight(&self, store: &Store, key: &Key, is_batched: bool) -> Option<Turn> {
        self.take(store, key, |server| if is_batched { &server.batched } else { &server.single }).await
    }

    async fn take(&self, store: &Store, key: &Key, queue: impl Fn(&ServerTurns) -> &Queue) -> Option<Turn> {
        if store.is_down(key.name()) {
            return None;
        }
        let mut server = store.server_of(key.name());
        let queue = queue(self.servers.get(server.number % SERVERS)?);
        let mut turn = pin!(Arc::clone(&queue.permits).acquire_owned());
        loop {
            queue.resize(server.round_trip);
            match timeout(LONG_WAIT, &mut turn).await {
                // Taking a turn fails only if the semaphore is closed, which is never done.
                Ok(turn) => return turn.ok(),
                Err(_) => store.suspect(),
            }
            server = store.server_of(key.name());
        }
    }
}

/// How many permits a process asks for at once. Few, so that a process with many waiting loads does not keep other processes waiting.
const MOST_REQUESTS: usize = 32;

/// How many waiting loads are looked at to count those with callers. Under an overload few of the newest loads have none.
const COUNTED_LOADS: usize = 256;

/// One permit in this many goes to the oldest waiting load.
const OLDEST_EVERY: u64 = 8;

/// How old the order of the loads may be, which follows from their counts of callers at one moment.
const ORDER_AGE: Duration = Duration::from_millis(50);

/// The answer to a waiting load.
pub(crate) enum Admission {
    Granted(GrantedPermit),
    /// The guard is shut down.
    Closed,
    /// All callers of the load have left.
    Left,
    /// The store failed.
    Failed(Arc<dyn Error + Send + Sync>),
}

/// A load's permit, which is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct GrantedPermit(oneshot::Sender<LoadEnd>);

impl GrantedPermit {
    /// Gives the permit back, and counts the load with this result. A permit that is dropped without this call is given back and counts no
    /// load.
    pub(crate) fn end(self, end: LoadEnd) {
        let _ = self.0.send(end);
    }
}

/// The queues of one guard, by the names of their limits.
#[derive(Debug, Default)]
pub(crate) struct LoadQueues(Mutex<HashMap<Arc<str>, Arc<LoadQueue>>>);

impl LoadQueues {
    pub(crate) fn of(&self, name: &Arc<str>) -> Arc<LoadQueue> {
        Arc::clone(lock(&self.0).entry(Arc::clone(name)).or_default())
    }

    pub(crate) fn health(&self) -> Vec<(Arc<str>, LoadQueueHealth)> {
        lock(&self.0).iter().map(|(name, queue)| (Arc::clone(name), queue.health())).collect()
    }
}

/// How many callers wait for a load; `None` for a load without callers.
pub(crate) type Callers = Box<dyn Fn() -> Option<usize> + Send>;

struct WaitingLoad {
    callers: Callers,
    admitted: oneshot::Sender<Admission>,
}

#[derive(Default)]
pub(crate) struct LoadQueue {
    state: Mutex<QueueState>,
    /// Notified when the last waiting load has left the queue, so that no request for a permit is needed any more.
    emptied: Notify,
    /// An adaptive limit, as of the last permit that this process gave back, and its configured minimum.
    seen: Mutex<Option<(LimitState, u32)>>,
}

#[derive(Default)]
struct QueueState {
    /// The waiting loads, numbered in the order in which they came.
    loads: BTreeMap<u64, WaitingLoad>,
    /// The loads by their number of callers, then by their turn among equals; the next load is last. The order is that of `ordered_at`: it still lists loads
    /// that have left since, and lacks loads that came since.
    order: Vec<(usize, u64, u64)>,
    ordered_at: Option<Instant>,
    came: u64,
    granted: u64,
    requests: usize,
    /// How many permits loads of this process hold.
    held: usize,
}

/// The state of one load limit, as this process sees it.
pub(crate) struct LoadQueueHealth {
    pub(crate) waiting: usize,
    pub(crate) held: usize,
    /// An adaptive limit, as the store last reported it to this process, and its configured minimum.
    pub(crate) limit: Option<(LimitState, u32)>,
}

impl fmt::Debug for LoadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadQueue").field("loads", &lock(&self.state).loads.len()).finish_non_exhaustive()
    }
}

impl LoadQueue {
    /// Queues a load. It leaves the queue when the returned [`QueuedLoad`] is dropped.
    pub(crate) fn wait(self: &Arc<Self>, callers: Callers) -> (QueuedLoad, oneshot::Receiver<Admission>) {
        let (admitted, admission) = oneshot::channel();
        let mut state = lock(&self.state);
        state.came += 1;
        let number = state.came;
        state.loads.insert(number, WaitingLoad { callers, admitted });
        (QueuedLoad { queue: Arc::clone(self), number }, admission)
    }

    /// Called with an adaptive limit and its configured minimum when a permit was given back.
    pub(crate) fn has_seen(&self, limit: LimitState, least: u32) {
        *lock(&self.seen) = Some((limit, least));
    }

    fn health(&self) -> LoadQueueHealth {
        let state = lock(&self.state);
        LoadQueueHealth { waiting: state.loads.len(), held: state.held, limit: *lock(&self.seen) }
    }

    /// How many loads this process runs at once while the store cannot be reached: its share of the limit that it has last seen, or all of
    /// `limit` if it has seen none.
    pub(crate) fn share(&self, limit: u32) -> usize {
        let seen = *lock(&self.seen);
        let share = seen.map_or(limit, |(seen, _)| seen.limit / seen.processes.max(1));
        usize::try_from(share.max(1)).unwrap_or(usize::MAX)
    }

    /// The number of loads that wait.
    pub(crate) fn waiting(&self) -> usize {
        lock(&self.state).loads.len()
    }

    /// A further request for a permit, if the waiting loads need one.
    pub(crate) fn request(self: &Arc<Self>) -> Option<PermitRequest> {
        let mut state = lock(&self.state);
        if state.requests >= state.needed() {
            return None;
        }
        state.requests += 1;
        Some(PermitRequest { queue: Arc::clone(self), is_open: true })
    }
}

impl QueueState {
    /// How many requests for a permit the waiting loads need, at most [`MOST_REQUESTS`]: one for each load with callers among the newest
    /// [`COUNTED_LOADS`], and one for all others together.
    fn needed(&self) -> usize {
        let newest = self.loads.values().rev().take(COUNTED_LOADS);
        let with_callers = newest.filter(|load| (load.callers)().is_some()).take(MOST_REQUESTS).count();
        (with_callers + usize::from(self.loads.len() > with_callers)).min(MOST_REQUESTS)
    }

    /// Counts the callers of all loads, orders the loads by that, and takes out the loads that all callers have left.
    fn order(&mut self, now: Instant) -> Vec<WaitingLoad> {
        self.ordered_at = Some(now);
        self.order.clear();
        let mut left = Vec::new();
        for (number, load) in &self.loads {
            match (load.callers)() {
                Some(0) => left.push(*number),
                Some(callers) => self.order.push((callers, *number, *number)),
                // No caller gives up on these loads, so the oldest is next.
                None => self.order.push((0, u64::MAX - number, *number)),
            }
        }
        self.order.sort_unstable();
        left.into_iter().filter_map(|number| self.loads.remove(&number)).collect()
    }

    /// Takes out the load that is next, and the loads that all callers have left.
    fn next(&mut self) -> (Option<WaitingLoad>, Vec<WaitingLoad>) {
        let now = Instant::now();
        let is_current = self.ordered_at.is_some_and(|at| now - at < ORDER_AGE) && !self.order.is_empty();
        let left = if is_current { Vec::new() } else { self.order(now) };
        self.granted += 1;
        let next = if self.granted.is_multiple_of(OLDEST_EVERY) {
            self.loads.iter().find(|(_, load)| (load.callers)() > Some(0)).map(|(number, _)| *number)
        } else {
            None
        };
        let by_callers = || {
            while let Some((.., number)) = self.order.pop() {
                if self.loads.contains_key(&number) {
                    return Some(number);
                }
            }
            self.loads.last_key_value().map(|(number, _)| *number)
        };
        let next = next.or_else(by_callers);
        (next.and_then(|number| self.loads.remove(&number)), left)
    }
}

/// A load's membership in a [`LoadQueue`]: dropping it removes the load.
pub(crate) struct QueuedLoad {
    queue: Arc<LoadQueue>,
    number: u64,
}

impl Drop for QueuedLoad {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        let load = state.loads.remove(&self.number);
        let is_empty = state.loads.is_empty();
        drop(state);
        drop(load);
        if is_empty {
            self.queue.emptied.notify_waiters();
        }
    }
}

/// A running request for a permit.
pub(crate) struct PermitRequest {
    queue: Arc<LoadQueue>,
    is_open: bool,
}

impl PermitRequest {
    /// Ends the request and resolves when no load waits any more, so that the permit is not needed.
    pub(crate) async fn unneeded(&mut self) {
        let queue = &self.queue;
        let ends = || {
            let mut state = lock(&queue.state);
            let is_empty = state.loads.is_empty();
            state.requests -= usize::from(is_empty);
            is_empty
        };
        until(&queue.emptied, ends).await;
        self.is_open = false;
    }

    /// Ends the request, and gives the permit to the load that is next. Returns that load; `None` if none waits.
    pub(crate) fn grant(self) -> Option<PermittedLoad> {
        let queue = self.end();
        loop {
            let (next, left) = lock(&queue.state).next();
            for load in left {
                let _ = load.admitted.send(Admission::Left);
            }
            let (end, ended) = oneshot::channel();
            // If this load has just given up, the permit goes to the next one.
            if next?.admitted.send(Admission::Granted(GrantedPermit(end))).is_ok() {
                lock(&queue.state).held += 1;
                return Some(PermittedLoad { queue, ended });
            }
        }
    }

    /// Ends the request, and answers all loads that wait with `refusal` instead of a permit.
    pub(crate) fn refuse(self, refusal: impl Fn() -> Admission) {
        let queue = self.end();
        let loads = std::mem::take(&mut lock(&queue.state).loads);
        for load in loads.into_values() {
            let _ = load.admitted.send(refusal());
        }
    }

    /// Ends the request. Call this before loads are answered: a load that comes meanwhile would rely on this request.
    fn end(self) -> Arc<LoadQueue> {
        Arc::clone(&self.queue)
    }
}

/// A load that holds a permit.
pub(crate) struct PermittedLoad {
    queue: Arc<LoadQueue>,
    ended: oneshot::Receiver<LoadEnd>,
}

impl PermittedLoad {
    /// Waits for the end of the load. `None` if its permit was dropped without a result, so that the load does not count.
    pub(crate) async fn ended(mut self) -> Option<LoadEnd> {
        (&mut self.ended).await.ok()
    }
}

impl Drop for PermittedLoad {
    fn drop(&mut self) {
        lock(&self.queue.state).held -= 1;
    }
}

/// A request that is dropped, for example by a runtime that ends, no longer counts.
impl Drop for PermitRequest {
    fn drop(&mut self) {
        if self.is_open {
            lock(&self.queue.state).requests -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the later load relied on the request that was ending, so no request ran for it and it waited out its `permit_timeout`.
    #[test]
    fn a_load_that_comes_while_others_are_refused_has_a_request_of_its_own() {
        let queue = Arc::<LoadQueue>::default();
        let (_refused, mut admission) = queue.wait(Box::new(|| Some(1)));
        let later = std::cell::OnceCell::new();
        queue.request().expect("needed").refuse(|| {
            let load = queue.wait(Box::new(|| Some(1)));
            let _ = later.set((load, queue.request().is_some()));
            Admission::Closed
        });
        assert!(matches!(admission.try_recv(), Ok(Admission::Closed)));
        assert!(later.get().is_some_and(|(_, has_request)| *has_request));
    }

    /// Regression: with 32 older loads in the background, one request for all.
    #[test]
    fn loads_in_the_background_take_no_requests_from_those_with_callers() {
        let queue = Arc::<LoadQueue>::default();
        let requests = |queue: &Arc<LoadQueue>| std::iter::from_fn(|| queue.request()).collect::<Vec<_>>();
        let _background: Vec<_> = (0..40).map(|_| queue.wait(Box::new(|| None))).collect();
        let mut running = requests(&queue);
        assert_eq!(running.len(), 1);
        let _with_callers: Vec<_> = (0..3).map(|_| queue.wait(Box::new(|| Some(1)))).collect();
        running.extend(requests(&queue));
        assert_eq!(running.len(), 4);
    }

    #[test]
    fn more_flights_send_at_once_to_a_distant_server() {
        let queue = Queue::new(BATCHED);
        let Width { least, most, .. } = BATCHED;
        for (micros, size) in [(0, least), (200, least), (20_000, 80), (400_000, most), (1_000, 4)] {
            queue.resize(Duration::from_micros(micros));
            assert_eq!(queue.permits.available_permits(), size, "{micros}");
        }
    }

    #[test]
    fn a_queue_becomes_smaller_as_turns_end() {
        let queue = Queue::new(BATCHED);
        queue.resize(Duration::from_secs(1));
        let take = |_| Arc::clone(&queue.permits).try_acquire_owned().expect("free");
        let turns: Vec<_> = (0..BATCHED.most).map(take).collect();
        queue.resize(Duration::ZERO);
        drop(turns);
        queue.resize(Duration::ZERO);
        assert_eq!(queue.permits.available_permits(), BATCHED.least);
    }
}
