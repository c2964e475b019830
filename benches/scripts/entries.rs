//! ACQUIRE while an entry of 1 MiB is stored: the entry that the caller has already read, or a new one.

use std::time::Duration;

use stampede_guard::{LoadError, Policy, StampedeGuard};
use tokio::time::sleep;

use crate::stage::{Stage, Step};
use crate::table::Table;

/// The length of the value. With its encoding it fits into the default `max_body` of 1 MiB.
const SIZE: usize = (1 << 20) - 64;
const LONGEST: f64 = 0.2;
const FRESH_FOR: Duration = Duration::from_millis(100);

pub(crate) fn acquire(table: &mut Table) {
    let stage = Stage::start();
    let guard = stage.guard();
    stage.measure(
        table,
        "ACQUIRE, the entry of 1 MiB that the caller has read is stored".to_owned(),
        LONGEST,
        |round| seen(&stage, &guard, format!("s{round}")),
    );
    stage.measure(table, "ACQUIRE, a new entry of 1 MiB is stored".to_owned(), LONGEST, |round| {
        new(&stage, &guard, format!("n{round}"))
    });
}

/// The scripts that run after a look-up has found a stale value and before the load.
fn seen(stage: &Stage, guard: &StampedeGuard, key: String) -> Step {
    let policy = Policy::builder().fresh_for(FRESH_FOR).stale_if_error(Duration::from_secs(60));
    let policy = policy.command_timeout(Duration::from_secs(10)).coordination_budget(Duration::from_secs(20));
    let guard = guard.with_policy(policy.lease(Duration::from_secs(60)).build().expect("valid"));
    let (loading, begun) = tokio::sync::oneshot::channel();
    let (go, resume) = tokio::sync::oneshot::channel::<()>();
    stage.runtime.block_on(async {
        guard.insert(&*key, &value()).await.expect("stored");
        sleep(FRESH_FOR).await;
        stage.forget();
        let load = || async move {
            loading.send(()).expect("the bench waits");
            resume.await.expect("the bench goes on");
            Ok::<_, String>(value())
        };
        let loads = async {
            let loaded: Result<String, LoadError<String>> = guard.get_or_load(&*key, load).await;
            loaded.expect("a value");
        };
        let look_up = async {
            begun.await.expect("it loads");
            let step = stage.scripts();
            go.send(()).expect("it waits");
            step
        };
        tokio::join!(loads, look_up).1
    })
}

/// The scripts that a waiter runs after it was notified that a value was stored.
fn new(stage: &Stage, guard: &StampedeGuard, key: String) -> Step {
    let of = |kind: &str| format!("sg1:{kind}:{{default:{key}}}");
    let (entry, lease, queue) = (of("e"), of("l"), of("q"));
    let holder = format!("{:032x}:{:032x}", 1, 1);
    stage.runtime.block_on(async {
        guard.insert(&*key, &value()).await.expect("stored");
        let stored: Vec<u8> = stage.run(redis::cmd("GET").arg(&entry));
        stage.run::<()>(redis::cmd("DEL").arg(&entry));
        stage.run::<()>(redis::cmd("SET").arg(&lease).arg(&holder).arg("PX").arg(60_000));
        let load = || async { Err::<String, _>("it is stored already".to_owned()) };
        let waits = async {
            let loaded: Result<String, LoadError<String>> = guard.get_or_load(&*key, load).await;
            assert_eq!(loaded.expect("a value").len(), SIZE);
        };
        let stores = async {
            let waiter = loop {
                let waiting: Vec<String> = stage.run(redis::cmd("LRANGE").arg(&queue).arg(0).arg(0));
                match waiting.into_iter().next() {
                    Some(waiter) => break waiter,
                    None => sleep(Duration::from_millis(1)).await,
                }
            };
            stage.run::<()>(redis::cmd("SET").arg(&entry).arg(&stored).arg("PX").arg(60_000));
            stage.run::<()>(redis::cmd("DEL").arg(&lease).arg(&queue));
            stage.forget();
            let channel = format!("sg1:i:{}", &waiter[..32]);
            stage.run::<()>(redis::cmd("PUBLISH").arg(channel).arg(format!("w{holder}default:{key}")));
        };
        tokio::join!(waits, stores);
    });
    stage.scripts()
}

fn value() -> String {
    "v".repeat(SIZE)
}
