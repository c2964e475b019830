//! [`StoreError`]: the reason why a store did not answer, and whether a retry can help.

use std::fmt;
use std::sync::Arc;

/// Why a store did not answer.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    pub(crate) kind: StoreErrorKind,
    pub(crate) source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// The kinds of [`StoreError`], by whether the command may have run and whether a retry can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreErrorKind {
    /// No connection: the command was not sent.
    Unavailable,
    /// The connection broke under the command, which may have run.
    Broken,
    /// No answer within the command's deadline; the command may have run or may still run.
    TimedOut,
    /// The server refuses now and may accept later (out of memory, loading, busy).
    Transient,
    /// The server refuses until its configuration or this user's rights change.
    Refused,
    /// The store was closed.
    Closed,
}

impl StoreError {
    pub(crate) fn new(kind: StoreErrorKind) -> Self {
        Self { kind, source: None }
    }

    /// Whether a retry would get the same error.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Refused | StoreErrorKind::Closed)
    }
}

impl StoreErrorKind {
    /// Whether the command may have run, or may still run.
    pub(crate) fn is_ambiguous(self) -> bool {
        matches!(self, Self::Broken | Self::TimedOut)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            StoreErrorKind::Unavailable => "the store is unavailable",
            StoreErrorKind::Broken => "the connection to the store broke",
            StoreErrorKind::TimedOut => "the store did not answer in time",
            StoreErrorKind::Transient => "the store refused the command for now",
            StoreErrorKind::Refused => "the store refused the command",
            StoreErrorKind::Closed => "the store is closed",
        })
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
