//! Compiles all kernels for all architectures, without a GPU.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use mgpu_kernels::cuda::{ARCHITECTURES, Result, Usage, compile_for, compiler_version, sources};

use crate::print::outln;

/// Prints the results. True if everything compiled.
pub(super) fn run(table: bool) -> Result<bool> {
    let (major, minor) = compiler_version()?;
    outln!("NVRTC {major}.{minor}");
    let sources = sources();
    let work: Vec<_> =
        ARCHITECTURES.iter().flat_map(|at| sources.iter().map(move |source| (*source, *at))).collect();
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let compile = || {
        while let Some((source, architecture)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            let compiled = compile_for(source, *architecture).map(|compiled| compiled.usage());
            results.lock().expect("no panic holds it").push((*architecture, source.name, compiled));
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(compile))));
    let mut results = results.into_inner().expect("all workers ended well");
    results.sort_by_key(|(architecture, source, _)| (*architecture, *source));
    let mut failed = 0;
    if table {
        outln!(
            "{:<38} {:>6} {:>9} {:>7} {:>6} {:>6}",
            "kernel",
            "sm",
            "registers",
            "shared",
            "stack",
            "spills"
        );
    }
    for ((major, minor), source, outcome) in &results {
        match outcome {
            Ok(usage) if table => usage.iter().for_each(|usage| {
                let Usage { kernel, registers, shared, stack, spills } = usage;
                outln!("{kernel:<38} {major:>4}{minor}  {registers:>9} {shared:>7} {stack:>6} {spills:>6}");
            }),
            Ok(_) => {}
            Err(error) => {
                failed += 1;
                outln!("FAILED {source} for {major}.{minor}: {error}");
            }
        }
    }
    let kernels: usize = sources.iter().map(|source| source.kernels().len()).sum();
    outln!(
        "{kernels} kernels of {} sources, {} architectures, {failed} failed",
        sources.len(),
        ARCHITECTURES.len()
    );
    Ok(failed == 0)
}
