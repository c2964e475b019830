//! Examines the server's description of itself: `HELLO` for every user, `INFO` or `CONFIG GET` for users with that right.
//! Also checks before the first load whether the server runs the scripts of loads, and asks sentinels about the primary that
//! they report, and whether enough of them run to replace it.

use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Client, Cmd, ConnectionAddr, ErrorKind, RedisError, RedisResult, Value};
use uuid::Uuid;

use super::rights::{ALONE, ANSWER, all, lacked_by_loads, one, pairs, text};
use crate::health::{Finding, Topology};
use crate::store::redis::commands::Commands;
use crate::store::redis::errors::{THEIR_PASSWORD, advised, bounded, is_login, unquoted};
use crate::store::redis::scripts;
use crate::store::redis::subscriber::channel;
use crate::store::{StoreError, StoreErrorKind, StoreResult};

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

/// Examines memory, eviction, replicas and persistence, as far as this user may read them.
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

/// Reports what happens to leases, locks and entries when memory is short.
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

/// Reads INFO and the settings of the server, as far as this user may, and examines them.
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

/// The default of the setting [`BULK`].
const USUAL: usize = 512 * 1024 * 1024;

/// Reports the server's limit for the length of a value, if it is lower than the default.
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

/// Probes the server that has the keys of `name`; returns a transient failure that prevented it.
pub(super) async fn probe_at(
    commands: &Commands,
    name: &str,
    within: Duration,
) -> StoreResult<Option<StoreError>> {
    let unused_channel = channel(Uuid::new_v4());
    let args = |cmd: &mut Cmd| {
        cmd.arg(&unused_channel);
    };
    let probed = commands.run(&scripts::PROBE, name, (64, args), within, lacked_by_loads);
    let lacked = match probed.await {
        Err(error) if error.kind != StoreErrorKind::Refused => return Ok(Some(error)),
        lacked => lacked?,
    };
    if lacked.is_empty() {
        return Ok(None);
    }
    let cause = RedisError::from((ErrorKind::Client, "a script may not call", lacked.join(", ")));
    Err(StoreError { kind: StoreErrorKind::Refused, source: Some(advised(Some(LACKING), cause)) })
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

/// Returns which other sentinels refuse this client: each has its own users and passwords. A sentinel
/// that cannot be reached from here is not reported: it may have another address for this host than
/// for the other sentinels.
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
