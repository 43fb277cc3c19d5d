//! Asks a run to end.

use std::io;

use nix::sys::signal::Signal;

use crate::running_launcher::{RunningLauncher, signal_failure};

/// Asks the launcher of a run to end it, as Ctrl-C does. Returns what to tell the user. `inodes` are those of the pages by
/// which this launcher was found.
pub(super) fn stop(launcher: u32, inodes: &[u64]) -> String {
    match ask(launcher, inodes) {
        Ok(true) => format!("asked launcher {launcher} to end its ranks"),
        Ok(false) => format!("launcher {launcher} has ended or restarted its ranks; nothing was sent"),
        Err(error) => signal_failure(launcher, &error),
    }
}

/// Sends the signal if the process still holds one of these pages.
fn ask(launcher: u32, inodes: &[u64]) -> io::Result<bool> {
    let running = RunningLauncher::open(launcher)?;
    let running = running.filter(|running| running.pages.iter().any(|(inode, _)| inodes.contains(inode)));
    running.map_or(Ok(false), |running| running.signal(Signal::SIGTERM))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use mgpu_control::process::{has_ended, pidfd_open};

    use super::*;

    #[test]
    fn a_process_that_does_not_hold_the_page_is_not_signalled() {
        let mut other = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let told = stop(other.id(), &[7]);
        assert!(told.ends_with("has ended or restarted its ranks; nothing was sent"), "{told}");
        let process = pidfd_open(other.id()).unwrap();
        // It still reads its input, and ends by itself.
        assert!(!has_ended(&process));
        drop(other.stdin.take());
        assert!(other.wait().unwrap().success());
        assert!(stop(other.id(), &[7]).ends_with("nothing was sent"));
        assert!(stop(0, &[7]).starts_with("cannot signal launcher 0"));
    }
}
