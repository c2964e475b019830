//! Which attempts at changes a memory store refuses, because a later one of the same node has voided them.

use tokio::time::Instant;
use uuid::Uuid;

use super::expiring_map::{AROUND, later};
use super::records::KeyRecords;
use crate::store::attempt::{AttemptNumber, VOIDED_FOR};
use crate::store::{StoreError, StoreErrorKind};

/// The fraction of the store that the numbers may use.
const PART: usize = 4;

impl KeyRecords {
    /// Begins an attempt at a change of this name: refuses it if it was voided, else notes what it voids.
    pub(super) fn attempts(
        &mut self,
        name: &str,
        node: Uuid,
        attempt: AttemptNumber,
        capacity: usize,
    ) -> Result<(), StoreError> {
        let key = format!("{}:{name}", node.simple());
        if self.voided.get(&key).is_some_and(|latest| *latest > attempt.number) {
            return Err(StoreError::new(StoreErrorKind::TimedOut));
        }
        if attempt.voids_earlier {
            let bytes = 2 * key.len() + size_of::<u64>() + AROUND;
            self.voided.remove(&key);
            if self.voided.make_room(bytes, capacity / PART) && self.make_room(bytes, capacity) {
                self.voided.put(&key, attempt.number, bytes, later(Instant::now(), VOIDED_FOR));
            }
        }
        Ok(())
    }
}
