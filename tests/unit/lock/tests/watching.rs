//! Of all waiters of a process only the first one watches the clock. It uses what the other waiters have learnt about the end of the lease.

use super::*;

const LONG: Duration = Duration::from_secs(60);

fn patient(locks: &Locks, ttl: Duration) -> Mutex {
    with(locks, |builder| builder.ttl(ttl).acquire_timeout(Duration::MAX))
}

/// Waits for the lock and keeps it until its time to live ends.
async fn dies_with_it(mutex: Mutex) -> JoinHandle<()> {
    waiting(async move { std::mem::forget(locked(&mutex).await) }).await
}

/// Waits for the lock, and returns how long that took.
async fn waits(mutex: Mutex) -> JoinHandle<Duration> {
    waiting(async move { locked(&mutex).await.waited() }).await
}

fn about(took: Duration, expected: Duration) -> bool {
    (expected..=expected + ms(20)).contains(&took)
}

/// The next holder has a shorter lease, and dies. Of the two waiters behind it, the first one is dropped, `after` this time from the
/// announcement of that lease. Returns how long the other waiter waits.
async fn the_first_leaves(after: Duration) -> Duration {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, LONG)).await;
    let short_holder = dies_with_it(patient(&locks, ms(500))).await;
    let first = waits(patient(&locks, LONG)).await;
    let last = waits(patient(&locks, LONG)).await;
    holder.unlock().await.expect("asks");
    if !after.is_zero() {
        pass(after).await;
    }
    first.abort();
    short_holder.await.expect("handed over");
    last.await.expect("it is free")
}

/// The first waiter has already asked for the end of the new lease when it leaves. The answer must not be lost with it.
#[tokio::test(start_paused = true)]
async fn an_answer_to_a_waiter_outlives_it() {
    let took = the_first_leaves(ms(100)).await;
    assert!(about(took, ms(500)), "{took:?}");
}

/// The first waiter was notified of the new lease, and leaves before it asks for its end. The message must not be lost with it.
#[tokio::test(start_paused = true)]
async fn a_message_to_a_waiter_outlives_it() {
    let took = the_first_leaves(Duration::ZERO).await;
    assert!(about(took, ms(500)), "{took:?}");
}

/// A holder with an hour left frees the lock for `c`, and the first waiter behind it, `a`, is notified of that lease. When `c` frees the
/// lock for `a`, nothing is announced, because this lease is not shorter. Then `b` becomes the first waiter, and must not sleep until the
/// end that it learnt when it queued.
#[tokio::test(start_paused = true)]
async fn a_new_first_waiter_does_not_sleep_on_an_outdated_time() {
    let locks = Locks::in_memory();
    let mut holder = locked(&patient(&locks, LONG)).await;
    assert!(holder.extend(60 * LONG).await.expect("asks"));
    let c = patient(&locks, LONG);
    let c = waiting(async move {
        let mut guard = locked(&c).await;
        sleep(ms(10_000)).await;
        guard.unlock().await.expect("asks");
    })
    .await;
    let a = dies_with_it(patient(&locks, LONG)).await;
    let b = waits(patient(&locks, LONG)).await;
    holder.unlock().await.expect("asks");
    c.await.expect("handed over");
    a.await.expect("handed over");
    let took = b.await.expect("it is free");
    assert!(about(took, LONG + ms(10_000)), "{took:?}");
}

/// A holder shortens its lease, and dies: a waiter must not sleep until the former end.
#[tokio::test(start_paused = true)]
async fn waiters_learn_of_a_shortened_lease() {
    let locks = Locks::in_memory();
    let holder = locked(&patient(&locks, LONG)).await;
    let next = waits(patient(&locks, LONG)).await;
    assert!(holder.extend(ms(1000)).await.expect("asks"));
    std::mem::forget(holder);
    let took = next.await.expect("it is free");
    assert!(about(took, ms(1000)), "{took:?}");
}
