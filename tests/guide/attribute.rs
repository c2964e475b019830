//! The code of `docs/attribute.md`.

use std::error::Error;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stampede_guard::{LoadError, StampedeGuard, memoize};
use tokio::time::sleep;

#[derive(Debug)]
struct DbError;

impl fmt::Display for DbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the database is away")
    }
}

#[derive(Clone, Default)]
struct Database(Arc<AtomicU64>);

impl Database {
    async fn price(&self, id: u64) -> Result<Option<u64>, DbError> {
        let earlier = self.0.fetch_add(1, Ordering::SeqCst);
        if id == 0 { Err(DbError) } else { Ok((id < 100).then_some(499 + earlier)) }
    }

    async fn find(&self, text: &str) -> Result<Vec<u64>, DbError> {
        Ok((0..text.len() as u64).collect())
    }

    async fn row<T: Row>(&self, id: u64) -> Result<T, DbError> {
        Ok(T::of(id))
    }
}

#[derive(Clone)]
struct Shop {
    guard: StampedeGuard,
    db: Database,
    region: String,
}

impl Shop {
    /// The price in cents, if there is such a product.
    #[memoize(guard = self.guard, name = "price", fresh_for = "30s", negative_for = "5s")]
    async fn price(&self, id: u64) -> Result<Option<u64>, LoadError<DbError>> {
        self.db.price(id).await // one caller's in the whole fleet, and again when the value is stale
    }
}

impl Shop {
    async fn price_by_hand(&self, id: u64) -> Result<Option<u64>, LoadError<DbError>> {
        let db = self.db.clone();
        self.guard.get_or_load(("price", id), move || async move { db.price(id).await }).await
    }
}

fn shop() -> Shop {
    Shop { guard: StampedeGuard::in_memory(), db: Database::default(), region: "eu".to_owned() }
}

async fn changed(shop: &Shop) -> Result<(), Box<dyn Error>> {
    let price = shop.price(7).await?;
    shop.guard.invalidate(Shop::price_key(7)).await?;
    assert_eq!(price, Some(499));
    Ok(())
}

#[tokio::test]
async fn a_method_is_memoized_and_its_key_is_invalidated() -> Result<(), Box<dyn Error>> {
    let shop = shop();
    changed(&shop).await?;
    assert_eq!((shop.price(7).await?, shop.price_by_hand(7).await?), (Some(500), Some(500)));
    assert_eq!(
        (shop.price(100).await?, shop.price(100).await?, shop.db.price(1).await.ok().flatten()),
        (None, None, Some(502))
    );
    let failed = shop.price(0).await.expect_err("it fails");
    assert_eq!(failed.to_string(), "the load failed: the database is away");
    Ok(())
}

async fn inserted(shop: &Shop) -> Result<(), Box<dyn Error>> {
    let policy = shop.guard.policy().to_builder().fresh_for(Duration::from_secs(30)).build()?;
    shop.guard.with_policy(policy).insert(Shop::price_key(7), &Some(599_u64)).await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_value_is_inserted_with_the_settings_of_the_guard() -> Result<(), Box<dyn Error>> {
    let shop = shop();
    inserted(&shop).await?;
    // The guard's own policy has a minute.
    shop.guard.insert(Shop::price_key(8), &Some(699_u64)).await?;
    assert_eq!((shop.price(7).await?, shop.price(8).await?), (Some(599), Some(699)));
    sleep(Duration::from_secs(31)).await;
    assert_eq!((shop.price(7).await?, shop.price(8).await?), (Some(499), Some(699)));
    Ok(())
}

impl Shop {
    #[memoize(guard = self.guard, key = ("found", &self.region, text.to_lowercase()))]
    async fn found(&self, text: &str, trace: String) -> Result<Vec<u64>, LoadError<DbError>> {
        tracing(trace);
        self.db.find(text).await
    }
}

fn tracing(_: String) {}

#[tokio::test]
async fn a_key_is_an_expression() -> Result<(), Box<dyn Error>> {
    let shop = shop();
    assert_eq!(shop.found("Hat", "a trace".to_owned()).await?, [0, 1, 2]);
    assert_eq!(shop.found_key("hat").to_string(), "found:eu:hat");
    Ok(())
}

static GUARD: LazyLock<StampedeGuard> = LazyLock::new(StampedeGuard::in_memory);

trait Row: Clone + Serialize + DeserializeOwned + Send + 'static {
    const TABLE: &'static str;
    fn of(id: u64) -> Self;
}

impl Row for u64 {
    const TABLE: &'static str = "numbers";
    fn of(id: u64) -> Self {
        id
    }
}

impl Row for String {
    const TABLE: &'static str = "texts";
    fn of(id: u64) -> Self {
        format!("row {id}")
    }
}

#[derive(Clone)]
struct Rows<T> {
    guard: StampedeGuard,
    db: Database,
    of: PhantomData<fn() -> T>,
}

impl<T: Row> Rows<T> {
    #[memoize(guard = self.guard, key = (T::TABLE, id))]
    async fn row(&self, id: u64) -> Result<T, LoadError<DbError>> {
        self.db.row(id).await
    }
}

#[tokio::test]
async fn a_key_distinguishes_the_types_of_an_impl() -> Result<(), Box<dyn Error>> {
    let (guard, db) = (StampedeGuard::in_memory(), Database::default());
    let numbers = Rows::<u64> { guard: guard.clone(), db: db.clone(), of: PhantomData };
    let texts = Rows::<String> { guard, db, of: PhantomData };
    assert_eq!((numbers.row(7).await?, texts.row(7).await?), (7, "row 7".to_owned()));
    assert_eq!(Rows::<String>::row_key(7).to_string(), "texts:7");
    Ok(())
}

#[memoize(guard = GUARD, key = (T::TABLE, id), policy = |policy| policy.tags(["rows"]))]
async fn row<T: Row>(db: Database, id: u64) -> Result<T, LoadError<DbError>> {
    db.row(id).await
}

#[tokio::test]
async fn a_generic_function_has_a_key_with_its_type() -> Result<(), Box<dyn Error>> {
    assert_eq!(row::<u64>(Database::default(), 7).await?, 7);
    assert_eq!(row_key::<u64>(7).to_string(), "numbers:7");
    Ok(())
}

enum ShopError {
    Closed,
    Failed(LoadError<DbError>),
}

impl From<LoadError<DbError>> for ShopError {
    fn from(error: LoadError<DbError>) -> Self {
        Self::Failed(error)
    }
}

async fn handler(shop: &Shop, id: u64) -> Result<String, ShopError> {
    let price = shop.price(id).await?.ok_or(ShopError::Closed)?;
    Ok(format!("{price}"))
}

#[tokio::test]
async fn a_handler_makes_its_error_of_the_load_error() {
    let shop = shop();
    assert!(matches!(handler(&shop, 7).await.as_deref(), Ok("499")));
    assert!(matches!(handler(&shop, 100).await, Err(ShopError::Closed)));
    assert!(matches!(handler(&shop, 0).await, Err(ShopError::Failed(error)) if error.loader().is_some()));
}
