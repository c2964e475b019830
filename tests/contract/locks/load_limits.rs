//! The law of load limits: on every kind of store the same limit follows from the same loads.

use std::collections::VecDeque;

use tokio::time::sleep;

use super::*;
use crate::store::load_limit::{EndedLoad, LimitBounds, LimitState, LoadEnd};

contract! {
    the_limit_follows_the_throughput_of_loads,
    a_limit_without_waiting_loads_stays_where_it_is,
    a_load_is_counted_once_and_only_if_it_held_a_permit,
    a_lost_semaphore_starts_anew,
}

const BOUNDS: LimitBounds = LimitBounds { least: 2, most: 25 };

/// The loads of one process under one limit, in the order in which they get permits.
struct Loads<'a> {
    node: &'a Store,
    name: LockName,
    start: u32,
    loads: VecDeque<Asker>,
    window: Instant,
}

impl<'a> Loads<'a> {
    fn new(node: &'a Store, name: &str, start: u32) -> Self {
        Self { node, name: semaphore(name), start, loads: VecDeque::new(), window: Instant::now() }
    }

    /// Begins a load, which may have to wait.
    async fn begin(&mut self) {
        let load = Asker::on(self.node, &self.name);
        load.permit(load.ask_permit(self.start)).await;
        self.loads.push_back(load);
    }

    /// Ends the load that has held a permit for longest.
    async fn end(&mut self, end: LoadEnd) -> LimitState {
        let load = self.loads.pop_front().expect("a load");
        load.end_load(end).await.1.expect("it held a permit")
    }

    /// Ends loads, each followed by another, until their window closes.
    async fn end_window(&mut self, ends: u32, end: impl Fn(u32) -> LoadEnd) -> LimitState {
        let mut state = LimitState::default();
        for number in 0..ends {
            self.begin().await;
            if number == ends - 1 {
                sleep(ms(520).saturating_sub(self.window.elapsed())).await;
            }
            state = self.end(end(number)).await;
        }
        self.window = Instant::now();
        state
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
    let mut loads = Loads::new(&node, "k", 10);
    for _ in 0..40 {
        loads.begin().await;
    }
    loads.end(LoadEnd::Done).await;
    loads.window = Instant::now();
    let done = |_| LoadEnd::Done;
    let shown = |state: LimitState| (state.limit, state.rises);
    // The first window has none to be compared with. The second has half as much throughput again. (Few loads, so that
    // a slow store does not close a window before its last load.)
    assert_eq!(shown(loads.end_window(40, done).await), (15, true));
    assert_eq!(shown(loads.end_window(60, done).await), (22, true));
    // The throughput falls: the limit has risen beyond the knee.
    assert_eq!(shown(loads.end_window(40, done).await), (19, false));
    assert_eq!(shown(loads.end_window(60, done).await), (16, false));
    assert_eq!(shown(loads.end_window(40, done).await), (18, true));
    let state = loads.end_window(60, done).await;
    assert_eq!((shown(state), state.processes), ((20, true), 1));
    assert!((50_000..160_000).contains(&state.throughput), "{state:?}");
    // Refusals are neither failures nor throughput.
    let refused = |number| if number % 2 == 0 { LoadEnd::Refused } else { LoadEnd::Done };
    assert_eq!(shown(loads.end_window(60, refused).await), (17, false));
    // All processes that ended loads saw more fail than not.
    let failed = |number| if number % 3 == 0 { LoadEnd::Done } else { LoadEnd::Failed };
    assert_eq!(shown(loads.end_window(40, failed).await), (10, true));
    // From there it rises by half again, up to the greatest limit.
    assert_eq!(shown(loads.end_window(40, done).await), (15, true));
    assert_eq!(shown(loads.end_window(60, done).await), (22, true));
    assert_eq!(shown(loads.end_window(90, done).await), (25, true));
    for limit in [15, 9, 5, 3, 2, 2] {
        assert_eq!(shown(loads.end_window(40, |_| LoadEnd::Failed).await), (limit, true));
    }
    // A limit that became lower takes nothing away, and lets fewer begin.
    let state = loads.loads[0].state().await.expect("there");
    assert_eq!((state.capacity, state.available, state.holders.len()), (2, 0, 2));
}

async fn a_limit_without_waiting_loads_stays_where_it_is(world: &World) {
    let node = world.node().await;
    let mut loads = Loads::new(&node, "k", 10);
    loads.begin().await;
    assert_eq!(loads.end_window(40, |_| LoadEnd::Done).await.limit, 10);
    assert_eq!(loads.end_window(60, |_| LoadEnd::Done).await.limit, 10);
}

async fn a_load_is_counted_once_and_only_if_it_held_a_permit(world: &World) {
    let node = world.node().await;
    let name = semaphore("k");
    let (holder, waiter) = (Asker::on(&node, &name), Asker::on(&node, &name));
    holder.must_take_permit(1).await;
    waiter.must_wait_for_permit(1).await;
    // A waiter that leaves.
    assert_eq!(waiter.end_load(LoadEnd::Done).await, (PermitFreed { was_held: false, available: 0 }, None));
    let (freed, limit) = holder.end_load(LoadEnd::Done).await;
    assert!(freed.was_held && limit.is_some(), "{freed:?} {limit:?}");
    // The same call again, after a lost answer.
    assert_eq!(holder.end_load(LoadEnd::Failed).await.1, None);
}

/// A flush loses the law with its permits: the next load creates both with the limit that it names.
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
