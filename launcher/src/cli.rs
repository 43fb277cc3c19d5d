//! The command line of `mgpurun`.

mod args;
mod duration;
mod jobs;
mod node_args;
mod rank_count;
mod script;
mod torchrun;

use std::ffi::OsString;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use mgpu_control::nccl::interfaces::{SocketVariables, own_interfaces};
use nix::errno::Errno;
use nix::unistd::{SysconfVar, mkdtemp, sysconf};

use crate::error::LaunchError;
use crate::guardian::{self, Role};
use crate::launch::Launch;
use crate::metrics::FutureSocket;
use crate::nodes::ssh::Remote;
use crate::nodes::{
    NodeSettings, OneNode, SettingsError, Surroundings, binding_notice, complete_by_pmi, one_node,
    ranks_variable, settings,
};
use crate::output::{OutputOptions, StreamChoice};
use crate::plan::{LaunchPlan, Machine, NodePlace, Ranks, Request, RunContext};
use crate::restart::RestartPolicy;
use crate::status::runs;
use crate::{completions, descriptor_limits, doctor, exit_code, man_pages, stdout, stop, sweep, top};
pub(crate) use args::CommandLine;
use args::RankArgs;
pub(crate) use args::parse_seconds;
use jobs::{Jobs, split};
pub(crate) use node_args::NodeArgs;
use rank_count::{RanksPerNode, requested};
use script::{Search, Style};
use torchrun::{JobSettings, LaunchSettings, OutputSettings};

/// Time for all ranks to join, unless it is set.
pub(crate) const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// The program `mgpurun`.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // Subcommands; a program of the same name can be started after `--`.
    let done = match arguments.get(1).and_then(|word| word.to_str()) {
        Some("doctor") => doctor::main(&arguments[1..]),
        Some("ps") => runs::main(&arguments[1..]),
        Some("stop") => stop::main(&arguments[1..]),
        Some("sweep") => sweep::main(&arguments[1..]),
        Some("top") => top::main(&arguments[1..]),
        Some("completions") => completions::main(&arguments[1..]),
        Some("man") => man_pages::main(&arguments[1..]),
        _ => {
            let words = torchrun::join_tee_values(torchrun::expand(arguments));
            stdout::parse(words.iter().cloned())
                .and_then(|line| line.map_or_else(Ok, |line| run(line, &words)))
        }
    };
    done.unwrap_or_else(|error| {
        // Ignored: standard error may be closed.
        let _ = writeln!(io::stderr(), "mgpurun: {error}");
        ExitCode::from(code_of(error.as_ref()))
    })
}

/// The exit code for an error.
fn code_of(error: &(dyn std::error::Error + 'static)) -> u8 {
    match error.downcast_ref::<LaunchError>() {
        Some(refused) => refused.exit_code(),
        None if error.is::<SettingsError>() => exit_code::USAGE,
        None => exit_code::LAUNCHER,
    }
}

/// Runs the jobs of a command line that consists of these `words`.
fn run(line: CommandLine, words: &[OsString]) -> Result<ExitCode, Box<dyn std::error::Error>> {
    if line.torchrun.print_completion.is_some() {
        // Ignored: standard error may be closed.
        let _ = writeln!(io::stderr(), "mgpurun: {}", torchrun::NO_COMPLETION);
        return Ok(ExitCode::SUCCESS);
    }
    let surroundings = Surroundings { variable: &variable, file: &file };
    let is_torchrun = torchrun::is_torchrun(&line);
    let settings_of = |ranks: &RankArgs| {
        let is_torchrun = is_torchrun || torchrun::has_torchrun_option(ranks);
        JobSettings::new(ranks, is_torchrun, &surroundings).map(|settings| (settings, is_torchrun))
    };
    let launch_settings = LaunchSettings::new(&line, is_torchrun, &surroundings)?;
    let CommandLine { command, ranks, launch: args, nodes, .. } = line;
    let path: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    let own = std::env::current_exe().ok();
    let python = std::env::var_os("PYTHON_EXEC").filter(|python| !python.is_empty());
    let search = Search { path: &path, beside: own.as_deref().and_then(Path::parent), python };
    let command_words = command.len();
    let jobs = split(ranks, command, words, |ranks, name| {
        let (job, _) = settings_of(ranks).map_err(|error| error.to_string())?;
        // Any word may name a module, so a variable cannot make all words behind a `:` programs.
        if job.style == Style::Module && !ranks.script.names_module() {
            return Err("a module behind a `:` has -m in front of it".to_owned());
        }
        let found = search.command(job.style, &[name.to_owned()]);
        found.map(drop).map_err(|_| format!("there is no program `{}`", name.to_string_lossy()))
    });
    let Jobs { jobs, mut notices } = match jobs {
        Ok(jobs) => jobs,
        Err(error) => return stdout::refuse(&error),
    };
    notices.extend(launch_settings.notices);
    if let Some(hosts) = &nodes.hosts {
        check_several_nodes(jobs.len(), args.one_world)?;
        let (options, program) = words[1..].split_at(words.len() - 1 - command_words);
        let remote = Remote {
            hosts,
            nodes: &nodes,
            options,
            program,
            same_folder: true,
            grace: launch_settings.grace.max(launch_settings.stop_grace),
            raw: args.raw,
            signals: &launch_settings.signals,
        };
        return if args.dry_run { remote.describe() } else { remote.run() };
    }
    let node_args = nodes;
    let mut nodes = settings(&node_args, &surroundings, &mut notices)?;
    let one_node = match &nodes {
        Some(_) => OneNode::default(),
        None => one_node(&node_args, &surroundings, if args.one_world { 1 } else { jobs.len() })?,
    };
    if nodes.is_none() {
        notices.extend(torchrun::conf_without_effect(node_args.rdzv_conf.is_some(), &surroundings));
    }
    check_single_job(nodes.as_ref(), jobs.len(), args.one_world)?;
    let of_conf = nodes.as_ref().and_then(|nodes| nodes.join_timeout);
    let join_timeout = args.timeout.or(of_conf).unwrap_or(JOIN_TIMEOUT);
    let mut requests = Vec::new();
    for job in jobs {
        let (settings, is_torchrun) = settings_of(&job.ranks)?;
        let (program, arguments) = search.command(settings.style, &job.command)?;
        let (ranks, fewest) = count_ranks(&job.ranks, is_torchrun, &surroundings, &mut notices)?;
        requests.push(request(
            job.ranks,
            settings,
            Request { ranks, arguments, ..Request::new(program) },
            fewest,
        ));
    }
    if let Some(nodes) = &mut nodes {
        // Also for a dry run: the other nodes' wait for this one.
        if nodes.endpoint.is_none() {
            complete_by_pmi(nodes, &surroundings, join_timeout)?;
        }
        notices
            .extend(nodes.engine.and_then(|engine| binding_notice(engine, usable_cores(), present_cores())));
    }
    let OutputSettings { mut log_dir, tee, streams, local_filter } = launch_settings.output;
    if log_dir.is_none() && streams.as_ref().is_some_and(StreamChoice::logs_any) {
        log_dir = Some(log_folder(args.dry_run, &mut notices)?);
    }
    let output = OutputOptions {
        raw: args.raw,
        prefix: !args.no_prefix,
        color: args.color,
        timestamps: args.timestamps,
        log_dir,
        tee,
        streams,
        filter: args.rank_filter,
        local_filter,
        events: args.events,
        ..OutputOptions::default()
    };
    let metrics_socket = args.metrics_listen.as_ref().and_then(FutureSocket::of);
    let mut launch = Launch::of_requests(requests, args.one_world)
        .notices(notices.clone())
        .fail(args.fail)
        .report_bindings(args.report_bindings)
        .metrics(args.metrics_listen)
        .output(output)
        .join_timeout(join_timeout)
        .progress_timeout(args.progress_timeout)
        .restart(RestartPolicy { max_restarts: launch_settings.max_restarts, always: args.restart_always })
        .grace(launch_settings.grace)
        .stop_grace(launch_settings.stop_grace)
        .stop_after(args.stop_after)
        .one_node(one_node.clone())
        .adopt_orphans();
    if args.dry_run {
        let plans = launch.plan()?;
        let nodes = nodes.as_ref();
        let place = nodes.and_then(|nodes| place_of(nodes, &plans[0]));
        let of_nccl = place.iter().filter(|_| plans[0].uses_nccl());
        let of_nccl = of_nccl.map(|_| SocketVariables::detect().describe(&own_interfaces()));
        let of_nodes = nodes.map(NodeSettings::describe).unwrap_or_default();
        let lines: Vec<String> = notices.into_iter().chain(of_nodes).chain(of_nccl).collect();
        let mut context = RunContext { place, ..RunContext::placeholder() };
        let run_id = nodes.map_or(one_node.run_id, |nodes| nodes.run_id.clone());
        context.torch_run_id = run_id.unwrap_or(context.torch_run_id);
        context.master_port = one_node.master_port.map_or(context.master_port, |(port, _)| port.to_string());
        return stdout::print(&describe(&lines, &plans, &context), ExitCode::SUCCESS);
    }
    if let Some(nodes) = nodes {
        launch = launch.nodes(nodes).attached(node_args.attached);
    }
    let clean_up = || metrics_socket.iter().for_each(FutureSocket::remove);
    match guardian::fork_guardian(&launch_settings.signals, clean_up)? {
        Role::Done(code) => Ok(code),
        Role::Launcher { guardian, signals } => {
            descriptor_limits::raise();
            launch.take_over(guardian, &signals)?;
            Ok(ExitCode::from(launch.run()?.exit_code))
        }
    }
}

fn variable(name: &str) -> Option<String> {
    Some(std::env::var_os(name)?.to_string_lossy().into_owned())
}

fn file(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The settings of a job on several nodes, as far as this node can know them: for commands that take the same options.
///
/// # Errors
/// If they make no sense.
pub(crate) fn node_settings(
    args: &NodeArgs,
    join_timeout: Duration,
    notices: &mut Vec<String>,
) -> Result<Option<NodeSettings>, Box<dyn std::error::Error>> {
    let surroundings = Surroundings { variable: &variable, file: &file };
    let mut nodes = settings(args, &surroundings, notices)?;
    if let Some(nodes) = nodes.as_mut().filter(|nodes| nodes.endpoint.is_none()) {
        complete_by_pmi(nodes, &surroundings, join_timeout)?;
    }
    Ok(nodes)
}

/// Refuses `what`, which runs on one node, if this is one of several.
///
/// # Errors
/// If this is one of several nodes, or what the environment says about nodes is invalid.
pub(crate) fn check_one_node(what: &str) -> Result<(), SettingsError> {
    let surroundings = Surroundings { variable: &variable, file: &file };
    match settings(&NodeArgs::default(), &surroundings, &mut Vec::new())? {
        None => Ok(()),
        Some(nodes) => Err(SettingsError::new(format!(
            "{what} runs on one node, and this is one of {}: start it on one, or on each by itself with MGPU_NNODES=1",
            nodes.describe_nodes()
        ))),
    }
}

/// Several jobs start together on one node only.
fn check_single_job(nodes: Option<&NodeSettings>, jobs: usize, one_world: bool) -> Result<(), SettingsError> {
    nodes.map_or(Ok(()), |_| check_several_nodes(jobs, one_world))
}

/// Several nodes have one job.
fn check_several_nodes(jobs: usize, one_world: bool) -> Result<(), SettingsError> {
    let what = match one_world {
        true => "--one-world is for several programs".to_owned(),
        false if jobs > 1 => format!("this command line has {jobs} jobs"),
        false => return Ok(()),
    };
    Err(SettingsError::new(format!(
        "{what}, and on several nodes there is one job with one program: start an mgpurun for each, or add --standalone to stay on this node"
    )))
}

/// The number of ranks of a job, and the fewest with which it goes on if the number is a range. Without any number a line
/// of torchrun starts one rank.
fn count_ranks(
    ranks: &RankArgs,
    is_torchrun: bool,
    surroundings: &Surroundings<'_>,
    notices: &mut Vec<String>,
) -> Result<(Ranks, Option<u32>), SettingsError> {
    let variable = ranks_variable(surroundings);
    let has_number = ranks.ranks.is_some() || ranks.nproc_per_node.is_some() || variable.is_some();
    if is_torchrun && !has_number {
        if has_gpus() {
            notices
                .push("1 rank, as under torchrun without a number: -n auto starts one for each GPU".into());
        }
        return Ok((Ranks::Count(1), None));
    }
    let requested = requested(ranks.ranks, ranks.nproc_per_node, variable).map_err(SettingsError::new)?;
    let count = match requested {
        RanksPerNode::GpuOrOne => Ranks::Auto,
        RanksPerNode::Auto | RanksPerNode::Gpu if has_gpus() => Ranks::Auto,
        RanksPerNode::Gpu => {
            return Err(SettingsError::new(
                "gpu as the number of ranks needs GPUs, and this machine shows none: choose auto, cpu or a number",
            ));
        }
        RanksPerNode::Auto | RanksPerNode::Cpu => Ranks::Count(usable_cores() as u32),
        RanksPerNode::Count { ranks, min } => return Ok((Ranks::Count(ranks), min)),
    };
    Ok((count, None))
}

fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

fn present_cores() -> usize {
    let present = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    present.map_or(1, |cores| cores as usize)
}

fn has_gpus() -> bool {
    let mut machine = Machine::detect();
    machine.list_gpus_by_nvml();
    !machine.gpus.is_empty()
}

/// What is to be planned for a job with these options: `basis`, which has its command and its number of ranks, and
/// everything else.
fn request(ranks: RankArgs, settings: JobSettings, basis: Request, fewest: Option<u32>) -> Request {
    Request {
        min_ranks: ranks.min_ranks.or(fewest),
        backend: ranks.backend,
        gpus: ranks.gpus,
        isolate_gpus: ranks.isolate_gpus,
        share_gpus: ranks.share_gpus,
        injections: ranks.inject,
        bind: settings.bind,
        role: settings.role,
        virtual_local_rank: settings.virtual_local_rank,
        ..basis
    }
}

/// A new folder for logs, which is not removed. A dry run makes none.
fn log_folder(is_dry_run: bool, notices: &mut Vec<String>) -> Result<PathBuf, SettingsError> {
    let template = std::env::temp_dir().join("mgpurun-logs-XXXXXX");
    if is_dry_run {
        notices.push(format!("logs go to a new folder, {}", template.display()));
        return Ok(template);
    }
    let failed = |errno: Errno| {
        let place = template.display();
        SettingsError::new(format!(
            "cannot create the folder {place} for logs: {errno}; --log-dir DIR names another"
        ))
    };
    let folder = mkdtemp(&template).map_err(failed)?;
    notices.push(format!("the logs are in {}", folder.display()));
    Ok(folder)
}

/// What a dry run knows of the place of this node, which is not how many ranks the others have; `None` if it is alone.
fn place_of(settings: &NodeSettings, plan: &LaunchPlan) -> Option<NodePlace> {
    let nodes = *settings.nodes.end();
    (nodes > 1).then(|| NodePlace {
        node: settings.node_rank.unwrap_or_default(),
        nodes,
        first_rank: 0,
        world_size: plan.ranks.len() as u32,
        master_addr: "(address of node 0)".into(),
        injections: String::new(),
        nccl_interface: Vec::new(),
        net: settings.net.name(),
    })
}

/// The plans as shell commands, a block for each rank.
fn describe(notices: &[String], plans: &[LaunchPlan], context: &RunContext) -> String {
    let mut text: String = notices.iter().map(|notice| format!("# {notice}\n")).collect();
    for (job, plan) in plans.iter().enumerate() {
        if plans.len() > 1 {
            let ranks = if plan.ranks.len() == 1 { "rank" } else { "ranks" };
            text += &format!("# job {job}: {} {ranks} of {}\n", plan.ranks.len(), plan.command_line());
        }
        text.extend(plan.notices.iter().map(|notice| format!("# {notice}\n")));
        for rank in &plan.ranks {
            text += &format!("# {}\n", rank.location);
            for (name, value) in rank.full_environment(context) {
                text += &format!("{name}={} \\\n", quote(&value));
            }
            let command = plan.command_of(rank);
            let words = std::iter::once(command.program.as_os_str());
            let words = words.chain(command.arguments.iter().map(OsString::as_os_str));
            let words: Vec<String> = words.map(|word| quote(&word.to_string_lossy())).collect();
            text += &format!("{}\n", words.join(" "));
        }
    }
    text
}

/// A word, quoted for a shell.
pub(crate) fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::plan::BackendChoice;

    #[test]
    fn short_help() {
        insta::assert_snapshot!(CommandLine::command().render_help());
    }

    #[test]
    fn long_help() {
        insta::assert_snapshot!(CommandLine::command().render_long_help());
    }

    #[test]
    fn options_after_the_program_belong_to_it() {
        let args = CommandLine::parse_from(["mgpurun", "-n", "2", "prog", "--timeout", "x", "-n", "9"]);
        assert_eq!(args.ranks.ranks, Some(Ranks::Count(2)));
        assert_eq!(args.command, ["prog", "--timeout", "x", "-n", "9"]);
        let args = CommandLine::parse_from(["mgpurun", "--", "prog", "-h"]);
        assert_eq!(args.command, ["prog", "-h"]);
    }

    #[test]
    fn flags_of_torchrun_may_have_underscores() {
        let line = "mgpurun --nnodes 2 --node_rank 1 --nproc_per_node 1:4 --rdzv_backend c10d --rdzv_endpoint a:1 --rdzv_id x --rdzv_conf a=b --master_addr m --master_port 2 --local_addr l prog --node_rank 9";
        let args = CommandLine::parse_from(line.split(' '));
        let nodes = args.nodes;
        let given = [
            nodes.nnodes,
            nodes.node_rank,
            nodes.rdzv_backend,
            nodes.rdzv_endpoint,
            nodes.rdzv_id,
            nodes.rdzv_conf,
            nodes.master_addr,
            nodes.master_port,
            nodes.local_addr,
        ];
        assert_eq!(given.map(Option::unwrap), ["2", "1", "c10d", "a:1", "x", "a=b", "m", "2", "l"]);
        assert_eq!(args.ranks.nproc_per_node, Some(RanksPerNode::Count { ranks: 4, min: Some(1) }));
        assert_eq!(args.command, ["prog", "--node_rank", "9"]);
    }

    #[test]
    fn one_job_runs_on_several_nodes() {
        let variable = |name: &str| {
            Some(match name {
                "PET_NNODES" => "2".to_owned(),
                "PET_MASTER_ADDR" => "a".to_owned(),
                _ => return None,
            })
        };
        let surroundings = Surroundings { variable: &variable, file: &|_| None };
        let nodes = settings(&NodeArgs::default(), &surroundings, &mut Vec::new()).unwrap();
        assert_eq!(check_single_job(nodes.as_ref(), 1, false), Ok(()));
        assert_eq!(check_single_job(None, 2, true), Ok(()));
        let refusal =
            |jobs, one_world| check_single_job(nodes.as_ref(), jobs, one_world).unwrap_err().to_string();
        assert!(
            refusal(2, false)
                .starts_with("this command line has 2 jobs, and on several nodes there is one job")
        );
        assert!(refusal(2, true).starts_with("--one-world is for several programs, and on several nodes"));
    }

    #[test]
    fn usage_errors() {
        for (arguments, text) in [
            (&["-n", "0", "true"][..], "at least one rank is needed"),
            (&["-n", "two", "true"], "it should be a number from 1, or auto"),
            (&["-n", "-1", "true"], "it should be a number from 1, or auto"),
            (&["--grace=-1", "true"], "a number of seconds"),
            (&["--grace", "soon", "true"], "a number of seconds"),
            (&["--timeout", "1e19", "true"], "a number of seconds"),
            (&["--rank-filter", "x", "true"], "not a set of ranks"),
            (&["--raw", "--timestamps", "true"], "'--raw' cannot be used with '--timestamps'"),
            (&["--no-prefix", "--raw", "true"], "cannot be used with"),
            (&["--raw", "--color", "auto", "true"], "cannot be used with"),
            (&["--tee", "true"], "required arguments were not provided:\n  --log-dir <DIR>"),
            (&["--tiemout", "9", "true"], "unexpected argument '--tiemout'"),
            (&["-x", "true"], "unexpected argument '-x'"),
            (&["--bind", "x", "true"], "possible values: auto, none, core, numa, socket, cache"),
            (&["--backend", "mpi", "true"], "possible values: auto, nccl, cpu"),
            (&[], "required arguments were not provided"),
        ] {
            let error = CommandLine::try_parse_from([&["mgpurun"], arguments].concat()).unwrap_err();
            assert_eq!(error.exit_code(), i32::from(exit_code::USAGE));
            assert!(error.to_string().contains(text), "`{text}` should be in: {error}");
        }
    }

    #[test]
    fn dry_runs_can_be_pasted() {
        let request = Request {
            arguments: vec!["it's".into(), "a b".into(), "".into(), "x=1".into()],
            ranks: Ranks::Count(1),
            backend: BackendChoice::Cpu,
            ..Request::new("/bin/echo")
        };
        let plan = crate::plan::plan(&request, &crate::plan::Machine::default()).unwrap();
        insta::assert_snapshot!(describe(&[], &[plan], &RunContext::placeholder()));
    }
}
