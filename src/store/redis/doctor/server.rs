//! Examines the server's description of itself: `HELLO` for every user, `INFO` or `CONFIG GET` for users with that right.
//! Also checks before the first load whether the server runs the scripts of loads.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, Value};
use uuid::Uuid;

use super::rights::lacked_by_loads;
use super::rights::{ALONE, one, pairs, text};
use crate::health::{Finding, Topology};
use crate::store::redis::commands::{Commands, Servers, refused, run};
use crate::store::redis::errors::{Cause, advised, code_of, unexpected};
use crate::store::redis::scripts;
use crate::store::redis::subscriber::channel;
use crate::store::{StoreError, StoreErrorKind};

/// The oldest version that all scripts run on.
const OLDEST: (u32, u32) = (6, 2);

/// Checks the answer to HELLO: version, mode and role of the server at `address`.
pub(super) fn of_greeting(greeting: Value, topology: Topology, address: Option<&str>) -> Vec<Finding> {
    let address = address.unwrap_or("an unknown address");
    let Some(hello) = pairs(greeting).filter(|hello| hello.contains_key("version")) else {
        return vec![
            Finding::note("version", "HELLO is not permitted, or not known: older than 6, or not Redis")
                .advice("the guard needs 6.2 or later"),
        ];
    };
    let word = |name: &str| hello.get(name).and_then(text).unwrap_or_default();
    let (server, version) = (word("server"), word("version"));
    let mut findings = vec![if numbers(&version) < Some(OLDEST) {
        let found = Finding::problem("version", format!("{server} {version}, older than 6.2"));
        found.cost("scripts use commands that it does not have").advice("6.2 or later")
    } else {
        Finding::ok("version", format!("{server} {version}"))
    }];
    findings.push(match (word("mode").as_str(), word("role").as_str()) {
        ("standalone" | "", "master" | "primary" | "") if topology == Topology::Single => {
            Finding::ok("topology", format!("a single primary at {address}"))
        }
        ("standalone" | "", "master" | "primary" | "") => {
            Finding::ok("topology", format!("the sentinels' primary, at {address}"))
        }
        ("cluster", _) if topology == Topology::Cluster => {
            Finding::ok("topology", format!("a cluster; what follows is about its master at {address}"))
        }
        ("sentinel", _) => Finding::problem("topology", "a Sentinel, which stores nothing")
            .cost(ALONE)
            .advice("make the guard from a redis::sentinel::SentinelClient (feature `sentinel`)"),
        ("cluster", _) => Finding::problem("topology", "a node of a Redis Cluster")
            .cost(format!("keys of other nodes' slots are refused; for those {ALONE}"))
            .advice("make the guard from a redis::cluster::ClusterClient (feature `cluster`)"),
        (_, role) => Finding::problem("topology", format!("a {role}, which takes no writes"))
            .cost(format!("nothing is stored; {ALONE}"))
            .advice("the address of the primary"),
    });
    findings
}

/// Memory, eviction, replicas and persistence, as far as this user may read them.
pub(super) fn examine(info: &Value, settings: Value) -> Vec<Finding> {
    let info_text = match info {
        Value::ServerError(_) => None,
        info => text(info),
    };
    let Some(info_text) = info_text else {
        let hidden = Finding::note(
            "info",
            "INFO is not permitted: replicas and persistence could not be seen",
        )
        .advice("run the doctor as a user with +info, or look at INFO yourself; the guard does not need it");
        let mut findings = vec![hidden];
        let settings = pairs(settings).filter(|settings| settings.contains_key("maxmemory"));
        findings.extend(settings.map_or_else(
            || vec![Finding::note("memory", "not permitted: neither INFO nor CONFIG GET")],
            |settings| {
                let word = |name: &str| settings.get(name).and_then(text).unwrap_or_default();
                memory(&word("maxmemory"), &word("maxmemory-policy"), None)
            },
        ));
        return findings;
    };
    let fields: HashMap<&str, &str> =
        info_text.lines().filter_map(|line| line.trim_end().split_once(':')).collect();
    let field = |name: &str| fields.get(name).copied().unwrap_or_default();
    let evicted = field("evicted_keys").parse().ok();
    let mut findings = memory(field("maxmemory"), field("maxmemory_policy"), evicted);
    findings.push(replicas(field("connected_slaves").parse().unwrap_or(0)));
    findings.extend(persistence(&field));
    findings
}

/// What happens to leases, locks and entries when memory is short.
fn memory(most: &str, policy: &str, evicted: Option<u64>) -> Vec<Finding> {
    let Ok(most) = most.parse::<u64>() else {
        return vec![Finding::note("memory", "the server does not say how much it may use")];
    };
    if most == 0 {
        return vec![
            Finding::warning("memory", "maxmemory is 0: no bound")
                .cost("it grows until the system stops it, and everything that is stored is gone at once")
                .advice(
                    "maxmemory below the machine's memory, and maxmemory-policy volatile-lru or allkeys-lru",
                ),
        ];
    }
    let memory = Finding::ok("memory", format!("maxmemory is {} MiB", most / (1 << 20)));
    let evicted =
        evicted.map_or_else(String::new, |evicted| format!("; {evicted} keys evicted since it was started"));
    let found = format!("maxmemory-policy is {policy}{evicted}");
    let eviction = match policy {
        "noeviction" => Finding::warning("eviction", found)
            .cost(format!("nothing is evicted; when memory is full, writes are refused: {ALONE}, and nothing is stored"))
            .advice("volatile-lru or allkeys-lru for a cache; noeviction for a server that keeps locks"),
        "volatile-ttl" => Finding::warning("eviction", found)
            .cost("what expires soonest goes first: leases, queues and locks before any entry")
            .advice("volatile-lru or allkeys-lru"),
        _ => Finding::note("eviction", found)
            .cost(
                "an evicted lease or entry costs a second load, an evicted tag misses; an evicted mutex can have two \
                 holders",
            )
            .advice("enough memory that it is rare; for locks a server with noeviction, and fences"),
    };
    vec![memory, eviction]
}

fn replicas(count: u32) -> Finding {
    if count == 0 {
        return Finding::note("replicas", "none")
            .cost("while the server is away, each process loads for itself; a new one starts empty");
    }
    Finding::note("replicas", format!("{count}, which follow asynchronously"))
        .cost("a failover can lose the latest writes: a second load, a value from before its invalidation, a mutex with two holders")
        .advice("invalidate_replicas where an old value must not come back; fences with locks")
}

fn persistence<'t>(field: &impl Fn(&str) -> &'t str) -> Vec<Finding> {
    let failing = ["rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status"];
    let failing: Vec<_> = failing.into_iter().filter(|name| field(name) == "err").collect();
    if !failing.is_empty() {
        return vec![
            Finding::warning("persistence", format!("failing: {}", failing.join(", ")))
                .cost(format!("the server may refuse all writes (MISCONF) until it succeeds: {ALONE}"))
                .advice("its disk; for a cache alone: save \"\" and appendonly no"),
        ];
    }
    vec![match field("aof_enabled") {
        "1" => Finding::ok("persistence", "appendonly: entries survive a restart, with their lifetimes"),
        "0" => Finding::note(
            "persistence",
            "no appendonly file: a restart may begin empty, or with an older snapshot",
        )
        .cost("one load per key; from a snapshot, values from before their invalidation until they expire"),
        _ => Finding::note("persistence", "the server does not say"),
    }]
}

/// The first two numbers of a version.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

/// Memory and persistence of the server, as far as this user may read them.
/// `known` is the longest argument that the guard knows the server to take.
pub(super) async fn settings(
    commands: &mut MultiplexedConnection,
    known: usize,
) -> RedisResult<Vec<Finding>> {
    let info = one(commands, redis::cmd("INFO")).await?;
    let settings = match &info {
        Value::ServerError(_) => one(commands, redis::cmd("CONFIG").arg("GET").arg("maxmemory*")).await?,
        _ => Value::Nil,
    };
    let limit = one(commands, redis::cmd("CONFIG").arg("GET").arg(BULK)).await?;
    let limit = pairs(limit).and_then(|settings| text(settings.get(BULK)?)?.parse().ok());
    let mut findings = examine(&info, settings);
    findings.extend(longest(limit.unwrap_or(known)));
    Ok(findings)
}

const BULK: &str = "proto-max-bulk-len";

/// The default of this setting.
const USUAL: usize = 512 * 1024 * 1024;

/// Reports a limit that values may exceed.
fn longest(most: usize) -> Option<Finding> {
    let found = || {
        Finding::warning(
            "value size",
            format!("{BULK} is {most} bytes, or a value of about that size broke a connection"),
        )
    };
    let finding = || {
        found()
            .cost("the server takes no longer value, and closes the connection that has sent one; longer values are not stored")
            .advice("a higher proto-max-bulk-len, or a max_body below it")
    };
    (most < USUAL).then(finding)
}

/// The advice about missing commands.
const LACKING: &str = "the server lacks commands that the guard's scripts call, or the right of this user to them: use Redis \
                       6.2 or later, or Valkey, rename no commands, and give the user the rights that docs/redis.md lists; \
                       doctor() says which";

/// Returns an error if the server, or one of the masters that can be reached, runs no scripts or refuses a command of the
/// load scripts. A server that takes no commands at present is no error, because that passes. But if no master of a cluster
/// takes commands, that is an error, as it is for a single server that is loading: no load is shared.
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

/// Returns an error if all masters that answer say that the cluster is down. `passing` has the transient error of each
/// probe.
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
    let unused_channel = channel(Uuid::new_v4());
    let args = |cmd: &mut Cmd| {
        cmd.arg(&unused_channel);
    };
    let answer = match run(commands, &scripts::PROBE, name, 64, args, within).await {
        Err(error) if error.kind != StoreErrorKind::Refused => return Ok(Some(error)),
        answer => answer?,
    };
    let lacked = lacked_by_loads(&answer).ok_or_else(|| refused(unexpected()))?;
    if lacked.is_empty() {
        return Ok(None);
    }
    let cause = RedisError::from((ErrorKind::Client, "a script may not call", lacked.join(", ")));
    Err(StoreError { kind: StoreErrorKind::Refused, source: Some(advised(Some(LACKING), cause)) })
}

/// Adds the node's address to its error: rights differ by node.
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
