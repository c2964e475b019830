//! Regression tests of situations in which every waiting request went to the handler at the same time.

use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{MemoryStore, StampedeGuard};
use tokio::time::sleep;
use tower::Layer as _;

use super::kit::{Inner, Req, all, ask, get, policy, respond, send_many, settle, whole};
use crate::support::gate::Counter;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Regression: when a tag was invalidated faster than the handler answered, 400 handlers ran for 400 requests, in two processes.
#[tokio::test(start_paused = true)]
async fn a_tag_that_changes_faster_than_the_handler_answers_is_no_herd() {
    let (store, calls) = (MemoryStore::new(), Counter::default());
    let tagged = policy().tags(["catalog"]).build().unwrap();
    let guards = [(); 3].map(|()| StampedeGuard::new(store.clone()).with_policy(tagged.clone()));
    let counter = calls.clone();
    let handler = tower::service_fn(move |_: Req| {
        let counter = counter.clone();
        async move {
            let _running = counter.start();
            sleep(ms(300)).await;
            Ok::<_, Infallible>(respond(200, &[], whole("slow")))
        }
    });
    let shops = [0, 1].map(|at| guards[at].layer(handler.clone()));
    let requests = join_all((0..400).map(|n| {
        let shop = &shops[n % 2];
        async move {
            // Half of the requests come while the first handler runs.
            sleep(ms(150) * (n as u32 / 2 % 2)).await;
            ask(shop, get("/")).await
        }
    }));
    let storm = async {
        loop {
            sleep(ms(100)).await;
            guards[2].invalidate_tag("catalog").await.expect("confirmed");
        }
    };
    let seen = tokio::select! { seen = requests => seen, () = storm => unreachable!() };
    assert!(seen.iter().all(|seen| seen.status == 200));
    assert!(calls.started() <= 4, "{} calls", calls.started());
    assert!(calls.most_at_once() <= 2, "one in each process");
}

/// Regression: at the deadline of a shutdown, all requests that waited for another process's load went to the handler: 400 of 400.
#[tokio::test(start_paused = true)]
async fn requests_waiting_at_a_shutdown_share_one_call() {
    let (store, there, here) =
        (MemoryStore::new(), Inner::numbered(|_| ()).held(), Inner::numbered(|_| ()).held());
    let [loading, ending] = [(); 2].map(|()| StampedeGuard::new(store.clone()));
    let leads = send_many(&loading.layer(there.clone()), 1, "/");
    there.loads.reach(1).await;
    let shop = ending.layer(here.clone());
    let mut waiting = send_many(&shop, 400, "/");
    settle().await;
    assert_eq!(here.calls(), 0);
    assert!(!ending.shutdown(Duration::from_millis(100)).await.finished);
    settle().await;
    waiting.extend(send_many(&shop, 100, "/"));
    settle().await;
    assert_eq!(here.calls(), 1, "for those that waited, and those that came since");
    here.gate.open();
    assert!(all(waiting).await.iter().all(|seen| (seen.status, seen.text()) == (200, "1")));
    there.gate.open();
    all(leads).await;
}
