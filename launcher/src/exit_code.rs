//! The exit codes of `mgpurun`.
//!
//! A rank's own code is passed on as it is; a rank ended by a signal counts as 128 + its number, as in a shell.

/// All ranks finished.
pub const SUCCESS: u8 = 0;
/// The launcher itself failed: no such program, no rendezvous, no process.
pub const LAUNCHER: u8 = 1;
/// The command line makes no sense.
pub const USAGE: u8 = 2;
/// A rank never joined in time, while others had.
pub const NEVER_JOINED: u8 = 64;
/// A rank stopped making progress.
pub const NO_PROGRESS: u8 = 65;

/// The code of a process that signal number `signal` ended: 130 for SIGINT, 143 for SIGTERM, 137 for SIGKILL.
pub const fn signalled(signal: i32) -> u8 {
    128u8.wrapping_add(signal as u8)
}
