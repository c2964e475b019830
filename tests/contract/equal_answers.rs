//! Memory and Redis give the same answers to any sequence of steps.
//!
//! Times are long, so that nothing expires in between; expiries are tested by the cases. A failing run prints
//! its seed; `SG_SEED` replays it.

use super::support::redis_server::RedisServer;
use super::*;

const STEPS: usize = 4_000;
/// There are few keys and tokens, so that steps often concern the same ones.
const KEYS: [&str; 3] = ["a", "b", "c"];
const FLIGHTS_PER_KEY: usize = 3;
const TEXTS: [&str; 3] = ["one", "two", "three"];

/// The same flight on both stores, so that their answers can be compared.
struct Twins {
    memory: Flight,
    redis: Flight,
}

/// An answer without the parts that may differ: the holder's token is replaced by its number, and the time is left out.
fn plain(flights: &[Twins], of: impl Fn(&Twins) -> &Flight, acquired: &Acquired) -> String {
    match acquired {
        Acquired::Held { holder, remaining } => {
            assert!(*remaining <= LEASE && *remaining > LEASE / 2, "{remaining:?}");
            let number = flights.iter().position(|twins| of(twins).token == *holder);
            format!("held by {:?}", number.expect("a token of this test"))
        }
        other => format!("{other:?}"),
    }
}

#[tokio::test]
async fn random_steps_are_answered_alike() {
    let replayed = std::env::var("SG_SEED").ok().map(|seed| seed.parse().expect("SG_SEED is a number"));
    let seed = replayed.unwrap_or_else(|| fastrand::u64(..));
    println!("SG_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);

    let server = RedisServer::start();
    let (memory, redis) = (World::memory(), World::Redis(server));
    let World::Redis(server) = &redis else { unreachable!("made above") };
    let mut flights = Vec::new();
    for name in KEYS {
        for _ in 0..FLIGHTS_PER_KEY {
            let (memory, redis) =
                (Flight::separate(&memory, &key(name)).await, Flight::separate(&redis, &key(name)).await);
            flights.push(Twins { memory, redis });
        }
    }
    let (mut granted, mut ended) = (0, 0);
    for step in 0..STEPS {
        if random.u8(..) == 0 {
            server.script_flush();
        }
        let number = random.usize(..flights.len());
        let Twins { memory, redis } = &flights[number];
        let peer = &flights[number / FLIGHTS_PER_KEY * FLIGHTS_PER_KEY + random.usize(..FLIGHTS_PER_KEY)];
        let entry = bytes(TEXTS[random.usize(..3)]);
        let seen = match random.u8(..4) {
            0 => None,
            1 => Some(bytes(TEXTS[random.usize(..3)])),
            _ => memory.look_up().await,
        };
        let what = random.u8(..12);
        let context = format!("SG_SEED={seed} step {step} kind {what}");
        match what {
            0..=4 => {
                let (behind, queue) = (random.bool(), random.u8(..4) > 0);
                let answers = async |flight: &Flight, peer: &Flight| {
                    let (seen, behind) = (seen.as_ref(), behind.then_some(&peer.token));
                    flight.acquire(Acquire { seen, behind, queue, ..flight.ask() }).await
                };
                let one = answers(memory, &peer.memory).await;
                let two = answers(redis, &peer.redis).await;
                granted += usize::from(matches!(one, Acquired::Granted));
                ended += usize::from(matches!(one, Acquired::Ended(_)));
                let one = plain(&flights, |twins| &twins.memory, &one);
                assert_eq!(one, plain(&flights, |twins| &twins.redis, &two), "{context}");
            }
            5 => assert_eq!(memory.renew(LEASE).await, redis.renew(LEASE).await, "{context}"),
            6 => {
                let commit = async |flight: &Flight| {
                    flight.store.commit(&flight.key, &flight.token, entry.clone(), LEASE, WITHIN).await
                };
                let (one, two) = (commit(memory).await, commit(redis).await);
                assert_eq!(one.expect("memory"), two.expect("redis"), "{context}");
            }
            7 | 8 => {
                let replay = if random.u8(..4) == 0 { LEASE } else { Duration::ZERO };
                let older = match random.u8(..3) {
                    0 => OlderEntry::Stays,
                    1 => OlderEntry::Ends,
                    _ => OlderEntry::Marked(bytes("marker"), LEASE),
                };
                let fail = async |flight: &Flight| {
                    let (seen, older, outcome) = (seen.as_ref(), older.clone(), entry.clone());
                    flight.fail(Fail { outcome, replay, older, seen, ..flight.failure() }).await
                };
                assert_eq!(fail(memory).await, fail(redis).await, "{context}");
            }
            9 => assert_eq!(memory.hand_over(1).await, redis.hand_over(1).await, "{context}"),
            10 => assert_eq!(memory.release().await, redis.release().await, "{context}"),
            _ => {
                let over = random.bool().then(|| seen.clone()).flatten();
                let insert = random.bool().then_some(Insert { entry, keep: LEASE, over });
                for flight in [memory, redis] {
                    let done =
                        flight.store.invalidate(&flight.key, insert.clone(), &unannounced(), WITHIN).await;
                    done.expect("invalidate");
                }
            }
        }
        assert_eq!(memory.look_up().await, redis.look_up().await, "{context}");
        if step % 100 == 0 {
            assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "{context}");
        }
    }
    assert!(granted > 100 && ended > 30, "SG_SEED={seed}: {granted} grants, {ended} outcomes: too tame");
}
