//! Nodes in shadow mode ("on trial") beside nodes that serve, and callers without a tag beside callers with it: a separate world for one
//! seed of eight, without faults, with its own random stream.
//!
//! A change is made at the origin and invalidated. Once that is acknowledged, no node returns an older version, whichever node has stored
//! the value, and whichever load a caller joins (I3). Only callers whose policy lacks the invalidated tag may receive an older version.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::testing::{ChaosStore, Origin};
use crate::{Policy, StampedeGuard};

/// Sets this world's random stream, which differs from that of the plans.
const STREAM: u64 = 0x7472_6961_6c73;
const NODES: usize = 4;
const KEYS: u64 = 2;
const TAG: &str = "all";
const LASTS: Duration = Duration::from_secs(2);

fn ms(random: &mut Rng, most: u64) -> Duration {
    Duration::from_millis(random.u64(1..=most))
}

/// What all tasks of this world share.
struct World {
    nodes: Vec<StampedeGuard>,
    /// How many of the nodes, counted from the first one, are on trial.
    on_trial: usize,
    /// How many of ten callers have a policy without the tag that is invalidated.
    without_tag: u8,
    origin: Origin,
    /// For each key, the newest version whose invalidation is acknowledged.
    acknowledged: RefCell<[u64; KEYS as usize]>,
    violations: RefCell<Vec<String>>,
}

/// Runs the seed's world of trials and returns its violations.
pub(super) async fn violations(seed: u64) -> Vec<String> {
    let seed = seed ^ STREAM;
    let (chaos, mut random) = (ChaosStore::new(seed), Rng::with_seed(seed));
    chaos.latency(Duration::from_millis(1), Duration::from_millis(random.u64(1..=8)));
    let (on_trial, by_tag) = (random.usize(1..NODES), random.bool());
    let without_tag = if by_tag && random.bool() { random.u8(1..=5) } else { 0 };
    let fresh_for = ms(&mut random, 400);
    let nodes = (0..NODES).map(|node| {
        let policy = Policy::builder().fresh_for(fresh_for).tags([TAG]).shadow(node < on_trial).build();
        let guard = StampedeGuard::builder(chaos.replica()).policy(policy.expect("a valid policy"));
        guard.build().expect("a guard")
    });
    let world = Rc::new(World {
        nodes: nodes.collect(),
        on_trial,
        without_tag,
        origin: Origin::new(),
        acknowledged: RefCell::default(),
        violations: RefCell::default(),
    });
    world.origin.takes(ms(&mut random, 40));
    let mut tasks = JoinSet::new();
    for node in 0..NODES {
        tasks.spawn_local(asks(Rc::clone(&world), node, random.fork()));
    }
    tasks.spawn_local(changes(Rc::clone(&world), by_tag, random.fork()));
    while tasks.join_next().await.is_some() {}
    world.violations.take()
}

/// The callers of a node, which start one after another; some start before the previous caller has its answer.
async fn asks(world: Rc<World>, node: usize, mut random: Rng) {
    let (began, mut calls) = (Instant::now(), JoinSet::new());
    while began.elapsed() < LASTS {
        let has_tag = random.u8(..10) >= world.without_tag;
        calls.spawn_local(ask(Rc::clone(&world), node, random.u64(..KEYS), has_tag));
        sleep(ms(&mut random, 30)).await;
    }
    while calls.join_next().await.is_some() {}
}

async fn ask(world: Rc<World>, node: usize, key: u64, has_tag: bool) {
    let (least, origin) = (world.acknowledged.borrow()[key as usize], world.origin.clone());
    let load = move || async move { origin.load(key).await };
    let mut guard = world.nodes[node].clone();
    if !has_tag {
        let policy = guard.policy().to_builder().tags(None::<&str>).build();
        guard = guard.with_policy(policy.expect("a valid policy"));
    }
    let answer = guard.get_or_load(("k", key), load).await;
    let is_current = answer.as_ref().is_ok_and(|version| !has_tag || *version >= least);
    if !is_current {
        let kind = if node < world.on_trial { "on trial" } else { "that serves" };
        let text = format!(
            "I3: node {node} {kind} gives {answer:?} of key {key} after version {least} was acknowledged"
        );
        world.violations.borrow_mut().push(text);
    }
}

async fn changes(world: Rc<World>, by_tag: bool, mut random: Rng) {
    let began = Instant::now();
    while began.elapsed() < LASTS {
        sleep(ms(&mut random, 60)).await;
        let (node, key) = (&world.nodes[random.usize(..NODES)], random.u64(..KEYS));
        let version = world.origin.change(key);
        let invalidated = match by_tag {
            true => node.invalidate_tag(TAG).await,
            false => node.invalidate(("k", key)).await,
        };
        match invalidated {
            Ok(()) => world.acknowledged.borrow_mut()[key as usize] = version,
            Err(error) => world.violations.borrow_mut().push(format!("I12: {error} without a fault")),
        }
    }
}
