//! Keyspace notifications of a real server, for a user with the right to configure them.

use super::super::on_redis::world_of;
use super::super::support::redis_server::RedisServer;
use super::*;
use crate::store::KeyspaceAnswer;
use crate::store::redis::RedisStore;

const SETTING: &str = "notify-keyspace-events";

/// A node whose connection for messages is already open, so that its opening does not notify the waiters (`missed`).
async fn connected(url: &str) -> Store {
    let node =
        Store::Redis(Arc::new(RedisStore::new(redis::Client::open(url).expect("an address"), ms(1_000))));
    node.connect(WITHIN).await.expect("connects");
    node
}

fn flags(server: &RedisServer) -> String {
    let (_, flags): (String, String) = server.run(&["CONFIG", "GET", SETTING]);
    flags
}

/// How many channels for keyspace events have subscribers.
fn channels(server: &RedisServer) -> usize {
    server.run::<Vec<String>>(&["PUBSUB", "CHANNELS", "__keyspace@*"]).len()
}

impl Asker {
    async fn announced(&self) -> KeyspaceAnswer {
        self.node.announce_key_changes(&self.name, WITHIN).await.expect("an answer")
    }

    /// An asker that waits for a mutex with a foreign holder, and that was promised announcements of its end.
    async fn behind_a_foreign_holder(server: &RedisServer, node: &Store, name: &LockName) -> Self {
        server.run::<()>(&["SET", &name.key, "foreign", "PX", "600000"]);
        let asker = Self::on(node, name);
        assert_eq!(asker.announced().await, KeyspaceAnswer::Yes);
        asker.must_wait().await;
        asker
    }
}

/// S0.11, S0.13, C.8: waiters are notified after each command by which a foreign client may free the mutex.
#[tokio::test]
async fn waiters_are_notified_of_a_mutex_that_a_foreign_client_frees() {
    let server = RedisServer::start();
    // The documented rights for announcements, in addition to the minimal ones.
    let rights = ["~lock:*", "+config|get", "+config|set", "&__keyspace@*"];
    server.run::<()>(&[&["ACL", "SETUSER", "minimal"][..], &rights].concat());
    let node = connected(&server.minimal_user()).await;
    let name = LockName::prefixed("lock:k");
    for free in [
        &["DEL", "lock:k"][..],
        &["UNLINK", "lock:k"],
        &["RENAME", "lock:k", "other"],
        &["PEXPIRE", "lock:k", "20"],
        &["PEXPIREAT", "lock:k", "1"],
        &["MOVE", "lock:k", "3"],
    ] {
        let asker = Asker::behind_a_foreign_holder(&server, &node, &name).await;
        server.run::<()>(free);
        while !asker.notified().await.missed {}
        until(async || matches!(asker.take(asker.ask()).await, Taken::Granted { .. })).await;
        assert!(asker.free().await, "{free:?}");
    }
}

/// S0.23: neither a step of a holder on its own mutex nor a change of another key wakes a waiter.
#[tokio::test]
async fn an_event_that_frees_nothing_wakes_no_waiter() {
    let server = RedisServer::with_args(["--notify-keyspace-events", "KEA"]);
    let node = connected(&server.url()).await;
    let asker = Asker::behind_a_foreign_holder(&server, &node, &LockName::prefixed("lock:k")).await;
    for command in [
        &["SET", "lock:k", "foreign", "PX", "600000"][..],
        &["PEXPIRE", "lock:k", "500000"],
        &["PERSIST", "lock:k"],
        &["SET", "lock:k", "another"],
        &["SET", "lock:kk", "another"],
        &["DEL", "lock:kk"],
    ] {
        server.run::<()>(command);
    }
    // The message about this mutex arrives on the same connection, so after the messages of all commands above.
    let other = Asker::behind_a_foreign_holder(&server, &node, &LockName::prefixed("lock:other")).await;
    server.run::<()>(&["DEL", "lock:other"]);
    while !other.notified().await.missed {}
    assert!(timeout(Duration::ZERO, asker.wait.notified()).await.is_err());
    assert_eq!(flags(&server), "AKE", "nothing was missing");
}

/// S0.15: flags that other clients need stay set.
#[tokio::test]
async fn existing_flags_are_preserved() {
    let server = RedisServer::with_args(["--notify-keyspace-events", "El"]);
    let asker = Asker::on(&connected(&server.url()).await, &mutex("k"));
    assert_eq!(asker.announced().await, KeyspaceAnswer::Yes);
    let flags = flags(&server);
    assert!("ElKgxe".chars().all(|flag| flags.contains(flag)), "{flags}");
}

/// S0.15: the documented minimal user gets no announcements, and receives the reason; the same holds for a user without the right to
/// SUBSCRIBE.
#[tokio::test]
async fn where_announcements_are_refused_the_answer_says_so() {
    let world = World::redis();
    let server = world_of(&world);
    let asker = Asker::separate(&world, &mutex("k")).await;
    let KeyspaceAnswer::No { why } = asker.announced().await else { panic!("the minimal user may not") };
    assert!(why.contains("CONFIG"), "{why}");
    assert_eq!(flags(server), "");
    assert!(asker.node.grants_arrive(), "nothing was promised");
    let (holder, _) = Asker::holding(&world, &mutex("k")).await;
    asker.must_wait().await;
    assert!(holder.free().await);
    asker.granted().await;

    let user = &["ACL", "SETUSER", "unsubscribed", "on", ">pw", "~*", "resetchannels", "&sg1:*", "+@all"];
    server.run::<()>(user);
    let url = format!("redis://unsubscribed:pw@127.0.0.1:{}/", server.port());
    let asker = Asker::on(&connected(&url).await, &mutex("k"));
    let KeyspaceAnswer::No { why } = asker.announced().await else { panic!("it may not listen") };
    assert!(why.contains("SUBSCRIBE"), "{why}");
}

/// S0.16: each database has channels of its own.
#[tokio::test]
async fn databases_are_distinguished() {
    let server = RedisServer::start();
    let node = connected(&format!("{}5", server.url())).await;
    let name = LockName::prefixed("lock:k");
    let asker = Asker::on(&node, &name);
    let mut conn = server.conn();
    let mut on = |db: &str, command: &[&str]| {
        redis::cmd("SELECT").arg(db).exec(&mut conn).expect("SELECT");
        redis::cmd(command[0]).arg(&command[1..]).exec(&mut conn).expect("a command");
    };
    on("5", &["SET", "lock:k", "foreign"]);
    on("6", &["SET", "lock:k", "foreign"]);
    assert_eq!(asker.announced().await, KeyspaceAnswer::Yes);
    asker.must_wait().await;
    on("6", &["DEL", "lock:k"]);
    assert!(asker.has_no_hints().await);
    on("5", &["DEL", "lock:k"]);
    while !asker.notified().await.missed {}
    asker.must_take().await;
}

/// S0.17, S0.18: however many waiters there are, one connection subscribes, and one of the waiters takes again after an event.
#[tokio::test]
async fn many_waiters_are_one_connection_and_one_command() {
    let server = RedisServer::start();
    let node = connected(&server.url()).await;
    let before = server.pubsub_clients();
    let name = LockName::prefixed("lock:k");
    let askers: Vec<_> = (0..100).map(|_| Asker::on(&node, &name)).collect();
    server.run::<()>(&["SET", "lock:k", "foreign"]);
    let answers = join_all(askers.iter().map(Asker::announced)).await;
    assert!(answers.iter().all(|answer| *answer == KeyspaceAnswer::Yes));
    for asker in &askers {
        asker.must_wait().await;
    }
    assert_eq!((server.pubsub_clients() - before, channels(&server)), (1, 1));
    server.run::<()>(&["DEL", "lock:k"]);
    while !askers[0].notified().await.missed {}
    askers[0].must_take().await;
    for asker in &askers[1..] {
        assert!(timeout(Duration::ZERO, asker.wait.notified()).await.is_err(), "one command for all");
    }
}

/// A process without waiters has no subscription, and keeps no connection for them.
#[tokio::test]
async fn nothing_is_left_without_waiters() {
    let server = RedisServer::start();
    let node = connected(&server.url()).await;
    let before = server.client_count();
    let (stays, goes) = (Asker::on(&node, &mutex("stays")), Asker::on(&node, &mutex("goes")));
    assert_eq!((stays.announced().await, goes.announced().await), (KeyspaceAnswer::Yes, KeyspaceAnswer::Yes));
    assert_eq!(channels(&server), 2);
    goes.wait.hold();
    until(async || channels(&server) == 1).await;
    drop(stays);
    let started = Instant::now();
    while server.client_count() > before {
        assert!(started.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(ms(50)).await;
    }
    let again = Asker::on(&node, &mutex("again"));
    assert_eq!(again.announced().await, KeyspaceAnswer::Yes);
    assert_eq!(channels(&server), 1);
}

/// S0.14: an event may be lost while the connection is down, so the waiter takes again after the loss.
#[tokio::test]
async fn messages_lost_with_a_connection_are_replaced_by_taking_again() {
    let server = RedisServer::start();
    let node = connected(&server.url()).await;
    let name = LockName::prefixed("lock:k");
    let asker = Asker::behind_a_foreign_holder(&server, &node, &name).await;
    assert!(server.kill_pubsub() >= 1);
    server.run::<()>(&["DEL", "lock:k"]);
    until(async || {
        while !asker.notified().await.missed {}
        matches!(asker.take(asker.ask()).await, Taken::Granted { .. })
    })
    .await;
    assert!(asker.free().await);
    drop(asker);

    // A restarted server has lost the setting that makes it announce changes of keys, so it is set again.
    let asker = Asker::on(&node, &name);
    assert_eq!(asker.announced().await, KeyspaceAnswer::Yes);
    server.restart();
    until(async || {
        let locks = &node;
        locks.look_at_mutex(&name, WITHIN).await.is_ok() && locks.grants_arrive() && channels(&server) == 1
    })
    .await;
    assert_eq!(asker.announced().await, KeyspaceAnswer::Yes);
    server.run::<()>(&["SET", "lock:k", "foreign"]);
    asker.must_wait().await;
    while timeout(Duration::ZERO, asker.wait.notified()).await.is_ok() {}
    until(async || flags(&server).contains('K') && channels(&server) == 1).await;
    server.run::<()>(&["DEL", "lock:k"]);
    while !asker.notified().await.missed {}
    asker.must_take().await;
}

/// While announcements that were promised may be missed, waiters take again earlier, as without announcements.
#[tokio::test]
async fn announcements_that_may_be_missed_are_known() {
    let server = RedisServer::start();
    let node = connected(&server.url()).await;
    let asker = Asker::on(&node, &mutex("k"));
    assert_eq!(asker.announced().await, KeyspaceAnswer::Yes);
    assert!(node.grants_arrive());
    server.run::<()>(&["ACL", "SETUSER", "default", "-config"]);
    server.kill_pubsub();
    // The node receives messages again at once, but no announcements: the right to configure them is gone.
    while !asker.notified().await.missed {}
    until(async || matches!(asker.announced().await, KeyspaceAnswer::No { .. })).await;
    assert!(!node.grants_arrive());
    drop(asker);
    until(async || node.grants_arrive()).await;
    node.close();
    let late = Asker::on(&node, &mutex("k"));
    assert!(node.announce_key_changes(&late.name, WITHIN).await.is_err());
}
