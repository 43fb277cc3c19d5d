//! The command line of `mgpurun sweep`.

use std::path::PathBuf;

use clap::{ArgGroup, Parser};

use super::cells::{Vary, first_repeated};
use crate::plan::BackendChoice;

const AFTER_HELP: &str = "\
Examples:
  mgpurun sweep -n 1,2 --repeat 3 --strong -- train_mnist --json --batch 64 --epochs 2
  mgpurun sweep -n 1,2,4 --vary=--net=lenet5,deep --out sweep.jsonl -- train_mnist --json
  mgpurun sweep -n 1,2,4 --keys loss,tokens_per_s -- python3 train.py

The figures of a program are in the last JSON object (one line) that it prints. If that object has
images_per_s, as that of train_mnist --json, the table has time of training and of testing an epoch,
images/s, share of communication and GPU memory. Any other program is compared by its wall time, or
by --keys.

A percentage is the speed compared with the smallest number of ranks and the same options: the ratio
of rates (keys such as images_per_s, busbw_gbps), or the inverse ratio of times (keys such as
train_s, us_p50, ms_per_step). With --weak the ratio of times is multiplied by the ratio of ranks,
since the work has grown as well.

Exit codes:
  0              all runs finished
  1              a run failed, a file could not be written, or the program cannot be started
  2              wrong usage, or more ranks than devices; nothing was run
  141            the reader of the output exited (SIGPIPE)
  129, 130, 143  interrupted by SIGHUP, SIGINT, SIGTERM";

/// Run a program on several numbers of ranks and compare: speed, time, memory.
///
/// Every cell of the table is a launch of its own: a number of ranks with a value of each varied option. A run that
/// fails is noted with its exit code and error, and the sweep goes on. After Ctrl-C the table shows what has ended.
///
/// To start a program named sweep: mgpurun -- sweep
#[derive(Debug, Parser)]
#[command(name = "mgpurun sweep", bin_name = "mgpurun sweep", max_term_width = 100, after_long_help = AFTER_HELP)]
#[command(override_usage = "mgpurun sweep [OPTIONS] [--] PROGRAM [ARGS]...")]
#[command(group(ArgGroup::new("scaling").args(["strong", "weak"])))]
pub(crate) struct Args {
    /// Numbers of ranks, such as 1,2,4, or auto: powers of two up to the number of devices.
    #[arg(short = 'n', long = "ranks", value_name = "N,N|auto", default_value = "auto", value_parser = parse_ranks, allow_negative_numbers = true)]
    pub(super) ranks: RankList,

    /// Vary an option of the program: --vary=--batch=32,64.
    ///
    /// May be repeated: all combinations are run. The value replaces the one in the program's command line; an option
    /// that is not there is added at the end. Without values (--vary=--overlap) the program is run without the option
    /// and with it. A comma within a value is written `\,`.
    #[arg(long, value_name = "FLAG=V,V", allow_hyphen_values = true)]
    pub(super) vary: Vec<Vary>,

    /// Strong scaling: divide the program's --batch, or another option, by the number of ranks.
    ///
    /// The total work is then the same on any number of ranks. The command line of the program has the total.
    #[arg(long, value_name = "FLAG", num_args = 0..=1, require_equals = true, default_missing_value = "--batch")]
    pub(super) strong: Option<String>,

    /// Weak scaling: each rank does the same work on any number of ranks.
    ///
    /// The command line is not changed. The percentages of times count the work of all ranks.
    #[arg(long)]
    pub(super) weak: bool,

    /// Run every cell N times.
    ///
    /// All cells are run once, then all again. The table shows the median, and the lowest and highest value.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) repeat: u32,

    /// Keys of the program's last JSON object to compare, instead of the default.
    ///
    /// A dot enters an inner object: stats.loss. The first number of a list is left out as warm-up. wall_s is the wall
    /// time of the launch.
    #[arg(long, value_name = "KEY,KEY", value_delimiter = ',', value_parser = parse_key)]
    pub(super) keys: Vec<String>,

    /// Backend of the launches: auto, nccl or cpu.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = BackendChoice::Auto, hide_possible_values = true)]
    pub(super) backend: BackendChoice,

    /// Another option of mgpurun for all launches: --launch-option=--bind=core. May be repeated.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    pub(super) launch_option: Vec<String>,

    /// Allow more ranks than GPUs (nccl) or cores (cpu).
    ///
    /// Without this it is an error, because such figures say nothing about scaling. They are marked in table, JSON and
    /// plot. On GPUs the launches get --share-gpus.
    #[arg(long)]
    pub(super) oversubscribe: bool,

    /// Keep the results in FILE: one JSON object for each run, as soon as it has ended.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) out: Option<PathBuf>,

    /// Continue the sweep in --out.
    ///
    /// Runs that have finished are not repeated; those that failed are. Program, scaling, options of the launches and
    /// machine must be the same. More ranks, values and repeats may be added.
    #[arg(long, requires = "out")]
    pub(super) resume: bool,

    /// Plot speed over ranks, beside the ideal line, to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub(super) svg: Option<PathBuf>,

    /// Print JSON lines instead of the table: the sweep, each run when it has ended, and each row of the table.
    #[arg(long)]
    pub(super) json: bool,

    /// Print the command line of every run, and start nothing.
    #[arg(long)]
    pub(super) dry_run: bool,

    /// The program and its arguments.
    ///
    /// It is found as by mgpurun. Everything after the program is passed to it.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM [ARGS]")]
    pub(super) command: Vec<String>,
}

/// Numbers of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankList {
    Auto,
    /// Ascending.
    Of(Vec<u32>),
}

fn parse_ranks(text: &str) -> Result<RankList, String> {
    if text == "auto" {
        return Ok(RankList::Auto);
    }
    let number = |word: &str| word.trim().parse::<u32>().ok().filter(|ranks| *ranks > 0);
    let numbers: Option<Vec<u32>> = text.split(',').map(number).collect();
    let mut numbers = numbers.ok_or("it should be numbers from 1, such as 1,2,4, or auto")?;
    if let Some(twice) = first_repeated(&numbers) {
        return Err(format!("{twice} is there twice"));
    }
    numbers.sort_unstable();
    Ok(RankList::Of(numbers))
}

fn parse_key(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("a key is empty".into()) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn long_help() {
        insta::assert_snapshot!(Args::command().render_long_help());
    }

    #[test]
    fn numbers_of_ranks_are_sorted() {
        assert_eq!(parse_ranks("4, 1,2"), Ok(RankList::Of(vec![1, 2, 4])));
        assert_eq!(parse_ranks("auto"), Ok(RankList::Auto));
        for text in ["", "0", "1,", "-1", "1-4", "two"] {
            assert!(parse_ranks(text).unwrap_err().contains("such as 1,2,4, or auto"), "{text}");
        }
        assert_eq!(parse_ranks("1,2,1").unwrap_err(), "1 is there twice");
    }
}
