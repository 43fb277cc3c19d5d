//! `mgpurun sweep`: runs a program on several numbers of ranks, with several values of its options, and compares.
//!
//! | module | part |
//! |---|---|
//! | `cells` | arguments → cells, and the command line of each (pure) |
//! | `devices` | the machine, and how many ranks it has devices for |
//! | `measure` | runs a cell: a launch of this same executable |
//! | `reports` | what is kept of the output of a launch (pure) |
//! | `record` | the JSON lines |
//! | `results_file` | the file that a sweep is continued from |
//! | `figures` | the figures in the results (pure) |
//! | `summary` | runs → rows: medians, percentages (pure) |
//! | `table`, `plot` | rows → text, SVG (pure) |
//!
//! Runs are repeated in rounds, all cells once and then all cells again: when the machine becomes slower or faster, by
//! its temperature or by another user, that affects all cells alike.
//!
//! A run that fails is a result, too: the sweep goes on.

mod cells;
mod devices;
mod figures;
mod measure;
mod plot;
mod record;
mod reports;
mod results_file;
mod summary;
mod table;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Parser, ValueEnum};
use mgpu_control::process::{block_sigxfsz, reset_sigchld};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::interrupt::{ends_the_run, handled_signals};
use crate::plan::BackendChoice;
use crate::{exit_code, stdout};
use cells::{Cell, Grid, Scaling, Vary, first_repeated};
use devices::Devices;
use figures::Figure;
use measure::{Launcher, Measured, Request, read_signal};
use record::{Conditions, Record, Run};
use results_file::ResultsFile;

const AFTER_HELP: &str = "\
Examples:
  mgpurun sweep -n 1,2 --repeat 3 --strong -- train_mnist --json --batch 64 --epochs 2
  mgpurun sweep -n 1,2,4 --vary=--batch=32,64 --out sweep.jsonl --svg sweep.svg -- train_mnist --json
  mgpurun sweep -n 1,2,4 --keys loss,tokens_per_s -- python3 train.py

The figures of a program are in the last JSON object (one line) that it prints. If that object has images_per_s, as that
of train_mnist --json, the table has time of training and of testing an epoch, images/s, share of communication and GPU
memory. Any other program is compared by its wall time, or by --keys.

A percentage is the speed compared with the smallest number of ranks and the same options: the ratio of rates (keys such
as images_per_s, busbw_gbps), or the inverse ratio of times (keys such as train_s, p50_us, ms_per_step). With --weak
the ratio of times is multiplied by the ratio of ranks, since the work has grown as well.

Exit codes:
  0              all runs finished
  1              a run failed, or results could not be written
  2              wrong usage, or a launch that mgpurun refuses; nothing was measured
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
struct Args {
    /// Numbers of ranks, such as 1,2,4, or auto: powers of two up to the number of devices.
    #[arg(short = 'n', long = "ranks", value_name = "N,N|auto", default_value = "auto", value_parser = parse_ranks, allow_negative_numbers = true)]
    ranks: RankList,

    /// Vary an option of the program: --vary=--batch=32,64.
    ///
    /// May be repeated: all combinations are run. The value replaces the one in the program's command line; an option
    /// that is not there is added at the end. Without values (--vary=--overlap) the program is run without the option
    /// and with it. A comma within a value is written `\,`.
    #[arg(long, value_name = "FLAG=V,V", allow_hyphen_values = true)]
    vary: Vec<Vary>,

    /// Strong scaling: divide the program's --batch, or another option, by the number of ranks.
    ///
    /// The total work is then the same on any number of ranks. The command line of the program has the total.
    #[arg(long, value_name = "FLAG", num_args = 0..=1, require_equals = true, default_missing_value = "--batch")]
    strong: Option<String>,

    /// Weak scaling: each rank does the same work on any number of ranks.
    ///
    /// The command line is not changed. The percentages of times count the work of all ranks.
    #[arg(long)]
    weak: bool,

    /// Run every cell N times.
    ///
    /// All cells are run once, then all again. The table shows the median, and the lowest and highest value.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: u32,

    /// Keys of the program's last JSON object to compare, instead of the default.
    ///
    /// A dot enters an inner object: stats.loss. Of a list of numbers the first is left out as warm-up. wall_s is the
    /// wall time of the launch.
    #[arg(long, value_name = "KEY,KEY", value_delimiter = ',', value_parser = parse_key)]
    keys: Vec<String>,

    /// Backend of the launches: auto, nccl or cpu.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = BackendChoice::Auto, hide_possible_values = true)]
    backend: BackendChoice,

    /// Another option of mgpurun for all launches: --launch-option=--bind=core. May be repeated.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    launch_option: Vec<String>,

    /// Allow more ranks than GPUs (nccl) or cores (cpu).
    ///
    /// Without this it is an error, because such figures say nothing about scaling. They are marked in table, JSON and
    /// plot. On GPUs the launches get --share-gpus.
    #[arg(long)]
    oversubscribe: bool,

    /// Keep the results in FILE: one JSON object for each run, as soon as it has ended.
    #[arg(long, value_name = "FILE.jsonl")]
    out: Option<PathBuf>,

    /// Continue the sweep in --out.
    ///
    /// Runs that have finished are not repeated; those that failed are. Program, scaling, options of the launches and
    /// machine must be the same. More ranks, values and repeats may be added.
    #[arg(long, requires = "out")]
    resume: bool,

    /// Plot speed over ranks, beside the ideal line, to this file.
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,

    /// Print JSON lines instead of the table: the sweep, each run when it has ended, and each row of the table.
    #[arg(long)]
    json: bool,

    /// Print the command line of every run, and start nothing.
    #[arg(long)]
    dry_run: bool,

    /// The program and its arguments.
    ///
    /// It is found as by mgpurun. Everything after the program is passed to it.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM [ARGS]")]
    command: Vec<String>,
}

/// Numbers of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
enum RankList {
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

/// The command, with the arguments from `sweep` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let args = match stdout::parse::<Args>(arguments.iter().cloned())? {
        Ok(args) => args,
        Err(code) => return Ok(code),
    };
    let plan = match Plan::new(&args) {
        Ok(plan) => plan,
        Err((code, error)) => {
            say(&error);
            return Ok(ExitCode::from(code));
        }
    };
    if args.dry_run {
        return stdout::print(&plan.describe(), ExitCode::SUCCESS);
    }
    match Sweep::start(args, plan) {
        Ok(sweep) => sweep.run(),
        Err(error) => {
            say(&error.to_string());
            Ok(ExitCode::from(exit_code::LAUNCHER))
        }
    }
}

/// Prints a message for people. Ignores errors: standard error may be closed.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "mgpurun sweep: {text}");
}

/// What is to be measured.
#[derive(Debug)]
struct Plan {
    program: String,
    grid: Grid,
    repeat: u32,
    devices: Devices,
    launcher: Launcher,
    conditions: Conditions,
}

impl Plan {
    /// # Errors
    /// Exit code and text, if a cell cannot be run.
    fn new(args: &Args) -> Result<Self, (u8, String)> {
        let usage = |error: String| (exit_code::USAGE, error);
        let devices = Devices::detect(args.backend);
        let ranks = match &args.ranks {
            RankList::Auto => devices.rank_numbers().map_err(usage)?,
            RankList::Of(ranks) => ranks.clone(),
        };
        if let Some(most) =
            ranks.last().filter(|ranks| !args.oversubscribe && devices.are_fewer_than(**ranks))
        {
            return Err(usage(devices.refusal(*most)));
        }
        let (program, arguments) = args.command.split_first().expect("clap requires a program");
        let scaling = match &args.strong {
            Some(flag) => Scaling::Strong(flag.clone()),
            None if args.weak => Scaling::Weak,
            None => Scaling::AsGiven,
        };
        let flags: Vec<&str> = args.vary.iter().map(|vary| vary.flag.as_str()).collect();
        if let Some(twice) = first_repeated(&flags) {
            return Err(usage(format!(
                "--vary={twice} is there twice; write all values in one: {twice}=V,V"
            )));
        }
        let mut options = args.launch_option.clone();
        if args.backend != BackendChoice::Auto {
            let name = args.backend.to_possible_value().expect("no backend is hidden");
            options.extend(["--backend".to_owned(), name.get_name().to_owned()]);
        }
        let conditions = Conditions {
            command: args.command.clone(),
            scaling: scaling.to_string(),
            launch_options: options.clone(),
            machine: devices.describe(),
        };
        let executable = std::env::current_exe()
            .map_err(|error| (exit_code::LAUNCHER, format!("cannot find mgpurun itself: {error}")))?;
        let plan = Plan {
            program: program.clone(),
            grid: Grid { ranks, vary: args.vary.clone(), scaling, arguments: arguments.to_vec() },
            repeat: args.repeat,
            devices,
            launcher: Launcher { executable, options },
            conditions,
        };
        plan.check()?;
        Ok(plan)
    }

    /// Finds out before the first run what would make later ones impossible.
    fn check(&self) -> Result<(), (u8, String)> {
        let mut checked = Vec::new();
        for cell in self.grid.cells() {
            let command = self.command(&cell).map_err(|error| (exit_code::USAGE, error))?;
            // Launches differ in their number of ranks only: the program's options are its own business.
            if !checked.contains(&cell.ranks) {
                self.launcher.check(&self.request(&cell, &command))?;
                checked.push(cell.ranks);
            }
        }
        Ok(())
    }

    /// Program and arguments in a cell.
    fn command(&self, cell: &Cell) -> Result<Vec<String>, String> {
        let arguments = self.grid.arguments_of(cell)?;
        Ok(std::iter::once(self.program.clone()).chain(arguments).collect())
    }

    fn request<'a>(&self, cell: &Cell, command: &'a [String]) -> Request<'a> {
        let share_gpus = self.devices.are_gpus() && self.devices.are_fewer_than(cell.ranks);
        Request { ranks: cell.ranks, share_gpus, command }
    }

    /// All runs, in order.
    fn runs(&self) -> Vec<(u32, Cell)> {
        (1..=self.repeat)
            .flat_map(|repeat| self.grid.cells().into_iter().map(move |cell| (repeat, cell)))
            .collect()
    }

    /// The command lines of one round.
    fn describe(&self) -> String {
        let line = |cell: Cell| {
            let command = self.command(&cell).expect("it was checked");
            let words = self.launcher.words(&self.request(&cell, &command));
            let words: Vec<String> = words.iter().map(|word| crate::cli::quote(word)).collect();
            format!("mgpurun {}\n", words.join(" "))
        };
        self.grid.cells().into_iter().map(line).collect()
    }
}

/// A sweep that is running.
struct Sweep {
    args: Args,
    plan: Plan,
    file: Option<ResultsFile>,
    signals: SignalFd,
    /// Runs that have ended, in this sweep or the one that it continues.
    done: Vec<Run>,
    /// A file could not be written.
    has_lost: bool,
    /// The reader of standard output has not exited.
    has_reader: bool,
}

impl Sweep {
    fn start(args: Args, plan: Plan) -> Result<Self, Box<dyn std::error::Error>> {
        // If the parent of this process ignored SIGCHLD, the kernel would discard the exit statuses of launches.
        reset_sigchld()?;
        block_sigxfsz();
        let signals: SigSet = handled_signals().iter().filter(|signal| ends_the_run(*signal)).collect();
        signals.thread_block()?;
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let opened = args.out.as_ref().map(|path| ResultsFile::open(path, &plan.conditions, args.resume));
        let (file, done) = opened.transpose()?.map_or((None, Vec::new()), |(file, done)| (Some(file), done));
        let sweep = Sweep { args, plan, file, signals, done, has_lost: false, has_reader: true };
        sweep.check_done()?;
        Ok(sweep)
    }

    /// Every run in the results file must have a place in this table.
    fn check_done(&self) -> Result<(), String> {
        let cells: Vec<_> = self
            .plan
            .grid
            .cells()
            .iter()
            .map(|cell| (cell.ranks, summary::options(&self.plan.grid, cell)))
            .collect();
        let is_planned = |run: &&Run| {
            run.repeat <= self.plan.repeat
                && cells.iter().any(|(ranks, options)| *ranks == run.ranks && *options == run.vary)
        };
        let Some(other) = self.done.iter().find(|run| !is_planned(run)) else { return Ok(()) };
        let options: String = other.vary.iter().map(|(flag, value)| format!(" {flag}={value}")).collect();
        Err(format!(
            "--resume: the results have repeat {} of -n {}{options}, which this sweep has not; give the options of that \
             sweep (more ranks, values and repeats may be added), or choose another --out",
            other.repeat, other.ranks
        ))
    }

    /// What is known of a run before it.
    fn run_of(&self, repeat: u32, cell: &Cell) -> Run {
        Run {
            ranks: cell.ranks,
            vary: summary::options(&self.plan.grid, cell),
            repeat,
            oversubscribed: self.plan.devices.are_fewer_than(cell.ranks),
            command: Vec::new(),
            exit_code: exit_code::SUCCESS,
            error: None,
            wall_s: 0.0,
            peak_rss_mib: Vec::new(),
            result: None,
        }
    }

    fn run(mut self) -> Result<ExitCode, Box<dyn std::error::Error>> {
        if self.args.json {
            self.print(&Record::Sweep(self.plan.conditions.clone()))?;
        }
        let runs = self.plan.runs();
        let signal = self.measure_all(&runs)?;
        self.report()?;
        if let Some(signal) = signal {
            self.say_how_to_continue(runs.len());
            return Ok(ExitCode::from(exit_code::signalled(signal as i32)));
        }
        Ok(ExitCode::from(match self {
            Sweep { has_reader: false, .. } => exit_code::BROKEN_PIPE,
            Sweep { has_lost: true, .. } => exit_code::LAUNCHER,
            _ if self.done.iter().any(Run::failed) => exit_code::LAUNCHER,
            _ => exit_code::SUCCESS,
        }))
    }

    /// Makes the runs that have no result yet. Returns a signal that has interrupted them.
    fn measure_all(&mut self, runs: &[(u32, Cell)]) -> Result<Option<Signal>, Box<dyn std::error::Error>> {
        for ((repeat, cell), number) in runs.iter().zip(1..) {
            if let Some(signal) = read_signal(&self.signals) {
                return Ok(Some(signal));
            }
            if !self.has_reader {
                break;
            }
            let planned = self.run_of(*repeat, cell);
            if let Some(done) = self.done.iter().find(|run| run.is_same_run(&planned) && !run.failed()) {
                if self.args.json {
                    self.print(&Record::Run(done.clone()))?;
                }
                continue;
            }
            let name = self.plan.grid.name(cell);
            let repeats = if self.plan.repeat > 1 { format!(", repeat {repeat}") } else { String::new() };
            // The line is completed when the run has ended.
            let _ = write!(io::stderr(), "{number}/{}: {name}{repeats}: ", runs.len());
            if let Some(signal) = self.measure(planned, cell)? {
                let _ = writeln!(io::stderr(), "interrupted");
                return Ok(Some(signal));
            }
        }
        Ok(None)
    }

    /// Makes a run and keeps its result. Returns a signal that has ended it: an interrupted run has no result.
    fn measure(&mut self, planned: Run, cell: &Cell) -> Result<Option<Signal>, Box<dyn std::error::Error>> {
        let command = self.plan.command(cell)?;
        let request = self.plan.request(cell, &command);
        let Measured { exit_code, error, wall_s, peak_rss_mib, result, signal } =
            self.plan.launcher.measure(&request, &self.signals)?;
        if signal.is_some() {
            return Ok(signal);
        }
        let run = Run { command, exit_code, error, wall_s, peak_rss_mib, result, ..planned };
        self.done.retain(|earlier| !earlier.is_same_run(&run));
        self.done.push(run.clone());
        let _ = writeln!(io::stderr(), "{}", self.progress(&run));
        let record = Record::Run(run);
        if let Some(Err(error)) = self.file.as_mut().map(|file| file.append(&record)) {
            self.has_lost = true;
            say(&format!("{error}; the sweep goes on, but the file gets no further results"));
        }
        if self.args.json {
            self.print(&record)?;
        }
        Ok(None)
    }

    /// The result of a run in a few words.
    fn progress(&self, run: &Run) -> String {
        if let Some(error) = &run.error {
            return format!("failed with exit code {}: {error}", run.exit_code);
        }
        let figures = self.figures();
        let first = figures.iter().find(|figure| figure.percent.is_some() && figure.name != "wall_s");
        let value = first.and_then(|figure| Some((figure, *figure.samples(run).first()?)));
        let value = value.map(|(figure, value)| format!("{} {}, ", table::significant(value), figure.title));
        format!("{}wall {} s", value.unwrap_or_default(), table::significant(run.wall_s))
    }

    fn figures(&self) -> Vec<Figure> {
        figures::choose(&self.args.keys, &self.done)
    }

    fn print(&mut self, record: &Record) -> Result<(), Box<dyn std::error::Error>> {
        self.print_text(&(serde_json::to_string(record)? + "\n"))
    }

    fn print_text(&mut self, text: &str) -> Result<(), Box<dyn std::error::Error>> {
        self.has_reader = self.has_reader && stdout::print(text, ExitCode::SUCCESS)? == ExitCode::SUCCESS;
        Ok(())
    }

    /// Draws the plot, and prints the table.
    fn report(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let (grid, figures, devices) = (&self.plan.grid, self.figures(), self.plan.devices.name());
        let rows = summary::summarise(grid, &figures, &self.done);
        if let Some(path) = &self.args.svg {
            let svg = plot::plot(&self.plan.conditions.command.join(" "), grid, &figures, &rows, devices);
            if let Err(error) = plot::write(path, &svg) {
                self.has_lost = true;
                say(&format!("cannot write --svg {}: {error}", path.display()));
            }
        }
        if self.args.json {
            return rows.into_iter().try_for_each(|row| self.print(&Record::Row(row)));
        }
        let text = table::table(&self.plan.conditions, grid, &figures, &rows, devices);
        self.print_text(&text)
    }

    fn say_how_to_continue(&self, runs: usize) {
        let done = self.done.iter().filter(|run| !run.failed()).count();
        let how = match &self.args.out {
            Some(_) if self.args.resume => "repeat the same command to continue",
            Some(_) => "repeat the same command with --resume to continue",
            None => "to continue a sweep, give --out FILE from its start",
        };
        say(&format!("interrupted after {done} of {runs} runs; {how}"));
    }
}
