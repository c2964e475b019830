//! [`Fault`], the faults that a chaos store injects between a guard and its store, and [`Condition`], the state of a
//! replica: running, cut off, stopped or dead.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::sync::{lock, until};

/// Declares the faults, each with its name for tables and logs.
macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident $name:literal,)*) => {
        /// A fault on the way to a store, in the store, or on the way back.
        ///
        /// Some strike a command, some a wake-up, and some the store itself, at the moment when a command arrives. Faults
        /// of the last kind need a store in memory.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Fault {
            $($(#[$doc])* $fault,)*
        }

        impl Fault {
            /// All faults.
            pub const ALL: &'static [Self] = &[$(Self::$fault),*];

            /// The name, for tables and logs.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$fault => $name,)*
                }
            }
        }
    };
}

faults! {
    /// A command fails and is not run: no connection.
    ErrorBefore "error before",
    /// A command runs, and then the connection breaks: its caller gets an error.
    ErrorAfter "error after",
    /// A command gets no answer within its deadline, and runs up to three seconds later.
    Ghost "ghost",
    /// A command gets no answer within its deadline, and never runs.
    BlackHole "black hole",
    /// A command takes up to twice its deadline, before or after it runs.
    Slow "slow",
    /// A waiter does not receive the message that its wait has ended, or that a lock has been granted to it.
    WakeLost "wake lost",
    /// A waiter receives a message twice, the second time up to a second later.
    WakeTwice "wake twice",
    /// The waiters of a key receive a message about an event that did not happen, or the waiters of a lock a message to
    /// ask again. (A false grant of a lock is never sent, because guards trust the sender of grants.)
    WakeForged "wake forged",
    /// A replica's subscription is lost, for up to a second. In half of the cases the replica does not notice.
    Unreachable "deaf",
    /// The lease of the command's key is evicted.
    EvictLease "lease evicted",
    /// The entry of the command's key is evicted.
    EvictEntry "entry evicted",
    /// The registry of the nodes that keep local copies is evicted.
    EvictRegistry "registry evicted",
    /// The log of the announcements to the nodes that keep local copies is evicted.
    EvictLog "log evicted",
    /// The store loses everything that it holds.
    Flush "flush",
    /// A failover to a server that lacks the latest writes, up to half a second of them.
    FailOver "failover",
    /// The store's clock jumps by up to an hour, to either side.
    ClockStep "clock step",
    /// A write is refused because the server is out of memory.
    OutOfMemory "out of memory",
    /// Writes are refused for up to half a second: the server is no longer the primary.
    ReadOnly "read-only",
    /// A byte of the key's entry is changed.
    Corrupt "corrupt",
}

impl Fault {
    /// The faults that strike on any store: those of commands and of messages to waiters. The others happen only in
    /// a memory store.
    pub const ON_ANY_STORE: &'static [Self] = &[
        Self::ErrorBefore,
        Self::ErrorAfter,
        Self::Ghost,
        Self::BlackHole,
        Self::Slow,
        Self::WakeLost,
        Self::WakeTwice,
        Self::WakeForged,
        Self::Unreachable,
        Self::OutOfMemory,
        Self::ReadOnly,
    ];
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The probability of each fault, the faults that are due, and how many times each has struck.
#[derive(Debug)]
pub(super) struct Odds {
    random: fastrand::Rng,
    chance: [f64; Fault::ALL.len()],
    due: Vec<Fault>,
    struck: [u64; Fault::ALL.len()],
}

impl Odds {
    pub(super) fn new(seed: u64) -> Self {
        let (chance, struck) = ([0.0; Fault::ALL.len()], [0; Fault::ALL.len()]);
        Self { random: fastrand::Rng::with_seed(seed), chance, due: Vec::new(), struck }
    }

    pub(super) fn set(&mut self, fault: Fault, chance: f64) {
        self.chance[fault as usize] = if chance.is_nan() { 0.0 } else { chance.clamp(0.0, 1.0) };
    }

    pub(super) fn once(&mut self, fault: Fault) {
        self.due.push(fault);
    }

    pub(super) fn calm(&mut self) {
        self.chance = [0.0; Fault::ALL.len()];
        self.due.clear();
    }

    pub(super) fn struck(&self, fault: Fault) -> u64 {
        self.struck[fault as usize]
    }

    /// Decides whether the fault strikes now, and counts the strike.
    pub(super) fn strikes(&mut self, fault: Fault) -> bool {
        let chance = self.chance[fault as usize];
        let due = self.due.iter().position(|due| *due == fault).map(|at| self.due.remove(at)).is_some();
        // An impossible fault takes no random number, so that turning on a fault changes only the numbers that
        // depend on it.
        let strikes = due || (chance > 0.0 && self.random.f64() < chance);
        self.struck[fault as usize] += u64::from(strikes);
        strikes
    }

    /// Takes back a strike that had no effect.
    pub(super) fn missed(&mut self, fault: Fault) {
        self.struck[fault as usize] -= 1;
    }

    /// A random time up to `most`, with the precision of a microsecond.
    pub(super) fn up_to(&mut self, most: Duration) -> Duration {
        let most = u64::try_from(most.as_micros()).unwrap_or(u64::MAX);
        // No random number is taken if there is only one result, so that a store without latency takes none.
        Duration::from_micros(if most == 0 { 0 } else { self.random.u64(0..=most) })
    }

    pub(super) fn random(&mut self) -> &mut fastrand::Rng {
        &mut self.random
    }
}

/// What a replica does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ReplicaState {
    #[default]
    Running,
    Cut,
    Stopped,
    Dead,
}

/// The condition of a replica. Shared by its handle and its lines.
#[derive(Debug, Default)]
pub(super) struct Condition {
    state: Mutex<ReplicaState>,
    changed: Notify,
    /// How much longer half a round trip of this replica takes than of other replicas.
    detour: Mutex<Duration>,
    /// Whether messages to the replica get lost one by one, while its subscription stays as it is.
    misses_messages: AtomicBool,
}

impl Condition {
    pub(super) fn is(&self, state: ReplicaState) -> bool {
        *lock(&self.state) == state
    }

    /// Changes what the replica does. A dead replica stays dead.
    pub(super) fn set(&self, state: ReplicaState) {
        let mut present = lock(&self.state);
        if *present != ReplicaState::Dead {
            *present = state;
        }
        drop(present);
        self.changed.notify_waiters();
    }

    pub(super) fn move_away(&self, by: Duration) {
        *lock(&self.detour) = by / 2;
    }

    pub(super) fn detour(&self) -> Duration {
        *lock(&self.detour)
    }

    pub(super) fn misses_messages(&self) -> bool {
        self.misses_messages.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn miss_messages(&self, misses: bool) {
        self.misses_messages.store(misses, Ordering::Relaxed);
    }

    /// Waits until the replica can act: returns at once unless it is stopped, and never if it is dead.
    pub(super) async fn runs(&self) {
        let runs = || !self.is(ReplicaState::Stopped) && !self.is(ReplicaState::Dead);
        until(&self.changed, runs).await;
    }
}
