//! Queues of thousands of tokens of dead processes, more than one script call passes over, and a live waiter behind them.

use super::on_redis::at;
use super::*;

on_servers! {
    a_waiter_at_the_end_of_a_long_queue_is_notified_of_every_end,
    a_hand_over_reaches_a_waiter_behind_many_dead_ones,
    a_hand_over_past_only_dead_waiters_frees_the_lease,
}

/// The length of a queue that requires several calls of each script.
const QUEUE_LENGTH: usize = 1_700;

/// Adds tokens of dead processes to the queue. Each token is added `each` times in a row.
fn enqueue_dead(world: &World, name: &str, each: usize) {
    let server = world.server_of(key(name).name());
    let token = |_| Token::mint(uuid::Uuid::new_v4()).as_str().to_owned();
    let tokens: Vec<String> = (0..QUEUE_LENGTH / each).map(token).collect();
    let tokens: Vec<&str> = tokens.iter().flat_map(|token| std::iter::repeat_n(&**token, each)).collect();
    let queue = at("q", name);
    server.run::<()>(&[&["RPUSH", &queue], &tokens[..]].concat());
    server.run::<()>(&["PEXPIRE", &queue, "600000"]);
}

async fn a_waiter_at_the_end_of_a_long_queue_is_notified_of_every_end(world: &World) {
    for end in ["commit", "fail", "release", "invalidate", "insert"] {
        let holder = Flight::holding(world, &key(end)).await;
        enqueue_dead(world, end, 1);
        let waiter = Flight::waiting(world, &key(end)).await;
        match end {
            "commit" => assert_eq!(holder.commit("v").await, TokenCheck::Held),
            "fail" => assert_eq!(holder.fail(holder.failure()).await, TokenCheck::Held),
            "release" => assert_eq!(holder.release().await, TokenCheck::Held),
            "invalidate" => holder.invalidate().await,
            _ => holder.insert("v", None).await,
        }
        let hints = waiter.hints().await;
        let ends = matches!(end, "commit" | "fail" | "release").then(|| holder.token.clone());
        assert_eq!((hints.finished, hints.invalidated), (ends.clone(), ends.is_none()), "{end}");
        let left: usize = world.server_of(holder.key.name()).run(&["EXISTS", &at("q", end)]);
        assert_eq!(left, 0, "{end}");
    }
}

async fn a_hand_over_reaches_a_waiter_behind_many_dead_ones(world: &World) {
    if world.gives_claims() {
        // A cluster gives a claim to the head of the queue, even if its process is dead.
        return;
    }
    for each in [1, 100] {
        let name = format!("{each} entries each");
        let holder = Flight::holding(world, &key(&name)).await;
        enqueue_dead(world, &name, each);
        let waiter = Flight::waiting(world, &key(&name)).await;
        assert_eq!(holder.hand_over(1).await, HandedOver::ToWaiter);
        assert_eq!(waiter.granted(world).await, 1);
        waiter.must_hold().await;
        assert_eq!(waiter.release().await, TokenCheck::Held);
    }
}

async fn a_hand_over_past_only_dead_waiters_frees_the_lease(world: &World) {
    if world.gives_claims() {
        return;
    }
    let holder = Flight::holding(world, &key("k")).await;
    enqueue_dead(world, "k", 1);
    assert_eq!(holder.hand_over(1).await, HandedOver::Freed);
    Flight::holding(world, &key("k")).await;
}
