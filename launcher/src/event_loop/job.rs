//! A job of the launch, over all its restarts.

use std::borrow::Cow;
use std::time::Instant;

use mgpu_control::rendezvous::Server;
use nix::sys::signal::Signal;

use super::Shared;
use super::attempt::{Attempt, AttemptEnd, JobId, Judge, Started};
use super::survey::{Present, Survey};
use crate::elasticity::Elasticity;
use crate::error::LaunchError;
use crate::events::Event;
use crate::interrupt::ends_the_run;
use crate::launch::Supervision;
use crate::plan::{LaunchPlan, RankPlan, Request, RunContext, replan};
use crate::port::ReservedPort;
use crate::restart::{Decision, Reached};
use crate::spawn::spawn;
use crate::supervisor::{Outcome, Supervisor};
use crate::{exit_code, faults};

/// What stays the same over the restarts of a job.
pub(crate) struct JobPlan<'a> {
    pub(crate) id: JobId,
    /// The plan of its first start.
    pub(crate) plan: &'a LaunchPlan,
    /// If it may go on with fewer ranks: its request, in which `min_ranks` is set.
    pub(crate) elastic: Option<&'a Request>,
    /// Identifier of its world.
    pub(crate) run_id: String,
    /// Its name for PyTorch's scripts.
    pub(crate) torch_run_id: String,
    /// Reserved until all ranks have ended.
    pub(crate) port: ReservedPort,
    pub(crate) supervision: Supervision,
    /// Number of ranks of all jobs.
    pub(crate) launch_ranks: u32,
}

/// A job and what it is doing.
pub(super) struct Job<'a> {
    plan: &'a JobPlan<'a>,
    restarts: u32,
    /// Which ranks go on, if it may go on with fewer.
    elasticity: Option<Elasticity>,
    state: State<'a>,
    /// Its end was reported to the loop.
    is_end_known: bool,
}

#[expect(clippy::large_enum_variant, reason = "there are a few of them")]
enum State<'a> {
    /// Its ranks run, or processes that they have left behind.
    Running(Attempt<'a>),
    /// It failed so, and is started again at this time, after a look at the machine if it may go on with fewer ranks.
    Pausing(Outcome, Instant, Option<Survey>),
    Over(Outcome),
}

impl<'a> Job<'a> {
    /// Starts its ranks.
    pub(super) fn start(plan: &'a JobPlan<'a>, shared: &mut Shared<'_>) -> Result<Self, LaunchError> {
        let attempt = plan.start(plan.plan, 0, shared)?;
        let fewest = plan.elastic.and_then(|request| request.min_ranks);
        let elasticity = fewest.map(|fewest| Elasticity::new(fewest, plan.plan.ranks.len() as u32));
        Ok(Job { plan, restarts: 0, elasticity, state: State::Running(attempt), is_end_known: false })
    }

    pub(super) fn attempt(&self) -> Option<&Attempt<'a>> {
        match &self.state {
            State::Running(attempt) => Some(attempt),
            State::Pausing(..) | State::Over(_) => None,
        }
    }

    pub(super) fn attempt_mut(&mut self) -> Option<&mut Attempt<'a>> {
        match &mut self.state {
            State::Running(attempt) => Some(attempt),
            State::Pausing(..) | State::Over(_) => None,
        }
    }

    /// How it ended, once it is over.
    pub(super) fn outcome(&self) -> Option<&Outcome> {
        match &self.state {
            State::Over(outcome) => Some(outcome),
            State::Running(_) | State::Pausing(..) => None,
        }
    }

    /// How it ended, at the first call after its end.
    pub(super) fn take_news_of_end(&mut self) -> Option<Outcome> {
        let outcome = self.outcome()?.clone();
        (!std::mem::replace(&mut self.is_end_known, true)).then_some(outcome)
    }

    /// How the job has failed, once it is sure that it is not restarted, although its ranks may still run.
    pub(super) fn failure(&self) -> Option<&Outcome> {
        match &self.state {
            State::Over(outcome) => Some(outcome).filter(|outcome| outcome.exit_code != exit_code::SUCCESS),
            State::Pausing(..) => None,
            State::Running(attempt) => attempt.settled.as_ref().filter(|outcome| {
                let decision = self.decide(outcome, attempt.reached());
                outcome.culprit.is_some() && !matches!(decision, Decision::Restart(_))
            }),
        }
    }

    /// Whether it is restarted after a start that ended so. Fewer ranks may come further than a start without a step.
    fn decide(&self, outcome: &Outcome, reached: Reached) -> Decision {
        let mut policy = self.plan.supervision.restart;
        policy.always |= self.elasticity.as_ref().is_some_and(Elasticity::may_shrink);
        policy.decide(outcome, reached, self.restarts)
    }

    /// When the loop has to call [`restart_if_due`](Self::restart_if_due) or the attempt at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Running(attempt) => attempt.next_deadline(),
            State::Pausing(_, until, _) => self.plan.supervision.stop_at.into_iter().chain([*until]).min(),
            State::Over(_) => None,
        }
    }

    /// Handles a signal that ends the run or asks for a stop, or the time of `--stop-after`, during the pause before a
    /// restart.
    pub(super) fn interrupt_pause(&mut self, signals: &[Signal], shared: &mut Shared<'_>) {
        let State::Pausing(failure, ..) = &self.state else { return };
        // The end of the guardian counts as SIGKILL.
        let guardian = shared.guardian_ended.then_some(Signal::SIGKILL);
        if let Some(signal) = signals.iter().copied().find(|signal| ends_the_run(*signal)).or(guardian) {
            let outcome = Outcome::interruption(signal);
            outcome.message.iter().for_each(|message| self.plan.id.say_end(shared, &outcome, message));
            self.state = State::Over(outcome);
            return;
        }
        let has_passed = self.plan.supervision.stop_at.is_some_and(|at| at <= Instant::now());
        let why = match signals.contains(&Signal::SIGUSR1) {
            _ if has_passed => "not restarted, since the time of --stop-after has passed",
            true => "not restarted, since SIGUSR1 asks for a stop",
            false => return,
        };
        let mut outcome = failure.clone();
        outcome.ask_to_stop();
        self.plan.id.say(shared, why);
        self.state = State::Over(outcome);
    }

    /// Starts the ranks again if the pause is over.
    pub(super) fn restart_if_due(&mut self, shared: &mut Shared<'_>) -> Result<(), LaunchError> {
        let State::Pausing(outcome, until, survey) = &mut self.state else { return Ok(()) };
        if *until > Instant::now() {
            return Ok(());
        }
        let present = match survey.as_ref().map(Survey::take).transpose() {
            Ok(present) => present,
            Err(later) => {
                *until = later;
                return Ok(());
            }
        };
        let plan = match (self.plan.elastic.zip(self.elasticity.as_mut()), present) {
            (Some(elastic), Some(present)) => self.plan.adapt(elastic, &present, shared)?,
            _ => Some(Cow::Borrowed(self.plan.plan)),
        };
        let Some(plan) = plan else {
            self.state = State::Over(outcome.clone());
            return Ok(());
        };
        self.restarts += 1;
        self.state = State::Running(self.plan.start(&plan, self.restarts, shared)?);
        Ok(())
    }

    /// Ends the job because its ranks cannot be started again.
    pub(super) fn fail(&mut self, error: &LaunchError, shared: &mut Shared<'_>) {
        let message = error.to_string();
        self.plan.id.say(shared, &message);
        self.state = State::Over(Outcome {
            exit_code: exit_code::LAUNCHER,
            culprit: None,
            incompatible: false,
            message: Some(message),
            interrupted: false,
        });
    }

    /// Ends the job because of something outside its world, unless it is about to end.
    pub(super) fn stop(&mut self, why: &str, shared: &mut Shared<'_>) {
        match &mut self.state {
            State::Pausing(outcome, ..) => {
                let outcome = outcome.clone();
                self.plan.id.say(shared, &format!("not restarted: {why}"));
                self.state = State::Over(outcome);
            }
            State::Running(attempt) if attempt.leftovers.is_none() => {
                if let Some(end) = attempt.stop(why.to_owned(), shared) {
                    self.finish(end, false, shared);
                }
            }
            State::Running(_) | State::Over(_) => {}
        }
    }

    /// Handles the end of an attempt: pauses before a restart, if the policy and `may_restart` allow one.
    pub(super) fn finish(&mut self, end: AttemptEnd, may_restart: bool, shared: &mut Shared<'_>) {
        let AttemptEnd { outcome, reached, missed_faults, error } = end;
        let id = self.plan.id;
        if shared.output.is_muted() {
            // The reader has exited, so the run ends quietly and without a restart, as `cat` would.
            self.state = State::Over(Outcome { message: None, ..outcome });
            return;
        }
        let ranks = self.elasticity.as_ref().map_or(u32::MAX, |ranks| ranks.current().len() as u32);
        let of_missing = faults::of_missing_ranks(&self.plan.plan.injections, self.restarts, ranks);
        missed_faults.iter().chain(&of_missing).for_each(|fault| id.say(shared, fault));
        if let Some(culprit) = outcome.culprit {
            shared.output.show_cause(id.first_rank + culprit, error.as_ref());
        }
        let most = self.plan.supervision.restart.max_restarts;
        self.state = match self.decide(&outcome, reached) {
            Decision::Restart(pause) if may_restart => {
                let (next, seconds) = (self.restarts + 1, pause.as_secs_f64());
                id.say(shared, &format!("restart {next} of {most} in {seconds} s"));
                if let (Some(elasticity), Some(culprit)) = (&mut self.elasticity, outcome.culprit) {
                    elasticity.note_failure(culprit, reached);
                }
                let until = Instant::now() + pause;
                State::Pausing(outcome, until, self.elasticity.is_some().then(|| Survey::begin(until)))
            }
            decision => {
                if let Decision::Stop(why) = decision {
                    why.into_iter().for_each(|why| id.say(shared, why));
                }
                let missed = faults::of_later_starts(&self.plan.plan.injections, self.restarts);
                missed.iter().for_each(|fault| id.say(shared, fault));
                State::Over(outcome)
            }
        };
    }
}

impl<'a> JobPlan<'a> {
    /// The plan of a restart on the machine as it was found: with all ranks that can run, except those that are left out
    /// after failures. `None`, after a message, if they are too few.
    fn adapt(
        &self,
        (request, elasticity): (&Request, &mut Elasticity),
        present: &Present,
        shared: &mut Shared<'_>,
    ) -> Result<Option<Cow<'a, LaunchPlan>>, LaunchError> {
        let (first, before, all) = (self.plan, elasticity.current().len(), self.plan.ranks.len());
        let can_run = |rank: u32| first.ranks[rank as usize].gpu.as_ref().is_none_or(|gpu| present.has(gpu));
        let kept = match elasticity.choose(can_run) {
            Ok(kept) => kept,
            Err(usable) => {
                let fewest = request.min_ranks.unwrap_or_default();
                let text = format!("{usable} of {all} GPUs can be used, fewer than --min-ranks {fewest}");
                self.id.say(shared, &format!("not restarted: {text}"));
                return Ok(None);
            }
        };
        if kept.len() < all {
            let why = why_fewer(first, kept, can_run);
            self.id.say(shared, &format!("going on with {} of {all} ranks: {why}", kept.len()));
            let is_alone = self.id.number.is_none();
            return Ok(Some(Cow::Owned(replan(request, (first, kept), is_alone, present.machine())?)));
        }
        if before < all {
            self.id.say(shared, &format!("going on with all {all} ranks again"));
        }
        Ok(Some(Cow::Borrowed(first)))
    }

    /// Starts all ranks of `plan`. No process of theirs is left when the attempt ends, and their resources, such as GPU
    /// memory, are free for the next one: the kernel closes a process's devices before it reports its end.
    fn start(
        &'a self,
        plan: &LaunchPlan,
        restarts: u32,
        shared: &mut Shared<'_>,
    ) -> Result<Attempt<'a>, LaunchError> {
        let ranks = plan.ranks.len() as u32;
        let mut server = Server::bind(ranks, &self.run_id)?;
        if plan.commands.len() > 1 {
            server.expect_programs(plan.ranks.iter().map(|rank| rank.command as u32).collect());
        }
        server.describe(&plan.command_line(), restarts);
        let context = RunContext {
            rendezvous: server.address().to_owned(),
            run_id: self.run_id.clone(),
            torch_run_id: self.torch_run_id.clone(),
            master_port: self.port.number().to_string(),
            progress: shared.output.shows_progress(),
            restart_count: restarts,
            max_restarts: self.supervision.restart.max_restarts,
            launch_ranks: self.launch_ranks,
            error_files: (0..ranks).filter_map(|rank| server.error_file(rank)).collect(),
            place: None,
        };
        let processes = spawn(plan, &context)?;
        for (process, rank) in processes.iter().zip(0..) {
            server.rank_started(rank, process.pid.as_raw() as u32);
            process.notice.iter().for_each(|notice| self.id.say(shared, notice));
        }
        let first = &plan.commands[0];
        shared.events.record_of(
            self.id.number,
            Event::Start {
                ranks,
                program: first.program.to_string_lossy().into_owned(),
                arguments: first.arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
                run_id: self.run_id.clone(),
                restart: restarts,
            },
        );
        let Supervision { join_timeout, grace, stop_grace, .. } = self.supervision;
        let supervisor =
            Supervisor::new(ranks, join_timeout, grace, Instant::now()).with_stop_grace(stop_grace);
        let (injections, run_id) = (&self.plan.injections[..], self.run_id.clone());
        shared.board.put(self.id.number, server.shared_page());
        let started = Started { job: self.id, processes, first: 0, server, injections, run_id };
        let judge = Judge::Supervisor(supervisor);
        Ok(Attempt::new(started, judge, self.supervision, shared.events.is_enabled()))
    }
}

/// Why only the ranks `kept` of the first start go on.
fn why_fewer(first: &LaunchPlan, kept: &[u32], can_run: impl Fn(u32) -> bool) -> String {
    let missing = first.ranks.iter().filter(|plan| !kept.contains(&plan.rank));
    let why = missing.map(|RankPlan { rank, gpu, .. }| match gpu {
        Some(gpu) if !can_run(*rank) => format!("GPU {} is gone", gpu.lasting_name()),
        Some(gpu) => format!("GPU {} is left out after failures", gpu.lasting_name()),
        None => format!("rank {rank} is left out after failures"),
    });
    why.collect::<Vec<_>>().join(", ")
}
