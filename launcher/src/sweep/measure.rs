//! Runs a cell: one launch of this same executable, so supervision, exit codes and clean-up are those of any launch.
//!
//! The launch has its own process group. A signal from the terminal therefore reaches the sweep only, which forwards
//! it: the launch ends its ranks as it would by itself, and a second signal kills them. If the sweep is killed, the
//! kernel kills the launch, and with it all ranks.
//!
//! The launch writes its events to a pipe that it opens through `/proc`; they have the memory of each rank.

use std::io::{self, ErrorKind, PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use mgpu_control::process::{has_ended, kill_with_parent, pidfd_open};
use mgpu_control::protocol::MGPU_PROGRESS;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::unistd::Pid;
use serde_json::{Map, Value};

use super::reports::{LineSplitter, Reports};
use crate::exit_code;

/// What a launch is made of.
#[derive(Debug)]
pub(super) struct Launcher {
    /// This executable.
    pub(super) executable: PathBuf,
    /// The options of every launch.
    pub(super) options: Vec<String>,
}

/// A launch to be made.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) ranks: u32,
    pub(super) share_gpus: bool,
    /// Program and arguments.
    pub(super) command: &'a [String],
}

/// What a launch has given.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) exit_code: u8,
    /// Why it failed, if it did.
    pub(super) error: Option<String>,
    pub(super) wall_s: f64,
    pub(super) peak_rss_mib: Vec<Option<u64>>,
    pub(super) result: Option<Map<String, Value>>,
    /// A signal that ends the sweep has arrived meanwhile.
    pub(super) signal: Option<Signal>,
}

impl Launcher {
    /// The options of a launch up to its program.
    pub(super) fn words(&self, request: &Request<'_>) -> Vec<String> {
        let mut words = vec!["-n".to_owned(), request.ranks.to_string()];
        words.extend(self.options.iter().cloned());
        if request.share_gpus {
            words.push("--share-gpus".to_owned());
        }
        words.push("--".to_owned());
        words.extend(request.command.iter().cloned());
        words
    }

    /// A launch that writes its events to the file `events`, without options and program.
    fn command(&self, events: &str) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .arg0("mgpurun")
            .args(["--no-prefix", "--color", "never", "--events", events])
            .env_remove(MGPU_PROGRESS)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        kill_with_parent(&mut command);
        command
    }

    /// Asks the launcher whether it can start a launch, by a dry run.
    ///
    /// # Errors
    /// Its exit code and its error.
    pub(super) fn check(&self, request: &Request<'_>) -> Result<(), (u8, String)> {
        let mut command = self.command("/dev/null");
        let output = command.arg("--dry-run").args(self.words(request)).output();
        let output = output.map_err(|error| (exit_code::LAUNCHER, cannot_start(&error)))?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr);
        let text = text.trim().trim_start_matches("mgpurun: ").trim_start_matches("error: ");
        Err((code_of(output.status), text.to_owned()))
    }

    /// Makes a launch and waits for its end. `signals` are forwarded to it.
    ///
    /// # Errors
    /// If the launch cannot be started.
    pub(super) fn measure(&self, request: &Request<'_>, signals: &SignalFd) -> Result<Measured, String> {
        let failed = |error: io::Error| cannot_start(&error);
        let (events, writer) = io::pipe().map_err(failed)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), writer.as_raw_fd());
        let mut command = self.command(&path);
        let started = Instant::now();
        let child = command.args(self.words(request)).spawn().map_err(failed)?;
        let mut running = Running::new(child, events, request.ranks).map_err(failed)?;
        let (status, signal) = running.wait(signals).map_err(failed)?;
        let wall_s = (started.elapsed().as_secs_f64() * 1e4).round() / 1e4;
        let (reports, exit_code) = (running.reports, code_of(status));
        Ok(Measured {
            exit_code,
            error: (exit_code != exit_code::SUCCESS).then(|| reports.failure(exit_code)),
            wall_s,
            peak_rss_mib: reports.peak_rss_mib,
            result: reports.result,
            signal,
        })
    }
}

fn cannot_start(error: &io::Error) -> String {
    format!("cannot start a launch: {}", mgpu_control::process::start_failure(error))
}

fn code_of(status: ExitStatus) -> u8 {
    let signal = status.signal().unwrap_or(0);
    status.code().map_or(exit_code::signalled(signal), |code| code as u8)
}

/// Bytes of a read.
const READ_SIZE: usize = 1 << 14;
/// Reads from a pipe before others have their turn: together as much as the largest pipe holds.
const READS: usize = 64;

/// A stream of a launch that is read.
#[derive(Debug, Clone, Copy)]
enum Stream {
    Output,
    Errors,
    Events,
}

/// A launch that is running.
struct Running {
    child: Child,
    /// Readable when it has ended.
    ended: OwnedFd,
    /// Non-blocking; removed once closed.
    pipes: Vec<(Stream, PipeReader, LineSplitter)>,
    reports: Reports,
}

impl Running {
    fn new(mut child: Child, events: PipeReader, ranks: u32) -> io::Result<Self> {
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            unreachable!("both are piped")
        };
        let pipes = [
            (Stream::Output, OwnedFd::from(stdout).into()),
            (Stream::Errors, OwnedFd::from(stderr).into()),
            (Stream::Events, events),
        ];
        let open = || {
            for (_, pipe) in &pipes {
                fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            }
            pidfd_open(child.id())
        };
        let ended = open().inspect_err(|_| _ = child.kill().and_then(|()| child.wait()))?;
        let pipes = pipes.map(|(stream, pipe)| (stream, pipe, LineSplitter::default())).into();
        Ok(Running { child, ended, pipes, reports: Reports::new(ranks) })
    }

    /// Reads what the launch prints until it ends, and forwards signals to it. Returns the first of them.
    fn wait(&mut self, signals: &SignalFd) -> io::Result<(ExitStatus, Option<Signal>)> {
        let mut first = None;
        while !has_ended(&self.ended) {
            let fds = [self.ended.as_fd(), signals.as_fd()].into_iter();
            let fds = fds.chain(self.pipes.iter().map(|(_, pipe, _)| pipe.as_fd()));
            let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            // After an interrupted poll nothing is ready; the next iteration waits again.
            let _ = poll(&mut fds, PollTimeout::NONE);
            while let Some(signal) = read_signal(signals) {
                first = first.or(Some(signal));
                // It has not been waited for, so the pid is still its own.
                let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
            }
            self.read();
        }
        // No process of the launch is left that could still write.
        self.read();
        let Running { pipes, reports, .. } = self;
        for (stream, _, splitter) in pipes {
            splitter.finish(|line| reports.take(*stream, line));
        }
        Ok((self.child.wait()?, first))
    }

    /// Reads what is in the pipes.
    fn read(&mut self) {
        let Running { pipes, reports, .. } = self;
        let mut buffer = [0; READ_SIZE];
        pipes.retain_mut(|(stream, pipe, splitter)| {
            for _ in 0..READS {
                match pipe.read(&mut buffer) {
                    Ok(0) => {
                        splitter.finish(|line| reports.take(*stream, line));
                        return false;
                    }
                    Ok(count) => splitter.push(&buffer[..count], |line| reports.take(*stream, line)),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return error.kind() == ErrorKind::WouldBlock,
                }
            }
            true
        });
    }
}

impl Reports {
    fn take(&mut self, stream: Stream, line: &[u8]) {
        match stream {
            Stream::Output => self.output(line),
            Stream::Errors => self.error(line),
            Stream::Events => self.event(line),
        }
    }
}

/// The next signal that has arrived, without waiting for one.
pub(super) fn read_signal(signals: &SignalFd) -> Option<Signal> {
    let info = signals.read_signal().ok()??;
    Signal::try_from(info.ssi_signo as i32).ok()
}
