//! The time of one call, measured for the guard and a control, which take turns.

use std::hint::black_box;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::table::{Limit, Row, Spread, Unit};

const ROUNDS: usize = 7;
/// How many tasks call at once.
const CALLERS: u32 = 64;
/// How long a side runs in one round: many scheduler switches long, so that a single switch does not decide the result.
const STRETCH: Duration = Duration::from_millis(50);

/// The sizes of the values that hits return, in bytes.
pub(crate) const SIZES: [usize; 3] = [64, 1024, 64 * 1024];

/// The guard or a control: makes this many calls, and returns how long they took together.
pub(crate) type Side<'a> = Box<dyn FnMut(u32) -> Duration + 'a>;

/// A side whose calls are synchronous.
pub(crate) fn calls<'a, T>(mut call: impl FnMut() -> T + 'a) -> Side<'a> {
    Box::new(move |times| {
        let started = Instant::now();
        for _ in 0..times {
            black_box(call());
        }
        started.elapsed()
    })
}

/// A side whose calls are asynchronous, and awaited one at a time.
pub(crate) fn awaited<'a, T>(runtime: &'a Runtime, mut call: impl AsyncFnMut() -> T + 'a) -> Side<'a> {
    Box::new(move |times| {
        runtime.block_on(async {
            let started = Instant::now();
            for _ in 0..times {
                black_box(call().await);
            }
            started.elapsed()
        })
    })
}

/// A side whose asynchronous calls are made by 64 tasks at once, on a runtime with threads.
pub(crate) fn concurrent<'a, F, Fut>(runtime: &'a Runtime, call: F) -> Side<'a>
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future + Send,
    Fut::Output: Send,
{
    Box::new(move |times| {
        let started = Instant::now();
        runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for _ in 0..CALLERS {
                let call = call.clone();
                tasks.spawn(async move {
                    for _ in 0..times.div_ceil(CALLERS) {
                        black_box(call().await);
                    }
                });
            }
            tasks.join_all().await;
        });
        started.elapsed()
    })
}

/// A runtime with two worker threads, as a small service has.
pub(crate) fn threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

pub(crate) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Runs both sides in turn, and makes a row of the guard's time divided by the control's.
pub(crate) fn compare(what: String, guard: Side<'_>, control: Side<'_>) -> Row {
    let mut sides = [guard, control].map(|mut side| (fill(&mut side), side));
    let mut nanos: [Vec<f64>; 2] = Default::default();
    for round in 0..ROUNDS {
        for at in [round % 2, (round + 1) % 2] {
            let (times, side) = &mut sides[at];
            nanos[at].push(side(*times).as_secs_f64() * 1e9 / f64::from(*times));
        }
    }
    let [guard, control] = &nanos;
    let ratios: Vec<_> = guard.iter().zip(control).map(|(guard, control)| guard / control).collect();
    let (ratio, guard, control) = (Spread::of(&ratios), Spread::of(guard), Spread::of(control));
    Row {
        what,
        unit: Unit::Ratio,
        must: Limit::None,
        aim: Limit::None,
        measured: ratio.median,
        detail: format!("{ratio}; {:.0} ns, control {:.0} ns", guard.median, control.median),
    }
}

/// How many calls of this side fill a stretch. The measurement also warms caches up.
fn fill(side: &mut Side<'_>) -> u32 {
    let mut times = 1;
    while times < u32::MAX / 2 {
        let took = side(times);
        if took >= STRETCH / 2 {
            return (f64::from(times) * STRETCH.as_secs_f64() / took.as_secs_f64()).ceil() as u32;
        }
        times *= 2;
    }
    times
}
