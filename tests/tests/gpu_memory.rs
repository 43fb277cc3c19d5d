//! Memory of a GPU can be allocated and freed at any time: while another thread captures, and while copies are in
//! flight. Runs on the fake libraries of `tests/gpu`, whose captures refuse what CUDA refuses.

use mgpu_tests::fake_gpu;
use mgpu_tests::process::run;

#[test]
fn memory_is_allocated_and_freed_while_another_thread_captures() {
    run(fake_gpu::command(env!("CARGO_BIN_EXE_t-gpu-memory")).arg("capture")).expect(0, &[]);
}

#[test]
fn pinned_memory_is_freed_after_its_copies() {
    // Every piece of work starts late, so a missing wait frees the memory before the copy.
    let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-gpu-memory"));
    run(command.arg("pinned").env("FAKE_GPU_DELAY_US", "20000")).expect(0, &[]);
}
