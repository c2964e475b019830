//! The lock toolkit on a Redis server: one script per step.
//!
//! | key | holds |
//! |---|---|
//! | `sg1:m:{tag}`, or a key with a prefix of the user's | the mutex: its holder's token |
//! | `sg1:mq:{tag}`, or `sg1:pq:{key}` | its queue: of each who waits the token and the time to live, first come first; before a place of one that barges, `t` and the microseconds of the server's clock when it came |
//! | `sg1:mf:{tag}`, or `sg1:pf:{key}` | the latest fence |
//! | `sg1:mt:{tag}`, or `sg1:pt:{key}` | the head of the queue that was told that the mutex is free, until it has looked |
//! | `sg1:mx:{tag}`, or `sg1:px:{key}` | the holder's token and for how long it was extended last, if that is longer than the token says |
//! | `sg1:mr:{tag}`, or `sg1:pr:{key}`; `sg1:sr:{tag}` | in a cluster, the nodes in the queue that were told to look after a death, and whether they have asked since |
//! | `sg1:sh:{tag}` | the holders of a semaphore's permits, by the moment their leases end |
//! | `sg1:sq:{tag}` | its queue: of each who waits the token and the lease |
//! | `sg1:sm:{tag}` | layout, what it was created with, what was added, its idle time in ms |
//!
//! A mutex under a user's prefix has companions of other names, because its key may read like the tag of
//! another mutex.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::sleep;

use super::commands::lock_replies::{Remarks, mutex_holder, remaining, semaphore_state, taken, yes};

use super::commands::lock_leaving::Joined;
use super::commands::lock_losses::find_lost;
use super::commands::lock_scripts;

use super::RedisStore;
use super::commands::Commands;
use super::commands::call::{refused, run_call};
use super::connection::connector::unexpected;
use super::scripts::{self, By, Script, millis};
use crate::store::lock_store::{
    Announced, Change, Create, Leave, LockStore, MutexHolder, MutexTaken, Offer, PermitFreed, PermitTaken,
    SemaphoreState, Take, TakePermit, Taken, leave_alone,
};
use crate::store::names::LockName;
use crate::store::wake::lock_waiters::Await;
use crate::store::{Reply, StoreError, StoreErrorKind, Token};

/// A script for one lock.
pub(super) struct Step<'a> {
    pub(super) script: &'a Script,
    pub(super) name: &'a LockName,
    /// What the names of its keys begin with, after its own.
    parts: &'a [&'a str],
    /// The same of the key that follows in a cluster only.
    spread_part: Option<&'a str>,
}

impl<'a> Step<'a> {
    /// A take of a mutex; in a cluster with the roll of its waiters' nodes.
    pub(super) fn taking(name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let spread_part = Some(if prefixed { "sg1:pr" } else { "sg1:mr" });
        Self { spread_part, ..Self::giving(&scripts::MUTEX_TAKE, name) }
    }

    /// The same of a permit.
    pub(super) fn taking_permit(name: &'a LockName) -> Self {
        Self { spread_part: Some("sg1:sr"), ..Self::semaphore(&scripts::SEMAPHORE_TAKE, name) }
    }

    /// A step that gives the mutex away, and needs all its keys for that.
    pub(super) fn giving(script: &'a Script, name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:pf"] } else { &["sg1:mq", "sg1:mf"] };
        Self { script, name, parts, spread_part: None }
    }

    /// A step of a mutex that is left to whichever take comes first; with the mark of a head that was told.
    pub(super) fn offering(script: &'a Script, name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:pf", "sg1:pt"] } else { &["sg1:mq", "sg1:mf", "sg1:mt"] };
        Self { script, name, parts, spread_part: None }
    }

    /// A step that starts the holder's time anew, which those who wait may have to be told, and takes down a longer one than the
    /// token says.
    pub(super) fn extending(name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:px"] } else { &["sg1:mq", "sg1:mx"] };
        Self { script: &scripts::MUTEX_EXTEND, name, parts, spread_part: None }
    }

    pub(super) fn repairing(name: &'a LockName) -> Self {
        let Self { parts, .. } = Self::extending(name);
        Self { script: &scripts::MUTEX_REPAIR, name, parts: &parts[1..], spread_part: None }
    }

    /// A step about the places in a queue, of any kind of lock.
    pub(super) fn queueing(script: &'a Script, name: &'a LockName) -> Self {
        let Self { parts, .. } =
            if name.is_semaphore() { Self::semaphore(script, name) } else { Self::giving(script, name) };
        Self { script, name, parts: &parts[..1], spread_part: None }
    }

    /// A step that stays with the mutex's own key.
    pub(super) fn alone(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &[], spread_part: None }
    }

    pub(super) fn semaphore(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &["sg1:sq", "sg1:sm"], spread_part: None }
    }

    pub(super) async fn run<T>(
        self,
        commands: &Commands,
        args: impl Fn(&mut Cmd) + Sync,
        within: Duration,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<T, StoreError> {
        let call = |by: By| {
            let mut cmd = self.script.call_on(by, self.name, self.parts, self.spread_part, 256);
            args(&mut cmd);
            cmd
        };
        let answer = run_call(commands, &self.name.key, call, within).await?;
        read(answer).ok_or_else(|| refused(unexpected()))
    }
}

impl RedisStore {
    /// A take was answered. Where it had lost its place, the other waiters of this process may have lost theirs, too: the process
    /// was paused for so long that it was taken for dead, or the data is gone.
    fn answered(&self, name: &LockName, token: &Token, remarks: Remarks) {
        self.grants.is_answered(token);
        // A process that hears nothing has lost its places for as long as that lasts.
        if remarks.lost_place
            && self.inbox.hears()
            && let Some(census) = self.grants.census(&name.key)
        {
            let (commands, node) = (self.commands.clone(), self.inbox.node());
            tokio::spawn(find_lost(commands, vec![census], node, self.command_timeout));
        }
    }

    /// Makes a step that frees a lock. While this process hears nothing it is passed over in the queue, and its first waiter asks
    /// twice a second; what it frees itself, that one is told at once.
    fn freeing<'a, T: 'a>(
        &'a self,
        name: &'a LockName,
        step: impl Future<Output = Result<T, StoreError>> + Send + 'a,
    ) -> Reply<'a, T> {
        Box::pin(async move {
            let freed = step.await;
            if !self.inbox.hears() {
                drop(self.grants.tell_missed(&name.key, None));
            }
            freed
        })
    }
}

impl LockStore for RedisStore {
    fn take_mutex<'a>(
        &'a self,
        name: &'a LockName,
        ask: Take<'a>,
        within: Duration,
    ) -> Reply<'a, MutexTaken> {
        Box::pin(async move {
            self.inbox.open();
            let again = self.grants.asks_again(ask.token);
            let (taken, remarks) = if ask.barges && ask.instead.is_none() {
                barge(&self.commands, name, (ask, again), within).await?
            } else {
                lock_scripts::take_mutex(&self.commands, name, (ask, again), within).await?
            };
            self.answered(name, ask.token, remarks);
            Ok(taken)
        })
    }

    fn offer_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        offer: Offer,
        within: Duration,
    ) -> Reply<'a, bool> {
        self.freeing(name, lock_scripts::offer_mutex(&self.commands, name, token, offer, within))
    }

    fn free_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        self.freeing(name, lock_scripts::free_mutex(&self.commands, name, token, ttl, within))
    }

    fn leave<'a>(&'a self, name: &'a LockName, leave: Leave<'a>, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            let ms = if name.is_semaphore() { millis(leave.ttl.unwrap_or_default()) } else { end(leave.ttl) };
            let joined = self.leaving.join(name, place(leave.token, ms), within).await;
            if matches!(joined, Joined::Gone) {
                return Ok(());
            }
            leave_alone(self, name, leave, within).await?;
            if let Joined::First(mut duty) = joined {
                while duty.see_to_others(&self.commands, name, within).await? {
                    // One of them may have been the one that should have seen to a lock without a holder.
                    leave_alone(self, name, leave, within).await?;
                }
            }
            Ok(())
        })
    }

    fn extend_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(token.as_str()).arg(end(ttl));
            };
            Step::extending(name).run(&self.commands, args, within, yes).await
        })
    }

    fn look_at_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Option<MutexHolder>> {
        Box::pin(Step::alone(&scripts::MUTEX_LOOK, name).run(&self.commands, |_| {}, within, mutex_holder))
    }

    fn break_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, bool> {
        Box::pin(lock_scripts::break_mutex(&self.commands, name, within))
    }

    fn take_permit<'a>(
        &'a self,
        name: &'a LockName,
        ask: TakePermit<'a>,
        within: Duration,
    ) -> Reply<'a, PermitTaken> {
        Box::pin(async move {
            self.inbox.open();
            let again = self.grants.asks_again(ask.token);
            let (taken, remarks) =
                lock_scripts::take_permit(&self.commands, name, (ask, again), within).await?;
            self.answered(name, ask.token, remarks);
            Ok(taken)
        })
    }

    fn free_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, PermitFreed> {
        self.freeing(name, lock_scripts::free_permit(&self.commands, name, token, lease, within))
    }

    fn refresh_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, bool> {
        Box::pin(lock_scripts::refresh_permit(&self.commands, name, token, lease, within))
    }

    fn look_at_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        let look = Step::semaphore(&scripts::SEMAPHORE_LOOK, name);
        Box::pin(look.run(&self.commands, |_| {}, within, semaphore_state))
    }

    fn change_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        change: Change,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        Box::pin(lock_scripts::change_semaphore(&self.commands, name, change, within))
    }

    fn await_grant(&self, name: &LockName, token: &Token) -> Await {
        self.grants.register(name, token)
    }

    fn grants_arrive(&self) -> bool {
        self.inbox.hears() && self.keyspace.hears()
    }

    fn grants_are_claims(&self) -> bool {
        self.commands.is_spread()
    }

    fn announce<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Announced> {
        Box::pin(self.keyspace.announce(&name.key, within))
    }
}

async fn barge(
    commands: &Commands,
    name: &LockName,
    (ask, again): (Take<'_>, bool),
    within: Duration,
) -> Result<(MutexTaken, Remarks), StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(ask.token.as_str()).arg(end(ask.ttl)).arg(u8::from(ask.queue)).arg(u8::from(again));
    };
    let step = if again { Step::offering } else { Step::giving };
    let answer = step(&scripts::MUTEX_BARGE, name).run(commands, args, within, Some).await?;
    repaired(commands, name, taken(answer), within).await
}

/// The answer to a take, once the mutex has no more time left than its holder has asked for. That is looked at by a step of
/// its own, because a holder may have asked for more than its token says, and hardly any take has to know.
pub(super) async fn repaired(
    commands: &Commands,
    name: &LockName,
    answer: Option<(MutexTaken, Remarks)>,
    within: Duration,
) -> Result<(MutexTaken, Remarks), StoreError> {
    let (mut taken, remarks) = answer.ok_or_else(|| refused(unexpected()))?;
    if remarks.is_doubtful
        // Without an answer the waiter sleeps on the longer time; whichever asks next finds it too.
        && let Ok(remaining) = Step::repairing(name).run(commands, |_| {}, within, remaining).await
    {
        taken.taken = Taken::Busy { remaining };
    }
    Ok((taken, remarks))
}

/// Gives back what was granted to a waiter that has left. It would be missing until it expires, which some
/// mutexes never do; so this is tried for a while.
pub(super) async fn give_back(commands: Commands, name: LockName, token: Token, within: Duration) {
    const PAUSES: [u64; 6] = [50, 200, 1_000, 3_000, 10_000, 0];
    for pause in PAUSES {
        // Who was granted it is in no queue any more, so the time to live, by which a place is found, is none.
        let freed = if name.is_semaphore() {
            lock_scripts::free_permit(&commands, &name, &token, Duration::ZERO, within).await.map(|_| ())
        } else {
            lock_scripts::free_mutex(&commands, &name, &token, None, within).await.map(|_| ())
        };
        match freed.map_err(|error| error.kind) {
            Ok(()) | Err(StoreErrorKind::Closed | StoreErrorKind::Refused) => return,
            Err(_) => sleep(Duration::from_millis(pause)).await,
        }
    }
}

/// A mutex's time to live in milliseconds, 0 for none.
pub(super) fn end(ttl: Option<Duration>) -> u64 {
    ttl.map_or(0, millis)
}

/// A waiter as it stands in a queue.
pub(super) fn place(token: &Token, ms: u64) -> String {
    format!("{}{ms}", token.as_str())
}

pub(super) fn push_create(cmd: &mut Cmd, semaphore: Create) {
    cmd.arg(semaphore.capacity).arg(millis(semaphore.idle_ttl));
}
