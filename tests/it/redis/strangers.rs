//! Foreign or damaged data under the guard's names of keys: damaged bytes are a miss and are replaced, other programs' data is never
//! overwritten, and neither makes a caller wait for ever.

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::probe::assert_nothing_left;
use crate::support::warnings::Warnings;

const LEASE: Duration = Duration::from_secs(60);
const ENTRY: &str = "sg1:e:{default:k}";

async fn pair(server: &RedisServer) -> [StampedeGuard; 2] {
    [local(server, lease_of(LEASE)).await, local(server, lease_of(LEASE)).await]
}

/// Writes `bytes` instead of the entry.
fn put(server: &RedisServer, bytes: &[u8]) {
    let mut set = redis::cmd("SET");
    set.arg(ENTRY).arg(bytes).arg("PX").arg(600_000).query::<()>(&mut server.conn()).expect("SET");
}

fn entry(server: &RedisServer) -> Vec<u8> {
    server.run(&["GET", ENTRY])
}

#[tokio::test]
async fn damaged_bytes_are_a_miss_and_are_healed() {
    let server = RedisServer::start();
    let guards = pair(&server).await;
    answer(&guards[0], "k", 1).await;
    let sound = entry(&server);
    let damaged = |at: usize, mask: u8| {
        let mut bytes = sound.clone();
        bytes[at] ^= mask;
        bytes
    };
    let last = sound.len() - 1;
    let damages = [
        ("empty", Vec::new()),
        ("not ours", b"hello, world, this is not an entry at all".to_vec()),
        ("cut short", sound[..last].to_vec()),
        ("only its head", sound[..20].to_vec()),
        ("longer", [&sound[..], b"x"].concat()),
        ("another version", damaged(2, 0x7f)),
        ("a flipped bit of the value", damaged(last, 1)),
        ("a flipped bit of a time", damaged(25, 1)),
    ];
    for (number, (damage, bytes)) in damages.into_iter().enumerate() {
        put(&server, &bytes);
        let before = guards[0].stats().unreadable;
        let value = 10 + number as u32;
        assert_eq!(answer(&guards[0], "k", value).await, value, "{damage}");
        assert!(guards[0].stats().unreadable > before, "{damage}: it is recorded");
        assert_eq!(answer(&guards[1], "k", 99).await, value, "{damage}: it is healed");
    }
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}

/// Damage usually affects many keys, for example by a disk, a deployment, or a second service in the namespace. There is one warning, and
/// the counter says how many entries are damaged.
#[tokio::test]
async fn damage_to_many_keys_is_one_warning() {
    let server = RedisServer::start();
    let guard = local(&server, lease_of(LEASE)).await;
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    for number in 0..50 {
        let entry = format!("sg1:e:{{default:k{number}}}");
        server.run::<()>(&["SET", &entry, "not an entry", "PX", "600000"]);
        assert_eq!(answer(&guard, &format!("k{number}"), 1).await, 1);
    }
    assert!(guard.stats().unreadable >= 50, "{:?}", guard.stats());
    let warned = warnings.about("unreadable");
    assert_eq!(warned.len(), 1, "{warned:?}");
}

#[tokio::test]
async fn callers_that_read_damaged_bytes_share_one_load() {
    let server = RedisServer::start();
    let guards = pair(&server).await;
    put(&server, b"sg\x63 from another time");
    let loads = Counter::default();
    let callers = (0..40).map(|caller| {
        let loads = loads.clone();
        guards[caller % 2].get_or_load("k", move || async move {
            let _running = loads.start();
            tokio::time::sleep(ms(200)).await;
            Ok::<_, String>(1)
        })
    });
    assert!(join_all(callers).await.into_iter().all(|value| value.is_ok()));
    assert_eq!(loads.started(), 1);
}

/// Without this check, two long keys whose digests collide would read each other's values.
#[tokio::test]
async fn an_entry_of_another_key_is_a_miss() {
    let server = RedisServer::start();
    let guards = pair(&server).await;
    answer(&guards[0], "other", 1).await;
    let other: Vec<u8> = server.run(&["GET", "sg1:e:{default:other}"]);
    put(&server, &other);
    assert_eq!(answer(&guards[1], "k", 2).await, 2);
    assert_eq!(answer(&guards[0], "k", 3).await, 2);
    assert_eq!(answer(&guards[0], "other", 3).await, 1);
}

#[tokio::test]
async fn other_peoples_data_is_never_overwritten() {
    let server = RedisServer::start();
    let guards = pair(&server).await;
    server.run::<()>(&["RPUSH", ENTRY, "theirs"]);
    server.run::<()>(&["PEXPIRE", ENTRY, "600000"]);
    let theirs = || server.run::<Vec<String>>(&["LRANGE", ENTRY, "0", "-1"]);
    for guard in &guards {
        assert_eq!(answer(guard, "k", 1).await, 1);
        assert_eq!(guard.get::<u32>("k").await.expect("an answer"), None);
        assert_eq!(theirs(), ["theirs"]);
        assert_eq!(guard.stats().unreadable, 2, "each look-up is a recorded miss");
    }
    guards[0].insert("k", &2u32).await.expect_err("it can not be stored there");
    assert_eq!(theirs(), ["theirs"]);
    guards[0].get_or_load("k", || async { Err::<u32, _>("no".to_owned()) }).await.expect_err("fails");
    assert_eq!(theirs(), ["theirs"]);
    guards[0].invalidate("k").await.expect("there is nothing of ours");
    assert_eq!(theirs(), ["theirs"]);
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}

/// A value that cannot be stored is still shared with the waiters of its load.
#[tokio::test]
async fn waiters_behind_other_peoples_data_are_served_by_one_load() {
    const NODES: usize = 4;
    let server = RedisServer::start();
    server.run::<()>(&["RPUSH", ENTRY, "theirs"]);
    server.run::<()>(&["PEXPIRE", ENTRY, "600000"]);
    let mut guards = Vec::new();
    for _ in 0..NODES {
        guards.push(local(&server, lease_of(LEASE)).await);
    }
    for wave in 1..=2 {
        let (gate, loads) = (Gate::closed(), Counter::default());
        let callers = (0..NODES * 10).map(|caller| {
            let (gate, loads) = (gate.clone(), loads.clone());
            guards[caller % NODES].get_or_load("k", move || async move {
                let _running = loads.start();
                gate.pass().await;
                Ok::<_, String>(1)
            })
        });
        let opened = async {
            loads.reach(1).await;
            queued(&server, "k", NODES - 1).await;
            gate.open();
        };
        let (values, ()) = futures_util::future::join(join_all(callers), opened).await;
        assert!(values.into_iter().all(|value| value.is_ok_and(|value| value == 1)));
        assert_eq!(loads.started(), 1, "wave {wave}");
    }
    assert_eq!(server.run::<Vec<String>>(&["LRANGE", ENTRY, "0", "-1"]), ["theirs"]);
}

/// With foreign data instead of the lease, the queue or the outcome, nodes may fail to coordinate, but every caller is answered, by at
/// most one load per process.
#[tokio::test]
async fn foreign_data_instead_of_lease_or_queue_does_no_harm() {
    for kind in ["l", "q", "o"] {
        let server = RedisServer::start();
        let guards = pair(&server).await;
        let name = format!("sg1:{kind}:{{default:k}}");
        server.run::<()>(&["HSET", &name, "f", "v"]);
        server.run::<()>(&["PEXPIRE", &name, "600000"]);
        let loads = Counter::default();
        let callers = (0..20).map(|caller| {
            let loads = loads.clone();
            guards[caller % 2].get_or_load("k", move || async move {
                let _running = loads.start();
                tokio::time::sleep(ms(200)).await;
                Ok::<_, String>(1)
            })
        });
        assert!(join_all(callers).await.into_iter().all(|value| value.is_ok()), "{name}");
        assert!(loads.started() <= 2, "{name}: {} loads", loads.started());
        guards[1].invalidate("k").await.expect("confirmed");
        guards[0].get_or_load("k", || async { Err::<u32, _>("no".to_owned()) }).await.expect_err("fails");
        guards[1].invalidate("k").await.expect("confirmed");
        settled(&guards).await;
        assert_eq!(server.run::<String>(&["HGET", &name, "f"]), "v", "{name} is theirs");
        server.run::<()>(&["DEL", &name]);
        assert_nothing_left(&server, SOON).await;
    }
}
