//! cuDNN and cuBLASLt are used if available and correct, and are not required. Runs on fake libraries:
//! `tests/gpu/fake_cudnn.cpp` and `tests/gpu/fake_cublaslt.cpp` say what they refuse.

use std::path::{Path, PathBuf};
use std::process::Command;

use mgpu_tests::process::Finished;
use mgpu_tests::{fake_gpu, process};

/// The program, which verifies results itself, with its own cache.
fn program(cache: &Path) -> Command {
    let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-gpu-libraries"));
    command.env("MGPU_CACHE_DIR", cache);
    command
}

/// Each launch of our own convolutions takes 10 ms longer, so that the libraries are faster whatever else the machine does.
const OURS_ARE_SLOW: (&str, &str) = ("FAKE_GPU_SLOW", "10");

fn run(command: &mut Command) -> Finished {
    let finished = process::run(command);
    finished.expect(0, &[]);
    finished
}

/// The lines about convolutions of several channels, or about dense layers.
fn lines<'a>(finished: &'a Finished, kind: &str) -> Vec<&'a str> {
    let ours = |line: &&str| line.contains(kind) && !line.contains("of 1x");
    let lines: Vec<_> = finished.stdout.lines().filter(ours).collect();
    // Three slopes in four precisions.
    assert_eq!(lines.len(), 12, "lines about `{kind}` in {finished:#?}");
    lines
}

#[track_caller]
fn assert_all(lines: &[&str], texts: &[&str]) {
    for line in lines {
        assert!(texts.iter().all(|text| line.contains(text)), "all of {texts:?} in `{line}`");
    }
}

#[test]
fn library_kernels_serve_every_pass_and_are_cached() {
    let cache = tempfile::tempdir().expect("a folder");
    let first = run(program(cache.path()).envs([OURS_ARE_SLOW]));
    let passes = ["forward cuDNN ", "backward input cuDNN ", "backward weights cuDNN "];
    assert_all(&lines(&first, "conv"), &passes);
    let passes = ["forward cuBLASLt ", "backward input cuBLASLt ", "backward weights cuBLASLt "];
    assert_all(&lines(&first, "dense"), &passes);
    assert!(!first.stderr.contains("not deterministic"), "{first:#?}");
    assert!(!first.stderr.contains("in place"), "{first:#?}");
    for line in first.stdout.lines() {
        let fused = line
            .split(", backward")
            .next()
            .is_some_and(|forward| forward.ends_with("ms") && forward.contains("fused"));
        assert!(
            !(fused && (line.contains("slope 0.2") || line.contains("dense") && line.contains("bf16:"))),
            "no such epilogue: {line}"
        );
        assert!(
            !line.contains("of 1x") || line.contains("forward built in, "),
            "own kernels for one channel: {line}"
        );
        let narrow = line.contains("conv 16") && line.contains("bf16: ");
        assert_eq!(
            line.contains(" bf16 "),
            narrow,
            "the gradient is narrow where the library has no other: {line}"
        );
    }
    let fused = |line: &&str| line.starts_with("slope 1 ") && line.contains(", f32: ");
    let hidden = |line: &&str| line.starts_with("slope 0 ") && line.contains(", f32: ");
    for line in lines(&first, "dense").into_iter().filter(fused) {
        assert!(
            !line.contains(" ("),
            "the bias may come with the product, and nothing else is wrong: {line}"
        );
    }
    for line in lines(&first, "dense").into_iter().filter(hidden) {
        assert!(
            line.contains(
                "fused: comparison with a plain kernel failed: NaN in the bias does not reach the output"
            ),
            "{line}"
        );
    }
    // The same choices, including all digits of their times.
    let second = run(&mut program(cache.path()));
    let choices = |finished: &Finished| -> Vec<String> {
        finished.stdout.lines().map(|line| line.split(" (").next().unwrap_or_default().to_owned()).collect()
    };
    assert_eq!(choices(&second), choices(&first));
}

#[test]
fn nondeterministic_kernels_are_used_only_on_request() {
    let cache = tempfile::tempdir().expect("a folder");
    let finished = run(program(cache.path()).arg("nondeterministic"));
    finished.expect(0, &["algorithm 0 is not deterministic", "in-place reduction scheme"]);
}

#[test]
fn without_libraries_all_kernels_are_built_in() {
    let cache = tempfile::tempdir().expect("a folder");
    let mut command = program(cache.path());
    command.env("MGPU_CUDNN_LIBRARY", "/nowhere/libcudnn.so.9");
    command.env("MGPU_CUBLASLT_LIBRARY", "/nowhere/libcublasLt.so.13");
    let finished = run(&mut command);
    let passes = ["forward built in, backward input built in, backward weights built in"];
    assert_all(&lines(&finished, "conv"), &[passes[0], "libcudnn.so.9 (convolutions) was not found"]);
    assert_all(&lines(&finished, "dense"), &[passes[0], "libcublasLt.so.13 (matrix products) was not found"]);
}

/// A library with functions that return these numbers.
fn library(file: PathBuf, functions: &[(&str, u32)]) -> PathBuf {
    let source = file.with_extension("cpp");
    let code = functions.iter().map(|(name, result)| format!("size_t {name}() {{ return {result}; }}\n"));
    let code: String = code.collect();
    std::fs::write(&source, format!("#include <cstddef>\nextern \"C\" {{\n{code}}}\n")).expect("a file");
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()));
    let compiled = compiler.args(["-shared", "-fPIC", "-o"]).arg(&file).arg(&source).status();
    assert!(compiled.expect("a compiler").success());
    file
}

/// A library that contains only the function by which it is recognised.
fn stub(folder: &Path, function: &str) -> PathBuf {
    library(folder.join(format!("{function}.so")), &[(function, 0)])
}

/// Makes the loader search `folder` before the fakes.
fn search_first(command: &mut Command, folder: &Path) {
    let folders = [folder, &fake_gpu::folder()].map(|folder| folder.display().to_string());
    command.env("LD_LIBRARY_PATH", folders.join(":"));
}

#[test]
fn the_driver_decides_which_version_of_a_library_is_used() {
    let cache = tempfile::tempdir().expect("a folder");
    let link = |name: &str, target: &str| {
        let target = fake_gpu::folder().join(target);
        std::os::unix::fs::symlink(target, cache.path().join(name)).expect("a link");
    };
    // A CUDA 12 driver, cuDNN and cuBLASLt of CUDA 13 only.
    let mut command = program(cache.path());
    search_first(&mut command, cache.path());
    command.env("FAKE_CUDA_VERSION", "12040").env("FAKE_NVRTC_MAJOR", "12");
    link("libnvrtc.so.12", "libnvrtc.so.13");
    let finished = run(&mut command);
    let why = "it needs a driver of CUDA 13, but this driver is of CUDA 12.4";
    assert_all(
        &lines(&finished, "conv"),
        &[
            "forward built in, ",
            "libcudnn.so.9 (convolutions) cannot be used; searched: libcudnn.so.9 (",
            why,
        ],
    );
    assert_all(
        &lines(&finished, "dense"),
        &["forward built in, ", "libcublasLt.so.13 (matrix products) cannot be used", why],
    );
    // With a cuBLASLt of CUDA 12 beside it, that one is used.
    let newer = [("cublasLtMatmul", 0), ("cublasLtGetCudartVersion", 13000)];
    library(cache.path().join("libcublasLt.so.13"), &newer);
    link("libcublasLt.so.12", "libcublasLt.so.13");
    command.env("FAKE_CUDNN_CUDA", "12080").env("FAKE_CUBLASLT_CUDA", "12080").envs([OURS_ARE_SLOW]);
    let finished = run(&mut command);
    assert_all(&lines(&finished, "conv"), &["forward cuDNN "]);
    assert_all(&lines(&finished, "dense"), &["forward cuBLASLt "]);
}

#[test]
fn a_stub_of_the_driver_is_not_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let body = || {
        let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-gpu-memory"));
        command.arg("capture");
        command
    };
    library(folder.path().join("libcuda.so"), &[("cuInit", 34)]);
    let mut command = body();
    search_first(&mut command, folder.path());
    run(&mut command);
    // Only stubs.
    library(folder.path().join("libcuda.so.1"), &[("cuInit", 34)]);
    let mut command = body();
    let finished = process::run(command.env("LD_LIBRARY_PATH", folder.path()));
    finished.expect(1, &["the NVIDIA driver was not found: libcuda.so.1 is the stub of a CUDA toolkit"]);
}

#[test]
fn a_library_without_a_required_function_is_not_used() {
    let cache = tempfile::tempdir().expect("a folder");
    let mut command = program(cache.path());
    command.env("MGPU_CUDNN_LIBRARY", stub(cache.path(), "cudnnGetConvolutionForwardAlgorithm_v7"));
    command.env("MGPU_CUBLASLT_LIBRARY", stub(cache.path(), "cublasLtMatmul"));
    let finished = run(&mut command);
    assert_all(
        &lines(&finished, "conv"),
        &["forward built in, ", "has no cudnnGetVersion: this version of the library is not supported"],
    );
    assert_all(
        &lines(&finished, "dense"),
        &["forward built in, ", "has no cublasLtGetVersion: this version of the library is not supported"],
    );
}

#[test]
fn a_library_that_rejects_the_gpu_is_not_used() {
    let cache = tempfile::tempdir().expect("a folder");
    let finished = run(program(cache.path()).env("FAKE_CUDNN_CREATE", "0").env("FAKE_CUBLASLT_CREATE", "0"));
    assert_all(
        &lines(&finished, "conv"),
        &["forward built in, ", "cudnnCreate failed: CUDNN_STATUS_NOT_INITIALIZED"],
    );
    assert_all(
        &lines(&finished, "dense"),
        &["forward built in, ", "cublasLtCreate failed: the library was not"],
    );
}

#[test]
fn missing_library_epilogues_are_added() {
    let cache = tempfile::tempdir().expect("a folder");
    let mut command = program(cache.path());
    command
        .envs([OURS_ARE_SLOW])
        .env("FAKE_CUDNN_FUSED", "0")
        .env("FAKE_CUBLASLT_FUSED", "0")
        .env("FAKE_CUDNN_WIDE_GRADIENT", "1");
    let finished = run(&mut command);
    assert_all(&lines(&finished, "conv"), &["forward cuDNN ", "backward weights cuDNN "]);
    assert_all(&lines(&finished, "dense"), &["forward cuBLASLt "]);
    for line in finished.stdout.lines() {
        let choices = line.split(" (").next().unwrap_or_default();
        // The gradient of weights in f32 leaves no reason for one in bf16; the program finds it correct.
        assert!(!choices.contains("fused") && !choices.contains(" bf16 "), "{line}");
    }
}

#[test]
fn a_library_with_wrong_results_is_not_chosen() {
    let cache = tempfile::tempdir().expect("a folder");
    let finished = run(program(cache.path()).env("FAKE_CUDNN_WRONG", "1").env("FAKE_CUBLASLT_WRONG", "1"));
    let convs = lines(&finished, "conv");
    assert_all(&convs, &["backward input cuDNN ", "results deviate by 5e-1"]);
    for line in convs {
        // Passes computed by another function of the library are correct or wrong independently.
        let (forward, backward) = line.split_once(", backward input ").expect("both passes");
        assert!(forward.contains("forward built in ") || forward.contains(" transposed "), "{line}");
        let backward = backward.split(", backward weights ").next().unwrap_or_default();
        assert!(!backward.contains(" transposed "), "{line}");
    }
    let passes = [
        "forward built in ",
        "backward input built in ",
        "backward weights built in ",
        "results deviate by 5e-1",
    ];
    assert_all(&lines(&finished, "dense"), &passes);
}

/// Large enough layers that the first and the last few thousand results are not all of them.
fn large(cache: &Path) -> Command {
    let mut command = program(cache);
    command.arg("large");
    command
}

#[test]
fn a_single_wrong_result_is_found_wherever_it_is() {
    let cache = tempfile::tempdir().expect("a folder");
    let finished = run(large(cache.path()).env("FAKE_CUDNN_WRONG", "2").env("FAKE_CUBLASLT_WRONG", "2"));
    for line in finished.stdout.lines() {
        let forward = line.split(", backward input ").next().unwrap_or_default();
        assert!(forward.contains("forward built in ") || forward.contains(" transposed "), "{line}");
        let results = if line.contains("conv") { 24_192 } else { 19_200 };
        let found = format!("1 of {results} by more than rounding explains");
        assert!(line.contains(&found), "{found} in {line}");
    }
    assert_eq!(finished.stdout.lines().count(), 4, "{finished:#?}");
}

#[test]
fn a_wrong_kernel_of_our_own_is_not_chosen() {
    let cache = tempfile::tempdir().expect("a folder");
    let mut command = large(cache.path());
    // Its last block does nothing.
    command.env("FAKE_GPU_LAME", "conv_forward_f32_small");
    // Once tuned, once from the cache.
    for why in ["(forward built in: comparison with a plain kernel failed: results deviate by ", ""] {
        let finished = process::run(&mut command);
        finished.expect(1, &["forward cuDNN ", why, "no correct kernel for the forward pass of conv 16 3x3"]);
        // The program got as far as unaligned operands: the results before were right.
        finished.expect(1, &["results are wrong, and the other one needs operands at multiples of 16 bytes"]);
    }
}

#[test]
fn a_layer_without_a_correct_kernel_is_an_error() {
    let cache = tempfile::tempdir().expect("a folder");
    let mut command = large(cache.path());
    command.env("FAKE_GPU_LAME", "conv_backward_weights_f32_small").env("FAKE_CUDNN_FILTER_WRONG", "1");
    let finished = process::run(&mut command);
    let pass = "no correct kernel for the backward weights pass of conv 16 3x3 of 8x9x7, 24 images, f32: ";
    finished
        .expect(1, &[pass, "built in: comparison with a plain kernel failed", "cuDNN 1: comparison with"]);
}

/// The fake cuDNN delays all but the algorithm that suits a layer, and the fake GPU our own kernels.
#[test]
fn the_fastest_algorithm_of_each_layer_is_chosen() {
    let cache = tempfile::tempdir().expect("a folder");
    let mut command = program(cache.path());
    command
        .arg("depths")
        .env("FAKE_CUDNN_COST", "1")
        .env("FAKE_CUDNN_WIDE_GRADIENT", "1")
        .envs([OURS_ARE_SLOW]);
    let finished = run(&mut command);
    let lines: Vec<_> = finished.stdout.lines().collect();
    assert_all(&lines[..1], &["forward cuDNN 0 ", "backward input cuDNN 1 transposed"]);
    assert_all(&lines[1..], &["forward cuDNN 1 ", "backward input cuDNN 1 transposed"]);
    // A gradient in bf16 would be faster.
    assert!(!finished.stdout.contains(" bf16 "), "{finished:#?}");
    let narrow = run(command.arg("narrow"));
    let lines: Vec<_> = narrow.stdout.lines().collect();
    assert!(
        lines[2].contains("bf16: ") && lines[2].contains("backward weights cuDNN 1 bf16 "),
        "{narrow:#?}"
    );
}
