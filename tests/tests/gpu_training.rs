//! The whole GPU path, from the launcher to the optimizer, on fake NVIDIA libraries.
//!
//! The kernels run as C++ on the CPU, on streams that are threads and on replayed graphs, and compute what a GPU
//! would. Their speed says nothing about a GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use mgpu_tests::fake_gpu;
use mgpu_tests::mnist::{write, write_digits, write_tiny};
use mgpu_tests::process::{Finished, command, run};
use serde_json::Value;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_t-mgpurun");
const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");
const GOLDEN: &str = env!("CARGO_BIN_EXE_t-golden_check");

/// Generated digits, small batches of the smallest network, only our own kernels.
const SMALL: [&str; 8] =
    ["--synthetic", "--images", "2000", "--json", "--batch", "2", "--kernels", "builtin"];

/// `program` on `ranks` fake GPUs.
fn on_gpus(ranks: u32, program: &str) -> Command {
    let mut launcher = fake_gpu::launched(LAUNCHER, ranks);
    launcher.args(["--no-prefix", program]);
    launcher
}

fn train(ranks: u32, arguments: &[&str]) -> Finished {
    let finished = run(on_gpus(ranks, TRAIN).args(SMALL).args(arguments));
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    finished
}

#[test]
fn two_ranks_train_on_a_gpu_each() {
    let finished =
        run(on_gpus(2, TRAIN).args(["--steps", "5", "--json", "--kernels", "builtin", "--skip-test"]));
    finished.expect(0, &["on 2 ranks of one FAKE GPU (tests only), f32"]);
    let json = finished.json();
    let expected =
        [("device", "cuda"), ("gpu", "FAKE GPU (tests only)"), ("dtype", "f32"), ("net", "lenet5")];
    for (key, value) in expected {
        assert_eq!(json[key], value, "{json:#}");
    }
    assert_eq!((&json["ranks"], &json["steps"]), (&2.into(), &5.into()));
    assert!(json["max_gpu_mib"].as_u64().is_some_and(|mebibytes| mebibytes > 40), "{json:#}");
    let memory = json["rank_gpu_mib"].as_array().unwrap();
    assert!(memory.len() == 2 && memory.iter().all(|mebibytes| mebibytes.as_u64() > Some(40)), "{json:#}");
    assert_eq!(json["max_gpu_mib"].as_u64(), memory.iter().filter_map(Value::as_u64).max());
}

#[test]
fn a_graph_gives_the_bits_of_single_launches() {
    // Beyond the first steps, with a larger graph and some single steps.
    let arguments = ["--steps", "16", "--skip-test"];
    for ranks in [1, 2] {
        let graph = train(ranks, &arguments).weights();
        let single = train(ranks, &[&arguments[..], &["--no-graph"]].concat());
        assert_eq!(graph, single.weights(), "{ranks} ranks");
    }
}

#[test]
fn epochs_of_any_length_give_the_bits_of_single_launches() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 13);
    let data = folder.path().to_str().unwrap();
    let train = |ranks: u32, more: &[&str]| {
        let arguments =
            ["--data", data, "--kernels", "builtin", "--json", "--schedule", "constant", "--skip-test"];
        run(on_gpus(ranks, TRAIN).args(arguments).args(more))
    };
    // Epochs of 13, 6 and 1 steps, in which some images are left out.
    for (ranks, batch) in [(1, "1"), (1, "2"), (2, "5")] {
        let whole = ["--batch", batch, "--steps", "23"];
        let graphs = train(ranks, &whole).weights();
        let single = train(ranks, &[&whole[..], &["--no-graph"]].concat()).weights();
        assert_eq!(graphs, single, "{ranks} ranks, batch {batch}");
        let kept = folder.path().join(format!("{ranks}-{batch}"));
        let kept = ["--batch", batch, "--checkpoint-every", "7", "--checkpoint-dir", kept.to_str().unwrap()];
        train(ranks, &[&kept[..], &["--steps", "11"]].concat()).expect(0, &[]);
        let resumed = train(ranks, &[&kept[..], &["--steps", "23", "--resume"]].concat());
        assert_eq!(graphs, resumed.expect(0, &["after step 11"]).weights(), "{ranks} ranks, batch {batch}");
    }
}

#[test]
fn images_that_are_copied_for_each_step_give_the_bits_of_images_on_the_gpu() {
    let folder = tempfile::tempdir().unwrap();
    // Epochs of 46, 23 and 11 steps. The training uses slots again (there are 30), and ends within their ring and within an epoch.
    write_digits(folder.path(), 47, 16);
    let data = folder.path().to_str().unwrap();
    let train = |ranks: u32, more: &[&str]| {
        let mut program = on_gpus(ranks, TRAIN);
        program.env("FAKE_GPU_DELAY_US", "50");
        program.args(["--data", data, "--kernels", "builtin", "--json", "--steps", "43"]);
        run(program.args(more))
    };
    for (ranks, more) in [
        (1, &["--batch", "1", "--log-every", "9"][..]),
        (1, &["--batch", "2", "--accumulate", "2", "--precision", "bf16"]),
        (1, &["--batch", "2", "--precision", "fp16", "--loss-scale", "1e12"]),
        (2, &["--batch", "2"]),
        (2, &["--batch", "1", "--precision", "bf16", "--placement", "host"]),
    ] {
        let resident = train(ranks, &[more, &["--data-on", "device"]].concat());
        for on in [&["--data-on", "host"][..], &["--data-on", "disk", "--no-graph"]] {
            let staged = train(ranks, &[more, on].concat());
            assert_eq!(resident.weights(), staged.weights(), "{ranks} ranks, {more:?}, {on:?}");
            assert_eq!(resident.json()["test_loss"], staged.json()["test_loss"], "{ranks} ranks, {more:?}");
        }
    }
}

#[test]
fn a_run_with_copied_images_continues_with_images_on_the_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    write_digits(&data, 47, 16);
    let kept = folder.path().join("checkpoints");
    let train = |on: &str, steps: &str, more: &[&str]| {
        let mut program = on_gpus(2, TRAIN);
        program.arg("--data").arg(&data).args(["--kernels", "builtin", "--json", "--schedule", "constant"]);
        run(program.args(["--batch", "2", "--data-on", on, "--steps", steps]).args(more))
    };
    let whole = train("device", "37", &[]).weights();
    let saved = ["--resume", "--checkpoint-dir", kept.to_str().unwrap()];
    // At a step that is no multiple of the ring's slots.
    for (on, steps) in [("disk", "13"), ("host", "24"), ("device", "31")] {
        train(on, steps, &saved).expect(0, &[]);
    }
    assert_eq!(whole, train("host", "37", &saved).expect(0, &["after step 31"]).weights());
}

#[test]
fn a_pipeline_of_gpus_keeps_its_images_there() {
    let mut program = on_gpus(2, TRAIN);
    program.args(SMALL).args(["--steps", "1", "--placement", "layers", "--cut", "7", "--data-on", "host"]);
    run(&mut program)
        .expect(1, &["--placement layers on GPUs keeps the images in GPU memory: leave --data-on out"]);
}

/// What all ranks asked of the driver (see `tests/gpu/fake_counters.cpp`) in a training of so many epochs.
fn driver_calls(ranks: u32, batch: &str, epochs: u64, data: &Path) -> [u64; 4] {
    let counters = data.join(format!("counters-{ranks}-{epochs}"));
    let mut program = on_gpus(ranks, TRAIN);
    program.env("FAKE_GPU_COUNTERS", &counters).arg("--data").arg(data);
    program.args(["--kernels", "builtin", "--skip-test", "--batch", batch, "--epochs", &epochs.to_string()]);
    run(&mut program).expect(0, &[]);
    let lines = fs::read_to_string(counters).unwrap();
    let ranks: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sum = |what| ranks.iter().map(|rank| rank[what].as_u64().unwrap()).sum();
    ["kernels", "graphs", "uploads", "drains"].map(sum)
}

#[test]
fn the_stream_does_not_run_empty_between_epochs() {
    let folder = tempfile::tempdir().unwrap();
    write_tiny(folder.path());
    // Epochs of 12 and of 16 steps; a few images are left over.
    for (ranks, batch) in [(1, "5"), (2, "2")] {
        let [three, five] = [3, 5].map(|epochs| driver_calls(ranks, batch, epochs, folder.path()));
        let more: Vec<u64> = five.iter().zip(three).map(|(five, three)| five - three).collect();
        // For each further epoch and rank two graphs, the order of its samples, and no wait for the whole stream.
        let epochs = 2 * u64::from(ranks);
        assert_eq!(more, [0, 2 * epochs, epochs, 0], "{ranks} ranks: {three:?}, {five:?}");
    }
}

#[test]
fn late_stream_work_does_not_change_the_result() {
    let arguments = ["--steps", "5", "--skip-test"];
    let prompt = train(2, &arguments).weights();
    let mut late = on_gpus(2, TRAIN);
    late.env("FAKE_GPU_DELAY_US", "200").args(SMALL).args(arguments);
    assert_eq!(prompt, run(&mut late).weights());
}

/// Training and test loss of the only epoch in a metrics file.
fn losses(metrics: &Path) -> [f64; 2] {
    let text = fs::read_to_string(metrics).unwrap();
    let epoch: Value = serde_json::from_str(text.lines().next().expect("an epoch")).unwrap();
    [&epoch["train_loss"], &epoch["test_loss"]].map(|loss| loss.as_f64().expect("a loss"))
}

#[test]
fn gpu_and_cpu_training_agree() {
    let folder = tempfile::tempdir().unwrap();
    // Dropout and batch normalisation, L2 penalty and moving average, pooling that rounds up.
    for (net, tolerance) in [("lenet5", 1e-4), ("keras", 2e-3), ("deep", 1e-4), ("ensemble2400", 2e-3)] {
        let train = |mut program: Command, name: &str| {
            let metrics = folder.path().join(format!("{net}-{name}"));
            program.args([
                "--synthetic",
                "--images",
                "2000",
                "--skip-test",
                "--net",
                net,
                "--batch",
                "2",
                "--steps",
                "3",
                "--metrics",
            ]);
            let finished = run(program.arg(&metrics));
            assert_eq!(finished.code, Some(0), "{net}: {finished:#?}");
            let text = fs::read_to_string(metrics).unwrap();
            let epoch: Value = serde_json::from_str(text.lines().next().expect("an epoch")).unwrap();
            (epoch["train_loss"].as_f64().expect("a loss"), epoch["l2_loss"].as_f64())
        };
        let (cpu, cpu_l2) = train(command(TRAIN), "cpu");
        let mut program = on_gpus(1, TRAIN);
        program.args(["--kernels", "builtin"]);
        let (gpu, gpu_l2) = train(program, "gpu");
        assert!((cpu - gpu).abs() < tolerance * cpu, "{net}: {cpu} on the CPU, {gpu} on the GPU");
        assert_eq!(cpu_l2.is_some(), net == "deep");
        let agrees = cpu_l2.zip(gpu_l2).is_none_or(|(cpu, gpu)| (cpu - gpu).abs() < 1e-4 * cpu);
        assert!(agrees && cpu_l2.is_some() == gpu_l2.is_some(), "{net}: {cpu_l2:?} and {gpu_l2:?}");
    }
}

#[test]
fn every_epoch_has_the_samples_of_the_cpus() {
    let folder = tempfile::tempdir().unwrap();
    write_tiny(folder.path());
    let losses = |mut program: Command| -> Vec<f64> {
        let metrics = folder.path().join("metrics");
        program.arg("--data").arg(folder.path()).args([
            "--batch",
            "5",
            "--epochs",
            "4",
            "--skip-test",
            "--metrics",
        ]);
        run(program.arg(&metrics)).expect(0, &[]);
        let text = fs::read_to_string(&metrics).unwrap();
        fs::remove_file(&metrics).unwrap();
        let epochs = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        epochs.map(|epoch| epoch["train_loss"].as_f64().unwrap()).collect()
    };
    let cpu = losses(command(TRAIN));
    let mut gpu = on_gpus(1, TRAIN);
    gpu.args(["--kernels", "builtin"]);
    let gpu = losses(gpu);
    assert_eq!(cpu.len(), 4);
    assert!(cpu.iter().zip(&gpu).all(|(cpu, gpu)| (cpu - gpu).abs() < 1e-3 * cpu), "{cpu:?} and {gpu:?}");
}

/// Each line of `--log-every` up to its loss, and its loss.
fn log_lines(finished: &Finished) -> Vec<(String, f64)> {
    let lines = finished.stdout.lines().filter(|line| line.starts_with("step "));
    let parts = lines.map(|line| line.split_once(" loss ").unwrap());
    parts.map(|(begin, rest)| (begin.to_owned(), rest.split(' ').next().unwrap().parse().unwrap())).collect()
}

#[test]
fn the_log_is_that_of_the_cpus_and_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    write_tiny(folder.path());
    let train = |mut program: Command, more: &[&str]| {
        program.arg("--data").arg(folder.path()).args(["--batch", "2", "--epochs", "2", "--json"]);
        run(program.args(["--log-every", "5"]).args(more))
    };
    let mut host = command(LAUNCHER);
    host.args(["-n", "2", "--no-prefix", TRAIN]);
    let expected = log_lines(&train(host, &[]));
    assert_eq!(expected.len(), 6, "two epochs of 16 steps");
    let kept = folder.path().join("checkpoints");
    let kept = ["--skip-test", "--checkpoint-every", "7", "--checkpoint-dir", kept.to_str().unwrap()];
    let mut weights = Vec::new();
    // With an evaluation between epochs; straight on; and with other stops between the lines.
    for more in [&[][..], &["--skip-test"], &kept] {
        let mut program = on_gpus(2, TRAIN);
        program.args(["--kernels", "builtin"]);
        let finished = train(program, more);
        weights.push(finished.weights());
        let found = log_lines(&finished);
        assert_eq!(found.len(), expected.len(), "{finished:#?}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.0, expected.0, "{more:?}");
            assert!((found.1 - expected.1).abs() < 1e-3, "{found:?} and {expected:?}, {more:?}");
        }
    }
    let mut plain = on_gpus(2, TRAIN);
    plain.args(["--kernels", "builtin", "--batch", "2", "--epochs", "2", "--json", "--skip-test", "--data"]);
    let plain = run(plain.arg(folder.path())).weights();
    assert!(weights.iter().all(|weights| *weights == plain), "{weights:?} and {plain}");
}

#[test]
fn a_sum_of_gradients_trains_the_weights_of_their_mean() {
    let folder = tempfile::tempdir().unwrap();
    write_tiny(folder.path());
    let weights = |flags: &[&str], how| {
        let mut program = on_gpus(2, TRAIN);
        program.args([
            "--kernels",
            "builtin",
            "--json",
            "--skip-test",
            "--batch",
            "4",
            "--steps",
            "6",
            "--data",
        ]);
        run(program.arg(folder.path()).args(flags).args(["--reduction", how])).weights()
    };
    for flags in [&[][..], &["--accumulate", "2", "--gradients", "bf16"], &["--world-size-invariant", "4"]] {
        assert_eq!(weights(flags, "sum"), weights(flags, "mean"), "{flags:?}");
    }
}

#[test]
fn a_checkpoint_is_evaluated_on_gpus_and_cpus_alike() {
    let folder = tempfile::tempdir().unwrap();
    write_tiny(folder.path());
    let (kept, output) = (folder.path().join("checkpoints"), folder.path().join("predictions"));
    let images = folder.path().join("t10k-images-idx3-ubyte");
    let mut program = on_gpus(2, TRAIN);
    program.args(["--kernels", "builtin", "--batch", "2", "--steps", "9", "--json", "--data"]);
    let trained = run(program.arg(folder.path()).arg("--checkpoint-dir").arg(&kept));
    let (weights, trained) = (trained.weights(), trained.json());
    for (mut program, device) in
        [(on_gpus(2, TRAIN), "cuda"), (on_gpus(3, TRAIN), "cuda"), (command(TRAIN), "cpu")]
    {
        program
            .arg("--data")
            .arg(folder.path())
            .arg("--evaluate")
            .arg(&kept)
            .args(["--batch", "4", "--json"]);
        program.arg("--predict").arg(&images).arg("--output").arg(&output).args(["--kernels", "builtin"]);
        let finished = run(&mut program);
        assert_eq!(finished.weights(), weights, "{finished:#?}");
        let json = finished.json();
        assert_eq!((&json["device"], &json["steps"]), (&device.into(), &9.into()));
        for key in ["test_acc", "test_loss"] {
            let [found, expected] = [&json, &trained].map(|json| json[key].as_f64().unwrap());
            assert!((found - expected).abs() < 1e-4, "{key}: {found} and {expected} on {device}");
        }
        let text = fs::read_to_string(&output).unwrap();
        assert_eq!(text.lines().count(), 16);
        for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
            let probability = &line["probabilities"][line["class"].as_u64().unwrap() as usize];
            let loss = -probability.as_f64().unwrap().ln();
            // All images are equal: each has the largest probability that the labels' loss allows.
            assert!(loss <= json["test_loss"].as_f64().unwrap() + 1e-6, "{line}");
        }
    }
}

#[test]
fn the_first_calls_of_nccl_may_be_slow() {
    // With the default timeouts. The fake refuses kernels that a capture would load.
    let mut slow = on_gpus(2, TRAIN);
    slow.env("FAKE_NCCL_FIRST_MS", "300").args(SMALL).args(["--steps", "5", "--skip-test"]);
    let slow = run(&mut slow).weights();
    assert_eq!(slow, train(2, &["--steps", "5", "--skip-test"]).weights());
}

#[test]
fn evaluation_covers_the_whole_test_set_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let digits = folder.path().join("digits");
    write_digits(&digits, 128, 1003);
    let mut found = Vec::new();
    for ranks in [1, 2] {
        let metrics = folder.path().join(ranks.to_string());
        let path = metrics.to_str().unwrap();
        let batch = if ranks == 1 { "64" } else { "32" };
        let mut program = on_gpus(ranks, TRAIN);
        program.args(["--kernels", "builtin", "--batch", batch, "--steps", "2", "--metrics", path, "--data"]);
        program.arg(&digits);
        run(&mut program).expect(0, &["; test "]);
        found.push(losses(&metrics));
    }
    let close = |a: f64, b: f64| (a - b).abs() < 1e-4;
    assert!(close(found[0][0], found[1][0]) && close(found[0][1], found[1][1]), "{found:?}");
}

#[test]
fn a_resumed_run_is_bit_equal() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    // An epoch of generated digits is long; this run ends within the first.
    let whole = train(1, &["--steps", "9", "--schedule", "constant", "--skip-test"]).weights();
    let kept = ["--schedule", "constant", "--skip-test", "--checkpoint-dir", folder];
    train(1, &[&["--steps", "5"], &kept[..]].concat());
    let resumed = train(1, &[&["--steps", "9", "--resume"], &kept[..]].concat());
    resumed.expect(0, &["resumed from", "after step 5"]);
    assert_eq!(whole, resumed.weights());
}

#[test]
fn a_cpu_checkpoint_resumes_on_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let kept =
        ["--schedule", "constant", "--skip-test", "--checkpoint-dir", folder, "--batch", "8", "--synthetic"];
    run(command(TRAIN).args(["--steps", "4"]).args(kept)).expect(0, &[]);
    let mut program = on_gpus(1, TRAIN);
    program.args(["--kernels", "builtin", "--steps", "6", "--resume"]).args(kept);
    run(&mut program).expect(0, &["resumed from", "after step 4"]);
}

#[test]
fn gpu_only_precisions_are_refused_on_a_cpu() {
    for precision in ["tf32", "bf16", "fp16"] {
        let finished = train(1, &["--steps", "4", "--precision", precision, "--skip-test"]);
        assert_eq!(finished.json()["dtype"], precision);
    }
    let finished = run(command(TRAIN).args(["--synthetic", "--precision", "tf32", "--steps", "1"]));
    finished.expect(2, &["--precision tf32 needs a GPU"]);
}

/// The first steps overflow. Graphs of several steps skip the same ones as single launches, on all ranks.
#[test]
fn fp16_skips_steps_within_graphs_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let common = ["--precision", "fp16", "--loss-scale", "1e9", "--schedule", "constant", "--skip-test"];
    for (ranks, more) in [
        (1, &[][..]),
        (2, &["--accumulate", "2", "--clip-norm", "1", "--shard-optimizer", "on"]),
        (2, &["--placement", "shared"]),
        (2, &["--placement", "host"]),
    ] {
        let run_with = |of_run: &[&str]| train(ranks, &[&common[..], more, of_run].concat());
        let graphs = run_with(&["--steps", "16"]);
        let json = graphs.json();
        let skipped = json["skipped_steps"].as_u64().unwrap();
        assert!((5..16).contains(&skipped), "{ranks} ranks, {more:?}: {json:#}");
        assert_eq!(json["loss_scale"].as_f64(), Some(f64::from(1e9f32) / 2f64.powi(skipped as i32)));
        let single = run_with(&["--steps", "16", "--no-graph"]);
        assert_eq!(single.weights(), graphs.weights(), "{ranks} ranks, {more:?}");
        assert_eq!(single.json()["skipped_steps"], skipped);
        let kept = folder.path().join(format!("{ranks}{}", more.join("")));
        let kept = ["--resume", "--checkpoint-dir", kept.to_str().unwrap()];
        for steps in ["4", "16"] {
            let resumed = run_with(&[&["--steps", steps][..], &kept].concat());
            resumed.expect(0, &[]);
            if steps == "16" {
                assert_eq!(resumed.weights(), graphs.weights(), "{ranks} ranks, {more:?}");
                assert_eq!(resumed.json()["skipped_steps"], skipped);
            }
        }
    }
}

#[test]
fn fp16_learns_generated_digits_as_f32_does() {
    let folder = tempfile::tempdir().unwrap();
    let accuracy = |precision: &str| {
        let metrics = folder.path().join(precision);
        let mut program = on_gpus(1, TRAIN);
        program.args(["--synthetic", "--images", "2000", "--batch", "8", "--kernels", "builtin"]);
        program.args(["--skip-test", "--steps", "120", "--precision", precision, "--metrics"]);
        assert_eq!(run(program.arg(&metrics)).code, Some(0));
        let line: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&metrics).unwrap()).unwrap();
        line["train_acc"].as_f64().unwrap()
    };
    let [fp16, f32] = ["fp16", "f32"].map(accuracy);
    // Of 960 images, from the first step on.
    assert!(fp16 > 0.3 && (fp16 - f32).abs() < 0.01, "{fp16} in fp16, {f32} in f32");
}

#[test]
fn old_gpus_are_told_of_fp16() {
    let header = |precision: &str| {
        let mut program = on_gpus(1, TRAIN);
        program.env("FAKE_GPU_CAPABILITY", "75").args(["--synthetic", "--kernels", "builtin", "--skip-test"]);
        let finished = run(program.args(["--steps", "1", "--batch", "2", "--precision", precision]));
        assert_eq!(finished.code, Some(0), "{finished:#?}");
        finished
            .stdout
            .contains("compute capability 7.5) has tensor cores for fp16, but multiplies bf16 as f32")
    };
    assert_eq!(["bf16", "fp16", "f32"].map(header), [true, false, false]);
}

/// The golden run of lenet5 and the data, or a message that the test is skipped.
fn golden() -> Option<(PathBuf, PathBuf)> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from);
    let (Some(golden), Some(data)) = (folder("MGPU_GOLDEN"), folder("MGPU_DATA")) else {
        println!("skipped: set MGPU_GOLDEN and MGPU_DATA to run the golden checks");
        return None;
    };
    Some((golden.join("lenet5.json"), data))
}

#[test]
fn a_golden_run_is_within_its_bounds_in_every_precision_split_and_placement() {
    let Some((file, data)) = golden() else { return };
    for (ranks, precision, placement) in [
        (1, "f32", "replicated"),
        (2, "f32", "replicated"),
        (1, "tf32", "replicated"),
        (1, "bf16", "replicated"),
        (2, "bf16", "replicated"),
        (1, "fp16", "replicated"),
        (2, "fp16", "shared"),
        (2, "fp16", "host"),
        (2, "f32", "shared"),
        (1, "f32", "host"),
        (2, "f32", "host"),
    ] {
        let mut program = on_gpus(ranks, GOLDEN);
        program.args(["--kernels", "builtin", "--precision", precision, "--placement", placement]);
        program.arg("--data").arg(&data).arg(&file);
        let finished = run(&mut program);
        finished.expect(0, &[&format!("on FAKE GPU (tests only), {precision}")]);
        let verdicts = finished.stdout.lines().filter(|line| line.ends_with("ok")).count();
        assert_eq!(verdicts, 4, "{finished:#?}");
    }
}
