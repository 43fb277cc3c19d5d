//! Draws a snapshot. Pure: what is drawn depends on the snapshot, the state and the size only. Fits 80 columns and 24
//! rows; more columns show more of the last action, more rows more ranks.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};

use super::state::{Shown, State};
use crate::ranks::list as rank_list;
use crate::status::gpus::GpuSnapshot;
use crate::status::runs::duration;
use crate::status::snapshot::{RankSnapshot, RunSnapshot};

/// Most lines about GPUs.
const MAX_GPUS: usize = 8;

/// The columns of the table: title and width. The last one takes the rest.
const COLUMNS: [(&str, usize); 9] = [
    ("rank", 5),
    ("state", 8),
    ("step", 7),
    ("step/s", 6),
    ("comm", 5),
    ("late", 5),
    ("memory", 7),
    ("waits for", 9),
    ("last seen", usize::MAX),
];

/// Numbers are aligned to the right, texts to the left.
const IS_TEXT: [bool; 9] = [false, true, false, false, false, false, false, true, true];

const PLAIN: Style = Style::new();
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const SELECTED: Style = Style::new().add_modifier(Modifier::REVERSED);
const LATE: Style = Style::new().fg(Color::Yellow);
const FAILED: Style = Style::new().fg(Color::Red);

/// Draws all of it.
pub(super) fn draw(shown: &Shown<'_>, state: &State, buffer: &mut Buffer) {
    let mut page = Page { area: buffer.area, buffer, row: 0, reserved: 0 };
    let Some(run) = shown.runs.get(state.run) else {
        page.line("no run of this user", BOLD);
        page.footer("q quit", PLAIN);
        return;
    };
    head(&mut page, run, state, shown.runs.len());
    for gpu in shown.gpus.iter().take(MAX_GPUS.min(page.area.height as usize / 4)) {
        page.line(&gpu_line(gpu), PLAIN);
    }
    page.row += 1;
    let lines = last_lines(shown, state, page.rows_left());
    page.reserved = lines.len();
    match &shown.details {
        Some(lines) => details(&mut page, run, state, lines),
        None => table(&mut page, run, state),
    }
    page.reserved = 0;
    let first = page.area.height.saturating_sub(1 + lines.len() as u16);
    for (row, (line, style)) in (first..).zip(&lines) {
        page.put(row, line, *style);
    }
    let keys = match (&state.asks_to_stop, &state.told) {
        (Some(launcher), _) => (format!("end the run of launcher {launcher}? y yes, any other key no"), BOLD),
        (None, Some(told)) => (told.clone(), BOLD),
        (None, None) => {
            let (order, reverse) =
                (state.order.name(), if state.is_reversed { "reversed" } else { "reverse" });
            let next = if shown.runs.len() > 1 { "  Tab next run" } else { "" };
            (format!("q quit  ↑↓ select  Enter look  s sort: {order}  r {reverse}  x end{next}"), DIM)
        }
    };
    page.footer(&keys.0, keys.1);
}

/// Lines from the top of the screen.
struct Page<'a> {
    area: Rect,
    buffer: &'a mut Buffer,
    row: u16,
    /// Rows above the footer that are used for something else.
    reserved: usize,
}

impl Page<'_> {
    /// Rows that are free above the footer.
    fn rows_left(&self) -> usize {
        usize::from(self.area.height.saturating_sub(self.row)).saturating_sub(1 + self.reserved)
    }

    fn line(&mut self, text: &str, style: Style) {
        if self.rows_left() > 0 {
            self.put(self.row, text, style);
            self.row += 1;
        }
    }

    fn footer(&mut self, text: &str, style: Style) {
        if self.area.height > 0 {
            self.put(self.area.height - 1, text, style);
        }
    }

    fn put(&mut self, row: u16, text: &str, style: Style) {
        let width = usize::from(self.area.width);
        self.buffer.set_stringn(self.area.x, self.area.y + row, text, width, style);
    }
}

fn head(page: &mut Page<'_>, run: &RunSnapshot, state: &State, runs: usize) {
    let which = if runs > 1 { format!(" (run {} of {runs})", state.run + 1) } else { String::new() };
    page.line(&format!("launcher {}{which}: {}", run.launcher, run.program), BOLD);
    let up = run.ranks.iter().filter(|rank| rank.is_up).count();
    let mut facts = vec![
        format!("{up} of {} ranks up", run.ranks.len()),
        duration(std::time::Duration::from_secs_f64(run.age_s.max(0.0))),
        format!("{} steps/s", number(run.steps_per_s())),
    ];
    facts.extend(run.samples_per_s().map(|samples| format!("{} samples/s", number(samples))));
    facts.push(format!("{} in communication", percent(mean(run, |rank| rank.rates.communicating))));
    if run.restarts > 0 {
        facts.push(format!("restarted {} times", run.restarts));
    }
    page.line(&facts.join(", "), PLAIN);
    match run.straggler() {
        None => page.line("no rank is waited for", DIM),
        Some(late) => page.line(
            &format!(
                "rank {} is waited for: {} ranks on average, {}",
                late.rank,
                number(late.rates.waited_for),
                late.doing
            ),
            LATE,
        ),
    }
}

fn mean(run: &RunSnapshot, value: impl Fn(&RankSnapshot) -> f64) -> f64 {
    let up: Vec<f64> = run.ranks.iter().filter(|rank| rank.is_up).map(value).collect();
    if up.is_empty() { 0.0 } else { up.iter().sum::<f64>() / up.len() as f64 }
}

fn gpu_line(gpu: &GpuSnapshot) -> String {
    let memory = gpu.used_bytes.zip(gpu.total_bytes);
    let facts = [
        gpu.utilization.map(|share| format!("{} busy", percent(share))),
        memory.map(|(used, total)| format!("{} of {}", bytes(used), bytes(total))),
        gpu.temperature_c.map(|degrees| format!("{degrees} °C")),
        (!gpu.ranks.is_empty()).then(|| format!("ranks {}", rank_list(&gpu.ranks))),
    ];
    let facts: Vec<String> = facts.into_iter().flatten().collect();
    format!("GPU {} {}: {}", gpu.index, gpu.name, facts.join(", "))
}

fn table(page: &mut Page<'_>, run: &RunSnapshot, state: &State) {
    page.line(&cells(COLUMNS.map(|(title, _)| title.to_owned())), BOLD);
    let (sorted, room) = (state.sorted(run), page.rows_left());
    let place = sorted.iter().position(|rank| rank.rank == state.rank).unwrap_or_default();
    // The selected rank is always visible.
    let first = (place + 1).saturating_sub(room);
    let straggler = run.straggler().map(|rank| rank.rank);
    for rank in sorted.into_iter().skip(first).take(room) {
        let style = match () {
            () if rank.rank == state.rank => SELECTED,
            () if !rank.is_up => FAILED,
            () if Some(rank.rank) == straggler => LATE,
            () => PLAIN,
        };
        page.line(&row(rank), style);
    }
}

fn row(rank: &RankSnapshot) -> String {
    let known = |text: String| if rank.has_joined { text } else { "-".into() };
    let state = match &rank.host {
        Some(host) => host.clone(),
        None if !rank.is_up => "ended".into(),
        None => rank.state.clone(),
    };
    // The step has a column of its own.
    let place = format!("in step {}, ", rank.step);
    let doing = rank.doing.strip_prefix(&place).unwrap_or(&rank.doing);
    cells([
        rank.rank.to_string(),
        state,
        known(rank.step.to_string()),
        known(number(rank.rates.steps)),
        known(percent(rank.rates.communicating)),
        known(number(rank.rates.waited_for)),
        rank.resident_bytes.map_or_else(|| "-".into(), bytes),
        rank.waits_for.map_or_else(|| "-".into(), |peer| format!("rank {peer}")),
        if rank.is_up { doing.to_owned() } else { rank.state.clone() },
    ])
}

/// A line of the table.
fn cells(cells: [String; 9]) -> String {
    let mut line = String::new();
    for ((cell, (_, width)), is_text) in cells.iter().zip(COLUMNS).zip(IS_TEXT) {
        let cell: String = cell.chars().take(width).collect();
        match (is_text, width) {
            (_, usize::MAX) => line += &cell,
            (true, _) => line += &format!("{cell:<width$} "),
            (false, _) => line += &format!("{cell:>width$} "),
        }
    }
    line
}

/// The last lines of the selected rank below a title: a third of the rows at most.
fn last_lines(shown: &Shown<'_>, state: &State, rows: usize) -> Vec<(String, Style)> {
    let room = (rows / 3).min(shown.last_lines.len() + 1);
    if room < 2 || shown.last_lines.is_empty() {
        return Vec::new();
    }
    let lines = &shown.last_lines[shown.last_lines.len() - (room - 1)..];
    let title = (format!("last lines of rank {}", state.rank), BOLD);
    [title].into_iter().chain(lines.iter().map(|line| (line.clone(), PLAIN))).collect()
}

fn details(page: &mut Page<'_>, run: &RunSnapshot, state: &State, lines: &[String]) {
    let Some(rank) = run.ranks.iter().find(|rank| rank.rank == state.rank) else { return };
    let host = rank.host.as_ref().map_or_else(String::new, |host| format!(" on host {host}"));
    page.line(&format!("rank {}, process {}{host}: {}", rank.rank, rank.pid, rank.state), BOLD);
    page.line(&format!("{}, {:.1} s ago", rank.doing, rank.idle_s), PLAIN);
    let memory = rank.resident_bytes.map_or_else(|| "unknown".into(), bytes);
    let cores = rank.cpu_s.map_or_else(|| "unknown".into(), |seconds| format!("{seconds:.1} s"));
    page.line(&format!("memory {memory}, time of cores {cores}"), PLAIN);
    lines.iter().for_each(|line| page.line(line, PLAIN));
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Three digits or more: "0.25", "12.5", "1834".
fn number(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        small if small < 10.0 => format!("{small:.2}"),
        middle if middle < 100.0 => format!("{middle:.1}"),
        large => format!("{large:.0}"),
    }
}

fn bytes(count: u64) -> String {
    match count {
        0..1_000_000_000 => format!("{:.0} MB", count as f64 / 1e6),
        _ => format!("{:.1} GB", count as f64 / 1e9),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::status::totals::{RankRates, RankTotals};

    /// A run in which rank 1 is late.
    pub(in super::super) fn run(launcher: u32, ranks: u32) -> RunSnapshot {
        let rank = |rank: u32| {
            let is_late = rank == 1;
            RankSnapshot {
                rank,
                pid: 1000 + rank,
                host: None,
                state: if is_late { "running" } else { "sleeping" }.into(),
                is_up: true,
                has_joined: true,
                doing: format!(
                    "in step 120, {} all_reduce #367, 4.2 MB",
                    if is_late { "after" } else { "in" }
                ),
                step: 120,
                idle_s: 0.2,
                waits_for: (!is_late).then_some(1),
                resident_bytes: Some(70_000_000 + u64::from(rank) * 1_000_000_000),
                cpu_s: Some(12.5),
                totals: RankTotals { samples: u64::from(rank == 0) * 3840, ..RankTotals::default() },
                rates: RankRates {
                    steps: 12.25,
                    samples: if rank == 0 { 784.0 } else { 0.0 },
                    collectives: 40.0,
                    communicating: if is_late { 0.08 } else { 0.61 },
                    waited_for: if is_late { f64::from(ranks - 1) * 0.55 } else { 0.0 },
                },
            }
        };
        RunSnapshot {
            job: None,
            launcher,
            program: "train_mnist --net ensemble2400 --epochs 20 --checkpoint-dir /a/long/folder".into(),
            restarts: 0,
            age_s: 200.0,
            ranks: (0..ranks).map(rank).collect(),
        }
    }

    fn drawn(shown: &Shown<'_>, state: &State, (width, height): (u16, u16)) -> String {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        draw(shown, state, &mut buffer);
        let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
        (0..height).map(|y| format!("{}\n", line(y).trim_end())).collect()
    }

    fn gpu() -> GpuSnapshot {
        GpuSnapshot {
            index: 0,
            uuid: "GPU-1".into(),
            name: "NVIDIA H100".into(),
            utilization: Some(0.93),
            used_bytes: Some(21_000_000_000),
            total_bytes: Some(85_000_000_000),
            temperature_c: Some(61),
            ranks: vec![0, 1],
        }
    }

    #[test]
    fn ranks_fit_a_small_terminal() {
        let mut runs = [run(42, 4)];
        runs[0].ranks[3].is_up = false;
        runs[0].ranks[3].state = "was killed by SIGKILL".into();
        let gpus = [gpu()];
        let last_lines = (1..=10).map(|line| format!("    epoch {line}: loss 0.{line}")).collect();
        let shown = Shown { runs: &runs, gpus: &gpus, details: None, last_lines };
        insta::assert_snapshot!(drawn(&shown, &State::default(), (80, 24)));
    }

    #[test]
    fn the_selected_one_of_many_ranks_is_visible() {
        let runs = [run(42, 100), run(43, 1)];
        let shown = Shown { runs: &runs, gpus: &[], details: None, last_lines: Vec::new() };
        let state = State { rank: 77, ..State::default() };
        let text = drawn(&shown, &state, (80, 24));
        assert!(text.lines().any(|line| line.starts_with("   77 sleeping")), "{text}");
        assert!(text.contains("(run 1 of 2)") && text.ends_with("Tab next run\n"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn a_rank_is_shown_in_detail() {
        let (runs, lines) = ([run(42, 2)], vec!["train: sleeping".to_owned(), "x\x1b[2J\n".to_owned()]);
        let shown = Shown { runs: &runs, gpus: &[], details: Some(lines), last_lines: Vec::new() };
        let text = drawn(&shown, &State { rank: 1, asks_to_stop: Some(42), ..State::default() }, (80, 12));
        assert!(text.contains("\nrank 1, process 1001: running\n") && text.contains("\ntrain: sleeping\n"));
        // Escape sequences in names do not reach the terminal.
        assert!(text.contains("\nx[2J\n") && text.ends_with("y yes, any other key no\n"), "{text}");
    }

    #[test]
    fn no_size_and_no_run_are_too_small() {
        let runs = [run(42, 3)];
        for size in [(0, 0), (1, 1), (3, 2), (10, 5), (300, 1)] {
            for runs in [&runs[..], &[]] {
                let details = Some(vec!["a line".to_owned()]);
                for details in [details, None] {
                    let last_lines = vec!["a line".to_owned(); 3];
                    drawn(&Shown { runs, gpus: &[gpu()], details, last_lines }, &State::default(), size);
                }
            }
        }
    }
}
