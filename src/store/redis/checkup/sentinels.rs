//! What sentinels say: who is the primary, and whether they are enough to replace it.

use std::collections::HashMap;

use redis::{Client, RedisResult, Value};

use super::{ALONE, ANSWER, all, one, words};
use crate::health::Finding;
use crate::store::redis::client::bounded;
use crate::store::redis::sentinel::{RESOLVING, Sentinels};

/// Asks the first sentinel that answers about the primary at `address`.
pub(super) async fn examine(sentinels: &Sentinels, address: &str) -> Finding {
    let told = async {
        let client = bounded(RESOLVING, sentinels.any()).await?;
        ask(&client, address).await
    };
    told.await.unwrap_or_else(|error| {
        Finding::warning("sentinels", format!("could not be asked: {}", words(error)))
            .cost(format!("while none answers a new primary is not found: {ALONE}"))
            .advice("start them, and let this user send them SENTINEL and ROLE")
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
    let (enough, said) = match verdict {
        Value::ServerError(error) if error.code() == "NOQUORUM" => {
            (false, error.details().unwrap_or_default().to_owned())
        }
        Value::ServerError(error) => return Err(error.into()),
        said => (true, redis::from_redis_value(said).unwrap_or_default()),
    };
    // `OK 3 usable Sentinels. ..`, or the same after `NOQUORUM`.
    let usable = said.split(' ').find_map(|word| word.parse::<u32>().ok()).unwrap_or(0);
    let found = format!(
        "{usable} of {} can be used, quorum is {}; {name} is at {}, with {} replicas",
        others + 1,
        word(master, "quorum"),
        at(master),
        word(master, "num-slaves")
    );
    if !enough {
        let found = Finding::problem("sentinels", found);
        let cost = format!("a primary that dies is not replaced: {ALONE}, until somebody does it by hand");
        return Ok(found.cost(cost).advice("more sentinels than half must run and reach one another"));
    }
    if word(master, "num-slaves") == "0" {
        let found =
            Finding::warning("sentinels", found).cost("there is nothing that could replace the primary");
        return Ok(found.advice("a replica"));
    }
    Ok(Finding::ok("sentinels", found))
}
