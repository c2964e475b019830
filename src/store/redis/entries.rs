//! Implements the [`Store`] contract on Redis.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::commands::acquire::acquire;
use super::commands::call::{refused, run};
use super::commands::lease_end::{REST, hand_over, wake_rest};
use super::doctor;
use super::errors::reply::unexpected;
use super::redis_store::RedisStore;
use super::scripts::{self, Script, get_entry, millis, push_outcome, push_seen};
use crate::health::{Finding, Health};
use crate::key::Key;
use crate::store::volume::{Announced, Announcement};
use crate::store::{
    Acquire, Acquired, Examine, Fail, HandOver, HandedOver, Insert, LeaseWatch, NamedServer, OlderEntry,
    Reply, Store, StoreError, StoreErrorKind, Token, TokenCheck,
};

impl RedisStore {
    /// LOOK UP, as an unboxed future.
    pub(crate) async fn get(&self, key: &Key, within: Duration) -> Result<Option<Bytes>, StoreError> {
        match self.commands.read(key.name(), &get_entry(key.name()), within).await? {
            Value::BulkString(entry) => Ok(Some(Bytes::from(entry))),
            Value::Nil => Ok(None),
            // Foreign data under our key: not an entry, and counted as one that cannot be decoded. (MGET, which reads an
            // entry with its tags, answers nil for it.)
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(Some(Bytes::new())),
            _ => Err(refused(unexpected())),
        }
    }

    /// Runs a script whose answer says whether the lease was the token's, and then tells the waiters that the script left
    /// untold.
    async fn kept(
        &self,
        script: &Script,
        key: &Key,
        token: &Token,
        (size, args): (usize, impl Fn(&mut Cmd) + Sync),
        within: Duration,
    ) -> Result<TokenCheck, StoreError> {
        let sent = Instant::now();
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str());
            args(cmd);
        };
        let done = match run(&self.commands, script, key.name(), size + 80, args, within).await? {
            Value::Int(done) => done,
            _ => return Err(refused(unexpected())),
        };
        if done > REST {
            let says = |cmd: &mut Cmd| {
                cmd.arg(format!("w{}", token.as_str()));
            };
            let left = within.saturating_sub(sent.elapsed());
            wake_rest(&self.commands, key.name(), token, says, left).await;
        }
        match done % REST {
            1 => Ok(TokenCheck::Held),
            0 => Ok(TokenCheck::Lost),
            2 => Ok(TokenCheck::ForeignData),
            _ => Err(refused(unexpected())),
        }
    }
}

impl Store for RedisStore {
    fn node(&self) -> Uuid {
        self.inbox.node()
    }

    fn place(&self) -> u64 {
        self.connections.place
    }

    fn clock_at(&self, moment: Instant) -> u64 {
        self.commands.clock_at(moment)
    }

    fn is_spread(&self) -> bool {
        self.commands.is_spread()
    }

    fn look_up<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, Option<Bytes>> {
        Box::pin(self.get(key, within))
    }

    fn acquire<'a>(&'a self, key: &'a Key, ask: Acquire<'a>, within: Duration) -> Reply<'a, Acquired> {
        Box::pin(async move {
            self.inbox.open();
            acquire(&self.commands, key, ask, within).await
        })
    }

    fn renew<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(millis(lease));
            };
            self.kept(&scripts::RENEW, key, token, (16, args), within).await
        })
    }

    fn commit<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        entry: Bytes,
        keep: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(&entry[..]).arg(millis(keep));
            };
            self.kept(&scripts::COMMIT, key, token, (entry.len() + 16, args), within).await
        })
    }

    fn fail<'a>(&'a self, key: &'a Key, fail: Fail<'a>, within: Duration) -> Reply<'a, TokenCheck> {
        Box::pin(async move {
            let (marker, older) = match &fail.older {
                OlderEntry::Stays => (&[][..], "0".to_owned()),
                OlderEntry::Ends => (&[][..], "-".to_owned()),
                OlderEntry::Marked(marker, life) => (&marker[..], millis(*life).to_string()),
            };
            let args = |cmd: &mut Cmd| {
                push_outcome(cmd, fail.token.as_str(), &fail.outcome, fail.keep, fail.replay);
                cmd.arg(marker).arg(&older);
                push_seen(cmd, fail.seen);
            };
            let size = fail.outcome.len() + marker.len() + 176;
            self.kept(&scripts::FAIL, key, fail.token, (size, args), within).await
        })
    }

    fn hand_over<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        how: HandOver,
        within: Duration,
    ) -> Reply<'a, HandedOver> {
        let HandOver { lease, hops, is_leaving } = how;
        Box::pin(hand_over(&self.commands, key.name(), token, Some(lease), (hops, is_leaving), within))
    }

    fn release<'a>(&'a self, key: &'a Key, token: &'a Token, within: Duration) -> Reply<'a, TokenCheck> {
        Box::pin(async move { self.kept(&scripts::RELEASE, key, token, (0, |_: &mut Cmd| {}), within).await })
    }

    fn invalidate<'a>(
        &'a self,
        key: &'a Key,
        insert: Option<Insert>,
        announcement: &'a Announcement,
        within: Duration,
    ) -> Reply<'a, Announced> {
        Box::pin(async move {
            let change = |attempt, left| {
                crate::store::redis::commands::invalidate::invalidate(
                    &self.commands,
                    key,
                    insert.as_ref(),
                    attempt,
                    left,
                )
            };
            self.changing(announcement, within, change).await
        })
    }

    fn watch(&self, key: &Key, token: &Token) -> LeaseWatch {
        self.watches.register(key.name(), token)
    }

    fn hints_arrive(&self) -> bool {
        self.inbox.hears()
    }

    fn connect(&self, within: Duration) -> Reply<'_, ()> {
        Box::pin(async move {
            self.inbox.open();
            let both = async {
                self.commands.until_up().await?;
                self.inbox.settled().await;
                Ok(())
            };
            timeout(within, both).await.unwrap_or_else(|_| {
                let why = self.commands.down();
                Err(why.unwrap_or_else(|| StoreError::new(StoreErrorKind::TimedOut)))
            })
        })
    }

    fn probe<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            // A command that stays unanswered for longer than two deadlines would cost the connection.
            match within.min(self.command_timeout()) {
                Duration::ZERO => Ok(()),
                within => crate::store::redis::doctor::probe::probe(&self.commands, key.name(), within).await,
            }
        })
    }

    fn reach<'a>(&'a self, name: &'a str, within: Duration) -> Reply<'a, ()> {
        // Does not wait for the inbox: a caller that only sends commands needs no messages.
        Box::pin(async move {
            timeout(within, self.commands.reach(name)).await.unwrap_or_else(|_| {
                let why = self.commands.down();
                Err(why.unwrap_or_else(|| StoreError::new(StoreErrorKind::Unavailable)))
            })
        })
    }

    fn server_of(&self, name: &str) -> NamedServer {
        self.commands.server_of(name)
    }

    fn is_slow(&self) {
        self.commands.suspect();
    }

    fn is_down(&self, name: &str) -> bool {
        self.commands.is_down(name)
    }

    fn close(&self) {
        self.leave();
    }

    fn health(&self) -> Health {
        let (commands, breaker, reason) = self.commands.link();
        Health {
            topology: self.connections.topology,
            commands,
            inbox: self.inbox.link(),
            breaker,
            reason,
            clock: self.commands.clock(),
            last_heard: self.inbox.last_heard(),
            inbox_lag: self.inbox.lag(),
            outages: self.connections.dial.outages.begun(),
            credential_failures: self.connections.dial.login.failures(),
            local: None,
        }
    }

    fn longest_entry(&self) -> usize {
        self.commands.longest_argument()
    }

    fn went_without(&self) {
        self.connections.dial.outages.load();
    }

    fn examine(&self, ask: Examine) -> Pin<Box<dyn Future<Output = Vec<Finding>> + Send + '_>> {
        Box::pin(doctor::examine(self, ask))
    }
}
