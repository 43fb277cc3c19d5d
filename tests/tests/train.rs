//! `train_mnist`: smoke tests, equality of ranks and runs, resume, bad input. On generated digits, so anywhere.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use mgpu_tests::process::{Finished, command, finish, run, until};

const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

/// `train_mnist` under the launcher.
fn launched(ranks: u32) -> Command {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.args(["-n", &ranks.to_string(), "--no-prefix", TRAIN]);
    launcher
}

fn plain() -> Command {
    command(TRAIN)
}

fn train(mut program: Command, arguments: &[&str]) -> Finished {
    run(program.args(["--synthetic", "--json"]).args(arguments))
}

fn weights(finished: &Finished) -> String {
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    finished.json()["weights"].as_str().expect("a checksum of the weights").to_owned()
}

#[test]
fn the_smoke_test_of_a_ci_job() {
    for program in [launched(1), plain()] {
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
fn alone_with_and_without_the_launcher_gives_the_same_bits() {
    let arguments = ["--steps", "12", "--skip-test", "--threads", "1"];
    assert_eq!(weights(&train(plain(), &arguments)), weights(&train(launched(1), &arguments)));
}

#[test]
fn a_seed_and_a_rank_count_give_the_same_bits_every_time() {
    let arguments = ["--steps", "12", "--skip-test", "--seed", "5"];
    for ranks in [2, 3] {
        let first = weights(&train(launched(ranks), &arguments));
        assert_eq!(first, weights(&train(launched(ranks), &arguments)));
    }
    let other = ["--steps", "12", "--skip-test", "--seed", "6"];
    assert_ne!(weights(&train(launched(2), &arguments)), weights(&train(launched(2), &other)));
}

#[test]
fn a_sharded_optimizer_gives_the_same_bits() {
    for (net, steps) in [("lenet5", "12"), ("keras", "3")] {
        let run = |ranks, how| {
            let arguments = ["--net", net, "--steps", steps, "--batch", "8", "--skip-test"];
            weights(&train(launched(ranks), &[&arguments[..], &["--shard-optimizer", how]].concat()))
        };
        for ranks in [2, 3] {
            let replicated = run(ranks, "off");
            assert_eq!(replicated, run(ranks, "on"));
            assert_eq!(replicated, run(ranks, "auto"));
        }
    }
}

#[test]
fn a_sharded_run_goes_on_replicated_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let all = ["--batch", "16", "--skip-test", "--schedule", "constant"];
    let whole = weights(&train(launched(2), &[&all[..], &["--steps", "15"]].concat()));
    let folder = folder.path().to_str().unwrap();
    let go_on = |how, steps| {
        let saving = ["--checkpoint-dir", folder, "--resume", "--shard-optimizer", how, "--steps", steps];
        train(launched(2), &[&all[..], &saving].concat())
    };
    go_on("on", "5").expect(0, &["no checkpoint in"]);
    go_on("off", "10").expect(0, &["resumed from"]);
    assert_eq!(weights(&go_on("on", "15")), whole);
}

#[test]
fn generated_digits_are_learned() {
    let finished = train(launched(2), &["--epochs", "1"]);
    finished.expect(0, &["the same on 2 ranks"]);
    let accuracy = finished.json()["test_acc"].as_f64().unwrap();
    assert!(accuracy > 0.9, "test accuracy {accuracy}");
}

#[test]
fn images_kept_as_bf16_are_learned_from_alike_on_all_ranks() {
    let finished = train(launched(2), &["--epochs", "1", "--precision", "bf16"]);
    finished.expect(0, &["the same on 2 ranks"]);
    let json = finished.json();
    assert_eq!(json["dtype"], "bf16");
    let accuracy = json["test_acc"].as_f64().unwrap();
    assert!(accuracy > 0.9, "test accuracy {accuracy}");
    let weights_in = |precision| {
        let arguments = ["--steps", "5", "--skip-test", "--precision", precision];
        weights(&train(launched(1), &arguments))
    };
    assert_ne!(weights_in("bf16"), weights_in("f32"), "nothing was rounded");
}

#[test]
fn curves_are_drawn_and_written_for_tensorboard() {
    let folder = tempfile::tempdir().unwrap();
    let (plot, events) = (folder.path().join("curves.svg"), folder.path().join("events"));
    let mut program = launched(2);
    program.arg("--plot").arg(&plot).arg("--tensorboard").arg(&events);
    train(program, &["--steps", "20"]).expect(0, &[]);
    let text = fs::read_to_string(&plot).unwrap();
    assert!(text.starts_with("<svg") && text.contains("accuracy, %"), "{text}");
    // Of rank 0 alone.
    let files: Vec<_> = fs::read_dir(&events).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let bytes = fs::read(&files[0]).unwrap();
    let times = |tag: &[u8]| bytes.windows(tag.len()).filter(|window| *window == tag).count();
    assert_eq!((times(b"train/step_loss"), times(b"test/accuracy")), (20, 1));
    run(plain().args(["--synthetic", "--plot", "/nonexistent/c.svg"])).expect(1, &["/nonexistent/c.svg"]);
    run(plain().args(["--synthetic", "--tensorboard", "/proc/none"])).expect(1, &["/proc/none"]);
}

#[test]
fn a_prolonged_run_is_bit_equal() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let all = ["--batch", "16", "--skip-test", "--schedule", "constant"];
    let whole = weights(&train(launched(2), &[&all[..], &["--steps", "30"]].concat()));
    let saving = [&all[..], &["--checkpoint-dir", folder, "--resume"]].concat();
    train(launched(2), &[&saving[..], &["--steps", "18"]].concat()).expect(0, &["no checkpoint in"]);
    let resumed = train(launched(2), &[&saving[..], &["--steps", "30"]].concat());
    resumed.expect(0, &["resumed from", "after step 18"]);
    assert_eq!(weights(&resumed), whole);
    // Another run's checkpoint is refused by name.
    let other = train(launched(2), &[&saving[..], &["--steps", "40", "--seed", "9"]].concat());
    other.expect(1, &["step-00000030 is of another run"]);
}

#[test]
fn a_killed_and_resumed_run_is_bit_equal() {
    let folder = tempfile::tempdir().unwrap();
    let (data, checkpoints) = (folder.path().join("data"), folder.path().join("checkpoints"));
    fs::create_dir(&data).unwrap();
    tiny_mnist(&data);
    let run_on_tiny = |extra: &[&str]| {
        let mut launcher = launched(2);
        launcher.args(["--data", data.to_str().unwrap(), "--net", "keras", "--batch", "4", "--epochs", "3"]);
        launcher.args(["--json"]).args(extra);
        launcher
    };
    let whole = weights(&run(&mut run_on_tiny(&[])));
    let saving = ["--checkpoint-dir", checkpoints.to_str().unwrap(), "--resume"];
    let mut first = run_on_tiny(&saving).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let has_checkpoint = || {
        let entries = fs::read_dir(&checkpoints).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with("step-"))
    };
    until(has_checkpoint);
    first.kill().unwrap();
    finish(&mut first);
    let resumed = run(&mut run_on_tiny(&saving));
    resumed.expect(0, &["resumed from"]);
    assert_eq!(weights(&resumed), whole);
}

#[test]
fn a_restarted_run_goes_on_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let restarted = |faults: &[&str]| {
        let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
        launcher.args(["-n", "2", "--no-prefix", "--max-restarts", "1"]);
        faults.iter().for_each(|fault| _ = launcher.args(["--inject", fault]));
        launcher.args([TRAIN, "--synthetic", "--json", "--batch", "2048", "--epochs", "3", "--skip-test"]);
        launcher
    };
    let undisturbed = run(&mut restarted(&[]));
    let (whole, steps) = (weights(&undisturbed), undisturbed.json()["steps"].as_u64().unwrap());
    // After the second checkpoint.
    let fault = format!("rank=1,step={},fault=sigkill", steps * 2 / 3 + 1);
    let finished = run(restarted(&[&fault]).args(["--checkpoint-dir", folder]));
    finished.expect(0, &["rank 1 was killed by SIGKILL", "restart 1 of 1", "resumed from"]);
    assert_eq!(weights(&finished), whole);
    // What is there is not overwritten by mistake.
    let again = run(restarted(&[]).args(["--checkpoint-dir", folder]));
    again.expect(1, &["is of an earlier run: go on with --resume, or choose another --checkpoint-dir"]);
}

#[test]
fn metrics_are_one_json_object_an_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    let arguments = ["--steps", "5", "--skip-test", "--metrics", file.to_str().unwrap()];
    train(launched(2), &arguments).expect(0, &[]);
    let text = fs::read_to_string(file).unwrap();
    let line: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((&line["epoch"], &line["step"]), (&1.into(), &5.into()));
    assert!(line["data"].as_str().unwrap().contains("generated"));
    assert_eq!(text.lines().count(), 1);
}

/// A folder with tiny valid data, to be damaged.
fn tiny_mnist(folder: &Path) {
    for (prefix, count) in [("train", 64u32), ("t10k", 16)] {
        let mut images = [0x803u32, count, 28, 28].map(u32::to_be_bytes).concat();
        images.resize(16 + count as usize * 784, 7);
        fs::write(folder.join(format!("{prefix}-images-idx3-ubyte")), images).unwrap();
        let mut labels = [0x801u32, count].map(u32::to_be_bytes).concat();
        labels.extend((0..count).map(|i| (i % 10) as u8));
        fs::write(folder.join(format!("{prefix}-labels-idx1-ubyte")), labels).unwrap();
    }
}

fn with_data(folder: &Path) -> Finished {
    run(launched(2).args(["--data", folder.to_str().unwrap(), "--steps", "1", "--batch", "8", "--json"]))
}

#[test]
fn bad_data_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    with_data(path).expect(1, &["train-images-idx3-ubyte"]);
    with_data(&path.join("none")).expect(1, &["none"]);
    tiny_mnist(path);
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
}

#[test]
fn bad_arguments_are_usage_errors() {
    for (arguments, text) in [
        (&["--net", "resnet"][..], "lenet5, deep, keras"),
        (&["--batch", "0"], "a number from 1"),
        (&["--precision", "tf32"], "tf32 needs a GPU"),
        (&["--epochs", "1", "--steps", "1"], "cannot be used with"),
        (&["--data", "x", "--synthetic"], "cannot be used with"),
        (&["--resume"], "--checkpoint-dir"),
    ] {
        run(plain().args(arguments)).expect(2, &[text]);
    }
    run(plain().args(["--synthetic", "--steps", "1", "--batch", "70000"]))
        .expect(1, &["60000 samples are fewer"]);
    run(plain().args(["--synthetic", "--steps", "1", "--metrics", "/nonexistent/m"]))
        .expect(1, &["/nonexistent/m"]);
    run(plain().args(["--synthetic", "--steps", "1", "--checkpoint-dir", "/proc/none"]))
        .expect(1, &["/proc/none"]);
    run(plain().args(["--threads", "5000"])).expect(2, &["5000 is not in 1..=1024"]);
}
