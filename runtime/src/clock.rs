//! The clock of timelines and waits.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`, which is the same for all processes of a host. Never 0.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has a monotonic clock");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}
