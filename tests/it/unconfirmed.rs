//! Promise 19: an invalidation that the store has not confirmed is retained, and sent as soon as the store answers. Until then its process
//! serves no value that it invalidates.
//!
//! On the in-memory store with a paused clock. A replica that is connected again sends nothing until the clock moves, so a test sees what
//! it serves before its retained invalidations are sent. `redis::unconfirmed` runs the same cases on a server.

mod pending;
mod together;

use std::time::Duration;

use stampede_guard::testing::{ChaosStore, Replica};
use stampede_guard::{ErrorKind, Policy, PolicyBuilder, StampedeGuard, StampedeGuardBuilder};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::support::gate::{Counter, Gate};
use crate::support::warnings::Warnings;

/// Longer than any pause of the guard between attempts, so retained invalidations were sent by then.
const SENT: Duration = Duration::from_secs(10);

/// Two processes on one store; the first one can be cut off.
struct Two {
    line: Replica,
    cut: StampedeGuard,
    other: StampedeGuard,
}

impl Two {
    fn with(policy: PolicyBuilder, settings: impl Fn(StampedeGuardBuilder) -> StampedeGuardBuilder) -> Self {
        let (chaos, policy) = (ChaosStore::new(1), policy.build().expect("valid"));
        let line = chaos.replica();
        let guard = |replica: &Replica| {
            settings(StampedeGuard::builder(replica.clone()).policy(policy.clone())).build().expect("valid")
        };
        Self { cut: guard(&line), other: guard(&chaos.replica()), line }
    }

    fn new(policy: PolicyBuilder) -> Self {
        Self::with(policy, |builder| builder)
    }

    /// Connects the first process again. The task that sends retained invalidations first waits half a second of the paused clock, so it
    /// has sent nothing when this returns.
    async fn heal(&self) {
        sleep(Duration::from_millis(1)).await;
        self.line.resume();
    }

    async fn eventually_sent(&self) {
        sleep(SENT).await;
        assert_eq!(self.cut.stats().kept_invalidations, 0);
    }
}

async fn load(guard: &StampedeGuard, key: &str, value: u32) -> u32 {
    guard.get_or_load(key, move || async move { Ok::<_, String>(value) }).await.expect("loaded")
}

async fn get(guard: &StampedeGuard, key: &str) -> Option<u32> {
    guard.get(key).await.expect("answered")
}

#[tokio::test(start_paused = true)]
async fn an_unconfirmed_invalidation_is_sent_later_and_nothing_older_is_served_before() {
    let two = Two::new(Policy::builder());
    for key in ["key", "other"] {
        load(&two.cut, key, 1).await;
    }
    two.line.cut();
    let error = two.cut.invalidate("key").await.expect_err("cut off");
    assert!(error.is_store() && error.to_string().starts_with("not confirmed yet"), "{error}");
    assert_eq!((two.cut.stats().invalidations_unconfirmed, two.cut.stats().kept_invalidations), (1, 1));

    two.heal().await;
    assert_eq!(get(&two.other, "key").await, Some(1), "the store has the older value");
    assert_eq!(get(&two.cut, "key").await, None);
    let many = two.cut.get_many::<u32, _>(["key", "other"]).await;
    assert_eq!(many.into_iter().collect::<Result<Vec<_>, _>>().expect("answered"), [None, Some(1)]);
    assert!(!two.cut.contains("key").await.expect("answered"));
    assert_eq!(load(&two.cut, "key", 2).await, 2, "its process loads a newer one");
    assert_eq!(load(&two.cut, "other", 2).await, 1, "other keys are served");

    two.eventually_sent().await;
    assert_eq!(get(&two.other, "key").await, None);
    assert_eq!(load(&two.cut, "key", 3).await, 3);
    assert_eq!(get(&two.other, "key").await, Some(3), "it is sent once");
    let stats = two.cut.stats();
    assert_eq!((stats.invalidations_unconfirmed, stats.invalidations_resent, stats.invalidations), (1, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_that_its_caller_drops_is_retained_too() {
    let two = Two::new(Policy::builder());
    load(&two.cut, "key", 1).await;
    two.line.cut();
    timeout(Duration::from_millis(50), two.cut.invalidate("key")).await.expect_err("it is dropped");
    assert_eq!(two.cut.stats().kept_invalidations, 1);
    two.heal().await;
    assert_eq!(get(&two.cut, "key").await, None);
    two.eventually_sent().await;
    assert_eq!(get(&two.other, "key").await, None);
}

#[tokio::test(start_paused = true)]
async fn a_retained_tag_hides_the_values_of_its_policy_and_those_stored_with_it() {
    let two = Two::new(Policy::builder().tags(["catalog"]));
    let plain = two.cut.with_policy(Policy::default());
    load(&two.cut, "of the policy", 1).await;
    plain.insert_with_tags("of its own", &1_u32, ["sale", "catalog"]).await.expect("stored");
    plain.insert_with_tags("other", &1_u32, ["sale"]).await.expect("stored");
    two.line.cut();
    two.cut.invalidate_tag("catalog").await.expect_err("cut off");
    two.heal().await;
    assert_eq!(get(&two.other, "of the policy").await, Some(1));
    assert_eq!((get(&two.cut, "of the policy").await, get(&plain, "of its own").await), (None, None));
    assert_eq!(get(&plain, "other").await, Some(1));
    two.eventually_sent().await;
    assert_eq!(get(&two.other, "of the policy").await, None);
    assert_eq!((get(&plain, "of its own").await, get(&plain, "other").await), (None, Some(1)));
}

#[tokio::test(start_paused = true)]
async fn a_later_confirmed_change_replaces_the_retained_one() {
    let two = Two::new(Policy::builder());
    load(&two.cut, "key", 1).await;
    two.line.cut();
    two.cut.invalidate("key").await.expect_err("cut off");
    two.heal().await;
    two.cut.insert("key", &2_u32).await.expect("confirmed");
    assert_eq!((two.cut.stats().kept_invalidations, get(&two.cut, "key").await), (0, Some(2)));
    two.eventually_sent().await;
    assert_eq!((get(&two.other, "key").await, two.cut.stats().invalidations_resent), (Some(2), 0));
}

#[tokio::test(start_paused = true)]
async fn an_insertion_is_not_retained_and_an_expiry_is() {
    let two = Two::new(Policy::builder().stale_if_error(SENT * 10));
    load(&two.cut, "inserted", 1).await;
    load(&two.cut, "expired", 1).await;
    two.line.cut();
    let error = two.cut.insert("inserted", &2_u32).await.expect_err("cut off");
    assert!(error.to_string().starts_with("not confirmed: the insertion"), "{error}");
    let error = two.cut.expire("expired").await.expect_err("cut off");
    assert!(error.to_string().starts_with("not confirmed yet: the expiry"), "{error}");
    two.heal().await;
    assert_eq!((get(&two.cut, "inserted").await, get(&two.cut, "expired").await), (Some(1), None));
    two.eventually_sent().await;
    assert_eq!((get(&two.other, "inserted").await, get(&two.other, "expired").await), (Some(1), None));
}

/// Cuts the first process off while it loads 1, and drops its invalidation of that key. The load ends when the gate opens.
async fn invalidated_while_loading(two: &Two) -> (Gate, JoinHandle<u32>) {
    let (gate, loads) = (Gate::closed(), Counter::default());
    let older = tokio::spawn({
        let (guard, gate, loads) = (two.cut.clone(), gate.clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                gate.pass().await;
                Ok::<_, String>(1_u32)
            };
            guard.get_or_load("key", load).await.expect("loaded")
        }
    });
    loads.reach(1).await;
    two.line.cut();
    timeout(Duration::from_millis(50), two.cut.invalidate("key")).await.expect_err("it is dropped");
    (gate, older)
}

/// A load that began before the invalidation answers only the callers that had joined it, although nothing in the store has ended its
/// lease.
#[tokio::test(start_paused = true)]
async fn a_load_from_before_does_not_answer_later_callers() {
    let two = Two::new(Policy::builder().lease(SENT * 10).load_timeout(SENT * 10));
    let (gate, older) = invalidated_while_loading(&two).await;
    let later = tokio::spawn({
        let guard = two.cut.clone();
        async move { load(&guard, "key", 2).await }
    });
    assert_eq!(later.await.expect("joined"), 2);
    two.heal().await;
    gate.open();
    assert_eq!(older.await.expect("joined"), 1);
    assert_ne!(get(&two.cut, "key").await, Some(1));
    two.eventually_sent().await;
    assert_ne!(get(&two.other, "key").await, Some(1));
}

#[tokio::test(start_paused = true)]
async fn clones_and_policies_share_retained_invalidations_and_the_bypass_changes_nothing() {
    let two = Two::new(Policy::builder());
    load(&two.cut, "key", 1).await;
    let clone = two.cut.with_policy(Policy::builder().name("other").build().expect("valid"));
    two.line.cut();
    clone.invalidate("key").await.expect_err("cut off");
    two.cut.set_bypass(true);
    two.heal().await;
    assert_eq!((get(&two.cut, "key").await, get(&clone, "key").await), (None, None));
    two.eventually_sent().await;
    assert_eq!(get(&two.other, "key").await, None);
}

#[tokio::test(start_paused = true)]
async fn beyond_the_bound_everything_is_invalidated() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let two = Two::with(Policy::builder().invalidate_all(true), |builder| builder.most_kept_invalidations(2));
    for key in ["a", "b", "c", "never invalidated"] {
        load(&two.cut, key, 1).await;
    }
    two.line.cut();
    for key in ["a", "b", "a", "c"] {
        timeout(Duration::from_millis(50), two.cut.invalidate(key)).await.expect_err("it is dropped");
    }
    assert_eq!(two.cut.stats().kept_invalidations, 1, "that of everything");
    assert_eq!(two.cut.stats().invalidations_overflowed, 1);
    two.heal().await;
    for key in ["a", "b", "c", "never invalidated"] {
        assert_eq!((get(&two.cut, key).await, get(&two.other, key).await), (None, Some(1)), "{key}");
    }
    two.eventually_sent().await;
    for key in ["a", "b", "c", "never invalidated"] {
        assert_eq!(get(&two.other, key).await, None, "{key}");
    }
    assert_eq!(load(&two.cut, "a", 2).await, 2);
    assert_eq!(load(&two.cut, "a", 3).await, 2, "it is served again");
    assert_eq!(warnings.about("most_kept_invalidations").len(), 1, "{warnings:?}");
    assert!(warnings.about("invalidate_all(true)").is_empty(), "no value was missed: {warnings:?}");
}

/// Values of a policy without `invalidate_all` have no common tag, so their process does not serve any that may be older.
#[tokio::test(start_paused = true)]
async fn beyond_the_bound_values_without_a_common_tag_are_not_served_until_they_are_newer() {
    const LOAD: Duration = Duration::from_secs(5);
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let policy = Policy::builder().load_timeout(LOAD).fresh_for(SENT * 10).ttl_jitter(0.0);
    let two = Two::with(policy, |builder| builder.most_kept_invalidations(1));
    for key in ["a", "b"] {
        load(&two.cut, key, 1).await;
    }
    two.line.cut();
    for key in ["a", "b"] {
        timeout(Duration::from_millis(50), two.cut.invalidate(key)).await.expect_err("it is dropped");
    }
    assert_eq!(warnings.about("invalidate_all(true)").len(), 1, "{warnings:?}");
    two.heal().await;
    two.eventually_sent().await;
    assert_eq!(get(&two.other, "a").await, Some(1), "as the error says");
    assert_eq!(get(&two.cut, "a").await, None);
    // For as long as `load_timeout`, a load of another process may have begun before the invalidation.
    sleep(LOAD + SENT).await;
    assert_eq!(get(&two.cut, "a").await, None);
    assert_eq!(load(&two.cut, "a", 2).await, 2);
    assert_eq!((load(&two.cut, "a", 3).await, get(&two.other, "a").await), (2, Some(2)));
}

/// Regression: for `load_timeout` and a second after the confirmation each call loaded each key anew, also one that was never invalidated.
#[tokio::test(start_paused = true)]
async fn what_a_process_loads_after_its_invalidation_of_everything_was_confirmed_is_served_at_once() {
    let policy = Policy::builder().load_timeout(SENT * 6).fresh_for(SENT * 60).ttl_jitter(0.0);
    let two = Two::with(policy, |builder| builder.most_kept_invalidations(1));
    two.line.cut();
    for key in ["a", "b"] {
        timeout(Duration::from_millis(50), two.cut.invalidate(key)).await.expect_err("it is dropped");
    }
    two.heal().await;
    two.eventually_sent().await;
    assert_eq!((load(&two.cut, "new", 1).await, load(&two.cut, "new", 2).await), (1, 1));
    assert_eq!((get(&two.cut, "new").await, get(&two.other, "new").await), (Some(1), Some(1)));
    // The load of the other process may have begun before the invalidation, so its value is loaded again, once.
    assert_eq!((load(&two.other, "theirs", 1).await, get(&two.cut, "theirs").await), (1, None));
    assert_eq!((load(&two.cut, "theirs", 2).await, load(&two.cut, "theirs", 3).await), (2, 2));
    assert_eq!(get(&two.other, "theirs").await, Some(2));
}

/// The call is dropped at its beginning, when only a part of the keys was sent, or it outlasts its deadline, because the outage goes on.
#[tokio::test(start_paused = true)]
async fn an_invalidation_of_many_keys_is_retained_as_a_whole_and_costs_one_wait() {
    const KEYS: u64 = 2_000;
    for patience in [Duration::from_millis(50), Duration::from_millis(2_500)] {
        let two = Two::new(Policy::builder());
        let stored = two.cut.insert_many((0..KEYS).map(|key| (key, 1_u32))).await;
        assert!(stored.into_iter().all(|stored| stored.is_ok()));
        two.line.cut();
        let ended = timeout(patience, two.cut.invalidate_many(0..KEYS)).await;
        let stats = two.cut.stats();
        assert_eq!((stats.kept_invalidations, stats.invalidations_unconfirmed), (KEYS, KEYS));
        if patience > Duration::from_secs(2) {
            for answer in ended.expect("within one wait") {
                let error = answer.expect_err("cut off");
                assert!(error.is_store() && error.to_string().starts_with("not confirmed yet"), "{error}");
            }
            let inserted = timeout(patience, two.cut.insert_many((0..KEYS).map(|key| (key, 2_u32)))).await;
            assert!(inserted.expect("within one wait").into_iter().all(|inserted| inserted.is_err()));
        }
        two.heal().await;
        assert!(
            two.cut
                .get_many::<u32, _>(0..KEYS)
                .await
                .into_iter()
                .all(|found| found.is_ok_and(|found| found.is_none()))
        );
        two.eventually_sent().await;
        assert_eq!(get(&two.other, &(KEYS - 1).to_string()).await, None);
    }
}

/// As long as some of the changes are confirmed, the deadline of the call moves on.
#[tokio::test(start_paused = true)]
async fn a_slow_store_confirms_an_invalidation_of_many_keys() {
    let chaos = ChaosStore::new(1);
    let guard = StampedeGuard::new(chaos.clone());
    chaos.latency(Duration::from_millis(200), Duration::from_millis(200));
    let began = Instant::now();
    let invalidated = guard.invalidate_many(0..5_000_u64).await;
    assert!(invalidated.into_iter().all(|invalidated| invalidated.is_ok()));
    assert!(began.elapsed() > Duration::from_secs(3), "{:?}", began.elapsed());
}

#[test]
fn the_bound_is_at_least_one() {
    let none = StampedeGuard::builder(ChaosStore::new(1)).most_kept_invalidations(0).build();
    assert_eq!(none.expect_err("refused").kind(), ErrorKind::InvalidPolicy);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_sends_retained_invalidations_or_reports_them() {
    for is_healed in [true, false] {
        let warnings = Warnings::default();
        let _listening = warnings.listen();
        let two = Two::new(Policy::builder());
        load(&two.cut, "key", 1).await;
        two.line.cut();
        two.cut.invalidate("key").await.expect_err("cut off");
        if is_healed {
            two.heal().await;
        }
        let ended = two.cut.shutdown(SENT).await;
        let (left, stored) = if is_healed { (0, None) } else { (1, Some(1)) };
        assert_eq!((ended.unsent_invalidations, get(&two.other, "key").await), (left, stored));
        assert_eq!(warnings.about("the guard ends with invalidations").len(), left, "{warnings:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_is_dropped_says_what_it_forgets_and_ends() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let Two { line, cut, other } = Two::new(Policy::builder());
    load(&cut, "key", 1).await;
    line.cut();
    cut.invalidate("key").await.expect_err("cut off");
    drop(cut);
    sleep(SENT).await;
    line.resume();
    sleep(SENT).await;
    assert_eq!(get(&other, "key").await, Some(1));
    assert_eq!(warnings.about("the guard ends with invalidations").len(), 1, "{warnings:?}");
}

#[tokio::test(start_paused = true)]
async fn the_beginning_and_the_end_are_logged_once() {
    let events = Warnings::up_to(tracing::Level::INFO);
    let _listening = events.listen();
    let two = Two::new(Policy::builder());
    two.line.cut();
    for key in ["a", "b", "c"] {
        two.cut.invalidate(key).await.expect_err("cut off");
    }
    assert_eq!(two.cut.stats().kept_invalidations, 3);
    assert_eq!(events.about("has not confirmed an invalidation").len(), 1, "{events:?}");
    assert!(events.about("that were kept are confirmed").is_empty(), "{events:?}");
    two.heal().await;
    two.eventually_sent().await;
    assert_eq!(events.about("that were kept are confirmed").len(), 1, "{events:?}");
    assert_eq!(two.cut.stats().invalidations_resent, 3);
}

/// An invalidation was retained in a runtime that ends before the store answers. A later call in another runtime makes it be sent.
#[test]
fn a_call_in_another_runtime_sends_what_an_ended_runtime_has_retained() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let two = Two::new(Policy::builder());
    runtime().expect("a runtime").block_on(async {
        load(&two.cut, "key", 1).await;
        two.line.cut();
        two.cut.invalidate("key").await.expect_err("cut off");
    });
    two.line.resume();
    runtime().expect("a runtime").block_on(async {
        assert_eq!(get(&two.cut, "key").await, None);
        two.eventually_sent().await;
        assert_eq!(get(&two.other, "key").await, None);
    });
}

/// A read whose answer is on its way when the invalidation ends must not make a copy, and neither must a read that is sent later.
#[tokio::test(start_paused = true)]
async fn no_copy_of_a_name_with_a_retained_invalidation_is_served() {
    let two = Two::new(Policy::builder().local_for(Duration::MAX).fresh_for(SENT * 100).ttl_jitter(0.0));
    for guard in [&two.cut, &two.other] {
        guard.connect().await.expect("connected");
        load(guard, "key", 1).await;
        load(guard, "key", 1).await;
    }
    two.line.cut();
    two.cut.invalidate("key").await.expect_err("cut off");
    two.heal().await;
    for _ in 0..3 {
        assert_eq!(get(&two.cut, "key").await, None);
    }
    assert_eq!(get(&two.other, "key").await, Some(1));
    two.eventually_sent().await;
    assert_eq!((get(&two.cut, "key").await, get(&two.other, "key").await), (None, None));
}

/// Until the invalidation is sent, the store accepts the value of a load that began before it. That value must not become a copy.
#[tokio::test(start_paused = true)]
async fn a_load_from_before_makes_no_copy() {
    let policy = Policy::builder().local_for(Duration::MAX).lease(SENT * 10).load_timeout(SENT * 10);
    let two = Two::new(policy.fresh_for(SENT * 100).ttl_jitter(0.0));
    let (gate, older) = invalidated_while_loading(&two).await;
    two.heal().await;
    gate.open();
    assert_eq!(older.await.expect("joined"), 1);
    assert_eq!(get(&two.other, "key").await, Some(1), "its value was stored");
    assert_eq!((get(&two.cut, "key").await, get(&two.cut, "key").await), (None, None));
    two.eventually_sent().await;
    assert_eq!((get(&two.cut, "key").await, get(&two.other, "key").await), (None, None));
}
