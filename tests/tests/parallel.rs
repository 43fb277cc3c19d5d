//! The flags for data-parallel training. `placements` covers where the weights are.

#[path = "parallel/placements.rs"]
mod placements;

use mgpu_tests::mnist;
use mgpu_tests::process::{Finished, Program, command, run};

const TRAIN: Program =
    Program { launcher: env!("CARGO_BIN_EXE_t-mgpurun"), path: env!("CARGO_BIN_EXE_t-train_mnist") };

fn train(ranks: u32, arguments: &[&str]) -> Finished {
    run(TRAIN.launched(ranks).args(["--synthetic", "--images", "2000", "--json"]).args(arguments))
}

#[test]
fn world_size_invariant_training_is_bit_equal() {
    // keras has batch normalisation and dropout.
    for (net, steps) in [("lenet5", "10"), ("keras", "3")] {
        let run = |ranks: u32, flags: &[&str]| {
            let batch = (32 / ranks).to_string();
            let all = ["--net", net, "--steps", steps, "--batch", &batch, "--skip-test"];
            train(ranks, &[&all[..], flags].concat()).weights()
        };
        let invariant = ["--world-size-invariant", "4", "--clip-norm", "1"];
        let expected = run(1, &invariant);
        for ranks in [2, 4] {
            assert_eq!(run(ranks, &invariant), expected, "{net} on {ranks} ranks");
            assert_eq!(run(ranks, &[&invariant[..], &["--shard-optimizer", "on"]].concat()), expected);
        }
        assert_ne!(run(2, &["--threads", "1"]), expected, "{net}: what is asked for is not there anyway");
    }
}

#[test]
fn a_sum_of_gradients_trains_the_weights_of_their_mean() {
    let folder = tempfile::tempdir().unwrap();
    mnist::write_tiny(folder.path());
    let train = |ranks, flags: &[&str]| {
        run(TRAIN
            .launched(ranks)
            .arg("--data")
            .arg(folder.path())
            .args(["--json", "--threads", "1"])
            .args(flags))
    };
    // Adam, with L2 penalty and without, and RMSprop. All are powers of two of summands.
    for (ranks, flags) in [
        (2, &["--net", "lenet5", "--steps", "12"][..]),
        (2, &["--net", "deep", "--steps", "2", "--batch", "4", "--shard-optimizer", "on"]),
        (2, &["--net", "keras", "--steps", "2", "--batch", "4", "--accumulate", "2"]),
        (4, &["--net", "lenet5", "--steps", "6", "--gradients", "bf16"]),
        (2, &["--net", "lenet5", "--steps", "6", "--world-size-invariant", "8"]),
    ] {
        let flags = [flags, &["--skip-test"]].concat();
        let mean = train(ranks, &flags).weights();
        let sum = train(ranks, &[&flags[..], &["--reduction", "sum"]].concat()).weights();
        assert_eq!(mean, sum, "{ranks} ranks, {flags:?}");
    }
    let loss = |how| {
        let flags = ["--steps", "6", "--batch", "4", "--clip-norm", "0.5", "--reduction", how];
        train(3, &flags).json()["test_loss"].as_f64().unwrap()
    };
    let (mean, sum) = (loss("mean"), loss("sum"));
    assert!((mean - sum).abs() < 1e-4 * mean, "{mean} and {sum}");
}

#[test]
fn a_run_is_resumed_with_the_reduction_that_it_began_with() {
    let folder = tempfile::tempdir().unwrap();
    let keep = ["--checkpoint-dir", folder.path().to_str().unwrap(), "--resume", "--skip-test"];
    let run = |ranks, batch, steps, how| {
        let flags = ["--batch", batch, "--steps", steps, "--schedule", "constant", "--reduction", how];
        train(ranks, &[&keep[..], &flags].concat())
    };
    run(2, "8", "2", "sum").expect(0, &[]);
    let saved = "--reduction: sum of 2 micro-batches on all ranks in the checkpoint, ";
    run(2, "8", "4", "mean").expect(1, &[&format!("{saved}mean here")]);
    // The optimizer's state is the state of these sums.
    run(1, "16", "4", "sum").expect(1, &[&format!("{saved}sum of 1 micro-batches on all ranks here")]);
    run(2, "8", "4", "sum").expect(0, &["after step 2"]);
}

/// Killed after the fifth step, with four steps saved.
#[test]
fn a_killed_run_resumes_bit_equal_with_every_option() {
    for flags in [
        &["--schedule", "cosine:0.1", "--warm-up", "3", "--clip-norm", "0.5"][..],
        &["--accumulate", "4", "--schedule", "step:3:0.5", "--shard-optimizer", "on"],
        &["--gradients", "bf16", "--clip-norm", "0.5", "--shard-optimizer", "on"],
        &["--world-size-invariant", "4", "--clip-norm", "0.5"],
    ] {
        let all = [&["--batch", "16", "--steps", "9", "--skip-test"], flags].concat();
        let expected = train(2, &all).weights();
        let folder = tempfile::tempdir().unwrap();
        let saving = ["--checkpoint-every", "2", "--checkpoint-dir", folder.path().to_str().unwrap()];
        let saving = [&all[..], &saving].concat();
        let mut killed = TRAIN.launched_with(2, &["--inject", "rank=1,step=6,fault=sigkill"]);
        run(killed.args(["--synthetic", "--images", "2000"]).args(&saving)).expect(128 + 9, &[]);
        let resumed = train(2, &[&saving[..], &["--resume"]].concat());
        resumed.expect(0, &["resumed from"]);
        assert_eq!(resumed.weights(), expected, "{flags:?}");
    }
}

/// Started on four ranks, resumed on two, with the bits of one.
#[test]
fn a_world_size_invariant_run_resumes_on_other_ranks_bit_equal() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let run = |ranks: u32, steps: &str, flags: &[&str]| {
        let batch = (32 / ranks).to_string();
        let all = ["--world-size-invariant", "8", "--batch", &batch, "--schedule", "constant", "--skip-test"];
        train(ranks, &[&all[..], &["--steps", steps], flags].concat())
    };
    let expected = run(1, "8", &[]).weights();
    run(4, "3", &["--checkpoint-dir", folder]).expect(0, &[]);
    let resumed = run(2, "8", &["--checkpoint-dir", folder, "--resume"]);
    assert_eq!(resumed.weights(), expected);
    assert!(!resumed.stdout.contains("will not be bit-equal"), "{resumed:#?}");
    let other = ["--checkpoint-dir", folder, "--resume", "--clip-norm", "1", "--warm-up", "2"];
    run(2, "8", &other).expect(1, &["--clip-norm: none in the checkpoint, 1 here", "--warm-up: 0 in the"]);
}

#[test]
fn micro_batches_use_less_memory() {
    let run = |flags: &[&str]| {
        let all = ["--net", "conv6", "--steps", "1", "--batch", "32", "--skip-test"];
        let finished = train(2, &[&all[..], flags].concat());
        finished.expect(0, &["the same on 2 ranks"]);
        finished.json()["rss_mib"].as_f64().unwrap()
    };
    let (whole, parts) = (run(&[]), run(&["--accumulate", "8"]));
    assert!(parts < whole, "{parts} MiB in parts, {whole} MiB at once");
    let finished =
        train(2, &["--steps", "800", "--accumulate", "4", "--gradients", "bf16", "--clip-norm", "5"]);
    finished.expect(0, &["the same on 2 ranks"]);
    assert!(finished.json()["test_acc"].as_f64().unwrap() > 0.95, "{finished:#?}");
}

#[test]
fn indivisible_batches_name_the_flag() {
    let expect_error = |ranks, flags: &[&str], text| {
        train(ranks, &[&["--steps", "1"], flags].concat()).expect(1, &[text]);
    };
    expect_error(2, &["--world-size-invariant", "6"], "--world-size-invariant 6 must be a power of two");
    expect_error(3, &["--world-size-invariant", "8"], "a multiple of the number of ranks, 3");
    expect_error(
        1,
        &["--accumulate", "5"],
        "the batch of 16 images on each rank cannot be split into 5 equal micro-batches",
    );
    train(1, &["--clip-norm", "0"]).expect(2, &["--clip-norm", "it should be a number above 0"]);
    train(1, &["--accumulate", "2", "--world-size-invariant", "2"]).expect(2, &["cannot be used with"]);
}

#[test]
fn overlap_does_not_change_the_weights() {
    // keras also sums over ranks in its passes; deep has sharded buckets.
    for (ranks, net, flags) in [
        (3, "lenet5", &[][..]),
        (3, "keras", &["--clip-norm", "1"]),
        (2, "deep", &["--accumulate", "2", "--gradients", "bf16"]),
    ] {
        let all = [&["--net", net, "--batch", "8", "--steps", "4", "--skip-test"], flags].concat();
        let expected = train(ranks, &all).weights();
        let found = train(ranks, &[&all[..], &["--overlap"]].concat()).weights();
        assert_eq!(found, expected, "{net} on {ranks} ranks, {flags:?}");
    }
}

/// Three ranks with `arguments`; rank 1 also has `others`.
fn train_unequally(arguments: &[&str], others: &str) -> Finished {
    let script = format!(r#"if [ "$RANK" = 1 ]; then set -- "$@" {others}; fi; exec "$@""#);
    let mut launcher = command(TRAIN.launcher);
    launcher.args(["-n", "3", "sh", "-c", &script, "sh", TRAIN.path]).args(arguments);
    run(&mut launcher)
}

/// Ranks with different flags would train something unintended, or wait for each other forever.
#[test]
fn flags_that_differ_between_ranks_are_named_before_the_first_step() {
    for (others, text) in [
        ("--net keras", "--net keras where rank 0 has lenet5"),
        ("--steps 3", "--steps 3 where rank 0 has none"),
        ("--epochs 2", "--epochs 2 where rank 0 has 3"),
        ("--batch 8", "--batch 8 where rank 0 has 16"),
        ("--lr 0.5", "--lr 0.5 where rank 0 has 0.001"),
        ("--schedule cosine:0.1", "--schedule cosine:0.1 where rank 0 has linear"),
        ("--warm-up 2", "--warm-up 2 where rank 0 has 0"),
        ("--seed 2", "--seed 2 where rank 0 has 1"),
        ("--precision bf16", "--precision bf16 where rank 0 has f32"),
        ("--conv direct", "--conv direct where rank 0 has auto"),
        ("--placement shared", "--placement shared where rank 0 has replicated"),
        ("--bucket 0.5", "--bucket 0.5 where rank 0 has none"),
        ("--shard-optimizer on", "--shard-optimizer on where rank 0 has auto"),
        ("--overlap", "--overlap true where rank 0 has false"),
        ("--accumulate 2", "--accumulate 2 where rank 0 has 1"),
        ("--world-size-invariant 4", "--world-size-invariant 4 where rank 0 has none"),
        ("--clip-norm 1.5", "--clip-norm 1.5 where rank 0 has none"),
        ("--gradients bf16", "--gradients bf16 where rank 0 has f32"),
        ("--reduction sum", "--reduction sum where rank 0 has mean"),
        ("--log-every 7", "--log-every 7 where rank 0 has none"),
        ("--evaluate none", "--evaluate given where rank 0 has none"),
        ("--skip-test", "--skip-test true where rank 0 has false"),
    ] {
        let finished = train_unequally(&["--synthetic"], others);
        assert_eq!(finished.code, Some(1), "{finished:#?}");
        for rank in 0..3 {
            let line = format!("[{rank}] train_mnist: rank 1 has {text}; all ranks need the same");
            assert!(finished.stderr.contains(&line), "no `{line}` in {finished:#?}");
        }
    }
}

#[test]
fn data_that_differs_between_ranks_is_named() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    folders.iter().for_each(|folder| mnist::write_tiny(folder.path()));
    let [first, second] = folders.each_ref().map(|folder| folder.path().to_str().unwrap());
    // The contents of the data matter, not its path.
    let script = r#"if [ "$RANK" = 1 ]; then set -- "$@" --data "$1"; else set -- "$@" --data "$2"; fi; shift 2; exec "$@""#;
    let train = || {
        let mut launcher = command(TRAIN.launcher);
        launcher.args(["-n", "3", "sh", "-c", script, "sh", first, second, TRAIN.path, "--steps", "1"]);
        run(launcher.args(["--batch", "4"]))
    };
    train().expect(0, &["the same on 3 ranks"]);
    let labels = folders[0].path().join("train-labels-idx1-ubyte");
    let mut bytes = std::fs::read(&labels).unwrap();
    bytes[8] ^= 1;
    std::fs::write(&labels, bytes).unwrap();
    let text = "rank 1 has as training set 64 images with checksum ";
    train().expect(1, &[text, "where rank 0 has 64 images with checksum ", "mgpurun: rank 1 exited"]);
    train_unequally(&["--steps", "1"], &format!("--data {first}")).expect(
        1,
        &["rank 1 has --data, --synthetic or --download a folder where rank 0 has 60000 generated digits; all"],
    );
}
