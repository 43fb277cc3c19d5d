//! The event loop: one `poll` waits for the exits, output, messages, signals and deadlines of all jobs.
//!
//! The loop makes few decisions. It passes events to the attempt of each job, which asks its supervisor what to do; the
//! loop itself only decides that the failure of one job ends the others. It never blocks outside of `poll`, neither on a
//! rank's pipe nor on the reader of the launcher's own output.

mod attempt;
mod job;
mod leftovers;
mod node;
mod processes;
mod survey;
mod wait;

use std::time::{Duration, Instant};

use mgpu_control::progress;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::error::LaunchError;
use crate::events::{Event, EventLog};
use crate::exit_code;
use crate::interrupt::Signals;
use crate::metrics::Board;
use crate::orphans;
use crate::output::Output;
use crate::restart::FailPolicy;
use crate::supervisor::Outcome;
pub(crate) use attempt::JobId;
use job::Job;
pub(crate) use job::JobPlan;
pub(crate) use node::NodeJob;
pub(crate) use node::run as run_node;
use processes::PIPE_CAPACITY;
pub(crate) use wait::flush;
use wait::{JobSource, Source, output_sources, poll_sources, signal_sources};

/// If the loop wakes so much later than its deadline, the launcher was suspended, and the ranks with it (by the cgroup
/// freezer, for instance). Their lack of progress in that time is ignored.
const SUSPENSION_THRESHOLD: Duration = Duration::from_secs(1);

/// What all jobs use.
pub(super) struct Shared<'a> {
    output: &'a mut Output,
    events: &'a mut EventLog,
    /// The progress pages for the metrics.
    board: Board,
    /// The guardian has ended.
    guardian_ended: bool,
    /// The user was told which signal ends the run.
    told_of_interruption: bool,
    /// End of the last suspension of this process, as [`progress::now`].
    awake_since: Duration,
    /// Processes of other jobs than the one that is being handled.
    unreaped_elsewhere: usize,
    /// Read buffer.
    bytes: Box<[u8]>,
}

impl<'a> Shared<'a> {
    fn new(output: &'a mut Output, events: &'a mut EventLog, board: &Board) -> Self {
        Shared {
            output,
            events,
            board: board.clone(),
            guardian_ended: false,
            told_of_interruption: false,
            awake_since: Duration::ZERO,
            unreaped_elsewhere: 0,
            bytes: vec![0; PIPE_CAPACITY].into(),
        }
    }

    /// Handles sources that belong to no job. Returns the signals that have arrived.
    fn handle_own(&mut self, ready: &[Source], own: &Signals) -> Vec<Signal> {
        let mut signals = Vec::new();
        for source in ready {
            match source {
                Source::Writable(stream) => self.output.resume(*stream),
                Source::Signals => signals.extend(own.take()),
                Source::Guardian => self.guardian_ended = true,
                Source::Job(..) | Source::Log => {}
            }
        }
        self.output.tick(Instant::now());
        if let Some(notice) = self.events.failure() {
            self.output.say(&notice);
        }
        signals
    }
}

/// Reaps processes that were left to this one, if a child has ended, but not these `ranks`: they are reaped when their
/// pidfds become readable. Takes SIGCHLD from `signals`.
fn reap_orphans(signals: &mut Vec<Signal>, adopts_orphans: bool, ranks: impl Iterator<Item = Pid>) {
    let has_children = signals.contains(&Signal::SIGCHLD);
    signals.retain(|signal| *signal != Signal::SIGCHLD);
    if has_children && adopts_orphans {
        let ranks: Vec<Pid> = ranks.collect();
        orphans::reap(|child| ranks.contains(&child));
    }
}

/// The state of the event loop.
pub(crate) struct EventLoop<'a> {
    jobs: Vec<Job<'a>>,
    signals: &'a Signals,
    shared: Shared<'a>,
    fail: FailPolicy,
    /// This process adopts the leftover processes of the ranks.
    adopts_orphans: bool,
    /// The first job that failed for good.
    failed: Option<usize>,
}

/// The end of a launch.
pub(crate) struct LaunchEnd {
    /// The outcome of the first job that failed, or else of a stopped one ([`decisive_stop`]); success if there is none.
    pub(crate) outcome: Outcome,
    /// The index of that job.
    pub(crate) job: Option<usize>,
}

/// The job that decides the exit code if no job has failed and some were stopped, whichever ended first: the first one that
/// did not stop by itself, since code 74 says that all work was saved, or else the first one.
fn decisive_stop<'a>(outcomes: impl Iterator<Item = Option<&'a Outcome>>) -> Option<usize> {
    let stopped = outcomes.enumerate().filter_map(|(job, outcome)| {
        outcome.filter(|outcome| outcome.is_interruption()).map(|outcome| (job, outcome.exit_code))
    });
    stopped.min_by_key(|(job, code)| (*code == exit_code::STOPPED, *job)).map(|(job, _)| job)
}

impl<'a> EventLoop<'a> {
    /// Starts the ranks of all jobs.
    ///
    /// # Errors
    /// If a rank cannot be started; none is left then.
    pub(crate) fn start(
        plans: &'a [JobPlan<'a>],
        fail: FailPolicy,
        signals: &'a Signals,
        output: &'a mut Output,
        events: &'a mut EventLog,
        board: &Board,
    ) -> Result<Self, LaunchError> {
        let mut shared = Shared::new(output, events, board);
        let jobs = plans.iter().map(|plan| Job::start(plan, &mut shared)).collect::<Result<_, _>>()?;
        let adopts_orphans = plans.iter().any(|plan| plan.supervision.adopts_orphans);
        Ok(EventLoop { jobs, signals, shared, fail, adopts_orphans, failed: None })
    }

    /// Runs until all jobs are over: all ranks and their groups have ended and all their output has been read.
    ///
    /// # Errors
    /// If ranks cannot be started again; none is left then.
    pub(crate) fn run(mut self) -> Result<LaunchEnd, LaunchError> {
        while self.jobs.iter().any(|job| job.outcome().is_none()) {
            let ready = self.wait();
            let of_job = |index: usize| -> Vec<JobSource> {
                let sources = ready.iter().filter_map(|source| match source {
                    Source::Job(job, source) => Some((*job, *source)),
                    _ => None,
                });
                sources.filter(|(job, _)| *job == index).map(|(_, source)| source).collect()
            };
            let of_jobs: Vec<Vec<JobSource>> = (0..self.jobs.len()).map(of_job).collect();
            // Output first: what a rank wrote before it ended is shown before its end is reported.
            for (job, ready) in self.jobs.iter_mut().zip(&of_jobs) {
                if let Some(attempt) = job.attempt_mut() {
                    attempt.read_output(ready, &mut self.shared);
                }
            }
            let signals = self.handle_own(&ready);
            for (index, ready) in of_jobs.iter().enumerate() {
                self.handle_job(index, ready, &signals)?;
            }
        }
        let stopped = || decisive_stop(self.jobs.iter().map(Job::outcome));
        let job = self.failed.or_else(stopped);
        let outcome = job.and_then(|job| self.jobs[job].outcome().cloned());
        Ok(LaunchEnd { outcome: outcome.unwrap_or_else(Outcome::success), job })
    }

    /// Handles sources that belong to no job. Returns the signals that have arrived.
    fn handle_own(&mut self, ready: &[Source]) -> Vec<Signal> {
        let mut signals = self.shared.handle_own(ready, self.signals);
        let ranks = self.jobs.iter().filter_map(Job::attempt).flat_map(|attempt| attempt.unreaped());
        reap_orphans(&mut signals, self.adopts_orphans, ranks);
        signals
    }

    /// Handles the events of one job, and what its failure means for the others.
    fn handle_job(
        &mut self,
        index: usize,
        ready: &[JobSource],
        signals: &[Signal],
    ) -> Result<(), LaunchError> {
        self.shared.unreaped_elsewhere = self.unreaped_but(index);
        let may_restart = self.may_restart();
        let job = &mut self.jobs[index];
        if let Some(attempt) = job.attempt_mut() {
            if let Some(end) = attempt.handle(ready, signals, &mut self.shared) {
                job.finish(end, may_restart, &mut self.shared);
            }
        } else {
            job.interrupt_pause(signals, &mut self.shared);
            match job.restart_if_due(&mut self.shared) {
                // It concerns this job only: whether the others run on is decided as for any other failure.
                Err(error) if self.jobs.len() > 1 => self.jobs[index].fail(&error, &mut self.shared),
                result => result?,
            }
        }
        self.record_end(index);
        self.judge(index);
        Ok(())
    }

    /// Notes the first job that has failed, and ends the others if they should not run on. Jobs that were stopped do not
    /// count: they neither hide the failure of another one nor prevent its restart.
    fn judge(&mut self, index: usize) {
        let Some(failure) = self.jobs[index].failure() else { return };
        if failure.is_interruption() || self.failed.is_some() {
            return;
        }
        // A signal has reached all jobs.
        let ends_others = self.jobs.len() > 1 && self.fail == FailPolicy::All && !failure.interrupted;
        if ends_others || self.jobs[index].outcome().is_some() {
            self.failed = Some(index);
        }
        if ends_others {
            self.stop_others(index);
        }
    }

    /// False once a failure ends the whole launch.
    fn may_restart(&self) -> bool {
        self.failed.is_none() || self.fail == FailPolicy::One
    }

    /// Ends the jobs other than the one that has failed.
    fn stop_others(&mut self, failed: usize) {
        let why = format!("stopped, since job {failed} has failed (--fail one lets the other jobs run on)");
        for index in (0..self.jobs.len()).filter(|index| *index != failed) {
            self.shared.unreaped_elsewhere = self.unreaped_but(index);
            self.jobs[index].stop(&why, &mut self.shared);
            self.record_end(index);
        }
    }

    /// The number of processes of other jobs than this one.
    fn unreaped_but(&self, index: usize) -> usize {
        let others = self.jobs.iter().enumerate().filter(|(other, _)| *other != index);
        others.filter_map(|(_, job)| job.attempt()).map(|attempt| attempt.unreaped().count()).sum()
    }

    /// Records the end of a job once, if there are several.
    fn record_end(&mut self, index: usize) {
        if self.jobs.len() > 1
            && let Some(outcome) = self.jobs[index].take_news_of_end()
        {
            let Outcome { exit_code, culprit, message, .. } = outcome;
            let end = Event::End { exit_code, message, culprit, culprit_job: None };
            self.shared.events.record_of(Some(index as u32), end);
        }
    }

    /// Sleeps until a source is ready or a deadline has passed.
    fn wait(&mut self) -> Vec<Source> {
        // The guardian's pidfd stays readable; it is handled once.
        let guardian_ended = self.shared.guardian_ended;
        let is_news = |source: &Source| !(guardian_ended && matches!(source, Source::Guardian));
        let mut sources: Vec<_> =
            signal_sources(self.signals).filter(|(source, _)| is_news(source)).collect();
        for (index, attempt) in self.jobs.iter().map(Job::attempt).enumerate() {
            let of_job = attempt.map(|attempt| attempt.sources(&self.shared)).unwrap_or_default();
            sources.extend(of_job.into_iter().map(|(source, fd)| (Source::Job(index, source), fd)));
        }
        sources.extend(output_sources(self.shared.output));
        let deadlines = self.jobs.iter().filter_map(Job::next_deadline);
        let deadline = deadlines.chain(self.shared.output.next_deadline()).min();
        let ready = poll_sources(&sources, deadline);
        if deadline.is_some_and(|deadline| Instant::now() > deadline + SUSPENSION_THRESHOLD) {
            self.shared.awake_since = progress::now();
        }
        ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::StopCause;

    #[test]
    fn the_code_of_several_stopped_jobs_does_not_depend_on_their_order_of_ending() {
        let saved = Outcome::stopped(StopCause::Time);
        let killed = Outcome::interruption(Signal::SIGTERM);
        let decisive = |outcomes: &[Option<&Outcome>]| decisive_stop(outcomes.iter().copied());
        let finished = Outcome::success();
        assert_eq!(decisive(&[Some(&saved), Some(&killed), Some(&killed)]), Some(1));
        assert_eq!(decisive(&[Some(&finished), Some(&saved), Some(&saved)]), Some(1));
        assert_eq!(decisive(&[Some(&finished), None]), None);
    }
}
