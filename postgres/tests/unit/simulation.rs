//! The reader on a simulated database and a simulated store, by seed: transactions that overlap, roll back, lose savepoints and become
//! visible after they are in the log; readers that die at any point; messages and commands that are late or lost.
//!
//! The value of a key is the LSN of the last transaction that has changed it. What is checked:
//!
//! - *Once a position is reported as passed, or confirmed to the server, no process serves a key older than the commits before it.*
//! - *When everything has settled, each process serves each key as it is committed.*
//!
//! A [`Plant`] breaks one rule of the protocol, and some seed must notice.
#![allow(clippy::unwrap_used)] // In a test the panic is the report.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use fastrand::Rng;
use stampede_guard::testing::{ChaosStore, Fault, Replica};
use stampede_guard::{Policy, StampedeGuard};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::*;

const KEYS: u64 = 4;
const PROCESSES: usize = 3;
/// Longer than any pause of a reader and any lease.
const SETTLED: Duration = Duration::from_secs(60);

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    None,
    /// A position is confirmed when it is received.
    ConfirmedEarly,
    /// Invalidated although no load sees the transaction yet.
    VisibilityIgnored,
    /// A load reads in a snapshot that is older than the load.
    OlderSnapshot,
    /// A second reader begins where the first has received, not where it has confirmed, and both read.
    TwoReaders,
    /// A slot is made without the message that invalidates everything.
    SlotWithoutMessage,
}

#[derive(Clone)]
struct Database {
    state: Arc<Mutex<DatabaseState>>,
    /// The end of the log.
    written: watch::Sender<u64>,
    /// How many transactions have become visible.
    visible: watch::Sender<u64>,
    plant: Plant,
}

#[derive(Default)]
struct DatabaseState {
    lsn: u64,
    commits: Vec<Commit>,
    slot: Option<Slot>,
    /// The number of the connection that reads the slot.
    reader: u64,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    made: u64,
    confirmed: u64,
    received: u64,
}

#[derive(Clone)]
struct Commit {
    xid: u32,
    end: u64,
    /// `None`: everything.
    keys: Option<Vec<u64>>,
    is_visible: bool,
}

impl Database {
    fn new(plant: Plant) -> Self {
        Self { state: Arc::default(), written: watch::Sender::new(0), visible: watch::Sender::new(0), plant }
    }

    fn state(&self) -> MutexGuard<'_, DatabaseState> {
        self.state.lock().unwrap()
    }

    /// Writes a commit into the log. It becomes visible later.
    fn commit(&self, keys: Option<Vec<u64>>) -> u64 {
        let mut state = self.state();
        state.lsn += 10;
        let (end, xid) = (state.lsn, u32::try_from(state.commits.len()).unwrap());
        state.commits.push(Commit { xid, end, keys, is_visible: false });
        drop(state);
        self.written.send_replace(end);
        end
    }

    fn show(&self, end: u64) {
        let mut state = self.state();
        let commit = state.commits.iter_mut().find(|commit| commit.end == end).unwrap();
        commit.is_visible = true;
        drop(state);
        self.visible.send_modify(|count| *count += 1);
    }

    /// The values of all keys, as a statement reads them that begins now.
    fn snapshot(&self) -> BTreeMap<u64, u64> {
        self.committed(|commit| commit.is_visible)
    }

    /// The values of all keys, by some of the commits.
    fn committed(&self, counts: impl Fn(&Commit) -> bool) -> BTreeMap<u64, u64> {
        let mut values: BTreeMap<_, _> = (0..KEYS).map(|key| (key, 0)).collect();
        for commit in self.state().commits.iter().filter(|commit| counts(commit)) {
            for key in commit.keys.iter().flatten() {
                let value = values.entry(*key).or_default();
                *value = commit.end.max(*value);
            }
        }
        values
    }

    /// Waits until some of the commits are visible.
    async fn until_visible(&self, counts: impl Fn(&Commit) -> bool) {
        let mut visible = self.visible.subscribe();
        while self.state().commits.iter().any(|commit| counts(commit) && !commit.is_visible) {
            visible.changed().await.unwrap();
        }
    }

    fn lose_slot(&self) {
        let mut state = self.state();
        (state.slot, state.reader) = (None, state.reader + 1);
        drop(state);
        self.written.send_modify(|_| ());
    }
}

/// A process's way to the database.
struct SimulatedLog {
    database: Database,
    rng: Mutex<Rng>,
}

struct SimulatedSession {
    database: Database,
    number: u64,
    began: u64,
    /// What was received.
    at: u64,
    /// What was confirmed; the server hears of it a moment later, or never.
    confirmed: u64,
    rng: Rng,
}

impl Log for SimulatedLog {
    type Session = SimulatedSession;

    async fn open(&self) -> Result<SimulatedSession, LogError> {
        let mut rng = self.rng.lock().unwrap().fork();
        sleep(Duration::from_millis(rng.u64(0..20))).await;
        if rng.f64() < 0.1 {
            return Err(LogError::new(ErrorKind::Silent));
        }
        let (is_new, start) = {
            let mut state = self.database.state();
            state.reader += 1;
            (state.slot.is_none(), state.lsn)
        };
        if is_new {
            // The real one has another name until its first message is in the log, so a reader that dies in between leaves none.
            self.database.until_visible(|commit| commit.end <= start).await;
            if self.database.plant != Plant::SlotWithoutMessage {
                let message = self.database.commit(None);
                self.database.show(message);
            }
            self.database.state().slot.get_or_insert(Slot { made: start, confirmed: start, received: start });
        }
        let state = self.database.state();
        let slot = state.slot.unwrap_or_default();
        let at = if self.database.plant == Plant::TwoReaders { slot.received } else { slot.confirmed };
        let (number, began) = (state.reader, state.lsn);
        drop(state);
        Ok(SimulatedSession { database: self.database.clone(), number, began, at, confirmed: at, rng })
    }
}

impl SimulatedSession {
    fn is_over(&self) -> bool {
        self.database.plant != Plant::TwoReaders && self.database.state().reader != self.number
    }
}

impl Session for SimulatedSession {
    fn position(&self, end: u64) -> Option<LogPosition> {
        (end >= self.began).then(|| LogPosition::new(ServerId::default(), end))
    }

    fn server(&self) -> ServerId {
        ServerId::default()
    }

    fn kept(&mut self) -> Option<KeptLog> {
        None
    }

    async fn next(&mut self) -> Result<LogStep, LogError> {
        let mut written = self.database.written.subscribe();
        loop {
            if self.is_over() {
                return Err(LogError::new(ErrorKind::Ended));
            }
            let next = self.database.state().commits.iter().find(|commit| commit.end > self.at).cloned();
            if let Some(commit) = next {
                self.at = commit.end;
                if let Some(slot) = &mut self.database.state().slot {
                    slot.received = slot.received.max(commit.end);
                }
                if self.database.plant == Plant::ConfirmedEarly {
                    self.confirm(commit.end);
                }
                let mut names = Names::default();
                match &commit.keys {
                    Some(keys) => names.keys.extend(keys.iter().map(|key| ("k", key).into())),
                    None => names = Names::all(),
                }
                return Ok(LogStep { names, xid: Some(commit.xid), end: Some(commit.end), committed: None });
            }
            if self.rng.f64() < 0.3 {
                return Ok(LogStep { end: Some(self.at), ..LogStep::default() });
            }
            let _ = timeout(Duration::from_secs(1), written.changed()).await;
        }
    }

    async fn until_visible(&mut self, xids: &[u32]) -> Result<(), LogError> {
        if self.database.plant != Plant::VisibilityIgnored {
            self.database.until_visible(|commit| xids.contains(&commit.xid)).await;
        }
        Ok(())
    }

    fn confirm(&mut self, end: u64) {
        self.confirmed = self.confirmed.max(end);
        let (database, number, confirmed) = (self.database.clone(), self.number, self.confirmed);
        let delay = Duration::from_millis(self.rng.u64(0..30));
        tokio::spawn(async move {
            sleep(delay).await;
            let mut state = database.state();
            if state.reader == number
                && let Some(slot) = &mut state.slot
            {
                slot.confirmed = slot.confirmed.max(confirmed);
            }
        });
    }

    async fn close(self) {}
}

struct Process {
    replica: Replica,
    guard: StampedeGuard,
    reader: Arc<Reader<SimulatedLog>>,
    reading: JoinHandle<()>,
}

struct World {
    database: Database,
    chaos: ChaosStore,
    rng: Rng,
}

impl World {
    fn process(&mut self) -> Process {
        let policy = Policy::builder().invalidate_all(true).fresh_for(Duration::from_secs(86_400));
        let policy = if self.rng.bool() { policy.local_for(Duration::from_secs(3_600)) } else { policy };
        let replica = self.chaos.replica();
        let guard = StampedeGuard::builder(replica.clone()).policy(policy.build().unwrap()).build().unwrap();
        let mutex =
            guard.locks().mutex("reader").ttl(Duration::from_secs(1)).auto_renew(true).build().unwrap();
        let log = SimulatedLog { database: self.database.clone(), rng: Mutex::new(self.rng.fork()) };
        let progress = Progress::new(&guard, "slot");
        let reader = Arc::new(Reader { guard: guard.clone(), mutex, logs: vec![log], progress });
        let running = Arc::clone(&reader);
        Process { replica, guard, reader, reading: tokio::spawn(async move { running.run().await }) }
    }

    /// What a caller of a process is given.
    async fn read(&mut self, guard: &StampedeGuard, key: u64) -> Option<u64> {
        let (database, delay) = (self.database.clone(), Duration::from_millis(self.rng.u64(0..200)));
        let is_older = database.plant == Plant::OlderSnapshot;
        let older = database.snapshot();
        let load = move || async move {
            let snapshot = if is_older { older } else { database.snapshot() };
            sleep(delay).await;
            Ok::<_, String>(snapshot[&key])
        };
        guard.get_or_load(("k", key), load).await.ok()
    }

    /// A transaction, in a task.
    fn write(&mut self, writers: &mut JoinSet<()>) {
        let (database, mut rng) = (self.database.clone(), self.rng.fork());
        writers.spawn(async move {
            let mut keys: Vec<_> = (0..rng.u64(1..3)).map(|_| rng.u64(0..KEYS)).collect();
            sleep(Duration::from_millis(rng.u64(0..100))).await;
            // A savepoint is rolled back: the log has nothing of it.
            if rng.f64() < 0.2 {
                keys.pop();
            }
            if keys.is_empty() || rng.f64() < 0.2 {
                return;
            }
            let end = database.commit(Some(keys));
            // Mostly at once; while a standby is waited for, long.
            let delay = if rng.f64() < 0.2 { rng.u64(0..500) } else { 0 };
            sleep(Duration::from_millis(delay)).await;
            database.show(end);
        });
    }
}

/// Runs one seed. Returns what was wrong.
async fn run(seed: u64, plant: Plant) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let chaos = ChaosStore::new(rng.u64(..));
    chaos.latency(Duration::ZERO, Duration::from_millis(rng.u64(0..20)));
    if !seed.is_multiple_of(3) {
        for fault in [Fault::ErrorAfter, Fault::ErrorBefore, Fault::WakeLost] {
            chaos.inject(fault, rng.f64() * 0.1);
        }
    }
    let mut world = World { database: Database::new(plant), chaos, rng };
    let mut processes: Vec<_> = (0..PROCESSES).map(|_| world.process()).collect();
    let mut writers = JoinSet::new();
    for _ in 0..60 {
        let at = world.rng.usize(0..PROCESSES);
        match world.rng.u8(0..20) {
            0..8 => world.write(&mut writers),
            8..15 => {
                let (guard, key) = (processes[at].guard.clone(), world.rng.u64(0..KEYS));
                let position = LogPosition::new(ServerId::default(), world.database.state().lsn);
                let expected = world.database.committed(|commit| commit.is_visible)[&key];
                let within = Duration::from_millis(world.rng.u64(0..3_000));
                // A position that is passed; else what a plain caller is given is not checked here.
                if processes[at].reader.progress.wait_for(position, within).await
                    && let Some(read) = world.read(&guard, key).await
                    && read < expected
                {
                    return Err(format!(
                        "seed {seed}: {read} of key {key} after {position}, committed {expected}"
                    ));
                }
                world.read(&guard, key).await;
            }
            15 | 16 => sleep(Duration::from_millis(world.rng.u64(0..1_500))).await,
            17 => {
                // The process ends, and another one takes its place. Killed, it frees nothing that it holds.
                if world.rng.bool() {
                    processes[at].replica.kill();
                }
                processes[at].reading.abort();
                processes[at] = world.process();
            }
            18 => world.database.lose_slot(),
            _ => {
                // What was confirmed is final: a reader would not read it again.
                let slot = world.database.state().slot.filter(|slot| slot.confirmed > slot.made);
                let confirmed = slot.map_or(0, |slot| slot.confirmed);
                let expected = world.database.committed(|commit| commit.end <= confirmed);
                let guard = processes[at].guard.clone();
                for (key, expected) in expected {
                    let stored: Option<u64> = guard.get(("k", key)).await.ok().flatten();
                    if confirmed > 0 && stored.is_some_and(|stored| stored < expected) {
                        return Err(format!("seed {seed}: {stored:?} of key {key}, confirmed {expected}"));
                    }
                }
            }
        }
    }
    while writers.join_next().await.is_some() {}
    world.chaos.calm();
    let began = Instant::now();
    sleep(SETTLED).await;
    let expected = world.database.snapshot();
    for process in &processes {
        for (&key, &expected) in &expected {
            let read = world.read(&process.guard, key).await;
            if read != Some(expected) {
                return Err(format!(
                    "seed {seed}: {read:?} of key {key} {:?} later, committed {expected}",
                    began.elapsed()
                ));
            }
        }
    }
    processes.iter().for_each(|process| process.reading.abort());
    Ok(())
}

fn run_paused(seed: u64, plant: Plant) -> Result<(), String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(run(seed, plant))
}

fn seeds() -> u64 {
    std::env::var("SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(100)
}

#[test]
fn no_seed_finds_a_stale_read() {
    for seed in 0..seeds() {
        run_paused(seed, Plant::None).unwrap();
    }
}

#[test]
fn each_planted_fault_is_noticed() {
    for plant in [
        Plant::ConfirmedEarly,
        Plant::VisibilityIgnored,
        Plant::OlderSnapshot,
        Plant::TwoReaders,
        Plant::SlotWithoutMessage,
    ] {
        let noticed = (0..500).find_map(|seed| run_paused(seed, plant).err());
        println!("{plant:?}: {noticed:?}");
        assert!(noticed.is_some(), "{plant:?}");
    }
}
