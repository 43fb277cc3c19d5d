//! The processes of an attempt: their output and their end.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::SystemTime;

use mgpu_control::process;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::read;

use super::Shared;
use super::attempt::{Attempt, Judge};
use super::wait::JobSource;
use crate::events;
use crate::exit_code;
use crate::group::running_in;
use crate::output::{STREAMS, Stream};
use crate::spawn::Sent;
use crate::supervisor::{Event, Exit};

/// Size of the read buffer, and the assumed capacity of a pipe if the kernel does not tell it.
pub(super) const PIPE_CAPACITY: usize = 64 << 10;

impl Attempt<'_> {
    /// The ranks' pipes to read: those whose output has room at its reader and its disk.
    pub(super) fn pipes<'s>(
        &'s self,
        shared: &'s Shared<'_>,
    ) -> impl Iterator<Item = (JobSource, BorrowedFd<'s>)> {
        let all = (0..).zip(&self.ranks).flat_map(|(number, rank)| {
            STREAMS.map(|stream| (number, stream, rank.pipes[stream as usize].as_ref()))
        });
        let open = all.filter_map(|(number, stream, pipe)| Some((number, stream, pipe?)));
        open.filter(|(number, stream, _)| shared.output.has_room(self.job.first_rank + *number, *stream))
            .map(|(number, stream, pipe)| (JobSource::Pipe(number, stream), pipe.as_fd()))
    }

    /// Reads once. Returns the number of bytes; 0 if there are none now or the pipe is closed.
    pub(super) fn read_pipe(&mut self, number: u32, stream: Stream, shared: &mut Shared<'_>) -> usize {
        let writer = self.job.first_rank + number;
        let pipe = &mut self.ranks[number as usize].pipes[stream as usize];
        let Some(open) = pipe else { return 0 };
        match read(open, &mut shared.bytes) {
            Ok(count) if count > 0 => {
                shared.output.push(writer, stream, &shared.bytes[..count]);
                if !shared.output.is_wanted(writer, stream) {
                    *pipe = None;
                }
                count
            }
            Err(Errno::EAGAIN | Errno::EINTR) => 0,
            Ok(_) | Err(_) => {
                *pipe = None;
                shared.output.finish(writer, stream);
                0
            }
        }
    }

    /// Reads everything that a rank wrote before it ended. That is at most the capacity of its pipes; the limit matters
    /// because a process that left the rank's group may continue to write.
    fn drain(&mut self, number: u32, shared: &mut Shared<'_>) {
        for stream in STREAMS {
            let pipe = self.ranks[number as usize].pipes[stream as usize].as_ref();
            let capacity = pipe.and_then(|pipe| fcntl(pipe, FcntlArg::F_GETPIPE_SZ).ok());
            let mut left = capacity.map_or(PIPE_CAPACITY, |capacity| capacity as usize);
            while left > 0 {
                match self.read_pipe(number, stream, shared) {
                    0 => break,
                    count => left = left.saturating_sub(count),
                }
            }
        }
    }

    /// Handles a process that has ended.
    pub(super) fn reap(&mut self, number: u32, shared: &mut Shared<'_>) -> Option<Event> {
        let (pid, may_have_leftovers) = (self.ranks[number as usize].pid, self.may_have_leftovers(shared));
        let stop_asked = self.server.has_asked_to_stop();
        let has_stopped = |code| stop_asked && code == i32::from(exit_code::STOPPED);
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
            Ok(WaitStatus::Exited(_, code))
                if (code == 0 || has_stopped(code)) && rank.sent == Sent::Nothing && may_have_leftovers =>
            {
                return Some(self.note_end(number, Exit::Code(code), shared));
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
        Some(self.note_end(number, exit, shared))
    }

    /// Reads the remaining output of a rank that has ended, and returns the event of its end.
    fn note_end(&mut self, number: u32, exit: Exit, shared: &mut Shared<'_>) -> Event {
        let stop_asked = self.server.has_asked_to_stop();
        let rank = &mut self.ranks[number as usize];
        let asked = rank.sent > Sent::Nothing;
        rank.has_finished =
            exit == Exit::Code(0) || stop_asked && exit == Exit::Code(i32::from(exit_code::STOPPED));
        rank.ended = Some(if asked { exit.describe_signalled() } else { exit.describe() });
        rank.exit = Some((exit, SystemTime::now()));
        let peak_memory = rank.peak_memory;
        let rank = self.first + number;
        shared.events.record_of(self.job.number, events::Event::exit(rank, exit, asked, peak_memory));
        self.drain(number, shared);
        self.end_quietly(number, exit, shared);
        Event::Exited { rank, exit, blame: self.server.blame(rank) }
    }

    /// Mutes the output if the rank ended because the launcher's own reader has exited, as `head` does. The errors of the
    /// other ranks about that are of no use.
    fn end_quietly(&mut self, number: u32, exit: Exit, shared: &mut Shared<'_>) {
        let is_first = match &self.judge {
            Judge::Supervisor(supervisor) => supervisor.is_undecided(),
            Judge::Coordinator(_) => self.settled.is_none(),
        };
        let is_unread = !shared.output.is_wanted(self.job.first_rank + number, Stream::Stdout);
        if is_first && is_unread && exit.code() == exit_code::BROKEN_PIPE {
            shared.output.mute();
        }
    }

    /// Reads what is left in the pipes. Does not wait for a process that left its group and holds a pipe open.
    pub(super) fn drain_all(&mut self, shared: &mut Shared<'_>) {
        for number in 0..self.ranks.len() as u32 {
            self.drain(number, shared);
            for stream in STREAMS {
                shared.output.finish(self.job.first_rank + number, stream);
            }
        }
    }
}
