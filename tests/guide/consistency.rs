//! The code of `docs/consistency.md`.

use std::error::Error;
use std::time::Duration;

use serde::Deserialize;
use stampede_guard::{MemoryStore, Policy, StampedeGuard};

#[derive(Deserialize)]
struct Price {
    cents: u64,
}

fn guard(policy: Policy) -> Result<StampedeGuard, stampede_guard::Error> {
    StampedeGuard::builder(MemoryStore::new()).policy(policy).build()
}

#[tokio::test]
async fn audits() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(3600))
        .audit(0.001) // of a thousand hits one is compared with the origin
        .build()?;
    assert_eq!(guard(policy)?.stats().audits_differed, 0);
    let policy = Policy::builder()
        .audit(0.001)
        .audit_by(|served: &Price, loaded: &Price| served.cents == loaded.cents)
        .build()?;
    assert_eq!(guard(policy)?.stats().audits_matched, 0);
    Ok(())
}

#[tokio::test]
async fn a_trial() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().shadow(true).build()?;
    let guard = guard(policy)?;
    let price = guard.get_or_load("price", || async { Ok::<_, std::io::Error>(499_u64) }).await?;
    assert_eq!(price, 499);
    Ok(())
}
