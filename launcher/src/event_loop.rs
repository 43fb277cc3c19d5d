//! The one place where the launcher waits: exits, output, messages, signals and deadlines come out of one `poll`.
//!
//! Nothing here decides anything. Events go to the [`Supervisor`], and its actions are carried out. Nothing here blocks
//! either, except in `poll`: not on a rank's pipe, and not on the reader of our own output.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mgpu::rendezvous::{Server, ServerEvent};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::read;

use crate::events::{self, EventLog};
use crate::group::wait_for_end;
use crate::interrupt::Signals;
use crate::output::{Output, Stream};
use crate::spawn::Process;
use crate::supervisor::{Action, Event, Exit, Outcome, Supervisor};

/// Capacity of a pipe where the kernel does not tell.
const PIPE_CAPACITY: usize = 64 << 10;

/// What a ready descriptor belongs to.
#[derive(Debug, Clone, Copy)]
enum Source {
    Signals,
    Server,
    Exit(u32),
    Pipe(u32, Stream),
    Room(Stream),
    Log,
}

/// Everything the loop waits for.
pub(crate) struct EventLoop<'a> {
    ranks: Vec<Process>,
    server: Server,
    signals: &'a Signals,
    output: &'a mut Output,
    events: &'a mut EventLog,
    supervisor: Supervisor,
    /// Ranks that the launcher has asked to end.
    asked: Vec<bool>,
}

impl<'a> EventLoop<'a> {
    pub(crate) fn new(
        ranks: Vec<Process>,
        server: Server,
        signals: &'a Signals,
        output: &'a mut Output,
        events: &'a mut EventLog,
        supervisor: Supervisor,
    ) -> Self {
        let asked = vec![false; ranks.len()];
        EventLoop { ranks, server, signals, output, events, supervisor, asked }
    }

    /// Runs until all ranks and their groups have ended and their output has been taken in.
    pub(crate) fn run(mut self) -> Outcome {
        loop {
            let ready = self.wait();
            // Output first: what a rank wrote before it ended comes before its end.
            for source in &ready {
                match source {
                    Source::Pipe(rank, stream) => _ = self.read_pipe(*rank, *stream),
                    Source::Room(stream) => self.output.resume(*stream),
                    Source::Signals | Source::Server | Source::Exit(_) | Source::Log => {}
                }
            }
            self.output.tick(Instant::now());
            if let Some(notice) = self.events.failure() {
                self.output.say(&notice);
            }
            for event in self.events(&ready) {
                for action in self.supervisor.handle(event, Instant::now()) {
                    if let Some(outcome) = self.carry_out(action) {
                        self.drain_all();
                        wait_for_end(self.ranks.iter().map(|rank| rank.pid));
                        return outcome;
                    }
                }
            }
        }
    }

    /// What has happened, the most telling first.
    fn events(&mut self, ready: &[Source]) -> Vec<Event> {
        let (mut events, mut exits) = (Vec::new(), Vec::new());
        for source in ready {
            match source {
                Source::Signals => events.extend(self.signals.take().into_iter().map(Event::Signalled)),
                Source::Server => events.extend(self.serve()),
                Source::Exit(rank) => exits.extend(self.reap(*rank)),
                Source::Pipe(..) | Source::Room(_) | Source::Log => {}
            }
        }
        // Of ranks that ended within one turn, one that blames another failed after it.
        exits.sort_by_key(|exit| matches!(exit, Event::Exited { blame: Some(_), .. }));
        events.extend(exits);
        if self.server.next_deadline().is_some_and(|deadline| deadline <= Instant::now()) {
            events.extend(self.serve());
        }
        events.push(Event::Tick);
        events
    }

    /// Sleeps until something is ready or due.
    fn wait(&self) -> Vec<Source> {
        let mut sources = vec![];
        sources.extend(self.signals.fds().map(|fd| (Source::Signals, fd)));
        sources.extend(self.server.fds().into_iter().map(|fd| (Source::Server, fd)));
        for (rank, number) in self.ranks.iter().zip(0..) {
            if !rank.reaped {
                sources.push((Source::Exit(number), rank.pidfd.as_fd()));
            }
            for stream in [Stream::Stdout, Stream::Stderr] {
                let pipe =
                    rank.pipes[stream as usize].iter().filter(|_| self.output.has_room(number, stream));
                sources.extend(pipe.map(|pipe| (Source::Pipe(number, stream), pipe.as_fd())));
            }
        }
        sources.extend(output_sources(self.output));
        let deadlines =
            [self.supervisor.next_deadline(), self.server.next_deadline(), self.output.next_deadline()];
        poll_sources(&sources, deadlines.into_iter().flatten().min())
    }

    fn serve(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for event in self.server.service() {
            match event {
                ServerEvent::Joined { rank, pid } => {
                    self.events.record(events::Event::Join { rank, pid });
                    events.push(Event::Joined(rank));
                }
                ServerEvent::Left { .. } => {}
                ServerEvent::Refused { why } => self.output.say(&format!("refused a connection: {why}")),
            }
        }
        events
    }

    /// Reads once; the number of bytes, 0 when there are none for now or for ever.
    fn read_pipe(&mut self, number: u32, stream: Stream) -> usize {
        let pipe = &mut self.ranks[number as usize].pipes[stream as usize];
        let Some(open) = pipe else { return 0 };
        let mut bytes = [0u8; 64 << 10];
        match read(open, &mut bytes) {
            Ok(count) if count > 0 => {
                self.output.push(number, stream, &bytes[..count]);
                if !self.output.is_wanted(number, stream) {
                    *pipe = None;
                }
                count
            }
            Err(Errno::EAGAIN | Errno::EINTR) => 0,
            Ok(_) | Err(_) => {
                *pipe = None;
                self.output.finish(number, stream);
                0
            }
        }
    }

    /// Reads all that a rank has written before it ended. That is at most what its pipes hold: a process that left
    /// its group may go on writing for ever.
    fn drain(&mut self, number: u32) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let pipe = self.ranks[number as usize].pipes[stream as usize].as_ref();
            let capacity = pipe.and_then(|pipe| fcntl(pipe, FcntlArg::F_GETPIPE_SZ).ok());
            let mut left = capacity.map_or(PIPE_CAPACITY, |capacity| capacity as usize);
            while left > 0 {
                match self.read_pipe(number, stream) {
                    0 => break,
                    count => left = left.saturating_sub(count),
                }
            }
        }
    }

    /// Takes in a process that has ended.
    fn reap(&mut self, number: u32) -> Option<Event> {
        let rank = &mut self.ranks[number as usize];
        let pid = rank.pid;
        // Look without reaping: while the zombie is there, the number of its group cannot be anybody else's.
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        match waitid(Id::Pid(pid), look) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => return None,
            Ok(_) => _ = killpg(pid, Signal::SIGKILL),
            // Somebody else in this process has waited for our child: its group's number is not ours any more.
            Err(_) => {}
        }
        let exit = match waitpid(pid, None) {
            Ok(WaitStatus::Exited(_, code)) => Exit::Code(code),
            Ok(WaitStatus::Signaled(_, signal, _)) => Exit::Signal(signal as i32),
            // Its code is lost as well.
            Ok(_) | Err(_) => Exit::Code(i32::from(crate::exit_code::LAUNCHER)),
        };
        rank.reaped = true;
        self.events.record(events::Event::exit(number, exit, self.asked[number as usize]));
        self.drain(number);
        Some(Event::Exited { rank: number, exit, blame: self.server.blame(number) })
    }

    fn carry_out(&mut self, action: Action) -> Option<Outcome> {
        match action {
            Action::Announce(rank, departure) => self.server.rank_gone(rank, departure),
            Action::Send(number, signal) => {
                let rank = &self.ranks[number as usize];
                if !rank.reaped {
                    let _ = killpg(rank.pid, signal);
                    self.asked[number as usize] |= asks_to_end(signal);
                }
            }
            Action::Say(text) => self.output.say(&text),
            Action::Finish(outcome) => {
                if let Some(rank) = outcome.culprit {
                    let cause = outcome.message.clone().unwrap_or_default();
                    self.events.record(events::Event::Fault { rank, cause, exit_code: outcome.exit_code });
                }
                return Some(outcome);
            }
        }
        None
    }

    /// Takes in what is left in the pipes. A process that left its group and holds a pipe open is not waited for.
    fn drain_all(&mut self) {
        for number in 0..self.ranks.len() as u32 {
            self.drain(number);
            for stream in [Stream::Stdout, Stream::Stderr] {
                self.output.finish(number, stream);
            }
        }
    }
}

/// Waits until the readers of our output and the logs have taken everything, `patience` has passed or a signal says
/// to give up.
pub(crate) fn flush(output: &mut Output, signals: &Signals, patience: Option<Duration>) {
    let deadline = patience.map(|patience| Instant::now() + patience);
    let mut given_up = false;
    output.close();
    while output.is_pending() && !given_up && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        let mut sources: Vec<_> = signals.fds().map(|fd| (Source::Signals, fd)).collect();
        sources.extend(output_sources(output));
        for source in poll_sources(&sources, deadline.into_iter().chain(output.next_deadline()).min()) {
            match source {
                Source::Room(stream) => output.resume(stream),
                Source::Signals => given_up |= signals.take().into_iter().any(asks_to_end),
                _ => {}
            }
        }
        output.tick(Instant::now());
    }
    // What was found out in the last turn, such as a full disk, is still to be said.
    output.tick(Instant::now());
    output.abandon_logs();
}

/// What the output waits for.
fn output_sources(output: &Output) -> impl Iterator<Item = (Source, BorrowedFd<'_>)> {
    let rooms = output.waiting().map(|(stream, fd)| (Source::Room(stream), fd));
    rooms.chain(output.log_bell().map(|fd| (Source::Log, fd)))
}

/// True but for the signals that are merely passed on.
fn asks_to_end(signal: Signal) -> bool {
    !matches!(signal, Signal::SIGUSR1 | Signal::SIGUSR2)
}

/// The sources that are ready, after a sleep until one is or `deadline` has passed.
fn poll_sources(sources: &[(Source, BorrowedFd<'_>)], deadline: Option<Instant>) -> Vec<Source> {
    let wanted = |source: &Source| match source {
        Source::Room(_) => PollFlags::POLLOUT,
        _ => PollFlags::POLLIN,
    };
    let mut fds: Vec<PollFd<'_>> =
        sources.iter().map(|(source, fd)| PollFd::new(*fd, wanted(source))).collect();
    let time_left = deadline.map_or(PollTimeout::NONE, |deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up: waking a fraction of a millisecond early would only mean another turn.
        PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
    });
    // An interrupted poll leaves nothing ready: the next turn of the loop waits again.
    if poll(&mut fds, time_left).is_err() {
        return Vec::new();
    }
    let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
    fds.iter().zip(sources).filter(|(fd, _)| is_ready(fd)).map(|(_, (source, _))| *source).collect()
}
