//! With `--global-batch` a run trains the same on any number of ranks, and continues on any.

use super::{TRAIN, Tiny, resumed_after};
use mgpu_tests::process::Finished;

/// Five steps of twelve images in an epoch.
const GLOBAL: [&str; 2] = ["--global-batch", "12"];

impl Tiny {
    /// A run of two epochs, unless `arguments` override that, on `ranks` ranks, without `--batch`.
    fn elastic(&self, ranks: u32, options: &[&str], arguments: &[&str]) -> Finished {
        let data = self.folder.path().join("data");
        let mut program = TRAIN.launched_with(ranks, options);
        program.args(["--json", "--threads", "1", "--data"]).arg(data).args(arguments);
        if !arguments.contains(&"--steps") {
            program.args(["--epochs", "2"]);
        }
        super::run(&mut program)
    }

    /// As [`elastic`](Self::elastic), with a checkpoint after every second step, and `--resume`.
    fn elastic_saved(&self, ranks: u32, options: &[&str], arguments: &[&str]) -> Finished {
        let folder = self.checkpoints();
        let saving = ["--checkpoint-every", "2", "--checkpoint-dir", folder.to_str().unwrap(), "--resume"];
        self.elastic(ranks, options, &[arguments, &saving].concat())
    }
}

/// Sharded state of RMSprop and Adam, batch normalisation, dropout, clipping; micro-batches of one and of two images;
/// interrupted within an epoch.
#[test]
fn a_run_that_shrinks_and_grows_back_has_the_bits_of_an_uninterrupted_one() {
    for flags in [
        &["--net", "lenet5", "--shard-optimizer", "on", "--warm-up", "3"][..],
        &["--net", "keras", "--clip-norm", "0.5", "--skip-test"],
    ] {
        let tiny = Tiny::new();
        let all = [&GLOBAL[..], &["--world-size-invariant", "8", "--steps", "5"], flags].concat();
        let whole = tiny.elastic(1, &[], &all);
        assert_eq!(whole.json()["steps"], 5);
        for (ranks, step) in [(4, 3), (2, 4)] {
            let fault = format!("rank=1,step={step},fault=sigkill");
            let killed = tiny.elastic_saved(ranks, &["--inject", &fault], &all);
            killed.expect(128 + 9, &["the 12 images of a step are divided unevenly"]);
        }
        let last = tiny.elastic_saved(4, &[], &all);
        assert!([2, 4].contains(&resumed_after(&last)), "{last:#?}");
        assert!(!last.stdout.contains("will not be bit-equal"), "{last:#?}");
        assert_eq!(last.weights(), whole.weights(), "{flags:?}");
        assert_eq!(last.json()["test_loss"], whole.json()["test_loss"]);
    }
}

#[test]
fn a_launch_goes_on_without_a_rank_that_fails_again_and_again() {
    let tiny = Tiny::new();
    let all = [&GLOBAL[..], &["--world-size-invariant", "4"]].concat();
    let whole = tiny.elastic(2, &[], &all).weights();
    let options = [
        &["--min-ranks", "1", "--max-restarts", "2", "--inject", "rank=1,step=4,fault=sigkill"][..],
        &["--inject", "rank=1,step=8,fault=exit:3,restart=1"],
    ];
    let shrunk = tiny.elastic_saved(2, &options.concat(), &all);
    shrunk.expect(0, &["going on with 1 of 2 ranks", "the same on 1 rank"]);
    assert_eq!(shrunk.stdout.matches("resumed from").count(), 2, "{shrunk:#?}");
    assert_eq!(shrunk.weights(), whole);
}

/// All images weigh the same, whatever the number of images of a rank, a replica or a micro-batch.
#[test]
fn unequal_batches_train_what_one_rank_trains() {
    let tiny = Tiny::new();
    for (ranks, global, flags, options) in [
        (3, "8", &["--net", "lenet5", "--lr", "0.01"][..], &[][..]),
        // Statistics of the whole batch, and dropout by its images.
        (3, "8", &["--net", "keras"], &["--shard-optimizer", "on"]),
        (2, "7", &["--net", "lenet5", "--lr", "0.01"], &["--accumulate", "2", "--clip-norm", "99"]),
        (2, "7", &["--net", "lenet5", "--lr", "0.01"], &["--reduction", "sum", "--overlap"]),
        (4, "5", &["--net", "lenet5", "--lr", "0.01"], &["--placement", "layers:2", "--cut", "7"]),
    ] {
        let common = [flags, &["--global-batch", global, "--steps", "3", "--schedule", "constant"]].concat();
        let run = |ranks, more: &[&str]| {
            let mut program = TRAIN.launched(ranks);
            program.args(["--json", "--skip-test", "--log-every", "1", "--threads", "1", "--data"]);
            program.arg(tiny.folder.path().join("data"));
            let finished = super::run(program.args(&common).args(more));
            let json = finished.expect(0, &[]).json();
            let lines = finished.stdout.lines().filter(|line| line.starts_with("step "));
            let losses = lines.map(|line| line.split(' ').nth(5).unwrap().parse().unwrap());
            (losses.collect::<Vec<f64>>(), ["global_batch", "batch"].map(|key| json[key].as_u64().unwrap()))
        };
        let ((alone, whole), (divided, part)) = (run(1, &[]), run(ranks, options));
        let what =
            format!("{ranks} ranks, {global} images, {flags:?} {options:?}: {divided:?}, not {alone:?}");
        let is_close = |(a, b): (&f64, &f64)| (a - b).abs() < 2e-4;
        assert!(alone.len() == 3 && alone.iter().zip(&divided).all(is_close), "{what}");
        assert!(part[0] == whole[0] && part[1] < whole[1], "{what}");
    }
}

#[test]
fn an_equal_division_has_the_bits_of_batches_of_each_rank() {
    let tiny = Tiny::new();
    for flags in [&[][..], &["--accumulate", "2", "--clip-norm", "0.5"]] {
        let all = [&["--net", "keras", "--skip-test", "--steps", "2"], flags].concat();
        let of_each = tiny.run(TRAIN.launched(2), &[&all[..], &["--batch", "6"]].concat());
        let global = tiny.elastic(2, &[], &[&all[..], &GLOBAL].concat());
        assert!(!global.stdout.contains("unevenly"), "{global:#?}");
        assert_eq!(global.weights(), of_each.weights(), "{flags:?}");
        assert_eq!(global.json()["batch"], 6);
    }
}

#[test]
fn a_global_batch_continues_on_other_ranks_and_another_one_is_refused() {
    let tiny = Tiny::new();
    let quick = ["--skip-test", "--schedule", "constant"];
    tiny.elastic_saved(3, &[], &[&quick[..], &GLOBAL].concat()).expect(0, &["no checkpoint in"]);
    let note = "the weights will not be bit-equal to those of an uninterrupted run: ranks 2 instead of 3";
    tiny.elastic_saved(2, &[], &[&quick[..], &GLOBAL].concat()).expect(0, &[note, "nothing left to train"]);
    tiny.elastic_saved(2, &[], &[&quick[..], &["--global-batch", "13"]].concat()).expect(
        1,
        &["--batch: 12 images a step, 4 on each of 3 in the checkpoint, 13 images a step, at most 7 on each of 2 here"],
    );
    for (ranks, flags, text) in [
        (3, &["--global-batch", "2"][..], "a global batch of 2 images is too small for 3 ranks"),
        (2, &["--global-batch", "5", "--accumulate", "3"], "the 2 images of a rank are too few for its 3"),
        (1, &["--global-batch", "65"], "64 samples are fewer than a global batch of 65"),
    ] {
        tiny.elastic(ranks, &[], flags).expect(1, &[text]);
    }
    tiny.elastic(1, &[], &["--global-batch", "4", "--batch", "4"]).expect(2, &["cannot be used with"]);
}
