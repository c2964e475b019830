//! One run: its nodes, their events and callers, and the calm time after the faults, in which everything must recover.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::dropped::{self, dropped};
use super::loads::Begins;
use super::mutants;
use super::nodes::{Asking, Node};
use super::oracle::{Oracle, State, Value};
use super::plan::{Call, Does, Ends, Leaves, Plan, Profile, Script, TAG};
use crate::key::{CacheKey, Key};
use crate::sync::lock;
use crate::testing::{ChaosStore, Fault};
use crate::{LoadContext, StampedeGuard};

/// The longest chain of calls: a call, a change, and a call for what was changed.
const MOST_CALLS: u32 = 3;

#[derive(Debug)]
pub(super) struct World {
    pub(super) plan: Plan,
    pub(super) chaos: ChaosStore,
    pub(super) oracle: Arc<Oracle>,
    pub(super) keys: Vec<Key>,
    pub(super) nodes: Mutex<Vec<Arc<Node>>>,
    guards_started: Mutex<usize>,
    /// [`bound`](Self::bound), computed once because each load needs it.
    pub(super) bound: OnceLock<Duration>,
}

impl World {
    pub(super) fn new(plan: Plan, seed: u64, is_traced: bool) -> Arc<Self> {
        let chaos = mutants::store(seed);
        chaos.latency(Duration::ZERO, plan.latency);
        let keys: Vec<_> = (0..plan.keys).map(|key| Key::new("default", &cache_key(key))).collect();
        let policy = &plan.policy;
        let oracle = Arc::new(Oracle {
            began: Instant::now(),
            profile: plan.profile,
            tagged: plan.tagged,
            has_stand_ins: plan.profile != Profile::None && !plan.policy.stale_if_error.is_zero(),
            lease: policy.lease,
            window: plan
                .faults
                .iter()
                .all(|(fault, _)| *fault != Fault::ClockStep)
                .then(|| policy.stale_while_revalidate.max(policy.stale_if_error)),
            copies_for: match (plan.keeps.contains(&true), plan.profile) {
                (false, _) => Some(Duration::ZERO),
                (true, Profile::None) => Some(plan.trip() * 4 + Duration::from_millis(50)),
                // The announcement may be lost: the value's own lifetime bounds the copies.
                (true, Profile::Mixed | Profile::Heavy) => None,
            },
            trip: plan.trip(),
            budget: policy.coordination_budget,
            // The acquire that reads the outcome of an awaited load may take as long as a lease.
            patience: policy.lease
                + policy.coordination_budget * 2
                + plan.trip() * 2
                + Duration::from_millis(100),
            keys: keys.iter().enumerate().map(|(n, key)| (key.name().into(), n as u8)).collect(),
            most_unsent: plan.most_unsent,
            state: Mutex::default(),
        });
        lock(&oracle.state).log = is_traced.then(Vec::new);
        chaos.set_witness(Arc::clone(&oracle) as _);
        let (nodes, guards_started) = Default::default();
        let world = Self { plan, chaos, oracle, keys, nodes, guards_started, bound: OnceLock::new() };
        let nodes = (0..world.plan.nodes).map(|slot| world.node(slot)).collect();
        *lock(&world.nodes) = nodes;
        Arc::new(world)
    }

    pub(super) fn node(&self, slot: usize) -> Arc<Node> {
        let replica = self.chaos.replica();
        if slot == 0 {
            replica.move_away(self.plan.detour);
        }
        let policy = if self.plan.keeps[slot] { &self.plan.local } else { &self.plan.policy };
        let guard = StampedeGuard::builder(replica.clone()).policy(policy.clone());
        let guard = guard.local_term(self.plan.term).most_kept_invalidations(self.plan.most_unsent);
        let guard = guard.build().expect("a guard");
        let id = std::mem::replace(&mut *lock(&self.guards_started), 0) + 1;
        *lock(&self.guards_started) = id;
        let name = guard.parts().0.store.node().simple().to_string();
        lock(&self.oracle.state).loads.is_node(&name, id);
        Arc::new(Node::new(id, guard, replica))
    }

    /// How many nodes have been started so far, successors of dead nodes included.
    pub(super) fn guards_started(&self) -> usize {
        *lock(&self.guards_started)
    }

    /// How many answers came from memory, at the nodes that now occupy the slots. Their predecessors are not counted.
    pub(super) fn local_hits(&self) -> u64 {
        lock(&self.nodes).iter().map(|node| node.guard.stats().local_hits).sum()
    }

    pub(super) fn living(&self) -> Vec<Arc<Node>> {
        lock(&self.nodes).iter().filter(|node| !node.replica.is_dead()).cloned().collect()
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
                let mut next = Some(call);
                while let Some(call) = next {
                    Arc::clone(&world).call(call).await;
                    next = call.next();
                }
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
        let ends = Instant::now() + self.bound() * MOST_CALLS;
        self.heal().await;
        // I4
        while let Ok(Some(_)) = timeout_at(ends, calls.join_next()).await {}
        if !calls.is_empty() {
            self.oracle.violated(format_args!("I4: {} calls have not returned", calls.len()));
        }
        if self.plan.profile == Profile::None {
            // A `get` that shared a read with callers that then load may read once more. And `heal` has requested each key.
            let reads = |call: &Call| 1 + usize::from(call.does == Does::Get);
            let reads = self.plan.all_calls().map(|call| reads(&call)).sum::<usize>();
            self.oracle.check_frugality(reads + usize::from(self.plan.keys));
        }
        self.settle().await;
        auditor.abort();
    }

    /// How many times a fault has changed the store or delayed a command, without the nodes' knowledge.
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
        // If the store's clock had jumped, stored data expires when `calm` sets the clock right.
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
                        let _ = dropped(dropped::Drop::AtWake(poll), world.work(&node, call)).await;
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

    /// Records a call that begins.
    pub(super) fn asks<'a>(&self, node: &'a Node, key: u8, does: Does) -> Asking<'a> {
        for node in self.living() {
            if node.guard.stats().kept_invalidations == 0 {
                self.oracle.sent_all(node.id);
            }
        }
        let seq = {
            let mut state = lock(&self.oracle.state);
            if matches!(does, Does::Invalidate | Does::InvalidateTag | Does::Insert) {
                state.changing.insert(node.id);
            }
            match does {
                // A forced refresh loads even if a fresh value is stored.
                Does::Refresh => state.loads.may_load_again(Some(key)),
                Does::Invalidate | Does::Insert => state.loads.detached(Some(node.id), key),
                Does::InvalidateTag => {
                    self.detached(&mut state, node.id);
                    let seq = state.next();
                    state.tag_changes.push(seq);
                }
                Does::Load | Does::LoadMany | Does::Get => {}
            }
            state.next()
        };
        self.oracle.note(format_args!("n{} k{key} {does:?} begins", node.id));
        node.asks(key, seq)
    }

    /// Records that a node detaches its flights of all keys from later callers.
    fn detached(&self, state: &mut State, node: usize) {
        (0..self.plan.keys).for_each(|key| state.loads.detached(Some(node), key));
    }

    async fn work(self: &Arc<Self>, node: &Arc<Node>, call: Call) {
        let Call { key, does, load, .. } = call;
        if does == Does::LoadMany {
            return self.work_many(node, call).await;
        }
        let (began, id) = (Instant::now(), node.id);
        let asking = self.asks(node, key, does);
        let start_seq = asking.seq;
        let mut change = RunningChange::of(self, id, key, does, start_seq);
        let loader = {
            let (world, node) = (Arc::clone(self), Arc::clone(node));
            move |cx| async move { world.load(&node, key, does, began, load, cx).await }
        };
        let guard = &node.guard;
        let answer: Result<Option<Value>, String> = match does {
            // This is not reached, because `work_many` has answered the call above.
            Does::LoadMany => Ok(None),
            Does::Load => guard
                .load(cache_key(key))
                .get(loader)
                .await
                .map(|loaded| Some(loaded.value))
                .map_err(|e| e.to_string()),
            Does::Refresh => guard
                .load(cache_key(key))
                .refresh(loader)
                .await
                .map(|loaded| Some(loaded.value))
                .map_err(|e| e.to_string()),
            Does::Get => guard.get(cache_key(key)).await.map_err(|e| e.to_string()),
            Does::Invalidate => {
                guard.invalidate(cache_key(key)).await.map(|()| None).map_err(|e| e.to_string())
            }
            Does::InvalidateTag => guard.invalidate_tag(TAG).await.map(|()| None).map_err(|e| e.to_string()),
            Does::Insert => {
                let value = self.oracle.made(id, key);
                let inserted = guard.insert(cache_key(key), &value).await;
                let mut state = lock(&self.oracle.state);
                if inserted.is_ok() && state.lost < start_seq {
                    state.inserted.insert(value);
                }
                drop(state);
                inserted.map(|()| None).map_err(|e| e.to_string())
            }
        };
        if does == Does::InvalidateTag {
            self.detached(&mut lock(&self.oracle.state), id);
        }
        if answer.is_ok() {
            change.keys.clear();
        }
        drop(change);
        if matches!(does, Does::Invalidate | Does::Insert) && answer.is_ok() {
            self.oracle.confirmed(id, key, start_seq);
            lock(&self.oracle.state).loads.detached(Some(id), key);
        }
        if does == Does::InvalidateTag && answer.is_ok() {
            (0..self.plan.keys).for_each(|key| self.oracle.confirmed(id, key, start_seq));
        }
        asking.answered();
        let took = began.elapsed();
        self.oracle.note(format_args!("n{id} k{key} {does:?} answered {answer:?} after {took:?}"));
        if let Ok(Some(value)) = answer {
            self.check_answer(id, key, start_seq, began, value);
        }
        if self.plan.profile == Profile::None
            && let Err(error) = &answer
        {
            self.oracle.violated(format_args!("a call failed without a fault: {error}"));
        }
        self.check_time(node, &call, start_seq, began);
        self.check_rounds(node, &call, start_seq);
    }

    pub(super) fn check_answer(&self, id: usize, key: u8, start_seq: u64, began: Instant, value: Value) {
        // After a failover to an older state, copies may be older for one term: the memberships of their nodes may be among what was lost.
        let keeps = self.plan.keeps.contains(&true);
        let may_be_older = keeps && self.oracle.has_failed_over(self.plan.term, began);
        self.oracle.check_value(id, key, (!may_be_older).then_some(start_seq), value);
        if !may_be_older {
            self.oracle.check_windows(key, start_seq, began, value);
        }
    }

    pub(super) async fn load(
        self: Arc<Self>,
        node: &Arc<Node>,
        key: u8,
        does: Does,
        came: Instant,
        script: Script,
        mut cx: LoadContext<Value>,
    ) -> Result<Value, String> {
        let began = Instant::now();
        node.replica.runs().await;
        let begins = self.begins(node, key, does, came);
        let mut running = Running::begin(&self, node, begins, began);
        let id = running.id;
        sleep(script.takes).await;
        if script.ends == Ends::Never {
            std::future::pending::<()>().await;
        }
        node.replica.runs().await;
        running.over = Some(script.ends);
        match script.ends {
            Ends::Error => return Err("scripted".to_owned()),
            // This does not call the panic hook, which would print the panic.
            Ends::Panic => std::panic::resume_unwind(Box::new("scripted")),
            Ends::DoNotStore => cx.do_not_store(),
            Ends::Value | Ends::Never => {}
        }
        running.returned = true;
        Ok((key, id))
    }
}

pub(super) fn cache_key(key: u8) -> CacheKey {
    CacheKey::from(("key", key))
}

/// A running call that invalidates keys. Dropping it reports its keys as unconfirmed: the caller has left, or received an error.
struct RunningChange<'a> {
    oracle: &'a Oracle,
    node: usize,
    keys: Vec<u8>,
    began: u64,
}

impl<'a> RunningChange<'a> {
    fn of(world: &'a World, node: usize, key: u8, does: Does, began: u64) -> Self {
        let keys = match does {
            Does::Invalidate => vec![key],
            Does::InvalidateTag => (0..world.plan.keys).collect(),
            Does::Load | Does::LoadMany | Does::Get | Does::Refresh | Does::Insert => Vec::new(),
        };
        Self { oracle: &world.oracle, node, keys, began }
    }
}

impl Drop for RunningChange<'_> {
    fn drop(&mut self) {
        for &key in &self.keys {
            self.oracle.unconfirmed(self.node, key, self.began);
        }
    }
}

/// A running load. Dropping it reports the load's end.
pub(super) struct Running<'a> {
    world: &'a World,
    node: &'a Node,
    pub(super) id: u32,
    began: Instant,
    leased: bool,
    pub(super) over: Option<Ends>,
    pub(super) returned: bool,
}

impl<'a> Running<'a> {
    /// `began`: the earliest moment from which the load's flight may have measured its time.
    pub(super) fn begin(world: &'a World, node: &'a Node, begins: Begins, began: Instant) -> Self {
        let leased = begins.lease.is_some();
        let id = world.oracle.load_began(begins);
        Self { world, node, id, began, leased, over: None, returned: false }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let oracle = &self.world.oracle;
        oracle.load_ended(self.id, self.returned, self.over);
        // I8: a leased load continues whichever callers leave, because others may want its value.
        let may_end = self.over.is_some()
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
