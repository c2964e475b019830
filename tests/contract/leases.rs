//! The lease, the exclusive steps of its holder, and the outcomes of failed loads.

use super::*;

contract! {
    a_free_lease_is_granted_and_a_held_one_names_its_holder,
    of_simultaneous_callers_one_is_granted,
    acquiring_again_is_granted_and_restarts_the_time,
    a_lease_runs_out_by_itself,
    a_renewal_restarts_the_time,
    a_commit_stores_frees_and_is_found,
    an_entry_expires_after_its_time,
    late_steps_of_an_old_token_are_refused_and_change_nothing,
    steps_of_a_token_that_never_held_are_refused,
    an_entry_that_was_seen_is_passed_over_and_another_is_found,
    an_outcome_is_only_for_waiters_behind_its_holder,
    an_outcome_is_replayed_to_newcomers_for_its_time_only,
    an_outcome_expires,
    an_entry_comes_before_an_outcome_and_ends_it,
    a_marker_replaces_nothing_but_the_entry_that_was_seen,
    a_failure_removes_nothing_but_the_entry_that_was_seen,
}

async fn a_free_lease_is_granted_and_a_held_one_names_its_holder(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    assert_eq!(holder.look_up().await, None);
    let waiter = Flight::separate(world, &key("k")).await;
    let Acquired::Held { remaining, holder: named } = waiter.acquire(waiter.ask()).await else {
        panic!("the lease is held");
    };
    assert_eq!(named, holder.token);
    assert!(remaining <= LEASE && remaining > LEASE / 2, "{remaining:?}");
}

async fn of_simultaneous_callers_one_is_granted(world: &World) {
    let nodes = [world.node().await, world.node().await, world.node().await];
    let flights: Vec<_> = (0..60).map(|i| Flight::on(&nodes[i % 3], &key("k"))).collect();
    let acquired = join_all(flights.iter().map(|flight| flight.acquire(flight.ask()))).await;
    assert_eq!(acquired.iter().filter(|acquired| matches!(acquired, Acquired::Granted)).count(), 1);
}

async fn acquiring_again_is_granted_and_restarts_the_time(world: &World) {
    let holder = Flight::separate(world, &key("k")).await;
    let short = Acquire { lease: ms(2_000), ..holder.ask() };
    assert!(matches!(holder.acquire(short).await, Acquired::Granted));
    holder.must_hold().await;
    let waiter = Flight::separate(world, &key("k")).await;
    let acquired = waiter.acquire(waiter.ask()).await;
    assert!(matches!(acquired, Acquired::Held { remaining, .. } if remaining > ms(2_000)), "{acquired:?}");
}

async fn a_lease_runs_out_by_itself(world: &World) {
    let (old, new) = (Flight::separate(world, &key("k")).await, Flight::separate(world, &key("k")).await);
    let started = Instant::now();
    assert!(matches!(old.acquire(Acquire { lease: ms(150), ..old.ask() }).await, Acquired::Granted));
    while let Acquired::Held { remaining, .. } = new.acquire(new.ask()).await {
        assert!(remaining <= ms(150), "{remaining:?}");
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
    // The server's milliseconds do not begin at the same moments as those of this clock.
    assert!(started.elapsed() >= ms(149), "{:?}", started.elapsed());
}

async fn a_renewal_restarts_the_time(world: &World) {
    let holder = Flight::separate(world, &key("k")).await;
    holder.acquire(Acquire { lease: ms(5_000), ..holder.ask() }).await;
    assert_eq!(holder.renew(LEASE).await, TokenCheck::Held);
    let waiter = Flight::separate(world, &key("k")).await;
    let acquired = waiter.acquire(waiter.ask()).await;
    assert!(matches!(acquired, Acquired::Held { remaining, .. } if remaining > ms(5_000)), "{acquired:?}");
}

async fn a_commit_stores_frees_and_is_found(world: &World) {
    let (holder, other) = (Flight::holding(world, &key("k")).await, Flight::separate(world, &key("k")).await);
    assert_eq!(holder.commit("v").await, TokenCheck::Held);
    assert_eq!(other.look_up().await, Some(bytes("v")));
    assert!(matches!(other.acquire(other.ask()).await, Acquired::Found(entry) if entry == "v"));
    assert_eq!(holder.commit("w").await, TokenCheck::Lost, "the lease ended with the commit");
    let seen = bytes("v");
    let ask = Acquire { seen: Some(&seen), ..other.ask() };
    assert!(matches!(other.acquire(ask).await, Acquired::Granted), "the lease is free");
}

async fn an_entry_expires_after_its_time(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let started = Instant::now();
    let committed = holder.store.commit(&holder.key, &holder.token, bytes("v"), ms(150), WITHIN).await;
    assert_eq!(committed.expect("commit"), TokenCheck::Held);
    while holder.look_up().await.is_some() {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
    assert!(started.elapsed() >= ms(149), "{:?}", started.elapsed());
}

/// Invariants 1 and 2 of the store: a step that runs late changes only what belongs to its token.
async fn late_steps_of_an_old_token_are_refused_and_change_nothing(world: &World) {
    let old = Flight::holding(world, &key("k")).await;
    old.invalidate().await;
    let new = Flight::holding(world, &key("k")).await;
    let waiter = Flight::waiting(world, &key("k")).await;

    assert_eq!(old.commit("old").await, TokenCheck::Lost);
    assert_eq!(old.renew(ms(1)).await, TokenCheck::Lost);
    assert_eq!(old.release().await, TokenCheck::Lost);
    let older = OlderEntry::Marked(bytes("marker"), LEASE);
    assert_eq!(old.fail(Fail { replay: LEASE, older, ..old.failure() }).await, TokenCheck::Lost);
    assert_eq!(old.hand_over(1).await, HandedOver::NotMine);

    assert_eq!(new.look_up().await, None, "nothing was stored");
    let behind = Acquire { behind: Some(&old.token), ..waiter.ask() };
    let acquired = waiter.acquire(behind).await;
    let Acquired::Held { remaining, holder } = acquired else { panic!("{acquired:?}") };
    assert!(holder == new.token && remaining > LEASE / 2, "{remaining:?}");
    assert!(waiter.has_no_hints().await);
    assert_eq!(new.commit("new").await, TokenCheck::Held);
    assert_eq!(waiter.hints().await.finished, Some(new.token.clone()), "its position was retained");
}

async fn steps_of_a_token_that_never_held_are_refused(world: &World) {
    let stranger = Flight::separate(world, &key("k")).await;
    assert_eq!(stranger.commit("v").await, TokenCheck::Lost);
    assert_eq!(stranger.renew(LEASE).await, TokenCheck::Lost);
    assert_eq!(stranger.release().await, TokenCheck::Lost);
    assert_eq!(stranger.fail(stranger.failure()).await, TokenCheck::Lost);
    assert_eq!(stranger.hand_over(0).await, HandedOver::NotMine);
    assert_eq!(stranger.look_up().await, None);
    Flight::holding(world, &key("k")).await;
}

async fn an_entry_that_was_seen_is_passed_over_and_another_is_found(world: &World) {
    let first = Flight::holding(world, &key("k")).await;
    first.commit("stale").await;
    let (seen, other) = (bytes("stale"), bytes("another"));
    let flight = Flight::separate(world, &key("k")).await;
    let acquired = flight.acquire(Acquire { seen: Some(&other), ..flight.ask() }).await;
    assert!(matches!(acquired, Acquired::Found(entry) if entry == "stale"));
    assert!(matches!(flight.acquire(Acquire { seen: Some(&seen), ..flight.ask() }).await, Acquired::Granted));
    assert_eq!(flight.commit("fresh").await, TokenCheck::Held, "the seen entry is replaced");
    let late = Flight::separate(world, &key("k")).await;
    let acquired = late.acquire(Acquire { seen: Some(&seen), ..late.ask() }).await;
    assert!(matches!(acquired, Acquired::Found(entry) if entry == "fresh"));
}

async fn an_outcome_is_only_for_waiters_behind_its_holder(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let (one, two) = (Flight::waiting(world, &key("k")).await, Flight::waiting(world, &key("k")).await);
    assert_eq!(holder.fail(holder.failure()).await, TokenCheck::Held);
    for waiter in [&one, &two] {
        assert_eq!(waiter.hints().await.finished, Some(holder.token.clone()));
        let ask = Acquire { behind: Some(&holder.token), ..waiter.ask() };
        let acquired = waiter.acquire(ask).await;
        assert!(matches!(&acquired, Acquired::Ended(outcome) if outcome == "no route"), "{acquired:?}");
    }
    assert_eq!(one.look_up().await, None);
    let elsewhere = Acquire { behind: Some(&two.token), ..one.ask() };
    assert!(matches!(one.acquire(elsewhere).await, Acquired::Granted), "it waited behind another");
    one.release().await;
    two.must_hold().await;
}

async fn an_outcome_is_replayed_to_newcomers_for_its_time_only(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let newcomer = Flight::separate(world, &key("k")).await;
    let started = Instant::now();
    holder.fail(Fail { replay: ms(300), ..holder.failure() }).await;
    let acquired = newcomer.acquire(newcomer.ask()).await;
    let is_replayed = matches!(&acquired, Acquired::Ended(outcome) if outcome == "no route");
    assert!(is_replayed || started.elapsed() > ms(250), "{acquired:?}");
    while let Acquired::Ended(_) = newcomer.acquire(newcomer.ask()).await {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
    assert!(started.elapsed() >= ms(299), "{:?}", started.elapsed());
    let behind = Acquire { behind: Some(&holder.token), ..newcomer.ask() };
    assert!(matches!(newcomer.acquire(behind).await, Acquired::Ended(_)), "a waiter has longer");
}

async fn an_outcome_expires(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    holder.fail(Fail { keep: ms(100), ..holder.failure() }).await;
    let waiter = Flight::separate(world, &key("k")).await;
    let started = Instant::now();
    let behind = Acquire { behind: Some(&holder.token), ..waiter.ask() };
    while let Acquired::Ended(_) = waiter.acquire(behind).await {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
}

async fn an_entry_comes_before_an_outcome_and_ends_it(world: &World) {
    let failed = Flight::holding(world, &key("k")).await;
    failed.fail(failed.failure()).await;
    let loaded = Flight::holding(world, &key("k")).await;
    loaded.commit("v").await;
    let waiter = Flight::separate(world, &key("k")).await;
    let behind = Acquire { behind: Some(&failed.token), ..waiter.ask() };
    assert!(matches!(waiter.acquire(behind).await, Acquired::Found(entry) if entry == "v"));
    let seen = bytes("v");
    let acquired = waiter.acquire(Acquire { seen: Some(&seen), ..behind }).await;
    assert!(matches!(acquired, Acquired::Granted), "the outcome went with the commit: {acquired:?}");
}

async fn a_marker_replaces_nothing_but_the_entry_that_was_seen(world: &World) {
    let marked = |seen: Option<&'static str>| async move {
        let k = key(seen.unwrap_or("nothing"));
        let flight = Flight::holding(world, &k).await;
        if seen.is_some() {
            flight.commit("stale").await;
            let stale = bytes("stale");
            flight.acquire(Acquire { seen: Some(&stale), ..flight.ask() }).await;
        }
        let seen = seen.map(bytes);
        let older = OlderEntry::Marked(bytes("marker"), LEASE);
        let fail = Fail { older, seen: seen.as_ref(), ..flight.failure() };
        assert_eq!(flight.fail(fail).await, TokenCheck::Held);
        flight.look_up().await.expect("an entry")
    };
    assert_eq!(marked(None).await, "marker");
    assert_eq!(marked(Some("stale")).await, "marker");
    assert_eq!(marked(Some("something older")).await, "stale");
}

async fn a_failure_removes_nothing_but_the_entry_that_was_seen(world: &World) {
    for (seen, left) in [("stale", None), ("something older", Some(bytes("stale")))] {
        let flight = Flight::holding(world, &key(seen)).await;
        flight.commit("stale").await;
        let (stale, seen) = (bytes("stale"), bytes(seen));
        flight.acquire(Acquire { seen: Some(&stale), ..flight.ask() }).await;
        let fail = || Fail { older: OlderEntry::Ends, seen: Some(&seen), ..flight.failure() };
        assert_eq!(flight.fail(fail()).await, TokenCheck::Held);
        assert_eq!(flight.look_up().await, left);
        // A late command of a token that holds nothing any more.
        let newer = Flight::separate(world, &flight.key).await;
        newer.acquire(Acquire { seen: left.as_ref(), ..newer.ask() }).await;
        newer.commit("stale").await;
        assert_eq!(flight.fail(fail()).await, TokenCheck::Lost);
        assert_eq!(flight.look_up().await, Some(bytes("stale")));
    }
    let flight = Flight::holding(world, &key("nothing")).await;
    let fail = Fail { older: OlderEntry::Ends, ..flight.failure() };
    assert_eq!(flight.fail(fail).await, TokenCheck::Held);
    assert_eq!(flight.look_up().await, None);
}
