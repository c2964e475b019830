//! [`RowChange`]: a row of a publication that a transaction has changed, for writers that send no message.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use pg_walstream::{
    LogicalReplicationMessage, LogicalReplicationParser, RelationInfo, ReplicationState, TupleData,
};

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
/// Postgres sends the older values of a row only where they are its replica identity: of the primary key, where the key has changed or the
/// row is deleted; of all columns after `alter table .. replica identity full`.
#[derive(Debug)]
pub struct RowChange<'a> {
    relation: &'a RelationInfo,
    old: Option<&'a TupleData>,
    new: Option<&'a TupleData>,
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

    /// The text of a column before the change; `None` for NULL, an inserted row, a column that the table lacks and one that was not sent.
    pub fn before(&self, column: &str) -> Option<&str> {
        self.column(self.old, column)
    }

    /// The text of a column after the change; `None` for NULL, a deleted row, a column that the table lacks and one that was not sent (a
    /// long value that has not changed).
    pub fn after(&self, column: &str) -> Option<&str> {
        self.column(self.new, column)
    }

    /// The texts of a column before and after the change, each once: what a key or tag of the row is made of.
    pub fn each(&self, column: &str) -> impl Iterator<Item = &str> {
        let (before, after) = (self.before(column), self.after(column));
        before.into_iter().chain(after.filter(|after| before != Some(after)))
    }

    fn column<'a>(&'a self, tuple: Option<&'a TupleData>, column: &str) -> Option<&'a str> {
        let at = self.relation.columns.iter().position(|known| &*known.name == column)?;
        let value = tuple?.columns.get(at).filter(|value| value.is_text())?;
        std::str::from_utf8(value.as_bytes()).ok()
    }
}

/// Parses the rows of a session, of which the tables come first.
pub(crate) struct RowParser {
    map: RowMap,
    parser: LogicalReplicationParser,
    tables: ReplicationState,
}

impl RowParser {
    pub(crate) fn new(map: RowMap) -> Self {
        Self {
            map,
            parser: LogicalReplicationParser::with_protocol_version(1),
            tables: ReplicationState::new(),
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
        let relation =
            self.tables.get_relation(*table).ok_or_else(|| unreadable(format!("no table {table}")))?;
        let message = (self.map.0)(&RowChange { relation, old, new });
        // An empty name stands for what the closure did not find: it may have meant anything.
        Ok(message.names().unwrap_or_else(Names::all))
    }
}
