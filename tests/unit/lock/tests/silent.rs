//! Waiters whose futures are not polled. Each of them delays the others by its time to live and a moment; the waiters that are polled send
//! no more commands than without them.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::poll;

use super::faults::TERMS;
use super::faulty::{Fate, Faulty};
use super::*;
use crate::lock::WaitTerms;
use crate::lock::acquire::acquire;
use crate::lock::{LockError, Wait};

const TTL: Duration = Duration::from_millis(1000);
/// The delay that a silent waiter adds to its time to live, with a tolerance.
const MOMENT: Duration = Duration::from_millis(400 + 20);

type Silent<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Queues a call, by polling it once. Its future is returned and not polled again.
async fn silent<T>(work: impl Future<Output = T> + Send + 'static) -> Silent<T> {
    let mut work: Silent<T> = Box::pin(work);
    assert!(poll!(&mut work).is_pending(), "it has to wait");
    work
}

fn patient(locks: &Locks, ttl: Duration) -> Mutex {
    with(locks, |builder| builder.ttl(ttl).acquire_timeout(Duration::MAX))
}

async fn silent_lock(locks: &Locks) -> Silent<Result<MutexGuard, LockError>> {
    let mutex = patient(locks, TTL);
    silent(async move { mutex.lock().await }).await
}

async fn waits(locks: &Locks) -> JoinHandle<MutexGuard> {
    let mutex = patient(locks, TTL);
    waiting(async move { locked(&mutex).await }).await
}

/// Waits for the grant, and returns how long it took from now on.
async fn granted<T>(waits: JoinHandle<T>) -> (Duration, T) {
    let (took, granted) = timed(tokio::time::timeout(Duration::from_secs(3600), waits)).await;
    (took, granted.expect("it does not starve").expect("no panic"))
}

#[tokio::test(start_paused = true)]
async fn a_silent_waiter_costs_its_time_and_a_moment() {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, TTL)).await;
    let _silent = silent_lock(&locks).await;
    let next = waits(&locks).await;
    assert!(holder.unlock().await.expect("asks"));
    let (took, _) = granted(next).await;
    assert!((TTL..=TTL + MOMENT).contains(&took), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn two_silent_waiters_cost_twice_as_much() {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, TTL)).await;
    let _silent = [silent_lock(&locks).await, silent_lock(&locks).await];
    let next = waits(&locks).await;
    assert!(holder.unlock().await.expect("asks"));
    let (took, _) = granted(next).await;
    assert!((2 * TTL..=2 * (TTL + MOMENT)).contains(&took), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_short_time_to_live_makes_the_moment_short() {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, ms(100))).await;
    let quiet = patient(&locks, ms(100));
    let _silent = silent(async move { quiet.lock().await }).await;
    let next = patient(&locks, ms(100));
    let next = waiting(async move { locked(&next).await }).await;
    assert!(holder.unlock().await.expect("asks"));
    let (took, _) = granted(next).await;
    assert!((ms(100)..=ms(100 + 50 + 20)).contains(&took), "{took:?}");
}

/// Each holder keeps the lock until its time to live ends, so that the clock ends each turn.
#[tokio::test(start_paused = true)]
async fn a_silent_waiter_costs_its_moment_once() {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, TTL)).await;
    let _silent = silent_lock(&locks).await;
    let all = [waits(&locks).await, waits(&locks).await, waits(&locks).await];
    assert!(holder.unlock().await.expect("asks"));
    let mut total = Duration::ZERO;
    for next in all {
        let (took, guard) = granted(next).await;
        std::mem::forget(guard);
        total += took;
    }
    // A new waiter does not wait for the silent one again.
    let (took, _) = granted(waits(&locks).await).await;
    total += took;
    assert!((4 * TTL..=4 * TTL + MOMENT + ms(40)).contains(&total), "{total:?}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_waiter_for_a_permit_costs_its_lease_and_a_moment() {
    let locks = Locks::in_memory();
    let semaphore = locks.semaphore("seats", 1).lease(TTL).build().expect("valid");
    let acquire = || {
        let semaphore = semaphore.clone();
        async move { semaphore.acquire(Wait::Forever).await.expect("asks").expect("for ever") }
    };
    let mut permit = acquire().await;
    let _silent = [silent(acquire()).await, silent(acquire()).await];
    let next = waiting(acquire()).await;
    assert!(permit.release().await.expect("asks").was_held);
    let (took, _) = granted(next).await;
    assert!((2 * TTL..=2 * (TTL + MOMENT)).contains(&took), "{took:?}");
}

/// Only the first waiter is notified that the next lease ends sooner, and it is silent. The others sleep until the end of the former lease,
/// which is far off or never comes.
#[tokio::test(start_paused = true)]
async fn a_message_to_a_silent_waiter_reaches_the_next() {
    let hour = Duration::from_secs(3600);
    for lasts in [Some(hour), None] {
        let locks = Locks::in_memory();
        let holder = with(&locks, |builder| match lasts {
            Some(ttl) => builder.ttl(ttl),
            None => builder.non_expiring(),
        });
        let mut holder = locked(&holder).await;
        let short_holder = patient(&locks, ms(200));
        let short_holder = waiting(async move { std::mem::forget(locked(&short_holder).await) }).await;
        let _silent = [silent_lock(&locks).await, silent_lock(&locks).await];
        let next = waits(&locks).await;
        pass(ms(5000)).await;
        assert!(holder.unlock().await.expect("asks"));
        short_holder.await.expect("handed over");
        let (took, _) = granted(next).await;
        assert!((ms(200) + 2 * TTL..=ms(200) + 2 * (TTL + MOMENT)).contains(&took), "{took:?}");
    }
}

/// A holder shortens its lease repeatedly. Only the first waiter is notified, and it is silent; the next one sleeps until the previous end.
#[tokio::test(start_paused = true)]
async fn a_shortened_lease_reaches_the_waiters_behind_a_silent_one() {
    let locks = Locks::in_memory();
    let holder = locked(&patient(&locks, 3600 * TTL)).await;
    let _silent = silent_lock(&locks).await;
    let next = waits(&locks).await;
    for left in [1800, 900, 2] {
        assert!(holder.extend(left * TTL).await.expect("asks"));
        pass(ms(100)).await;
    }
    std::mem::forget(holder);
    let (took, _) = granted(next).await;
    assert!((ms(2900)..=ms(2900) + MOMENT).contains(&took), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_waiter_that_is_polled_again_has_its_turn() {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, TTL)).await;
    let silent = silent_lock(&locks).await;
    let next = waits(&locks).await;
    assert!(holder.unlock().await.expect("asks"));
    let mut guard = granted(next).await.1;
    let polled = waiting(silent).await;
    let last = waits(&locks).await;
    assert!(guard.unlock().await.expect("asks"));
    let (took, guard) = granted(polled).await;
    assert_eq!(took, ms(0));
    // It is polled now, so it delays the next waiter only while it holds the lock.
    std::mem::forget(guard.expect("handed over"));
    let (took, _) = granted(last).await;
    assert!((TTL..=TTL + ms(20)).contains(&took), "{took:?}");
}

/// A waiter that takes because the waiter before it is silent does not count that as a retry.
#[tokio::test(start_paused = true)]
async fn asking_for_a_silent_waiter_is_no_retry() {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, TTL)).await;
    let quiet = patient(&locks, 2 * TTL);
    let _silent = silent(async move { quiet.lock().await }).await;
    let next = with(&locks, |builder| builder.retries(1).acquire_timeout(Duration::MAX));
    let next = waiting(async move { next.lock().await.map(drop) }).await;
    assert!(holder.unlock().await.expect("asks"));
    let (took, next) = granted(next).await;
    next.expect("it is free by then");
    assert!((2 * TTL..=2 * TTL + ms(20)).contains(&took), "{took:?}");
}

/// How many TAKEs this many waiters send during `during`, without their first ones.
async fn takes(waiters: usize, locks: &Locks, fates: &[Fate], during: impl Future) -> usize {
    let target = Faulty::new(locks, TTL, &[("take", fates)]);
    let terms = WaitTerms { timeout: None, ..TERMS };
    let all: Vec<_> = (0..waiters)
        .map(|_| {
            let target = Arc::clone(&target);
            tokio::spawn(async move { acquire(&target, &terms, None).await.map(drop) })
        })
        .collect();
    settle().await;
    let before = target.commands().len();
    assert_eq!(before, waiters);
    during.await;
    for one in all {
        one.abort();
    }
    target.commands().len() - before
}

/// The first waiter sends one command per period, however many wait: no waiter takes because the one before it is a little late.
#[tokio::test(start_paused = true)]
async fn a_thousand_polled_waiters_send_one_command_per_period() {
    let locks = Locks::in_memory();
    let holder = locked(&patient(&locks, TTL)).await;
    let sent = takes(1_000, &locks, &[], async {
        for _ in 0..100 {
            pass(ms(990)).await;
            assert!(holder.extend(TTL).await.expect("asks"));
        }
    })
    .await;
    assert!((95..=105).contains(&sent), "{sent} in 100 periods");
    let locks = Locks::in_memory();
    let _holder = locked(&with(&locks, MutexBuilder::non_expiring)).await;
    let sent = takes(1_000, &locks, &[], pass(ms(100_500))).await;
    assert!((95..=105).contains(&sent), "{sent} in 100 seconds");
}

/// A waiter that has sent a command and awaits a slow answer is not silent.
#[tokio::test(start_paused = true)]
async fn no_waiter_asks_while_another_awaits_an_answer() {
    let locks = Locks::in_memory();
    let holder = locked(&patient(&locks, TTL)).await;
    let mut fates = [Fate::Late(ms(0)); 11];
    fates[10] = Fate::Late(ms(800));
    let sent = takes(10, &locks, &fates, async {
        pass(ms(900)).await;
        assert!(holder.extend(60 * TTL).await.expect("asks"));
        pass(10 * TTL).await;
    })
    .await;
    assert_eq!(sent, 1);
}

/// After a pause of the whole process all waiters are late, but only one or two of them take.
#[tokio::test(start_paused = true)]
async fn a_process_that_stood_still_does_not_ask_for_each_waiter() {
    let locks = Locks::in_memory();
    let holder = locked(&patient(&locks, TTL)).await;
    let sent = takes(1_000, &locks, &[], async {
        assert!(holder.extend(60 * TTL).await.expect("asks"));
        tokio::time::advance(5 * TTL).await;
        settle().await;
    })
    .await;
    assert!((1..=2).contains(&sent), "{sent}");
}
