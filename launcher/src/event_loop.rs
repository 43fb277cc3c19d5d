//! The one place where the launcher waits: exits, output, messages, signals and deadlines come out of one `poll`.
//!
//! Nothing here decides anything. Events go to the [`Supervisor`], and its actions are carried out. Nothing here blocks
//! either, except in `poll`: not on a rank's pipe, and not on the reader of our own output.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mgpu::progress::{self, RankState};
use mgpu::rendezvous::{Server, ServerEvent};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::read;

use crate::group::wait_for_end;
use crate::interrupt::Signals;
use crate::output::{Output, Stream};
use crate::spawn::Process;
use crate::status::{Row, is_stopped, table};
use crate::supervisor::{Action, Event, Exit, Outcome, Supervisor};
use crate::watch::{self, Verdict, Watched};
use crate::{exit_code, orphans};

/// Capacity of a pipe where the kernel does not tell.
const PIPE_CAPACITY: usize = 64 << 10;

/// What a ready descriptor belongs to.
#[derive(Debug, Clone, Copy)]
enum Source {
    Signals,
    Guardian,
    Server,
    Exit(u32),
    Pipe(u32, Stream),
    Room(Stream),
}

/// Everything the loop waits for.
pub(crate) struct EventLoop<'a> {
    ranks: Vec<Process>,
    server: Server,
    signals: &'a Signals,
    output: &'a mut Output,
    supervisor: Supervisor,
    /// Longest silence of a rank.
    progress_timeout: Option<Duration>,
    /// When a rank might have been silent for so long.
    next_look: Option<Instant>,
    /// This process is the parent of whatever the ranks leave behind.
    adopts: bool,
    /// The guardian has ended.
    orphaned: bool,
}

/// How the ranks ended.
pub(crate) struct End {
    pub(crate) outcome: Outcome,
    /// Some rank has made a training step.
    pub(crate) made_a_step: bool,
}

impl<'a> EventLoop<'a> {
    pub(crate) fn new(
        ranks: Vec<Process>,
        server: Server,
        signals: &'a Signals,
        output: &'a mut Output,
        supervisor: Supervisor,
    ) -> Self {
        let (progress_timeout, next_look) = (None, None);
        let (adopts, orphaned) = (false, false);
        EventLoop {
            ranks,
            server,
            signals,
            output,
            supervisor,
            progress_timeout,
            next_look,
            adopts,
            orphaned,
        }
    }

    /// A rank that is silent for so long ends the run.
    pub(crate) fn progress_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.progress_timeout = timeout;
        self.next_look = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self
    }

    /// This process has no other children than the ranks and what they leave behind.
    pub(crate) fn adopts(mut self, adopts: bool) -> Self {
        self.adopts = adopts;
        self
    }

    /// Runs until all ranks and their groups have ended and their output has been taken in.
    pub(crate) fn run(mut self) -> End {
        loop {
            let ready = self.wait();
            // Output first: what a rank wrote before it ended comes before its end.
            for source in &ready {
                match source {
                    Source::Pipe(rank, stream) => _ = self.read_pipe(*rank, *stream),
                    Source::Room(stream) => self.output.resume(*stream),
                    Source::Signals | Source::Guardian | Source::Server | Source::Exit(_) => {}
                }
            }
            for event in self.events(&ready) {
                for action in self.supervisor.handle(event, Instant::now()) {
                    if let Some(outcome) = self.carry_out(action) {
                        return self.end(outcome);
                    }
                }
            }
        }
    }

    /// Nothing of the ranks is left when this returns.
    fn end(&mut self, outcome: Outcome) -> End {
        self.drain_all();
        if self.adopts {
            if !orphans::end_all() {
                self.output.say("a process that a rank has left behind does not end, though it was killed");
            }
        } else {
            wait_for_end(self.ranks.iter().map(|rank| rank.pid));
        }
        let page = self.server.page();
        let made_a_step = (0..page.world_size()).any(|rank| page.progress(rank).steps_begun > 1);
        End { outcome, made_a_step }
    }

    /// What has happened, the most telling first.
    fn events(&mut self, ready: &[Source]) -> Vec<Event> {
        let (mut events, mut exits) = (Vec::new(), Vec::new());
        for source in ready {
            match source {
                Source::Signals => events.extend(self.take_signals()),
                Source::Guardian => {
                    self.orphaned = true;
                    events.push(Event::Orphaned);
                }
                Source::Server => events.extend(self.serve()),
                Source::Exit(rank) => exits.extend(self.reap(*rank)),
                Source::Pipe(..) | Source::Room(_) => {}
            }
        }
        // Of ranks that ended within one turn, one that blames another failed after it.
        exits.sort_by_key(|exit| matches!(exit, Event::Exited { blame: Some(_), .. }));
        events.extend(exits);
        if self.server.next_deadline().is_some_and(|deadline| deadline <= Instant::now()) {
            events.extend(self.serve());
        }
        events.extend(self.look_for_silence());
        events.push(Event::Tick);
        events
    }

    fn take_signals(&mut self) -> Vec<Event> {
        let (children, signals): (Vec<Signal>, Vec<Signal>) =
            self.signals.take().into_iter().partition(|signal| *signal == Signal::SIGCHLD);
        if !children.is_empty() && self.adopts {
            // Ranks are waited for when their pidfds say so.
            orphans::reap(|child| self.ranks.iter().any(|rank| rank.pid == child && !rank.reaped));
        }
        signals.into_iter().map(Event::Signalled).collect()
    }

    /// The rank that has been silent for too long, if one could have been by now.
    fn look_for_silence(&mut self) -> Option<Event> {
        let timeout =
            self.progress_timeout.filter(|_| self.next_look.is_some_and(|at| at <= Instant::now()))?;
        let (page, now) = (self.server.page(), progress::now());
        let member = |rank: u32| {
            let progress = page.progress(rank);
            let runs = progress.state == RankState::Joined && !self.ranks[rank as usize].reaped;
            runs.then_some(Watched { rank, progress })
        };
        let members: Vec<Watched> = (0..page.world_size()).filter_map(member).collect();
        if (0..page.world_size()).any(|rank| page.progress(rank).state == RankState::Absent) {
            // Those who have joined wait for those who have not: that is the business of the other deadline.
            self.next_look = Instant::now().checked_add(timeout);
            return None;
        }
        let stopped = |rank: u32| is_stopped(self.ranks[rank as usize].pid.as_raw() as u32);
        match watch::look(&members, timeout, now, stopped) {
            Verdict::Healthy(next) => {
                let wait = next.map_or(timeout, |next| next.saturating_sub(now));
                self.next_look = Instant::now().checked_add(wait);
                None
            }
            Verdict::Silent(rank, idle) => {
                self.next_look = None;
                Some(Event::Silent { rank, idle, doing: self.row(rank).doing() })
            }
        }
    }

    /// What a rank is doing.
    fn row(&self, rank: u32) -> Row {
        let process = &self.ranks[rank as usize];
        Row::of(self.server.page(), rank, Some(process.pid.as_raw() as u32), process.ended.clone())
    }

    /// Shows what every rank is doing.
    fn report(&mut self) {
        let rows: Vec<Row> = (0..self.ranks.len() as u32).map(|rank| self.row(rank)).collect();
        for line in table(&rows, progress::now()).lines() {
            self.output.say(line);
        }
    }

    /// Sleeps until something is ready or due.
    fn wait(&self) -> Vec<Source> {
        let mut sources = vec![];
        sources.extend(self.signals.fds().map(|fd| (Source::Signals, fd)));
        let guardian = self.signals.guardian().filter(|_| !self.orphaned);
        sources.extend(guardian.map(|fd| (Source::Guardian, fd)));
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
        sources.extend(self.output.waiting().map(|(stream, fd)| (Source::Room(stream), fd)));
        let deadlines = [self.supervisor.next_deadline(), self.server.next_deadline(), self.next_look];
        poll_sources(&sources, deadlines.into_iter().flatten().min())
    }

    fn serve(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for event in self.server.service() {
            match event {
                ServerEvent::Joined { rank, .. } => events.push(Event::Joined(rank)),
                ServerEvent::Left { .. } => {}
                ServerEvent::Unfit { rank, fault, why } => {
                    events.push(Event::Unfit { rank, exit_code: exit_code::preflight(fault), why });
                }
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
            Ok(_) | Err(_) => Exit::Code(i32::from(exit_code::LAUNCHER)),
        };
        rank.reaped = true;
        rank.ended = Some(exit.describe());
        self.drain(number);
        Some(Event::Exited { rank: number, exit, blame: self.server.blame(number) })
    }

    fn carry_out(&mut self, action: Action) -> Option<Outcome> {
        match action {
            Action::Announce(rank, departure) => self.server.rank_gone(rank, departure),
            Action::Send(rank, signal) => {
                let rank = &self.ranks[rank as usize];
                if !rank.reaped {
                    let _ = killpg(rank.pid, signal);
                }
            }
            Action::Say(text) => self.output.say(&text),
            Action::Report => self.report(),
            Action::Finish(outcome) => return Some(outcome),
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

/// Lets `pause` pass. `false` if somebody wants the run to end meanwhile.
pub(crate) fn wait_out(pause: Duration, signals: &Signals) -> bool {
    let deadline = Instant::now() + pause;
    while Instant::now() < deadline {
        let mut sources: Vec<_> = signals.fds().map(|fd| (Source::Signals, fd)).collect();
        sources.extend(signals.guardian().map(|fd| (Source::Guardian, fd)));
        for source in poll_sources(&sources, Some(deadline)) {
            match source {
                Source::Signals if !signals.take().into_iter().any(ends_the_run) => {}
                _ => return false,
            }
        }
    }
    true
}

fn ends_the_run(signal: Signal) -> bool {
    matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP)
}

/// Waits until the reader of our output has taken everything, `patience` has passed or a signal says to give up.
pub(crate) fn flush(output: &mut Output, signals: &Signals, patience: Option<Duration>) {
    let deadline = patience.map(|patience| Instant::now() + patience);
    while output.waiting().next().is_some() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        let mut sources: Vec<_> = signals.fds().map(|fd| (Source::Signals, fd)).collect();
        sources.extend(output.waiting().map(|(stream, fd)| (Source::Room(stream), fd)));
        for source in poll_sources(&sources, deadline) {
            match source {
                Source::Room(stream) => output.resume(stream),
                _ if signals.take().into_iter().any(ends_the_run) => return,
                _ => {}
            }
        }
    }
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
