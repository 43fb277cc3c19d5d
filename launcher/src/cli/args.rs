//! The options of `mgpurun`, with their help.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};
use mgpu_control::inject::Injection;

use super::duration::parse_duration;
use super::node_args::NodeArgs;
use super::rank_count::RanksPerNode;
use super::torchrun::{ScriptArgs, Tee, TorchrunArgs};
use crate::launch::MAX_DURATION;
use crate::metrics::MetricsAddress;
use crate::output::Color;
use crate::placement::Bind;
use crate::plan::{BackendChoice, GpuChoice, Ranks};
use crate::ranks::RankSet;
use crate::restart::FailPolicy;

const AFTER_HELP: &str = "\
Example:
  mgpurun -n 2 train_mnist --net lenet5
  mgpurun -n 2 train_mnist --net ensemble2400 : -n 2 train_mnist --net ensemble4800

The second line starts two jobs at once, on different GPUs and cores: see --fail and --one-world.
Every rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (reserved
for the run), the other variables of torchrun and the MGPU_* variables of the rendezvous. Unless you
have set them, it also gets MGPU_THREADS and OMP_NUM_THREADS (its share of the cores) and
PYTHONUNBUFFERED=1 (Python's output is shown when it is printed). --dry-run shows all of them.

The standard input of every rank is /dev/null: a rank that reads it gets end of file.

Every line of a rank's output starts with its rank, such as [0], also a line of JSON (`--json` of
train_mnist): a program that reads the output needs --no-prefix.

If a rank exits with code 0 and leaves a process running in its process group, such as tee at the
end of a pipe, that process may run until 2 s after the last rank has ended. Then mgpurun names it
and kills it.

Commands of mgpurun itself (write -- in front to start a program of that name):
  mgpurun doctor   show this machine's cores, memory, GPUs, drivers and libraries
  mgpurun ps       show what the ranks of this user's runs are doing
  mgpurun stop     ask a running job to save its work and stop
  mgpurun sweep    run a program on several numbers of ranks, and compare speed and memory
  mgpurun top      watch the ranks of this user's runs live
  mgpurun completions SHELL   print a script that completes the command line in bash, zsh, fish ...
  mgpurun man [DIR]           print the manual page, or write those of all commands to DIR

SIGQUIT (Ctrl-\\) shows what the ranks of a running mgpurun are doing; the run continues. SIGTERM,
SIGINT, SIGHUP and SIGUSR1 ask ranks that can stop by themselves, as train_mnist can, to save their
work and stop, within --stop-grace. Other ranks get the signal. SIGUSR2 is forwarded to the ranks. A
second SIGINT or SIGTERM kills the ranks.

Exit codes:
  0              all ranks finished
  1              the launcher itself failed
  2              wrong usage
  64             a rank never joined in time
  65             a rank stopped making progress
  66             a rank uses another version of the protocol than mgpurun
  67             ranks run different programs
  68             a rank expects another world size
  69             two ranks use one GPU
  70             ranks use different versions of the NVIDIA driver or of NCCL
  71             a node of the job was lost
  72             a node of the job could not authenticate itself
  73             nodes differ in their program, its arguments, versions or the number of nodes
  74             the job stopped on request, so that it can be resumed
  141            the reader of the output exited (SIGPIPE)
  129, 130, 143  interrupted by SIGHUP, SIGINT, SIGTERM
  other          the first failing rank's own code, or 128 + its signal";

/// Options that concern the ranks of one job.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of the ranks, for each job its own")]
pub(super) struct RankArgs {
    /// Number of ranks, or auto: one for each GPU [default: auto].
    ///
    /// `auto` counts the GPUs that CUDA_VISIBLE_DEVICES leaves visible, and is 1 on a machine without GPUs.
    #[arg(short = 'n', long = "ranks", value_name = "N|auto", value_parser = parse_ranks, allow_negative_numbers = true)]
    pub(super) ranks: Option<Ranks>,

    /// The same under torchrun's name: a number, MIN:MAX, auto, gpu or cpu.
    ///
    /// `auto` is one for each GPU, or without GPUs one for each core. `gpu` is one for each GPU, and an error without
    /// GPUs; `cpu` is one for each core. Also set by the variable PET_NPROC_PER_NODE.
    #[arg(long, alias = "nproc_per_node", value_name = "N", allow_negative_numbers = true)]
    pub(super) nproc_per_node: Option<RanksPerNode>,

    /// Go on with fewer ranks after failures, but at least N.
    ///
    /// For programs that train the same on any number of ranks, such as `train_mnist --global-batch 64`. Each start of
    /// --max-restarts gets as many ranks as can be used, between N and those of -n. A GPU that the driver no longer
    /// lists cannot be used. A rank that fails in two starts in a row, or before the first step of a restart, is left
    /// out, with its GPU. The restart after the next failure tries it again. The first start always has all ranks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) min_ranks: Option<u32>,

    /// Backend of the collectives: auto, nccl or cpu.
    ///
    /// `auto` is NCCL if there are at least N GPUs, and the CPU if there are none. Fewer than N GPUs are an error,
    /// since silently using only some of the GPUs is never what was meant. `nccl` is also accepted if the driver lists
    /// no GPU: the ranks then look for GPUs themselves.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = BackendChoice::Auto, hide_possible_values = true)]
    pub(super) backend: BackendChoice,

    /// GPUs to use: all, free, or numbers and UUIDs such as 2,5.
    ///
    /// Numbers count the GPUs that CUDA_VISIBLE_DEVICES leaves visible, from 0. `free` takes those on which no process
    /// computes and which no other launch has reserved. The GPUs are reserved: another launch with --gpus does not get
    /// them. The ranks see only these GPUs.
    #[arg(long, value_name = "GPUS", default_value_t = GpuChoice::All)]
    pub(super) gpus: GpuChoice,

    /// Let each rank see only its own GPU.
    ///
    /// Sets CUDA_VISIBLE_DEVICES to one GPU for each rank, and MGPU_DEVICE=0. Programs that use device LOCAL_RANK do
    /// not need it.
    #[arg(long)]
    pub(super) isolate_gpus: bool,

    /// Let several ranks use one GPU: for tests, never for timings.
    ///
    /// Rank r uses GPU r modulo the number of GPUs. NCCL gets the variables that make it allow this; they depend on its
    /// version, and --dry-run shows them. NCCL_* variables that you have set stay as they are.
    #[arg(long)]
    pub(super) share_gpus: bool,

    /// Bind ranks to cores: auto, none, core, cache, numa or socket.
    ///
    /// `core` gives each rank a share of the cores, `cache` all cores that share a last-level cache, `numa` all cores of
    /// one NUMA node, `socket` all cores of its socket. Ranks with a GPU are placed on its node. `auto` binds to NUMA nodes if there are several and the GPUs or the ranks match them; otherwise it
    /// does not bind, since the kernel schedules better within a node. Several jobs are bound to different cores, except
    /// with `none`. More ranks than cores are never bound. Only the cores in mgpurun's own affinity mask are used.
    #[arg(long, value_enum, value_name = "TO", default_value_t = Bind::Auto, hide_possible_values = true)]
    pub(super) bind: Bind,

    /// Inject a fault into a rank, to test how the job handles it.
    ///
    /// FAULT is rank=R, step=N or phase=PHASE, and fault=KIND, separated by commas. The option may be repeated. PHASE
    /// is start (before the rank joins), join, collective (its first), checkpoint or finalise. KIND is abort, exit:N,
    /// exit0, sigkill, sigstop, hang, segv, oom, panic or leak-child. restart=K injects the fault after the K-th
    /// restart. A fault that has not happened by the end of the run is reported.
    #[arg(long, value_name = "FAULT")]
    pub(super) inject: Vec<Injection>,

    #[command(flatten)]
    pub(super) script: ScriptArgs,
}

/// What stands behind a `:`, another job.
#[derive(Debug, Parser)]
#[command(name = "mgpurun", disable_version_flag = true, disable_help_flag = true)]
pub(super) struct JobArgs {
    #[command(flatten)]
    pub(super) ranks: RankArgs,
    #[arg(required = true, trailing_var_arg = true)]
    pub(super) command: Vec<OsString>,
}

/// Options of the whole launch.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of the launch")]
pub(super) struct LaunchArgs {
    /// Seconds for all ranks to join after the first [default: 60].
    ///
    /// The time counts from the first rank that joins, so a slow disk at the start does not matter. A program that
    /// never joins (`mgpurun -n 8 hostname`) is not waited for. Exit code 64 if a rank does not join in time.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(super) timeout: Option<Duration>,

    /// Seconds that a rank may make no progress; unlimited if absent.
    ///
    /// A rank that has joined makes progress when it begins a step, a collective or another phase. A rank that waits
    /// for another one is not stuck. mgpurun names the stuck rank, shows the state of all ranks, and ends the run with
    /// exit code 65. (A rank that waits for a stuck rank in a collective gives up after MGPU_TIMEOUT seconds, 300 by
    /// default, with the same exit code.)
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(super) progress_timeout: Option<Duration>,

    /// Restart all ranks of a job up to N times when one fails.
    ///
    /// Ranks that joined the rendezvous are restarted only if a training step was completed since the last start: a run
    /// that fails before its first step would fail again. Programs that never join, such as PyTorch scripts, are
    /// restarted in any case. The ranks get MGPU_RESTART_COUNT; train_mnist resumes from its last checkpoint. There is
    /// a pause of 0.5 to 30 s before each restart.
    #[arg(long, alias = "max_restarts", value_name = "N")]
    pub(super) max_restarts: Option<u32>,

    /// Restart even if the ranks have joined and completed no step.
    #[arg(long, requires = "max_restarts")]
    pub(super) restart_always: bool,

    /// Seconds between SIGTERM and SIGKILL after a failure [default: 5].
    ///
    /// When a rank fails, the other ranks are asked to end. Those that are still running after this time are killed.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(super) grace: Option<Duration>,

    /// Seconds to stop on request [default: 25, or --grace].
    ///
    /// When mgpurun gets a signal that ends the run (SIGTERM, SIGINT, SIGHUP), SIGUSR1 or `mgpurun stop`, and at the time
    /// of --stop-after, ranks that can stop by themselves save their work. Other ranks get the signal. Those that are still
    /// running after this time are killed. The default is --grace if that is given. Slurm and Kubernetes kill 30 s after
    /// SIGTERM, unless they are configured otherwise.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(super) stop_grace: Option<Duration>,

    /// Ask the ranks to stop after TIME, such as 2h, 90m or 1h30m.
    ///
    /// The time counts from the start of mgpurun. Ranks that can stop by themselves save their work, and mgpurun exits with
    /// code 74. Other ranks get SIGTERM.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(super) stop_after: Option<Duration>,

    /// Do not put the rank in front of each line.
    ///
    /// For output that a program reads. By default a line of `train_mnist --json` arrives as `[0] {...}`.
    #[arg(long)]
    pub(super) no_prefix: bool,

    /// Pass output on unchanged, byte by byte, as it arrives.
    ///
    /// For binary data and for a single rank's carriage returns: no prefix, no line feed that the rank has not written,
    /// and no dropped byte, however long a reader or a disk stalls. The bytes of several ranks are interleaved as they
    /// arrive; --rank-filter shows one rank's, --log-dir separates them. The last lines of a failed rank are not
    /// repeated. Incompatible with --no-prefix, --color and --timestamps.
    #[arg(long, conflicts_with_all = ["no_prefix", "color", "timestamps"])]
    pub(super) raw: bool,

    /// Colour the ranks' prefixes: auto, always or never.
    ///
    /// `auto` colours on a terminal, unless NO_COLOR is set.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Color::Auto, hide_possible_values = true)]
    pub(super) color: Color,

    /// Write each rank's output to DIR/rank-N.log instead of showing it.
    ///
    /// A log holds both streams in the order in which they arrive, without prefix. DIR is created if it is missing;
    /// logs of an earlier run are overwritten. The last lines of a failed rank are still shown. With several jobs the
    /// logs of job J are in DIR/job-J.
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    pub(super) log_dir: Option<PathBuf>,

    /// Show the output that is logged, too; with STREAMS, log and show these streams.
    ///
    /// A rank whose output is logged continues after the reader of mgpurun's own output exits, as `head` does. Without
    /// a log it finds its output closed. STREAMS are as for --redirects, and the next word if it has that form: `--tee 3`,
    /// `-t 0:1`. `--tee -- 3` starts a program called 3.
    #[arg(
        short,
        long,
        value_name = "STREAMS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = Tee::SWITCH,
        requires_if(Tee::SWITCH, "log_dir")
    )]
    pub(super) tee: Option<Tee>,

    /// Show only these ranks' output: 0 or 1- or 0,2-3.
    ///
    /// The output of the other ranks is still logged. Each of several jobs counts its own ranks. The last lines of a failed rank are shown in any case.
    #[arg(long, value_name = "RANKS")]
    pub(super) rank_filter: Option<RankSet>,

    /// Put the time in front of each line, in logs too.
    ///
    /// The time is that at which mgpurun read the end of the line, in UTC, such as 2026-11-21T08:15:30.123Z.
    #[arg(long)]
    pub(super) timestamps: bool,

    /// Append the run's events to FILE, one JSON object a line.
    ///
    /// The key `event` is start, join, step, fault, exit, end or lost. Steps are sampled once a second. `lost` counts
    /// events that were dropped because the disk was too slow. Each object has `time` (UTC) and `elapsed_s`, seconds
    /// since mgpurun's start, and `job` if there are several.
    #[arg(long, value_name = "FILE")]
    pub(super) events: Option<PathBuf>,

    /// Serve the state of the ranks at ADDR: for Prometheus, and as a page for browsers.
    ///
    /// ADDR is a port of the loopback interface such as 9400 (0 is any free one), ADDRESS:PORT, or unix:PATH. /metrics is
    /// OpenMetrics text, / a page that draws the run live. Whoever can connect sees the command line and the state of
    /// the ranks; nothing can be changed.
    #[arg(long, value_name = "ADDR")]
    pub(super) metrics_listen: Option<MetricsAddress>,

    /// Print the cores and the GPU of each rank at the start.
    #[arg(long)]
    pub(super) report_bindings: bool,

    /// Print what each rank would run, and start nothing.
    #[arg(long)]
    pub(super) dry_run: bool,

    /// Start several programs as ranks of one world.
    ///
    /// By default each program between colons is a job, a world of its own. With this option all their ranks form one
    /// world, numbered from left to right, as under mpirun. --backend and --share-gpus have to be the same for all, and
    /// --inject counts ranks of the world.
    #[arg(long)]
    pub(super) one_world: bool,

    /// What ends when a job fails: one, or all.
    ///
    /// `all` ends the other jobs, too. With `one` they run on; the exit code is that of the first job that failed. A job
    /// that is restarted (--max-restarts) has not failed.
    #[arg(long, value_enum, value_name = "JOBS", default_value_t = FailPolicy::All, hide_possible_values = true)]
    pub(super) fail: FailPolicy,
}

/// Start a program once per GPU, as ranks of one run.
#[derive(Debug, Parser)]
#[command(name = "mgpurun", version, after_long_help = AFTER_HELP, max_term_width = 100)]
#[command(
    override_usage = "mgpurun [OPTIONS] [--] PROGRAM [ARGS]... [: [OPTIONS OF THE RANKS] PROGRAM [ARGS]...]..."
)]
pub(crate) struct CommandLine {
    /// The program and its arguments.
    ///
    /// A name with a slash is a path. Any other name is looked up in PATH, then in the folder of mgpurun itself. A Python
    /// script (NAME.py) is looked up in the current folder first, and run by python3 if it is not executable.
    /// Everything after the program is passed to it.
    /// A `:` before another program, or before its options, begins another job; `\:` is passed on as `:`. After `--`
    /// every word is passed on as it is.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM [ARGS]")]
    pub(super) command: Vec<OsString>,

    #[command(flatten)]
    pub(super) ranks: RankArgs,

    #[command(flatten)]
    pub(super) launch: LaunchArgs,

    #[command(flatten)]
    pub(super) nodes: NodeArgs,

    #[command(flatten)]
    pub(super) torchrun: TorchrunArgs,
}

fn parse_ranks(text: &str) -> Result<Ranks, String> {
    match text.parse() {
        _ if text == "auto" => Ok(Ranks::Auto),
        Ok(0) => Err("at least one rank is needed".into()),
        Ok(count) => Ok(Ranks::Count(count)),
        Err(_) => Err("it should be a number from 1, or auto".into()),
    }
}

pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map(Duration::try_from_secs_f64);
    match seconds {
        Ok(Ok(seconds)) if seconds <= MAX_DURATION => Ok(seconds),
        _ => Err("it should be a number of seconds, such as 5 or 0.5".into()),
    }
}
