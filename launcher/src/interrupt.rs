//! Sources of signals: the process's own signals for `mgpurun`, an [`Interrupter`] for a program that embeds the library.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getppid};

/// Asks the ranks of a running launch to end, as SIGTERM would. Works from any thread and from signal handlers that run
/// on a thread (the `ctrlc` crate). A second call kills the ranks.
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
    /// The process's own signals, if the launcher handles them.
    own: Option<SignalFd>,
    guardian: Option<Guardian>,
    event: Arc<EventFd>,
}

/// The guardian process, which forwards the user's signals.
///
/// A sender that signals all processes, as service managers do, signals this process and the guardian, and the guardian
/// forwards the same signal again. The pair must count as one signal: a direct signal starts the shutdown, but neither a
/// second direct one nor its forwarded copy kills the ranks. Only signals from the guardian count as second ones.
#[derive(Debug)]
struct Guardian {
    pid: Pid,
    /// Readable when it has ended.
    end: OwnedFd,
    /// Arrival of a direct signal whose forwarded copy has not arrived.
    direct: Cell<Option<Instant>>,
    /// A signal has arrived from the guardian.
    forwarded: Cell<bool>,
}

/// Longest time between a direct signal and its forwarded copy.
const FORWARD_DELAY: Duration = Duration::from_secs(1);

impl Guardian {
    /// True if a signal that ends the run counts.
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

    /// Handles the process's `signals`, which were blocked before a second thread was started, and ends the run when the
    /// process of the pidfd `guardian`, the parent of this one, ends.
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

    /// The signals that have arrived.
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

/// True for signals that ask a process to end or kill it.
pub(crate) fn ends_the_run(signal: Signal) -> bool {
    matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGKILL)
}

/// The signals that the launcher handles: SIGINT, SIGTERM and SIGHUP end the run, SIGQUIT shows what the ranks are
/// doing, SIGUSR1 and SIGUSR2 are forwarded to the ranks. Signals that the parent process has set to be ignored stay
/// ignored, so that `nohup mgpurun` survives the end of the terminal. SIGQUIT is handled in any case: shells make
/// background jobs ignore it, and it does no harm. The `forwarded` ones, which the user has listed, are forwarded, too.
pub(crate) fn handled_signals(forwarded: &[Signal]) -> SigSet {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = signal_mask(&status, "SigIgn:");
    let others = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2];
    let handled = others.into_iter().filter(|signal| ignored & (1 << (*signal as u32 - 1)) == 0);
    handled.chain([Signal::SIGQUIT]).chain(forwarded.iter().copied()).collect()
}

/// The signals in a field of a process's `/proc/PID/status`, bit n − 1 for signal n: those that it ignores in `SigIgn:`.
pub(crate) fn signal_mask(status: &str, field: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix(field));
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
        // A signal from the guardian that arrives much later is not a forwarded copy.
        let long_ago = Instant::now().checked_sub(2 * FORWARD_DELAY);
        assert!(guardian(long_ago, false).counts(through));
    }

    #[test]
    fn ignored_signals_are_parsed() {
        let status = "Name:\tx\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n";
        assert_eq!(signal_mask(status, "SigIgn:"), 1 << 12 | 1);
        assert_eq!(signal_mask("nothing", "SigIgn:"), 0);
    }
}
