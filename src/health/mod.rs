//! How a guard stands with its store: [`Health`], a snapshot of what it knows, and [`Report`], what it finds when it looks.
//!
//! [`StampedeGuard::health`](crate::StampedeGuard::health) asks nobody and costs nothing: for a status page, or a gauge.
//! [`StampedeGuard::doctor`](crate::StampedeGuard::doctor) asks the server, for a moment: for a deployment, or an incident.

mod report;

use std::fmt;
use std::time::Duration;

pub use report::{Finding, Report, Severity};

/// Where the fleet meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Topology {
    /// In this process's memory: there is no fleet.
    Memory,
    /// On one Redis server, or one name that stands for it.
    Single,
    /// On the Redis server that its sentinels call the primary.
    Sentinel,
    /// On the masters of a Redis Cluster, each with some of the keys.
    Cluster,
}

/// How a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkState {
    /// Nothing has needed it yet.
    Idle,
    /// It is being opened for the first time; who needs it waits for it, within its deadline. That
    /// ends after two command timeouts, even if the attempt does not: then it is `Down`.
    Connecting,
    /// It is there.
    Up,
    /// It was lost, or can not be had; it is opened again in the background.
    Down,
    /// The server does not allow what it is for. Tried again every half minute.
    Refused,
    /// The guard was shut down.
    Closed,
}

/// Whether commands are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Breaker {
    /// They are sent.
    Closed,
    /// They fail at once and nothing is sent, until the connection is there again.
    Open,
    /// Those for some masters of a cluster fail at once; the others are sent.
    Partly,
}

/// What is known of the store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClockReading {
    /// How far the store's clock is ahead of this host's, in milliseconds; negative where it is behind. As exact as
    /// half a round trip, and as this host's clock now.
    pub ahead_ms: i64,
    /// How long ago the store's clock was last read: with each connection, and each minute.
    pub age: Duration,
    /// The farthest that it has jumped between two readings. Another server's clock, after a failover, is a jump too.
    pub largest_jump: Duration,
}

/// What a guard knows about its store at one moment, without asking it.
///
/// # Examples
///
/// ```
/// use stampede_guard::StampedeGuard;
/// use stampede_guard::health::{Breaker, Topology};
///
/// let health = StampedeGuard::in_memory().health();
/// assert_eq!((health.topology, health.breaker), (Topology::Memory, Breaker::Closed));
/// println!("{health}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Where the fleet meets.
    pub topology: Topology,
    /// The connection that carries commands.
    pub commands: LinkState,
    /// The connection on which this process is told that a load has ended. Opened by the first load; without it waits
    /// end by their timers.
    pub inbox: LinkState,
    /// Whether commands are tried.
    pub breaker: Breaker,
    /// Why commands are not tried, in the server's or the system's words. Never a key.
    pub reason: Option<String>,
    /// What is known of the store's clock. `None` where there is no other clock than this host's, and before it was
    /// first read.
    pub clock: Option<ClockReading>,
    /// How long ago the inbox last heard anything. While it is [`Up`](LinkState::Up) the server is asked for a sign of
    /// life each second, and one that takes longer than a second ends the connection. `None` before the first time.
    pub last_heard: Option<Duration>,
    /// How long the answer to the latest of those questions took, or has taken by now: roughly the delay with which
    /// waiters learn of a load elsewhere. `None` before the first on a connection, and without one.
    pub inbox_lag: Option<Duration>,
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Single => "single",
            Self::Sentinel => "sentinel",
            Self::Cluster => "cluster",
        })
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::Connecting => "connecting",
            Self::Up => "up",
            Self::Down => "down",
            Self::Refused => "refused",
            Self::Closed => "closed",
        })
    }
}

impl fmt::Display for Breaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::Partly => "partly",
        })
    }
}

impl fmt::Display for Health {
    /// One line, for a log or a status page.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { topology, commands, inbox, breaker, reason, clock, last_heard, inbox_lag } = self;
        write!(f, "topology={topology} commands={commands} inbox={inbox} breaker={breaker}")?;
        if let Some(ClockReading { ahead_ms, age, largest_jump }) = clock {
            let (age, jump) = (age.as_secs_f32(), largest_jump.as_millis());
            write!(f, " clock={ahead_ms:+}ms read={age:.1}s jump={jump}ms")?;
        }
        if let Some(heard) = last_heard {
            write!(f, " heard={:.1}s", heard.as_secs_f32())?;
        }
        if let Some(lag) = inbox_lag {
            write!(f, " lag={:.1}ms", lag.as_secs_f64() * 1e3)?;
        }
        if let Some(reason) = reason {
            write!(f, " reason={reason:?}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_one_line_that_names_everything() {
        let secs = Duration::from_secs;
        let clock = Some(ClockReading { ahead_ms: -40, age: secs(7), largest_jump: secs(1) });
        let mut health = Health {
            topology: Topology::Single,
            commands: LinkState::Down,
            inbox: LinkState::Refused,
            breaker: Breaker::Open,
            reason: Some("Connection refused".to_owned()),
            clock,
            last_heard: Some(secs(3)),
            inbox_lag: Some(Duration::from_micros(400)),
        };
        assert_eq!(
            health.to_string(),
            "topology=single commands=down inbox=refused breaker=open clock=-40ms read=7.0s jump=1000ms heard=3.0s lag=0.4ms \
             reason=\"Connection refused\""
        );
        (health.clock, health.last_heard, health.inbox_lag, health.reason) = (None, None, None, None);
        assert_eq!(health.to_string(), "topology=single commands=down inbox=refused breaker=open");
    }
}
