//! Loads that add their tags before, while or after they read the origin: a separate world for one seed of eight, with its own random
//! stream. In half of the runs the store loses records, commands and answers.
//!
//! A change is made at the origin, and its tag is invalidated or expired. Once that is acknowledged, no caller that comes later receives an
//! older version (I3), or, after an expiry, none as a fresh one: whichever node has stored it or loads it, and whenever that load has
//! added the tag.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::sync::lock;
use crate::testing::{ChaosStore, Fault};
use crate::{LoadContext, Outcome, Policy, StampedeGuard};

/// Sets this world's random stream, which differs from that of the plans.
const STREAM: u64 = 0x006c_6174_6574_6167;
const NODES: usize = 3;
const KEYS: u64 = 2;
const LASTS: Duration = Duration::from_secs(4);
const LOSSES: [Fault; 6] =
    [Fault::ErrorBefore, Fault::ErrorAfter, Fault::Ghost, Fault::EvictEntry, Fault::EvictLog, Fault::Flush];

fn ms(random: &mut Rng, most: u64) -> Duration {
    Duration::from_millis(random.u64(1..=most))
}

/// What all tasks of this world share. All keys have one tag.
struct World {
    nodes: Vec<StampedeGuard>,
    has_faults: bool,
    version: Arc<AtomicU64>,
    /// The newest version with an acknowledged invalidation, and that with an acknowledged change of either kind.
    invalidated: AtomicU64,
    acknowledged: AtomicU64,
    violations: Mutex<Vec<String>>,
}

/// Runs the seed's world of late tags and returns its violations.
pub(super) async fn violations(seed: u64) -> Vec<String> {
    let seed = seed ^ STREAM;
    let (chaos, mut random) = (ChaosStore::new(seed), Rng::with_seed(seed));
    chaos.latency(Duration::from_millis(1), Duration::from_millis(random.u64(1..=8)));
    let has_faults = random.bool();
    for fault in LOSSES.into_iter().filter(|_| has_faults) {
        chaos.inject(fault, 0.01);
    }
    let local_for = if random.u8(..4) == 0 { Duration::from_secs(60) } else { Duration::ZERO };
    let policy = Policy::builder().fresh_for(ms(&mut random, 2_000)).local_for(local_for);
    let window = if random.bool() { Duration::from_secs(1) } else { Duration::ZERO };
    let policy = policy.stale_while_revalidate(window).build().expect("a valid policy");
    let node = |_| StampedeGuard::builder(chaos.replica()).policy(policy.clone()).build().expect("a guard");
    let world = Rc::new(World {
        nodes: (0..NODES).map(node).collect(),
        has_faults,
        version: Arc::default(),
        invalidated: AtomicU64::new(0),
        acknowledged: AtomicU64::new(0),
        violations: Mutex::default(),
    });
    let mut tasks = JoinSet::new();
    for node in 0..NODES {
        tasks.spawn_local(asks(Rc::clone(&world), node, random.fork()));
    }
    tasks.spawn_local(changes(Rc::clone(&world), random.fork()));
    while tasks.join_next().await.is_some() {}
    std::mem::take(&mut *lock(&world.violations))
}

async fn asks(world: Rc<World>, node: usize, mut random: Rng) {
    let (began, mut calls) = (Instant::now(), JoinSet::new());
    while began.elapsed() < LASTS {
        calls.spawn_local(ask(Rc::clone(&world), node, random.fork()));
        sleep(ms(&mut random, 40)).await;
    }
    while calls.join_next().await.is_some() {}
}

async fn ask(world: Rc<World>, node: usize, mut random: Rng) {
    let (key, tags_at, takes) = (random.u64(..KEYS), random.u8(..3), [(); 2].map(|()| ms(&mut random, 30)));
    let [least, least_stale] = [&world.acknowledged, &world.invalidated].map(|version| version.load(SeqCst));
    let version = Arc::clone(&world.version);
    let load = move |mut cx: LoadContext<u64>| async move {
        let mut read = 0;
        for step in 0..3 {
            if step == 1 {
                read = version.load(SeqCst);
            }
            if step == tags_at {
                cx.tag(["all"]).await.map_err(|error| error.to_string())?;
            }
            if let Some(time) = takes.get(usize::from(step)) {
                sleep(*time).await;
            }
        }
        Ok::<_, String>(read)
    };
    let loaded = world.nodes[node].load(("k", key)).get(load).await;
    let answer = loaded.map(|loaded| (loaded.value, loaded.info.outcome));
    let is_current = match &answer {
        Ok((version, Outcome::Stale)) => *version >= least_stale,
        Ok((version, _)) => *version >= least,
        Err(_) => world.has_faults,
    };
    if !is_current {
        let text =
            format!("I3: node {node} gives {answer:?} of key {key} after version {least} was acknowledged");
        lock(&world.violations).push(text);
    }
}

async fn changes(world: Rc<World>, mut random: Rng) {
    let began = Instant::now();
    while began.elapsed() < LASTS {
        sleep(ms(&mut random, 150)).await;
        let version = world.version.fetch_add(1, SeqCst) + 1;
        let (node, expires) = (&world.nodes[random.usize(..NODES)], random.bool());
        let changed = if expires { node.expire_tag("all").await } else { node.invalidate_tag("all").await };
        match changed {
            Ok(()) => {
                world.acknowledged.fetch_max(version, SeqCst);
                if !expires {
                    world.invalidated.fetch_max(version, SeqCst);
                }
            }
            Err(_) if world.has_faults => {}
            Err(error) => lock(&world.violations).push(format!("I12: {error} without a fault")),
        }
    }
}
