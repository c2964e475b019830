//! How long it takes until another process has a value that was loaded, in round trips to Redis.
//!
//! There are 200 rounds with two processes, which have one caller each:
//!
//! - *script*, the control: on a bare redis-rs connection, one EVALSHA of the commit script with an empty queue, after a pause as long as a
//!   load. *Next* is another one right after it, which is faster because no thread sleeps.
//! - *alone*: from the return of the loader to the answer of its own caller, without another caller.
//! - *together*: from the return of the loader to the answer of the caller in the other process. That is the hops between tasks, COMMIT,
//!   PUBLISH, the wake-up, and one more script, by which the woken process reads the entry.
//!
//! So the time from sending COMMIT to waking the waiter is at most *together* less *next*.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;

use crate::calls::{Guards, Round, ms_between};
use crate::sides::raw;
use crate::support::origin::Answer;
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit, millis};

const ROUNDS: usize = 200;
const LOAD: Duration = Duration::from_millis(15);

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let Times { script, next, alone, together } = runtime.block_on(measure());
    let us = |spread: &Spread| {
        let Spread { median, min, max } = spread;
        format!("{:.0} us ({:.0} to {:.0})", median * 1e3, min * 1e3, max * 1e3)
    };
    table.add(Row {
        what: "COMMIT sent -> waiter woken in another process / one EVALSHA with an empty queue".into(),
        unit: Unit::Ratio,
        must: Limit::AtMost(2.0),
        aim: Limit::AtMost(1.4),
        measured: (together.median - next.median) / script.median,
        detail: format!(
            "medians of {ROUNDS}: script {}, next {}, alone {}, together {}",
            us(&script),
            us(&next),
            us(&alone),
            us(&together)
        ),
    });
    table.add(Row {
        what: "COMMIT sent -> value in hand in another process / the same".into(),
        unit: Unit::Ratio,
        must: Limit::AtMost(3.0),
        aim: Limit::AtMost(2.4),
        measured: together.median / script.median,
        detail: String::new(),
    });
}

struct Times {
    script: Spread,
    next: Spread,
    alone: Spread,
    together: Spread,
}

async fn measure() -> Times {
    let server = RedisServer::start();
    let guards = Guards::start(&server, 2, 1, Duration::from_secs(4)).await;
    let mut bare = raw(&server.client()).await;
    let sha1 = load_script(&mut bare).await;
    let mut times: [Vec<f64>; 4] = Default::default();
    // The first ten rounds only warm up scripts and caches.
    for round in 0..ROUNDS + 10 {
        let key = |name: &str| {
            let key = format!("{name}-{round}");
            guards.origin.script(&key, [Answer::value("v".repeat(1024)).after(LOAD)]);
            key
        };
        let own = key(["own-0", "own-1"][round % 2]);
        let shared = key("shared");

        let member = guards.fleet.member(round % 2);
        member.send(&own);
        let seen = Round { seen: vec![member.result().await], loads: guards.origin.loads(&own) };
        assert_eq!(seen.loads, 1);
        let lone = seen.last_waiter();

        let seen = guards.round(&shared).await;
        assert_eq!(seen.loads, 1);
        let (_, ended) = seen.load();
        let mut others = seen.seen.iter().filter(|seen| seen.load.is_none());
        let waiter = others.next().expect("one waits").answers[0].0;

        let [script, next] = commits(&mut bare, &sha1, round).await;
        if round >= 10 {
            for (times, time) in times.iter_mut().zip([script, next, lone, ms_between(ended, waiter)]) {
                times.push(time);
            }
        }
    }
    let [script, next, alone, together] = times.map(|times| Spread::of(&times));
    Times { script, next, alone, together }
}

async fn load_script(connection: &mut MultiplexedConnection) -> String {
    const WAKE: &str = include_str!("../../src/store/redis/scripts/wake.lua");
    const OURS: &str = include_str!("../../src/store/redis/scripts/ours.lua");
    const COMMIT: &str = include_str!("../../src/store/redis/scripts/commit.lua");
    let mut load = redis::cmd("SCRIPT");
    load.arg("LOAD").arg(format!("{WAKE}{OURS}{COMMIT}")).query_async(connection).await.expect("SCRIPT LOAD")
}

/// How many milliseconds two commits took that are like the guard's (1 KiB, a held lease, an empty queue): one after a pause as long as a
/// load, when processes and processors are asleep, and one right after it.
async fn commits(connection: &mut MultiplexedConnection, sha1: &str, round: usize) -> [f64; 2] {
    let token = "0123456789abcdef0123456789abcdef:0123456789abcdef0123456789abcdef";
    let keys = ["first", "second"]
        .map(|which| ["e", "l", "q", "o"].map(|kind| format!("sg1:{kind}:{{bench:{which}-{round}}}")));
    for keys in &keys {
        let mut lease = redis::cmd("SET");
        lease.arg(&keys[1]).arg(token).arg("PX").arg(10_000);
        lease.exec_async(connection).await.expect("SET");
    }
    tokio::time::sleep(LOAD).await;
    let mut took = [0.0; 2];
    for (keys, took) in keys.iter().zip(&mut took) {
        let mut evalsha = redis::cmd("EVALSHA");
        evalsha.arg(sha1).arg(4).arg(keys).arg(token).arg([b'v'; 1024].as_slice()).arg(10_000);
        let sent = Instant::now();
        let stored: i64 = evalsha.query_async(connection).await.expect("EVALSHA");
        *took = millis(sent.elapsed());
        assert_eq!(stored, 1, "the lease was ours");
    }
    took
}
