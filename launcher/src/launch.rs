//! A launch, from the request to the outcome.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mgpu::rendezvous::Server;

use crate::error::LaunchError;
use crate::event_loop::{EventLoop, flush};
use crate::interrupt::{Interrupter, Signals};
use crate::output::{Output, OutputOptions};
use crate::plan::{BackendChoice, Machine, Plan, Ranks, Request, RunFacts, plan};
use crate::port::ReservedPort;
use crate::spawn::spawn;
use crate::supervisor::{Outcome, Supervisor};

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
    join_timeout: Duration,
    grace: Duration,
    signals: Result<Signals, nix::Error>,
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
            },
            output: OutputOptions::default(),
            join_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(5),
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

    /// Chooses what happens to the ranks' output.
    pub fn output(mut self, options: OutputOptions) -> Self {
        self.output = options;
        self
    }

    /// Longest time between the first and the last rank to join (60 s). Programs that never join are not waited
    /// for.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = timeout;
        self
    }

    /// Time between SIGTERM and SIGKILL (5 s).
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// A handle that asks the ranks to end.
    ///
    /// # Panics
    /// If the system could not make an event descriptor; [`run`](Self::run) reports that as an error.
    pub fn interrupter(&self) -> Interrupter {
        self.signals.as_ref().expect("an event descriptor").interrupter()
    }

    pub(crate) fn with_request(mut self, request: Request) -> Self {
        self.request = request;
        self
    }

    /// Takes the process's signals over: for the launcher's own main, before it has threads.
    pub(crate) fn own_process_signals(&mut self) -> Result<(), LaunchError> {
        self.signals.as_mut().map_err(|errno| *errno)?.own_process_signals()?;
        Ok(())
    }

    /// What would be started on this machine.
    ///
    /// # Errors
    /// If the request cannot be met.
    pub fn plan(&self) -> Result<Plan, LaunchError> {
        Ok(plan(&self.request, &Machine::detect())?)
    }

    /// Starts the ranks and returns when all have ended. Call it from a thread that stays alive: ranks die with it.
    ///
    /// The ranks' output goes to this process's standard output and error, as [`OutputOptions`] say; so does a line
    /// about a failure, with the last lines of the rank to blame.
    ///
    /// # Errors
    /// If they cannot be started; none is left running then.
    pub fn run(self) -> Result<Outcome, LaunchError> {
        let plan = self.plan()?;
        let signals = self.signals?;
        let ranks = plan.ranks.len() as u32;
        let mut output = Output::new(ranks, self.output)?;
        if let Some(notice) = &plan.notice {
            output.say(notice);
        }
        let run_id = mgpu::protocol::new_run_id()?;
        let server = Server::bind(ranks, &run_id)?;
        // Held until the ranks have ended.
        let port = ReservedPort::reserve();
        let facts = RunFacts {
            rendezvous: server.address().to_owned(),
            run_id,
            master_port: port.number().to_string(),
            restart_count: 0,
            max_restarts: 0,
            progress: output.shows_progress(),
        };
        // All or none: those that were started before one that cannot be are ended when they are dropped.
        let processes = plan.ranks.iter().map(|rank| spawn(&plan, rank, &facts)).collect::<Result<_, _>>()?;
        let supervisor = Supervisor::new(ranks, self.join_timeout, self.grace, Instant::now());
        let outcome = EventLoop::new(processes, server, &signals, &mut output, supervisor).run();
        if let Some(message) = &outcome.message {
            output.say(message);
        }
        if let Some(culprit) = outcome.culprit {
            output.repeat_last_lines(culprit);
        }
        // A pager may take its time over the end of a run, but not over one that somebody wants to be over.
        flush(&mut output, &signals, outcome.interrupted.then_some(self.grace));
        Ok(outcome)
    }
}
