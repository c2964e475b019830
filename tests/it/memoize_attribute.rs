//! The attribute `#[memoize]`: keys, guards and policies of functions, what the loader owns, and what callers receive.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stampede_guard::{ErrorKind, LoadError, MemoryStore, Policy, StampedeGuard, memoize};
use tokio::time::sleep;

/// An origin that counts its loads.
#[derive(Clone, Default)]
pub(crate) struct Origin(Arc<AtomicUsize>);

impl Origin {
    /// How many times the origin was called so far.
    pub(crate) fn calls(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn ask(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}

type Never<T> = Result<T, LoadError<Infallible>>;

/// A guard without jitter, so that the clock alone decides when a value is stale.
fn exact() -> StampedeGuard {
    let policy = Policy::builder().ttl_jitter(0.0).build().expect("valid");
    StampedeGuard::in_memory().with_policy(policy)
}

#[memoize(guard = guard, name = "price", skip(guard, origin), fresh_for = "30s")]
async fn price(guard: &StampedeGuard, origin: &Origin, id: u64, currency: &str) -> Never<String> {
    origin.ask();
    Ok(format!("{id} {currency}"))
}

#[tokio::test(start_paused = true)]
async fn a_value_is_loaded_once_for_each_set_of_arguments_until_it_is_stale() {
    let (guard, origin) = (exact(), Origin::default());
    for _ in 0..2 {
        assert_eq!(price(&guard, &origin, 7, "EUR").await.expect("loaded"), "7 EUR");
        assert_eq!(price(&guard, &origin, 7, "USD").await.expect("loaded"), "7 USD");
    }
    assert_eq!(origin.calls(), 2);
    sleep(Duration::from_secs(31)).await;
    assert_eq!(price(&guard, &origin, 7, "EUR").await.expect("loaded"), "7 EUR");
    assert_eq!(origin.calls(), 3);
}

#[tokio::test]
async fn the_key_function_names_what_the_function_stores() {
    let (guard, origin) = (exact(), Origin::default());
    assert_eq!(price_key(7, "EUR").to_string(), "price:7:EUR");
    guard.insert(price_key(7, "EUR"), &"dear".to_owned()).await.expect("stored");
    assert_eq!(price(&guard, &origin, 7, "EUR").await.expect("found"), "dear");
    guard.invalidate(price_key(7, "EUR")).await.expect("done");
    assert_eq!(price(&guard, &origin, 7, "EUR").await.expect("loaded"), "7 EUR");
}

/// Other attributes use the function's name as the default key, so two functions with one name would share values.
#[tokio::test]
async fn functions_of_one_name_have_the_keys_that_their_attributes_set() {
    mod users {
        #[stampede_guard::memoize(guard = guard, name = "user", skip(guard))]
        pub(super) async fn find(guard: &stampede_guard::StampedeGuard, id: u64) -> super::Never<String> {
            Ok(format!("user {id}"))
        }
    }
    mod orders {
        #[stampede_guard::memoize(guard = guard, name = "order", skip(guard))]
        pub(super) async fn find(guard: &stampede_guard::StampedeGuard, id: u64) -> super::Never<String> {
            Ok(format!("order {id}"))
        }
    }
    let guard = exact();
    assert_eq!(users::find(&guard, 7).await.expect("loaded"), "user 7");
    assert_eq!(orders::find(&guard, 7).await.expect("loaded"), "order 7");
    assert_ne!(users::find_key(7), orders::find_key(7));
}

/// A service that has its guard as a field, like the state of a router.
#[derive(Clone)]
struct Shop {
    guard: StampedeGuard,
    origin: Origin,
    region: &'static str,
}

impl Shop {
    fn new(region: &'static str) -> Self {
        Self { guard: exact(), origin: Origin::default(), region }
    }

    /// The stock of a product.
    #[memoize(guard = self.guard, name = "stock")]
    pub(crate) async fn stock(&self, id: u64) -> Never<usize> {
        let doubled = |n: usize| n * 2;
        Ok(doubled(self.origin.ask()) + usize::try_from(id).unwrap_or_default())
    }

    #[memoize(guard = self.guard, key = ("offer", self.region, id % 10))]
    async fn offer(&self, id: u64, trace: String) -> Never<String> {
        let number = self.origin.ask();
        Ok(format!("{trace}: offer {number} of {id} in {}", self.region))
    }

    #[memoize(guard = self.guard, name = "owner")]
    async fn owner(self: &Arc<Self>) -> Never<usize> {
        Ok(self.origin.ask() + Arc::strong_count(self))
    }

    #[memoize(guard = self.guard, name = "last")]
    async fn last(mut self, mut id: u64) -> Never<String> {
        self.region = "moon";
        id += 1;
        Ok(format!("{id} on the {}", self.region))
    }

    /// The function has neither a receiver nor `Self`, so nothing in it shows that it is in an `impl`.
    #[memoize(guard = *GUARD, name = "open")]
    async fn open(day: &'static str) -> Never<bool> {
        Ok(day != "sunday")
    }
}

static GUARD: LazyLock<StampedeGuard> = LazyLock::new(StampedeGuard::in_memory);

#[tokio::test]
async fn the_receiver_is_no_part_of_the_key_unless_the_key_names_it() {
    let (here, mut there) = (Shop::new("here"), Shop::new("there"));
    there.guard = here.guard.clone();
    assert_eq!(here.stock(1).await.expect("loaded"), 3);
    assert_eq!(there.stock(1).await.expect("found"), 3);
    assert_eq!(there.origin.calls(), 0);
    assert_eq!(Shop::stock_key(1).to_string(), "stock:1");
    assert_eq!(here.offer(17, "a".to_owned()).await.expect("loaded"), "a: offer 2 of 17 in here");
    assert_eq!(there.offer(17, "b".to_owned()).await.expect("loaded"), "b: offer 1 of 17 in there");
    assert_eq!(here.offer(27, "c".to_owned()).await.expect("found"), "a: offer 2 of 17 in here");
    assert_eq!(there.offer_key(27).to_string(), "offer:there:7");
}

#[tokio::test]
async fn a_method_has_any_receiver_that_the_loader_can_own() {
    let shop = Arc::new(Shop::new("here"));
    assert_eq!(shop.owner().await.expect("loaded"), 3);
    assert_eq!(Shop::clone(&shop).last(6).await.expect("loaded"), "7 on the moon");
    assert!(Shop::open("monday").await.expect("loaded"));
    assert_eq!(Shop::open_key("monday").to_string(), "open:monday");
}

/// A table of one kind of row.
trait Table: Serialize + DeserializeOwned + fmt::Debug + Send + Sync + 'static {
    const NAME: &'static str;
    fn row(id: u64) -> Self;
}

impl Table for u64 {
    const NAME: &'static str = "numbers";
    fn row(id: u64) -> Self {
        id
    }
}

impl Table for String {
    const NAME: &'static str = "texts";
    fn row(id: u64) -> Self {
        format!("text {id}")
    }
}

#[memoize(guard = guard, key = (T::NAME, id))]
async fn row<T, Unused>(
    guard: &StampedeGuard,
    origin: &Origin,
    id: u64,
    _unused: PhantomData<Unused>,
) -> Never<T>
where
    T: Table,
    Unused: Send,
{
    origin.ask();
    Ok(T::row(id))
}

trait Database: Clone + Send + Sync + 'static {
    fn count(&self, least: u64) -> usize;
}

impl Database for Origin {
    fn count(&self, least: u64) -> usize {
        self.ask() + usize::try_from(least).unwrap_or_default()
    }
}

#[memoize(guard = guard, name = "count", skip(guard, db))]
async fn count<const PAGE: usize, D>(guard: StampedeGuard, db: &D, least: u64) -> Never<usize>
where
    D: Database,
{
    Ok(db.count(least) + PAGE)
}

#[tokio::test]
async fn a_generic_function_stores_each_type_under_its_own_key() {
    let (guard, origin) = (exact(), Origin::default());
    for _ in 0..2 {
        assert_eq!(row::<u64, ()>(&guard, &origin, 7, PhantomData).await.expect("loaded"), 7);
        assert_eq!(row::<String, ()>(&guard, &origin, 7, PhantomData).await.expect("loaded"), "text 7");
    }
    assert_eq!(origin.calls(), 2);
    // The key function has only those type parameters that the key uses.
    assert_eq!(row_key::<String>(7).to_string(), "texts:7");
    assert_eq!(count::<100, _>(guard.clone(), &origin, 1).await.expect("loaded"), 104);
    assert_eq!(count::<200, _>(guard.clone(), &origin, 1).await.expect("loaded"), 205);
    assert_eq!(count::<100, _>(guard, &origin, 1).await.expect("found"), 104);
    assert_eq!(count_key::<100>(1).to_string(), "count:100:1");
}

#[memoize(guard = guard, name = "user", skip(guard, origin), negative_for = "5s")]
async fn user(guard: &StampedeGuard, origin: &Origin, id: u64) -> Result<Option<String>, LoadError<String>> {
    if id > 100 {
        return Err("no such shard".to_owned());
    }
    Ok((origin.ask() > 1).then(|| format!("user {id}")))
}

#[tokio::test(start_paused = true)]
async fn nothing_is_a_value_with_its_own_lifetime() {
    let (guard, origin) = (exact(), Origin::default());
    assert_eq!(user(&guard, &origin, 7).await.expect("loaded"), None);
    sleep(Duration::from_secs(4)).await;
    assert_eq!(user(&guard, &origin, 7).await.expect("found"), None);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(user(&guard, &origin, 7).await.expect("loaded").as_deref(), Some("user 7"));
    sleep(Duration::from_secs(6)).await;
    assert_eq!(user(&guard, &origin, 7).await.expect("found").as_deref(), Some("user 7"));
    assert_eq!(origin.calls(), 2);
}

#[derive(Clone, Debug, PartialEq)]
enum ApiError {
    Busy,
    Guard(String),
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl From<LoadError<Self>> for ApiError {
    fn from(error: LoadError<Self>) -> Self {
        error.loader().cloned().unwrap_or_else(|| Self::Guard(error.to_string()))
    }
}

#[memoize(guard = guard, name = "typed", skip(guard))]
async fn typed(guard: &StampedeGuard, ok: bool) -> Result<u8, ApiError> {
    if ok { Ok(1) } else { Err(ApiError::Busy) }
}

#[memoize(guard = guard, name = "any", skip(guard))]
async fn any(guard: &StampedeGuard, text: &str) -> anyhow::Result<u8> {
    let number: u8 = text.parse()?;
    Ok(number)
}

#[memoize(guard = guard, name = "boxed", skip(guard))]
async fn boxed(guard: &StampedeGuard, text: &str) -> Result<u8, Box<dyn std::error::Error + Send + Sync>> {
    Ok(text.parse()?)
}

#[tokio::test]
async fn an_error_is_a_load_error_or_is_made_of_one() {
    let guard = exact();
    let failed = user(&guard, &Origin::default(), 101).await.expect_err("failed");
    assert_eq!(failed.loader().map(String::as_str), Some("no such shard"));
    assert_eq!(typed(&guard, false).await, Err(ApiError::Busy));
    assert_eq!(typed(&guard, true).await, Ok(1));
    let failed = any(&guard, "x").await.expect_err("failed");
    assert!(failed.downcast_ref::<LoadError<anyhow::Error>>().is_some(), "{failed:?}");
    assert_eq!(any(&guard, "7").await.expect("loaded"), 7);
    let failed = boxed(&guard, "x").await.expect_err("failed");
    assert_eq!(failed.to_string(), "the load failed: invalid digit found in string");
}

#[memoize(guard = guard, name = "own", skip(guard, origin), policy = |policy| policy.max_body(8), load_timeout = "1s")]
async fn own(guard: &StampedeGuard, origin: &Origin, length: usize) -> Never<String> {
    origin.ask();
    if length == 0 {
        sleep(Duration::from_secs(2)).await;
    }
    Ok("x".repeat(length))
}

#[tokio::test(start_paused = true)]
async fn settings_change_the_policy_of_the_guard_and_leave_its_others() {
    let policy = Policy::builder()
        .ttl_jitter(0.0)
        .fresh_for(Duration::from_secs(10))
        .error_for(Duration::from_secs(2));
    let (guard, origin) =
        (StampedeGuard::in_memory().with_policy(policy.build().expect("valid")), Origin::default());
    for _ in 0..2 {
        own(&guard, &origin, 1).await.expect("loaded");
        own(&guard, &origin, 100).await.expect("loaded");
        let late = own(&guard, &origin, 0).await.expect_err("too long");
        assert_eq!(late.guard().map(|error| error.kind()), Some(ErrorKind::Timeout), "{late:?}");
    }
    // The short value is stored, and the long one is not. The failure is stored, because the guard's policy says so.
    assert_eq!(origin.calls(), 4);
    sleep(Duration::from_secs(11)).await;
    own(&guard, &origin, 1).await.expect("loaded");
    assert_eq!(origin.calls(), 5);
    // The attribute's settings also apply on top of a policy that is set later.
    let longer = guard.policy().to_builder().fresh_for(Duration::from_secs(100)).build().expect("valid");
    guard.set_policy(longer).expect("allowed");
    own(&guard, &origin, 2).await.expect("loaded");
    sleep(Duration::from_secs(90)).await;
    own(&guard, &origin, 2).await.expect("found");
    assert_eq!(origin.calls(), 6);
}

#[memoize(guard = guard, name = "contradicted", skip(guard), load_timeout = "0s")]
async fn contradicted(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[tokio::test]
async fn settings_that_contradict_each_other_are_an_error_of_the_call() {
    let failed = contradicted(&exact()).await.expect_err("refused");
    assert_eq!(failed.guard().map(|error| error.kind()), Some(ErrorKind::InvalidPolicy), "{failed:?}");
    assert!(failed.to_string().contains("load_timeout"), "{failed}");
}

/// A guard that is dropped closes its connections, because no function that it was passed to keeps it.
#[tokio::test]
async fn a_function_keeps_no_guard() {
    let store = MemoryStore::new();
    let guard = StampedeGuard::new(store.clone());
    price(&guard, &Origin::default(), 1, "EUR").await.expect("loaded");
    let policy = Arc::downgrade(&guard.policy());
    drop(guard);
    assert_eq!(policy.strong_count(), 0);
}

#[tokio::test]
async fn counters_are_those_of_the_guard() {
    let (guard, origin) = (exact(), Origin::default());
    for id in [1, 1, 2] {
        price(&guard, &origin, id, "EUR").await.expect("loaded");
    }
    let stats = guard.stats();
    assert_eq!((stats.loads, stats.hits), (2, 1), "{stats:?}");
}

/// The attribute keeps what surrounds the function's code: other attributes, visibility, `?` in the body, inner items and macros.
#[must_use]
#[allow(clippy::too_many_arguments, reason = "to see that a key has twelve parts")]
#[memoize(guard = GUARD, name = "many", skip(m, n))]
pub(crate) async fn many(
    a: u8,
    b: u8,
    c: u8,
    d: u8,
    e: u8,
    f: u8,
    g: u8,
    h: u8,
    i: u8,
    j: char,
    r#type: &str,
    m: &[u8],
    n: Vec<u8>,
) -> Result<String, LoadError<fmt::Error>> {
    use std::fmt::{self, Write as _};
    struct Inner(u8);
    impl Inner {
        fn get(&self) -> u8 {
            self.0
        }
    }
    let mut text = String::new();
    write!(text, "{a}{b}{c}{d}{e}{f}{g}{h}{i}{j}")?;
    fmt::Write::write_str(&mut text, r#type)?;
    if m.is_empty() {
        return Ok(text);
    }
    Ok(format!("{text}{}{}", Inner(m[0]).get(), n.len()))
}

#[tokio::test]
async fn a_function_keeps_its_attributes_and_its_body() {
    let text = many(1, 2, 3, 4, 5, 6, 7, 8, 9, 'j', "t", &[5], vec![1, 2]).await.expect("loaded");
    assert_eq!(text, "123456789jt52");
    assert_eq!(many_key(1, 2, 3, 4, 5, 6, 7, 8, 9, 'j', "t").to_string(), "many:1:2:3:4:5:6:7:8:9:j:t");
}

#[memoize(guard = guard, name = "shared", skip(guard, origin))]
async fn shared(guard: &StampedeGuard, origin: Origin, id: u64) -> Never<usize> {
    sleep(Duration::from_secs(1)).await;
    let _ = id;
    Ok(origin.ask())
}

/// Two guards of one store stand for two processes.
#[tokio::test(start_paused = true)]
async fn callers_of_two_nodes_share_one_load() {
    let (store, origin) = (MemoryStore::new(), Origin::default());
    let guards = [(); 2].map(|()| StampedeGuard::new(store.clone()));
    let calls = (0..20).map(|n| shared(&guards[n % 2], origin.clone(), 7));
    let answers = futures_util::future::join_all(calls).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(1))), "{answers:?}");
    assert_eq!(origin.calls(), 1);
}
