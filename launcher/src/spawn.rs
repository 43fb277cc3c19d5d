//! Starting a rank.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::Pid;

use crate::plan::{Plan, RankPlan, RunFacts};

/// A rank's process.
#[derive(Debug)]
pub(crate) struct Process {
    /// The process, and its process group.
    pub(crate) pid: Pid,
    /// Readable when the process has ended.
    pub(crate) pidfd: OwnedFd,
    /// Its standard output and error, to be read without blocking; `None` once they are closed.
    pub(crate) pipes: [Option<OwnedFd>; 2],
}

/// Starts a rank in a process group of its own, with closed standard input. It dies with the calling thread.
pub(crate) fn spawn(plan: &Plan, rank: &RankPlan, facts: &RunFacts) -> Result<Process, String> {
    let failed = |error: &dyn std::fmt::Display| {
        format!("cannot start rank {} ({}): {error}", rank.rank, plan.program.display())
    };
    let mut command = Command::new(&plan.program);
    command
        .args(&plan.arguments)
        .envs(rank.complete(facts))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    mgpu::process::tie_to_parent(&mut command);
    let mut child = command.spawn().map_err(|error| failed(&error))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (Some(stdout), Some(stderr)) = (stdout, stderr) else { unreachable!("both are piped") };
    let pidfd = mgpu::process::pidfd_open(child.id()).map_err(|error| failed(&error))?;
    let pipes = [OwnedFd::from(stdout), OwnedFd::from(stderr)];
    for pipe in &pipes {
        fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|error| failed(&error))?;
    }
    Ok(Process { pid: Pid::from_raw(child.id() as i32), pidfd, pipes: pipes.map(Some) })
}

/// A TCP port nobody listens on at the moment, for programs that make a rendezvous of their own (PyTorch).
pub(crate) fn free_port() -> String {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    // Without a loopback interface there is nobody to connect either.
    port.map_or_else(|_| "29500".into(), |address| address.port().to_string())
}

impl Process {
    /// Kills the process with its group and waits for it.
    pub(crate) fn end(&self) {
        let _ = nix::sys::signal::killpg(self.pid, nix::sys::signal::Signal::SIGKILL);
        let _ = nix::sys::wait::waitpid(self.pid, None);
    }
}
