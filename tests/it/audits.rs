//! Audits of hits, and trials, in which a guard runs beside its callers' own loads. On the in-memory store with a paused clock.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
#[cfg(feature = "testing")]
use stampede_guard::testing::ChaosStore;
use stampede_guard::{MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{Instant, sleep};

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const LOAD: Duration = Duration::from_millis(20);

fn audited(fraction: f64) -> PolicyBuilder {
    Policy::builder().fresh_for(secs(3_600)).audit(fraction)
}

/// An origin with one value, which counts its loads.
#[derive(Clone, Default)]
struct Origin {
    value: Arc<AtomicU64>,
    loads: Arc<AtomicU64>,
    most_at_once: Arc<AtomicU64>,
    running: Arc<AtomicU64>,
}

impl Origin {
    fn set(&self, value: u64) {
        self.value.store(value, Ordering::SeqCst);
    }

    fn loads(&self) -> u64 {
        self.loads.load(Ordering::SeqCst)
    }

    async fn load(self) -> Result<u64, Infallible> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_once.fetch_max(running, Ordering::SeqCst);
        let value = self.value.load(Ordering::SeqCst);
        sleep(LOAD).await;
        self.running.fetch_sub(1, Ordering::SeqCst);
        Ok(value)
    }
}

fn guard(policy: PolicyBuilder) -> StampedeGuard {
    let policy = policy.build().expect("valid");
    StampedeGuard::builder(MemoryStore::new()).policy(policy).build().expect("valid")
}

async fn ask(guard: &StampedeGuard, key: u64, origin: &Origin) -> u64 {
    let origin = origin.clone();
    guard.get_or_load(("key", key), || origin.load()).await.expect("infallible")
}

/// The numbers of audits that matched, that differed and that failed.
fn audits(guard: &StampedeGuard) -> (u64, u64, u64) {
    let stats = guard.stats();
    (stats.audits_matched, stats.audits_differed, stats.audits_failed)
}

/// Waits until all audits have ended, including their grace of a second.
async fn settle() {
    sleep(secs(3)).await;
}

/// The promise: with a thousand hits a second, of which one in a thousand is audited, a stale value is found within a minute. Returns when.
async fn seconds_until_found(policy: PolicyBuilder) -> u64 {
    let (guard, origin) = (guard(policy), Origin::default());
    ask(&guard, 1, &origin).await;
    origin.set(1);
    let began = Instant::now();
    while audits(&guard).1 == 0 && began.elapsed() < secs(60) {
        ask(&guard, 1, &origin).await;
        sleep(Duration::from_millis(1)).await;
    }
    assert!(audits(&guard).1 > 0, "not found within a minute");
    began.elapsed().as_secs()
}

#[tokio::test(start_paused = true)]
async fn a_missing_invalidation_is_found_within_a_minute() {
    seconds_until_found(audited(0.001)).await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_invalidation_of_a_local_copy_is_found_within_a_minute() {
    seconds_until_found(audited(0.001).local_for(Duration::MAX)).await;
}

#[tokio::test(start_paused = true)]
async fn without_audits_a_hit_loads_nothing() {
    let (guard, origin) = (guard(audited(0.0)), Origin::default());
    for _ in 0..1_000 {
        ask(&guard, 1, &origin).await;
    }
    settle().await;
    assert_eq!((origin.loads(), audits(&guard)), (1, (0, 0, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_value_that_is_invalidated_within_the_grace_does_not_differ() {
    let (guard, origin) = (guard(audited(1.0)), Origin::default());
    ask(&guard, 1, &origin).await;
    // The program writes to the origin first and invalidates next. An audit loads between both steps, and must not report a difference.
    origin.set(1);
    assert_eq!(ask(&guard, 1, &origin).await, 0);
    sleep(2 * LOAD).await;
    guard.invalidate(("key", 1)).await.expect("confirmed");
    settle().await;
    assert_eq!(audits(&guard), (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_key_is_audited_once_a_second() {
    let (guard, origin) = (guard(audited(1.0)), Origin::default());
    for _ in 0..10 {
        for _ in 0..100 {
            ask(&guard, 1, &origin).await;
        }
        sleep(secs(1)).await;
    }
    settle().await;
    assert_eq!((origin.loads(), audits(&guard)), (11, (10, 0, 0)));
}

#[tokio::test(start_paused = true)]
async fn audits_of_many_keys_do_not_overload_the_origin() {
    let (guard, origin) = (guard(audited(1.0)), Origin::default());
    for key in 0..200 {
        guard.insert(("key", key), &0_u64).await.expect("stored");
    }
    for key in 0..200 {
        ask(&guard, key, &origin).await;
    }
    settle().await;
    let most = origin.most_at_once.load(Ordering::SeqCst);
    assert!((1..=8).contains(&most), "{most} at once");
    assert_eq!(audits(&guard), (8, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn an_audit_takes_a_permit_of_the_bulkhead() {
    let policy = audited(1.0).max_concurrent_loads(1);
    let (guard, origin) = (guard(policy), Origin::default());
    for key in 0..4 {
        guard.insert(("key", key), &0_u64).await.expect("stored");
    }
    join_all((0..8).map(|key| ask(&guard, key, &origin))).await;
    settle().await;
    assert_eq!((origin.loads(), origin.most_at_once.load(Ordering::SeqCst)), (8, 1));
    assert_eq!(audits(&guard), (4, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn an_audit_that_fails_or_panics_is_recorded_and_harms_no_caller() {
    let guard = guard(audited(1.0));
    for key in 0..2_u64 {
        guard.insert(("key", key), &7_u64).await.expect("stored");
    }
    let failing = || async { Err::<u64, _>("no route") };
    assert_eq!(guard.get_or_load(("key", 0), failing).await.expect("a hit"), 7);
    let panicking = || async { panic!("in an audit") as Result<u64, Infallible> };
    assert_eq!(guard.get_or_load(("key", 1), panicking).await.expect("a hit"), 7);
    settle().await;
    assert_eq!(audits(&guard), (0, 0, 2));
    assert_eq!(guard.get::<u64>(("key", 1)).await.expect("answered"), Some(7));
}

#[tokio::test(start_paused = true)]
async fn values_are_compared_as_the_program_says() {
    let policy = audited(1.0).audit_by(|served: &u64, loaded: &u64| served / 10 == loaded / 10);
    let (guard, origin) = (guard(policy), Origin::default());
    ask(&guard, 1, &origin).await;
    origin.set(9);
    ask(&guard, 1, &origin).await;
    settle().await;
    assert_eq!(audits(&guard), (1, 0, 0));
    origin.set(10);
    ask(&guard, 1, &origin).await;
    settle().await;
    assert_eq!(audits(&guard), (1, 1, 0));
    guard.insert(("key", 2), &"no number").await.expect("stored");
    let text = || async { Ok::<_, Infallible>("no number".to_owned()) };
    guard.get_or_load::<String, _, _, _>(("key", 2), text).await.expect("a hit");
    settle().await;
    assert_eq!(audits(&guard), (1, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_audits() {
    let guard = guard(audited(1.0));
    guard.insert("key", &7_u64).await.expect("stored");
    let hanging = || pending::<Result<u64, Infallible>>();
    assert_eq!(guard.get_or_load("key", hanging).await.expect("a hit"), 7);
    let began = Instant::now();
    guard.shutdown(secs(30)).await;
    assert!(began.elapsed() < secs(1), "{:?}", began.elapsed());
}

/// In a trial, the guard serves no value, and counts what it would have done.
#[tokio::test(start_paused = true)]
async fn in_a_trial_each_caller_is_answered_by_its_own_load() {
    let policy = Policy::builder().fresh_for(secs(3_600)).shadow(true);
    let (guard, origin) = (guard(policy), Origin::default());
    // A hundred callers of one key come at once.
    assert_eq!(join_all((0..100).map(|_| ask(&guard, 1, &origin))).await, [0; 100]);
    settle().await;
    assert_eq!(origin.loads(), 100);
    let stats = guard.stats();
    assert_eq!((stats.led, stats.coalesced, stats.hits), (1, 99, 0));
    assert_eq!(stats.loads, 1, "the guard alone would have loaded once");
    // The guard would have served the stored value, which is older than the value of the caller's own load.
    origin.set(1);
    assert_eq!(ask(&guard, 1, &origin).await, 1);
    settle().await;
    assert_eq!((guard.stats().hits, audits(&guard)), (1, (0, 1, 0)));
}

#[tokio::test(start_paused = true)]
async fn in_a_trial_a_failed_load_is_its_own_callers() {
    let guard = guard(Policy::builder().shadow(true));
    guard.insert("key", &7_u64).await.expect("stored");
    let failed = guard.get_or_load("key", || async { Err::<u64, _>("no route") }).await;
    assert!(failed.is_err(), "the stored value was served");
    let hanging = || pending::<Result<u64, Infallible>>();
    let began = Instant::now();
    assert!(guard.get_or_load("other", hanging).await.is_err());
    assert_eq!(began.elapsed(), secs(30), "load_timeout");
}

/// Two processes on one store: the first one is on trial.
fn beside_a_trial(policy: impl Fn() -> PolicyBuilder) -> [StampedeGuard; 2] {
    let store = MemoryStore::new();
    [true, false].map(|shadow| {
        let policy = policy().fresh_for(secs(3_600)).shadow(shadow).build().expect("valid");
        StampedeGuard::builder(store.clone()).policy(policy).build().expect("valid")
    })
}

/// The change is acknowledged when the load has already read the origin: a lease that is requested after that would not know of the change.
#[tokio::test(start_paused = true)]
async fn in_a_trial_nothing_is_stored_whose_load_began_before_its_lease() {
    for by_tag in [false, true] {
        let [trial, other] = beside_a_trial(|| Policy::builder().tags(["all"]));
        let invalidates = other.clone();
        let load = move || async move {
            match by_tag {
                true => invalidates.invalidate_tag("all").await.expect("acknowledged"),
                false => invalidates.invalidate("key").await.expect("acknowledged"),
            }
            sleep(LOAD).await;
            Ok::<_, Infallible>("before the change".to_owned())
        };
        assert_eq!(trial.get_or_load("key", load).await.expect("its own"), "before the change");
        settle().await;
        assert_eq!(other.get::<String>("key").await.expect("answered"), None, "by tag: {by_tag}");
    }
}

/// The store answers later than a caller on trial is ready to wait, so the load has no lease.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn in_a_trial_a_load_does_not_wait_for_a_slow_store_and_is_not_stored() {
    let chaos = ChaosStore::new(1);
    chaos.latency(Duration::from_millis(40), Duration::from_millis(40));
    let policy = || Policy::builder().fresh_for(secs(3_600));
    let guard = |policy: PolicyBuilder| {
        let policy = policy.build().expect("valid");
        StampedeGuard::builder(chaos.replica()).policy(policy).build().expect("valid")
    };
    let (trial, other) = (guard(policy().shadow(true)), guard(policy()));
    let (origin, began) = (Origin::default(), Instant::now());
    assert_eq!(ask(&trial, 1, &origin).await, 0);
    assert!(began.elapsed() < LOAD + Duration::from_millis(25), "{:?}", began.elapsed());
    settle().await;
    assert_eq!((trial.stats().led, origin.loads()), (1, 1));
    assert_eq!(other.get::<u64>(("key", 1)).await.expect("answered"), None);
}

/// When the caller on trial leaves, the waiter in the other process loads for itself at once, and receives no failure.
#[tokio::test(start_paused = true)]
async fn a_caller_on_trial_that_leaves_is_no_failure_of_the_others() {
    let [trial, other] = beside_a_trial(Policy::builder);
    let hanging =
        tokio::spawn(async move { trial.get_or_load("key", pending::<Result<u64, Infallible>>).await });
    sleep(LOAD).await;
    let waiting =
        tokio::spawn(async move { other.get_or_load("key", || async { Ok::<_, Infallible>(7) }).await });
    sleep(LOAD).await;
    let began = Instant::now();
    hanging.abort();
    assert_eq!(waiting.await.expect("not aborted").expect("loaded"), 7);
    assert!(began.elapsed() < secs(1), "{:?}", began.elapsed());
}

#[test]
fn impossible_settings_are_refused_by_name() {
    for fraction in [-0.1, 1.1, f64::NAN] {
        let text = Policy::builder().audit(fraction).build().expect_err("refused").to_string();
        assert!(text.contains("audit is") && text.contains("choose from 0 to 1"), "{text}");
    }
    let text = Policy::builder().audit_grace(secs(100_000)).build().expect_err("refused").to_string();
    assert!(text.contains("audit_grace"), "{text}");
}
