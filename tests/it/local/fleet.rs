//! Promise 16 with real processes on real servers: after a change has been acknowledged, no caller of any process that begins
//! later receives an older value.
//!
//! Versions are numbers on a second server, on which no fault is injected. A change raises a version, changes the guard's value, and notes
//! the moment of its acknowledgement. A reader notes a moment, asks, and notes the versions that it received. The oracle compares both
//! afterwards, which is possible because all processes read the same clock of the same machine.
//!
//! One fleet runs at a time, because the bounds of its changes are for a machine that does little else.

mod changes;
#[cfg(feature = "cluster")]
mod cluster;
mod connections;
mod kills;
mod losses;
mod oracle;
#[cfg(feature = "http")]
mod pages;
mod process;
mod readers;
#[cfg(feature = "sentinel")]
mod sentinel;
mod silent;
mod stage;
mod truth;
mod well;

use std::time::Duration;

use tokio::sync::Mutex;

use crate::support::processes::Role;

pub(crate) const ROLES: &[Role] = &[
    ("local.fleet", process::play),
    #[cfg(feature = "http")]
    ("local.pages", pages::serve),
];

/// For how long a process may serve copies after a renewal.
const TERM: Duration = Duration::from_millis(500);

/// How long a change may take while no process has a fault, and how much longer than its term a silent process may delay one.
const WELL: Duration = Duration::from_millis(500);
const SLACK: Duration = Duration::from_secs(1);

static ONE_FLEET: Mutex<()> = Mutex::const_new(());
