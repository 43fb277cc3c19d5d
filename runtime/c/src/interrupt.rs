//! Ends the waits of calls from outside: a signal handler, such as that of Ctrl-C, or another thread.
//!
//! An interpreter runs its handlers only after a call has returned. So a signal must end a call that waits for other ranks.
//! Interruptions are counted. A wait ends if one has come since its call has begun: one that came earlier was handled by
//! the program already.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::call::{Result, call};
use crate::status::{Failure, MGPU_ERROR_SYSTEM, Status};

static INTERRUPTIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Their number when the current call of this thread began; `None` for threads of the library.
    static AT_BEGIN: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Remembers that this thread begins a call.
pub(crate) fn begin_call() {
    let _ = AT_BEGIN.try_with(|at| at.set(Some(INTERRUPTIONS.load(Ordering::Relaxed))));
}

/// Whether the current call of this thread was interrupted.
pub(crate) fn is_interrupted() -> bool {
    let at = AT_BEGIN.try_with(Cell::get).ok().flatten();
    at.is_some_and(|at| at != INTERRUPTIONS.load(Ordering::Relaxed))
}

/// Ends the waits of all calls that are running: they return `MGPU_ERROR_INTERRUPTED` within 20 ms, and their
/// communicators cannot be used any more. May be called in signal handlers. A world of one waits for nobody.
#[unsafe(no_mangle)]
pub extern "C" fn mgpu_interrupt() {
    INTERRUPTIONS.fetch_add(1, Ordering::Relaxed);
}

/// The handler of SIGINT before [`mgpu_interrupt_on_sigint`].
static BEFORE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_sigint(signal: c_int) {
    mgpu_interrupt();
    let before = BEFORE.load(Ordering::Relaxed);
    // SAFETY: the address of a handler of one argument, which may be called here because the signal has arrived.
    let before: extern "C" fn(c_int) = unsafe { std::mem::transmute(before) };
    before(signal);
}

/// Makes SIGINT interrupt calls, before the handler that the program has installed for it runs: for interpreters, whose
/// handlers only run after the call. Does nothing if the signal is ignored, ends the process, or has a handler that wants
/// more than its number.
#[unsafe(no_mangle)]
pub extern "C" fn mgpu_interrupt_on_sigint() -> Status {
    static DONE: OnceLock<Result<(), String>> = OnceLock::new();
    call(|| {
        let done = DONE.get_or_init(|| chain_handler().map_err(|errno| errno.to_string()));
        done.clone()
            .map_err(|reason| Failure::new(MGPU_ERROR_SYSTEM, format!("cannot handle SIGINT: {reason}")))
    })
}

fn chain_handler() -> nix::Result<()> {
    let mut current = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: only reads the current action.
    let read = unsafe { libc::sigaction(libc::SIGINT, std::ptr::null(), current.as_mut_ptr()) };
    nix::errno::Errno::result(read)?;
    // SAFETY: written by the system.
    let current = unsafe { current.assume_init() };
    let is_handler = current.sa_sigaction != libc::SIG_DFL && current.sa_sigaction != libc::SIG_IGN;
    if !is_handler || current.sa_flags & libc::SA_SIGINFO != 0 {
        return Ok(());
    }
    BEFORE.store(current.sa_sigaction, Ordering::Relaxed);
    let flags = SaFlags::from_bits_retain(current.sa_flags);
    let action = SigAction::new(SigHandler::Handler(on_sigint), flags, SigSet::empty());
    // SAFETY: the handler only adds to a counter and calls the handler that was there.
    unsafe { sigaction(Signal::SIGINT, &action) }.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_that_runs_is_interrupted() {
        std::thread::spawn(|| assert!(!is_interrupted())).join().unwrap();
        mgpu_interrupt();
        begin_call();
        assert!(!is_interrupted());
        mgpu_interrupt();
        assert!(is_interrupted());
        begin_call();
        assert!(!is_interrupted());
    }
}
