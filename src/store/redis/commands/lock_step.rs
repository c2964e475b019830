//! One script call for one lock, and the keys it gets.

use std::time::Duration;

use redis::{Cmd, Value};

use super::Commands;
use super::call::{refused, run_call};
use crate::store::lock_store::Create;
use crate::store::names::LockName;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, CallForm, Script, millis};
use crate::store::{StoreError, Token};

/// One script call for one lock.
pub(crate) struct LockStep<'a> {
    pub(crate) script: &'a Script,
    pub(crate) name: &'a LockName,
    /// The prefixes of its keys after the lock's own.
    parts: &'a [&'a str],
    /// In a cluster, the prefix of one more key, after those of `parts`: the roll of the waiters' nodes.
    spread_part: Option<&'a str>,
}

impl<'a> LockStep<'a> {
    /// A take of a mutex; in a cluster with the roll of its waiters' nodes.
    pub(crate) fn taking(name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let spread_part = Some(if prefixed { "sg1:pr" } else { "sg1:mr" });
        Self { spread_part, ..Self::giving(&scripts::MUTEX_TAKE, name) }
    }

    /// A take of a permit; in a cluster with the roll of its waiters' nodes.
    pub(crate) fn taking_permit(name: &'a LockName) -> Self {
        Self { spread_part: Some("sg1:sr"), ..Self::semaphore(&scripts::SEMAPHORE_TAKE, name) }
    }

    /// A step that gives the mutex to a waiter, with all its keys.
    pub(crate) fn giving(script: &'a Script, name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:pf"] } else { &["sg1:mq", "sg1:mf"] };
        Self { script, name, parts, spread_part: None }
    }

    /// A step of a mutex that the first take gets; with the mark of a head that was told.
    pub(crate) fn offering(script: &'a Script, name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:pf", "sg1:pt"] } else { &["sg1:mq", "sg1:mf", "sg1:mt"] };
        Self { script, name, parts, spread_part: None }
    }

    /// A step that restarts the holder's time: it may have to tell the waiters, and records a time that is
    /// longer than the token says.
    pub(crate) fn extending(name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:px"] } else { &["sg1:mq", "sg1:mx"] };
        Self { script: &scripts::MUTEX_EXTEND, name, parts, spread_part: None }
    }

    pub(crate) fn repairing(name: &'a LockName) -> Self {
        let Self { parts, .. } = Self::extending(name);
        Self { script: &scripts::MUTEX_REPAIR, name, parts: &parts[1..], spread_part: None }
    }

    /// A step about the queue of any kind of lock.
    pub(crate) fn queueing(script: &'a Script, name: &'a LockName) -> Self {
        let Self { parts, .. } =
            if name.is_semaphore() { Self::semaphore(script, name) } else { Self::giving(script, name) };
        Self { script, name, parts: &parts[..1], spread_part: None }
    }

    /// A step with the mutex's own key alone.
    pub(crate) fn alone(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &[], spread_part: None }
    }

    pub(crate) fn semaphore(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &["sg1:sq", "sg1:sm"], spread_part: None }
    }

    pub(crate) async fn run<T>(
        self,
        commands: &Commands,
        args: impl Fn(&mut Cmd) + Sync,
        within: Duration,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<T, StoreError> {
        let call = |by: CallForm| {
            let mut cmd = self.script.call_on(by, self.name, self.parts, self.spread_part, 256);
            args(&mut cmd);
            cmd
        };
        let answer = run_call(commands, &self.name.key, call, within).await?;
        read(answer).ok_or_else(|| refused(unexpected()))
    }
}

/// A mutex's time to live in milliseconds, 0 for none.
pub(crate) fn end(ttl: Option<Duration>) -> u64 {
    ttl.map_or(0, millis)
}

/// A waiter's place in a queue.
pub(crate) fn place(token: &Token, ms: u64) -> String {
    format!("{}{ms}", token.as_str())
}

pub(crate) fn push_create(cmd: &mut Cmd, semaphore: Create) {
    cmd.arg(semaphore.capacity).arg(millis(semaphore.idle_ttl));
}
