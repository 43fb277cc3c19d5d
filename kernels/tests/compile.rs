//! Every kernel compiles for the supported architectures with the real compiler, and does not spill registers.
#![cfg(feature = "cuda")]

use std::process::Command;

use mgpu_kernels::conv::cuda::exists;
use mgpu_kernels::cuda::{ARCHITECTURES, Source, Usage, compile_for, compiler_version, sources};

/// Kernels that may spill, each with the architecture, the maximum number of bytes and the reason.
const SPILLS: [(&str, (u32, u32), u32, &str); 0] = [];

/// In a worker process: its number and the number of workers, with a slash between them.
const SHARE: &str = "MGPU_TEST_COMPILE_SHARE";

/// The newest architecture whose code differs: it is above all limits in `device.cuh`.
#[test]
fn every_kernel_compiles_without_spills() {
    compile(&[(9, 0)]);
}

/// Others have the code below a limit, or other numbers of registers.
#[test]
#[ignore = "takes minutes: .ci/full"]
fn every_kernel_compiles_for_every_architecture_without_spills() {
    compile(&ARCHITECTURES);
}

/// Compiles every kernel for these architectures, or this worker's share of them.
fn compile(architectures: &[(u32, u32)]) {
    if let Err(missing) = compiler_version() {
        println!("skipped: {missing}");
        return;
    }
    match std::env::var(SHARE) {
        Ok(share) => {
            let (worker, workers) = share.split_once('/').expect("a share");
            compile_share(
                architectures,
                worker.parse().expect("a worker"),
                workers.parse().expect("the workers"),
            );
        }
        Err(_) => compile_in_processes(),
    }
}

/// NVRTC compiles one program at a time in a process, so each worker is a process: this test with a [`SHARE`].
fn compile_in_processes() {
    let program = std::env::current_exe().expect("this program");
    let test = std::thread::current().name().expect("the name of this test").to_owned();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let compile = |worker| {
        let mut command = Command::new(&program);
        command.args(["--include-ignored", "--exact", &test]).env(SHARE, format!("{worker}/{workers}"));
        let worker = command.output().expect("a worker process");
        assert!(worker.status.success(), "{}", String::from_utf8_lossy(&worker.stdout));
    };
    std::thread::scope(|scope| (0..workers).for_each(|worker| drop(scope.spawn(move || compile(worker)))));
}

/// Compiles every `workers`-th of all sources and architectures.
fn compile_share(architectures: &[(u32, u32)], worker: usize, workers: usize) {
    // The sources of matrix products take the longest, so they come first.
    let all = sources()
        .into_iter()
        .flat_map(|source| architectures.iter().map(move |architecture| (source, *architecture)));
    let own = all.skip(worker).step_by(workers);
    let found: Vec<String> = own.flat_map(|(source, architecture)| problems(source, architecture)).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// What is wrong with the kernels of a source on an architecture.
fn problems(source: &'static Source, architecture: (u32, u32)) -> Vec<String> {
    let sm = architecture.0 * 10 + architecture.1;
    let compiled = match compile_for(source, architecture) {
        Ok(compiled) => compiled,
        Err(error) => return vec![error.to_string()],
    };
    let usage = compiled.usage();
    let mut problems = Vec::new();
    let mut expected = source.kernels();
    expected.retain(|kernel| exists(kernel, architecture));
    expected.sort_unstable();
    let found: Vec<&str> = usage.iter().map(|usage| usage.kernel.as_str()).collect();
    if found != expected {
        problems.push(format!("{} for sm_{sm}: the compiler found {found:?}", source.name));
    }
    for Usage { kernel, spills, .. } in &usage {
        let allowed = SPILLS.iter().find(|(name, at, ..)| name == kernel && *at == architecture);
        if *spills > allowed.map_or(0, |(_, _, most, _)| *most) {
            problems.push(format!("{kernel} for sm_{sm} spills {spills} bytes"));
        }
    }
    problems
}
