//! The signals that ask a rank to stop: SIGTERM, SIGINT and SIGUSR1.
//!
//! They are handled only in a program that asks whether it should stop, from its first question on, and only where they
//! would end the process: a signal that the program handles or ignores stays as it is. The handler notes the signal and
//! nothing else. There are three exceptions, in which the signal ends the process as if there were no handler:
//!
//! - It comes from this rank's `mgpurun`, and is not SIGUSR1. `mgpurun` asks ranks to stop through the rendezvous, so a
//!   signal of it means that the run has failed, and that the rank should end at once.
//! - It is a second SIGTERM or SIGINT, at least [`REPEAT_DELAY`] after the first one: the user does not want to wait. What
//!   arrives earlier is the same request by another way: batch systems signal both a launcher and its ranks.
//! - The process is a forked child of the rank.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// A second signal counts from this time after the first one on.
const REPEAT_DELAY: Duration = Duration::from_secs(1);

/// A signal has asked this process to stop.
static ASKED: AtomicBool = AtomicBool::new(false);
/// When the first SIGTERM or SIGINT arrived, in milliseconds of the monotonic clock; 0 before.
static FIRST: AtomicU64 = AtomicU64::new(0);
/// The rank's process.
static OWN: AtomicI32 = AtomicI32::new(0);
/// The process of `mgpurun`, or 0.
static LAUNCHER: AtomicI32 = AtomicI32::new(0);

/// Handles the signals from now on. `launcher` is the process of `mgpurun` that serves this rank, if one does. Only the
/// first call of a process has an effect.
pub fn handle(launcher: Option<u32>) {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        OWN.store(std::process::id() as i32, SeqCst);
        LAUNCHER.store(launcher.map_or(0, |pid| pid as i32), SeqCst);
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1] {
            handle_signal(signal);
        }
    });
}

/// True once a signal has asked this process to stop.
#[inline]
pub fn have_asked() -> bool {
    ASKED.load(SeqCst)
}

/// Handles a signal that would end the process.
fn handle_signal(signal: Signal) {
    let handler = SigHandler::SigAction(on_signal);
    let action = SigAction::new(handler, SaFlags::SA_RESTART | SaFlags::SA_SIGINFO, SigSet::empty());
    // SAFETY: the handler calls async-signal-safe functions only.
    let Ok(before) = (unsafe { sigaction(signal, &action) }) else { return };
    if !matches!(before.handler(), SigHandler::SigDfl) {
        // SAFETY: it was the action before this call.
        let _ = unsafe { sigaction(signal, &before) };
    }
}

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: getpid is async-signal-safe.
    let is_own = unsafe { libc::getpid() } == OWN.load(SeqCst);
    // SAFETY: the kernel passes a valid pointer; for signals of processes the field is set.
    let (sender, is_of_process) = unsafe { ((*info).si_pid(), (*info).si_code <= 0) };
    let launcher = LAUNCHER.load(SeqCst);
    // A sender outside of this process's pid namespace is 0: a launcher whose ranks are in a container.
    let is_of_launcher = launcher != 0 && is_of_process && (sender == launcher || sender == 0);
    let ends = signal != libc::SIGUSR1;
    if !is_own || ends && (is_of_launcher || is_repeated()) {
        // SAFETY: both are async-signal-safe. The signal is delivered when this handler returns.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        return;
    }
    ASKED.store(true, SeqCst);
}

/// Notes a SIGTERM or SIGINT. True if it is a second one.
fn is_repeated() -> bool {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime is async-signal-safe, and writes to a valid place.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let now = (time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000).max(1);
    let first = FIRST.compare_exchange(0, now, SeqCst, SeqCst);
    first.is_err_and(|first| now.saturating_sub(first) >= REPEAT_DELAY.as_millis() as u64)
}
