//! A launch, from the request to the outcome.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use mgpu_control::inject::Injection;
use mgpu_control::rendezvous::Server;
use nix::sys::signal::SigSet;

use crate::error::LaunchError;
use crate::event_loop::{Attempt, AttemptEnd, EventLoop, flush, wait_out};
use crate::events::{Event, EventLog};
use crate::interrupt::{Interrupter, Signals};
use crate::output::{Output, OutputOptions};
use crate::placement::Bind;
use crate::plan::{BackendChoice, LaunchPlan, Machine, Ranks, Request, RunContext, plan};
use crate::port::ReservedPort;
use crate::restart::{Decision, RestartPolicy};
use crate::spawn::{Process, spawn};
use crate::supervisor::Outcome;
use crate::{exit_code, faults, nccl, orphans};

/// About 30 years: an `Instant` much further away may not be representable.
pub(crate) const MAX_DURATION: Duration = Duration::from_secs(1_000_000_000);

/// Copies of a program to be started as ranks.
///
/// ```no_run
/// let launch = mgpurun::Launch::new("/usr/bin/true").ranks(4);
/// let outcome = launch.run()?;
/// assert_eq!(outcome.exit_code, 0);
/// # Ok::<(), mgpurun::LaunchError>(())
/// ```
#[derive(Debug)]
pub struct Launch {
    request: Request,
    output: OutputOptions,
    report_bindings: bool,
    supervision: Supervision,
    signals: Result<Signals, nix::Error>,
}

/// Timeouts and policies of supervision, passed from the command line to the event loop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Supervision {
    /// Longest time between the first and the last rank to join.
    pub(crate) join_timeout: Duration,
    /// Longest time without progress of a rank that has joined.
    pub(crate) progress_timeout: Option<Duration>,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    pub(crate) restart: RestartPolicy,
    /// This process adopts the leftover processes of the ranks, and has no other children.
    pub(crate) adopts_orphans: bool,
}

impl Launch {
    /// Copies of `program`, by default one for each GPU.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Launch {
            request: Request {
                program: program.into(),
                arguments: Vec::new(),
                ranks: Ranks::Auto,
                backend: BackendChoice::Auto,
                isolate_gpus: false,
                share_gpus: false,
                injections: Vec::new(),
                bind: Bind::Auto,
            },
            report_bindings: false,
            output: OutputOptions::default(),
            supervision: Supervision {
                join_timeout: Duration::from_secs(60),
                progress_timeout: None,
                grace: Duration::from_secs(5),
                restart: RestartPolicy::default(),
                adopts_orphans: false,
            },
            signals: Signals::new(),
        }
    }

    /// The program's arguments.
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.request.arguments = arguments.into_iter().map(Into::into).collect();
        self
    }

    /// Starts `count` copies.
    pub fn ranks(mut self, count: u32) -> Self {
        self.request.ranks = Ranks::Count(count);
        self
    }

    /// Chooses the backend.
    pub fn backend(mut self, backend: BackendChoice) -> Self {
        self.request.backend = backend;
        self
    }

    /// Chooses which cores each rank may use.
    pub fn bind(mut self, bind: Bind) -> Self {
        self.request.bind = bind;
        self
    }

    /// Prints the cores and the GPU of each rank at the start.
    pub fn report_bindings(mut self, report: bool) -> Self {
        self.report_bindings = report;
        self
    }

    /// Sets the options of the ranks' output.
    pub fn output(mut self, options: OutputOptions) -> Self {
        self.output = options;
        self
    }

    /// Longest time between the first and the last rank to join (default 60 s). Programs that never join are not waited
    /// for.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.supervision.join_timeout = timeout.min(MAX_DURATION);
        self
    }

    /// Time between SIGTERM and SIGKILL (default 5 s).
    pub fn grace(mut self, grace: Duration) -> Self {
        self.supervision.grace = grace.min(MAX_DURATION);
        self
    }

    /// Longest time without progress of a rank that has joined: time without beginning a step, a collective or a phase
    /// (`World::report_phase`) while it does not wait for another rank. No limit by default.
    pub fn progress_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.supervision.progress_timeout = timeout;
        self
    }

    /// When failed ranks are restarted (never by default).
    pub fn restart(mut self, policy: RestartPolicy) -> Self {
        self.supervision.restart = policy;
        self
    }

    /// Faults to inject into ranks, to test how the job handles them.
    pub fn inject(mut self, injections: Vec<Injection>) -> Self {
        self.request.injections = injections;
        self
    }

    /// Kills all leftover processes of the ranks, whatever process group they are in: this process adopts orphans among
    /// its descendants (it becomes a *subreaper*) and kills all its children at the end of a run. Only for a process
    /// without other children. Without this, processes that have left their rank's process group survive.
    pub fn adopt_orphans(mut self) -> Self {
        self.supervision.adopts_orphans = true;
        self
    }

    /// A handle that asks the ranks to end.
    ///
    /// # Panics
    /// If the system could not create an event descriptor; [`run`](Self::run) reports that as an error.
    pub fn interrupter(&self) -> Interrupter {
        self.signals.as_ref().expect("an event descriptor").interrupter()
    }

    pub(crate) fn with_request(mut self, request: Request) -> Self {
        self.request = request;
        self
    }

    /// Handles the process's `signals`, which are blocked, and ends the run when the process of the pidfd `guardian`
    /// ends.
    pub(crate) fn take_over(&mut self, guardian: OwnedFd, signals: &SigSet) -> Result<(), LaunchError> {
        self.signals.as_mut().map_err(|errno| *errno)?.take_over(guardian, signals)?;
        Ok(())
    }

    /// What would be started on this machine.
    ///
    /// # Errors
    /// If the request cannot be met.
    pub fn plan(&self) -> Result<LaunchPlan, LaunchError> {
        let mut machine = Machine::detect();
        if self.request.share_gpus {
            machine.nccl = nccl::version();
        }
        Ok(plan(&self.request, &machine)?)
    }

    /// Starts the ranks and returns when all have ended. Call it from a thread that stays alive: the kernel kills the
    /// ranks when it ends.
    ///
    /// The ranks' output goes to this process's standard output and error, according to the [`OutputOptions`]. After a
    /// failure, a line about it and the last lines of the culprit are printed, too.
    ///
    /// # Errors
    /// If the ranks cannot be started; none is left running then.
    pub fn run(self) -> Result<Outcome, LaunchError> {
        let plan = self.plan()?;
        let Launch { request, output, signals, supervision, report_bindings } = self;
        let signals = signals?;
        if supervision.adopts_orphans {
            orphans::adopt()?;
        }
        let mut events = match &output.events {
            Some(path) => EventLog::open(path)?,
            None => EventLog::disabled(),
        };
        let mut output = Output::new(plan.ranks.len() as u32, output)?;
        for notice in &plan.notices {
            output.say(notice);
        }
        if report_bindings {
            plan.ranks.iter().for_each(|rank| output.say(&rank.location));
        }
        // Held until the ranks have ended.
        let port = ReservedPort::reserve();
        let run = Run {
            plan: &plan,
            signals: &signals,
            run_id: mgpu_control::protocol::new_run_id()?,
            master_port: port.number().to_string(),
            supervision,
            injections: &request.injections,
        };
        let result = run.run_with_restarts(&mut output, &mut events);
        let outcome = result.as_ref().ok();
        events.record(Event::End {
            exit_code: outcome.map_or(exit_code::LAUNCHER, |outcome| outcome.exit_code),
            message: match &result {
                Ok(outcome) => outcome.message.clone(),
                Err(error) => Some(error.to_string()),
            },
            culprit: outcome.and_then(|outcome| outcome.culprit),
        });
        // A slow reader, such as a pager, may delay the end of the run, but not of an interrupted one.
        let is_over = outcome.is_some_and(|outcome| outcome.interrupted);
        flush(&mut output, &signals, is_over.then_some(supervision.grace));
        events.flush();
        if let Some(notice) = events.failure() {
            output.say(&notice);
        }
        result.map(|outcome| match outcome.exit_code {
            exit_code::SUCCESS if output.is_incomplete() => {
                Outcome { exit_code: exit_code::LAUNCHER, ..outcome }
            }
            _ => outcome,
        })
    }
}

/// The parts of a run that stay the same over restarts.
struct Run<'a> {
    plan: &'a LaunchPlan,
    signals: &'a Signals,
    run_id: String,
    master_port: String,
    supervision: Supervision,
    injections: &'a [Injection],
}

impl Run<'_> {
    /// Starts the ranks, and restarts them as often as the policy allows.
    fn run_with_restarts(&self, output: &mut Output, events: &mut EventLog) -> Result<Outcome, LaunchError> {
        let mut restarts = 0;
        loop {
            let AttemptEnd { outcome, reached, missed_faults } = self.attempt(restarts, output, events)?;
            if output.is_muted() {
                // The reader has exited, so the run ends quietly and without a restart, as `cat` would.
                return Ok(Outcome { message: None, ..outcome });
            }
            missed_faults.iter().for_each(|fault| output.say(fault));
            if let Some(culprit) = outcome.culprit {
                output.repeat_last_lines(culprit);
            }
            let policy = self.supervision.restart;
            match policy.decide(&outcome, reached, restarts) {
                Decision::Restart(pause) => {
                    restarts += 1;
                    let (most, seconds) = (policy.max_restarts, pause.as_secs_f64());
                    output.say(&format!("restart {restarts} of {most} in {seconds} s"));
                    if let Some(signal) = wait_out(pause, self.signals, output) {
                        let outcome = Outcome::interruption(signal);
                        outcome.message.iter().for_each(|message| output.say(message));
                        return Ok(outcome);
                    }
                }
                Decision::Stop(why) => {
                    why.into_iter().for_each(|why| output.say(why));
                    faults::of_later_starts(self.injections, restarts)
                        .iter()
                        .for_each(|fault| output.say(fault));
                    return Ok(outcome);
                }
            }
        }
    }

    /// Starts all ranks and supervises them to their end. No process of theirs is left then, and their resources, such
    /// as GPU memory, are free for the next attempt: the kernel closes a process's devices before it reports its end.
    fn attempt(
        &self,
        restarts: u32,
        output: &mut Output,
        events: &mut EventLog,
    ) -> Result<AttemptEnd, LaunchError> {
        let plan = self.plan;
        let ranks = plan.ranks.len() as u32;
        let server = Server::bind(ranks, &self.run_id)?;
        server.describe(&plan.command_line(), restarts);
        let context = RunContext {
            rendezvous: server.address().to_owned(),
            run_id: self.run_id.clone(),
            master_port: self.master_port.clone(),
            progress: output.shows_progress(),
            restart_count: restarts,
            max_restarts: self.supervision.restart.max_restarts,
        };
        // All or none: if one rank cannot be started, dropping the others kills them.
        let processes: Vec<Process> =
            plan.ranks.iter().map(|rank| spawn(plan, rank, &context)).collect::<Result<_, _>>()?;
        for (process, rank) in processes.iter().zip(0..) {
            server.rank_started(rank, process.pid.as_raw() as u32);
            process.notice.iter().for_each(|notice| output.say(notice));
        }
        events.record(Event::Start {
            ranks,
            program: plan.program.to_string_lossy().into_owned(),
            arguments: plan.arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            run_id: self.run_id.clone(),
            restart: restarts,
        });
        let attempt =
            Attempt { processes, server, injections: self.injections, supervision: self.supervision };
        Ok(EventLoop::new(attempt, self.signals, output, events).run())
    }
}
