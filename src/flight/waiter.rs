//! One flight and its waiters: their slots, their loaders, and their outcomes. No I/O; the only time is when the flight began.
//! The invariants are listed in `flight`, which has the map.
//!
//! [`Oneshot`] is a slot for one message to a future that may be dropped at any moment. [`Oneshot::offer`] returns the message if the
//! reader was dropped, and [`Oneshot::close`] returns a message that was never read. So a message that must not be lost (a turn, a
//! baton) can always be passed on.

use std::future::Future;
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::{Arc, AtomicUsize, Mutex, Ordering, lock};

/// One load in progress in this process, and its waiters.
#[derive(Debug)]
pub(crate) struct Flight<L, O> {
    begun: Instant,
    /// The names of the tags that the flight checks before it publishes a value. Set before the flight can end.
    checked: OnceLock<Box<[Box<str>]>>,
    /// How many callers have a slot.
    waiters: AtomicUsize,
    /// How many loads have begun.
    loads: AtomicUsize,
    /// When the lease of the flight ends unless it is renewed, if it has one.
    lease_ends: OnceLock<Arc<Mutex<Instant>>>,
    state: Mutex<FlightState<L, O>>,
}

#[derive(Debug)]
struct FlightState<L, O> {
    /// The slots, in the order in which callers took them; closed slots are removed now and then.
    all: Vec<Arc<WaiterSlot<L, O>>>,
    /// The outcome that all waiters receive before the flight ends, if one was announced.
    announced: Option<O>,
    /// Whether any number of callers may join, because they do not wait.
    is_open_to_all: bool,
    store_link: StoreLink,
    leftover: LeftoverLoader<L, O>,
}

/// Whether the flight still learns of invalidations, hence whether a caller may join it after its look-up found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreLink {
    /// The flight learns of invalidations.
    Connected,
    /// Like [`Connected`](Self::Connected), for a flight that has replaced one that lost the store.
    Replacement,
    /// The flight lost the store. A caller whose look-up found nothing replaces it.
    Lost,
    /// The flight lost the store and a replacement would too, so callers join it anyway.
    LostForAll,
}

/// How far a flight is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlightProgress {
    pub(crate) age: Duration,
    /// How many callers have a slot.
    pub(crate) waiters: usize,
    /// How many loads have begun: none while the flight waits for the lease or a permit, several if some have vanished.
    pub(crate) loads: usize,
    /// The remaining time of the lease, as far as this process knows; `None` without a lease.
    pub(crate) lease_remaining: Option<Duration>,
}

/// The loader of a caller that stopped waiting, used only if no waiter has one (invariant 6).
#[derive(Debug)]
enum LeftoverLoader<L, O> {
    /// The next caller that stops waiting leaves its loader here.
    Empty,
    /// A caller that stopped waiting has left its loader, with its former slot.
    Left(L, Arc<WaiterSlot<L, O>>),
    /// A load has begun, or the flight has ended.
    Unneeded,
}

/// One caller's slot on a flight.
#[derive(Debug)]
pub(crate) struct WaiterSlot<L, O> {
    outcome: Oneshot<O>,
    loader: Mutex<Option<L>>,
}

impl<L, O: Clone> Flight<L, O> {
    pub(crate) fn new(store_link: StoreLink) -> Self {
        let state = FlightState {
            all: Vec::new(),
            announced: None,
            is_open_to_all: false,
            store_link,
            leftover: LeftoverLoader::Empty,
        };
        Self {
            begun: Instant::now(),
            checked: OnceLock::new(),
            waiters: AtomicUsize::new(0),
            loads: AtomicUsize::new(0),
            lease_ends: OnceLock::new(),
            state: Mutex::new(state),
        }
    }

    /// Records the tags whose ids the flight checks before it publishes a value. Only the first call counts.
    pub(crate) fn checks(&self, tags: Box<[Box<str>]>) {
        let _ = self.checked.set(tags);
    }

    /// The time since the flight began.
    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Records when the lease ends under which the flight loads. Only the first call counts.
    pub(crate) fn leased(&self, ends: Arc<Mutex<Instant>>) {
        let _ = self.lease_ends.set(ends);
    }

    pub(crate) fn progress(&self) -> FlightProgress {
        let [waiters, loads] = [&self.waiters, &self.loads].map(|count| count.load(Ordering::Relaxed));
        let left = |ends: &Arc<Mutex<Instant>>| lock(ends).saturating_duration_since(Instant::now());
        FlightProgress { age: self.age(), waiters, loads, lease_remaining: self.lease_ends.get().map(left) }
    }

    /// Whether no further caller may join: all `slots` slots are taken, and callers have to wait.
    pub(crate) fn is_full(&self, slots: usize) -> bool {
        self.waiters.load(Ordering::Relaxed) >= slots && !lock(&self.state).is_open_to_all
    }

    pub(crate) fn store_link(&self) -> StoreLink {
        lock(&self.state).store_link
    }

    pub(crate) fn attach(self: &Arc<Self>, loader: L) -> Waiter<L, O> {
        let slot = Arc::new(WaiterSlot { outcome: Oneshot::new(), loader: Mutex::new(Some(loader)) });
        let mut state = lock(&self.state);
        let all = &mut state.all;
        // Slots of callers that left during a long load must not pile up, so a full vector is cleared of them. It then gets room
        // for as many again; otherwise, when few slots are freed, each new caller would go through a long vector.
        if all.len() == all.capacity() {
            all.retain(|slot| !slot.outcome.is_closed());
            all.reserve(all.len());
        }
        all.push(Arc::clone(&slot));
        let announced = state.announced.clone();
        drop(state);
        self.waiters.fetch_add(1, Ordering::Relaxed);
        if let Some(outcome) = announced {
            // The slot has not been polled, so this wakes no task under the map's lock.
            slot.notify(outcome);
        }
        Waiter { slot, flight: Arc::clone(self) }
    }

    pub(crate) fn next_loader(&self) -> Option<(L, Arc<WaiterSlot<L, O>>)> {
        let mut state = lock(&self.state);
        let leftover = std::mem::replace(&mut state.leftover, LeftoverLoader::Unneeded);
        let waiting = state.all.iter().filter(|slot| !slot.outcome.is_closed()).find_map(|slot| {
            let loader = slot.take_loader()?;
            Some((loader, Arc::clone(slot)))
        });
        drop(state);
        // An unneeded leftover loader is dropped here, outside all locks.
        let next = match (waiting, leftover) {
            (Some(waiting), _) => waiting,
            (None, LeftoverLoader::Left(loader, slot)) => (loader, slot),
            (None, LeftoverLoader::Empty | LeftoverLoader::Unneeded) => return None,
        };
        self.loads.fetch_add(1, Ordering::Relaxed);
        Some(next)
    }

    /// Removes this slot from the flight, and gives its caller this outcome.
    pub(crate) fn leave(&self, own: &Arc<WaiterSlot<L, O>>, outcome: O) {
        lock(&self.state).all.retain(|slot| !Arc::ptr_eq(slot, own));
        own.notify(outcome);
    }

    /// Removes the slots whose loader `matches` from this flight, and gives their callers `outcome`. They keep their loaders, so they can
    /// join again.
    pub(crate) fn leave_if(&self, outcome: &O, matches: impl Fn(&L) -> bool) {
        // The slots are removed before they are notified, so that the flight uses none of their loaders next.
        let leave = |slot: &mut Arc<WaiterSlot<L, O>>| lock(&slot.loader).as_ref().is_some_and(&matches);
        let left: Vec<_> = lock(&self.state).all.extract_if(.., leave).collect();
        for slot in left {
            slot.notify(outcome.clone());
        }
    }

    /// Calls `see` with the loader of each caller that waits, while the flight and that loader are locked.
    pub(crate) fn each_loader(&self, see: impl Fn(&L)) {
        for slot in &lock(&self.state).all {
            if let Some(loader) = &*lock(&slot.loader) {
                see(loader);
            }
        }
    }

    /// Whether a caller waits for the flight. A caller whose loader was taken, by itself or by the flight, does not count.
    pub(crate) fn is_awaited(&self) -> bool {
        let is_awaited =
            |slot: &Arc<WaiterSlot<L, O>>| !slot.outcome.is_closed() && lock(&slot.loader).is_some();
        lock(&self.state).all.iter().any(is_awaited)
    }

    /// How many callers wait for the flight, counted as in [`is_awaited`](Self::is_awaited); `None` if none waits and an earlier caller has
    /// left its loader to the flight.
    pub(crate) fn callers(&self) -> Option<usize> {
        let state = lock(&self.state);
        let waits = |slot: &&Arc<WaiterSlot<L, O>>| !slot.outcome.is_closed() && lock(&slot.loader).is_some();
        match (state.all.iter().filter(waits).count(), &state.leftover) {
            (0, LeftoverLoader::Left(..)) => None,
            (callers, _) => Some(callers),
        }
    }

    pub(crate) fn is_awaited_by(&self, own: &Arc<WaiterSlot<L, O>>) -> bool {
        let is_attached = lock(&self.state).all.iter().any(|slot| Arc::ptr_eq(slot, own));
        is_attached && !own.outcome.is_closed()
    }

    /// Records that the flight learns of no invalidation from now on. `may_another_do_better`: a replacement may reach the store.
    pub(crate) fn lose_store(&self, may_another_do_better: bool) {
        let mut state = lock(&self.state);
        let first = may_another_do_better && state.store_link == StoreLink::Connected;
        state.store_link = if first { StoreLink::Lost } else { StoreLink::LostForAll };
    }

    /// Gives all present and later waiters this outcome before the flight ends, except the caller whose loader runs. Only the
    /// first announcement counts.
    pub(crate) fn announce(&self, outcome: O) {
        self.announce_to(outcome, false);
    }

    /// Like [`announce`](Self::announce). Callers that join later do not wait, so any number of them may join.
    pub(crate) fn announce_to_all(&self, outcome: O) {
        self.announce_to(outcome, true);
    }

    fn announce_to(&self, outcome: O, is_open_to_all: bool) {
        let all = {
            let mut state = lock(&self.state);
            state.is_open_to_all |= is_open_to_all && state.announced.is_none();
            if state.announced.is_some() {
                return;
            }
            state.announced = Some(outcome.clone());
            state.all.clone()
        };
        for slot in all {
            if lock(&slot.loader).is_some() {
                slot.notify(outcome.clone());
            }
        }
    }

    /// Gives all waiters the outcome. The flight must be out of the map by then.
    pub(crate) fn end(&self, outcome: &O) {
        let (all, _leftover) = {
            let mut state = lock(&self.state);
            (std::mem::take(&mut state.all), std::mem::replace(&mut state.leftover, LeftoverLoader::Unneeded))
        };
        for slot in all {
            slot.notify(outcome.clone());
        }
    }
}

impl<L, O> WaiterSlot<L, O> {
    /// Gives this slot alone an outcome, ahead of the flight's.
    pub(crate) fn notify(&self, outcome: O) {
        // This fails only if the caller has left the slot or already has an outcome.
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
/// Dropping it leaves the slot; the flight goes on.
#[derive(Debug)]
pub(crate) struct Waiter<L, O> {
    slot: Arc<WaiterSlot<L, O>>,
    flight: Arc<Flight<L, O>>,
}

impl<L, O> Waiter<L, O> {
    pub(crate) fn slot(&self) -> Arc<WaiterSlot<L, O>> {
        Arc::clone(&self.slot)
    }

    /// Takes this caller's loader back, unless the flight has used it.
    pub(crate) fn take_loader(&self) -> Option<L> {
        self.slot.take_loader()
    }

    /// Whether the flight checks this tag before it publishes a value.
    pub(crate) fn is_checked(&self, tag: &str) -> bool {
        self.flight.checked.get().is_some_and(|checked| checked.iter().any(|known| **known == *tag))
    }

    /// Changes this caller's loader, if the flight has not used it. Returns whether it has been changed.
    pub(crate) fn amend_loader(&self, amend: impl FnOnce(&mut L)) -> bool {
        lock(&self.slot.loader).as_mut().map(amend).is_some()
    }

    /// Leaves the slot, but lets the flight use the loader if no waiter has one (invariant 6).
    pub(crate) fn stop_waiting(self) {
        let mut state = lock(&self.flight.state);
        if matches!(state.leftover, LeftoverLoader::Empty)
            && let Some(loader) = self.slot.take_loader()
        {
            state.leftover = LeftoverLoader::Left(loader, Arc::clone(&self.slot));
        }
    }
}

impl<L, O> Future for Waiter<L, O> {
    type Output = O;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<O> {
        self.slot.outcome.poll_take(cx)
    }
}

impl<L, O> Drop for Waiter<L, O> {
    fn drop(&mut self) {
        // The slot is closed first: the leader skips closed slots, so the loader is dropped here, outside all locks.
        let _outcome = self.slot.outcome.close();
        self.flight.waiters.fetch_sub(1, Ordering::Relaxed);
        drop(self.slot.take_loader());
    }
}

#[derive(Debug)]
pub(crate) struct Oneshot<M> {
    state: Mutex<OneshotState<M>>,
}

#[derive(Debug)]
struct OneshotState<M> {
    message: Option<M>,
    waker: Option<Waker>,
    closed: bool,
}

impl<M> Oneshot<M> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(OneshotState { message: None, waker: None, closed: false }) }
    }

    /// Stores a message and wakes the reader; returns the message if the reader was dropped or already has one.
    pub(crate) fn offer(&self, message: M) -> Result<(), M> {
        let waker = {
            let mut state = lock(&self.state);
            if state.closed || state.message.is_some() {
                return Err(message);
            }
            state.message = Some(message);
            state.waker.take()
        };
        // Woken outside the lock, because a waker runs foreign code.
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// Takes the message, which closes this slot; pending until there is a message.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>) -> Poll<M> {
        let mut state = lock(&self.state);
        if let Some(message) = state.message.take() {
            state.closed = true;
            return Poll::Ready(message);
        }
        let stale = match &state.waker {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            _ => state.waker.replace(cx.waker().clone()),
        };
        drop(state);
        drop(stale);
        Poll::Pending
    }

    /// Closes the slot for the reader; returns a message that was not read.
    fn close(&self) -> Option<M> {
        let mut state = lock(&self.state);
        state.closed = true;
        let (waker, message) = (state.waker.take(), state.message.take());
        drop(state);
        drop(waker);
        message
    }

    fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}
