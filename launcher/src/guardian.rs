//! Two processes that monitor each other, so that SIGKILL to either of them leaves no process behind.
//!
//! `mgpurun` forks before it does anything. The process that the user started becomes the *guardian*: it forwards
//! signals, waits, and exits with the launcher's exit code. Its child is the launcher. If the launcher is killed, the
//! kernel kills its ranks and everything in their process groups; processes that have left these groups become children
//! of the guardian, which kills them. If the guardian is killed, the launcher notices at once and kills everything
//! itself. Only SIGKILL to both at the same time leaves processes: those that had left the process group of their rank.
//!
//! The launcher gets its own process group, so that a signal from the terminal or to the whole group arrives once,
//! through the guardian, which alone decides what it means. The launcher also gets its own process name, so that
//! killing by name, as `killall -9 mgpurun` does, hits only the guardian.

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
/// Exit code of a Rust program that has panicked.
const PANICKED: i32 = 101;

/// The role of this process after the fork.
pub(crate) enum Role {
    /// The launcher.
    Launcher {
        /// Becomes readable when its guardian ends.
        guardian: OwnedFd,
        /// The signals that it handles; blocked.
        signals: SigSet,
    },
    /// The guardian, after the launcher has ended.
    Done(ExitCode),
}

/// Forks this process, which must not have started a thread. In the guardian it returns when the launcher has ended. Both
/// handle the usual signals, and those to be `forwarded` to the ranks. The guardian calls `clean_up` after a launcher that
/// could not clean up itself.
pub(crate) fn fork_guardian(forwarded: &[Signal], clean_up: impl FnOnce()) -> io::Result<Role> {
    let guardian = getpid();
    // A shell that became `mgpurun` by exec may have started children before.
    let others = orphans::children();
    let mut signals = handled_signals(forwarded);
    signals.add(Signal::SIGCHLD);
    // SIGXFSZ is blocked and never read: at the limit on file sizes a write then fails, as on a full disk, and the
    // process is not killed. Ranks start with no signal blocked.
    let mut blocked = signals;
    blocked.add(Signal::SIGXFSZ);
    // Before the fork, so that no end of a child is missed. If the parent of this process ignored SIGCHLD, the kernel
    // would discard the exit statuses of our children.
    mgpu_control::process::reset_sigchld()?;
    blocked.thread_block()?;
    match fork()? {
        Fork::Child => {
            let pidfd = pidfd_open(guardian.as_raw() as u32)?;
            // The guardian may have ended before the pidfd was opened, and its pid may have been reused.
            if getppid() != guardian {
                return Err(io::Error::other("it was killed while it started"));
            }
            setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
            nix::sys::prctl::set_name(LAUNCHER_NAME)?;
            // With `stty tostop`, a process outside the terminal's foreground group is stopped when it writes to the
            // terminal, unless it blocks SIGTTOU.
            let mut background = SigSet::empty();
            background.add(Signal::SIGTTOU);
            background.thread_block()?;
            Ok(Role::Launcher { guardian: pidfd, signals })
        }
        Fork::Parent(launcher) => {
            let _ = orphans::adopt();
            run_guardian(launcher, &others, &signals, clean_up).map(Role::Done)
        }
    }
}

/// Forwards signals until the launcher ends. If it was killed, kills its leftover processes, all children but `others`, and
/// removes its files.
fn run_guardian(
    launcher: Pid,
    others: &[Pid],
    signals: &SigSet,
    clean_up: impl FnOnce(),
) -> io::Result<ExitCode> {
    let source = SignalFd::with_flags(signals, SfdFlags::SFD_CLOEXEC)?;
    let end = loop {
        match source.read_signal()?.map(|info| Signal::try_from(info.ssi_signo as i32)) {
            Some(Ok(Signal::SIGCHLD)) => match waitpid(launcher, Some(WaitPidFlag::WNOHANG)) {
                Ok(end @ (WaitStatus::Exited(..) | WaitStatus::Signaled(..))) => break end,
                _ => orphans::reap(|child| child == launcher || others.contains(&child)),
            },
            // It is our child and has not been reaped, so the pid is still its own.
            Some(Ok(signal)) => {
                let _ = kill(launcher, signal);
                // In case it was stopped.
                let _ = kill(launcher, Signal::SIGCONT);
            }
            _ => {}
        }
    };
    let end_launch = || {
        let say = |text: &str| _ = writeln!(io::stderr(), "mgpurun: {text}");
        orphans::end_all(|child| others.contains(&child), say).iter().for_each(|problem| say(problem));
        mgpu_control::rendezvous::remove_abandoned();
        clean_up();
    };
    Ok(match end {
        // A launcher that exits leaves no processes, unless it has panicked. If it passes on the code of a rank that has
        // panicked, there is nothing to clean up.
        WaitStatus::Exited(_, code) => {
            if code == PANICKED {
                end_launch();
            }
            ExitCode::from(code as u8)
        }
        WaitStatus::Signaled(_, signal, _) => {
            end_launch();
            let line = format!("mgpurun: the launcher was killed by {signal}, and its ranks with it\n");
            let _ = io::stderr().write_all(line.as_bytes());
            ExitCode::from(exit_code::signalled(signal as i32))
        }
        _ => unreachable!("the loop ends with one of these"),
    })
}
