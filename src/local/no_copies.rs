//! Stands in for `copies` while the feature `local` is off: there are no copies.

use std::sync::Arc;

use super::tickets::LocalCopy;
use crate::key::Key;
use crate::key::KeyProbe;

#[derive(Debug)]
pub(super) struct Copies;

impl Copies {
    pub(super) fn new(_capacity: u64) -> Self {
        Self
    }

    pub(super) fn get(&self, _key: &Key) -> Option<Arc<LocalCopy>> {
        None
    }

    pub(super) fn find(&self, _probe: KeyProbe<'_>) -> Option<Arc<LocalCopy>> {
        None
    }

    pub(super) fn insert(&self, _key: &Key, _copy: LocalCopy) {}

    pub(super) fn remove(&self, _key: &Key) -> Option<Arc<LocalCopy>> {
        None
    }

    pub(super) fn len(&self) -> u64 {
        0
    }

    pub(super) fn bytes(&self) -> u64 {
        0
    }

    pub(super) fn capacity(&self) -> u64 {
        0
    }
}
