//! [`LoadQueue`]: the loads of this process that wait for a permit of one load limit, and the order in which they get one.
//!
//! The permits of this process belong to no particular load: a permit that is granted goes to the load with the most callers. So the
//! queue in the store, which is first come first served, knows only how many permits this process asks for, and a load that gains a
//! caller costs no command. Of loads with equally many callers the newest is first: at an overload the oldest are about to be given up
//! by their callers. Every eighth permit goes to the oldest, so that no load starves while its callers still wait. Loads without callers
//! (refreshes in the background, audits) come last.
//!
//! Invariants:
//!
//! 1. While loads wait, at least one request for a permit runs ([`PermitRequest`]). A request that ends takes a load along, or starts
//!    anew if a load came meanwhile.
//! 2. A load that all its callers have left gets no permit.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::store::load_limit::{LimitState, LoadEnd};
use crate::sync::lock;

/// How many permits a process asks for at once. Few, so that a process with many waiting loads does not keep the others waiting.
const MOST_REQUESTS: usize = 32;

/// Every so many permits go to the oldest load.
const OLDEST_EVERY: u64 = 8;

/// How old the counts of callers may be by which loads are ordered.
const ORDER_AGE: Duration = Duration::from_millis(50);

/// What a waiting load gets.
pub(crate) enum Admission {
    Granted(GrantedPermit),
    /// The guard is shut down.
    Closed,
    /// All its callers have left.
    Left,
    /// The store failed.
    Failed(Arc<dyn Error + Send + Sync>),
}

/// A load's permit, which is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct GrantedPermit {
    end: Mutex<Option<oneshot::Sender<LoadEnd>>>,
}

impl GrantedPermit {
    /// A permit, and how its load ends.
    pub(crate) fn new() -> (Self, oneshot::Receiver<LoadEnd>) {
        let (end, ended) = oneshot::channel();
        (Self { end: Mutex::new(Some(end)) }, ended)
    }

    /// Gives the permit back after a load that ended so. Without this call a permit that is dropped counts no load.
    pub(crate) fn end(&self, end: LoadEnd) {
        if let Some(sender) = lock(&self.end).take() {
            let _ = sender.send(end);
        }
    }
}

/// The queues of one guard, by the names of their limits.
#[derive(Debug, Default)]
pub(crate) struct LoadQueues(Mutex<HashMap<Arc<str>, Arc<LoadQueue>>>);

impl LoadQueues {
    pub(crate) fn of(&self, name: &Arc<str>) -> Arc<LoadQueue> {
        Arc::clone(lock(&self.0).entry(Arc::clone(name)).or_default())
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
    /// Notified when the last load has left.
    emptied: Notify,
    /// The limit when this process last gave a permit back; `None` for a limit that does not change.
    seen: Mutex<Option<LimitState>>,
}

#[derive(Default)]
struct QueueState {
    /// By the order in which they came.
    loads: BTreeMap<u64, WaitingLoad>,
    /// The loads by callers and age, the next one last. Loads that have left are still listed, later ones are not.
    order: Vec<(usize, u64)>,
    ordered_at: Option<Instant>,
    came: u64,
    granted: u64,
    requests: usize,
}

impl fmt::Debug for LoadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadQueue").field("loads", &lock(&self.state).loads.len()).finish_non_exhaustive()
    }
}

impl LoadQueue {
    /// Queues a load. Its place is given up when the ticket is dropped.
    pub(crate) fn wait(self: &Arc<Self>, callers: Callers) -> (QueuedLoad, oneshot::Receiver<Admission>) {
        let (admitted, admission) = oneshot::channel();
        let mut state = lock(&self.state);
        state.came += 1;
        let number = state.came;
        state.loads.insert(number, WaitingLoad { callers, admitted });
        (QueuedLoad { queue: Arc::clone(self), number }, admission)
    }

    /// Called with the limit when a permit was given back.
    pub(crate) fn has_seen(&self, limit: LimitState) {
        *lock(&self.seen) = Some(limit);
    }

    /// How many loads this process runs of `limit`, or of the limit that it has last seen, while the store can not be reached: its share.
    pub(crate) fn share(&self, limit: u32) -> usize {
        let seen = *lock(&self.seen);
        let share = seen.map_or(limit, |seen| seen.limit / seen.processes.max(1));
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

    /// All loads that wait get this instead of a permit.
    pub(crate) fn refuse_all(&self, refusal: impl Fn() -> Admission) {
        let loads = std::mem::take(&mut lock(&self.state).loads);
        for load in loads.into_values() {
            let _ = load.admitted.send(refusal());
        }
    }
}

impl QueueState {
    /// How many requests the waiting loads need: one if they are all without callers.
    fn needed(&self) -> usize {
        let needed = self.loads.len().min(MOST_REQUESTS);
        let all_in_background =
            || self.loads.values().take(MOST_REQUESTS).all(|load| (load.callers)().is_none());
        if needed > 1 && all_in_background() { 1 } else { needed }
    }

    /// Counts the callers of all loads, and takes out those that all callers have left.
    fn order(&mut self, now: Instant) -> Vec<WaitingLoad> {
        self.ordered_at = Some(now);
        self.order.clear();
        let mut left = Vec::new();
        for (number, load) in &self.loads {
            match (load.callers)() {
                Some(0) => left.push(*number),
                callers => self.order.push((callers.unwrap_or(0), *number)),
            }
        }
        self.order.sort_unstable();
        left.into_iter().filter_map(|number| self.loads.remove(&number)).collect()
    }

    /// Takes out the load that is next, and the loads that have been left.
    fn next(&mut self) -> (Option<WaitingLoad>, Vec<WaitingLoad>) {
        let now = Instant::now();
        let is_current = self.ordered_at.is_some_and(|at| now - at < ORDER_AGE) && !self.order.is_empty();
        let left = if is_current { Vec::new() } else { self.order(now) };
        self.granted += 1;
        let next = if self.granted % OLDEST_EVERY == 0 {
            self.loads.iter().find(|(_, load)| (load.callers)() > Some(0)).map(|(number, _)| *number)
        } else {
            None
        };
        let by_callers = || {
            while let Some((_, number)) = self.order.pop() {
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

/// A load's place in a [`LoadQueue`].
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
    /// Resolves when no load needs the permit any more, and the request has ended.
    pub(crate) async fn unneeded(&mut self) {
        loop {
            let emptied = self.queue.emptied.notified();
            tokio::pin!(emptied);
            emptied.as_mut().enable();
            {
                let mut state = lock(&self.queue.state);
                if state.loads.is_empty() {
                    state.requests -= 1;
                    self.is_open = false;
                    return;
                }
            }
            emptied.await;
        }
    }

    /// Ends the request, and gives the permit to the load that is next. Returns how that load will end; `None` if none waits.
    pub(crate) fn grant(mut self) -> Option<oneshot::Receiver<LoadEnd>> {
        self.is_open = false;
        let queue = Arc::clone(&self.queue);
        lock(&queue.state).requests -= 1;
        loop {
            let (next, left) = lock(&queue.state).next();
            for load in left {
                let _ = load.admitted.send(Admission::Left);
            }
            let (permit, ended) = GrantedPermit::new();
            // A load that has just given up does not receive it.
            if next?.admitted.send(Admission::Granted(permit)).is_ok() {
                return Some(ended);
            }
        }
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
