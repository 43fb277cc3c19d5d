//! The one place where the launcher waits: exits, output, messages, signals and deadlines come out of one `poll`.
//!
//! Nothing here decides anything. Events go to the [`Supervisor`], and its actions are carried out.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use mgpu::rendezvous::{Server, ServerEvent};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::read;

use crate::interrupt::Signals;
use crate::output::{Output, Stream};
use crate::spawn::Process;
use crate::supervisor::{Action, Event, Exit, Outcome, Supervisor};

/// What a ready descriptor belongs to.
#[derive(Debug, Clone, Copy)]
enum Source {
    Signals,
    Server,
    Exit(u32),
    Pipe(u32, Stream),
}

/// A rank as the loop sees it.
struct Rank {
    process: Process,
    reaped: bool,
}

/// Everything the loop waits for.
pub(crate) struct EventLoop<'a> {
    ranks: Vec<Rank>,
    server: Server,
    signals: &'a Signals,
    output: &'a mut Output,
    supervisor: Supervisor,
}

impl<'a> EventLoop<'a> {
    pub(crate) fn new(
        processes: Vec<Process>,
        server: Server,
        signals: &'a Signals,
        output: &'a mut Output,
        supervisor: Supervisor,
    ) -> Self {
        let ranks = processes.into_iter().map(|process| Rank { process, reaped: false });
        EventLoop { ranks: ranks.collect(), server, signals, output, supervisor }
    }

    /// Runs until all ranks have ended and their output has been passed on.
    pub(crate) fn run(mut self) -> Outcome {
        loop {
            let ready = self.wait();
            // Output first: what a rank wrote before it ended comes before its end.
            for source in &ready {
                if let Source::Pipe(rank, stream) = source {
                    self.read_pipe(*rank, *stream);
                }
            }
            let mut events = Vec::new();
            for source in &ready {
                match source {
                    Source::Signals => events.extend(self.signals.take().into_iter().map(Event::Signalled)),
                    Source::Server => events.extend(self.serve()),
                    Source::Exit(rank) => events.extend(self.reap(*rank)),
                    Source::Pipe(..) => {}
                }
            }
            if self.server.next_deadline().is_some_and(|deadline| deadline <= Instant::now()) {
                events.extend(self.serve());
            }
            events.push(Event::Tick);
            for event in events {
                for action in self.supervisor.handle(event, Instant::now()) {
                    if let Some(outcome) = self.carry_out(action) {
                        self.drain();
                        return outcome;
                    }
                }
            }
        }
    }

    /// Sleeps until something is ready or due.
    fn wait(&self) -> Vec<Source> {
        let mut sources: Vec<(Source, BorrowedFd<'_>)> = Vec::new();
        sources.extend(self.signals.fds().map(|fd| (Source::Signals, fd)));
        sources.extend(self.server.fds().into_iter().map(|fd| (Source::Server, fd)));
        for (rank, number) in self.ranks.iter().zip(0..) {
            if !rank.reaped {
                sources.push((Source::Exit(number), rank.process.pidfd.as_fd()));
            }
            for stream in [Stream::Stdout, Stream::Stderr] {
                let pipe = rank.process.pipes[stream as usize].iter();
                sources.extend(pipe.map(|pipe| (Source::Pipe(number, stream), pipe.as_fd())));
            }
        }
        let mut fds: Vec<PollFd<'_>> =
            sources.iter().map(|(_, fd)| PollFd::new(*fd, PollFlags::POLLIN)).collect();
        // An interrupted poll leaves nothing ready: the next turn of the loop waits again.
        if poll(&mut fds, self.time_left()).is_err() {
            return Vec::new();
        }
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        fds.iter().zip(&sources).filter(|(fd, _)| is_ready(fd)).map(|(_, (source, _))| *source).collect()
    }

    fn time_left(&self) -> PollTimeout {
        let deadline = self.supervisor.next_deadline().into_iter().chain(self.server.next_deadline()).min();
        let Some(deadline) = deadline else { return PollTimeout::NONE };
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up: waking a fraction of a millisecond early would only mean another turn.
        PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
    }

    fn serve(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for event in self.server.service() {
            match event {
                ServerEvent::Joined { rank, .. } => events.push(Event::Joined(rank)),
                ServerEvent::Left { .. } => {}
                ServerEvent::Refused { why } => self.output.say(&format!("refused a connection: {why}")),
            }
        }
        events
    }

    /// Reads what is there. `false` when there is no more for now, or for ever.
    fn read_pipe(&mut self, number: u32, stream: Stream) -> bool {
        let pipe = &mut self.ranks[number as usize].process.pipes[stream as usize];
        let Some(open) = pipe else { return false };
        let mut bytes = [0u8; 64 << 10];
        match read(open, &mut bytes) {
            Ok(count) if count > 0 => {
                self.output.push(number, stream, &bytes[..count]);
                // Nobody reads us any more: the rank finds its pipe closed, as it would without a launcher.
                if !self.output.is_wanted(number, stream) {
                    *pipe = None;
                }
                true
            }
            Err(Errno::EAGAIN | Errno::EINTR) => false,
            Ok(_) | Err(_) => {
                *pipe = None;
                self.output.finish(number, stream);
                false
            }
        }
    }

    /// Takes in a process that has ended.
    fn reap(&mut self, number: u32) -> Option<Event> {
        let rank = &mut self.ranks[number as usize];
        let pid = rank.process.pid;
        // Look without reaping: while the zombie is there, the number of its group cannot be anybody else's.
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        if let Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) = waitid(Id::Pid(pid), look) {
            return None;
        }
        let _ = killpg(pid, Signal::SIGKILL);
        rank.reaped = true;
        let exit = match waitpid(pid, None) {
            Ok(WaitStatus::Exited(_, code)) => Exit::Code(code),
            Ok(WaitStatus::Signaled(_, signal, _)) => Exit::Signal(signal as i32),
            // Somebody else in this process waited for our child: its code is lost.
            Ok(_) | Err(_) => Exit::Code(i32::from(crate::exit_code::LAUNCHER)),
        };
        // All that the rank has written is in its pipes by now.
        for stream in [Stream::Stdout, Stream::Stderr] {
            while self.read_pipe(number, stream) {}
        }
        Some(Event::Exited { rank: number, exit, blame: self.server.blame(number) })
    }

    fn carry_out(&mut self, action: Action) -> Option<Outcome> {
        match action {
            Action::Announce(rank, departure) => self.server.rank_gone(rank, departure),
            Action::Send(rank, signal) => {
                let rank = &self.ranks[rank as usize];
                if !rank.reaped {
                    let _ = killpg(rank.process.pid, signal);
                }
            }
            Action::Finish(outcome) => return Some(outcome),
        }
        None
    }

    /// Passes on what is left in the pipes. A process that left its group and holds a pipe open is not waited for.
    fn drain(&mut self) {
        for number in 0..self.ranks.len() as u32 {
            for stream in [Stream::Stdout, Stream::Stderr] {
                while self.read_pipe(number, stream) {}
                self.output.finish(number, stream);
            }
        }
    }
}
