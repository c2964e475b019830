//! Waiters that give up their places: alone, or together where many do at one moment.
//!
//! To find a place in a queue takes the longer the more there are, so thousands of waiters whose time is up at one moment
//! would hold the server up for seconds. The first leaves by itself. Those that leave before it has an answer go together in
//! one script call, up to some thousands; then those that came meanwhile. No timer is needed for that.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::Commands;
use super::lock_step::Step;
use crate::store::StoreError;
use crate::store::names::LockName;
use crate::store::redis::scripts;
use crate::sync::lock;

/// How many leave in one call: their places are its arguments.
const AT_ONCE: usize = 2_000;

/// Places that are left to whichever waiter of the same lock is leaving already, by the lock's key.
#[derive(Debug, Default)]
pub(crate) struct Leaving(Mutex<HashMap<Arc<str>, Vec<Leaver>>>);

#[derive(Debug)]
struct Leaver {
    place: String,
    /// Told once its place was taken out of the queue; dropped, it has to leave by itself.
    gone: oneshot::Sender<()>,
}

/// What leaving with others came to.
pub(crate) enum Joined<'a> {
    /// This waiter is the first: it leaves by itself, and sees to the others.
    First(Duty<'a>),
    /// Its place was taken out of the queue.
    Gone,
    /// It was not: the waiter may hold the lock, or has to leave by itself.
    Alone,
}

/// The duty to see to those that leave meanwhile. Dropped, they leave by themselves.
pub(crate) struct Duty<'a> {
    leaving: &'a Leaving,
    key: Arc<str>,
    has_ended: bool,
}

impl Leaving {
    /// Leaves this place to the waiter of the same lock that is leaving already, if there is one.
    pub(crate) async fn join(&self, name: &LockName, place: String, within: Duration) -> Joined<'_> {
        let gone = {
            let mut all = lock(&self.0);
            match all.get_mut(&name.key) {
                None => {
                    all.insert(Arc::clone(&name.key), Vec::new());
                    let key = Arc::clone(&name.key);
                    return Joined::First(Duty { leaving: self, key, has_ended: false });
                }
                Some(others) => {
                    let (gone, is_gone) = oneshot::channel();
                    others.push(Leaver { place, gone });
                    is_gone
                }
            }
        };
        if matches!(timeout(within, gone).await, Ok(Ok(()))) { Joined::Gone } else { Joined::Alone }
    }
}

impl Duty<'_> {
    /// Those that have come since; none, and the duty has ended.
    fn next(&mut self) -> Vec<Leaver> {
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

    /// Takes those out of the queue that have come since; whether there were any.
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
            let leave = Step::queueing(&scripts::LEAVE, name);
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

impl Drop for Duty<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let others = lock(&self.leaving.0).remove(&self.key);
            drop(others);
        }
    }
}

/// How many were seen to, and the numbers of those that stood in the queue.
fn left(answer: Value) -> Option<(usize, Vec<usize>)> {
    let Value::Array(parts) = answer else { return None };
    let mut numbers = parts.into_iter().map(|part| match part {
        Value::Int(number) => usize::try_from(number).ok(),
        _ => None,
    });
    Some((numbers.next()??, numbers.collect::<Option<_>>()?))
}
