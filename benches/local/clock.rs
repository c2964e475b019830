//! The monotonic clock as a number, which can be sent to another process.

use rustix::time::{ClockId, clock_gettime};

/// The nanoseconds of CLOCK_MONOTONIC. All processes of a machine share this clock, and nothing sets it. (An `Instant` has the same clock,
/// but cannot be sent to another process.)
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
