//! `--placement layers`: a network that is cut over ranks trains the bits of one rank with the same micro-batches.

use std::fs;
use std::path::Path;
use std::process::Command;

use mgpu_tests::mnist;
use mgpu_tests::process::{Finished, Program, run};
use serde_json::Value;

const TRAIN: Program =
    Program { launcher: env!("CARGO_BIN_EXE_t-mgpurun"), path: env!("CARGO_BIN_EXE_t-train_mnist") };

/// A small data set whose images differ.
struct Data {
    folder: tempfile::TempDir,
}

impl Data {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        mnist::write_tiny(folder.path());
        for file in ["train-images-idx3-ubyte", "t10k-images-idx3-ubyte"] {
            let path = folder.path().join(file);
            let mut bytes = fs::read(&path).unwrap();
            for (index, pixel) in bytes[16..].iter_mut().enumerate() {
                let (image, noise) = (index / 784, index * 104_729 % 1009);
                *pixel = if (index / 28 + image) % 10 < 3 { 200 } else { (noise % 64) as u8 };
            }
            fs::write(&path, bytes).unwrap();
        }
        Data { folder }
    }

    /// A path in the folder of the data.
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// On one rank, or on several.
    fn train(&self, ranks: u32, arguments: &[&str]) -> Finished {
        let program = if ranks == 1 { TRAIN.alone() } else { TRAIN.launched(ranks) };
        run(&mut self.command(program, arguments))
    }

    fn command(&self, mut program: Command, arguments: &[&str]) -> Command {
        program.args(["--threads", "1", "--json", "--data"]).arg(self.folder.path()).args(arguments);
        program
    }
}

/// Compares `net` on one rank with the same network over `ranks` ranks each, without evaluation.
#[track_caller]
fn check(net: &str, flags: &[&str], ranks: &[u32]) {
    let data = Data::new();
    let flags = [&["--net", net, "--batch", "4", "--steps", "2", "--skip-test"], flags].concat();
    let alone = data.train(1, &flags).weights();
    for ranks in ranks {
        let cut = data.train(*ranks, &[&flags[..], &["--placement", "layers"]].concat());
        assert_eq!(cut.weights(), alone, "{ranks} ranks, {flags:?}");
    }
}

/// With and without micro-batches.
#[track_caller]
fn check_network(net: &str, most: u32) {
    check(net, &["--accumulate", "4"], &[2, most]);
    check(net, &[], &[3]);
}

#[test]
fn lenet5_cut_over_ranks_trains_the_bits_of_one() {
    check_network("lenet5", 4);
    check("lenet5", &["--accumulate", "2"], &[5]);
}

#[test]
fn deep_cut_over_ranks_trains_the_bits_of_one() {
    check_network("deep", 4);
}

#[test]
fn keras_cut_over_ranks_trains_the_bits_of_one() {
    check_network("keras", 4);
}

#[test]
fn ensemble2400_cut_over_ranks_trains_the_bits_of_one() {
    check_network("ensemble2400", 4);
}

#[test]
fn ensemble4800_cut_over_ranks_trains_the_bits_of_one() {
    check_network("ensemble4800", 4);
}

#[test]
fn layers_cut_over_ranks_trains_the_bits_of_one() {
    check_network("layers", 4);
}

#[test]
fn conv6_cut_over_ranks_trains_the_bits_of_one() {
    check_network("conv6", 4);
}

#[test]
fn mlp_gelu_cut_over_ranks_trains_the_bits_of_one() {
    check_network("mlp-gelu", 3);
}

#[test]
fn any_cut_trains_the_same_bits() {
    for cut in ["2", "4", "5", "8,10", "2,4,13"] {
        let ranks = cut.split(',').count() as u32 + 1;
        let data = Data::new();
        let flags = ["--net", "keras", "--batch", "4", "--accumulate", "2", "--steps", "1", "--skip-test"];
        let finished = data.train(ranks, &[&flags[..], &["--placement", "layers", "--cut", cut]].concat());
        if cut == "8,10" {
            // The dropout of layer 8 works in place.
            finished.expect(1, &["--cut 8,10: keras cannot be cut before layer 8, but before 2,4,5,10,13"]);
            continue;
        }
        assert_eq!(finished.weights(), data.train(1, &flags).weights(), "{cut}");
    }
}

#[test]
fn images_between_layers_are_passed_on_in_bf16() {
    for net in ["keras", "conv6"] {
        check(net, &["--precision", "bf16", "--accumulate", "2"], &[2, 3]);
    }
}

/// Two replicas of the network, each on two ranks, against two ranks with the whole network.
#[test]
fn a_grid_trains_the_bits_of_its_copies() {
    let data = Data::new();
    for (net, flags) in [
        ("keras", &["--accumulate", "2"][..]),
        ("deep", &["--accumulate", "4", "--shard-optimizer", "on"]),
        ("lenet5", &["--accumulate", "2", "--gradients", "bf16", "--reduction", "sum"]),
    ] {
        let flags = [&["--net", net, "--batch", "4", "--steps", "3"], flags].concat();
        let replicas = data.train(2, &flags);
        let grid = data.train(4, &[&flags[..], &["--placement", "layers:2"]].concat());
        assert_eq!(grid.weights(), replicas.weights(), "{flags:?}");
        grid.expect(0, &["cut over 2 ranks, the same in 2 replicas"]);
        let [found, expected] = [grid, replicas].map(|finished| finished.json());
        let value = |json: &Value, key: &str| json[key].clone();
        for key in ["test_acc", "test_loss", "test_acc_average", "test_loss_average", "batch", "steps"] {
            assert_eq!(value(&found, key), value(&expected, key), "{key}");
        }
        assert_eq!((value(&found, "ranks"), value(&found, "stages")), (4.into(), 2.into()));
        assert_eq!(value(&found, "placement"), "layers:2");
    }
}

/// Checkpoints are those of any placement, and so are evaluation and logits.
#[test]
fn a_run_continues_under_another_placement() {
    for net in ["keras", "deep"] {
        let data = Data::new();
        let (folder, logits, other) = (data.path("checkpoints"), data.path("a.json"), data.path("b.json"));
        let flags = ["--net", net, "--batch", "4", "--accumulate", "2", "--schedule", "constant", "--steps"];
        let whole = data.train(1, &[&flags[..], &["6", "--logits", &logits]].concat());
        let saved = ["--checkpoint-dir", &folder, "--resume"];
        let part = |ranks, steps, flags_of_part: &[&str]| {
            data.train(ranks, &[&flags[..], &[steps], &saved, flags_of_part].concat())
        };
        part(2, "2", &["--placement", "layers", "--skip-test"]).expect(0, &["cut over 2 ranks"]);
        part(1, "4", &["--skip-test"]).expect(0, &["resumed from"]);
        let last = part(3, "6", &["--placement", "layers:3", "--logits", &other]);
        last.expect(0, &[]);
        assert!(!last.stdout.contains("will not be bit-equal"), "{last:#?}");
        assert_eq!(last.weights(), whole.weights());
        for key in ["test_loss", "test_loss_average"] {
            assert_eq!(last.json()[key], whole.json()[key], "{key}");
        }
        assert_eq!(fs::read(&other).unwrap(), fs::read(&logits).unwrap(), "{net}");
        evaluations_are_equal(&data, Path::new(&folder));
    }
}

/// Evaluation and predictions of a grid, and of one rank.
fn evaluations_are_equal(data: &Data, folder: &Path) {
    let images = data.path("t10k-images-idx3-ubyte");
    let evaluate = |ranks, name: &str, flags: &[&str]| {
        let output = data.path(name);
        let all = ["--evaluate", folder.to_str().unwrap(), "--predict", &images, "--output", &output];
        let json = data.train(ranks, &[&all[..], flags].concat()).json();
        (json["weights"].clone(), json["test_acc"].clone(), fs::read(output).unwrap())
    };
    let alone = evaluate(1, "alone.jsonl", &["--batch", "4"]);
    let grid = evaluate(4, "grid.jsonl", &["--batch", "4", "--placement", "layers:2"]);
    assert!(grid == alone, "{} and {}", String::from_utf8_lossy(&grid.2), String::from_utf8_lossy(&alone.2));
    // Batches that do not divide the images.
    let (weights, accuracy, _) = evaluate(4, "other.jsonl", &["--batch", "3", "--placement", "layers:2"]);
    assert_eq!((weights, accuracy), (alone.0, alone.1));
}

/// No more than the stages behind it, and no more than there are micro-batches.
#[test]
fn each_stage_keeps_the_activations_in_flight() {
    let data = Data::new();
    let run = |micro_batches: usize| {
        let [batch, count] = [8 * micro_batches, micro_batches].map(|number| number.to_string());
        let flags = ["--net", "ensemble2400", "--batch", &batch, "--accumulate", &count, "--steps", "1"];
        let cut = ["--skip-test", "--placement", "layers", "--cut", "4,8"];
        let json = data.train(3, &[&flags[..], &cut].concat()).json();
        let mib = json["rank_activations_mib"].as_array().unwrap().clone();
        let mib: Vec<f64> = mib.iter().map(|mib| mib.as_f64().unwrap()).collect();
        (json["rank_in_flight"].clone(), mib)
    };
    let (in_flight, one) = run(1);
    assert_eq!(in_flight, serde_json::json!([1, 1, 1]));
    for (micro_batches, expected) in [(2, [2.0, 2.0, 1.0]), (5, [3.0, 2.0, 1.0])] {
        let (in_flight, mib) = run(micro_batches);
        assert_eq!(in_flight, serde_json::json!(expected.map(|count| count as u32)));
        for ((mib, one), count) in mib.iter().zip(&one).zip(expected) {
            assert!(
                (mib / one - count).abs() < 0.02,
                "{mib} MiB with {micro_batches} micro-batches, {one} with 1"
            );
        }
    }
}

/// Without micro-batches only one of the stages works at a time.
#[test]
fn waiting_for_other_stages_is_idle_time() {
    let data = Data::new();
    let flags = ["--batch", "4", "--skip-test", "--placement", "layers", "--steps"];
    let idle = |steps: &str| data.train(2, &[&flags[..], &[steps]].concat()).json()["idle"].clone();
    assert_eq!(idle("3"), Value::Null, "steps of the warm-up are not measured");
    let share = idle("8").as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "{share}");
}

#[test]
fn the_timeline_numbers_micro_batches_and_shows_messages() {
    let data = Data::new();
    let path = data.path("timeline.json");
    let flags = ["--batch", "4", "--accumulate", "4", "--steps", "1", "--skip-test", "--timeline", &path];
    data.train(2, &[&flags[..], &["--placement", "layers", "--cut", "7"]].concat()).expect(0, &[]);
    let file: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    let spans = |rank: u64, name: &str| -> Vec<&Value> {
        let mut spans: Vec<&Value> =
            events.iter().filter(|event| event["tid"] == rank + 1 && event["name"] == name).collect();
        spans.sort_by(|a, b| a["ts"].as_f64().unwrap().total_cmp(&b["ts"].as_f64().unwrap()));
        spans
    };
    // Within the step.
    let of = |rank: u64, name: &str| -> Vec<Value> {
        let begin = |span: &Value| span["ts"].as_f64().unwrap();
        let step = spans(rank, "step")[0];
        let step = begin(step)..begin(step) + step["dur"].as_f64().unwrap();
        let within = spans(rank, name).into_iter().filter(|span| step.contains(&begin(span)));
        within.map(|span| span["args"]["micro_batch"].clone()).collect()
    };
    for rank in [0, 1] {
        for pass in ["forward", "backward"] {
            assert_eq!(of(rank, pass), [0, 1, 2, 3].map(Value::from), "{pass} on rank {rank}");
        }
    }
    for (rank, message) in [(0, "send"), (0, "recv"), (1, "send"), (1, "recv")] {
        let message = format!("{message}, group 1 (ranks 0, 1)");
        assert_eq!(of(rank, &message).len(), 4, "{message} on rank {rank}");
    }
}

#[test]
fn a_killed_rank_is_named_by_all() {
    let data = Data::new();
    let killed = TRAIN.launched_with(4, &["--inject", "rank=1,step=3,fault=sigkill"]);
    let flags = ["--batch", "4", "--steps", "500", "--skip-test", "--placement", "layers:2"];
    let finished = run(&mut data.command(killed, &flags));
    finished.expect(128 + 9, &["rank 1 was killed by SIGKILL"]);
    let errors = finished.stderr.lines().filter(|line| line.starts_with("train_mnist: "));
    let errors: Vec<_> = errors.collect();
    assert!(!errors.is_empty() && errors.iter().all(|error| error.contains("rank 1")), "{finished:#?}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let data = Data::new();
    let refused = |ranks: u32, flags: &[&str], text: &str| {
        let all = ["--batch", "4", "--steps", "1", "--skip-test"];
        data.train(ranks, &[&all[..], flags].concat()).expect(1, &[text]);
    };
    let layers = ["--placement", "layers"];
    let with = |flags: &[&'static str]| [&layers[..], flags].concat();
    refused(2, &["--cut", "3"], "--cut needs --placement layers");
    refused(3, &["--placement", "layers:2"], "--placement layers:2 needs a multiple of 2 ranks, not 3");
    refused(2, &["--placement", "layers:4"], "--placement layers:4 needs a multiple of 4 ranks, not 2");
    refused(2, &with(&["--clip-norm", "1"]), "--placement layers and --clip-norm are incompatible");
    refused(2, &with(&["--profile"]), "--placement layers and --profile are incompatible");
    refused(2, &with(&["--overlap"]), "--placement layers and --overlap are incompatible");
    refused(
        2,
        &with(&["--world-size-invariant", "2"]),
        "--placement layers and --world-size-invariant are incompatible",
    );
    refused(2, &with(&["--cut", "4"]), "lenet5 cannot be cut before layer 4, but before 3,7,9,11");
    refused(2, &with(&["--cut", "3,7"]), "--cut 3,7: 2 cuts, but 2 ranks need 1 cut");
    refused(6, &layers, "lenet5 has 5 layers with parameters and cannot be cut over 6 ranks");
}
