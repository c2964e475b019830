//! Signals, and the limit of open files, without `unsafe`.

use std::io;

/// A signal of [`send`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal {
    Kill,
    Stop,
    Continue,
}

/// Sends a signal to a child that has not been reaped.
#[cfg(unix)]
pub(crate) fn send(pid: u32, signal: Signal) -> io::Result<()> {
    use rustix::process::{Pid, Signal as Sent, kill_process};

    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("no number of a process"))?;
    let signal = match signal {
        Signal::Kill => Sent::KILL,
        Signal::Stop => Sent::STOP,
        Signal::Continue => Sent::CONT,
    };
    Ok(kill_process(pid, signal)?)
}

#[cfg(not(unix))]
pub(crate) fn send(_pid: u32, _signal: Signal) -> io::Result<()> {
    Err(io::Error::other("this system has no such signals: run the lab on Linux or macOS"))
}

/// Allows as many open files as two thousand requests at once need: a socket each at the load generator, at a replica and at the
/// origin. Many systems allow 256 or 1,024 by default.
#[cfg(unix)]
pub(crate) fn allow_many_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};

    const TARGET: u64 = 10_240;
    let mut limit = getrlimit(Resource::Nofile);
    let target = limit.maximum.map_or(TARGET, |most| most.min(TARGET));
    if limit.current.is_some_and(|current| current < target) {
        limit.current = Some(target);
        // If it is refused, the lab runs, and counts requests for which there is no socket as failed.
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

#[cfg(not(unix))]
pub(crate) fn allow_many_files() {}
