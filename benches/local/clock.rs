//! The monotonic clock as a number.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share and nothing sets. (An `Instant` is the same clock, and cannot
/// be sent to another process.)
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
