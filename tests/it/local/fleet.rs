//! Promise 16 with real processes on real servers: after a change has been acknowledged, no caller of any process that begins
//! later receives an older value.
//!
//! Versions are numbers on a second server, which stays well. A change raises a version, changes the guard's value, and notes the
//! moment of its acknowledgement. A reader notes a moment, asks, and notes the versions that it received. The oracle compares
//! both afterwards: all processes read the same clock of the same machine.
//!
//! One fleet runs at a time: the bounds of its changes are for a machine that does little else.

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

/// The longest right of a process.
const TERM: Duration = Duration::from_millis(500);

/// The bound of a change while all processes are well; and what a silent process may add to its term.
const WELL: Duration = Duration::from_millis(500);
const SLACK: Duration = Duration::from_secs(1);

static ONE_FLEET: Mutex<()> = Mutex::const_new(());
