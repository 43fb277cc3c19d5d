//! Collectives of the NCCL backend between processes, on host buffers and on device memory.
//!
//! Everything runs on the fake libraries of `tests/gpu`: the tests cover the use of NCCL, not NCCL itself.

use std::process::Command;

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, run};

fn launcher(ranks: u32) -> Command {
    let mut launcher = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.env("FAKE_GPU_COUNT", "4").env("MGPU_TIMEOUT", "60");
    launcher.args(["-n", &ranks.to_string(), "--backend", "nccl"]);
    launcher
}

/// Runs `t-device BODY` on this number of ranks.
fn on_devices(ranks: u32, body: &str) -> Finished {
    let finished = run(launcher(ranks).args([env!("CARGO_BIN_EXE_t-device"), body]));
    finished.expect(0, &[&format!("rank 0 of {ranks} on FAKE GPU (tests only)")]);
    finished
}

#[test]
fn every_operation_type_and_reduction_on_device_memory() {
    for ranks in [1, 2, 4] {
        on_devices(ranks, "all");
    }
}

#[test]
fn grouped_operations_start_together() {
    for ranks in [1, 2, 4] {
        on_devices(ranks, "groups");
    }
}

#[test]
fn operations_are_captured_and_replayed() {
    for ranks in [1, 2, 4] {
        on_devices(ranks, "capture");
    }
}

#[test]
fn host_buffers_are_staged_through_the_device() {
    for ranks in [1, 2, 3] {
        run(launcher(ranks).args([env!("CARGO_BIN_EXE_t-collectives"), "all"])).expect(0, &[]);
    }
}

#[test]
fn groups_run_every_collective_on_host_buffers() {
    for ranks in [2, 3, 4, 7] {
        let mut groups = launcher(ranks);
        groups.env("FAKE_GPU_COUNT", "9");
        run(groups.args([env!("CARGO_BIN_EXE_t-collectives"), "groups"])).expect(0, &[]);
    }
}

/// Rows and columns at once, groups of groups, and ranks without a group.
#[test]
fn groups_run_on_device_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    for (ranks, delay) in [(2, "0"), (3, "3000"), (4, "0"), (5, "3000"), (9, "0")] {
        let trace = folder.path().join(ranks.to_string());
        let mut groups = launcher(ranks);
        groups.env("FAKE_GPU_COUNT", "9").env("FAKE_NCCL_TRACE", &trace).env("FAKE_GPU_DELAY_US", delay);
        run(groups.args([env!("CARGO_BIN_EXE_t-groups"), "grid"])).expect(0, &[]);
        let calls = std::fs::read_to_string(&trace).expect("calls of NCCL");
        let count = |call: &str| calls.lines().filter(|line| *line == call).count();
        // Four splits of the world, and one of all ranks but the first.
        assert_eq!(
            count("ncclCommSplit") as u32,
            4 * ranks + if ranks > 2 { ranks - 1 } else { 0 },
            "{calls}"
        );
        assert_eq!((count("ncclGetUniqueId"), count("ncclCommAbort")), (1, 0), "{calls}");
        assert_eq!(count("ncclCommFinalize"), count("ncclCommDestroy"), "{calls}");
    }
}

#[test]
fn groups_are_dropped_in_any_order() {
    let folder = tempfile::tempdir().expect("a folder");
    for ranks in [2, 3, 4] {
        let trace = folder.path().join(ranks.to_string());
        let mut groups = launcher(ranks);
        groups.env("FAKE_NCCL_TRACE", &trace);
        run(groups.args([env!("CARGO_BIN_EXE_t-groups"), "drops"])).expect(0, &[]);
        let calls = std::fs::read_to_string(&trace).expect("calls of NCCL");
        assert!(!calls.contains("ncclCommAbort"), "{calls}");
    }
}

#[test]
fn two_communicators_alternate() {
    run(launcher(2).args([env!("CARGO_BIN_EXE_t-collectives"), "two-communicators"])).expect(0, &[]);
}

#[test]
fn programs_are_independent_of_the_backend() {
    run(launcher(2).arg("t-hello_ring")).expect(
        0,
        &["hello from rank 1 of 2 (nccl backend): the ranks sum to 1", "the token came back with 1"],
    );
}

#[test]
fn a_world_of_one_needs_no_nccl() {
    let mut alone = launcher(1);
    alone.env("MGPU_NCCL_LIBRARY", "/nonexistent/libnccl.so.2");
    run(alone.args([env!("CARGO_BIN_EXE_t-device"), "all"])).expect(0, &[]);
    // Also without a launcher.
    let mut alone = fake_gpu::command(env!("CARGO_BIN_EXE_t-device"));
    alone.env("MGPU_BACKEND", "nccl").env("MGPU_NCCL_LIBRARY", "/nonexistent/libnccl.so.2").arg("groups");
    run(&mut alone).expect(0, &["rank 0 of 1 on FAKE GPU (tests only)"]);
}

/// `MGPU_NCCL=always` opens NCCL for a single rank, and all operations go through it.
#[test]
fn a_world_of_one_uses_nccl_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    for body in ["all", "groups", "capture"] {
        let trace = folder.path().join(body);
        let mut alone = launcher(1);
        alone.env("MGPU_NCCL", "always").env("FAKE_NCCL_TRACE", &trace);
        run(alone.args([env!("CARGO_BIN_EXE_t-device"), body])).expect(0, &["rank 0 of 1"]);
        let calls = std::fs::read_to_string(&trace).expect("calls of NCCL");
        let has = |call: &str| calls.lines().any(|line| line == call);
        let life = ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommFinalize", "ncclCommDestroy"];
        assert!(life.into_iter().all(has) && has("ncclAllReduce"), "{body}: {calls}");
        assert_eq!(has("ncclAllReduce captured"), body == "capture", "{calls}");
        assert!(has("ncclGroupStart") == has("ncclGroupEnd") && !has("ncclCommAbort"), "{calls}");
    }
    let mut alone = launcher(1);
    alone.env("MGPU_NCCL", "always").env("MGPU_NCCL_LIBRARY", "/nonexistent/libnccl.so.2");
    run(alone.args([env!("CARGO_BIN_EXE_t-device"), "all"])).expect(9, &["/nonexistent/libnccl.so.2"]);
    let mut alone = fake_gpu::command(env!("CARGO_BIN_EXE_t-device"));
    alone.env("MGPU_BACKEND", "nccl").env("MGPU_NCCL", "always").arg("all");
    run(&mut alone).expect(9, &["MGPU_NCCL", "start the program with `mgpurun -n 1`"]);
    let mut alone = launcher(1);
    alone.env("MGPU_NCCL", "never");
    run(alone.args([env!("CARGO_BIN_EXE_t-device"), "all"])).expect(9, &["known are auto and always"]);
}

#[test]
fn each_rank_uses_its_visible_gpu() {
    let finished = run(launcher(2).args(["--isolate-gpus", "--dry-run", "true"]));
    // The fake driver lists no GPUs, so there is nothing to narrow.
    assert!(!finished.stdout.contains("CUDA_VISIBLE_DEVICES"), "{finished:#?}");
    let mut narrowed = fake_gpu::command(env!("CARGO_BIN_EXE_t-device"));
    narrowed.env("MGPU_BACKEND", "nccl").env("MGPU_DEVICE", "1").arg("groups");
    run(&mut narrowed).expect(0, &["FAKE GPU"]);
    narrowed.env("MGPU_DEVICE", "7");
    run(&mut narrowed).expect(9, &["there is no GPU 7: CUDA sees 2"]);
}

#[test]
fn ranks_share_a_gpu_only_on_request() {
    let mut sharing = launcher(3);
    sharing.env("FAKE_GPU_COUNT", "1").arg("--share-gpus");
    run(sharing.args([env!("CARGO_BIN_EXE_t-device"), "groups"])).expect(0, &["rank 2 of 3"]);
    let dry = run(launcher(2).args(["--share-gpus", "--dry-run", "true"]));
    dry.expect(0, &["MGPU_SHARE_GPUS=1", "NCCL_SOCKET_IFNAME=lo", "NCCL_NVLS_ENABLE=0"]);
}

#[test]
fn collective_perf_measures_device_memory() {
    for (ranks, collective) in [
        (2, "all_reduce"),
        (2, "reduce_scatter"),
        (3, "all_gather"),
        (1, "broadcast"),
        (3, "gather"),
        (2, "scatter"),
    ] {
        let mut perf = launcher(ranks);
        let sizes = ["--min", "256", "--max", "1024", "--factor", "4"];
        perf.args(["--no-prefix", env!("CARGO_BIN_EXE_t-collective_perf"), "--check"]).args(sizes);
        let finished = run(perf.args(["--collective", collective, "--op", "avg", "--dtype", "bf16"]));
        finished.expect(0, &[]);
        let line = finished.json();
        assert_eq!(
            (&line["impl"], &line["ranks"], &line["checked"]),
            (&"mgpu".into(), &ranks.into(), &true.into())
        );
        assert_eq!((&line["buffers"], &line["device"]), (&"device".into(), &"FAKE GPU (tests only)".into()));
        assert_eq!(line["backend"], if ranks == 1 { "solo" } else { "nccl" });
    }
    let mut staged = launcher(2);
    staged.args(["--no-prefix", env!("CARGO_BIN_EXE_t-collective_perf"), "--max", "1024", "--check"]);
    let line = run(staged.args(["--buffers", "private"])).expect(0, &[]).json();
    assert_eq!((&line["buffers"], &line["backend"]), (&"private".into(), &"nccl".into()));
    // all_to_all in place is only available on host buffers.
    let exchange =
        [env!("CARGO_BIN_EXE_t-collective_perf"), "--max", "1024", "--check", "--collective", "all_to_all"];
    let line = run(launcher(3).arg("--no-prefix").args(exchange)).expect(0, &[]).json();
    assert_eq!((&line["buffers"], &line["backend"]), (&"private".into(), &"nccl".into()));
    let refused = run(launcher(2).args(exchange).args(["--buffers", "device"]));
    refused.expect(1, &["--buffers device has no all_to_all in place; use private"]);
}
