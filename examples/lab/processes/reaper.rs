//! The reaper: a process that knows the lab's children, and kills them when the lab has ended.
//!
//! The replicas end by themselves when their stdin closes, but a stopped one can not, and `redis-server` does not look. The
//! reaper's own stdin closes when the lab ends, also by SIGKILL.

use std::collections::BTreeSet;
use std::io::{self, BufRead as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::signals::{self, Signal};
use crate::ROLE;

/// The name of the reaper's role.
pub(crate) const NAME: &str = "reaper";

/// The lab's end of the pipe.
#[derive(Debug)]
pub(crate) struct Reaper {
    stdin: Mutex<Option<ChildStdin>>,
    process: Mutex<Child>,
}

impl Reaper {
    /// Starts the reaper, before any child.
    pub(crate) fn start() -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        // Ctrl-C must not end it: it has to be the last.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut process = command.env(ROLE, NAME).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        Ok(Self { stdin: Mutex::new(process.stdin.take()), process: Mutex::new(process) })
    }

    pub(crate) fn register(&self, pid: u32) {
        self.send(&format!("+{pid}\n"));
    }

    pub(crate) fn unregister(&self, pid: u32) {
        self.send(&format!("-{pid}\n"));
    }

    fn send(&self, line: &str) {
        if let Some(stdin) = &mut *self.stdin.lock().unwrap_or_else(PoisonError::into_inner) {
            // Fails if the reaper was killed: then the children end with their pipes only.
            let _ = stdin.write_all(line.as_bytes());
        }
    }

    /// Closes the pipe, and waits until the reaper has killed all children that are left.
    pub(crate) fn end(&self) {
        self.stdin.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = self.process.lock().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

/// Plays the role: reads `+PID` and `-PID`, and kills at the end of stdin.
pub(crate) fn run() {
    let mut children = BTreeSet::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_at_checked(1).map(|(sign, pid)| (sign, pid.parse::<u32>())) {
            Some(("+", Ok(pid))) => {
                children.insert(pid);
            }
            Some((_, Ok(pid))) => {
                children.remove(&pid);
            }
            _ => {}
        }
    }
    for pid in children {
        let _ = signals::send(pid, Signal::Kill);
    }
}
