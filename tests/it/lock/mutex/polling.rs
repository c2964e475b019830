//! Waiting by polling, and the limits of any wait. (`tests/unit/lock/tests` tests exact times, with a paused clock.)

use stampede_guard::lock::Waiting;

use super::*;
use crate::support::monitor::Monitor;

fn poll(interval: Duration) -> Waiting {
    Waiting::Poll { interval, jitter: 0.0 }
}

/// S0.9: at an interval of 100 ms, behind a holder of one second, a waiter makes 9 to 12 attempts on an idle machine,
/// and sends no other command.
#[tokio::test]
async fn polling_asks_at_its_interval() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    warm(&one).await;
    let mut holder = locked(&mutex(&one)).await;
    let b = with(&other, |builder| builder.wait(poll(ms(100))));
    let monitor = Monitor::start(&server);
    let next = tokio::spawn(async move { b.lock().await });
    tokio::time::sleep(ms(1_000)).await;
    assert!(holder.unlock().await.expect("asks"));
    let (next, took) = granted(next).await;
    let commands = monitor.finish().without(["ping", "time"]);
    // On a busy machine, where pauses are longer, there are fewer attempts, but never more.
    assert!((2..=12).contains(&next.attempts()), "{}", next.attempts());
    assert_eq!(commands.total, next.attempts() as usize + 1, "{commands:#?}");
    assert!(took < ms(100) + AT_ONCE, "{took:?}");
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
}

/// S1.5, S1.6, S1.7: it would be a flaw to pause again after the last attempt. Without retries there is one attempt; ten retries are eleven
/// attempts with ten pauses between them.
#[tokio::test]
async fn each_retry_is_one_command_and_one_pause() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let _holder = locked(&mutex(&one)).await;
    // A pause after the only attempt would take two seconds.
    for (retries, interval, least, most) in [(0, 2_000, 0, 1_000), (10, 10, 100, 1_000)] {
        let b = with(&other, |builder| builder.retries(retries).retry_interval(ms(interval)));
        // The fastest of a few rounds counts, because delays of a busy machine say nothing about pauses.
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let monitor = Monitor::start(&server);
            let started = Instant::now();
            let busy = b.lock().await;
            fastest = fastest.min(started.elapsed());
            assert!(matches!(busy, Err(LockError::TooManyAttempts { attempts }) if attempts == retries + 1));
            assert_eq!(monitor.finish().of("evalsha"), retries as usize + 1);
        }
        assert!((ms(least)..=ms(most)).contains(&fastest), "{retries} retries took {fastest:?}");
    }
}

/// S0.19: it would be a flaw to wait without end. A wait that ends after 300 ms returns an error that says so.
#[tokio::test]
async fn a_wait_ends_on_time_in_each_way_of_waiting() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let guard = locked(&mutex(&one)).await;
    for waiting in [Waiting::Notify, poll(ms(70))] {
        let b = with(&other, |builder| builder.wait(waiting).acquire_timeout(ms(300)));
        let started = Instant::now();
        let error = refused(&b).await;
        let took = started.elapsed();
        assert!((ms(300)..ms(300) + AT_ONCE).contains(&took), "{waiting:?}: {took:?}");
        let LockError::AcquireTimeout { attempts, waited } = error else { panic!("{error:?}") };
        assert!(attempts >= 1 && waited >= ms(300) && waited <= took, "{attempts} in {waited:?}");
    }
    drop(guard);
    free(&server, AT_ONCE).await;
}

/// S5.1: the settings of redlock-rb: three retries, one every 200 ms with up to 50 ms on top. The remaining time is reduced by 1 % and 2
/// ms, and measured from the sending of the command. Times are exact on the memory store, whose clock is paused.
#[tokio::test(start_paused = true)]
async fn a_mutex_can_be_configured_like_redlock() {
    let locks = Locks::in_memory();
    let set = |builder: MutexBuilder| {
        builder.ttl(ms(10_000)).retries(3).wait(Waiting::Poll { interval: ms(200), jitter: 0.25 })
    };
    let (a, b) = (with(&locks, set), with(&locks, set));
    let mut guard = locked(&a).await;
    assert_eq!(guard.remaining(), Some(ms(10_000 - 100 - 2)));
    let mut took = Vec::new();
    for _ in 0..20 {
        let started = Instant::now();
        let busy = b.lock().await;
        assert!(matches!(busy, Err(LockError::TooManyAttempts { attempts: 4 })), "{busy:?}");
        took.push(started.elapsed());
        assert!(guard.extend(ms(10_000)).await.expect("asks"));
    }
    assert!(took.iter().all(|took| (ms(600)..=ms(760)).contains(took)), "{took:?}");
    took.sort();
    assert!(took[19] - took[0] > ms(5), "pauses differ: {took:?}");
    assert!(guard.unlock().await.expect("asks"));
}
