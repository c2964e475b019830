//! Child processes that do not outlive the lab, however it ends.

pub(crate) mod reaper;
pub(crate) mod redis_server;
pub(crate) mod signals;

use std::io;
use std::sync::Arc;

use tokio::process::{Child, Command};

use reaper::Reaper;
use signals::Signal;

/// A child process. The reaper kills it when the lab has ended, also if the child is stopped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: u32,
    reaper: Arc<Reaper>,
    /// Whether the reaper still has the number.
    is_registered: bool,
}

impl Process {
    pub(crate) fn spawn(command: &mut Command, reaper: &Arc<Reaper>) -> io::Result<Self> {
        // In a process group of its own, so that Ctrl-C reaches the lab alone, which then ends its children in order.
        #[cfg(unix)]
        command.process_group(0);
        let child = command.kill_on_drop(true).spawn()?;
        let pid = child.id().ok_or_else(|| io::Error::other("the process has ended already"))?;
        reaper.register(pid);
        Ok(Self { child, pid, reaper: reaper.clone(), is_registered: true })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// The child itself, to take its standard streams.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        signals::send(self.pid, signal)
    }

    /// Kills the process, or buries one that has ended. When this returns, the process has ended.
    pub(crate) async fn end(mut self) {
        self.kill();
        let _ = self.child.wait().await;
    }

    fn kill(&mut self) {
        let _ = self.child.start_kill();
        // Before the process is reaped: until then no other process can have its number.
        if std::mem::take(&mut self.is_registered) {
            self.reaper.unregister(self.pid);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
