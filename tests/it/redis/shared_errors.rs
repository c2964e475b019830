//! On Redis, a loader's error keeps its type in the message to a waiter, and in the record of `error_for`.

use super::*;
use crate::shared_errors::{ApiError, busy};
use crate::support::gate::{Counter, Gate};

#[tokio::test]
async fn an_error_reaches_other_nodes_as_itself() {
    let server = RedisServer::start();
    let policy = || {
        let shared = patient(Duration::from_secs(60)).share_errors::<ApiError>();
        shared.error_for(Duration::from_secs(50)).build().expect("valid")
    };
    let guards = [local(&server, policy()).await, local(&server, policy()).await];
    let (gate, loads) = (Gate::closed(), Counter::default());
    let call = |guard: &StampedeGuard| {
        let load = held_load(guard, "k", Err::<u32, _>(busy()), &gate, &loads);
        tokio::spawn(async move { load.await.expect_err("failed") })
    };
    let leads = call(&guards[0]);
    loads.reach(1).await;
    let waits = call(&guards[1]);
    queued(&server, "k", 1).await;
    gate.open();
    let (led, waited) = notified(futures_util::future::join(leads, waits)).await;
    let later = call(&guards[1]).await;
    for error in [led, waited, later].map(|error| error.expect("joined")) {
        assert_eq!(error.loader(), Some(&busy()), "{error:?}");
    }
    assert_eq!(loads.started(), 1);
}
