//! The commands of mutexes and semaphores. Each step of a lock is one script.

use std::future::Future;
use std::time::Duration;

use redis::Cmd;

use crate::key::Key;
use crate::store::load_limit::{EndedLoad, LimitState};
use crate::store::protocol::*;
use crate::store::redis::RedisStore;
use crate::store::redis::commands::lock_queue::{LeaveRole, find_lost};
use crate::store::redis::commands::lock_steps::{
    LockCalls, TakeRemarks, UnreachableNodes, end, ints, mutex_holder, permit_taken, queue_entry, remaining,
    semaphore_state, taken, yes,
};
use crate::store::redis::commands::not_understood;
use crate::store::redis::scripts;
use crate::store::redis::scripts::millis;
use crate::store::wake_locks::LockWaiter;

impl RedisStore {
    fn calls<'a>(&'a self, name: &'a LockName, within: Duration) -> LockCalls<'a> {
        LockCalls { commands: &self.commands, name, within }
    }

    pub(crate) async fn take_mutex(
        &self,
        name: &LockName,
        ask: Take<'_>,
        within: Duration,
    ) -> StoreResult<MutexTaken> {
        self.inbox.open();
        let again = self.grants.begin_take(ask.token);
        let (mut unreachable, mut old, mut was_held) = (UnreachableNodes::default(), ask.instead, false);
        let calls = self.calls(name, within);
        loop {
            let args = |cmd: &mut Cmd| {
                cmd.arg(ask.token.as_str()).arg(end(ask.ttl));
                let goes_on = old.is_some() || !unreachable.is_empty();
                // The server parses each argument, so arguments that most takes do not need are omitted.
                if !ask.queue || again || goes_on {
                    cmd.arg(u8::from(ask.queue)).arg(u8::from(again));
                }
                if goes_on {
                    cmd.arg(old.map_or("", Token::as_str));
                    unreachable.push(cmd);
                }
            };
            let (answer, nodes) = calls.run_part(&scripts::MUTEX_TAKE, args, Some).await?;
            let Some(nodes) = nodes else {
                let (mut taken, remarks) = taken(answer).ok_or_else(not_understood)?;
                if remarks.is_doubtful {
                    taken.taken = repaired(calls).await.unwrap_or(taken.taken);
                }
                self.handle_take_answer(name, ask.token, remarks);
                return Ok(MutexTaken { was_held: was_held || taken.was_held, ..taken });
            };
            if old.take().is_some() {
                let [_, held] = ints(answer).ok_or_else(not_understood)?;
                was_held = held == 1;
            }
            unreachable.learn(&nodes);
        }
    }

    pub(crate) async fn free_mutex(
        &self,
        name: &LockName,
        token: &Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> StoreResult<bool> {
        self.freeing(name, self.calls(name, within).free_mutex(token, ttl)).await
    }

    pub(crate) async fn leave(&self, name: &LockName, leave: Leave<'_>, within: Duration) -> StoreResult<()> {
        let ms = if name.is_semaphore() { millis(leave.ttl.unwrap_or_default()) } else { end(leave.ttl) };
        let joined = self.leaving.join(name, queue_entry(leave.token, ms), within).await;
        if matches!(joined, LeaveRole::Removed) {
            return Ok(());
        }
        let calls = self.calls(name, within);
        self.freeing(name, calls.free(leave.token, leave.ttl)).await?;
        if let LeaveRole::First(mut job) = joined {
            while job.remove_others(calls).await? {
                // One of the waiters that were removed may have been the next for a lock without a holder: another LEAVE
                // passes the lock on.
                self.freeing(name, calls.free(leave.token, leave.ttl)).await?;
            }
        }
        Ok(())
    }

    pub(crate) async fn extend_mutex(
        &self,
        name: &LockName,
        token: &Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> StoreResult<bool> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str()).arg(end(ttl));
        };
        self.calls(name, within).run(&scripts::MUTEX_EXTEND, args, yes).await
    }

    pub(crate) async fn look_at_mutex(
        &self,
        name: &LockName,
        within: Duration,
    ) -> StoreResult<Option<MutexHolder>> {
        self.calls(name, within).run(&scripts::MUTEX_LOOK, |_| {}, mutex_holder).await
    }

    /// A lease is stored as a mutex is: under one key, which has its holder's token and ends with its time.
    pub(crate) async fn look_at_lease(
        &self,
        key: &Key,
        within: Duration,
    ) -> StoreResult<Option<MutexHolder>> {
        let name = LockName::prefixed(&format!("sg1:l:{{{}}}", key.name()));
        self.look_at_mutex(&name, within).await
    }

    pub(crate) async fn break_mutex(&self, name: &LockName, within: Duration) -> StoreResult<bool> {
        Ok(self.calls(name, within).run_and_hand_over(&scripts::MUTEX_BREAK, |_| {}, yes).await?.0)
    }

    pub(crate) async fn take_permit(
        &self,
        name: &LockName,
        ask: TakePermit<'_>,
        within: Duration,
    ) -> StoreResult<PermitTaken> {
        self.inbox.open();
        let again = self.grants.begin_take(ask.token);
        let mut unreachable = UnreachableNodes::default();
        loop {
            let args = |cmd: &mut Cmd| {
                cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
                cmd.arg(u8::from(ask.queue)).arg(u8::from(again));
                push_create(cmd, ask.semaphore);
                unreachable.push(cmd);
            };
            match self.calls(name, within).run_part(&scripts::SEMAPHORE_TAKE, args, permit_taken).await? {
                ((taken, remarks), None) => {
                    self.handle_take_answer(name, ask.token, remarks);
                    return Ok(taken);
                }
                (_, Some(nodes)) => unreachable.learn(&nodes),
            }
        }
    }

    pub(crate) async fn free_permit(
        &self,
        name: &LockName,
        token: &Token,
        lease: Duration,
        within: Duration,
    ) -> StoreResult<PermitFreed> {
        let freed = self.freeing(name, self.calls(name, within).free_permit(token, lease, None)).await;
        freed.map(|(freed, _)| freed)
    }

    pub(crate) async fn end_load(
        &self,
        name: &LockName,
        token: &Token,
        (lease, load): (Duration, EndedLoad),
        within: Duration,
    ) -> StoreResult<(PermitFreed, Option<LimitState>)> {
        self.freeing(name, self.calls(name, within).free_permit(token, lease, Some(load))).await
    }

    pub(crate) async fn refresh_permit(
        &self,
        name: &LockName,
        token: &Token,
        lease: Duration,
        within: Duration,
    ) -> StoreResult<bool> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str()).arg(millis(lease));
        };
        Ok(self.calls(name, within).run_and_hand_over(&scripts::SEMAPHORE_REFRESH, args, yes).await?.0)
    }

    pub(crate) async fn look_at_semaphore(
        &self,
        name: &LockName,
        within: Duration,
    ) -> StoreResult<Option<SemaphoreState>> {
        self.calls(name, within).run(&scripts::SEMAPHORE_LOOK, |_| {}, semaphore_state).await
    }

    pub(crate) async fn change_semaphore(
        &self,
        name: &LockName,
        change: SemaphoreChange,
        within: Duration,
    ) -> StoreResult<Option<SemaphoreState>> {
        let args = |cmd: &mut Cmd| match change {
            SemaphoreChange::Ensure(semaphore) => push_create(cmd.arg("ensure"), semaphore),
            SemaphoreChange::Add { permits, semaphore } => {
                push_create(cmd.arg("add"), semaphore);
                cmd.arg(permits);
            }
            SemaphoreChange::Sweep => drop(cmd.arg("sweep")),
            SemaphoreChange::Delete => drop(cmd.arg("delete")),
        };
        let (calls, mut notified, mut was_created, mut recovered) = (self.calls(name, within), 0, false, 0);
        let state = loop {
            let (answer, more) = calls.run_part(&scripts::SEMAPHORE_CHANGE, args, Some).await?;
            if more.is_none() {
                break semaphore_state(answer).ok_or_else(not_understood)?;
            }
            let [notified_now, made, ended] = ints(answer).ok_or_else(not_understood)?;
            notified += u32::try_from(notified_now).unwrap_or(u32::MAX);
            recovered += u32::try_from(ended).unwrap_or(u32::MAX);
            if change != SemaphoreChange::Delete {
                was_created = made == 1;
                calls.hand_over(more).await?;
                break self.look_at_semaphore(name, within).await?;
            }
        };
        Ok(state.map(|state| SemaphoreState {
            waiting: state.waiting.saturating_add(notified),
            created: state.created || was_created,
            recovered: state.recovered.saturating_add(recovered),
            ..state
        }))
    }

    pub(crate) fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter {
        self.grants.register(name, token)
    }

    pub(crate) fn grants_arrive(&self) -> bool {
        self.inbox.hears() && self.keyspace.hears()
    }

    pub(crate) async fn announce_key_changes(
        &self,
        name: &LockName,
        within: Duration,
    ) -> StoreResult<KeyspaceAnswer> {
        self.keyspace.announce(&name.key, within).await
    }

    /// Handles the answer to a take. If the token had lost its position in the queue, searches for other waiters of this process
    /// that have lost theirs: the process was paused for so long that it was considered dead, or the data was lost.
    fn handle_take_answer(&self, name: &LockName, token: &Token, remarks: TakeRemarks) {
        self.grants.record_answer(token);
        // The waiters of a process without an inbox lose their positions again and again, so the search waits until the
        // inbox is up.
        if remarks.lost_position
            && self.inbox.hears()
            && let Some(absent_waiters) = self.grants.absent_waiters(&name.key)
        {
            let (commands, node) = (self.commands.clone(), self.inbox.node());
            tokio::spawn(find_lost(commands, vec![absent_waiters], node, self.command_timeout()));
        }
    }

    /// Runs a step that frees a lock. While this process receives no messages, the scripts pass over its waiters in the
    /// queue, and its first waiter retries twice a second. So if this process itself frees the lock, it notifies that waiter
    /// at once.
    async fn freeing<T>(
        &self,
        name: &LockName,
        step: impl Future<Output = StoreResult<T>>,
    ) -> StoreResult<T> {
        let freed = step.await;
        if !self.inbox.hears() {
            drop(self.grants.notify_missed(&name.key, None));
        }
        freed
    }
}

/// REPAIR: limits the mutex's remaining time to the time that its holder has requested. TAKE does not do this itself, because
/// few takes need it, and it reads another key: a holder may have requested more than its token says. Without an answer the
/// waiter sleeps for the longer time, and the next take repeats the repair.
async fn repaired(calls: LockCalls<'_>) -> Option<Taken> {
    let repaired = calls.run(&scripts::MUTEX_REPAIR, |_| {}, remaining).await;
    repaired.ok().map(|remaining| Taken::Busy { remaining })
}

fn push_create(cmd: &mut Cmd, semaphore: Create) {
    cmd.arg(semaphore.capacity).arg(millis(semaphore.idle_ttl));
}
