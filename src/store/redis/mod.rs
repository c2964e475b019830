//! The store on a Redis server: plain GETs, scripts, one channel per node.
//!
//! Two connections per node, both opened when they are first needed: [`connection`] carries
//! commands, [`inbox`] brings messages. Keys of one resource share a slot:
//!
//! | key | holds |
//! |---|---|
//! | `sg1:e:{name}` | the entry |
//! | `sg1:l:{name}` | the lease: its holder's token |
//! | `sg1:q:{name}` | the queue: tokens of the waiters, first come first, and fences between waves (`wake.lua`) |
//! | `sg1:t:{name}` | the id of a tag |
//! | `sg1:w:{name}:..` | nothing: what is waited for where replicas are to have a change |
//! | `sg1:o:{name}` | the last outcome: its holder's token, until when newcomers get it, what it was |
//!
//! Locks have keys of their own, named in [`locks`]. Messages go to `sg1:i:<node>`: [`message`].

#[cfg(feature = "cluster")]
mod cluster;
mod commands;
mod connection;
#[cfg(test)]
mod crowd_tests;
mod doctor;
mod errors;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzed;
mod locks;
mod messages;
mod scripts;
mod tags;
mod topology;

use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
#[cfg(feature = "cluster")]
use redis::cluster::ClusterClient;
#[cfg(feature = "sentinel")]
use redis::sentinel::SentinelClient;
use redis::{Client, Cmd, Value};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

#[cfg(feature = "cluster")]
use cluster::Cluster;
#[cfg(all(test, feature = "cluster"))]
pub(crate) use cluster::slot_of;
use commands::Commands;
use commands::acquire::acquire;
use commands::call::{REST, hand_over, refused, run, wake_rest};
use commands::lock_leaving::Leaving;
use connection::Supervisor;
use connection::connector::{Dial, unexpected};
use messages::inbox::Inbox;
use messages::keyspace::Keyspace;
use scripts::{Script, get_entry, millis, push_outcome, push_seen};
#[cfg(feature = "sentinel")]
use topology::sentinel::Sentinels;

use super::wake::lease_waiters::Watches;
use super::wake::lock_waiters::Grants;
use super::{
    Acquire, Acquired, Examine, Fail, HandOver, HandedOver, Insert, Kept, Reply, Store, StoreError,
    StoreErrorKind, Token, Watch,
};
use crate::health::{Finding, Health, Topology};
use crate::key::Key;

/// One node's connections to a Redis server.
pub(crate) struct RedisStore {
    /// Digest of the server's address and the database.
    place: u64,
    topology: Topology,
    /// The deadline of one command.
    command_timeout: Duration,
    commands: Commands,
    inbox: Arc<Inbox>,
    watches: Arc<Watches>,
    grants: Arc<Grants>,
    leaving: Leaving,
    keyspace: Arc<Keyspace>,
    /// Places for those who wait for replicas, each with a connection.
    replicating: Semaphore,
}

impl RedisStore {
    /// A node of its own on one server, not connected yet. `command_timeout` is the deadline of one command: a
    /// server slower than this counts as down.
    pub(crate) fn new(client: Client, command_timeout: Duration) -> Self {
        let info = client.get_connection_info();
        let mut place = DefaultHasher::new();
        info.addr().to_string().hash(&mut place);
        info.redis_settings().db().hash(&mut place);
        Self::of(Dial::new(&client, command_timeout), None, Topology::Single, place.finish())
    }

    /// The same on whichever server these sentinels call the primary.
    #[cfg(feature = "sentinel")]
    pub(crate) fn watched(client: SentinelClient, command_timeout: Duration) -> Self {
        // The client does not show what it leads to, so each guard is taken for one of its own.
        let place = fastrand::u64(..);
        Self::of(Dial::through(Sentinels::new(client), command_timeout), None, Topology::Sentinel, place)
    }

    /// The same on the nodes of a cluster.
    #[cfg(feature = "cluster")]
    pub(crate) fn spread(client: ClusterClient, command_timeout: Duration) -> Self {
        let cluster = Cluster::new(client, command_timeout);
        let mut place = DefaultHasher::new();
        cluster.atlas().described().hash(&mut place);
        let inbox = Dial::any(cluster.atlas(), command_timeout);
        Self::of(inbox, Some(Commands::Cluster(cluster)), Topology::Cluster, place.finish())
    }

    /// `dial` leads to messages; and to commands, where those have no ways of their own.
    fn of(dial: Dial, commands: Option<Commands>, topology: Topology, place: u64) -> Self {
        let command_timeout = dial.answer;
        let watches = Arc::new(Watches::default());
        let commands = commands.unwrap_or_else(|| Supervisor::new(dial.clone()).into());
        let grants = Arc::new(Grants::default());
        let keyspace = Keyspace::new(dial.clone(), commands.clone(), Arc::clone(&grants));
        let inbox = Inbox::new(dial, commands.clone(), Arc::clone(&watches), Arc::clone(&grants));
        let replicating = Semaphore::new(tags::MOST_REPLICATING);
        Self {
            place,
            topology,
            command_timeout,
            commands,
            inbox,
            watches,
            grants,
            leaving: Leaving::default(),
            keyspace,
            replicating,
        }
    }

    /// LOOK UP, without a box around it.
    pub(crate) async fn get(&self, key: &Key, within: Duration) -> Result<Option<Bytes>, StoreError> {
        match self.commands.send(key.name(), &get_entry(key.name()), within).await? {
            Value::BulkString(entry) => Ok(Some(Bytes::from(entry))),
            Value::Nil => Ok(None),
            // Other people's data under our name: no entry, and counted as one that can not be read. (MGET, which reads an
            // entry with its tags, does not tell it from nothing.)
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(Some(Bytes::new())),
            _ => Err(refused(unexpected())),
        }
    }

    /// Runs a script whose answer says whether the lease was the token's, and tells the waiters that it left untold.
    async fn kept(
        &self,
        script: &Script,
        key: &Key,
        token: &Token,
        (size, args): (usize, impl Fn(&mut Cmd) + Sync),
        within: Duration,
    ) -> Result<Kept, StoreError> {
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
            1 => Ok(Kept::Yes),
            0 => Ok(Kept::No),
            2 => Ok(Kept::Aside),
            _ => Err(refused(unexpected())),
        }
    }
}

impl Store for RedisStore {
    fn node(&self) -> Uuid {
        self.inbox.node()
    }

    fn place(&self) -> u64 {
        self.place
    }

    fn clock_at(&self, moment: Instant) -> u64 {
        self.commands.clock_at(moment)
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
    ) -> Reply<'a, Kept> {
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
    ) -> Reply<'a, Kept> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(&entry[..]).arg(millis(keep));
            };
            self.kept(&scripts::COMMIT, key, token, (entry.len() + 16, args), within).await
        })
    }

    fn fail<'a>(&'a self, key: &'a Key, fail: Fail<'a>, within: Duration) -> Reply<'a, Kept> {
        Box::pin(async move {
            let (marker, marker_life) = match &fail.marker {
                Some((marker, life)) => (&marker[..], millis(*life)),
                None => (&[][..], 0),
            };
            let args = |cmd: &mut Cmd| {
                push_outcome(cmd, fail.token.as_str(), &fail.outcome, fail.keep, fail.replay);
                cmd.arg(marker).arg(marker_life);
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

    fn release<'a>(&'a self, key: &'a Key, token: &'a Token, within: Duration) -> Reply<'a, Kept> {
        Box::pin(async move { self.kept(&scripts::RELEASE, key, token, (0, |_: &mut Cmd| {}), within).await })
    }

    fn invalidate<'a>(&'a self, key: &'a Key, insert: Option<Insert>, within: Duration) -> Reply<'a, ()> {
        Box::pin(commands::invalidate::invalidate(&self.commands, key, insert, within))
    }

    fn watch(&self, key: &Key, token: &Token) -> Watch {
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
            // A command without an answer for longer than two deadlines would cost the connection.
            match within.min(self.command_timeout) {
                Duration::ZERO => Ok(()),
                within => doctor::probe::probe(&self.commands, key.name(), within).await,
            }
        })
    }

    fn reach<'a>(&'a self, name: &'a str, within: Duration) -> Reply<'a, ()> {
        // Not for messages: who has something to send need not be heard.
        Box::pin(async move {
            timeout(within, self.commands.reach(name)).await.unwrap_or_else(|_| {
                let why = self.commands.down();
                Err(why.unwrap_or_else(|| StoreError::new(StoreErrorKind::Unavailable)))
            })
        })
    }

    fn is_down(&self, name: &str) -> bool {
        self.commands.is_down(name)
    }

    fn close(&self) {
        self.commands.close();
        self.inbox.close();
        self.keyspace.close();
    }

    fn health(&self) -> Health {
        let (commands, breaker, reason) = self.commands.link();
        Health {
            topology: self.topology,
            commands,
            inbox: self.inbox.link(),
            breaker,
            reason,
            clock: self.commands.clock(),
            last_heard: self.inbox.last_heard(),
            inbox_lag: self.inbox.lag(),
        }
    }

    fn examine(&self, ask: Examine) -> Pin<Box<dyn Future<Output = Vec<Finding>> + Send + '_>> {
        Box::pin(doctor::examine(self, ask))
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the node: it is half of every token, and who knows a token can end its lease.
        let Self {
            place: _,
            topology: _,
            command_timeout: _,
            commands,
            inbox,
            watches: _,
            grants: _,
            leaving: _,
            keyspace: _,
            replicating: _,
        } = self;
        f.debug_struct("RedisStore").field("commands", commands).field("inbox", inbox).finish_non_exhaustive()
    }
}
