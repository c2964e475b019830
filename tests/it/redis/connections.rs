//! The ways to connect to one server: Unix sockets, databases, both protocols, and users with passwords.

use stampede_guard::health::Breaker;
use stampede_guard::lock::{Locks, Mutex};
use stampede_guard::{LoadError, OnStoreDown};

use super::*;
use crate::support::probe::assert_nothing_left;
use crate::support::redis_server::{MINIMAL_ACL, field};
use crate::support::scratch::Scratch;
use crate::support::warnings::Warnings;

/// The lease is so long that a test fails if a waiter is not notified.
const LEASE: Duration = Duration::from_secs(60);

async fn connected(url: &str) -> StampedeGuard {
    let guard = unconnected(url, lease_of(LEASE));
    connects(&guard).await;
    guard
}

async fn pair(url: &str) -> [StampedeGuard; 2] {
    [connected(url).await, connected(url).await]
}

/// All other tests connect with several attempts, because a stall of a second fails an attempt. Here the bounds are long enough for one.
#[tokio::test]
async fn one_try_connects() {
    let server = RedisServer::start();
    let guard = unconnected(&server.minimal_user(), lease_of(LEASE));
    guard.connect().await.expect("within its budget of four seconds");
    let client = redis::Client::open(server.minimal_user()).expect("an address");
    let locks = Locks::builder(client).command_timeout(SOON / 2).build().expect("valid");
    locks.connect().await.expect("within five seconds");
}

#[tokio::test]
async fn guards_share_a_load_through_a_unix_socket() {
    let files = Scratch::new();
    let server = RedisServer::with_args(["--unixsocket".to_owned(), files.text("redis.sock")]);
    for scheme in ["unix", "redis+unix"] {
        let url = format!("{scheme}://{}?user=minimal&pass=pw", files.text("redis.sock"));
        let guards = pair(&url).await;
        share_a_load(&server, &guards).await;
        let list: String = server.run(&["CLIENT", "LIST"]);
        let ours: Vec<_> = list.lines().filter(|client| field(client, "user") == Some("minimal")).collect();
        assert!(ours.len() >= 4 && ours.iter().all(|client| client.contains("redis.sock:0")), "{list}");
        server.flush_all();
    }
}

#[tokio::test]
async fn a_missing_unix_socket_is_reported_as_such() {
    let files = Scratch::new();
    let url = format!("unix://{}", files.text("redis.sock"));
    loads_go_on_without(&unconnected(&url, Policy::default()), "see the server's setting `unixsocket`").await;
    // If the socket file has no listener, the cause is another one, and the advice does not apply.
    drop(std::os::unix::net::UnixListener::bind(files.path("redis.sock")).unwrap());
    loads_go_on_without(&unconnected(&url, Policy::default()), "refused").await;
}

/// `connect` returns the same kind of error as every other call.
#[tokio::test]
async fn connecting_after_a_shutdown_is_a_closed_error() {
    let guard = local(&RedisServer::start(), Policy::default()).await;
    guard.shutdown(Duration::ZERO).await;
    assert_eq!(
        guard.connect().await.expect_err("it was shut down").kind(),
        stampede_guard::ErrorKind::Closed
    );
}

/// Each key belongs to one database. Channels span all databases, but each node has its own channel, and queues only in its own database.
#[tokio::test]
async fn guards_in_two_databases_do_not_meet() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+select"]);
    let in_three = format!("{}3", server.minimal_user());
    let (zero, three) = (pair(&server.minimal_user()).await, pair(&in_three).await);
    let gate = Gate::closed();
    let (loads_of_zero, loads_of_three) = (Counter::default(), Counter::default());
    let queued_in = async |db: &str| {
        eventually_eq("a node waits", SOON, 1, async || {
            let mut conn = server.conn();
            redis::cmd("SELECT").arg(db).exec(&mut conn).expect("SELECT");
            redis::cmd("LLEN").arg("sg1:q:{default:k}").query::<usize>(&mut conn).expect("LLEN")
        })
        .await;
    };
    let leads_zero = held_call(&zero[0], 10, &gate, &loads_of_zero);
    let gate_of_three = Gate::closed();
    let leads_three = held_call(&three[0], 30, &gate_of_three, &loads_of_three);
    loads_of_zero.reach(1).await;
    loads_of_three.reach(1).await;
    let waits_zero = held_call(&zero[1], 11, &gate, &loads_of_zero);
    let waits_three = held_call(&three[1], 31, &gate_of_three, &loads_of_three);
    queued_in("0").await;
    queued_in("3").await;
    // The end of the load in database 0 wakes no waiter in database 3.
    gate.open();
    assert_eq!((leads_zero.await.unwrap(), waits_zero.await.unwrap()), (10, 10));
    queued_in("3").await;
    assert!(!leads_three.is_finished() && !waits_three.is_finished());
    // An invalidation in database 0 wakes no waiter in database 3 either.
    zero[0].invalidate("k").await.expect("confirmed");
    assert_eq!(zero[1].get::<u32>("k").await.expect("store"), None);
    gate_of_three.open();
    assert_eq!((leads_three.await.unwrap(), waits_three.await.unwrap()), (30, 30));
    assert_eq!((loads_of_zero.started(), loads_of_three.started()), (1, 1));
    assert_eq!(three[1].get::<u32>("k").await.expect("store"), Some(30));
    assert_eq!(zero[1].get::<u32>("k").await.expect("store"), None);
    settled(&zero).await;
    assert_nothing_left(&server, SOON).await;
    assert_eq!(server.keys(), Vec::<String>::new(), "database 0 has nothing of database 3's");
}

/// A cache may be filled from another one: only a nested load of the same key on the same server would deadlock, and is refused.
#[tokio::test]
async fn a_load_may_ask_for_its_key_in_another_database_and_on_another_server() {
    let (server, another) = (RedisServer::start(), RedisServer::start());
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+select"]);
    let guard = connected(&server.minimal_user()).await;
    let through = async |key: &'static str, url: &str| {
        let inner = connected(url).await;
        let load = move || async move { inner.get_or_load(key, || async { Ok::<_, String>(1u32) }).await };
        guard.get_or_load(key, load).await.is_ok_and(|value| value == 1)
    };
    assert!(through("a", &format!("{}3", server.minimal_user())).await);
    assert!(through("b", &another.minimal_user()).await);
    assert!(!through("c", &server.minimal_user()).await);
}

/// In two databases, mutexes of one name are different mutexes, and each is handed over to its own waiter.
#[tokio::test]
async fn mutexes_in_two_databases_do_not_meet() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+select"]);
    let in_three = format!("{}3", server.minimal_user());
    let mutex = |guard: &StampedeGuard| Mutex::new(&guard.locks(), "m").expect("valid");
    let (zero, three) = (pair(&server.minimal_user()).await, pair(&in_three).await);
    let mut held = mutex(&zero[0]).lock().await.expect("free");
    let mut other = mutex(&three[0]).lock().await.expect("free, in its own database");
    let waits = tokio::spawn({
        let mutex = mutex(&three[1]);
        async move { mutex.lock().await.map(drop) }
    });
    eventually_eq("one waits", SOON, 1, async || {
        let mut conn = server.conn();
        redis::cmd("SELECT").arg(3).exec(&mut conn).expect("SELECT");
        let queues: Vec<String> = redis::cmd("KEYS").arg("sg1:mq:*").query(&mut conn).expect("KEYS");
        queues.len()
    })
    .await;
    assert!(held.unlock().await.expect("released"));
    assert!(!waits.is_finished());
    assert!(other.unlock().await.expect("released"));
    waits.await.unwrap().expect("handed over");
}

#[tokio::test]
async fn an_inaccessible_database_is_reported_as_such() {
    let server = RedisServer::start();
    // First the right to SELECT is missing, and then the database does not exist.
    loads_go_on_without(&unconnected(&format!("{}3", server.minimal_user()), Policy::default()), "+select")
        .await;
    loads_go_on_without(&unconnected(&format!("{}99", server.url()), Policy::default()), "needs that many")
        .await;
}

/// Scripts reply in RESP3, but the inbox always speaks RESP2.
#[tokio::test]
async fn guards_with_different_protocols_share_a_load() {
    let server = RedisServer::start();
    let (two, three) = (server.minimal_user(), format!("{}?protocol=resp3", server.minimal_user()));
    for (one, other) in [(&two, &two), (&three, &three), (&two, &three), (&three, &two)] {
        share_a_load(&server, &[connected(one).await, connected(other).await]).await;
        server.flush_all();
    }
}

/// Open connections stay. New connections with the old password are refused, with advice. New guards with the new password work.
#[tokio::test]
async fn a_password_is_rotated_while_guards_run() {
    let server = RedisServer::start();
    for query in ["", "?protocol=resp3"] {
        server.run::<()>(&["ACL", "SETUSER", "minimal", "resetpass", ">pw"]);
        server.flush_all();
        let old = pair(&format!("{}{query}", server.minimal_user())).await;
        server.run::<()>(&["ACL", "SETUSER", "minimal", "resetpass", ">secret"]);
        share_a_load(&server, &old).await;

        server.kill_clients();
        loads_go_on_without(&old[0].with_policy(Policy::default()), "put the present ones into the URL")
            .await;
        server.flush_all();
        let new = pair(&format!("{}{query}", server.minimal_user().replace(":pw@", ":secret@"))).await;
        share_a_load(&server, &new).await;
    }
}

#[tokio::test]
async fn an_unknown_user_and_a_missing_password_are_reported_as_such() {
    let server = RedisServer::start();
    // From here on, the harness itself cannot run commands on the server.
    server.run::<()>(&["CONFIG", "SET", "requirepass", "secret"]);
    let to = |user: &str, query: &str| {
        unconnected(&format!("redis://{user}127.0.0.1:{}/{query}", server.port()), Policy::default())
    };
    for query in ["", "?protocol=resp3"] {
        loads_go_on_without(&to("nobody:pw@", query), "put the present ones into the URL").await;
        loads_go_on_without(&to("", query), "redis://user:password@host").await;
    }
}

/// If the right to SUBSCRIBE, or to the channels, is missing, there is one warning, however many times the guard retries.
#[tokio::test]
async fn a_refused_subscription_is_logged_once() {
    let server = RedisServer::start();
    for right in ["-subscribe", "resetchannels"] {
        let warnings = Warnings::default();
        let _listening = warnings.listen();
        server
            .run::<()>(&[&["ACL", "SETUSER", "minimal", "reset"][..], &minimal_rights(), &[right]].concat());
        let guards = pair(&server.minimal_user()).await;
        for key in ["a", "b", "c"] {
            answer(&guards[0], key, 1).await;
            server.kill_clients();
            eventually("connects", SOON, async || guards[0].connect().await.is_ok()).await;
        }
        let warned = warnings.about("no notifications");
        assert_eq!(warned.len(), guards.len(), "{warned:?}");
        assert!(
            warned.iter().all(|warning| warning.contains("rights that docs/redis.md lists")),
            "{warned:?}"
        );
        server.flush_all();
    }
}

/// A changed password first shows as a closed connection, so the first warning of the outage cannot name the password. One later warning
/// does, however many times the guard retries.
#[tokio::test]
async fn each_outage_by_a_changed_password_is_one_warning() {
    let server = RedisServer::start();
    let guard = connected(&server.minimal_user()).await;
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    for outage in 1..=2 {
        server.run::<()>(&["ACL", "SETUSER", "minimal", "resetpass", ">another"]);
        server.kill_clients();
        let reported = || {
            let mut reported = warnings.about("put the present ones into the URL");
            // The inbox logs a separate warning.
            reported.retain(|warning| !warning.contains("no notifications"));
            reported.len()
        };
        eventually_eq("it is logged", SOON, outage, async || reported()).await;
        // The guard retries meanwhile, without another warning.
        tokio::time::sleep(ms(1_500)).await;
        assert_eq!(reported(), outage, "{:?}", warnings.about(""));
        server.run::<()>(&["ACL", "SETUSER", "minimal", "resetpass", ">pw"]);
        connects(&guard).await;
        // A connection that breaks within this time belongs to the same outage.
        tokio::time::sleep(ms(1_500)).await;
    }
}

/// An operator who reads the log later learns how long the outage was, and what it cost: loads without the server, and invalidations that
/// were not confirmed.
#[tokio::test]
async fn the_end_of_an_outage_is_logged_once_with_its_length_and_its_loads() {
    let server = RedisServer::start();
    let guard = connected(&server.url()).await;
    let events = Warnings::up_to(tracing::Level::INFO);
    let _listening = events.listen();
    for outage in 1..=2 {
        server.kill();
        eventually_eq("it is noticed", SOON, Breaker::Open, async || guard.health().breaker).await;
        let began = tokio::time::Instant::now();
        for key in 0..12 {
            answer(&guard, &format!("k{outage}.{key}"), 1).await;
        }
        assert_eq!(guard.stats().fail_open_loads, outage * 12);
        guard.invalidate("k").await.expect_err("the server is dead");
        // The caller leaves earlier than the invalidation would give up.
        tokio::time::timeout(ms(50), guard.invalidate("k")).await.expect_err("it is dropped");
        tokio::time::timeout(ms(50), guard.invalidate_tag("t")).await.expect_err("it is dropped");
        assert_eq!(guard.stats().invalidations_unconfirmed, outage * 3);
        server.start_again();
        let reported = || events.about("redis is back after").len() as u64;
        eventually_eq("it is logged", SOON, outage, async || reported()).await;
        let line = events.about("redis is back after").pop().expect("logged");
        assert!(line.contains(" s; 12 loads went without it"), "{line}");
        let took: f64 = line
            .split("after ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next())
            .expect("a time")
            .parse()
            .expect("a number");
        let most = began.elapsed().as_secs_f64() + 2.0;
        assert!((1.9..most).contains(&took), "{line}");
        assert_eq!(reported(), outage, "{:?}", events.about(""));
        assert!(guard.health().outages >= outage);
        assert_eq!(guard.health().breaker, Breaker::Closed);
    }
}

/// The right to the channels is taken away: the server closes the connection, and only the next connection receives the reason.
#[tokio::test]
async fn a_right_to_subscribe_that_is_taken_away_is_named_in_one_warning() {
    let server = RedisServer::start();
    let guard = connected(&server.minimal_user()).await;
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "resetchannels"]);
    eventually_eq("it is refused", SOON, LinkState::Refused, async || guard.health().inbox).await;
    let reported = || {
        warnings
            .about("no notifications")
            .into_iter()
            .filter(|warning| warning.contains("rights that docs/redis.md"))
    };
    eventually_eq("it is logged", SOON, 1, async || reported().count()).await;
}

fn minimal_rights() -> Vec<&'static str> {
    MINIMAL_ACL.split_whitespace().collect()
}

/// Without the right to run scripts, loads are answered, and the error of any other call names the missing right.
#[tokio::test]
async fn a_missing_right_to_run_scripts_is_reported_and_loads_go_on() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-evalsha", "-eval"]);
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard = unconnected(&server.minimal_user(), lease_of(LEASE));
    opens(&guard).await;
    let added = requests(&guard, "open", 40).await;
    assert!(median(added.clone()) <= NOTHING, "{added:?}");
    assert!(guard.stats().fail_open_loads >= 40);

    let check = |error: &dyn std::error::Error| {
        let why = chain(error);
        assert!(why.contains("rights that docs/redis.md lists") && why.contains("evalsha"), "{why}");
    };
    check(&guard.connect().await.expect_err("refused"));
    check(&guard.invalidate("k").await.expect_err("refused"));
    check(&Mutex::new(&guard.locks(), "m").expect("valid").lock().await.expect_err("refused"));
    let closed = Policy::builder().on_store_down(OnStoreDown::FailClosed).build().expect("valid");
    match guard.with_policy(closed).get_or_load("k", || async { Ok::<_, String>(1) }).await {
        Err(LoadError::Guard(error)) => check(&error),
        other => panic!("{other:?}"),
    }
    assert_eq!(warnings.about("refuses a command").len(), 1);
}
