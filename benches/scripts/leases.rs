//! The end of a lease with many waiters: HAND OVER past dead processes, and COMMIT with messages to processes that do not exist.

use stampede_guard::{LoadError, StampedeGuard};

use crate::stage::{SIZES, Stage, Step};
use crate::table::Table;

/// The longest time of one script call that is allowed, in milliseconds.
const LONGEST: f64 = 5.0;

pub(crate) fn hand_over(table: &mut Table) {
    let stage = Stage::start();
    let guard = stage.guard();
    // The loads panic on purpose, so the panics are not printed.
    std::panic::set_hook(Box::new(|_| {}));
    for (what, entries, nodes) in SIZES
        .map(|size| (format!("HAND OVER past {size} dead processes"), size, size))
        .into_iter()
        .chain([("HAND OVER past 10000 places of ten dead processes".to_owned(), 10_000, 10)])
    {
        let step =
            |round| ended(&stage, &guard, &format!("h{entries}x{nodes}r{round}"), (entries, nodes), true);
        stage.measure(table, what, LONGEST, step);
    }
    drop(std::panic::take_hook());
}

pub(crate) fn commit(table: &mut Table) {
    let stage = Stage::start();
    let guard = stage.guard();
    for size in SIZES {
        let step = |round| ended(&stage, &guard, &format!("c{size}r{round}"), (size, size), false);
        stage.measure(table, format!("COMMIT, {size} processes wait"), LONGEST, step);
    }
}

/// Ends a load while its queue has this many `entries`, of `nodes` nodes. The load returns a value or, with `vanishes`, panics, after which
/// the lease is handed over.
fn ended(
    stage: &Stage,
    guard: &StampedeGuard,
    key: &str,
    (entries, nodes): (usize, usize),
    vanishes: bool,
) -> Step {
    let queue = format!("sg1:q:{{default:{key}}}");
    let (loading, begun) = tokio::sync::oneshot::channel();
    let (go, resume) = tokio::sync::oneshot::channel::<()>();
    let load = move || async move {
        loading.send(()).expect("the bench waits");
        resume.await.expect("the bench goes on");
        let value = if vanishes { Err("the bench's own panic") } else { Ok(1_u8) };
        Ok::<_, String>(value.expect("a value"))
    };
    let loads = async {
        let loaded: Result<u8, LoadError<String>> = guard.get_or_load(key, load).await;
        assert_eq!(loaded.is_err(), vanishes);
    };
    let laid = async {
        begun.await.expect("it loads");
        stage.lay(&queue, entries, nodes, "");
        go.send(()).expect("it waits");
    };
    stage.runtime.block_on(async {
        tokio::join!(loads, laid);
        // The task of the flight continues for a moment after the value was returned.
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    });
    stage.until_removed(&queue);
    stage.scripts()
}
