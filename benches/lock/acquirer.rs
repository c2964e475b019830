//! One client of a lock: acquires and releases it repeatedly for a set time.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::time::{sleep, sleep_until};

use crate::book::{Lua, SetNx, Thread};
use crate::ours::{Bumped, Ours};
use crate::way::Lock;

/// The locks that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    SetNx,
    Lua,
    Ours,
    /// The crate's mutex, which is released and acquired again by one command.
    Bumped,
}

/// A client of one of the kinds of locks.
pub(crate) enum Client {
    SetNx(SetNx),
    Lua(Lua),
    Ours(Ours),
    Bumped(Bumped),
}

/// When a client begins and ends, and for how long it holds the lock each time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    pub(crate) from: Instant,
    pub(crate) time: Duration,
    pub(crate) hold: Duration,
}

/// What one client has done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Tally {
    pub(crate) tries: u64,
    pub(crate) acquires: u64,
    /// For each acquire, how many microseconds it took. An acquire that succeeded after the end is included.
    pub(crate) waits: Vec<u32>,
    /// The CPU time that the client's thread has used, in nanoseconds.
    pub(crate) cpu_ns: u64,
}

/// Whether a client of this process is in the critical section. Detects that two clients are in it at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inside(Arc<AtomicBool>);

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::SetNx, Self::Lua, Self::Ours, Self::Bumped];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SetNx => "SETNX control",
            Self::Lua => "Lua control",
            Self::Ours => "`Mutex`",
            Self::Bumped => "`Mutex`, bumped",
        })
    }
}

impl Client {
    /// Connects a client of the lock `name`, and acquires the lock once, so that scripts are loaded.
    pub(crate) async fn connect(kind: Kind, redis: &str, name: &str, thread: Thread) -> Self {
        let mut client = match kind {
            Kind::SetNx => Self::SetNx(SetNx::connect(redis, name, thread).await),
            Kind::Lua => Self::Lua(Lua::connect(redis, name, thread).await),
            Kind::Ours => Self::Ours(Ours::connect(redis, name).await),
            Kind::Bumped => Self::Bumped(Bumped::connect(redis, name).await),
        };
        client.acquire().await;
        assert!(client.release().await, "it was held");
        client.leave().await;
        client
    }

    pub(crate) async fn contend(&mut self, turn: Turn, inside: &Inside) -> Tally {
        let until = turn.from + turn.time;
        let mut tally = Tally::default();
        sleep_until(turn.from.into()).await;
        loop {
            let began = Instant::now();
            if began >= until {
                self.leave().await;
                return tally;
            }
            let tries = self.acquire().await;
            let acquired = Instant::now();
            assert!(!inside.0.swap(true, Ordering::AcqRel), "another client holds it");
            // An acquire that succeeds after the end does not count, but its wait does: it shows that a client starved.
            if acquired <= until {
                tally.tries += u64::from(tries);
                tally.acquires += 1;
            }
            tally.waits.push(u32::try_from((acquired - began).as_micros()).expect("less than an hour"));
            if !turn.hold.is_zero() {
                sleep(turn.hold).await;
            }
            inside.0.store(false, Ordering::Release);
            assert!(self.release().await, "it was held");
        }
    }
}

impl Lock for Client {
    async fn acquire(&mut self) -> u32 {
        match self {
            Self::SetNx(client) => client.acquire().await,
            Self::Lua(client) => client.acquire().await,
            Self::Ours(client) => client.acquire().await,
            Self::Bumped(client) => client.acquire().await,
        }
    }

    async fn release(&mut self) -> bool {
        match self {
            Self::SetNx(client) => client.release().await,
            Self::Lua(client) => client.release().await,
            Self::Ours(client) => client.release().await,
            Self::Bumped(client) => client.release().await,
        }
    }

    async fn leave(&mut self) {
        if let Self::Bumped(client) = self {
            client.leave().await;
        }
    }
}
