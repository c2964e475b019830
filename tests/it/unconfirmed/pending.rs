//! An invalidation that begins before the origin is changed: from its beginning to its end its process serves nothing stored that it
//! names, and only `withdraw` ends it without invalidating.

use stampede_guard::PendingInvalidation;

use super::*;
use crate::held_calls::held_call_of;

/// A key, a value with a tag of its own and one with the policy's tag, stored by the other process; copies in memory, if any, in both.
async fn stored(policy: PolicyBuilder) -> Two {
    let two = Two::new(policy.tags(["all"]));
    for guard in [&two.other, &two.cut] {
        load(guard, "key", 1).await;
        load(guard, "bystander", 1).await;
    }
    two.other.insert_with_tags("tagged", &1_u32, ["tag"]).await.expect("stored");
    assert_eq!(get(&two.cut, "tagged").await, Some(1));
    two
}

fn begin(guard: &StampedeGuard) -> PendingInvalidation {
    guard.invalidation().key("key").tag("tag").begin().expect("valid names")
}

fn policies() -> [PolicyBuilder; 2] {
    [Policy::builder(), Policy::builder().local_for(Duration::from_secs(60))]
}

#[tokio::test(start_paused = true)]
async fn nothing_that_it_names_is_served_until_it_is_sent() {
    for policy in policies() {
        let two = stored(policy).await;
        let change = begin(&two.cut);
        for key in ["key", "tagged"] {
            assert_eq!(get(&two.cut, key).await, None, "{key}");
            assert!(!two.cut.contains(key).await.expect("answered"));
            assert_eq!(get(&two.other, key).await, Some(1), "only its own process knows of it");
        }
        assert_eq!(get(&two.cut, "bystander").await, Some(1));
        // What is loaded meanwhile is given to its callers, and is older than the change that is to come.
        assert_eq!(load(&two.cut, "key", 1).await, 1);
        assert_eq!(get(&two.cut, "key").await, None);

        change.send().await.expect("confirmed");
        for guard in [&two.cut, &two.other] {
            assert_eq!((get(guard, "key").await, get(guard, "tagged").await), (None, None));
        }
        assert_eq!(load(&two.other, "key", 2).await, 2);
        assert_eq!(get(&two.cut, "key").await, Some(2), "served again");
        let stats = two.cut.stats();
        assert_eq!((stats.invalidations_unconfirmed, stats.kept_invalidations), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn withdrawn_it_has_invalidated_nothing() {
    for policy in policies() {
        let two = stored(policy).await;
        let before = two.cut.stats().invalidations;
        begin(&two.cut).withdraw();
        sleep(SENT).await;
        for guard in [&two.cut, &two.other] {
            assert_eq!((get(guard, "key").await, get(guard, "tagged").await), (Some(1), Some(1)));
        }
        assert_eq!(two.cut.stats().invalidations, before);
    }
}

/// A client that leaves, a `?` between the commit and `send`, a panic, a `send` that is not polled.
#[tokio::test(start_paused = true)]
async fn dropped_it_is_sent_and_nothing_is_served_before() {
    let ends: [fn(PendingInvalidation); 2] = [drop, |change| drop(change.send())];
    for (end, policy) in ends.into_iter().flat_map(|end| policies().map(|policy| (end, policy))) {
        let two = stored(policy).await;
        let change = begin(&two.cut);
        end(change);
        assert_eq!(two.cut.stats().kept_invalidations, 2);
        assert_eq!((get(&two.cut, "key").await, get(&two.cut, "tagged").await), (None, None));
        two.eventually_sent().await;
        for guard in [&two.cut, &two.other] {
            assert_eq!((get(guard, "key").await, get(guard, "tagged").await), (None, None));
        }
    }
}

/// An invalidation of the same names by another caller, whose commands began before the origin's change, does not stand for it.
#[tokio::test(start_paused = true)]
async fn an_invalidation_that_began_before_the_change_does_not_settle_it() {
    let chaos = ChaosStore::new(1);
    let guard = StampedeGuard::new(chaos.clone());
    chaos.latency(Duration::from_millis(200), Duration::from_millis(200));
    let change = begin(&guard);
    let earlier = tokio::spawn(guard.invalidation().key("key").tag("tag").send());
    sleep(Duration::from_millis(100)).await;
    drop(change); // after the origin's change
    earlier.await.expect("no panic").expect("confirmed");
    assert_eq!(guard.stats().kept_invalidations, 2);
    sleep(SENT).await;
    assert_eq!((guard.stats().kept_invalidations, guard.stats().invalidations_resent), (0, 2));
}

/// Callers that come while it is pending join one load; those that come after `send` was called begin another.
#[tokio::test(start_paused = true)]
async fn a_load_that_began_before_send_is_not_joined_after_it() {
    let two = stored(Policy::builder()).await;
    let change = begin(&two.cut);
    let (gate, loads) = (Gate::closed(), Counter::default());
    let callers: Vec<_> = (0..3).map(|_| held_call_of(&two.cut, "key", 1, &gate, &loads)).collect();
    loads.reach(1).await;
    let sent = change.send();
    let later = {
        let guard = two.cut.clone();
        tokio::spawn(async move { load(&guard, "key", 2).await })
    };
    sent.await.expect("confirmed");
    assert_eq!(later.await.expect("no panic"), 2);
    gate.open();
    for caller in callers {
        assert_eq!(caller.await.expect("no panic"), 1, "it came before the change was acknowledged");
    }
    assert_eq!(
        (loads.started(), get(&two.cut, "key").await, get(&two.other, "key").await),
        (1, Some(2), Some(2))
    );
}

/// A resource of HTTP has a tag for the responses to requests with reports of proxies. Other keys are not concerned.
#[cfg(feature = "http")]
#[tokio::test(start_paused = true)]
async fn loads_of_other_keys_are_joined_while_a_path_is_pending() {
    let http = stampede_guard::http::HttpPolicy::default().authority("shop.example");
    let two = stored(Policy::builder().http(http)).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let call = || held_call_of(&two.cut, "another", 1, &gate, &loads);
    let first = call();
    loads.reach(1).await;
    let change = two.cut.invalidation().path("/product/7").begin().expect("a path");
    let second = call();
    sleep(Duration::from_millis(1)).await;
    gate.open();
    for caller in [first, second] {
        assert_eq!(caller.await.expect("no panic"), 1);
    }
    assert_eq!(loads.started(), 1);
    change.withdraw();
}

/// Two transactions that change one key: the first one's end does not show it.
#[tokio::test(start_paused = true)]
async fn a_name_is_hidden_until_the_last_of_them_ends() {
    let two = stored(Policy::builder()).await;
    let changes = [begin(&two.cut), begin(&two.cut)];
    let [first, second] = changes;
    first.withdraw();
    assert_eq!(get(&two.cut, "key").await, None);
    second.withdraw();
    assert_eq!(get(&two.cut, "key").await, Some(1));
}

/// A bad name fails before the commit, and nothing has begun.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_none_is_an_error_before_anything_begins() {
    let two = stored(Policy::builder()).await;
    let error = two.cut.invalidation().key("key").tag("").begin().expect_err("an empty tag");
    assert_eq!((error.kind(), get(&two.cut, "key").await), (ErrorKind::InvalidKey, Some(1)));
    two.cut.invalidation().begin().expect("nothing to hide").send().await.expect("nothing to send");
}

/// The bound of kept invalidations counts what is kept, not what is pending.
#[tokio::test(start_paused = true)]
async fn a_large_transaction_does_not_invalidate_everything() {
    let two = Two::with(Policy::builder(), |builder| builder.most_kept_invalidations(10));
    load(&two.cut, "bystander", 1).await;
    let change = two.cut.invalidation().keys(0..1_000_u64).begin().expect("valid names");
    assert_eq!(get(&two.cut, "bystander").await, Some(1));
    change.send().await.expect("confirmed");
    assert_eq!((get(&two.cut, "bystander").await, two.cut.stats().invalidations_overflowed), (Some(1), 0));
}
