//! When a round of a batch is called, and with which members.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::sleep;

use super::*;
use crate::sync::lock;

/// The rounds that were called so far, each with the numbers of its members.
type Rounds = Arc<Mutex<Vec<Vec<usize>>>>;

fn batch(size: usize) -> (Rounds, Vec<BatchMember>) {
    let rounds = Rounds::default();
    let called = Arc::clone(&rounds);
    let members = LoadBatch::of(size, move |round| {
        lock(&called).push(round);
        std::future::ready(())
    });
    (rounds, members)
}

async fn called(rounds: &Rounds) -> Vec<Vec<usize>> {
    for _ in 0..10 {
        yield_now().await;
    }
    std::mem::take(&mut *lock(rounds))
}

#[tokio::test(start_paused = true)]
async fn a_round_waits_for_all_that_attempt_and_has_all_that_lead() {
    let (rounds, mut members) = batch(4);
    let (d, c, b, a) = (members.pop(), members.pop(), members.pop(), members.pop());
    a.expect("four").lead(None);
    drop(c);
    assert!(called(&rounds).await.is_empty(), "two members attempt");
    let attempt = b.as_ref().expect("four").attempt();
    attempt.rest();
    assert!(called(&rounds).await.is_empty(), "one member attempts");
    d.expect("four").lead(None);
    assert_eq!(called(&rounds).await, [[0, 3]]);
}

#[tokio::test(start_paused = true)]
async fn members_that_lead_later_are_called_together() {
    let (rounds, members) = batch(3);
    let mut members = members.into_iter();
    let (a, b, c) = (members.next().expect("3"), members.next().expect("3"), members.next().expect("3"));
    let (mut later_b, mut later_c) = (b.attempt(), c.attempt());
    later_b.rest();
    later_c.rest();
    a.lead(None);
    assert_eq!(called(&rounds).await, [[0]]);
    later_b.again();
    b.lead(None);
    assert!(called(&rounds).await.is_empty(), "the later round collects");
    sleep(Duration::from_millis(10)).await;
    later_c.again();
    c.lead(None);
    sleep(LATER).await;
    assert_eq!(called(&rounds).await, [[1, 2]]);
}

#[tokio::test(start_paused = true)]
async fn a_later_round_waits_for_a_member_that_attempts_again() {
    let (rounds, members) = batch(2);
    let mut members = members.into_iter();
    let (a, b) = (members.next().expect("2"), members.next().expect("2"));
    let (mut of_a, mut of_b) = (a.attempt(), b.attempt());
    of_a.rest();
    of_b.rest();
    // The first round ends for both members, and both attempt again.
    of_a.again();
    of_b.again();
    a.lead(None);
    of_b.rest();
    // Member `b` attempts again before the round is called, so the round waits for it.
    of_b.again();
    assert!(called(&rounds).await.is_empty());
    b.lead(None);
    assert_eq!(called(&rounds).await, [[0, 1]]);
}

/// A call of a member begins a flight and, if that takes too long, another one. The end of the older flight must not end the member's
/// attempt.
#[tokio::test(start_paused = true)]
async fn only_the_latest_attempt_of_a_member_ends_it() {
    let (rounds, members) = batch(2);
    let mut members = members.into_iter();
    let (a, b) = (members.next().expect("2"), members.next().expect("2"));
    a.lead(None);
    let mut caller = b.attempt();
    let flight = caller.of_flight();
    drop(flight);
    // The dropped flight counts as resting.
    assert_eq!(called(&rounds).await, [[0]]);
    let flight = caller.of_flight();
    caller.again();
    drop(flight);
    drop(caller);
    drop(b);
    sleep(LATER * 2).await;
    assert!(called(&rounds).await.is_empty(), "a member that is dropped is not called");
}

#[tokio::test]
async fn a_batch_without_leaders_calls_nothing_and_is_freed() {
    let (rounds, members) = batch(3);
    drop(members);
    assert!(called(&rounds).await.is_empty());
    assert_eq!(Arc::strong_count(&rounds), 1, "the batch is freed");
}

#[tokio::test]
async fn the_share_is_one_while_it_is_used() {
    let (_rounds, members) = batch(2);
    let (one, other) = (members[0].attempt(), members[1].attempt());
    let (first, second) = (one.share(), other.share());
    assert!(Arc::ptr_eq(&first, &second));
    let share = Arc::downgrade(&first);
    drop((first, second));
    assert!(share.upgrade().is_none(), "the share is freed with its last user");
}
