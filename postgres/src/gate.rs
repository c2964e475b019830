//! [`Gate`]: a connection to a server before its log is read, and what is set up there.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use bytes::Bytes;
use pgwire_replication::config::ReplicationConfig;
use pgwire_replication::{PgWireError, ReplicationClient};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{ErrorKind, LogError};
use crate::message::LogMessage;
use crate::source::{Server, Source};

/// How long connecting, a statement and the start of replication may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// How long the server may take to make a slot: it waits for the end of all transactions that run then.
const SLOT_PATIENCE: Duration = Duration::from_secs(600);
/// After this time without an answer, or without its taking anything, the server ends the connection of a reader, so that the slot is free.
/// It asks for an answer after half of it. The second is for a stopped reader with a full connection: its server process waits in the
/// middle of a message, and a checkpoint that finds the slot beyond its bound would wait for that process.
const SERVER_PATIENCE: Duration = Duration::from_secs(5);
/// How soon the server learns of a position at the latest.
const CONFIRM: Duration = Duration::from_millis(100);
/// How often the server is asked whether transactions have ended.
const LOOK: Duration = Duration::from_millis(50);
/// How many events wait for the reader at most.
const EVENTS: usize = 1_024;

impl Source {
    fn config(&self) -> ReplicationConfig {
        let Server { host, port, user, password, database, tls } = self.server.clone();
        let patience = SERVER_PATIENCE.as_millis();
        ReplicationConfig::new(host, user, password, database, &*self.slot, &*self.publication)
            .with_port(port)
            .with_tls(tls)
            .with_status_interval(CONFIRM)
            .with_buffer_size(EVENTS)
            .with_options(format!(
                "-c wal_sender_timeout={patience} -c tcp_user_timeout={patience} -c synchronous_commit=local"
            ))
            .with_application_name(&self.application_name)
    }
}

/// A connection that ends with this value.
pub(crate) struct Connection(ReplicationClient);

impl Deref for Connection {
    type Target = ReplicationClient;

    fn deref(&self) -> &ReplicationClient {
        &self.0
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut ReplicationClient {
        &mut self.0
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Its task would otherwise wait for a server that does not answer.
        self.0.abort();
    }
}

/// A connection to a server on which replication has not begun.
pub(crate) struct Gate {
    source: Source,
    pub(crate) connection: Connection,
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
        Ok(Self { source: source.clone(), connection: Connection(client) })
    }

    pub(crate) async fn rows(&mut self, sql: &str) -> Result<Vec<Vec<String>>, LogError> {
        self.rows_within(PATIENCE, sql).await
    }

    async fn rows_within(&mut self, patience: Duration, sql: &str) -> Result<Vec<Vec<String>>, LogError> {
        let rows = within(patience, self.connection.simple_query(sql)).await?;
        let text = |column: Option<Bytes>| {
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
    pub(crate) async fn set_up(&mut self) -> Result<(), LogError> {
        if self.text("select pg_is_in_recovery()").await? == "t" {
            return Err(LogError::new(ErrorKind::Standby));
        }
        let level = self.text("show wal_level").await?;
        if level != "logical" {
            return Err(LogError::new(ErrorKind::WalLevel(level)));
        }
        let is_published = self.make_publication().await?;
        let name = self.source.slot.clone();
        let slot = self.slot(&name).await?;
        if slot.as_ref().is_some_and(|slot| !slot.is_usable) {
            return Err(LogError::new(ErrorKind::SlotOfAnother(name)));
        }
        match slot {
            Some(slot) if slot.is_lost || !is_published => {
                tracing::warn!(
                    slot = %name,
                    "a part of the log can not be read: the server has removed it (max_slot_wal_keep_size), or the publication was \
                     dropped. Everything in the namespace is invalidated, and the slot begins anew"
                );
                self.rows(&format!("select pg_drop_replication_slot('{name}')")).await?;
                self.make_slot().await
            }
            Some(Slot { active_pid: Some(pid), .. }) => self.take_over(&pid).await,
            Some(_) => Ok(()),
            None => {
                tracing::info!(slot = %name, "the slot is made; everything in the namespace is invalidated");
                self.make_slot().await
            }
        }
    }

    pub(crate) async fn has_publication(&mut self, name: &str) -> Result<bool, LogError> {
        let sql = format!("select 1 from pg_publication where pubname = '{name}'");
        Ok(!self.text(&sql).await?.is_empty())
    }

    /// Makes the publication if it is not there; messages need none of its tables. Returns whether it was there: what was written before it
    /// cannot be decoded.
    async fn make_publication(&mut self) -> Result<bool, LogError> {
        let name = self.source.publication.clone();
        if self.has_publication(&name).await? {
            return Ok(true);
        }
        if self.source.rows.is_some() {
            return Err(LogError::new(ErrorKind::NoPublication(name)));
        }
        self.rows(&format!("create publication \"{name}\"")).await?;
        Ok(false)
    }

    /// Makes a slot whose first message invalidates everything: what was committed before it is in no log that will be read. First as a
    /// temporary slot of this connection, so that a reader that dies in between leaves no slot without that message.
    async fn make_slot(&mut self) -> Result<(), LogError> {
        let (name, temporary) =
            (self.source.slot.clone(), format!("{}_{:08x}", self.source.slot, fastrand::u32(..)));
        let create = format!("select pg_create_logical_replication_slot('{temporary}', 'pgoutput', true)");
        self.rows_within(SLOT_PATIENCE, &create).await?;
        self.until_all_ended().await?;
        let everything = String::from_utf8_lossy(&LogMessage::new().all().to_bytes()).into_owned();
        let prefix = LogMessage::PREFIX;
        self.rows(&format!("select pg_logical_emit_message(true, '{prefix}', '{everything}')")).await?;
        self.rows(&format!("select pg_copy_logical_replication_slot('{temporary}', '{name}', false)"))
            .await?;
        self.rows(&format!("select pg_drop_replication_slot('{temporary}')")).await?;
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
            sleep(LOOK).await;
        }
        Ok(())
    }

    /// Ends the connection of a reader that has lost the mutex, or has died without its host's noticing.
    async fn take_over(&mut self, pid: &str) -> Result<(), LogError> {
        let name = self.source.slot.clone();
        let program =
            self.text(&format!("select application_name from pg_stat_activity where pid = {pid}")).await?;
        // Empty if it has just ended.
        if !program.is_empty() && program != self.source.application_name {
            return Err(LogError::new(ErrorKind::SlotOfAnother(name)));
        }
        tracing::info!(slot = %name, "the connection of the slot's former reader is ended");
        self.rows(&format!("select pg_terminate_backend({pid}, 2000)")).await?;
        Ok(())
    }

    /// Fails if the server counts the reader as a synchronous standby: a commit would wait for the reader, which waits for the commit.
    pub(crate) async fn check_is_no_standby(&mut self) -> Result<(), LogError> {
        let name = &self.source.application_name;
        let sql = format!(
            "select count(*) from pg_stat_replication where application_name = '{name}' and sync_priority > 0"
        );
        match &*self.text(&sql).await? {
            "0" => Ok(()),
            _ => Err(LogError::new(ErrorKind::SynchronousStandby)),
        }
    }
}

pub(crate) async fn within<T>(
    patience: Duration,
    work: impl Future<Output = Result<T, PgWireError>>,
) -> Result<T, LogError> {
    match timeout(patience, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(LogError::new(ErrorKind::Silent)),
    }
}
