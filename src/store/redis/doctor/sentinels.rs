//! What sentinels report: the primary, and whether enough of them run to replace it.

use std::collections::HashMap;
use std::future::Future;

use redis::aio::MultiplexedConnection;
use redis::{Client, ConnectionAddr, RedisResult, Value};

use super::examination::{ALONE, ANSWER, all, one};
use crate::health::Finding;
use crate::store::redis::errors::bounded;
use crate::store::redis::errors::unquoted;
use crate::store::redis::errors::{THEIR_PASSWORD, is_login};

/// Asks a sentinel about the primary at `address`.
pub(super) async fn examine(sentinel: impl Future<Output = RedisResult<Client>>, address: &str) -> Finding {
    let query = async { ask(&sentinel.await?, address).await };
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

async fn ask(client: &Client, address: &str) -> RedisResult<Finding> {
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
