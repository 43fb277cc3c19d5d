//! The command line of `mgpurun`.

mod args;
mod jobs;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::doctor;
use crate::error::LaunchError;
use crate::guardian::{self, Role};
use crate::launch::Launch;
use crate::output::OutputOptions;
use crate::plan::{LaunchPlan, Request, RunContext};
use crate::program::ProgramError;
use crate::restart::RestartPolicy;
use crate::status::runs;
use crate::{exit_code, program, stdout, sweep};
use args::CommandLine;
use jobs::{Job, Jobs, split};

/// The program `mgpurun`.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // Subcommands; a program of the same name can be started after `--`.
    let done = match arguments.get(1).and_then(|word| word.to_str()) {
        Some("doctor") => doctor::main(&arguments[1..]),
        Some("ps") => runs::main(&arguments[1..]),
        Some("sweep") => sweep::main(&arguments[1..]),
        _ => stdout::parse(arguments.iter().cloned())
            .and_then(|line| line.map_or_else(Ok, |line| run(line, &arguments))),
    };
    done.unwrap_or_else(|error| {
        // Ignored: standard error may be closed.
        let _ = writeln!(io::stderr(), "mgpurun: {error}");
        let refused = error.downcast_ref::<LaunchError>();
        ExitCode::from(refused.map_or(exit_code::LAUNCHER, LaunchError::exit_code))
    })
}

/// Runs the jobs of a command line that consists of these `words`.
fn run(line: CommandLine, words: &[OsString]) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let CommandLine { command, ranks, launch: args } = line;
    let search: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    let own = std::env::current_exe().ok();
    let find = |name: &OsStr| program::find(name, &search, own.as_deref().and_then(|path| path.parent()));
    let Jobs { jobs, notices } = match split(ranks, command, words, |name| find(name).is_ok()) {
        Ok(jobs) => jobs,
        Err(error) => return stdout::refuse(&error),
    };
    let requests: Vec<Request> = jobs.into_iter().map(|job| request(job, find)).collect::<Result<_, _>>()?;
    let output = OutputOptions {
        raw: args.raw,
        prefix: !args.no_prefix,
        color: args.color,
        timestamps: args.timestamps,
        log_dir: args.log_dir,
        tee: args.tee,
        filter: args.rank_filter,
        events: args.events,
        ..OutputOptions::default()
    };
    let mut launch = Launch::of_requests(requests, args.one_world)
        .notices(notices.clone())
        .fail(args.fail)
        .report_bindings(args.report_bindings)
        .output(output)
        .join_timeout(args.timeout)
        .progress_timeout(args.progress_timeout)
        .restart(RestartPolicy { max_restarts: args.max_restarts, always: args.restart_always })
        .grace(args.grace)
        .adopt_orphans();
    if args.dry_run {
        return stdout::print(&describe(&notices, &launch.plan()?), ExitCode::SUCCESS);
    }
    match guardian::fork_guardian()? {
        Role::Done(code) => Ok(code),
        Role::Launcher { guardian, signals } => {
            launch.take_over(guardian, &signals)?;
            Ok(ExitCode::from(launch.run()?.exit_code))
        }
    }
}

fn request(
    job: Job,
    find: impl Fn(&OsStr) -> Result<PathBuf, ProgramError>,
) -> Result<Request, ProgramError> {
    let Job { ranks, command } = job;
    let mut words = command.into_iter();
    Ok(Request {
        program: find(&words.next().unwrap_or_default())?,
        arguments: words.collect(),
        ranks: ranks.ranks,
        min_ranks: ranks.min_ranks,
        backend: ranks.backend,
        gpus: ranks.gpus,
        isolate_gpus: ranks.isolate_gpus,
        share_gpus: ranks.share_gpus,
        injections: ranks.inject,
        bind: ranks.bind,
    })
}

/// The plans as shell commands, a block for each rank.
fn describe(notices: &[String], plans: &[LaunchPlan]) -> String {
    let mut text: String = notices.iter().map(|notice| format!("# {notice}\n")).collect();
    for (job, plan) in plans.iter().enumerate() {
        if plans.len() > 1 {
            let ranks = if plan.ranks.len() == 1 { "rank" } else { "ranks" };
            text += &format!("# job {job}: {} {ranks} of {}\n", plan.ranks.len(), plan.command_line());
        }
        text.extend(plan.notices.iter().map(|notice| format!("# {notice}\n")));
        for rank in &plan.ranks {
            text += &format!("# {}\n", rank.location);
            for (name, value) in rank.full_environment(&RunContext::placeholder()) {
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
    use crate::plan::{BackendChoice, Ranks};

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
        assert_eq!(args.ranks.ranks, Ranks::Count(2));
        assert_eq!(args.command, ["prog", "--timeout", "x", "-n", "9"]);
        let args = CommandLine::parse_from(["mgpurun", "--", "prog", "-h"]);
        assert_eq!(args.command, ["prog", "-h"]);
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
            (&["--bind", "socket", "true"], "possible values: auto, none, core, numa"),
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
        insta::assert_snapshot!(describe(&[], &[plan]));
    }
}
