//! The ends of a lease behind which many wait: HAND OVER past the dead, COMMIT to processes that are not there.

use stampede_guard::{LoadError, StampedeGuard};

use crate::stage::{SIZES, Stage, Step};
use crate::table::Table;

/// No call holds the server for longer.
const LONGEST: f64 = 5.0;

pub(crate) fn hand_over(table: &mut Table) {
    let stage = Stage::start();
    let guard = stage.guard();
    // The loads vanish by a panic, which is no news here.
    std::panic::set_hook(Box::new(|_| {}));
    for (what, places, nodes) in SIZES
        .map(|size| (format!("HAND OVER past {size} dead processes"), size, size))
        .into_iter()
        .chain([("HAND OVER past 10000 places of ten dead processes".to_owned(), 10_000, 10)])
    {
        let step =
            |round| ended(&stage, &guard, &format!("h{places}x{nodes}r{round}"), (places, nodes), true);
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

/// The end of a load behind which so many places of so many nodes wait: by a panic, whose lease is handed over, or a value.
fn ended(
    stage: &Stage,
    guard: &StampedeGuard,
    key: &str,
    (places, nodes): (usize, usize),
    vanishes: bool,
) -> Step {
    let queue = format!("sg1:q:{{default:{key}}}");
    let (loading, begun) = tokio::sync::oneshot::channel();
    let (go, gone) = tokio::sync::oneshot::channel::<()>();
    let load = move || async move {
        loading.send(()).expect("the bench waits");
        gone.await.expect("the bench goes on");
        let value = if vanishes { Err("the bench's own panic") } else { Ok(1_u8) };
        Ok::<_, String>(value.expect("a value"))
    };
    let loads = async {
        let loaded: Result<u8, LoadError<String>> = guard.get_or_load(key, load).await;
        assert_eq!(loaded.is_err(), vanishes);
    };
    let laid = async {
        begun.await.expect("it loads");
        stage.lay(&queue, places, nodes, "");
        go.send(()).expect("it waits");
    };
    stage.runtime.block_on(async {
        tokio::join!(loads, laid);
        // What follows the value is the task's own.
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    });
    stage.until_gone(&queue);
    stage.scripts()
}
