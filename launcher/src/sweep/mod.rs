//! `mgpurun sweep`: runs a program on several numbers of ranks, with several values of its options, and compares.
//!
//! | module | part |
//! |---|---|
//! | `args` | the command line |
//! | `plan` | arguments + machine → the runs to make |
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

mod args;
mod cells;
mod devices;
mod figures;
mod measure;
mod plan;
mod plot;
mod record;
mod reports;
mod results_file;
mod summary;
mod table;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use mgpu_control::process::{block_sigxfsz, reset_sigchld};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::interrupt::{ends_the_run, handled_signals};
use crate::{exit_code, stdout};
pub(crate) use args::Args;
use cells::Cell;
use figures::Figure;
use measure::{Measured, read_signal};
use plan::Plan;
use record::{Record, Run};
use results_file::ResultsFile;

/// The command, with the arguments from `sweep` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let args = match stdout::parse::<Args>(arguments.iter().cloned())? {
        Ok(args) => args,
        Err(code) => return Ok(code),
    };
    crate::cli::check_one_node("a sweep")?;
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
        if let Some(path) = &args.svg {
            plot::check(path).map_err(|error| format!("cannot write --svg {}: {error}", path.display()))?;
        }
        let signals: SigSet = handled_signals(&[])
            .iter()
            .filter(|signal| ends_the_run(*signal) || *signal == Signal::SIGUSR1)
            .collect();
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
        let measured = self.measure_all(&runs);
        // What there is, also after an error.
        self.report()?;
        if let Some(signal) = measured? {
            self.say_how_to_continue(runs.len());
            return Ok(ExitCode::from(match signal {
                Signal::SIGUSR1 => exit_code::STOPPED,
                signal => exit_code::signalled(signal as i32),
            }));
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
            return format!("failed ({}): {error}", run.exit_code);
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
            let svg = plot::plot(&self.plan.conditions.command_line(), grid, &figures, &rows, devices);
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
