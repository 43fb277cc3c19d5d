//! Two processes that look after each other, so that SIGKILL of either leaves nothing behind.
//!
//! `mgpurun` splits in two before it does anything. The process the user knows becomes the *guardian*: it passes signals
//! on, waits, and exits with the launcher's code. Its child is the launcher proper. If the launcher is killed, its ranks
//! die with it, and all that is in their process groups (the kernel is asked for that), and what has left these falls to
//! the guardian, which ends it. If the guardian is killed, the launcher notices at once and ends everything itself. Only
//! SIGKILL to both at the same moment leaves something: processes that had left the group of their rank.
//!
//! The launcher gets a process group of its own, so that a signal from the terminal or to the whole group comes once,
//! through the guardian, which alone decides what it means. It also gets a name of its own: whoever kills by name, as
//! `killall -9 mgpurun` does, hits the guardian alone.

use std::ffi::CStr;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use mgpu_control::process::{Fork, fork, pidfd_open};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid, getppid, setpgid};

use crate::exit_code;
use crate::interrupt::handled_signals;
use crate::orphans;

/// Name of the launcher's process in `ps` and `top`.
const LAUNCHER_NAME: &CStr = c"mgpu-launcher";

/// What this process is after the split.
pub(crate) enum Role {
    /// The launcher.
    Launcher {
        /// Becomes readable when its guardian ends.
        guardian: OwnedFd,
        /// What it is to take notice of; blocked.
        signals: SigSet,
    },
    /// The guardian, when everything is over.
    Done(ExitCode),
}

/// Splits this process, which must not have started a thread. In the guardian it returns when the launcher has ended.
pub(crate) fn fork_guardian() -> io::Result<Role> {
    let guardian = getpid();
    // A shell that became `mgpurun` by exec may have started something before.
    let others = orphans::children();
    let mut signals = handled_signals();
    signals.add(Signal::SIGCHLD);
    // Blocked and not read: a limit of file sizes then fails a write, as a full disk does, and does not end the process.
    // Ranks start with no signal blocked.
    let mut blocked = signals;
    blocked.add(Signal::SIGXFSZ);
    // Before there is a child whose end might be missed. Whoever started us may have ignored it, and then the kernel
    // would not keep the ends of children for us.
    mgpu_control::process::reset_sigchld()?;
    blocked.thread_block()?;
    match fork()? {
        Fork::Child => {
            let pidfd = pidfd_open(guardian.as_raw() as u32)?;
            // A guardian that ended before that is not noticed by its number: it may be somebody else's by now.
            if getppid() != guardian {
                return Err(io::Error::other("it was killed while it started"));
            }
            setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
            nix::sys::prctl::set_name(LAUNCHER_NAME)?;
            // A process outside of the terminal's group that writes to it is stopped, if the terminal is set so, unless
            // it blocks the signal.
            let mut background = SigSet::empty();
            background.add(Signal::SIGTTOU);
            background.thread_block()?;
            Ok(Role::Launcher { guardian: pidfd, signals })
        }
        Fork::Parent(launcher) => {
            let _ = orphans::adopt();
            run_guardian(launcher, &others, &signals).map(Role::Done)
        }
    }
}

/// Passes signals on until the launcher ends. If it was killed, ends what it has left: all children but `others`.
fn run_guardian(launcher: Pid, others: &[Pid], signals: &SigSet) -> io::Result<ExitCode> {
    let source = SignalFd::with_flags(signals, SfdFlags::SFD_CLOEXEC)?;
    let end = loop {
        match source.read_signal()?.map(|info| Signal::try_from(info.ssi_signo as i32)) {
            Some(Ok(Signal::SIGCHLD)) => match waitpid(launcher, Some(WaitPidFlag::WNOHANG)) {
                Ok(end @ (WaitStatus::Exited(..) | WaitStatus::Signaled(..))) => break end,
                _ => orphans::reap(|child| child == launcher || others.contains(&child)),
            },
            // It is our child and has not been waited for: the number is still its own.
            Some(Ok(signal)) => {
                let _ = kill(launcher, signal);
                // Should somebody have stopped it.
                let _ = kill(launcher, Signal::SIGCONT);
            }
            _ => {}
        }
    };
    Ok(match end {
        // It has left nothing.
        WaitStatus::Exited(_, code) => ExitCode::from(code as u8),
        WaitStatus::Signaled(_, signal, _) => {
            let say = |text: &str| _ = writeln!(io::stderr(), "mgpurun: {text}");
            orphans::end_all(others, say).iter().for_each(|problem| say(problem));
            mgpu_control::rendezvous::remove_abandoned();
            let line = format!("mgpurun: the launcher was killed by {signal}, and its ranks with it\n");
            let _ = io::stderr().write_all(line.as_bytes());
            ExitCode::from(exit_code::signalled(signal as i32))
        }
        _ => unreachable!("the loop ends with one of these"),
    })
}
