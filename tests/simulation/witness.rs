//! The oracle as a witness of the store: it checks each command that runs there.

use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::mutants;
use super::oracle::Oracle;
use super::plan::Profile;
use crate::key::Key;
use crate::store::command::{CommandAnswer, EntryCommand};
use crate::store::memory::MemoryStore;
use crate::store::{Acquired, HandedOver, Token, TokenCheck};
use crate::sync::lock;
use crate::testing::Witness;
use crate::value::entry::Entry;
use crate::value::entry::Freshness;

/// How many unusable entries the acquires of one flight may find before the flight loads without the store.
const UNUSABLE_LIMIT: u8 = 3;

impl Oracle {
    /// Runs a command in the store, records what it did, and reports a violation if the command must not do that.
    fn step(
        &self,
        store: &MemoryStore,
        (key, of): (&Key, u8),
        command: EntryCommand,
        run: &dyn Fn(EntryCommand) -> CommandAnswer,
    ) -> CommandAnswer {
        let name = key.name();
        let (lease, entry) = (store.lease(name), store.entry(name));
        let answer = mutants::run(store, key, command.clone(), run);
        let (lease_after, entry_after) = (store.lease(name), store.entry(name));
        let held_by = |token: &Token| lease.as_ref().is_some_and(|(holder, _)| holder == token);
        let who = |token: &Token| self.number(token, of);
        let same_holder =
            lease.as_ref().map(|(token, _)| token) == lease_after.as_ref().map(|(token, _)| token);
        let before = self.holder(lease.as_ref(), of);
        let after = self.holder(lease_after.as_ref(), of);
        let text = match &command {
            EntryCommand::LookUp => "look up".to_owned(),
            EntryCommand::Acquire { token, .. } => format!("acquire t{}", who(token)),
            EntryCommand::Renew { token, .. } => format!("renew t{}", who(token)),
            EntryCommand::Commit { token, .. } => format!("commit t{}", who(token)),
            EntryCommand::Fail { token, .. } => format!("fail t{}", who(token)),
            EntryCommand::HandOver { token, .. } => format!("hand over t{}", who(token)),
            EntryCommand::Release { token } => format!("release t{}", who(token)),
            EntryCommand::Invalidate { .. } => "invalidate".to_owned(),
        };
        let came = match &answer {
            CommandAnswer::Found(found) => format!("found={}", found.is_some()),
            CommandAnswer::Acquired(Acquired::Found(_)) => "found".to_owned(),
            CommandAnswer::Acquired(Acquired::Ended(_)) => "ended".to_owned(),
            CommandAnswer::Acquired(Acquired::Granted) => "granted".to_owned(),
            CommandAnswer::Acquired(Acquired::Held { remaining, .. }) => format!("held for {remaining:?}"),
            CommandAnswer::Checked(check) => format!("{check:?}"),
            CommandAnswer::HandedOver(done) => format!("{done:?}"),
            CommandAnswer::Announced(_) => "done".to_owned(),
            CommandAnswer::Refused(_) => "voided".to_owned(),
            other => format!("{other:?}"),
        };
        self.note(format_args!("k{of} {text}: {came}; lease {before} -> {after}"));

        // Whether the stored entry would be served, at the node of this token, to a caller that requires nothing special.
        let is_served = |token: &Token| {
            {
                let state = lock(&self.state);
                if state.loads.node_of(token).is_some_and(|node| state.unsent.contains(&(node, of))) {
                    return false;
                }
            }
            let entry = entry_after.clone().and_then(|entry| Entry::decode(entry, key, usize::MAX).ok());
            entry.is_some_and(|entry| {
                matches!(entry.serves(store.now()), Freshness::Fresh | Freshness::BackingOff)
            })
        };
        let ours = |token: &Token, done: bool, step: &str| {
            self.check(
                !done || held_by(token),
                format_args!("I1/I2: {step} of t{} ran, lease {before}", who(token)),
            );
            self.check(
                done || (same_holder && entry == entry_after),
                format_args!(
                    "I2: {step} of t{} was refused and changed something: {before} -> {after}",
                    who(token)
                ),
            );
            if done {
                self.lease_ended(of, lease_after.as_ref().map(|(holder, _)| holder));
            }
            let heir = lease_after.as_ref().filter(|_| !same_holder);
            let heir = heir.map(|(heir, _)| (heir, is_served(heir)));
            let mut state = lock(&self.state);
            state.loads.abandoned(of, token, ["commit", "fail"].contains(&step));
            if let Some(holder) = state.tokens.get_mut(token) {
                holder.over = true;
            }
            if done {
                state.loads.ended(of, token, step == "commit");
                if let Some((heir, is_served)) = heir {
                    state.loads.granted(of, heir, is_served);
                }
            }
            drop(state);
            if done && ["commit", "fail"].contains(&step) {
                self.unstorable_load_ended(of, token);
            }
        };
        match (&command, &answer) {
            (EntryCommand::LookUp, _) => lock(&self.state).look_ups += 1,
            (EntryCommand::Acquire { token, .. }, CommandAnswer::Acquired(acquired)) => {
                let due = match acquired {
                    Acquired::Held { remaining, .. } => {
                        Some(Instant::now() + (*remaining).min(self.lease) + self.patience)
                    }
                    _ => None,
                };
                let acquires = {
                    let mut state = lock(&self.state);
                    let state = &mut *state;
                    let events = state.by_key.entry(of).or_default().events;
                    state.tokens.get_mut(token).map(|holder| {
                        holder.acquires += 1;
                        holder.granted |= matches!(acquired, Acquired::Granted);
                        holder.found += u8::from(matches!(acquired, Acquired::Found(_)));
                        // An acquire that runs after the grant arrives late, and its flight has given it up: no flight waits for its reply.
                        holder.due = due.filter(|_| !holder.granted);
                        holder.is_late = false;
                        // A live holder renews the lease when two thirds of it are left, which bounds how many times a waiter's timer ends.
                        let naps = holder.first.elapsed().as_millis() * 2 / self.lease.as_millis().max(1);
                        // Beyond this number of unusable entries the flight continues without the store; it also does so where the round
                        // trips of the look-up and of these acquires use up its budget.
                        let spent = self.trip * (u32::from(holder.found) + 2);
                        if holder.found > UNUSABLE_LIMIT || holder.found > 0 && spent > self.budget {
                            state.loads.troubled(token.node(), of);
                        }
                        // An acquire may find a value that is unusable because it or its tag was invalidated.
                        let rejects = self.tagged
                            || state
                                .loads
                                .node_of(token)
                                .is_some_and(|node| state.unsent.contains(&(node, of)));
                        let outdated = if rejects { u64::from(holder.found) } else { 0 };
                        (holder.acquires, 3 + events - holder.events_before + naps as u64 + outdated)
                    })
                };
                // The flight then checks the value's tags, and from that moment on later callers do not join it.
                if self.tagged && matches!(acquired, Acquired::Found(_)) {
                    lock(&self.state).loads.lost(of, token);
                }
                if !matches!(acquired, Acquired::Granted) {
                    lock(&self.state).loads.waits(of, token);
                }
                if matches!(acquired, Acquired::Granted) {
                    let is_served = is_served(token);
                    lock(&self.state).loads.granted(of, token, is_served);
                    self.check(
                        lease.is_none() || held_by(token),
                        format_args!("I1: t{} was granted over {before}", who(token)),
                    );
                }
                if let Some((acquires, most)) = acquires.filter(|_| self.profile == Profile::None) {
                    self.check(
                        acquires <= most,
                        format_args!("I9: t{} has sent {acquires} requests for {most} reasons", who(token)),
                    );
                }
            }
            (EntryCommand::Renew { token, .. }, CommandAnswer::Checked(check)) => {
                self.check(
                    *check == TokenCheck::Lost || held_by(token),
                    format_args!("I2: renewed t{}, lease {before}", who(token)),
                );
                self.check(same_holder, format_args!("I2: a renewal changed {before} to {after}"));
                if *check == TokenCheck::Lost {
                    lock(&self.state).loads.lost(of, token);
                }
            }
            (EntryCommand::Commit { token, entry, .. }, CommandAnswer::Checked(check)) => {
                let done = *check == TokenCheck::Held;
                if let Some((_, id)) = self.value(entry, key) {
                    lock(&self.state).loads.is_committed(id);
                }
                ours(token, done, "commit");
                if done {
                    let again = {
                        let mut state = lock(&self.state);
                        state.commits += 1;
                        state
                            .tokens
                            .get_mut(token)
                            .is_some_and(|holder| std::mem::replace(&mut holder.committed, true))
                    };
                    self.check(!again, format_args!("I1: a second commit of t{}", who(token)));
                    self.check(
                        entry_after.as_ref() == Some(entry) && lease_after.is_none(),
                        format_args!("I1: a commit of t{} left something else", who(token)),
                    );
                    if let Some(value) = self.value(entry, key) {
                        self.check_age(of, value);
                        let served_for = self.served_for(entry, key, store.now());
                        lock(&self.state).loads.is_stored(value.1, served_for);
                    }
                }
            }
            (EntryCommand::Fail { token, .. }, CommandAnswer::Checked(check)) => {
                ours(token, *check == TokenCheck::Held, "fail")
            }
            (EntryCommand::Release { token }, CommandAnswer::Checked(check)) => {
                ours(token, *check == TokenCheck::Held, "release")
            }
            (EntryCommand::HandOver { token, .. }, CommandAnswer::HandedOver(done)) => {
                ours(token, *done != HandedOver::NotMine, "hand over");
            }
            (EntryCommand::Invalidate { insert, .. }, CommandAnswer::Announced(_)) => {
                let inserted = insert.as_ref().and_then(|insert| self.value(&insert.entry, key));
                let is_again = inserted.is_some_and(|value| lock(&self.state).inserted.contains(&value));
                self.check(
                    !is_again,
                    format_args!("I3: a late attempt at a confirmed insertion of key {of} ran"),
                );
                {
                    let served_for =
                        insert.as_ref().map(|insert| self.served_for(&insert.entry, key, store.now()));
                    let mut state = lock(&self.state);
                    let seq = state.next();
                    state.by_key.entry(of).or_default().invalidated.push((Instant::now(), seq));
                    // An inserted value counts as loaded at the moment of its insertion.
                    let now = state.next();
                    if let Some((_, id)) = inserted
                        && let Some(load) = state.loads.all.get_mut(id as usize)
                    {
                        load.began = now;
                        state.loads.is_stored(id, served_for.unwrap_or_default());
                    }
                }
                let expected = insert.as_ref().map(|insert| &insert.entry);
                self.check(
                    lease_after.is_none() && entry_after.as_ref() == expected,
                    format_args!("I3: an invalidation of key {of} left {after}"),
                );
                lock(&self.state).loads.invalidated(of, expected.is_some());
                self.lease_ended(of, None);
            }
            (EntryCommand::Invalidate { .. }, CommandAnswer::Refused(_)) => self.check(
                same_holder && entry == entry_after,
                format_args!("I3: a voided invalidation of key {of} changed something: {before} -> {after}"),
            ),
            (command, answer) => self.violated(format_args!("{command:?} was answered {answer:?}")),
        }
        answer
    }
}

impl Witness for Oracle {
    fn run(
        &self,
        store: &MemoryStore,
        key: &Key,
        command: EntryCommand,
        run: &dyn Fn(EntryCommand) -> CommandAnswer,
    ) -> CommandAnswer {
        let Some(&of) = self.keys.get(key.name()) else { return run(command) };
        mutants::arrive(command, |command| self.step(store, (key, of), command, run))
    }

    fn tag_changed(&self, node: Uuid) {
        let mut state = lock(&self.state);
        let seq = state.next();
        state.tag_changes.push(seq);
        for &key in self.keys.values() {
            state.loads.may_load_again(Some(key));
            state.loads.detached_at_node(&node.simple().to_string(), key);
        }
    }

    fn flushed(&self) {
        lock(&self.state).lose();
    }

    fn failed_over(&self, to: Instant) {
        self.note(format_args!("failover, back {:?}", to.elapsed()));
        let mut state = lock(&self.state);
        state.lose();
        state.failed_over = state.next();
        state.failed_over_at = Some(Instant::now());
        for of in state.by_key.values_mut() {
            // Invalidations that the failover has undone no longer count.
            of.invalidated.retain(|(at, _)| *at < to);
            // Neither do ends of unstorable loads: the older values that they outdated are there again.
            of.unstored.retain(|(_, at, _)| *at < to);
            of.ended.retain(|change| change.outlives_failover(to));
            of.events += 1;
        }
        // Older leases and values are there again, and newer ones are lost.
        state.loads.may_load_again(None);
    }

    fn answered(&self, node: Uuid, key: &Key, took: Duration, is_ok: bool) {
        // Timers are late by up to a millisecond each, on the way to the store and on the way back.
        if is_ok && took <= self.trip + Duration::from_millis(2) {
            return;
        }
        let (mut state, node) = (lock(&self.state), node.simple().to_string());
        let Some(&of) = self.keys.get(key.name()) else {
            // A key that is not in `keys` is that of the tag, which the values of all keys have.
            self.keys.values().for_each(|&of| state.loads.troubled(&node, of));
            return;
        };
        state.loads.troubled(&node, of);
        // A waiter that receives late how long it has to wait begins to sleep late, so its time ends later.
        for (_, holder) in
            state.tokens.iter_mut().filter(|(token, of_it)| is_ok && of_it.key == of && token.node() == node)
        {
            holder.due = holder.due.map(|due| due + took);
        }
    }

    fn forged(&self, name: &str) {
        if let Some(&of) = self.keys.get(name) {
            lock(&self.state).loads.detached(None, of);
        }
    }

    fn stepped(&self) {
        // An entry that callers have read as stale may be fresh by the new clock, and later become stale once more, which allows a load.
        lock(&self.state).loads.may_load_again(None);
    }
}
