//! `mgpurun top`: a live view of this user's runs in the terminal.
//!
//! | module | job |
//! |---|---|
//! | `terminal` | the terminal: raw mode, size, and the backend that ratatui draws on |
//! | `keys` | bytes → keys (pure) |
//! | `state` | (state, key) → state and command (pure) |
//! | `view` | snapshot + state → cells (pure) |
//! | `stop` | asks a run to end |
//!
//! It reads the progress pages as `mgpurun ps` does, and needs no help of the launcher. Only the core of ratatui is used,
//! with a backend of a few escape sequences.

mod keys;
mod state;
mod stop;
mod terminal;
mod view;

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use mgpu_control::progress::{ProgressPage, RunInfo, now};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use ratatui_core::terminal::Terminal;

use crate::cli::parse_seconds;
use crate::output::TailReader;
use crate::status::gpus::{GpuSnapshot, Gpus};
use crate::status::runs;
use crate::status::snapshot::RunSnapshot;
use crate::status::totals::{SAMPLE_INTERVAL, Totals};
use crate::status::{Histories, Row};
use crate::stdout;
use keys::keys;
use state::{Command, Shown, State};
use terminal::Screen;

/// Watch the runs of this user live: speed, communication, stragglers, memory, GPUs.
///
/// Communication and waiting times are sampled 20 times a second and shown for the last 3 seconds. `late` is the mean
/// number of ranks that wait for this one. Keys: arrows or j and k select a rank, Enter shows its threads and last
/// collectives, s sorts, r reverses, Tab shows the next run, x asks the run to end, q quits.
///
/// To start a program named top: mgpurun -- top
#[derive(Debug, Parser)]
#[command(name = "mgpurun top", bin_name = "mgpurun top", max_term_width = 100)]
pub(crate) struct Args {
    /// Show the run of this launcher first, by the process id that `mgpurun ps` shows.
    #[arg(value_name = "LAUNCHER")]
    launcher: Option<u32>,

    /// Seconds between two updates.
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = parse_seconds)]
    interval: Duration,
}

/// How often runs are looked for.
const SEARCH_INTERVAL: Duration = Duration::from_secs(2);

/// The command, with the arguments from `top` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    let args: Args = match stdout::parse(arguments.iter().cloned())? {
        Ok(args) => args,
        Err(code) => return Ok(code),
    };
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err("top needs a terminal for input and output; `mgpurun ps` prints the runs once".into());
    }
    // Before the terminal is changed, so that a signal cannot leave it changed.
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block()?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let mut watched = Watched::search(args.launcher)?;
    let mut gpus = Gpus::default();
    let mut terminal = Terminal::new(Screen::open()?)?;
    let mut state = State::default();
    let interval = args.interval.max(SAMPLE_INTERVAL);
    let mut next_snapshot = Instant::now();
    // A snapshot of many ranks takes too long to be taken for each key.
    let (mut runs, mut of_gpus) = (Vec::new(), Vec::new());
    let mut was_pressed = false;
    loop {
        let now = Instant::now();
        watched.sample(now);
        let is_due = now >= next_snapshot;
        if is_due {
            watched.search_if_due(now);
            runs = watched.snapshots();
            of_gpus = gpus.of_ranks(&runs);
            state.settle(&runs);
            next_snapshot = now + interval;
        }
        if is_due || was_pressed {
            let shown = watched.shown(&state, &runs, &of_gpus);
            terminal.draw(|frame| view::draw(&shown, &state, frame.buffer_mut()))?;
        }
        let Some(bytes) = read_input(&signals, SAMPLE_INTERVAL)? else { break };
        let pressed = keys(&bytes);
        was_pressed = !pressed.is_empty();
        for key in pressed {
            match state.handle(key, &runs) {
                Some(Command::Quit) => return Ok(ExitCode::SUCCESS),
                Some(Command::Stop(launcher)) => {
                    state.told = Some(stop::stop(launcher, &watched.inodes_of(launcher)));
                }
                None => {}
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for input. `None` at its end, or after a signal that ends this program.
fn read_input(signals: &SignalFd, timeout: Duration) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
    let stdin = std::io::stdin();
    let mut fds =
        [PollFd::new(stdin.as_fd(), PollFlags::POLLIN), PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(timeout.as_millis()).unwrap_or(PollTimeout::MAX);
    if poll(&mut fds, timeout).is_err() {
        return Ok(Some(Vec::new()));
    }
    let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
    if is_ready(&fds[1]) {
        return Ok(None);
    }
    if !is_ready(&fds[0]) {
        return Ok(Some(Vec::new()));
    }
    let mut bytes = [0; 256];
    // Not through the buffer of the standard library, which poll does not know.
    match nix::unistd::read(stdin.as_fd(), &mut bytes) {
        Ok(0) => Ok(None),
        Ok(count) => Ok(Some(bytes[..count].to_vec())),
        Err(nix::errno::Errno::EINTR | nix::errno::Errno::EAGAIN) => Ok(Some(Vec::new())),
        Err(errno) => Err(format!("cannot read the keyboard: {errno}").into()),
    }
}

/// A run. Two may be described by the same words, so the inode of its page identifies it.
struct Run {
    inode: u64,
    info: RunInfo,
    page: ProgressPage,
    totals: Totals,
}

/// The runs, the first of which is shown first.
struct Watched {
    /// The run of this launcher comes first.
    preferred: Option<u32>,
    runs: Vec<Run>,
    /// The last lines of the ranks of these launchers. They stay readable when the launcher has ended.
    last_lines: BTreeMap<u32, TailReader>,
    next_sample: Instant,
    next_search: Instant,
}

impl Watched {
    fn search(preferred: Option<u32>) -> Result<Self, Box<dyn Error>> {
        runs::check_proc()?;
        let now = Instant::now();
        let mut watched = Watched {
            preferred,
            runs: Vec::new(),
            last_lines: BTreeMap::new(),
            next_sample: now,
            next_search: now,
        };
        watched.search_if_due(now);
        match preferred {
            Some(launcher) if !watched.runs.iter().any(|run| run.info.launcher == launcher) => {
                Err(format!("no run of launcher {launcher}; `mgpurun ps` shows those of this user").into())
            }
            _ => Ok(watched),
        }
    }

    /// Finds new runs, and drops those whose launcher is gone, unless it is the last one: its end stays visible.
    fn search_if_due(&mut self, at: Instant) {
        if at < self.next_search {
            return;
        }
        self.next_search = at + SEARCH_INTERVAL;
        let found = runs::identified_pages().map(|(inode, page)| (inode, page.run(), page));
        let mut found: Vec<(u64, RunInfo, ProgressPage)> = found.collect();
        found.sort_by_key(|(inode, run, _)| (Some(run.launcher) != self.preferred, run.started, *inode));
        if found.is_empty() {
            return;
        }
        let mut known = std::mem::take(&mut self.runs);
        for (inode, info, page) in found {
            let totals = match known.iter().position(|run| run.inode == inode) {
                Some(index) => known.swap_remove(index).totals,
                None => Totals::new(page.world_size()),
            };
            self.runs.push(Run { inode, info, page, totals });
        }
        let launchers: Vec<u32> = self.runs.iter().map(|run| run.info.launcher).collect();
        self.last_lines.retain(|launcher, _| launchers.contains(launcher));
        for launcher in &launchers {
            // The ranks of several jobs are not told apart there.
            let is_only = launchers.iter().filter(|other| *other == launcher).count() == 1;
            if is_only && !self.last_lines.contains_key(launcher) {
                let found = runs::last_lines(*launcher);
                found.into_iter().for_each(|reader| drop(self.last_lines.insert(*launcher, reader)));
            }
        }
    }

    fn sample(&mut self, at: Instant) {
        if at < self.next_sample {
            return;
        }
        self.next_sample = at + SAMPLE_INTERVAL;
        self.runs.iter_mut().for_each(|run| run.totals.sample(&run.page, at));
    }

    fn snapshots(&self) -> Vec<RunSnapshot> {
        self.runs.iter().map(|run| RunSnapshot::of(None, &run.page, &run.totals)).collect()
    }

    /// The inodes of the pages of a launcher.
    fn inodes_of(&self, launcher: u32) -> Vec<u64> {
        let own = self.runs.iter().filter(|run| run.info.launcher == launcher);
        own.map(|run| run.inode).collect()
    }

    /// What is drawn.
    fn shown<'a>(&self, state: &State, runs: &'a [RunSnapshot], gpus: &'a [GpuSnapshot]) -> Shown<'a> {
        let shown = self.runs.get(state.run);
        let page = shown.map(|run| &run.page);
        let tails = shown.and_then(|run| self.last_lines.get(&run.info.launcher));
        let last_lines = tails.map(|tails| tails.lines(state.rank)).unwrap_or_default();
        let details = page.zip(state.opened()).filter(|(page, rank)| *rank < page.world_size());
        let details = details.map(|(page, rank)| {
            let ended = page.process_end_description(rank);
            let row = Row::of(page, rank, page.process(rank), ended);
            let histories = Histories::of(page);
            let parted = histories.divergence(now());
            row.thread_lines().into_iter().chain(parted).chain(histories.newest_first(rank)).collect()
        });
        Shown { runs, gpus, details, last_lines }
    }
}
