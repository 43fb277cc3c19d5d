//! The table, for people. Pure.

use std::fmt::Write;

use unicode_width::UnicodeWidthStr;

use super::cells::{Cell, Grid};
use super::figures::Figure;
use super::record::{Conditions, Row};
use super::summary::Summary;

/// Spaces between columns.
const GAP: usize = 2;
/// Follows the number of ranks where there are more ranks than devices.
const MARK: &str = "*";
const NOTHING: &str = "-";

/// The table with its caption and notes. `devices` are what each rank should have one of: `cores` or `GPUs`.
pub(super) fn table(
    conditions: &Conditions,
    grid: &Grid,
    figures: &[Figure],
    rows: &[Row],
    devices: &str,
) -> String {
    let mut text = format!("{}\n{}\n{}\n", conditions.command_line(), conditions.scaling, conditions.machine);
    if rows.is_empty() {
        return text + "no run has ended\n";
    }
    let head = header(grid, figures);
    let lines: Vec<Vec<String>> =
        std::iter::once(head).chain(rows.iter().map(|row| line(grid, figures, row))).collect();
    text += "\n";
    text += &aligned(&lines, grid.vary.len());
    let notes = notes(grid, figures, rows, devices);
    if !notes.is_empty() {
        text += "\n";
        text += &notes;
    }
    text
}

fn header(grid: &Grid, figures: &[Figure]) -> Vec<String> {
    let mut head: Vec<String> = grid.vary.iter().map(|vary| vary.flag.clone()).collect();
    head.push("ranks".to_owned());
    for figure in figures {
        head.push(figure.title.clone());
        head.extend(figure.percent.clone());
    }
    head.push("MiB a rank".to_owned());
    head
}

fn line(grid: &Grid, figures: &[Figure], row: &Row) -> Vec<String> {
    let mut line: Vec<String> = grid.vary.iter().map(|vary| row.vary[&vary.flag].clone()).collect();
    line.push(format!("{}{}", row.ranks, if row.oversubscribed { MARK } else { "" }));
    for figure in figures {
        let summary = row.figures.get(&figure.name);
        line.push(summary.map_or(NOTHING.to_owned(), |summary| value(figure, summary)));
        if figure.percent.is_some() {
            let percent = summary.and_then(|summary| summary.percent);
            line.push(percent.map_or(NOTHING.to_owned(), show_percent));
        }
    }
    let known = row.peak_rss_mib.iter().flatten();
    line.push(match (known.clone().min(), known.max()) {
        (Some(low), Some(high)) if low == high => low.to_string(),
        (Some(low), Some(high)) => format!("{low}–{high}"),
        _ => NOTHING.to_owned(),
    });
    if row.failed == row.runs {
        line[grid.vary.len() + 1] = format!("failed ({})", row.exit_code.unwrap_or_default());
    }
    line
}

/// The median, and the lowest and highest value if they differ; only these two if the values are of ranks.
fn value(figure: &Figure, summary: &Summary) -> String {
    let show = |value: f64| {
        if figure.is_share { format!("{:.1}%", 100.0 * value) } else { significant(value) }
    };
    let [median, low, high] = [summary.median, summary.min, summary.max].map(show);
    match (low == high, figure.is_of_ranks()) {
        (true, _) => median,
        (false, true) => format!("{low}–{high}"),
        (false, false) => format!("{median} ({low}–{high})"),
    }
}

fn show_percent(percent: f64) -> String {
    if percent < 10.0 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

/// A number with four significant digits, or all digits of its integral part.
pub(super) fn significant(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude > 0.0 && !(1e-3..1e12).contains(&magnitude) {
        return format!("{value:.3e}");
    }
    let decimals = match magnitude {
        1000.0.. => 0,
        100.0.. => 1,
        10.0.. => 2,
        1.0.. => 3,
        _ => 4,
    };
    // An integer, such as a number of megabytes, has no decimals to show.
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.decimals$}") }
}

/// Lines of columns: the first `names` columns begin at the same place, all others end there.
fn aligned(lines: &[Vec<String>], names: usize) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|word| word.width()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for line in lines {
        let mut padded = String::new();
        for (column, (word, width)) in line.iter().zip(&widths).enumerate() {
            let space = " ".repeat(width - word.width());
            let gap = if column == 0 { "" } else { &" ".repeat(GAP) };
            padded += gap;
            padded += &if column < names { format!("{word}{space}") } else { format!("{space}{word}") };
        }
        text += padded.trim_end();
        text.push('\n');
    }
    text
}

/// What a reader must know about the rows.
fn notes(grid: &Grid, figures: &[Figure], rows: &[Row], devices: &str) -> String {
    let mut notes = String::new();
    let mut note = |text: String| _ = writeln!(notes, "{text}");
    let samples =
        |figure: &Figure| rows.iter().filter_map(|row| Some(row.figures.get(&figure.name)?.samples)).max();
    if figures.iter().any(|figure| !figure.is_of_ranks() && samples(figure) > Some(1)) {
        note(
            "median (lowest–highest): a value from each run, or from each of its epochs after the first if they are listed"
                .to_owned(),
        );
    }
    if let Some(base) = grid.ranks.first().filter(|base| **base > 1)
        && figures.iter().any(|figure| figure.percent.is_some())
    {
        note(format!("% of {base} ranks"));
    }
    let is_missing = |figure: &&Figure| !rows.iter().any(|row| row.figures.contains_key(&figure.name));
    if rows.iter().any(|row| row.failed < row.runs) {
        for figure in figures.iter().filter(is_missing) {
            note(format!("no run has a number at the key {} of its last JSON object", figure.name));
        }
    }
    if rows.iter().any(|row| row.oversubscribed) {
        note(format!("{MARK} more ranks than {devices}: these figures say nothing about scaling"));
    }
    for row in rows.iter().filter(|row| row.failed > 0) {
        let values = grid.vary.iter().map(|vary| row.vary[&vary.flag].clone()).collect();
        let name = grid.name(&Cell { ranks: row.ranks, values });
        let what = match (row.failed, row.runs) {
            (1, 1) => "failed".to_owned(),
            (failed, runs) => format!("failed in {failed} of {runs} runs"),
        };
        note(format!("{name} {what}: {}", row.error.as_deref().unwrap_or("no error")));
    }
    notes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::cells::Scaling;
    use super::super::figures::choose;
    use super::super::record::Run;
    use super::super::summary::summarise;
    use super::super::summary::tests::{failure, grid, run};
    use super::*;

    fn text(grid: &Grid, keys: &[&str], runs: &[Run]) -> String {
        let conditions = Conditions {
            command: vec!["train_mnist".into(), "--epochs=3".into()],
            scaling: grid.scaling.to_string(),
            launch_options: Vec::new(),
            machine: "a processor, 2 cores".into(),
        };
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let figures = choose(&keys, runs);
        table(&conditions, grid, &figures, &summarise(grid, &figures, runs), "cores")
    }

    #[test]
    fn a_training() {
        let result = |train: f64, test: f64, communication| {
            json!({
                "images_per_s": 60_000.0 / train, "communication": communication,
                "epochs_train_s": [9.0, train, train + 0.01], "epochs_test_s": [9.0, test, test],
            })
        };
        let (shared, host) = ([("--placement", "shared")], [("--placement", "host")]);
        let runs = [
            run(1, &shared, 1, result(7.234, 0.412, None)),
            run(2, &shared, 1, result(3.902, 0.231, Some(0.04))),
            run(4, &shared, 1, result(2.311, 0.242, Some(0.16))),
            run(1, &host, 1, result(7.348, 0.415, None)),
            failure(2, &host, "rank 1 exited with code 3: no memory"),
            run(4, &host, 1, result(2.208, 0.143, Some(0.12))),
            Run { repeat: 2, ..failure(4, &host, "rank 0 was killed by SIGKILL") },
        ];
        let grid = grid(&[1, 2, 4], &["--placement=shared,host"], Scaling::Strong("--batch".into()));
        insta::assert_snapshot!(text(&grid, &[], &runs));
    }

    #[test]
    fn any_program() {
        let runs =
            [run(2, &[], 1, json!({"loss": 0.00001, "a_s": 3})), run(4, &[], 1, json!({"a_s": 1234.5}))];
        let grid = grid(&[2, 4, 8], &[], Scaling::Weak);
        insta::assert_snapshot!(text(&grid, &["loss", "a_s"], &runs));
        insta::assert_snapshot!(text(&grid, &[], &runs[..1]), @r"
        train_mnist --epochs=3
        weak scaling: the same work for each rank
        a processor, 2 cores

        ranks  wall s     %  MiB a rank
            2       1  100%       40–41

        % of 2 ranks
        ");
        assert!(text(&grid, &[], &[]).ends_with("2 cores\nno run has ended\n"));
    }

    /// As with the memory of processes, a median over ranks would say nothing.
    #[test]
    fn values_of_ranks_have_no_median() {
        let runs = [
            run(1, &[], 1, json!({"rank_gpu_mib": [900]})),
            run(2, &[], 1, json!({"rank_gpu_mib": [900, 500]})),
        ];
        let shown = text(&grid(&[1, 2], &[], Scaling::AsGiven), &["rank_gpu_mib"], &runs);
        assert!(shown.contains("1           900") && shown.contains("2       500–900"), "{shown}");
        assert!(!shown.contains("median"), "{shown}");
    }

    #[test]
    fn numbers_have_four_digits() {
        let shown = [0.0, 0.0951, 1.0, 7.2344, 72.344, 723.44, 15500.4, 2e-5, -0.5, 3e15].map(significant);
        insta::assert_snapshot!(shown.join(" "), @"0 0.0951 1 7.234 72.34 723.4 15500 2.000e-5 -0.5000 3.000e15");
    }
}
