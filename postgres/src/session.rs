//! One connection on which Postgres sends its log: what is set up before, and what comes from it.

use std::time::Duration;

use pgwire_replication::config::ReplicationConfig;
use pgwire_replication::{Lsn, PgWireError, ReplicationClient, ReplicationEvent};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{ErrorKind, LogError};
use crate::log::{KeptLog, Log, LogStep, Session};
use crate::message::LogMessage;
use crate::names::Names;
use crate::position::LogPosition;
use crate::rows::RowParser;
use crate::source::{Server, Source};

/// How long connecting, a statement and the start of replication may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the server may take to make a slot: it waits for the end of all transactions that run then.
const SLOT_PATIENCE: Duration = Duration::from_secs(600);
/// After this time without an answer the server ends the connection, so that the slot is free. It asks for an answer after half of it.
const SERVER_PATIENCE: Duration = Duration::from_secs(5);
/// After this time the server gives up sending to a reader that takes nothing. It would send it the reason of its end first, and meanwhile
/// neither the slot is free nor does a checkpoint end.
const STOPPED: Duration = Duration::from_millis(1_500);
/// After this time without a message the server is taken for dead: it would have asked for an answer by then.
const MOST_SILENCE: Duration = Duration::from_secs(6);
/// How soon the server learns of a position at the latest.
const CONFIRM: Duration = Duration::from_millis(100);

/// How often the server is asked what it keeps for the slot, while it sends anything.
const LOOKS: Duration = Duration::from_secs(5);
/// The pauses between two looks at whether a transaction is visible, of which the first almost always shows that it is.
const SHORTEST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(50);

impl Source {
    fn config(&self) -> ReplicationConfig {
        let Server { host, port, user, password, database, tls } = self.server.clone();
        let patience = SERVER_PATIENCE.as_millis();
        ReplicationConfig::new(host, user, password, database, &*self.slot, &*self.publication)
            .with_port(port)
            .with_tls(tls)
            .with_status_interval(CONFIRM)
            .with_options(format!(
                "-c wal_sender_timeout={patience} -c tcp_user_timeout={} -c synchronous_commit=local",
                STOPPED.as_millis()
            ))
            .with_application_name(self.application_name())
    }

    /// By which a reader knows the connection of another reader of the same slot from that of another program.
    fn application_name(&self) -> String {
        format!("stampede-guard {}", self.slot)
    }
}

/// A connection to a server on which replication has not begun.
pub(crate) struct Gate {
    source: Source,
    client: ReplicationClient,
}

/// What a server says of a slot.
struct Slot {
    active_pid: Option<String>,
    is_lost: bool,
    is_usable: bool,
}

impl Gate {
    pub(crate) async fn open(source: &Source) -> Result<Self, LogError> {
        let client = within(PATIENCE, ReplicationClient::connect_gated(source.config())).await?;
        Ok(Self { source: source.clone(), client })
    }

    pub(crate) async fn rows(&mut self, sql: &str) -> Result<Vec<Vec<String>>, LogError> {
        let rows = within(PATIENCE, self.client.simple_query(sql)).await?;
        let text = |column: Option<bytes::Bytes>| {
            column.map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
        };
        Ok(rows.into_iter().map(|row| row.into_iter().map(text).collect()).collect())
    }

    /// The only row's only column, empty for NULL.
    pub(crate) async fn text(&mut self, sql: &str) -> Result<String, LogError> {
        let row = self.rows(sql).await?.into_iter().next();
        Ok(row.and_then(|row| row.into_iter().next()).unwrap_or_default())
    }

    async fn slot(&mut self, name: &str) -> Result<Option<Slot>, LogError> {
        let sql = format!(
            "select active_pid, wal_status, plugin = 'pgoutput' and database = current_database() \
             from pg_replication_slots where slot_name = '{name}'"
        );
        let row = self.rows(&sql).await?.into_iter().next();
        Ok(row.map(|row| {
            let column = |at: usize| row.get(at).cloned().unwrap_or_default();
            Slot {
                active_pid: Some(column(0)).filter(|pid| !pid.is_empty()),
                is_lost: column(1) == "lost",
                is_usable: column(2) == "t",
            }
        }))
    }

    /// Checks what replication needs, and makes the publication and the slot if they are not there.
    async fn set_up(&mut self) -> Result<(), LogError> {
        if self.text("select pg_is_in_recovery()").await? == "t" {
            return Err(LogError::new(ErrorKind::Standby));
        }
        let level = self.text("show wal_level").await?;
        if level != "logical" {
            return Err(LogError::new(ErrorKind::WalLevel(level)));
        }
        // Before the slot: what is written earlier is decoded with the publications of that time.
        let publication = self.source.publication.clone();
        let published = format!("select 1 from pg_publication where pubname = '{publication}'");
        if self.text(&published).await?.is_empty() {
            self.rows(&format!("create publication {publication}")).await?;
        }
        let name = self.source.slot.clone();
        match self.slot(&name).await? {
            Some(slot) if slot.is_lost => {
                tracing::warn!(
                    slot = %name,
                    "the server has removed parts of the log that the slot had not delivered (max_slot_wal_keep_size): everything in \
                     the namespace is invalidated, and the slot begins anew"
                );
                self.rows(&format!("select pg_drop_replication_slot('{name}')")).await?;
                self.make_slot().await
            }
            Some(slot) if !slot.is_usable => Err(LogError::new(ErrorKind::SlotOfAnother(name.clone()))),
            Some(Slot { active_pid: Some(pid), .. }) => self.take_over(&pid).await,
            Some(_) => Ok(()),
            None => {
                tracing::info!(slot = %name, "the slot is made; everything in the namespace is invalidated");
                self.make_slot().await
            }
        }
    }

    /// Makes a slot whose first message invalidates everything: what was committed before it is in no log that will be read. First under
    /// another name, so that a reader that dies in between leaves no slot without that message.
    async fn make_slot(&mut self) -> Result<(), LogError> {
        let name = self.source.slot.clone();
        let new = format!("{name}_new");
        if self.slot(&new).await?.is_some() {
            self.rows(&format!("select pg_drop_replication_slot('{new}')")).await?;
        }
        let create = format!("select pg_create_logical_replication_slot('{new}', 'pgoutput')");
        within(SLOT_PATIENCE, self.client.simple_query(&create)).await?;
        self.until_all_ended().await?;
        let everything = String::from_utf8_lossy(&LogMessage::new().all().to_bytes()).into_owned();
        let prefix = LogMessage::PREFIX;
        self.rows(&format!("select pg_logical_emit_message(true, '{prefix}', '{everything}')")).await?;
        self.rows(&format!("select pg_copy_logical_replication_slot('{new}', '{name}')")).await?;
        self.rows(&format!("select pg_drop_replication_slot('{new}')")).await?;
        Ok(())
    }

    /// Waits for the end of all transactions that run now. One of them may have committed before the slot, and be seen by loads later.
    async fn until_all_ended(&mut self) -> Result<(), LogError> {
        let number = self.text("select pg_current_xact_id()").await?;
        let ended = format!("select pg_snapshot_xmin(pg_current_snapshot()) >= '{number}'::xid8");
        let until = Instant::now() + SLOT_PATIENCE;
        while self.text(&ended).await? != "t" {
            if Instant::now() >= until {
                return Err(LogError::new(ErrorKind::LongTransactions));
            }
            sleep(LONGEST_LOOK).await;
        }
        Ok(())
    }

    /// Ends the connection of a reader that has lost the mutex, or has died without its host's noticing.
    async fn take_over(&mut self, pid: &str) -> Result<(), LogError> {
        let name = self.source.slot.clone();
        let program =
            self.text(&format!("select application_name from pg_stat_activity where pid = {pid}")).await?;
        // Empty if it has just ended.
        if !program.is_empty() && program != self.source.application_name() {
            return Err(LogError::new(ErrorKind::SlotOfAnother(name.clone())));
        }
        tracing::info!(slot = %name, "the connection of the slot's former reader is ended");
        self.rows(&format!("select pg_terminate_backend({pid}, 2000)")).await?;
        Ok(())
    }
}

/// A connection on which the log arrives.
pub(crate) struct PostgresSession {
    client: ReplicationClient,
    /// Another connection, for statements.
    statements: Gate,
    slot: String,
    timeline: u32,
    kept: Option<KeptLog>,
    looked: Instant,
    /// The slot's first message is before this LSN.
    began: u64,
    /// Microseconds of this process's clock minus those of the server's, measured when the connection was opened.
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
        let (mut gate, statements) = (Gate::open(self).await?, Gate::open(self).await?);
        gate.set_up().await?;
        let began = gate.text("select pg_current_wal_flush_lsn()").await?;
        let began = Lsn::parse(&began).map_err(|_| LogError::new(ErrorKind::Ended))?.0;
        let clock_offset = clock_offset(&mut gate).await?;
        let Gate { mut client, .. } = gate;
        let timeline = within(PATIENCE, client.identify_system()).await?.timeline;
        within(PATIENCE, client.start()).await?;
        within(PATIENCE, client.wait_started()).await?;
        let rows = self.rows.clone().map(RowParser::new);
        let (slot, kept, looked) = (self.slot.clone(), None, Instant::now());
        Ok(PostgresSession {
            client,
            statements,
            slot,
            kept,
            looked,
            timeline,
            began,
            clock_offset,
            rows,
            xid: 0,
            transaction: Names::default(),
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
        (end >= self.began).then(|| LogPosition::new(self.timeline, end))
    }

    fn kept(&mut self) -> Option<KeptLog> {
        self.kept.take()
    }

    async fn next(&mut self) -> Result<LogStep, LogError> {
        loop {
            if self.looked.elapsed() >= LOOKS {
                self.look_at_slot().await?;
            }
            let event = match timeout(MOST_SILENCE, self.client.recv()).await {
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
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_LOOK);
        }
    }

    fn confirm(&mut self, end: u64) {
        self.client.update_applied_lsn(Lsn(end));
    }

    async fn close(mut self) {
        // The server frees the slot at the end of the connection, and it has the last confirmation by then.
        let _ = timeout(PATIENCE, self.client.shutdown()).await;
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

async fn within<T>(
    patience: Duration,
    work: impl Future<Output = Result<T, PgWireError>>,
) -> Result<T, LogError> {
    match timeout(patience, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(LogError::new(ErrorKind::Silent)),
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
