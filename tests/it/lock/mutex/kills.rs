//! Acquirers that die at random points: no key stays without a TTL, and no client waits for a dead one for longer than its TTL.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::support::processes::Fleet;
use crate::support::proxy::{Mode, Proxy};

/// How many acquirers each process has. They die with it.
const ACQUIRERS: usize = 40;
/// How many processes are killed at once, and how many times that happens.
const PROCESSES: [usize; 2] = [4, 5];
/// How many times a process loses all its connections, while commands are in flight.
const CUTS: usize = 5;

const MUTEXES: usize = 8;
const TTL: Duration = Duration::from_millis(1_500);

/// Acquires for ever, from the same few mutexes as all others: it tries, waits, gives up, holds, extends, releases, and drops guards, which
/// the background releases.
async fn acquirer(locks: Locks, calls: Arc<AtomicUsize>) {
    loop {
        let builder = locks.mutex(("contended", fastrand::usize(..MUTEXES))).ttl(TTL);
        let builder = builder.acquire_timeout(ms(fastrand::u64(..30))).auto_renew(fastrand::u8(..8) == 0);
        let mutex = builder.build().expect("valid");
        let acquired =
            if fastrand::bool() { mutex.lock().await.ok() } else { mutex.try_lock().await.ok().flatten() };
        if let Some(mut guard) = acquired {
            match fastrand::u8(..4) {
                0 => drop(guard.extend(TTL).await),
                1 => tokio::time::sleep(Duration::from_micros(fastrand::u64(..3_000))).await,
                _ => {}
            }
            if fastrand::u8(..4) > 0 {
                let _ = guard.unlock().await;
            }
        }
        calls.fetch_add(1, Ordering::Relaxed);
        // Without a connection a call fails within microseconds, so this lets other tasks run.
        tokio::task::yield_now().await;
    }
}

/// Starts many acquirers. Returns when they have made one call each on average.
async fn start(locks: &Locks) -> (Vec<JoinHandle<()>>, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let acquirers = (0..ACQUIRERS).map(|_| tokio::spawn(acquirer(locks.clone(), calls.clone()))).collect();
    eventually("they are at it", SOON, async || calls.load(Ordering::Relaxed) >= ACQUIRERS).await;
    (acquirers, calls)
}

/// A child process whose many acquirers take and free mutexes until it is killed.
pub(super) fn acquirers(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis } = child.config();
        let locks = connected(&redis).await;
        let _acquirers = start(&locks).await;
        child.ready();
        std::future::pending().await
    })
}

/// Checks that every mutex is free again within its TTL, and that every key that stays has a TTL.
async fn nothing_is_stuck(server: &RedisServer) {
    let locks = node(server).await;
    let started = Instant::now();
    for name in 0..MUTEXES {
        let mutex = locks.mutex(("contended", name)).acquire_timeout(SOON).build().expect("valid");
        let mut guard = locked(&mutex).await;
        assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
        assert!(guard.unlock().await.expect("asks"));
    }
    // The server may grant the mutex to several dead waiters in turn before it notices that they are dead.
    assert!(started.elapsed() < 2 * TTL + AT_ONCE, "{:?}", started.elapsed());
    free(server, AT_ONCE).await;
}

/// S0.4, S0.24, S5.5: 1,000 acquirers are killed at random points. 800 die by SIGKILL, 40 with each of 20 processes; 200 lose their
/// connection in the middle of a call, 40 with each of 5 cuts. None leaves a key without a TTL.
#[tokio::test]
async fn a_thousand_killed_acquirers_leave_no_key_for_ever() {
    let [at_a_time, times] = PROCESSES;
    assert_eq!(ACQUIRERS * (at_a_time * times + CUTS), 1_000);
    let server = RedisServer::start();

    let proxy = Proxy::start(server.port()).await;
    let cut = connected(&format!("redis://minimal:pw@127.0.0.1:{}/", proxy.port())).await;
    let (cut_acquirers, calls) = start(&cut).await;
    for _ in 0..CUTS {
        let before = calls.load(Ordering::Relaxed);
        proxy.set(Mode::Reset);
        proxy.set(Mode::Pass);
        assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
        eventually("it is back", SOON, async || cut.connect().await.is_ok()).await;
        eventually("they go on", SOON, async || calls.load(Ordering::Relaxed) >= before + 5 * ACQUIRERS)
            .await;
    }
    cut_acquirers.iter().for_each(JoinHandle::abort);
    nothing_is_stuck(&server).await;

    for _ in 0..times {
        let fleet = Fleet::spawn(at_a_time, "mutex.acquirers", &Config { redis: server.minimal_user() });
        fleet.wait_ready().await;
        for member in fleet.members() {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..20_000))).await;
            member.kill();
            assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
        }
    }
    nothing_is_stuck(&server).await;
}
