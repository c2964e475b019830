//! Promise 19 on a server: what could not be invalidated during an outage is invalidated after the outage.

use stampede_guard::ErrorKind;

use super::store_down::{Line, Outage};
use super::*;
use crate::support::proxy::Mode;

/// The outage does not remove the older value, because the server keeps its data.
async fn survives_an_outage(outage: Outage) {
    let policy =
        || Policy::builder().tags(["catalog"]).fresh_for(Duration::from_secs(600)).build().expect("valid");
    let line = Line::with(outage, policy()).await;
    let other = local(&line.server, policy()).await;
    connects(&line.guard).await;
    for key in ["k", "of a tag", "other"] {
        answer(&line.guard, key, 1).await;
    }
    line.guard
        .with_policy(Policy::default())
        .insert_with_tags("own", &1_u32, ["sale"])
        .await
        .expect("stored");
    line.begin(outage);
    let error = line.guard.invalidate("k").await.expect_err("not confirmed");
    assert!(error.to_string().contains("not confirmed yet"), "{error}");
    tokio::time::timeout(ms(50), line.guard.invalidate_tag("sale")).await.expect_err("it is dropped");
    assert_eq!(line.guard.stats().kept_invalidations, 2);

    line.end(outage);
    // These are all reads from the moment on at which the server answers. None of them may return the older value.
    let reads = async || {
        let read = line.guard.get::<u32>("k").await;
        assert_ne!(read.as_ref().ok(), Some(&Some(1)), "the older value is served");
        read.is_ok() && line.guard.stats().kept_invalidations == 0
    };
    eventually("all are sent", SOON, reads).await;
    assert_eq!(line.guard.stats().invalidations_resent, 2);
    connects(&other).await;
    assert_eq!(other.get::<u32>("k").await.expect("answered"), None);
    let plain = other.with_policy(Policy::default());
    assert_eq!(plain.get::<u32>("own").await.expect("answered"), None);
    for key in ["of a tag", "other"] {
        assert_eq!(other.get::<u32>(key).await.expect("answered"), Some(1), "{key}");
    }
}

#[tokio::test]
async fn an_unconfirmed_invalidation_is_sent_when_a_stopped_server_goes_on() {
    survives_an_outage(Outage::Stopped).await;
}

#[tokio::test]
async fn an_unconfirmed_invalidation_is_sent_when_the_network_is_back() {
    survives_an_outage(Outage::Network(Mode::BlackHole)).await;
}

#[tokio::test]
async fn an_unconfirmed_invalidation_is_sent_when_the_connection_is_back() {
    survives_an_outage(Outage::Network(Mode::Reset)).await;
}

/// A handler makes three changes, and the server is away at the first one.
async fn loses_none_of_three(outage: Outage, patience: Option<Duration>) {
    let line = Line::with(outage, lease_of(SOON)).await;
    let other = local(&line.server, lease_of(SOON)).await;
    connects(&line.guard).await;
    for key in ["a", "b"] {
        answer(&line.guard, key, 1).await;
    }
    line.guard.insert_with_tags("own", &1_u32, ["sale"]).await.expect("stored");
    line.begin(outage);
    let (began, sending) = (Instant::now(), line.guard.invalidation().key("a").tag("sale").key("b").send());
    match patience {
        Some(patience) => drop(tokio::time::timeout(patience, sending).await.expect_err("it is dropped")),
        None => {
            let error = sending.await.expect_err("not confirmed");
            assert_eq!(error.unconfirmed().len(), 3, "{error}");
            assert!(error.to_string().starts_with("not confirmed yet: 3 of 3"), "{error}");
            assert!(began.elapsed() < Duration::from_secs(2) + SLACK, "{:?}", began.elapsed());
        }
    }
    assert_eq!(line.guard.stats().kept_invalidations, 3);
    line.end(outage);
    eventually("all are sent", SOON, async || line.guard.stats().kept_invalidations == 0).await;
    connects(&other).await;
    for key in ["a", "b", "own"] {
        assert_eq!(other.get::<u32>(key).await.expect("answered"), None, "{key}");
    }
}

#[tokio::test]
async fn an_outage_at_the_first_of_three_invalidations_loses_none() {
    loses_none_of_three(Outage::Stopped, None).await;
    loses_none_of_three(Outage::Network(Mode::Reset), None).await;
}

#[tokio::test]
async fn a_cancellation_after_the_first_of_three_invalidations_loses_none() {
    loses_none_of_three(Outage::Stopped, Some(ms(50))).await;
    loses_none_of_three(Outage::Network(Mode::BlackHole), Some(ms(50))).await;
}

/// A guard that was shut down sends nothing more, so its error does not promise to send the invalidation.
#[tokio::test]
async fn after_a_shutdown_the_error_names_all_and_promises_nothing() {
    let server = RedisServer::start();
    let guard = local(&server, lease_of(SOON)).await;
    guard.shutdown(Duration::ZERO).await;
    let error = guard.invalidation().key("a").tag("b").send().await.expect_err("shut down");
    assert_eq!((error.kind(), error.unconfirmed().len()), (ErrorKind::Closed, 2), "{error}");
    assert!(!error.to_string().contains("kept"), "{error}");
}
