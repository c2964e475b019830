//! One connection on which Postgres sends its log, and what comes from it.

use std::time::Duration;

use pgwire_replication::{Lsn, ReplicationEvent};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{ErrorKind, LogError};
use crate::gate::{Connection, Gate, PATIENCE, within};
use crate::log::{KeptLog, Log, LogStep, Session};
use crate::message::LogMessage;
use crate::names::Names;
use crate::position::{LogPosition, ServerId};
use crate::rows::RowParser;
use crate::source::Source;

/// After this time without a message the server is taken for dead: it would have asked for an answer by then.
const MOST_SILENCE: Duration = Duration::from_secs(6);
/// How often the server is asked what it keeps for the slot, while it sends anything.
const LOOKS: Duration = Duration::from_secs(5);
/// The pauses between two looks at whether a transaction is visible, of which the first almost always shows that it is.
const SHORTEST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(50);

/// A connection on which the log arrives.
pub(crate) struct PostgresSession {
    connection: Connection,
    /// Another connection, for statements.
    statements: Gate,
    slot: String,
    server: ServerId,
    kept: Option<KeptLog>,
    looked: Instant,
    /// The slot's first message is before this LSN.
    began: u64,
    /// Microseconds of this process's clock minus those of the server's, measured every now and then.
    clock_offset: i64,
    rows: Option<RowParser>,
    xid: u32,
    transaction: Names,
}

/// Microseconds from the epoch of Unix to that of Postgres, 2000-01-01.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

impl Log for Source {
    type Session = PostgresSession;

    /// Also makes the publication and the slot, if they are missing.
    async fn open(&self) -> Result<PostgresSession, LogError> {
        #[cfg(feature = "tls")]
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Another task may just have installed one.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let (mut gate, mut statements) = (Gate::open(self).await?, Gate::open(self).await?);
        gate.set_up().await?;
        let began = gate.text("select pg_current_wal_flush_lsn()").await?;
        let began = Lsn::parse(&began).map_err(|_| LogError::new(ErrorKind::Ended))?.0;
        let mut connection = gate.connection;
        let system = within(PATIENCE, connection.identify_system()).await?;
        let id = system.system_id.parse().map_err(|_| LogError::new(ErrorKind::Ended))?;
        within(PATIENCE, connection.start()).await?;
        within(PATIENCE, connection.wait_started()).await?;
        statements.check_is_no_standby().await?;
        Ok(PostgresSession {
            connection,
            slot: self.slot.clone(),
            server: ServerId { system: id, timeline: system.timeline },
            kept: None,
            looked: Instant::now(),
            began,
            clock_offset: clock_offset(&mut statements).await?,
            rows: self.rows.clone().map(RowParser::new),
            xid: 0,
            transaction: Names::default(),
            statements,
        })
    }
}

impl PostgresSession {
    async fn look_at_slot(&mut self) -> Result<(), LogError> {
        let sql = format!(
            "select pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint, safe_wal_size from pg_replication_slots \
             where slot_name = '{}'",
            self.slot
        );
        let row = self.statements.rows(&sql).await?.into_iter().next().unwrap_or_default();
        let number = |at: usize| row.get(at).and_then(|text| text.parse::<i64>().ok());
        let bytes = |number: i64| u64::try_from(number).unwrap_or_default();
        self.kept = number(0).map(|lag| KeptLog { lag: bytes(lag), left: number(1).map(bytes) });
        self.clock_offset = clock_offset(&mut self.statements).await?;
        self.looked = Instant::now();
        Ok(())
    }

    fn read(&mut self, event: ReplicationEvent) -> Result<Option<LogStep>, LogError> {
        Ok(match event {
            ReplicationEvent::Begin { xid, .. } => {
                (self.xid, self.transaction) = (xid, Names::default());
                None
            }
            ReplicationEvent::Message { prefix, .. } if prefix != LogMessage::PREFIX => None,
            ReplicationEvent::Message { content, transactional, .. } => {
                let names = LogMessage::parse(&content).unwrap_or_else(|| {
                    tracing::warn!(
                        "a message in the log cannot be read: everything in the namespace is invalidated"
                    );
                    Names::all()
                });
                if !transactional {
                    return Ok(Some(LogStep { names, ..LogStep::default() }));
                }
                self.transaction.add(names);
                None
            }
            ReplicationEvent::XLogData { data, .. } => {
                if let Some(rows) = &mut self.rows {
                    self.transaction.add(rows.names(data)?);
                }
                None
            }
            ReplicationEvent::Commit { end_lsn, commit_time_micros, .. } => Some(LogStep {
                xid: Some(self.xid).filter(|_| !self.transaction.is_empty()),
                names: std::mem::take(&mut self.transaction),
                end: Some(end_lsn.0),
                committed: Some(
                    commit_time_micros.saturating_add(POSTGRES_EPOCH).saturating_add(self.clock_offset),
                ),
            }),
            // Everything before it has been sent.
            ReplicationEvent::KeepAlive { wal_end, .. } => {
                Some(LogStep { end: Some(wal_end.0), ..LogStep::default() })
            }
            ReplicationEvent::StoppedAt { .. } => return Err(LogError::new(ErrorKind::Ended)),
        })
    }
}

impl Session for PostgresSession {
    fn position(&self, end: u64) -> Option<LogPosition> {
        (end >= self.began).then(|| LogPosition::new(self.server, end))
    }

    fn server(&self) -> ServerId {
        self.server
    }

    fn kept(&mut self) -> Option<KeptLog> {
        self.kept.take()
    }

    async fn next(&mut self) -> Result<LogStep, LogError> {
        loop {
            if self.looked.elapsed() >= LOOKS {
                self.look_at_slot().await?;
            }
            let event = match timeout(MOST_SILENCE, self.connection.recv()).await {
                Ok(event) => event?.ok_or_else(|| LogError::new(ErrorKind::Ended))?,
                Err(_) => return Err(LogError::new(ErrorKind::Silent)),
            };
            if let Some(step) = self.read(event)? {
                return Ok(step);
            }
        }
    }

    async fn until_visible(&mut self, xids: &[u32]) -> Result<(), LogError> {
        let mut pause = SHORTEST_LOOK;
        loop {
            let snapshot = self.statements.text("select pg_current_snapshot()").await?;
            let snapshot = Snapshot::parse(&snapshot).ok_or_else(|| LogError::new(ErrorKind::Ended))?;
            if xids.iter().all(|xid| snapshot.sees(*xid)) {
                return Ok(());
            }
            if pause == LONGEST_LOOK {
                self.statements.check_is_no_standby().await?;
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_LOOK);
        }
    }

    fn confirm(&mut self, end: u64) {
        self.connection.update_applied_lsn(Lsn(end));
    }

    async fn close(mut self) {
        // The last confirmation may not be sent: what it confirms is read again.
        let _ = timeout(PATIENCE, self.connection.shutdown()).await;
    }
}

/// What a transaction sees that begins now: `xmin:xmax:xip,xip..`, of which the lower 32 bits are those of a transaction in the log.
struct Snapshot {
    /// The first transaction that had not ended, and had no later one that had.
    xmax: u32,
    /// Those before it that had not ended.
    running: Vec<u32>,
}

impl Snapshot {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':').skip(1);
        let xid = |text: &str| text.parse::<u64>().ok().map(|xid| (xid & 0xFFFF_FFFF) as u32);
        let (xmax, running) = (xid(parts.next()?)?, parts.next()?);
        let running = running.split(',').filter(|xid| !xid.is_empty()).map(xid).collect::<Option<_>>()?;
        Some(Self { xmax, running })
    }

    /// Whether a committed transaction is seen. Numbers go in a circle.
    fn sees(&self, xid: u32) -> bool {
        xid.wrapping_sub(self.xmax) > u32::MAX / 2 && !self.running.contains(&xid)
    }
}

/// By half of the statement's round trip at most.
async fn clock_offset(gate: &mut Gate) -> Result<i64, LogError> {
    let sent = Instant::now();
    let server = gate.text("select (extract(epoch from clock_timestamp()) * 1000000)::bigint").await?;
    let server: i64 = server.parse().map_err(|_| LogError::new(ErrorKind::Ended))?;
    let half = i64::try_from(sent.elapsed().as_micros() / 2).unwrap_or(i64::MAX);
    Ok(unix_micros().saturating_sub(half).saturating_sub(server))
}

/// This process's clock.
pub(crate) fn unix_micros() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.ok().and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_sees_what_has_ended_before_it() {
        let seen = |snapshot: &str, xid| Snapshot::parse(snapshot).expect("a snapshot").sees(xid);
        assert!(seen("740:740:", 739) && !seen("740:740:", 740) && !seen("740:740:", 741));
        assert!(
            !seen("740:745:740,743", 740) && seen("740:745:740,743", 742) && !seen("740:745:740,743", 743)
        );
        // Beyond 32 bits, and around their end.
        assert!(seen("4294967300:4294967310:", 5) && !seen("4294967300:4294967310:4294967301", 5));
        assert!(seen("4294967290:4294967298:", u32::MAX) && !seen("4294967290:4294967295:", u32::MAX));
        for text in ["", "740", "740:x:", "740:745:a"] {
            assert!(Snapshot::parse(text).is_none(), "{text}");
        }
    }
}
