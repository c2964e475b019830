//! Tests of the mutex for the flaws and gaps of the locks in *Redis in Action* (6.2 and 11.2): the rows S3 about locks. The rows S3 about
//! semaphores are tested in `semaphore`.

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

pub(crate) const ROLES: &[Role] = &[("book.acquirers", acquirers), ("book.holder", holder)];

fn with(locks: &Locks, set: impl FnOnce(MutexBuilder) -> MutexBuilder) -> Mutex {
    set(locks.mutex("market")).build().expect("valid")
}

/// S3.1, S3.4: `lock` gives up after ten seconds by default, or after its `acquire_timeout`, here 10 ms as in the
/// book's test.
#[tokio::test(start_paused = true)]
async fn lock_gives_up_after_ten_seconds_or_its_timeout() {
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
            assert!((expected..=expected + ms(50)).contains(&took), "{took:?} instead of {expected:?}");
        }
    }
}

/// S3.5: it would be a flaw to make no attempt at all when the timeout is zero.
#[tokio::test]
async fn a_timeout_of_zero_makes_one_attempt() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let [one, other] = [(); 2].map(|()| with(&locks, |builder| builder.acquire_timeout(Duration::ZERO)));
    let _held = locked(&one).await;
    let busy = refused(&other).await;
    assert!(matches!(busy, LockError::AcquireTimeout { attempts: 1, .. }), "{busy:?}");
}

/// S3.2, S3.3, S3.9: the key's TTL is set in milliseconds, is never rounded up to seconds, and the key's value is the
/// token.
#[tokio::test]
async fn the_key_holds_the_token_for_its_time_to_live() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for (ttl, least, most) in [(ms(1_200), 1_101, 1_200), (Duration::from_micros(1_200_001), 1_101, 1_201)] {
        let mutex = with(&locks, |builder| builder.ttl(ttl));
        let mut longest = 0;
        // Part of the TTL passes before PTTL reads it. On a busy machine that may be much, but not in every round.
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

/// The role `book.holder`: a process that acquires the lock for three seconds, and never releases it.
fn holder(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let _guard = locked(&with(&connected(&redis).await, |builder| builder.ttl(ms(3_000)))).await;
        child.ready();
        std::future::pending().await
    })
}

/// The role `book.acquirers`: a process that acquires and releases 25 locks as fast as it can, with random TTLs.
fn acquirers(mut child: Child) -> BoxFuture<'static, ()> {
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

/// S3.15: after a crash of the holder, waiters wait only for the rest of its TTL.
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

/// S3.7: it would be a flaw to set the key first and its TTL next. Forty processes, each of which makes 25 acquisitions at once, are killed
/// after a random time.
#[tokio::test]
async fn a_thousand_acquisitions_killed_anywhere_leave_no_key_for_ever() {
    let server = RedisServer::start();
    let config = Config { redis: server.minimal_user() };
    for _ in 0..10 {
        let fleet = Fleet::spawn(4, "book.acquirers", &config);
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

/// S3.8: a key without a TTL, as a crash of the book's own code leaves it. The mutex reports it as held, waiters time
/// out, and only `force_unlock` removes it.
#[tokio::test]
async fn a_foreign_key_without_a_ttl_is_busy_and_waiters_time_out() {
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

/// S3.10: the book's test of 6.2. One node acquires, another is refused until the TTL ends, and each guard releases
/// once.
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

/// S3.11, S3.12: no step is a WATCH with retries. Each step is one EVALSHA, and a server that lost the scripts
/// receives them again.
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
        // This TTL is longer. A shorter one would be announced to the waiter, which would then send a command.
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

/// S3.13: with the prefix `lock:`, a mutex has the key of the book's lock, which is excluded by it.
#[tokio::test]
async fn the_books_key_prefix_is_supported() {
    let server = RedisServer::start();
    let mutex = with(&connected(&server.url()).await, |builder| builder.prefix("lock:"));
    assert_eq!(mutex.key(), "lock:market");
    let guard = locked(&mutex).await;
    assert_eq!(server.run::<String>(&["GET", "lock:market"]), guard.token());
    // The book's own way to acquire is refused.
    assert_eq!(server.run::<i64>(&["SETNX", "lock:market", "theirs"]), 0);
}

/// S3.14: failure (a) of the book's list, a lock that is lost without its holder's knowledge. A guard that renews
/// learns of the loss at its next renewal, any other guard when its TTL ends. `synchronize` reports the loss after the
/// work.
#[tokio::test]
async fn a_holder_learns_that_its_lock_is_lost() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for renews in [true, false] {
        let mutex = with(&locks, |builder| builder.ttl(ms(900)).auto_renew(renews));
        let mut guard = locked(&mutex).await;
        let since = Instant::now();
        server.run::<()>(&["DEL", mutex.key()]);
        tokio::time::timeout(SOON, guard.lost()).await.expect("it is notified");
        let within = if renews { ms(300) } else { ms(900) };
        assert!(since.elapsed() < within + AT_ONCE, "{:?}", since.elapsed());
        assert!(guard.remaining().is_some_and(|left| left.is_zero()));
        assert!(!guard.is_owned().await.expect("asks") && !guard.unlock().await.expect("asks"));
        let work = async |_| server.run::<()>(&["DEL", mutex.key()]);
        let lasting = with(&locks, |builder| builder);
        assert!(!lasting.synchronize(work).await.expect("acquired").still_held);
    }
}

/// A resource that the lock protects. It refuses a write whose fence is below the last accepted one.
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

/// S3.16: failures (c) and (d), in which several clients believe to hold the lock. Two nodes make 2,000 acquisitions, some of which are
/// lost before they write. Fences only grow, so a late write is refused.
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
                // On a busy machine a grant with a TTL of 5 ms may arrive too late; `lock` has then released it.
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

/// S3.22: by default, the pauses between polls have jitter, which only makes them longer than the configured interval.
#[tokio::test(start_paused = true)]
async fn polling_has_jitter_by_default() {
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

/// S3.23: items can be locked one by one, instead of the whole market.
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
