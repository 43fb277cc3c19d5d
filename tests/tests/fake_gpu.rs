//! The fake libraries behave like the real ones, and detect misuse.

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, run};

/// Runs one case of `tests/gpu/selftest.cpp`.
fn case(words: &[&str], variables: &[(&str, &str)]) -> Finished {
    run(fake_gpu::command(fake_gpu::selftest()).args(words).envs(variables.iter().copied()))
}

#[track_caller]
fn passes(name: &str) {
    case(&[name], &[]).expect(0, &[]);
}

/// Runs a case that a signal ends after a message.
#[track_caller]
fn ends_with(name: &str, message: &str) {
    let finished = case(&[name], &[]);
    assert_eq!(finished.code, None, "{finished:#?}");
    assert!(finished.stderr.contains(message), "{finished:#?}");
}

#[test]
fn the_fake_library_exports_every_symbol() {
    let folder = fake_gpu::folder();
    for name in ["libcuda.so.1", "libnvrtc.so.13", "libnccl.so.2", "libcudnn.so.9", "libcublasLt.so.13"] {
        assert!(folder.join(name).exists(), "{name}");
    }
}

#[test]
fn barriers_hold_for_any_thread_order() {
    for order in ["forward", "reverse", "shuffled"] {
        for name in ["sums", "lanes"] {
            case(&[name], &[("FAKE_GPU_ORDER", order)]).expect(0, &[]);
        }
    }
}

#[test]
fn the_tensor_cores_products_are_right() {
    passes("mma_bf16");
    passes("mma_f16");
    passes("mma_tf32");
}

#[test]
fn tensor_cores_truncate_on_request() {
    passes("truncated");
    for name in ["truncated", "mma_bf16", "mma_f16", "mma_tf32"] {
        case(&[name], &[("FAKE_GPU_TRUNCATE", "1")]).expect(0, &[]);
    }
}

#[test]
fn matrices_are_loaded_without_bank_conflicts() {
    passes("tiles_matrices");
    ends_with("tiles_bank_conflict", "rows of a matrix in the same banks of shared memory");
    passes("tiles_conflicts");
}

/// What arrives too late, or is overwritten too early, is found in any thread order.
#[test]
fn asynchronous_copies_arrive_after_a_wait_and_a_barrier() {
    for order in ["forward", "reverse", "shuffled"] {
        for name in ["", "_without_wait", "_without_barrier", "_too_early"] {
            case(&[&format!("tiles_copies{name}")], &[("FAKE_GPU_ORDER", order)]).expect(0, &[]);
        }
    }
    ends_with("tiles_copies_left_behind", "a thread ends with asynchronous copies that it has not awaited");
}

#[test]
fn tiles_are_multiplied_at_any_depth_by_both_loops() {
    for precision in ["bf16", "tf32"] {
        for order in ["forward", "reverse", "shuffled"] {
            case(&[&format!("tiles_products_{precision}")], &[("FAKE_GPU_ORDER", order)]).expect(0, &[]);
        }
        for truncate in ["0", "1"] {
            let truncate = [("FAKE_GPU_TRUNCATE", truncate)];
            case(&[&format!("tiles_same_bits_{precision}")], &truncate).expect(0, &[]);
        }
    }
}

/// What a warpgroup multiplies is read, and its sums are complete, when the kernel awaits them and no earlier.
#[test]
fn products_of_a_warpgroup_are_awaited() {
    for order in ["forward", "reverse", "shuffled"] {
        for name in ["", "_products", "_read_too_early", "_overwritten"] {
            case(&[&format!("tiles_group{name}")], &[("FAKE_GPU_ORDER", order)]).expect(0, &[]);
        }
    }
    case(&["tiles_group_products"], &[("FAKE_GPU_TRUNCATE", "1")]).expect(0, &[]);
    ends_with("tiles_group_askew", "a warpgroup's operand does not begin with an atom");
    ends_with(
        "tiles_group_left_behind",
        "a thread ends with products of its warpgroup that it has not awaited",
    );
}

#[test]
fn a_misaligned_access_is_reported() {
    passes("aligned");
    let finished = case(&["misaligned"], &[]);
    assert_eq!(finished.code, None, "{finished:#?}");
    let text = "kernel selftest_copy_packs, block (0, 0, 0): misaligned address";
    assert!(finished.stderr.contains(text) && finished.stderr.contains("a multiple of 16"), "{finished:#?}");
}

#[test]
fn a_missing_barrier_makes_the_result_depend_on_thread_order() {
    let out = |order| case(&["no_barrier"], &[("FAKE_GPU_ORDER", order)]).expect(0, &[]).stdout.clone();
    assert_ne!(out("forward"), out("reverse"));
    assert_ne!(out("forward"), out("shuffled"));
}

#[test]
fn a_divergent_barrier_is_reported() {
    let finished = case(&["half_a_barrier"], &[]);
    assert_eq!(finished.code, None, "{finished:#?}");
    assert!(finished.stderr.contains("kernel selftest_half_a_barrier"), "{finished:#?}");
    assert!(finished.stderr.contains("32 wait in __syncthreads, 32 in a warp function"), "{finished:#?}");
}

#[test]
fn launches_and_modules_have_limits() {
    passes("limits");
}

#[test]
fn uninitialised_memory_is_poisoned() {
    passes("memory");
    ends_with("past_the_end", "written to past their end");
}

#[test]
fn a_copy_from_freed_pinned_memory_is_reported() {
    ends_with("freed_pinned", "a copy uses pinned memory that has been freed");
}

#[test]
fn the_host_cannot_access_device_memory() {
    for name in ["host_reads_device", "host_copies_device"] {
        ends_with(name, "FAKE GPU: the host accesses device memory at 0x");
    }
}

#[test]
fn the_device_accesses_only_pinned_memory_of_the_host() {
    passes("pinned");
    ends_with("copy_to_host_address", "is neither device memory nor pinned memory of the host");
    ends_with("kernel_gets_host_address", "selftest_count: 0x");
}

#[test]
fn a_use_of_freed_device_memory_is_reported() {
    let why = "is device memory that is freed, or was never allocated";
    ends_with("copy_from_freed", why);
    ends_with("kernel_gets_freed", why);
    ends_with("graph_uses_freed", why);
}

#[test]
fn an_access_past_the_end_of_device_memory_is_reported() {
    ends_with("fill_past_the_end", "cuMemset: 44 bytes are accessed at 0x");
    ends_with("kernel_far_past_the_end", "where no device memory is allocated");
}

#[test]
fn a_missing_event_wait_is_detected_with_slow_streams() {
    let slow = [("FAKE_GPU_DELAY_US", "2000")];
    case(&["event_wait"], &slow).expect(0, &[]);
    case(&["missing_event_wait"], &slow).expect(0, &[]);
}

#[test]
fn a_captured_graph_is_replayed_with_its_branches() {
    passes("replay");
    case(&["replay"], &[("FAKE_GPU_DELAY_US", "1000")]).expect(0, &[]);
}

#[test]
fn events_have_times_only_when_cuda_has_them() {
    passes("times");
}

#[test]
fn graphs_record_and_await_events_and_call_the_host() {
    passes("external_nodes");
}

#[test]
fn a_capture_refuses_kernels_that_are_not_loaded() {
    let finished = case(&["lazy_loading"], &[]);
    finished.expect(0, &["the first launch of a kernel loads it, which a capture forbids: selftest_count"]);
    case(&["lazy_loading"], &[("FAKE_CUDA_LAZY_LOADING", "0")]).expect(1, &[]);
}

#[test]
fn a_capture_refuses_what_cuda_refuses() {
    passes("capture_errors");
}

#[test]
fn collectives_between_threads_and_between_processes() {
    for ranks in ["1", "2", "3", "5"] {
        let devices = [("FAKE_GPU_COUNT", ranks)];
        case(&["nccl_collectives", ranks], &devices).expect(0, &[]);
        case(&["nccl_processes", ranks], &devices).expect(0, &[]);
    }
    passes("nccl_numbers");
    passes("nccl_graph");
}

#[test]
fn a_split_connects_the_ranks_of_a_color() {
    for ranks in ["3", "4", "6"] {
        case(&["nccl_split", ranks], &[("FAKE_GPU_COUNT", ranks)]).expect(0, &[]);
    }
    passes("nccl_split_fault");
}

#[test]
fn ranks_on_one_device_are_refused_unless_allowed() {
    passes("nccl_same_device");
    let newer = [("FAKE_NCCL_VERSION", "23003"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1")];
    case(&["nccl_same_device"], &newer).expect(0, &[]);
}

#[test]
fn registered_memory_is_checked() {
    for ranks in ["1", "2", "3"] {
        case(&["nccl_registration", ranks], &[("FAKE_GPU_COUNT", ranks)]).expect(0, &[]);
    }
    let place = "at 0x1 of registered memory";
    for (misuse, message) in [
        ("freed", "is freed while it is registered"),
        ("twice", "gets a second window"),
        ("sizes", "the ranks call different collectives: rank "),
        ("mixed", place),
        ("offsets", place),
        ("unfinished", "is device memory that is freed, or was never allocated"),
    ] {
        let finished = case(&["nccl_misuse"], &[("MISUSE", misuse)]);
        assert!(finished.code.is_none() && finished.stderr.contains(message), "{misuse}: {finished:#?}");
    }
}

#[test]
fn injected_faults_end_by_abort() {
    for fault in ["init_error@1", "hang_init@1", "async_error@1:after=2", "stuck_collective@1:after=2"] {
        case(&["nccl_fault"], &[("FAKE_NCCL_FAULT", fault)]).expect(0, &[]);
    }
    for fault in ["call_error@1", "stuck_finalize@1"] {
        case(&["nccl_call_fault"], &[("FAKE_NCCL_FAULT", fault)]).expect(0, &[]);
    }
    for fault in ["hang_call_init", "stuck_abort"] {
        case(&["nccl_hang"], &[("FAKE_NCCL_FAULT", fault)]).expect(0, &[]);
    }
}

#[test]
fn ranks_wait_for_a_killed_peer_until_they_abort() {
    case(&["nccl_killed", "3"], &[("FAKE_GPU_COUNT", "3")]).expect(0, &[]);
}
