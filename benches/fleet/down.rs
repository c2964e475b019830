//! Redis outages: how long requests are delayed before and after the breaker opens, and how long it takes until Redis is used again.
//!
//! One process with the default policy. Its loader answers at once, so the guard spends all the time that a request
//! takes. Each kind of outage happens five times: 64 requests for 64 keys arrive right after it begins, and 60 more
//! one by one while it lasts. Then Redis is reachable again, and values are loaded until one is found in the store.
//! (If only old connections are dead, new ones work from the start, and the time is measured from there.)

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use stampede_guard::StampedeGuard;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit, millis};

const ROUNDS: usize = 5;
const AT_ONCE: usize = 64;
const AFTERWARDS: usize = 60;
/// The budget of the default policy.
const BUDGET: Duration = Duration::from_millis(100);
const ALLOWANCE: Duration = Duration::from_millis(50);
/// How long an outage lasts: until the pauses between attempts to connect have reached their full length.
const LASTS: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outage {
    /// Connections are refused.
    Dead,
    /// SIGSTOP: the kernel accepts connections, but the server does not answer.
    Hung,
    /// No byte passes, neither on old connections nor on new ones.
    BlackHole,
    /// Old connections are dead without a RST or FIN. New connections work.
    OldFlows,
    /// In each tenth of a second the network does something else: it resets connections, passes no byte, or passes all.
    Flapping,
}

impl Outage {
    fn name(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::Hung => "hung",
            Self::BlackHole => "black-holed",
            Self::OldFlows => "black-holed on old connections",
            Self::Flapping => "flapping",
        }
    }

    /// Whether the outage lasts so long that the guard knows of it, and opens the breaker.
    fn opens_the_breaker(self) -> bool {
        matches!(self, Self::Dead | Self::Hung | Self::BlackHole)
    }
}

struct Line {
    server: RedisServer,
    proxy: Arc<Proxy>,
    flaps: Option<JoinHandle<()>>,
}

impl Line {
    fn begin(&mut self, outage: Outage) {
        match outage {
            Outage::Dead => self.server.kill(),
            Outage::Hung => self.server.pause(),
            Outage::BlackHole => self.proxy.set(Mode::BlackHole),
            Outage::OldFlows => self.proxy.set(Mode::BlackHoleOld),
            Outage::Flapping => {
                let proxy = Arc::clone(&self.proxy);
                self.proxy.set(Mode::Reset);
                self.flaps = Some(tokio::spawn(async move {
                    for mode in [Mode::BlackHole, Mode::Pass, Mode::Reset].into_iter().cycle() {
                        sleep(Duration::from_millis(100)).await;
                        proxy.set(mode);
                    }
                }));
            }
        }
    }

    async fn end(&mut self, outage: Outage) {
        match outage {
            Outage::Dead => self.server.start_again(),
            Outage::Hung => self.server.resume(),
            // The old connections stay dead, so nothing has to be ended.
            Outage::OldFlows => {}
            Outage::BlackHole => self.proxy.set(Mode::Pass),
            Outage::Flapping => {
                if let Some(flaps) = self.flaps.take() {
                    flaps.abort();
                    // The task may still set a mode until it has stopped.
                    let _ = flaps.await;
                }
                self.proxy.set(Mode::Pass);
            }
        }
    }
}

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for outage in [Outage::Dead, Outage::Hung, Outage::BlackHole, Outage::OldFlows, Outage::Flapping] {
        runtime.block_on(outages(table, outage));
    }
}

async fn outages(table: &mut Table, outage: Outage) {
    let server = RedisServer::start();
    let proxy = Arc::new(Proxy::start(server.port()).await);
    // These outages need a direct connection: a proxy would accept connections for a dead server.
    let url = if matches!(outage, Outage::Dead | Outage::Hung) { server.url() } else { proxy.url() };
    let guard = StampedeGuard::new(redis::Client::open(url).expect("an address"));
    guard.connect().await.expect("connects");
    let mut line = Line { server, proxy, flaps: None };
    let (mut before, mut after, mut usable) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        stores(&guard, &format!("well-{round}")).await;
        line.begin(outage);
        let began = Instant::now();
        before.extend(join_all((0..AT_ONCE).map(|n| request(&guard, format!("before-{round}-{n}")))).await);
        let again = format!("again-{round}");
        if outage == Outage::OldFlows {
            stores(&guard, &again).await;
            usable.push(millis(began.elapsed()));
        }
        for n in 0..AFTERWARDS {
            let due = began + LASTS.mul_f64((n + 1) as f64 / AFTERWARDS as f64);
            sleep(due.saturating_duration_since(Instant::now())).await;
            after.push(request(&guard, format!("after-{round}-{n}")).await);
        }
        line.end(outage).await;
        if outage != Outage::OldFlows {
            usable.push(millis(stores(&guard, &again).await));
        }
    }

    let name = outage.name();
    let (sent, answered) = (before.len() + after.len(), before.iter().chain(&after).flatten().count());
    table.add(Row {
        what: format!("Redis {name}: requests answered, of {sent}"),
        unit: Unit::Count,
        must: Limit::Exactly(sent as f64),
        aim: Limit::None,
        measured: answered as f64,
        detail: String::new(),
    });
    let mut row = |what: String, must: f64, measured: f64, detail: String| {
        let (what, must) = (format!("Redis {name}: {what}"), Limit::AtMost(must));
        table.add(Row { what, unit: Unit::Millis, must, aim: Limit::None, measured, detail });
    };
    let spread = |added: Vec<Option<Duration>>| {
        Spread::of(&added.into_iter().flatten().map(millis).collect::<Vec<_>>())
    };
    let (before, after, usable) = (spread(before), spread(after), Spread::of(&usable));
    let within = millis(BUDGET + ALLOWANCE);
    let what = format!("added to a request as it begins, the worst of {}", ROUNDS * AT_ONCE);
    row(what, within, before.max, format!("median {:.2}", before.median));
    if outage == Outage::Flapping {
        let what = format!("added to a request while it lasts, the worst of {}", ROUNDS * AFTERWARDS);
        row(what, within, after.max, format!("median {:.2}", after.median));
    }
    if outage.opens_the_breaker() {
        let what = format!("added after the breaker opened, median of {}", ROUNDS * AFTERWARDS);
        row(what, 1.0, after.median, format!("worst {:.2}", after.max));
    }
    let what = format!("values are stored again so long after it, the worst of {ROUNDS}");
    row(what, 1_000.0, usable.max, format!("median {:.0}", usable.median));
}

/// How long a request took; `None` if it failed.
async fn request(guard: &StampedeGuard, key: String) -> Option<Duration> {
    let began = Instant::now();
    let answer = guard.get_or_load(key, || async { Ok::<_, String>(7) }).await;
    answer.ok().map(|_| began.elapsed())
}

/// How long it took until a value that was loaded was also stored.
async fn stores(guard: &StampedeGuard, name: &str) -> Duration {
    let began = Instant::now();
    for attempt in 0.. {
        let key = format!("{name}-{attempt}");
        request(guard, key.clone()).await;
        if guard.get::<i32>(key).await.is_ok_and(|found| found.is_some()) {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "never again");
        sleep(Duration::from_millis(5)).await;
    }
    began.elapsed()
}
