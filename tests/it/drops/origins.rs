//! Drops of the futures of `testing::Origin`, with which users test their services.

use stampede_guard::testing::Origin;
use stampede_guard::{LoadContext, StampedeGuard};

use super::*;

/// A load that is dropped counts as a load, but no longer as a running one.
#[tokio::test(start_paused = true)]
async fn a_load_that_is_dropped_anywhere_does_not_run_on() {
    let drops = at_every_poll("load", async |drop| {
        let origin = Origin::new();
        origin.takes(ms(10));
        let waits = origin.wait_for_loads("k", 2);
        tokio::pin!(waits);
        let early = futures_util::future::poll_immediate(waits.as_mut()).await;
        assert!(early.is_none(), "{drop:?}: there was none yet");
        let done = dropped(drop, origin.load("k")).await.is_some();
        assert_eq!((origin.loads("k"), origin.total_most_at_once()), (1, 1), "{drop:?}");
        // The next load does not run beside the dropped one.
        assert_eq!(origin.load("k").await.ok(), Some(0), "{drop:?}");
        assert_eq!((origin.loads("k"), origin.total_most_at_once()), (2, 1), "{drop:?}");
        waits.await;
        done
    })
    .await;
    assert!(drops >= 2, "{drops}");
}

/// The guard's load continues, and a wait that is dropped takes no notification away from another wait.
#[tokio::test(start_paused = true)]
async fn a_wait_for_loads_that_is_dropped_anywhere_does_not_disturb_other_waits() {
    let drops = at_every_poll("wait_for_loads", async |drop| {
        let (guard, origin) = (StampedeGuard::in_memory(), Origin::new());
        origin.takes(ms(10));
        let loads = async {
            let origin = origin.clone();
            let load = |mut cx: LoadContext<u64>| async move { origin.load_with(&mut cx, "k").await };
            assert_eq!(guard.load("k").get(load).await.ok().map(|loaded| loaded.value), Some(0));
        };
        let waits = dropped(drop, origin.wait_for_loads("k", 1));
        let (done, (), ()) = tokio::join!(waits, origin.wait_for_loads("k", 1), loads);
        done.is_some()
    })
    .await;
    assert!(drops >= 1, "{drops}");
}
