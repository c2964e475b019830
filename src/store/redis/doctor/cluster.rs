//! Examines a cluster: coverage of the slots, replicas, whether each master can be reached, and clocks.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Value};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::rights::{self, ALONE, ANSWER, ExaminedServer, one};
use super::server::{probe_at, settings};
use crate::health::{Finding, Severity};
use crate::store::redis::cluster::{Cluster, Coverage, MasterNode};
use crate::store::redis::commands::Commands;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::endpoint::TimedReading;
use crate::store::redis::errors::{Cause, bounded, code_of, reason, unquoted};
use crate::store::redis::subscriber::channel;
use crate::store::{StoreError, StoreErrorKind, StoreResult};

/// A larger difference between two clocks is reported.
const MAX_CLOCK_DIFFERENCE_MS: u64 = 1_000;

/// Examines all masters. Returns the master to examine further, if possible one that can be reached, and a name like
/// `name` whose keys it has. `None` if there is nothing more to examine; the findings say why.
pub(super) async fn examine(
    cluster: &Arc<Cluster>,
    name: &str,
    user: &str,
    findings: &mut Vec<Finding>,
) -> Option<ExaminedServer> {
    let up = timeout(ANSWER * 2, cluster.until_up()).await;
    let Some(Coverage { masters, unserved }) = cluster.coverage() else {
        let why = cluster.all().err().map_or_else(|| format!("{up:?}"), |why| reason(&why));
        let found = Finding::problem("cluster", format!("no node tells which node has which slot: {why}"));
        let advice = format!(
            "the addresses given to the ClusterClient; ACL SETUSER {user} +cluster|slots; are they nodes of a cluster?"
        );
        findings.push(found.cost(ALONE).advice(advice));
        return None;
    };
    findings.push(coverage(&masters, unserved));
    let (clocks, reached) = reach(&masters, findings).await;
    findings.extend(clock_difference(&clocks));
    let samples = cluster.samples(name);
    let target =
        samples.iter().find(|(master, _)| reached.contains(&master.name())).or_else(|| samples.first());
    if target.is_none() {
        let found = Finding::problem("connection", "no node serves any slot");
        findings.push(found.cost(ALONE).advice("see what is said of the cluster"));
    }
    let (connector, name) = target.map(|(master, name)| (master.server.connector.clone(), name.clone()))?;
    // Subscribes at any node: a message that is published at one node must reach all nodes.
    let inbox = Connector { answer: ANSWER, ..cluster.any_node() };
    Some(ExaminedServer { connector, inbox, name, reached })
}

/// Reports slots without a master, and masters without a replica.
fn coverage(masters: &[MasterNode], unserved: usize) -> Finding {
    let alone: Vec<_> =
        masters.iter().filter(|master| master.replicas == 0).map(|master| master.name()).collect();
    let found = format!("{} masters", masters.len());
    if unserved > 0 {
        Finding::problem("cluster", format!("{found}; {unserved} of 16384 slots are served by no node"))
            .cost(format!("for their keys {ALONE}; by default the whole cluster takes no commands then"))
            .advice("redis-cli --cluster check, and fix")
    } else if alone.is_empty() {
        Finding::ok("cluster", format!("{found} serve all slots, each with a replica or more"))
    } else {
        let found = format!("{found} serve all slots; without a replica: {}", alone.join(", "));
        Finding::warning("cluster", found)
            .cost(format!("when one of these is down, for its keys {ALONE}; by default for all keys"))
            .advice("a replica for each master")
    }
}

/// Connects to each master. Returns the clocks, and the names of those that can be reached.
async fn reach(
    masters: &[MasterNode],
    findings: &mut Vec<Finding>,
) -> (Vec<(String, TimedReading)>, Vec<String>) {
    let (mut clocks, mut reached) = (Vec::new(), Vec::new());
    for master in masters {
        let (name, started) = (master.name(), Instant::now());
        findings.push(match open(master).await {
            Ok((_, reading)) => {
                clocks.extend(reading.map(|reading| (name.clone(), reading)));
                let (took, replicas) = (started.elapsed(), master.replicas);
                let found = format!("{name} opened in {took:.1?}, {replicas} replicas");
                reached.push(name);
                Finding::ok("master", found)
            }
            Err(error) => {
                let known = master.server.connector.advice(&error);
                Finding::problem("master", format!("{name} can not be reached: {}", unquoted(error)))
                    .cost(format!("for its keys {ALONE}; by default for all keys, once the others miss it"))
                    .advice(known.unwrap_or("is it up, and where the cluster says?"))
            }
        });
    }
    (clocks, reached)
}

/// Examines what differs by node: users, rights and settings. `findings` are about the node that `target` and `commands` lead
/// to. Adds findings about ASKING there and about the other masters, unless the connection to that node fails.
pub(super) async fn examine_nodes(
    cluster: &Cluster,
    target: &ExaminedServer,
    user: &str,
    commands: &mut MultiplexedConnection,
    mut findings: Vec<Finding>,
) -> (Vec<Finding>, RedisResult<()>) {
    let Some(at) = target.connector.address() else { return (findings, Ok(())) };
    match may_ask(commands, user).await {
        Ok(found) => findings.extend(found),
        Err(error) => return (findings, Err(error)),
    }
    prefix_address(&at, &mut findings);
    findings.extend(examine_others(cluster, &target.name, user, &target.reached).await);
    (findings, Ok(()))
}

/// Reports the clock that differs most from the first master's, which decides whether entries are fresh.
fn clock_difference(clocks: &[(String, TimedReading)]) -> Option<Finding> {
    let now = Instant::now();
    let at = |reading: &TimedReading| reading.server_ms + now.duration_since(reading.at).as_millis() as u64;
    let (first, by) = clocks.first()?;
    let (name, off) =
        clocks.iter().map(|(name, other)| (name, at(other).abs_diff(at(by)))).max_by_key(|(_, off)| *off)?;
    (off > MAX_CLOCK_DIFFERENCE_MS).then(|| {
        Finding::warning("clocks", format!("that of {name} is {off} ms from that of {first}"))
            .cost("nothing for entries, which go by the first; fences and times to live of locks go by their own master's")
            .advice("NTP on all nodes")
    })
}

/// Examines the masters other than the one that has the keys of `name`, because users, rights and settings differ by node.
/// Skips those that cannot be reached, which [`examine`] has reported.
async fn examine_others(cluster: &Cluster, name: &str, user: &str, reached: &[String]) -> Vec<Finding> {
    let (mut findings, mut sound) = (Vec::new(), 0);
    for (master, name) in cluster.samples(name).into_iter().skip(1) {
        if !reached.contains(&master.name()) {
            continue;
        }
        let Ok(mut found) = examine_other(&master, &name, user).await else { continue };
        found.retain(|finding| finding.severity >= Severity::Warning);
        sound += usize::from(found.iter().all(|finding| finding.check != "rights"));
        prefix_address(&master.name(), &mut found);
        findings.extend(found);
    }
    if sound > 0 {
        findings.push(Finding::ok("rights", format!("`{user}` may do everything at {sound} other masters")));
    }
    findings
}

async fn examine_other(master: &MasterNode, name: &str, user: &str) -> RedisResult<Vec<Finding>> {
    let (mut commands, _) = open(master).await?;
    let unused_channel = channel(Uuid::new_v4());
    let mut findings = rights::examine(&mut commands, name, &unused_channel, user).await?.findings;
    findings.extend(may_ask(&mut commands, user).await?);
    findings.extend(settings(&mut commands, master.server.longest_argument()).await?);
    Ok(findings)
}

/// Opens a connection for the doctor. Bounded, because one master that hangs must leave time for the others.
async fn open(master: &MasterNode) -> RedisResult<(MultiplexedConnection, Option<TimedReading>)> {
    let mut connector = master.server.connector.clone();
    connector.answer = ANSWER;
    bounded(ANSWER * 2, connector.commands()).await
}

/// Names the master in each warning and problem.
fn prefix_address(address: &str, findings: &mut [Finding]) {
    for finding in findings.iter_mut().filter(|finding| finding.severity >= Severity::Warning) {
        finding.found = format!("at {address}: {}", finding.found);
    }
}

/// Reports a user that may not follow a slot while it migrates.
async fn may_ask(commands: &mut MultiplexedConnection, user: &str) -> RedisResult<Option<Finding>> {
    let answer = bounded(ANSWER, one(commands, redis::cmd("ASKING"))).await?;
    Ok(matches!(&answer, Value::ServerError(error) if error.code() == "NOPERM").then(|| {
        Finding::warning("rights", format!("`{user}` may not ASKING"))
            .cost("while a slot moves to another node, requests for its keys load without the fleet")
            .advice(format!("ACL SETUSER {user} +asking"))
    }))
}

/// Probes each master at a name like `name`.
pub(super) async fn probe(
    cluster: &Cluster,
    commands: &Commands,
    name: &str,
    within: Duration,
) -> StoreResult<()> {
    let each = cluster.samples(name).into_iter().map(|(master, name)| async move {
        match probe_at(commands, &name, within).await {
            Ok(passing) => Ok(passing.map(|error| (master.name(), error))),
            Err(error) => Err(at(master.name(), error)),
        }
    });
    takes_commands(futures_util::future::try_join_all(each).await?)
}

/// Returns an error if all masters that answer say that the cluster is down. `passing` has the transient error of each
/// probe, `None` for one that succeeded.
fn takes_commands(passing: Vec<Option<(String, StoreError)>>) -> StoreResult<()> {
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

/// Adds the node's address to an error that it has returned, because rights differ by node.
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
