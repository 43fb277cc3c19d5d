//! The one place where the launcher waits: exits, output, messages, signals and deadlines come out of one `poll`.
//!
//! Nothing here decides anything. Events go to the [`Supervisor`], and its actions are carried out. Nothing here blocks
//! either, except in `poll`: not on a rank's pipe, and not on the reader of our own output.

mod leftovers;
mod wait;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mgpu_control::inject::Injection;
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

/// Longest read, and the capacity of a pipe where the kernel does not tell.
const PIPE_CAPACITY: usize = 64 << 10;

/// Time between two looks at the ranks' steps, if somebody records them.
const STEP_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Who is so late was not busy but suspended, and the ranks with it, as by a freezer of control groups: their silence
/// in that time says nothing.
const SUSPENSION_THRESHOLD: Duration = Duration::from_secs(1);

/// Everything the loop waits for.
pub(crate) struct EventLoop<'a> {
    ranks: Vec<Process>,
    server: Server,
    signals: &'a Signals,
    output: &'a mut Output,
    events: &'a mut EventLog,
    supervisor: Supervisor,
    supervision: Supervision,
    /// When a rank might have been silent for so long.
    next_progress_check: Option<Instant>,
    /// When to look for new steps, if somebody records them.
    next_step_poll: Option<Instant>,
    mpi: MpiWatch,
    /// Faults that ranks are to commit.
    injections: &'a [Injection],
    /// The guardian has ended.
    guardian_ended: bool,
    /// When this process was last found to have been kept from its work, as [`progress::now`].
    awake_since: Duration,
    /// What was read of a pipe.
    bytes: Box<[u8]>,
}

/// How the ranks ended.
pub(crate) struct AttemptEnd {
    pub(crate) outcome: Outcome,
    pub(crate) reached: Reached,
    /// Faults that were to be injected and were not, each in a line.
    pub(crate) missed_faults: Vec<String>,
}

/// The ranks of one start, and how they are supervised.
pub(crate) struct Attempt<'a> {
    pub(crate) processes: Vec<Process>,
    pub(crate) server: Server,
    /// Faults that ranks are to commit; at the end it is told which have not happened.
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

    /// Runs until all ranks and their groups have ended and their output has been taken in.
    pub(crate) fn run(mut self) -> AttemptEnd {
        loop {
            let ready = self.wait();
            // Output first: what a rank wrote before it ended comes before its end.
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

    /// Nothing of the ranks is left when this returns.
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

    /// What has happened, the most telling first.
    fn events(&mut self, ready: &[Source]) -> Vec<Event> {
        let (mut events, mut exits, mut served) = (Vec::new(), Vec::new(), false);
        for source in ready {
            match source {
                Source::Signals => events.extend(self.take_signals()),
                Source::Guardian => {
                    self.guardian_ended = true;
                    events.push(Event::GuardianEnded);
                }
                // All of its connections at once.
                Source::Server if !served => {
                    served = true;
                    events.extend(self.serve());
                }
                Source::Server => {}
                Source::Exit(rank) => exits.extend(self.reap(*rank)),
                Source::Pipe(..) | Source::Writable(_) | Source::Log => {}
            }
        }
        // Of ranks that ended within one turn, one that blames another failed after it.
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
            // Ranks are waited for when their pidfds say so.
            orphans::reap(|child| self.ranks.iter().any(|rank| rank.pid == child && !rank.reaped));
        }
        for signal in signals.iter().filter(|signal| ends_the_run(**signal)) {
            self.signal_leftovers(*signal);
        }
        signals.into_iter().map(Event::Signalled).collect()
    }

    /// Tells the user if the ranks seem to expect another launcher.
    fn check_for_mpi(&mut self) {
        match self.ranks.first().filter(|rank| !rank.reaped) {
            Some(rank) if self.mpi.check(rank.pid.as_raw(), Instant::now()) => self.output.say(mpi::ADVICE),
            Some(_) => {}
            None => self.mpi.end(),
        }
    }

    /// The rank that has been silent for too long, if one could have been by now.
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
            // Those who have joined wait for those who have not: that is the business of the other deadline.
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

    /// Writes down the steps that ranks have come to since the last time.
    fn record_steps(&mut self) {
        for (rank, process) in (0..).zip(&mut self.ranks) {
            let step = self.server.page().progress(rank).step;
            if std::mem::replace(&mut process.step, step) != step {
                self.events.record(events::Event::Step { rank, step });
            }
        }
    }

    /// What a rank is doing.
    fn row(&self, rank: u32) -> Row {
        let ended = self.ranks[rank as usize].ended.clone();
        Row::of(self.server.page(), rank, Some(self.pid_of(rank)), ended)
    }

    /// The process that does a rank's work: the one that has joined, which a shell may have started.
    fn pid_of(&self, rank: u32) -> u32 {
        match self.server.page().progress(rank).pid {
            0 => self.ranks[rank as usize].pid.as_raw() as u32,
            joined => joined,
        }
    }

    /// Shows what every rank is doing.
    fn report(&mut self) {
        let rows: Vec<Row> = (0..self.ranks.len() as u32).map(|rank| self.row(rank)).collect();
        for line in table(&rows, progress::now()).lines() {
            self.output.say(line);
        }
    }

    /// Sleeps until something is ready or due.
    fn wait(&mut self) -> Vec<Source> {
        let mut sources = vec![];
        // The guardian's end stays readable: once is enough.
        let is_news = |source: &Source| !(self.guardian_ended && matches!(source, Source::Guardian));
        sources.extend(signal_sources(self.signals).filter(|(source, _)| is_news(source)));
        sources.extend(self.server.fds().into_iter().map(|fd| (Source::Server, fd)));
        for (rank, number) in self.ranks.iter().zip(0..) {
            if rank.ended.is_none() {
                // Of a rank that has ended, what is left of its group.
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

    /// The ranks' pipes that may be read: their readers and disks have room.
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

    /// Tells the user of refused connections. What a rank starts is in its group.
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

    /// Reads once; the number of bytes, 0 when there are none for now or for ever.
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

    /// Reads all that a rank has written before it ended. That is at most what its pipes hold: a process that left
    /// its group may go on writing for ever.
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

    /// Takes in a process that has ended.
    fn reap(&mut self, number: u32) -> Option<Event> {
        let (pid, may_have_leftovers) = (self.ranks[number as usize].pid, self.may_have_leftovers());
        let rank = &mut self.ranks[number as usize];
        // Look without reaping: while the zombie is there, the number of its group cannot be anybody else's.
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        match waitid(Id::Pid(pid), look) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => return None,
            // A shell that was asked to end does so at once, while the program it runs uses its time.
            Ok(_) if rank.sent == Sent::Request => {
                rank.group = running_in(&[pid.as_raw()]);
                if !rank.group.is_empty() {
                    return None;
                }
            }
            // Its children may still be writing: they are seen to at the end of the run.
            Ok(WaitStatus::Exited(_, 0)) if rank.sent == Sent::Nothing && may_have_leftovers => {
                return Some(self.note_end(number, Exit::Code(0)));
            }
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
        Some(self.note_end(number, exit))
    }

    /// Takes in what a rank that has ended has written, and says how it ended.
    fn note_end(&mut self, number: u32, exit: Exit) -> Event {
        let rank = &mut self.ranks[number as usize];
        let asked = rank.sent > Sent::Nothing;
        rank.ended = Some(if asked { exit.describe_signalled() } else { exit.describe() });
        self.events.record(events::Event::exit(number, exit, asked));
        self.drain(number);
        self.end_quietly(number, exit);
        Event::Exited { rank: number, exit, blame: self.server.blame(number) }
    }

    /// Our reader has left, as `head` does, so the rank found its pipe closed and ended. What the others have to say
    /// about that is no news to anybody.
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

    /// Tells the user how the run ends, and the record who is to blame.
    fn settle(&mut self, outcome: Outcome) {
        if self.ranks.iter().all(|rank| rank.reaped) {
            // What they have written comes first.
            self.drain_all();
        }
        if let Some(rank) = outcome.culprit {
            let cause = outcome.message.clone().unwrap_or_default();
            self.events.record(events::Event::Fault { rank, cause, exit_code: outcome.exit_code });
        }
        // As `cat` ends when its reader has left: nobody wants to know.
        if !self.output.is_muted() {
            outcome.message.iter().for_each(|message| self.output.say(message));
        }
    }

    /// Takes in what is left in the pipes. A process that left its group and holds a pipe open is not waited for.
    fn drain_all(&mut self) {
        for number in 0..self.ranks.len() as u32 {
            self.drain(number);
            for stream in STREAMS {
                self.output.finish(number, stream);
            }
        }
    }
}
