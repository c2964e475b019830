//! I5 as the oracle counts it: all loads of a run, the lease or the excuse of each, and how many loads there may be.
//!
//! A load either has the lease, and is then the only load under that lease except for loads that panicked; or it has an excuse for
//! going without, which `excuses` finds.
//!
//! Events of a key bound the number of its leased loads (B2): one to begin with, and one more for each value that is removed or no
//! longer fresh, each load that failed or left nothing to other callers, each lease that was lost with its load, each invalidation,
//! and each forced reload.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::oracle::{Oracle, State, Value};
use super::plan::{Does, Ends};
use crate::store::Token;
use crate::sync::lock;

/// By how much something that is due at once may be late, because a timer may be involved.
const AT_ONCE: Duration = Duration::from_millis(1);

#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) node: usize,
    pub(super) key: u8,
    pub(super) began: u64,
    pub(super) returned: bool,
    pub(super) at: Instant,
    /// When the caller that brought the loader came. It joined the flight later, so no earlier event had detached the flight.
    pub(super) came: Instant,
    pub(super) ended: Option<Instant>,
    /// The lease under which it runs, if any.
    pub(super) lease: Option<Token>,
    /// The commit of the value has reached the store, or the value was inserted.
    committed: bool,
    /// The loader has said that its value must not be stored.
    is_unstorable: bool,
    /// When the value may no longer be served, not even as a stale one. Set when it is stored.
    pub(super) served_until: Option<Instant>,
    /// This load has replaced another load, which could not use the store either.
    pub(super) instead: bool,
    /// Another load has replaced this load.
    pub(super) replaced: bool,
    /// It was counted as the load that replaced the flight of a call for many keys, or was replaced by it: see `was_overtaken`.
    pub(super) has_overtaken: bool,
}

impl Load {
    /// A load without a lease that replaces no other load.
    fn begins(node: usize, key: u8, began: u64, came: Instant) -> Self {
        Self {
            node,
            key,
            began,
            returned: false,
            at: Instant::now(),
            came,
            ended: None,
            lease: None,
            committed: false,
            is_unstorable: false,
            served_until: None,
            instead: false,
            replaced: false,
            has_overtaken: false,
        }
    }

    /// Whether the store has checked for changes since the load began.
    pub(super) fn is_fenced(&self) -> bool {
        self.committed
    }
}

/// Events of one key at one node.
#[derive(Debug, Default)]
pub(super) struct AtNode {
    /// When a command about the key last failed or was slower than a round trip, or a flight continued without the store.
    troubled: Option<Instant>,
    /// When a flight was last detached: later callers do not join it.
    pub(super) detached: Option<Instant>,
    /// Leases that were granted to the node and that it has not ended, and when each was granted.
    granted: Vec<(Token, Instant)>,
    /// The last load that panicked, and when, until its flight continues with another loader.
    vanished: Option<(Instant, u32)>,
}

/// All loads of a run.
#[derive(Debug, Default)]
pub(super) struct Loads {
    pub(super) all: Vec<Load>,
    pub(super) at_node: HashMap<(usize, u8), AtNode>,
    of_key: HashMap<u8, OfKey>,
    of_lease: HashMap<Token, OfLease>,
    /// The nodes' numbers, by the first half of their tokens.
    nodes: HashMap<Box<str>, usize>,
}

/// The bound B2 for one key.
#[derive(Debug, Default)]
struct OfKey {
    /// How many leased loads of the key have begun.
    leased: usize,
    /// How many leased loads there may be in addition to the first.
    more: usize,
    /// A value was stored and, as far as is known, is still there.
    stored: bool,
    /// The lease that was granted last, until it is known how it ended.
    holder: Option<Token>,
}

/// How many loads began under a lease, and how many of them have panicked.
#[derive(Debug, Default)]
struct OfLease {
    loads: usize,
    vanished: usize,
    /// The last of these loads, if it may also have begun without the lease, because it had an excuse.
    excused: Option<u32>,
}

impl OfLease {
    /// Whether a load under the lease is running, or has ended without a panic.
    fn is_used(&self) -> bool {
        self.loads > self.vanished
    }
}

/// A load that begins.
#[derive(Debug)]
pub(super) struct Begins {
    pub(super) node: usize,
    pub(super) key: u8,
    pub(super) does: Does,
    pub(super) came: Instant,
    /// The lease of the key, if a flight of the node has it.
    pub(super) lease: Option<Token>,
    /// Why the load may begin without the lease.
    pub(super) excuse: Option<&'static str>,
    /// The load before this one in the same flight, which panicked.
    pub(super) after: Option<u32>,
    /// How many loads of the key the node may run at once without the lease. Each of them may be replaced once.
    pub(super) lanes: usize,
}

impl Loads {
    pub(super) fn is_node(&mut self, name: &str, id: usize) {
        self.nodes.insert(name.into(), id);
    }

    fn at_node(&mut self, node: usize, key: u8) -> &mut AtNode {
        self.at_node.entry((node, key)).or_default()
    }

    pub(super) fn node_of(&self, token: &Token) -> Option<usize> {
        self.nodes.get(token.node()).copied()
    }

    pub(super) fn troubled(&mut self, name: &str, key: u8) {
        if let Some(&node) = self.nodes.get(name) {
            self.at_node(node, key).troubled = Some(Instant::now());
        }
    }

    /// A flight of the key was, or may have been, detached from later callers: at one node, or (`None`) at all nodes.
    pub(super) fn detached(&mut self, node: Option<usize>, key: u8) {
        let now = Some(Instant::now());
        match node {
            Some(node) => self.at_node(node, key).detached = now,
            None => {
                for &node in self.nodes.values() {
                    self.at_node.entry((node, key)).or_default().detached = now;
                }
            }
        }
    }

    /// Like [`detached`](Self::detached), at the node with this name.
    pub(super) fn detached_at_node(&mut self, name: &str, key: u8) {
        if let Some(&node) = self.nodes.get(name) {
            self.detached(Some(node), key);
        }
    }

    /// The flight with this lease learns that the lease is lost, so later callers no longer join the flight.
    pub(super) fn lost(&mut self, key: u8, token: &Token) {
        if let Some(node) = self.node_of(token) {
            self.detached(Some(node), key);
        }
    }

    /// From now on the lease belongs to this token. `is_served`: the stored value can be served without a new load.
    pub(super) fn granted(&mut self, key: u8, token: &Token, is_served: bool) {
        if let Some(node) = self.node_of(token) {
            let granted = &mut self.at_node(node, key).granted;
            if !granted.iter().any(|(known, _)| known == token) {
                granted.push((token.clone(), Instant::now()));
            }
        }
        let of = self.of_key.entry(key).or_default();
        if of.holder.as_ref() != Some(token)
            && let Some(lost) = of.holder.replace(token.clone())
        {
            of.more += usize::from(self.of_lease.get(&lost).is_some_and(OfLease::is_used));
        }
        if of.stored && !is_served {
            (of.stored, of.more) = (false, of.more + 1);
        }
    }

    /// The flight of this lease has ended it, or has tried to, and loads nothing more. If the flight `has_loaded` but no load is known
    /// under its lease, its load was recorded under the lease of another flight of the node. This lease is then not forgotten: it is the
    /// excuse of the other flight's load, which is still to come.
    pub(super) fn abandoned(&mut self, key: u8, token: &Token, has_loaded: bool) {
        if has_loaded && self.of_lease.get(token).is_none_or(|of| of.loads == 0) {
            return;
        }
        if let Some(node) = self.node_of(token) {
            self.at_node(node, key).granted.retain(|(known, _)| known != token);
        }
    }

    /// The lease has ended, with a stored value or without one.
    pub(super) fn ended(&mut self, key: u8, token: &Token, with_value: bool) {
        let of = self.of_key.entry(key).or_default();
        if of.holder.as_ref() == Some(token) {
            of.holder = None;
        }
        if with_value {
            of.stored = true;
        } else {
            of.more += usize::from(self.of_lease.get(token).is_some_and(OfLease::is_used));
        }
    }

    /// The stored value is removed, and the lease holder can store nothing any more. `inserted`: another value is stored instead.
    pub(super) fn invalidated(&mut self, key: u8, inserted: bool) {
        let of = self.of_key.entry(key).or_default();
        if let Some(holder) = of.holder.take() {
            of.more += usize::from(self.of_lease.get(&holder).is_some_and(OfLease::is_used));
        }
        of.more += usize::from(of.stored);
        of.stored = inserted;
        self.detached(None, key);
    }

    /// Allows one more load of this key, or (`None`) of each key.
    pub(super) fn may_load_again(&mut self, key: Option<u8>) {
        match key {
            Some(key) => self.of_key.entry(key).or_default().more += 1,
            None => self.of_key.values_mut().for_each(|of| of.more += 1),
        }
    }

    /// Whether a command of the node about the key has failed, or was slow, after `since`.
    pub(super) fn was_troubled(&self, node: usize, key: u8, since: Instant) -> bool {
        self.at_node.get(&(node, key)).and_then(|at| at.troubled).is_some_and(|at| at >= since)
    }

    /// Whether the node was granted a lease of the key after `since` that it has not ended and no longer has. `held` is the lease that it
    /// has now.
    pub(super) fn has_lost(&self, node: usize, key: u8, since: Instant, held: Option<&Token>) -> bool {
        let is_lost = |(token, at): &(Token, Instant)| *at >= since && Some(token) != held;
        self.at_node.get(&(node, key)).is_some_and(|at| at.granted.iter().any(is_lost))
    }

    /// The load that has just panicked, if its flight continues with another loader. Each such load is returned only once.
    ///
    /// The flight's next load begins at once, except for the time (`asks`) in which it may read its tags.
    pub(super) fn taken_over(&mut self, node: usize, key: u8, asks: Duration) -> Option<u32> {
        let (at, id) = self.at_node(node, key).vanished.take()?;
        (at.elapsed() <= AT_ONCE + asks).then_some(id)
    }

    /// Whether a load that begins may be the one that runs under this lease of its node. An earlier load with an excuse was recorded under
    /// the lease, but may belong to another flight. If a load without an excuse follows, the earlier load ran without the lease.
    fn is_free(&mut self, lease: &Token, is_excused: bool) -> bool {
        let of = self.of_lease.entry(lease.clone()).or_default();
        if !of.is_used() {
            return true;
        }
        if is_excused {
            return false;
        }
        let Some(other) = of.excused.take().and_then(|id| self.all.get_mut(id as usize)) else {
            return false;
        };
        other.lease = None;
        of.loads -= 1;
        self.of_key.entry(other.key).or_default().leased -= 1;
        true
    }

    /// The commit of the load's value has reached the store.
    pub(super) fn is_committed(&mut self, id: u32) {
        if let Some(load) = self.all.get_mut(id as usize) {
            load.committed = true;
        }
    }

    /// The load's value is stored. If it is stored a second time, the first time still bounds how long it may be served.
    pub(super) fn is_stored(&mut self, id: u32, served_for: Duration) {
        if let Some(load) = self.all.get_mut(id as usize) {
            load.served_until.get_or_insert_with(|| Instant::now() + served_for);
        }
    }

    /// When that load began which has ended under this lease with a value that must not be stored.
    pub(super) fn unstorable(&self, token: &Token) -> Option<u64> {
        let is_it = |load: &&Load| load.is_unstorable && load.lease.as_ref() == Some(token);
        self.all.iter().rfind(is_it).map(|load| load.began)
    }

    /// How many leased loads of the key have begun at the node after `seq` and returned a value.
    pub(super) fn since(&self, node: usize, key: u8, seq: u64) -> usize {
        let is_one =
            |load: &&Load| load.node == node && load.key == key && load.began > seq && load.lease.is_some();
        self.all.iter().filter(is_one).filter(|load| load.returned && load.ended.is_some()).count()
    }

    /// The spans, from `since` on, in which the node was loading the key.
    pub(super) fn times(&self, node: usize, key: u8, since: Instant) -> Vec<(Instant, Instant)> {
        let now = Instant::now();
        let of_both = self.all.iter().filter(|load| load.node == node && load.key == key);
        let times = of_both.map(|load| (load.at.max(since), load.ended.unwrap_or(now)));
        times.filter(|(from, to)| from <= to).collect()
    }
}

impl Oracle {
    /// Records a load that begins, and checks I5 and I8.
    pub(super) fn load_began(&self, begins: Begins) -> u32 {
        let Begins { node, key, does, came, lease, excuse, after, lanes } = begins;
        let (id, leased, claimed, bound) = {
            let mut state = lock(&self.state);
            let began = state.next();
            let State { loads, .. } = &mut *state;
            let lease = lease.filter(|lease| loads.is_free(lease, excuse.is_some()));
            // Later callers do not join a flight that has lost its lease.
            let has_lost = |before: &Load| before.lease.is_some() && lease.is_none();
            let as_before = |before: &Load| (Some(before.instead), before.replaced || has_lost(before));
            let before = after.and_then(|id| loads.all.get(id as usize));
            let (claimed, replaced) = match before.map(as_before) {
                Some(as_before) => as_before,
                // A leased load may also replace a load that continues without the store.
                None if lease.is_some() => (loads.claim(node, key, 0).or(Some(false)), false),
                // The flight may be one that later callers do not join, or may have replaced another one: the oracle cannot tell which.
                None if !loads.is_joinable(node, key, came) => {
                    loads.claim(node, key, lanes);
                    (Some(false), false)
                }
                None if does == Does::LoadMany && loads.was_overtaken(node, key, came) => (Some(false), true),
                None => (loads.claim(node, key, lanes), false),
            };
            let mut bound = None;
            if let Some(lease) = &lease {
                let of = loads.of_lease.entry(lease.clone()).or_default();
                of.loads += 1;
                of.excused = excuse.map(|_| loads.all.len() as u32);
                let of = loads.of_key.entry(key).or_default();
                of.leased += 1;
                bound = (of.leased > 1 + of.more).then_some((of.leased, 1 + of.more));
            }
            let (leased, instead) = (lease.is_some(), claimed == Some(true));
            loads.all.push(Load { lease, instead, replaced, ..Load::begins(node, key, began, came) });
            ((loads.all.len() - 1) as u32, leased, claimed, bound)
        };
        let why = if leased { "the lease" } else { excuse.unwrap_or("nothing") };
        self.note(format_args!("n{node} k{key} load {id} begins for {does:?} by {why}"));
        self.check(
            excuse.is_some() || leased,
            format_args!("I5: node {node} loads key {key} without a lease of its own or a reason"),
        );
        if let Some((loads, most)) = bound {
            self.violated(format_args!(
                "I5: {loads} loads of key {key} have had the lease, for {most} reasons"
            ));
        }
        self.check(
            claimed.is_some(),
            format_args!(
                "I8: node {node} begins a load of key {key} beside those that it has on their way without a lease"
            ),
        );
        id
    }

    pub(super) fn load_ended(&self, id: u32, returned: bool, ends: Option<Ends>) {
        {
            let mut state = lock(&self.state);
            let State { loads, .. } = &mut *state;
            let load = &mut loads.all[id as usize];
            (load.ended, load.returned) = (Some(Instant::now()), returned);
            load.is_unstorable = ends == Some(Ends::DoNotStore);
            // After a panic, the flight continues with another caller's loader.
            if ends == Some(Ends::Panic) {
                let (node, key) = (load.node, load.key);
                if let Some(lease) = &load.lease {
                    loads.of_lease.entry(lease.clone()).or_default().vanished += 1;
                    loads.of_key.entry(key).or_default().more += 1;
                }
                loads.at_node(node, key).vanished = Some((Instant::now(), id));
            }
        }
        self.note(format_args!("load {id} ends, value={returned}"));
    }

    /// Records an inserted value as if a load had returned it.
    pub(super) fn made(&self, node: usize, key: u8) -> Value {
        let mut state = lock(&self.state);
        let (began, at) = (state.next(), Instant::now());
        let load =
            Load { returned: true, ended: Some(at), committed: true, ..Load::begins(node, key, began, at) };
        state.loads.all.push(load);
        (key, (state.loads.all.len() - 1) as u32)
    }

    pub(super) fn loads_of(&self, key: u8) -> usize {
        lock(&self.state).loads.all.iter().filter(|load| load.key == key).count()
    }
}
