//! Checks before the first load whether the server supports what loads need.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError};
use uuid::Uuid;

use super::rights::lacked_by_loads;
use crate::store::redis::commands::call::{refused, run};
use crate::store::redis::commands::{Commands, Servers};
use crate::store::redis::errors::advice::{Cause, advised};
use crate::store::redis::errors::classify::code_of;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::messages::message;
use crate::store::redis::scripts;
use crate::store::{StoreError, StoreErrorKind};

/// The advice about missing commands.
const LACKING: &str = "the server lacks commands that the guard's scripts call, or the right of this user to them: use Redis \
                       6.2 or later, or Valkey, rename no commands, and give the user the rights that docs/redis.md lists; \
                       doctor() says which";

/// Returns an error if the server, or one of the masters that can be reached, runs no scripts or refuses a command of the
///         load scripts. A server that takes no commands at present is no error, because that passes. But if no master of a
///         cluster takes commands, that is an error, as for a single server that is loading: no load is shared.
pub(crate) async fn probe(commands: &Commands, name: &str, within: Duration) -> Result<(), StoreError> {
    match &commands.to {
        Servers::One(_) => probe_at(commands, name, within).await.map(drop),
        Servers::Cluster(cluster) => {
            let each = cluster.samples(name).into_iter().map(|(master, name)| async move {
                match probe_at(commands, &name, within).await {
                    Ok(passing) => Ok(passing.map(|error| (master.name(), error))),
                    Err(error) => Err(at(master.name(), error)),
                }
            });
            takes_commands(futures_util::future::try_join_all(each).await?)
        }
    }
}

/// By what was in the way of trying each master: an error if those that answer say that the cluster is down, all of them.
fn takes_commands(passing: Vec<Option<(String, StoreError)>>) -> Result<(), StoreError> {
    let answers = |error: &StoreError| matches!(error.kind, StoreErrorKind::Transient);
    let mut down = None;
    for passing in passing {
        match passing {
            Some((address, error)) if code_of(&error) == Some("CLUSTERDOWN") => {
                down.get_or_insert_with(|| at(address, error));
            }
            Some((_, error)) if !answers(&error) => {}
            _ => return Ok(()),
        }
    }
    down.map_or(Ok(()), Err)
}

/// Probes the server that has the keys of `name`; returns a transient failure that prevented it.
async fn probe_at(
    commands: &Commands,
    name: &str,
    within: Duration,
) -> Result<Option<StoreError>, StoreError> {
    let nobodys = message::channel(Uuid::new_v4());
    let args = |cmd: &mut Cmd| {
        cmd.arg(&nobodys);
    };
    let answer = match run(commands, &scripts::PROBE, name, 64, args, within).await {
        Err(error) if error.kind != StoreErrorKind::Refused => return Ok(Some(error)),
        answer => answer?,
    };
    let lacked = lacked_by_loads(&answer).ok_or_else(|| refused(unexpected()))?;
    if lacked.is_empty() {
        return Ok(None);
    }
    let named = RedisError::from((ErrorKind::Client, "a script may not call", lacked.join(", ")));
    Err(StoreError { kind: StoreErrorKind::Refused, source: Some(advised(Some(LACKING), named)) })
}

/// Rights belong to one node each: names the node.
fn at(address: String, error: StoreError) -> StoreError {
    let StoreError { kind, source } = error;
    StoreError { kind, source: Some(Arc::new(Probe { address, source })) }
}

#[derive(Debug)]
struct Probe {
    address: String,
    source: Option<Cause>,
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the master at {}", self.address)
    }
}

impl Error for Probe {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
