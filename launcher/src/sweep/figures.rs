//! The figures of a run: which ones, and where they are in the results. Pure.
//!
//! The program's result is the last JSON object that it prints. Keys are read as they come, so any program can be
//! compared. A training in the manner of `train_mnist`, whose object has `images_per_s`, gets the figures of a training
//! by default; any other program its wall time.

use serde_json::{Map, Value};

use super::record::Run;

/// What a figure says about speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Lower is faster, and it is of work that does not depend on the number of ranks.
    FixedTime,
    /// Lower is faster, and it is of all work of a run.
    Time,
    /// Higher is faster.
    Rate,
    /// Nothing.
    Other,
}

/// Where a figure comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    Wall,
    /// Mean time of a training epoch after the first.
    TrainEpoch,
    /// The same of the evaluations.
    TestEpoch,
    /// A key of the result, inside objects after dots.
    Key(String),
}

/// A figure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Figure {
    /// Its key in JSON.
    pub(super) name: String,
    /// The head of its column.
    pub(super) title: String,
    /// The head of the column with its percentage, if it has one.
    pub(super) percent: Option<String>,
    pub(super) kind: Kind,
    /// It is a share, shown in per cent.
    pub(super) is_share: bool,
    source: Source,
}

impl Figure {
    fn wall() -> Self {
        let percent = Some("%".to_owned());
        let (name, title) = ("wall_s".to_owned(), "wall s".to_owned());
        Figure { name, title, percent, kind: Kind::Time, is_share: false, source: Source::Wall }
    }

    fn key(key: &str) -> Self {
        let kind = kind_of(key);
        let percent = (kind != Kind::Other).then(|| "%".to_owned());
        let (name, title) = (key.to_owned(), key.to_owned());
        Figure { name, title, percent, kind, is_share: false, source: Source::Key(key.to_owned()) }
    }

    /// Whether its values are of ranks, not of moments.
    pub(super) fn is_of_ranks(&self) -> bool {
        matches!(&self.source, Source::Key(key) if is_of_ranks(key))
    }

    /// Its values in a run, without those of the warm-up.
    pub(super) fn samples(&self, run: &Run) -> Vec<f64> {
        let empty = Map::new();
        let result = run.result.as_ref().unwrap_or(&empty);
        match &self.source {
            Source::Wall => vec![run.wall_s],
            Source::Key(key) if self.is_of_ranks() => values(result, key),
            Source::Key(key) => after_warm_up(values(result, key)),
            Source::TrainEpoch => epochs(result, "epochs_train_s", || {
                // Warm-up steps are left out of the time of a step, not of the total.
                Some(number(result, "ms_per_step")? * number(result, "steps")? / 1e3)
            }),
            // It is 0 if nothing was tested.
            Source::TestEpoch => {
                epochs(result, "epochs_test_s", || number(result, "test_s").filter(|time| *time > 0.0))
            }
        }
    }
}

/// The figures to show: those of `keys`, or those that suit the results.
pub(super) fn choose(keys: &[String], runs: &[Run]) -> Vec<Figure> {
    if !keys.is_empty() {
        return keys
            .iter()
            .map(|key| if key == "wall_s" { Figure::wall() } else { Figure::key(key) })
            .collect();
    }
    let training = [
        ("train_s", "train s", None, Kind::Other, Source::TrainEpoch),
        ("images_per_s", "images/s", Some("train %"), Kind::Rate, Source::Key("images_per_s".into())),
        ("test_s", "test s", Some("test %"), Kind::FixedTime, Source::TestEpoch),
        ("communication", "communication", None, Kind::Other, Source::Key("communication".into())),
        ("rank_gpu_mib", "GPU MiB a rank", None, Kind::Other, Source::Key("rank_gpu_mib".into())),
        ("max_gpu_mib", "GPU MiB", None, Kind::Other, Source::Key("max_gpu_mib".into())),
    ];
    let figure = |(name, title, percent, kind, source): (&str, &str, Option<&str>, Kind, Source)| Figure {
        name: name.to_owned(),
        title: title.to_owned(),
        percent: percent.map(str::to_owned),
        kind,
        is_share: name == "communication",
        source,
    };
    let figures = training.map(figure).into_iter();
    let mut figures: Vec<_> = figures
        .filter(|figure| runs.iter().any(|run| !run.failed() && !figure.samples(run).is_empty()))
        .collect();
    if figures.iter().any(|figure| figure.name == "rank_gpu_mib") {
        figures.retain(|figure| figure.name != "max_gpu_mib");
    }
    let is_training = figures.iter().any(|figure| figure.name == "images_per_s");
    if is_training { figures } else { vec![Figure::wall()] }
}

/// Whether a key is that of a time or a rate, by its unit.
fn kind_of(key: &str) -> Kind {
    let key = key.rsplit('.').next().unwrap_or(key);
    let ends_in = |ends: &[&str]| ends.iter().any(|end| key.ends_with(end));
    let begins_with = |begins: &[&str]| begins.iter().any(|begin| key.starts_with(begin));
    if ends_in(&["_per_s", "_per_sec", "_per_second", "gbps", "_gb_s", "_gib_s", "_mb_s", "_flops"]) {
        Kind::Rate
    } else if ends_in(&["_s", "_ms", "_us", "_ns"]) || begins_with(&["s_per_", "ms_per_", "us_", "ns_per_"]) {
        Kind::Time
    } else {
        Kind::Other
    }
}

/// The numbers at a key: one, or those of an array.
fn values(result: &Map<String, Value>, key: &str) -> Vec<f64> {
    let value = result.get(key);
    let inner = || {
        let (first, rest) = key.split_once('.')?;
        Some(values(result.get(first)?.as_object()?, rest))
    };
    match value {
        Some(Value::Array(items)) => items.iter().filter_map(Value::as_f64).collect(),
        Some(value) => value.as_f64().into_iter().collect(),
        None => inner().unwrap_or_default(),
    }
}

fn number(result: &Map<String, Value>, key: &str) -> Option<f64> {
    result.get(key)?.as_f64()
}

/// Whether a list at this key has a value of each rank.
fn is_of_ranks(key: &str) -> bool {
    key.rsplit('.').next().unwrap_or(key).starts_with("rank_")
}

/// The first of several values is of the warm-up.
fn after_warm_up(values: Vec<f64>) -> Vec<f64> {
    let skipped = usize::from(values.len() > 1);
    values.into_iter().skip(skipped).collect()
}

/// Times of epochs: those of the list at `key` after the first, or else `total` divided by the number of epochs.
fn epochs(result: &Map<String, Value>, key: &str, total: impl FnOnce() -> Option<f64>) -> Vec<f64> {
    let listed = values(result, key);
    if listed.len() > 1 {
        return after_warm_up(listed);
    }
    let mean = || Some(total()? / number(result, "epochs").filter(|epochs| *epochs > 0.0)?);
    mean().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::summary::tests::run;
    use super::*;

    fn names(figures: &[Figure]) -> Vec<&str> {
        figures.iter().map(|figure| figure.name.as_str()).collect()
    }

    #[test]
    fn a_training_has_the_figures_of_a_training() {
        let result = json!({
            "images_per_s": 100, "ms_per_step": 20.0, "steps": 300, "epochs": 3, "test_s": 1.5,
            "communication": null, "max_gpu_mib": null,
        });
        let training = run(1, &[], 1, result);
        let figures = choose(&[], std::slice::from_ref(&training));
        assert_eq!(names(&figures), ["train_s", "images_per_s", "test_s"]);
        let samples: Vec<_> = figures.iter().map(|figure| figure.samples(&training)).collect();
        assert_eq!(samples, [[2.0], [100.0], [0.5]]);
        let times =
            json!({"images_per_s": 1, "epochs_train_s": [9.0, 2.0, 3.0], "epochs_test_s": [5.0, 1.0]});
        let listed = run(1, &[], 1, times);
        let figures = choose(&[], std::slice::from_ref(&listed));
        assert_eq!(figures[0].samples(&listed), [2.0, 3.0]);
        assert_eq!(figures[2].samples(&listed), [1.0]);
        let untested = run(1, &[], 1, json!({"images_per_s": 1, "test_s": 0.0, "epochs": 1}));
        assert_eq!(names(&choose(&[], std::slice::from_ref(&untested))), ["images_per_s"]);
    }

    /// None of them is a warm-up.
    #[test]
    fn memory_of_gpus_is_that_of_all_ranks() {
        let result = json!({"images_per_s": 100, "max_gpu_mib": 900, "rank_gpu_mib": [900, 500]});
        let training = run(2, &[], 1, result);
        let figures = choose(&[], std::slice::from_ref(&training));
        assert_eq!(names(&figures), ["images_per_s", "rank_gpu_mib"]);
        assert_eq!(figures[1].samples(&training), [900.0, 500.0]);
        let host = &choose(&["memory.rank_rss_mib".to_owned()], std::slice::from_ref(&training))[0];
        let inner = run(2, &[], 1, json!({"memory": {"rank_rss_mib": [40, 30]}}));
        assert_eq!(host.samples(&inner), [40.0, 30.0]);
        // A program that only knows the maximum.
        let training = run(2, &[], 1, json!({"images_per_s": 100, "max_gpu_mib": 900, "rank_gpu_mib": null}));
        assert_eq!(names(&choose(&[], std::slice::from_ref(&training))), ["images_per_s", "max_gpu_mib"]);
    }

    #[test]
    fn other_programs_have_a_wall_time_unless_keys_are_chosen() {
        let other = run(1, &[], 1, json!({"loss": [4, 1, 2], "inner": {"busbw_gbps": 3.5}, "text": "7"}));
        let runs = std::slice::from_ref(&other);
        assert_eq!(names(&choose(&[], runs)), ["wall_s"]);
        let keys = ["loss", "inner.busbw_gbps", "text", "none.at.all", "wall_s"].map(str::to_owned);
        let figures = choose(&keys, runs);
        let samples: Vec<_> = figures.iter().map(|figure| figure.samples(&other)).collect();
        assert_eq!(samples, [vec![1.0, 2.0], vec![3.5], vec![], vec![], vec![1.0]]);
        let kinds: Vec<_> = figures.iter().map(|figure| figure.kind).collect();
        assert_eq!(kinds, [Kind::Other, Kind::Rate, Kind::Other, Kind::Other, Kind::Time]);
    }

    #[test]
    fn units_say_what_is_faster() {
        for (key, kind) in [
            ("images_per_s", Kind::Rate),
            ("tokens_per_sec", Kind::Rate),
            ("a.busbw_gbps", Kind::Rate),
            ("train_s", Kind::Time),
            ("p50_us", Kind::Time),
            ("us_p50", Kind::Time),
            ("ms_per_step", Kind::Time),
            ("a_s.loss", Kind::Other),
            ("loss", Kind::Other),
        ] {
            assert_eq!(kind_of(key), kind, "{key}");
        }
    }
}
