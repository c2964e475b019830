//! [`RowChange`]: a row of a publication that a transaction has changed, for writers that send no message.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pg_walstream::{
    LogicalReplicationMessage, LogicalReplicationParser, RelationInfo, ReplicationState, TupleData,
};
use tokio::time::Instant;

use crate::error::{ErrorKind, LogError};
use crate::message::LogMessage;
use crate::names::Names;

/// What a changed row invalidates.
#[derive(Clone)]
pub(crate) struct RowMap(pub(crate) Arc<dyn Fn(&RowChange<'_>) -> LogMessage + Send + Sync>);

impl fmt::Debug for RowMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RowMap")
    }
}

/// A row that a committed transaction has inserted, updated or deleted.
///
/// Postgres sends the older values of a row only of its replica identity: of its primary key, or of all columns after `alter table ..
/// replica identity full`.
#[derive(Debug)]
pub struct RowChange<'a> {
    relation: &'a RelationInfo,
    old: Option<&'a TupleData>,
    new: Option<&'a TupleData>,
    /// Set when a value was asked for that the server has not sent.
    misses: Cell<bool>,
    is_insert: bool,
}

impl RowChange<'_> {
    /// The table's schema, such as `public`.
    pub fn schema(&self) -> &str {
        &self.relation.namespace
    }

    /// The table's name.
    pub fn table(&self) -> &str {
        &self.relation.relation_name
    }

    /// The text of a column before the change; `None` for NULL and for an inserted row.
    ///
    /// If the server has not sent it, the row invalidates everything: a column that the table lacks, or one of an updated or deleted row that
    /// is no part of the replica identity.
    pub fn before(&self, column: &str) -> Option<&str> {
        let (at, is_key) = self.position(column)?;
        let is_whole = self.relation.replica_identity == b'f';
        match self.old {
            None if self.is_insert => None,
            // The key has not changed.
            None if is_key => self.value(self.new, at),
            Some(_) if is_key || is_whole => self.value(self.old, at),
            _ => self.missing(),
        }
    }

    /// The text of a column after the change; `None` for NULL and for a deleted row.
    ///
    /// If the server has not sent it, the row invalidates everything: a column that the table lacks, or a long value that has not changed.
    pub fn after(&self, column: &str) -> Option<&str> {
        let (at, _) = self.position(column)?;
        self.new.and_then(|new| self.value(Some(new), at))
    }

    /// The texts of a column before and after the change, each once: what a key or tag of the row is made of.
    pub fn each(&self, column: &str) -> impl Iterator<Item = &str> {
        let (before, after) = (self.before(column), self.after(column));
        before.into_iter().chain(after.filter(|after| before != Some(after)))
    }

    /// Where a column is, and whether it is a part of the replica identity.
    fn position(&self, column: &str) -> Option<(usize, bool)> {
        let at = self.relation.columns.iter().position(|known| &*known.name == column);
        match at {
            Some(at) => Some((at, self.relation.columns[at].is_key())),
            None => self.missing(),
        }
    }

    fn value<'a>(&'a self, tuple: Option<&'a TupleData>, at: usize) -> Option<&'a str> {
        let Some(value) = tuple.and_then(|tuple| tuple.columns.get(at)) else { return self.missing() };
        if value.is_null() {
            return None;
        }
        let text = value.is_text().then(|| std::str::from_utf8(value.as_bytes()).ok()).flatten();
        text.or_else(|| self.missing())
    }

    fn missing<T>(&self) -> Option<T> {
        self.misses.set(true);
        None
    }
}

/// Parses the rows of a session, of which the tables come first.
pub(crate) struct RowParser {
    map: RowMap,
    parser: LogicalReplicationParser,
    tables: ReplicationState,
    log: RowLog,
}

/// Logs once a minute that a row invalidates everything.
#[derive(Default)]
struct RowLog(Option<Instant>);

impl RowLog {
    fn warn(&mut self, table: &str) {
        if self.0.is_none_or(|at| at.elapsed() >= Duration::from_secs(60)) {
            self.0 = Some(Instant::now());
            tracing::error!(
                table,
                "a changed row invalidates everything: its function has panicked, has made an empty name, or has asked for a column that \
                 the server has not sent (alter table .. replica identity full)"
            );
        }
    }
}

impl RowParser {
    pub(crate) fn new(map: RowMap) -> Self {
        Self {
            map,
            parser: LogicalReplicationParser::with_protocol_version(1),
            tables: ReplicationState::new(),
            log: RowLog::default(),
        }
    }

    /// What a message of `pgoutput` invalidates.
    ///
    /// # Errors
    ///
    /// A message that cannot be parsed, or a row of a table that was not sent.
    pub(crate) fn names(&mut self, message: Bytes) -> Result<Names, LogError> {
        let unreadable = |why: String| LogError::new(ErrorKind::Row(why));
        let parsed =
            self.parser.parse_wal_message_bytes(message).map_err(|error| unreadable(error.to_string()))?;
        let (table, old, new) = match &parsed.message {
            LogicalReplicationMessage::Relation {
                relation_id,
                namespace,
                relation_name,
                replica_identity,
                columns,
            } => {
                let (schema, name) = (Arc::clone(namespace), Arc::clone(relation_name));
                self.tables.add_relation(RelationInfo::new(
                    *relation_id,
                    schema,
                    name,
                    *replica_identity,
                    columns.clone(),
                ));
                return Ok(Names::default());
            }
            LogicalReplicationMessage::Insert { relation_id, tuple } => (relation_id, None, Some(tuple)),
            LogicalReplicationMessage::Update { relation_id, old_tuple, new_tuple, .. } => {
                (relation_id, old_tuple.as_ref(), Some(new_tuple))
            }
            LogicalReplicationMessage::Delete { relation_id, old_tuple, .. } => {
                (relation_id, Some(old_tuple), None)
            }
            // The rows that it has removed are not sent.
            LogicalReplicationMessage::Truncate { .. } => return Ok(Names::all()),
            _ => return Ok(Names::default()),
        };
        let is_insert = matches!(parsed.message, LogicalReplicationMessage::Insert { .. });
        let relation =
            self.tables.get_relation(*table).ok_or_else(|| unreadable(format!("no table {table}")))?;
        let row = RowChange { relation, old, new, misses: Cell::new(false), is_insert };
        let message = catch_unwind(AssertUnwindSafe(|| (self.map.0)(&row)));
        let names = message.ok().and_then(LogMessage::names).filter(|_| !row.misses.get());
        Ok(names.unwrap_or_else(|| {
            self.log.warn(row.table());
            Names::all()
        }))
    }
}
