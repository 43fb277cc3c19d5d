//! Ends the waits of calls from outside: a signal handler, such as that of Ctrl-C, or another thread.
//!
//! An interpreter runs its handlers only after a call has returned. So a signal must end a call that waits for other ranks.
//! Interruptions are counted. A wait ends if one has come since its call has begun: one that came earlier was handled by
//! the program already.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use nix::libc;

use crate::call::call;
use crate::status::{Failure, MGPU_ERROR_SYSTEM, Status};

static INTERRUPTIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Their number when the current call of this thread began; `None` if there is none, as in threads of the library.
    static AT_BEGIN: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A call of this thread, until it is dropped. A call within another one, by a function that the library has called, is part
/// of it.
pub(crate) struct RunningCall {
    is_outermost: bool,
}

impl RunningCall {
    pub(crate) fn begin() -> Self {
        let is_outermost = AT_BEGIN.try_with(|at| {
            let is_outermost = at.get().is_none();
            if is_outermost {
                at.set(Some(INTERRUPTIONS.load(Ordering::Relaxed)));
            }
            is_outermost
        });
        RunningCall { is_outermost: is_outermost.unwrap_or(false) }
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        if self.is_outermost {
            let _ = AT_BEGIN.try_with(|at| at.set(None));
        }
    }
}

/// Whether the current call of this thread was interrupted.
pub(crate) fn is_interrupted() -> bool {
    let at = AT_BEGIN.try_with(Cell::get).ok().flatten();
    at.is_some_and(|at| at != INTERRUPTIONS.load(Ordering::Relaxed))
}

/// Ends the waits of all calls that are running: they return `MGPU_ERROR_INTERRUPTED` within 20 ms, and their
/// communicators cannot be used any more. But `mgpu_init` waits on. May be called in signal handlers. A world of one waits for
/// nobody.
#[unsafe(no_mangle)]
pub extern "C" fn mgpu_interrupt() {
    INTERRUPTIONS.fetch_add(1, Ordering::Relaxed);
}

/// The handler to which [`on_sigint`] passes the signal on. Null before the first [`mgpu_interrupt_on_sigint`] that has found
/// one.
static PASSED_TO: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn on_sigint(signal: c_int) {
    mgpu_interrupt();
    let handler = PASSED_TO.load(Ordering::Acquire);
    if !handler.is_null() {
        // SAFETY: the address of a handler of one argument, which may be called here because the signal has arrived.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

/// Makes SIGINT interrupt calls, before the handler that the program has installed for it runs: for interpreters, whose
/// handlers only run after the call. Does nothing if the signal is ignored, ends the process, or has a handler that wants
/// more than its number.
///
/// An interpreter whose program installs another handler puts its own function back. So call this again before a call
/// that may wait; it costs one system call. A handler that is neither this library's nor the one of the first call is
/// left as it is.
#[unsafe(no_mangle)]
pub extern "C" fn mgpu_interrupt_on_sigint() -> Status {
    call(|| {
        chain_handler().map_err(|errno| {
            Failure::new(MGPU_ERROR_SYSTEM, format!("cannot handle SIGINT: {}", errno.desc()))
        })
    })
}

/// Puts [`on_sigint`] before the handler of the interpreter, if that is the handler now.
///
/// Only one handler is ever chained. Another one that was installed later may call ours, and a chain to it would be a loop.
fn chain_handler() -> nix::Result<()> {
    let ours = on_sigint as extern "C" fn(c_int) as usize;
    let current = exchange_action(None)?;
    let handler = current.sa_sigaction;
    let is_plain =
        ![libc::SIG_DFL, libc::SIG_IGN, ours].contains(&handler) && current.sa_flags & libc::SA_SIGINFO == 0;
    if !is_plain {
        return Ok(());
    }
    let handler = std::ptr::with_exposed_provenance_mut(handler);
    let first =
        PASSED_TO.compare_exchange(std::ptr::null_mut(), handler, Ordering::AcqRel, Ordering::Acquire);
    if first.is_err_and(|first| first != handler) {
        return Ok(());
    }
    // With the flags and the mask of the handler.
    let mut action = current;
    action.sa_sigaction = ours;
    let replaced = exchange_action(Some(&action))?;
    // Another thread has changed it meanwhile: to what the program wants, or to ours.
    if ![current.sa_sigaction, ours].contains(&replaced.sa_sigaction) {
        exchange_action(Some(&replaced))?;
    }
    Ok(())
}

/// The action of SIGINT; sets a new one if there is one.
fn exchange_action(action: Option<&libc::sigaction>) -> nix::Result<libc::sigaction> {
    let mut before = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    let action = action.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the new action is one that was there before, or `on_sigint`, which adds to a counter and calls the handler
    // that was there.
    let code = unsafe { libc::sigaction(libc::SIGINT, action, before.as_mut_ptr()) };
    nix::errno::Errno::result(code)?;
    // SAFETY: written by the system.
    Ok(unsafe { before.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that interrupt run one after the other.
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn only_a_call_that_runs_is_interrupted() {
        let _one = ONE.lock();
        std::thread::spawn(|| assert!(!is_interrupted())).join().unwrap();
        mgpu_interrupt();
        let outer = RunningCall::begin();
        assert!(!is_interrupted());
        drop(RunningCall::begin());
        mgpu_interrupt();
        assert!(is_interrupted());
        drop(RunningCall::begin());
        assert!(is_interrupted(), "a call within it does not forget the interruption");
        drop(outer);
        let _next = RunningCall::begin();
        assert!(!is_interrupted());
    }

    static HANDLED: AtomicU64 = AtomicU64::new(0);

    extern "C" fn interpreter(_signal: c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }

    extern "C" fn another(_signal: c_int) {}

    /// Installs a handler, as an interpreter does, and calls the function under test. Returns the handler afterwards.
    fn handler_after(handler: usize, flags: c_int) -> usize {
        let mut action = exchange_action(None).unwrap();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        exchange_action(Some(&action)).unwrap();
        assert_eq!(mgpu_interrupt_on_sigint(), 0);
        let after = exchange_action(None).unwrap();
        assert_eq!(after.sa_flags & libc::SA_RESTART, flags & libc::SA_RESTART);
        after.sa_sigaction
    }

    #[test]
    fn only_the_handler_of_the_interpreter_is_chained() {
        let _one = ONE.lock();
        let ours = on_sigint as extern "C" fn(c_int) as usize;
        let [interpreter, another] = [interpreter, another].map(|f: extern "C" fn(c_int)| f as usize);
        for kept in [libc::SIG_DFL, libc::SIG_IGN] {
            assert_eq!(handler_after(kept, 0), kept);
        }
        assert_eq!(handler_after(another, libc::SA_SIGINFO), another);
        for flags in [0, libc::SA_RESTART] {
            assert_eq!(handler_after(interpreter, flags), ours, "also when it is put back");
            let (interruptions, handled) =
                (INTERRUPTIONS.load(Ordering::Relaxed), HANDLED.load(Ordering::Relaxed));
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGINT).unwrap();
            assert!(INTERRUPTIONS.load(Ordering::Relaxed) > interruptions);
            assert_eq!(HANDLED.load(Ordering::Relaxed), handled + 1);
        }
        assert_eq!(handler_after(ours, 0), ours);
        for kept in [another, libc::SIG_IGN, libc::SIG_DFL] {
            assert_eq!(handler_after(kept, 0), kept);
        }
    }
}
