//! The oracle: records each step in the store, each load and each call of a run, and reports broken invariants.
//!
//! It counts independently and trusts nothing that the code under test reports. The invariants are numbered as on the page of
//! [`simulation`](super).

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write as _};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::loads::Loads;
use super::plan::Profile;
use crate::key::Key;
use crate::store::Token;
use crate::sync::lock;
use crate::value::entry::Entry;

/// Timers and the store's clock count milliseconds.
const SLACK: Duration = Duration::from_millis(2);

/// What a loader returns: the key, and the load that made the value.
pub(super) type Value = (u8, u32);

#[derive(Debug)]
pub(super) struct Oracle {
    pub(super) began: Instant,
    pub(super) profile: Profile,
    /// All values of the run have the same tag.
    pub(super) tagged: bool,
    /// An older value may stand in for a failed load, even if another node has changed the resource.
    pub(super) has_stand_ins: bool,
    pub(super) lease: Duration,
    /// The longest round trip of a command without faults.
    pub(super) trip: Duration,
    /// How much time the store may add to one call.
    pub(super) budget: Duration,
    /// How much time the store may cost a flight between two acquires.
    pub(super) patience: Duration,
    /// How long a value may still be served once it is no longer fresh; `None` if the store's clock, or its state, may jump.
    pub(super) window: Option<Duration>,
    /// How long copies of older values may be served after a load whose value must not be stored; `None`: until they are stale.
    pub(super) copies_for: Option<Duration>,
    pub(super) keys: HashMap<Box<str>, u8>,
    /// How many names of unconfirmed invalidations a node keeps before they become one of everything.
    pub(super) most_unsent: usize,
    pub(super) state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) violations: Vec<String>,
    /// The lines of the trace; `None` unless the run is traced.
    pub(super) log: Option<Vec<String>>,
    hash: DefaultHasher,
    /// The position of the last event in the order of all events. Fields of type `u64` that say "when" are such positions.
    seq: u64,
    pub(super) loads: Loads,
    pub(super) by_key: HashMap<u8, OfKey>,
    /// The tokens. Each has a number, in the order in which they came, for reports, because the text of a token is random.
    pub(super) tokens: HashMap<Token, Holder>,
    pub(super) look_ups: u64,
    pub(super) commits: u64,
    /// When the last failover took the store back to an older state.
    pub(super) failed_over: u64,
    pub(super) failed_over_at: Option<Instant>,
    /// When each call that invalidates the tag began.
    pub(super) tag_changes: Vec<u64>,
    /// The nodes at which a call that changes something has begun.
    pub(super) changing: HashSet<usize>,
    /// The nodes with an unconfirmed invalidation of a key, and that key, as long as the node may not have sent it again.
    pub(super) unsent: HashSet<(usize, u8)>,
    /// The values of confirmed insertions that began after `lost`.
    pub(super) inserted: HashSet<Value>,
    /// When the store last lost anything.
    pub(super) lost: u64,
}

#[derive(Debug)]
pub(super) struct Holder {
    pub(super) number: usize,
    pub(super) key: u8,
    pub(super) acquires: u64,
    /// The key's `events` at the token's first acquire.
    pub(super) events_before: u64,
    pub(super) first: Instant,
    pub(super) committed: bool,
    pub(super) granted: bool,
    /// Its flight has ended the lease, or has tried to.
    pub(super) over: bool,
    /// How many of its acquires have found a value.
    pub(super) found: u8,
    /// The latest time for the flight's next acquire, if its last acquire found the lease held.
    pub(super) due: Option<Instant>,
    /// The waiter was late at the last audit.
    pub(super) is_late: bool,
}

#[derive(Debug, Default)]
pub(super) struct OfKey {
    /// When the store executed each invalidation: the time, and the position in the order of events.
    pub(super) invalidated: Vec<(Instant, u64)>,
    /// The changes that have ended for their caller, with an acknowledgement or without one.
    pub(super) ended: Vec<Ended>,
    /// Loads that must not be stored and have ended under their lease: the moment, in the order of events and by the clock, and when
    /// the load began.
    pub(super) unstored: Vec<(u64, Instant, u64)>,
    /// How many times a lease of the key has ended, or may have ended, so far.
    pub(super) events: u64,
}

/// A change that has ended for its caller. From then on, the node that made it serves nothing older.
#[derive(Debug)]
pub(super) struct Ended {
    node: usize,
    began: u64,
    ended: u64,
    /// When the other nodes, too, cease to serve anything older: at the acknowledgement, or once the node has sent the change again.
    everywhere: Option<u64>,
    at: Instant,
}

impl Ended {
    /// Whether the change still counts after a failover to the state of `to`. A change that was not acknowledged at once does not
    /// count: the node may have sent it at any time.
    pub(super) fn outlives_failover(&self, to: Instant) -> bool {
        self.at < to && self.everywhere == Some(self.ended)
    }
}

/// Hashes the text that is written to it.
struct Into<'a>(&'a mut DefaultHasher);

impl fmt::Write for Into<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

impl State {
    pub(super) fn next(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    /// Records that the store has lost writes, and may have lost the numbers of attempts.
    pub(super) fn lose(&mut self) {
        self.inserted.clear();
        self.lost = self.seq;
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash.finish()
    }
}

impl Oracle {
    pub(super) fn violated(&self, what: impl fmt::Display) {
        let at = self.began.elapsed();
        self.note(format_args!("VIOLATED {what}"));
        lock(&self.state).violations.push(format!("at {at:?}: {what}"));
    }

    /// Adds a line to the trace.
    pub(super) fn note(&self, what: impl fmt::Display) {
        let at = self.began.elapsed();
        let mut state = lock(&self.state);
        at.as_micros().hash(&mut state.hash);
        // Hashed while it is formatted, without an intermediate string.
        let _ = write!(Into(&mut state.hash), "{what}");
        if let Some(log) = &mut state.log {
            log.push(format!("{:>10.3} {what}", at.as_micros() as f64 / 1000.0));
        }
    }

    pub(super) fn number(&self, token: &Token, key: u8) -> usize {
        let mut state = lock(&self.state);
        let number = state.tokens.len();
        let events_before = state.by_key.entry(key).or_default().events;
        let (acquires, committed, due, first) = (0, false, None, Instant::now());
        let (granted, over, is_late, found) = (false, false, false, 0);
        let holder = Holder {
            number,
            key,
            acquires,
            events_before,
            first,
            committed,
            granted,
            over,
            found,
            due,
            is_late,
        };
        state.tokens.entry(token.clone()).or_insert(holder).number
    }

    pub(super) fn holder(&self, lease: Option<&(Token, Duration)>, key: u8) -> String {
        lease.map_or_else(|| "-".to_owned(), |(token, _)| format!("t{}", self.number(token, key)))
    }

    /// Records that the key's lease has ended: all its waiters were notified, or only the waiter that it was handed to.
    pub(super) fn lease_ended(&self, key: u8, handed_to: Option<&Token>) {
        let mut state = lock(&self.state);
        state.by_key.entry(key).or_default().events += 1;
        // I6: without faults, a notified waiter asks again at once.
        if self.profile == Profile::None {
            let soon = Instant::now() + self.trip * 2 + Duration::from_millis(20);
            let is_notified = |token: &Token| handed_to.is_none_or(|other| token == other);
            for (_, holder) in
                state.tokens.iter_mut().filter(|(token, holder)| holder.key == key && is_notified(token))
            {
                holder.due = holder.due.map(|due| due.min(soon));
            }
        }
    }

    /// I6: no waiter sleeps past its time. `waits` returns `None` for a token that no longer waits, else whether its node runs.
    pub(super) fn audit(&self, waits: impl Fn(&Token) -> Option<bool>) {
        let now = Instant::now();
        let mut late = Vec::new();
        for (token, holder) in &mut lock(&self.state).tokens {
            let Some(due) = holder.due else { continue };
            match waits(token) {
                None => holder.due = None,
                // The node is stopped, so the waiter's time begins when the node resumes.
                Some(false) => holder.due = Some(due.max(now + self.lease + self.patience)),
                Some(true) if due >= now => {}
                // The waiter may continue at this very moment: only the next audit reports it.
                Some(true) if !std::mem::replace(&mut holder.is_late, true) => {}
                Some(true) => late.push((holder.number, holder.key, now - due)),
            }
        }
        late.sort();
        for (number, key, late) in late {
            self.violated(format_args!(
                "I6: t{number} sleeps on key {key}, {late:?} past the time that it received"
            ));
        }
    }

    pub(super) fn check(&self, is_so: bool, what: impl fmt::Display) {
        if !is_so {
            self.violated(what);
        }
    }

    /// I9 for look-ups and commits, in a run without lost commands: the calls need `most` look-ups at most.
    pub(super) fn check_frugality(&self, most: usize) {
        let state = lock(&self.state);
        let (look_ups, commits, loads) = (state.look_ups, state.commits, state.loads.all.len());
        drop(state);
        self.check(look_ups <= most as u64, format_args!("I9: {look_ups} look-ups for at most {most}"));
        self.check(commits <= loads as u64, format_args!("I9: {commits} commits of {loads} loads"));
    }

    /// I3 in the store: the stored value is of a load that began after the key's last invalidation.
    pub(super) fn check_age(&self, key: u8, value: Value) {
        let state = lock(&self.state);
        let began = state.loads.all.get(value.1 as usize).map_or(0, |load| load.began);
        let newest = state.by_key.get(&key).and_then(|of| of.invalidated.last()).map_or(0, |(_, seq)| *seq);
        drop(state);
        self.check(
            began > newest,
            format_args!("I3: key {key}: stored load {} that began before an invalidation", value.1),
        );
    }

    /// I3 and I10 for a value that a caller receives. `start_seq`: when the call began; without it the value may be older than a change.
    pub(super) fn check_value(&self, node: usize, key: u8, start_seq: Option<u64>, value: Value) {
        let (whose, load) = value;
        self.check(whose == key, format_args!("I10: key {key} returned a value of key {whose}"));
        let state = lock(&self.state);
        let known = state.loads.all.get(load as usize).cloned();
        let older = known.as_ref().and_then(|known| {
            let (start_seq, ended) = (start_seq?, state.by_key.get(&key)?.ended.iter());
            ended
                .filter(|change| {
                    // A load whose value was never committed is not checked for the changes of other nodes.
                    let elsewhere = change.everywhere.filter(|_| known.is_fenced() && !self.has_stand_ins);
                    let ended = if change.node == node { Some(change.ended) } else { elsewhere };
                    ended.is_some_and(|ended| ended < start_seq) && known.began < change.began
                })
                .count()
                .checked_sub(1)
        });
        drop(state);
        self.check(
            known.is_some_and(|known| known.key == key && known.returned),
            format_args!("I10: key {key} returned what no load of it has returned: {load}"),
        );
        self.check(
            older.is_none(),
            format_args!(
                "I3: node {node} received load {load} of key {key}, older than a change that had ended before its call"
            ),
        );
    }

    /// I14 for a value that a caller receives: the call began at `start_seq`, and the caller came at `came`.
    pub(super) fn check_windows(&self, key: u8, start_seq: u64, came: Instant, (_, load): Value) {
        let state = lock(&self.state);
        let Some(known) = state.loads.all.get(load as usize) else { return };
        let over = known.served_until.filter(|_| self.window.is_some()).map(|until| until + SLACK);
        let is_over = over.is_some_and(|over| over < came);
        let until = |at: Instant| self.copies_for.map(|copies| at + copies);
        let is_ended = known.is_fenced()
            && !self.has_stand_ins
            && state.by_key.get(&key).is_some_and(|of| {
                of.unstored.iter().any(|(seq, at, began)| {
                    known.began < *began && *seq < start_seq && until(*at).is_some_and(|until| until <= came)
                })
            });
        drop(state);
        self.check(
            !is_over,
            format_args!("I14: key {key}: load {load} was returned after its stale windows"),
        );
        self.check(
            !is_ended,
            format_args!("I14: key {key}: load {load} was returned after a load that must not be stored"),
        );
    }

    /// If the load under this lease must not be stored, records that the lease has ended, and with it all older values.
    pub(super) fn unstorable_load_ended(&self, key: u8, token: &Token) {
        let mut state = lock(&self.state);
        let Some(began) = state.loads.unstorable(token) else { return };
        let load = (state.next(), Instant::now(), began);
        state.by_key.entry(key).or_default().unstored.push(load);
    }

    pub(super) fn confirmed(&self, node: usize, key: u8, began: u64) {
        self.ended(node, key, began, true);
    }

    /// Records an invalidation whose caller received an error or has left. The node retains it until it has sent it again.
    pub(super) fn unconfirmed(&self, node: usize, key: u8, began: u64) {
        self.ended(node, key, began, false);
        let mut state = lock(&self.state);
        state.unsent.insert((node, key));
        if state.unsent.iter().filter(|(of, _)| *of == node).count() > self.most_unsent {
            state.unsent.extend(self.keys.values().map(|key| (node, *key)));
        }
        state.loads.detached(Some(node), key);
    }

    fn ended(&self, node: usize, key: u8, began: u64, is_confirmed: bool) {
        let mut state = lock(&self.state);
        let ended = state.next();
        if began < state.failed_over {
            // A failover may have undone the change before it was acknowledged, and no node can know that: the change does not count.
            return;
        }
        let change =
            Ended { node, began, ended, everywhere: is_confirmed.then_some(ended), at: Instant::now() };
        state.by_key.entry(key).or_default().ended.push(change);
    }

    /// Records that the node retains no invalidation any more: it has sent all of them.
    pub(super) fn sent_all(&self, node: usize) {
        let mut state = lock(&self.state);
        let now = state.next();
        let sent: Vec<_> = state.unsent.extract_if(|(unsent, _)| *unsent == node).collect();
        // A value that was read before the invalidation was sent is not served, so its caller loads.
        sent.into_iter().for_each(|(_, key)| state.loads.may_load_again(Some(key)));
        for change in state.by_key.values_mut().flat_map(|of| &mut of.ended) {
            if change.node == node {
                change.everywhere.get_or_insert(now);
            }
        }
    }

    /// Whether the store went back to an older state, and `before` is earlier than that moment plus `within`.
    pub(super) fn has_failed_over(&self, within: Duration, before: Instant) -> bool {
        lock(&self.state).failed_over_at.is_some_and(|at| before < at + within)
    }

    pub(super) fn invalidations(&self, key: u8, since: u64) -> usize {
        let state = lock(&self.state);
        let tags = state.tag_changes.iter().filter(|seq| **seq > since).count();
        let of_key = state.by_key.get(&key);
        tags + of_key.map_or(0, |of| of.invalidated.iter().filter(|(_, seq)| *seq > since).count())
    }

    /// How long a value that is stored now, at `now` by the store's clock, may be served.
    pub(super) fn served_for(&self, raw: &Bytes, key: &Key, now: u64) -> Duration {
        let entry = Entry::decode(raw.clone(), key, usize::MAX).ok();
        let fresh = entry.map_or(0, |entry| entry.expiry.fresh_until.saturating_sub(now));
        Duration::from_millis(fresh) + self.window.unwrap_or_default()
    }

    pub(super) fn value(&self, raw: &Bytes, key: &Key) -> Option<Value> {
        let entry = Entry::decode(raw.clone(), key, usize::MAX).ok()?;
        rmp_serde::from_slice(&entry.payload).ok()
    }
}
