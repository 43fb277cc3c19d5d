//! The command line of `mgpurun`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::exit_code;
use crate::launch::Launch;
use crate::output::{Color, OutputOptions};
use crate::plan::{BackendChoice, Plan, Ranks, Request, RunFacts};
use crate::program;
use crate::ranks::RankSet;

const AFTER_HELP: &str = "\
Example:
  mgpurun -n 2 train_mnist --net lenet5

Every rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (reserved
for the run), what else torchrun sets, and the MGPU_* variables of the rendezvous; --dry-run shows
them.

Exit codes:
  0              all ranks finished
  1              the launcher itself failed
  2              wrong usage
  64             a rank never joined in time
  65             a rank stopped making progress
  129, 130, 143  interrupted by SIGHUP, SIGINT, SIGTERM
  other          the first failing rank's own code, or 128 + its signal";

/// Start a program once per GPU, as ranks of one run.
#[derive(Debug, Parser)]
#[command(name = "mgpurun", version, after_long_help = AFTER_HELP, max_term_width = 100)]
#[command(override_usage = "mgpurun [OPTIONS] [--] PROGRAM [ARGS]...")]
struct Args {
    /// Number of ranks, or auto: one for each GPU.
    ///
    /// `auto` counts the GPUs that CUDA_VISIBLE_DEVICES leaves visible, and is 1 on a machine without any.
    #[arg(short = 'n', long = "ranks", value_name = "N|auto", default_value = "auto", value_parser = parse_ranks, allow_negative_numbers = true)]
    ranks: Ranks,

    /// Where collectives run: auto, nccl or cpu.
    ///
    /// `auto` is NCCL where there are at least N GPUs and the CPU where there is none; in between it is an error, since
    /// silently using some of the GPUs is never what was meant.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = BackendArg::Auto, hide_possible_values = true)]
    backend: BackendArg,

    /// Seconds for all ranks to join once one has.
    ///
    /// Counted from the first rank that joins, so that a slow disk at the start does not matter; a program that never
    /// joins (`mgpurun -n 8 hostname`) is not waited for. Exit code 64 when it passes.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    timeout: Duration,

    /// Seconds between SIGTERM and SIGKILL.
    ///
    /// When a rank fails or the launcher is interrupted, the other ranks are asked to end and get this long for it.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    grace: Duration,

    /// Pass output on without the rank in front.
    ///
    /// For output that a program reads, such as `train_mnist --json`.
    #[arg(long)]
    no_prefix: bool,

    /// Colour the ranks' prefixes: auto, always or never.
    ///
    /// `auto` colours on a terminal, unless NO_COLOR is set.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = ColorArg::Auto, hide_possible_values = true)]
    color: ColorArg,

    /// Write each rank's output to DIR/rank-N.log too.
    ///
    /// Both streams in the order they arrive, without prefix. The folder is made if it is missing. Ranks that are
    /// logged go on when whoever reads mgpurun's own output leaves, as `head` does; others find it closed.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Do not show these ranks' output: 1- or 0,2-3.
    ///
    /// It is still logged, and the last lines of a rank that fails are shown all the same.
    #[arg(long, value_name = "RANKS")]
    quiet_ranks: Option<RankSet>,

    /// Let each rank see its own GPU only.
    ///
    /// Narrows CUDA_VISIBLE_DEVICES for each rank. Not needed by programs that pick device LOCAL_RANK.
    #[arg(long)]
    isolate_gpus: bool,

    /// Print what each rank would run, and start nothing.
    #[arg(long)]
    dry_run: bool,

    /// The program and its arguments.
    ///
    /// With a slash it is a path; else it is looked for in PATH, then beside mgpurun itself. Everything after it is
    /// passed to it.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM [ARGS]")]
    command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum BackendArg {
    Auto,
    Nccl,
    Cpu,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ColorArg {
    Auto,
    Always,
    Never,
}

fn parse_ranks(text: &str) -> Result<Ranks, String> {
    match text.parse() {
        _ if text == "auto" => Ok(Ranks::Auto),
        Ok(0) => Err("at least one rank is needed".into()),
        Ok(count) => Ok(Ranks::Count(count)),
        Err(_) => Err("it should be a number from 1, or auto".into()),
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map(Duration::try_from_secs_f64);
    match seconds {
        Ok(Ok(seconds)) => Ok(seconds),
        _ => Err("it should be a number of seconds, such as 5 or 0.5".into()),
    }
}

/// The program `mgpurun`.
pub fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // Whoever closed standard error does not want to know.
            let _ = writeln!(io::stderr(), "mgpurun: {error}");
            ExitCode::from(exit_code::LAUNCHER)
        }
    }
}

fn run(args: Args) -> Result<u8, Box<dyn std::error::Error>> {
    let (name, arguments) = args.command.split_first().ok_or("no program")?;
    let search: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    let own = std::env::current_exe().ok();
    let program = program::find(name, &search, own.as_deref().and_then(|path| path.parent()))?;
    let request = Request {
        program: program.clone(),
        arguments: arguments.to_vec(),
        ranks: args.ranks,
        backend: match args.backend {
            BackendArg::Auto => BackendChoice::Auto,
            BackendArg::Nccl => BackendChoice::Nccl,
            BackendArg::Cpu => BackendChoice::Cpu,
        },
        isolate_gpus: args.isolate_gpus,
    };
    let color = match args.color {
        ColorArg::Auto => Color::Auto,
        ColorArg::Always => Color::Always,
        ColorArg::Never => Color::Never,
    };
    let output = OutputOptions {
        prefix: !args.no_prefix,
        color,
        log_dir: args.log_dir,
        quiet: args.quiet_ranks.unwrap_or_default(),
    };
    let mut launch = Launch::new(program)
        .with_request(request)
        .output(output)
        .join_timeout(args.timeout)
        .grace(args.grace);
    if args.dry_run {
        let mut stdout = io::stdout();
        let written = stdout.write_all(describe(&launch.plan()?).as_bytes()).and_then(|()| stdout.flush());
        return match written {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(format!("cannot print the dry run: {error}").into())
            }
            _ => Ok(exit_code::SUCCESS),
        };
    }
    launch.own_process_signals()?;
    Ok(launch.run()?.exit_code)
}

/// The plan as shell commands, a block for each rank.
fn describe(plan: &Plan) -> String {
    let mut text = plan.notice.as_ref().map(|notice| format!("# {notice}\n")).unwrap_or_default();
    for rank in &plan.ranks {
        text += &format!("# rank {}\n", rank.rank);
        for (name, value) in rank.complete(&RunFacts::unknown()) {
            text += &format!("{name}={} \\\n", quote(&value));
        }
        let words =
            std::iter::once(plan.program.as_os_str()).chain(plan.arguments.iter().map(OsString::as_os_str));
        let words: Vec<String> = words.map(|word| quote(&word.to_string_lossy())).collect();
        text += &format!("{}\n", words.join(" "));
    }
    text
}

/// A word as a shell would read it back.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn short_help() {
        insta::assert_snapshot!(Args::command().render_help());
    }

    #[test]
    fn long_help() {
        insta::assert_snapshot!(Args::command().render_long_help());
    }

    #[test]
    fn options_after_the_program_are_its_own() {
        let args = Args::parse_from(["mgpurun", "-n", "2", "prog", "--timeout", "x", "-n", "9"]);
        assert_eq!(args.ranks, Ranks::Count(2));
        assert_eq!(args.command, ["prog", "--timeout", "x", "-n", "9"]);
        let args = Args::parse_from(["mgpurun", "--", "prog", "-h"]);
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
            (&["--quiet-ranks", "x", "true"], "no set of ranks"),
            (&["--tiemout", "9", "true"], "unexpected argument '--tiemout'"),
            (&["-x", "true"], "unexpected argument '-x'"),
            (&["--backend", "mpi", "true"], "possible values: auto, nccl, cpu"),
            (&[], "required arguments were not provided"),
        ] {
            let error = Args::try_parse_from([&["mgpurun"], arguments].concat()).unwrap_err();
            assert_eq!(error.exit_code(), i32::from(exit_code::USAGE));
            assert!(error.to_string().contains(text), "`{text}` should be in: {error}");
        }
    }

    #[test]
    fn dry_runs_can_be_pasted() {
        let request = Request {
            program: "/bin/echo".into(),
            arguments: vec!["it's".into(), "a b".into(), "".into(), "x=1".into()],
            ranks: Ranks::Count(1),
            backend: BackendChoice::Cpu,
            isolate_gpus: false,
        };
        let plan = crate::plan::plan(&request, &crate::plan::Machine::default()).unwrap();
        insta::assert_snapshot!(describe(&plan));
    }
}
