//! Hits on 1, 2, 4 .. threads, up to the number of cores: from memory beside the maps and a router, and from Redis on several connections
//! beside raw GETs on as many.

use std::convert::Infallible;
use std::fs;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http_body_util::BodyExt as _;
use redis::aio::MultiplexedConnection;
use stampede_guard::{Policy, StampedeGuard};
use tokio::runtime::{Builder, Runtime};
use tower::Service as _;

use crate::caches::{Map, Moka, Quick};
use crate::hits::{filled, hit};
use crate::layer::{fill, guard, uris};
use crate::raw::{self, set_all};
use crate::readers::mapped;
use crate::responses::{body, headers, request, response};
use crate::support::redis_server::RedisServer;
use crate::support::zipf::Zipf;
use crate::table::{Limit, Row, Table, Unit};
use crate::turns::{Side, Times, concurrent, in_turn, lets_others_run};
use crate::values::{User, keys};

const KEYS: u32 = 1_000;
const CALLERS_PER_THREAD: u32 = 64;
/// How many connections the rows of Redis have.
const CONNECTIONS: [usize; 4] = [1, 2, 4, 8];

/// The keys that callers request, one after the other.
type Draws = Arc<[u32]>;

pub(crate) fn rows(table: &mut Table) {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut threads = 1;
    while threads <= cores {
        let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build();
        let load = Callers { runtime: runtime.expect("a runtime"), threads };
        for (which, draws) in [("zipf over 1,000 keys", zipf()), ("one hot key", Draws::from([0]))] {
            load.maps(table, which, &draws);
            load.layer(table, which, &draws);
        }
        load.redis(table);
        threads *= 2;
    }
}

fn zipf() -> Draws {
    let (zipf, mut random) = (Zipf::new(KEYS as usize, 1.0), fastrand::Rng::with_seed(46));
    (0..65_536).map(|_| zipf.draw(&mut random) as u32).collect()
}

fn drawn(draws: &[u32], caller: u32, call: u32) -> usize {
    draws[(caller as usize * 997 + call as usize) % draws.len()] as usize
}

struct Callers {
    runtime: Runtime,
    threads: usize,
}

impl Callers {
    /// Callers that go through the draws, each from another position.
    fn side<F, Fut>(&self, draws: &Draws, call: F) -> Side<'_>
    where
        F: Fn(usize) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send,
    {
        let draws = Arc::clone(draws);
        concurrent(&self.runtime, self.threads as u32 * CALLERS_PER_THREAD, move |caller, calls| {
            let (draws, call) = (Arc::clone(&draws), call.clone());
            async move {
                for number in 0..calls {
                    call(drawn(&draws, caller, number)).await;
                    lets_others_run(number).await;
                }
            }
        })
    }

    fn map<M: Map<User>>(&self, draws: &Draws) -> Side<'_> {
        let (map, texts) = (mapped::<M>(KEYS), keys(KEYS));
        self.side(draws, move |key| {
            let (map, texts) = (map.clone(), Arc::clone(&texts));
            async move { drop(black_box(map.get(&texts[key]))) }
        })
    }

    fn maps(&self, table: &mut Table, which: &str, draws: &Draws) {
        let (guard, texts) = (self.runtime.block_on(filled(KEYS)), keys(KEYS));
        let loader = self.side(draws, move |key| {
            let (guard, texts) = (guard.clone(), Arc::clone(&texts));
            async move { drop(black_box(hit(&guard, &texts[key]).await)) }
        });
        let sides = vec![loader, self.map::<Quick<User>>(draws), self.map::<Moka<User>>(draws)];
        self.add(table, &format!("{which}: a shared loader from memory / quick_cache (and moka)"), sides);
    }

    fn layer(&self, table: &mut Table, which: &str, draws: &Draws) {
        let bare =
            || Router::new().route("/report/{n}", get(async || response(headers(), body()).map(Body::new)));
        let (guard, uris) = (guard(), uris());
        let guarded = bare().layer(guard.clone());
        self.runtime.block_on(fill(&guard, guarded.clone()));
        let sides = [guarded, bare()].map(|router| {
            let uris = Arc::clone(&uris);
            let answer = move |key: usize| {
                let (mut router, request) = (router.clone(), request(&uris[key]));
                async move {
                    let Ok(answer) = router.call(request).await;
                    drop(black_box(answer.into_body().collect().await));
                }
            };
            self.side(draws, answer)
        });
        self.add(table, &format!("{which}: a router with the layer, from memory / without"), sides.into());
    }

    fn redis(&self, table: &mut Table) {
        let (server, draws) = (RedisServer::start(), zipf());
        for connections in CONNECTIONS {
            let policy = Policy::builder()
                .command_timeout(Duration::from_secs(1))
                .coordination_budget(Duration::from_secs(4))
                .lease(Duration::from_secs(4));
            let policy = policy.fresh_for(Duration::from_secs(3_600)).build().expect("valid");
            let builder = StampedeGuard::builder(server.client()).policy(policy).connections(connections);
            let (guard, texts) = (builder.build().expect("valid"), keys(KEYS));
            let all = self.runtime.block_on(async {
                guard.connect().await.expect("connects");
                for text in &*texts {
                    guard.insert(text.as_str(), &User::new(7)).await.expect("stored");
                }
                let mut all = Vec::new();
                for _ in 0..connections {
                    all.push(server.client().get_multiplexed_async_connection().await.expect("connects"));
                }
                set_all(&mut all[0].clone(), &texts).await;
                Arc::<[MultiplexedConnection]>::from(all)
            });
            let raw_texts = Arc::clone(&texts);
            let sides = vec![
                self.side(&draws, move |key| {
                    let (guard, texts) = (guard.clone(), Arc::clone(&texts));
                    async move {
                        let load = async || Ok::<_, Infallible>(User::new(7));
                        black_box(guard.get_or_load(&texts[key], load).await.expect("infallible"));
                    }
                }),
                self.side(&draws, move |key| {
                    let (mut connection, texts) = (all[key % all.len()].clone(), Arc::clone(&raw_texts));
                    async move {
                        black_box(raw::get(&mut connection, &texts[key]).await);
                    }
                }),
            ];
            self.add(
                table,
                &format!("`get_or_load` on Redis, {connections} connections / raw GETs on as many"),
                sides,
            );
        }
    }

    /// Measures the sides in turn. The first is the row's, the second its control.
    fn add(&self, table: &mut Table, what: &str, sides: Vec<Side<'_>>) {
        let mut costs = vec![(Costs::default(), 0_u64); sides.len()];
        let observed = sides.into_iter().zip(&mut costs).map(|(mut side, (costs, calls))| {
            Box::new(move |times: u32| {
                let before = Costs::now();
                let took = side(times);
                *costs += Costs::now() - before;
                *calls += u64::from(times);
                took
            }) as Side<'_>
        });
        let times: Times = in_turn(observed.collect());
        let ratio = times.throughput(0, 1);
        let sides: Vec<_> = costs
            .iter()
            .enumerate()
            .map(|(side, (costs, calls))| format!("{:.0} ns {}", times.of(side).median, costs.per(*calls)))
            .collect();
        let measured = ratio.median;
        let (what, detail) =
            (format!("{} threads, {what}", self.threads), format!("{ratio}; {}", sides.join(", ")));
        table.add(Row { what, unit: Unit::Ratio, must: Limit::None, aim: Limit::None, measured, detail });
    }
}

/// What the process did besides computing.
#[derive(Clone, Copy, Default)]
struct Costs {
    /// Time in the kernel, in ticks of 10 ms.
    system: f64,
    /// How often a thread went to sleep.
    sleeps: f64,
}

impl Costs {
    /// Of all threads that live now.
    fn now() -> Self {
        let stat = fs::read_to_string("/proc/self/stat").expect("the kernel's file");
        let after_name = stat.rsplit_once(')').expect("a name").1;
        let system =
            after_name.split_whitespace().nth(12).and_then(|ticks| ticks.parse().ok()).expect("a number");
        let tasks = fs::read_dir("/proc/self/task").expect("the kernel's folder").flatten();
        let sleeps = tasks.filter_map(|task| {
            let status = fs::read_to_string(task.path().join("status")).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
            line.trim().parse::<f64>().ok()
        });
        Self { system, sleeps: sleeps.sum() }
    }

    fn per(self, calls: u64) -> String {
        let calls = calls as f64;
        format!("({:.0} ns in the kernel, {:.3} sleeps)", self.system * 1e7 / calls, self.sleeps / calls)
    }
}

impl std::ops::Sub for Costs {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { system: self.system - other.system, sleeps: self.sleeps - other.sleeps }
    }
}

impl std::ops::AddAssign for Costs {
    fn add_assign(&mut self, other: Self) {
        self.system += other.system;
        self.sleeps += other.sleeps;
    }
}
