//! [`PostgresLog`]: the log of a database as a service uses it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stampede_guard::__members::{self, Channel};
use stampede_guard::{CacheKey, LoadError, StampedeGuard};
use tokio::task::JoinHandle;

use crate::doctor::{self, LogReport};
use crate::error::{ErrorKind, LogError};
use crate::log::Reader;
use crate::message::LogMessage;
use crate::position::LogPosition;
use crate::progress::{LogStats, Progress};
use crate::rows::{RowChange, RowMap};
use crate::source::{Server, Source};

/// How long a reader that has died without unlocking keeps the others waiting.
const READER_LEASE: Duration = Duration::from_secs(1);
/// How long a process waits in the queue of readers before it enters it anew.
const QUEUE: Duration = Duration::from_secs(3600);

/// The log of a Postgres database, from which one process of the fleet sends the invalidations of all committed transactions.
///
/// Each process [runs](Self::spawn) it; one of them reads, and another one takes over when that one ends. What a transaction invalidates
/// is in a [`LogMessage`] that it has written, or is found by a function from the [rows](PostgresLogBuilder::rows) that it has changed.
///
/// # Consistency
///
/// A committed transaction is invalidated, as by `StampedeGuard::invalidate`, in the order of commits, at least once, whatever process,
/// server or connection fails in between: its position is confirmed to Postgres only after the store's acknowledgement. If the server has
/// removed a part of the log (a slot beyond `max_slot_wal_keep_size`, a failover to a server without the slot), everything in the
/// namespace is invalidated: what is stored under policies with `invalidate_all(true)`, which all policies of the namespace should have. A
/// Redis that loses acknowledged writes, in a failover or a restart from a snapshot, loses invalidations, too.
///
/// # Examples
///
/// ```no_run
/// # async fn serve(redis: redis::Client) -> Result<(), Box<dyn std::error::Error>> {
/// use stampede_guard::{Policy, StampedeGuard};
/// use stampede_guard_postgres::PostgresLog;
///
/// let policy = Policy::builder().invalidate_all(true).build()?;
/// let guard = StampedeGuard::builder(redis).namespace("shop").policy(policy).build()?;
/// let log = PostgresLog::builder(&guard, ["postgres://shop_cache:secret@db/shop"]).build()?;
/// let reading = log.spawn();
/// # drop(reading);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresLog {
    reader: Arc<Reader<Source>>,
    patience: Duration,
}

/// Settings of a [`PostgresLog`]; [`build`](Self::build) checks them.
#[must_use = "a builder does nothing until `build` is called"]
pub struct PostgresLogBuilder {
    guard: StampedeGuard,
    urls: Vec<String>,
    slot: Option<String>,
    publication: String,
    rows: Option<RowMap>,
    patience: Duration,
}

impl PostgresLog {
    /// Begins the settings of a log. The guard's policy needs `invalidate_all(true)`. The URLs are those of a server and of all that may
    /// take its place; the one that is no standby is read.
    pub fn builder<U: Into<String>>(
        guard: &StampedeGuard,
        urls: impl IntoIterator<Item = U>,
    ) -> PostgresLogBuilder {
        PostgresLogBuilder {
            guard: guard.clone(),
            urls: urls.into_iter().map(Into::into).collect(),
            slot: None,
            publication: "stampede_guard".to_owned(),
            rows: None,
            patience: Duration::from_secs(2),
        }
    }

    /// Reads the log in a task, whenever no other process does, until the guard is shut down or the task is aborted. Failures are logged
    /// and tried again.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime with time and network.
    pub fn spawn(&self) -> JoinHandle<()> {
        tokio::spawn(self.clone().run())
    }

    /// What [`spawn`](Self::spawn) runs.
    ///
    /// # Cancel safety
    ///
    /// Safe: what is not confirmed is read again, by this process or another one.
    pub async fn run(self) {
        self.reader.run().await;
    }

    /// Waits until everything that was committed before `position` is invalidated, at most for the log's
    /// [`patience`](PostgresLogBuilder::patience). Returns whether it is.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn wait_for(&self, position: LogPosition) -> bool {
        self.reader.progress.wait_for(position, self.patience).await
    }

    /// Like `StampedeGuard::get_or_load`, and gives nothing that is older than the commits before `position`: it waits until they are
    /// invalidated, as [`wait_for`](Self::wait_for), or else returns the result of `load`, beside the cache.
    ///
    /// # Errors
    ///
    /// See `StampedeGuard::get_or_load`.
    ///
    /// # Cancel safety
    ///
    /// See `StampedeGuard::get_or_load`; a load beside the cache is cancelled.
    ///
    /// # Consistency
    ///
    /// `load` must read from the server of the commit, or from one that has it.
    pub async fn get_or_load_after<T, E, F, Fut>(
        &self,
        position: LogPosition,
        key: impl Into<CacheKey>,
        load: F,
    ) -> Result<T, LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        if self.wait_for(position).await {
            self.reader.guard.get_or_load(key, load).await
        } else {
            load().await.map_err(|error| LoadError::Loader(Arc::new(error)))
        }
    }

    /// Looks at each server: its settings, the rights of the user, the slot and the publication. Changes nothing.
    pub async fn doctor(&self) -> LogReport {
        let mut report = LogReport::default();
        for source in &self.reader.logs {
            doctor::examine(source, &mut report).await;
        }
        report
    }

    /// What this process has read, and how soon commits were final.
    pub fn stats(&self) -> LogStats {
        self.reader.progress.stats()
    }
}

impl fmt::Debug for PostgresLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresLog").field("logs", &self.reader.logs).finish_non_exhaustive()
    }
}

/// Without the URLs, which may have passwords.
impl fmt::Debug for PostgresLogBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresLogBuilder").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl PostgresLogBuilder {
    /// The name of the replication slot: one for each fleet, that is for each namespace on each Redis. Defaults to `stampede_guard_` and
    /// eight digits that follow from the namespace and the number of the Redis database; fleets with the same namespace on different Redis
    /// servers need names. A slot that is not there is made.
    pub fn slot(mut self, slot: impl Into<String>) -> Self {
        self.slot = Some(slot.into());
        self
    }

    /// The publication with the tables of [`rows`](Self::rows). Defaults to `stampede_guard`. One that is not there is made without tables:
    /// messages need none.
    pub fn publication(mut self, publication: impl Into<String>) -> Self {
        self.publication = publication.into();
        self
    }

    /// What a changed row of the publication's tables invalidates, for writers that write no [`LogMessage`]. A `TRUNCATE` invalidates
    /// everything.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn settings(builder: stampede_guard_postgres::PostgresLogBuilder) -> stampede_guard_postgres::PostgresLogBuilder {
    /// use stampede_guard_postgres::LogMessage;
    ///
    /// // Needs `alter table products replica identity full`, so that an update sends the older category, too.
    /// builder.rows(|row| match row.table() {
    ///     "products" => {
    ///         let message = row.each("id").fold(LogMessage::new(), |message, id| message.key(("price", id)));
    ///         row.each("category").fold(message, |message, category| message.tag(("category", category)))
    ///     }
    ///     _ => LogMessage::new(),
    /// })
    /// # }
    /// ```
    pub fn rows(mut self, rows: impl Fn(&RowChange<'_>) -> LogMessage + Send + Sync + 'static) -> Self {
        self.rows = Some(RowMap(Arc::new(rows)));
        self
    }

    /// How long [`get_or_load_after`](PostgresLog::get_or_load_after) waits for the reader. Defaults to two seconds.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Builds the log. Nothing is connected before [`spawn`](PostgresLog::spawn).
    ///
    /// # Errors
    ///
    /// A URL or name that is none, and a guard whose policy lacks `invalidate_all(true)`.
    pub fn build(self) -> Result<PostgresLog, LogError> {
        let Self { guard, urls, slot, publication, rows, patience } = self;
        let fleet = Channel::named(&guard, "log").to_string();
        let slot = slot.unwrap_or_else(|| format!("stampede_guard_{}", &fleet[..8]));
        for (what, name) in [("slot", &slot), ("publication", &publication)] {
            if !is_name(name) {
                return Err(LogError::new(ErrorKind::InvalidName(what, name.clone())));
            }
        }
        if urls.is_empty() {
            return Err(LogError::new(ErrorKind::NoUrl));
        }
        if !__members::invalidates_all(&guard) {
            return Err(LogError::new(ErrorKind::PolicyMissesAll));
        }
        let source = |url: &String| {
            let server = Server::parse(url)?;
            Ok(Source {
                server,
                slot: slot.clone(),
                publication: publication.clone(),
                application_name: format!("stampede-guard {fleet}"),
                rows: rows.clone(),
            })
        };
        let logs = urls.iter().map(source).collect::<Result<_, LogError>>()?;
        let mutex = guard.locks().mutex(("stampede-guard-postgres", &*slot));
        let mutex = mutex.ttl(READER_LEASE).auto_renew(true).acquire_timeout(QUEUE).build();
        let mutex = mutex.map_err(|error| LogError::new(ErrorKind::Mutex(error)))?;
        let progress = Progress::new(&guard, &slot);
        Ok(PostgresLog { reader: Arc::new(Reader { guard, mutex, logs, progress }), patience })
    }
}

/// A name that SQL takes without quotes, and that leaves room for a suffix.
fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=48).contains(&name.len())
        && name.bytes().all(is_plain)
        && name.as_bytes().first().is_some_and(u8::is_ascii_lowercase)
}
