//! Runs a test program with a time limit.
//!
//! Its output goes to memory that has no reader to wait for, so a program that prints much is never blocked, and what it
//! had printed until it was killed can be read: that tells what hung.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use mgpu_control::process::{kill_with_parent, pidfd_open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Bytes of each output that are read.
const MOST_OUTPUT: u64 = 4 << 20;
/// A killed process has ended after this time, unless it is stuck in the kernel.
const KILL_TIME: Duration = Duration::from_secs(1);

/// How a program ended, and what it printed.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) end: End,
    pub(super) out: String,
    pub(super) errors: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Exited(ExitStatus),
    /// Killed at the time limit.
    Killed,
    /// Not even ended by SIGKILL: stuck in a system call, such as one of a driver.
    Stuck,
}

impl Run {
    /// Whether the program ended with exit code 0.
    pub(super) fn is_success(&self) -> bool {
        matches!(self.end, End::Exited(status) if status.success())
    }

    /// Both outputs: messages that explain a failure may be in either.
    pub(super) fn text(&self) -> String {
        format!("{}\n{}", self.errors, self.out)
    }
}

/// Runs the command to its end, or kills it after `limit`.
///
/// # Errors
/// If it cannot be started.
pub(super) fn run(mut command: Command, limit: Duration) -> io::Result<Run> {
    let (out, errors) = (memory()?, memory()?);
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(errors.try_clone()?);
    kill_with_parent(&mut command);
    let mut child = command.spawn()?;
    let ended = pidfd_open(child.id()).inspect_err(|_| _ = child.kill().and_then(|()| child.wait()))?;
    let end = if ends_within(&ended, limit) {
        End::Exited(child.wait()?)
    } else {
        // The launcher's own guardian notices that, and ends the ranks.
        child.kill()?;
        match ends_within(&ended, KILL_TIME) {
            true => child.wait().map(|_| End::Killed)?,
            false => End::Stuck,
        }
    };
    Ok(Run { end, out: content(out)?, errors: content(errors)? })
}

fn memory() -> io::Result<File> {
    Ok(memfd_create(c"mgpurun-doctor", MFdFlags::MFD_CLOEXEC)?.into())
}

fn content(mut file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    // Descriptors share one position, and the program may still write.
    file.seek(SeekFrom::Start(0))?;
    file.take(MOST_OUTPUT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn ends_within(process: &OwnedFd, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(ready) if ready > 0 => return true,
            _ if Instant::now() < deadline => {}
            _ => return false,
        }
    }
}

/// The last line of an error output, which says why.
pub(super) fn last_line(errors: &str) -> &str {
    errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Run {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, limit).unwrap()
    }

    #[test]
    fn a_failing_program_leaves_its_output() {
        let run = shell("echo out; echo why >&2; exit 3", Duration::from_secs(60));
        let End::Exited(status) = run.end else { panic!("{run:?}") };
        assert_eq!((status.code(), run.out.as_str(), run.errors.as_str()), (Some(3), "out\n", "why\n"));
        assert!(!run.is_success());
        assert_eq!((last_line("one\ntwo\n\n"), last_line("")), ("two", "without a message"));
    }

    #[test]
    fn a_program_that_prints_more_than_a_pipe_holds_is_not_blocked() {
        let run = shell("head -c 300000 /dev/zero | tr '\\0' x", Duration::from_secs(60));
        assert!(run.is_success() && run.out.len() == 300_000, "{:?}", run.end);
    }

    #[test]
    fn a_program_that_hangs_is_killed_and_its_output_is_kept() {
        let run = shell("echo begun; exec sleep 1000", Duration::from_millis(300));
        assert_eq!(run.end, End::Killed);
        // A slow machine may not have started it yet.
        assert!(["", "begun\n"].contains(&run.out.as_str()), "{run:?}");
    }
}
