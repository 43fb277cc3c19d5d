//! A launch, from the request to the outcome.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mgpu_control::digest;
use mgpu_control::inject::Injection;
use mgpu_control::nodes::{Credentials, Munge, Secret};
use mgpu_control::protocol::MGPU_BACKEND;
use nix::sys::signal::SigSet;
use nix::unistd::gethostname;

use crate::error::LaunchError;
use crate::event_loop::{EventLoop, JobId, JobPlan, LaunchEnd, NodeJob, flush, run_node};
use crate::events::{Event, EventLog};
use crate::interrupt::{Interrupter, Signals};
use crate::metrics::{Board, MetricsAddress, MetricsServer};
use crate::nodes::net::{HostNet, NetChoice};
use crate::nodes::ssh::attachment;
use crate::nodes::{AuthChoice, Engine, NodeCard, NodeSettings, OneNode};
use crate::output::{Output, OutputOptions};
use crate::placement::Bind;
use crate::plan::{BackendChoice, GpuChoice, LaunchPlan, Machine, PlanError, Ranks, Request, plan_jobs};
use crate::port::ReservedPort;
use crate::reservation::{Register, Reservations};
use crate::restart::{FailPolicy, RestartPolicy};
use crate::supervisor::Outcome;
use crate::{exit_code, nccl, orphans};

/// The secret that the nodes of a job share.
const MGPU_SECRET: &str = "MGPU_SECRET";

/// The socket of munged, if it is not where libmunge looks for it.
const MGPU_MUNGE_SOCKET: &str = "MGPU_MUNGE_SOCKET";

/// Time between SIGTERM and SIGKILL after a failure, unless it is set.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// Time that ranks have to stop on request, unless it is set: Slurm and Kubernetes kill after 30 s.
pub(crate) const STOP_GRACE: Duration = Duration::from_secs(25);

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
    /// One for each job, or for each part of a single world.
    requests: Vec<Request>,
    one_world: bool,
    nodes: Option<NodeSettings>,
    one_node: OneNode,
    is_attached: bool,
    notices: Vec<String>,
    fail: FailPolicy,
    output: OutputOptions,
    report_bindings: bool,
    metrics: Option<MetricsAddress>,
    supervision: Supervision,
    stop_after: Option<Duration>,
    signals: Result<Signals, nix::Error>,
}

/// Timeouts and policies of supervision, passed from the command line to the event loop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Supervision {
    /// Longest time between the first and the last rank to join.
    pub(crate) join_timeout: Duration,
    /// Longest time without progress of a rank that has joined.
    pub(crate) progress_timeout: Option<Duration>,
    /// Time between SIGTERM and SIGKILL after a failure.
    pub(crate) grace: Duration,
    /// Time that ranks have when they are asked to stop.
    pub(crate) stop_grace: Duration,
    /// When they are asked to, if at a certain time.
    pub(crate) stop_at: Option<Instant>,
    pub(crate) restart: RestartPolicy,
    /// This process adopts the leftover processes of the ranks, and has no other children.
    pub(crate) adopts_orphans: bool,
}

impl Launch {
    /// Copies of `program`, by default one for each GPU.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Launch::of_requests(vec![Request::new(program)], false)
    }

    /// A job for each request, or one world of all.
    pub(crate) fn of_requests(requests: Vec<Request>, one_world: bool) -> Self {
        Launch {
            requests,
            one_world,
            nodes: None,
            one_node: OneNode::default(),
            is_attached: false,
            notices: Vec::new(),
            fail: FailPolicy::default(),
            report_bindings: false,
            metrics: None,
            output: OutputOptions::default(),
            supervision: Supervision {
                join_timeout: Duration::from_secs(60),
                progress_timeout: None,
                grace: GRACE,
                stop_grace: STOP_GRACE,
                stop_at: None,
                restart: RestartPolicy::default(),
                adopts_orphans: false,
            },
            stop_after: None,
            signals: Signals::new(),
        }
    }

    /// The program's arguments.
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.requests[0].arguments = arguments.into_iter().map(Into::into).collect();
        self
    }

    /// Starts `count` copies.
    pub fn ranks(mut self, count: u32) -> Self {
        self.requests[0].ranks = Ranks::Count(count);
        self
    }

    /// Lets restarts go on with fewer copies, but at least `count`, when a GPU has died or a rank fails again and again
    /// (never by default). Requires [`restart`](Self::restart).
    pub fn min_ranks(mut self, count: u32) -> Self {
        self.requests[0].min_ranks = Some(count);
        self
    }

    /// Chooses the backend.
    pub fn backend(mut self, backend: BackendChoice) -> Self {
        self.requests[0].backend = backend;
        self
    }

    /// Chooses which cores each rank may use.
    pub fn bind(mut self, bind: Bind) -> Self {
        self.requests[0].bind = bind;
        self
    }

    /// Prints the cores and the GPU of each rank at the start.
    pub fn report_bindings(mut self, report: bool) -> Self {
        self.report_bindings = report;
        self
    }

    /// Serves the state of the ranks there, as OpenMetrics and as a page (nowhere by default). A thread of this process
    /// does it.
    pub fn metrics(mut self, address: Option<MetricsAddress>) -> Self {
        self.metrics = address;
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

    /// Time between SIGTERM and SIGKILL (default 5 s). Also that of [`stop_grace`](Self::stop_grace), unless that is set
    /// after this.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.supervision.grace = grace.min(MAX_DURATION);
        self.supervision.stop_grace = self.supervision.grace;
        self
    }

    /// Time that ranks have to end when they were asked to stop, by a signal for instance (default 25 s). Then they are
    /// killed.
    pub fn stop_grace(mut self, stop_grace: Duration) -> Self {
        self.supervision.stop_grace = stop_grace.min(MAX_DURATION);
        self
    }

    /// Asks the ranks to stop so long after the start of [`run`](Self::run) (never by default), as SIGTERM would.
    pub fn stop_after(mut self, time: Option<Duration>) -> Self {
        self.stop_after = time;
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
        self.requests[0].injections = injections;
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

    /// Adds a job to be started together with this one, as a world of its own. The jobs get disjoint GPUs and cores. Of
    /// the options of `other` only those of its ranks count: program, arguments, number, backend, binding and faults.
    ///
    /// ```no_run
    /// use mgpurun::Launch;
    /// let small = Launch::new("/usr/bin/true").ranks(2);
    /// small.and(Launch::new("/usr/bin/true").ranks(1)).run()?;
    /// # Ok::<(), mgpurun::LaunchError>(())
    /// ```
    pub fn and(mut self, other: Launch) -> Self {
        self.requests.extend(other.requests);
        self
    }

    /// What the failure of one of several jobs means for the others (by default they end).
    pub fn fail(mut self, policy: FailPolicy) -> Self {
        self.fail = policy;
        self
    }

    /// What torchrun's options mean for a job on one node.
    pub(crate) fn one_node(mut self, settings: OneNode) -> Self {
        self.one_node = settings;
        self
    }

    /// Makes this the part of one node in a job on several.
    pub(crate) fn nodes(mut self, settings: NodeSettings) -> Self {
        self.nodes = Some(settings);
        self
    }

    /// Reads signals from standard input, and ends the run when it ends.
    pub(crate) fn attached(mut self, is_attached: bool) -> Self {
        self.is_attached = is_attached;
        self
    }

    /// Messages to print before the start.
    pub(crate) fn notices(mut self, notices: Vec<String>) -> Self {
        self.notices = notices;
        self
    }

    /// Handles the process's `signals`, which are blocked, and ends the run when the process of the pidfd `guardian`
    /// ends.
    pub(crate) fn take_over(&mut self, guardian: OwnedFd, signals: &SigSet) -> Result<(), LaunchError> {
        self.signals.as_mut().map_err(|errno| *errno)?.take_over(guardian, signals)?;
        Ok(())
    }

    /// What would be started on this machine: a plan for each job. Reserves nothing.
    ///
    /// # Errors
    /// If the requests cannot be met.
    pub fn plan(&self) -> Result<Vec<LaunchPlan>, LaunchError> {
        let (plans, _) = self.choose()?;
        Ok(plans)
    }

    /// Plans all jobs. Until the returned register is dropped, no other launch chooses GPUs.
    fn choose(&self) -> Result<(Vec<LaunchPlan>, Option<Register>), LaunchError> {
        let is_elastic = self.requests.iter().any(|request| request.min_ranks.is_some());
        if is_elastic && self.supervision.restart.max_restarts == 0 {
            return Err(PlanError::NoRestarts.into());
        }
        if is_elastic && self.nodes.is_some() {
            let why = "a job on several nodes has the same ranks on each of them in every start";
            return Err(PlanError::NotElastic { option: "several nodes", why }.into());
        }
        let mut machine = Machine::detect();
        if self.requests.iter().any(|request| request.share_gpus) {
            machine.nccl = nccl::version();
        }
        let wanted = Wanted::of(&self.requests, self.one_world);
        if wanted.is_divided {
            machine.list_gpus_by_nvml();
        }
        let opened = (!machine.gpus.is_empty()).then(Register::open);
        let register = match opened.transpose() {
            Err(error) if wanted.is_chosen => return Err(error.into()),
            // A launch that does not choose uses its GPUs in any case.
            opened => opened.ok().flatten(),
        };
        if let Some(register) = register.as_ref().filter(|_| wanted.is_chosen) {
            machine.find_users(register, wanted.is_free)?;
        }
        Ok((plan_jobs(&self.requests, self.one_world, &machine)?, register))
    }

    /// The faults to inject into ranks of all nodes: they are not those of the plan, which counts ranks on this host.
    fn take_injections_of_nodes(&mut self) -> Vec<Injection> {
        match self.nodes {
            Some(_) => std::mem::take(&mut self.requests[0].injections),
            None => Vec::new(),
        }
    }

    /// Starts the ranks and returns when all have ended. Call it from a thread that stays alive: the kernel kills the
    /// ranks when it ends.
    ///
    /// The ranks' output goes to this process's standard output and error, according to the [`OutputOptions`]. After a
    /// failure, a line about it and the last lines of the culprit are printed, too. The outcome is that of the first job
    /// that failed.
    ///
    /// # Errors
    /// If the ranks cannot be started; none is left running then.
    pub fn run(mut self) -> Result<Outcome, LaunchError> {
        let started = Instant::now();
        let credentials = self.nodes.as_ref().map(credentials).transpose()?;
        if self.is_attached {
            // The secret was the first line.
            attachment::follow(self.interrupter())
                .map_err(|error| LaunchError::Network(format!("cannot follow standard input: {error}")))?;
        }
        let injections = self.take_injections_of_nodes();
        let (mut plans, register) = self.choose()?;
        // Held until the ranks have ended.
        let _reservations = register.map(|register| reserve(&mut plans, &register)).transpose()?;
        let Launch {
            requests,
            output,
            signals,
            supervision,
            report_bindings,
            metrics,
            fail,
            notices,
            nodes,
            one_node,
            stop_after,
            ..
        } = self;
        let signals = signals?;
        let stop_at = stop_after.and_then(|time| started.checked_add(time));
        let supervision = Supervision { stop_at, ..supervision };
        if supervision.adopts_orphans {
            orphans::adopt()?;
        }
        let mut events = match &output.events {
            Some(path) => EventLog::open(path)?,
            None => EventLog::disabled(),
        };
        let sizes: Vec<u32> = plans.iter().map(|plan| plan.ranks.len() as u32).collect();
        let mut output = match &nodes {
            Some(_) => Output::of_node(sizes[0], output)?,
            None => Output::new(&sizes, output)?,
        };
        notices.iter().for_each(|notice| output.say(notice));
        let board = Board::default();
        let serve = |address: &MetricsAddress| MetricsServer::start(address, board.clone());
        let metrics = metrics.as_ref().map(serve).transpose()?;
        if let Some(MetricsServer { address, .. }) = &metrics {
            output.say(&format!("metrics at {address}"));
        }
        let jobs = name_jobs(&plans, &requests, supervision, &one_node)?;
        for JobPlan { id, plan, .. } in &jobs {
            let locations =
                plan.ranks.iter().map(|rank| &rank.location).filter(|_| report_bindings && nodes.is_none());
            plan.notices.iter().chain(locations).for_each(|line| id.say_to(&mut output, line));
        }
        let result = match (&nodes, credentials) {
            (Some(settings), Some(credentials)) => {
                let (plan, injections) = (&plans[0], &injections[..]);
                let card = node_card(plan, settings);
                let job =
                    NodeJob { plan, settings, supervision, injections, report_bindings, card, credentials };
                run_node(&job, &signals, &mut output, &mut events, &board)
            }
            _ => EventLoop::start(&jobs, fail, &signals, &mut output, &mut events, &board)
                .and_then(EventLoop::run),
        };
        if result.is_err() && supervision.adopts_orphans {
            // Other jobs may have left processes.
            orphans::end_all(|_| false, |notice| output.say(notice))
                .iter()
                .for_each(|problem| output.say(problem));
        }
        let outcome = result.as_ref().ok().map(|end| &end.outcome);
        let failed = result.as_ref().ok().and_then(|end| end.job);
        events.record(Event::End {
            exit_code: outcome.map_or(exit_code::LAUNCHER, |outcome| outcome.exit_code),
            message: match &result {
                Ok(end) => end.outcome.message.clone(),
                Err(error) => Some(error.to_string()),
            },
            culprit: outcome.and_then(|outcome| outcome.culprit),
            culprit_job: failed.and_then(|failed| jobs[failed].id.number),
        });
        // A slow reader, such as a pager, may delay the end of the run, but not of an interrupted one.
        let is_over = outcome.is_some_and(|outcome| outcome.interrupted);
        flush(&mut output, &signals, is_over.then_some(supervision.grace));
        events.flush();
        if let Some(notice) = events.failure() {
            output.say(&notice);
        }
        result.map(|LaunchEnd { outcome, .. }| match outcome.exit_code {
            exit_code::SUCCESS if output.is_incomplete() => {
                Outcome { exit_code: exit_code::LAUNCHER, ..outcome }
            }
            _ => outcome,
        })
    }
}

/// How this node proves that it belongs to the job: by a secret, or else, where Slurm has it, by munge.
fn credentials(settings: &NodeSettings) -> Result<Credentials, LaunchError> {
    let failed = |error: mgpu_control::Error| LaunchError::Credentials(error.to_string());
    let from_variable = || std::env::var_os(MGPU_SECRET).filter(|secret| !secret.is_empty());
    let munge = || {
        let socket = std::env::var_os(MGPU_MUNGE_SOCKET).map(PathBuf::from);
        Munge::open(socket.as_deref()).map(Credentials::Munge).map_err(LaunchError::Credentials)
    };
    let is_under_slurm = settings.engine == Some(Engine::Slurm);
    match (settings.auth, &settings.secret_file) {
        (AuthChoice::None, _) => Ok(Credentials::None),
        (AuthChoice::Munge, _) => munge(),
        (_, Some(file)) => Secret::read(file).map(Credentials::Secret).map_err(failed),
        (choice, None) => match from_variable() {
            Some(secret) => {
                let secret = Secret::new(secret.as_encoded_bytes(), MGPU_SECRET);
                secret.map(Credentials::Secret).map_err(failed)
            }
            None if choice == AuthChoice::Auto && is_under_slurm => munge(),
            None => Err(LaunchError::Credentials(format!(
                "nodes authenticate each other by a secret, and there is none: give all nodes the same \
                 --secret-file FILE or {MGPU_SECRET} (`openssl rand -hex 32` makes one), or choose --auth none on a \
                 network where nobody else can connect"
            ))),
        },
    }
}

/// What this node says about itself.
fn node_card(plan: &LaunchPlan, settings: &NodeSettings) -> NodeCard {
    let command = &plan.commands[0];
    let backend = plan.ranks[0].environment.iter().find(|(name, _)| *name == MGPU_BACKEND);
    let backend = backend.map(|(_, backend)| backend.clone()).unwrap_or_default();
    // NCCL finds the network of GPUs itself; what else goes between hosts there is small.
    let net = match settings.net {
        NetChoice::Auto if backend != "cpu" => HostNet::tcp(),
        choice => HostNet::examine(choice),
    };
    NodeCard {
        net,
        host: host_name(),
        node_rank: settings.node_rank,
        nodes: (*settings.nodes.start(), *settings.nodes.end()),
        ranks: plan.ranks.len() as u32,
        backend,
        version: env!("CARGO_PKG_VERSION").into(),
        program: command.program.display().to_string(),
        digest: digest::of_file(&command.program).ok().map(|digest| format!("{digest:016x}")),
        arguments: command.arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        nccl: None,
    }
}

/// The name of this host, for people.
fn host_name() -> String {
    gethostname().map_or_else(|_| "unknown".into(), |name| name.to_string_lossy().into_owned())
}

/// Gives each job its number, identifier and port. The identifier of one of several jobs is that of the launch with the
/// number behind it.
fn name_jobs<'a>(
    plans: &'a [LaunchPlan],
    requests: &'a [Request],
    supervision: Supervision,
    one_node: &OneNode,
) -> Result<Vec<JobPlan<'a>>, LaunchError> {
    let launch_id = mgpu_control::protocol::new_run_id()?;
    let launch_ranks = plans.iter().map(|plan| plan.ranks.len() as u32).sum();
    let mut first_rank = 0;
    let job = |(number, plan): (u32, &'a LaunchPlan)| {
        let elastic = requests.get(number as usize).filter(|request| request.min_ranks.is_some());
        let number = (plans.len() > 1).then_some(number);
        let id = JobId { number, first_rank };
        first_rank += plan.ranks.len() as u32;
        let run_id = number.map_or(launch_id.clone(), |number| format!("{launch_id}.{number}"));
        let torch_run_id = one_node.run_id.clone().unwrap_or_else(|| run_id.clone());
        let port = match &one_node.master_port {
            None => ReservedPort::reserve(),
            Some((port, from)) => ReservedPort::of_number(*port)
                .map_err(|error| LaunchError::MasterPort { port: *port, from: from.clone(), error })?,
        };
        Ok(JobPlan { id, plan, elastic, run_id, torch_run_id, port, supervision, launch_ranks })
    };
    (0..).zip(plans).map(job).collect()
}

/// What the requests want to know about the GPUs.
struct Wanted {
    /// Jobs certainly divide the GPUs, choose some, or may go on without one.
    is_divided: bool,
    /// Some job has chosen GPUs.
    is_chosen: bool,
    /// Some job takes GPUs that nobody uses.
    is_free: bool,
}

impl Wanted {
    fn of(requests: &[Request], one_world: bool) -> Self {
        let any = |is: fn(&Request) -> bool| requests.iter().any(is);
        let is_chosen = any(|request| request.gpus != GpuChoice::All);
        // A GPU that has died is known by its UUID.
        let is_elastic = any(|request| request.min_ranks.is_some() && request.backend == BackendChoice::Nccl);
        let is_several =
            requests.len() > 1 && !one_world && any(|request| request.backend == BackendChoice::Nccl);
        // Ranks that see all GPUs would all use the first one.
        let is_virtual = any(|request| request.virtual_local_rank);
        Wanted {
            is_divided: is_chosen || is_several || is_elastic || is_virtual,
            is_chosen,
            is_free: any(|request| request.gpus == GpuChoice::Free),
        }
    }
}

/// Reserves the GPUs of all jobs. A job that has not chosen its GPUs uses them even if another launch has reserved them,
/// with a notice.
fn reserve(plans: &mut [LaunchPlan], register: &Register) -> Result<Reservations, LaunchError> {
    let mut reservations = Reservations::default();
    for plan in plans {
        let command = plan.command_line();
        for gpu in &plan.gpus {
            match register.reserve(gpu, plan.owns_gpus, &command, &mut reservations) {
                Ok(None) => {}
                Ok(Some(holder)) if plan.owns_gpus => {
                    return Err(PlanError::held(gpu, &holder).into());
                }
                Ok(Some(holder)) => {
                    let name = &gpu.name;
                    plan.notices.push(format!(
                        "GPU {name} is reserved by {holder}, and used here, too; --gpus free chooses others"
                    ));
                }
                Err(error) if plan.owns_gpus => return Err(error.into()),
                // Reserving is a courtesy here.
                Err(_) => {}
            }
        }
    }
    Ok(reservations)
}
