//! A fleet of real processes: the test binary runs itself again, once per member.
//!
//! A child is this binary with `--exact child_entry`, the one libtest test that plays a *role* when `SG_ROLE` is
//! set and does nothing otherwise; so libtest and nextest need no second binary. Parent and child exchange lines: the
//! parent writes to stdin (`go`, or the commands of the role), the child to stdout, where a prefix distinguishes its
//! lines from libtest's. Every wait is bounded, and its failure prints the child's output.

use std::fmt::Write as _;
use std::future::Future;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::panic::Location;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::{mpsc, watch};

use super::PATIENCE;
use super::os::Guarded;

const PREFIX: &str = "@sg ";
const READY: &str = "ready";
const RESULT: &str = "result";
const GO: &str = "go";

/// The name of a role, and the function that plays it in a child.
pub(crate) type Role = (&'static str, fn(Child) -> BoxFuture<'static, ()>);

/// Some children in the same role; dropping it kills them.
#[derive(Debug)]
pub(crate) struct Fleet {
    members: Vec<Member>,
}

impl Fleet {
    /// Starts `n` processes in `role`, each with the same `config`, read by [`Child::config`].
    pub(crate) fn spawn(n: usize, role: &str, config: &impl Serialize) -> Self {
        Self::spawn_by(&[], n, role, config)
    }

    /// Like [`spawn`](Self::spawn), but each process is started through `program`, which gets the command line as further arguments.
    pub(crate) fn spawn_by(program: &[&str], n: usize, role: &str, config: &impl Serialize) -> Self {
        let config = serde_json::to_string(config).expect("a config that is JSON");
        Self { members: (0..n).map(|index| Member::spawn(program, index, role, &config)).collect() }
    }

    pub(crate) fn member(&self, index: usize) -> &Member {
        &self.members[index]
    }

    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Waits until every member is [`ready`](Child::ready).
    #[track_caller]
    pub(crate) fn wait_ready(&self) -> impl Future<Output = ()> + '_ {
        // Loops, not closures: `track_caller` does not reach through a closure.
        let mut waits = Vec::new();
        for member in self.alive() {
            waits.push(member.wait_event(READY));
        }
        async {
            for wait in waits {
                wait.await;
            }
        }
    }

    /// Lets every member pass [`Child::wait_go`], as nearly at once as pipes allow.
    #[track_caller]
    pub(crate) fn go(&self) {
        for member in self.alive() {
            member.send(GO);
        }
    }

    /// The results of all members that were not killed by the test, in order of their index.
    #[track_caller]
    pub(crate) fn results<T: DeserializeOwned>(&self) -> impl Future<Output = Vec<T>> + '_ {
        let mut waits = Vec::new();
        for member in self.alive() {
            waits.push(member.result());
        }
        async {
            let mut results = Vec::new();
            for wait in waits {
                results.push(wait.await);
            }
            results
        }
    }

    fn alive(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| !member.killed.load(Ordering::SeqCst))
    }
}

/// The parent's view of one child.
#[derive(Debug)]
pub(crate) struct Member {
    index: usize,
    role: String,
    process: Mutex<Guarded>,
    stdin: Mutex<ChildStdin>,
    output: watch::Receiver<Output>,
    killed: AtomicBool,
}

/// The events and the stderr of a child so far.
#[derive(Debug, Default)]
struct Output {
    /// Name and data, in order. `taken` has the indices of the events that a wait has returned.
    events: Vec<(String, Value)>,
    taken: Mutex<Vec<usize>>,
    stderr: String,
    /// Both streams have ended, so nothing more will come.
    closed: bool,
}

impl Member {
    fn spawn(program: &[&str], index: usize, role: &str, config: &str) -> Self {
        let test = std::env::current_exe().expect("the path of the test binary");
        let mut command = match program {
            [] => Command::new(test),
            [program, args @ ..] => {
                let mut command = Command::new(program);
                command.args(args).arg(test);
                command
            }
        };
        let mut process = Guarded::spawn(
            command
                .args(["--exact", "child_entry", "--nocapture", "--test-threads=1"])
                .env("SG_ROLE", role)
                .env("SG_CONFIG", config)
                .env("SG_INDEX", index.to_string())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        )
        .expect("running the test binary again");
        let child = process.child();
        let stdin = child.stdin.take().expect("stdin is piped");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut stderr = child.stderr.take().expect("stderr is piped");

        let (said, output) = watch::channel(Output::default());
        let said = Arc::new(said);
        let errors = thread::spawn({
            let said = said.clone();
            move || {
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = stderr.read(&mut buffer) {
                    said.send_modify(|output| output.stderr.push_str(&String::from_utf8_lossy(&buffer[..n])));
                }
            }
        });
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The prefix need not start the line: libtest prints "test child_entry ... " without an end of line.
                if let Some(at) = line.find(PREFIX) {
                    let event = serde_json::from_str(&line[at + PREFIX.len()..]);
                    let event = event.unwrap_or_else(|error| (format!("garbled: {error}"), line.into()));
                    said.send_modify(|output| output.events.push(event));
                }
            }
            // A failing wait prints the child's stderr, so read all of it first.
            let _ = errors.join();
            said.send_modify(|output| output.closed = true);
        });
        let (process, stdin) = (Mutex::new(process), Mutex::new(stdin));
        Self { index, role: role.to_owned(), process, stdin, output, killed: AtomicBool::new(false) }
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn pid(&self) -> u32 {
        lock(&self.process).pid()
    }

    /// Waits for the child's next event of this name and returns its data. Each event is returned once.
    #[track_caller]
    pub(crate) fn wait_event(&self, name: &str) -> impl Future<Output = Value> + '_ {
        let (caller, name) = (Location::caller(), name.to_owned());
        async move {
            let mut output = self.output.clone();
            let event = output.wait_for(|output| output.closed || output.has(&name));
            let in_time = tokio::time::timeout(PATIENCE, event).await.is_ok();
            // Look at the latest state: the event may have arrived just before the end.
            if let Some(data) = self.output.borrow().take(&name) {
                return data;
            }
            let why = if in_time { "ended without" } else { "did not send in time" };
            panic!("{caller}: {} {why} `{name}`{}", self.describe(), self.report());
        }
    }

    /// How many events of this name came so far, returned by a wait or not.
    pub(crate) fn events(&self, name: &str) -> usize {
        self.output.borrow().events.iter().filter(|(event, _)| event == name).count()
    }

    /// Waits for the child's [`result`](Child::result).
    #[track_caller]
    pub(crate) fn result<T: DeserializeOwned>(&self) -> impl Future<Output = T> + '_ {
        let (caller, event) = (Location::caller(), self.wait_event(RESULT));
        async move {
            let result = serde_json::from_value(event.await);
            result.unwrap_or_else(|error| panic!("{caller}: result of {}: {error}", self.describe()))
        }
    }

    /// Sends a line, read by [`Child::recv_line`].
    #[track_caller]
    pub(crate) fn send(&self, line: &str) {
        let sent = lock(&self.stdin).write_all(format!("{line}\n").as_bytes());
        if let Err(error) = sent {
            panic!("sending `{line}` to {}: {error}{}", self.describe(), self.report());
        }
    }

    /// SIGKILL. When this returns, the child has ended.
    pub(crate) fn kill(&self) {
        self.killed.store(true, Ordering::SeqCst);
        lock(&self.process).kill();
    }

    /// SIGSTOP. When this returns, the child has stopped.
    pub(crate) fn pause(&self) {
        lock(&self.process).pause();
    }

    /// SIGCONT.
    pub(crate) fn resume(&self) {
        lock(&self.process).resume();
    }

    /// Waits until the child has ended by itself.
    #[track_caller]
    pub(crate) fn wait_exit(&self) -> impl Future<Output = ExitStatus> + '_ {
        let caller = Location::caller();
        async move {
            let mut output = self.output.clone();
            let closed =
                tokio::time::timeout(PATIENCE, output.wait_for(|output| output.closed)).await.is_ok();
            assert!(closed, "{caller}: {} did not end{}", self.describe(), self.report());
            // The streams close an instant before the process can be reaped: poll for that instant.
            loop {
                if let Some(status) = lock(&self.process).try_wait() {
                    return status;
                }
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        }
    }

    fn describe(&self) -> String {
        format!("child {} ({}, pid {})", self.index, self.role, self.pid())
    }

    fn report(&self) -> String {
        let output = self.output.borrow();
        let mut report = "\n--- its events ---\n".to_owned();
        for (name, data) in &output.events {
            let _ = writeln!(report, "{name} {data}");
        }
        let _ = write!(report, "--- its stderr ---\n{}\n---", output.stderr.trim_end());
        report
    }
}

impl Output {
    fn has(&self, name: &str) -> bool {
        self.next(name, &lock(&self.taken)).is_some()
    }

    fn take(&self, name: &str) -> Option<Value> {
        let mut taken = lock(&self.taken);
        let index = self.next(name, &taken)?;
        taken.push(index);
        Some(self.events[index].1.clone())
    }

    fn next(&self, name: &str, taken: &[usize]) -> Option<usize> {
        self.events
            .iter()
            .enumerate()
            .position(|(index, (event, _))| event == name && !taken.contains(&index))
    }
}

/// The child's own view, passed to its role.
#[derive(Debug)]
pub(crate) struct Child {
    index: usize,
    config: String,
    lines: mpsc::UnboundedReceiver<String>,
    report: Report,
}

impl Child {
    /// Position of this process in its fleet.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn config<T: DeserializeOwned>(&self) -> T {
        serde_json::from_str(&self.config).expect("the config of this role")
    }

    /// A handle that sends events to the parent, for moving into a loader or a task.
    pub(crate) fn report(&self) -> Report {
        self.report
    }

    pub(crate) fn ready(&self) {
        self.report.event(READY);
    }

    pub(crate) fn event(&self, name: &str) {
        self.report.event(name);
    }

    pub(crate) fn result(&self, result: &impl Serialize) {
        self.report.event_with(RESULT, result);
    }

    pub(crate) async fn wait_go(&mut self) {
        assert_eq!(self.recv_line().await, GO);
    }

    /// The parent's next line. Stays pending if the parent has ended, because this process exits then.
    pub(crate) async fn recv_line(&mut self) -> String {
        match self.lines.recv().await {
            Some(line) => line,
            None => std::future::pending().await,
        }
    }
}

/// Sends events to the parent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report(());

impl Report {
    pub(crate) fn event(self, name: &str) {
        self.event_with(name, &Value::Null);
    }

    pub(crate) fn event_with(self, name: &str, data: &impl Serialize) {
        let event = serde_json::to_string(&(name, data)).expect("data that is JSON");
        // One write of a whole line, past the capture of `print!` by libtest; it fails only without a parent.
        let _ = io::stdout().lock().write_all(format!("{PREFIX}{event}\n").as_bytes());
    }
}

/// Body of the test `child_entry`: plays the role of `SG_ROLE`, or does nothing if there is none.
///
/// `SG_LOG=debug` in the environment of the whole test run makes children log to stderr, which the parent prints
/// when it fails.
pub(crate) fn run_child(roles: &[Role]) {
    let Ok(role) = std::env::var("SG_ROLE") else { return };
    if let Some(level) = std::env::var("SG_LOG").ok().and_then(|level| level.parse().ok()) {
        let level: tracing_subscriber::filter::LevelFilter = level;
        tracing_subscriber::fmt().with_max_level(level).with_ansi(false).with_writer(io::stderr).init();
    }
    let play = roles.iter().find(|(name, _)| *name == role).map(|(_, play)| play);
    let play = play.unwrap_or_else(|| panic!("no role `{role}` is registered in main.rs"));
    let (sender, lines) = mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            // Fails if the role has stopped reading.
            let _ = sender.send(line);
        }
        // The parent has ended. Its guard would kill this process anyway; exiting is quieter.
        std::process::exit(3);
    });
    let index = std::env::var("SG_INDEX").ok().and_then(|index| index.parse().ok()).expect("SG_INDEX");
    let config = std::env::var("SG_CONFIG").expect("SG_CONFIG");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(play(Child { index, config, lines, report: Report(()) }));
    // A task that the role left running, such as a hung loader, must not keep the process alive.
    runtime.shutdown_background();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A failed wait must not hide its message behind a second panic while the fleet is dropped.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
