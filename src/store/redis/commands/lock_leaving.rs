//! Waiters that give up their places, alone or together.
//!
//! To find a place takes time in proportion to the queue's length, so thousands of waiters with the same deadline would
//! block the server for seconds. The first waiter leaves alone. The waiters that leave before its answer arrives go
//! together in one script call, up to some thousands; then those that came meanwhile. This needs no timer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::Commands;
use super::lock_step::LockStep;
use crate::store::StoreError;
use crate::store::names::LockName;
use crate::store::redis::scripts;
use crate::sync::lock;

/// How many leave in one call: their places are its arguments.
const AT_ONCE: usize = 2_000;

/// For each lock on which a waiter is leaving, the places of the waiters that leave with it.
#[derive(Debug, Default)]
pub(crate) struct LeaveBatches(Mutex<HashMap<Arc<str>, Vec<LeavingWaiter>>>);

#[derive(Debug)]
struct LeavingWaiter {
    place: String,
    /// Sent when the place was removed from the queue; if it is dropped, the waiter must leave alone.
    gone: oneshot::Sender<()>,
}

/// The result of leaving together with others.
pub(crate) enum LeaveRole<'a> {
    /// This waiter is the first: it leaves alone, and then removes the others.
    First(LeaveDuty<'a>),
    /// Its place was removed from the queue.
    Gone,
    /// It had no place in the queue: the waiter may hold the lock, or must leave alone.
    Alone,
}

/// The duty to remove the waiters that leave meanwhile. If it is dropped, they leave alone.
pub(crate) struct LeaveDuty<'a> {
    leaving: &'a LeaveBatches,
    key: Arc<str>,
    has_ended: bool,
}

impl LeaveBatches {
    /// Adds this place to those of the waiter that is leaving the same lock already, if there is one.
    pub(crate) async fn join(&self, name: &LockName, place: String, within: Duration) -> LeaveRole<'_> {
        let gone = {
            let mut all = lock(&self.0);
            match all.get_mut(&name.key) {
                None => {
                    all.insert(Arc::clone(&name.key), Vec::new());
                    let key = Arc::clone(&name.key);
                    return LeaveRole::First(LeaveDuty { leaving: self, key, has_ended: false });
                }
                Some(others) => {
                    let (gone, is_gone) = oneshot::channel();
                    others.push(LeavingWaiter { place, gone });
                    is_gone
                }
            }
        };
        if matches!(timeout(within, gone).await, Ok(Ok(()))) { LeaveRole::Gone } else { LeaveRole::Alone }
    }
}

impl LeaveDuty<'_> {
    /// The waiters that have come since the last call; if there are none, the duty has ended.
    fn next(&mut self) -> Vec<LeavingWaiter> {
        let mut all = lock(&self.leaving.0);
        let Some(others) = all.get_mut(&self.key) else { return Vec::new() };
        let rest = others.split_off(others.len().min(AT_ONCE));
        let next = std::mem::replace(others, rest);
        if next.is_empty() {
            all.remove(&self.key);
            self.has_ended = true;
        }
        next
    }

    /// Removes from the queue the waiters that have come since the last call; returns whether there were any.
    pub(crate) async fn see_to_others(
        &mut self,
        commands: &Commands,
        name: &LockName,
        within: Duration,
    ) -> Result<bool, StoreError> {
        let mut leavers = self.next();
        let any = !leavers.is_empty();
        while !leavers.is_empty() {
            let args = |cmd: &mut Cmd| {
                for leaver in &leavers {
                    cmd.arg(&leaver.place);
                }
            };
            let leave = LockStep::queueing(&scripts::LEAVE, name);
            let (seen_to, mut gone) = leave.run(commands, args, within, left).await?;
            gone.sort_unstable();
            let later = leavers.split_off(seen_to.clamp(1, leavers.len()));
            for (number, leaver) in leavers.into_iter().enumerate() {
                if gone.binary_search(&(number + 1)).is_ok() {
                    let _ = leaver.gone.send(());
                }
            }
            leavers = later;
        }
        Ok(any)
    }
}

impl Drop for LeaveDuty<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let others = lock(&self.leaving.0).remove(&self.key);
            drop(others);
        }
    }
}

/// How many places were handled, and the indices of those that stood in the queue.
fn left(answer: Value) -> Option<(usize, Vec<usize>)> {
    let Value::Array(parts) = answer else { return None };
    let mut numbers = parts.into_iter().map(|part| match part {
        Value::Int(number) => usize::try_from(number).ok(),
        _ => None,
    });
    Some((numbers.next()??, numbers.collect::<Option<_>>()?))
}
