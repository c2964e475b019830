use tokio::time::timeout;
use uuid::Uuid;

use super::*;

fn three(name: &LockName) -> (Arc<LockWaiters>, [LockWaiter; 3]) {
    let grants = Arc::new(LockWaiters::default());
    let waiters = [(); 3].map(|()| grants.register(name, &Token::mint(Uuid::nil())));
    (grants, waiters)
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(86_400)
}

/// The waiter's role, if its own time ends far in the future.
fn watch(waiter: &LockWaiter) -> ClockRole {
    waiter.watch(far(), None)
}

async fn notified(waiter: &LockWaiter) -> Option<LockHints> {
    timeout(Duration::from_millis(1), waiter.notified()).await.ok()
}

#[tokio::test(start_paused = true)]
async fn a_grant_is_retained_until_its_waiter_takes_it() {
    let (grants, [one, two, _three]) = three(&LockName::mutex("a"));
    assert!(grants.notify(&two.waiter.token, LockHint::Granted { fence: 7 }).is_some());
    assert_eq!(notified(&one).await, None);
    assert_eq!(notified(&two).await, Some(LockHints { granted: Some(7), ..LockHints::default() }));
    assert_eq!(notified(&two).await, None, "it is taken once");
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_receiver_is_reported() {
    let (grants, [one, two, three]) = three(&LockName::mutex("a"));
    let (token, late) = (one.waiter.token.clone(), two.waiter.token.clone());
    drop(one);
    assert!(grants.notify(&token, LockHint::Granted { fence: 1 }).is_none());
    assert!(grants.notify(&late, LockHint::Granted { fence: 1 }).is_some());
    drop((two, three));
    assert!(grants.notify(&late, LockHint::Broken).is_none());
    assert!(lock(&grants.registry).by_token.is_empty() && lock(&grants.registry).waiting.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_next_waiter_becomes_the_first_when_the_first_leaves_or_holds() {
    let (_grants, [one, two, three]) = three(&LockName::mutex("a"));
    assert!(one.is_first() && !two.is_first() && !three.is_first());
    drop(two);
    assert_eq!(notified(&three).await, None, "it is still the second");
    one.hold();
    assert!(three.is_first() && !one.is_first());
    assert_eq!(notified(&three).await, Some(LockHints { role_changed: true, ..LockHints::default() }));
    drop(one);
    assert_eq!(notified(&three).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_notified_that_its_mutex_was_broken() {
    let (grants, [holder, waiter, _three]) = three(&LockName::mutex("a"));
    holder.hold();
    let _ = notified(&waiter).await;
    let _ = grants.notify(&holder.waiter.token, LockHint::Broken);
    assert!(notified(&holder).await.is_some_and(|hints| hints.broken));
}

#[cfg(feature = "redis")]
#[tokio::test(start_paused = true)]
async fn the_first_waiter_is_notified_of_a_free_key_and_with_the_holder_of_a_loss() {
    let (grants, [holder, one, two]) = three(&LockName::mutex("a"));
    holder.hold();
    let _ = notified(&one).await;
    drop(grants.notify_missed("sg1:m:{b}", None));
    assert_eq!(notified(&one).await, None);
    drop(grants.notify_missed("sg1:m:{a}", None));
    assert_eq!((notified(&holder).await, notified(&two).await), (None, None));
    drop(one);
    let passed_on = Some(LockHints { role_changed: true, missed: true, ..LockHints::default() });
    assert_eq!(notified(&two).await, passed_on, "the first has left without looking");
    grants.notify_firsts_missed();
    assert!(notified(&holder).await.is_some_and(|hints| hints.missed));
    assert!(notified(&two).await.is_some_and(|hints| hints.missed && hints.is_silent));
    assert!(grants.anyone_waits("sg1:m:{a}"));
    drop(two);
    assert!(!grants.anyone_waits("sg1:m:{a}"), "a holder does not wait");
}

/// After a loss of messages, the first waiter is notified, and all others are looked up in the queue. Waiters that are not in it are
/// notified, too, unless they have sent a take since the look-up began.
#[cfg(feature = "redis")]
#[tokio::test(start_paused = true)]
async fn waiters_missing_from_the_queue_are_notified_to_ask() {
    let (grants, [one, two, three]) = three(&LockName::mutex("a"));
    let four = grants.register(&LockName::mutex("a"), &Token::mint(Uuid::nil()));
    let take = |waiter: &LockWaiter| {
        let again = grants.begin_take(&waiter.waiter.token);
        grants.record_answer(&waiter.waiter.token);
        again
    };
    for waiter in [&one, &two, &three] {
        assert!(!take(waiter), "it asks for the first time");
    }
    grants.notify_firsts_missed();
    assert!(notified(&one).await.is_some_and(|hints| hints.missed));
    assert_eq!(notified(&two).await, None);
    let Ok([mut absent_waiters]) = <[AbsentWaiters; 1]>::try_from(grants.all_absent_waiters()) else {
        panic!("one lock")
    };
    assert!(absent_waiters.name == LockName::mutex("a") && !absent_waiters.is_empty());
    absent_waiters.found(&three.waiter.token);
    assert!(take(&one));
    absent_waiters.absent().iter().for_each(Absent::notify);
    assert!(notified(&two).await.is_some_and(|hints| hints.missed && hints.is_silent));
    assert!(!take(&two), "it has no position to search for");
    assert_eq!(
        (notified(&three).await, notified(&four).await),
        (None, None),
        "one has a position, one has sent no request yet"
    );

    let Ok([absent_waiters]) = <[AbsentWaiters; 1]>::try_from(grants.all_absent_waiters()) else {
        panic!("one lock")
    };
    assert!(take(&two));
    assert!(grants.begin_take(&three.waiter.token));
    absent_waiters.absent().iter().for_each(Absent::notify);
    assert_eq!(notified(&two).await, None, "it was answered since");
    assert_eq!(notified(&three).await, None, "it will be");
}

/// The first waiter has been granted the lock, so the message goes to the second one, which leaves before it acts on it.
#[tokio::test(start_paused = true)]
async fn a_message_that_the_first_did_not_act_on_passes_to_the_next_waiter() {
    let (grants, [one, two, _three]) = three(&LockName::mutex("a"));
    drop(grants.notify(&one.waiter.token, LockHint::Granted { fence: 1 }));
    drop(grants.notify_missed("sg1:m:{a}", None));
    assert!(notified(&one).await.is_some_and(|hints| hints.granted == Some(1) && !hints.missed));
    assert_eq!(watch(&one), ClockRole::Look(Instant::now()));
    drop(two);
    assert_eq!(notified(&one).await, Some(LockHints { missed: true, ..LockHints::default() }));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_with_a_void_grant_is_notified() {
    let (grants, [one, two, _three]) = three(&LockName::mutex("a"));
    drop(grants.notify(&one.waiter.token, LockHint::Granted { fence: 1 }));
    let _ = notified(&one).await;
    one.is_busy(Instant::now(), None);
    drop(grants.notify_missed("sg1:m:{a}", None));
    assert!(notified(&one).await.is_some_and(|hints| hints.missed));
    assert_eq!(notified(&two).await, None);
}

#[tokio::test(start_paused = true)]
async fn the_first_watches_the_latest_answer_of_any_waiter() {
    let (_grants, [one, two, three]) = three(&LockName::mutex("a"));
    let now = Instant::now();
    let [short, long] = [1, 60].map(|secs| now + Duration::from_secs(secs));
    one.is_busy(now, Some(long));
    two.is_busy(now, Some(long));
    assert_eq!((watch(&one), notified(&one).await), (ClockRole::Look(long), None));
    assert_eq!(watch(&two), ClockRole::Stand(Some(long + Duration::from_millis(400))));
    tokio::time::advance(Duration::from_millis(1)).await;
    three.is_busy(Instant::now(), Some(short));
    assert_eq!(notified(&one).await, Some(LockHints { role_changed: true, ..LockHints::default() }));
    two.is_busy(now, Some(long));
    assert_eq!(
        (watch(&one), notified(&one).await),
        (ClockRole::Look(short), None),
        "an earlier answer, come late"
    );
    drop(one);
    assert_eq!(watch(&two), ClockRole::Look(short));
    two.is_busy(Instant::now(), None);
    assert_eq!(watch(&two), ClockRole::Look(far()));
}

#[tokio::test(start_paused = true)]
async fn a_mutex_and_a_semaphore_of_one_name_have_each_a_first() {
    let grants = Arc::new(LockWaiters::default());
    let mutex = grants.register(&LockName::mutex("a"), &Token::mint(Uuid::nil()));
    let semaphore = grants.register(&LockName::semaphore("a"), &Token::mint(Uuid::nil()));
    assert!(mutex.is_first() && semaphore.is_first());
}

#[tokio::test(start_paused = true)]
async fn one_waiter_replaces_a_silent_first_which_rejoins_at_the_end() {
    let (_grants, [one, two, three]) = three(&LockName::mutex("a"));
    let ends = Instant::now() + Duration::from_secs(1);
    one.is_busy(Instant::now(), Some(ends));
    assert_eq!(watch(&one), ClockRole::Look(ends));
    tokio::time::advance(Duration::from_millis(1_300)).await;
    assert!(!two.stands_in() && one.is_first(), "it may be late");
    tokio::time::advance(Duration::from_millis(100)).await;
    assert!(!one.stands_in(), "it would look by itself");
    assert!(three.stands_in() && three.is_first());
    assert!(!two.stands_in(), "one is enough");
    three.hold();
    assert!(two.is_first(), "a silent waiter is not waited for again");
    assert!(!one.is_first());
    drop(two);
    assert!(one.is_first(), "it has spoken");
}

/// When the time to wait becomes shorter, sleepers are woken once. They then sleep only briefly, so that further messages need not wake
/// them.
#[tokio::test(start_paused = true)]
async fn waiters_that_sleep_for_too_long_are_woken_once() {
    let (grants, [one, two, three]) = three(&LockName::mutex("a"));
    let ends = Instant::now() + Duration::from_secs(60);
    one.is_busy(Instant::now(), Some(ends));
    let _ = (watch(&one), watch(&two), watch(&three));
    let changed = Some(LockHints { role_changed: true, ..LockHints::default() });
    for expected in [changed, None] {
        drop(grants.notify_missed("sg1:m:{a}", None));
        assert!(notified(&one).await.is_some_and(|hints| hints.missed));
        assert_eq!((notified(&two).await, notified(&three).await), (expected.clone(), expected));
        let _ = (watch(&two), watch(&three));
    }
    assert!(
        matches!(watch(&two), ClockRole::Stand(Some(until)) if until <= Instant::now() + Duration::from_millis(500))
    );
}
