//! I5 and I8, as the oracle counts: which loads there are, what each of them is entitled to, and how many of them there may be
//! in all.
//!
//! A load has the lease, and then it is the only one of that lease but for those that have panicked under it; or it has a reason
//! to go without, which `excuses` finds.
//!
//! Those with the lease are bounded by what has happened to their key (B2): one to begin with, and one more for each value that
//! is gone or not fresh any more, each load that has failed or left nothing to others, each lease that was lost with its load, each
//! invalidation, and each caller that wants a load whatever there is.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::oracle::{Oracle, State, Value};
use super::plan::{Does, Ends};
use crate::store::Token;
use crate::sync::lock;

/// Within what is due at once: a timer may be in between.
const AT_ONCE: Duration = Duration::from_millis(1);

#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) node: usize,
    pub(super) key: u8,
    pub(super) began: u64,
    pub(super) returned: bool,
    pub(super) at: Instant,
    /// When its caller came, who joined its flight later: that could be joined then.
    came: Instant,
    pub(super) ended: Option<Instant>,
    /// The lease that it has, if any.
    lease: Option<Token>,
    /// The store was asked whether its value may be stored, or it was inserted.
    asked: bool,
    /// It has taken the place of another one, which could not ask the store either.
    instead: bool,
    /// Another one has taken its place.
    replaced: bool,
}

impl Load {
    /// Whether the store has said if there was a change since it began.
    pub(super) fn is_fenced(&self) -> bool {
        self.asked
    }
}

/// What has happened to a key at a node.
#[derive(Debug, Default)]
struct AtNode {
    /// When a command about it last failed, or took longer than the way takes.
    troubled: Option<Instant>,
    /// When a flight was last taken away from those who come later.
    detached: Option<Instant>,
    /// Leases that were granted to it and that it has not ended.
    granted: Vec<(Token, Instant)>,
    /// When which load panicked whose flight has not gone on yet.
    vanished: Option<(Instant, u32)>,
}

/// All loads of a run.
#[derive(Debug, Default)]
pub(super) struct Loads {
    pub(super) all: Vec<Load>,
    at_node: HashMap<(usize, u8), AtNode>,
    of_key: HashMap<u8, OfKey>,
    of_lease: HashMap<Token, OfLease>,
    /// By the first half of their tokens.
    nodes: HashMap<Box<str>, usize>,
}

/// B2, of one key.
#[derive(Debug, Default)]
struct OfKey {
    /// How many loads with the lease have begun, and how many more than the first one there may be.
    leased: usize,
    more: usize,
    /// A value was stored, and nothing is known to have become of it.
    stored: bool,
    /// The lease that was granted last, until it is known how it ended.
    holder: Option<Token>,
}

/// How many loads a lease has seen, and how many of them have panicked.
#[derive(Debug, Default)]
struct OfLease {
    loads: usize,
    vanished: usize,
}

impl OfLease {
    /// Whether a load of it is on its way, or has ended otherwise than by a panic.
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
    /// The lease of the key, where a flight of the node has it.
    pub(super) lease: Option<Token>,
    /// Why it may go without.
    pub(super) excuse: Option<&'static str>,
    /// The load that has panicked, and in whose flight it is the next one.
    pub(super) after: Option<u32>,
    /// How many loads of the key the node may have on their way without the lease, each of which may be replaced by another one.
    pub(super) lanes: usize,
}

impl Loads {
    pub(super) fn is_node(&mut self, name: &str, id: usize) {
        self.nodes.insert(name.into(), id);
    }

    fn at_node(&mut self, node: usize, key: u8) -> &mut AtNode {
        self.at_node.entry((node, key)).or_default()
    }

    fn node_of(&self, token: &Token) -> Option<usize> {
        self.nodes.get(token.node()).copied()
    }

    pub(super) fn troubled(&mut self, name: &str, key: u8) {
        if let Some(&node) = self.nodes.get(name) {
            self.at_node(node, key).troubled = Some(Instant::now());
        }
    }

    /// A flight of the key was, or may have been, taken away from those who come later: at a node, or at all.
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

    /// The flight with this lease is told that it is lost, and leaves later callers to themselves.
    pub(super) fn lost(&mut self, key: u8, token: &Token) {
        if let Some(node) = self.node_of(token) {
            self.detached(Some(node), key);
        }
    }

    /// The lease is this one's from now on. `is_served`: what is stored is to be served, and not to be loaded anew.
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

    /// The lease's own flight has ended it, or has tried to: it loads nothing any more. One that `has_loaded` and of which no
    /// load is known was lost to another flight of its node, whose lease that load was taken for: that one's own comes yet.
    pub(super) fn given_up(&mut self, key: u8, token: &Token, has_loaded: bool) {
        if has_loaded && self.of_lease.get(token).is_none_or(|of| of.loads == 0) {
            return;
        }
        if let Some(node) = self.node_of(token) {
            self.at_node(node, key).granted.retain(|(known, _)| known != token);
        }
    }

    /// The lease has ended with a value, or without one.
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

    /// What was stored and whoever was loading count for nothing any more. `inserted`: something else is stored instead.
    pub(super) fn invalidated(&mut self, key: u8, inserted: bool) {
        let of = self.of_key.entry(key).or_default();
        if let Some(holder) = of.holder.take() {
            of.more += usize::from(self.of_lease.get(&holder).is_some_and(OfLease::is_used));
        }
        of.more += usize::from(of.stored);
        of.stored = inserted;
        self.detached(None, key);
    }

    /// One more load of a key may come, or of each.
    pub(super) fn may_load_again(&mut self, key: Option<u8>) {
        match key {
            Some(key) => self.of_key.entry(key).or_default().more += 1,
            None => self.of_key.values_mut().for_each(|of| of.more += 1),
        }
    }

    /// Whether a command about the key has gone wrong at the node since then.
    pub(super) fn was_troubled(&self, node: usize, key: u8, since: Instant) -> bool {
        self.at_node.get(&(node, key)).and_then(|at| at.troubled).is_some_and(|at| at >= since)
    }

    /// Whether the node was given a lease of the key since then, has not ended it, and has it no more: `held` is what it has.
    pub(super) fn has_lost(&self, node: usize, key: u8, since: Instant, held: Option<&Token>) -> bool {
        let is_lost = |(token, at): &(Token, Instant)| *at >= since && Some(token) != held;
        self.at_node.get(&(node, key)).is_some_and(|at| at.granted.iter().any(is_lost))
    }

    /// The load that has panicked just now and whose flight goes on with another loader, as it is. Once.
    ///
    /// The next one begins at once, but for what it may ask about its tags.
    pub(super) fn taken_over(&mut self, node: usize, key: u8, asks: Duration) -> Option<u32> {
        let (at, id) = self.at_node(node, key).vanished.take()?;
        (at.elapsed() <= AT_ONCE + asks).then_some(id)
    }

    /// A flight that waits for another node's load may have taken the place of one that goes on without the store, and may come
    /// to its end without a load.
    pub(super) fn waits(&mut self, key: u8, token: &Token) {
        if let Some(node) = self.node_of(token) {
            self.place(node, key, 0);
        }
    }

    fn detached_at(&self, node: usize, key: u8) -> Option<Instant> {
        self.at_node.get(&(node, key)).and_then(|at| at.detached)
    }

    /// Whether later callers join the flight of one who came then.
    fn is_joinable(&self, node: usize, key: u8, came: Instant) -> bool {
        self.detached_at(node, key).is_none_or(|at| at < came)
    }

    /// Makes room for one more load without a lease, where there are as many `lanes` for them: who finds that a load goes on
    /// without the store may begin another one in its place, once. Whether it takes a place; `None` where there is none.
    fn place(&mut self, node: usize, key: u8, lanes: usize) -> Option<bool> {
        let detached = self.detached_at(node, key);
        let is_one = |load: &&mut Load| {
            load.node == node
                && load.key == key
                && load.ended.is_none()
                && load.lease.is_none()
                && !load.replaced
                && detached.is_none_or(|at| at < load.came)
        };
        let mut joinable: Vec<_> = self.all.iter_mut().filter(is_one).collect();
        if joinable.len() < lanes {
            return Some(false);
        }
        let first = joinable.iter_mut().find(|load| !load.instead)?;
        first.replaced = true;
        Some(true)
    }

    /// The store is asked to store what the load has come to.
    pub(super) fn is_committed(&mut self, id: u32) {
        if let Some(load) = self.all.get_mut(id as usize) {
            load.asked = true;
        }
    }

    /// How many loads of the key with the lease have begun at the node since then and come to a value.
    pub(super) fn since(&self, node: usize, key: u8, seq: u64) -> usize {
        let is_one =
            |load: &&Load| load.node == node && load.key == key && load.began > seq && load.lease.is_some();
        self.all.iter().filter(is_one).filter(|load| load.returned && load.ended.is_some()).count()
    }

    /// When the node had loads of the key on their way since then.
    pub(super) fn times(&self, node: usize, key: u8, since: Instant) -> Vec<(Instant, Instant)> {
        let now = Instant::now();
        let of_both = self.all.iter().filter(|load| load.node == node && load.key == key);
        let times = of_both.map(|load| (load.at.max(since), load.ended.unwrap_or(now)));
        times.filter(|(from, to)| from <= to).collect()
    }
}

impl Oracle {
    /// I5 and I8, when a load begins.
    pub(super) fn load_began(&self, begins: Begins) -> u32 {
        let Begins { node, key, does, came, lease, excuse, after, lanes } = begins;
        let (id, leased, place, bound) = {
            let mut state = lock(&self.state);
            let began = state.next();
            let State { loads, .. } = &mut *state;
            let lease = lease.filter(|lease| !loads.of_lease.entry(lease.clone()).or_default().is_used());
            // Whose flight has lost its lease is not joined any more.
            let has_lost = |before: &Load| before.lease.is_some() && lease.is_none();
            let as_before = |before: &Load| (Some(before.instead), before.replaced || has_lost(before));
            let before = after.and_then(|id| loads.all.get(id as usize));
            let (place, replaced) = match before.map(as_before) {
                Some(as_before) => as_before,
                // It, too, may be in another one's place.
                None if lease.is_some() => (loads.place(node, key, 0).or(Some(false)), false),
                // Its own flight may be one that is not joined any more.
                None if !loads.is_joinable(node, key, came) => (Some(false), false),
                None => (loads.place(node, key, lanes), false),
            };
            let mut bound = None;
            if let Some(lease) = &lease {
                loads.of_lease.entry(lease.clone()).or_default().loads += 1;
                let of = loads.of_key.entry(key).or_default();
                of.leased += 1;
                bound = (of.leased > 1 + of.more).then_some((of.leased, 1 + of.more));
            }
            let (leased, at, instead) = (lease.is_some(), Instant::now(), place == Some(true));
            loads.all.push(Load {
                node,
                key,
                began,
                returned: false,
                at,
                came,
                ended: None,
                lease,
                asked: false,
                instead,
                replaced,
            });
            ((loads.all.len() - 1) as u32, leased, place, bound)
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
            place.is_some(),
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
            // Its flight goes on with another caller's loader.
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

    /// A value that is there without a loader.
    pub(super) fn made(&self, node: usize, key: u8) -> Value {
        let mut state = lock(&self.state);
        let (began, at) = (state.next(), Instant::now());
        let (ended, lease) = (Some(at), None);
        let [asked, returned, instead, replaced] = [true, true, false, false];
        let load = Load { node, key, began, returned, at, came: at, ended, lease, asked, instead, replaced };
        state.loads.all.push(load);
        (key, (state.loads.all.len() - 1) as u32)
    }

    pub(super) fn loads_of(&self, key: u8) -> usize {
        lock(&self.state).loads.all.iter().filter(|load| load.key == key).count()
    }
}
