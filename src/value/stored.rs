//! The entry found under a key, or bytes that are no usable entry, shared by all callers of one read.

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

    /// Found for all callers that share a read, which checked these tags.
    pub(crate) fn shared(content: Result<Entry, Bytes>, checked: &[Key]) -> Self {
        Self { content, checked: checked.into(), shared: Some(SharedValue::new()) }
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
