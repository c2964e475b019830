//! The time of one call, measured for several sides that take turns.

use std::hint::black_box;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinSet, yield_now};

use crate::table::Spread;

const ROUNDS: usize = 9;
/// How long a side runs in one round: many scheduler switches long, so that a single switch does not decide the result.
const STRETCH: Duration = Duration::from_millis(100);
/// After this many calls a reader lets the other readers of its thread run.
const AT_ONCE: u32 = 64;

/// One of the compared programs: makes this many calls, and returns how long they took together.
pub(crate) type Side<'a> = Box<dyn FnMut(u32) -> Duration + 'a>;

/// A side with one caller on one thread.
pub(crate) fn lone<'a, T>(runtime: &'a Runtime, mut call: impl AsyncFnMut(u32) -> T + 'a) -> Side<'a> {
    Box::new(move |times| {
        runtime.block_on(async {
            let started = Instant::now();
            for number in 0..times {
                black_box(call(number).await);
            }
            started.elapsed()
        })
    })
}

/// A side with many readers at once. `reader` makes a number of calls as the reader with a given number, and calls [`lets_others_run`]
/// after each.
pub(crate) fn concurrent<'a, R, Fut>(runtime: &'a Runtime, readers: u32, reader: R) -> Side<'a>
where
    R: Fn(u32, u32) -> Fut + 'a,
    Fut: Future<Output = ()> + Send + 'static,
{
    Box::new(move |times| {
        runtime.block_on(async {
            let started = Instant::now();
            let mut tasks = JoinSet::new();
            for number in 0..readers {
                tasks.spawn(reader(number, times.div_ceil(readers)));
            }
            tasks.join_all().await;
            started.elapsed()
        })
    })
}

/// A call that finds its value in memory never waits, so without this the readers of a thread would run one after the other.
pub(crate) async fn lets_others_run(call: u32) {
    if call % AT_ONCE == AT_ONCE - 1 {
        yield_now().await;
    }
}

/// A runtime with two worker threads, as a small service has.
pub(crate) fn two_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

pub(crate) fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// For each side, how many nanoseconds a call took in each round.
#[derive(Debug)]
pub(crate) struct Times(Vec<Vec<f64>>);

/// Runs all sides once per round, each round in another order.
pub(crate) fn in_turn(sides: Vec<Side<'_>>) -> Times {
    let mut sides: Vec<_> = sides.into_iter().map(|mut side| (fill(&mut side), side)).collect();
    let mut nanos = vec![Vec::new(); sides.len()];
    for round in 0..ROUNDS {
        for turn in 0..sides.len() {
            let at = (round + turn) % sides.len();
            let (times, side) = &mut sides[at];
            nanos[at].push(side(*times).as_secs_f64() * 1e9 / f64::from(*times));
        }
    }
    Times(nanos)
}

impl Times {
    /// How many nanoseconds a call of this side took.
    pub(crate) fn of(&self, side: usize) -> Spread {
        Spread::of(&self.0[side])
    }

    /// The throughput of a side divided by that of a control, in each round.
    pub(crate) fn throughput(&self, side: usize, control: usize) -> Spread {
        let pairs = self.0[side].iter().zip(&self.0[control]);
        Spread::of(&pairs.map(|(side, control)| control / side).collect::<Vec<_>>())
    }
}

/// How many calls of this side fill a stretch. The measurement also warms caches up.
fn fill(side: &mut Side<'_>) -> u32 {
    let mut times = 1024;
    while times < u32::MAX / 2 {
        let took = side(times);
        if took >= STRETCH / 2 {
            return (f64::from(times) * STRETCH.as_secs_f64() / took.as_secs_f64()).ceil() as u32;
        }
        times *= 2;
    }
    times
}
