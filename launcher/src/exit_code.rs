//! The exit codes of `mgpurun`.
//!
//! The exit code of a failed rank is passed on unchanged. A rank killed by a signal counts as 128 + its number, as in a
//! shell.

use mgpu_control::protocol::EXIT_STOPPED;
use mgpu_control::rendezvous::PreflightFault;

/// All ranks finished.
pub const SUCCESS: u8 = 0;
/// The launcher itself failed: no such program, no rendezvous, no process.
pub const LAUNCHER: u8 = 1;
/// The command line is invalid.
pub const USAGE: u8 = 2;
/// A rank did not join in time, while others had.
pub const NEVER_JOINED: u8 = 64;
/// A rank stopped making progress.
pub const NO_PROGRESS: u8 = 65;

/// Preflight: a rank uses another version of the protocol than the launcher.
pub const PREFLIGHT_PROTOCOL: u8 = 66;
/// Preflight: ranks run different programs.
pub const PREFLIGHT_PROGRAM: u8 = 67;
/// Preflight: a rank expects another world size.
pub const PREFLIGHT_WORLD_SIZE: u8 = 68;
/// Preflight: two ranks use one GPU.
pub const PREFLIGHT_GPU: u8 = 69;
/// Preflight: ranks use different versions of the NVIDIA driver or of NCCL.
pub const PREFLIGHT_VERSIONS: u8 = 70;

/// A node was lost: its host does not answer, its `mgpurun` has ended, or the coordinator is gone.
pub const NODE_LOST: u8 = 71;
/// A node could not prove that it belongs to the job, or the coordinator could not.
pub const AUTHENTICATION: u8 = 72;
/// Nodes contradict each other: other programs, arguments, versions or numbers of nodes, or two nodes with one rank.
pub const NODES_DIFFER: u8 = 73;
/// The ranks stopped because they were asked to, at a step from which they can be resumed.
pub const STOPPED: u8 = EXIT_STOPPED;

/// The reader of standard output has exited, as `head` does: the code of a program that SIGPIPE kills.
pub const BROKEN_PIPE: u8 = signalled(13);

/// The code of a failed preflight check.
pub const fn preflight(fault: PreflightFault) -> u8 {
    match fault {
        PreflightFault::Protocol => PREFLIGHT_PROTOCOL,
        PreflightFault::Program => PREFLIGHT_PROGRAM,
        PreflightFault::WorldSize => PREFLIGHT_WORLD_SIZE,
        PreflightFault::Gpu => PREFLIGHT_GPU,
        PreflightFault::Versions => PREFLIGHT_VERSIONS,
    }
}

/// The code of a process that signal number `signal` killed: 130 for SIGINT, 143 for SIGTERM, 137 for SIGKILL.
pub const fn signalled(signal: i32) -> u8 {
    128u8.wrapping_add(signal as u8)
}
