//! All locks of a memory store.

use super::mutexes::Mutexes;
use super::semaphores::Semaphores;

/// The locks that a memory store holds.
#[derive(Default)]
pub(super) struct LockTable {
    pub(super) mutexes: Mutexes,
    pub(super) semaphores: Semaphores,
}
