//! Long queues, most of whose waiters have died: how much of the queue one script call works off.

use super::super::on_redis::at;
use super::*;

on_servers! {
    ten_thousand_waiters_of_ten_dead_nodes_cost_ten_messages,
    a_call_tries_a_bounded_number_of_nodes,
    a_take_passes_the_dead_and_is_answered_once,
    an_exchange_passes_the_dead_and_says_that_it_was_held,
    a_break_passes_the_dead_and_leaves_the_next_holder_alone,
    a_step_that_ends_halfway_is_continued_by_the_next_one,
    permits_pass_ten_thousand_waiters_of_ten_dead_nodes,
    a_permit_is_taken_behind_the_dead,
    permits_are_added_for_the_dead_and_the_living,
    a_thousand_waiters_are_notified_of_the_end,
    of_a_thousand_nodes_a_hundred_are_notified_of_a_shorter_time,
}

/// Adds `waiters` waiters of `nodes` dead nodes to a queue.
fn fill(world: &World, kind: &str, waiters: usize, nodes: usize) {
    let nodes: Vec<_> = (0..nodes).map(|_| uuid::Uuid::new_v4()).collect();
    let mut conn = world.server_of(&mutex("k").tag).conn();
    let mut pipeline = redis::pipe();
    for number in 0..waiters {
        let token = Token::mint(nodes[number % nodes.len()]);
        pipeline.cmd("RPUSH").arg(at(kind, "k")).arg(format!("{}60000", token.as_str())).ignore();
    }
    pipeline.cmd("PEXPIRE").arg(at(kind, "k")).arg(600_000).ignore();
    pipeline.query::<()>(&mut conn).expect("filled");
}

/// How many calls of this command the server has counted since its start.
fn calls(world: &World, command: &str) -> u64 {
    let stats: String = world.server_of(&mutex("k").tag).run(&["INFO", "commandstats"]);
    let head = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(head.as_str()));
    line.map_or(0, |rest| rest.split(',').next().and_then(|calls| calls.parse().ok()).expect("a number"))
}

/// How many script calls the server has counted since its start.
fn scripts(world: &World) -> u64 {
    calls(world, "evalsha") + calls(world, "eval")
}

/// A holder, and a waiter behind `dead` waiters of `nodes` dead nodes.
async fn behind_the_dead(world: &World, dead: usize, nodes: usize) -> (Asker, Asker) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    fill(world, "mq", dead, nodes);
    let waiter = Asker::waiting(world, &mutex("k")).await;
    (holder, waiter)
}

async fn ten_thousand_waiters_of_ten_dead_nodes_cost_ten_messages(world: &World) {
    if world.gives_claims() {
        return;
    }
    let (holder, waiter) = behind_the_dead(world, 10_000, 10).await;
    let (messages, steps) = (calls(world, "publish"), scripts(world));
    assert!(holder.free().await);
    waiter.granted().await;
    assert!(waiter.owns().await);
    assert_eq!(calls(world, "publish") - messages, 11, "one for each node");
    let steps = scripts(world) - steps;
    // The count includes the LOOK above, and each script twice if the server does not know its text yet.
    assert!((6..=12).contains(&steps), "a call takes 2,000 entries: {steps}");
}

async fn a_call_tries_a_bounded_number_of_nodes(world: &World) {
    if world.gives_claims() {
        return;
    }
    let (holder, waiter) = behind_the_dead(world, 1_000, 1_000).await;
    let (messages, steps) = (calls(world, "publish"), scripts(world));
    assert!(holder.free().await);
    waiter.granted().await;
    assert_eq!(calls(world, "publish") - messages, 1_001);
    assert!(scripts(world) - steps >= 11, "a call tries 100 nodes");
}

async fn a_take_passes_the_dead_and_is_answered_once(world: &World) {
    if world.gives_claims() {
        return;
    }
    let server = world.server_of(&mutex("k").tag);
    fill(world, "mq", 5_000, 500);
    let (one, two) = (Asker::separate(world, &mutex("k")).await, Asker::separate(world, &mutex("k")).await);
    one.must_take().await;
    assert_eq!(server.run::<i64>(&["EXISTS", &at("mq", "k")]), 0, "no dead waiter is left");
    two.must_wait().await;
    assert_eq!(server.run::<i64>(&["LLEN", &at("mq", "k")]), 1);
    assert!(one.free().await);
    two.granted().await;
}

async fn an_exchange_passes_the_dead_and_says_that_it_was_held(world: &World) {
    if world.gives_claims() {
        return;
    }
    let (holder, waiter) = behind_the_dead(world, 5_000, 500).await;
    let next = Asker::on(&holder.node, &mutex("k"));
    let (taken, was_held) = next.take_instead_of(&holder).await;
    assert!(matches!(taken, Taken::Busy { .. }) && was_held, "{taken:?}, {was_held}");
    waiter.granted().await;
    assert!(waiter.free().await);
    next.granted().await;
    assert!(next.free().await && next.look().await.is_none());
}

async fn a_break_passes_the_dead_and_leaves_the_next_holder_alone(world: &World) {
    if world.gives_claims() {
        return;
    }
    let (holder, waiter) = behind_the_dead(world, 5_000, 500).await;
    assert!(holder.force().await);
    waiter.granted().await;
    assert!(waiter.owns().await);
    assert!(holder.notified().await.broken);
    assert!(timeout(Duration::ZERO, waiter.wait.notified()).await.is_err(), "the next holder is left alone");
}

/// The process that frees the mutex dies between two script calls: the mutex is free and has a queue, as after a holder's death, and the
/// next take continues the work.
async fn a_step_that_ends_halfway_is_continued_by_the_next_one(world: &World) {
    if world.gives_claims() {
        return;
    }
    let (holder, waiter) = behind_the_dead(world, 5_000, 5_000).await;
    let server = world.server_of(&mutex("k").tag);
    let freeing = tokio::spawn(async move { holder.free().await });
    until(async || server.run::<i64>(&["LLEN", &at("mq", "k")]) < 5_001).await;
    freeing.abort();
    let _ = freeing.await;
    let newcomer = Asker::separate(world, &mutex("k")).await;
    newcomer.must_wait().await;
    waiter.granted().await;
    assert!(waiter.owns().await, "in the order of coming");
    assert!(waiter.free().await);
    newcomer.granted().await;
}

async fn permits_pass_ten_thousand_waiters_of_ten_dead_nodes(world: &World) {
    if world.gives_claims() {
        return;
    }
    let name = semaphore("k");
    let (holder, waiter) = (Asker::separate(world, &name).await, Asker::separate(world, &name).await);
    holder.must_take_permit(1).await;
    fill(world, "sq", 10_000, 10);
    waiter.must_wait_for_permit(1).await;
    let (messages, steps) = (calls(world, "publish"), scripts(world));
    assert_eq!(holder.free_permit().await, PermitFreed { was_held: true, available: 0 });
    waiter.granted().await;
    assert_eq!(calls(world, "publish") - messages, 11, "one for each node");
    let steps = scripts(world) - steps;
    assert!((5..=11).contains(&steps), "a call takes 2,000 entries: {steps}");
}

async fn a_permit_is_taken_behind_the_dead(world: &World) {
    if world.gives_claims() {
        return;
    }
    let name = semaphore("k");
    let (one, two) = (Asker::separate(world, &name).await, Asker::separate(world, &name).await);
    one.must_take_permit(2).await;
    fill(world, "sq", 5_000, 500);
    let taken = two.must_take_permit(2).await;
    assert_eq!(taken.available, 0);
    let state = one.state().await.expect("there");
    assert_eq!((state.waiting, state.holders.len()), (0, 2));
    fill(world, "sq", 5_000, 500);
    assert!(two.free_permit().await.was_held);
    assert!(one.refresh(LEASE).await);
    let state = one.state().await.expect("there");
    assert_eq!((state.waiting, state.available, state.holders.len()), (0, 1, 1));
}

/// One script call tries a limited number of waiters, whether or not they receive their grants, so this takes several calls.
async fn permits_are_added_for_the_dead_and_the_living(world: &World) {
    if world.gives_claims() {
        return;
    }
    let name = semaphore("k");
    let create = Create { capacity: 1, idle_ttl: LEASE };
    let (holder, node) = (Asker::separate(world, &name).await, world.node().await);
    holder.must_take_permit(1).await;
    fill(world, "sq", 300, 300);
    let waiters: Vec<_> = (0..250).map(|_| Asker::on(&node, &name)).collect();
    for waiter in &waiters {
        waiter.must_wait_for_permit(1).await;
    }
    let steps = scripts(world);
    let state = holder.change(SemaphoreChange::Add { permits: 250, semaphore: create }).await.expect("there");
    assert_eq!((state.capacity, state.available, state.waiting, state.holders.len()), (251, 0, 0, 251));
    assert!(!state.created);
    assert!(scripts(world) - steps >= 6, "a call tries 100 waiters");
    for waiter in &waiters {
        waiter.granted().await;
    }
}

async fn a_thousand_waiters_are_notified_of_the_end(world: &World) {
    let name = semaphore("k");
    let (holder, waiter) = (Asker::separate(world, &name).await, Asker::separate(world, &name).await);
    holder.must_take_permit(1).await;
    fill(world, "sq", 1_200, 1_200);
    waiter.must_wait_for_permit(1).await;
    let steps = scripts(world);
    let state = holder.change(SemaphoreChange::Delete).await.expect("there");
    assert_eq!((state.capacity, state.waiting, state.holders.len()), (1, 1_201, 1));
    assert!(waiter.notified().await.closed);
    assert!(holder.state().await.is_none());
    assert!(scripts(world) - steps >= 3, "a call notifies 500 waiters");
}

async fn of_a_thousand_nodes_a_hundred_are_notified_of_a_shorter_time(world: &World) {
    let holder = Asker::separate(world, &mutex("k")).await;
    assert!(matches!(holder.take_for(None).await, Taken::Granted { .. }));
    holder.wait.hold();
    let first = Asker::waiting(world, &mutex("k")).await;
    fill(world, "mq", 1_000, 1_000);
    let last = Asker::waiting(world, &mutex("k")).await;
    let messages = calls(world, "publish");
    assert!(holder.extend(Some(LEASE)).await);
    assert_eq!(calls(world, "publish") - messages, 100);
    assert!(first.notified().await.missed && last.notified().await.missed);
}
