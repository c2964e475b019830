//! The semaphore's keys on the server: how they are created, their names, their layout and their times to live.

use std::io;
use std::sync::{Arc, Mutex};

use futures_util::future::join_all;

use super::*;
use crate::support::monitor::Monitor;

/// S4.21, S4.22: it would be a flaw to use a list, which loses its TTL when it is emptied. Three nodes take random steps, and after each
/// step every key has a TTL.
#[tokio::test]
async fn every_key_has_a_time_to_live_after_every_step() {
    let server = RedisServer::start();
    let nodes: [Locks; 3] = nodes(&server).await;
    let handles = nodes
        .each_ref()
        .map(|locks| with(locks, 2, |builder| builder.lease(ms(400)).idle_ttl(Duration::from_secs(2))));
    let (mut held, mut waiters) = (Vec::new(), Vec::new());
    for step in 0..300 {
        let semaphore = &handles[step % 3];
        match fastrand::u8(..10) {
            0..3 => held.extend(semaphore.acquire(Wait::Now).await.expect("asks")),
            3..6 if !held.is_empty() => {
                let mut permit: Permit = held.swap_remove(fastrand::usize(..held.len()));
                permit.release().await.expect("asks");
            }
            6 => waiters.push(waiter(semaphore)),
            7 if !waiters.is_empty() => waiters.swap_remove(fastrand::usize(..waiters.len())).abort(),
            8 => drop(semaphore.release_stale().await.expect("asks")),
            _ => drop(semaphore.ensure_created().await.expect("asks")),
        }
        if held.len() > 3 {
            held.clear();
        }
        assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "step {step}");
    }
    waiters.iter().for_each(JoinHandle::abort);
    held.clear();
    eventually_eq("all keys expire when unused", SOON, Vec::<String>::new(), async || server.keys()).await;
}

/// S4.31: a semaphore has three keys with one hash tag, prefixed by this crate and its namespace. The same name in
/// another namespace is another semaphore, and a mutex of that name is separate too.
#[tokio::test]
async fn no_key_is_outside_the_namespace() {
    let server = RedisServer::start();
    let handles = ["shop", "stock"].map(|namespace| {
        let client = redis::Client::open(server.minimal_user()).expect("an address");
        let locks = Locks::builder(client).namespace(namespace).build().expect("valid");
        (semaphore(&locks, 1), locks)
    });
    let (shop, stock) = (&handles[0], &handles[1]);
    let _held = free(&shop.0).await;
    let next = waiter(&shop.0);
    queued(&shop.0, 1).await;
    let names = |namespace: &str| ["sh", "sm", "sq"].map(|kind| format!("sg1:{kind}:{{{namespace}:s}}"));
    assert_eq!(server.keys(), names("shop"));
    let _other = free(&stock.0).await;
    let _mutex = stock.1.mutex("s").build().expect("valid").try_lock().await.expect("asks").expect("free");
    assert!(server.keys().iter().all(|key| key.ends_with(":{shop:s}") || key.ends_with(":{stock:s}")));
    assert!(!next.is_finished());
    next.abort();
}

/// S4.30: there is data of a later version, or of another program. Every call fails with an error that says so, however long it may wait,
/// and nothing is overwritten.
#[tokio::test]
async fn an_unknown_layout_is_an_error_and_is_left_alone() {
    let server = RedisServer::start();
    let semaphore = semaphore(&node(&server).await, 2);
    let put: [&[&str]; 4] = [
        &["SET", "sg1:sm:{default:s}", "2 5 0 60000 and more"],
        &["HSET", "sg1:sm:{default:s}", "version", "0"],
        &["RPUSH", "sg1:sh:{default:s}", "theirs"],
        &["SADD", "sg1:sq:{default:s}", "theirs"],
    ];
    for command in put {
        server.run::<redis::Value>(command);
        server.run::<()>(&["PEXPIRE", command[1], "60000"]);
        let before: Vec<u8> = server.run(&["DUMP", command[1]]);
        for wait in [Wait::Now, Wait::For(ms(100)), Wait::Forever] {
            let acquired = tokio::time::timeout(SOON, semaphore.acquire(wait)).await.expect("no hang");
            let error = acquired.expect_err("it is no semaphore of ours");
            assert!(error.is_store(), "{command:?}: {error:?}");
        }
        assert!(semaphore.ensure_created().await.is_err() && semaphore.add_permits(1).await.is_err());
        assert!(semaphore.release_stale().await.is_err());
        assert_eq!(server.keys(), [command[1]], "nothing was written beside it");
        assert_eq!(server.run::<Vec<u8>>(&["DUMP", command[1]]), before);
        server.flush_all();
    }
    drop(free(&semaphore).await);
}

/// Everything that is logged on the test's own thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// S4.33: the first process sets the number of permits. With another number, `ensure_created` fails, `acquire` logs
/// one warning, and the stored number stays.
#[tokio::test]
async fn another_number_of_permits_is_reported_and_changes_nothing() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _logged = tracing::subscriber::set_default(subscriber);
    let stage = Stage::on_redis().await;
    let (five, three) = (semaphore(&stage.one, 5), semaphore(&stage.other, 3));
    assert!(five.ensure_created().await.expect("asks"));
    let mismatch = three.ensure_created().await;
    assert!(matches!(mismatch, Err(LockError::CapacityMismatch { expected: 3, actual: 5 })), "{mismatch:?}");
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(free(&three).await);
    }
    assert!(none_is_free(&three).await && none_is_free(&five).await);
    assert_eq!((three.capacity().await.expect("asks"), available(&three).await), (5, 0));
    let log = String::from_utf8(log.0.lock().expect("no panic").clone()).expect("text");
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("another number of permits")).collect();
    assert_eq!(warnings.len(), 1, "once per handle: {log}");
    assert!(
        warnings[0].contains("WARN")
            && warnings[0].contains("expected=3")
            && warnings[0].contains("actual=5")
    );
    // Permits that are added later do not contradict the number.
    drop(held);
    five.add_permits(1).await.expect("asks");
    assert!(!five.ensure_created().await.expect("5 is what it was made with"));
}

/// S4.33 for two processes that name different numbers.
#[tokio::test]
async fn processes_that_disagree_on_the_number_get_an_error() {
    let server = RedisServer::start();
    let semaphore = semaphore(&node(&server).await, 5);
    let fleet = processes(&server, 2).await;
    let (five, three) = (fleet.member(0), fleet.member(1));
    five.send("ensure s 5");
    assert_eq!(five.wait_event("ensured").await["Ok"], true);
    three.send("ensure s 3");
    let answer = three.wait_event("ensured").await;
    assert!(answer["Err"].as_str().is_some_and(|text| text.contains('5') && text.contains('3')), "{answer}");
    for taken_already in 0..5 {
        three.send(&format!("take {taken_already} s 3 60000 now"));
        taken(three, &taken_already.to_string()).await.token.expect("there are five");
    }
    three.send("take more s 3 60000 now");
    assert!(taken(three, "more").await.token.is_none());
    assert_eq!((available(&semaphore).await, semaphore.capacity().await.expect("asks")), (0, 5));
}

/// S4.34: it would be a flaw if two clients both believed to be the first. Five nodes make fifty acquisitions at once, in each of twenty
/// rounds.
#[tokio::test]
async fn fifty_first_acquisitions_make_one_semaphore() {
    let server = RedisServer::start();
    let nodes: [Locks; 5] = nodes(&server).await;
    for round in 0..20 {
        let handles =
            nodes.each_ref().map(|locks| locks.semaphore(("round", round), 7).build().expect("valid"));
        let all = join_all((0..50).map(|caller| handles[caller % 5].acquire(Wait::Now))).await;
        let held: Vec<_> = all.into_iter().filter_map(|acquired| acquired.expect("asks")).collect();
        assert_eq!(held.len(), 7);
        assert_eq!(handles[0].capacity().await.expect("asks"), 7);
        assert_eq!(handles[1].holders().await.expect("asks").len(), 7);
    }
}

/// S3.12 for permits: a server that has lost the scripts receives them again, and each step is one command.
#[tokio::test]
async fn each_step_is_one_script_and_survives_the_loss_of_all_scripts() {
    let stage = Stage::on_redis().await;
    let server = stage.server.as_ref().expect("on Redis");
    let [a, _] = stage.handles(2);
    let steps = async || {
        let mut permit = free(&a).await;
        assert!(permit.refresh().await.expect("asks") && permit.is_held().await.expect("asks"));
        assert_eq!(a.add_permits(1).await.expect("asks") - available(&a).await, 1);
        assert_eq!(a.release_stale().await.expect("asks"), 0);
        assert!(permit.release().await.expect("asks").was_held);
        assert!(a.delete().await.expect("asks"));
    };
    steps().await;
    server.script_flush();
    steps().await;
    let monitor = Monitor::start(server);
    steps().await;
    let commands = monitor.finish().without(["ping", "time"]);
    assert_eq!((commands.total, commands.of("evalsha")), (8, 8), "{commands:#?}");
}
