//! What a caller learns about its answer besides the value, and the switch that turns a guard off. On the in-memory store with a paused
//! clock.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(feature = "testing")]
use stampede_guard::OnWaitTimeout;
#[cfg(feature = "testing")]
use stampede_guard::testing::ChaosStore;
use stampede_guard::{AnswerInfo, Loaded, MemoryStore, Outcome, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::sleep;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn guard(policy: PolicyBuilder) -> StampedeGuard {
    let policy = policy.ttl_jitter(0.0).build().expect("valid");
    StampedeGuard::builder(MemoryStore::new()).policy(policy).build().expect("valid")
}

/// Requests a value that takes a second to load.
async fn ask(guard: &StampedeGuard) -> (u64, AnswerInfo) {
    let load = || async {
        sleep(secs(1)).await;
        Ok::<_, Infallible>(7)
    };
    let Loaded { value, info, .. } = guard.load("key").get(move |_| load()).await.expect("infallible");
    (value, info)
}

fn is(info: AnswerInfo, outcome: Outcome, age: u64, fresh_for: u64) {
    let seconds = |duration: Duration| duration.as_millis().div_ceil(1_000) as u64;
    let reported = (info.outcome, info.age.as_secs(), seconds(info.fresh_for));
    assert_eq!(reported, (outcome, age, fresh_for), "{info:?}");
}

#[tokio::test(start_paused = true)]
async fn a_caller_receives_the_outcome_of_its_call() {
    let guard = guard(Policy::builder().fresh_for(secs(60)).stale_while_revalidate(secs(60)));
    let (led, joined) = tokio::join!(ask(&guard), ask(&guard));
    assert_eq!((led.0, joined.0), (7, 7));
    is(led.1, Outcome::Led, 0, 60);
    is(joined.1, Outcome::Coalesced, 0, 60);
    sleep(secs(20)).await;
    is(ask(&guard).await.1, Outcome::Hit, 20, 40);
    sleep(secs(50)).await;
    is(ask(&guard).await.1, Outcome::Stale, 70, 0);
}

#[tokio::test(start_paused = true)]
async fn a_hit_from_memory_is_distinguished_from_one_of_the_store() {
    let guard = guard(Policy::builder().fresh_for(secs(60)).local_for(Duration::MAX));
    guard.connect().await.expect("there is no server");
    ask(&guard).await;
    ask(&guard).await;
    sleep(secs(20)).await;
    let mut last = ask(&guard).await.1;
    // After a pause, the first caller makes the process renew its right to serve from memory, so later ones are served from memory.
    for _ in 0..100 {
        sleep(Duration::from_millis(1)).await;
        last = ask(&guard).await.1;
    }
    is(last, Outcome::LocalHit, 20, 40);
    let load = || async { Ok::<_, Infallible>(7_u64) };
    let shared = guard.load("key").get_shared(move |_| load()).await.expect("infallible");
    assert_eq!(*shared.value, 7);
    is(shared.info, Outcome::LocalHit, 20, 40);
}

#[tokio::test(start_paused = true)]
async fn a_value_that_is_not_stored_is_not_fresh() {
    let guard = guard(Policy::builder().max_body(1));
    let load = || async { Ok::<_, Infallible>("longer than a byte".to_owned()) };
    let loaded = guard.load("key").get(move |_| load()).await.expect("infallible");
    is(loaded.info, Outcome::Led, 0, 0);
}

/// A load is not stored if there is no store, its tag was invalidated meanwhile, its lease was lost, or it ran outside the lease. The
/// callers of the process share it all the same.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_value_whose_load_was_not_stored_is_not_fresh() {
    let policy = Policy::builder().fresh_for(secs(60)).ttl_jitter(0.0).tags(["tag"]);
    let policy = policy.wait_timeout(secs(2), OnWaitTimeout::Load).build().expect("valid");
    for case in ["no store", "an invalidated tag", "a lost lease", "no lease"] {
        let chaos = ChaosStore::new(1);
        let replica = chaos.replica();
        let [guard, other] = [&replica, &chaos.replica()]
            .map(|on| StampedeGuard::builder(on.clone()).policy(policy.clone()).build().expect("valid"));
        if case == "no store" {
            replica.cut();
        }
        let holder = async {
            let load = || async {
                sleep(secs(20)).await;
                Ok::<_, Infallible>(7_u64)
            };
            if case == "no lease" {
                other.get_or_load("key", load).await.expect("infallible");
            }
        };
        let change = async {
            // The load takes a second, and begins after at most half a second of waiting for the store.
            sleep(Duration::from_millis(800)).await;
            match case {
                "an invalidated tag" => other.invalidate_tag("tag").await.expect("confirmed"),
                "a lost lease" => other.invalidate("key").await.expect("confirmed"),
                _ => {}
            }
        };
        let calls = async {
            sleep(Duration::from_millis(1)).await;
            tokio::join!(ask(&guard), ask(&guard))
        };
        let ((), (), (one, another)) = tokio::join!(holder, change, calls);
        let both = [one.1, another.1];
        for outcome in [Outcome::Led, Outcome::Coalesced] {
            assert!(both.iter().any(|info| info.outcome == outcome), "{case}: {both:?}");
        }
        assert_eq!(both.map(|info| info.fresh_for), [Duration::ZERO; 2], "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_is_switched_off_lets_each_caller_load() {
    for local_for in [Duration::ZERO, Duration::MAX] {
        let guard = guard(Policy::builder().fresh_for(secs(600)).local_for(local_for));
        let loads = Arc::<AtomicU64>::default();
        let ask = async || {
            let loads = Arc::clone(&loads);
            let load = || async move { Ok::<_, Infallible>(loads.fetch_add(1, Ordering::SeqCst)) };
            guard.get_or_load("key", load).await.expect("infallible")
        };
        assert_eq!((ask().await, ask().await, ask().await), (0, 0, 0));
        // The switch applies to all clones of the guard and to all its policies.
        guard.with_policy(Policy::default()).set_bypass(true);
        assert_eq!((ask().await, ask().await), (1, 2));
        assert_eq!(guard.stats().bypassed, 2);
        guard.invalidate("key").await.expect("changes are made as ever");
        guard.set_bypass(false);
        assert_eq!((ask().await, ask().await), (3, 3));
    }
}

#[tokio::test(start_paused = true)]
async fn guards_that_are_made_from_clones_of_one_builder_have_one_switch() {
    let builder = StampedeGuard::builder(MemoryStore::new());
    let [one, two] = ["one", "two"].map(|name| builder.clone().namespace(name).build().expect("valid"));
    let other = StampedeGuard::builder(MemoryStore::new()).build().expect("valid");
    let is_off = async |guard: &StampedeGuard| {
        guard.insert("key", &0).await.expect("stored");
        guard.get_or_load("key", || async { Ok::<_, Infallible>(1) }).await.expect("infallible") == 1
    };
    for is_bypassed in [true, false] {
        two.set_bypass(is_bypassed);
        for (guard, expected) in [(&one, is_bypassed), (&two, is_bypassed), (&other, false)] {
            assert_eq!(is_off(guard).await, expected);
        }
    }
}

/// Another caller's load is running, and the store has a value: the refresh returns neither of both values.
#[tokio::test(start_paused = true)]
async fn a_refresh_of_a_guard_that_is_off_or_on_trial_returns_its_own_load() {
    for shadow in [false, true] {
        let guard = guard(Policy::builder().fresh_for(secs(600)).shadow(shadow));
        let refresh = async |n: u64| {
            let load = move || async move {
                tokio::time::sleep(secs(1)).await;
                Ok::<_, Infallible>(n)
            };
            guard.load("key").refresh(move |_| load()).await.expect("infallible").value
        };
        guard.insert("key", &0_u64).await.expect("stored");
        guard.set_bypass(!shadow);
        let began = tokio::time::Instant::now();
        assert_eq!(tokio::join!(refresh(1), refresh(2), refresh(3)), (1, 2, 3), "shadow: {shadow}");
        assert_eq!(began.elapsed(), secs(1), "shadow: {shadow}");
        let stored = guard.get::<u64>("key").await.expect("answered");
        assert!(stored > Some(0), "shadow: {shadow}, {stored:?}");
    }
}

#[cfg(feature = "redis")]
#[test]
fn what_is_no_address_is_refused_without_its_password() {
    use stampede_guard::ErrorKind;
    for address in ["localhost", "http://guard:secret@cache/", "redis://guard:secret@cache:port/"] {
        let error = StampedeGuard::open(address).expect_err("no address");
        assert_eq!(error.kind(), ErrorKind::InvalidAddress);
        let text = format!("{error} {error:?}");
        assert!(text.contains("redis://") && !text.contains("secret"), "{text}");
    }
    StampedeGuard::open("redis://guard:secret@cache/3").expect("an address");
    let parts = stampede_guard::redis::Client::open("redis://cache/").expect("an address");
    StampedeGuard::open(parts.get_connection_info().clone()).expect("an address");
}

#[test]
fn numbers_are_keys() {
    use stampede_guard::CacheKey;
    assert_eq!(CacheKey::from(42_u64), CacheKey::from("42"));
    assert_eq!(CacheKey::from(-7), CacheKey::from("-7"));
}
