//! Each fault does what its documentation says, and a seed reproduces it.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Answer, ChaosStore, Fault, Origin};
use crate::health::LinkState;
use crate::store::wake_leases::Hints;
use crate::store::{Acquire, Acquired, HandOver, HandedOver, Store, StoreErrorKind, Token, TokenCheck};
use crate::{Backend, CacheKey, ErrorKind, Policy, StampedeGuard};

const WITHIN: Duration = Duration::from_millis(50);
const LEASE: Duration = Duration::from_secs(2);

fn key() -> crate::key::Key {
    crate::key::Key::new("ns", &CacheKey::from("k"))
}

async fn acquire(node: &Store, token: &Token) -> Result<Acquired, StoreErrorKind> {
    let ask = Acquire { token, lease: LEASE, seen: None, behind: None, queue: true };
    node.acquire(&key(), ask, WITHIN).await.map_err(|error| error.kind)
}

/// Sends one ACQUIRE under `fault`. Returns whether it has the lease at once, and whether it had it within four seconds, and the answer
/// that its caller received.
async fn one_acquire(fault: Fault) -> (bool, bool, Result<Acquired, StoreErrorKind>) {
    let chaos = ChaosStore::new(3);
    let node = Backend::from(chaos.replica()).node(WITHIN);
    let token = Token::mint(node.node());
    chaos.once(fault);
    let answer = acquire(&node, &token).await;
    let mine = || chaos.store().lease(key().name()).is_some_and(|(holder, _)| holder == token);
    let at_once = mine();
    let mut later = at_once;
    for _ in 0..40 {
        sleep(Duration::from_millis(100)).await;
        later |= mine();
    }
    assert_eq!(chaos.struck(fault), 1);
    (at_once, later, answer)
}

#[tokio::test(start_paused = true)]
async fn connection_faults_decide_whether_a_command_runs_and_what_its_caller_gets() {
    use StoreErrorKind::{Broken, TimedOut, Transient, Unavailable};
    for (fault, runs, error) in [
        (Fault::ErrorBefore, (false, false), Unavailable),
        (Fault::ErrorAfter, (true, true), Broken),
        (Fault::Ghost, (false, true), TimedOut),
        (Fault::BlackHole, (false, false), TimedOut),
        (Fault::OutOfMemory, (false, false), Transient),
        (Fault::ReadOnly, (false, false), Unavailable),
    ] {
        let (at_once, later, answer) = one_acquire(fault).await;
        assert_eq!(((at_once, later), answer.err()), (runs, Some(error)), "{fault}");
    }
    let began = Instant::now();
    let (.., answer) = one_acquire(Fault::Slow).await;
    assert!(began.elapsed() > Duration::from_secs(4) && !matches!(answer, Ok(Acquired::Held { .. })));
}

#[tokio::test(start_paused = true)]
async fn the_store_and_its_leases_follow_the_paused_clock() {
    let chaos = ChaosStore::new(1);
    let node = Backend::from(chaos.replica()).node(WITHIN);
    let (one, other) = (Token::mint(node.node()), Token::mint(node.node()));
    assert!(matches!(acquire(&node, &one).await, Ok(Acquired::Granted)));
    let before = node.now();
    tokio::time::advance(LEASE - Duration::from_millis(1)).await;
    assert!(matches!(acquire(&node, &other).await, Ok(Acquired::Held { .. })));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(matches!(acquire(&node, &other).await, Ok(Acquired::Granted)));
    assert_eq!(node.now() - before, 2_000);
    let keep = Duration::from_secs(3600);
    assert_eq!(
        node.commit(&key(), &other, "v".into(), keep, WITHIN).await.expect("answered"),
        TokenCheck::Held
    );
    tokio::time::advance(keep - Duration::from_millis(1)).await;
    assert_eq!(chaos.store().len(), 1);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(chaos.store().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn faults_of_the_store_affect_every_guard() {
    let chaos = ChaosStore::new(5);
    let guard = StampedeGuard::new(chaos.clone());
    let stored = async || guard.get::<u32>("k").await.expect("answered");
    for fault in [Fault::EvictEntry, Fault::Flush, Fault::Corrupt] {
        guard.insert("k", &7_u32).await.expect("stored");
        chaos.once(fault);
        assert_eq!((stored().await, chaos.struck(fault)), (None, 1), "{fault}");
    }
    guard.insert("k", &7_u32).await.expect("stored");
    chaos.store().step_clock(3_600_000);
    assert_eq!(stored().await, None, "an hour later by the store's clock");

    // A failover loses at most the last half second of changes, so in some runs it loses the second value, and never both.
    guard.insert("k", &8_u32).await.expect("stored");
    sleep(Duration::from_millis(501)).await;
    let mut lost = 0;
    for _ in 0..20 {
        guard.insert("k", &8_u32).await.expect("stored");
        sleep(Duration::from_millis(501)).await;
        guard.insert("k", &9_u32).await.expect("stored");
        sleep(Duration::from_millis(250)).await;
        chaos.once(Fault::FailOver);
        let value = stored().await.expect("never both of them");
        assert!(value == 8 || value == 9);
        lost += u32::from(value == 8);
    }
    assert!((1..20).contains(&lost), "{lost}");
}

/// Faults are also injected over a memory store that the caller has made.
#[tokio::test(start_paused = true)]
async fn faults_strike_a_callers_own_memory_store() {
    let store = crate::MemoryStore::with_capacity(1 << 20);
    let chaos = ChaosStore::over(store.clone(), 5);
    let guard = StampedeGuard::new(chaos.clone());
    guard.insert("k", &7_u32).await.expect("stored");
    assert_eq!((store.len(), chaos.store().len()), (1, 1));
    chaos.once(Fault::Flush);
    assert_eq!(guard.get::<u32>("k").await.expect("answered"), None);
    assert_eq!((store.len(), chaos.struck(Fault::Flush)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn wake_ups_are_lost_doubled_and_forged() {
    let chaos = ChaosStore::new(2);
    let (one, other) =
        (Backend::from(chaos.replica()).node(WITHIN), Backend::from(chaos.replica()).node(WITHIN));
    let (holder, waiter) = (Token::mint(one.node()), Token::mint(other.node()));
    let watch = other.watch(&key(), &waiter);
    let hints = async |most: Duration| tokio::time::timeout(most, watch.hints()).await.ok();
    let second = Duration::from_secs(1);
    let finished = Some(Hints { finished: Some(holder.clone()), ..Hints::default() });
    let commit = async || {
        acquire(&one, &holder).await.expect("answered");
        acquire(&other, &waiter).await.expect("answered");
        one.commit(&key(), &holder, "v".into(), Duration::from_millis(1), WITHIN).await.expect("answered");
        sleep(Duration::from_millis(5)).await;
    };
    commit().await;
    assert_eq!(hints(second).await, finished);
    chaos.once(Fault::WakeLost);
    commit().await;
    assert_eq!(hints(second).await, None);
    chaos.once(Fault::WakeTwice);
    commit().await;
    assert_eq!((hints(second).await, hints(second).await), (finished.clone(), finished));
    chaos.once(Fault::WakeForged);
    let _ = one.look_up(&key(), WITHIN).await;
    assert!(hints(second).await.is_some());
    chaos.once(Fault::Unreachable);
    let _ = other.look_up(&key(), WITHIN).await;
    commit().await;
    assert_eq!(hints(second * 2).await, Some(Hints { missed: true, ..Hints::default() }));
    assert!(other.hints_arrive());
}

#[tokio::test(start_paused = true)]
async fn a_stopped_replica_goes_on_and_a_cut_one_comes_back() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let replica = chaos.replica();
    let guard = StampedeGuard::new(replica.clone());
    let load = || {
        let origin = origin.clone();
        move || async move { origin.load("k").await }
    };
    replica.stop();
    let call = tokio::spawn({
        let (guard, load) = (guard.clone(), load());
        async move { guard.get_or_load("k", load).await }
    });
    sleep(Duration::from_secs(100)).await;
    assert!(!call.is_finished());
    replica.resume();
    assert_eq!(call.await.expect("no panic").ok(), Some(0));
    // The call's budget was used up while its replica was stopped, so it loaded without the store; the next call uses the store.
    assert_eq!((chaos.store().len(), origin.loads("k")), (0, 1));
    assert_eq!(guard.get_or_load("k", load()).await.ok(), Some(0));
    assert_eq!((chaos.store().len(), origin.loads("k")), (1, 2));

    replica.cut();
    let began = Instant::now();
    assert!(guard.get_or_load("k", load()).await.is_ok(), "for itself");
    assert!(began.elapsed() <= Policy::default().coordination_budget + Duration::from_millis(1));
    assert_eq!(origin.loads("k"), 3);
    replica.resume();
    assert!(guard.get_or_load("k", load()).await.is_ok());
    assert_eq!(origin.loads("k"), 3, "what was stored before is there again");
}

/// What the guard reports about its connections must agree with what happens to its commands.
#[tokio::test(start_paused = true)]
async fn a_cut_off_replica_reports_it_until_it_resumes() {
    let chaos = ChaosStore::new(1);
    let (one, other) = (chaos.replica(), chaos.replica());
    let (cut, well) = (StampedeGuard::new(one.clone()), StampedeGuard::new(other));
    let links = |guard: &StampedeGuard| (guard.health().commands, guard.health().inbox);
    cut.connect().await.expect("it is there");
    one.cut();
    let error = cut.connect().await.expect_err("it is cut off");
    assert_eq!(error.kind(), ErrorKind::Store, "{error}");
    assert_eq!(links(&cut), (LinkState::Down, LinkState::Down));
    assert!(cut.health().to_string().contains("cut off"), "{}", cut.health());
    let report = cut.doctor().await;
    assert!(!report.is_healthy() && report.to_string().contains("cut off"), "{report}");
    well.connect().await.expect("the others are not");
    assert_eq!(links(&well), (LinkState::Up, LinkState::Up));

    one.resume();
    cut.connect().await.expect("it is back");
    assert_eq!((links(&cut), cut.health().reason), ((LinkState::Up, LinkState::Up), None));
    assert!(cut.doctor().await.is_healthy());
    // Once a guard was shut down, it reports that instead of the cut.
    cut.shutdown(Duration::ZERO).await;
    one.cut();
    assert_eq!(links(&cut), (LinkState::Closed, LinkState::Closed));
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_comes_when_its_waiter_has_left_is_passed_on() {
    let chaos = ChaosStore::new(1);
    chaos.latency(Duration::from_millis(2), Duration::from_millis(2));
    let (one, other) =
        (Backend::from(chaos.replica()).node(WITHIN), Backend::from(chaos.replica()).node(WITHIN));
    let (holder, waiter) = (Token::mint(one.node()), Token::mint(other.node()));
    acquire(&one, &holder).await.expect("answered");
    let watch = other.watch(&key(), &waiter);
    assert!(matches!(acquire(&other, &waiter).await, Ok(Acquired::Held { .. })));
    drop(watch);
    let how = HandOver { lease: LEASE, hops: 1, is_leaving: false };
    let done = one.hand_over(&key(), &holder, how, WITHIN).await.expect("answered");
    assert_eq!(done, HandedOver::ToWaiter);
    sleep(Duration::from_millis(10)).await;
    assert_eq!(chaos.store().lease(key().name()), None);
}

/// Runs a busy minute, and returns all its events: commands, faults, loads, and the time of each answer. `cap` limits concurrent
/// loads: further loads wait for a permit, and ask again at random times that the guard chooses.
fn busy(seed: u64, cap: Option<u32>) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let (chaos, origin) = (ChaosStore::new(seed), Origin::new());
        chaos.latency(Duration::ZERO, Duration::from_millis(4));
        for &fault in Fault::ALL {
            chaos.inject(fault, 0.03);
        }
        origin.takes(Duration::from_millis(30));
        origin.always("k", Answer::After(Duration::from_millis(5)));
        let policy = Policy::builder().fresh_for(Duration::from_millis(200));
        let policy = match cap {
            Some(cap) => policy.max_concurrent_loads(cap),
            None => policy,
        };
        let policy = policy.build().expect("valid");
        let mut calls = tokio::task::JoinSet::new();
        let began = Instant::now();
        for n in 0..4 {
            let guard = StampedeGuard::new(chaos.clone()).with_policy(policy.clone());
            for caller in 0..5_u64 {
                let (guard, origin) = (guard.clone(), origin.clone());
                calls.spawn(async move {
                    let mut answers = Vec::new();
                    for round in 0..20 {
                        let origin = origin.clone();
                        let key = ["k", "l", "m"][(caller as usize + round) % 3];
                        let call = guard.get_or_load(key, move || async move { origin.load(key).await });
                        let is_ok = call.await.is_ok();
                        answers.push((n, caller, began.elapsed().as_micros(), is_ok));
                        sleep(Duration::from_millis(31 + caller)).await;
                    }
                    answers
                });
            }
        }
        let answers = calls.join_all().await;
        let struck: Vec<_> = Fault::ALL.iter().map(|&fault| chaos.struck(fault)).collect();
        format!("{} {} {struck:?} {answers:?}", chaos.commands(), origin.total_loads())
    })
}

#[test]
fn the_same_seed_makes_the_same_run() {
    for seed in 0..20 {
        for cap in [None, Some(1), Some(2)] {
            assert_eq!(busy(seed, cap), busy(seed, cap), "SEED={seed}");
        }
    }
    assert_ne!(busy(1, None), busy(2, None));
}
