//! The mutex where the locks of Redis in Action (6.2 and 11.2) go wrong or are silent: rows S3, as far as they are
//! about locks. What is about semaphores is beside this.

use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use stampede_guard::MemoryStore;
use stampede_guard::lock::{LockError, Locks, Mutex, MutexBuilder, Waiting};
use tokio::time::Instant;

use crate::support::PATIENCE;
use crate::support::monitor::Monitor;
use crate::support::probe::{eventually, eventually_eq};
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

use super::nodes::{A_MOMENT, AT_ONCE, SOON, connected, locked, ms, node, refused};

pub(crate) const ROLES: &[Role] = &[("book.crowd", crowd), ("book.holder", holder)];

fn with(locks: &Locks, set: impl FnOnce(MutexBuilder) -> MutexBuilder) -> Mutex {
    set(locks.mutex("market")).build().expect("valid")
}

/// S3.1, S3.4: ten seconds where nothing is said, and as in the book's test a hundredth of one.
#[tokio::test(start_paused = true)]
async fn it_is_given_up_after_ten_seconds_or_as_told() {
    let store = MemoryStore::new();
    let (one, other) = (Locks::new(store.clone()), Locks::new(store));
    let _held = locked(&with(&one, |builder| builder)).await;
    for (set, expected) in [(None, Duration::from_secs(10)), (Some(ms(10)), ms(10))] {
        let mutex = with(&other, |builder| match set {
            None => builder,
            Some(set) => builder.acquire_timeout(set),
        });
        let since = Instant::now();
        let Err(LockError::AcquireTimeout { attempts, waited }) = mutex.lock().await else {
            panic!("it is held")
        };
        assert!(attempts >= 1);
        for took in [since.elapsed(), waited] {
            assert!((expected..=expected + ms(50)).contains(&took), "{took:?} in place of {expected:?}");
        }
    }
}

/// S3.5: the flaw of no attempt at all.
#[tokio::test]
async fn without_any_time_there_is_one_attempt() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let [one, other] = [(); 2].map(|()| with(&locks, |builder| builder.acquire_timeout(Duration::ZERO)));
    let _held = locked(&one).await;
    let busy = refused(&other).await;
    assert!(matches!(busy, LockError::AcquireTimeout { attempts: 1, .. }), "{busy:?}");
}

/// S3.2, S3.3, S3.9: in milliseconds, never for longer by being rounded to seconds, and with the token as its value.
#[tokio::test]
async fn the_key_holds_the_token_for_its_time() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for (ttl, least, most) in [(ms(1_200), 1_101, 1_200), (Duration::from_micros(1_200_001), 1_101, 1_201)] {
        let mutex = with(&locks, |builder| builder.ttl(ttl));
        let mut longest = 0;
        // Some of it is over before it is looked at: more on a busy machine, but not each time.
        for _ in 0..10 {
            let mut guard = locked(&mutex).await;
            let left: i64 = server.run(&["PTTL", mutex.key()]);
            assert!(left <= most, "{left}");
            longest = longest.max(left);
            assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
            guard.unlock().await.expect("asks");
        }
        assert!(longest >= least, "{longest}");
    }
    let mutex = with(&locks, |builder| builder);
    let guard = locked(&mutex).await;
    assert_eq!(server.run::<String>(&["GET", mutex.key()]), guard.token());
}

#[derive(Serialize, Deserialize)]
struct Config {
    redis: String,
}

/// The role `book.holder`: holds the lock for three seconds, and would not release it.
fn holder(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let _guard = locked(&with(&connected(&redis).await, |builder| builder.ttl(ms(3_000)))).await;
        child.ready();
        std::future::pending().await
    })
}

/// The role `book.crowd`: takes and releases 25 locks as fast as it can, with times to live of all kinds.
fn crowd(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let locks = connected(&redis).await;
        child.ready();
        child.wait_go().await;
        let lanes = (0..25).map(|lane| {
            let mutex = locks.mutex(("item", lane)).ttl(ms(200 + fastrand::u64(..1_000))).build();
            async move {
                let mutex = mutex.expect("valid");
                while mutex.synchronize(async |_| tokio::task::yield_now().await).await.is_ok() {}
            }
        });
        join_all(lanes).await;
    })
}

/// S3.15: the others wait for the rest of its time, and not for ever.
#[tokio::test]
async fn a_holder_that_crashes_costs_its_time_to_live() {
    let server = RedisServer::start();
    let mutex = with(&node(&server).await, |builder| builder.acquire_timeout(PATIENCE));
    let fleet = Fleet::spawn(1, "book.holder", &Config { redis: server.minimal_user() });
    fleet.wait_ready().await;
    assert!(mutex.try_lock().await.expect("asks").is_none());
    fleet.member(0).kill();
    let since = Instant::now();
    let _held = locked(&mutex).await;
    assert!(since.elapsed() < ms(3_000) + A_MOMENT, "{:?}", since.elapsed());
}

/// S3.7: the flaw of a key that is set first and given its time to live next. Forty processes with 25 locks on their
/// way each are killed after a random time.
#[tokio::test]
async fn a_thousand_acquisitions_killed_anywhere_leave_no_key_for_ever() {
    let server = RedisServer::start();
    let config = Config { redis: server.minimal_user() };
    for _ in 0..10 {
        let fleet = Fleet::spawn(4, "book.crowd", &config);
        fleet.wait_ready().await;
        fleet.go();
        for member in fleet.members() {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..8_000))).await;
            member.kill();
            assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
        }
    }
    assert!(!server.keys().is_empty(), "they had not begun");
    eventually("every lock is free in the end", SOON, async || {
        !server.keys().iter().any(|key| key.starts_with("sg1:m:"))
    })
    .await;
}

/// S3.8: a lock that a crash of the book's own code left for ever. It is seen, it is waited for in vain and not for
/// ever, and it is removed by force only.
#[tokio::test]
async fn a_foreign_key_without_an_end_is_busy_and_no_trap() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for waiting in [Waiting::Notify, Waiting::Poll { interval: ms(10), jitter: 0.1 }] {
        let mutex = with(&locks, |builder| builder.wait(waiting).acquire_timeout(ms(300)));
        server.run::<()>(&["SET", mutex.key(), "1339518083.107412"]);
        assert!(mutex.is_locked().await.expect("asks"));
        assert_eq!(mutex.remaining().await.expect("asks"), Some(Duration::MAX), "it is said to have no end");
        assert!(mutex.try_lock().await.expect("asks").is_none());
        let since = Instant::now();
        let busy = refused(&mutex).await;
        assert!(matches!(busy, LockError::AcquireTimeout { .. }), "{busy:?}");
        assert!((ms(300)..ms(300) + AT_ONCE).contains(&since.elapsed()), "{:?}", since.elapsed());
        assert_eq!(server.run::<String>(&["GET", mutex.key()]), "1339518083.107412");
        assert!(mutex.force_unlock().await.expect("asks"));
        assert!(locked(&mutex).await.unlock().await.expect("asks"));
    }
}

/// S3.10: the book's test of 6.2: it is had, a second one is not, it comes back by itself, and is released once.
#[tokio::test]
async fn only_the_holder_releases() {
    let server = RedisServer::start();
    let [one, other] = [node(&server).await, node(&server).await]
        .map(|locks| with(&locks, |builder| builder.ttl(ms(2_000)).acquire_timeout(ms(10))));
    let mut lost = locked(&one).await;
    assert!(matches!(refused(&other).await, LockError::AcquireTimeout { .. }));
    eventually("it comes back by itself", SOON, async || !other.is_locked().await.expect("asks")).await;
    let mut held = locked(&other).await;
    assert!(!lost.unlock().await.expect("asks"));
    assert!(held.unlock().await.expect("asks") && !held.unlock().await.expect("asks"));
    assert!(locked(&one).await.unlock().await.expect("asks"));
}

/// S3.11, S3.12: nothing is watched and tried again; after the first time, scripts are named and not sent; and a server
/// that forgot them is told them again.
#[tokio::test]
async fn each_step_is_one_cached_script() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let (one, other) = (with(&one, |builder| builder), with(&other, |builder| builder));
    let handed_over = async || {
        let mut guard = locked(&one).await;
        let next = tokio::spawn({
            let other = other.clone();
            async move { locked(&other).await.unlock().await.expect("asks") }
        });
        let queue = "sg1:mq:{default:market}";
        eventually_eq("it waits", SOON, 1, async || server.run::<usize>(&["LLEN", queue])).await;
        // For longer: who waits is told of a shorter time, and asks.
        assert!(guard.extend(ms(120_000)).await.expect("asks") && guard.unlock().await.expect("asks"));
        assert!(next.await.expect("joined"));
    };
    handed_over().await;
    server.script_flush();
    handed_over().await;
    let monitor = Monitor::start(&server);
    for _ in 0..5 {
        handed_over().await;
    }
    let commands = monitor.finish().without(["ping", "time"]);
    assert_eq!((commands.total, commands.of("evalsha")), (25, 25), "five each: {commands:#?}");
}

/// S3.13
#[tokio::test]
async fn the_books_prefix_is_on_offer() {
    let server = RedisServer::start();
    let mutex = with(&connected(&server.url()).await, |builder| builder.prefix("lock:"));
    assert_eq!(mutex.key(), "lock:market");
    let guard = locked(&mutex).await;
    assert_eq!(server.run::<String>(&["GET", "lock:market"]), guard.token());
    // The book's own acquire excludes it, and is excluded.
    assert_eq!(server.run::<i64>(&["SETNX", "lock:market", "theirs"]), 0);
}

/// S3.14: failure (a) of the book's list, a lock that is lost without its holder knowing. A renewed one is told at its
/// next renewal, another one when its time is over; and whoever worked under it is told at the end.
#[tokio::test]
async fn a_holder_whose_lock_has_gone_is_told() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for renews in [true, false] {
        let mutex = with(&locks, |builder| builder.ttl(ms(900)).auto_renew(renews));
        let mut guard = locked(&mutex).await;
        let since = Instant::now();
        server.run::<()>(&["DEL", mutex.key()]);
        tokio::time::timeout(SOON, guard.lost()).await.expect("it is told");
        let within = if renews { ms(300) } else { ms(900) };
        assert!(since.elapsed() < within + AT_ONCE, "{:?}", since.elapsed());
        assert!(guard.remaining().is_some_and(|left| left.is_zero()));
        assert!(!guard.is_owned().await.expect("asks") && !guard.unlock().await.expect("asks"));
        let work = async |_| server.run::<()>(&["DEL", mutex.key()]);
        let lasting = with(&locks, |builder| builder);
        assert!(!lasting.synchronize(work).await.expect("acquired").still_held);
    }
}

/// What is written to beside the lock, and refuses those who come after the next one.
#[derive(Debug, Default)]
struct Register {
    fence: u64,
    writes: u32,
}

impl Register {
    fn write(&mut self, fence: u64) -> Result<(), u64> {
        if fence < self.fence {
            return Err(self.fence);
        }
        (self.fence, self.writes) = (fence, self.writes + 1);
        Ok(())
    }
}

/// S3.16: failures (c) and (d), many who all believe that they hold it: 2,000 acquisitions of two nodes, some of which
/// are lost before they write. Their fences only grow, and a late write is refused.
#[tokio::test]
async fn fences_only_grow_and_a_late_write_is_refused() {
    const ACQUISITIONS: u32 = 2_000;
    let server = RedisServer::start();
    let nodes = [node(&server).await, node(&server).await];
    let lasting = nodes.each_ref().map(|locks| with(locks, |builder| builder));
    let fleeting = nodes.each_ref().map(|locks| with(locks, |builder| builder.ttl(ms(5))));
    let (mut register, mut last) = (Register::default(), 0);
    for acquisition in 0..ACQUISITIONS {
        let of = fastrand::usize(..2);
        let lost = match acquisition % 20 {
            0 => {
                let lost = fleeting[of].lock().await;
                // On a busy machine a grant of 5 ms may come too late; then it was given back.
                let free = async || !lasting[of].is_locked().await.expect("asks");
                eventually("it is lost", SOON, free).await;
                lost.ok()
            }
            1 => {
                let lost = locked(&lasting[of]).await;
                assert!(lasting[1 - of].force_unlock().await.expect("asks"));
                Some(lost)
            }
            _ => None,
        };
        let mut guard = locked(&lasting[fastrand::usize(..2)].clone()).await;
        let fences = [lost.as_ref().map(|lost| lost.fence()), Some(guard.fence())];
        for fence in fences.into_iter().flatten() {
            assert!(fence > last, "{fence} after {last}");
            last = fence;
        }
        register.write(guard.fence()).expect("it is the holder");
        if let Some(lost) = lost {
            assert_eq!(register.write(lost.fence()), Err(guard.fence()));
        }
        assert!(guard.unlock().await.expect("asks"));
    }
    assert_eq!(register.writes, ACQUISITIONS);
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "no counter is left for ever");
}

/// S3.22: pauses are spread where nothing else is said, and never shorter than asked.
#[tokio::test(start_paused = true)]
async fn polling_is_spread_by_default() {
    let store = MemoryStore::new();
    let (one, other) = (Locks::new(store.clone()), Locks::new(store));
    let _held = locked(&with(&one, |builder| builder)).await;
    let paced =
        |builder: MutexBuilder| builder.retry_interval(ms(100)).acquire_timeout(Duration::from_secs(10));
    let by_default = with(&other, paced);
    assert!(by_default.options().jitter > 0.0);
    let mut seen = Vec::new();
    for mutex in [by_default, with(&other, |builder| paced(builder).jitter(0.0))] {
        let Err(LockError::AcquireTimeout { attempts, .. }) = mutex.lock().await else {
            panic!("it is held")
        };
        seen.push(attempts);
    }
    assert!((92..100).contains(&seen[0]) && (100..=101).contains(&seen[1]), "{seen:?}");
}

/// S3.23: one lock per item in place of one for the market.
#[tokio::test]
async fn locks_of_different_items_are_held_at_once() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut held = Vec::new();
    for item in 0..10 {
        for locks in [&one, &other] {
            let mutex = locks.mutex(("market", item)).build().expect("valid");
            held.extend(mutex.try_lock().await.expect("asks"));
        }
    }
    assert_eq!(held.len(), 10, "each once");
    assert!(with(&one, |builder| builder).try_lock().await.expect("asks").is_some(), "the market is another");
}
