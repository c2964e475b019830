//! Numbers that do not depend on time: commands without contention, and connections of many waiters.

use std::time::{Duration, Instant};

use stampede_guard::lock::{Locks, Mutex};

use crate::acquirer::{Client, Kind};
use crate::book::Thread;
use crate::support::PATIENCE;
use crate::support::monitor::{Commands, Monitor};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit, millis};
use crate::way::Lock as _;

const MONITORED: usize = 10;
const WAITERS: usize = 500;

/// The commands of one client. Each is sent after the reply to the one before, so their number is that of the round trips. Only the SETNX
/// control sends three commands in one write.
pub(crate) fn trips(table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (bumps, [setnx, lua, ours]) = runtime.block_on(async {
        let server = RedisServer::start();
        let bumps = bumps(&server).await;
        let mut monitored = Vec::new();
        for kind in [Kind::SetNx, Kind::Lua, Kind::Ours] {
            monitored.push(count(&server, kind).await);
        }
        (bumps, <[_; 3]>::try_from(monitored).expect("three kinds"))
    });
    table.add(Row {
        what: "commands without contention: bump".into(),
        unit: Unit::Count,
        must: Limit::Exactly(1.0),
        aim: Limit::None,
        measured: bumps.iter().map(|commands| commands.total).max().unwrap_or(0) as f64,
        detail: format!("most of {MONITORED}"),
    });
    for (step, name) in ["acquire", "release"].into_iter().enumerate() {
        let most = |counts: &[[Commands; 2]]| counts.iter().map(|both| both[step].total).max().unwrap_or(0);
        let names = &ours[0][step].by_name;
        table.add(Row {
            what: format!("commands without contention: {name}"),
            unit: Unit::Count,
            must: Limit::Exactly(1.0),
            aim: Limit::None,
            measured: most(&ours) as f64,
            detail: format!(
                "most of {MONITORED}, {}; Lua control {}, SETNX control {}",
                names.keys().cloned().collect::<Vec<_>>().join(", "),
                most(&lua),
                most(&setnx)
            ),
        });
    }
}

/// The commands of each bump of one client, in order.
async fn bumps(server: &RedisServer) -> Vec<Commands> {
    let mut client = Client::connect(Kind::Bumped, &server.url(), "bumped", Thread::Shared).await;
    client.acquire().await;
    let mut monitored = Vec::new();
    for _ in 0..MONITORED {
        let monitor = Monitor::start(server);
        assert_eq!(client.acquire().await, 1, "no other client contends");
        monitored.push(monitor.finish().without(["ping", "time"]));
    }
    client.leave().await;
    monitored
}

/// For each of several rounds, the commands of acquiring and those of releasing, without periodic ones.
async fn count(server: &RedisServer, kind: Kind) -> Vec<[Commands; 2]> {
    let mut client = Client::connect(kind, &server.url(), "free", Thread::Shared).await;
    let mut monitored = Vec::new();
    for _ in 0..MONITORED {
        let monitor = Monitor::start(server);
        assert_eq!(client.acquire().await, 1, "no other client contends");
        let acquire = monitor.finish().without(["ping", "time"]);
        let monitor = Monitor::start(server);
        assert!(client.release().await, "it was held");
        monitored.push([acquire, monitor.finish().without(["ping", "time"])]);
    }
    monitored
}

/// Lets many tasks of one process wait for one holder, and counts connections and commands.
pub(crate) fn waiters(table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let server = RedisServer::start();
        let locks = Locks::new(server.client());
        let mutex = Mutex::new(&locks, "popular").expect("a name");
        let mut guard = mutex.lock().await.expect("it is free");
        let waiting: Vec<_> = (0..WAITERS)
            .map(|_| {
                let mutex = mutex.clone();
                tokio::spawn(async move {
                    let mut guard = mutex.lock().await.expect("its turn");
                    let attempts = guard.attempts();
                    guard.unlock().await.expect("an answer");
                    (f64::from(attempts), Instant::now())
                })
            })
            .collect();
        let deadline = Instant::now() + PATIENCE;
        while server.run::<usize>(&["LLEN", "sg1:mq:{default:popular}"]) < WAITERS {
            assert!(Instant::now() < deadline, "not all are in the queue");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (subscribed, all) = (server.pubsub_clients(), server.client_count());
        let released = Instant::now();
        guard.unlock().await.expect("an answer");
        let (mut attempts, mut last) = (Vec::new(), released);
        for waiter in waiting {
            let (tries, at) = waiter.await.expect("a waiter");
            attempts.push(tries);
            last = last.max(at);
        }
        table.add(Row {
            what: format!("{WAITERS} waiters in one process: connections used for waiting"),
            unit: Unit::Count,
            must: Limit::Exactly(1.0),
            aim: Limit::None,
            measured: subscribed as f64,
            detail: format!(
                "{all} connections in all; all served {:.0} ms after unlocking",
                millis(last - released)
            ),
        });
        table.add(Row {
            what: format!("{WAITERS} waiters in one process: most tries of one"),
            unit: Unit::Count,
            must: Limit::Exactly(1.0),
            aim: Limit::None,
            measured: Spread::of(&attempts).max,
            detail: String::new(),
        });
    });
}
