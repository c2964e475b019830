//! Nodes that stop and run again while values with short lifetimes are loaded: a separate world for one seed of eight, with its own random
//! stream.
//!
//! A node that was stopped after its load stores the value late. The value is not returned to a caller that came after the end of its
//! lifetime, at any node (I14).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::testing::ChaosStore;
use crate::{Policy, StampedeGuard};

/// Sets this world's random stream, which differs from that of the plans.
const STREAM: u64 = 0x0073_746f_7073;
const NODES: usize = 3;
const LASTS: Duration = Duration::from_secs(4);
/// Allows for the store's clock, which counts milliseconds, and for the stamp of a value, which it receives when its load's task runs
/// again.
const SLACK: Duration = Duration::from_millis(3);

fn ms(random: &mut Rng, least: u64, most: u64) -> Duration {
    Duration::from_millis(random.u64(least..=most))
}

/// What all tasks of this world share. A loaded value is the time at which its load ended.
struct World {
    began: Instant,
    fresh_for: Duration,
    longest: Duration,
    violations: RefCell<Vec<String>>,
}

/// Runs the seed's world of stops and returns its violations.
pub(super) async fn violations(seed: u64) -> Vec<String> {
    let seed = seed ^ STREAM;
    let (chaos, mut random) = (ChaosStore::new(seed), Rng::with_seed(seed));
    chaos.latency(Duration::from_millis(1), ms(&mut random, 1, 4));
    let (fresh_for, longest) = (ms(&mut random, 50, 500), ms(&mut random, 50, 400));
    let policy = Policy::builder().fresh_for(fresh_for).ttl_jitter(0.0).build().expect("a valid policy");
    let world = Rc::new(World { began: Instant::now(), fresh_for, longest, violations: RefCell::default() });
    let mut tasks = JoinSet::new();
    for _ in 0..NODES {
        let replica = chaos.replica();
        let guard = StampedeGuard::builder(replica.clone()).policy(policy.clone()).build().expect("a guard");
        tasks.spawn_local(asks(Rc::clone(&world), guard, random.fork()));
        let mut random = random.fork();
        tasks.spawn_local(async move {
            let began = Instant::now();
            while began.elapsed() < LASTS {
                sleep(ms(&mut random, 50, 800)).await;
                replica.stop();
                sleep(ms(&mut random, 50, 900)).await;
                replica.resume();
            }
        });
    }
    while tasks.join_next().await.is_some() {}
    world.violations.take()
}

/// The callers of a node, which start one after another; some start before the previous caller has its answer.
async fn asks(world: Rc<World>, guard: StampedeGuard, mut random: Rng) {
    let (began, mut calls) = (Instant::now(), JoinSet::new());
    while began.elapsed() < LASTS {
        let takes = ms(&mut random, 1, world.longest.as_millis() as u64);
        calls.spawn_local(ask(Rc::clone(&world), guard.clone(), takes));
        sleep(ms(&mut random, 1, 60)).await;
    }
    while calls.join_next().await.is_some() {}
}

async fn ask(world: Rc<World>, guard: StampedeGuard, takes: Duration) {
    let (began, came) = (world.began, world.began.elapsed());
    let load = move || async move {
        sleep(takes).await;
        Ok::<_, String>(began.elapsed())
    };
    let answer = guard.get_or_load("k", load).await;
    if !answer.as_ref().is_ok_and(|loaded| *loaded + world.fresh_for + SLACK >= came) {
        let text = format!(
            "I14: a caller that came at {came:?} received {answer:?}, fresh for {:?}",
            world.fresh_for
        );
        world.violations.borrow_mut().push(text);
    }
}
