//! The entry found under a key, or bytes that are no usable entry, shared by all callers of one read.

use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;

use super::entry::{Entry, EntryKind};
use super::reader::SharedValue;
use crate::key::Key;

/// What one read found under a key.
#[derive(Debug)]
pub(crate) struct StoredEntry {
    /// The entry; or the bytes, if they are no entry of this key or if one of the entry's tags was invalidated.
    pub(crate) content: Result<Entry, Bytes>,
    /// The policy's tags that were checked in this read.
    pub(crate) checked: Box<[Key]>,
    /// The value that the first caller makes of the entry, for the other callers of a shared read.
    pub(crate) shared: Option<SharedValue>,
}

impl StoredEntry {
    /// Found for one caller.
    pub(crate) fn new(content: Result<Entry, Bytes>) -> Self {
        Self { content, checked: Box::default(), shared: None }
    }

    /// The same for all callers that share the read, which checked these tags.
    pub(crate) fn shared(self, checked: &[Key]) -> Self {
        Self { checked: checked.into(), shared: Some(SharedValue::new()), ..self }
    }

    /// The value, if there is one: it may be served if a load fails, and the load may revalidate it.
    pub(crate) fn value(&self) -> Option<&Entry> {
        self.content.as_ref().ok().filter(|entry| entry.kind == EntryKind::Value)
    }

    /// The bytes as they are stored.
    pub(crate) fn raw(&self, key: &Key) -> Bytes {
        match &self.content {
            Ok(entry) => entry.encode(key),
            Err(raw) => raw.clone(),
        }
    }
}

/// What a caller has found: alone, without an allocation, or with the other callers of its read.
#[derive(Debug)]
pub(crate) enum Found {
    Own(StoredEntry),
    Shared(Arc<StoredEntry>),
}

impl Deref for Found {
    type Target = StoredEntry;

    fn deref(&self) -> &StoredEntry {
        match self {
            Self::Own(entry) => entry,
            Self::Shared(entry) => entry,
        }
    }
}

impl From<Found> for Arc<StoredEntry> {
    fn from(found: Found) -> Self {
        match found {
            Found::Own(entry) => Self::new(entry),
            Found::Shared(entry) => entry,
        }
    }
}
