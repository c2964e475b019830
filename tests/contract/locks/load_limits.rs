//! The law of load limits: on every kind of store the same limit follows from the same loads.

use std::collections::VecDeque;

use tokio::time::sleep;

use super::*;
use crate::store::load_limit::{EndedLoad, LimitBounds, LimitState, LoadEnd, LoadLimit, WINDOW_LOADS};

contract! {
    the_limit_follows_the_throughput_of_loads,
    a_limit_without_waiting_loads_stays_where_it_is,
    a_load_is_counted_once_and_only_if_it_held_a_permit,
    a_lost_semaphore_starts_anew,
}

const BOUNDS: LimitBounds = LimitBounds { least: 2, most: 25 };
const START: u32 = 10;

/// The loads of one process under one limit, in the order in which they get permits. After each end, the store's limit is compared with
/// that of the law in Rust.
struct Loads<'a> {
    node: &'a Store,
    name: LockName,
    loads: VecDeque<Asker>,
    law: LoadLimit,
    /// The time that `law` was last given.
    now: Instant,
    window: Window,
}

struct Window {
    begun: Instant,
    ended: u32,
    done: u32,
}

impl<'a> Loads<'a> {
    /// Begins this many loads, after a further load that has ended and thereby began the first window.
    async fn new(node: &'a Store, number: u32) -> Self {
        let now = Instant::now();
        let (law, window) = (LoadLimit::new(START, now), Window { begun: now, ended: 0, done: 0 });
        let mut all = Self { node, name: semaphore("k"), loads: VecDeque::new(), law, now, window };
        for _ in 0..=number {
            all.begin().await;
        }
        all.end(LoadEnd::Done).await;
        all.window.begun = Instant::now();
        all
    }

    /// Begins a load, which may have to wait.
    async fn begin(&mut self) {
        let load = Asker::on(self.node, &self.name);
        load.permit(load.ask_permit(START)).await;
        self.loads.push_back(load);
    }

    /// Ends the load that has held a permit for the longest time.
    async fn end(&mut self, end: LoadEnd) -> LimitState {
        let load = self.loads.pop_front().expect("a load");
        let state = load.end_load(end).await.1.expect("it held a permit");
        let window = &mut self.window;
        window.ended += 1;
        window.done += u32::from(end == LoadEnd::Done);
        if window.ended == WINDOW_LOADS {
            // How long the window was by the store's clock, computed from the throughput that the store reports, because the store may be
            // slow.
            let seconds = f64::from(window.done) * 1e3 / (state.throughput as f64 + 0.5);
            self.now += ms((seconds * 1e3).round() as u64).max(ms(500));
            *window = Window { begun: Instant::now(), ended: 0, done: 0 };
        }
        let (ended, waits) = (EndedLoad { end, bounds: BOUNDS }, self.loads.len() > BOUNDS.most as usize);
        assert_eq!(state, self.law.end_load(self.now, 0, ended, (waits, false)));
        state
    }

    /// Ends loads, each after another one has begun, until the window closes with the end of the last one.
    async fn end_window(&mut self, end: impl Fn(u32) -> LoadEnd) -> LimitState {
        loop {
            self.begin().await;
            let number = self.window.ended + 1;
            if number == WINDOW_LOADS {
                sleep(ms(520).saturating_sub(self.window.begun.elapsed())).await;
            }
            let state = self.end(end(number)).await;
            if number == WINDOW_LOADS {
                return state;
            }
        }
    }
}

impl Asker {
    async fn end_load(&self, end: LoadEnd) -> (PermitFreed, Option<LimitState>) {
        let load = (LEASE, EndedLoad { end, bounds: BOUNDS });
        self.node.end_load(&self.name, &self.token, load, WITHIN).await.expect("end")
    }
}

async fn the_limit_follows_the_throughput_of_loads(world: &World) {
    let node = world.node().await;
    let mut loads = Loads::new(&node, 40).await;
    // Refusals are neither failures nor throughput. Their share makes the throughput fall and rise, however long the store takes.
    let done_of_8 =
        |done: u32| move |number| if number % 8 < done { LoadEnd::Done } else { LoadEnd::Refused };
    for done in [1, 2, 4, 8, 4, 8, 8, 2, 4] {
        loads.end_window(done_of_8(done)).await;
    }
    // Two of three loads fail.
    let failed = |number| if number % 3 == 0 { LoadEnd::Done } else { LoadEnd::Failed };
    let mut limits = Vec::new();
    for _ in 0..7 {
        limits.push(loads.end_window(failed).await.limit);
    }
    // On a slow machine it was low already.
    assert!(limits.is_sorted_by(|before, after| before > after || (*before, *after) == (2, 2)), "{limits:?}");
    assert_eq!(limits[5..], [2, 2]);
    // When the limit becomes lower, no permit is taken away, but fewer loads begin.
    let state = loads.loads[0].state().await.expect("there");
    assert_eq!((state.capacity, state.available, state.holders.len()), (2, 0, 2));
    assert_eq!(loads.end_window(done_of_8(8)).await.limit, 3);
}

async fn a_limit_without_waiting_loads_stays_where_it_is(world: &World) {
    let node = world.node().await;
    let mut loads = Loads::new(&node, 1).await;
    assert_eq!(loads.end_window(|_| LoadEnd::Done).await.limit, START);
    assert_eq!(loads.end_window(|_| LoadEnd::Done).await.limit, START);
}

async fn a_load_is_counted_once_and_only_if_it_held_a_permit(world: &World) {
    let node = world.node().await;
    let name = semaphore("k");
    let (holder, waiter) = (Asker::on(&node, &name), Asker::on(&node, &name));
    holder.must_take_permit(1).await;
    waiter.must_wait_for_permit(1).await;
    // A waiter that leaves ends a load that held no permit: it is not counted.
    assert_eq!(waiter.end_load(LoadEnd::Done).await, (PermitFreed { was_held: false, available: 0 }, None));
    let (freed, limit) = holder.end_load(LoadEnd::Done).await;
    assert!(freed.was_held && limit.is_some(), "{freed:?} {limit:?}");
    // The end of the same load is sent again, as after a lost answer: it is not counted a second time.
    assert_eq!(holder.end_load(LoadEnd::Failed).await.1, None);
}

/// If the semaphore is lost, so is the law, with all its permits: the next load creates both, with the limit that it names.
async fn a_lost_semaphore_starts_anew(world: &World) {
    let node = world.node().await;
    let holder = Asker::on(&node, &semaphore("k"));
    holder.must_take_permit(7).await;
    assert!(holder.change(SemaphoreChange::Delete).await.is_some());
    assert_eq!(holder.end_load(LoadEnd::Done).await, (PermitFreed { was_held: false, available: 0 }, None));
    let next = Asker::on(&node, &holder.name);
    next.must_take_permit(5).await;
    assert_eq!(next.end_load(LoadEnd::Done).await.1.map(|state| state.limit), Some(5));
}
