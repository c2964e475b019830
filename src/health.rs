//! The state of a guard's store: [`Health`], a snapshot of what the guard knows, and [`Report`], the findings of an examination of the
//! deployment, with their costs and remedies.
//!
//! [`StampedeGuard::health`](crate::StampedeGuard::health) sends nothing and costs nothing: for a status page, or a gauge.
//! [`StampedeGuard::doctor`](crate::StampedeGuard::doctor) asks the server: for a deployment, or an incident.

use std::fmt;
use std::time::Duration;

/// Which kind of store the fleet shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Topology {
    /// This process's memory: there is no fleet.
    Memory,
    /// One Redis server, or one name that stands for it.
    Single,
    /// The Redis server that its sentinels call the primary.
    Sentinel,
    /// The masters of a Redis Cluster, each with some of the keys.
    Cluster,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkState {
    /// No command has needed the connection yet.
    Idle,
    /// The connection is being opened for the first time; commands wait for it, within their deadlines. After two
    /// command timeouts it is `Down`, even if the attempt goes on.
    Connecting,
    /// The connection is open.
    Up,
    /// The connection was lost or cannot be opened; it is opened again in the background.
    Down,
    /// The server refuses the commands that the connection is for. They are tried again every half minute.
    Refused,
    /// The guard was shut down.
    Closed,
}

/// Whether commands are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Breaker {
    /// Commands are sent.
    Closed,
    /// Commands fail at once and are not sent, until the connection is up again.
    Open,
    /// Commands for some masters of a cluster fail at once; the others are sent.
    Partly,
}

/// The latest reading of the store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClockReading {
    /// How far the store's clock is ahead of this host's, in milliseconds; negative if it is behind. The error is up to half a
    /// round trip of the reading; this host's clock is read now.
    pub ahead_ms: i64,
    /// How long ago the store's clock was last read. It is read on each new connection, and each minute.
    pub age: Duration,
    /// The largest jump of the store's clock between two successive readings so far. After a failover the difference to the new server's
    /// clock counts as a jump too.
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
    /// Which kind of store the fleet shares.
    pub topology: Topology,
    /// The connections that carry commands, which are opened and lost together.
    pub commands: LinkState,
    /// How many connections for commands are open; in a cluster those to all masters together. 0 for a store in memory.
    pub open_connections: usize,
    /// The connection on which this process is notified that a load has ended. The first load opens it; without this
    /// connection, waits end by their timers.
    pub inbox: LinkState,
    /// Whether commands are sent.
    pub breaker: Breaker,
    /// Why commands are not sent, in the server's or the system's words. Never a key.
    pub reason: Option<String>,
    /// The latest reading of the store's clock. `None` if the store uses this host's clock, and before the first
    /// reading.
    pub clock: Option<ClockReading>,
    /// How long ago the inbox last received anything; `None` if it never did. While the inbox is [`Up`](LinkState::Up), the guard pings
    /// the server each second through it, and closes the inbox's connection if the answer takes longer than a second.
    pub silent_for: Option<Duration>,
    /// How long the answer to the latest ping took, or has taken by now: roughly the delay with which
    /// waiters learn of a load elsewhere. `None` before the first ping on a connection, and without a connection.
    pub inbox_lag: Option<Duration>,
    /// How many times the breaker has opened since the guard was made: a connection for commands was lost or could not be opened.
    pub outages: u64,
    /// How many times, since the guard was made, the provider of credentials (`Backend::credentials`) has failed or the server has
    /// refused its credentials. 0 without a provider.
    pub credential_failures: u64,
    /// The local tier; `None` if no policy of this guard keeps copies.
    pub local: Option<LocalTierHealth>,
}

/// The copies in this process's memory, and the lease under which they are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalTierHealth {
    /// How many copies there are. Copies of values that were changed count until their space is needed.
    pub copies: u64,
    /// How many bytes the copies take, by estimate.
    pub bytes: u64,
    /// How many bytes the copies may take: `local_capacity`, less what is for [threads' own copies](crate::StampedeGuardBuilder::local_capacity)
    /// once there are some.
    pub capacity: u64,
    /// How long this process may still serve from memory, unless the lease is renewed, which happens at each third of its term while
    /// callers request copies. Zero while it is not renewed: the store is down, or no caller has requested a copy for some terms.
    pub lease_remaining: Duration,
}

/// Implements `Display` for enums by a text for each variant.
macro_rules! texts {
    ($($Type:ident { $($Variant:ident = $text:literal),+ })+) => {$(
        impl fmt::Display for $Type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $(Self::$Variant => $text,)+
                })
            }
        }
    )+};
}

texts! {
    Topology { Memory = "memory", Single = "single", Sentinel = "sentinel", Cluster = "cluster" }
    LinkState {
        Idle = "idle", Connecting = "connecting", Up = "up", Down = "down", Refused = "refused", Closed = "closed"
    }
    Breaker { Closed = "closed", Open = "open", Partly = "partly" }
    Severity { Ok = "ok", Note = "note", Warning = "WARNING", Problem = "PROBLEM" }
}

impl fmt::Display for Health {
    /// One line, for a log or a status page.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { topology, commands, inbox, breaker, outages, credential_failures, .. } = self;
        write!(f, "topology={topology} commands={commands} inbox={inbox} breaker={breaker}")?;
        if let Some(ClockReading { ahead_ms, age, largest_jump }) = &self.clock {
            let (age, jump) = (age.as_secs_f32(), largest_jump.as_millis());
            write!(f, " clock={ahead_ms:+}ms read={age:.1}s jump={jump}ms")?;
        }
        if let Some(silence) = self.silent_for {
            write!(f, " heard={:.1}s", silence.as_secs_f32())?;
        }
        if let Some(lag) = self.inbox_lag {
            write!(f, " lag={:.1}ms", lag.as_secs_f64() * 1e3)?;
        }
        if *outages > 0 {
            write!(f, " outages={outages}")?;
        }
        if *credential_failures > 0 {
            write!(f, " credential_failures={credential_failures}")?;
        }
        if let Some(LocalTierHealth { copies, bytes, capacity, lease_remaining }) = &self.local {
            let left = lease_remaining.as_secs_f32();
            write!(f, " copies={copies} bytes={bytes}/{capacity} lease={left:.1}s")?;
        }
        if let Some(reason) = &self.reason {
            write!(f, " reason={reason:?}")?;
        }
        Ok(())
    }
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// The check found nothing wrong.
    Ok,
    /// Worth knowing, or not visible with the rights of this user.
    Note,
    /// The guard works, but this costs something: a second load, a slower wait, all stored values.
    Warning,
    /// A promise does not hold here.
    Problem,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The name of the check: `rights`, `latency`, `eviction` and so on.
    pub check: &'static str,
    /// How much the finding matters.
    pub severity: Severity,
    /// What was found. Never a key, a value or a password.
    pub found: String,
    /// What the finding costs the service; empty if it costs nothing.
    pub cost: String,
    /// What to do; empty if there is nothing to do.
    pub advice: String,
}

/// The findings of [`StampedeGuard::doctor`](crate::StampedeGuard::doctor).
///
/// Its `Display` is for people: the worst finding first, each with its cost and advice.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use stampede_guard::StampedeGuard;
/// use stampede_guard::health::Severity;
///
/// let report = StampedeGuard::in_memory().doctor().await;
/// for finding in &report.findings {
///     if finding.severity >= Severity::Warning {
///         eprintln!("{}: {}", finding.check, finding.found);
///     }
/// }
/// assert!(report.is_healthy());
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// All findings, in the order of the checks.
    pub findings: Vec<Finding>,
}

impl Finding {
    fn new(check: &'static str, severity: Severity, found: impl Into<String>) -> Self {
        Self { check, severity, found: found.into(), cost: String::new(), advice: String::new() }
    }

    pub(crate) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Ok, found)
    }

    pub(crate) fn note(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Note, found)
    }

    pub(crate) fn warning(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Warning, found)
    }

    pub(crate) fn problem(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Problem, found)
    }

    pub(crate) fn cost(self, cost: impl Into<String>) -> Self {
        Self { cost: cost.into(), ..self }
    }

    pub(crate) fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: advice.into(), ..self }
    }
}

impl Report {
    pub(crate) fn new(findings: Vec<Finding>) -> Self {
        Self { findings }
    }

    /// Whether every promise holds here: no finding is a [`Problem`](Severity::Problem). Warnings and checks that were not
    /// permitted do not count; use [`worst`](Self::worst) to be stricter.
    pub fn is_healthy(&self) -> bool {
        self.worst() < Severity::Problem
    }

    /// The severity of the worst finding.
    pub fn worst(&self) -> Severity {
        self.findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { check, severity, found, cost, advice } = self;
        write!(f, "{severity:8} {check}: {found}")?;
        if !cost.is_empty() {
            write!(f, "\n         costs: {cost}")?;
        }
        if !advice.is_empty() {
            write!(f, "\n         to do: {advice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut findings: Vec<_> = self.findings.iter().collect();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
        let (problems, warnings) = (count(Severity::Problem), count(Severity::Warning));
        let verdict =
            if self.is_healthy() { "every promise holds here" } else { "not every promise holds here" };
        writeln!(f, "stampede-guard: {verdict}; problems: {problems}, warnings: {warnings}")?;
        for finding in findings {
            writeln!(f, "{finding}")?;
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
            open_connections: 0,
            inbox: LinkState::Refused,
            breaker: Breaker::Open,
            reason: Some("Connection refused".to_owned()),
            clock,
            silent_for: Some(secs(3)),
            inbox_lag: Some(Duration::from_micros(400)),
            outages: 2,
            credential_failures: 5,
            local: Some(LocalTierHealth {
                copies: 3,
                bytes: 900,
                capacity: 2_000,
                lease_remaining: Duration::from_millis(1_500),
            }),
        };
        assert_eq!(
            health.to_string(),
            "topology=single commands=down inbox=refused breaker=open clock=-40ms read=7.0s jump=1000ms heard=3.0s lag=0.4ms \
             outages=2 credential_failures=5 copies=3 bytes=900/2000 lease=1.5s reason=\"Connection refused\""
        );
        (health.clock, health.silent_for, health.inbox_lag, health.reason) = (None, None, None, None);
        (health.local, health.outages, health.credential_failures) = (None, 0, 0);
        assert_eq!(health.to_string(), "topology=single commands=down inbox=refused breaker=open");
    }
}

#[cfg(test)]
mod report_tests {
    use super::*;

    #[test]
    fn a_report_lists_the_worst_finding_first_with_its_cost_and_advice() {
        let report = Report::new(vec![
            Finding::ok("version", "7.0.15"),
            Finding::problem("rights", "not permitted: EVAL")
                .cost("each process loads for itself")
                .advice("+eval"),
        ]);
        assert_eq!(
            report.to_string(),
            "stampede-guard: not every promise holds here; problems: 1, warnings: 0\n\
             PROBLEM  rights: not permitted: EVAL\n         costs: each process loads for itself\n         to do: +eval\n\
             ok       version: 7.0.15\n"
        );
        assert!(!report.is_healthy());
    }

    #[test]
    fn warnings_and_checks_not_permitted_leave_a_report_healthy() {
        let report =
            Report::new(vec![Finding::warning("memory", "no bound"), Finding::note("info", "not permitted")]);
        assert!(report.is_healthy());
        assert_eq!(report.worst(), Severity::Warning);
        assert_eq!(Report::default().worst(), Severity::Ok);
    }
}
