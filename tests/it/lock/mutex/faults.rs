//! Connections that break, hang or lose messages while a client waits for a mutex or holds it.

use super::*;
use crate::support::proxy::{Mode, Proxy};

/// A connected node behind a proxy, with the default settings: a command may take one second.
async fn proxied(server: &RedisServer) -> (Proxy, Locks) {
    warmed(server).await;
    let proxy = Proxy::start(server.port()).await;
    let client = redis::Client::open(format!("redis://minimal:pw@127.0.0.1:{}/", proxy.port()));
    let locks = Locks::new(client.expect("an address"));
    connect(&locks).await;
    (proxy, locks)
}

/// S0.14: it would be a flaw to rely on messages, which may be lost. The subscription is cut, and the mutex is unlocked before the node has
/// subscribed again. A waiter that did not notice this would ask only when the holder's TTL ends, in a minute.
#[tokio::test]
async fn a_release_while_unsubscribed_is_found() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut took = Vec::new();
    for round in 0..9 {
        eventually_eq("both hear", SOON, 2, async || server.pubsub_clients()).await;
        let mut holder = locked(&mutex(&one)).await;
        let next = waiter(&other);
        queued(&server, 1).await;
        assert_eq!(server.kill_pubsub(), 2);
        // The mutex is unlocked at once; or while the waiter asks whether it missed a message; or after it was answered, when no message
        // reaches it until it has subscribed again.
        tokio::time::sleep(ms(round % 3 * 5)).await;
        assert!(holder.unlock().await.expect("asks"));
        let (mut next, after) = granted(next).await;
        took.push(after);
        assert!(next.unlock().await.expect("asks"));
    }
    took.sort();
    println!("median {:?}, worst {:?}", took[4], took[8]);
    // The first cut of a connection is repaired within some milliseconds, and a repeated cut after a pause of up to 500 ms.
    assert!(took[8] < AT_ONCE, "{took:?}");
}

/// The connection of a subscription dies without a sign, so the server still counts it as a subscriber. Commands continue, a ping shows
/// that the connection is dead, and the waiter finds the grant that was sent into it.
#[tokio::test]
async fn a_grant_into_a_half_open_inbox_is_found() {
    let server = RedisServer::start();
    let one = node(&server).await;
    let (proxy, other) = proxied(&server).await;
    let mut holder = locked(&mutex(&one)).await;
    let next = waiter(&other);
    queued(&server, 1).await;
    proxy.set(Mode::BlackHoleOldSubscriptions);
    assert!(holder.unlock().await.expect("asks"));
    // The mutex was granted to the waiter: no other client can acquire it.
    assert!(mutex(&one).try_lock().await.expect("asks").is_none());
    let (next, took) = granted(next).await;
    assert!(took < SOON, "{took:?}");
    assert!(retried(async || next.is_owned().await).await);
}

/// All connections of a waiter's process die without a sign, and the server grants it the mutex. The waiter acquires it or receives a store
/// error: it does not hang, and other clients can get the mutex.
#[tokio::test]
async fn a_grant_into_a_dead_host_is_not_lost() {
    let server = RedisServer::start();
    let one = node(&server).await;
    let (proxy, other) = proxied(&server).await;
    let mut holder = locked(&mutex(&one)).await;
    let next = waiter(&other);
    queued(&server, 1).await;
    proxy.set(Mode::BlackHoleOld);
    assert!(holder.unlock().await.expect("asks"));
    let ended = tokio::time::timeout(SOON, next).await.expect("it does not hang").expect("joined");
    match ended {
        Ok(mut guard) => assert!(guard.unlock().await.expect("asks")),
        Err(error) => assert!(error.is_store(), "{error:?}"),
    }
    free(&server, SOON).await;
}

/// A node without the right to subscribe receives no messages. Its waiter asks twice a second, and acquires the mutex.
#[tokio::test]
async fn without_the_right_to_subscribe_a_waiter_asks_twice_a_second() {
    let server = RedisServer::start();
    let one = node(&server).await;
    server.run::<()>(&[
        "ACL",
        "SETUSER",
        "unsubscribed",
        "on",
        ">pw",
        "~sg1:*",
        "resetchannels",
        "&sg1:*",
        "+@all",
        "-subscribe",
    ]);
    let unsubscribed = connected(&format!("redis://unsubscribed:pw@127.0.0.1:{}/", server.port())).await;
    for _ in 0..2 {
        let mut holder = locked(&mutex(&one)).await;
        let next = waiter(&unsubscribed);
        queued(&server, 1).await;
        holder.unlock().await.expect("asks");
        let (mut next, took) = granted(next).await;
        assert!(took < ms(600) + AT_ONCE, "{took:?}");
        assert!(next.unlock().await.expect("asks"));
    }
}

/// S1.17: an unlock while the connection is cut is an error. The handle still counts as held, and `unlock` can be
/// called again until it gets an answer.
#[tokio::test]
async fn a_failed_unlock_can_be_repeated() {
    let server = RedisServer::start();
    let (proxy, locks) = proxied(&server).await;
    let a = mutex(&locks);
    let mut guard = locked(&a).await;
    proxy.set(Mode::Reset);
    for _ in 0..3 {
        let cut = guard.unlock().await;
        assert!(cut.as_ref().is_err_and(LockError::is_store), "{cut:?}");
        assert!(a.is_held());
        assert!(matches!(a.try_lock().await, Err(LockError::AlreadyAcquired)));
    }
    assert_eq!(server.run::<String>(&["GET", a.key()]), guard.token());
    proxy.set(Mode::Pass);
    eventually("it is back", SOON, async || locks.connect().await.is_ok()).await;
    assert!(guard.unlock().await.expect("asks"), "it was held all the time");
    assert!(!a.is_held() && !a.is_locked().await.expect("asks"));

    let mut guard = locked(&a).await;
    server.kill();
    assert!(guard.unlock().await.is_err_and(|error| error.is_store()));
    server.start_again();
    eventually("it is back", SOON, async || locks.connect().await.is_ok()).await;
    assert!(!guard.unlock().await.expect("asks"), "the server has lost it");
    assert!(!a.is_held());
    drop(locked(&a).await);
}

/// S1.17: an unlock whose answer is lost has run all the same. Called again, it returns false, and does not touch another holder's lock.
#[tokio::test]
async fn repeating_an_unlock_with_a_lost_answer_does_no_harm() {
    let server = RedisServer::start();
    let (proxy, locks) = proxied(&server).await;
    let other = node(&server).await;
    let mut guard = locked(&mutex(&locks)).await;
    let next = waiter(&other);
    queued(&server, 1).await;
    proxy.set(Mode::NoReplies);
    assert!(guard.unlock().await.is_err_and(|error| error.is_store()));
    let (mut next, _) = granted(next).await;
    proxy.set(Mode::Pass);
    eventually("it is back", SOON, async || locks.connect().await.is_ok()).await;
    assert!(!guard.unlock().await.expect("asks"));
    assert!(next.is_owned().await.expect("asks"));
    assert!(next.unlock().await.expect("asks"));
}

/// A holder that renews survives a cut connection. If the server hangs for longer than the TTL, the holder knows that its lock may be lost
/// before another client can acquire it.
#[tokio::test]
async fn a_renewed_holder_outlives_a_cut_and_knows_of_a_pause() {
    let server = RedisServer::start();
    let (proxy, locks) = proxied(&server).await;
    let a = with(&locks, |builder| builder.ttl(ms(3_000)).auto_renew(true));
    let guard = locked(&a).await;
    for _ in 0..4 {
        proxy.set(Mode::Reset);
        proxy.set(Mode::Pass);
        eventually("it is back", SOON, async || locks.connect().await.is_ok()).await;
        tokio::time::sleep(ms(300)).await;
    }
    assert!(guard.remaining().is_some_and(|left| !left.is_zero()));
    assert!(guard.is_owned().await.expect("asks"));
    proxy.set(Mode::BlackHole);
    tokio::time::timeout(ms(3_000) + A_MOMENT, guard.lost()).await.expect("it knows");
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
}

/// Other programs can publish to a node's channel. A node that receives a grant for which no caller waits releases it, but only if the
/// token is its own.
#[tokio::test]
async fn a_forged_grant_frees_no_other_nodes_mutex() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    eventually_eq("both hear", SOON, 2, async || server.pubsub_clients()).await;
    let held = locked(&mutex(&one)).await;
    let token: String = server.run(&["GET", "sg1:m:{default:m}"]);
    let own = format!("sg1:i:{}", &token[..32]);
    let mut channels: Vec<String> = server.run(&["PUBSUB", "CHANNELS", "sg1:i:*"]);
    channels.retain(|channel| *channel != own);
    let said = format!("m{token}{:016}sg1:m:{{default:m}}", held.fence());
    assert_eq!(server.run::<usize>(&["PUBLISH", &channels[0], &said]), 1);
    // Messages arrive in order, and so do commands: the grant of `n` follows the forged message, and the unlock of `n`
    // follows every command that the message caused.
    let [first, second] = [&one, &other].map(|locks| locks.mutex("n").build().expect("valid"));
    let mut before = locked(&first).await;
    let next = tokio::spawn(async move { second.lock().await });
    queued_for(&server, "sg1:mq:{default:n}", 1).await;
    assert!(before.unlock().await.expect("asks"));
    let (mut next, _) = granted(next).await;
    assert!(next.unlock().await.expect("asks"));
    assert!(held.is_owned().await.expect("asks"));
}
