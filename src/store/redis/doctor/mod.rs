//! Examines the server for operators: the user's rights, the server's latency, and how safe stored data is. Also checks
//! whether invalidations can wait for as many replicas as the policy requires.
//!
//! Uses separate connections: slow, refused or broken commands here must not count against the guard's connection,
//! and the guard's deadline for one command must not hide how slow the server is.

#[cfg(feature = "cluster")]
mod cluster;
mod rights;
mod server;
#[cfg(test)]
#[path = "../../../../tests/unit/store/redis/doctor_tests.rs"]
mod tests;

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{RedisError, RedisResult, Value};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use self::rights::{ALONE, ANSWER, Examination, ExaminedServer, one, words};
use super::RedisStore;
use super::commands::{Commands, by_route};
use super::connection::connector::Connector;
use super::endpoint::{TimedReading, host_ms, read_clock};
use super::errors::{bounded, io_error_of, unquoted};
use super::subscriber::channel;
use crate::health::{Breaker, ClockReading, Finding, LinkState};
use crate::store::{Examine, StoreResult};

/// How long the whole examination may take.
const TOTAL: Duration = Duration::from_secs(10);
/// How many round trips measure latency and clock.
const TRIES: usize = 20;
/// How much two readings of clocks may differ beyond the round trip: timers tick, and this machine runs other tasks.
const TICK: Duration = Duration::from_millis(20);

/// Returns all findings of one examination, after at most [`TOTAL`].
pub(super) async fn examine(store: &RedisStore, ask: Examine) -> Vec<Finding> {
    let mut checkup = Examination { store, ask, findings: Vec::new() };
    match timeout(TOTAL, checkup.run()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => checkup.broke_off(error),
        Err(_) => checkup.broke_off(io_error_of(std::io::ErrorKind::TimedOut)),
    }
    checkup.findings
}

/// Returns an error if the server, or one of the masters that can be reached, runs no scripts or refuses a command of the
/// load scripts. A server that takes no commands at present is no error, because that passes. But it is an error if no master of a
/// cluster takes commands, because no load is shared then; a single server that is loading cannot even be connected to.
pub(super) async fn probe(commands: &Commands, name: &str, within: Duration) -> StoreResult<()> {
    by_route!(
        &commands.route,
        |_server| server::probe_at(commands, name, within).await.map(drop),
        |cluster| cluster::probe(cluster, commands, name, within).await
    )
}

impl Examination<'_> {
    async fn run(&mut self) -> RedisResult<()> {
        self.guard();
        let name = self.ask.key.name();
        let target = by_route!(
            &self.store.commands.route,
            |server| {
                let connector = server.connector.clone();
                let (inbox, name) = (connector.clone(), name.to_owned());
                Some(ExaminedServer { inbox, connector, name, reached: Vec::new() })
            },
            |cluster| cluster::examine(cluster, name, &self.user(), &mut self.findings).await
        );
        let Some(mut target) = target else { return Ok(()) };
        // The guard allows little time for an answer. With more, the report can say how slow the server is.
        (target.connector.answer, target.inbox.answer) = (ANSWER, ANSWER);
        let ExaminedServer { connector, inbox, name, .. } = &target;
        let Some((mut commands, reading)) = self.connect(connector).await else { return Ok(()) };
        let greeting = one(&mut commands, redis::cmd("HELLO")).await?;
        self.findings.extend(server::of_greeting(
            greeting,
            self.store.connections.topology,
            connector.address().as_deref(),
        ));
        if let (Some(sentinel), Some(primary)) = (connector.endpoint.sentinel(), connector.address()) {
            self.findings.push(server::examine_sentinels(sentinel, &primary).await);
        }
        self.findings.extend(examine_replicas(&mut commands, self.ask.replicas, &self.user()).await?);
        self.measure_round_trips(&mut commands, reading.is_some()).await?;
        let channel = channel(Uuid::new_v4());
        let inbox = self.subscribe(inbox, &channel).await;
        let user = self.user();
        let trial = rights::examine(&mut commands, name, &channel, &user).await?;
        let (findings, examined) = by_route!(
            &self.store.commands.route,
            |_server| (trial.findings, RedisResult::Ok(())),
            |cluster| {
                cluster::examine_nodes(cluster, &target, &user, &mut commands, trial.findings).await
            }
        );
        self.findings.extend(findings);
        examined?;
        // The sink is dropped only here, because messages arrive only while the connection is open.
        if let Some((sink, mut messages)) = inbox {
            self.listen(&mut messages, trial.published_at, trial.receivers).await;
            drop(sink);
        }
        self.slots();
        self.findings.extend(server::settings(&mut commands, self.store.commands.longest_argument()).await?);
        Ok(())
    }

    /// Opens the connection for the examination.
    async fn connect(
        &mut self,
        connector: &Connector,
    ) -> Option<(MultiplexedConnection, Option<TimedReading>)> {
        let started = Instant::now();
        match connector.commands().await {
            Ok(opened) => {
                self.findings.push(Finding::ok("connection", format!("opened in {:.1?}", started.elapsed())));
                Some(opened)
            }
            Err(error) => {
                let known = connector.advice(&error);
                let found = Finding::problem("connection", format!("can not be opened: {}", unquoted(error)));
                let advice = known.unwrap_or("address, TLS, user and password; is the server up?");
                self.findings.push(found.cost(ALONE).advice(advice));
                None
            }
        }
    }

    /// Reports the guard's own state, without a request to the server.
    fn guard(&mut self) {
        let health = self.store.health();
        let (cost, advice) = match (health.commands, health.breaker) {
            // A guard that was shut down is reported elsewhere.
            (LinkState::Closed, _) => return,
            (_, Breaker::Closed) => return self.findings.push(Finding::ok("guard", health.to_string())),
            (_, Breaker::Partly) => (
                format!("of its keys, those of the masters that can not be reached: {ALONE}"),
                "it connects again by itself; see what is said of the masters",
            ),
            (_, Breaker::Open) => (
                ALONE.to_owned(),
                "it connects again by itself; if the connection below can be opened, the outage has just ended, or the \
                 server is slower than command_timeout",
            ),
        };
        self.findings.push(Finding::problem("guard", health.to_string()).cost(cost).advice(advice));
    }

    fn broke_off(&mut self, error: RedisError) {
        let found = Finding::problem("connection", format!("broke off during the checks: {}", words(error)));
        self.findings.push(found.cost(ALONE).advice("what follows was not checked; try again"));
    }

    /// Measures latency and clock with the round trip that the guard uses to check a connection.
    async fn measure_round_trips(
        &mut self,
        commands: &mut MultiplexedConnection,
        has_clock: bool,
    ) -> RedisResult<()> {
        let (mut trips, mut readings) = (Vec::with_capacity(TRIES), Vec::with_capacity(TRIES));
        for _ in 0..TRIES {
            let sent = Instant::now();
            let reading = bounded(ANSWER, read_clock(commands, false)).await?;
            trips.push(sent.elapsed());
            readings.extend(reading.map(|reading| (reading, sent.elapsed())));
        }
        trips.sort();
        let (median, worst) = (trips[TRIES / 2], trips[TRIES - 1]);
        let Examine { coordination_budget: budget, lease, .. } = self.ask;
        let bounds = TimeBounds { command: self.store.command_timeout(), budget, lease };
        self.findings.extend(bounds.latency(median, worst));
        if has_clock {
            // A cluster's common clock is that of one master, and this may be another master.
            let believed = self.store.commands.clock().filter(|_| !self.store.commands.is_spread());
            self.findings.extend(clock(&readings, believed));
        } else {
            let found = Finding::warning("clock", "TIME is not permitted");
            self.findings.push(
                found
                    .cost("freshness is judged on each host's own clock: hosts that disagree serve values too long or too briefly")
                    .advice(format!("ACL SETUSER {} +time", self.user())),
            );
        }
        Ok(())
    }

    /// Checks that all keys of one resource are in one slot.
    fn slots(&mut self) {
        let name = self.ask.key.name();
        let whole = !name.is_empty() && !name.contains(['{', '}']);
        self.findings.push(if whole {
            Finding::ok("slots", "all keys of one resource have one hash tag, and so one slot")
        } else {
            Finding::problem("slots", "the hash tag of a key is not its whole name")
                .cost("scripts would span slots")
        });
    }
}

/// The times within which a server must answer this guard.
#[derive(Clone, Copy)]
struct TimeBounds {
    command: Duration,
    budget: Duration,
    lease: Duration,
}

impl TimeBounds {
    /// Checks whether the round trips fit into this guard's settings.
    fn latency(self, median: Duration, worst: Duration) -> Vec<Finding> {
        let Self { command, budget, lease } = self;
        let measured = format!("{median:.1?} in the median of {TRIES} round trips, {worst:.1?} at worst");
        let raise = |least: Duration| {
            // Values that `build()` accepts: rounded up, and with a longer lease where the present one is too short for them.
            let ms = least.as_millis() + 1;
            let (also, lease) = match lease < least.saturating_add(Duration::from_millis(1)) * 4 {
                true => (", coordination_budget and lease", format!(", {} and {}", ms * 2, ms * 4)),
                false => (" and coordination_budget", format!(" and {}", ms * 2)),
            };
            format!("a server nearer by, or command_timeout{also} of at least {ms}{lease} ms")
        };
        let too_slow = || format!("{measured}; command_timeout is {command:.0?}");
        let latency = if median >= command {
            Finding::problem("latency", too_slow())
                .cost(format!("most commands time out: {ALONE}"))
                .advice(raise(median * 4))
        } else if worst >= command {
            Finding::warning("latency", too_slow())
                .cost("a command that takes that long is given up, and its request loads without the fleet")
                .advice(raise(worst * 2))
        } else {
            Finding::ok("latency", &measured)
        };
        // A cold key needs a look-up, an acquire, and after a wait another acquire.
        let settings = if median >= command || median * 2 >= budget {
            // Without the second round trip nothing is ever stored.
            let found = format!(
                "coordination_budget ({budget:.0?}) and command_timeout ({command:.0?}) have no room for the two round \
                 trips of a load"
            );
            Finding::problem("settings", found)
                .cost(format!("next to nothing is stored: {ALONE}"))
                .advice(raise(median * 4))
        } else if median * 3 > budget {
            let found = format!("coordination_budget ({budget:.0?}) has no room for three round trips");
            Finding::warning("settings", found)
                .cost("requests for cold keys load without the fleet")
                .advice(raise(median * 4))
        } else if worst * 3 > lease {
            let found = format!("a third of the lease ({lease:.0?}) is less than the worst round trip");
            Finding::warning("settings", found)
                .cost("a renewal that comes too late loses the lease: a second load")
                .advice("a longer lease")
        } else {
            let found = format!(
                "budget {budget:.0?}, command {command:.0?} and lease {lease:.0?} have room for this latency"
            );
            Finding::ok("settings", found)
        };
        vec![latency, settings]
    }
}

/// Compares the server's clock with this host's, and with the guard's latest reading.
fn clock(readings: &[(TimedReading, Duration)], believed: Option<ClockReading>) -> Vec<Finding> {
    // The fastest answer is the most exact.
    let Some((best, trip)) = readings.iter().min_by_key(|(_, trip)| *trip) else {
        return vec![Finding::note("clock", "could not be read")];
    };
    // All readings are compared at one moment: a pause of this process between two of them would look like a jump of the
    // server's clock.
    let compared_at = Instant::now();
    let server = |reading: &TimedReading| {
        let since = compared_at.saturating_duration_since(reading.at);
        reading.server_ms.saturating_add(since.as_millis() as u64)
    };
    let (now, host) = (server(best), host_ms());
    let ahead = i64::try_from(now).unwrap_or(i64::MAX).saturating_sub_unsigned(host);
    let offset = format!("the server's is {ahead:+} ms from this host's (within {:.1?})", *trip / 2);
    let mut findings = vec![if ahead.unsigned_abs() > 1_000 {
        Finding::note("clock", offset)
            .cost("nothing here, freshness goes by the server's clock; but times in logs do not match")
            .advice("NTP on both")
    } else {
        Finding::ok("clock", offset)
    }];
    let jump = readings.iter().map(|(reading, took)| {
        let off = Duration::from_millis(server(reading).abs_diff(now));
        off.saturating_sub(*took / 2 + *trip / 2)
    });
    let jump = jump.max().unwrap_or_default();
    let drift = believed.map_or(0, |believed| ahead.abs_diff(believed.ahead_ms));
    let drift = Duration::from_millis(drift).saturating_sub(*trip);
    let moved = "values become stale, or stay fresh, by as much too early or too late, for up to a minute";
    if jump > TICK {
        let found =
            Finding::warning("clock", format!("the server's jumped by {jump:.0?} while it was looked at"));
        findings.push(found.cost(moved).advice("a clock that is slewed, not stepped (chrony, ntpd)"));
    }
    if drift > Duration::from_millis(250) {
        let found = format!("the server's is {drift:.0?} from what this guard has last read of it");
        findings.push(
            Finding::warning("clock", found).cost(moved).advice("is it stepped, or is this another server?"),
        );
    }
    findings
}

/// Parses `answer` as the reply to HELLO, INFO and CONFIG GET. For the fuzzer.
#[cfg(any(test, fuzzing))]
pub(super) fn read_any(answer: &redis::Value) -> Vec<Finding> {
    let mut findings = server::of_greeting(answer.clone(), crate::health::Topology::Single, None);
    findings.extend(server::examine(answer, answer.clone()));
    findings
}

/// How long the replicas have to answer. (If there are enough, it takes one round trip.)
const WITHIN_MS: u64 = 500;
/// The cost if too few replicas answer.
const REFUSED: &str =
    "each invalidation, of keys, of tags and by storing, is done and returns an error all the same";

/// Checks with WAIT, as an invalidation does, whether enough replicas follow; `None` if invalidations do not wait.
async fn examine_replicas(
    commands: &mut MultiplexedConnection,
    required: u32,
    user: &str,
) -> RedisResult<Option<Finding>> {
    if required == 0 {
        return Ok(None);
    }
    let answer = one(commands, redis::cmd("WAIT").arg(required).arg(WITHIN_MS)).await?;
    Ok(Some(match answer {
        Value::Int(following) if following >= i64::from(required) => {
            Finding::ok("replicas", format!("{following} follow, invalidate_replicas asks for {required}"))
        }
        Value::Int(following) => {
            let found = format!("{following} of {required} that invalidate_replicas asks for follow");
            Finding::problem("replicas", found)
                .cost(REFUSED)
                .advice("more replicas that are up, or a smaller invalidate_replicas")
        }
        Value::ServerError(error) if error.code() == "NOPERM" => {
            let found = format!("`{user}` may not WAIT, which invalidate_replicas needs");
            Finding::problem("replicas", found).cost(REFUSED).advice(format!("ACL SETUSER {user} +wait"))
        }
        Value::ServerError(error) => {
            let found = format!("WAIT is refused: {}", words(error.into()));
            Finding::problem("replicas", found)
                .cost(REFUSED)
                .advice("the address of the primary, or no invalidate_replicas")
        }
        _ => Finding::note("replicas", "WAIT was not answered with a number"),
    }))
}
