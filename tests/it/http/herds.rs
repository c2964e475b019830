//! What once sent every waiting request to the handler at once.

use std::time::Duration;

use stampede_guard::{MemoryStore, StampedeGuard};
use tower::Layer as _;

use super::kit::{Inner, all, crowd, policy, settle};

/// 400 handlers ran for 400 requests.
#[tokio::test(start_paused = true)]
async fn a_tag_that_changes_faster_than_the_handler_answers_is_no_herd() {
    let inner = Inner::numbered(|_| ()).held();
    let guard = StampedeGuard::in_memory().with_policy(policy().tags(["catalog"]).build().unwrap());
    let shop = guard.layer(inner.clone());
    let requests = crowd(&shop, 400, "/");
    settle().await;
    for calls in 1..=3 {
        if requests.iter().all(tokio::task::JoinHandle::is_finished) {
            break;
        }
        guard.invalidate_tag("catalog").await.expect("confirmed");
        assert_eq!(inner.calls(), calls);
        inner.gate.open();
        settle().await;
        inner.gate.close();
    }
    inner.gate.open();
    assert!(all(requests).await.iter().all(|seen| seen.status == 200));
    assert!(inner.calls() <= 2, "{} calls", inner.calls());
}

/// The deadline of a shutdown sent all requests that waited for another process's load to the handler: 400 of 400.
#[tokio::test(start_paused = true)]
async fn requests_that_wait_in_a_process_that_ends_share_one_call() {
    let (store, there, here) =
        (MemoryStore::new(), Inner::numbered(|_| ()).held(), Inner::numbered(|_| ()).held());
    let [loading, ending] = [(); 2].map(|()| StampedeGuard::new(store.clone()));
    let leads = crowd(&loading.layer(there.clone()), 1, "/");
    there.loads.reach(1).await;
    let shop = ending.layer(here.clone());
    let mut waiting = crowd(&shop, 400, "/");
    settle().await;
    assert_eq!(here.calls(), 0);
    assert!(!ending.shutdown(Duration::from_millis(100)).await.finished);
    settle().await;
    waiting.extend(crowd(&shop, 100, "/"));
    settle().await;
    assert_eq!(here.calls(), 1, "for those that waited, and those that came since");
    here.gate.open();
    assert!(all(waiting).await.iter().all(|seen| (seen.status, seen.text()) == (200, "1")));
    there.gate.open();
    all(leads).await;
}
