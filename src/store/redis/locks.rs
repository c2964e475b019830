//! Implements the [`LockStore`] contract on Redis: one script per step.
//!
//! | key | holds |
//! |---|---|
//! | `sg1:m:{tag}`, or a key with a prefix of the user's | the mutex: its holder's token |
//! | `sg1:mq:{tag}`, or `sg1:pq:{key}` | its queue: the token and the time to live of each waiter, first come first; before the place of a barging waiter, `t` and the microseconds of the server's clock at its arrival |
//! | `sg1:mf:{tag}`, or `sg1:pf:{key}` | the latest fence |
//! | `sg1:mt:{tag}`, or `sg1:pt:{key}` | the head of the queue that was told that the mutex is free, until that head has looked |
//! | `sg1:mx:{tag}`, or `sg1:px:{key}` | the holder's token and its last extension, if that is longer than the time in the token |
//! | `sg1:mr:{tag}`, or `sg1:pr:{key}`; `sg1:sr:{tag}` | in a cluster: the nodes in the queue that were told to look after a holder's death, and whether they have asked since |
//! | `sg1:sh:{tag}` | the holders of a semaphore's permits, by the moment their leases end |
//! | `sg1:sq:{tag}` | its queue: the token and the lease of each waiter |
//! | `sg1:sm:{tag}` | layout, capacity at creation, added permits, idle time in ms |
//!
//! A mutex under a user's prefix uses other prefixes for its companion keys, because its key may equal
//! another mutex's tag.

use std::time::Duration;

use redis::Cmd;

use super::RedisStore;
use super::commands::lock_leaving::LeaveRole;
use super::commands::lock_losses::find_lost;
use super::commands::lock_replies::{TakeRemarks, mutex_holder, semaphore_state, yes};
use super::commands::lock_scripts::{self, barge};
use super::commands::lock_step::{LockStep, end, place};
use super::scripts::{self, millis};
use crate::store::lock_store::{
    Change, KeyspaceAnswer, Leave, LockStore, MutexHolder, MutexTaken, Offer, PermitFreed, PermitTaken,
    SemaphoreState, Take, TakePermit, leave_alone,
};
use crate::store::names::LockName;
use crate::store::wake::lock_waiters::LockWaiter;
use crate::store::{Reply, StoreError, Token};

impl RedisStore {
    /// Handles the answer to a take. If the token had lost its place, the other waiters of this process
    /// may have lost theirs, too: the process was paused for so long that it counted as dead, or the data
    /// was lost.
    fn answered(&self, name: &LockName, token: &Token, remarks: TakeRemarks) {
        self.grants.is_answered(token);
        // A process without an inbox keeps losing its places, so there is nothing to find until the
        // inbox is up.
        if remarks.lost_place
            && self.inbox.hears()
            && let Some(census) = self.grants.census(&name.key)
        {
            let (commands, node) = (self.commands.clone(), self.inbox.node());
            tokio::spawn(find_lost(commands, vec![census], node, self.command_timeout()));
        }
    }

    /// Runs a step that frees a lock. While this process receives no messages, its places in the queue
    /// are passed over, and its first waiter asks twice a second; so that waiter is told at once of a
    /// lock that this process frees itself.
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
            if matches!(joined, LeaveRole::Gone) {
                return Ok(());
            }
            leave_alone(self, name, leave, within).await?;
            if let LeaveRole::First(mut duty) = joined {
                while duty.see_to_others(&self.commands, name, within).await? {
                    // One of the leaving waiters may be the one that should have taken a lock without a
                    // holder.
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
            LockStep::extending(name).run(&self.commands, args, within, yes).await
        })
    }

    fn look_at_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Option<MutexHolder>> {
        Box::pin(LockStep::alone(&scripts::MUTEX_LOOK, name).run(
            &self.commands,
            |_| {},
            within,
            mutex_holder,
        ))
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
        let look = LockStep::semaphore(&scripts::SEMAPHORE_LOOK, name);
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

    fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter {
        self.grants.register(name, token)
    }

    fn grants_arrive(&self) -> bool {
        self.inbox.hears() && self.keyspace.hears()
    }

    fn grants_are_claims(&self) -> bool {
        self.commands.is_spread()
    }

    fn announce<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, KeyspaceAnswer> {
        Box::pin(self.keyspace.announce(&name.key, within))
    }
}
