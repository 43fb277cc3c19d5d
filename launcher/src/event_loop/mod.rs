//! The event loop: one `poll` waits for exits, output, messages, signals and deadlines.
//!
//! The loop makes no decisions: it passes events to the [`Supervisor`] and carries out its actions. It never blocks
//! outside of `poll`, neither on a rank's pipe nor on the reader of the launcher's own output.

mod leftovers;
mod wait;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mgpu_control::inject::Injection;
use mgpu_control::process;
use mgpu_control::progress::{self, RankState};
use mgpu_control::rendezvous::{Server, ServerEvent};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::read;

use crate::events::{self, EventLog};
use crate::faults;
use crate::group::{running_in, wait_for_end};
use crate::interrupt::{Signals, ends_the_run};
use crate::launch::Supervision;
use crate::mpi::MpiWatch;
use crate::output::{Output, STREAMS, Stream};
use crate::restart::Reached;
use crate::spawn::{Process, Sent, send};
use crate::status::{Row, is_stopped, table};
use crate::supervisor::{Action, Event, Exit, Outcome, Supervisor};
use crate::watch::{self, Verdict, WatchedRank};
use crate::{exit_code, mpi, orphans};
use wait::{Source, output_sources, poll_sources, signal_sources};
pub(crate) use wait::{flush, wait_out};

/// Size of the read buffer, and the assumed capacity of a pipe if the kernel does not tell it.
const PIPE_CAPACITY: usize = 64 << 10;

/// Interval at which the ranks' steps are polled if events are recorded.
const STEP_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// If the loop wakes so much later than its deadline, the launcher was suspended, and the ranks with it (by the cgroup
/// freezer, for instance). Their lack of progress in that time is ignored.
const SUSPENSION_THRESHOLD: Duration = Duration::from_secs(1);

/// The state of the event loop.
pub(crate) struct EventLoop<'a> {
    ranks: Vec<Process>,
    server: Server,
    signals: &'a Signals,
    output: &'a mut Output,
    events: &'a mut EventLog,
    supervisor: Supervisor,
    supervision: Supervision,
    /// Earliest time at which a rank may have exceeded the progress timeout.
    next_progress_check: Option<Instant>,
    /// When to poll the ranks' steps, if events are recorded.
    next_step_poll: Option<Instant>,
    mpi: MpiWatch,
    /// Faults to inject.
    injections: &'a [Injection],
    /// The guardian has ended.
    guardian_ended: bool,
    /// End of the last suspension of this process, as [`progress::now`].
    awake_since: Duration,
    /// Read buffer.
    bytes: Box<[u8]>,
}

/// The end of an attempt.
pub(crate) struct AttemptEnd {
    pub(crate) outcome: Outcome,
    pub(crate) reached: Reached,
    /// Injected faults that have not happened, one line each.
    pub(crate) missed_faults: Vec<String>,
}

/// One start of the ranks, and how they are supervised.
pub(crate) struct Attempt<'a> {
    pub(crate) processes: Vec<Process>,
    pub(crate) server: Server,
    /// Faults to inject; those that have not happened are reported at the end.
    pub(crate) injections: &'a [Injection],
    pub(crate) supervision: Supervision,
}

impl<'a> EventLoop<'a> {
    pub(crate) fn new(
        attempt: Attempt<'a>,
        signals: &'a Signals,
        output: &'a mut Output,
        events: &'a mut EventLog,
    ) -> Self {
        let Attempt { processes: ranks, server, injections, supervision } = attempt;
        let Supervision { join_timeout, progress_timeout, grace, .. } = supervision;
        let now = Instant::now();
        EventLoop {
            mpi: MpiWatch::new(ranks.len()),
            supervisor: Supervisor::new(ranks.len() as u32, join_timeout, grace, now),
            next_progress_check: progress_timeout.and_then(|timeout| now.checked_add(timeout)),
            next_step_poll: events.is_enabled().then_some(now),
            ranks,
            server,
            signals,
            output,
            events,
            supervision,
            injections,
            guardian_ended: false,
            awake_since: Duration::ZERO,
            bytes: vec![0; PIPE_CAPACITY].into(),
        }
    }

    /// Runs until all ranks and their groups have ended and all their output has been read.
    pub(crate) fn run(mut self) -> AttemptEnd {
        loop {
            let ready = self.wait();
            // Output first: what a rank wrote before it ended is shown before its end is reported.
            for source in &ready {
                match source {
                    Source::Pipe(rank, stream) => _ = self.read_pipe(*rank, *stream),
                    Source::Writable(stream) => self.output.resume(*stream),
                    Source::Signals | Source::Guardian | Source::Server | Source::Exit(_) | Source::Log => {}
                }
            }
            self.output.tick(Instant::now());
            if let Some(notice) = self.events.failure() {
                self.output.say(&notice);
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

    /// Cleans up: no process of the ranks is left when this returns.
    fn end(&mut self, mut outcome: Outcome) -> AttemptEnd {
        if !outcome.interrupted
            && let Some(signal) = self.wait_for_leftovers()
        {
            let was_success = outcome.message.is_none();
            outcome.interrupt(signal);
            outcome.message.iter().filter(|_| was_success).for_each(|message| self.output.say(message));
        }
        self.end_leftovers();
        self.drain_all();
        self.record_steps();
        for event in self.server.drain_rejections() {
            if let ServerEvent::Rejected { group, connections, why } = event {
                self.say_rejected(group, connections, &why);
            }
        }
        if self.supervision.adopts_orphans {
            if let Some(problem) = orphans::end_all(&[], |notice| self.output.say(notice)) {
                self.output.say(&problem);
            }
        } else {
            wait_for_end(self.ranks.iter().map(|rank| rank.pid));
        }
        let page = self.server.page();
        let made_a_step = (0..page.world_size()).any(|rank| page.progress(rank).steps_begun > 1);
        let reached = match self.supervisor.has_joined() {
            _ if made_a_step => Reached::Step,
            true => Reached::Join,
            false => Reached::Start,
        };
        let missed_faults = faults::missed(self.injections, page);
        AttemptEnd { outcome, reached, missed_faults }
    }

    /// The events of the ready sources, in the order in which the supervisor should see them.
    fn events(&mut self, ready: &[Source]) -> Vec<Event> {
        let (mut events, mut exits, mut served) = (Vec::new(), Vec::new(), false);
        for source in ready {
            match source {
                Source::Signals => events.extend(self.take_signals()),
                Source::Guardian => {
                    self.guardian_ended = true;
                    events.push(Event::GuardianEnded);
                }
                // One call serves all connections.
                Source::Server if !served => {
                    served = true;
                    events.extend(self.serve());
                }
                Source::Server => {}
                Source::Exit(rank) => exits.extend(self.reap(*rank)),
                Source::Pipe(..) | Source::Writable(_) | Source::Log => {}
            }
        }
        // If several ranks ended in one iteration, a rank that blames another one failed after it.
        exits.sort_by_key(|exit| matches!(exit, Event::Exited { blame: Some(_), .. }));
        events.extend(exits);
        if self.server.next_deadline().is_some_and(|deadline| deadline <= Instant::now()) {
            events.extend(self.serve());
        }
        if self.next_step_poll.is_some_and(|at| at <= Instant::now()) {
            self.record_steps();
            self.next_step_poll = Some(Instant::now() + STEP_POLL_INTERVAL);
        }
        self.check_for_mpi();
        events.extend(self.check_progress());
        events.push(Event::Tick);
        events
    }

    fn take_signals(&mut self) -> Vec<Event> {
        let (children, signals): (Vec<Signal>, Vec<Signal>) =
            self.signals.take().into_iter().partition(|signal| *signal == Signal::SIGCHLD);
        if !children.is_empty() && self.supervision.adopts_orphans {
            // Ranks are reaped when their pidfds become readable.
            orphans::reap(|child| self.ranks.iter().any(|rank| rank.pid == child && !rank.reaped));
        }
        for signal in signals.iter().filter(|signal| ends_the_run(**signal)) {
            self.signal_leftovers(*signal);
        }
        signals.into_iter().map(Event::Signalled).collect()
    }

    /// Tells the user if the ranks are MPI programs.
    fn check_for_mpi(&mut self) {
        match self.ranks.first().filter(|rank| !rank.reaped) {
            Some(rank) if self.mpi.check(rank.pid.as_raw(), Instant::now()) => self.output.say(mpi::ADVICE),
            Some(_) => {}
            None => self.mpi.end(),
        }
    }

    /// The event of a rank that has exceeded the progress timeout, if a check is due.
    fn check_progress(&mut self) -> Option<Event> {
        let timeout = self
            .supervision
            .progress_timeout
            .filter(|_| self.next_progress_check.is_some_and(|at| at <= Instant::now()))?;
        let (page, now) = (self.server.page(), progress::now());
        let watched = |rank: u32| {
            let mut progress = page.progress(rank);
            progress.changed = progress.changed.max(self.awake_since);
            WatchedRank { rank, progress }
        };
        let mut ranks: Vec<WatchedRank> = (0..page.world_size()).map(watched).collect();
        if ranks.iter().any(|rank| rank.progress.state == RankState::Absent) {
            // The ranks that have joined wait for the others: the join timeout covers this.
            self.next_progress_check = Instant::now().checked_add(timeout);
            return None;
        }
        let has_ended = |rank: &WatchedRank| self.ranks[rank.rank as usize].ended.is_some();
        ranks.retain(|rank| rank.progress.state == RankState::Joined && !has_ended(rank));
        let stopped = |rank: u32| is_stopped(self.pid_of(rank));
        match watch::find_silent_rank(&ranks, timeout, now, stopped) {
            Verdict::Healthy(next) => {
                let wait = next.map_or(timeout, |next| next.saturating_sub(now));
                self.next_progress_check = Instant::now().checked_add(wait);
                None
            }
            Verdict::Silent(rank, idle) => {
                self.next_progress_check = None;
                Some(Event::Silent { rank, idle, doing: self.row(rank).doing() })
            }
        }
    }

    /// Records the steps that have changed since the last call.
    fn record_steps(&mut self) {
        for (rank, process) in (0..).zip(&mut self.ranks) {
            let step = self.server.page().progress(rank).step;
            if std::mem::replace(&mut process.step, step) != step {
                self.events.record(events::Event::Step { rank, step });
            }
        }
    }

    /// The row of a rank in the table.
    fn row(&self, rank: u32) -> Row {
        let ended = self.ranks[rank as usize].ended.clone();
        Row::of(self.server.page(), rank, Some(self.pid_of(rank)), ended)
    }

    /// The process of a rank: the one that has joined, which may be a child of the started process.
    fn pid_of(&self, rank: u32) -> u32 {
        match self.server.page().progress(rank).pid {
            0 => self.ranks[rank as usize].pid.as_raw() as u32,
            joined => joined,
        }
    }

    /// Prints the table of what every rank is doing.
    fn report(&mut self) {
        let rows: Vec<Row> = (0..self.ranks.len() as u32).map(|rank| self.row(rank)).collect();
        for line in table(&rows, progress::now()).lines() {
            self.output.say(line);
        }
    }

    /// Sleeps until a source is ready or a deadline has passed.
    fn wait(&mut self) -> Vec<Source> {
        let mut sources = vec![];
        // The guardian's pidfd stays readable; it is handled once.
        let is_news = |source: &Source| !(self.guardian_ended && matches!(source, Source::Guardian));
        sources.extend(signal_sources(self.signals).filter(|(source, _)| is_news(source)));
        sources.extend(self.server.fds().into_iter().map(|fd| (Source::Server, fd)));
        for (rank, number) in self.ranks.iter().zip(0..) {
            if rank.ended.is_none() {
                // For a rank that has ended: the remaining processes of its group.
                let end = rank.group.first().unwrap_or(&rank.pidfd);
                sources.push((Source::Exit(number), end.as_fd()));
            }
        }
        sources.extend(self.pipes());
        sources.extend(output_sources(self.output));
        let deadlines = [
            self.supervisor.next_deadline(),
            self.server.next_deadline(),
            self.output.next_deadline(),
            self.next_progress_check,
            self.next_step_poll,
            self.mpi.next_deadline(),
        ];
        let deadline = deadlines.into_iter().flatten().min();
        let ready = poll_sources(&sources, deadline);
        if deadline.is_some_and(|deadline| Instant::now() > deadline + SUSPENSION_THRESHOLD) {
            self.awake_since = progress::now();
        }
        ready
    }

    /// The ranks' pipes to read: those whose output has room at its reader and its disk.
    fn pipes(&self) -> impl Iterator<Item = (Source, BorrowedFd<'_>)> {
        let all = (0..).zip(&self.ranks).flat_map(|(number, rank)| {
            STREAMS.map(|stream| (number, stream, rank.pipes[stream as usize].as_ref()))
        });
        let open = all.filter_map(|(number, stream, pipe)| Some((number, stream, pipe?)));
        open.filter(|(number, stream, _)| self.output.has_room(*number, *stream))
            .map(|(number, stream, pipe)| (Source::Pipe(number, stream), pipe.as_fd()))
    }

    fn serve(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for event in self.server.service() {
            match event {
                ServerEvent::Joined { rank, pid } => {
                    self.mpi.end();
                    self.events.record(events::Event::Join { rank, pid });
                    events.push(Event::Joined(rank));
                }
                ServerEvent::Left { .. } => {}
                ServerEvent::Incompatible { rank, fault, why } => {
                    events.push(Event::Incompatible { rank, exit_code: exit_code::preflight(fault), why });
                }
                ServerEvent::Rejected { group, connections, why } => {
                    self.say_rejected(group, connections, &why);
                }
            }
        }
        events
    }

    /// Reports rejected connections. The processes that a rank starts are in its group.
    fn say_rejected(&mut self, group: Option<u32>, connections: u64, why: &str) {
        let what = match connections {
            1 => "a connection".to_owned(),
            many => format!("{many} connections, the first"),
        };
        let is_its = |rank: &Process| group == u32::try_from(rank.pid.as_raw()).ok();
        let rank = self.ranks.iter().position(is_its);
        let whose = rank.map_or(String::new(), |rank| format!(" of rank {rank}"));
        self.output.say(&format!("rejected {what}{whose}: {why}"));
    }

    /// Reads once. Returns the number of bytes; 0 if there are none now or the pipe is closed.
    fn read_pipe(&mut self, number: u32, stream: Stream) -> usize {
        let pipe = &mut self.ranks[number as usize].pipes[stream as usize];
        let Some(open) = pipe else { return 0 };
        match read(open, &mut self.bytes) {
            Ok(count) if count > 0 => {
                self.output.push(number, stream, &self.bytes[..count]);
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

    /// Reads everything that a rank wrote before it ended. That is at most the capacity of its pipes; the limit matters
    /// because a process that left the rank's group may continue to write.
    fn drain(&mut self, number: u32) {
        for stream in STREAMS {
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

    /// Handles a process that has ended.
    fn reap(&mut self, number: u32) -> Option<Event> {
        let (pid, may_have_leftovers) = (self.ranks[number as usize].pid, self.may_have_leftovers());
        let rank = &mut self.ranks[number as usize];
        // Check without reaping (WNOWAIT): while the zombie exists, the number of its group is not reused.
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        rank.peak_memory = process::peak_memory(pid);
        match waitid(Id::Pid(pid), look) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => return None,
            // A shell ends at once when asked to, while the program that it runs may need its grace time.
            Ok(_) if rank.sent == Sent::Request => {
                rank.group = running_in(&[pid.as_raw()]);
                if !rank.group.is_empty() {
                    return None;
                }
            }
            // Its children may still be writing; they are handled at the end of the run.
            Ok(WaitStatus::Exited(_, 0)) if rank.sent == Sent::Nothing && may_have_leftovers => {
                return Some(self.note_end(number, Exit::Code(0)));
            }
            Ok(_) => _ = killpg(pid, Signal::SIGKILL),
            // Another part of this process has reaped our child: its group's number may have been reused.
            Err(_) => {}
        }
        let exit = match waitpid(pid, None) {
            Ok(WaitStatus::Exited(_, code)) => Exit::Code(code),
            Ok(WaitStatus::Signaled(_, signal, _)) => Exit::Signal(signal as i32),
            // Its exit code is lost, too.
            Ok(_) | Err(_) => Exit::Code(i32::from(exit_code::LAUNCHER)),
        };
        rank.reaped = true;
        Some(self.note_end(number, exit))
    }

    /// Reads the remaining output of a rank that has ended, and returns the event of its end.
    fn note_end(&mut self, number: u32, exit: Exit) -> Event {
        let rank = &mut self.ranks[number as usize];
        let asked = rank.sent > Sent::Nothing;
        rank.ended = Some(if asked { exit.describe_signalled() } else { exit.describe() });
        self.events.record(events::Event::exit(number, exit, asked, rank.peak_memory));
        self.drain(number);
        self.end_quietly(number, exit);
        Event::Exited { rank: number, exit, blame: self.server.blame(number) }
    }

    /// Mutes the output if the rank ended because the launcher's own reader has exited, as `head` does. The errors of the
    /// other ranks about that are of no use.
    fn end_quietly(&mut self, number: u32, exit: Exit) {
        let is_first = self.supervisor.is_undecided();
        let is_unread = !self.output.is_wanted(number, Stream::Stdout);
        if is_first && is_unread && exit.code() == exit_code::BROKEN_PIPE {
            self.output.mute();
        }
    }

    fn carry_out(&mut self, action: Action) -> Option<Outcome> {
        match action {
            Action::Announce(rank, end) => self.server.rank_ended(rank, end),
            Action::Send(number, signal) => {
                let rank = &mut self.ranks[number as usize];
                if !rank.reaped {
                    send(rank.pid, signal);
                    rank.sent = rank.sent.max(match signal {
                        Signal::SIGKILL => Sent::Kill,
                        signal if ends_the_run(signal) => Sent::Request,
                        _ => Sent::Nothing,
                    });
                }
            }
            Action::Say(text) => self.output.say(&text),
            Action::Report => self.report(),
            Action::Settle(outcome) => self.settle(outcome),
            Action::Finish(outcome) => return Some(outcome),
        }
        None
    }

    /// Prints how the run ends, and records the culprit as an event.
    fn settle(&mut self, outcome: Outcome) {
        if self.ranks.iter().all(|rank| rank.reaped) {
            // Their output comes first.
            self.drain_all();
        }
        if let Some(rank) = outcome.culprit {
            let cause = outcome.message.clone().unwrap_or_default();
            self.events.record(events::Event::Fault { rank, cause, exit_code: outcome.exit_code });
        }
        // If the reader has exited, the run ends quietly, as `cat` would.
        if !self.output.is_muted() {
            outcome.message.iter().for_each(|message| self.output.say(message));
        }
    }

    /// Reads what is left in the pipes. Does not wait for a process that left its group and holds a pipe open.
    fn drain_all(&mut self) {
        for number in 0..self.ranks.len() as u32 {
            self.drain(number);
            for stream in STREAMS {
                self.output.finish(number, stream);
            }
        }
    }
}
