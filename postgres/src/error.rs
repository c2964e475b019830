//! [`LogError`]: why a log cannot be read.

use std::fmt;

use pgwire_replication::PgWireError;
use stampede_guard::lock::LockError;

/// Why a log cannot be read, and what to do about it.
#[derive(Clone, Debug)]
pub struct LogError {
    kind: ErrorKind,
}

/// What failed.
#[derive(Clone, Debug)]
pub(crate) enum ErrorKind {
    InvalidUrl(String),
    InvalidName(&'static str, String),
    NoUrl,
    PolicyMissesAll,
    Standby,
    /// A standby was promoted since this server was the primary.
    OlderTimeline,
    SynchronousStandby,
    WalLevel(String),
    NoPublication(String),
    SlotOfAnother(String),
    LongTransactions,
    /// The server did not answer.
    Silent,
    /// The server ended the log, or sent what the protocol does not have.
    Ended,
    /// The mutex was lost, so another process may read.
    NotReader,
    Unacknowledged(stampede_guard::Error),
    /// The guard was shut down.
    Closed,
    Row(String),
    Server(PgWireError),
    Mutex(LockError),
}

impl LogError {
    pub(crate) fn new(kind: ErrorKind) -> Self {
        Self { kind }
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.kind, ErrorKind::Closed | ErrorKind::Mutex(LockError::Closed))
    }

    pub(crate) fn is_standby(&self) -> bool {
        matches!(self.kind, ErrorKind::Standby)
    }

    /// Whether it passes by itself: a server that restarts, a connection that is lost, a reader that takes over. Otherwise a setting or a
    /// right has to be changed.
    pub fn is_transient(&self) -> bool {
        match &self.kind {
            ErrorKind::Standby
            | ErrorKind::Silent
            | ErrorKind::Ended
            | ErrorKind::NotReader
            | ErrorKind::Mutex(_) => true,
            // 55006: the slot is in use; class 57: the server stops or starts; class 08: connections; 53300: too many of them.
            ErrorKind::Server(PgWireError::Server(text)) => {
                ["SQLSTATE 55006", "SQLSTATE 57P", "SQLSTATE 08", "SQLSTATE 53300"]
                    .iter()
                    .any(|code| text.contains(code))
            }
            ErrorKind::Server(error) => error.is_transient(),
            _ => false,
        }
    }
}

impl From<PgWireError> for LogError {
    fn from(error: PgWireError) -> Self {
        Self::new(ErrorKind::Server(error))
    }
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ErrorKind::InvalidUrl(why) => {
                write!(f, "not a URL of Postgres: {why}. Use postgres://user:password@host:5432/database?sslmode=verify-full")
            }
            ErrorKind::InvalidName(what, name) => {
                write!(f, "not a name of a {what}: {name:?}. Use 1 to 48 of a to z, 0 to 9 and _, with a letter first")
            }
            ErrorKind::NoUrl => f.write_str("no URL: name the server, and each that may take its place"),
            ErrorKind::PolicyMissesAll => f.write_str(
                "the guard's policy lacks invalidate_all(true): a lost slot could not be made good. Build it with \
                 Policy::builder().invalidate_all(true)",
            ),
            ErrorKind::Standby => f.write_str("the server is a standby: its primary has the log"),
            ErrorKind::OlderTimeline => f.write_str(
                "the server is one that a standby has replaced: commits on it are not read. Stop it, or make it a standby",
            ),
            ErrorKind::SynchronousStandby => f.write_str(
                "the server counts the reader as a synchronous standby, so commits and the reader would wait for each other: name the \
                 standbys in synchronous_standby_names instead of *",
            ),
            ErrorKind::NoPublication(name) => write!(
                f,
                "the publication {name} is not there: run CREATE PUBLICATION {name} FOR TABLE .. for the tables of `rows`"
            ),
            ErrorKind::WalLevel(level) => write!(
                f,
                "wal_level is {level}: run ALTER SYSTEM SET wal_level = 'logical' and restart the server"
            ),
            ErrorKind::SlotOfAnother(name) => write!(
                f,
                "the slot {name} belongs to another database, plugin or program: choose another name with `slot`"
            ),
            ErrorKind::LongTransactions => f.write_str(
                "the slot can not be made while transactions run that began before it: end them (see pg_stat_activity)",
            ),
            ErrorKind::Silent => f.write_str("the server does not answer"),
            ErrorKind::Ended => f.write_str("the server has ended the log"),
            ErrorKind::NotReader => f.write_str("another process reads the log"),
            ErrorKind::Unacknowledged(error) => write!(f, "commits are not invalidated: {error}"),
            ErrorKind::Closed => f.write_str("the guard was shut down"),
            ErrorKind::Row(why) => write!(f, "a row in the log cannot be read: {why}"),
            ErrorKind::Server(PgWireError::Server(text)) if text.contains("SQLSTATE 42501") => write!(
                f,
                "a right is missing: {text}. The user needs REPLICATION, and CREATE on the database unless the publication exists"
            ),
            ErrorKind::Server(error) => write!(f, "{error}"),
            ErrorKind::Mutex(error) => write!(f, "the reader's mutex: {error}"),
        }
    }
}

impl std::error::Error for LogError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            ErrorKind::Server(error) => Some(error),
            ErrorKind::Mutex(error) => Some(error),
            ErrorKind::Unacknowledged(error) => Some(error),
            _ => None,
        }
    }
}
