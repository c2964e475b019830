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

    /// The rest of the first printed line that begins with `start`.
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

    /// How many of the lines printed so far contain `text`.
    pub(crate) fn lines_with(&self, text: &str) -> usize {
        lock(&self.lines).iter().filter(|line| line.contains(text)).count()
    }

    /// The content of stderr so far.
    pub(crate) fn stderr(&self) -> String {
        lock(&self.errors).join("\n")
    }

    pub(crate) fn terminate(&mut self) {
        self.process.terminate();
    }

    /// Sends SIGTERM, and waits for the end up to [`PATIENCE`].
    pub(crate) fn stop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        if self.process.try_wait().is_none() {
            self.process.terminate();
        }
        while self.process.try_wait().is_none() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process has ended and all its output is read.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait() {
                for reader in self.readers.drain(..) {
                    let _ = reader.join();
                }
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end: {:?} {}", lock(&self.lines), self.stderr());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Collects the lines of a pipe in a thread that reads all the time, because a full pipe blocks the writer.
fn collect(pipe: impl Read + Send + 'static) -> (Lines, JoinHandle<()>) {
    let lines = Lines::default();
    let reader = thread::spawn({
        let lines = Arc::clone(&lines);
        move || BufReader::new(pipe).lines().map_while(Result::ok).for_each(|line| lock(&lines).push(line))
    });
    (lines, reader)
}

/// Builds the example and returns its path. `cargo test --test it` alone does not build examples, and an outdated binary
/// would test old code. If the binary is up to date, this is quick.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test binary");
    let profile = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let target = profile.parent().expect("target/<profile>");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--example", name]).arg("--target-dir").arg(target);
    // The variables that cargo sets for a test would make build scripts run again.
    let set_by_cargo =
        |name: &str| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|head| name.starts_with(head));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(set_by_cargo) {
            cargo.env_remove(name);
        }
    }
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    // `http` is a feature of the package for Postgres as well, `axum` is not.
    if cfg!(all(
        feature = "tls",
        feature = "http",
        feature = "metrics",
        any(feature = "axum", not(feature = "redis"))
    )) {
        // As `make test` builds everything: with the features of other packages' dependencies, nothing is compiled a second time.
        cargo.args(["--workspace", "--all-features"]);
    } else if cfg!(feature = "axum") {
        cargo.args(["--features", "axum"]);
    }
    let status = cargo.current_dir(root()).status().expect("running cargo");
    assert!(status.success(), "building the example {name}: {status}");
    profile.join("examples").join(name)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
