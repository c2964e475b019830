//! A cap on the loads of different keys in the whole fleet: a fair queue in front of the origin.
//!
//! ```text
//! cargo run --example bulkhead                                   no set-up: three replicas on an in-memory store
//! REDIS_URL=redis://127.0.0.1/ cargo run --example bulkhead     the same on Redis
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use stampede_guard::{Backend, MemoryStore, OnOverload, Policy, StampedeGuard};

const KEYS: usize = 24;
const CAP: u32 = 4;

/// An origin that can not take more than a few queries at once.
#[derive(Default)]
struct Database {
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Database {
    async fn query(&self, id: usize) -> Result<String, std::io::Error> {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.running.fetch_sub(1, Ordering::SeqCst);
        Ok(format!("row {id}"))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let replicas = replicas()?;
    let plain = Policy::default();
    let capped = Policy::builder()
        .max_concurrent_loads(CAP)
        .permit_timeout(Duration::from_secs(10), OnOverload::Shed)
        .build()?;
    println!("{KEYS} cold keys, requested by three replicas at once; the database takes 100 ms a query\n");
    for (name, policy) in [("without a cap", plain), ("max_concurrent_loads(4)", capped)] {
        let database = Arc::new(Database::default());
        let started = Instant::now();
        let calls = (0..KEYS * 3).map(|call| {
            let (guard, database) = (replicas[call % 3].with_policy(policy.clone()), Arc::clone(&database));
            let id = call / 3;
            async move { guard.get_or_load((name, id), move || async move { database.query(id).await }).await }
        });
        for answer in join_all(calls).await {
            answer?;
        }
        let most = database.most.load(Ordering::SeqCst);
        println!("{name:>24}: {most:>2} queries at once at most, all answered in {:?}", started.elapsed());
    }
    Ok(())
}

/// Three guards, as if in three processes.
fn replicas() -> Result<Vec<StampedeGuard>, Box<dyn std::error::Error>> {
    let memory = MemoryStore::new();
    // A new namespace per run, so that all keys are cold.
    let namespace = format!("bulkhead-{}", uuid::Uuid::new_v4().simple());
    let backend = || -> Result<Backend, Box<dyn std::error::Error>> {
        match std::env::var("REDIS_URL") {
            Ok(url) => Ok(redis::Client::open(url)?.into()),
            Err(_) => Ok(memory.clone().into()),
        }
    };
    (0..3).map(|_| Ok(StampedeGuard::builder(backend()?).namespace(namespace.as_str()).build()?)).collect()
}
