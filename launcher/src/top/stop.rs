//! Asks a run to end.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Asks the launcher of a run to end it, as Ctrl-C does. Returns what to tell the user.
pub(super) fn stop(launcher: u32) -> String {
    let pid = i32::try_from(launcher).ok().filter(|pid| *pid > 1);
    let sent = pid.ok_or(nix::errno::Errno::ESRCH).and_then(|pid| kill(Pid::from_raw(pid), Signal::SIGTERM));
    match sent {
        Ok(()) => format!("asked launcher {launcher} to end its ranks"),
        Err(errno) => format!("cannot signal launcher {launcher}: {errno}"),
    }
}
