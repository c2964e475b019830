//! New values that cannot be stored, while the store still has an older value: the older value ends.
//!
//! On the in-memory store; the guards of one store are the processes of a fleet.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use stampede_guard::{ErrorKind, LoadContext, LoadError, MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{advance, sleep};

use crate::support::gate::Counter;

const OLD: &[u8] = b"old";

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn policy() -> PolicyBuilder {
    Policy::builder().fresh_for(secs(10)).ttl_jitter(0.0).max_body(100).back_off(secs(20))
}

fn fleet(policy: PolicyBuilder) -> [StampedeGuard; 3] {
    let (store, policy) = (MemoryStore::new(), policy.build().expect("valid"));
    std::array::from_fn(|_| {
        StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid")
    })
}

/// The reason for which a new value is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    TooLong,
    DoNotStore,
    FreshForZero,
}

impl Why {
    const ALL: [Self; 3] = [Self::TooLong, Self::DoNotStore, Self::FreshForZero];

    fn load(self) -> impl FnOnce(LoadContext<Bytes>) -> Loading + Send + 'static {
        move |mut cx| {
            match self {
                Self::TooLong => return std::future::ready(Ok(Bytes::from(vec![0; 200]))),
                Self::DoNotStore => cx.do_not_store(),
                Self::FreshForZero => {
                    cx.fresh_for(Duration::ZERO);
                    cx.stale_while_revalidate(Duration::ZERO);
                    cx.stale_if_error(Duration::ZERO);
                }
            }
            std::future::ready(Ok(Bytes::from_static(b"new")))
        }
    }
}

type Loading = std::future::Ready<Result<Bytes, String>>;

async fn insert_old(guard: &StampedeGuard) {
    guard.insert("k", &Bytes::from_static(OLD)).await.expect("stored");
}

async fn has_none(fleet: &[StampedeGuard], case: &str) {
    for guard in fleet {
        assert_eq!(guard.get::<Bytes>("k").await.expect("answered"), None, "{case}");
        assert!(!guard.contains("k").await.expect("answered"), "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_background_refresh_whose_value_can_not_be_stored_ends_the_older_one() {
    for why in Why::ALL {
        let fleet = fleet(policy().stale_while_revalidate(secs(60)).stale_if_error(secs(60)));
        insert_old(&fleet[0]).await;
        advance(secs(11)).await;
        let value = fleet[1].load("k").get(why.load()).await.expect("served").value;
        assert_eq!(&value[..], OLD, "{why:?}: it is served during the refresh");
        sleep(secs(1)).await;
        has_none(&fleet, &format!("{why:?}")).await;
        // The older value does not stand in for a failed load either.
        let failed = fleet[2].get_or_load("k", || async { Err::<Bytes, _>("no route".to_owned()) }).await;
        assert!(matches!(failed, Err(LoadError::Loader(_))), "{why:?}: {failed:?}");
    }
}

/// Regression: each caller that was served the older value began another such load.
#[tokio::test(start_paused = true)]
async fn a_value_that_is_not_stored_any_more_is_loaded_once_per_wave() {
    for why in [Why::DoNotStore, Why::FreshForZero] {
        let fleet = fleet(policy().stale_while_revalidate(secs(60)));
        insert_old(&fleet[0]).await;
        advance(secs(11)).await;
        let loads = Counter::default();
        let ask = |guard: StampedeGuard| {
            let loads = loads.clone();
            async move {
                let load = move |cx| async move {
                    let _running = loads.start();
                    let value = why.load()(cx).await;
                    sleep(secs(1)).await;
                    value
                };
                guard.load("k").get(load).await.expect("served").value
            }
        };
        ask(fleet[0].clone()).await;
        sleep(secs(2)).await;
        for wave in 1..=10 {
            let values = join_all((0..60).map(|n| ask(fleet[n % 3].clone()))).await;
            assert!(values.iter().all(|value| value == "new"), "{why:?}");
            assert_eq!(loads.started(), 1 + wave, "{why:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_refresh_whose_value_can_not_be_stored_ends_the_older_one() {
    for why in Why::ALL {
        for (shadow, bypass) in [(false, false), (true, false), (false, true)] {
            let case = format!("{why:?}, shadow: {shadow}, bypass: {bypass}");
            let fleet = fleet(policy());
            insert_old(&fleet[0]).await;
            let trial = policy().shadow(shadow).build().expect("valid");
            let refreshing = fleet[1].with_policy(trial);
            refreshing.set_bypass(bypass);
            let value = refreshing.load("k").refresh(why.load()).await.expect("loaded").value;
            assert_ne!(&value[..], OLD, "{case}");
            refreshing.set_bypass(false);
            has_none(&fleet, &case).await;
        }
    }
    let fleet = fleet(policy());
    insert_old(&fleet[0]).await;
    let long = || async { Ok::<_, String>(Bytes::from(vec![0; 200])) };
    assert_eq!(fleet[0].load("k").refresh(move |_| long()).await.expect("loaded").value.len(), 200);
    has_none(&fleet, "refresh").await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_refresh_ends_nothing() {
    let fleet = fleet(policy());
    insert_old(&fleet[0]).await;
    let failed = fleet[1].load("k").refresh(|_| async { Err::<Bytes, _>("no route") }).await;
    assert!(failed.is_err());
    assert_eq!(fleet[2].get::<Bytes>("k").await.expect("answered").as_deref(), Some(OLD));
}

#[derive(serde::Deserialize)]
struct Unencodable;

impl serde::Serialize for Unencodable {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("no words for it"))
    }
}

#[tokio::test(start_paused = true)]
async fn an_insertion_that_can_not_be_stored_is_an_error_and_removes_the_older_value() {
    let fleet = fleet(policy());
    let long = Bytes::from(vec![0; 200]);
    insert_old(&fleet[0]).await;
    let error = fleet[1].insert("k", &long).await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Encode);
    assert!(error.to_string().contains("older value is removed"), "{error}");
    has_none(&fleet, "insert").await;
    insert_old(&fleet[0]).await;
    let error = fleet[1].insert_with_tags("k", &long, ["tag"]).await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Encode);
    has_none(&fleet, "insert_with_tags").await;
    insert_old(&fleet[0]).await;
    let answers = fleet[1].insert_many([("k", long), ("other", Bytes::new())]).await;
    assert!(answers[0].is_err() && answers[1].is_ok(), "{answers:?}");
    has_none(&fleet, "insert_many").await;
    insert_old(&fleet[0]).await;
    let error = fleet[1].insert("k", &Unencodable).await.expect_err("not encodable");
    assert_eq!(error.kind(), ErrorKind::Encode);
    has_none(&fleet, "not encodable").await;
}

#[tokio::test(start_paused = true)]
async fn many_values_at_once_end_as_one_does() {
    let fleet = fleet(policy().stale_while_revalidate(secs(60)));
    let load = |keys: Vec<&'static str>| async move {
        Ok::<_, String>(keys.into_iter().map(|key| (key, "x".repeat(200))).collect::<Vec<_>>())
    };
    let insert = async || fleet[0].insert("k", &"old".to_owned()).await.expect("stored");
    insert().await;
    advance(secs(11)).await;
    let answers = fleet[1].get_or_load_many(["k", "l"], load).await;
    assert_eq!(answers[0].as_ref().expect("served").as_deref(), Some("old"));
    sleep(secs(1)).await;
    has_none(&fleet, "get_or_load_many").await;
    insert().await;
    advance(secs(11)).await;
    fleet[1].warm(["k"], 10, load).await;
    sleep(secs(1)).await;
    has_none(&fleet, "warm").await;
}

/// In a trial the caller's own load is not the load of a flight, but it ends the older value all the same.
#[tokio::test(start_paused = true)]
async fn a_trial_ends_what_a_guard_would_end() {
    for why in Why::ALL {
        let fleet = fleet(policy().stale_while_revalidate(secs(60)));
        insert_old(&fleet[0]).await;
        advance(secs(11)).await;
        let trial = policy().stale_while_revalidate(secs(60)).shadow(true).build().expect("valid");
        let value = fleet[1].with_policy(trial).load("k").get(why.load()).await.expect("loaded").value;
        assert_ne!(&value[..], OLD, "{why:?}");
        sleep(secs(1)).await;
        has_none(&fleet, &format!("{why:?}")).await;
    }
}

/// An audit only compares its value with the stored one, and ends nothing.
#[tokio::test(start_paused = true)]
async fn an_audit_ends_nothing() {
    let fleet = fleet(policy().audit(1.0));
    insert_old(&fleet[0]).await;
    for guard in &fleet {
        let value = guard.load("k").get(Why::DoNotStore.load()).await.expect("served").value;
        assert_eq!(&value[..], OLD);
        sleep(secs(1)).await;
    }
}
