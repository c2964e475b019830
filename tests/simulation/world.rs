//! One run: the nodes, what happens to them, those who call, and the time after, in which everything has to be well.

use std::collections::HashMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::oracle::{Oracle, Value};
use super::plan::{Call, Does, Ends, Leaves, Plan, Profile, Script, What};
use crate::key::{CacheKey, Key};
use crate::sync::lock;
use crate::testing::{ChaosStore, Fault, Replica};
use crate::{LoadContext, StampedeGuard, Stats};

/// One process, until it dies.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: usize,
    pub(super) guard: StampedeGuard,
    pub(super) replica: Replica,
    /// It is being shut down.
    pub(super) leaves: AtomicBool,
    /// Its callers.
    pub(super) calls: Mutex<Vec<AbortHandle>>,
    /// What it had counted when calls began that a load may be for, by key.
    since: Mutex<HashMap<u8, Vec<Since>>>,
}

/// What there was when a call began.
#[derive(Clone, Copy, Debug)]
struct Since {
    seq: u64,
    at: Instant,
    stats: Stats,
    struck: u64,
    answered: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) plan: Plan,
    pub(super) chaos: ChaosStore,
    pub(super) oracle: Arc<Oracle>,
    pub(super) keys: Vec<Key>,
    pub(super) nodes: Mutex<Vec<Arc<Node>>>,
    born: Mutex<usize>,
}

impl World {
    pub(super) fn new(plan: Plan, seed: u64, is_shown: bool) -> Arc<Self> {
        let chaos = ChaosStore::new(seed);
        chaos.latency(Duration::ZERO, plan.latency);
        let keys: Vec<_> = (0..plan.keys).map(|key| Key::new("default", &cache_key(key))).collect();
        let policy = &plan.policy;
        let oracle = Arc::new(Oracle {
            began: Instant::now(),
            profile: plan.profile,
            lease: policy.lease,
            trip: plan.latency,
            // The end of a load that was waited for is read with the patience of a lease.
            patience: policy.lease
                + policy.coordination_budget * 2
                + plan.latency * 2
                + Duration::from_millis(100),
            keys: keys.iter().enumerate().map(|(n, key)| (key.name().into(), n as u8)).collect(),
            state: Mutex::default(),
        });
        lock(&oracle.state).log = is_shown.then(Vec::new);
        chaos.set_witness(Arc::clone(&oracle) as _);
        let world = Self { plan, chaos, oracle, keys, nodes: Mutex::default(), born: Mutex::default() };
        let nodes = (0..world.plan.nodes).map(|_| world.node()).collect();
        *lock(&world.nodes) = nodes;
        Arc::new(world)
    }

    pub(super) fn node(&self) -> Arc<Node> {
        let replica = self.chaos.replica();
        let guard = StampedeGuard::builder(replica.clone()).policy(self.plan.policy.clone()).build();
        let guard = guard.expect("a guard");
        let id = std::mem::replace(&mut *lock(&self.born), 0) + 1;
        *lock(&self.born) = id;
        let leaves = AtomicBool::new(false);
        Arc::new(Node { id, guard, replica, leaves, calls: Mutex::default(), since: Mutex::default() })
    }

    /// How many nodes there have been.
    pub(super) fn born(&self) -> usize {
        *lock(&self.born)
    }

    pub(super) fn living(&self) -> Vec<Arc<Node>> {
        lock(&self.nodes).iter().filter(|node| !node.replica.is_dead()).cloned().collect()
    }

    /// No call takes longer, however much goes wrong: B1.
    pub(super) fn bound(&self) -> Duration {
        let policy = &self.plan.policy;
        let stops = self.plan.events.iter().map(|event| match event.what {
            What::Stop(lasts) => lasts,
            What::Crash(_) | What::Cut(_) | What::Leave(..) => Duration::ZERO,
        });
        policy.wait_timeout + policy.load_timeout * 5 + stops.sum::<Duration>() + Duration::from_secs(1)
    }

    pub(super) async fn live(self: Arc<Self>) {
        for &(fault, chance) in &self.plan.faults {
            self.chaos.inject(fault, chance);
        }
        let began = self.oracle.began;
        let mut calls = JoinSet::new();
        for call in self.plan.calls.clone() {
            let world = Arc::clone(&self);
            calls.spawn(async move {
                sleep_until(began + call.at).await;
                world.call(call).await;
            });
        }
        for event in self.plan.events.clone() {
            let world = Arc::clone(&self);
            tokio::spawn(async move {
                sleep_until(began + event.at).await;
                world.happen(event.node, event.what).await;
            });
        }
        let world = Arc::clone(&self);
        let auditor = tokio::spawn(async move {
            loop {
                sleep(Duration::from_millis(97)).await;
                world.oracle.audit(|token| world.chaos.waits(token));
            }
        });
        sleep_until(began + self.plan.lasts).await;
        let ends = Instant::now() + self.bound();
        self.heal().await;
        // I4
        while let Ok(Some(_)) = timeout_at(ends, calls.join_next()).await {}
        if !calls.is_empty() {
            self.oracle.violated(format_args!("I4: {} calls have not returned", calls.len()));
        }
        if self.plan.profile == Profile::None {
            // Who only looks, and was read for with those who then load, reads once more. And each key was asked for in the end.
            let reads = |call: &Call| 1 + usize::from(call.does == Does::Get);
            let reads = self.plan.calls.iter().map(reads).sum::<usize>();
            self.oracle.check_frugality(reads + usize::from(self.plan.keys));
        }
        self.settle().await;
        auditor.abort();
    }

    /// How often something has happened to the store behind everybody's back.
    pub(super) fn struck(&self) -> u64 {
        let kinds = [
            Fault::EvictLease,
            Fault::EvictEntry,
            Fault::Flush,
            Fault::FailOver,
            Fault::ClockStep,
            Fault::Corrupt,
            Fault::Ghost,
            Fault::Slow,
        ];
        // Where the clock had jumped, what is stored goes when it is put right.
        let calm = u64::from(
            self.chaos.struck(Fault::ClockStep) > 0 && self.oracle.began.elapsed() >= self.plan.lasts,
        );
        kinds.iter().map(|fault| self.chaos.struck(*fault)).sum::<u64>() + calm
    }

    async fn call(self: Arc<Self>, call: Call) {
        let node = Arc::clone(&lock(&self.nodes)[call.node]);
        let world = Arc::clone(&self);
        let task = tokio::spawn({
            let node = Arc::clone(&node);
            async move {
                node.replica.runs().await;
                match call.leaves {
                    Some(Leaves::AtPoll(poll)) => {
                        DropAt { left: poll, future: Some(Box::pin(world.work(&node, call))) }.await
                    }
                    Some(Leaves::After(time)) => drop(timeout(time, world.work(&node, call)).await),
                    None => world.work(&node, call).await,
                }
            }
        });
        lock(&node.calls).push(task.abort_handle());
        if node.replica.is_dead() {
            task.abort();
        }
        if let Err(error) = task.await
            && error.is_panic()
        {
            self.oracle.violated(format_args!("I11: a call panicked: {error}"));
        }
    }

    /// Takes note that somebody asks: what has happened since then may excuse a load.
    pub(super) fn asked(&self, node: &Node, key: u8, does: Does) -> u64 {
        let seq = lock(&self.oracle.state).next();
        self.oracle.note(format_args!("n{} k{key} {does:?} asked", node.id));
        let (stats, struck) = (node.guard.stats(), self.struck());
        let since = Since { seq, at: Instant::now(), stats, struck, answered: None };
        lock(&node.since).entry(key).or_default().push(since);
        seq
    }

    /// And that he has his answer.
    pub(super) fn answered(node: &Node, key: u8, asked: u64) {
        let mut since = lock(&node.since);
        if let Some(since) = since.entry(key).or_default().iter_mut().find(|since| since.seq == asked) {
            since.answered = Some(Instant::now());
        }
    }

    async fn work(self: &Arc<Self>, node: &Arc<Node>, call: Call) {
        let Call { key, does, load, .. } = call;
        let (began, id) = (Instant::now(), node.id);
        let asked = self.asked(node, key, does);
        let loader = {
            let (world, node) = (Arc::clone(self), Arc::clone(node));
            move |cx| async move { world.load(&node, key, does, load, cx).await }
        };
        let guard = &node.guard;
        let answer: Result<Option<Value>, String> = match does {
            Does::Load => {
                guard.get_or_load_with(cache_key(key), loader).await.map(Some).map_err(|e| e.to_string())
            }
            Does::Refresh => {
                guard.refresh_with(cache_key(key), loader).await.map(Some).map_err(|e| e.to_string())
            }
            Does::Get => guard.get(cache_key(key)).await.map_err(|e| e.to_string()),
            Does::Invalidate => {
                guard.invalidate(cache_key(key)).await.map(|()| None).map_err(|e| e.to_string())
            }
            Does::Insert => {
                let value = self.oracle.made(id, key);
                guard.insert(cache_key(key), &value).await.map(|()| None).map_err(|e| e.to_string())
            }
        };
        if matches!(does, Does::Invalidate | Does::Insert) && answer.is_ok() {
            self.oracle.confirmed(id, key, asked);
        }
        Self::answered(node, key, asked);
        let took = began.elapsed();
        self.oracle.note(format_args!("n{id} k{key} {does:?} answered {answer:?} after {took:?}"));
        if let Ok(Some(value)) = answer {
            self.oracle.check_value(id, key, asked, value);
        }
        if self.plan.profile == Profile::None {
            if let Err(error) = &answer {
                self.oracle.violated(format_args!("a call failed without a fault: {error}"));
            }
            // I4, where nothing goes wrong: what is loaded, and loaded again after each invalidation.
            let left = self.plan.events.iter().filter(|event| matches!(event.what, What::Leave(..))).count();
            let loads = 2 + (left + self.oracle.invalidations(key, asked)) as u32;
            let most = (self.plan.longest_load + self.plan.latency * 8 + Duration::from_millis(50)) * loads;
            if took > most {
                self.oracle
                    .violated(format_args!("I4: {does:?} of key {key} took {took:?}, more than {most:?}"));
            }
        }
    }

    pub(super) async fn load(
        self: Arc<Self>,
        node: &Arc<Node>,
        key: u8,
        does: Does,
        script: Script,
        mut cx: LoadContext<Value>,
    ) -> Result<Value, String> {
        let began = Instant::now();
        node.replica.runs().await;
        // Who comes after that loads alone, whoever has the lease.
        let alone = node.leaves.load(Ordering::Relaxed);
        let mine = !alone && self.chaos.holds(&node.replica, self.keys[key as usize].name());
        let (excused, crowd) = self.excuse(node, key);
        let id = self.oracle.load_began(node.id, key, does, excused, mine, crowd);
        let mut running =
            Running { world: &self, node, id, began, leased: mine, over: false, returned: false };
        sleep(script.takes).await;
        if script.ends == Ends::Never {
            std::future::pending::<()>().await;
        }
        node.replica.runs().await;
        running.over = true;
        match script.ends {
            Ends::Error => return Err("scripted".to_owned()),
            // Without the hook, which would print it.
            Ends::Panic => std::panic::resume_unwind(Box::new("scripted")),
            Ends::DoNotStore => cx.do_not_store(),
            Ends::Value | Ends::Never => {}
        }
        running.returned = true;
        Ok((key, id))
    }

    /// Whether a load may begin without the lease (I5), and how many of the node's may run then (I8).
    fn excuse(&self, node: &Node, key: u8) -> (bool, usize) {
        let (plan, stats) = (&self.plan, node.guard.stats());
        // A background load begins a little after its call was answered.
        let recent =
            |since: &Since| since.answered.is_none_or(|at| at.elapsed() < Duration::from_millis(400));
        // It answers those who are still there, without the fleet.
        if node.leaves.load(Ordering::Relaxed) {
            return (true, usize::MAX);
        }
        let since =
            lock(&node.since).get(&key).and_then(|since| since.iter().find(|since| recent(since)).copied());
        let invalidated = since.map_or(0, |since| self.oracle.invalidations(key, since.seq));
        let lanes = 2 + usize::from(plan.calls.iter().any(|call| call.does == Does::Refresh));
        // Whatever has taken the flight out of its map, its load goes on.
        let detached = self.oracle.detached_within(key) + stats.leases_lost as usize;
        if plan.profile == Profile::None {
            let waited_out = since.is_none_or(|since| since.at.elapsed() >= plan.policy.wait_timeout);
            return (invalidated > 0 || waited_out, lanes + detached);
        }
        let excused = since.is_none_or(|since| {
            let errors = |stats: &Stats| {
                stats.store_errors + stats.budget_exceeded + stats.leases_lost + stats.takeovers
            };
            errors(&stats) > errors(&since.stats)
                || since.at.elapsed() >= plan.policy.wait_timeout
                || self.struck() > since.struck
                || plan.events.iter().any(|event| matches!(event.what, What::Stop(_)))
        });
        let panics = plan.calls.iter().any(|call| call.load.ends == Ends::Panic);
        let crowd = if panics || self.struck() > 0 { usize::MAX } else { lanes + 1 + detached };
        (excused || invalidated > 0, crowd)
    }
}

pub(super) fn cache_key(key: u8) -> CacheKey {
    CacheKey::from(("key", key))
}

/// A load on its way.
struct Running<'a> {
    world: &'a World,
    node: &'a Node,
    id: u32,
    began: Instant,
    leased: bool,
    over: bool,
    returned: bool,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let oracle = &self.world.oracle;
        oracle.load_ended(self.id, self.returned);
        // I8: whoever has left, others may want it.
        let may_end = self.over
            || !self.leased
            || self.node.guard.parts().0.is_leaving()
            || self.node.replica.is_dead()
            || self.began.elapsed() >= self.world.plan.policy.load_timeout;
        if !may_end {
            oracle.violated(format_args!(
                "I8: load {} was cut off after {:?}",
                self.id,
                self.began.elapsed()
            ));
        }
    }
}

/// A caller that goes away at a poll.
struct DropAt<F> {
    left: usize,
    future: Option<Pin<Box<F>>>,
}

impl<F: Future<Output = ()>> Future for DropAt<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.left == 0 {
            self.future = None;
        }
        self.left = self.left.saturating_sub(1);
        match &mut self.future {
            Some(future) => pin!(future).poll(cx),
            None => Poll::Ready(()),
        }
    }
}
