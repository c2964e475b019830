//! Conditions that only a server has: rights, memory, lost scripts, connections, keys with a time to live.

use super::super::on_redis::{own_keys, world_of};
use super::super::support::monitor::Monitor;
use super::super::support::redis_server::RedisServer;
use super::*;
use crate::store::redis::RedisStore;
use crate::store::{StoreError, StoreErrorKind};

on_servers! {
    registry_and_log_expire_by_themselves,
    every_step_survives_the_loss_of_the_scripts,
    a_mark_of_another_session_means_everything,
    a_mark_does_not_outlive_its_connection,
    a_server_without_memory_keeps_the_registry,
    a_late_insertion_announces_nothing,
    a_log_of_foreign_data_is_left_alone,
}

fn at(kind: &str) -> String {
    format!("sg1:{kind}:{{{}}}", volume().name())
}

fn server_of(world: &World) -> &RedisServer {
    world.server_of(volume().name())
}

async fn registry_and_log_expire_by_themselves(world: &World) {
    let (tier, _) = Tier::member(world).await;
    let server = server_of(world);
    for announces in [false, true] {
        for kind in ["n", "a"] {
            let left: i64 = server.run(&["PTTL", &at(kind)]);
            assert!((3_590_000..=3_600_000).contains(&left), "{kind}: {left}");
            server.run::<()>(&["PEXPIRE", &at(kind), "1000000"]);
        }
        if announces {
            tier.renew(2, None).await;
        } else {
            tier.announce(&value("a"), false).await;
        }
    }
    assert_eq!(own_keys(server), [at("a"), at("n")]);
}

async fn every_step_survives_the_loss_of_the_scripts(world: &World) {
    let (tier, other) = (Tier::new(world).await, Tier::new(world).await);
    let server = server_of(world);
    server.script_flush();
    tier.renew(1, None).await;
    for step in 0..4 {
        server.script_flush();
        match step {
            0 => drop(audience(other.announce(&value("a"), false).await)),
            1 => drop(audience(other.invalidate(world, &announcement(false), &key("a"), None).await)),
            2 => drop(audience(other.forget_tag(world, &announcement(false), &key("t")).await)),
            _ => tier.remove(1).await,
        }
    }
    assert_eq!(tier.received(3).await.len(), 3);
}

async fn a_mark_of_another_session_means_everything(world: &World) {
    let (tier, first) = Tier::member(world).await;
    let other = Mark { session: first.newest.session + 1, ..first.newest };
    let renewed = tier.renew(2, Some(other)).await;
    assert_eq!((renewed.announced, renewed.newest), (None, first.newest));
    // Sessions number a node's connections, and each node has its own connection.
    let (_, second) = Tier::member(world).await;
    assert_ne!(second.newest.session, first.newest.session);
}

async fn a_mark_does_not_outlive_its_connection(world: &World) {
    let (tier, first) = Tier::member(world).await;
    let missed = tier.ear.missed.load(Ordering::Relaxed);
    server_of(world).kill_clients();
    let started = Instant::now();
    let renewal = Renewal { stamp: 2, mark: Some(first.newest), known_registry: None, term: TERM };
    let renewed = loop {
        // This renewal may be sent on the connection that was cut.
        match tier.store.renew_membership(&volume(), renewal, WITHIN).await {
            Ok(renewed) => break renewed,
            Err(error) => assert!(started.elapsed() < WITHIN, "{error}"),
        }
        tokio::time::sleep(ms(5)).await;
    };
    assert_eq!((renewed.announced, renewed.newest.at), (None, first.newest.at));
    assert!(renewed.newest.session > first.newest.session);
    if !world.gives_claims() {
        // In a cluster the inbox may be at another node, whose connection was not cut.
        while tier.ear.missed.load(Ordering::Relaxed) == missed {
            assert!(started.elapsed() < WITHIN);
            tokio::time::sleep(ms(5)).await;
        }
    }
}

/// When memory is full, members and announcements are still recorded: the registry is small, and without it no change would reach the
/// copies.
async fn a_server_without_memory_keeps_the_registry(world: &World) {
    let (one, before) = Tier::member(world).await;
    let two = Tier::new(world).await;
    let server = server_of(world);
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let to = audience(two.announce(&value("a"), false).await);
    assert_eq!((to.registry.registry_id, to.members.len()), (before.registry.registry_id, 1));
    let renewal = Renewal { stamp: 2, mark: Some(before.newest), known_registry: None, term: TERM };
    let renewed = one.renew_with(renewal).await;
    assert_eq!(renewed.announced.map(|records| records.len()), Some(1));
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
}

/// The insertion reaches the server later than its caller has waited, so neither the value nor an announcement may be recorded.
async fn a_late_insertion_announces_nothing(world: &World) {
    let (tier, first) = Tier::member(world).await;
    let server = world.server_of(key("k").name());
    server.pause();
    let insert = Insert { entry: bytes("late"), keep: LEASE, over: None };
    let sent = tier.store.invalidate(&key("k"), Some(insert), &announcement(false), ms(50)).await;
    assert_eq!(sent.expect_err("it hangs").kind, StoreErrorKind::TimedOut);
    tokio::time::sleep(crate::store::LATEST + ms(200)).await;
    server.resume();
    let other = Tier::new(world).await;
    assert_eq!(other.store.look_up(&key("k"), WITHIN).await.expect("look up"), None);
    assert_eq!(other.renew(1, None).await.newest.at, first.newest.at);
}

async fn a_log_of_foreign_data_is_left_alone(world: &World) {
    let (one, _) = Tier::member(world).await;
    let (two, server) = (Tier::new(world).await, server_of(world));
    for kind in ["a", "n"] {
        server.run::<()>(&["SET", &at(kind), "foreign", "PX", "600000"]);
        let refused = |error: StoreError| error.kind == StoreErrorKind::Refused;
        let volumes = &one.store;
        let renewal = Renewal { stamp: 2, mark: None, known_registry: None, term: TERM };
        assert!(refused(volumes.renew_membership(&volume(), renewal, WITHIN).await.expect_err("no right")));
        let announced = two.store.announce(&announcement(false), &value("a"), WITHIN).await;
        assert!(refused(announced.expect_err("the caller receives the error")));
        assert_eq!(server.run::<String>(&["GET", &at(kind)]), "foreign");
        server.run::<()>(&["DEL", &at(kind)]);
    }
}

/// One command is enough even with a registry and members. The other cases show that the minimal user's rights are enough.
#[tokio::test]
async fn a_change_and_its_announcement_are_one_command() {
    let world = World::redis();
    let (one, _) = Tier::member(&world).await;
    let two = Tier::new(&world).await;
    for _ in 0..2 {
        two.invalidate(&world, &announcement(false), &key("k"), None).await;
        two.forget_tag(&world, &announcement(false), &key("t")).await;
        two.announce(&value("a"), false).await;
    }
    let server = world_of(&world);
    let monitor = Monitor::start(server);
    for n in 1..=10 {
        two.invalidate(&world, &announcement(false), &key("k"), None).await;
        two.forget_tag(&world, &announcement(false), &key("t")).await;
        one.received(6 + 2 * n).await;
    }
    let commands = monitor.finish().without(["ping", "time"]);
    assert_eq!((commands.total, commands.of("evalsha")), (20, 20), "{commands:#?}");
    world.check();
}

/// Without a registry, the script only looks for one, so announcements need no right that a fleet without local copies lacks.
#[tokio::test]
async fn a_fleet_without_local_copies_needs_no_further_right() {
    let world = World::redis();
    let server = world_of(&world);
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-hgetall", "-hmget", "-hset", "-hdel"]);
    let tier = Tier::new(&world).await;
    for _ in 0..2 {
        let none = tier.invalidate(&world, &announcement(false), &key("k"), None).await;
        assert!(matches!(none, Announced::NoRegistry), "{none:?}");
    }
    // Where there is a registry, the change is refused: its announcement must not be left out.
    server.run::<()>(&["HSET", &at("n"), "b", "0"]);
    server.run::<()>(&["PEXPIRE", &at("n"), "60000"]);
    let refused = tier.store.invalidate(&key("k"), None, &announcement(false), WITHIN).await;
    assert_eq!(refused.expect_err("the caller receives the error").kind, StoreErrorKind::Refused);
}

/// The server is a single node of a cluster, and the client knows only its address. Its scripts may name keys of one slot only.
#[tokio::test]
async fn a_server_that_splits_keys_receives_the_change_and_its_announcement_separately() {
    let server = RedisServer::with_args(["--cluster-enabled", "yes"]);
    // Redis 6.2 has no ADDSLOTSRANGE.
    let slots: Vec<_> = (0..16_384).map(|slot| slot.to_string()).collect();
    let command: Vec<_> =
        ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
    server.run::<()>(&command);
    let started = Instant::now();
    while !server.run::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok") {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(20)).await;
    }
    let world = World::Redis(server);
    let (one, _) = Tier::member(&world).await;
    let two = Tier::new(&world).await;
    for _ in 0..2 {
        let announcement = announcement(false);
        let insert = Insert { entry: bytes("v"), keep: LEASE, over: None };
        let answer = two.store.invalidate(&key("k"), Some(insert), &announcement, WITHIN).await;
        assert!(matches!(answer, Ok(Announced::Separately)), "{answer:?}");
        assert_eq!(two.store.look_up(&key("k"), WITHIN).await.expect("look up"), Some(bytes("v")));
        let answer = two.store.forget_tag(&key("t"), &announcement, WITHIN).await;
        assert!(matches!(answer, Ok(Announced::Separately)), "{answer:?}");
        let to = audience(two.announce_as(&announcement, &value("k")).await);
        assert_eq!(to.members, [one.member_with(1)]);
    }
    assert_eq!(one.received(2).await.len(), 2);
    world.check();
}

/// An acknowledgement that is sent outside of a runtime is dropped without an error.
#[test]
fn an_acknowledgement_without_a_runtime_is_dropped() {
    let client = ::redis::Client::open("redis://127.0.0.1:1/").expect("an address");
    let store = Store::Redis(Arc::new(RedisStore::new(client, ms(100))));
    store.acknowledge(Uuid::new_v4(), Uuid::new_v4());
}
