//! The code of `docs/loaders.md`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use stampede_guard::{MemoryStore, Policy, StampedeGuard};
use tokio::time::sleep;

#[derive(Clone, Default)]
struct Database(Arc<Mutex<Vec<String>>>);

impl Database {
    /// The products with these keys.
    async fn products(
        &self,
        missing: Vec<(&'static str, u64)>,
    ) -> Result<Vec<((&'static str, u64), String)>, std::io::Error> {
        let names: Vec<_> = missing.iter().map(|key| format!("{key:?}")).collect();
        self.0.lock().expect("no panic").push(format!("load of {}", names.join(", ")));
        Ok(missing.into_iter().map(|key| (key, format!("product {}", key.1))).collect())
    }
}

struct Shop {
    guard: StampedeGuard,
}

async fn page(shop: &Shop, db: Database, ids: Vec<u64>) -> Vec<Option<String>> {
    let products = shop
        .guard
        .get_or_load_many(ids.into_iter().map(|id| ("product", id)), move |missing| {
            let db = db.clone();
            // SELECT .. WHERE id IN (..): only what no replica has or loads
            async move { db.products(missing).await }
        })
        .await;
    products.into_iter().collect::<Result<_, _>>().expect("the database answers")
}

#[tokio::test(start_paused = true)]
async fn one_query_loads_what_is_missing() {
    let (shop, db) = (Shop { guard: StampedeGuard::in_memory() }, Database::default());
    page(&shop, db.clone(), vec![1]).await;
    let products = page(&shop, db.clone(), vec![1, 2, 3, 1]).await;
    let names = products.iter().flatten().map(String::as_str);
    assert!(names.eq(["product 1", "product 2", "product 3", "product 1"]));
    let loads = db.0.lock().expect("no panic");
    assert_eq!(loads[1..], [r#"load of ("product", 2), ("product", 3)"#]);
}

impl Database {
    async fn popular(&self) -> Vec<u64> {
        (0..250).collect()
    }
}

async fn start(guard: &StampedeGuard, db: Database) -> u64 {
    let popular = db.popular().await.into_iter().map(|id| ("product", id));
    let warmed = guard
        .warm(popular, 100, move |missing| {
            let db = db.clone();
            async move { db.products(missing).await }
        })
        .await;
    println!("{} stored, {} found, {} failed", warmed.stored, warmed.found, warmed.failed);
    warmed.stored
}

#[tokio::test(start_paused = true)]
async fn a_process_that_starts_loads_what_is_missing() {
    let (guard, db) = (StampedeGuard::in_memory(), Database::default());
    assert_eq!((start(&guard, db.clone()).await, start(&guard, db.clone()).await), (250, 0));
    assert_eq!(db.0.lock().expect("no panic").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_answer_has_its_age() -> Result<(), Box<dyn std::error::Error>> {
    let policy = Policy::builder().ttl_jitter(0.0).build()?;
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;
    let load = || async { Ok::<_, std::io::Error>(499_u32) };
    guard.get_or_load(("price", 7), load).await?;
    sleep(Duration::from_secs(20)).await;
    let price = guard.load(("price", 7)).get(move |_| load()).await?;
    let (value, how) = (price.value, price.info.outcome.as_str());
    let (age, rest) = (price.info.age.as_secs(), price.info.fresh_for.as_secs());
    println!("{value}: {how}, {age} s old, fresh for {rest} s");
    assert_eq!(format!("{value}: {how}, {age} s old"), "499: hit, 20 s old");
    assert!((39..=40).contains(&rest), "{rest}");
    Ok(())
}
