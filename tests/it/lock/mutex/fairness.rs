//! Waiters are served in the order of their requests, and share one connection.

use std::sync::Arc;

use tokio::sync::Mutex as AsyncMutex;

use super::*;

/// Checks that the node has one connection for messages and one for commands. Either may be reconnecting at any moment, so this waits.
async fn on_two_connections(server: &RedisServer) {
    eventually_eq("there are two connections", SOON, (1, 2), async || {
        (server.pubsub_clients(), server.client_count())
    })
    .await;
}

/// Twenty waiters of four processes, each of which queues after the one before, are served in this order.
#[tokio::test]
async fn waiters_are_served_in_order() {
    let server = RedisServer::start();
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(node(&server).await);
    }
    let mut holder = locked(&mutex(&nodes[0])).await;
    let order = Arc::new(AsyncMutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for at in 0..20 {
        let (mutex, order) = (mutex(&nodes[at % 4]), order.clone());
        waiters.push(tokio::spawn(async move {
            let mut guard = mutex.lock().await.expect("acquired");
            order.lock().await.push(at);
            guard.unlock().await.expect("asks")
        }));
        queued(&server, at + 1).await;
    }
    assert!(holder.unlock().await.expect("asks"));
    for waiter in waiters {
        assert!(waiter.await.expect("joined"));
    }
    assert_eq!(*order.lock().await, (0..20).collect::<Vec<_>>());
    free(&server, AT_ONCE).await;
}

/// While a client waits, another client can not acquire the mutex, neither by `try_lock` nor by polling.
#[tokio::test]
async fn no_client_overtakes_the_queue() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut holder = locked(&mutex(&one)).await;
    let next = waiter(&other);
    queued(&server, 1).await;
    // Another program deletes the key. The waiter has not noticed that, but is served before any other client.
    server.run::<()>(&["DEL", "sg1:m:{default:m}"]);
    assert!(mutex(&one).try_lock().await.expect("asks").is_none());
    let (next, took) = granted(next).await;
    assert!(took < AT_ONCE && next.is_owned().await.expect("asks"));
    assert!(!holder.unlock().await.expect("asks"));
}

/// `guard.locks()` uses the connections and the namespace of the guard.
#[tokio::test]
async fn the_locks_of_a_guard_share_its_connections() {
    let server = RedisServer::start();
    let client = redis::Client::open(server.minimal_user()).expect("an address");
    let guard = stampede_guard::StampedeGuard::builder(client).namespace("shop").build().expect("valid");
    crate::redis::connects(&guard).await;
    let a = mutex(&guard.locks());
    assert_eq!(a.key(), "sg1:m:{shop:m}");
    let mut holder = locked(&a).await;
    let next = waiter(&guard.locks());
    queued_for(&server, "sg1:mq:{shop:m}", 1).await;
    on_two_connections(&server).await;
    assert!(holder.unlock().await.expect("asks"));
    assert!(granted(next).await.1 < AT_ONCE);
    // Closing the locks ends their background work, not the guard.
    guard.locks().close().await;
    eventually("it stores", SOON, async || guard.insert("k", &1u32).await.is_ok()).await;
    let other = mutex(&node(&server).await);
    assert!(other.try_lock().await.expect("asks").is_some(), "another namespace is another lock");
}

/// S0.17: it would be a flaw to use a connection per waiter, so that the sixth waiter of a process gets a pool's error. Here 500 waiters of
/// one process share its two connections, and each acquires the mutex.
#[tokio::test]
async fn five_hundred_waiters_share_one_subscription() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let mut holder = locked(&mutex(&locks)).await;
    let waiters: Vec<_> = (0..500)
        .map(|_| {
            let mutex = with(&locks, |builder| builder.acquire_timeout(Duration::MAX));
            tokio::spawn(async move {
                let mut guard = mutex.lock().await.expect("acquired");
                let attempts = guard.attempts();
                assert!(guard.unlock().await.expect("asks"));
                attempts
            })
        })
        .collect();
    queued(&server, 500).await;
    on_two_connections(&server).await;
    let before = commands(&server, "subscribe");
    assert!(holder.unlock().await.expect("asks"));
    let mut attempts = 0;
    for waiter in waiters {
        attempts += waiter.await.expect("acquired");
    }
    // Each waiter asks once and is granted the mutex once. If the server stalled, it asks once more for each subscription that was renewed.
    let anew = (commands(&server, "subscribe") - before) as u64;
    assert!((500..=500 + 500 * anew).contains(&(attempts as u64)), "{attempts}, {anew} made anew");
    on_two_connections(&server).await;
    free(&server, AT_ONCE).await;
}
