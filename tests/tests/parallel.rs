//! The flags for how ranks train together, as a user gives them.

use mgpu_tests::process::{Finished, Program, run};

const TRAIN: Program =
    Program { launcher: env!("CARGO_BIN_EXE_t-mgpurun"), path: env!("CARGO_BIN_EXE_t-train_mnist") };

fn train(ranks: u32, arguments: &[&str]) -> Finished {
    run(TRAIN.launched(ranks).args(["--synthetic", "--json"]).args(arguments))
}

#[test]
fn the_number_of_ranks_makes_no_difference_where_that_is_asked_for() {
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

/// Killed after the fifth step, of which four were saved.
#[test]
fn whatever_a_step_does_a_killed_run_goes_on_to_the_same_bits() {
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
        run(killed.arg("--synthetic").args(&saving)).expect(128 + 9, &[]);
        let resumed = train(2, &[&saving[..], &["--resume"]].concat());
        resumed.expect(0, &["resumed from"]);
        assert_eq!(resumed.weights(), expected, "{flags:?}");
    }
}

/// Begun by four ranks, gone on by two, which give the bits of one.
#[test]
fn a_run_goes_on_with_other_ranks_to_the_same_bits() {
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
    assert!(!resumed.stdout.contains("will not have the bits"), "{resumed:#?}");
    let other = ["--checkpoint-dir", folder, "--resume", "--clip-norm", "1", "--warm-up", "2"];
    run(2, "8", &other).expect(1, &["--clip-norm: none in the checkpoint, 1 here", "--warm-up: 0 in the"]);
}

#[test]
fn micro_batches_take_less_memory_and_train_as_well() {
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
fn what_cannot_be_divided_is_told_by_its_flag() {
    let told = |ranks, flags: &[&str], text| {
        train(ranks, &[&["--steps", "1"], flags].concat()).expect(1, &[text]);
    };
    told(2, &["--world-size-invariant", "6"], "--world-size-invariant 6: it should be a power of two");
    told(3, &["--world-size-invariant", "8"], "and a multiple of the 3 ranks");
    told(1, &["--accumulate", "5"], "16 images a step on each rank cannot be cut into 5 micro-batches");
    train(1, &["--clip-norm", "0"]).expect(2, &["--clip-norm", "it should be a number above 0"]);
    train(1, &["--accumulate", "2", "--world-size-invariant", "2"]).expect(2, &["cannot be used with"]);
}

#[test]
fn reductions_on_a_thread_of_their_own_leave_the_bits_as_they_are() {
    // keras sums over ranks in between; deep has sharded buckets.
    for (ranks, net, flags) in [
        (3, "lenet5", &[][..]),
        (3, "keras", &["--clip-norm", "1"]),
        (2, "deep", &["--accumulate", "2", "--gradients", "bf16"]),
        (2, "lenet5", &["--world-size-invariant", "4"]),
    ] {
        let all = [&["--net", net, "--batch", "8", "--steps", "4", "--skip-test"], flags].concat();
        let expected = train(ranks, &all).weights();
        let found = train(ranks, &[&all[..], &["--overlap"]].concat()).weights();
        assert_eq!(found, expected, "{net} on {ranks} ranks, {flags:?}");
    }
}

#[test]
fn a_rank_that_dies_while_others_reduce_behind_their_backs_is_named() {
    let mut launcher = TRAIN.launched_with(3, &["--inject", "rank=1,step=5,fault=sigkill"]);
    run(launcher.args(["--synthetic", "--overlap", "--steps", "100000"]))
        .expect(128 + 9, &["rank 1 was killed by SIGKILL"]);
}
