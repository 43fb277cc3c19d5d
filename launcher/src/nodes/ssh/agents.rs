//! The agents of all hosts: starts them, passes on signals and output, and ends when all of them have.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use mgpu_control::process::{kill_with_parent, pidfd_open, reset_sigchld, start_hint};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::attachment::GREETING;
use super::command::AgentCommand;
use super::ending::{Action, Ending, SSH_FAILED};
use crate::exit_code;
use crate::interrupt::{ends_the_run, handled_signals};

/// Longest wait for more output after an agent has ended. (A connection of ssh that is kept for later keeps it open.)
const LAST_OUTPUT: Duration = Duration::from_secs(1);
/// How often that wait looks for signals, and for output that is being written.
const LAST_OUTPUT_INTERVAL: Duration = Duration::from_millis(50);
/// Exit codes of a shell that cannot start a program, and of one that does not find it.
const NOT_STARTED: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Longest line that is passed on as a whole, in bytes.
const MAX_LINE: u64 = 64 << 10;

/// An agent.
struct Agent<'a> {
    command: &'a AgentCommand,
    child: Child,
    pidfd: OwnedFd,
    /// `None` once it is closed.
    input: Option<ChildStdin>,
    /// Gets a value as soon as the agent has said that it runs, and is disconnected at the end of its output.
    greeting: Receiver<()>,
    has_ended: bool,
}

/// Runs the agents to their end, and passes on the usual signals and the `forwarded` ones. Returns the exit code of the
/// job.
///
/// # Errors
/// If one cannot be started; none is left running then.
pub(super) fn run(
    commands: &[AgentCommand],
    secret: &str,
    ending: Ending,
    forwarded: &[Signal],
    raw: bool,
) -> Result<u8, String> {
    let failed = |what: &str, error: io::Error| format!("{what}: {error}");
    reset_sigchld().map_err(|error| failed("cannot wait for processes", error))?;
    let handled = handled_signals(forwarded);
    handled.thread_block().map_err(|error| failed("cannot block signals", error.into()))?;
    let signals = SignalFd::with_flags(&handled, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .map_err(|error| failed("cannot wait for signals", error.into()))?;
    let (at_end, readers) = mpsc::channel();
    let passing = Passing { raw, counts: Arc::default(), at_end };
    let mut agents = Agents { agents: Vec::new(), ending, signals, is_interrupted: false };
    for command in commands {
        agents.start(command, secret, &passing)?;
    }
    let Passing { counts, at_end, .. } = passing;
    drop(at_end);
    let code = agents.wait();
    // A slow reader, such as a pager, may delay the end of the run, but not of an interrupted one.
    let stalled = if agents.is_interrupted { agents.ending.grace() } else { Duration::MAX };
    wait_for_output(&readers, &counts, stalled, &agents.signals);
    Ok(code)
}

struct Agents<'a> {
    agents: Vec<Agent<'a>>,
    ending: Ending,
    signals: SignalFd,
    is_interrupted: bool,
}

impl<'a> Agents<'a> {
    fn start(&mut self, command: &'a AgentCommand, secret: &str, passing: &Passing) -> Result<(), String> {
        let (program, arguments) = command.words.split_first().expect("a command has a program");
        let failed = |error: io::Error| {
            let (program, hint) = (program.to_string_lossy(), start_hint(&error));
            format!("cannot start {program} for host {}: {error}{hint}", command.host)
        };
        let mut start = Command::new(program);
        // In a group of its own: signals of the terminal arrive once, through the standard input.
        start.args(arguments).process_group(0);
        start.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        kill_with_parent(&mut start);
        let mut child = start.spawn().map_err(failed)?;
        let (stdout, stderr) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let mut input = child.stdin.take();
        let pidfd = pidfd_open(child.id());
        // A pipe has room for it. If the process has ended already, its exit code says more than this error.
        let _ = input.as_mut().map(|input| input.write_all(format!("{secret}\n").as_bytes()));
        let (greeted, greeting) = mpsc::channel();
        passing.clone().start(stdout, io::stdout, None).map_err(failed)?;
        passing.clone().start(stderr, io::stderr, Some(greeted)).map_err(failed)?;
        let pidfd = pidfd.map_err(failed)?;
        self.agents.push(Agent { command, child, pidfd, input, greeting, has_ended: false });
        Ok(())
    }

    /// Waits until all agents have ended. Returns the exit code of the job.
    fn wait(&mut self) -> u8 {
        while self.agents.iter().any(|agent| !agent.has_ended) {
            self.wait_for_something();
            let now = Instant::now();
            while let Ok(Some(info)) = self.signals.read_signal() {
                if let Ok(signal) = Signal::try_from(info.ssi_signo as i32) {
                    self.forward(signal, now);
                }
            }
            for node in 0..self.agents.len() {
                if let Some(status) = self.agents[node].poll_end() {
                    let code = self.agents[node].explain(status);
                    self.ending.ended(node, code, now);
                }
            }
            match self.ending.act(now) {
                Some(Action::Release) => self.agents.iter_mut().for_each(|agent| agent.input = None),
                Some(Action::Kill) => self.kill_the_rest(),
                None => {}
            }
        }
        self.ending.exit_code()
    }

    fn wait_for_something(&self) {
        let running = self.agents.iter().filter(|agent| !agent.has_ended);
        let mut fds: Vec<PollFd<'_>> =
            running.map(|agent| PollFd::new(agent.pidfd.as_fd(), PollFlags::POLLIN)).collect();
        fds.push(PollFd::new(self.signals.as_fd(), PollFlags::POLLIN));
        let timeout = self.ending.next_deadline().map_or(PollTimeout::NONE, |at| {
            let left = at.saturating_duration_since(Instant::now()).as_millis() + 1;
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        // An interrupted call is repeated by the caller.
        let _ = poll(&mut fds, timeout);
    }

    /// Tells node 0 about a signal that ends the job, which node 0 tells all others, and about SIGQUIT, since node 0 shows
    /// what all ranks are doing. An agent passes any other signal on to its own ranks, so all are told. A second signal that
    /// ends the job ends it without waiting.
    fn forward(&mut self, signal: Signal, now: Instant) {
        if !ends_the_run(signal) && signal != Signal::SIGQUIT {
            for agent in self.agents.iter_mut().filter(|agent| !agent.has_ended) {
                let _ = agent.tell(signal);
            }
            return;
        }
        if ends_the_run(signal) && std::mem::replace(&mut self.is_interrupted, true) {
            return self.ending.hurry(now);
        }
        let told = self.agents[0].tell(signal);
        if ends_the_run(signal) && !told {
            self.ending.hurry(now);
        }
    }

    fn kill_the_rest(&mut self) {
        for agent in self.agents.iter_mut().filter(|agent| !agent.has_ended) {
            say(&format!("host {} does not answer: its connection is given up", agent.command.host));
            let _ = agent.child.kill();
        }
    }
}

impl Agent<'_> {
    /// Writes the name of a signal. Returns false if nobody will read it.
    fn tell(&mut self, signal: Signal) -> bool {
        let input = self.input.as_mut().filter(|_| !self.has_ended);
        input.is_some_and(|input| writeln!(input, "{}", signal.as_str()).is_ok())
    }

    /// How it ended, once.
    fn poll_end(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten().filter(|_| !self.has_ended)?;
        self.has_ended = true;
        Some(status)
    }

    /// Says what its end means, unless it has spoken for itself. Returns its exit code, which is that of the launcher if it
    /// was not started.
    fn explain(&self, status: ExitStatus) -> u8 {
        let AgentCommand { host, is_here, words } = self.command;
        let code = code_of(status);
        if *is_here {
            return code;
        }
        if let Some(signal) = status.signal() {
            let name = Signal::try_from(signal).map_or("a signal", Signal::as_str);
            say(&format!("host {host}: {} was killed by {name}", words[0].to_string_lossy()));
            return code;
        }
        // A rank may have ended with the same code.
        let started = || self.greeting.recv_timeout(LAST_OUTPUT).is_ok();
        match explain_start(self.command, code).filter(|_| !started()) {
            Some(problem) => {
                say(&format!("host {host}: {problem}"));
                exit_code::LAUNCHER
            }
            None => code,
        }
    }
}

/// An early return leaves no agent behind.
impl Drop for Agent<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn code_of(status: ExitStatus) -> u8 {
    let killed = || exit_code::signalled(status.signal().unwrap_or(0));
    status.code().map_or_else(killed, |code| code as u8)
}

/// What the end of an agent means that was not started; `None` if nothing.
fn explain_start(command: &AgentCommand, code: u8) -> Option<String> {
    let (program, host) = (command.words[0].to_string_lossy(), &command.host);
    let problem = match code {
        NOT_FOUND => "no such program there: mgpurun has to be at the same path on every host".to_owned(),
        NOT_STARTED => {
            "mgpurun cannot be started there: the working folder and mgpurun have to be at the same paths on every host"
                .to_owned()
        }
        SSH_FAILED => format!(
            "{program} has no connection to it (exit code 255); `{program} {host} true` has to work without a password"
        ),
        _ => return None,
    };
    Some(problem)
}

fn say(text: &str) {
    let _ = writeln!(io::stderr(), "mgpurun: {text}");
}

/// What the threads have passed on.
#[derive(Default)]
struct Counts {
    /// Number of threads that have something to write, or wait until somebody reads it.
    writers: AtomicUsize,
    /// Number of lines or parts that were written.
    written: AtomicUsize,
}

/// How the threads pass on what agents write.
#[derive(Clone)]
struct Passing {
    /// Bytes as they come, instead of whole lines.
    raw: bool,
    counts: Arc<Counts>,
    /// Dropped at the end.
    at_end: Sender<()>,
}

impl Passing {
    /// Copies `from` on a thread: whole lines, so that those of different hosts do not mix, or bytes as they come. The line
    /// with the greeting goes to `greeted`; what comes before it, such as warnings of ssh, are lines.
    fn start<W: Write + 'static>(
        self,
        from: impl Read + Send + 'static,
        to: fn() -> W,
        mut greeted: Option<Sender<()>>,
    ) -> io::Result<()> {
        let Passing { raw, counts, at_end } = self;
        let mut from = BufReader::with_capacity(MAX_LINE as usize, from);
        let copy = move || {
            let _at_end = at_end;
            let mut bytes = Vec::new();
            loop {
                bytes.clear();
                let raw = raw && greeted.is_none();
                let read = match raw {
                    true => from.fill_buf().map(|ready| {
                        bytes.extend_from_slice(ready);
                        ready.len()
                    }),
                    false => from.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes),
                };
                if raw {
                    from.consume(bytes.len());
                }
                if !matches!(read, Ok(1..)) {
                    break;
                }
                if bytes == GREETING.as_bytes()
                    && let Some(greeted) = greeted.take()
                {
                    let _ = greeted.send(());
                    continue;
                }
                counts.writers.fetch_add(1, Ordering::Relaxed);
                let mut to = to();
                let written = to.write_all(&bytes).and_then(|()| to.flush());
                counts.written.fetch_add(1, Ordering::Relaxed);
                counts.writers.fetch_sub(1, Ordering::Relaxed);
                // If nobody reads this process's output any more, closing `from` tells the agent.
                if written.is_err() {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("output".into()).spawn(copy).map(drop)
    }
}

/// Waits until all threads that pass output on have ended. It takes as long as a slow reader needs, but no longer than
/// `stalled` if nothing is read, than [`LAST_OUTPUT`] if there is nothing to write, and than until a signal.
fn wait_for_output(readers: &Receiver<()>, counts: &Counts, stalled: Duration, signals: &SignalFd) {
    let (mut written, mut last_news) = (0, Instant::now());
    // Nothing is ever sent: the channel is disconnected when all threads have ended.
    while readers.recv_timeout(LAST_OUTPUT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        while let Ok(Some(info)) = signals.read_signal() {
            if Signal::try_from(info.ssi_signo as i32).is_ok_and(ends_the_run) {
                return;
            }
        }
        let is_idle = counts.writers.load(Ordering::Relaxed) == 0;
        let now_written = counts.written.load(Ordering::Relaxed);
        if now_written != written {
            (written, last_news) = (now_written, Instant::now());
        } else if is_idle && last_news.elapsed() >= LAST_OUTPUT {
            return;
        } else if last_news.elapsed() >= stalled {
            say("nobody reads the output of the hosts: the rest of it is lost");
            return;
        }
    }
}
