//! `docs/guarantees.md`.

use std::error::Error;
use std::time::Duration;

use stampede_guard::{MemoryStore, StampedeGuard};

#[tokio::test]
async fn one_load_per_fleet() -> Result<(), Box<dyn Error>> {
    let store = MemoryStore::new(); // stands for Redis
    let fleet: Vec<_> = (0..3).map(|_| StampedeGuard::new(store.clone())).collect(); // as in three processes

    let mut callers = tokio::task::JoinSet::new();
    for n in 0..300 {
        let guard = fleet[n % 3].clone();
        let load = || async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            Ok::<_, std::io::Error>(42)
        };
        callers.spawn(async move { guard.get_or_load("answer", load).await });
    }
    for answer in callers.join_all().await {
        assert_eq!(answer?, 42);
    }
    assert_eq!(fleet.iter().map(|guard| guard.stats().loads).sum::<u64>(), 1);
    Ok(())
}
