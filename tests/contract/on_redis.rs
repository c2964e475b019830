//! Conditions that only a server has: lost scripts, too little memory, foreign data. On a cluster the cases use the master
//! of the key.

use super::support::redis_server::RedisServer;
use super::*;
use crate::store::StoreErrorKind;

pub(super) fn world_of(server: &World) -> &RedisServer {
    match server {
        World::Redis(server) => server,
        _ => unreachable!("these cases are about one server"),
    }
}

on_servers! {
    every_key_has_a_ttl_and_every_step_survives_the_loss_of_the_scripts,
    a_lease_without_an_expiry_gets_one,
    a_lease_with_more_time_than_its_holder_requested_is_cut,
    a_holder_with_a_longer_lease_than_the_caller_keeps_it,
    an_entry_of_a_megabyte_is_found_or_passed_over_like_a_small_one,
    an_entry_of_a_megabyte_that_is_removed_before_it_is_read_counts_as_none,
    a_commit_after_the_loss_of_the_lease_is_refused,
    a_server_without_memory_still_releases,
    foreign_data_is_left_alone,
    the_clock_of_every_node_is_the_servers,
    an_outcome_with_a_postponed_expiry_is_not_replayed,
}

/// The server's key of this kind for the resource `text`.
pub(super) fn at(kind: &str, text: &str) -> String {
    format!("sg1:{kind}:{{{}}}", key(text).name())
}

/// The keys of the running case, sorted.
pub(super) fn own_keys(server: &RedisServer) -> Vec<String> {
    let own = format!("{{{}:", namespace());
    server.keys().into_iter().filter(|key| key.contains(&own)).collect()
}

/// Invariant 5 of the store. It is checked after each step, and the server's scripts are flushed before each.
async fn every_key_has_a_ttl_and_every_step_survives_the_loss_of_the_scripts(world: &World) {
    let server = world.server_of(key("k").name());
    let check = |step: &str| {
        assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "after {step}");
        server.script_flush();
    };
    server.script_flush();
    let (one, two) = (Flight::separate(world, &key("k")).await, Flight::separate(world, &key("k")).await);
    one.must_hold().await;
    check("granted");
    two.must_wait().await;
    check("queued");
    assert_eq!(own_keys(server), [at("l", "k"), at("q", "k")]);
    assert_eq!(one.renew(LEASE).await, TokenCheck::Held);
    check("renewed");
    assert_eq!(one.hand_over(1).await, HandedOver::ToWaiter);
    check("handed over");
    two.must_hold().await;
    check("granted again");
    one.must_wait().await;
    assert_eq!(
        two.fail(Fail { older: OlderEntry::Marked(bytes("m"), LEASE), ..two.failure() }).await,
        TokenCheck::Held
    );
    check("failed");
    assert_eq!(own_keys(server), [at("e", "k"), at("o", "k")]);
    one.invalidate().await;
    check("invalidated");
    assert_eq!(own_keys(server), Vec::<String>::new());
    one.must_hold().await;
    check("granted");
    assert_eq!(one.release().await, TokenCheck::Held);
    check("released");
    one.must_hold().await;
    assert_eq!(one.commit("v").await, TokenCheck::Held);
    check("committed");
    one.insert("w", None).await;
    check("inserted");
    assert_eq!(own_keys(server), [at("e", "k")]);
}

async fn a_lease_without_an_expiry_gets_one(world: &World) {
    let server = world.server_of(key("k").name());
    Flight::holding(world, &key("k")).await;
    server.run::<()>(&["PERSIST", &at("l", "k")]);
    let waiter = Flight::separate(world, &key("k")).await;
    let ask = Acquire { lease: ms(200), ..waiter.ask() };
    let acquired = waiter.acquire(ask).await;
    assert!(matches!(acquired, Acquired::Held { remaining, .. } if remaining <= ms(200)), "{acquired:?}");
    let started = Instant::now();
    while let Acquired::Held { .. } = waiter.acquire(ask).await {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
}

/// The lease has 60.7 s left, as if the server's clock had been set back by a minute while the holder died, and all callers would wait for
/// that. Each caller, even one with another policy, shortens it to the holder's own lease.
async fn a_lease_with_more_time_than_its_holder_requested_is_cut(world: &World) {
    let server = world.server_of(key("k").name());
    let holder = Flight::of_lease(&world.node().await, &key("k"), ms(400));
    holder.acquire(Acquire { lease: ms(400), ..holder.ask() }).await;
    let waiter = Flight::of_lease(&world.node().await, &key("k"), LEASE);
    server.run::<()>(&["PEXPIRE", &at("l", "k"), "60700"]);
    let acquired = waiter.acquire(waiter.ask()).await;
    assert!(matches!(acquired, Acquired::Held { remaining, .. } if remaining <= ms(400)), "{acquired:?}");
    let left: i64 = server.run(&["PTTL", &at("q", "k")]);
    assert!(left <= 2 * 60_000 + 1_000, "nor does the queue last longer: {left} ms");
    let started = Instant::now();
    while let Acquired::Held { .. } = waiter.acquire(waiter.ask()).await {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
}

/// Two policies are used with one key. The remaining time is compared with the lease that the holder requested, not with the caller's.
async fn a_holder_with_a_longer_lease_than_the_caller_keeps_it(world: &World) {
    let holder = Flight::of_lease(&world.node().await, &key("k"), LEASE);
    holder.must_hold().await;
    let waiter = Flight::of_lease(&world.node().await, &key("k"), ms(200));
    for _ in 0..2 {
        let acquired = waiter.acquire(Acquire { lease: ms(200), ..waiter.ask() }).await;
        let Acquired::Held { remaining, .. } = acquired else { panic!("{acquired:?}") };
        assert!(remaining > LEASE / 2, "{remaining:?}");
    }
}

async fn an_entry_of_a_megabyte_is_found_or_passed_over_like_a_small_one(world: &World) {
    // The first bytes of an entry identify it.
    let large = |first: u8| Bytes::from([vec![first; 68], vec![b'v'; 1 << 20]].concat());
    let holder = Flight::holding(world, &key("k")).await;
    let stored = holder.store.commit(&holder.key, &holder.token, large(1), LEASE, WITHIN).await;
    assert_eq!(stored.expect("commit"), TokenCheck::Held);
    let server = world.server_of(key("k").name());
    let read = || -> u64 {
        let stats: String = server.run(&["INFO", "commandstats"]);
        let get = stats.lines().find_map(|line| line.strip_prefix("cmdstat_get:calls=")).unwrap_or("0,");
        get.split(',').next().expect("a number").parse().expect("a number")
    };
    let flight = Flight::separate(world, &key("k")).await;
    let before = read();
    let found = flight.acquire(flight.ask()).await;
    assert!(matches!(&found, Acquired::Found(entry) if *entry == large(1)));
    assert_eq!(read() - before, 1, "by a command of its own, not in the script");
    let other = large(2);
    let found = flight.acquire(Acquire { seen: Some(&other), ..flight.ask() }).await;
    assert!(matches!(&found, Acquired::Found(entry) if *entry == large(1)));
    let seen = large(1);
    let before = read();
    let acquired = flight.acquire(Acquire { seen: Some(&seen), ..flight.ask() }).await;
    assert!(matches!(acquired, Acquired::Granted), "{acquired:?}");
    assert_eq!(read() - before, 2, "of the outcome and of the lease; the entry is not copied");
}

/// The script reports the entry, which is invalidated before it is read: the lease is requested again, and granted.
async fn an_entry_of_a_megabyte_that_is_removed_before_it_is_read_counts_as_none(world: &World) {
    let server = world.server_of(key("k").name());
    if world.gives_claims() {
        // A cluster's client does not connect through the relay.
        return;
    }
    let holder = Flight::holding(world, &key("k")).await;
    let entry = Bytes::from(vec![b'v'; 1 << 20]);
    let stored = holder.store.commit(&holder.key, &holder.token, entry, LEASE, WITHIN).await;
    assert_eq!(stored.expect("commit"), TokenCheck::Held);
    let relay = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let url = format!("redis://minimal:pw@{}/", relay.local_addr().expect("bound"));
    let passes_on = async {
        let entry = at("e", "k");
        let mut flows = Vec::new();
        while let Ok((client, _)) = relay.accept().await {
            flows.push(remove_before_get(client, server, &entry));
            if flows.len() == 2 {
                join_all(flows.drain(..)).await;
            }
        }
    };
    let client = ::redis::Client::open(url).expect("an address");
    let node = Store::Redis(Arc::new(crate::store::redis::RedisStore::new(client, ms(5_000))));
    let asks = async {
        let flight = Flight::on(&node, &key("k"));
        flight.must_hold().await;
    };
    tokio::select! { () = passes_on => {}, () = asks => {} }
}

/// Relays a connection, and removes the entry before a GET reaches the server.
async fn remove_before_get(mut client: tokio::net::TcpStream, server: &RedisServer, entry: &str) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut server_side =
        tokio::net::TcpStream::connect(("127.0.0.1", server.port())).await.expect("the server");
    let (mut request, mut response) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            Ok(n) = client.read(&mut request) => {
                if n == 0 { return }
                if request[..n].windows(9).any(|part| part == b"$3\r\nGET\r\n") {
                    server.run::<()>(&["DEL", entry]);
                }
                let _ = server_side.write_all(&request[..n]).await;
            }
            Ok(n) = server_side.read(&mut response) => {
                if n == 0 { return }
                let _ = client.write_all(&response[..n]).await;
            }
        }
    }
}

/// As after a restart, the scripts, the lease and the queue are lost: the old holder is refused.
async fn a_commit_after_the_loss_of_the_lease_is_refused(world: &World) {
    let server = world.server_of(key("k").name());
    let holder = Flight::holding(world, &key("k")).await;
    let waiter = Flight::waiting(world, &key("k")).await;
    server.flush_all();
    assert_eq!(holder.renew(LEASE).await, TokenCheck::Lost);
    assert_eq!(holder.commit("v").await, TokenCheck::Lost);
    waiter.must_hold().await;
    assert_eq!(own_keys(server), [at("l", "k")]);
}

/// When memory is full, the server refuses steps that need memory, but runs steps that release memory.
async fn a_server_without_memory_still_releases(world: &World) {
    let server = world.server_of(key("k").name());
    let holder = Flight::holding(world, &key("k")).await;
    let waiter = Flight::waiting(world, &key("k")).await;
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let refused = holder.store.commit(&holder.key, &holder.token, bytes("v"), LEASE, WITHIN).await;
    assert_eq!(refused.expect_err("no memory").kind, StoreErrorKind::Transient);
    assert_eq!(holder.renew(LEASE).await, TokenCheck::Held, "the refused commit changed nothing");
    assert_eq!(holder.fail(holder.failure()).await, TokenCheck::Held, "it begins with giving back");
    assert_eq!(waiter.hints().await.finished, Some(holder.token.clone()));
    let behind = Acquire { behind: Some(&holder.token), ..waiter.ask() };
    assert!(matches!(waiter.acquire(behind).await, Acquired::Ended(_)));
    let refused = waiter.store.acquire(&waiter.key, waiter.ask(), WITHIN).await;
    assert_eq!(refused.expect_err("no memory").kind, StoreErrorKind::Transient);

    server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    waiter.must_hold().await;
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(waiter.release().await, TokenCheck::Held);
    waiter.invalidate().await;
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(own_keys(server), Vec::<String>::new());
}

/// Foreign data under our keys is never overwritten, and no caller waits for it.
async fn foreign_data_is_left_alone(world: &World) {
    for kind in ["e", "q", "o"] {
        let (name, k) = (at(kind, kind), key(kind));
        let server = world.server_of(k.name());
        server.run::<()>(&["HSET", &name, "f", "v"]);
        server.run::<()>(&["PEXPIRE", &name, "600000"]);
        let holder = Flight::holding(world, &k).await;
        let found = (kind == "e").then(Bytes::new);
        assert_eq!(holder.look_up().await, found, "{name}: nothing, or nothing that can be read");
        let waiter = Flight::separate(world, &k).await;
        let acquired = waiter.store.acquire(&k, waiter.ask(), WITHIN).await;
        if kind == "q" {
            assert_eq!(acquired.expect_err("it can not queue").kind, StoreErrorKind::Refused);
            assert_eq!(holder.commit("v").await, TokenCheck::Held);
        } else {
            assert!(matches!(acquired, Ok(Acquired::Held { .. })), "{acquired:?}");
            let stored = if kind == "e" { TokenCheck::ForeignData } else { TokenCheck::Held };
            assert_eq!(holder.commit("v").await, stored, "{name}");
            assert_eq!(waiter.hints().await.finished, Some(holder.token.clone()), "{name}");
        }
        holder.invalidate().await;
        let failing = Flight::holding(world, &k).await;
        assert_eq!(failing.fail(failing.failure()).await, TokenCheck::Held);
        failing.invalidate().await;
        assert_eq!(server.run::<String>(&["HGET", &name, "f"]), "v", "{name}");
    }
    let (name, k) = (at("l", "l"), key("l"));
    let server = world.server_of(k.name());
    server.run::<()>(&["HSET", &name, "f", "v"]);
    server.run::<()>(&["PEXPIRE", &name, "600000"]);
    let flight = Flight::separate(world, &k).await;
    let acquired = flight.store.acquire(&k, flight.ask(), WITHIN).await;
    assert_eq!(acquired.expect_err("there can be no lease").kind, StoreErrorKind::Refused);
    flight.invalidate().await;
    assert_eq!(server.run::<String>(&["HGET", &name, "f"]), "v", "{name}");
}

/// The server's clock decides on freshness, whatever this machine's clock shows.
async fn the_clock_of_every_node_is_the_servers(world: &World) {
    let server = world.server_of(key("k").name());
    let server_ms = || {
        let (secs, micros): (u64, u64) = server.run(&["TIME"]);
        secs * 1_000 + micros / 1_000
    };
    let mut off = Vec::new();
    for _ in 0..9 {
        let node = world.node().await;
        let before = server_ms();
        let now = node.now();
        let after = server_ms();
        off.push(before.saturating_sub(now).max(now.saturating_sub(after)));
    }
    off.sort_unstable();
    // A sample is off by as long as the machine stood still while it was taken.
    assert!(off[4] <= 50 && off[8] <= 2_000, "milliseconds: {off:?}");
}

/// The server's clock is set back by an hour, so an outcome that should expire soon expires in an hour. It must not be
/// replayed during that hour.
async fn an_outcome_with_a_postponed_expiry_is_not_replayed(world: &World) {
    let server = world.server_of(key("k").name());
    let holder = Flight::holding(world, &key("k")).await;
    let newcomer = Flight::separate(world, &key("k")).await;
    let replayed = Fail { replay: LEASE / 2, ..holder.failure() };
    assert_eq!(holder.fail(replayed).await, TokenCheck::Held);
    assert!(matches!(newcomer.acquire(newcomer.ask()).await, Acquired::Ended(text) if text == "no route"));
    server.run::<()>(&["PEXPIRE", &at("o", "k"), "3600000"]);
    newcomer.must_hold().await;
    let left: i64 = server.run(&["PTTL", &at("o", "k")]);
    assert!(left <= LEASE.as_millis() as i64, "nor does it stay for so long: {left} ms");
    assert_eq!(newcomer.release().await, TokenCheck::Held);
    let behind = Acquire { behind: Some(&holder.token), ..newcomer.ask() };
    assert!(matches!(newcomer.acquire(behind).await, Acquired::Ended(text) if text == "no route"));
    newcomer.must_hold().await;
}
