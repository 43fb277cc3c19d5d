//! A running launcher, which is opened before it is identified, so that a signal never reaches a later process with the
//! same number.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use mgpu_control::process::{pidfd_open, pidfd_send_signal};
use mgpu_control::progress::ProgressPage;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use crate::status::runs::identified_pages_of;

/// A process that holds progress pages.
pub(crate) struct RunningLauncher {
    process: OwnedFd,
    /// Its pages, and the inode of each.
    pub(crate) pages: Vec<(u64, ProgressPage)>,
}

impl RunningLauncher {
    /// Opens the process `pid`; `None` if it has ended or holds no page.
    ///
    /// # Errors
    /// If there are no descriptors left, or the kernel has no pidfds.
    pub(crate) fn open(pid: u32) -> io::Result<Option<Self>> {
        let process = match pidfd_open(pid) {
            Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => return Ok(None),
            process => process?,
        };
        // These are the pages of the opened process, unless it has ended, and then no signal arrives.
        let pages = identified_pages_of(pid);
        Ok((!pages.is_empty()).then_some(RunningLauncher { process, pages }))
    }

    /// Sends a signal. False if the process has ended.
    ///
    /// # Errors
    /// If it belongs to another user.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<bool> {
        match pidfd_send_signal(self.process.as_fd(), signal) {
            Err(Errno::ESRCH) => Ok(false),
            sent => sent.map(|()| true).map_err(io::Error::from),
        }
    }

    /// Waits for its end.
    pub(crate) fn wait(&self) {
        let mut end = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        while poll(&mut end, PollTimeout::NONE).is_err() {
            // Interrupted by a signal.
        }
    }
}

/// What to tell the user if a signal cannot be sent.
pub(crate) fn signal_failure(launcher: u32, error: &io::Error) -> String {
    format!("cannot signal launcher {launcher}: {error}")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_signal_goes_to_the_process_of_the_descriptor() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(RunningLauncher::open(child.id()).unwrap().is_none(), "it holds no page");
        let launcher = RunningLauncher { process: pidfd_open(child.id()).unwrap(), pages: Vec::new() };
        assert!(launcher.signal(Signal::SIGUSR1).unwrap());
        let ended = std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap());
        assert_eq!(ended, Some(Signal::SIGUSR1 as i32));
        launcher.wait();
        assert!(!launcher.signal(Signal::SIGUSR1).unwrap());
    }
}
