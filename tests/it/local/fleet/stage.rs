//! The parent's side: it starts the processes of a fleet, makes them read and change, and collects their reports.

use tokio::sync::MutexGuard;
use tokio::time::{Instant, sleep};

use super::changes::Change;
use super::oracle::{self, Loss, Verdict};
use super::process::{Config, Counts, Report};
use super::{ONE_FLEET, TERM};
use crate::support::PATIENCE;
use crate::support::processes::{Fleet, Member};
use crate::support::redis_server::RedisServer;

/// Some processes that share a store, and the server of the versions.
pub(super) struct Stage {
    processes: Vec<Process>,
    truth: RedisServer,
    _one_fleet: MutexGuard<'static, ()>,
}

struct Process {
    fleet: Fleet,
    keeps: bool,
    killed: bool,
}

/// What a process is to do.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) redis: String,
    pub(super) keeps: bool,
    pub(super) callers: usize,
    pub(super) strict: bool,
}

impl Stage {
    /// Starts one process for each part. Returns when all are connected.
    pub(super) async fn start(parts: impl IntoIterator<Item = Part>) -> Self {
        let one_fleet = ONE_FLEET.lock().await;
        let mut stage = Self { processes: Vec::new(), truth: RedisServer::start(), _one_fleet: one_fleet };
        for part in parts {
            stage.join(part);
        }
        for process in &stage.processes {
            process.fleet.wait_ready().await;
        }
        stage
    }

    /// Starts another process, and returns its number.
    pub(super) fn join(&mut self, part: Part) -> usize {
        let Part { redis, keeps, callers, strict } = part;
        let process = self.processes.len();
        let config = Config { redis, truth: self.truth.url(), process, keeps, callers, strict };
        let fleet = Fleet::spawn(1, "local.fleet", &config);
        self.processes.push(Process { fleet, keeps, killed: false });
        process
    }

    pub(super) fn member(&self, process: usize) -> &Member {
        self.processes[process].fleet.member(0)
    }

    /// The processes that keep copies and are alive.
    fn with_copies(&self) -> impl Iterator<Item = usize> + '_ {
        let keeps = |process: &Process| process.keeps && !process.killed;
        self.processes.iter().enumerate().filter(move |(_, process)| keeps(process)).map(|(number, _)| number)
    }

    /// Makes all callers of all processes read. Returns when each process is served from memory and the registry is mature.
    pub(super) async fn read(&self) {
        for process in &self.processes {
            process.fleet.member(0).send("read");
        }
        self.are_served_from_memory().await;
        sleep(3 * TERM).await;
    }

    /// Waits until each process with copies has had further hits from memory.
    pub(super) async fn are_served_from_memory(&self) {
        for process in self.with_copies() {
            self.is_served_from_memory(process).await;
        }
    }

    pub(super) async fn is_served_from_memory(&self, process: usize) {
        let (before, began) = (self.counts(process).await, Instant::now());
        while self.counts(process).await.local_hits <= before.local_hits + 20 {
            assert!(began.elapsed() < PATIENCE, "process {process}: {:?}", self.counts(process).await);
            sleep(TERM / 50).await;
        }
    }

    pub(super) async fn counts(&self, process: usize) -> Counts {
        self.member(process).send("counts");
        let counts = self.member(process).wait_event("counts").await;
        serde_json::from_value(counts).expect("counts")
    }

    /// Makes processes change keys: in each of them `tasks` tasks at once, each `most` times, with a pause after each change.
    pub(super) fn change(&self, processes: &[usize], tasks: usize, most: usize, pause_ms: u64) {
        for process in processes {
            self.member(*process).send(&format!("change {tasks} {most} {pause_ms}"));
        }
    }

    /// Ends the changes, but a task with a given number of changes makes all of them.
    pub(super) fn halt(&self, processes: &[usize]) {
        for process in processes {
            self.member(*process).send("halt");
        }
    }

    /// Waits until these processes have made their changes, and returns them.
    pub(super) async fn changed(&self, processes: &[usize]) -> Vec<Change> {
        let mut all = Vec::new();
        for process in processes {
            self.member(*process).send("changed");
        }
        for process in processes {
            let changed = self.member(*process).wait_event("changed").await;
            all.extend(serde_json::from_value::<Vec<Change>>(changed).expect("changes"));
        }
        all
    }

    /// Makes one process invalidate this key.
    pub(super) async fn invalidate(&self, process: usize, key: usize) -> Change {
        self.member(process).send(&format!("invalidate {key}"));
        let made = self.member(process).wait_event("invalidated").await;
        let made: Change = serde_json::from_value(made).expect("a change");
        assert_eq!(made.error, None);
        made
    }

    pub(super) fn kill(&mut self, process: usize) {
        self.processes[process].killed = true;
        self.member(process).kill();
    }

    /// Ends the fleet, and judges what its processes report.
    pub(super) async fn evaluate(self, scene: &'static str, changes: &[Change], losses: &[Loss]) -> Verdict {
        let mut reports = Vec::new();
        for process in self.processes.iter().filter(|process| !process.killed) {
            process.fleet.member(0).send("stop");
        }
        for process in self.processes.iter().filter(|process| !process.killed) {
            reports.push(process.fleet.member(0).result::<Report>().await);
        }
        oracle::evaluate(scene, changes, &reports, losses)
    }
}
