//! Every CUDA kernel matches the CPU in any thread order, and a wrong kernel is detected.
//!
//! Everything runs on the fake libraries of `tests/gpu`: the kernels are the real ones, compiled for the CPU.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mgpu_tests::fake_gpu;
use mgpu_tests::mnist::write_tiny;
use mgpu_tests::process::run;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn gpu_check() -> Command {
    fake_gpu::command(env!("CARGO_BIN_EXE_t-gpu_check"))
}

/// Runs the quick checks with a thread order, a seed, a compute capability times ten, and tensor cores that truncate their sums or
/// round them.
fn quick(order: &str, seed: &str, capability: &str, truncate: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("results.json");
    let mut command = gpu_check();
    command.env("FAKE_GPU_ORDER", order).env("FAKE_GPU_SEED", seed);
    command.env("FAKE_GPU_TRUNCATE", if truncate { "1" } else { "0" }).env("FAKE_GPU_CAPABILITY", capability);
    let finished = run(command.args(["--quick", "--seed", seed, "--json"]).arg(&json));
    finished.expect(0, &["on FAKE GPU (tests only), 0 failed", &format!("seed {seed}")]);
    let text = std::fs::read_to_string(json).expect("the results");
    let results: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(results["device"], "FAKE GPU (tests only)");
    assert_eq!(results["unreached"], serde_json::json!([]), "kernels without a check");
    let checks = results["checks"].as_array().expect("an array");
    assert!(checks.len() > 300 && checks.iter().all(|check| check["ok"] == true));
    // A search among the algorithms of libraries is not quick.
    assert!(!checks.iter().any(|check| check["name"].as_str().is_some_and(|name| name.ends_with("layers"))));
}

#[test]
fn layers_are_right_with_the_kernels_of_libraries() {
    for (order, seed) in [("forward", "1"), ("reverse", "2"), ("shuffled", "3")] {
        let mut command = gpu_check();
        command.env("FAKE_GPU_ORDER", order).env("FAKE_GPU_SEED", seed);
        let layers = run(command.args(["--quick", "--seed", seed, "--only", "layers"]));
        layers.expect(0, &["conv layers", "dense layers", "on FAKE GPU (tests only), 0 failed"]);
    }
}

#[test]
#[ignore = "takes minutes"]
fn all_kernels_are_right_with_threads_forward() {
    quick("forward", "1", "90", false);
}

#[test]
fn all_kernels_are_right_without_warpgroups_with_threads_in_reverse_and_truncated_sums() {
    quick("reverse", "2", "80", true);
}

#[test]
fn all_kernels_are_right_with_threads_shuffled() {
    quick("shuffled", "3", "90", false);
}

/// As many multiprocessors as an H100 has: they choose grids, tiles and the depth of splits, and so the order of sums.
#[test]
fn kernels_are_right_with_132_multiprocessors() {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("results.json");
    for only in ["conv backward_weights", "dense forward", "norm", "optimizer"] {
        let mut command = gpu_check();
        command
            .env("FAKE_GPU_MULTIPROCESSORS", "132")
            .args(["--quick", "--seed", "4", "--only", only, "--json"]);
        run(command.arg(&json)).expect(0, &["132 multiprocessors", ", 0 failed"]);
        let text = std::fs::read_to_string(&json).expect("the results");
        let results: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert!(results["checks"].as_array().is_some_and(|checks| !checks.is_empty()), "{only}: {text}");
    }
}

/// A kernel whose last block does nothing is detected by the checks of its operation. (Without the fault they succeed, see above.)
#[test]
fn a_wrong_kernel_is_detected() {
    for (kernel, only) in [
        ("activation_bias_bf16", "activation bias"),
        ("arena_narrow_bf16", "arena narrow"),
        ("conv_forward_bf16_group", "dense forward"),
        ("conv_backward_input_f16_group", "dense backward_input"),
        ("conv_backward_weights_bf16_group", "dense backward_weights"),
        ("conv_backward_weights_tf32_small", "conv backward_weights"),
        ("conv_first_forward_f32_k5_x1", "conv forward"),
        ("conv_forward_bf16_scalar", "dense forward"),
        ("conv_forward_bf16_narrow", "conv forward"),
        ("conv_forward_bf16_even", "dense forward"),
        ("conv_backward_input_f16_even", "dense backward_input"),
        ("conv_backward_weights_bf16_even", "dense backward_weights"),
        ("conv_backward_input_bf16_narrow", "conv backward_input"),
        ("conv_backward_weights_bf16_narrow", "conv backward_weights"),
        ("conv_bias_f32", "conv backward_bias"),
        ("conv_first_backward_pooled_f32_k5_few", "fused backward_first"),
        ("conv_first_forward_bf16_k3_x1", "fused forward"),
        ("conv_first_backward_pooled_bf16_k3_x1", "fused backward_first"),
        ("conv_backward_input_bf16_small", "fused backward_input"),
        ("conv_forward_f32_small", "fused forward"),
        ("conv_direct_forward_bf16_k5", "conv forward"),
        ("conv_direct_forward_f16_k3", "fused forward"),
        ("conv_direct_backward_input_f16_k5", "conv backward_input"),
        ("conv_direct_backward_input_bf16_k3", "fused backward_input"),
        ("conv_direct_backward_weights_bf16_k3", "conv backward_weights"),
        ("conv_flip_f32", "conv flip"),
        ("conv_plain_backward_weights_bf16", "conv plain"),
        ("compare_random_f32", "compare random"),
        ("compare_bf16", "compare results"),
        ("digest_hash_f32", "digest hash"),
        ("dropout_apply_f32", "dropout"),
        ("gather_bf16", "gather batch"),
        ("gelu_forward_f32", "gelu forward"),
        ("loss_gradient_f32", "loss gradient"),
        ("norm_backward_input_f32", "norm backward_input"),
        ("norm_sum_gradients_bf16", "norm sum_gradients"),
        ("optimizer_update_adamw", "optimizer adamw"),
        ("pool_backward_fused_f32", "pool backward_fused"),
        ("step_begin", "step begin"),
        ("step_begin", "graph replay"),
    ] {
        let mut command = gpu_check();
        command.env("FAKE_GPU_LAME", kernel).args(["--quick", "--seed", "1", "--only", only]);
        run(&mut command).expect(1, &["FAILED"]);
    }
}

/// A training step of each of the seven networks is at most three launches for each layer with parameters, and six
/// more: counted in the captured graph, on a GPU that executes nothing.
#[test]
fn a_step_has_three_launches_a_layer_and_six_more() {
    let folder = tempfile::tempdir().expect("a folder");
    for net in ["conv6", "keras", "deep", "layers", "ensemble2400", "ensemble4800", "lenet5"] {
        for batch in ["128", "1024"] {
            let (json, counters) =
                (folder.path().join("steps"), folder.path().join(format!("{net}-{batch}")));
            let mut command = gpu_check();
            command.env("FAKE_GPU_IDLE", "1").env("FAKE_GPU_MULTIPROCESSORS", "132");
            command.env("FAKE_GPU_COUNTERS", &counters).env("MGPU_BACKEND", "nccl");
            command.args(["--steps", "--only", net, "--batch", batch, "--json"]).arg(&json);
            run(&mut command).expect(0, &[net]);
            let read = |file: &Path| -> serde_json::Value {
                serde_json::from_str(&std::fs::read_to_string(file).expect("a result file")).expect("JSON")
            };
            let step = &read(&json)["steps"][0];
            let number = |key: &str| step[key].as_u64().unwrap_or_else(|| panic!("{key} in {step:#}"));
            let (kernels, layers) = (number("kernels"), number("layers"));
            assert!(kernels <= 3 * layers + 6, "{net}, batch {batch}: {layers} layers, {step:#}");
            assert_eq!(read(&counters)["nodes"], kernels, "{net}, batch {batch}: {step:#}");
            assert!(number("bytes") >= number("least_bytes"), "{step:#}");
            // The loss, the check of gradients, the optimizer and the hash: one launch each, that visits everything once.
            // Besides there are tables, padding between tensors, and sums.
            let sweeps = step["sweeps"].as_array().expect("an array");
            assert_eq!(sweeps.len(), 4, "{step:#}");
            for sweep in sweeps {
                let number = |key: &str| sweep[key].as_u64().expect("a number");
                let (bytes, least) = (number("bytes"), number("least_bytes"));
                assert_eq!(number("kernels"), 1, "{net}, batch {batch}: {sweep:#}");
                assert!(
                    (least..least + least / 50 + 4096).contains(&bytes),
                    "{net}, batch {batch}: {sweep:#}"
                );
            }
        }
    }
}

/// `bench/gpu_check.sh` with the programs of this build, which writes its results to `folder`.
fn benchmark_script(folder: &Path) -> Command {
    for (name, program) in [
        ("mgpurun", env!("CARGO_BIN_EXE_t-mgpurun")),
        ("train_mnist", env!("CARGO_BIN_EXE_t-train_mnist")),
        ("golden_check", env!("CARGO_BIN_EXE_t-golden_check")),
        ("allreduce_perf", env!("CARGO_BIN_EXE_t-allreduce_perf")),
        ("gpu_check", env!("CARGO_BIN_EXE_t-gpu_check")),
        ("t-groups", env!("CARGO_BIN_EXE_t-groups")),
        ("t-collectives", env!("CARGO_BIN_EXE_t-collectives")),
        ("t-device-step", env!("CARGO_BIN_EXE_t-device-step")),
    ] {
        let link = folder.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(program, link).expect("a link");
        }
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/gpu_check.sh");
    let mut command = fake_gpu::command(script);
    command.env("BIN", folder).env("PYTHONDONTWRITEBYTECODE", "1").env("FAKE_GPU_COUNT", "1");
    command.arg("--out").arg(folder);
    command
}

/// The file in `folder` whose name ends like this.
fn written(folder: &Path, ending: &str) -> Option<PathBuf> {
    let mut files =
        std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok).map(|entry| entry.path());
    files.find(|file| file.to_string_lossy().ends_with(ending))
}

/// The result file of the script.
fn script_results(folder: &Path) -> serde_json::Value {
    let file = written(folder, "-fake-gpu-tests-only.json").expect("a result file");
    serde_json::from_str(&std::fs::read_to_string(file).expect("a result file")).expect("JSON")
}

/// `bench/gpu_check.sh` in its dry run: small, without times, and labelled. (`.ci/full` runs all of it.)
#[test]
fn the_gpu_benchmark_script_has_a_dry_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let finished = run(benchmark_script(folder.path()).args(["B", "--only", "throughput"]));
    finished.expect(0, &["FAKE GPU: no figures of a real GPU", "B: 7 runs, 0 failed, 0 left out"]);
    let results = script_results(folder.path());
    assert_eq!(results["fake"], true);
    let runs = results["runs"].as_array().expect("an array");
    assert!(runs.iter().all(|run| run["result"]["gpu"] == "FAKE GPU (tests only)"));
    let text = results.to_string();
    assert!(!text.contains("images_per_s") && !text.contains(" ms"), "times of a fake in {text}");
    // A later part joins the same file.
    run(benchmark_script(folder.path()).args(["C", "--only", "killed"]))
        .expect(0, &["B: 7 runs", "C: 1 runs, 0 failed"]);
    let results = script_results(folder.path());
    let all = results["runs"].as_array().expect("an array");
    assert_eq!((all.len(), &all[7]["name"]), (8, &"2 ranks, one is killed".into()), "{all:?}");
    assert!(written(folder.path(), "gpu-check-logs-B-throughput.tgz").is_some());
}

/// Items that need programs of the tests, two ranks on one GPU, or a checkpoint.
#[test]
fn the_gpu_benchmark_script_checks_groups_gpus_and_checkpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    write_tiny(folder.path());
    for (item, runs) in [("groups", 6), ("gpus", 9), ("evaluate", 12), ("uneven", 14)] {
        let mut script = benchmark_script(folder.path());
        let finished = run(script.env("MGPU_DATA", folder.path()).args(["C", "--only", item]));
        finished.expect(0, &[&format!("C: {runs} runs, 0 failed, 0 left out")]);
    }
}

/// What the script does only on a real GPU: figures, tools, logs that must be split.
#[test]
fn the_gpu_benchmark_script_passes_its_own_tests() {
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/gpu_check_test.py");
    run(&mut mgpu_tests::process::command(tests)).expect(0, &[]);
}

/// What was measured before a deadline or SIGTERM is kept, with the logs.
#[test]
fn an_interrupted_benchmark_script_keeps_its_results() {
    let folder = tempfile::tempdir().expect("a folder");
    let finished = run(benchmark_script(folder.path()).args(["A", "--deadline", "9"]));
    finished.expect(0, &["skipped lenet5 bf16 auto: it takes about 5 s, "]);
    assert!(written(folder.path(), "gpu-check-logs-A.tgz").is_some());

    let folder = tempfile::tempdir().expect("a folder");
    let mut script = benchmark_script(folder.path());
    let mut child = script.arg("A").stdout(Stdio::piped()).spawn().expect("the script");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let first = lines.find(|line| line.starts_with("ok ")).expect("an item that passes");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("the script can be signalled");
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().expect("its end").code(), Some(143), "{first}\n{rest:#?}");
    assert!(rest.iter().any(|line| line.starts_with("stopped by signal 15")), "{rest:#?}");
    assert!(!script_results(folder.path())["runs"].as_array().expect("an array").is_empty());
    assert!(written(folder.path(), "gpu-check-logs-A.tgz").is_some());
}

#[test]
fn nothing_is_measured_on_a_fake_gpu() {
    let finished = run(gpu_check().arg("--bandwidth"));
    finished.expect(0, &["FAKE GPU (tests only)", "is not measured"]);
    assert!(!finished.stdout.contains("GB/s"));
}

/// `gpu_check --layers` lists every candidate of every layer with its fate. It reports no times of a fake.
#[test]
fn candidates_of_layers_are_listed() {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("layers.json");
    let mut command = gpu_check();
    command.env("FAKE_CUBLASLT_WRONG", "1");
    let finished = run(command.args(["--layers", "--only", "lenet5", "--json"]).arg(&json));
    // Five layers, three precisions; the first has no gradient of its input.
    finished.expect(0, &["a fake GPU is not timed", "42 passes, 0 failed, 0 left out"]);
    let text = std::fs::read_to_string(&json).expect("the results");
    let results: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (&results[0]["fake"], &results[0]["peaks"]),
        (&serde_json::json!(true), &serde_json::Value::Null)
    );
    let rows = results[1].as_array().expect("an array");
    assert_eq!(rows.len(), 42);
    for row in rows {
        let candidates = row["candidates"].as_array().expect("an array");
        assert_eq!(candidates[0]["name"], "built in", "{row}");
        assert!(row["bound_ms"].is_null() && candidates.iter().all(|candidate| candidate["ms"].is_null()));
        let of = |library: &str| -> Vec<&serde_json::Value> {
            let is_its =
                |candidate: &&serde_json::Value| candidate["name"].as_str().unwrap_or("").contains(library);
            candidates.iter().filter(is_its).collect()
        };
        let layer = row["layer"].as_str().expect("a description");
        if layer.contains(" to ") {
            let deviates = |candidate: &&serde_json::Value| {
                candidate["rejected"].as_str().is_some_and(|why| why.contains("results deviate"))
            };
            assert!(!of("cuBLASLt").is_empty() && of("cuBLASLt").iter().all(deviates), "{row}");
        } else if layer.contains("x1x28x28") {
            assert_eq!(candidates.len(), 1, "images of one channel: {row}");
        } else {
            assert!(of("cuDNN").iter().any(|candidate| candidate["rejected"].is_null()), "{row}");
        }
    }
    assert!(!finished.stdout.contains(" ms") && !finished.stdout.contains("GB/s"), "times of a fake");
    // No time at all: nothing is begun.
    run(gpu_check().args(["--layers", "--budget", "0"])).expect(0, &["0 passes, 0 failed", "left out"]);
}

#[test]
fn kernels_are_listed_and_compiled_without_a_gpu() {
    let listed = run(gpu_check().arg("--list").env("CUDA_VISIBLE_DEVICES", ""));
    listed.expect(0, &["conv_bf16/conv_forward_bf16_large\n", "optimizer/step_begin\n"]);
    let compiled = run(gpu_check().args(["--compile-only", "--table"]).env("CUDA_VISIBLE_DEVICES", ""));
    compiled.expect(0, &[&format!("{} kernels of ", listed.stdout.lines().count()), "0 failed"]);
}
