//! The code of `docs/freshness.md`, on a paused clock.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::response::IntoResponse;
use axum::routing::get;
use stampede_guard::http::{CacheTerms, HttpPolicy};
use stampede_guard::{LoadContext, LoadError, MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::requests;

/// An origin with a price that is higher after each load, and that can be down.
#[derive(Clone, Default)]
struct Origin {
    loads: Arc<AtomicU64>,
    down: Arc<AtomicBool>,
}

impl Origin {
    async fn price(&self, _product: u64) -> Result<u64, std::io::Error> {
        let price = self.loads.fetch_add(1, Ordering::Relaxed) + 1;
        sleep(Duration::from_secs(1)).await;
        if self.down.load(Ordering::Relaxed) { Err(std::io::Error::other("no route")) } else { Ok(price) }
    }

    fn loads(&self) -> u64 {
        self.loads.load(Ordering::Relaxed)
    }
}

/// The price, and how long the caller waited.
async fn ask(guard: &StampedeGuard, origin: &Origin) -> (Result<u64, LoadError<std::io::Error>>, Duration) {
    let (origin, began) = (origin.clone(), Instant::now());
    let price = guard.get_or_load(("price", 7), move || async move { origin.price(7).await }).await;
    (price, began.elapsed())
}

fn guard(policy: PolicyBuilder) -> Result<StampedeGuard, stampede_guard::Error> {
    // Without jitter, so that the test knows the ends of windows to the second.
    StampedeGuard::builder(MemoryStore::new()).policy(policy.ttl_jitter(0.0).build()?).build()
}

const NOW: Duration = Duration::ZERO;
const LOAD: Duration = Duration::from_secs(1);

fn windows() -> Result<Policy, stampede_guard::Error> {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(60)) // served, and nothing else happens
        .stale_while_revalidate(Duration::from_secs(30)) // then: served at once, one load in the background
        .stale_if_error(Duration::from_secs(3600)) // then: a load; the old value stands in if it fails
        .build()?;
    Ok(policy)
}

#[tokio::test(start_paused = true)]
async fn the_windows() -> Result<(), Box<dyn Error>> {
    let origin = Origin::default();
    let guard = guard(windows()?.to_builder())?;
    assert!(matches!(ask(&guard, &origin).await, (Ok(1), LOAD)));
    sleep(Duration::from_secs(59)).await;
    assert!(matches!(ask(&guard, &origin).await, (Ok(1), NOW)), "fresh");
    sleep(Duration::from_secs(11)).await;
    assert!(matches!(ask(&guard, &origin).await, (Ok(1), NOW)), "stale, served at once");
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(ask(&guard, &origin).await, (Ok(2), NOW)), "the background load's value");
    sleep(Duration::from_secs(100)).await;
    assert!(matches!(ask(&guard, &origin).await, (Ok(3), LOAD)), "after the window callers wait");
    origin.down.store(true, Ordering::Relaxed);
    sleep(Duration::from_secs(100)).await;
    assert!(matches!(ask(&guard, &origin).await, (Ok(3), LOAD)), "the old value stands in");
    assert_eq!(origin.loads(), 4);
    for _ in 0..4 {
        sleep(Duration::from_secs(1)).await;
        assert!(matches!(ask(&guard, &origin).await, (Ok(3), NOW)), "back_off");
    }
    assert_eq!(origin.loads(), 4);
    sleep(Duration::from_secs(3600)).await;
    assert!(
        matches!(ask(&guard, &origin).await, (Err(LoadError::Loader(_)), LOAD)),
        "the end of stale_if_error"
    );
    Ok(())
}

fn everything() -> Result<Policy, stampede_guard::Error> {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(60))
        .stale_while_revalidate(Duration::from_secs(30))
        .stale_if_error(Duration::from_secs(3600))
        .back_off(Duration::from_secs(5)) // after a failed load the origin is left alone for so long
        .soft_timeout(Duration::from_millis(200)) // a load that takes longer: the old value stands in
        .early_refresh(1.0) // loads anew before the end: the earlier, the longer a load takes
        .refresh_ahead(0.8) // or once 80 % of the lifetime have passed
        .negative_for(Duration::from_secs(5)) // `None` is stored for a shorter time
        .error_for(Duration::from_millis(500)) // a failure is shared with later callers for so long
        .ttl_jitter(0.1) // values stored together do not expire together
        .build()?;
    Ok(policy)
}

#[tokio::test(start_paused = true)]
async fn a_slow_load_and_a_refresh_ahead() -> Result<(), Box<dyn Error>> {
    everything()?;
    let origin = Origin::default();
    let policy = windows()?.to_builder().stale_while_revalidate(Duration::ZERO);
    let slow = guard(policy.soft_timeout(Duration::from_millis(200)))?;
    ask(&slow, &origin).await.0?;
    sleep(Duration::from_secs(100)).await;
    let (price, waited) = ask(&slow, &origin).await;
    assert_eq!((price?, waited), (1, Duration::from_millis(200)));
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(ask(&slow, &origin).await, (Ok(2), NOW)), "the load went on and was stored");

    let origin = Origin::default();
    let ahead = guard(Policy::builder().refresh_ahead(0.8))?;
    ask(&ahead, &origin).await.0?;
    sleep(Duration::from_secs(49)).await;
    assert!(matches!(ask(&ahead, &origin).await, (Ok(1), NOW)), "loads anew in the background");
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(ask(&ahead, &origin).await, (Ok(2), NOW)));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_absent_value_is_stored_for_a_shorter_time() -> Result<(), Box<dyn Error>> {
    let guard = guard(Policy::builder().negative_for(Duration::from_secs(5)))?;
    let ask = async |found: Option<u64>| {
        guard.get_or_load("user", move || async move { Ok::<_, std::io::Error>(found) }).await
    };
    assert_eq!(ask(None).await?, None);
    assert_eq!(ask(Some(7)).await?, None, "stored");
    sleep(Duration::from_secs(6)).await;
    assert_eq!(ask(Some(7)).await?, Some(7));
    sleep(Duration::from_secs(50)).await;
    assert_eq!(ask(Some(8)).await?, Some(7));
    Ok(())
}

struct Versioned {
    version: String,
    report: String,
}

static TRANSFERS: AtomicU64 = AtomicU64::new(0);

/// `None`: not modified since `version`.
async fn fetch(version: Option<&str>) -> Result<Option<Versioned>, std::io::Error> {
    let modified = version != Some("v1");
    TRANSFERS.fetch_add(modified.into(), Ordering::Relaxed);
    Ok(modified.then(|| Versioned { version: "v1".to_owned(), report: "all is well".to_owned() }))
}

async fn load(mut cx: LoadContext<String>) -> Result<String, std::io::Error> {
    cx.fresh_for(Duration::from_secs(300)); // for this value, instead of the policy's
    cx.stale_if_error(Duration::from_secs(60)); // the same
    match (fetch(cx.validator()).await?, cx.take_previous()) {
        (Some(new), _) => {
            cx.set_validator(new.version); // stored with the value, at most 1 KiB
            Ok(new.report)
        }
        (None, Some(previous)) => Ok(previous), // not modified: fresh again, without a transfer
        (None, None) => Err(std::io::Error::other("nothing to be unmodified")),
    }
}

#[tokio::test(start_paused = true)]
async fn a_loader_sees_what_it_replaces() -> Result<(), Box<dyn Error>> {
    let guard = guard(Policy::builder())?;
    assert_eq!(guard.load("report").get(load).await?.value, "all is well");
    assert_eq!(guard.remaining_freshness("report").await?, Some(Duration::from_secs(300)));
    sleep(Duration::from_secs(310)).await;
    assert_eq!(guard.load("report").get(load).await?.value, "all is well");
    assert_eq!(guard.remaining_freshness("report").await?, Some(Duration::from_secs(300)));
    assert_eq!((guard.stats().loads, TRANSFERS.load(Ordering::Relaxed)), (2, 1));
    Ok(())
}

async fn new_template(guard: &StampedeGuard) -> Result<(), Box<dyn Error>> {
    guard.expire_tag("template").await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn many_values_become_stale_at_once() -> Result<(), Box<dyn Error>> {
    let guard = guard(windows()?.to_builder().tags(["template"]))?;
    guard.insert("page", &1_u64).await?;
    new_template(&guard).await?;
    let load = || async { Ok::<_, std::io::Error>(2) };
    assert_eq!(guard.get_or_load("page", load).await?, 1);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(guard.get::<u64>("page").await?, Some(2));
    Ok(())
}

async fn by_hand(guard: StampedeGuard, origin: Origin) -> Result<(), Box<dyn Error>> {
    // Stores a value that is known already; wins over loads that are running.
    guard.insert(("price", 7), &499_u64).await?;

    // Loads now, once in the fleet; other callers are served the stored value meanwhile.
    let db = origin.clone();
    let price = guard.load(("price", 7)).refresh(move |_| async move { db.price(7).await }).await?.value;

    // Stale from now on: the next caller loads; the value stands in if that load fails.
    guard.expire(("price", 7)).await?;

    // Reads without a loader.
    let stored: Option<u64> = guard.get(("price", 7)).await?;
    let fresh_for = guard.remaining_freshness(("price", 7)).await?;
    assert_eq!((price, stored, fresh_for), (1, None, Some(Duration::ZERO)));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn values_by_hand() -> Result<(), Box<dyn Error>> {
    let origin = Origin::default();
    let policy = windows()?.to_builder().stale_while_revalidate(Duration::ZERO);
    let guard = guard(policy)?;
    by_hand(guard.clone(), origin.clone()).await?;
    origin.down.store(true, Ordering::Relaxed);
    assert!(matches!(ask(&guard, &origin).await, (Ok(1), LOAD)), "stands in");
    Ok(())
}

/// Over HTTP the response's own directives count.
#[tokio::test]
async fn a_response_says_how_long() -> Result<(), Box<dyn Error>> {
    use http::{Request, Response};
    use stampede_guard::http::explain;

    let request = Request::get("http://shop.example/report/7").body(())?;
    let response = Response::builder()
        .header("cache-control", "max-age=60, stale-while-revalidate=30, stale-if-error=3600")
        .body(())?;
    let decision = explain(&request, &response, &HttpPolicy::default());
    assert_eq!(decision.fresh_for, Some(Duration::from_secs(60)));
    assert_eq!(decision.stale_while_revalidate, Duration::from_secs(30));
    assert_eq!(decision.stale_if_error, Duration::from_secs(3600));
    Ok(())
}

/// Lifetimes without header text.
async fn report() -> impl IntoResponse {
    let terms =
        CacheTerms::fresh_for(Duration::from_secs(300)).stale_while_revalidate(Duration::from_secs(60));
    (terms, "all is well\n") // feature `axum`; elsewhere `response.extensions_mut().insert(terms)`
}

#[tokio::test(start_paused = true)]
async fn a_handler_states_lifetimes_without_header_text() -> Result<(), Box<dyn Error>> {
    let app = Router::new().route("/report", get(report)).layer(guard(Policy::builder())?);
    for remark in ["fwd=uri-miss; stored; ttl=300", "hit; ttl=300"] {
        let seen = requests::get(&app, "/report").await;
        assert_eq!(seen.header("cache-control"), "max-age=300, stale-while-revalidate=60");
        assert_eq!((seen.remark(), seen.text()), (remark, "all is well\n"));
    }
    sleep(Duration::from_secs(330)).await;
    assert_eq!(requests::get(&app, "/report").await.remark(), "hit; ttl=-30");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_stored_response_without_a_tag_gets_one() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().http(HttpPolicy::default().etag(true)).build()?;
    let app = Router::new().route("/report", get(report)).layer(guard(policy.to_builder())?);
    let tag = "W/\"6478d44cbd73f9e5e65bca36073993d6\"";
    let seen = requests::get(&app, "/report").await;
    assert_eq!((seen.status, seen.header("etag")), (200, tag));
    let seen = requests::send(&app, "GET", "/report", &[("if-none-match", tag)]).await;
    assert_eq!((seen.status, seen.header("etag"), seen.remark()), (304, tag, "hit; ttl=300"));
    Ok(())
}

/// A row of the table of statuses: its statuses, what is stored for how long without and with a stated lifetime, and for which waiters.
type StatusRow<'a> = (Vec<u16>, [&'a str; 3]);

/// The rows of the table in the page; the last one, "all others", has only examples of its statuses.
fn status_rows(page: &str) -> Vec<StatusRow<'_>> {
    let table = page.split("### Which statuses are stored").nth(1).expect("the section");
    let rows = table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| status")).take(5);
    rows.map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let words = cells[0].trim_start_matches("all others:").trim_end_matches(" ..").split(", ");
        let statuses = words.map(str::trim).flat_map(|word| {
            let (first, last) = word.split_once(" to ").unwrap_or((word, word));
            first.parse::<u16>().expect("a status")..=last.parse().expect("a status")
        });
        (statuses.collect(), [cells[1], cells[2], cells[3]])
    })
    .collect()
}

/// What the guard does with a status, in the words of the table.
async fn row_of(status: u16) -> Result<[&'static str; 3], Box<dyn Error>> {
    use http::{Request, Response};
    use stampede_guard::http::explain;

    let policy = Policy::builder().fresh_for(Duration::from_secs(60)).negative_for(Duration::from_secs(5));
    let guard = guard(policy)?;
    let mut stored_for = ["not stored"; 2];
    let mut is_shared = [false; 2];
    for (n, control) in ["extension", "max-age=7"].into_iter().enumerate() {
        let respond = move || async move {
            let code = axum::http::StatusCode::from_u16(status).expect("a status");
            (code, [("cache-control", control)])
        };
        let path = format!("/{n}");
        let app = Router::new().route(&path, get(respond)).layer(guard.clone());
        let remark = requests::get(&app, &path).await.remark().to_owned();
        stored_for[n] = match remark.rsplit_once("stored; ttl=").map(|(_, ttl)| ttl) {
            Some("60") => "`fresh_for`",
            Some("5") => "`negative_for`",
            Some("7") => "that lifetime",
            _ => "not stored",
        };
        let request = Request::get("http://shop.example/").body(())?;
        let response = Response::builder().status(status).header("cache-control", control).body(())?;
        is_shared[n] = explain(&request, &response, &HttpPolicy::default()).shared_with_waiters;
    }
    let waiters = match is_shared {
        [true, true] => "always",
        [false, true] => "with a stated lifetime",
        [false, false] => "never",
        [true, false] => "without a stated lifetime",
    };
    Ok([stored_for[0], stored_for[1], waiters])
}

#[tokio::test(start_paused = true)]
async fn the_table_of_statuses_is_what_the_guard_does() -> Result<(), Box<dyn Error>> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/freshness.md"))?;
    let rows = status_rows(&page);
    let (others, named) = rows.split_last().ok_or("no table")?;
    assert!(others.0.len() > 3 && named.len() == 4, "{rows:?}");
    for status in 200..600 {
        let row = named.iter().find(|(statuses, _)| statuses.contains(&status)).unwrap_or(others);
        assert_eq!(row_of(status).await?, row.1, "{status}");
    }
    Ok(())
}
