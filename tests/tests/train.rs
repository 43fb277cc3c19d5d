//! `train_mnist`: smoke tests, equality of ranks and runs, invalid input. Uses generated digits, so it runs anywhere.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use mgpu_tests::mnist;
use mgpu_tests::process::{self, Finished, Program, run};

const TRAIN: Program =
    Program { launcher: env!("CARGO_BIN_EXE_t-mgpurun"), path: env!("CARGO_BIN_EXE_t-train_mnist") };

fn train(mut program: Command, arguments: &[&str]) -> Finished {
    run(program.args(["--synthetic", "--json"]).args(arguments))
}

#[test]
fn the_smoke_test_of_a_ci_job() {
    for program in [TRAIN.launched(1), TRAIN.alone()] {
        let finished = train(program, &["--steps", "20"]);
        finished.expect(0, &["generated digits"]);
        let json = finished.json();
        assert_eq!(
            (&json["impl"], &json["net"], &json["device"]),
            (&"mgpu".into(), &"lenet5".into(), &"cpu".into())
        );
        assert_eq!((&json["steps"], &json["ranks"], &json["dtype"]), (&20.into(), &1.into(), &"f32".into()));
        for key in ["images_per_s", "ms_per_step", "train_s", "test_s", "test_acc", "test_loss", "rss_mib"] {
            assert!(json[key].as_f64().is_some_and(|value| value > 0.0), "{key} in {json:#}");
        }
        assert!(json["max_gpu_mib"].is_null());
    }
}

#[test]
fn one_rank_is_bit_equal_with_and_without_the_launcher() {
    let arguments = ["--steps", "12", "--skip-test", "--threads", "1"];
    assert_eq!(train(TRAIN.alone(), &arguments).weights(), train(TRAIN.launched(1), &arguments).weights());
}

#[test]
fn training_is_reproducible_for_a_seed_and_rank_count() {
    let arguments = ["--images", "2000", "--steps", "12", "--skip-test", "--seed", "5"];
    for ranks in [2, 3] {
        let first = train(TRAIN.launched(ranks), &arguments).weights();
        assert_eq!(first, train(TRAIN.launched(ranks), &arguments).weights());
    }
    let other = ["--images", "2000", "--steps", "12", "--skip-test", "--seed", "6"];
    assert_ne!(train(TRAIN.launched(2), &arguments).weights(), train(TRAIN.launched(2), &other).weights());
}

#[test]
fn a_sharded_optimizer_gives_the_same_bits() {
    for (net, steps) in [("lenet5", "12"), ("keras", "3")] {
        let run = |ranks, how| {
            let arguments =
                ["--images", "2000", "--net", net, "--steps", steps, "--batch", "8", "--skip-test"];
            train(TRAIN.launched(ranks), &[&arguments[..], &["--shard-optimizer", how]].concat()).weights()
        };
        for ranks in [2, 3] {
            let replicated = run(ranks, "off");
            assert_eq!(replicated, run(ranks, "on"));
            assert_eq!(replicated, run(ranks, "auto"));
        }
    }
}

#[test]
fn generated_digits_are_learned() {
    let finished = train(TRAIN.launched(2), &["--epochs", "1"]);
    finished.expect(0, &["the same on 2 ranks"]);
    let accuracy = finished.json()["test_acc"].as_f64().unwrap();
    assert!(accuracy > 0.9, "test accuracy {accuracy}");
}

#[test]
fn training_on_bf16_images_is_equal_on_all_ranks() {
    let finished = train(TRAIN.launched(2), &["--steps", "800", "--precision", "bf16"]);
    finished.expect(0, &["the same on 2 ranks"]);
    let json = finished.json();
    assert_eq!(json["dtype"], "bf16");
    let accuracy = json["test_acc"].as_f64().unwrap();
    assert!(accuracy > 0.9, "test accuracy {accuracy}");
    let weights_in = |precision| {
        let arguments = ["--steps", "5", "--skip-test", "--precision", precision];
        train(TRAIN.launched(1), &arguments).weights()
    };
    assert_ne!(weights_in("bf16"), weights_in("f32"), "nothing was rounded");
}

/// The first gradients overflow at the larger scale; once it is small enough, the training goes on.
#[test]
fn training_in_fp16_skips_steps_that_overflow_and_learns() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    let skipped_steps = |scale: &str, steps: &str| {
        let mut program = TRAIN.launched(2);
        program.arg("--metrics").arg(&metrics);
        let finished = train(program, &["--precision", "fp16", "--loss-scale", scale, "--steps", steps]);
        finished.expect(0, &["the same on 2 ranks", " skipped; test "]);
        let json = finished.json();
        assert_eq!(json["dtype"], "fp16");
        let accuracy = json["test_acc"].as_f64().unwrap();
        assert!(accuracy > 0.9, "scale {scale}: test accuracy {accuracy}");
        let text = fs::read_to_string(&metrics).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        for key in ["loss_scale", "skipped_steps"] {
            assert!(json[key].is_number() && line[key] == json[key], "{key} in {line} and {json}");
        }
        json["skipped_steps"].as_u64().unwrap()
    };
    assert_eq!(skipped_steps("1024", "800"), 0);
    let skipped = skipped_steps("1e15", "800");
    assert!((5..50).contains(&skipped), "{skipped} steps");
    let json = train(TRAIN.launched(2), &["--steps", "4", "--skip-test"]).json();
    assert!(json.get("loss_scale").is_none() && json.get("skipped_steps").is_none());
}

#[test]
fn flags_that_fp16_excludes_are_named() {
    let refused = train(TRAIN.launched(1), &["--steps", "4", "--loss-scale", "8"]);
    refused.expect(2, &["--loss-scale is for --precision fp16, not f32"]);
    let refused = train(TRAIN.launched(2), &["--precision", "fp16", "--placement", "layers"]);
    refused
        .expect(2, &["--precision fp16 and --placement layers are incompatible: the parts of the network"]);
}

#[test]
fn curves_are_drawn_and_written_for_tensorboard() {
    let folder = tempfile::tempdir().unwrap();
    let (plot, events) = (folder.path().join("curves.svg"), folder.path().join("events"));
    let mut program = TRAIN.launched(2);
    program.arg("--plot").arg(&plot).arg("--tensorboard").arg(&events);
    train(program, &["--steps", "20"]).expect(0, &[]);
    let text = fs::read_to_string(&plot).unwrap();
    assert!(text.starts_with("<svg") && text.contains("accuracy, %"), "{text}");
    assert!(text.contains("lenet5 on 2 ranks: generated digits"), "{text}");
    // Of rank 0 only.
    let files: Vec<_> = fs::read_dir(&events).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let bytes = fs::read(&files[0]).unwrap();
    let times = |tag: &[u8]| bytes.windows(tag.len()).filter(|window| *window == tag).count();
    assert_eq!((times(b"train/step_loss"), times(b"test/accuracy")), (20, 1));
    run(TRAIN.alone().args(["--synthetic", "--plot", "/nonexistent/c.svg"]))
        .expect(1, &["/nonexistent/c.svg"]);
    run(TRAIN.alone().args(["--synthetic", "--tensorboard", "/proc/none"])).expect(1, &["/proc/none"]);
}

#[test]
fn metrics_are_one_json_object_an_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    let arguments = ["--steps", "5", "--skip-test", "--metrics", file.to_str().unwrap()];
    train(TRAIN.launched(2), &arguments).expect(0, &[]);
    let text = fs::read_to_string(file).unwrap();
    let line: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((&line["epoch"], &line["step"]), (&1.into(), &5.into()));
    assert!(line["data"].as_str().unwrap().contains("generated"));
    assert_eq!(text.lines().count(), 1);
}

/// Loss, percentage and step of each line of `--log-every`.
fn log_lines(finished: &Finished) -> Vec<(u64, f64, f64)> {
    let lines = finished.stdout.lines().filter_map(|line| line.strip_prefix("step "));
    let numbers = lines.map(|line| {
        let (step, rest) = line.split_once('/').unwrap();
        let (_, rest) = rest.split_once(": train ").unwrap();
        let (percent, rest) = rest.split_once("% loss ").unwrap();
        let (loss, rest) = rest.split_once(" (").unwrap();
        assert!(rest.strip_suffix(" images/s)").is_some_and(|speed| speed.parse::<u64>().unwrap() > 0));
        (step.parse().unwrap(), percent.parse().unwrap(), loss.parse().unwrap())
    });
    numbers.collect()
}

#[test]
fn the_log_has_the_results_of_every_n_steps_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let (metrics, events) = (folder.path().join("metrics"), folder.path().join("events"));
    // Three epochs of eight steps.
    let train = |more: &[&str]| {
        let mut program = TRAIN.launched(2);
        program.arg("--data").arg(folder.path()).args(["--batch", "4", "--threads", "1", "--json"]);
        run(program.args(more))
    };
    let plain = train(&[]);
    assert_eq!(log_lines(&plain), []);
    let single = train(&["--log-every", "1"]);
    let steps = log_lines(&single);
    assert_eq!(steps.len(), 24);
    for every in [3, 8, 11, 25] {
        let found = train(&[
            "--log-every",
            &every.to_string(),
            "--metrics",
            metrics.to_str().unwrap(),
            "--tensorboard",
            events.to_str().unwrap(),
        ]);
        assert_eq!(found.weights(), plain.weights(), "the log changes no bit");
        let found = log_lines(&found);
        assert_eq!(found.len(), 24 / every);
        for (line, steps) in found.iter().zip(steps.chunks(every)) {
            let mean = |value: fn(&(u64, f64, f64)) -> f64| {
                steps.iter().map(value).sum::<f64>() / steps.len() as f64
            };
            assert_eq!(line.0, steps.last().unwrap().0);
            assert!((line.1 - mean(|step| step.1)).abs() < 0.011, "{line:?}, {steps:?}");
            assert!((line.2 - mean(|step| step.2)).abs() < 1.1e-4, "{line:?}, {steps:?}");
        }
    }
    // The metrics still have one object an epoch; the events have the lines.
    let objects = fs::read_to_string(&metrics).unwrap();
    assert_eq!(objects.lines().count(), 4 * 3);
    let losses = objects.lines().take(3).map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let losses: Vec<f64> = losses.map(|epoch| epoch["train_loss"].as_f64().unwrap()).collect();
    for (epoch, line) in losses.iter().zip(log_lines(&train(&["--log-every", "8"]))) {
        assert!((epoch - line.2).abs() < 1e-4, "{losses:?}, {line:?}");
    }
    let logged = fs::read_dir(&events).unwrap().map(|entry| {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        bytes.windows(8).filter(|window| window == b"log/loss").count()
    });
    assert_eq!(logged.sum::<usize>(), 8 + 3 + 2);
}

#[test]
fn a_resumed_log_begins_where_the_run_continues() {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let checkpoints = folder.path().join("checkpoints");
    let train = |steps: &str, more: &[&str]| {
        let mut program = TRAIN.launched(2);
        program.arg("--data").arg(folder.path()).args(["--batch", "4", "--schedule", "constant"]);
        program.arg("--checkpoint-dir").arg(&checkpoints).args(["--steps", steps, "--resume", "--skip-test"]);
        run(program.args(["--checkpoint-every", "3", "--log-every", "5"]).args(more))
    };
    let steps = |finished: &Finished| log_lines(finished).iter().map(|line| line.0).collect::<Vec<_>>();
    assert_eq!(steps(&train("12", &[])), [5, 10]);
    assert_eq!(steps(&train("20", &[])), [15, 20]);
    train("20", &[]).expect(0, &["nothing left to train"]);
}

#[test]
fn the_summary_has_the_memory_of_each_rank_and_the_times_of_each_epoch() {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let summary = |more: &[&str]| {
        let mut program = TRAIN.launched(3);
        program.arg("--data").arg(folder.path()).args(["--batch", "4", "--epochs", "2", "--json"]);
        run(program.args(more)).json()
    };
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let json = summary(&[]);
    let memory = numbers(&json["rank_rss_mib"]);
    assert_eq!(memory.len(), 3, "{json:#}");
    assert!(memory.iter().all(|mebibytes| *mebibytes > 1.0), "{json:#}");
    assert_eq!(json["rss_mib"].as_f64().unwrap(), memory.iter().copied().fold(0.0, f64::max), "{json:#}");
    assert!(json["rank_gpu_mib"].is_null() && json["max_gpu_mib"].is_null(), "{json:#}");
    for (sum, each) in [("train_s", "epochs_train_s"), ("test_s", "epochs_test_s")] {
        let each = numbers(&json[each]);
        assert_eq!(each.len(), 2, "{json:#}");
        assert!((each.iter().sum::<f64>() - json[sum].as_f64().unwrap()).abs() < 0.0021, "{json:#}");
    }
    assert_eq!(summary(&["--skip-test"])["epochs_test_s"], serde_json::json!([]));
}

/// The lines of standard error that warn about a file.
fn warnings(finished: &Finished, path: &str) -> usize {
    let warns = |line: &&str| line.contains(path) && line.ends_with("training continues without this file");
    finished.stderr.lines().filter(warns).count()
}

#[test]
fn a_full_disk_for_a_by_product_file_affects_neither_checkpoint_nor_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let small =
        ["--batch", "4", "--epochs", "2", "--threads", "1", "--data", folder.path().to_str().unwrap()];
    let full = fs::symlink_metadata("/dev/full").unwrap();
    for flag in ["--metrics", "--plot", "--logits", "--timeline"] {
        let checkpoints = folder.path().join(format!("checkpoints{flag}"));
        let mut program = TRAIN.launched(2);
        program.args(small).args([flag, "/dev/full", "--json", "--checkpoint-dir"]).arg(&checkpoints);
        let finished = run(&mut program);
        finished.expect(0, &["No space left on device (os error 28)", "epoch 2/2", "the same on 2 ranks"]);
        assert_eq!(warnings(&finished, "/dev/full"), 1, "{flag}: {finished:#?}");
        assert!(flag == "--timeline" || finished.stderr.contains(&format!("cannot write {flag} /dev/full")));
        assert_eq!(finished.json()["epochs"], 2);
        let found = mgpu::checkpoint::find(&checkpoints).unwrap().unwrap();
        assert_eq!((found.checkpoint.manifest().step, found.damaged.len()), (16, 0));
    }
    let device = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino(), metadata.rdev());
    assert_eq!(device(&fs::symlink_metadata("/dev/full").unwrap()), device(&full));
    assert!(!Path::new("/dev/full.partial").exists());
}

#[test]
fn a_file_size_limit_is_treated_as_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (plot, checkpoints) = (folder.path().join("plot.svg"), folder.path().join("checkpoints"));
    let limited = |arguments: &[&str]| {
        let mut program = process::command("sh");
        program.args(["-c", "ulimit -f 1; exec \"$@\"", "sh", TRAIN.path, "--skip-test", "--steps", "5"]);
        train(program, arguments)
    };
    let finished = limited(&["--plot", plot.to_str().unwrap()]);
    finished.expect(0, &["cannot write --plot", "File too large (os error 27)"]);
    // A checkpoint that cannot be written is an error, not death by a signal.
    let finished = limited(&["--checkpoint-dir", checkpoints.to_str().unwrap()]);
    finished.expect(1, &["File too large (os error 27)"]);
    assert!(mgpu::checkpoint::find(&checkpoints).unwrap().is_none());
}

#[test]
fn on_a_full_disk_each_by_product_file_is_warned_about_once() {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let (disk, checkpoints) = (folder.path().join("disk"), folder.path().join("checkpoints"));
    fs::create_dir(&disk).unwrap();
    let on_disk = |name: &str| disk.join(name).to_str().unwrap().to_owned();
    let files = [
        ("--metrics", "metrics.jsonl"),
        ("--plot", "plot.svg"),
        ("--logits", "logits.json"),
        ("--timeline", "timeline.json"),
        ("--tensorboard", "events"),
    ];
    let arguments = files.iter().flat_map(|(flag, name)| [(*flag).to_owned(), on_disk(name)]);
    let mut program =
        process::on_a_small_disk(&disk, "1m", "echo old >plot.svg; cat /dev/zero >filler", TRAIN.path);
    program.args(["--batch", "4", "--epochs", "3", "--threads", "1", "--json", "--data"]).arg(folder.path());
    let finished = run(program.args(arguments).arg("--checkpoint-dir").arg(&checkpoints));
    if process::mounting_is_forbidden(&finished) {
        return;
    }
    finished.expect(0, &["No space left on device", "epoch 3/3"]);
    for (flag, name) in files {
        assert_eq!(warnings(&finished, name), 1, "{flag}: {finished:#?}");
    }
    assert!(mgpu::checkpoint::find(&checkpoints).unwrap().unwrap().checkpoint.verify().is_ok());
    // The final contents of the disk: the old file is intact, and there is no partial file.
    let listed = finished.stdout.lines().filter(|line| line.starts_with("on the disk: "));
    let listed: Vec<_> = listed.collect();
    assert!(listed.contains(&"on the disk: plot.svg old"), "{finished:#?}");
    assert!(!listed.iter().any(|line| line.contains("partial")), "{finished:#?}");
}

#[test]
fn an_impossible_by_product_path_fails_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (path, pipe) = (folder.path().to_str().unwrap(), pipe.to_str().unwrap());
    for (flag, path, problem) in [
        ("--metrics", path, "Is a directory (os error 21)"),
        ("--metrics", pipe, "nobody reads from it"),
        ("--plot", path, "it is a folder"),
        ("--logits", path, "it is a folder"),
        ("--logits", "/dev/null/x", "Not a directory (os error 20)"),
        ("--tensorboard", pipe, "File exists (os error 17)"),
    ] {
        let finished = run(TRAIN.alone().args(["--synthetic", "--steps", "1", flag, path]));
        finished.expect(1, &[&format!("train_mnist: cannot write {flag} {path}: {problem}")]);
        assert!(!finished.stdout.contains("epoch"), "{finished:#?}");
    }
    let finished = run(TRAIN.alone().args(["--synthetic", "--steps", "1", "--checkpoint-dir", pipe]));
    finished.expect(1, &[&format!("--checkpoint-dir: checkpoint {pipe}: not a folder")]);
}

#[test]
fn a_by_product_file_may_share_standard_output() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    for (flag, marks) in [("--plot", ["<svg", "</svg>"]), ("--metrics", ["{\"epoch\":1", "generated digits"])]
    {
        let mut shell = process::command("sh");
        shell.args(["-c", "exec \"$0\" \"$@\" >out"]).arg(TRAIN.path).current_dir(folder.path());
        run(shell.args(["--synthetic", "--steps", "1", "--skip-test", flag, "/dev/stdout"])).expect(0, &[]);
        let text = fs::read_to_string(&path).unwrap();
        let lines = ["lenet5 (", "epoch 1/1: ", "weights "];
        assert!(lines.iter().all(|begin| text.lines().any(|line| line.starts_with(begin))), "{flag}: {text}");
        assert!(marks.iter().all(|mark| text.contains(mark)), "{flag}: {text}");
        assert!(text.lines().last().unwrap().starts_with("weights "), "{flag}: {text}");
    }
}

#[test]
fn a_training_that_diverges_ends_with_an_error_and_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let checkpoints = folder.path().join("checkpoints");
    for (steps, more) in
        [("1", &[][..]), ("1", &["--skip-test"]), ("8", &[]), ("8", &["--checkpoint-every", "1"])]
    {
        let mut program = TRAIN.alone();
        program.args([
            "--lr",
            "3e38",
            "--schedule",
            "constant",
            "--batch",
            "4",
            "--threads",
            "1",
            "--steps",
            steps,
        ]);
        program.args(more).arg("--data").arg(folder.path()).arg("--checkpoint-dir").arg(&checkpoints);
        let finished = run(&mut program);
        assert_eq!(finished.code, Some(1), "{steps} {more:?}: {finished:#?}");
        let names = ["tensor `", "the test loss of epoch 1 is ", "the training loss of epoch 1 is "];
        assert!(names.iter().any(|name| finished.stderr.contains(name)), "{finished:#?}");
        assert_eq!(mgpu::checkpoint::latest(&checkpoints).unwrap(), None, "{finished:#?}");
    }
}

fn with_data(folder: &Path) -> Finished {
    let mut program = TRAIN.launched(2);
    run(program.arg("--data").arg(folder).args(["--steps", "1", "--batch", "8", "--json"]))
}

#[test]
fn bad_data_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    with_data(path).expect(1, &["train-images-idx3-ubyte"]);
    with_data(&path.join("none")).expect(1, &["none"]);
    mnist::write_tiny(path);
    with_data(path).expect(0, &[]);

    let labels = path.join("t10k-labels-idx1-ubyte");
    let good = fs::read(&labels).unwrap();
    let mut bad = good.clone();
    bad[8 + 5] = 10;
    fs::write(&labels, bad).unwrap();
    with_data(path).expect(1, &["t10k-labels-idx1-ubyte", "label 10"]);
    fs::write(&labels, good).unwrap();

    let images = path.join("train-images-idx3-ubyte");
    let good = fs::read(&images).unwrap();
    fs::write(&images, &good[..good.len() - 100]).unwrap();
    with_data(path).expect(1, &["train-images-idx3-ubyte", "truncated"]);
    fs::write(&images, &good[..7]).unwrap();
    with_data(path).expect(1, &["train-images-idx3-ubyte", "truncated"]);

    fs::remove_file(&images).unwrap();
    nix::unistd::mkfifo(&images, nix::sys::stat::Mode::S_IRWXU).unwrap();
    with_data(path).expect(1, &["train-images-idx3-ubyte: it is a named pipe, where a file is expected"]);
    with_data(&labels).expect(1, &["--data: ", "t10k-labels-idx1-ubyte: not a directory"]);
}

#[test]
fn bad_arguments_are_usage_errors() {
    for (arguments, text) in [
        (&["--net", "resnet"][..], "lenet5, deep, keras"),
        (&["--batch", "0"], "a number from 1"),
        (&["--lr", "1e39"], "a number above 0 that f32 can represent"),
        (&["--lr", "1e-60"], "a number above 0 that f32 can represent"),
        (&["--lr", "nan"], "a number above 0 that f32 can represent"),
        (&["--clip-norm", "inf"], "a number above 0 that f32 can represent"),
        (&["--precision", "tf32"], "tf32 needs a GPU"),
        (&["--epochs", "1", "--steps", "1"], "cannot be used with"),
        (&["--data", "x", "--synthetic"], "cannot be used with"),
        (&["--images", "9"], "<--synthetic|--write-digits <DIR>>"),
        (&["--synthetic", "--images", "1000001"], "at most 1000000: write more with --write-digits"),
        (&["--resume"], "--checkpoint-dir"),
        (&["--checkpoint-every", "5"], "--checkpoint-dir"),
        (&["--checkpoint-dir", "c", "--checkpoint-every", "0"], "0 is not in 1.."),
        (&["--checkpoint-dir", "c", "--keep", "0"], "0 is not in 1.."),
        (&["--log-every", "0"], "0 is not in 1.."),
        (&["--reduction", "max"], "invalid value 'max' for '--reduction <HOW>'"),
        (&["--evaluate", "c", "--steps", "5"], "'--evaluate <CHECKPOINT>' cannot be used with '--steps <N>'"),
        (&["--evaluate", "c", "--checkpoint-dir", "c"], "cannot be used with '--checkpoint-dir <DIR>'"),
        (&["--evaluate", "c", "--reduction", "sum"], "cannot be used with '--reduction <HOW>'"),
        (&["--predict", "i", "--output", "o"], "--evaluate <CHECKPOINT>"),
        (&["--evaluate", "c", "--predict", "i"], "--output <FILE>"),
        (&["--evaluate", "c", "--output", "o"], "--predict <IMAGES.idx>"),
    ] {
        run(TRAIN.alone().args(arguments)).expect(2, &[text]);
    }
    run(TRAIN.alone().args(["--synthetic", "--steps", "1", "--batch", "70000"]))
        .expect(1, &["60000 samples are fewer"]);
    run(TRAIN.alone().args(["--synthetic", "--images", "7", "--steps", "1", "--batch", "8"]))
        .expect(1, &["7 samples are fewer"]);
    run(TRAIN.alone().args(["--synthetic", "--steps", "1", "--metrics", "/nonexistent/m"]))
        .expect(1, &["/nonexistent/m"]);
    run(TRAIN.alone().args(["--synthetic", "--steps", "1", "--checkpoint-dir", "/proc/none"]))
        .expect(1, &["/proc/none"]);
    run(TRAIN.alone().args(["--threads", "5000"])).expect(2, &["5000 is not in 1..=1024"]);
}
