//! Examines what belongs to one kind of deployment. A cluster: coverage of the slots, replicas, whether each master can be
//! reached, and clocks. Sentinels: the primary that they report, and whether enough of them run to replace it.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{Client, ConnectionAddr, RedisResult, Value};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::rights::{self, ALONE, ANSWER, ExaminedServer, all, one};
use super::server::settings;
use crate::health::{Finding, Severity};
use crate::store::redis::cluster::{Cluster, Coverage, MasterNode};
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::endpoint::TimedReading;
use crate::store::redis::errors::{THEIR_PASSWORD, bounded, is_login, reason, unquoted};
use crate::store::redis::subscriber::channel;

/// A larger difference between two clocks is reported.
const MAX_CLOCK_DIFFERENCE_MS: u64 = 1_000;

/// Examines all masters. Returns the master to examine further, if possible one that can be reached, and a name like
/// `name` whose keys it has. `None` if there is nothing more to examine; the findings say why.
pub(super) async fn examine_cluster(
    cluster: &Arc<Cluster>,
    name: &str,
    user: &str,
    findings: &mut Vec<Finding>,
) -> Option<ExaminedServer> {
    let up = timeout(ANSWER * 2, cluster.until_up()).await;
    let Some(Coverage { masters, unserved }) = cluster.coverage() else {
        let why = cluster.down().map_or_else(|| format!("{up:?}"), |why| reason(&why));
        let found = Finding::problem("cluster", format!("no node tells which node has which slot: {why}"));
        let advice = format!(
            "the addresses given to the ClusterClient; ACL SETUSER {user} +cluster|slots; are they nodes of a cluster?"
        );
        findings.push(found.cost(ALONE).advice(advice));
        return None;
    };
    let alone: Vec<_> =
        masters.iter().filter(|master| master.replicas == 0).map(|master| master.name()).collect();
    let found = format!("{} masters", masters.len());
    findings.push(if unserved > 0 {
        Finding::problem("cluster", format!("{found}; {unserved} of 16384 slots are served by no node"))
            .cost(format!("for their keys {ALONE}; by default the whole cluster takes no commands then"))
            .advice("redis-cli --cluster check, and fix")
    } else if alone.is_empty() {
        Finding::ok("cluster", format!("{found} serve all slots, each with a replica or more"))
    } else {
        Finding::warning(
            "cluster",
            format!("{found} serve all slots; without a replica: {}", alone.join(", ")),
        )
        .cost(format!("when one of these is down, for its keys {ALONE}; by default for all keys"))
        .advice("a replica for each master")
    });
    let (mut clocks, mut reached) = (Vec::new(), Vec::new());
    for master in &masters {
        let started = Instant::now();
        match open(master).await {
            Ok((_, reading)) => clocks.extend(reading.map(|reading| (master.name(), reading))),
            Err(error) => {
                let known = master.server.connector.advice(&error);
                let found = format!("{} can not be reached: {}", master.name(), unquoted(error));
                let cost = format!("for its keys {ALONE}; by default for all keys, once the others miss it");
                let advice = known.unwrap_or("is it up, and where the cluster says?");
                findings.push(Finding::problem("master", found).cost(cost).advice(advice));
                continue;
            }
        }
        reached.push(master.name());
        let found =
            format!("{} opened in {:.1?}, {} replicas", master.name(), started.elapsed(), master.replicas);
        findings.push(Finding::ok("master", found));
    }
    findings.extend(clock_difference(&clocks));
    let samples = cluster.samples(name);
    let target =
        samples.iter().find(|(master, _)| reached.contains(&master.name())).or_else(|| samples.first());
    if target.is_none() {
        let found = Finding::problem("connection", "no node serves any slot");
        findings.push(found.cost(ALONE).advice("see what is said of the cluster"));
    }
    let (connector, name) = target.map(|(master, name)| (master.server.connector.clone(), name.clone()))?;
    // At any node: a message that is published at one node must reach all.
    let inbox = cluster.any_node(ANSWER);
    Some(ExaminedServer { connector, inbox, name, reached })
}

/// Examines what differs by node: users, rights and settings. The findings from index `from` on are about the node that
/// `target` and `commands` lead to; the other masters follow.
pub(super) async fn examine_nodes(
    cluster: &Arc<Cluster>,
    target: &Connector,
    (name, reached): (&str, &[String]),
    user: &str,
    commands: &mut MultiplexedConnection,
    (findings, from): (&mut Vec<Finding>, usize),
) -> RedisResult<()> {
    let Some(at) = target.address() else { return Ok(()) };
    findings.extend(may_ask(commands, user).await?);
    prefix_address(&at, &mut findings[from..]);
    findings.extend(examine_others(cluster, name, user, reached).await);
    Ok(())
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
/// Skips those that cannot be reached, which [`examine_cluster`] has reported.
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

/// Asks a sentinel about the primary at `address`.
pub(super) async fn examine_sentinels(
    sentinel: impl Future<Output = RedisResult<Client>>,
    address: &str,
) -> Finding {
    let query = async { ask_sentinel(&sentinel.await?, address).await };
    query.await.unwrap_or_else(|error| {
        let advice = match is_login(&error) {
            true => THEIR_PASSWORD,
            false => "start them, and let this user send them SENTINEL and ROLE",
        };
        Finding::warning("sentinels", format!("could not be asked: {}", unquoted(error)))
            .cost(format!("while none answers a new primary is not found: {ALONE}"))
            .advice(advice)
    })
}

async fn ask_sentinel(client: &Client, address: &str) -> RedisResult<Finding> {
    let mut connection = bounded(ANSWER, client.get_multiplexed_async_connection()).await?;
    let masters = one(&mut connection, redis::cmd("SENTINEL").arg("MASTERS")).await?.extract_error()?;
    let masters: Vec<HashMap<String, String>> = redis::from_redis_value(masters)?;
    let word = |master: &HashMap<String, String>, field: &str| master.get(field).cloned().unwrap_or_default();
    let at = |master: &HashMap<String, String>| format!("{}:{}", word(master, "ip"), word(master, "port"));
    let ours = masters.iter().find(|master| at(master) == address).or_else(|| masters.first());
    let Some(master) = ours.filter(|master| at(master) == address || masters.len() == 1) else {
        let found = Finding::warning("sentinels", format!("none of their primaries is at {address}"));
        return Ok(found.advice("a failover may be under way; look again"));
    };
    let name = word(master, "name");
    let others: u32 = word(master, "num-other-sentinels").parse().unwrap_or(0);
    let mut check = redis::pipe();
    check.cmd("SENTINEL").arg("CKQUORUM").arg(&name);
    let verdict = all(&mut connection, &check).await?.into_iter().next().unwrap_or(Value::Nil);
    let (enough, reply) = match verdict {
        Value::ServerError(error) if error.code() == "NOQUORUM" => {
            (false, error.details().unwrap_or_default().to_owned())
        }
        Value::ServerError(error) => return Err(error.into()),
        reply => (true, redis::from_redis_value(reply).unwrap_or_default()),
    };
    // `OK 3 usable Sentinels. ..`, or the same after `NOQUORUM`.
    let usable = reply.split(' ').find_map(|word| word.parse::<u32>().ok()).unwrap_or(0);
    let found = format!(
        "{usable} of {} can be used, quorum is {}; {name} is at {}, with {} replicas",
        others + 1,
        word(master, "quorum"),
        at(master),
        word(master, "num-slaves")
    );
    if !enough {
        let found = Finding::problem("sentinels", found);
        let cost = format!("a primary that dies is not replaced: {ALONE}, until an operator does it by hand");
        return Ok(found.cost(cost).advice("more sentinels than half must run and reach one another"));
    }
    if word(master, "num-slaves") == "0" {
        let found =
            Finding::warning("sentinels", found).cost("there is nothing that could replace the primary");
        return Ok(found.advice("a replica"));
    }
    let refusals = refusals(client, &mut connection, &name).await?;
    if !refusals.is_empty() {
        let found = Finding::warning("sentinels", format!("{found}; but {}", refusals.join(", ")));
        let cost = "when the others are gone too a new primary is not found";
        return Ok(found.cost(cost).advice(THEIR_PASSWORD));
    }
    Ok(Finding::ok("sentinels", found))
}

/// Which other sentinels refuse this client: each has its own users and passwords. A sentinel that
/// cannot be reached here is not reported: it may have another address for this host than for the
/// other sentinels.
async fn refusals(
    client: &Client,
    connection: &mut MultiplexedConnection,
    name: &str,
) -> RedisResult<Vec<String>> {
    let others = one(connection, redis::cmd("SENTINEL").arg("SENTINELS").arg(name)).await?;
    let others: Vec<HashMap<String, String>> = redis::from_redis_value(others).unwrap_or_default();
    let each = others.iter().filter_map(|other| Some((other.get("ip")?, other.get("port")?.parse().ok()?)));
    let checks = each.map(|(host, port)| async move {
        let error = bounded(ANSWER, greet(client, host, port)).await.err()?;
        is_login(&error).then(|| format!("{host}:{port} refuses this client ({})", unquoted(error)))
    });
    Ok(futures_util::future::join_all(checks).await.into_iter().flatten().collect())
}

/// Sends the guard's first command to the sentinel at this address, with the settings of `client`.
async fn greet(client: &Client, host: &str, port: u16) -> RedisResult<()> {
    let info = client.get_connection_info().clone();
    let addr = match info.addr().clone() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host.to_owned(), port),
    };
    let client = Client::open(info.set_addr(addr))?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    one(&mut connection, redis::cmd("ROLE")).await?.extract_error().map(drop)
}
