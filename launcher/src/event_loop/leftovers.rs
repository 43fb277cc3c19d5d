//! Leftover processes: those that a rank leaves running in its process group when it exits with code 0.
//!
//! A shell script may end while the filter of its output is still running (`exec > >(tee log)`), and a program may
//! leave a child that still writes its last file. Their output belongs to the run, so they get time to finish. For the
//! supervisor the rank has finished. While other ranks run, leftover processes may run, too. After the end of the last
//! rank they have [`TIME_TO_FINISH`]; then they are named and killed.
//!
//! The launcher waits until the group is empty. Closed pipes are not enough, because a process that has closed its output
//! may still be writing a file. A process that has left the group is not waited for: `orphans` kills it.
//!
//! The rank is not reaped before its group is empty: its zombie keeps the number of the group from being reused.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::waitpid;

use super::EventLoop;
use super::wait::{Source, output_sources, poll_sources, signal_sources};
use crate::group::{members, name_of, running_in};
use crate::interrupt::ends_the_run;
use crate::orphans;
use crate::output::STREAMS;
use crate::spawn::{Process, send};

/// Time to finish after the end of the last rank. Time during which the reader of our output accepts nothing is not
/// counted: the leftover processes may be blocked by it.
const TIME_TO_FINISH: Duration = Duration::from_secs(2);

/// Maximum number of processes that are named.
const MAX_NAMES: usize = 8;

impl EventLoop<'_> {
    /// False if no rank can have a child that outlives it.
    pub(super) fn may_have_leftovers(&self) -> bool {
        // When a rank's end is noticed, its children have already become children of this process.
        let ranks = self.ranks.iter().filter(|rank| !rank.reaped).count();
        !self.supervision.adopts_orphans || orphans::children().len() > ranks
    }

    /// Forwards a signal to leftover processes.
    pub(super) fn signal_leftovers(&self, signal: Signal) {
        self.unreaped().for_each(|(_, rank)| send(rank.pid, signal));
    }

    /// Gives leftover processes time to finish. Returns a signal that ends the run, if one arrives meanwhile.
    pub(super) fn wait_for_leftovers(&mut self) -> Option<Signal> {
        let groups: Vec<i32> = self.unreaped().map(|(_, rank)| rank.pid.as_raw()).collect();
        let mut time_left = TIME_TO_FINISH;
        let mut left = if groups.is_empty() { Vec::new() } else { running_in(&groups) };
        while !left.is_empty() && !self.guardian_ended {
            if time_left.is_zero() {
                self.name_leftovers(&groups);
                break;
            }
            let (turn, is_held_up) = (Instant::now(), self.holds_up_leftovers());
            let mut sources: Vec<_> = signal_sources(self.signals).collect();
            sources.extend((0..).zip(&left).map(|(index, end)| (Source::Exit(index), end.as_fd())));
            sources.extend(self.pipes());
            sources.extend(output_sources(self.output));
            let deadline = (turn + time_left).min(self.output.next_deadline().unwrap_or(turn + time_left));
            let (mut signal, mut ended) = (None, Vec::new());
            for source in poll_sources(&sources, Some(deadline)) {
                match source {
                    Source::Exit(index) => ended.push(index),
                    Source::Pipe(rank, stream) => _ = self.read_pipe(rank, stream),
                    Source::Writable(stream) => self.output.resume(stream),
                    Source::Guardian => self.guardian_ended = true,
                    Source::Signals => signal = signal.or(self.take_ending_signal()),
                    Source::Server | Source::Log => {}
                }
            }
            self.output.tick(Instant::now());
            if signal.is_some() {
                return signal;
            }
            let mut index = 0..;
            left.retain(|_| index.next().is_none_or(|index| !ended.contains(&index)));
            if left.is_empty() {
                // They may have started other processes.
                left = running_in(&groups);
            }
            if !is_held_up {
                time_left = time_left.saturating_sub(turn.elapsed());
            }
        }
        None
    }

    /// Kills leftover processes. Their end is waited for later, with that of all other processes.
    pub(super) fn end_leftovers(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_some() && !rank.reaped) {
            // While its zombie exists, the number of its group is not reused.
            let _ = killpg(rank.pid, Signal::SIGKILL);
            let _ = waitpid(rank.pid, None);
            rank.reaped = true;
        }
    }

    /// The ranks that have ended and whose groups may still have processes.
    fn unreaped(&self) -> impl Iterator<Item = (u32, &Process)> {
        (0..).zip(&self.ranks).filter(|(_, rank)| rank.ended.is_some() && !rank.reaped)
    }

    /// True while output of such a group is not read because our own reader is too slow.
    fn holds_up_leftovers(&self) -> bool {
        let is_unread = |number, rank: &Process| {
            STREAMS.iter().any(|stream| {
                rank.pipes[*stream as usize].is_some() && !self.output.has_room(number, *stream)
            })
        };
        self.unreaped().any(|(number, rank)| is_unread(number, rank))
    }

    /// The first pending signal that ends the run.
    fn take_ending_signal(&mut self) -> Option<Signal> {
        let signals = self.signals.take();
        if signals.contains(&Signal::SIGQUIT) {
            self.report();
        }
        signals.into_iter().find(|signal| ends_the_run(*signal))
    }

    fn name_leftovers(&mut self, groups: &[i32]) {
        let rank_of = |group| self.ranks.iter().position(|rank| rank.pid.as_raw() == group);
        let left: Vec<(u32, Option<usize>)> =
            members(groups).map(|(pid, stat)| (pid, rank_of(stat.group))).collect();
        let name = |(pid, rank): &(u32, Option<usize>)| {
            format!("{} (pid {pid}, of rank {})", name_of(*pid), rank.unwrap_or_default())
        };
        let mut names: Vec<String> = left.iter().take(MAX_NAMES).map(name).collect();
        if left.len() > MAX_NAMES {
            names.push(format!("{} more", left.len() - MAX_NAMES));
        }
        if !names.is_empty() {
            let seconds = TIME_TO_FINISH.as_secs();
            self.output.say(&format!(
                "still running {seconds} s after all ranks had ended: {}: killed; a rank should wait for its children",
                names.join(", ")
            ));
        }
    }
}
