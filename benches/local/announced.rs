//! How long an invalidation takes while all processes answer, compared with the same messages and answers between bare connections.
//!
//! The control removes the key and publishes to each process in one script, and waits until each process has published its answer. Before
//! each measurement, of either side, all processes read the key, so that all of them are equally awake and have the key in memory.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use redis::aio::{MultiplexedConnection, PubSubStream};
use stampede_guard::StampedeGuard;

use crate::holders::{ANSWERS, KEY, TERM, all_hold, bare, channel, connected, start};
use crate::support::processes::Fleet;
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Table, Unit, millis};

const PROCESSES: [usize; 2] = [8, 24];
const ROUNDS: usize = 1_000;
const SCRIPT: &str = "redis.call('DEL', KEYS[1]) \
     for i = 2, #ARGV do redis.call('PUBLISH', ARGV[i], ARGV[1]) end \
     return #ARGV - 1";

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    for processes in PROCESSES {
        let [mut guarded, mut control, mut scripts] = runtime.block_on(measure(processes));
        for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
            let [ours, theirs, script] =
                [&mut guarded, &mut control, &mut scripts].map(|times| quantile(times, share));
            table.add(Row {
                what: format!("invalidate with {processes} well processes, {name} / the same fan-out on bare connections"),
                unit: Unit::Ratio,
                must: Limit::AtMost(1.5),
                aim: Limit::AtMost(1.2),
                measured: ours / theirs,
                detail: format!("{ours:.2} ms, control {theirs:.2} ms; one EVALSHA {script:.2} ms"),
            });
        }
    }
}

/// How many milliseconds the invalidations took, those of the control, and a script that publishes nothing.
async fn measure(processes: usize) -> [Vec<f64>; 3] {
    let server = RedisServer::start();
    let fleet = start(vec![server.url(); processes], true).await;
    let guard = connected(&server.url()).await;
    let mut control = Control::connect(&server, processes).await;
    // Afterwards the registry is mature, and this process knows that.
    for _ in 0..3 {
        all_hold(&fleet).await;
        guard.invalidate(KEY).await.expect("acknowledged");
        tokio::time::sleep(TERM).await;
    }
    let mut times: [Vec<f64>; 3] = Default::default();
    // The first rounds only warm up.
    for round in 0..ROUNDS + 20 {
        let mut took = [0.0; 3];
        for turn in 0..2 {
            let side = (round + turn) % 2;
            took[side] = match side {
                0 => invalidation(&fleet, &guard).await,
                _ => control.announce(&fleet).await,
            };
        }
        took[2] = control.script().await;
        if round >= 20 {
            times.iter_mut().zip(took).for_each(|(times, took)| times.push(took));
        }
    }
    times
}

async fn invalidation(fleet: &Fleet, guard: &StampedeGuard) -> f64 {
    all_hold(fleet).await;
    let began = Instant::now();
    guard.invalidate(KEY).await.expect("acknowledged");
    millis(began.elapsed())
}

/// The control's announcer, on bare connections.
struct Control {
    commands: MultiplexedConnection,
    answers: PubSubStream,
    sha1: String,
    channels: Vec<String>,
    number: u32,
}

impl Control {
    async fn connect(server: &RedisServer, processes: usize) -> Self {
        let client = server.client();
        let mut commands = bare(&client).await;
        let mut answers = client.get_async_pubsub().await.expect("connects");
        answers.subscribe(ANSWERS).await.expect("subscribes");
        let mut load = redis::cmd("SCRIPT");
        let sha1 = load.arg("LOAD").arg(SCRIPT).query_async(&mut commands).await.expect("SCRIPT LOAD");
        let channels = (0..processes).map(channel).collect();
        Self { commands, answers: answers.into_on_message(), sha1, channels, number: 0 }
    }

    async fn announce(&mut self, fleet: &Fleet) -> f64 {
        all_hold(fleet).await;
        self.number += 1;
        let number = self.number.to_string();
        let began = Instant::now();
        let receivers = self.evalsha(&number, self.channels.clone()).await;
        assert_eq!(receivers, self.channels.len());
        for _ in 0..receivers {
            let answer = tokio::time::timeout(Duration::from_secs(10), self.answers.next()).await;
            let answer = answer.expect("in time").expect("a message");
            assert_eq!(answer.get_payload_bytes(), number.as_bytes());
        }
        millis(began.elapsed())
    }

    async fn script(&mut self) -> f64 {
        let began = Instant::now();
        self.evalsha("0", Vec::new()).await;
        millis(began.elapsed())
    }

    async fn evalsha(&mut self, number: &str, channels: Vec<String>) -> usize {
        let mut evalsha = redis::cmd("EVALSHA");
        evalsha.arg(&self.sha1).arg(1).arg("bare:key").arg(number).arg(channels);
        evalsha.query_async(&mut self.commands).await.expect("EVALSHA")
    }
}

fn quantile(times: &mut [f64], share: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * share).round() as usize]
}
