//! Names of mutexes: which names exclude each other, and which keys they use.

use stampede_guard::lock::{Scope, Waiting};

use super::*;
use crate::support::monitor::Monitor;

fn named(locks: &Locks, name: impl Into<Scope>) -> Mutex {
    locks.mutex(name).build().expect("valid")
}

async fn is_free(mutex: &Mutex) -> bool {
    mutex.try_lock().await.expect("asks").is_some()
}

/// S0.2: a scope excludes the same scope in any process, and no other one.
#[tokio::test]
async fn a_scope_excludes_itself_and_its_local_scopes_are_separate() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let scope = Scope::new("server_access");
    let held = [named(&one, scope.local("a")), named(&one, scope.local("b")), named(&one, scope.clone())];
    let mut guards = Vec::new();
    for mutex in &held {
        guards.push(mutex.try_lock().await.expect("asks").expect("another local is another lock"));
    }
    for name in [scope.local("a"), scope.local("b"), scope.clone(), scope.local("global")] {
        assert!(!is_free(&named(&other, name.clone())).await, "{name} is held");
    }
    assert!(is_free(&named(&other, "server_access")).await, "exactly this name is none of them");
    assert_eq!(named(&one, scope.local("a")).key(), "sg1:m:{default:server_access:a}");
}

/// S0.2: it would be a flaw to join parts by a dot, which gives two resources one lock.
#[tokio::test]
async fn parts_are_joined_unambiguously() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let names: [Scope; 8] = [
        Scope::new("a.b").local("c"),
        Scope::new("a").local("b.c"),
        Scope::new("a:b").local("c"),
        Scope::new("a").local("b:c"),
        Scope::new("a").local("b").local("c"),
        Scope::new("a%3Ab").local("c"),
        "a:b:c".into(),
        ("", "a", "b", "c").into(),
    ];
    let mut guards = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let mutex = named(&locks, name.clone());
        // Plain joining would make the sixth name equal to the fifth.
        let same = names[..at].iter().any(|before| before == name);
        match mutex.try_lock().await.expect("asks") {
            Some(guard) => guards.push(guard),
            None => assert!(same, "{name} is excluded by another name"),
        }
    }
    assert!(guards.len() >= 7, "only {} of them are distinct", guards.len());
}

/// S1.1
#[test]
fn an_empty_name_is_refused() {
    let locks = Locks::in_memory();
    for empty in [Mutex::new(&locks, ""), Mutex::new(&locks, Scope::new(""))] {
        assert!(matches!(empty, Err(LockError::InvalidKey)));
    }
}

/// A grant contains the name of its key, and a message has a maximum length. The longest possible name, namespace and prefix make a key
/// that fits into it.
#[tokio::test]
async fn the_longest_key_is_handed_over() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~ppp*"]);
    let client = || redis::Client::open(server.minimal_user()).expect("an address");
    let builder = |namespace| {
        let builder = Locks::builder(client()).namespace(namespace).command_timeout(SOON / 2);
        builder.build().expect("valid")
    };
    let prefix = "p".repeat(64);
    for (namespace, name, prefix) in [
        ("n".repeat(64), "k".repeat(135), None),
        ("n".to_owned(), "k".repeat(198), None),
        ("n".to_owned(), "k".repeat(5_000), None),
        ("n".to_owned(), "k".repeat(199), Some(&prefix)),
        ("n".to_owned(), "%".repeat(5_000), Some(&prefix)),
    ] {
        let (one, other) = (builder(namespace.clone()), builder(namespace.clone()));
        connect(&one).await;
        connect(&other).await;
        let handle = |locks: &Locks| {
            let builder = locks.mutex(name.as_str());
            prefix.map_or_else(|| builder.clone(), |prefix| builder.clone().prefix(prefix)).build()
        };
        let (a, b) = (handle(&one).expect("valid"), handle(&other).expect("valid"));
        assert!(a.key().len() <= 64 + 200, "{}", a.key());
        let mut guard = locked(&a).await;
        let next = tokio::spawn(async move { b.lock().await });
        eventually("it waits", SOON, async || server.keys().len() == 3).await;
        assert!(guard.unlock().await.expect("asks"));
        let (mut next, took) = granted(next).await;
        assert!(took < AT_ONCE && next.attempts() == 1, "it was notified after {took:?}");
        assert!(next.unlock().await.expect("asks"));
        server.flush_all();
    }
}

/// S1.26: a handle reports the options and the key; the server has the token of the present holder under that key.
#[tokio::test]
async fn a_handle_reports_its_configuration() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = with(&locks, |builder| builder.ttl(ms(1_500)).retries(3).retry_interval(ms(20)).jitter(0.0));
    let options = a.options();
    assert_eq!((options.ttl, options.retries, options.retry_interval), (Some(ms(1_500)), Some(3), ms(20)));
    assert_eq!(options.waiting, Waiting::Poll { interval: ms(20), jitter: 0.0 });
    assert_eq!(a.key(), "sg1:m:{default:m}");
    let guard = locked(&a).await;
    assert_eq!(server.run::<String>(&["GET", a.key()]), guard.token());
}

/// S0.16: it would be a flaw to use a channel that contains `@0`. A waiter in database 5 receives its grant, and the mutex of the same name
/// in database 6 is a separate one.
#[tokio::test]
async fn databases_are_separate_and_each_hears_its_own_grants() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+select"]);
    let [five, also_five, six] = [5, 5, 6].map(|database| format!("{}{database}", server.minimal_user()));
    let [five, also_five, six] = [connected(&five).await, connected(&also_five).await, connected(&six).await];
    warm(&five).await;
    let mut holder = locked(&mutex(&five)).await;
    let mut elsewhere = mutex(&six).try_lock().await.expect("asks").expect("another database");
    assert!(elsewhere.unlock().await.expect("asks"));
    let next = waiter(&also_five);
    let queue = "return redis.call('SELECT', 5) and redis.call('LLEN', 'sg1:mq:{default:m}')";
    eventually_eq("it waits", SOON, 1, async || server.run::<usize>(&["EVAL", queue, "0"])).await;

    let monitor = Monitor::start(&server);
    assert!(holder.unlock().await.expect("asks"));
    let (_guard, took) = granted(next).await;
    assert!(took < AT_ONCE, "{took:?}");
    let sent = monitor.finish().without(["ping", "time"]);
    assert_eq!(sent.total, 1, "it was handed over by the unlock: {sent:#?}");
}

/// A server that is a whole cluster, and refuses scripts with keys in two slots.
async fn cluster_of_one() -> RedisServer {
    let server = RedisServer::with_args(["--cluster-enabled", "yes"]);
    // The slots are named one by one, because Redis 6.2 has no ADDSLOTSRANGE.
    let slots: Vec<_> = (0..16_384).map(|slot| slot.to_string()).collect();
    let words = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
    server.run::<()>(&words.collect::<Vec<_>>());
    eventually("the cluster is up", SOON, async || {
        server.run::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    })
    .await;
    server
}

/// S0.21: it would be a flaw to send a TTL as a key. Every operation of a mutex runs in a cluster, where scripts over two slots are
/// refused, with a key of this crate and with `<prefix><name>`.
#[tokio::test]
async fn all_keys_of_a_mutex_are_in_one_slot() {
    let server = &cluster_of_one().await;
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~lock:*"]);
    let locks = node(server).await;
    for name in ["m", "a{b}c", "{", "}{", "x y\0z"] {
        for prefix in [None, Some("lock:")] {
            let build = || {
                let builder = locks.mutex(Scope::new("s").local(name)).ttl(ms(5_000));
                prefix.map_or_else(|| builder.clone(), |prefix| builder.clone().prefix(prefix)).build()
            };
            let (a, b) = (build().expect("valid"), build().expect("valid"));
            let mut guard = locked(&a).await;
            let next = tokio::spawn({
                let b = b.clone();
                async move { b.lock().await }
            });
            eventually("all its keys are there", SOON, async || server.keys().len() == 3).await;
            let slots: Vec<usize> =
                server.keys().iter().map(|key| server.run(&["CLUSTER", "KEYSLOT", key])).collect();
            assert!(slots.windows(2).all(|two| two[0] == two[1]), "{:?}: {slots:?}", server.keys());
            assert!(guard.extend(ms(4_000)).await.expect("asks") && guard.is_owned().await.expect("asks"));
            assert!(b.is_locked().await.expect("asks") && b.remaining().await.expect("asks").is_some());
            assert!(guard.unlock().await.expect("asks"));
            let (mut next, _) = granted(next).await;
            assert!(next.fence() > guard.fence());
            assert!(a.force_unlock().await.expect("asks") && !next.unlock().await.expect("asks"));
            server.flush_all();
        }
    }
}

/// A bare key may look like the tag of one of this crate's keys. They are nevertheless two locks, and a waiter for one of them is not
/// granted the other.
#[tokio::test]
async fn a_bare_key_shares_nothing_with_a_namespace_of_its_name() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~default:*"]);
    let locks = node(&server).await;
    let own = mutex(&locks);
    let bare = || with(&locks, |builder| builder.prefix("default:").acquire_timeout(ms(2_000)));
    assert_eq!(bare().key(), "default:m");
    let mut guards = [locked(&own).await, locked(&bare()).await];
    let waiting = bare();
    let waiting = tokio::spawn(async move { waiting.lock().await.map(drop) });
    queued_for(&server, "sg1:pq:{default:m}", 1).await;
    assert!(guards[0].unlock().await.expect("asks"));
    let waited = waiting.await.expect("joined");
    assert!(matches!(waited, Err(LockError::AcquireTimeout { .. })), "{waited:?}");
    assert!(guards[1].is_owned().await.expect("asks"));
}
