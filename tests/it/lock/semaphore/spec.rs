//! Tests of a semaphore and its permits, on Redis and on the memory store. They cover the test suites of earlier systems, and those flaws
//! of these systems that have a test there.

use super::*;

cases! {
    an_unused_semaphore_has_all_its_permits_and_no_keys,
    a_semaphore_exists_from_its_first_use_until_it_is_deleted,
    as_many_are_granted_as_there_are_permits,
    one_permit_is_a_mutex,
    a_wait_lasts_for_its_configured_time,
    each_permit_has_a_unique_token,
    work_runs_under_a_permit_and_gives_it_back,
    work_that_fails_or_panics_gives_its_permit_back,
    a_permit_is_released_once,
    any_client_sees_which_tokens_hold,
    a_refused_acquisition_holds_nothing,
    permits_are_added,
    any_process_releases_a_permit_by_its_token,
    free_and_held_permits_add_up_to_the_capacity,
}

/// S4.10, S4.11: reading the state of a semaphore creates nothing.
async fn an_unused_semaphore_has_all_its_permits_and_no_keys(stage: Stage) {
    let [a, b] = stage.handles(5);
    for semaphore in [&a, &b] {
        assert!(!semaphore.exists().await.expect("asks"));
        assert_eq!(available(semaphore).await, 5);
        assert_eq!(semaphore.capacity().await.expect("asks"), 5);
        assert_eq!(semaphore.waiting().await.expect("asks"), 0);
        assert_eq!(semaphore.holders().await.expect("asks"), []);
        assert!(!semaphore.holds("nobody's").await.expect("asks"));
        assert_eq!(semaphore.release_stale().await.expect("asks"), 0);
        assert!(semaphore.signal("nobody's").await.expect("asks").is_none());
    }
    assert!(!a.delete().await.expect("asks"), "there is nothing to delete");
    stage.keys(&[]);
}

/// S4.11, S4.12: a deleted semaphore leaves no key, and is created anew by its next use.
async fn a_semaphore_exists_from_its_first_use_until_it_is_deleted(stage: Stage) {
    let [a, b] = stage.handles(2);
    assert!(a.ensure_created().await.expect("asks"), "this call did");
    assert!(!b.ensure_created().await.expect("asks"), "that one did not");
    assert!(a.exists().await.expect("asks") && b.exists().await.expect("asks"));
    let mut held = free(&a).await;
    assert!(b.delete().await.expect("asks"));
    assert!(!a.exists().await.expect("asks"));
    stage.keys(&[]);
    assert!(!held.is_held().await.expect("asks"));
    assert!(!held.release().await.expect("asks").was_held);
    stage.keys(&[]);

    let (_one, _two) = (free(&b).await, free(&a).await);
    assert!(a.exists().await.expect("asks"));
    assert_eq!(available(&b).await, 0);
}

/// S3.17, S4.3, S4.10: of five permits, five are granted and no sixth. A permit that was released can be granted again.
async fn as_many_are_granted_as_there_are_permits(stage: Stage) {
    let [a, b] = stage.handles(5);
    let mut held = Vec::new();
    for taken in 0..5 {
        assert_eq!(available(&b).await, 5 - taken);
        held.push(free([&a, &b][taken as usize % 2]).await);
    }
    assert!(none_is_free(&a).await && none_is_free(&b).await);
    assert_eq!(available(&a).await, 0);
    let released = held[0].release().await.expect("asks");
    assert!(released.was_held);
    assert_eq!(released.available, 1);
    held[0] = free(&b).await;
    assert!(none_is_free(&a).await);
    for (freed, permit) in held.iter_mut().enumerate() {
        assert_eq!(permit.release().await.expect("asks").available as usize, freed + 1);
    }
    assert_eq!(available(&a).await, 5);
}

/// S4.4: the second client waits for a second, and receives none.
async fn one_permit_is_a_mutex(stage: Stage) {
    let [a, b] = stage.handles(1);
    let mut held = free(&a).await;
    let since = Instant::now();
    assert!(b.acquire(Wait::For(Duration::from_secs(1))).await.expect("busy is no error").is_none());
    stage.took(since, Duration::from_secs(1));
    queued(&b, 0).await;
    assert!(held.release().await.expect("asks").was_held);
    assert_eq!(free(&b).await.attempts(), 1);
}

/// S4.5, S4.36: a call does not wait, or waits for a fraction of a second, or without a limit.
async fn a_wait_lasts_for_its_configured_time(stage: Stage) {
    let [a, b] = stage.handles(1);
    let mut held = free(&a).await;
    for wait in [Wait::Now, Wait::For(Duration::ZERO)] {
        let since = Instant::now();
        assert!(b.acquire(wait).await.expect("busy is no error").is_none());
        stage.took(since, Duration::ZERO);
    }
    for wait in [ms(250), Duration::from_micros(62_500)] {
        let since = Instant::now();
        assert!(b.acquire(Wait::For(wait)).await.expect("busy is no error").is_none());
        stage.took(since, wait);
    }
    let next = waiter(&b);
    queued(&a, 1).await;
    tokio::time::sleep(ms(400)).await;
    assert!(!next.is_finished());
    let since = Instant::now();
    held.release().await.expect("asks");
    let next = granted(next).await;
    stage.took(since, Duration::ZERO);
    assert!(next.waited() >= ms(400), "{:?}", next.waited());
}

/// S4.6, S4.24: added permits have unique tokens, too. In the earlier system all added permits had the same token.
async fn each_permit_has_a_unique_token(stage: Stage) {
    let [a, b] = stage.handles(1);
    for _ in 0..3 {
        b.add_permits(1).await.expect("asks");
    }
    let mut held = Vec::new();
    for _ in 0..2 {
        held.extend([free(&a).await, free(&b).await]);
    }
    let mut tokens: Vec<_> = held.iter().map(|permit| permit.token().to_owned()).collect();
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), 4);
    let old = held[0].token().to_owned();
    held[0].release().await.expect("asks");
    assert_ne!(free(&a).await.token(), old, "it is another one each time");
}

/// S4.7
async fn work_runs_under_a_permit_and_gives_it_back(stage: Stage) {
    let [a, b] = stage.handles(1);
    let work = async |permit: stampede_guard::lock::PermitView| {
        assert_eq!(available(&b).await, 0);
        assert!(b.holds(permit.token()).await.expect("asks") && permit.is_held().await.expect("asks"));
        assert!(b.with_permit(Wait::Now, async |_| ()).await.expect("asks").is_none(), "there is one only");
        42
    };
    assert_eq!(a.with_permit(Wait::Forever, work).await.expect("asks"), Some(42));
    assert_eq!(available(&b).await, 1);
}

/// S4.7: an error is returned as a value, a panic is propagated, and a dropped future gives the permit back as well.
async fn work_that_fails_or_panics_gives_its_permit_back(stage: Stage) {
    let [a, b] = stage.handles(1);
    let failed = a.with_permit(Wait::Now, async |_| Err::<(), _>("no")).await.expect("asks");
    assert_eq!(failed, Some(Err("no")));
    assert_eq!(available(&b).await, 1);

    let panics = a.clone();
    let panicked = tokio::spawn(async move {
        let work = |_| async { panic!("panics on command") };
        panics.with_permit(Wait::Now, work).await.map(|_: Option<()>| ())
    });
    assert!(panicked.await.expect_err("it panics").is_panic());
    eventually_eq("it is released", AT_ONCE, 1, async || available(&b).await).await;

    let endless = a.with_permit(Wait::Now, |_| std::future::pending::<()>());
    tokio::time::timeout(ms(50), endless).await.expect_err("it has no end");
    eventually_eq("it is released", AT_ONCE, 1, async || available(&b).await).await;
}

/// S3.21, S4.8: the second release reports that the permit was not held, and sends no command.
async fn a_permit_is_released_once(stage: Stage) {
    let [a, b] = stage.handles(1);
    let mut held = free(&a).await;
    let released = held.release().await.expect("asks");
    assert_eq!((released.was_held, released.available), (true, 1));
    let other = free(&b).await;
    assert!(!held.release().await.expect("asks").was_held);
    assert!(!held.refresh().await.expect("asks"), "and is not refreshed either");
    drop(held);
    assert!(other.is_held().await.expect("asks"));
    assert_eq!(available(&a).await, 0);
}

/// S4.9: any client can ask whether there are holders, and whether this token is one of them.
async fn any_client_sees_which_tokens_hold(stage: Stage) {
    let [a, b] = stage.handles(2);
    let (mut one, two) = (free(&a).await, free(&b).await);
    for permit in [&one, &two] {
        assert!(permit.is_held().await.expect("asks"));
        assert!(a.holds(permit.token()).await.expect("asks") && b.holds(permit.token()).await.expect("asks"));
    }
    let mut tokens: Vec<_> =
        b.holders().await.expect("asks").into_iter().map(|holder| holder.token).collect();
    tokens.sort();
    let mut expected = [one.token().to_owned(), two.token().to_owned()];
    expected.sort();
    assert_eq!(tokens, expected);
    one.release().await.expect("asks");
    assert!(!one.is_held().await.expect("asks") && !b.holds(one.token()).await.expect("asks"));
    assert!(two.is_held().await.expect("asks") && a.holds(two.token()).await.expect("asks"));
    for strange in ["", "nobody's", "{}"] {
        assert!(!a.holds(strange).await.expect("asks"));
    }
}

/// S4.29, S4.32: a caller whose acquisition is refused holds no permit, and all counts are as before.
async fn a_refused_acquisition_holds_nothing(stage: Stage) {
    let [a, b] = stage.handles(1);
    let held = free(&a).await;
    for wait in [Wait::Now, Wait::For(ms(50))] {
        assert!(b.acquire(wait).await.expect("busy is no error").is_none());
        assert_eq!(available(&b).await, 0);
        queued(&b, 0).await;
    }
    let holders = b.holders().await.expect("asks");
    assert_eq!(holders.iter().map(|holder| &*holder.token).collect::<Vec<_>>(), [held.token()]);
}

/// S4.23: one permit and three added ones are four. Added permits are granted to waiters first, and the rest are available.
async fn permits_are_added(stage: Stage) {
    let [a, b] = stage.handles(1);
    assert!(a.ensure_created().await.expect("asks"));
    assert_eq!(b.add_permits(3).await.expect("asks"), 4);
    assert_eq!((available(&a).await, a.capacity().await.expect("asks")), (4, 4));
    let _held = [free(&a).await, free(&b).await, free(&a).await];
    assert_eq!(available(&b).await, 1);
    let _last = free(&b).await;

    let next = waiter(&a);
    queued(&b, 1).await;
    assert_eq!(b.add_permits(2).await.expect("asks"), 6);
    let _next = granted(next).await;
    assert_eq!((available(&a).await, b.waiting().await.expect("asks")), (1, 0));
    // A semaphore that does not exist yet starts with the number of its handle.
    let fresh = stage.one.semaphore("fresh", 2).build().expect("valid");
    assert_eq!(fresh.add_permits(1).await.expect("asks"), 3);
}

/// S4.23: a consumer in another process releases a producer's permit, once.
async fn any_process_releases_a_permit_by_its_token(stage: Stage) {
    let [a, b] = stage.handles(1);
    let mut held = free(&a).await;
    let next = waiter(&a);
    queued(&b, 1).await;
    let released = b.signal(held.token()).await.expect("asks").expect("it was held");
    assert_eq!((released.was_held, released.available), (true, 0), "it is the waiter's by now");
    let mut next = granted(next).await;
    assert!(b.signal(held.token()).await.expect("asks").is_none(), "it is released once");
    assert!(!held.release().await.expect("asks").was_held);
    assert!(next.release().await.expect("asks").was_held);
    assert_eq!(available(&b).await, 1);
}

/// S4.25: the sum of free and held permits is right after every step.
async fn free_and_held_permits_add_up_to_the_capacity(stage: Stage) {
    let [a, b] = stage.handles(3);
    let mut held = Vec::new();
    for step in 0..60 {
        if !held.is_empty() && (held.len() == 3 || fastrand::bool()) {
            let mut permit: Permit = held.swap_remove(fastrand::usize(..held.len()));
            assert!(permit.release().await.expect("asks").was_held);
        } else {
            held.push(free([&a, &b][step % 2]).await);
        }
        let holders = b.holders().await.expect("asks");
        assert_eq!((holders.len(), available(&a).await), (held.len(), 3 - held.len() as u32));
        assert!(held.iter().all(|permit| holders.iter().any(|holder| holder.token == permit.token())));
    }
}
