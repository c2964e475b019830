//! The processes of one measurement, and the orders to them.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::origin::{Kind, Origin};
use crate::participants::Participant;
use crate::support::PATIENCE;
use crate::support::os::Guarded;
use crate::support::redis_server::RedisServer;
use crate::wire::{Command, Order, Ready, Reply, Setup};

/// Calls that take longer than this count as not answered.
pub(crate) const TIMEOUT_MS: u64 = 20_000;

/// One process.
pub(crate) struct Replica {
    process: Guarded,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// Replies that arrived while another was waited for.
    early: HashMap<u64, Reply>,
    next: u64,
}

/// The settings of a fleet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) processes: usize,
    pub(crate) latency_ms: u64,
    pub(crate) kind: Kind,
    pub(crate) ttl_ms: u64,
    pub(crate) stale_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { processes: 1, latency_ms: 200, kind: Kind::Value, ttl_ms: 60_000, stale_ms: 0 }
    }
}

/// A private server, an origin and some processes.
pub(crate) struct Fleet {
    pub(crate) redis: RedisServer,
    pub(crate) origin: Origin,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) ready: Ready,
}

impl Fleet {
    /// Starts everything. Each process has loaded one key of its own, so that connections and scripts are there.
    pub(crate) fn start(participant: &Participant, options: Options) -> Result<Self, String> {
        let redis = RedisServer::start();
        // The warm-up is short and works, whatever the origin does later.
        let origin = Origin::start(Duration::from_millis(1), options.kind);
        let setup = Setup {
            subject: participant.name.to_owned(),
            redis: redis.url(),
            origin: origin.port(),
            ttl_ms: options.ttl_ms,
            stale_ms: options.stale_ms,
            uncacheable: options.kind == Kind::Private,
        };
        let mut replicas = Vec::new();
        for _ in 0..options.processes {
            replicas.push(Replica::spawn(participant, &setup)?);
        }
        let mut ready = None;
        for replica in &mut replicas {
            ready = Some(replica.ready(participant.name)?);
        }
        let mut fleet = Self { redis, origin, replicas, ready: ready.ok_or("no process")? };
        for number in 0..fleet.replicas.len() {
            fleet.replicas[number].ask(burst(&[format!("warm-{number}")], 1, now_ms() + 5.0))?;
        }
        fleet.origin.set_latency(Duration::from_millis(options.latency_ms));
        fleet.origin.reset();
        Ok(fleet)
    }

    pub(crate) fn lacks(&self) -> &BTreeMap<String, String> {
        &self.ready.lacks
    }

    /// Sends one command to all processes and returns their replies.
    pub(crate) fn ask_all(&mut self, command: &Command) -> Result<Vec<Reply>, String> {
        let mut ids = Vec::new();
        for replica in &mut self.replicas {
            ids.push(replica.send(command.clone())?);
        }
        let replies = self.replicas.iter_mut().zip(ids).map(|(replica, id)| replica.reply(id));
        replies.collect()
    }
}

impl Replica {
    pub(crate) fn spawn(participant: &Participant, setup: &Setup) -> Result<Self, String> {
        let mut command = participant.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // What libraries print about a dead server would hide the table.
        command.stderr(if std::env::var_os("VERBOSE").is_some() { Stdio::inherit() } else { Stdio::null() });
        let mut process = Guarded::spawn(&mut command)
            .map_err(|error| format!("{:?} does not start: {error}", participant.command().get_program()))?;
        let stdin = process.child().stdin.take().ok_or("no stdin")?;
        let stdout = process.child().stdout.take().ok_or("no stdout")?;
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut replica = Self { process, stdin, lines, early: HashMap::new(), next: 0 };
        replica.write(&serde_json::to_string(setup).map_err(|error| error.to_string())?)?;
        Ok(replica)
    }

    pub(crate) fn ready(&mut self, name: &str) -> Result<Ready, String> {
        let line = self.lines.recv_timeout(PATIENCE);
        let line =
            line.map_err(|_| format!("{name}: the process ended before it was ready (VERBOSE=1 shows why)"))?;
        serde_json::from_str(&line).map_err(|error| format!("{name}: {error}: {line}"))
    }

    pub(crate) fn send(&mut self, command: Command) -> Result<u64, String> {
        self.next += 1;
        let order = Order { id: self.next, command };
        self.write(&serde_json::to_string(&order).map_err(|error| error.to_string())?)?;
        Ok(self.next)
    }

    pub(crate) fn reply(&mut self, id: u64) -> Result<Reply, String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(reply) = self.early.remove(&id) {
                return Ok(reply);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let line =
                self.lines.recv_timeout(left).map_err(|_| "a process ended, or was silent for too long")?;
            let reply: Reply = serde_json::from_str(&line).map_err(|error| format!("{error}: {line}"))?;
            self.early.insert(reply.id, reply);
        }
    }

    pub(crate) fn ask(&mut self, command: Command) -> Result<Reply, String> {
        let id = self.send(command)?;
        self.reply(id)
    }

    pub(crate) fn process(&mut self) -> &mut Guarded {
        &mut self.process
    }

    /// Resident memory in MiB.
    pub(crate) fn memory(&self) -> f64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        kib.unwrap_or_default() / 1024.0
    }

    fn write(&mut self, line: &str) -> Result<(), String> {
        let written = self.stdin.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.stdin.flush());
        written.map_err(|error| format!("a process has ended: {error}"))
    }
}

/// Milliseconds of the wall clock.
pub(crate) fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970").as_secs_f64() * 1e3
}

pub(crate) fn burst(keys: &[String], callers: usize, at_ms: f64) -> Command {
    Command::Burst {
        keys: keys.to_vec(),
        callers,
        at_ms,
        timeout_ms: TIMEOUT_MS,
        cancel_first_after_ms: None,
    }
}
