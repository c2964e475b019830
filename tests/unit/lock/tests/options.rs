use super::*;
use crate::lock::{LockError, Mutex, Scope, Semaphore, SemaphoreBuilder, Waiting};

fn refused(built: Result<Mutex, LockError>) -> String {
    let error = built.expect_err("refused");
    assert!(!error.is_busy() && !error.is_store());
    format!("{error:?}").split(' ').next().unwrap_or_default().to_owned()
}

#[test]
fn the_defaults_are_those_that_are_documented() {
    let mutex = mutex(&Locks::in_memory());
    let options = mutex.options();
    assert_eq!(options.ttl, Some(Duration::from_secs(60)));
    assert_eq!(options.waiting, Waiting::Notify);
    assert_eq!(options.acquire_timeout, Some(Duration::from_secs(10)));
    assert_eq!((options.retries, options.retry_interval, options.jitter), (None, ms(10), 0.1));
    assert_eq!((options.min_remaining, options.auto_renew), (Duration::ZERO, false));
    assert_eq!(mutex.key(), "sg1:m:{default:door}");
}

/// S1.1: empty names and these prefixes would give locks a common key, or move a key to another slot.
#[test]
fn names_without_text_and_prefixes_that_hide_the_slot_are_refused() {
    let locks = Locks::in_memory();
    for name in [Scope::from(""), Scope::new(""), Scope::from(("",))] {
        assert_eq!(refused(Mutex::new(&locks, name)), "InvalidKey");
    }
    for prefix in ["", "{", "a}b", &"x".repeat(65)] {
        assert_eq!(refused(locks.mutex("a").prefix(prefix).build()), "InvalidKey");
    }
    assert!(matches!(Semaphore::new(&locks, "", 1), Err(LockError::InvalidKey)));
}

/// S3.13: with a prefix, a mutex has the key that other programs use, without the crate's own additions.
#[test]
fn a_prefix_makes_a_bare_key() {
    let locks = Locks::in_memory();
    let key = |name: Scope| locks.mutex(name).prefix("lock:").build().map(|mutex| mutex.key().to_owned());
    assert_eq!(key("market".into()).expect("valid"), "lock:market");
    assert_eq!(key(("a", "b").into()).expect("valid"), "lock:a:b");
    assert_eq!(key(("", "b").into()).expect("valid"), "lock::b");
    let long = key("k".repeat(1000).into()).expect("valid");
    assert!(long.len() < 300 && long.starts_with("lock:kkk"), "{long}");
    assert_ne!(long, key("k".repeat(1001).into()).expect("valid"));
}

/// S0.4, S1.4: a time to live that is zero milliseconds, or too long, is refused.
#[test]
fn times_to_live_are_whole_milliseconds_rounded_up() {
    let ttl = |ttl| Locks::in_memory().mutex("a").ttl(ttl).build().map(|mutex| mutex.options().ttl);
    for none in [Duration::ZERO, Duration::from_micros(500), Duration::MAX] {
        assert!(matches!(ttl(none), Err(LockError::InvalidTtl { ttl }) if ttl == none));
    }
    assert_eq!(ttl(Duration::from_micros(2_200)).expect("valid"), Some(ms(3)));
    assert_eq!(ttl(ms(500)).expect("valid"), Some(ms(500)));
    assert_eq!(Locks::in_memory().mutex("a").non_expiring().build().expect("valid").options().ttl, None);
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let build = |set: fn(MutexBuilder) -> MutexBuilder| refused(set(Locks::in_memory().mutex("a")).build());
    assert_eq!(build(|b| b.retry_interval(Duration::from_micros(900))), "InvalidOption");
    assert_eq!(build(|b| b.retry_interval(Duration::MAX)), "InvalidOption");
    assert_eq!(build(|b| b.wait(Waiting::Poll { interval: Duration::ZERO, jitter: 0.0 })), "InvalidOption");
    for jitter in [-0.1, 1.1, f64::NAN] {
        let locks = Locks::in_memory();
        assert_eq!(refused(locks.mutex("a").jitter(jitter).build()), "InvalidOption");
    }
    assert_eq!(build(|b| b.ttl(ms(1000)).min_remaining(ms(989))), "InvalidOption");
    assert_eq!(build(|b| b.non_expiring().auto_renew(true)), "InvalidOption");
    assert_eq!(build(|b| b.ttl(ms(29)).auto_renew(true)), "InvalidOption");
    Locks::in_memory().mutex("a").ttl(ms(1000)).min_remaining(ms(988)).build().expect("just possible");

    let build = |permits, set: fn(SemaphoreBuilder) -> SemaphoreBuilder| {
        format!("{:?}", set(Locks::in_memory().semaphore("a", permits)).build().expect_err("refused"))
    };
    assert!(build(0, |b| b).contains("permits"));
    assert!(build(1, |b| b.waiting(Waiting::Keyspace)).contains("waiting"));
    assert!(build(1, |b| b.lease(Duration::ZERO)).contains("InvalidTtl"));
    assert!(build(1, |b| b.idle_ttl(Duration::ZERO)).contains("InvalidTtl"));

    let locks = || Locks::builder(crate::MemoryStore::new());
    for builder in [locks().namespace(""), locks().namespace("n".repeat(65)), locks().command_timeout(ms(0))]
    {
        assert!(matches!(builder.build(), Err(LockError::InvalidOption { .. })));
    }
}

/// The whole of so short a time would be reserved for clock drift.
#[tokio::test(start_paused = true)]
async fn a_too_short_time_is_refused_and_the_shortest_allowed_one_works() {
    let locks = Locks::in_memory();
    for time in [ms(1), Duration::from_micros(1_500), ms(2)] {
        let errors = [
            locks.mutex("a").ttl(time).build().map(drop),
            locks.semaphore("a", 1).lease(time).build().map(drop),
        ];
        for (setting, refused) in ["ttl", "lease"].into_iter().zip(errors) {
            let text = refused.expect_err("refused").to_string();
            assert!(text.contains(setting) && text.contains("3ms"), "{text}");
        }
    }
    assert!(locked(&with(&locks, |builder| builder.ttl(ms(3)))).await.is_owned().await.expect("asks"));
    let semaphore = locks.semaphore("a", 1).lease(ms(3)).build().expect("valid");
    assert!(semaphore.acquire(crate::lock::Wait::Now).await.expect("asks").is_some());
}

/// The least time that the error suggests must not be refused, too.
#[test]
fn the_least_time_in_an_error_is_allowed() {
    let locks = Locks::in_memory();
    let refusal = |time: Duration| match locks.mutex("a").ttl(time).build().map(drop) {
        Ok(()) => String::new(),
        Err(error) => error.to_string(),
    };
    for time in [Duration::ZERO, Duration::from_micros(999), ms(1), ms(2)] {
        assert!(refusal(time).contains(" 3ms"), "{}", refusal(time));
        assert!(!refusal(time).contains("from 1ms"), "{}", refusal(time));
    }
    assert_eq!(refusal(ms(3)), "");
}

#[test]
fn an_interval_chooses_polling_unless_set_otherwise() {
    let waiting = |set: fn(MutexBuilder) -> MutexBuilder| with(&Locks::in_memory(), set).options().waiting;
    assert_eq!(
        waiting(|b| b.retry_interval(ms(20)).jitter(0.5)),
        Waiting::Poll { interval: ms(20), jitter: 0.5 }
    );
    assert_eq!(waiting(|b| b.wait(Waiting::Keyspace).retry_interval(ms(20))), Waiting::Keyspace);
    assert_eq!(waiting(|b| b.retries(3).jitter(0.5)), Waiting::Notify);
}

#[test]
fn errors_are_distinct_and_name_no_key_and_no_token() {
    let errors = [
        LockError::InvalidKey,
        LockError::InvalidTtl { ttl: ms(0) },
        LockError::option("jitter", "it is 2"),
        LockError::AlreadyAcquired,
        LockError::TooManyAttempts { attempts: 4 },
        LockError::AcquireTimeout { attempts: 2, waited: ms(300) },
        LockError::GrantedTooLate { elapsed: ms(300), ttl: ms(200) },
        LockError::NotHeld,
        LockError::NotificationsUnavailable { why: "CONFIG is refused" },
        LockError::Closed,
        LockError::CapacityMismatch { expected: 5, actual: 3 },
    ];
    let texts: std::collections::HashSet<_> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), errors.len());
    for (error, text) in errors.iter().zip(errors.iter().map(ToString::to_string)) {
        assert!(!text.ends_with('.') && text.starts_with(|first: char| !first.is_uppercase()), "{text}");
        assert!(std::error::Error::source(error).is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn debug_shows_neither_tokens_nor_names() {
    let locks = Locks::in_memory();
    let mutex = Mutex::new(&locks, "secret").expect("valid");
    let guard = locked(&mutex).await;
    let semaphore = Semaphore::new(&locks, "secret", 1).expect("valid");
    let permit = semaphore.acquire(crate::lock::Wait::Now).await.expect("asks").expect("free");
    let holders = semaphore.holders().await.expect("asks");
    let debug_text = format!("{mutex:?} {guard:?} {semaphore:?} {permit:?} {holders:?} {locks:?}");
    for hidden in ["secret", guard.token(), permit.token()] {
        assert!(!debug_text.contains(hidden), "{debug_text}");
    }
}
