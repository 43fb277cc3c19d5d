//! torchrun's command lines: its options, and its variables `PET_*`, each of which sets an option that the command line
//! does not.
//!
//! Rendezvous and nodes are in [`node_args`](super::node_args), the number of ranks is in
//! [`rank_count`](super::rank_count). A line is one of torchrun if it has an option that only torchrun has. Three things
//! then are as under torchrun: without a number of ranks there is one, a Python script is run by python3 even if it is
//! executable, and output that `--log-dir` logs is shown, too. Variables make no line one of torchrun's, since engines
//! set them for any program.

mod abbreviations;
mod signals;
mod variables;
mod words;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::Signal;

use super::args::{CommandLine, LaunchArgs, RankArgs, parse_seconds};
use super::node_args::NodeArgs;
use super::script::Style;
use crate::launch::{GRACE, STOP_GRACE};
use crate::nodes::{SettingsError, Surroundings};
use crate::output::{StreamChoice, StreamMap};
use crate::placement::Bind;
use crate::ranks::RankSet;
pub(super) use abbreviations::expand;
use signals::SignalList;
use variables::Variables;
pub(super) use words::join_tee_values;

/// torchrun's options of the ranks.
#[derive(Debug, Default, Args)]
pub(super) struct ScriptArgs {
    /// PROGRAM is a Python module, as for `python3 -m`.
    ///
    /// python3 is looked up in PATH; the variable PYTHON_EXEC has another one. The same holds for scripts.
    #[arg(short, long, hide_short_help = true)]
    module: bool,

    /// PROGRAM is no Python script, whatever its name is: start it directly.
    #[arg(long, alias = "no_python", hide_short_help = true)]
    no_python: bool,

    /// Run the Python script PROGRAM with runpy.run_path.
    #[arg(long, alias = "run_path", hide_short_help = true)]
    run_path: bool,

    /// The ranks' ROLE_NAME.
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    role: Option<String>,

    /// LOCAL_RANK is 0 for each rank, and each sees only its own GPU.
    #[arg(long, alias = "virtual_local_rank", hide_short_help = true)]
    virtual_local_rank: bool,

    /// --bind in torchrun's words: node, socket, exclusive or core-complex.
    ///
    /// `node` and `socket` bind each rank to the cores of a NUMA node or a socket, `exclusive` to a share of the node's
    /// cores, `core-complex` to cores that share a cache: those near its GPU, if it has one.
    #[arg(long, alias = "numa_binding", value_name = "TO", hide_short_help = true)]
    numa_binding: Option<NumaBinding>,
}

impl ScriptArgs {
    /// True with `--module`, which a variable can set as well.
    pub(super) fn names_module(&self) -> bool {
        self.module
    }
}

/// torchrun's options of the launch.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Options of the launch that torchrun has")]
pub(super) struct TorchrunArgs {
    /// Write these streams to files instead of showing them: 3, or 0:1,1:2.
    ///
    /// 1 is standard output, 2 is standard error, 3 is both, 0 is none: for all ranks, or LOCAL_RANK:STREAMS for each.
    /// The files are DIR/rank-N.stdout.log and DIR/rank-N.stderr.log in --log-dir, or in a new folder. The other streams
    /// are shown and not logged.
    #[arg(short, long, value_name = "STREAMS")]
    redirects: Option<StreamMap>,

    /// As --rank-filter, by local rank.
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS", hide_short_help = true)]
    local_ranks_filter: Option<RankSet>,

    /// The same as --grace.
    #[arg(long, alias = "shutdown_timeout", value_name = "SECONDS", value_parser = parse_seconds, conflicts_with = "grace", hide_short_help = true)]
    shutdown_timeout: Option<Duration>,

    /// Signals to forward to the ranks, such as SIGXCPU,SIGALRM.
    ///
    /// SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are handled in any case, as described below.
    #[arg(long, alias = "signals_to_handle", value_name = "SIGNAL,...", hide_short_help = true)]
    signals_to_handle: Option<SignalList>,

    /// Accepted without effect: mgpurun notices at once that a rank has ended.
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS", hide_short_help = true)]
    monitor_interval: Option<String>,

    /// Accepted without effect: mgpurun starts programs.
    #[arg(long, alias = "start_method", value_name = "NAME", hide_short_help = true)]
    start_method: Option<String>,

    /// Accepted without effect: `mgpurun completions SHELL` prints a script.
    #[arg(long, alias = "print_completion", value_name = "SHELL", exclusive = true, hide_short_help = true)]
    pub(super) print_completion: Option<String>,

    #[arg(long, alias = "logs_specs", hide = true)]
    logs_specs: Option<String>,

    #[arg(long, alias = "event_log_handler", hide = true)]
    event_log_handler: Option<String>,

    #[arg(long, alias = "duplicate_stdout_filters", hide = true)]
    duplicate_stdout_filters: Option<String>,

    #[arg(long, alias = "duplicate_stderr_filters", hide = true)]
    duplicate_stderr_filters: Option<String>,

    #[arg(long, alias = "log_line_prefix_template", hide = true)]
    log_line_prefix_template: Option<String>,
}

/// What `--tee` means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Tee {
    /// The output that `--log-dir` logs is shown, too.
    Switch,
    /// These streams are logged and shown.
    Streams(StreamMap),
}

impl Tee {
    /// The value of `--tee` without a value.
    pub(super) const SWITCH: &str = "";
}

impl FromStr for Tee {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            Self::SWITCH => Ok(Tee::Switch),
            streams => streams.parse().map(Tee::Streams),
        }
    }
}

/// What `--numa-binding` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum NumaBinding {
    Node,
    Socket,
    Exclusive,
    CoreComplex,
}

impl FromStr for NumaBinding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        <Self as clap::ValueEnum>::from_str(text, false)
            .map_err(|_| "it should be node, socket, exclusive or core-complex".into())
    }
}

impl NumaBinding {
    fn bind(self) -> Bind {
        match self {
            NumaBinding::Node => Bind::Numa,
            NumaBinding::Socket => Bind::Socket,
            NumaBinding::Exclusive => Bind::Core,
            NumaBinding::CoreComplex => Bind::Cache,
        }
    }
}

/// What torchrun's options say about the ranks of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JobSettings {
    pub(super) style: Style,
    pub(super) role: Option<String>,
    pub(super) virtual_local_rank: bool,
    pub(super) bind: Bind,
}

impl JobSettings {
    /// The settings of a job with the options `ranks`, in a line of torchrun or another.
    ///
    /// # Errors
    /// If a variable is invalid, or options exclude each other.
    pub(super) fn new(
        ranks: &RankArgs,
        is_torchrun: bool,
        surroundings: &Surroundings<'_>,
    ) -> Result<Self, SettingsError> {
        let (script, variables) = (&ranks.script, Variables::new(surroundings));
        let style = match (
            variables.switch(script.run_path, "RUN_PATH")?,
            variables.switch(script.module, "MODULE")?,
            variables.switch(script.no_python, "NO_PYTHON")?,
        ) {
            (true, _, _) => Style::RunPath,
            (false, true, true) => {
                return Err(SettingsError::new(
                    "--module runs a Python module, and --no-python something else: leave one of them out",
                ));
            }
            (false, true, false) => Style::Module,
            (false, false, true) => Style::Direct,
            (false, false, false) => Style::Any { python: is_torchrun },
        };
        let numa_binding = variables.value(script.numa_binding, "NUMA_BINDING")?.map(NumaBinding::bind);
        let bind = match (ranks.bind, numa_binding) {
            (bind, None) => bind,
            (Bind::Auto, Some(bind)) => bind,
            (bind, Some(other)) if bind == other => bind,
            _ => {
                return Err(SettingsError::new(
                    "--bind and --numa-binding both bind the ranks to cores: leave one of them out",
                ));
            }
        };
        Ok(JobSettings {
            style,
            role: variables.text(script.role.clone(), "ROLE"),
            virtual_local_rank: variables.switch(script.virtual_local_rank, "VIRTUAL_LOCAL_RANK")?,
            bind,
        })
    }
}

/// Where the ranks' output goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OutputSettings {
    pub(super) log_dir: Option<PathBuf>,
    /// Output that is logged is shown, too, if no streams are chosen.
    pub(super) tee: bool,
    pub(super) streams: Option<StreamChoice>,
    pub(super) local_filter: Option<RankSet>,
}

/// What torchrun's options say about the launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LaunchSettings {
    pub(super) output: OutputSettings,
    pub(super) max_restarts: u32,
    pub(super) grace: Duration,
    pub(super) stop_grace: Duration,
    /// Signals to be forwarded to the ranks.
    pub(super) signals: Vec<Signal>,
    /// Messages for the user.
    pub(super) notices: Vec<String>,
}

impl LaunchSettings {
    /// The settings of a launch.
    ///
    /// # Errors
    /// If a variable is invalid, or an option has no meaning here.
    pub(super) fn new(
        line: &CommandLine,
        is_torchrun: bool,
        surroundings: &Surroundings<'_>,
    ) -> Result<Self, SettingsError> {
        let CommandLine { launch, torchrun, nodes, .. } = line;
        let variables = Variables::new(surroundings);
        torchrun.refuse(&variables)?;
        let timeout = match launch.grace.or(torchrun.shutdown_timeout) {
            Some(timeout) => Some(timeout),
            None => variables.seconds()?,
        };
        let signals = variables.value(torchrun.signals_to_handle.clone(), "SIGNALS_TO_HANDLE")?;
        Ok(LaunchSettings {
            output: output(launch, torchrun, is_torchrun, &variables)?,
            max_restarts: variables.value(launch.max_restarts, "MAX_RESTARTS")?.unwrap_or(0),
            grace: timeout.unwrap_or(GRACE),
            stop_grace: launch.stop_grace.or(timeout).unwrap_or(STOP_GRACE),
            signals: signals.map(SignalList::into_forwarded).unwrap_or_default(),
            notices: torchrun.without_effect(nodes, &variables).into_iter().collect(),
        })
    }
}

fn output(
    launch: &LaunchArgs,
    torchrun: &TorchrunArgs,
    is_torchrun: bool,
    variables: &Variables<'_>,
) -> Result<OutputSettings, SettingsError> {
    let of_flag = launch.log_dir.clone();
    let is_by_variable = of_flag.is_none();
    let log_dir = of_flag.or_else(|| variables.text(None, "LOG_DIR").map(PathBuf::from));
    let redirects = variables.value(torchrun.redirects.clone(), "REDIRECTS")?;
    let tee = variables.value(launch.tee.clone(), "TEE")?;
    let is_switch = matches!(tee, Some(Tee::Switch));
    let tee = match tee {
        Some(Tee::Streams(streams)) => Some(streams),
        Some(Tee::Switch) | None => None,
    };
    let has_streams = redirects.is_some() || tee.is_some();
    if is_switch && has_streams {
        return Err(SettingsError::new(
            "--redirects chooses streams, and --tee has none: write --tee 3 for all streams of all ranks",
        ));
    }
    let streams = StreamChoice {
        redirects: redirects.unwrap_or_else(StreamMap::none),
        tee: tee.unwrap_or_else(StreamMap::none),
    };
    Ok(OutputSettings {
        tee: is_switch || is_torchrun || is_by_variable,
        log_dir,
        streams: has_streams.then_some(streams),
        local_filter: variables.value(torchrun.local_ranks_filter.clone(), "LOCAL_RANKS_FILTER")?,
    })
}

/// True if the line has an option that only torchrun has.
pub(super) fn is_torchrun(line: &CommandLine) -> bool {
    let CommandLine { ranks, launch, nodes, torchrun, .. } = line;
    let of_nodes = [&nodes.rdzv_backend, &nodes.rdzv_conf, &nodes.master_addr, &nodes.master_port];
    has_torchrun_option(ranks)
        || of_nodes.iter().any(|option| option.is_some())
        || matches!(launch.tee, Some(Tee::Streams(_)))
        || torchrun.redirects.is_some()
        || torchrun.local_ranks_filter.is_some()
        || torchrun.shutdown_timeout.is_some()
        || torchrun.signals_to_handle.is_some()
        || torchrun.monitor_interval.is_some()
        || torchrun.start_method.is_some()
        || torchrun.event_log_handler.is_some()
}

/// True if the options of a job have one that only torchrun has.
pub(super) fn has_torchrun_option(ranks: &RankArgs) -> bool {
    let ScriptArgs { module, no_python, run_path, role, virtual_local_rank, numa_binding } = &ranks.script;
    ranks.nproc_per_node.is_some()
        || *module
        || *no_python
        || *run_path
        || *virtual_local_rank
        || role.is_some()
        || numa_binding.is_some()
}

impl TorchrunArgs {
    /// Refuses what mgpurun cannot do. The values that mean "not used" are accepted.
    fn refuse(&self, variables: &Variables<'_>) -> Result<(), SettingsError> {
        let events =
            "a handler is a Python object in torchrun's process; use --events FILE for events as JSON";
        let filters = "nothing is written for lines that match; use --log-dir DIR, and grep its files";
        let options = [
            (
                &self.logs_specs,
                "LOGS_SPECS",
                "it names a Python class in torchrun's process; use --log-dir, --redirects and --tee",
            ),
            (&self.event_log_handler, "EVENT_LOG_HANDLER", events),
            (&self.duplicate_stdout_filters, "DUPLICATE_STDOUT_FILTERS", filters),
            (&self.duplicate_stderr_filters, "DUPLICATE_STDERR_FILTERS", filters),
            (
                &self.log_line_prefix_template,
                "LOG_LINE_PREFIX_TEMPLATE",
                "lines begin with the rank, or with nothing (--no-prefix)",
            ),
        ];
        for (flag, name, why) in options {
            let value = variables.text(flag.clone(), name).unwrap_or_default();
            if !value.is_empty() && (name, &*value) != ("EVENT_LOG_HANDLER", "null") {
                let from = variables.source(flag.is_some(), name);
                return Err(SettingsError::new(format!("{from} has no counterpart in mgpurun: {why}")));
            }
        }
        Ok(())
    }

    /// A line about the options that are accepted and change nothing.
    fn without_effect(&self, nodes: &NodeArgs, variables: &Variables<'_>) -> Option<String> {
        let options = [
            (self.monitor_interval.is_some(), "MONITOR_INTERVAL"),
            (self.start_method.is_some(), "START_METHOD"),
            (nodes.rdzv_backend.is_some(), "RDZV_BACKEND"),
        ];
        let given = options.into_iter().filter(|(is_given, name)| *is_given || variables.has(name));
        let names: Vec<String> = given.map(|(is_given, name)| variables.source(is_given, name)).collect();
        match names.as_slice() {
            [] => None,
            [name] => Some(format!("{name} has no effect here")),
            [names @ .., last] => Some(format!("{} and {last} have no effect here", names.join(", "))),
        }
    }
}

/// A line about `--rdzv-conf`, if it is given to a job on one node.
pub(super) fn conf_without_effect(is_given: bool, surroundings: &Surroundings<'_>) -> Option<String> {
    let (variables, name) = (Variables::new(surroundings), "RDZV_CONF");
    let is_found = is_given || variables.has(name);
    is_found.then(|| format!("{} has no effect on one node", variables.source(is_given, name)))
}

/// What `--print-completion` does.
pub(super) const NO_COMPLETION: &str =
    "--print-completion has no effect here: mgpurun completions SHELL prints a script";

#[cfg(test)]
mod tests;
