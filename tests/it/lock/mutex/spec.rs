//! What redis_exp_lock, redis-mutex and similar systems specify for a lock, tested on a server and on the memory store.

use super::*;

/// Two nodes on one store.
struct Stage {
    one: Locks,
    other: Locks,
    _server: Option<RedisServer>,
}

impl Stage {
    async fn on_redis() -> Self {
        let server = RedisServer::start();
        let (one, other) = (node(&server).await, node(&server).await);
        Self { one, other, _server: Some(server) }
    }

    fn in_memory() -> Self {
        let store = stampede_guard::MemoryStore::new();
        Self { one: Locks::new(store.clone()), other: Locks::new(store), _server: None }
    }

    /// A handle on the mutex in each node.
    fn handles(&self) -> [Mutex; 2] {
        [mutex(&self.one), mutex(&self.other)]
    }

    /// Like [`handles`](Self::handles), but the first handle has this TTL.
    fn handles_of(&self, ttl: Duration) -> [Mutex; 2] {
        [with(&self.one, |builder| builder.ttl(ttl)), mutex(&self.other)]
    }
}

/// A TTL that is long enough for a busy machine to check a held lock, and short enough to wait for its end.
const SHORT: Duration = Duration::from_secs(2);

/// Waits until the key no longer exists.
async fn expired(mutex: &Mutex) {
    eventually("it has expired", SOON, async || !mutex.is_locked().await.expect("asks")).await;
}

fn is_refused<T: std::fmt::Debug>(result: Result<T, LockError>) {
    assert!(matches!(result, Err(LockError::AlreadyAcquired)), "{result:?}");
}

/// S1.8: `is_held` is also right after a lock and an unlock, and during and after `synchronize`.
async fn a_handle_knows_whether_it_holds(stage: Stage) {
    let [a, b] = stage.handles();
    assert!(!a.is_held());
    let mut guard = locked(&a).await;
    assert!(a.is_held() && !b.is_held());
    guard.unlock().await.expect("asks");
    assert!(!a.is_held());
    let _ = a.synchronize(async |_| assert!(a.is_held())).await.expect("acquired");
    assert!(!a.is_held());
}

/// S1.9
async fn any_client_sees_whether_the_mutex_is_held(stage: Stage) {
    let [a, b] = stage.handles();
    for handle in [&a, &b] {
        assert!(!handle.is_locked().await.expect("asks"));
    }
    let guard = locked(&a).await;
    for handle in [&a, &b, &a.clone()] {
        assert!(handle.is_locked().await.expect("asks"));
    }
    drop(guard);
    expired(&b).await;
}

/// S1.10: only the holder's guard owns the mutex. After the expiry no guard owns it.
async fn only_the_holder_owns(stage: Stage) {
    let [a, b] = stage.handles_of(SHORT);
    let guard = locked(&a).await;
    assert!(guard.is_owned().await.expect("asks"));
    guard.ensure().await.expect("owned");
    expired(&a).await;
    assert!(!guard.is_owned().await.expect("asks"));
    let other = locked(&b).await;
    assert!(other.is_owned().await.expect("asks") && !guard.is_owned().await.expect("asks"));
    assert!(matches!(guard.ensure().await, Err(LockError::NotHeld)));
}

/// S1.11: an attempt is answered at once in either case.
async fn an_attempt_finds_the_mutex_free_or_busy(stage: Stage) {
    let [a, b] = stage.handles();
    let started = Instant::now();
    let guard = a.try_lock().await.expect("asks").expect("free");
    assert!(a.is_held() && a.is_locked().await.expect("asks") && guard.is_owned().await.expect("asks"));
    assert_eq!(guard.attempts(), 1);
    assert!(b.try_lock().await.expect("asks").is_none());
    assert!(!b.is_held() && guard.is_owned().await.expect("asks"));
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
}

/// S1.12: a handle that holds is refused by every method, also after the expiry, until it is unlocked.
async fn a_handle_acquires_once(stage: Stage) {
    let [a, _] = stage.handles_of(ms(100));
    let mut guard = locked(&a).await;
    for expires in [true, false] {
        is_refused(a.try_lock().await);
        is_refused(a.lock().await);
        is_refused(a.synchronize(async |_| panic!("it must not run")).await);
        if expires {
            expired(&a).await;
            assert!(a.is_held(), "until it is unlocked");
        }
    }
    assert!(!guard.unlock().await.expect("asks"));
    drop(locked(&a).await);
}

/// S1.27
async fn two_tasks_on_one_handle_do_not_both_acquire(stage: Stage) {
    let [a, _] = stage.handles();
    let (one, other) = tokio::join!(a.lock(), a.try_lock());
    let guard = one.expect("acquired");
    is_refused(other);
    drop(guard);
}

/// S1.3: a lock with a TTL expires.
async fn a_lock_expires(stage: Stage) {
    let [a, b] = stage.handles_of(SHORT);
    let guard = a.try_lock().await.expect("asks").expect("free");
    assert!(guard.is_owned().await.expect("asks"));
    expired(&b).await;
    assert!(!guard.is_owned().await.expect("asks"));
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
}

/// S1.3: a lock without a TTL is held at each of five looks, and has no end.
async fn a_non_expiring_lock_does_not_expire(stage: Stage) {
    let a = with(&stage.one, MutexBuilder::non_expiring);
    let mut guard = a.try_lock().await.expect("asks").expect("free");
    for _ in 0..5 {
        tokio::time::sleep(ms(100)).await;
        assert!(guard.is_owned().await.expect("asks"));
    }
    assert_eq!(a.remaining().await.expect("asks"), Some(Duration::MAX));
    assert_eq!(guard.remaining(), None);
    assert!(guard.unlock().await.expect("asks"));
    assert!(!a.is_locked().await.expect("asks"));
}

/// S1.14: three retries are four attempts. S1.13: if the mutex is free, one attempt is enough.
async fn attempts_run_out(stage: Stage) {
    let [a, _] = stage.handles();
    let mut guard = locked(&a).await;
    assert_eq!(guard.attempts(), 1);
    let b = with(&stage.other, |builder| builder.retries(3).retry_interval(ms(10)));
    let busy = b.lock().await;
    assert!(matches!(busy, Err(LockError::TooManyAttempts { attempts: 4 })), "{busy:?}");
    assert!(guard.unlock().await.expect("asks"));
    assert_eq!(locked(&b).await.attempts(), 1);
}

/// S1.13: a call with ten retries, one every 10 ms, meets a holder that unlocks after 15 ms.
async fn a_mutex_unlocked_between_retries_is_acquired(stage: Stage) {
    let [a, _] = stage.handles();
    let mut guard = locked(&a).await;
    let b = with(&stage.other, |builder| builder.retries(10).retry_interval(ms(10)));
    let unlock = async {
        tokio::time::sleep(ms(15)).await;
        assert!(guard.unlock().await.expect("asks"));
    };
    let (next, ()) = tokio::join!(b.lock(), unlock);
    let next = next.expect("acquired");
    assert!((2..=11).contains(&next.attempts()), "{}", next.attempts());
}

/// S0.6, S1.15: an unlock returns true if the mutex was held, and false the second time, and after the expiry. A caller that never acquired
/// has no guard that it could unlock.
async fn unlocking_returns_whether_it_was_held(stage: Stage) {
    let [a, b] = stage.handles_of(ms(100));
    let mut guard = locked(&b).await;
    assert!(guard.unlock().await.expect("asks"));
    assert!(!guard.unlock().await.expect("asks"));
    let mut guard = locked(&a).await;
    expired(&a).await;
    assert!(!guard.unlock().await.expect("asks"));
}

/// S1.15, S1.16: before the unlock all three predicates are true, and after it all are false.
async fn unlocking_clears_all_predicates(stage: Stage) {
    let [a, _] = stage.handles();
    let mut guard = locked(&a).await;
    assert!(a.is_held() && a.is_locked().await.expect("asks") && guard.is_owned().await.expect("asks"));
    assert!(guard.unlock().await.expect("asks"));
    assert!(!a.is_held() && !a.is_locked().await.expect("asks") && !guard.is_owned().await.expect("asks"));
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
}

/// S1.16: an unlock that returns false frees the handle, and the handle acquires again.
async fn unlocking_a_lost_mutex_frees_the_handle(stage: Stage) {
    let [a, _] = stage.handles_of(SHORT);
    let mut guard = locked(&a).await;
    expired(&a).await;
    assert!(!guard.unlock().await.expect("asks"));
    assert!(!a.is_held());
    let mut next = locked(&a).await;
    assert!(!guard.unlock().await.expect("asks"), "it is over for the old one");
    assert!(next.unlock().await.expect("asks"));
}

async fn unlocking_lets_others_acquire(stage: Stage) {
    let [a, b] = stage.handles();
    let mut guard = locked(&a).await;
    assert!(b.try_lock().await.expect("asks").is_none());
    guard.unlock().await.expect("asks");
    assert!(b.try_lock().await.expect("asks").is_some());
}

/// S0.7, S5.10: it would be a flaw if the value did not identify the holder, or if an unlock did not compare it.
async fn a_late_unlock_leaves_the_next_holder_alone(stage: Stage) {
    let [a, b] = stage.handles_of(ms(100));
    let mut late = locked(&a).await;
    let next = waiter(&stage.other);
    let (mut next, _) = granted(next).await;
    assert!(!late.unlock().await.expect("asks"));
    drop(late);
    assert!(next.is_owned().await.expect("asks") && b.is_locked().await.expect("asks"));
    assert!(next.unlock().await.expect("asks"));
}

/// S5.11: it would be a flaw to release after a failed acquisition, too, as an `ensure` does.
async fn a_failed_acquisition_releases_nothing(stage: Stage) {
    let [a, _] = stage.handles();
    let guard = locked(&a).await;
    let impatient = with(&stage.other, |builder| builder.acquire_timeout(ms(1_000)));
    let polling = with(&stage.other, |builder| builder.retries(2).retry_interval(ms(5)));
    for busy in [impatient, polling] {
        let error = busy.synchronize(async |_| panic!("it must not run")).await;
        assert!(error.as_ref().is_err_and(LockError::is_busy), "{error:?}");
    }
    // After this, the background work of the nodes is done.
    stage.other.close().await;
    assert!(guard.is_owned().await.expect("asks"));
}

async fn synchronize_excludes_others_and_lets_them_in_after(stage: Stage) {
    let [a, b] = stage.handles();
    let done = a.synchronize(async |_| b.try_lock().await.expect("asks").is_none()).await.expect("acquired");
    assert!(done.value && done.still_held);
    assert!(b.try_lock().await.expect("asks").is_some());
}

/// S1.19: it would be a flaw to return the result of the unlock. By then another client holds the mutex, and is not disturbed.
async fn synchronize_keeps_the_value_of_work_that_took_too_long(stage: Stage) {
    let [a, b] = stage.handles_of(SHORT);
    let mut other = None;
    let work = async |held: stampede_guard::lock::Held| {
        held.expired().await;
        expired(&a).await;
        other = b.try_lock().await.expect("asks");
        42
    };
    let done = a.synchronize(work).await.expect("acquired");
    assert_eq!((done.value, done.attempts, done.still_held), (42, 1, false));
    assert!(other.expect("it was free").is_owned().await.expect("asks"));
}

/// S5.2: if a TTL of 20 s is extended to 30 s, it is 30 s, not 50 s. A lost lock is not created again.
async fn extending_starts_the_time_anew_and_creates_nothing(stage: Stage) {
    let [a, b] = stage.handles_of(ms(20_000));
    let guard = locked(&a).await;
    assert!(guard.extend(ms(30_000)).await.expect("asks"));
    let remaining = b.remaining().await.expect("asks").expect("held");
    assert!(remaining > ms(20_000) && remaining <= ms(30_000), "{remaining:?}");
    assert!(guard.extend(ms(50)).await.expect("asks"), "and shorter");
    expired(&a).await;
    assert!(!guard.extend(ms(3_000)).await.expect("asks"));
    assert!(!a.is_locked().await.expect("asks"));
    let other = locked(&b).await;
    assert!(!guard.extend(ms(3_000)).await.expect("asks"));
    assert!(
        b.remaining().await.expect("asks").expect("held") > ms(3_000),
        "it is not the other's time either"
    );
    drop(other);
}

/// S5.3, S5.12: any client can read what is left of the holder's TTL. The holder's own estimate is lower, and sends no command.
async fn a_busy_mutex_reports_how_long_it_may_take(stage: Stage) {
    let [a, b] = stage.handles_of(ms(50_000));
    assert_eq!(b.remaining().await.expect("asks"), None);
    let guard = locked(&a).await;
    assert!(b.try_lock().await.expect("asks").is_none());
    let there = b.remaining().await.expect("asks").expect("held");
    let own = guard.remaining().expect("it expires");
    assert!(there > ms(40_000) && there <= ms(50_000), "{there:?}");
    assert!(own <= there && own > ms(40_000) && own <= ms(50_000 - 502), "{own:?}");
}

/// S5.7, S5.10: any client can do that, once. The holder is notified, and its late unlock does not unlock the next holder's lock.
async fn any_client_unlocks_by_force(stage: Stage) {
    let [a, b] = stage.handles();
    assert!(!b.force_unlock().await.expect("asks"), "it is free");
    let mut guard = locked(&a).await;
    let lost = guard.lost();
    assert!(b.force_unlock().await.expect("asks"));
    tokio::time::timeout(AT_ONCE, lost).await.expect("the holder is notified");
    assert!(!b.force_unlock().await.expect("asks"));
    let next = locked(&b).await;
    assert!(!guard.unlock().await.expect("asks"));
    assert!(next.is_owned().await.expect("asks"));
}

/// S5.6: services can be tested without a server, with a lock that is free, busy, or cannot be reached.
async fn busy_and_unreachable_are_different_answers(stage: Stage) {
    let [a, b] = stage.handles();
    let guard = locked(&a).await;
    assert!(b.try_lock().await.expect("busy is no error").is_none());
    drop(guard);
    expired(&b).await;
    stage.other.close().await;
    assert!(matches!(b.try_lock().await, Err(LockError::Closed)));
    assert!(matches!(b.lock().await, Err(LockError::Closed)));
    assert!(matches!(b.is_locked().await, Err(LockError::Closed)));
}

/// Makes two tests of each case: one on a server, and one on the memory store with a paused clock.
macro_rules! cases {
    ($($case:ident,)+) => {
        mod on_redis {
            $(#[tokio::test] async fn $case() { super::$case(super::Stage::on_redis().await).await; })+
        }
        mod in_memory {
            $(#[tokio::test(start_paused = true)] async fn $case() { super::$case(super::Stage::in_memory()).await; })+
        }
    };
}

cases! {
    a_handle_knows_whether_it_holds,
    any_client_sees_whether_the_mutex_is_held,
    only_the_holder_owns,
    an_attempt_finds_the_mutex_free_or_busy,
    a_handle_acquires_once,
    two_tasks_on_one_handle_do_not_both_acquire,
    a_lock_expires,
    a_non_expiring_lock_does_not_expire,
    attempts_run_out,
    a_mutex_unlocked_between_retries_is_acquired,
    unlocking_returns_whether_it_was_held,
    unlocking_clears_all_predicates,
    unlocking_a_lost_mutex_frees_the_handle,
    unlocking_lets_others_acquire,
    a_late_unlock_leaves_the_next_holder_alone,
    a_failed_acquisition_releases_nothing,
    synchronize_excludes_others_and_lets_them_in_after,
    synchronize_keeps_the_value_of_work_that_took_too_long,
    extending_starts_the_time_anew_and_creates_nothing,
    a_busy_mutex_reports_how_long_it_may_take,
    any_client_unlocks_by_force,
    busy_and_unreachable_are_different_answers,
}
