//! Times to live: which are accepted, and that no failure leaves a key without a TTL.

use super::*;

/// S0.3: the server receives the TTL in milliseconds.
#[tokio::test]
async fn the_server_keeps_the_time_to_live() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = with(&locks, |builder| builder.ttl(ms(1_500)));
    let mut most = 0;
    // Part of the TTL passes before PTTL reads it. On a busy machine that may be much, but not in every round.
    for _ in 0..10 {
        let mut guard = locked(&a).await;
        let left = pttl(&server, a.key());
        assert!(left <= 1_500, "{left}");
        most = most.max(left);
        guard.unlock().await.expect("asks");
    }
    assert!(most >= 1_300, "{most}");
}

/// S1.2: it would be a flaw if the default were only in the README, and not in the code.
#[tokio::test]
async fn the_default_ttl_is_sixty_seconds() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = Mutex::new(&locks, "m").expect("valid");
    let _guard = locked(&a).await;
    let left = pttl(&server, a.key());
    assert!((50_000..=60_000).contains(&left), "{left}");
}

/// S1.3: every key has a TTL, unless the mutex was made with `non_expiring`.
#[tokio::test]
async fn only_a_non_expiring_mutex_has_no_ttl() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = with(&locks, MutexBuilder::non_expiring);
    let mut guard = locked(&a).await;
    assert_eq!(pttl(&server, a.key()), -1);
    assert_eq!(server.keys_without_ttl(), [a.key()]);
    let next = waiter(&locks);
    queued(&server, 1).await;
    assert!(guard.unlock().await.expect("asks"));
    let (_guard, _) = granted(next).await;
    assert!(pttl(&server, a.key()) > 0, "the next one's is its own");
}

/// S0.4, S1.4: there were two flaws: half a second failed after the key was set, and less than a millisecond was rounded down to zero.
#[tokio::test]
async fn a_ttl_may_be_a_fraction_and_zero_is_refused_before_any_command() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for ttl in [Duration::ZERO, Duration::from_micros(500), Duration::from_nanos(1)] {
        let refused = locks.mutex("m").ttl(ttl).build();
        assert!(
            matches!(&refused, Err(LockError::InvalidTtl { ttl: reported }) if *reported == ttl),
            "{refused:?}"
        );
    }
    assert_eq!(server.keys(), Vec::<String>::new());
    let a = with(&locks, |builder| builder.ttl(ms(59_500)));
    let guard = locked(&a).await;
    assert!((50_000..=59_500).contains(&pttl(&server, a.key())));
    assert!(matches!(guard.extend(Duration::from_micros(999)).await, Err(LockError::InvalidTtl { .. })));
    assert!(guard.is_owned().await.expect("asks"));
    let half = locks.mutex("half").ttl(ms(500)).acquire_timeout(SOON).build().expect("valid");
    let mut most = -1;
    // The lock may expire before PTTL reads it, but not in every round.
    for _ in 0..10 {
        let _held = half.lock().await;
        most = most.max(pttl(&server, half.key()));
    }
    assert!((1..=500).contains(&most), "{most}");
}

/// S0.20: it would be a flaw to have one setting for both.
#[tokio::test]
async fn the_acquire_timeout_is_not_the_ttl() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = with(&locks, |builder| builder.ttl(Duration::from_secs(10)).acquire_timeout(ms(200)));
    let guard = locked(&a).await;
    let left = pttl(&server, a.key());
    assert!(left > 1_000, "{left}");
    let b = a.clone();
    assert!(matches!(refused(&b).await, LockError::AcquireTimeout { .. }));
    assert!(guard.is_owned().await.expect("asks"));
}

/// S0.24, S0.4: the changes of a script that fails are not undone. Random names, times and options are used on keys that are free, held or
/// of a foreign type: whatever the answer, no key is left without a TTL.
#[tokio::test]
async fn no_call_leaves_a_key_without_a_ttl() {
    const CALLS: usize = 600;
    let from_env = std::env::var("SG_SEED").ok().map(|seed| seed.parse().expect("SG_SEED is a number"));
    let seed = from_env.unwrap_or_else(|| fastrand::u64(..));
    println!("SG_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~lock:*"]);
    let locks = node(&server).await;
    let (mut acquired, mut refused, mut guards) = (0, 0, Vec::new());
    for call in 0..CALLS {
        let name: String = (0..random.usize(..12)).map(|_| random.char('\0'..'\u{2ff}')).collect();
        let ttl = match random.u8(..6) {
            0 => Duration::from_nanos(random.u64(..2_000_000)),
            1 => Duration::MAX,
            2 => Duration::from_secs(random.u64(..4_000 * 86_400)),
            _ => ms(random.u64(..5_000)),
        };
        let mut builder = locks.mutex(name).ttl(ttl).acquire_timeout(ms(random.u64(..3)));
        if random.bool() {
            builder = builder.prefix(["lock:", "lock:a b", "", "{x}"][random.usize(..4)]);
        }
        if random.bool() {
            builder = builder.min_remaining(ms(random.u64(..5_000)));
        }
        builder = builder.auto_renew(random.bool()).retries(random.u32(..3));
        let Ok(mutex) = builder.build() else {
            refused += 1;
            continue;
        };
        if random.u8(..8) == 0 {
            // Foreign data, of a type that no script expects, takes the key of the lock, of its queue or of its fence.
            let tag = mutex
                .key()
                .strip_prefix("sg1:m:")
                .map_or_else(|| format!("{{{}}}", mutex.key()), str::to_owned);
            let key = [mutex.key().to_owned(), format!("sg1:mq:{tag}"), format!("sg1:mf:{tag}")];
            // The data is only written if the key does not exist, because short names collide.
            let put = "if redis.call('EXISTS', KEYS[1]) == 0 then
                redis.call('SADD', KEYS[1], 'x')
                redis.call('PEXPIRE', KEYS[1], 60000)
            end";
            server.run::<()>(&["EVAL", put, "1", &key[random.usize(..3)]]);
        }
        match mutex.lock().await {
            Ok(guard) if random.bool() => guards.push(guard),
            Ok(mut guard) => {
                acquired += 1;
                assert!(guard.extend(ms(random.u64(30..60_000))).await.is_ok());
                guard.unlock().await.expect("asks");
            }
            Err(_) => refused += 1,
        }
        if call % 20 == 0 {
            assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "after call {call}");
        }
    }
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
    assert!(
        acquired > CALLS / 10 && refused > CALLS / 10,
        "{acquired} acquired, {refused} refused: too tame"
    );
    drop(guards);
    locks.close().await;
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
}
