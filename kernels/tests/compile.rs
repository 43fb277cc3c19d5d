//! Every kernel compiles for every supported architecture with the real compiler, and does not spill registers.
#![cfg(feature = "cuda")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use mgpu_kernels::cuda::{ARCHITECTURES, Source, compile_for, compiler_version, sources};

/// Kernels that may spill, each with the architecture, the maximum number of bytes and the reason.
const SPILLS: [(&str, (u32, u32), u32, &str); 0] = [];

#[test]
fn every_kernel_compiles_for_every_architecture_without_spills() {
    match compiler_version() {
        Ok((major, minor)) => println!("NVRTC {major}.{minor}"),
        Err(missing) => {
            println!("skipped: {missing}");
            return;
        }
    }
    println!(
        "{:<40} {:>5} {:>9} {:>7} {:>6} {:>6}",
        "kernel", "sm", "registers", "shared", "stack", "spills"
    );
    // The sources of matrix products take the longest, so they come first.
    let mut work = Vec::new();
    for source in sources() {
        work.extend(ARCHITECTURES.map(|architecture| (source, architecture)));
    }
    let (next, problems) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let each = || {
        while let Some((source, architecture)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = compile(source, *architecture);
            problems.lock().expect("no panic holds it").extend(found);
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(each))));
    let problems = problems.into_inner().expect("all workers ended well");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Prints the resources that each kernel uses, and returns what is wrong.
fn compile(source: &'static Source, architecture: (u32, u32)) -> Vec<String> {
    let sm = architecture.0 * 10 + architecture.1;
    let compiled = match compile_for(source, architecture) {
        Ok(compiled) => compiled,
        Err(error) => return vec![error.to_string()],
    };
    let usage = compiled.usage();
    let mut problems = Vec::new();
    let mut expected = source.kernels();
    expected.sort_unstable();
    let found: Vec<&str> = usage.iter().map(|usage| usage.kernel.as_str()).collect();
    if found != expected {
        problems.push(format!("{} for sm_{sm}: the compiler found {found:?}", source.name));
    }
    let mut lines = String::new();
    for of in &usage {
        let (kernel, spills) = (&of.kernel, of.spills);
        let (registers, shared, stack) = (of.registers, of.shared, of.stack);
        lines += &format!("{kernel:<40} {sm:>5} {registers:>9} {shared:>7} {stack:>6} {spills:>6}\n");
        let allowed = SPILLS.iter().find(|(name, at, ..)| name == kernel && *at == architecture);
        if spills > allowed.map_or(0, |(_, _, most, _)| *most) {
            problems.push(format!("{kernel} for sm_{sm} spills {spills} bytes"));
        }
    }
    print!("{lines}");
    problems
}
