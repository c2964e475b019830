//! Memoized functions in several nodes on one server: their keys are the same, so one load serves all.

use std::convert::Infallible;

use stampede_guard::{LoadError, memoize};

use super::*;

#[memoize(guard = guard, name = "exchange rate", skip(guard, gate, loads), fresh_for = "50s")]
async fn rate(
    guard: &StampedeGuard,
    gate: &Gate,
    loads: &Counter,
    from: &str,
    to: String,
) -> Result<Option<u32>, LoadError<Infallible>> {
    let _running = loads.start();
    gate.pass().await;
    Ok((from != to).then_some(loads.started() as u32))
}

#[tokio::test]
async fn nodes_share_one_load_of_a_memoized_function_and_its_invalidation() {
    let server = RedisServer::start();
    let guards = [local(&server, lease_of(SOON * 6)).await, local(&server, lease_of(SOON * 6)).await];
    let (gate, loads) = (Gate::closed(), Counter::default());
    let call = |node: usize| {
        let (guard, gate, loads) = (guards[node].clone(), gate.clone(), loads.clone());
        tokio::spawn(async move { rate(&guard, &gate, &loads, "EUR", "USD".to_owned()).await })
    };
    let leads = call(0);
    loads.reach(1).await;
    let waits = call(1);
    queued(&server, "exchange%20rate:EUR:USD", 1).await;
    gate.open();
    let (led, waited) = notified(futures_util::future::join(leads, waits)).await;
    for answer in [led, waited, call(0).await, call(1).await] {
        assert_eq!(answer.expect("joined").expect("loaded"), Some(1));
    }
    assert_eq!(loads.started(), 1);
    let key = || rate_key("EUR", "USD".to_owned());
    assert_eq!(guards[1].get::<Option<u32>>(key()).await.expect("answered"), Some(Some(1)));
    let rest = guards[1].remaining_freshness(key()).await.expect("answered").expect("stored");
    assert!(rest <= Duration::from_secs(50), "{rest:?}");
    guards[1].invalidate(key()).await.expect("confirmed");
    assert_eq!(call(0).await.expect("joined").expect("loaded"), Some(2));
}
