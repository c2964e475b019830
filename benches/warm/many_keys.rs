//! Three processes request the same 20,000 keys at once, with default settings, while a fourth one reads a stored value.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::StampedeGuard;
use tokio::time::sleep;

use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

pub(crate) const ROLE: Role = ("many_keys", ask_for_all);

const KEYS: u64 = 20_000;
const PROCESSES: usize = 3;
const ROUNDS: usize = 5;

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    redis: String,
    asks: Asks,
}

/// By which calls a process requests the keys.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Asks {
    OneCall,
    CallEach,
    /// The control, without the guard: two tasks send plain GETs, one after another, for as long as the other ways take, while two threads
    /// compute.
    PlainGets,
}

#[derive(Debug, Serialize, Deserialize)]
struct Seen {
    loads: u64,
    failed: u64,
    took_ms: f64,
}

/// The measurements of one round.
struct Round {
    loads: u64,
    failed: u64,
    stored: u64,
    took_ms: f64,
    /// The median time of a hit, first during the calls for many keys, then before them.
    hit: [f64; 2],
    lost_hits: u64,
}

pub(crate) async fn measure(table: &mut Table) {
    let all = [
        ("by plain GETs", Asks::PlainGets),
        ("by one call for many keys each", Asks::OneCall),
        ("by one call for each key", Asks::CallEach),
    ];
    let mut rounds: [Vec<Round>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for ((_, asks), rounds) in all.iter().zip(&mut rounds) {
            rounds.push(round(*asks).await);
        }
    }
    let [plain, ..] = &rounds;
    let control = Spread::of(&plain.iter().map(Round::slower).collect::<Vec<_>>());
    for ((how, _), rounds) in all.iter().zip(&rounds).skip(1) {
        rows(table, how, rounds, &control);
    }
}

impl Round {
    /// By how many times a hit was slower during the calls for many keys.
    fn slower(&self) -> f64 {
        self.hit[0] / self.hit[1]
    }
}

async fn round(asks: Asks) -> Round {
    let server = RedisServer::start();
    let other = connected(&server.url()).await;
    other.insert("hot", &1_u64).await.expect("stored");
    let fleet = Fleet::spawn(PROCESSES, "many_keys", &Config { redis: server.url(), asks });
    fleet.wait_ready().await;
    let (is_over, lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let before = hits(&other, &lost, async || sleep(Duration::from_millis(500)).await).await;
    let mut seen: Vec<Seen> = Vec::new();
    let beside = hits(&other, &lost, async || {
        fleet.go();
        seen = fleet.results().await;
        is_over.store(true, Ordering::Relaxed);
    });
    let hit = [beside.await, before];
    let stored = server.keys().iter().filter(|key| key.starts_with("sg1:e:")).count() as u64 - 1;
    Round {
        loads: seen.iter().map(|seen| seen.loads).sum(),
        failed: seen.iter().map(|seen| seen.failed).sum(),
        stored,
        took_ms: seen.iter().map(|seen| seen.took_ms).fold(0.0, f64::max),
        hit,
        lost_hits: lost.load(Ordering::Relaxed),
    }
}

/// The median time, in milliseconds, of hits that follow each other with a pause, while `beside` runs.
async fn hits(guard: &StampedeGuard, lost: &AtomicU64, beside: impl AsyncFnOnce()) -> f64 {
    let mut times = Vec::new();
    let hits = async {
        loop {
            let began = Instant::now();
            let hit = guard.get_or_load("hot", || async { Ok::<_, String>(0_u64) }).await;
            times.push(began.elapsed().as_secs_f64() * 1e3);
            lost.fetch_add(u64::from(!matches!(hit, Ok(1))), Ordering::Relaxed);
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = hits => {}
        () = beside() => {}
    }
    Spread::of(&times).median
}

fn rows(table: &mut Table, how: &str, rounds: &[Round], control: &Spread) {
    let most = |of: fn(&Round) -> u64| rounds.iter().map(of).max().unwrap_or(0) as f64;
    let took = Spread::of(&rounds.iter().map(|round| round.took_ms).collect::<Vec<_>>());
    let mut count = |what: &str, must: f64, measured: f64, detail: String| {
        let what = format!("{what}: 3 processes that ask for the same 20,000 keys, {how}");
        table.add(Row {
            what,
            unit: Unit::Count,
            must: Limit::Exactly(must),
            aim: Limit::None,
            measured,
            detail,
        });
    };
    count("loads", KEYS as f64, most(|round| round.loads), format!("in {took} ms"));
    count("values that are not stored", 0.0, most(|round| KEYS.saturating_sub(round.stored)), String::new());
    let lost = most(|round| round.lost_hits);
    count(
        "calls that failed, and lost hits of another process",
        0.0,
        most(|round| round.failed) + lost,
        String::new(),
    );
    let ratio = Spread::of(&rounds.iter().map(Round::slower).collect::<Vec<_>>());
    let [beside, before] =
        [0, 1].map(|at| Spread::of(&rounds.iter().map(|round| round.hit[at]).collect::<Vec<_>>()));
    table.add(Row {
        what: format!("median hit of another process beside them / before them, {how}"),
        unit: Unit::Ratio,
        must: Limit::AtMost(2.0),
        aim: Limit::None,
        measured: ratio.median,
        detail: format!(
            "{ratio}; {:.2} / {:.2} ms; beside three that compute and send plain GETs {:.2}, {control}",
            beside.median, before.median, control.median
        ),
    });
}

async fn connected(url: &str) -> StampedeGuard {
    let guard = StampedeGuard::new(redis::Client::open(url).expect("an address"));
    guard.connect().await.expect("connects");
    guard
}

fn ask_for_all(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let guard = connected(&config.redis).await;
        child.ready();
        child.wait_go().await;
        let (began, loads) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let failed = match config.asks {
            Asks::OneCall => many(&guard, &loads).await,
            Asks::CallEach => each(&guard, &loads).await,
            Asks::PlainGets => plain_gets(&config.redis).await,
        };
        let took_ms = began.elapsed().as_secs_f64() * 1e3;
        child.result(&Seen { loads: loads.load(Ordering::Relaxed), failed, took_ms });
    })
}

async fn many(guard: &StampedeGuard, loads: &Arc<AtomicU64>) -> u64 {
    let loads = Arc::clone(loads);
    let load = move |keys: Vec<u64>| {
        loads.fetch_add(keys.len() as u64, Ordering::Relaxed);
        async move { Ok::<_, String>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>()) }
    };
    let answers = guard.get_or_load_many(0..KEYS, load).await;
    answers.iter().zip(0..).filter(|(answer, key)| !matches!(answer, Ok(Some(found)) if found == key)).count()
        as u64
}

async fn each(guard: &StampedeGuard, loads: &Arc<AtomicU64>) -> u64 {
    let answers = (0..KEYS).map(|key| {
        let (guard, loads) = (guard.clone(), Arc::clone(loads));
        tokio::spawn(async move {
            let load = move || async move {
                loads.fetch_add(1, Ordering::Relaxed);
                Ok::<_, String>(key)
            };
            matches!(guard.get_or_load(key, load).await, Ok(found) if found == key)
        })
    });
    let answers = futures_util::future::join_all(answers.collect::<Vec<_>>()).await;
    answers.into_iter().filter(|answer| !matches!(answer, Ok(true))).count() as u64
}

async fn plain_gets(url: &str) -> u64 {
    let client = redis::Client::open(url).expect("an address");
    let connection = client.get_multiplexed_async_connection().await.expect("connects");
    let end = Instant::now() + Duration::from_secs(3);
    let gets = (0..2).map(|_| {
        let mut connection = connection.clone();
        tokio::spawn(async move {
            while Instant::now() < end {
                let none: Option<u64> =
                    redis::cmd("GET").arg("none").query_async(&mut connection).await.expect("an answer");
                assert_eq!(none, None);
            }
        })
    });
    let spinning = (0..2).map(|_| tokio::task::spawn_blocking(move || while Instant::now() < end {}));
    let gets = gets.chain(spinning);
    futures_util::future::join_all(gets).await.iter().filter(|gets| gets.is_err()).count() as u64
}
