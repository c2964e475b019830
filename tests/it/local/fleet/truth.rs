//! The versions of all keys and tags, on a server without faults, and the values that loads make of these versions.

use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard};

use super::process::Config;
use crate::support::os::wall_ns;
use crate::support::redis_server::plain_connection;

/// The number of keys without a tag. The first of them are inserted, too, each by one process and in one call at a time: otherwise a late
/// insertion of an older value would be the fault of the application.
pub(super) const PLAIN: usize = 16;
pub(super) const INSERTED: usize = 8;
/// The number of keys that have one of the tags, and the tag of everything.
const TAGGED: usize = 16;
pub(super) const KEYS: usize = PLAIN + TAGGED;
pub(super) const TAGS: usize = 4;

/// A key or a tag: each has a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Subject {
    Key(usize),
    Tag(usize),
    Everything,
}

/// A value: the versions at the beginning of its load, and where and when that load ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Value {
    pub(super) versions: Vec<(Subject, u64)>,
    pub(super) by: usize,
    pub(super) ended: u64,
}

/// One process's access to the versions.
#[derive(Clone)]
pub(super) struct Truth {
    connection: MultiplexedConnection,
    process: usize,
}

impl Truth {
    pub(super) async fn connect(config: &Config) -> Self {
        let client = redis::Client::open(&*config.truth).expect("an address");
        Self { connection: plain_connection(&client).await, process: config.process }
    }

    /// Raises the version of a subject, and returns the new one.
    pub(super) async fn raise(&self, subject: Subject) -> u64 {
        let mut connection = self.connection.clone();
        redis::cmd("INCR").arg(name(subject)).query_async(&mut connection).await.expect("the truth is well")
    }

    /// The value of a key, made from the versions of this moment.
    pub(super) async fn value(&self, key: usize) -> Value {
        let subjects = subjects(key);
        let mut cmd = redis::cmd("MGET");
        for subject in &subjects {
            cmd.arg(name(*subject));
        }
        let mut connection = self.connection.clone();
        let versions: Vec<Option<u64>> = cmd.query_async(&mut connection).await.expect("the truth is well");
        let versions =
            subjects.into_iter().zip(versions.into_iter().map(Option::unwrap_or_default)).collect();
        Value { versions, by: self.process, ended: wall_ns() }
    }

    /// The loader of a key. After it has read the versions, it takes a moment, in which they may change.
    pub(super) async fn load(self, key: usize) -> Result<Value, String> {
        let value = self.value(key).await;
        tokio::time::sleep(std::time::Duration::from_micros(fastrand::u64(..3_000))).await;
        Ok(Value { ended: wall_ns(), ..value })
    }
}

fn name(subject: Subject) -> String {
    match subject {
        Subject::Key(key) => format!("k:{key}"),
        Subject::Tag(tag) => format!("t:{tag}"),
        Subject::Everything => "all".into(),
    }
}

fn tag_of(key: usize) -> Option<usize> {
    (key >= PLAIN).then_some(key % TAGS)
}

/// What the value of a key depends on.
fn subjects(key: usize) -> Vec<Subject> {
    let of_key = [Subject::Key(key)];
    let of_tag = tag_of(key).map(|tag| [Subject::Tag(tag), Subject::Everything]);
    of_key.into_iter().chain(of_tag.into_iter().flatten()).collect()
}

/// The guard of one process, under the policies of all keys.
#[derive(Clone)]
pub(super) struct Guards {
    plain: StampedeGuard,
    tagged: Vec<StampedeGuard>,
}

impl Guards {
    /// `policy` returns the policy for values with this tag, or without a tag.
    pub(super) fn new(plain: StampedeGuard, policy: impl Fn(Option<usize>) -> Policy) -> Self {
        let tagged = (0..TAGS).map(|tag| plain.with_policy(policy(Some(tag)))).collect();
        Self { plain, tagged }
    }

    pub(super) fn any(&self) -> &StampedeGuard {
        &self.plain
    }

    /// The guard under the policy for values with this tag.
    pub(super) fn tagged(&self, tag: usize) -> &StampedeGuard {
        &self.tagged[tag]
    }

    pub(super) fn of(&self, key: usize) -> &StampedeGuard {
        tag_of(key).map_or(&self.plain, |tag| &self.tagged[tag])
    }
}
