//! Runs → rows: median, lowest and highest value, and the percentage of the smallest number of ranks. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::cells::{Cell, Grid, Scaling};
use super::figures::{Figure, Kind};
use super::record::{Row, Run};

/// A figure over all runs of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Summary {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    /// Number of values.
    pub(super) samples: usize,
    /// Speed, in per cent of the speed with the smallest number of ranks and the same options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) percent: Option<f64>,
}

impl Summary {
    /// `None` without values. Values that are no finite numbers do not count.
    fn new(mut samples: Vec<f64>) -> Option<Self> {
        samples.retain(|sample| sample.is_finite());
        samples.sort_by(f64::total_cmp);
        let (min, max, middle) = (*samples.first()?, *samples.last()?, samples.len() / 2);
        let median = if samples.len().is_multiple_of(2) {
            (samples[middle - 1] + samples[middle]) / 2.0
        } else {
            samples[middle]
        };
        Some(Summary { median, min, max, samples: samples.len(), percent: None })
    }
}

/// The rows of the table: the cells that have runs, in the order of the grid.
pub(super) fn summarise(grid: &Grid, figures: &[Figure], runs: &[Run]) -> Vec<Row> {
    let mut rows = Vec::new();
    for values in grid.combinations() {
        let cell = |ranks: &u32| Cell { ranks: *ranks, values: values.clone() };
        let mut of_combination: Vec<Row> =
            grid.ranks.iter().filter_map(|ranks| row(grid, &cell(ranks), figures, runs)).collect();
        compare(&mut of_combination, grid, figures);
        rows.extend(of_combination);
    }
    rows
}

/// The varied options of a cell with their values.
pub(super) fn options(grid: &Grid, cell: &Cell) -> BTreeMap<String, String> {
    grid.vary.iter().map(|vary| vary.flag.clone()).zip(cell.values.iter().cloned()).collect()
}

fn row(grid: &Grid, cell: &Cell, figures: &[Figure], runs: &[Run]) -> Option<Row> {
    let vary = options(grid, cell);
    let runs: Vec<&Run> = runs.iter().filter(|run| run.ranks == cell.ranks && run.vary == vary).collect();
    let (failed, good): (Vec<&Run>, Vec<&Run>) = runs.iter().partition(|run| run.failed());
    let summary = |figure: &Figure| {
        let samples = good.iter().flat_map(|run| figure.samples(run)).collect();
        Some((figure.name.clone(), Summary::new(samples)?))
    };
    let peak = |rank: usize| good.iter().filter_map(|run| *run.peak_rss_mib.get(rank)?).max();
    let last = failed.last();
    Some(Row {
        ranks: cell.ranks,
        oversubscribed: runs.first()?.oversubscribed,
        runs: runs.len() as u32,
        failed: failed.len() as u32,
        exit_code: last.map(|run| run.exit_code),
        error: last.and_then(|run| run.error.clone()),
        figures: figures.iter().filter_map(summary).collect(),
        peak_rss_mib: if good.is_empty() { Vec::new() } else { (0..cell.ranks as usize).map(peak).collect() },
        vary,
    })
}

/// Sets the percentages of rows that differ in their number of ranks only. They stay unknown if the smallest number of
/// ranks has no result: another base would be misread.
fn compare(rows: &mut [Row], grid: &Grid, figures: &[Figure]) {
    let Some(base) = rows.iter().find(|row| Some(&row.ranks) == grid.ranks.first()).cloned() else { return };
    for figure in figures {
        let Some(first) = base.figures.get(&figure.name).filter(|first| first.median > 0.0) else { continue };
        for row in rows.iter_mut() {
            let more_work = f64::from(row.ranks) / f64::from(base.ranks);
            let Some(summary) = row.figures.get_mut(&figure.name).filter(|now| now.median > 0.0) else {
                continue;
            };
            let speed = match (figure.kind, &grid.scaling) {
                (Kind::Other, _) => continue,
                (Kind::Rate, _) => summary.median / first.median,
                (Kind::Time, Scaling::Weak) => more_work * first.median / summary.median,
                (Kind::Time | Kind::FixedTime, _) => first.median / summary.median,
            };
            summary.percent = Some((1e4 * speed).round() / 100.0);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::super::figures::choose;
    use super::*;

    /// A run that has printed `result`.
    pub(in super::super) fn run(ranks: u32, vary: &[(&str, &str)], repeat: u32, result: Value) -> Run {
        Run {
            ranks,
            vary: vary.iter().map(|(flag, value)| ((*flag).to_owned(), (*value).to_owned())).collect(),
            repeat,
            oversubscribed: ranks > 2,
            command: vec!["prog".into()],
            exit_code: 0,
            error: None,
            wall_s: 1.0,
            peak_rss_mib: (0..ranks).map(|rank| Some(40 + u64::from(rank))).collect(),
            result: result.as_object().cloned(),
        }
    }

    /// A run that has failed.
    pub(in super::super) fn failure(ranks: u32, vary: &[(&str, &str)], error: &str) -> Run {
        Run { exit_code: 3, error: Some(error.to_owned()), result: None, ..run(ranks, vary, 1, Value::Null) }
    }

    pub(in super::super) fn grid(ranks: &[u32], vary: &[&str], scaling: Scaling) -> Grid {
        let vary = vary.iter().map(|text| text.parse().unwrap()).collect();
        Grid { ranks: ranks.to_vec(), vary, scaling, arguments: Vec::new() }
    }

    fn percents(grid: &Grid, key: &str, runs: &[Run]) -> Vec<Option<f64>> {
        let figures = choose(&[key.to_owned()], runs);
        let rows = summarise(grid, &figures, runs);
        rows.iter().map(|row| row.figures.get(key).and_then(|summary| summary.percent)).collect()
    }

    #[test]
    fn medians_and_spreads() {
        let median = |samples: &[f64]| Summary::new(samples.to_vec()).map(|summary| summary.median);
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[f64::NAN, f64::INFINITY]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, f64::NAN, 3.0]), Some(2.5));
        let summary = Summary::new(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((summary.min, summary.max, summary.samples), (1.0, 3.0, 3));
    }

    #[test]
    fn percentages_say_how_much_faster_the_work_is_done() {
        let runs: Vec<Run> = [(1, 8.0), (2, 5.0), (4, 4.0)]
            .map(|(ranks, value)| run(ranks, &[], 1, json!({"a_s": value, "a_per_s": value, "loss": value})))
            .to_vec();
        let of = |scaling, key| percents(&grid(&[1, 2, 4], &[], scaling), key, &runs);
        assert_eq!(of(Scaling::AsGiven, "a_s"), [Some(100.0), Some(160.0), Some(200.0)]);
        assert_eq!(of(Scaling::Strong("-b".into()), "a_s"), of(Scaling::AsGiven, "a_s"));
        assert_eq!(of(Scaling::Weak, "a_s"), [Some(100.0), Some(320.0), Some(800.0)]);
        assert_eq!(of(Scaling::Weak, "a_per_s"), [Some(100.0), Some(62.5), Some(50.0)]);
        assert_eq!(of(Scaling::AsGiven, "loss"), [None; 3]);
    }

    #[test]
    fn each_combination_is_compared_with_its_own_smallest_number_of_ranks() {
        let result = |value: f64| json!({"a_s": value});
        let (slow, fast) = ([("--p", "slow")], [("--p", "fast")]);
        let runs = [
            run(2, &slow, 1, result(6.0)),
            run(4, &slow, 1, result(3.0)),
            failure(2, &fast, "no"),
            run(4, &fast, 1, result(1.0)),
        ];
        let grid = grid(&[2, 4], &["--p=slow,fast"], Scaling::AsGiven);
        assert_eq!(percents(&grid, "a_s", &runs), [Some(100.0), Some(200.0), None, None]);
        // Nothing is compared with a run that is still missing.
        assert_eq!(percents(&grid, "a_s", &runs[1..2]), [None]);
    }

    #[test]
    fn runs_of_a_cell_are_pooled_and_failed_ones_counted() {
        let runs = [
            run(1, &[], 1, json!({"a_s": 1.0})),
            run(1, &[], 2, json!({"a_s": 3.0})),
            Run { repeat: 3, ..failure(1, &[], "rank 0 exited with code 3") },
        ];
        let grid = grid(&[1], &[], Scaling::AsGiven);
        let rows = summarise(&grid, &choose(&["a_s".to_owned()], &runs), &runs);
        assert_eq!((rows[0].runs, rows[0].failed, rows[0].exit_code), (3, 1, Some(3)));
        let summary = rows[0].figures["a_s"];
        assert_eq!((summary.median, summary.min, summary.max, summary.samples), (2.0, 1.0, 3.0, 2));
        assert_eq!(rows[0].peak_rss_mib, [Some(40)]);
    }
}
