//! R4, R9 to R12, R20: a server that runs but cannot execute commands: it is busy with a script, loads its dump, has no room for
//! connections, has lost its primary or its replicas, cannot save, or evicts.

use std::future::ready;
use std::thread::JoinHandle;

use redis::{Connection, RedisResult};
use store_down::{still_coalesces, stores_again};

use super::*;
use crate::support::probe::assert_nothing_left;
use crate::support::scratch::Scratch;

const STORED: u32 = 77;
/// How many commands a request sends one after the other, if the server answers each with an error.
const COMMANDS: u32 = 2;

/// Whether the failing server still serves stored values.
#[derive(PartialEq)]
enum Hits {
    Served,
    Loaded,
}

pub(super) fn run(admin: &mut Connection, command: &[&str]) {
    let done = redis::cmd(command[0]).arg(&command[1..]).exec(admin);
    done.unwrap_or_else(|error| panic!("{command:?}: {error}"));
}

/// Waits until the server answers this command with this error code.
pub(super) async fn is_refused(admin: &mut Connection, command: &[&str], code: &str) {
    eventually(format!("{command:?} is answered by {code}"), SOON, || {
        let done = redis::cmd(command[0]).arg(&command[1..]).exec(admin);
        ready(done.is_err_and(|error| error.code() == Some(code)))
    })
    .await;
}

/// Makes the server run an endless script.
pub(super) async fn run_endless_script(
    server: &RedisServer,
    admin: &mut Connection,
) -> JoinHandle<RedisResult<()>> {
    let mut other = server.conn();
    let script =
        std::thread::spawn(move || redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut other));
    is_refused(admin, &["PING"], "BUSY").await;
    script
}

/// A server that has `keys` keys, and that loads its dump slowly once it has a dump.
pub(super) fn with_a_slow_dump(keys: usize) -> (Scratch, RedisServer) {
    let files = Scratch::new();
    let folder = files.text("");
    let args =
        ["--dir", &folder, "--dbfilename", "dump.rdb", "--loading-process-events-interval-bytes", "1024"];
    let server = RedisServer::with_args(args.into_iter().chain(["--key-load-delay", "300"]));
    let mut all = redis::pipe();
    for key in 0..keys {
        all.cmd("SET").arg(key).arg("x".repeat(64)).arg("EX").arg(600).ignore();
    }
    all.exec(&mut server.conn()).expect("keys");
    (files, server)
}

pub(super) fn is_loading(server: &RedisServer) -> bool {
    server.run::<String>(&["INFO", "persistence"]).contains("loading:1")
}

/// A server without its working directory, so that it can not save.
pub(super) fn without_a_folder() -> (Scratch, RedisServer) {
    let files = Scratch::new();
    let removed = files.text("removed");
    std::fs::create_dir(&removed).expect("a folder");
    let server = RedisServer::with_args(["--dir", &removed]);
    std::fs::remove_dir(&removed).expect("it is empty");
    (files, server)
}

/// Turns saving on, so that a failed save makes the server refuse writes.
pub(super) const CAN_NOT_SAVE: [&str; 4] = ["CONFIG", "SET", "save", "3600 1000000"];
pub(super) const NEED_NOT_SAVE: [&str; 4] = ["CONFIG", "SET", "save", ""];

/// Waits until the server has noticed that it can not save.
pub(super) async fn has_failed_to_save(admin: &mut Connection) {
    run(admin, &CAN_NOT_SAVE);
    run(admin, &["BGSAVE"]);
    is_refused(admin, &["SET", "probe", "1", "PX", "1"], "MISCONF").await;
}

/// A guard with the default policy, and a connection for the test that was opened before the server fails.
struct Patient {
    server: RedisServer,
    admin: Connection,
    guard: StampedeGuard,
}

impl Patient {
    async fn new(server: RedisServer) -> Self {
        let guard = local(&server, Policy::default()).await;
        let admin = server.conn();
        let patient = Self { server, admin, guard };
        answer(&patient.in_peace(), "stored", STORED).await;
        requests(&patient.guard, "before", 3).await;
        patient
    }

    /// The guard with long bounds, for tests that store and read values.
    fn in_peace(&self) -> StampedeGuard {
        self.guard.with_policy(lease_of(Duration::from_secs(60)))
    }

    async fn started() -> Self {
        Self::new(RedisServer::start()).await
    }

    /// Checks that every call is answered, at almost no cost beyond the server's time for an error, and that callers of one key share a
    /// load.
    async fn is_tolerated(&mut self, hits: Hits) {
        let guard = &self.guard;
        let first = requests(guard, "first", 5).await;
        keep_to_the_budget(&first, "first");
        let (mut later, mut bare) = (Vec::new(), Vec::new());
        for round in 0..40 {
            later.extend(requests(guard, &format!("later-{round}"), 1).await);
            let started = Instant::now();
            // A busy server may take long to say so, if other tests leave it little CPU.
            let _ = redis::cmd("PING").exec(&mut self.admin);
            bare.push(started.elapsed());
        }
        keep_to_the_budget(&later, "later");
        let most = NOTHING + median(bare.clone()) * COMMANDS;
        assert!(median(later.clone()) <= most, "{later:?}, the server alone: {bare:?}");
        still_coalesces(guard).await;
        if hits == Hits::Served {
            assert_eq!(answer(&self.in_peace(), "stored", STORED + 1).await, STORED);
        }
        let stats = guard.stats();
        assert!(stats.fail_open_loads >= 40 && stats.failed == 0, "{stats:?}");
    }

    async fn is_cured(&self) {
        stores_again(&self.guard).await;
        assert_eq!(
            answer(&self.in_peace(), "stored", STORED + 2).await,
            STORED,
            "what was stored is still there"
        );
        settled(std::slice::from_ref(&self.guard)).await;
        assert_nothing_left(&self.server, SOON).await;
    }
}

/// R10: first the server is silent, then it replies -BUSY.
#[tokio::test]
async fn loads_go_on_while_the_server_is_busy_with_a_script() {
    // The old name of `busy-reply-threshold`, which Redis 6.2 has, too.
    let mut patient = Patient::new(RedisServer::with_args(["--lua-time-limit", "300"])).await;
    let script = run_endless_script(&patient.server, &mut patient.admin).await;
    patient.is_tolerated(Hits::Loaded).await;
    run(&mut patient.admin, &["SCRIPT", "KILL"]);
    assert!(script.join().expect("joined").is_err());
    patient.is_cured().await;
}

/// R9: the server restarts with a dump and loads it slowly.
#[tokio::test]
async fn loads_go_on_while_the_server_loads_its_dump() {
    let (_files, server) = with_a_slow_dump(20_000);
    let mut patient = Patient::new(server).await;
    patient.server.run::<()>(&["SAVE"]);
    patient.server.kill();
    patient.server.start_again();
    assert!(is_loading(&patient.server), "it has loaded too quickly for this test");
    patient.is_tolerated(Hits::Loaded).await;
    eventually("it has loaded", PATIENCE, async || !is_loading(&patient.server)).await;
    patient.is_cured().await;
}

/// R20: open connections continue to work, new connections are refused, and loads continue without the refused ones.
#[tokio::test]
async fn loads_go_on_while_the_server_has_no_room_for_connections() {
    let mut patient = Patient::started().await;
    run(&mut patient.admin, &["CONFIG", "SET", "maxclients", "1"]);
    assert_eq!(answer(&patient.in_peace(), "stored", 1).await, STORED);
    run(&mut patient.admin, &["CLIENT", "KILL", "TYPE", "pubsub"]);
    run(&mut patient.admin, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    patient.is_tolerated(Hits::Loaded).await;
    run(&mut patient.admin, &["CONFIG", "SET", "maxclients", "10000"]);
    patient.is_cured().await;
}

/// R11: a replica that has lost its primary and refuses to serve stale data.
#[tokio::test]
async fn loads_go_on_while_a_replica_has_lost_its_primary() {
    let mut patient = Patient::started().await;
    run(&mut patient.admin, &["CONFIG", "SET", "replica-serve-stale-data", "no"]);
    run(&mut patient.admin, &["REPLICAOF", "127.0.0.1", "1"]);
    let read = redis::cmd("GET").arg("k").exec(&mut patient.admin);
    assert_eq!(read.expect_err("refused").code(), Some("MASTERDOWN"));
    patient.is_tolerated(Hits::Loaded).await;
    run(&mut patient.admin, &["REPLICAOF", "NO", "ONE"]);
    patient.is_cured().await;
}

/// R12: NOREPLICAS. The server reads but does not write, so hits are served.
#[tokio::test]
async fn a_server_that_has_lost_its_replicas_serves_what_it_has() {
    let mut patient = Patient::started().await;
    run(&mut patient.admin, &["CONFIG", "SET", "min-replicas-to-write", "1"]);
    patient.is_tolerated(Hits::Served).await;
    run(&mut patient.admin, &["CONFIG", "SET", "min-replicas-to-write", "0"]);
    patient.is_cured().await;
}

/// R12: MISCONF, as with a full disk.
#[tokio::test]
async fn a_server_that_can_not_save_serves_what_it_has() {
    let (_files, server) = without_a_folder();
    let mut patient = Patient::new(server).await;
    has_failed_to_save(&mut patient.admin).await;
    patient.is_tolerated(Hits::Served).await;
    run(&mut patient.admin, &NEED_NOT_SAVE);
    patient.is_cured().await;
}

/// R4, R5: the server has so little memory that it evicts a lease during the load. Only the load that took over is stored.
#[tokio::test]
async fn an_evicted_lease_costs_one_load_and_overwrites_nothing() {
    let server = RedisServer::with_args(["--maxmemory", "4mb", "--maxmemory-policy", "allkeys-random"]);
    // The lease is so long that it is not renewed during the test.
    let policy = lease_of(Duration::from_secs(120));
    let guards = [local(&server, policy.clone()).await, local(&server, policy).await];
    let (old, new, loads) = (Gate::closed(), Gate::closed(), Counter::default());
    new.open();
    let leader = held_call(&guards[0], 1, &old, &loads);
    loads.reach(1).await;
    let mut filler = server.conn();
    let has =
        |conn: &mut Connection, key: &str| redis::cmd("EXISTS").arg(key).query::<bool>(conn).expect("EXISTS");
    let mut evict = |key: &str| {
        for round in 0.. {
            assert!(round < 200, "{key} is not evicted");
            let mut fill = redis::pipe();
            for number in 0..200 {
                let name = format!("filler-{round}-{number}");
                fill.cmd("SET").arg(name).arg("x".repeat(4_000)).arg("EX").arg(600).ignore();
            }
            fill.exec(&mut filler).expect("it evicts");
            if !has(&mut filler, key) {
                break;
            }
        }
    };
    evict("sg1:l:{default:k}");
    assert_eq!(held_call(&guards[1], 2, &new, &loads).await.expect("joined"), 2);
    old.open();
    assert_eq!(leader.await.expect("joined"), 1, "its own caller receives its load");
    settled(&guards).await;
    let stats = guards[0].stats();
    assert_eq!((loads.started(), stats.commits_refused + stats.leases_lost), (2, 1), "{stats:?}");
    if let Some(stored) = guards[0].get::<u32>("k").await.expect("store") {
        assert_eq!(stored, 2, "the late commit is not stored");
    }
    // If an entry is evicted right after its commit, that is a miss, which leads to one load.
    for round in 3..8 {
        evict("sg1:e:{default:k}");
        assert_eq!(answer(&guards[round as usize % 2], "k", round).await, round);
    }
    server.flush_all();
    assert_nothing_left(&server, SOON).await;
}
