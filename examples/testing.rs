//! The cost of each fault of the store for a service: three replicas for one minute of virtual time per fault.
//!
//! `cargo run --example testing --features testing [SEED]`

use std::time::Duration;

use stampede_guard::testing::{ChaosStore, Fault, Origin};
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

const REPLICAS: usize = 3;
const CALLERS: usize = 5;
const MINUTE: Duration = Duration::from_secs(60);

/// The result of one minute.
#[derive(Default)]
struct Minute {
    struck: u64,
    loads: u64,
    most_at_once: u64,
    answers: u64,
    errors: u64,
    slowest: Duration,
}

/// Callers on each replica ask for one key every 100 ms; it takes 50 ms to load and is fresh for 2 s.
async fn minute(seed: u64, fault: Option<(Fault, f64)>) -> Result<Minute, stampede_guard::Error> {
    let (chaos, origin) = (ChaosStore::new(seed), Origin::new());
    chaos.latency(Duration::from_millis(1), Duration::from_millis(2));
    origin.takes(Duration::from_millis(50));
    if let Some((fault, probability)) = fault {
        chaos.inject(fault, probability);
    }
    let policy = Policy::builder().fresh_for(Duration::from_secs(2)).build()?;
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..REPLICAS {
        let guard = StampedeGuard::builder(chaos.clone()).policy(policy.clone()).build()?;
        for _ in 0..CALLERS {
            let (guard, origin, began) = (guard.clone(), origin.clone(), Instant::now());
            callers.spawn(async move {
                let mut minute = Minute::default();
                while began.elapsed() < MINUTE {
                    let (origin, began) = (origin.clone(), Instant::now());
                    match guard.get_or_load("key", move || async move { origin.load("key").await }).await {
                        Ok(_) => minute.answers += 1,
                        Err(_) => minute.errors += 1,
                    }
                    minute.slowest = minute.slowest.max(began.elapsed());
                    sleep(Duration::from_millis(100)).await;
                }
                minute
            });
        }
    }
    let mut total = Minute::default();
    for caller in callers.join_all().await {
        total.answers += caller.answers;
        total.errors += caller.errors;
        total.slowest = total.slowest.max(caller.slowest);
    }
    total.struck = fault.map_or(0, |(fault, _)| chaos.struck(fault));
    total.loads = origin.loads("key");
    total.most_at_once = origin.most_at_once("key");
    Ok(total)
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seed = std::env::args().nth(1).map_or(Ok(1), |seed| seed.parse())?;
    fastrand::seed(seed);
    println!(
        "{REPLICAS} replicas, {CALLERS} callers each, one key, one minute of virtual time; SEED={seed}\n"
    );
    println!("fault           struck  loads  at once  answers  errors  slowest");
    let faults = Fault::ALL.iter().map(|&fault| match fault {
        // These faults last, or hit all replicas: a low probability is enough.
        Fault::Flush | Fault::FailOver | Fault::ClockStep | Fault::Unreachable | Fault::ReadOnly => {
            (fault, 0.01)
        }
        _ => (fault, 0.1),
    });
    for fault in std::iter::once(None).chain(faults.map(Some)) {
        let name = fault.map_or("none", |(fault, _)| fault.as_str());
        let Minute { struck, loads, most_at_once, answers, errors, slowest } = minute(seed, fault).await?;
        let slowest = slowest.as_millis();
        println!(
            "{name:<15} {struck:>6} {loads:>6} {most_at_once:>8} {answers:>8} {errors:>7} {slowest:>5} ms"
        );
    }
    Ok(())
}
