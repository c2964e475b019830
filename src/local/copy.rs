//! A value in this process's memory.

use std::sync::Arc;

use super::Moment;
use super::tickets::Ticket;
use crate::value::StoredEntry;

/// A value in this process's memory.
#[derive(Debug)]
pub(crate) struct LocalCopy {
    pub(crate) entry: Arc<StoredEntry>,
    /// The copy is served only while this is not void.
    pub(super) ticket: Ticket,
    pub(super) made_at: Moment,
}
