//! Waiters that leave a queue at the same moment.

use futures_util::future::join_all;

use super::super::on_redis::at;
use super::*;
use crate::store::Leave;

on_servers! {
    waiters_that_leave_together_leave_the_others_in_their_order,
    of_a_queue_of_thousands_a_few_leave_in_one_call,
    a_leaving_waiter_gives_back_a_grant_that_it_did_not_receive,
    permits_of_waiters_that_leave_go_to_the_next,
}

async fn leave(asker: &Asker) {
    let leave = Leave { token: &asker.token, ttl: Some(LEASE) };
    asker.node.leave(&asker.name, leave, WITHIN).await.expect("left");
}

fn queue(world: &World) -> Vec<String> {
    world.server_of(&mutex("k").tag).run(&["LRANGE", &at("mq", "k"), "0", "-1"])
}

/// Queues waiters of two nodes in turn. When those of the first node leave, the others keep their order.
async fn in_turn(world: &World, each: usize) {
    let server = world.server_of(&mutex("k").tag);
    let (one, other) = (world.node().await, world.node().await);
    let mut askers = Vec::new();
    for number in 0..2 * each {
        let asker = Asker::on(if number % 2 == 0 { &one } else { &other }, &mutex("k"));
        asker.must_wait().await;
        askers.push(asker);
    }
    let before = queue(world);
    join_all(askers.iter().step_by(2).map(leave)).await;
    let after = queue(world);
    assert!(after.iter().all(|position| position.starts_with(&other.node().simple().to_string())));
    let stays = |position: &&String| after.contains(position);
    assert_eq!(before.iter().filter(stays).collect::<Vec<_>>(), after.iter().collect::<Vec<_>>());
    assert_eq!(after.len(), before.len() - each);
    assert!(server.run::<i64>(&["PTTL", &at("mq", "k")]) > 60_000, "it lasts as long as before");
    for asker in askers.iter().skip(1).step_by(2) {
        leave(asker).await;
    }
}

async fn waiters_that_leave_together_leave_the_others_in_their_order(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    in_turn(world, 50).await;
    assert_eq!(queue(world), Vec::<String>::new());
    assert!(holder.free().await);
}

async fn of_a_queue_of_thousands_a_few_leave_in_one_call(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let other = Token::mint(uuid::Uuid::nil());
    let mut pipeline = redis::pipe();
    for _ in 0..6_000 {
        pipeline.cmd("RPUSH").arg(at("mq", "k")).arg(format!("{}60000", other.as_str())).ignore();
    }
    pipeline.query::<()>(&mut world.server_of(&mutex("k").tag).conn()).expect("filled");
    let node = world.node().await;
    let askers: Vec<_> = (0..40).map(|_| Asker::on(&node, &mutex("k"))).collect();
    for asker in &askers {
        asker.must_wait().await;
    }
    join_all(askers.iter().map(leave)).await;
    assert_eq!(queue(world).len(), 6_000);
    world.server_of(&mutex("k").tag).run::<()>(&["DEL", &at("mq", "k")]);
    assert!(holder.free().await);
}

async fn a_leaving_waiter_gives_back_a_grant_that_it_did_not_receive(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let node = world.node().await;
    let askers: Vec<_> = (0..10).map(|_| Asker::on(&node, &mutex("k"))).collect();
    for asker in &askers {
        asker.must_wait().await;
    }
    assert!(holder.free().await);
    until(async || askers[0].owns().await).await;
    join_all(askers.iter().map(leave)).await;
    assert!(holder.look().await.is_none(), "no holder is left");
    assert_eq!(queue(world), Vec::<String>::new());
}

async fn permits_of_waiters_that_leave_go_to_the_next(world: &World) {
    let server = world.server_of(&semaphore("k").tag);
    let (one, other) = (world.node().await, world.node().await);
    let holder = Asker::on(&other, &semaphore("k"));
    holder.must_take_permit(1).await;
    let askers: Vec<_> = (0..20).map(|_| Asker::on(&one, &semaphore("k"))).collect();
    for asker in &askers {
        asker.must_wait_for_permit(1).await;
    }
    let next = Asker::on(&other, &semaphore("k"));
    next.must_wait_for_permit(1).await;
    join_all(askers.iter().map(leave)).await;
    assert_eq!(server.run::<i64>(&["LLEN", &at("sq", "k")]), 1);
    assert!(holder.free_permit().await.was_held);
    next.granted().await;
    next.free_permit().await;
}
