//! Injects faults, one at a time: into processes, the server, the server's data and the network.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use tokio::time::{Instant, sleep};

use super::connections::Opened;
use super::oracle::{Event, Incarnation};
use super::truth::Truth;
use super::worker::{Config, Counts};
use super::*;
use crate::support::processes::Fleet;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::RedisServer;
use crate::support::scratch::Scratch;
use crate::support::tokens::Tokens;

pub(super) struct Nemesis {
    server: RedisServer,
    proxies: Vec<Proxy>,
    tokens: Option<Tokens>,
    truth: Truth,
    files: Scratch,
    /// For each slot its running process, and that process's number among all processes so far.
    slots: Vec<(Fleet, usize)>,
    incarnations: Vec<Incarnation>,
    events: Vec<Event>,
    /// The time without faults: from when all first processes had started until the first fault could strike.
    calm: (u64, u64),
    witness: Witness,
    random: fastrand::Rng,
}

impl Nemesis {
    pub(super) async fn start(seed: u64, tokens: Option<Duration>) -> Self {
        let server = RedisServer::start();
        let mut proxies = Vec::new();
        for _ in 0..PROCESSES {
            proxies.push(Proxy::start(server.port()).await);
        }
        let tokens = tokens.map(|life| Tokens::start(&[server.port()], life, &[]));
        let witness = Witness::start(server.port());
        let mut nemesis = Self {
            server,
            proxies,
            tokens,
            truth: Truth::start(KEYS).await,
            files: Scratch::new(),
            slots: Vec::new(),
            incarnations: Vec::new(),
            events: Vec::new(),
            calm: (0, 0),
            witness,
            random: fastrand::Rng::with_seed(seed),
        };
        for slot in 0..PROCESSES {
            let process = nemesis.spawn(slot);
            nemesis.slots.push(process);
        }
        for (fleet, _) in &nemesis.slots {
            fleet.wait_ready().await;
        }
        nemesis
    }

    fn spawn(&mut self, slot: usize) -> (Fleet, usize) {
        let process = self.incarnations.len();
        let log = self.files.text(&format!("log-{process}"));
        let redis = format!("redis://minimal:pw@127.0.0.1:{}/", self.proxies[slot].port());
        let (origin, keeps) = (self.truth.addr.clone(), keeps(slot));
        let issuer = self.tokens.as_ref().map(Tokens::addr);
        let config = Config { redis, origin, log: log.clone(), process, keeps, issuer };
        self.incarnations.push(Incarnation { log, slot, killed: false });
        (Fleet::spawn(1, "soak", &config), process)
    }

    /// Lets the processes run for this long without a new fault.
    pub(super) async fn rest(&mut self, lasts: Duration) {
        let from = wall_ns();
        sleep(lasts).await;
        self.calm = (from, wall_ns());
    }

    pub(super) async fn rage(&mut self, plan: Plan) {
        let end = Instant::now() + plan.lasts;
        while Instant::now() < end {
            let pause = self.within(plan.pause);
            sleep(pause.min(end - Instant::now())).await;
            self.strike(plan).await;
        }
    }

    fn within(&mut self, (from, to): (f64, f64)) -> Duration {
        Duration::from_secs_f64(from + (to - from) * self.random.f64())
    }

    async fn strike(&mut self, plan: Plan) {
        let slot = self.random.usize(..PROCESSES);
        let process = self.slots[slot].1;
        let ill = self.within(plan.ill);
        let from = wall_ns();
        let (what, whom, loses_data) = match self.random.u8(..10) {
            0 => {
                self.slots[slot].0.member(0).kill();
                self.incarnations[process].killed = true;
                self.slots[slot] = self.spawn(slot);
                self.slots[slot].0.wait_ready().await;
                ("SIGKILL of a process", Some(process), false)
            }
            1 | 2 => {
                self.slots[slot].0.member(0).pause();
                sleep(ill).await;
                self.slots[slot].0.member(0).resume();
                ("SIGSTOP of a process", Some(process), false)
            }
            3 => {
                self.server.restart();
                ("restart of Redis", None, true)
            }
            4 => {
                self.server.flush_all();
                ("FLUSHALL", None, true)
            }
            5 => {
                let set = |name: &str, value: &str| self.server.run::<()>(&["CONFIG", "SET", name, value]);
                set("maxmemory-policy", "allkeys-random");
                set("maxmemory", "1200kb");
                sleep(ill.min(Duration::from_secs(5))).await;
                set("maxmemory", "0");
                ("eviction", None, true)
            }
            6 => {
                self.server.pause();
                sleep(ill.min(Duration::from_secs(5))).await;
                self.server.resume();
                ("SIGSTOP of Redis", None, false)
            }
            7 => {
                self.server.kill_clients();
                ("CLIENT KILL", None, false)
            }
            how => {
                let all = how == 9;
                let mode = [
                    Mode::BlackHole,
                    Mode::BlackHoleOld,
                    Mode::BlackHoleSubscriptions,
                    Mode::NoReplies,
                    Mode::Reset,
                    Mode::Delay(Duration::from_millis(20)),
                    Mode::Delay(Duration::from_millis(200)),
                    Mode::Trickle(8),
                ][self.random.usize(..8)];
                let set = |mode| {
                    let ill = self.proxies.iter().enumerate().filter(|(at, _)| all || *at == slot);
                    ill.for_each(|(_, proxy)| proxy.set(mode));
                };
                set(mode);
                sleep(ill).await;
                set(Mode::Pass);
                ("a network that is ill", (!all).then_some(process), false)
            }
        };
        self.events.push(Event { what, whom, from, until: wall_ns(), loses_data });
    }

    /// Stops the requests after the last fault, checks that everything works, and judges the logs.
    pub(super) async fn heal_and_evaluate(mut self) -> Verdict {
        sleep(Duration::from_secs(2)).await;
        let mut counts = Vec::new();
        for (fleet, _) in &self.slots {
            fleet.member(0).send("stop");
        }
        for (fleet, _) in &self.slots {
            let event = fleet.member(0).wait_event("stopped").await;
            counts.push(serde_json::from_value::<Counts>(event).expect("counts"));
        }
        if self.tokens.is_some() {
            let sum = |of: fn(&Counts) -> u64| counts.iter().map(of).sum::<u64>();
            let (outages, failures) = (sum(|of| of.outages), sum(|of| of.credential_failures));
            let faults = self.events.len();
            println!(
                "of the last {PROCESSES} processes {failures} calls of the provider failed, {outages} outages in {faults} faults"
            );
        }
        let mut healed = Vec::new();
        for (fleet, _) in &self.slots {
            fleet.member(0).send("heal");
            let event = fleet.member(0).wait_event("healed").await;
            healed.push(serde_json::from_value::<(bool, usize)>(event).expect("what is right"));
        }
        // A lease that was taken by the last load has ended by then.
        sleep(LEASE + Duration::from_millis(200)).await;
        let mut left = self.server.keys_without_ttl();
        left.extend(self.server.keys().into_iter().filter(|key| key.starts_with("sg1:l:")));
        let (inside, outside) = self.witness.end();
        let opened: Vec<_> = self.proxies.iter().map(Proxy::accepted_at).collect();
        let tokens = self.tokens.as_ref().map(Tokens::issued);
        oracle::evaluate(&oracle::Evidence {
            incarnations: &self.incarnations,
            events: &self.events,
            loads: &self.truth.loads(),
            counts: &counts,
            healed: &healed,
            left: &left,
            writes: (inside, outside),
            opened: &Opened { at: opened, calm: self.calm, tokens },
        })
    }
}

/// Counts the writes of entries by scripts and by other commands, also after restarts of the server.
struct Witness {
    over: Arc<AtomicBool>,
    inside: Arc<AtomicUsize>,
    outside: Arc<AtomicUsize>,
}

impl Witness {
    fn start(port: u16) -> Self {
        let witness = Self { over: Arc::default(), inside: Arc::default(), outside: Arc::default() };
        let (over, inside, outside) = (witness.over.clone(), witness.inside.clone(), witness.outside.clone());
        thread::spawn(move || {
            while !over.load(Ordering::SeqCst) {
                let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
                    thread::sleep(Duration::from_millis(20));
                    continue;
                };
                if stream.write_all(b"MONITOR\r\n").is_err() {
                    continue;
                }
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let writes = line.to_ascii_uppercase().contains("\"SET\" \"SG1:E:");
                    let counter = if line.contains(" lua] ") { &inside } else { &outside };
                    counter.fetch_add(usize::from(writes), Ordering::SeqCst);
                }
            }
        });
        witness
    }

    fn end(&mut self) -> (usize, usize) {
        self.over.store(true, Ordering::SeqCst);
        (self.inside.load(Ordering::SeqCst), self.outside.load(Ordering::SeqCst))
    }
}
