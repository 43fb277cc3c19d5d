//! Where signals come from: the launcher's own, or the program's that embeds it.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getppid};

/// Asks the ranks of a running launch to end, as SIGTERM would. Works from any thread and from signal handlers that
/// run as threads (the `ctrlc` crate); a second call kills.
#[derive(Debug, Clone)]
pub struct Interrupter {
    event: Arc<EventFd>,
}

impl Interrupter {
    /// Asks the ranks to end.
    pub fn interrupt(&self) {
        // Fails only if the counter is about to overflow, with 2^64 interrupts pending.
        let _ = self.event.write(1);
    }
}

/// All sources of signals of one launch.
#[derive(Debug)]
pub(crate) struct Signals {
    /// The process's own signals, where the launcher owns them.
    own: Option<SignalFd>,
    guardian: Option<Guardian>,
    event: Arc<EventFd>,
}

/// The process that passes the user's signals on.
///
/// Whoever signals all processes, as service managers do, signals this one and the guardian, which passes the same
/// signal on once more. Only what comes from the guardian is counted, then: a signal that comes directly begins the end,
/// but does not hasten it, and that signal's echo does not either.
#[derive(Debug)]
struct Guardian {
    pid: Pid,
    /// Readable when it has ended.
    end: OwnedFd,
    /// When a signal came directly whose echo has not come.
    direct: Cell<Option<Instant>>,
    /// A signal has come through the guardian.
    forwarded: Cell<bool>,
}

/// Longest time between a signal and its echo.
const FORWARD_DELAY: Duration = Duration::from_secs(1);

impl Guardian {
    /// Whether a signal that ends the run counts.
    fn counts(&self, sender: Pid) -> bool {
        if sender == self.pid {
            self.forwarded.set(true);
            return self.direct.take().is_none_or(|at| at.elapsed() >= FORWARD_DELAY);
        }
        let first = self.direct.get().is_none() && !self.forwarded.get();
        if first {
            self.direct.set(Some(Instant::now()));
        }
        first
    }
}

impl Signals {
    pub(crate) fn new() -> nix::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Signals { own: None, guardian: None, event: Arc::new(EventFd::from_value_and_flags(0, flags)?) })
    }

    /// Reads the process's `signals`, which have been blocked since before there was a second thread, and ends the run
    /// when the process behind `guardian`, this one's parent, ends.
    pub(crate) fn take_over(&mut self, guardian: OwnedFd, signals: &SigSet) -> nix::Result<()> {
        self.own = Some(SignalFd::with_flags(signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?);
        let (direct, forwarded) = (Cell::new(None), Cell::new(false));
        self.guardian = Some(Guardian { pid: getppid(), end: guardian, direct, forwarded });
        Ok(())
    }

    pub(crate) fn guardian(&self) -> Option<BorrowedFd<'_>> {
        self.guardian.as_ref().map(|guardian| guardian.end.as_fd())
    }

    pub(crate) fn interrupter(&self) -> Interrupter {
        Interrupter { event: Arc::clone(&self.event) }
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.own.iter().map(AsFd::as_fd).chain([self.event.as_fd()])
    }

    /// The signals that have come.
    pub(crate) fn take(&self) -> Vec<Signal> {
        let mut signals = Vec::new();
        while let Some(Ok(Some(info))) = self.own.as_ref().map(SignalFd::read_signal) {
            let sender = Pid::from_raw(info.ssi_pid as i32);
            let counts = |signal: &Signal| {
                let guardian = self.guardian.as_ref().filter(|_| ends_the_run(*signal));
                guardian.is_none_or(|guardian| guardian.counts(sender))
            };
            signals.extend(Signal::try_from(info.ssi_signo as i32).ok().filter(counts));
        }
        if let Ok(count) = self.event.read() {
            signals.extend((0..count.min(2)).map(|_| Signal::SIGTERM));
        }
        signals
    }
}

/// True for what a process is asked or made to end by.
pub(crate) fn ends_the_run(signal: Signal) -> bool {
    matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGKILL)
}

/// The signals that mean something to a launcher: SIGINT, SIGTERM and SIGHUP end the run, SIGQUIT asks what the ranks
/// are doing, SIGUSR1 and SIGUSR2 are for the ranks. Those that whoever started us has set to be ignored stay ignored:
/// `nohup mgpurun` is to survive the end of the terminal. But SIGQUIT, which shells let background jobs ignore, does no
/// harm.
pub(crate) fn handled_signals() -> SigSet {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored_signals(&status);
    let others = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2];
    let heeded = others.into_iter().filter(|signal| ignored & (1 << (*signal as u32 - 1)) == 0);
    heeded.chain([Signal::SIGQUIT]).collect()
}

/// The signals that a process ignores, bit n − 1 for signal n, by its `/proc/PID/status`.
fn ignored_signals(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_to_both_processes_counts_once() {
        let guardian = |direct, forwarded| Guardian {
            pid: Pid::from_raw(7),
            end: OwnedFd::from(std::fs::File::open("/dev/null").unwrap()),
            direct: Cell::new(direct),
            forwarded: Cell::new(forwarded),
        };
        let (through, direct) = (Pid::from_raw(7), Pid::from_raw(8));
        let counted = |senders: &[Pid]| {
            let guardian = guardian(None, false);
            senders.iter().map(|sender| guardian.counts(*sender)).collect::<Vec<_>>()
        };
        assert_eq!(counted(&[through, through]), [true, true]);
        assert_eq!(counted(&[direct, through, through]), [true, false, true]);
        assert_eq!(counted(&[through, direct]), [true, false]);
        assert_eq!(counted(&[direct, direct]), [true, false]);
        // What comes through the guardian much later is no echo.
        let long_ago = Instant::now().checked_sub(2 * FORWARD_DELAY);
        assert!(guardian(long_ago, false).counts(through));
    }

    #[test]
    fn ignored_signals_are_read() {
        let status = "Name:\tx\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n";
        assert_eq!(ignored_signals(status), 1 << 12 | 1);
        assert_eq!(ignored_signals("nothing"), 0);
    }
}
