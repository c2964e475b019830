//! Waiting: it sends no commands and ends on time, and all waiters of one process share its connections.

use futures_util::future::join_all;

use super::*;
use crate::support::monitor::Monitor;

const QUEUE: &str = "sg1:sq:{default:s}";

/// S4.1: a waiter that waits for three seconds sends one command, and receives one message.
#[tokio::test]
async fn a_wait_is_one_command() {
    let server = RedisServer::start();
    let [one, other] = nodes(&server).await;
    let (a, b) = (semaphore(&one, 1), semaphore(&other, 1));
    // The server knows the scripts from here on.
    let mut held = free(&a).await;
    held.release().await.expect("asks");
    let mut held = free(&a).await;

    let monitor = Monitor::start(&server);
    let next = waiter(&b);
    eventually_eq("it waits", SOON, 1, async || server.run::<usize>(&["LLEN", QUEUE])).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!next.is_finished());
    let since = Instant::now();
    held.release().await.expect("asks");
    let next = granted(next).await;
    assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
    let commands = monitor.finish();
    // If the subscription was renewed because the server stalled, the waiter has asked once more.
    let anew = commands.of("subscribe");
    let scripts = commands.clone().without(["ping", "time", "subscribe"]);
    assert!(
        (2..=2 + anew).contains(&scripts.total) && scripts.of("evalsha") == scripts.total,
        "one to wait, one to release, {anew} made anew: {scripts:#?}"
    );
    assert!(commands.total <= 2 * (10 + 3 * anew), "with the signs of life of two nodes: {commands:#?}");
    assert!((1..=1 + anew).contains(&(next.attempts() as usize)), "{}", next.attempts());
}

/// S4.12: waiters in every process learn of the deletion, with a time limit or without one.
#[tokio::test]
async fn waiters_learn_that_the_semaphore_was_deleted() {
    let server = RedisServer::start();
    let nodes: [Locks; 4] = nodes(&server).await;
    let handles = nodes.each_ref().map(|locks| semaphore(locks, 2));
    let _held = [free(&handles[0]).await, free(&handles[1]).await];
    let waiters: Vec<_> = (0..20)
        .map(|waiter| {
            let semaphore = handles[waiter % 4].clone();
            let wait = if waiter % 3 == 0 { Wait::For(PATIENCE) } else { Wait::Forever };
            tokio::spawn(async move { semaphore.acquire(wait).await })
        })
        .collect();
    queued(&handles[0], 20).await;
    let since = Instant::now();
    assert!(handles[3].delete().await.expect("asks"));
    for waiter in waiters {
        let outcome = ended(waiter).await;
        assert!(matches!(outcome, Err(LockError::Closed)), "{outcome:?}");
    }
    assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
    assert_eq!(server.keys(), Vec::<String>::new(), "without a trace");
    // The name can be used again.
    assert_eq!(available(&handles[1]).await, 2);
    drop(free(&handles[2]).await);
}

/// S4.27: it would be a flaw to wait on a connection that the release needs, and to block it.
#[tokio::test]
async fn fifty_waiters_wait_and_release_through_one_connection() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let semaphore = semaphore(&locks, 2);
    let mut held = [free(&semaphore).await, free(&semaphore).await];
    let waiters: Vec<_> = (0..50)
        .map(|_| {
            let semaphore = semaphore.clone();
            tokio::spawn(async move {
                let mut permit = semaphore.acquire(Wait::Forever).await.expect("asks").expect("for ever");
                permit.release().await.expect("asks").was_held
            })
        })
        .collect();
    queued(&semaphore, 50).await;
    assert_eq!((server.client_count(), server.pubsub_clients()), (2, 1), "commands, and notifications");
    for permit in &mut held {
        permit.release().await.expect("asks");
    }
    for was_held in join_all(waiters).await {
        assert!(was_held.expect("joined"));
    }
    assert_eq!((available(&semaphore).await, semaphore.waiting().await.expect("asks")), (2, 0));
}

/// S4.28: it would be a flaw if a response timeout also ended waits.
#[tokio::test]
async fn a_wait_may_outlast_the_command_timeout() {
    let server = RedisServer::start();
    let holder = node(&server).await;
    let client = redis::Client::open(server.minimal_user()).expect("an address");
    let impatient = Locks::builder(client).command_timeout(ms(1_000)).build().expect("valid");
    connect(&impatient).await;
    let patient = semaphore(&holder, 1);
    let mut held = free(&patient).await;
    let next = waiter(&semaphore(&impatient, 1));
    queued(&patient, 1).await;
    tokio::time::sleep(ms(2_000)).await;
    assert!(!next.is_finished(), "{:?}", ended(next).await);
    held.release().await.expect("asks");
    assert!(granted(next).await.waited() >= ms(2_000));
}

/// S4.1, S4.36: polling can be chosen, at a configured interval.
#[tokio::test(start_paused = true)]
async fn polling_asks_once_per_interval() {
    let poll = stampede_guard::lock::Waiting::Poll { interval: ms(100), jitter: 0.1 };
    let stage = Stage::in_memory();
    let [a, _] = stage.handles(1);
    let b = with(&stage.other, 1, |builder| builder.waiting(poll));
    let mut held = free(&a).await;
    let (next, ()) = tokio::join!(b.acquire(Wait::For(SOON)), async {
        tokio::time::sleep(ms(1_000)).await;
        assert_eq!(a.waiting().await.expect("asks"), 0, "a polling waiter is in no queue");
        held.release().await.expect("asks");
    });
    let next = next.expect("asks").expect("in time");
    assert!((10..=12).contains(&next.attempts()), "{}", next.attempts());
    assert!(next.waited() <= ms(1_110 + 5), "{:?}", next.waited());
}
