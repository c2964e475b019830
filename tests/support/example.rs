//! The programs of `examples/` as real processes, started and signalled as an orchestrator does.

use std::io::{BufRead as _, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::os::Guarded;
use super::{PATIENCE, root};

/// A running example; dropping it kills it.
#[derive(Debug)]
pub(crate) struct Example {
    process: Guarded,
    lines: Lines,
    errors: Lines,
    readers: Vec<JoinHandle<()>>,
}

type Lines = Arc<Mutex<Vec<String>>>;

impl Example {
    pub(crate) fn start(name: &str, env: &[(&str, &str)]) -> Self {
        Self::run(Command::new(built(name)), env)
    }

    /// One of `scripts/`, which starts servers and prints how to try them.
    pub(crate) fn script(name: &str, env: &[(&str, &str)]) -> Self {
        let mut command = Command::new("bash");
        command.arg(root().join("scripts").join(name));
        Self::run(command, env)
    }

    fn run(mut command: Command, env: &[(&str, &str)]) -> Self {
        command.envs(env.iter().copied()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Guarded::spawn(&mut command).expect("starting an example");
        let (lines, printing) = collect(process.child().stdout.take().expect("stdout is piped"));
        let (errors, telling) = collect(process.child().stderr.take().expect("stderr is piped"));
        Self { process, lines, errors, readers: vec![printing, telling] }
    }

    /// What follows `start` in the first line that it printed with it.
    pub(crate) fn printed(&self, start: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = lock(&self.lines).iter().find_map(|line| line.strip_prefix(start).map(str::to_owned));
            if let Some(found) = found {
                return found;
            }
            assert!(Instant::now() < deadline, "`{start}` is not in {:?}", lock(&self.lines));
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// How many lines it has printed so far that contain this.
    pub(crate) fn lines_with(&self, text: &str) -> usize {
        lock(&self.lines).iter().filter(|line| line.contains(text)).count()
    }

    /// All that it has written to stderr so far.
    pub(crate) fn told(&self) -> String {
        lock(&self.errors).join("\n")
    }

    pub(crate) fn terminate(&mut self) {
        self.process.terminate();
    }

    /// Asks it to end, and waits a while for that.
    pub(crate) fn stop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        if self.process.try_wait().is_none() {
            self.process.terminate();
        }
        while self.process.try_wait().is_none() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end, and until all that it has printed is here.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait() {
                for reader in self.readers.drain(..) {
                    let _ = reader.join();
                }
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end: {:?} {}", lock(&self.lines), self.told());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// What comes out of a pipe, line by line; read all the time, because a full one stops who writes.
fn collect(pipe: impl Read + Send + 'static) -> (Lines, JoinHandle<()>) {
    let lines = Lines::default();
    let reader = thread::spawn({
        let lines = Arc::clone(&lines);
        move || BufReader::new(pipe).lines().map_while(Result::ok).for_each(|line| lock(&lines).push(line))
    });
    (lines, reader)
}

/// The program. `cargo test --test it` alone does not build examples, and an old one would be a lie; where it is
/// built already this takes a moment.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test binary");
    let profile = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let target = profile.parent().expect("target/<profile>");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--example", name]).arg("--target-dir").arg(target);
    // What cargo tells a test about its package would tell build scripts that they are to run again.
    let told = |name: &str| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|head| name.starts_with(head));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(told) {
            cargo.env_remove(name);
        }
    }
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    if cfg!(all(feature = "tls", feature = "axum", feature = "metrics")) {
        cargo.arg("--all-features");
    }
    let status = cargo.current_dir(root()).status().expect("running cargo");
    assert!(status.success(), "building the example {name}: {status}");
    profile.join("examples").join(name)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
