//! Commands of locks whose answers are lost, late or refused, with one script of faults per test.

use std::sync::Arc;

use super::faulty::{Fate, Faulty, Script};
use super::*;
use crate::lock::LockTarget as _;
use crate::lock::WaitTerms;
use crate::lock::acquire::acquire;
use crate::lock::hold::Hold;
use crate::lock::{LockError, Waiting};
use crate::store::StoreErrorKind;

pub(super) const TERMS: WaitTerms = WaitTerms {
    waiting: Waiting::Notify,
    fallback: (Duration::from_millis(10), 0.0),
    retries: None,
    timeout: Some(Duration::from_secs(10)),
    min_remaining: Duration::ZERO,
};

pub(super) async fn held(target: &Arc<Faulty>) -> Hold<Faulty> {
    acquire(target, &TERMS, None).await.expect("acquired")
}

/// The error of an acquisition that must fail. (`expect_err` cannot be used, because a hold has no `Debug`.)
async fn refused(target: &Arc<Faulty>, terms: &WaitTerms) -> LockError {
    match acquire(target, terms, None).await {
        Ok(_) => panic!("it was acquired"),
        Err(error) => error,
    }
}

/// S1.23: the lock is granted and the answer lost. The caller takes again with the same token, and gets the lock.
#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_requested_again_with_the_same_token() {
    for kind in [StoreErrorKind::Broken, StoreErrorKind::TimedOut] {
        let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[("take", &[Fate::Lost(kind)])]);
        let mut hold = held(&target).await;
        assert_eq!((hold.hold_state.grant.attempts, target.commands()), (1, vec!["take", "take"]));
        assert_eq!(hold.hold_state.remaining(), Some(ms(59_398)), "from the second on");
        assert_eq!(hold.free().await.expect("asks"), Some(true));
    }
}

/// S1.23: without any answer the call fails. A lock that may have been granted is released, and does not stay for its time to live.
#[tokio::test(start_paused = true)]
async fn an_acquisition_without_an_answer_fails_and_is_released() {
    let lost = Fate::Lost(StoreErrorKind::TimedOut);
    let script: Script<'_> =
        &[("take", &[lost, lost]), ("free", &[Fate::Fails(StoreErrorKind::Unavailable); 3])];
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), script);
    let (took, error) = timed(refused(&target, &TERMS)).await;
    assert!(error.is_store() && !error.is_busy() && took == ms(2000), "{error:?} {took:?}");
    assert!(target.is_locked().await, "granted at the server");
    pass(ms(500)).await;
    assert!(!target.is_locked().await);
    pass(ms(60_000)).await;
    assert_eq!(target.commands()[2..], ["free"; 5], "three that failed, one answered, one for late commands");
}

/// A TAKE whose connection broke runs after the FREE that should undo it, so a second FREE follows.
#[tokio::test(start_paused = true)]
async fn a_take_that_runs_late_is_released_too() {
    let runs_late = Fate::Straggles;
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[("take", &[runs_late, runs_late])]);
    assert!(refused(&target, &TERMS).await.is_store());
    pass(ms(150)).await;
    assert!(target.is_locked().await, "the first release came before it");
    pass(ms(250)).await;
    assert!(!target.is_locked().await);

    // A second FREE also follows if the second TAKE was granted, and freed before the first TAKE ran.
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[("take", &[runs_late])]);
    let mut hold = held(&target).await;
    hold.free().await.expect("asks");
    pass(ms(150)).await;
    assert!(target.is_locked().await);
    pass(ms(250)).await;
    assert!(!target.is_locked().await);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_not_repeated_and_releases_nothing() {
    for kind in [StoreErrorKind::Refused, StoreErrorKind::Transient, StoreErrorKind::Closed] {
        let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[("take", &[Fate::Fails(kind); 2])]);
        let error = refused(&target, &TERMS).await;
        assert_eq!(error.is_store(), kind != StoreErrorKind::Closed, "{error:?}");
        pass(ms(1000)).await;
        assert_eq!(target.commands(), ["take"]);
    }
}

/// A connection that died silently is abandoned after two commands without an answer. A waiter that is in the queue by then does not fail
/// because of that, but takes again.
#[tokio::test(start_paused = true)]
async fn a_waiter_outlasts_a_connection_that_died_in_silence() {
    let locks = Locks::in_memory();
    let lost = Fate::Fails(StoreErrorKind::TimedOut);
    let target = Faulty::new(&locks, ms(60_000), &[("take", &[Fate::Late(ms(0)), lost, lost])]);
    let holder = with(&locks, |builder| builder.ttl(ms(500)));
    std::mem::forget(locked(&holder).await);
    assert_eq!(held(&target).await.hold_state.grant.attempts, 2);
    assert_eq!(target.commands(), ["take"; 4]);
}

/// A caller with a single attempt does not wait for a connection; a waiting caller does.
#[tokio::test(start_paused = true)]
async fn only_a_waiting_caller_waits_for_a_connection() {
    let down = ("take", &[Fate::Fails(StoreErrorKind::Unavailable)] as &[_]);
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[down]);
    drop(held(&target).await);
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[down]);
    let once = WaitTerms { retries: Some(0), ..TERMS };
    assert!(refused(&target, &once).await.is_store());
    assert_eq!(target.commands(), ["take"]);
}

/// S1.24: a grant is released if, when its answer comes, its time to live has passed, or less than `min_remaining` of it is left.
#[tokio::test(start_paused = true)]
async fn a_grant_that_comes_too_late_is_released() {
    let late = ("take", &[Fate::Late(ms(300))] as &[_]);
    let target = Faulty::new(&Locks::in_memory(), ms(200), &[late]);
    let error = refused(&target, &TERMS).await;
    assert!(
        matches!(error, LockError::GrantedTooLate { elapsed, ttl } if elapsed == ms(300) && ttl == ms(200)),
        "{error:?}"
    );

    let target = Faulty::new(&Locks::in_memory(), ms(1000), &[late]);
    let hold = held(&target).await;
    assert_eq!(hold.hold_state.remaining(), Some(ms(688)));
    drop(hold);

    let target = Faulty::new(&Locks::in_memory(), ms(1000), &[late]);
    let error = refused(&target, &WaitTerms { min_remaining: ms(700), ..TERMS }).await;
    assert!(matches!(error, LockError::GrantedTooLate { .. }), "{error:?}");
    settle().await;
    assert!(!target.is_locked().await);
    assert_eq!(target.commands(), ["take", "free"]);
}

/// A grant's lease is counted from the waiter's first TAKE. If less than three quarters remain, another TAKE restarts it.
#[tokio::test(start_paused = true)]
async fn a_grant_after_a_long_wait_starts_its_time_anew() {
    for (waited, commands) in [(ms(100), vec!["take"]), (ms(400), vec!["take", "take"])] {
        let locks = Locks::in_memory();
        let target = Faulty::new(&locks, ms(1000), &[]);
        let mut guard = locked(&mutex(&locks)).await;
        let next = tokio::spawn({
            let target = Arc::clone(&target);
            async move { held(&target).await }
        });
        pass(waited).await;
        guard.unlock().await.expect("asks");
        let hold = next.await.expect("no panic");
        assert_eq!((target.commands(), hold.hold_state.grant.attempts), (commands, 1));
        assert!(hold.hold_state.remaining() >= Some(ms(750)));
    }
}

/// S1.23: the caller's future is dropped before the answer comes.
#[tokio::test(start_paused = true)]
async fn a_future_dropped_in_mid_command_leaves_nothing() {
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[("take", &[Fate::Late(ms(300))])]);
    let caller = waiting({
        let target = Arc::clone(&target);
        async move { drop(held(&target).await) }
    })
    .await;
    assert!(target.is_locked().await);
    caller.abort();
    settle().await;
    assert!(!target.is_locked().await);
}

/// S1.17: a guard whose unlock received no answer can unlock again; if it is dropped instead, the background releases the lock.
#[tokio::test(start_paused = true)]
async fn an_unlock_without_an_answer_can_be_repeated() {
    let script: Script<'_> = &[("free", &[Fate::Fails(StoreErrorKind::Broken)])];
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), script);
    let mut hold = held(&target).await;
    assert!(hold.free().await.is_err());
    assert_eq!(hold.hold_state.remaining(), Some(ms(59_398)), "it still counts as held");
    assert_eq!(hold.free().await.expect("asks"), Some(true));
    assert_eq!(hold.free().await.expect("asks"), None);

    let script: Script<'_> = &[("free", &[Fate::Fails(StoreErrorKind::Broken); 2])];
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), script);
    let mut hold = held(&target).await;
    assert!(hold.free().await.is_err());
    drop(hold);
    pass(ms(500)).await;
    assert!(!target.is_locked().await, "dropped, it is retried in the background");
}

/// A command that was not sent for want of a connection is sent again, once there is one.
#[tokio::test(start_paused = true)]
async fn an_unlock_waits_for_a_connection_that_is_being_made() {
    let script: Script<'_> = &[("free", &[Fate::Fails(StoreErrorKind::Unavailable)])];
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), script);
    assert_eq!(held(&target).await.free().await.expect("asks"), Some(true));
    assert_eq!(target.commands(), ["take", "free", "free"]);
}

#[tokio::test(start_paused = true)]
async fn a_release_in_the_background_ends_with_the_time_to_live() {
    let script: Script<'_> = &[("free", &[Fate::Fails(StoreErrorKind::Unavailable); 1000])];
    let target = Faulty::new(&Locks::in_memory(), ms(1000), script);
    drop(held(&target).await);
    pass(ms(5000)).await;
    let (last, at) = *target.log().last().expect("there were some");
    assert!(last == "free" && at <= 1100, "{at}");
    assert_eq!(target.registry().background.count(), 0);
}

/// After an extension by an hour, the store may hold the lock for that hour. The release is retried until
/// then, even if the answer to the extension was lost.
#[tokio::test(start_paused = true)]
async fn a_background_release_is_retried_until_the_extended_lease_ends() {
    for is_answered in [true, false] {
        let extend = if is_answered { Fate::Late(ms(0)) } else { Fate::Lost(StoreErrorKind::Broken) };
        // With pauses of 20 to 100 ms between them, these failures last longer than the initial time to live.
        let down = [Fate::Fails(StoreErrorKind::Unavailable); 60];
        let target = Faulty::new(&Locks::in_memory(), ms(1000), &[("extend", &[extend]), ("free", &down)]);
        let hold = held(&target).await;
        assert_eq!(hold.hold_state.extend(Some(ms(3_600_000))).await.is_ok(), is_answered);
        drop(hold);
        pass(ms(7000)).await;
        assert_eq!(target.registry().background.count(), 0);
        assert!(!target.is_locked().await, "answered: {is_answered}");
    }
}

/// The time for which the release is retried counts from the last grant or extension. It is shorter after an extension that shortened the
/// lease.
#[tokio::test(start_paused = true)]
async fn a_background_release_is_retried_no_longer_than_the_remaining_lease() {
    for (extended, ends) in [(None, 1000), (Some(ms(100)), 700), (Some(ms(800)), 1400)] {
        let script: Script<'_> = &[("free", &[Fate::Fails(StoreErrorKind::Unavailable); 1000])];
        let target = Faulty::new(&Locks::in_memory(), ms(1000), script);
        let hold = held(&target).await;
        pass(ms(600)).await;
        if let Some(ttl) = extended {
            assert!(hold.hold_state.extend(Some(ttl)).await.expect("asks"));
        }
        drop(hold);
        pass(ms(5000)).await;
        let (_, last) = *target.log().last().expect("there were some");
        assert!((ends..=ends + 100).contains(&last), "{last} of {ends}, after {extended:?}");
    }
}

/// An unreachable store does not keep the process from ending: neither beyond the deadline of the shutdown,
/// nor beyond two seconds.
#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_failing_releases_only_briefly() {
    let script: Script<'_> = &[("free", &[Fate::Fails(StoreErrorKind::Unavailable); 1000])];
    for (deadline, waits) in [(ms(0), ms(0)), (ms(500), ms(500)), (ms(60_000), ms(2000))] {
        let guard = crate::StampedeGuard::in_memory();
        drop(held(&Faulty::new(&guard.locks(), ms(10_000), script)).await);
        let (took, shutdown) = timed(guard.shutdown(deadline)).await;
        assert!(shutdown.finished && took == waits, "{took:?} of {deadline:?}");
    }
}

/// The lock is released while a renewal awaits its answer: no other renewal is sent after that.
#[tokio::test(start_paused = true)]
async fn no_renewal_follows_a_release() {
    for dropped in [false, true] {
        let script: Script<'_> = &[("extend", &[Fate::Late(ms(200)); 10])];
        let target = Faulty::new(&Locks::in_memory(), ms(900), script);
        let mut hold = held(&target).await.renew();
        pass(ms(400)).await;
        assert_eq!(target.log().last(), Some(&("extend", 300)));
        if dropped {
            drop(hold);
        } else {
            assert_eq!(hold.free().await.expect("asks"), Some(true));
        }
        pass(ms(10_000)).await;
        assert_eq!(target.log(), [("take", 0), ("extend", 300), ("free", 400)]);
    }
}

/// A failed renewal is retried as long as the lease lasts, and after that the holder is notified of the loss.
#[tokio::test(start_paused = true)]
async fn failed_renewals_are_repeated_and_end_in_a_loss() {
    let down = Fate::Fails(StoreErrorKind::Broken);
    let target = Faulty::new(&Locks::in_memory(), ms(900), &[("extend", &[down; 3])]);
    let hold = held(&target).await.renew();
    pass(ms(2000)).await;
    assert_eq!(target.log()[1..5], [("extend", 300), ("extend", 350), ("extend", 400), ("extend", 450)]);
    assert!(hold.hold_state.remaining() > Some(ms(500)));
    drop(hold);

    let target = Faulty::new(&Locks::in_memory(), ms(900), &[("extend", &[down; 1000])]);
    let hold = held(&target).await.renew();
    assert_eq!(timed(Arc::clone(&hold.hold_state).lost()).await.0, ms(889));
    pass(ms(1000)).await;
    assert!(target.log().iter().all(|(_, at)| *at <= 889));
    assert_eq!(hold.hold_state.remaining(), Some(ms(0)));
}

/// An extension without an answer may have shortened the lease, so the shorter of both times counts.
#[tokio::test(start_paused = true)]
async fn an_unanswered_extension_counts_as_the_shorter_time() {
    let lost = Fate::Lost(StoreErrorKind::Broken);
    let target = Faulty::new(&Locks::in_memory(), ms(1000), &[("extend", &[lost; 2])]);
    let hold = held(&target).await;
    assert!(hold.hold_state.extend(Some(ms(5000))).await.is_err());
    assert_eq!(hold.hold_state.remaining(), Some(ms(988)));
    assert!(hold.hold_state.extend(Some(ms(100))).await.is_err());
    assert_eq!(hold.hold_state.remaining(), Some(ms(97)));
    assert!(hold.hold_state.extend(Some(ms(1000))).await.expect("asks"));
    assert_eq!(hold.hold_state.remaining(), Some(ms(988)));
}

/// The caller's time ends during a command. The answer before that said that the lock is busy, so the error is a timeout, not a store's
/// error.
#[tokio::test(start_paused = true)]
async fn a_timeout_in_a_late_command_is_a_timeout() {
    let locks = Locks::in_memory();
    let script: Script<'_> = &[("take", &[Fate::Late(ms(0)), Fate::Lost(StoreErrorKind::TimedOut)])];
    let target = Faulty::new(&locks, ms(60_000), script);
    let _guard = locked(&mutex(&locks)).await;
    let poll = Waiting::Poll { interval: ms(100), jitter: 0.0 };
    let terms = WaitTerms { waiting: poll, timeout: Some(ms(300)), ..TERMS };
    let (took, error) = timed(refused(&target, &terms)).await;
    assert!(matches!(error, LockError::AcquireTimeout { attempts: 2, .. }), "{error:?}");
    assert_eq!(took, ms(300));
}

/// The answer to a bump is lost. The bump is repeated with the same tokens, so the mutex has one holder at a time,
/// and the bump acquires it.
#[tokio::test(start_paused = true)]
async fn a_bump_without_an_answer_is_repeated() {
    let locks = Locks::in_memory();
    let take = &[Fate::Late(ms(0)), Fate::Lost(StoreErrorKind::Broken)];
    let target = Faulty::new(&locks, ms(60_000), &[("take", take)]);
    let mut old = held(&target).await;
    let next = waiting({
        let next = mutex(&locks);
        async move {
            let guard = locked(&next).await;
            sleep(ms(30)).await;
            guard.fence()
        }
    })
    .await;
    let (took, again) = timed(acquire(&Arc::clone(&old.hold_state.target), &TERMS, Some(&mut old))).await;
    let mut again = again.expect("acquired");
    assert_eq!((took, target.commands()), (ms(30), vec!["take"; 3]));
    assert!(old.freed && !old.was_held, "no answer says so any more");
    let between = next.await.expect("joined");
    assert!(old.hold_state.grant.fence < between && between < again.hold_state.grant.fence);
    drop(old);
    assert_eq!(again.free().await.expect("asks"), Some(true));
    pass(ms(1000)).await;
    assert!(!target.is_locked().await);
}

/// If a bump receives no answer, the guard still counts as held. Its release also undoes a bump that may have run.
#[tokio::test(start_paused = true)]
async fn a_bump_that_fails_is_released_with_what_it_replaces() {
    for fate in [Fate::Fails(StoreErrorKind::TimedOut), Fate::Lost(StoreErrorKind::TimedOut), Fate::Straggles]
    {
        let take = &[Fate::Late(ms(0)), fate, fate];
        let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[("take", take)]);
        let mut old = held(&target).await;
        let failed = acquire(&Arc::clone(&old.hold_state.target), &TERMS, Some(&mut old)).await;
        assert!(matches!(failed, Err(LockError::Store(_))) && !old.freed, "{fate:?}");
        drop((failed, old));
        pass(ms(1000)).await;
        assert!(!target.is_locked().await, "{fate:?}");
    }
}
