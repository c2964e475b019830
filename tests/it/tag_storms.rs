//! Promises 1, 11 and 12 together: tags that are invalidated faster than their values load cause no herd.
//!
//! Regression: a load with an invalidated tag served only its leader, so each caller attempted four loads and then loaded
//! alone, beyond the cap as well: 1,000 callers made 1,000 loads, 497 of them at once.

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{MemoryStore, OnWaitTimeout, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::sleep;

use crate::support::gate::Counter;

const LOAD: Duration = Duration::from_millis(300);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn nodes<const N: usize>(policy: PolicyBuilder) -> [StampedeGuard; N] {
    let (store, policy) = (MemoryStore::new(), policy.tags(["catalog"]).build().expect("valid"));
    [(); N].map(|()| StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid"))
}

async fn load(guard: StampedeGuard, key: String, takes: Duration, loads: Counter) {
    let load = move || async move {
        let _running = loads.start();
        sleep(takes).await;
        Ok::<_, String>(1)
    };
    guard.get_or_load(key, load).await.expect("loaded");
}

/// Runs the calls while another process invalidates the tag once per `period`.
async fn under_a_storm(guard: &StampedeGuard, period: Duration, calls: impl Future) {
    let storm = async {
        loop {
            sleep(period).await;
            guard.invalidate_tag("catalog").await.expect("confirmed");
        }
    };
    tokio::select! { _ = calls => {}, () = storm => unreachable!() }
}

#[tokio::test(start_paused = true)]
async fn each_caller_retries_at_most_once_and_a_node_has_one_load_at_a_time() {
    for (callers, period) in [(400, ms(250)), (1_000, ms(100))] {
        let [invalidates, guards @ ..]: [_; 3] = nodes(Policy::builder());
        let loads = [(); 2].map(|()| Counter::default());
        // Half of the callers come while the first load runs.
        let calls = join_all((0..callers).map(|n| {
            let (guard, loads) = (guards[n % 2].clone(), loads[n % 2].clone());
            async move {
                sleep(LOAD * (n as u32 / 2 % 2) / 2).await;
                load(guard, "k".into(), LOAD, loads).await;
            }
        }));
        under_a_storm(&invalidates, period, calls).await;
        for loads in loads {
            assert!(loads.started() <= 2, "{} loads of one node for {callers} callers", loads.started());
            assert_eq!(loads.most_at_once(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn no_load_goes_beyond_the_cap() {
    let [invalidates, guards @ ..]: [_; 3] = nodes(Policy::builder().max_concurrent_loads(3));
    let loads = Counter::default();
    let calls = join_all((0..1_000).map(|n| {
        let (guard, loads) = (guards[n % 2].clone(), loads.clone());
        async move {
            sleep(ms(n as u64 % 200)).await;
            load(guard, format!("key {}", n % 6), LOAD, loads).await;
        }
    }));
    under_a_storm(&invalidates, ms(100), calls).await;
    assert_eq!(loads.most_at_once(), 3);
    assert!(loads.started() <= 6 * 2 * 2, "{} loads of six keys on two nodes", loads.started());
}

/// The callers have passed their `wait_timeout`, so they load beside the lease. Such a load can be invalidated like any other.
#[tokio::test(start_paused = true)]
async fn slow_loads_outside_the_lease_are_one_at_a_time_too() {
    let policy = || Policy::builder().lease(ms(500)).wait_timeout(ms(400), OnWaitTimeout::Load);
    let [invalidates, guards @ ..]: [_; 3] = nodes(policy());
    let loads = [(); 2].map(|()| Counter::default());
    let calls = join_all((0..400).map(|n| {
        let (guard, loads) = (guards[n % 2].clone(), loads[n % 2].clone());
        async move {
            sleep(ms(n as u64)).await;
            load(guard, "k".into(), ms(3_000), loads).await;
        }
    }));
    under_a_storm(&invalidates, ms(100), calls).await;
    for loads in loads {
        // There is one load with the lease and one without it, and each is repeated once.
        assert!(loads.started() <= 4, "{} loads", loads.started());
        assert!(loads.most_at_once() <= 2, "{} at once", loads.most_at_once());
    }
}
