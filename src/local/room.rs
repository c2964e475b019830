//! [`RoomBesideCopies`]: memory of threads that counts as part of the tier's capacity.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::copies::Copies;

/// An eighth of the capacity. The copies lose it when the first of its bytes are taken.
#[derive(Debug)]
pub(super) struct RoomBesideCopies {
    most: u64,
    taken: Arc<AtomicU64>,
    is_in_use: AtomicBool,
}

/// Bytes of the room, which are free again once this is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    taken: Arc<AtomicU64>,
    bytes: u64,
}

impl RoomBesideCopies {
    pub(super) fn of(capacity: u64) -> Self {
        Self { most: capacity / 8, taken: Arc::default(), is_in_use: AtomicBool::new(false) }
    }

    /// Takes `bytes`, if there are so many.
    pub(super) fn take(&self, bytes: u64, copies: &Copies) -> Option<Room> {
        let with = |taken: u64| Some(taken + bytes).filter(|taken| *taken <= self.most);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with).ok()?;
        let room = Room { taken: Arc::clone(&self.taken), bytes };
        if !self.is_in_use.swap(true, Ordering::Relaxed) {
            copies.set_capacity(copies.capacity() - self.most);
        }
        Some(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
