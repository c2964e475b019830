//! The guard in situations in which a cache look-up behind a spinlock fails: the rows S2 of `lock/ROWS.md` that no other test covers.

use std::collections::BTreeSet;

use stampede_guard::lock::LockError;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::monitor::Monitor;
use crate::support::origin::Answer;
use crate::support::os::cpu_time;

/// The lease is so long that a test fails if the lease is never released.
const LONG_LEASE: Duration = Duration::from_secs(120);

/// A policy with long bounds, so that no timeout causes a second load: these tests are about the order of steps.
fn patient() -> Policy {
    let builder = Policy::builder().lease(LONG_LEASE);
    builder.coordination_budget(SOON).command_timeout(SOON / 2).build().expect("valid")
}

async fn nodes(server: &RedisServer, n: usize) -> Vec<StampedeGuard> {
    let mut nodes = Vec::new();
    for _ in 0..n {
        nodes.push(local(server, patient()).await);
    }
    nodes
}

/// S2.2: 1,000 loads of 100 ms, each requested by four nodes before, during and just after it. A lease that is released before
/// the value is stored would let a node load again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_is_stored_before_its_lease_is_free() {
    const LANES: usize = 100;
    const ROUNDS: usize = 1_000;
    let server = RedisServer::start();
    let nodes = nodes(&server, 4).await;
    let lanes = (0..LANES).map(|lane| {
        let nodes = nodes.clone();
        tokio::spawn(async move {
            for round in 0..ROUNDS / LANES {
                let (key, loads) = (format!("{lane}-{round}"), Counter::default());
                let calls = nodes.iter().map(|node| {
                    let (key, loads) = (key.as_str(), loads.clone());
                    async move {
                        tokio::time::sleep(ms(fastrand::u64(..130))).await;
                        let load = move || async move {
                            let _running = loads.start();
                            tokio::time::sleep(ms(100)).await;
                            Ok::<_, String>(round)
                        };
                        node.get_or_load(key, load).await.expect("a value")
                    }
                });
                assert_eq!(join_all(calls).await, [round; 4]);
                assert_eq!(loads.started(), 1, "{key}");
            }
        })
    });
    for lane in join_all(lanes).await {
        lane.expect("no second load");
    }
}

/// A proxy that holds scripts back until its gate is open.
struct Holding {
    url: String,
    gate: Gate,
    held: Counter,
}

impl Holding {
    async fn start(server: &RedisServer) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let url = format!("redis://minimal:pw@{}/", listener.local_addr().expect("bound"));
        let (gate, held, port) = (Gate::closed(), Counter::default(), server.port());
        tokio::spawn({
            let (gate, held) = (gate.clone(), held.clone());
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(hold(client, port, gate.clone(), held.clone()));
                }
            }
        });
        Self { url, gate, held }
    }
}

async fn hold(client: TcpStream, port: u16, gate: Gate, held: Counter) {
    let server = TcpStream::connect(("127.0.0.1", port)).await.expect("the server");
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let there = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = from_client.read(&mut buffer).await {
            if buffer[..n].windows(7).any(|word| word == b"EVALSHA") {
                let _held = held.start();
                gate.pass().await;
            }
            if to_server.write_all(&buffer[..n]).await.is_err() {
                return;
            }
        }
    };
    let back = tokio::io::copy(&mut from_server, &mut to_client);
    tokio::select! { () = there => {}, _ = back => {} }
}

/// S2.4: between a node's miss and its lease, another node loads, stores and releases. The first node gets the lease at its first attempt,
/// and must not load again.
#[tokio::test]
async fn a_value_stored_between_miss_and_lease_is_not_loaded_again() {
    let server = RedisServer::start();
    let slow = Holding::start(&server).await;
    let (paused, quick) = (unconnected(&slow.url, patient()), local(&server, patient()).await);
    connects(&paused).await;
    let loads = Counter::default();
    let open = Gate::closed();
    open.open();
    let late = held_call(&paused, 1, &open, &loads);
    slow.held.reach(1).await;
    assert_eq!(held_call(&quick, 2, &open, &loads).await.expect("joined"), 2);
    assert_eq!(server.keys(), ["sg1:e:{default:k}"], "stored and released");
    slow.gate.open();
    assert_eq!(late.await.expect("joined"), 2);
    assert_eq!(loads.started(), 1);
}

/// S2.6: a process with fifty callers that wait for two seconds sends only PING and TIME, and uses almost no CPU.
#[tokio::test]
async fn a_waiting_process_neither_asks_nor_spins() {
    let nodes = Nodes::start(2, LONG_LEASE).await;
    nodes.origin.script("k", [Answer::value("v").held()]);
    nodes.one_leads("k", "load k 1", 50).await;
    let monitor = Monitor::start(&nodes.server);
    let cpu = cpu_time(nodes.node(1).pid());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let spent = cpu_time(nodes.node(1).pid()).zip(cpu).map(|(after, before)| after - before);
    let commands = monitor.finish();
    let (all, sent) = (commands.total, commands.clone().without(["ping", "time"]).total);
    assert_eq!(sent, 0, "{commands:#?}");
    assert!(all <= 2 * 5, "five of each process: {commands:#?}");
    if let Some(spent) = spent {
        assert!(spent < ms(100), "5 % of a core are 100 ms in two seconds: {spent:?}");
    }
    nodes.origin.release("k");
    nodes.all_get(0..2, "k", "v").await;
}

/// S2.7
#[tokio::test]
async fn namespaces_do_not_exclude_each_other() {
    let server = RedisServer::start();
    let (gate, loads) = (Gate::closed(), Counter::default());
    let calls = ["named_locks", "other_locks"].map(|namespace| {
        let client = redis::Client::open(server.minimal_user()).expect("an address");
        let guard = StampedeGuard::builder(client).policy(patient()).namespace(namespace).build();
        held_call(&guard.expect("valid"), namespace.len() as u32, &gate, &loads)
    });
    loads.reach(2).await;
    gate.open();
    for call in calls {
        assert_eq!(call.await.expect("joined"), 11);
    }
    assert_eq!(server.keys(), ["sg1:e:{named_locks:k}", "sg1:e:{other_locks:k}"]);
}

/// S2.11: a lock inside the load is busy. It would be a flaw to take that error for one of the guard's own lock, and to load again. The
/// guard returns it unchanged as the load's error, after one load.
#[tokio::test]
async fn a_lock_that_is_busy_inside_the_load_is_the_loads_error() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 2).await;
    let inner = nodes[0].locks().mutex("k").acquire_timeout(ms(20)).build().expect("valid");
    let held = inner.lock().await.expect("free");
    let loads = Counter::default();
    // First another handle has the lock, and then the handle that is used has it already.
    for (n, inner) in (1..).zip([inner.clone(), inner]) {
        let load = {
            let loads = loads.clone();
            move || async move {
                let _running = loads.start();
                inner.lock().await.map(|_| 1)
            }
        };
        let error = nodes[1].get_or_load("k", load).await.expect_err("it is busy");
        let busy = error.loader().expect("the load's own");
        let as_it_is = if n == 1 { busy.is_busy() } else { matches!(busy, LockError::AlreadyAcquired) };
        assert!(as_it_is, "{busy:?}");
        assert_eq!(loads.started(), n);
    }
    drop(held);
}

/// S2.12: by the time at which a failure is returned, the lease is released and the error is stored, but no value is.
#[tokio::test]
async fn a_failed_load_frees_its_lease_and_stores_nothing() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 2).await;
    for failed in 1..=5 {
        let error = nodes[0].get_or_load("k", move || async move { Err::<u32, _>(format!("no {failed}")) });
        let error = error.await.expect_err("it fails");
        assert_eq!(error.loader(), Some(&format!("no {failed}")));
        eventually_eq("the lease is free", SOON, vec!["sg1:o:{default:k}".to_owned()], async || {
            server.keys()
        })
        .await;
    }
    let since = Instant::now();
    assert_eq!(answer(&nodes[1], "k", 1).await, 1);
    assert!(since.elapsed() < LONG_LEASE / 10, "{:?}", since.elapsed());
}

/// S2.14: a hundred waiters of four nodes receive the value, and none of them takes the lock first. If each of them took it for 100 ms,
/// they would take ten seconds.
#[tokio::test]
async fn waiters_are_answered_together_and_not_in_turn() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 4).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let mut callers = vec![held_call(&nodes[0], 1, &gate, &loads)];
    loads.reach(1).await;
    callers.extend((0..100).map(|caller| held_call(&nodes[caller % 4], 2, &gate, &loads)));
    queued(&server, "k", 3).await;
    let since = Instant::now();
    gate.open();
    for caller in callers {
        assert_eq!(caller.await.expect("joined"), 1);
    }
    assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
    assert_eq!(loads.started(), 1);
}

/// The key's slot in Redis Cluster: the CRC-16 of the text between its first braces, modulo the number of slots.
fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or(key, |(tag, _)| tag);
    let crc = tag.bytes().fold(0_u16, |crc, byte| {
        (0..8)
            .fold(crc ^ (u16::from(byte) << 8), |crc, _| (crc << 1) ^ if crc >> 15 == 1 { 0x1021 } else { 0 })
    });
    crc % 16_384
}

/// S2.15: the keys of one resource are in one slot, and those of different resources in different slots.
#[tokio::test]
async fn the_leases_of_different_keys_are_in_different_slots() {
    assert_eq!(slot("foo"), 12_182, "as CLUSTER KEYSLOT says");
    let server = RedisServer::start();
    let (nodes, gate, loads) = (nodes(&server, 2).await, Gate::closed(), Counter::default());
    let calls: Vec<_> = (0..2 * 50)
        .map(|call| {
            let (node, gate, loads) = (nodes[call % 2].clone(), gate.clone(), loads.clone());
            tokio::spawn(async move {
                let load = move || async move {
                    let _running = loads.start();
                    gate.pass().await;
                    Ok::<_, String>(1)
                };
                node.get_or_load(("hot", call / 2), load).await.expect("a value")
            })
        })
        .collect();
    loads.reach(50).await;
    eventually_eq("a lease and a queue each", SOON, 100, async || server.keys().len()).await;
    let keys = server.keys();
    let leases: Vec<_> = keys.iter().filter(|key| key.starts_with("sg1:l:")).collect();
    let slots: BTreeSet<_> = leases.iter().map(|key| slot(key)).collect();
    assert_eq!(leases.len(), 50);
    assert!(slots.len() > 45, "50 keys are in {} slots", slots.len());
    for lease in leases {
        let queue = lease.replacen("sg1:l:", "sg1:q:", 1);
        assert!(keys.contains(&queue) && slot(&queue) == slot(lease), "{lease}");
    }
    gate.open();
    for call in calls {
        assert_eq!(call.await.expect("joined"), 1);
    }
}

/// S2.18
#[tokio::test]
async fn a_key_of_any_bytes_is_loaded_once_and_found_by_all() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 2).await;
    let long = [b'k'; 1024];
    let keys: [&[u8]; 9] =
        [b"a b", b"a:b", b"{a}", b"}{", b"a\0b", b"\xff\xfe", b"\r\n*1\r\n", b"100%", &long];
    for (value, key) in (1..).zip(keys) {
        for node in &nodes {
            let load = move || async move { Ok::<u32, String>(value) };
            assert_eq!(node.get_or_load(key, load).await.expect("a value"), value, "{key:?}");
        }
    }
    let loads: u64 = nodes.iter().map(|node| node.stats().loads).sum();
    assert_eq!((loads, server.keys().len()), (9, 9));
}
