//! `train_mnist` resumes from its checkpoints, bit-equal to an uninterrupted run, or with a message why not. `evaluation`
//! covers runs that only load a checkpoint, `global_batch` runs whose number of ranks changes.

#[path = "resume/evaluation.rs"]
mod evaluation;
#[path = "resume/global_batch.rs"]
mod global_batch;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mgpu::checkpoint::{Position, Writer};
use mgpu_tests::mnist;
use mgpu_tests::process::{self, Finished, Program, finish, run, until};

const TRAIN: Program =
    Program { launcher: env!("CARGO_BIN_EXE_t-mgpurun"), path: env!("CARGO_BIN_EXE_t-train_mnist") };

fn train(mut program: Command, arguments: &[&str]) -> Finished {
    run(program.args(["--synthetic", "--json"]).args(arguments))
}

/// A small data set, and a checkpoint folder.
struct Tiny {
    folder: tempfile::TempDir,
}

impl Tiny {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        mnist::write_tiny(&folder.path().join("data"));
        Tiny { folder }
    }

    fn checkpoints(&self) -> PathBuf {
        self.folder.path().join("checkpoints")
    }

    /// Three epochs of eight steps of eight images, unless `arguments` override that.
    fn run(&self, program: Command, arguments: &[&str]) -> Finished {
        run(&mut self.command(program, arguments))
    }

    fn command(&self, mut program: Command, arguments: &[&str]) -> Command {
        program.arg("--json").args(arguments);
        for (flag, value) in [("--batch", "4"), ("--epochs", "3"), ("--threads", "1")] {
            let other = if flag == "--epochs" { "--steps" } else { flag };
            if !arguments.iter().any(|argument| *argument == flag || *argument == other) {
                program.args([flag, value]);
            }
        }
        if !arguments.contains(&"--data") {
            program.arg("--data").arg(self.folder.path().join("data"));
        }
        program
    }

    /// As [`run`](Self::run), with `--checkpoint-dir` and `--resume`.
    fn saved(&self, program: Command, arguments: &[&str]) -> Finished {
        let folder = self.checkpoints();
        self.run(program, &[arguments, &["--checkpoint-dir", folder.to_str().unwrap(), "--resume"]].concat())
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.checkpoints()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Changes the last byte of a file in the checkpoint after `step` steps.
    fn damage(&self, step: u64, file: &str) {
        let path = self.checkpoints().join(format!("step-{step:08}")).join(file);
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
    }
}

/// The step after which a run was resumed, according to its output.
fn resumed_after(finished: &Finished) -> u64 {
    let line = finished.stdout.lines().find(|line| line.starts_with("resumed from"));
    let line = line.unwrap_or_else(|| panic!("not resumed: {finished:#?}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_run_killed_within_an_epoch_resumes_at_the_next_step() {
    // With this scale, gradients overflow in the first steps.
    for (precision, scale) in [("f32", &[][..]), ("bf16", &[]), ("fp16", &["--loss-scale", "1e7"])] {
        let tiny = Tiny::new();
        let digits = tiny.folder.path().join("digits");
        mnist::write_digits(&digits, 64, 16);
        let data = ["--data", digits.to_str().unwrap()];
        let all = [&["--net", "keras", "--precision", precision, "--skip-test"][..], &data, scale].concat();
        let whole = tiny.run(TRAIN.launched(2), &all);
        let every = [&all[..], &["--checkpoint-every", "3"]].concat();
        let killed =
            tiny.saved(TRAIN.launched_with(2, &["--inject", "rank=1,step=14,fault=sigkill"]), &every);
        assert_eq!(killed.code, Some(128 + 9), "{killed:#?}");
        // Every third and every eighth step is saved; a checkpoint being written may be lost.
        let newest = mgpu::checkpoint::find(&tiny.checkpoints()).unwrap().unwrap().checkpoint;
        let step = newest.manifest().step;
        assert_eq!(newest.manifest().position, Some(Position { seed: 1, epoch: step / 8, step: step % 8 }));
        let resumed = tiny.saved(TRAIN.launched(2), &every);
        assert_eq!(resumed_after(&resumed), step);
        assert!(!step.is_multiple_of(8), "in the middle of an epoch: {step}");
        assert_eq!(resumed.weights(), whole.weights());
        let (json, uninterrupted) = (resumed.json(), whole.json());
        for key in ["loss_scale", "skipped_steps"] {
            assert_eq!(json.get(key), uninterrupted.get(key), "{precision}");
            assert_eq!(json.get(key).is_some(), precision == "fp16");
        }
        assert!(json.get("skipped_steps").is_none_or(|steps| steps.as_u64() > Some(0)), "{json:#}");
        assert!(json["ms_per_checkpoint"].as_f64().is_some_and(|ms| ms > 0.0), "{json:#}");
    }
}

#[test]
fn keep_limits_the_number_of_checkpoints() {
    let tiny = Tiny::new();
    let finished = tiny.saved(TRAIN.launched(2), &["--checkpoint-every", "5", "--keep", "3", "--skip-test"]);
    assert_eq!(finished.json()["checkpoints"], 7, "after steps 5, 8, 10, 15, 16, 20 and 24");
    assert_eq!(tiny.names(), ["step-00000016", "step-00000020", "step-00000024"]);
    let tiny = Tiny::new();
    tiny.saved(TRAIN.launched(1), &["--skip-test"]).expect(0, &["no checkpoint in"]);
    assert_eq!(tiny.names(), ["step-00000032", "step-00000048"]);
}

#[test]
fn resuming_a_finished_run_reports_its_result() {
    let tiny = Tiny::new();
    let first = tiny.saved(TRAIN.launched(2), &["--net", "deep"]);
    let again = tiny.saved(TRAIN.launched(2), &["--net", "deep"]);
    again.expect(0, &["resumed from", "nothing left to train: 24 steps are done, 24 requested; test"]);
    let (first, again) = (first.json(), again.json());
    for key in ["weights", "epochs", "steps", "test_acc", "test_loss", "test_acc_average", "data"] {
        assert_eq!(first[key], again[key], "{key}");
        assert!(!again[key].is_null(), "{key} in {again:#}");
    }
    assert_eq!(again["epochs"], 3);
}

#[test]
fn resuming_another_run_is_refused_with_every_difference() {
    let tiny = Tiny::new();
    let first = ["--skip-test", "--epochs", "1"];
    tiny.saved(TRAIN.launched(2), &first).expect(0, &[]);
    let other = tempfile::tempdir().unwrap();
    mnist::write_tiny(other.path());
    let labels = other.path().join("train-labels-idx1-ubyte");
    let mut bytes = fs::read(&labels).unwrap();
    bytes[20] = (bytes[20] + 1) % 10;
    fs::write(&labels, bytes).unwrap();
    let changed = [
        &["--net", "deep", "--seed", "9", "--batch", "8", "--lr", "0.5", "--epochs", "3"][..],
        &["--precision", "bf16", "--data", other.path().to_str().unwrap(), "--skip-test"],
    ];
    let refused = tiny.saved(TRAIN.launched(2), &changed.concat());
    refused.expect(
        1,
        &[
            "step-00000008 belongs to another run:\n",
            "\n  --net: lenet5 in the checkpoint, deep here\n",
            "\n  --seed: 1 in the checkpoint, 9 here\n",
            "\n  --batch: 8 images a step, 4 on each of 2 in the checkpoint, 16 images a step, 8 on each of 2 here\n",
            "\n  --lr: 0.001 in the checkpoint, 0.5 here\n",
            "\n  --epochs or --steps: a learning rate that decays over 8 steps in the checkpoint, a learning rate that decays over 12 steps here\n",
            "\n  --precision: f32 in the checkpoint, bf16 here\n",
            "\n  --data: MNIST from ",
        ],
    );
    tiny.saved(TRAIN.launched(2), &["--skip-test", "--epochs", "1", "--schedule", "constant"])
        .expect(1, &["\n  --schedule: linear in the checkpoint, constant here"]);
    // The same images in another folder are the same data.
    let moved = tiny.folder.path().join("moved");
    fs::rename(tiny.folder.path().join("data"), &moved).unwrap();
    let again = [&first[..], &["--data", moved.to_str().unwrap()]].concat();
    tiny.saved(TRAIN.launched(2), &again).expect(0, &["nothing left to train"]);
}

#[test]
fn resuming_with_other_ranks_or_threads_warns_about_rounding() {
    let tiny = Tiny::new();
    let all = ["--skip-test", "--schedule", "constant", "--steps"];
    tiny.saved(TRAIN.launched(2), &[&all[..], &["5"]].concat()).expect(0, &[]);
    let note = "the weights will not be bit-equal to those of an uninterrupted run: ";
    let same = tiny.saved(TRAIN.launched(2), &[&all[..], &["6"]].concat());
    assert!(!same.expect(0, &["resumed from"]).stdout.contains(note), "{same:#?}");
    let alone = [&all[..], &["7", "--batch", "8", "--threads", "2"]].concat();
    let text = format!("{note}ranks 1 instead of 2, threads 2 instead of 1");
    tiny.saved(TRAIN.launched(1), &alone).expect(0, &[&text, "resumed from", "after step 6"]);
    let four = [&all[..], &["8", "--batch", "2"]].concat();
    tiny.saved(TRAIN.launched(4), &four).expect(0, &["ranks 4 instead of 1", "after step 7"]);
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_previous_one_is_used() {
    let tiny = Tiny::new();
    let all = ["--skip-test", "--schedule", "constant"];
    let whole = tiny.run(TRAIN.launched(2), &all).weights();
    tiny.saved(TRAIN.launched(2), &[&all[..], &["--epochs", "2"]].concat()).expect(0, &[]);
    tiny.damage(16, "exp_avg.safetensors");
    let resumed = tiny.saved(TRAIN.launched(2), &all);
    let name = "step-00000016/exp_avg.safetensors: damaged: checksum";
    let said = "renamed to damaged-step-00000016; resuming from the previous checkpoint";
    resumed.expect(0, &[name, said]);
    assert_eq!((resumed_after(&resumed), resumed.weights()), (8, whole));
    assert_eq!(tiny.names(), ["damaged-step-00000016", "step-00000016", "step-00000024"]);
    // No valid checkpoint is left: starting again would be a surprise.
    tiny.damage(16, "weights.safetensors");
    fs::remove_file(tiny.checkpoints().join("step-00000024/manifest.json")).unwrap();
    tiny.saved(TRAIN.launched(2), &all).expect(
        1,
        &["no intact checkpoint among 2", "step-00000024/manifest.json: damaged: there is no such file"],
    );
}

#[test]
fn a_folder_in_use_by_another_run_is_refused() {
    let tiny = Tiny::new();
    let _writer = Writer::new(&tiny.checkpoints(), 1).unwrap();
    tiny.saved(TRAIN.launched(2), &["--skip-test"])
        .expect(1, &["checkpoints: another run is writing its checkpoints here"]);
}

#[test]
fn on_a_full_disk_earlier_checkpoints_survive() {
    let tiny = Tiny::new();
    let disk = tiny.checkpoints();
    fs::create_dir(&disk).unwrap();
    // Room for two checkpoints of 740 kB.
    let mut program = process::on_a_small_disk(&disk, "2m", "true", TRAIN.path);
    program.args(["--batch", "4", "--epochs", "4", "--threads", "1", "--skip-test", "--checkpoint-dir"]);
    let finished = run(program.arg(&disk).arg("--data").arg(tiny.folder.path().join("data")));
    if process::mounting_is_forbidden(&finished) {
        return;
    }
    finished.expect(1, &[".step-00000048.partial/", ": No space left on device (os error 28)"]);
    for name in ["step-00000016/manifest.json", "step-00000032/manifest.json"] {
        finished.expect(1, &[&format!("on the disk: {name}")]);
    }
    assert!(!finished.stdout.contains("on the disk: ."), "{finished:#?}");
}

#[test]
fn foreign_files_in_the_checkpoint_folder_survive() {
    let tiny = Tiny::new();
    let folder = tiny.checkpoints();
    let every = ["--skip-test", "--checkpoint-every", "2", "--keep", "1"];
    let mut found = Vec::new();
    let mut put = |name: &str| {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, name).unwrap();
        found.push(path);
    };
    for name in
        ["notes", "step-notes/text", "step-5/text", "step-00000002/text", ".step-00000004.partial/text"]
    {
        put(name);
    }
    let killed = tiny.saved(TRAIN.launched_with(2, &["--inject", "rank=1,step=14,fault=sigkill"]), &every);
    assert_eq!(killed.code, Some(128 + 9), "{killed:#?}");
    let newest = mgpu::checkpoint::latest(&folder).unwrap().unwrap();
    put(&format!("{}/evaluation.json", newest.file_name().unwrap().to_str().unwrap()));
    tiny.saved(TRAIN.launched(2), &every).expect(0, &["resumed from"]);
    for path in found {
        let name = path.strip_prefix(&folder).unwrap().to_str().unwrap();
        // A foreign file hidden under one of our names is restored.
        let path = folder.join(name.replace(".step-00000004.partial", "step-00000004"));
        assert_eq!(fs::read_to_string(&path).unwrap(), name, "{}", path.display());
    }
    assert_eq!(mgpu::checkpoint::latest(&folder).unwrap().unwrap(), folder.join("step-00000024"));
}

/// Runs examples/python/load_in_torch.py with a Python without PyTorch.
fn load_in_torch(folder: &Path, arguments: &[&str]) -> Finished {
    fs::write(folder.join("torch.py"), "raise ModuleNotFoundError('none', name='torch')").unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/python/load_in_torch.py");
    let mut python = process::command("python3");
    python.current_dir(folder).env("PYTHONPATH", folder).arg(script).args(arguments);
    let finished = run(&mut python);
    assert!(!finished.stderr.contains("Traceback"), "{finished:#?}");
    finished
}

#[test]
fn load_in_torch_reads_the_newest_checkpoint_and_reports_errors() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no python3");
        return;
    }
    let tiny = Tiny::new();
    let path = tiny.folder.path();
    tiny.saved(TRAIN.alone(), &["--skip-test", "--logits", path.join("logits.json").to_str().unwrap()])
        .expect(0, &[]);
    let newest = "checkpoints/step-00000048";
    for (arguments, text) in [
        (["checkpoints", "logits.json"], "checkpoints/step-00000048: Python has no torch: pip install"),
        (["checkpoints/step-00000032", "logits.json"], "checkpoints/step-00000032: Python has no torch"),
        ([newest, "none"], "none: No such file or directory"),
        ([newest, "torch.py"], "torch.py: not JSON: "),
        (
            [newest, "checkpoints/step-00000048/manifest.json"],
            "manifest.json: not a file of train_mnist: missing keys: net, images",
        ),
        (["none", "logits.json"], "none: there is no such folder"),
        (["logits.json", "logits.json"], "logits.json: not a folder"),
        (["data", "logits.json"], "data: neither a checkpoint (it has no manifest.json) nor a folder with"),
    ] {
        load_in_torch(path, &arguments).expect(1, &[text]);
    }
}

#[test]
fn logits_are_written_after_training_and_after_resuming() {
    let tiny = Tiny::new();
    let file = tiny.folder.path().join("logits.json");
    let read =
        |path: &Path| -> serde_json::Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let arguments = ["--net", "keras", "--epochs", "1", "--logits", file.to_str().unwrap()];
    tiny.saved(TRAIN.launched(2), &arguments).expect(0, &[]);
    let first = read(&file);
    assert_eq!((&first["net"], &first["labels"][11]), (&"keras".into(), &1.into()));
    let length = |key: &str| first[key].as_array().unwrap().len();
    assert_eq!((length("images"), length("logits"), length("labels")), (16, 16, 16));
    assert_eq!(first["images"][3].as_array().unwrap().len(), 784);
    let logits = first["logits"][3].as_array().unwrap();
    assert!(logits.len() == 10 && logits.iter().all(|value| value.as_f64() != Some(0.0)), "{logits:?}");
    fs::remove_file(&file).unwrap();
    tiny.saved(TRAIN.launched(2), &arguments).expect(0, &["nothing left to train"]);
    assert_eq!(read(&file), first);
}

#[test]
fn a_run_resumes_between_sharded_and_replicated() {
    let folder = tempfile::tempdir().unwrap();
    let all = ["--batch", "16", "--skip-test", "--schedule", "constant"];
    let whole = train(TRAIN.launched(2), &[&all[..], &["--steps", "15"]].concat()).weights();
    let folder = folder.path().to_str().unwrap();
    let go_on = |how, steps| {
        let saving = ["--checkpoint-dir", folder, "--resume", "--shard-optimizer", how, "--steps", steps];
        train(TRAIN.launched(2), &[&all[..], &saving].concat())
    };
    go_on("on", "5").expect(0, &["no checkpoint in"]);
    go_on("off", "10").expect(0, &["resumed from"]);
    assert_eq!(go_on("on", "15").weights(), whole);
}

#[test]
fn an_extended_run_is_bit_equal() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let all = ["--batch", "16", "--skip-test", "--schedule", "constant"];
    let whole = train(TRAIN.launched(2), &[&all[..], &["--steps", "30"]].concat()).weights();
    let saving = [&all[..], &["--checkpoint-dir", folder, "--resume"]].concat();
    train(TRAIN.launched(2), &[&saving[..], &["--steps", "18"]].concat()).expect(0, &["no checkpoint in"]);
    let resumed = train(TRAIN.launched(2), &[&saving[..], &["--steps", "30"]].concat());
    resumed.expect(0, &["resumed from", "after step 18"]);
    assert_eq!(resumed.weights(), whole);
    // The error names the checkpoint of another run.
    let other = train(TRAIN.launched(2), &[&saving[..], &["--steps", "40", "--seed", "9"]].concat());
    other.expect(1, &["step-00000030 belongs to another run"]);
}

#[test]
fn a_run_continues_under_another_placement() {
    let tiny = Tiny::new();
    let all = ["--clip-norm", "0.5", "--skip-test"];
    let whole = tiny.run(TRAIN.launched(2), &all).weights();
    let in_placement = |placement, options: &[&str]| {
        let every = [&all[..], &["--checkpoint-every", "2", "--placement", placement]].concat();
        let finished = tiny.saved(TRAIN.launched_with(2, options), &every);
        assert!(!finished.stdout.contains("bit-equal"), "{finished:#?}");
        finished
    };
    for (placement, rank, step) in
        [("replicated", 1, 5), ("shared", 0, 10), ("host", 1, 15), ("shared", 1, 20)]
    {
        let killed =
            in_placement(placement, &["--inject", &format!("rank={rank},step={step},fault=sigkill")]);
        killed.expect(128 + 9, &[&format!("rank {rank} was killed by SIGKILL")]);
        assert!(step == 5 || resumed_after(&killed) > 0);
    }
    let last = in_placement("replicated", &[]);
    assert!(resumed_after(&last) >= 16);
    assert_eq!(last.weights(), whole);
}

#[test]
fn a_run_that_is_killed_with_its_launcher_and_resumed_is_bit_equal() {
    let tiny = Tiny::new();
    let whole = tiny.run(TRAIN.launched(2), &["--net", "keras"]).weights();
    let folder = tiny.checkpoints();
    let saving = ["--net", "keras", "--checkpoint-dir", folder.to_str().unwrap(), "--resume"];
    let mut first = tiny.command(TRAIN.launched(2), &saving);
    let mut first = first.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| mgpu::checkpoint::latest(&folder).unwrap().is_some());
    first.kill().unwrap();
    finish(&mut first);
    let resumed = tiny.run(TRAIN.launched(2), &saving);
    resumed.expect(0, &["resumed from"]);
    assert_eq!(resumed.weights(), whole);
}

#[test]
fn a_restarted_run_resumes_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let restarted = |faults: &[&str]| {
        let faults = faults.iter().flat_map(|fault| ["--inject", *fault]);
        let options: Vec<&str> = ["--max-restarts", "1"].into_iter().chain(faults).collect();
        let mut launcher = TRAIN.launched_with(2, &options);
        launcher.args([
            "--synthetic",
            "--images",
            "8192",
            "--json",
            "--batch",
            "256",
            "--epochs",
            "3",
            "--skip-test",
        ]);
        launcher
    };
    let undisturbed = run(&mut restarted(&[]));
    let (whole, steps) = (undisturbed.weights(), undisturbed.json()["steps"].as_u64().unwrap());
    // After the second checkpoint.
    let fault = format!("rank=1,step={},fault=sigkill", steps * 2 / 3 + 1);
    let finished = run(restarted(&[&fault]).args(["--checkpoint-dir", folder]));
    finished.expect(0, &["rank 1 was killed by SIGKILL", "restart 1 of 1", "resumed from"]);
    assert_eq!(finished.weights(), whole);
    // Existing checkpoints are not overwritten by mistake.
    let again = run(restarted(&[]).args(["--checkpoint-dir", folder]));
    again.expect(
        1,
        &["belongs to an earlier run: continue it with --resume, or choose another --checkpoint-dir"],
    );
}

#[test]
fn a_restart_ignores_checkpoints_of_an_earlier_launch() {
    let tiny = Tiny::new();
    let folder = tiny.checkpoints();
    let all = ["--skip-test", "--epochs", "1", "--checkpoint-dir", folder.to_str().unwrap()];
    let restarted = |fault: &[&str]| {
        let fault = fault.iter().flat_map(|fault| ["--inject", *fault]);
        let options: Vec<&str> =
            ["--max-restarts", "1", "--restart-always"].into_iter().chain(fault).collect();
        TRAIN.launched_with(2, &options)
    };
    tiny.run(TRAIN.launched(2), &all).expect(0, &[]);
    // The restart follows a start that was refused, or one that failed before it read the folder.
    let early = "rank=1,phase=start,fault=exit:5";
    for fault in [&[][..], &[early]] {
        let refused = tiny.run(restarted(fault), &all);
        refused.expect(
            1,
            &["restart 1 of 1", "step-00000008 belongs to an earlier run: continue it with --resume"],
        );
        assert!(!refused.stdout.contains("resumed from"), "{refused:#?}");
    }
    // With --resume a run continues; a launch without own checkpoints starts at step 0.
    let resuming = [&all[..], &["--resume"]].concat();
    tiny.run(restarted(&[early]), &resuming).expect(0, &["restart 1 of 1", "resumed from", "nothing left"]);
    fs::remove_dir_all(&folder).unwrap();
    tiny.run(restarted(&[early]), &all).expect(0, &["restart 1 of 1", "starting at step 0"]);
}
