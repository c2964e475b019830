//! Redis away: what requests lose, before and after the breaker opens, and how soon it is used when it is back.
//!
//! One process with the default policy, whose loader answers at once, so all the time that a request takes is the
//! guard's. Of each kind of outage there are five, one after the other: 64 requests for 64 keys arrive the moment
//! after it began; 60 more come one by one for as long as it lasts. Then all is well again, and values are loaded
//! until one is found in the store. (Where only old connections are dead all is well for new ones from the start, and
//! that is how long it takes from there.)

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
/// The default policy's.
const BUDGET: Duration = Duration::from_millis(100);
const ALLOWANCE: Duration = Duration::from_millis(50);
/// The pauses between attempts to connect are as long as they get by then.
const LASTS: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outage {
    /// Connections are refused.
    Dead,
    /// SIGSTOP: the kernel accepts, nobody answers.
    Hung,
    /// Nothing moves, on old connections or new ones.
    BlackHole,
    /// Connections from before are dead without a sign, new ones work.
    OldFlows,
    /// All connections are reset, nothing moves, or all is well, and another each tenth of a second.
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

    /// Whether there is a time at which it is known to be away.
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
            // What is dead stays dead.
            Outage::OldFlows => {}
            Outage::BlackHole => self.proxy.set(Mode::Pass),
            Outage::Flapping => {
                if let Some(flaps) = self.flaps.take() {
                    flaps.abort();
                    // Until it has stopped it may set another one.
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
    // The proxy accepts for a server that does not.
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
    let (asked, answered) = (before.len() + after.len(), before.iter().chain(&after).flatten().count());
    table.add(Row {
        what: format!("Redis {name}: requests answered, of {asked}"),
        unit: Unit::Count,
        must: Limit::Exactly(asked as f64),
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

/// How long it took; `None` if it was not answered.
async fn request(guard: &StampedeGuard, key: String) -> Option<Duration> {
    let asked = Instant::now();
    let answer = guard.get_or_load(key, || async { Ok::<_, String>(7) }).await;
    answer.ok().map(|_| asked.elapsed())
}

/// How long it takes until a value that was loaded is found in the store.
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
