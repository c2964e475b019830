//! Clients that contend for one lock, all in this process or each in a separate process.

use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::acquirer::{Client, Inside, Kind, Tally, Turn};
use crate::book::Thread;
use crate::support::os::wall_ns;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const ROLES: &[Role] = &[("client", process)];

/// The most clients in a row of the table.
pub(crate) const MOST: usize = 10;

/// The name of the lock for one kind of clients. Different kinds use different keys, so they would not exclude each other.
fn name(kind: Kind) -> String {
    format!("{kind:?}").to_lowercase()
}

/// [`MOST`] clients of each kind, on one server.
pub(crate) struct Clients {
    runs_in: RunsIn,
    server: u32,
}

enum RunsIn {
    /// All clients are tasks on the bench's own thread.
    Tasks([Vec<Client>; Kind::ALL.len()]),
    /// Each process has one thread, and a client of each kind.
    Processes(Fleet),
}

/// What some clients have done together in one stretch of time.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) time: Duration,
    pub(crate) tries: u64,
    pub(crate) acquires: u64,
    /// The fewest and the most acquires of any one client.
    pub(crate) shares: (u64, u64),
    /// The 99th percentile of the waits of all clients together, in milliseconds.
    pub(crate) p99_wait: f64,
    pub(crate) longest_wait: f64,
    /// CPU time per acquire in microseconds, of the server's thread and of all clients' threads together. Zero where the system does not
    /// report it. Other programs that run at the same time do not change it.
    pub(crate) server_cpu: f64,
    pub(crate) client_cpu: f64,
}

impl Clients {
    pub(crate) async fn tasks(server: &RedisServer) -> Self {
        let mut of_kind: [Vec<_>; Kind::ALL.len()] = Default::default();
        for (clients, kind) in of_kind.iter_mut().zip(Kind::ALL) {
            for _ in 0..MOST {
                clients.push(Client::connect(kind, &server.url(), &name(kind), Thread::Shared).await);
            }
        }
        Self { runs_in: RunsIn::Tasks(of_kind), server: server.pid() }
    }

    pub(crate) async fn processes(server: &RedisServer) -> Self {
        let fleet = Fleet::spawn(MOST, "client", &server.url());
        fleet.wait_ready().await;
        Self { runs_in: RunsIn::Processes(fleet), server: server.pid() }
    }

    /// Lets `number` clients of one kind contend for `time`.
    pub(crate) async fn contend(
        &mut self,
        kind: Kind,
        number: usize,
        time: Duration,
        hold: Duration,
    ) -> Cell {
        let before = cpu(&self.server.to_string());
        let tallies = match &mut self.runs_in {
            RunsIn::Tasks(of_kind) => tasks(&mut of_kind[kind as usize], number, time, hold).await,
            RunsIn::Processes(fleet) => {
                let order = Order { kind, from_ns: wall_ns() + 30_000_000, time, hold };
                let members = &fleet.members()[..number];
                for member in members {
                    member.send(&serde_json::to_string(&order).expect("JSON"));
                }
                let mut tallies = Vec::new();
                for member in members {
                    tallies.push(member.result().await);
                }
                tallies
            }
        };
        Cell::of(&tallies, time, cpu(&self.server.to_string()) - before)
    }
}

async fn tasks(clients: &mut Vec<Client>, number: usize, time: Duration, hold: Duration) -> Vec<Tally> {
    let turn = Turn { from: Instant::now() + Duration::from_millis(5), time, hold };
    let (inside, before) = (Inside::default(), cpu("thread-self"));
    let contending: Vec<_> = clients
        .drain(..number)
        .map(|mut client| {
            let inside = inside.clone();
            tokio::spawn(async move {
                let tally = client.contend(turn, &inside).await;
                (client, tally)
            })
        })
        .collect();
    let mut tallies = Vec::new();
    for client in contending {
        let (client, tally) = client.await.expect("a client");
        clients.push(client);
        tallies.push(tally);
    }
    // All clients are tasks of one thread, whose CPU time is noted for the first of them.
    tallies[0].cpu_ns = cpu("thread-self") - before;
    tallies
}

/// The command to a client process.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    kind: Kind,
    /// The start, by `wall_ns`, because all processes share that clock.
    from_ns: u64,
    time: Duration,
    hold: Duration,
}

/// A process that has a client of each kind.
fn process(mut child: Child) -> BoxFuture<'static, ()> {
    let serve = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let redis: String = child.config();
            let mut clients = Vec::new();
            for kind in Kind::ALL {
                clients.push(Client::connect(kind, &redis, &name(kind), Thread::Own).await);
            }
            child.ready();
            loop {
                let order: Order = serde_json::from_str(&child.recv_line().await).expect("an order");
                let Order { kind, from_ns, time, hold } = order;
                let from = Instant::now() + Duration::from_nanos(from_ns.saturating_sub(wall_ns()));
                let (turn, before) = (Turn { from, time, hold }, cpu("thread-self"));
                let mut tally = clients[kind as usize].contend(turn, &Inside::default()).await;
                tally.cpu_ns = cpu("thread-self") - before;
                child.result(&tally);
            }
        })
    };
    // One thread, as the tasks have. A second thread would save some clients thread switches, and cost others more.
    Box::pin(async { tokio::task::spawn_blocking(serve).await.expect("the client's thread") })
}

impl Cell {
    fn of(tallies: &[Tally], time: Duration, server_ns: u64) -> Self {
        let shares = || tallies.iter().map(|tally| tally.acquires);
        let mut waits: Vec<_> = tallies.iter().flat_map(|tally| tally.waits.iter().copied()).collect();
        waits.sort_unstable();
        let wait = |part: usize| waits.get(waits.len() * part / 100).or_else(|| waits.last());
        let wait = |part| f64::from(*wait(part).expect("there was an acquire")) / 1e3;
        let acquires: u64 = shares().sum();
        let cpu = |ns: u64| ns as f64 / 1e3 / acquires as f64;
        Self {
            time,
            tries: tallies.iter().map(|tally| tally.tries).sum(),
            acquires,
            shares: (shares().min().unwrap_or(0), shares().max().unwrap_or(0)),
            p99_wait: wait(99),
            longest_wait: wait(100),
            server_cpu: cpu(server_ns),
            client_cpu: cpu(tallies.iter().map(|tally| tally.cpu_ns).sum()),
        }
    }

    /// Acquires per second.
    pub(crate) fn rate(&self) -> f64 {
        self.acquires as f64 / self.time.as_secs_f64()
    }

    pub(crate) fn tries_per_acquire(&self) -> f64 {
        self.tries as f64 / self.acquires as f64
    }

    /// How evenly the clients got the lock: 1 if all of them had it the same number of times.
    pub(crate) fn fairness(&self) -> f64 {
        self.shares.0 as f64 / self.shares.1 as f64
    }
}

/// CPU time in nanoseconds of a thread, or of the first thread of a process.
fn cpu(of: &str) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{of}/schedstat")).unwrap_or_default();
    stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}
