//! Child processes that cannot outlive the test process, and the signals they get.
//!
//! The package forbids `unsafe`, so it can call neither `prctl(PR_SET_PDEATHSIG)` nor `libc::kill`: a shell does both.
//! `kill` is a builtin of every `sh`, but the program `kill` is missing in slim images.

use std::io::{self, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::PATIENCE;

/// A child process that dies with the test process, however the test process ends and even while the child is stopped.
///
/// A shell holds the reading end of a pipe. When the test process ends, by SIGKILL or otherwise, the kernel closes the
/// other end, and the shell kills the child.
///
/// Invariant 1: the child is reaped only after the shell has received `done`, on which it ends without a kill. Until then the child's pid
/// stays taken (by a zombie at worst), so the shell can never kill another process that reuses the pid.
#[derive(Debug)]
pub(crate) struct Guarded {
    child: Child,
    lifeline: Child,
    exited: Option<ExitStatus>,
}

impl Guarded {
    /// Starts `command` under guard; its standard streams stay with the caller, see [`child`](Self::child).
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        // The shell starts first: then the child is unguarded only during one write, not during a fork and an exec. The shell ignores the
        // signals that a terminal or a test runner sends to the whole group, because it must outlive the child.
        let mut lifeline = Command::new("sh")
            .args(["-c", "trap '' INT TERM HUP; read -r pid || exit 0; read -r done || kill -9 \"$pid\""])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                drop(lifeline.stdin.take());
                let _ = lifeline.wait();
                return Err(error);
            }
        };
        let mut guarded = Self { child, lifeline, exited: None };
        let pid = guarded.pid();
        guarded.write_lifeline(&pid.to_string())?;
        Ok(guarded)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The child itself, for taking its standard streams.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How the child ended, if it has.
    pub(crate) fn try_wait(&mut self) -> Option<ExitStatus> {
        if self.exited.is_none() {
            self.exited = self.child.try_wait().expect("waiting for an own child");
            if self.exited.is_some() {
                self.let_go();
            }
        }
        self.exited
    }

    /// SIGKILL, which also ends a stopped process. When this returns, the child has ended and its sockets are closed.
    pub(crate) fn kill(&mut self) {
        if self.try_wait().is_some() {
            return;
        }
        // An error means that the child ended by itself a moment ago.
        let _ = self.child.kill();
        self.let_go();
        self.exited = Some(self.child.wait().expect("waiting for an own child"));
    }

    /// SIGSTOP. When this returns, the child has stopped: right after the signal it still runs for microseconds, in which
    /// it could answer one command.
    pub(crate) fn pause(&mut self) {
        self.signal("STOP");
        let deadline = Instant::now() + PATIENCE;
        while state(self.pid()) != Some('T') {
            assert!(Instant::now() < deadline, "process {} did not stop", self.pid());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// SIGCONT.
    pub(crate) fn resume(&mut self) {
        self.signal("CONT");
    }

    /// SIGTERM: how an orchestrator asks a process to end.
    pub(crate) fn terminate(&mut self) {
        self.signal("TERM");
    }

    fn signal(&mut self, name: &str) {
        assert!(self.try_wait().is_none(), "process {} has ended: {:?}", self.pid(), self.exited);
        let status = Command::new("sh")
            .args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &self.pid().to_string()])
            .status()
            .expect("running sh");
        assert!(status.success(), "SIG{name} to process {}: {status}", self.pid());
    }

    fn write_lifeline(&mut self, line: &str) -> io::Result<()> {
        match &mut self.lifeline.stdin {
            Some(pipe) => pipe.write_all(format!("{line}\n").as_bytes()),
            None => Ok(()),
        }
    }

    fn let_go(&mut self) {
        let _ = self.write_lifeline("done");
        drop(self.lifeline.stdin.take());
        let _ = self.lifeline.wait();
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a process exists, running or stopped. A zombie does not count: its files and sockets are closed.
pub(crate) fn is_alive(pid: u32) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}

/// State letter of a process (`T` = stopped), from `/proc` if it exists, else from `ps` (macOS).
fn state(pid: u32) -> Option<char> {
    if let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        // The second field is the name in parentheses and may contain anything, so look behind the last parenthesis.
        return stat.rsplit_once(") ")?.1.chars().next();
    }
    let output = Command::new("ps").args(["-o", "state=", "-p", &pid.to_string()]).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().chars().next()
}

/// The CPU time of a process so far; `None` without `/proc`.
pub(crate) fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, the 12th and 13th field are the times in user and kernel mode, in hundredths of a second.
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks =
        fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().ok()).sum::<Option<u64>>()?;
    Some(Duration::from_millis(10 * ticks))
}

/// Nanoseconds of the wall clock, for comparing moments of different processes.
///
/// All processes of a test read the same clock of the same machine. An `Instant` could not be sent to another process.
/// NTP may step the wall clock during a test, so use it for orders and spans of milliseconds, not for limits that
/// decide a test.
pub(crate) fn wall_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    u64::try_from(since.as_nanos()).expect("the clock is before 2554")
}
