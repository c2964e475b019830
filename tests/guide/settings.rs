//! `docs/settings.md`.

use std::error::Error;
use std::time::Duration;

use stampede_guard::{AdaptiveLoads, OnOverload, OnWaitTimeout, Policy, StampedeGuard};

/// A report takes 8 s at worst; clients give up after 10 s; Redis is 1 ms away; the database takes 40 queries at once, and ten
/// processes ask it.
fn reports(redis: redis::Client) -> Result<StampedeGuard, stampede_guard::Error> {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(300))
        .load_timeout(Duration::from_secs(9))
        .wait_timeout(Duration::from_millis(9_500), OnWaitTimeout::Fail)
        .max_concurrent_loads(40)
        .permit_timeout(Duration::from_secs(1), OnOverload::Shed)
        .max_fail_open_loads(4)
        .build()?;
    StampedeGuard::builder(redis).namespace("reports").policy(policy).build()
}

#[test]
fn settings_of_a_service() -> Result<(), Box<dyn Error>> {
    let guard = reports(redis::Client::open("redis://127.0.0.1/")?)?;

    // One route with a shorter lifetime, on the same connections.
    let short_lived = guard.policy().to_builder().fresh_for(Duration::from_secs(5)).build()?;
    let short_lived = guard.with_policy(short_lived);

    assert_ne!(short_lived.policy(), guard.policy());
    Ok(())
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let refused = Policy::builder()
        .lease(Duration::from_millis(300))
        .command_timeout(Duration::from_millis(100))
        .build();
    let Err(error) = refused else { panic!("refused") };
    println!("{error}");
    assert!(
        error.to_string().contains("lease (300ms) and command_timeout (100ms) contradict each other"),
        "{error}"
    );
}

#[test]
fn a_distant_redis() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder()
        .coordination_budget(Duration::from_millis(400))
        .lease(Duration::from_secs(2)) // at least four command timeouts of, here, 200 ms
        .build()?;
    assert_ne!(policy, Policy::default());
    Ok(())
}

/// `docs/origin-limit.md`.
#[test]
fn a_limit_that_finds_its_number() -> Result<(), stampede_guard::Error> {
    let policy = Policy::builder()
        .adaptive_loads(true) // finds out how many loads at once the origin can take
        .permit_timeout(Duration::from_secs(2), OnOverload::Shed) // as long as clients wait
        .stale_if_error(Duration::from_secs(3_600)) // and serve the older value meanwhile, if there is one
        .build()?;

    let database = AdaptiveLoads::new().name("orders-db").min(8).start(50);
    let orders = Policy::builder().name("orders").adaptive_loads(database.clone()).build()?;
    let invoices = Policy::builder().name("invoices").adaptive_loads(database).build()?;

    assert!(policy != orders && orders != invoices);
    let refused = Policy::builder().adaptive_loads(AdaptiveLoads::new().min(30)).build();
    let Err(error) = refused else { panic!("refused") };
    assert!(
        error.to_string().contains("the start of adaptive_loads is 20: choose from its min to its max"),
        "{error}"
    );
    Ok(())
}
