//! Hundreds of waiters of one process are affected by the same event at one moment: the process asks the server about all of them at once.

use super::*;

const MANY: usize = 400;

async fn queue_many(server: &RedisServer, locks: &Locks) -> Vec<JoinHandle<u32>> {
    let visitors = (0..MANY)
        .map(|_| visitor(with(locks, |builder| builder.ttl(LONG).acquire_timeout(Duration::MAX))))
        .collect();
    queued(server, MANY).await;
    visitors
}

/// Cuts the subscriptions, and waits until they are open again.
async fn resubscribed(server: &RedisServer) {
    assert!(server.kill_pubsub() >= 1);
    eventually("it hears again", SOON, async || server.pubsub_clients() >= 2).await;
}

/// One command asks about all waiters, and none is lost: each acquires the mutex before its TTL of a minute ends.
#[tokio::test]
async fn a_lost_subscription_costs_one_question_for_all_waiters_of_a_process() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    warm(&one).await;
    let mut holder = locked(&with(&one, |builder| builder.ttl(LONG))).await;
    let visitors = queue_many(&server, &other).await;
    let before = scripts_run(&server);
    resubscribed(&server).await;
    tokio::time::sleep(ms(300)).await;
    let sent = scripts_run(&server) - before;
    assert!(sent <= 12, "{sent} scripts: the first asks, twice, and a look at all positions");
    assert!(holder.unlock().await.expect("asks"));
    let attempts = visited(visitors).await;
    assert!(attempts as usize <= MANY + 12, "the others were granted it by message: {attempts}");
    free(&server, SOON).await;
}

/// The mutex is released while no waiter is subscribed: all are passed over, queue again, and none is lost.
#[tokio::test]
async fn waiters_that_were_passed_over_queue_again() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut holder = locked(&with(&one, |builder| builder.ttl(LONG))).await;
    let visitors = queue_many(&server, &other).await;
    assert!(server.kill_pubsub() >= 1);
    assert!(holder.unlock().await.expect("asks"));
    let started = Instant::now();
    visited(visitors).await;
    assert!(started.elapsed() < LONG / 3, "{:?}", started.elapsed());
    free(&server, SOON).await;
}

/// The queue is deleted. The first waiter that asks notices that, and then its process asks about the other waiters: all queue again while
/// the mutex is still held.
#[tokio::test]
async fn waiters_of_a_lost_queue_queue_again_together() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut holder = locked(&with(&one, |builder| builder.ttl(ms(600)).auto_renew(true))).await;
    let waits = || visitor(with(&other, |builder| builder.ttl(LONG).acquire_timeout(Duration::MAX)));
    let visitors: Vec<_> = (0..20).map(|_| waits()).collect();
    queued(&server, 20).await;
    server.run::<()>(&["DEL", "sg1:mq:{default:m}"]);
    queued(&server, 20).await;
    assert!(holder.unlock().await.expect("asks"));
    visited(visitors).await;
    free(&server, SOON).await;
}

/// A node without the right to subscribe never receives a message. One of its waiters asks for all, twice a second, and each acquires the
/// mutex.
#[tokio::test]
async fn one_waiter_asks_for_all_that_can_not_subscribe() {
    let server = RedisServer::start();
    let (one, url) = (node(&server).await, server.minimal_user());
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-subscribe"]);
    let other = unconnected(&url);
    let mut holder = locked(&with(&one, |builder| builder.ttl(LONG))).await;
    let visitors = queue_many(&server, &other).await;
    let before = scripts_run(&server);
    tokio::time::sleep(ms(1_600)).await;
    let sent = scripts_run(&server) - before;
    assert!((1..=12).contains(&sent), "{sent}");
    assert!(holder.unlock().await.expect("asks"));
    visited(visitors).await;
    free(&server, SOON).await;
}

/// Many waiters time out at one moment. A waiter of another process keeps its position among them.
#[tokio::test]
async fn waiters_that_time_out_at_one_moment_leave_together() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    warm(&other).await;
    let mut holder = locked(&with(&one, |builder| builder.ttl(LONG))).await;
    let half = |locks: &Locks| {
        let mutex = with(locks, |builder| builder.ttl(LONG).acquire_timeout(ms(1_500)));
        let waits = |mutex: Mutex| async move { mutex.lock().await.map(drop) };
        (0..MANY / 2).map(|_| tokio::spawn(waits(mutex.clone()))).collect::<Vec<_>>()
    };
    let mut leaving = half(&other);
    queued(&server, MANY / 2).await;
    let next = {
        let mutex = with(&one, |builder| builder.ttl(LONG).acquire_timeout(Duration::MAX));
        tokio::spawn(async move { mutex.lock().await })
    };
    queued(&server, MANY / 2 + 1).await;
    leaving.extend(half(&other));
    queued(&server, MANY + 1).await;
    let before = scripts_run(&server);
    for waiter in leaving {
        assert!(waiter.await.expect("joined").is_err(), "it is held");
    }
    queued(&server, 1).await;
    let sent = scripts_run(&server) - before;
    assert!(sent < MANY / 2, "they go together: {sent} scripts for {MANY}");
    assert!(pttl(&server, "sg1:mq:{default:m}") > 0, "the queue has an end");
    assert!(holder.unlock().await.expect("asks"));
    let (mut next, took) = granted(next).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert!(next.unlock().await.expect("asks"));
    free(&server, SOON).await;
}
