//! Redis dead (connections refused) or hung (SIGSTOP): what requests lose, before and after the breaker opens.
//!
//! One process with the default policy, whose loader answers at once, so all the time that a request takes is the
//! guard's. 64 requests for 64 keys arrive the moment after the outage began; when they are answered, 300 more come
//! one after the other.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use stampede_guard::StampedeGuard;

use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit, millis};

const AT_ONCE: usize = 64;
const AFTERWARDS: usize = 300;
/// The default policy's.
const BUDGET: Duration = Duration::from_millis(100);
const ALLOWANCE: Duration = Duration::from_millis(50);

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(outage(table, "dead", RedisServer::kill));
    runtime.block_on(outage(table, "hung", RedisServer::pause));
}

async fn outage(table: &mut Table, name: &str, begin: fn(&RedisServer)) {
    let server = RedisServer::start();
    let guard = StampedeGuard::new(server.client());
    guard.connect().await.expect("connects");
    request(&guard, "before".to_owned()).await.expect("answered");

    begin(&server);
    let before = join_all((0..AT_ONCE).map(|n| request(&guard, format!("before-{n}")))).await;
    let mut after = Vec::new();
    for n in 0..AFTERWARDS {
        after.push(request(&guard, format!("after-{n}")).await);
    }
    if name == "hung" {
        server.resume();
    }

    let answered = before.iter().chain(&after).flatten().count();
    table.add(Row {
        what: format!("Redis {name}: requests answered, of {}", AT_ONCE + AFTERWARDS),
        unit: Unit::Count,
        must: Limit::Exactly((AT_ONCE + AFTERWARDS) as f64),
        aim: Limit::None,
        measured: answered as f64,
        detail: String::new(),
    });
    let before: Vec<_> = before.into_iter().flatten().map(millis).collect();
    let spread = Spread::of(&before);
    table.add(Row {
        what: format!("Redis {name}: added to a request before the breaker opens, the worst of {AT_ONCE}"),
        unit: Unit::Millis,
        must: Limit::AtMost(millis(BUDGET + ALLOWANCE)),
        aim: Limit::None,
        measured: spread.max,
        detail: format!("median {:.2}", spread.median),
    });
    let after: Vec<_> = after.into_iter().flatten().map(millis).collect();
    let spread = Spread::of(&after);
    table.add(Row {
        what: format!("Redis {name}: added after the breaker opened, median of {AFTERWARDS}"),
        unit: Unit::Millis,
        must: Limit::AtMost(2.0),
        aim: Limit::None,
        measured: spread.median,
        detail: format!("worst {:.2}", spread.max),
    });
}

/// How long it took; `None` if it was not answered.
async fn request(guard: &StampedeGuard, key: String) -> Option<Duration> {
    let asked = Instant::now();
    let answer = guard.get_or_load(key, || async { Ok::<_, String>(7) }).await;
    answer.ok().map(|_| asked.elapsed())
}
