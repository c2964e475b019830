//! Calls for many keys at once. On the in-memory store, whose clones are the processes of a fleet.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stampede_guard::{
    Error, ErrorKind, LoadError, MemoryStore, OnAbsent, OnOverload, Policy, PolicyBuilder, StampedeGuard,
};
use tokio::task::yield_now;
use tokio::time::sleep;

type Answers = Vec<Result<Option<u64>, LoadError<&'static str>>>;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn on(store: &MemoryStore, policy: PolicyBuilder) -> StampedeGuard {
    let policy = policy.ttl_jitter(0.0).build().expect("valid");
    StampedeGuard::builder(store.clone()).policy(policy).build().expect("valid")
}

/// Records the keys of each call of a loader. The value of a key is the key times ten, and a call takes a second.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<Vec<u64>>>>);

impl Calls {
    fn load(&self) -> impl Fn(Vec<u64>) -> LoadFuture + Send + Sync + 'static {
        let calls = self.clone();
        move |keys| {
            calls.0.lock().expect("no panic").push(keys.clone());
            Box::pin(async move {
                sleep(secs(1)).await;
                Ok(keys.into_iter().map(|key| (key, key * 10)).collect())
            })
        }
    }

    fn taken(&self) -> Vec<Vec<u64>> {
        let mut calls = std::mem::take(&mut *self.0.lock().expect("no panic"));
        calls.iter_mut().for_each(|keys| keys.sort_unstable());
        calls
    }
}

type LoadFuture = std::pin::Pin<Box<dyn Future<Output = Result<HashMap<u64, u64>, &'static str>> + Send>>;

fn values(answers: Answers) -> Vec<Option<u64>> {
    answers.into_iter().collect::<Result<_, _>>().expect("each key has an answer")
}

#[tokio::test(start_paused = true)]
async fn one_call_loads_the_missing_keys_in_the_order_and_with_the_duplicates_of_the_input() {
    let (guard, calls) = (on(&MemoryStore::new(), Policy::builder()), Calls::default());
    guard.insert(2_u64, &20_u64).await.expect("stored");
    let answers = guard.get_or_load_many([3, 2, 1, 3, 2], calls.load()).await;
    assert_eq!(values(answers), [Some(30), Some(20), Some(10), Some(30), Some(20)]);
    assert_eq!(calls.taken(), [[1, 3]]);
    // All values are stored, each under its own key, in the form of a value that was loaded alone.
    let load = || async { Err::<Option<u64>, _>("is stored") };
    assert_eq!(guard.get_or_load(1_u64, load).await.expect("stored"), Some(10));
    assert_eq!(values(guard.get_or_load_many([1, 2, 3], calls.load()).await).len(), 3);
    assert!(calls.taken().is_empty());
    assert!(guard.get_or_load_many([], calls.load()).await.is_empty());
    assert!(calls.taken().is_empty());
}

#[tokio::test(start_paused = true)]
async fn overlapping_sets_load_each_key_once_in_the_fleet() {
    let store = MemoryStore::new();
    let fleet: Vec<_> = (0..8).map(|_| on(&store, Policy::builder())).collect();
    let calls = Calls::default();
    let asks = fleet.iter().enumerate().flat_map(|(process, guard)| {
        // Each process has two callers, which name the keys in different orders.
        let mut keys: Vec<u64> = (0..30).map(|key| (key + process as u64 * 5) % 50).collect();
        let up = (keys.clone(), guard.get_or_load_many(keys.clone(), calls.load()));
        keys.reverse();
        let down = (keys.clone(), guard.get_or_load_many(keys, calls.load()));
        [up, down]
    });
    let asks: Vec<_> = asks.map(|(keys, ask)| async move { (keys, ask.await) }).collect();
    for (keys, answers) in futures_util::future::join_all(asks).await {
        let expected: Vec<_> = keys.iter().map(|key| Some(key * 10)).collect();
        assert_eq!(values(answers), expected);
    }
    let mut loaded = calls.taken().concat();
    loaded.sort_unstable();
    assert_eq!(loaded, (0..50).collect::<Vec<_>>(), "each key is loaded once");
}

#[tokio::test(start_paused = true)]
async fn single_callers_and_callers_of_many_share_loads() {
    let (guard, calls) = (on(&MemoryStore::new(), Policy::builder()), Calls::default());
    let singles = Arc::new(AtomicUsize::new(0));
    let single = |key: u64| {
        let singles = Arc::clone(&singles);
        guard.get_or_load(key, move || async move {
            singles.fetch_add(1, Ordering::Relaxed);
            sleep(secs(1)).await;
            Ok::<_, Infallible>(Some(key * 10))
        })
    };
    let many = guard.get_or_load_many([1, 2, 3], calls.load());
    let (before, many, after) = tokio::join!(biased; single(1), many, single(3));
    assert_eq!((before.expect("loaded"), after.expect("loaded")), (Some(10), Some(30)));
    assert_eq!(values(many), [Some(10), Some(20), Some(30)]);
    assert_eq!((singles.load(Ordering::Relaxed), calls.taken()), (1, vec![vec![2, 3]]));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_the_loader_leaves_out_is_negative() {
    let policy = Policy::builder().fresh_for(secs(60)).negative_for(secs(5));
    let (guard, calls) = (on(&MemoryStore::new(), policy), Arc::new(AtomicUsize::new(0)));
    let ask = async || {
        let calls = Arc::clone(&calls);
        let load = move |_| {
            calls.fetch_add(1, Ordering::Relaxed);
            async { Ok([(1, 10_u64), (99, 990)]) }
        };
        values(guard.get_or_load_many([1, 2], load).await)
    };
    assert_eq!(ask().await, [Some(10), None]);
    assert_eq!(ask().await, [Some(10), None]);
    assert_eq!(calls.load(Ordering::Relaxed), 1, "the absence is stored");
    assert_eq!(guard.get::<Option<u64>>(99_u64).await.expect("answers"), None, "it was not requested");
    sleep(secs(6)).await;
    assert_eq!(ask().await, [Some(10), None]);
    assert_eq!(calls.load(Ordering::Relaxed), 2, "the absence ends after negative_for");
}

#[tokio::test(start_paused = true)]
async fn a_key_that_the_loader_leaves_out_fails_if_the_policy_says_so() {
    let guard = on(&MemoryStore::new(), Policy::builder().on_absent(OnAbsent::Fail));
    let load = |_: Vec<u64>| async { Ok::<_, &str>([(1, 10_u64)]) };
    let answers = guard.get_or_load_many([1, 2], load).await;
    assert_eq!(answers[0].as_ref().ok(), Some(&Some(10)));
    let error = answers[1].as_ref().expect_err("absent").guard().expect("of the guard").clone();
    assert_eq!(error.kind(), ErrorKind::Absent);
    assert!(error.to_string().contains("returned no value for key #"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn keys_fail_together_or_separately() {
    let guard = on(&MemoryStore::new(), Policy::builder());
    let together = guard.get_or_load_many([1_u64, 2], |_| async { Err::<[(u64, u64); 0], _>("down") }).await;
    for answer in together {
        assert_eq!(answer.expect_err("fails").loader(), Some(&"down"));
    }
    let each = |keys: Vec<u64>| async move {
        keys.into_iter()
            .map(|key| (key, if key == 3 { Ok(30_u64) } else { Err("sold out") }))
            .collect::<Vec<_>>()
    };
    let each = guard.get_or_load_many_each([3_u64, 4], each).await;
    assert_eq!(each[0].as_ref().ok(), Some(&Some(30)));
    assert_eq!(each[1].as_ref().expect_err("fails").loader(), Some(&"sold out"));
    assert_eq!(
        guard.get(3_u64).await.expect("answers"),
        Some(30_u64),
        "the value beside a failure is stored"
    );
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_call_is_the_failure_of_its_keys() {
    let guard = on(&MemoryStore::new(), Policy::builder());
    let loader = |keys: Vec<u64>| {
        assert!(keys.is_empty(), "no such table");
        async { Ok::<[(u64, u64); 0], &str>([]) }
    };
    for answer in guard.get_or_load_many([1_u64, 2], loader).await {
        let LoadError::Panicked(text) = answer.expect_err("panicked") else { panic!("another failure") };
        assert!(text.contains("no such table"), "{text}");
    }
    assert_eq!((guard.stats().flights, guard.stats().tasks), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_callers_call_goes_on_and_is_stored() {
    let (guard, calls) = (on(&MemoryStore::new(), Policy::builder()), Calls::default());
    let ask = tokio::spawn({
        let (guard, load) = (guard.clone(), calls.load());
        async move { guard.get_or_load_many([1, 2, 3], load).await }
    });
    while calls.0.lock().expect("no panic").is_empty() {
        yield_now().await;
    }
    ask.abort();
    assert!(ask.await.expect_err("aborted").is_cancelled());
    sleep(secs(2)).await;
    let found: Result<Vec<Option<u64>>, Error> = guard.get_many([1_u64, 2, 3]).await.into_iter().collect();
    assert_eq!(found.expect("answers"), [Some(10), Some(20), Some(30)]);
}

/// If each flight of the batch waited for a separate permit, the flight that has the only permit would wait for the others for ever.
#[tokio::test(start_paused = true)]
async fn a_call_takes_one_permit_for_all_its_keys() {
    let store = MemoryStore::new();
    let policy = || Policy::builder().max_concurrent_loads(1).permit_timeout(secs(60), OnOverload::Shed);
    let fleet: Vec<_> = (0..4).map(|_| on(&store, policy())).collect();
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let asks = fleet.iter().enumerate().map(|(process, guard)| {
        let (running, most) = (Arc::clone(&running), Arc::clone(&most));
        let from = process as u64 * 3;
        guard.get_or_load_many(from..from + 6, move |keys| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(secs(1)).await;
                running.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, &str>(keys.into_iter().map(|key| (key, key * 10)).collect::<Vec<_>>())
            }
        })
    });
    for answers in futures_util::future::join_all(asks).await {
        assert_eq!(values(answers).len(), 6);
    }
    assert_eq!(most.load(Ordering::SeqCst), 1, "one call at a time");
}

#[tokio::test(start_paused = true)]
async fn a_load_that_requests_one_of_its_own_keys_fails_as_reentrant() {
    let guard = on(&MemoryStore::new(), Policy::builder());
    let inner = guard.clone();
    let answers = guard
        .get_or_load_many([1_u64, 2], move |keys| {
            let inner = inner.clone();
            async move {
                let error = inner
                    .get_or_load(2_u64, || async { Ok::<u64, Infallible>(0) })
                    .await
                    .expect_err("it would wait for itself");
                assert_eq!(error.guard().map(Error::kind), Some(ErrorKind::Reentrant));
                Ok::<_, &str>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>())
            }
        })
        .await;
    assert_eq!(values(answers), [Some(1), Some(2)]);
}

#[tokio::test(start_paused = true)]
async fn stale_values_are_served_and_loaded_with_the_missing_ones() {
    let policy = Policy::builder().fresh_for(secs(10)).stale_while_revalidate(secs(60));
    let (guard, calls) = (on(&MemoryStore::new(), policy), Calls::default());
    guard.insert(1_u64, &1_u64).await.expect("stored");
    sleep(secs(20)).await;
    let answers = guard.get_or_load_many([1, 2], calls.load()).await;
    assert_eq!(values(answers), [Some(1), Some(20)]);
    assert_eq!(calls.taken(), [[1, 2]]);
    assert_eq!(values(guard.get_or_load_many([1, 2], calls.load()).await), [Some(10), Some(20)]);
    assert!(calls.taken().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_bad_key_is_an_error_of_its_own() {
    let guard = on(&MemoryStore::new(), Policy::builder());
    let load = |keys: Vec<&'static str>| async move {
        Ok::<_, &str>(keys.into_iter().map(|key| (key, 1_u64)).collect::<Vec<_>>())
    };
    let answers = guard.get_or_load_many(["a", "", "b"], load).await;
    assert_eq!(answers[0].as_ref().ok(), Some(&Some(1)));
    let error = answers[1].as_ref().expect_err("empty");
    assert_eq!(error.guard().map(Error::kind), Some(ErrorKind::InvalidKey));
    assert_eq!(answers[2].as_ref().ok(), Some(&Some(1)));
    let found = guard.get_many::<u64, _>(["a", "", "c"]).await;
    assert_eq!(found[0].as_ref().ok(), Some(&Some(1)));
    assert_eq!(found[1].as_ref().map_err(Error::kind), Err(ErrorKind::InvalidKey));
    assert_eq!(found[2].as_ref().ok(), Some(&None));
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_is_bypassed_calls_once_for_all_keys() {
    let (guard, calls) = (on(&MemoryStore::new(), Policy::builder()), Calls::default());
    guard.set_bypass(true);
    for _ in 0..2 {
        assert_eq!(values(guard.get_or_load_many([1, 2], calls.load()).await), [Some(10), Some(20)]);
        assert_eq!(calls.taken(), [[1, 2]]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_guard_on_trial_calls_once_for_all_keys() {
    let (guard, calls) = (on(&MemoryStore::new(), Policy::builder().shadow(true)), Calls::default());
    for _ in 0..2 {
        assert_eq!(values(guard.get_or_load_many([1, 2], calls.load()).await), [Some(10), Some(20)]);
        assert_eq!(calls.taken(), [[1, 2]]);
    }
}

#[tokio::test(start_paused = true)]
async fn tags_and_invalidations_hold_for_each_key() {
    let (guard, calls) = (on(&MemoryStore::new(), Policy::builder().tags(["prices"])), Calls::default());
    values(guard.get_or_load_many([1, 2, 3], calls.load()).await);
    assert_eq!(calls.taken(), [[1, 2, 3]]);
    let invalidated: Result<(), Error> = guard.invalidate_many([1_u64, 3]).await.into_iter().collect();
    invalidated.expect("confirmed");
    values(guard.get_or_load_many([1, 2, 3], calls.load()).await);
    assert_eq!(calls.taken(), [[1, 3]]);
    guard.invalidate_tag("prices").await.expect("confirmed");
    values(guard.get_or_load_many([1, 2, 3], calls.load()).await);
    assert_eq!(calls.taken(), [[1, 2, 3]]);
}

#[tokio::test(start_paused = true)]
async fn copies_in_memory_answer_many_keys() {
    let policy = Policy::builder().fresh_for(secs(600)).local_for(Duration::MAX);
    let (guard, calls) = (on(&MemoryStore::new(), policy), Calls::default());
    guard.connect().await.expect("there is no server");
    values(guard.get_or_load_many([1, 2], calls.load()).await);
    values(guard.get_or_load_many([1, 2], calls.load()).await);
    let before = guard.stats().local_hits;
    values(guard.get_or_load_many([1, 2], calls.load()).await);
    assert_eq!((guard.stats().local_hits - before, calls.taken()), (2, vec![vec![1, 2]]));
    let error = guard.invalidate_many([1_u64]).await.into_iter().collect::<Result<(), _>>();
    error.expect("confirmed");
    assert_eq!(guard.get_many::<u64, _>([1_u64, 2]).await.len(), 2);
    values(guard.get_or_load_many([1, 2], calls.load()).await);
    assert_eq!(calls.taken(), [[1]]);
}
