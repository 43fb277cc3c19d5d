//! The clock of traces and of waits.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`, which all processes of a host share. Never 0.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has a monotonic clock");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}
