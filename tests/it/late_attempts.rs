//! Promise 5 for a change that is sent several times: once the change is confirmed, an earlier attempt that arrives late changes nothing.
//!
//! Regression: an insertion whose first attempt was late came back after an acknowledged invalidation, insertion or refresh, and a late
//! attempt at an invalidation removed a newer value. The cases run in memory, on one server and on a cluster
//! (`redis::late_attempts`).

use std::time::Duration;

use futures_util::future::{LocalBoxFuture, join_all};
use stampede_guard::testing::{ChaosStore, Fault};
use stampede_guard::{Backend, MemoryStore, Policy, StampedeGuard};
use tokio::time::sleep;

/// Two processes on one store. The commands of the first one may be late.
pub(crate) struct Two<S> {
    chaos: ChaosStore<S>,
    late: StampedeGuard,
    other: StampedeGuard,
}

impl<S: Into<Backend> + Clone + Send + Sync + 'static> Two<S> {
    fn new(store: S, namespace: &str) -> Self {
        let chaos = ChaosStore::over(store.clone(), 1);
        let policy = Policy::builder().stale_if_error(Duration::from_secs(600)).build().expect("valid");
        let guard = |builder: stampede_guard::StampedeGuardBuilder| {
            builder.namespace(namespace).policy(policy.clone()).build().expect("valid")
        };
        let late = guard(StampedeGuard::builder(chaos.replica()));
        Self { late, other: guard(StampedeGuard::builder(store)), chaos }
    }

    async fn connected(store: S, namespace: &str) -> Self {
        let two = Self::new(store, namespace);
        for guard in [&two.late, &two.other] {
            while guard.connect().await.is_err() {}
        }
        two
    }

    /// From now on: the next command of the first process gets no answer in time, and runs later.
    fn first_is_late(&self) {
        self.chaos.once(Fault::Ghost);
    }

    /// Waits until all late commands have run: their deadlines have passed, and [`Fault::Ghost`] runs them within three seconds.
    async fn all_have_run(&self) {
        assert!(self.chaos.struck(Fault::Ghost) > 0);
        sleep(Duration::from_millis(3_100)).await;
        // This read is sent on the same connection as the late commands, so they have run when it is answered.
        while self.late.get::<u32>("k").await.is_err() {}
    }

    async fn value(&self) -> Option<u32> {
        loop {
            if let Ok(value) = self.other.get("k").await {
                return value;
            }
        }
    }

    async fn sale(&self, value: u32) {
        self.other.insert_with_tags("k", &value, ["sale"]).await.expect("stored");
    }
}

pub(crate) type Case<S> = (&'static str, fn(Two<S>) -> LocalBoxFuture<'static, Option<u32>>, Option<u32>);

/// All cases, each with the value that must be stored in the end.
pub(crate) fn cases<S: Into<Backend> + Clone + Send + Sync + 'static>() -> Vec<Case<S>> {
    vec![
        ("an insertion before an invalidation", |two| Box::pin(insertion_and_invalidation(two)), None),
        ("an insertion before an insertion", |two| Box::pin(insertion_and_insertion(two)), Some(2)),
        ("an insertion before a refresh", |two| Box::pin(insertion_and_refresh(two)), Some(2)),
        ("an invalidation before an insertion", |two| Box::pin(invalidation(two)), Some(2)),
        ("a tag", |two| Box::pin(tag(two)), Some(2)),
        ("a namespace", |two| Box::pin(namespace(two)), Some(2)),
        ("an insertion that failed", |two| Box::pin(failed_insertion(two)), Some(2)),
        ("a retained invalidation", |two| Box::pin(retained(two)), Some(2)),
        ("a retained tag", |two| Box::pin(retained_tag(two)), Some(2)),
    ]
}

async fn late_insertion<S: Into<Backend> + Clone + Send + Sync + 'static>(two: &Two<S>) {
    two.first_is_late();
    two.late.insert("k", &1_u32).await.expect("its second attempt is confirmed");
}

async fn insertion_and_invalidation<S: Into<Backend> + Clone + Send + Sync + 'static>(
    two: Two<S>,
) -> Option<u32> {
    late_insertion(&two).await;
    two.other.invalidate("k").await.expect("confirmed");
    two.all_have_run().await;
    two.value().await
}

async fn insertion_and_insertion<S: Into<Backend> + Clone + Send + Sync + 'static>(
    two: Two<S>,
) -> Option<u32> {
    late_insertion(&two).await;
    two.other.insert("k", &2_u32).await.expect("confirmed");
    two.all_have_run().await;
    two.value().await
}

async fn insertion_and_refresh<S: Into<Backend> + Clone + Send + Sync + 'static>(two: Two<S>) -> Option<u32> {
    late_insertion(&two).await;
    two.other.load("k").refresh(|_| async { Ok::<_, String>(2_u32) }).await.expect("confirmed");
    two.all_have_run().await;
    two.value().await
}

async fn invalidation<S: Into<Backend> + Clone + Send + Sync + 'static>(two: Two<S>) -> Option<u32> {
    two.first_is_late();
    two.late.invalidate("k").await.expect("its second attempt is confirmed");
    two.other.insert("k", &2_u32).await.expect("confirmed");
    two.all_have_run().await;
    two.value().await
}

async fn tag<S: Into<Backend> + Clone + Send + Sync + 'static>(two: Two<S>) -> Option<u32> {
    two.sale(1).await;
    two.first_is_late();
    two.late.invalidate_tag("sale").await.expect("its second attempt is confirmed");
    two.sale(2).await;
    two.all_have_run().await;
    two.value().await
}

async fn namespace<S: Into<Backend> + Clone + Send + Sync + 'static>(mut two: Two<S>) -> Option<u32> {
    let policy = Policy::builder().invalidate_all(true).build().expect("valid");
    for guard in [&mut two.late, &mut two.other] {
        *guard = guard.with_policy(policy.clone());
    }
    two.other.insert("k", &1_u32).await.expect("confirmed");
    two.first_is_late();
    two.late.invalidate_all().await.expect("its second attempt is confirmed");
    two.other.insert("k", &2_u32).await.expect("confirmed");
    two.all_have_run().await;
    two.value().await
}

/// An insertion that has failed, and another change by the program, which is confirmed at once.
async fn failed_insertion<S: Into<Backend> + Clone + Send + Sync + 'static>(two: Two<S>) -> Option<u32> {
    two.chaos.inject(Fault::Ghost, 1.0);
    two.late.insert("k", &1_u32).await.expect_err("not confirmed");
    two.chaos.calm();
    two.late.insert("k", &2_u32).await.expect("confirmed");
    two.all_have_run().await;
    two.value().await
}

async fn sent<S>(two: &Two<S>) {
    while two.late.stats().kept_invalidations > 0 {
        sleep(Duration::from_millis(10)).await;
    }
}

async fn retained<S: Into<Backend> + Clone + Send + Sync + 'static>(two: Two<S>) -> Option<u32> {
    two.other.insert("k", &1_u32).await.expect("confirmed");
    two.chaos.inject(Fault::Ghost, 1.0);
    two.late.invalidate("k").await.expect_err("not confirmed");
    two.chaos.calm();
    sent(&two).await;
    two.other.insert("k", &2_u32).await.expect("confirmed");
    two.all_have_run().await;
    two.value().await
}

async fn retained_tag<S: Into<Backend> + Clone + Send + Sync + 'static>(two: Two<S>) -> Option<u32> {
    two.sale(1).await;
    two.chaos.inject(Fault::Ghost, 1.0);
    two.late.invalidate_tag("sale").await.expect_err("not confirmed");
    two.chaos.calm();
    sent(&two).await;
    two.sale(2).await;
    two.all_have_run().await;
    two.value().await
}

/// Runs all cases at once, each in a namespace of its own.
pub(crate) async fn all_hold<S: Into<Backend> + Clone + Send + Sync + 'static>(store: S) {
    let run = async |(number, (name, case, expected)): (usize, Case<S>)| {
        let ends = case(Two::connected(store.clone(), &format!("case{number}")).await).await;
        (ends != expected).then(|| format!("{name}: {ends:?} instead of {expected:?}"))
    };
    let failed: Vec<_> =
        join_all(cases().into_iter().enumerate().map(run)).await.into_iter().flatten().collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[tokio::test(start_paused = true)]
async fn a_late_attempt_at_a_confirmed_change_changes_nothing() {
    all_hold(MemoryStore::new()).await;
}

/// Regression: while connections were killed, 31 of 60 keys ended with the former value.
#[tokio::test(start_paused = true)]
async fn of_a_key_that_is_inserted_twice_the_last_value_is_stored_also_if_the_former_is_sent_again() {
    let chaos = ChaosStore::new(1);
    let guard = StampedeGuard::new(chaos.clone());
    chaos.once(Fault::ErrorBefore);
    let stored = guard.insert_many([("k", 1_u32), ("other", 3), ("k", 2)]).await;
    let answers: Vec<_> = stored.into_iter().map(|stored| stored.is_ok()).collect();
    assert_eq!(answers, [true; 3]);
    let values: Vec<Option<u32>> = [guard.get("k").await.unwrap(), guard.get("other").await.unwrap()].into();
    assert_eq!(values, [Some(2), Some(3)]);
    let refused = guard.insert_many([("k", 4_u32), ("", 5), ("k", 6)]).await;
    let answers: Vec<_> = refused.into_iter().map(|stored| stored.is_ok()).collect();
    assert_eq!(answers, [true, false, true], "each has its answer");
    assert_eq!(guard.get::<u32>("k").await.unwrap(), Some(6));
}

/// A change that was not confirmed may still run. A caller that waits for a load meanwhile finds the inserted value. It was stored only
/// now, but its lifetime counts from the call that inserted it. It may only replace a load that has failed, for as long as the policy
/// says: here the awaited load goes on.
///
/// Regression: a value that was found instead of an awaited lease was served, however old it was.
#[tokio::test(start_paused = true)]
async fn an_insertion_that_comes_late_is_served_for_no_longer_than_its_lifetime() {
    for stale_if_error in [0, 60] {
        let chaos = ChaosStore::new(1);
        let policy = Policy::builder().fresh_for(Duration::from_millis(200));
        let policy = policy.stale_if_error(Duration::from_secs(stale_if_error)).build().expect("valid");
        let guard = || StampedeGuard::new(chaos.replica()).with_policy(policy.clone());
        let (stopped, leads, waits) = (chaos.replica(), guard(), guard());
        let late = StampedeGuard::new(stopped.clone()).with_policy(policy.clone());
        stopped.stop();
        let inserted = tokio::spawn(async move { late.insert("k", &1_u32).await });
        sleep(Duration::from_millis(300)).await;
        let slow = leads.get_or_load("k", || async {
            sleep(Duration::from_millis(400)).await;
            Ok::<_, String>(2)
        });
        let found = async {
            sleep(Duration::from_millis(50)).await;
            waits.get_or_load("k", || async { Ok::<_, String>(3) }).await
        };
        let resumes = async {
            sleep(Duration::from_millis(100)).await;
            stopped.resume();
        };
        let (led, found, ()) = tokio::join!(slow, found, resumes);
        inserted.await.expect("no panic").expect("it was sent once more, or late");
        assert_eq!((led.unwrap(), found.unwrap()), (2, 3), "stale_if_error of {stale_if_error} s");
    }
}

/// Found by the simulation (seed 1556): a value is stored long after its load has ended, because its process was stopped in between. A
/// flight of another process that waits for it returns it to the callers that waited, and to none that came after the value's lifetime.
#[tokio::test(start_paused = true)]
async fn a_flight_that_waited_for_a_value_does_not_return_it_to_a_caller_that_came_after_its_end() {
    let chaos = ChaosStore::new(1);
    let policy = Policy::builder().fresh_for(Duration::from_millis(200)).build().expect("valid");
    let stopped = chaos.replica();
    let [leads, waits] =
        [stopped.clone(), chaos.replica()].map(|node| StampedeGuard::new(node).with_policy(policy.clone()));
    let after = |millis: u64| sleep(Duration::from_millis(millis));
    let load = |value: u32| move || async move { Ok::<_, String>(value) };
    let led = leads.get_or_load("k", || async {
        sleep(Duration::from_millis(300)).await;
        Ok::<_, String>(1)
    });
    let first = async {
        after(50).await;
        waits.get_or_load("k", load(2)).await
    };
    let late = async {
        after(700).await;
        waits.get_or_load("k", load(3)).await
    };
    let stops = async {
        after(250).await;
        stopped.stop();
        after(650).await;
        stopped.resume();
    };
    let (led, first, late, ()) = tokio::join!(led, first, late, stops);
    assert_eq!((led.unwrap(), first.unwrap(), late.unwrap()), (1, 1, 3));
}
