//! A load is in progress in a runtime that is alive but not driven. Callers in other runtimes of the process must not wait for it for ever.

use std::time::Duration;

use stampede_guard::{MemoryStore, Policy, StampedeGuard};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{advance, sleep};

use crate::support::gate::Counter;

const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
const LEASE: Duration = Duration::from_secs(2);

/// A runtime with its own clock, which stands still.
fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime")
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Regression: as long as that runtime was not driven, no other caller of the process could refresh the key: the value went stale, and then
/// expired.
#[test]
fn a_refresh_in_an_undriven_runtime_delays_the_others_for_a_bounded_time() {
    let policy = Policy::builder().fresh_for(secs(10)).ttl_jitter(0.0).stale_while_revalidate(secs(3600));
    let policy = policy.load_timeout(LOAD_TIMEOUT).lease(LEASE).build().expect("valid");
    let (resting, serving) = (runtime(), runtime());
    let loads = Counter::default();
    let ask = |guard: &StampedeGuard| {
        let (guard, loads) = (guard.clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                Ok::<_, String>(2_u32)
            };
            guard.get_or_load("k", load).await.expect("served")
        }
    };
    let guard = serving.block_on(async {
        let guard = StampedeGuard::new(MemoryStore::new()).with_policy(policy);
        guard.insert("k", &1_u32).await.expect("stored");
        advance(secs(11)).await;
        guard
    });
    // The refresh of this runtime has begun, and makes no further step, because the runtime is not driven.
    resting.block_on(async {
        advance(secs(11)).await;
        assert_eq!(ask(&guard).await, 1);
    });
    assert_eq!((guard.stats().refreshes, loads.started()), (1, 0));
    serving.block_on(async {
        advance(LOAD_TIMEOUT).await;
        assert_eq!(ask(&guard).await, 1);
        assert_eq!((guard.stats().refreshes, loads.started()), (1, 0), "it may be at work yet");
        // By then the refresh must be over, wherever it runs: no load may take longer than `load_timeout`, and its lease has ended.
        advance(LEASE + secs(1)).await;
        assert_eq!(ask(&guard).await, 1);
        sleep(secs(1)).await;
        assert_eq!((guard.stats().refreshes, loads.started()), (2, 1));
        assert_eq!(ask(&guard).await, 2);
        assert_eq!(guard.stats().flights, 0);
    });
    // When the runtime is driven again, its refresh finds that the value was replaced meanwhile.
    resting.block_on(async {
        advance(LOAD_TIMEOUT + LEASE).await;
        sleep(secs(1)).await;
        assert_eq!(ask(&guard).await, 2);
    });
    assert_eq!((loads.started(), guard.stats().flights, guard.stats().tasks), (1, 0, 0));
}
