//! All promises under random faults: three nodes, few keys, callers that leave, panic and fail, frequent invalidations,
//! and a server that loses connections, scripts and data, or stops for a while.
//!
//! Invariants: every caller is answered; no caller receives a value older than an invalidation that its node confirmed
//! before the call; at the end nothing is left, and everything works as at the start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use stampede_guard::LoadError;

use super::*;
use crate::support::probe::{DropAt, assert_nothing_left};

const LEASE: Duration = Duration::from_millis(800);
/// The least duration of a test. If servers start slowly, it runs on until enough calls are answered.
const FOR: Duration = Duration::from_secs(4);
const KEYS: usize = 3;

/// The origin: a version per key, which only grows.
#[derive(Default)]
struct Truth {
    versions: [AtomicU64; KEYS],
    answered: AtomicUsize,
    invalidated: AtomicUsize,
    over: AtomicBool,
}

impl Truth {
    fn now(&self, key: usize) -> u64 {
        self.versions[key].load(Ordering::SeqCst)
    }

    /// The numbers of answers and of confirmed invalidations.
    fn totals(&self) -> (usize, usize) {
        (self.answered.load(Ordering::SeqCst), self.invalidated.load(Ordering::SeqCst))
    }

    fn is_tame(&self) -> bool {
        let (answered, invalidated) = self.totals();
        answered <= 200 || invalidated <= 20
    }
}

/// Makes one call after another until the test ends.
async fn callers(guard: StampedeGuard, truth: Arc<Truth>, seed: u64, confirmed: Arc<[AtomicU64; KEYS]>) {
    let mut random = fastrand::Rng::with_seed(seed);
    while !truth.over.load(Ordering::SeqCst) {
        let key = random.usize(..KEYS);
        let (takes, how, polls) = (random.u64(..40), random.u8(..20), random.usize(..5));
        // No answer may be older than the version whose invalidation this node has confirmed before the call.
        let oldest = confirmed[key].load(Ordering::SeqCst);
        let load = {
            let truth = Arc::clone(&truth);
            move || async move {
                let version = truth.now(key);
                tokio::time::sleep(ms(takes)).await;
                match how {
                    0 => panic!("scripted"),
                    1 => Err("scripted".to_owned()),
                    _ => Ok(version),
                }
            }
        };
        let polls = if how < 5 { polls } else { usize::MAX };
        let call = DropAt::new(polls, guard.get_or_load(("key", key), load));
        let answered = tokio::time::timeout(SOON, call).await.expect("no call hangs");
        match answered {
            Some(Ok(version)) => assert!(version >= oldest, "key {key}: got {version}, confirmed {oldest}"),
            Some(Err(LoadError::Loader(_) | LoadError::Remote(_) | LoadError::Panicked(_))) | None => {}
            Some(Err(error)) => panic!("{error:?}"),
        }
        truth.answered.fetch_add(1, Ordering::SeqCst);
    }
}

/// Repeatedly changes the origin's version of a key, and invalidates the key.
async fn changes(guard: StampedeGuard, truth: Arc<Truth>, seed: u64, confirmed: Arc<[AtomicU64; KEYS]>) {
    let mut random = fastrand::Rng::with_seed(seed);
    while !truth.over.load(Ordering::SeqCst) {
        let key = random.usize(..KEYS);
        let version = truth.versions[key].fetch_add(1, Ordering::SeqCst) + 1;
        // If the server is down, an invalidation may stay unconfirmed. Then it promises nothing.
        if guard.invalidate(("key", key)).await.is_ok() {
            confirmed[key].fetch_max(version, Ordering::SeqCst);
            truth.invalidated.fetch_add(1, Ordering::SeqCst);
            let stored = guard.get::<u64>(("key", key)).await;
            if let Ok(Some(stored)) = stored {
                assert!(stored >= version, "key {key}: {stored} is stored, confirmed {version}");
            }
        }
        tokio::time::sleep(ms(random.u64(..60))).await;
    }
}

async fn run(disturb: impl AsyncFn(&RedisServer, &mut fastrand::Rng)) {
    let from_env = std::env::var("SG_SEED").ok().map(|seed| seed.parse().expect("SG_SEED is a number"));
    let seed = from_env.unwrap_or_else(|| fastrand::u64(..));
    println!("SG_SEED={seed} (schedules differ; what is done does not)");
    let mut random = fastrand::Rng::with_seed(seed);
    let server = RedisServer::start();
    let truth = Arc::new(Truth::default());
    let (mut guards, mut tasks) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let guard = local(&server, lease_of(LEASE)).await;
        let confirmed = Arc::<[AtomicU64; KEYS]>::default();
        for _ in 0..6 {
            let (guard, truth, confirmed) = (guard.clone(), Arc::clone(&truth), Arc::clone(&confirmed));
            tasks.push(tokio::spawn(callers(guard, truth, random.u64(..), confirmed)));
        }
        tasks.push(tokio::spawn(changes(guard.clone(), Arc::clone(&truth), random.u64(..), confirmed)));
        guards.push(guard);
    }
    let started = Instant::now();
    while started.elapsed() < FOR || truth.is_tame() {
        let (answered, invalidated) = truth.totals();
        assert!(started.elapsed() < FOR * 15, "{answered} answers, {invalidated} invalidations: too tame");
        // The pauses grow, in case the server starts more slowly than the first pauses last.
        let late = started.elapsed().saturating_sub(FOR) / 4;
        tokio::time::sleep(ms(random.u64(50..300)) + late).await;
        disturb(&server, &mut random).await;
    }
    truth.over.store(true, Ordering::SeqCst);
    for task in tasks {
        task.await.expect("the promises hold");
    }
    let (answered, invalidated) = truth.totals();
    println!("{answered} answers, {invalidated} invalidations");

    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
    // The nodes work as at the start: they share one load of a cold key.
    let loads = crate::support::gate::Counter::default();
    let policy = lease_of(Duration::from_secs(60));
    let guards: Vec<_> = guards.into_iter().map(|guard| guard.with_policy(policy.clone())).collect();
    for guard in &guards {
        connects(guard).await;
    }
    let callers = (0..30).map(|caller| {
        let loads = loads.clone();
        guards[caller % 3].get_or_load("after", move || async move {
            let _running = loads.start();
            tokio::time::sleep(ms(200)).await;
            Ok::<_, String>(1)
        })
    });
    assert!(join_all(callers).await.into_iter().all(|value| value.is_ok()));
    assert_eq!(loads.started(), 1);
    drop(guards);
    eventually_eq("connections are closed", SOON, 0, async || server.client_count()).await;
}

#[tokio::test]
async fn the_promises_hold_at_random_on_a_sound_server() {
    run(async |_, _| ()).await;
}

#[tokio::test]
async fn the_promises_hold_at_random_on_a_server_that_loses_everything_but_data() {
    run(async |server, random| match random.u8(..4) {
        0 => server.script_flush(),
        1 => drop(server.kill_pubsub()),
        2 => drop(server.kill_clients()),
        _ => {
            server.pause();
            tokio::time::sleep(ms(random.u64(..700))).await;
            server.resume();
        }
    })
    .await;
}

#[tokio::test]
async fn the_promises_hold_at_random_on_a_server_that_loses_its_data() {
    run(async |server, random| match random.u8(..3) {
        0 => server.flush_all(),
        1 => server.restart(),
        _ => {
            server.kill();
            tokio::time::sleep(ms(random.u64(..500))).await;
            server.start_again();
        }
    })
    .await;
}
