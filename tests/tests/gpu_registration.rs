//! NCCL accesses gradients in place where it can, on all ranks or on none, and training goes on where it cannot.
//!
//! The fake NCCL ends a process that frees registered memory, or whose peers use registered memory at another offset.

use std::process::Command;

use mgpu_tests::fake_gpu;
use mgpu_tests::process::{Finished, run};

const WINDOW: &str = "in place (window)";
const REGISTERED: &str = "in place (registered)";

/// `t-device-step access` on this number of ranks, with a file for the calls of NCCL.
struct Training {
    command: Command,
    folder: tempfile::TempDir,
}

impl Training {
    fn new(ranks: u32, words: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = fake_gpu::launched(env!("CARGO_BIN_EXE_t-mgpurun"), ranks);
        command.env("MGPU_TIMEOUT", "60").env("FAKE_NCCL_TRACE", folder.path().join("calls"));
        command.args(words).arg(env!("CARGO_BIN_EXE_t-device-step")).arg("access");
        Training { command, folder }
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// The checksum of the weights, after every rank has said how NCCL accesses gradients; and the calls of NCCL.
    #[track_caller]
    fn ends_with(mut self, access: &[&str]) -> (String, Calls) {
        let finished = run(&mut self.command);
        finished.expect(0, &[]);
        for (rank, access) in access.iter().enumerate() {
            let line = format!("[{rank}] gradients: {access}");
            assert!(finished.stdout.lines().any(|other| other == line), "`{line}` of {finished:#?}");
        }
        (checksum(&finished), Calls(std::fs::read_to_string(self.folder.path().join("calls")).unwrap()))
    }
}

fn checksum(finished: &Finished) -> String {
    let line = finished.stdout.lines().find_map(|line| line.split_once("weights: "));
    line.unwrap_or_else(|| panic!("no weights: {finished:#?}")).1.to_owned()
}

struct Calls(String);

impl Calls {
    /// How often each of them was called.
    fn count<const N: usize>(&self, calls: [&str; N]) -> [usize; N] {
        calls.map(|call| self.0.lines().filter(|line| *line == call).count())
    }
}

/// Allocation, registration and windows, and their ends.
const MEMORY: [&str; 6] = [
    "ncclMemAlloc",
    "ncclCommRegister",
    "ncclCommWindowRegister",
    "ncclCommWindowDeregister",
    "ncclCommDeregister",
    "ncclMemFree",
];

#[test]
fn gradients_are_accessed_in_place() {
    for ranks in [2, 3] {
        let (plain, none) = Training::new(ranks, &[])
            .env("MGPU_NCCL_REGISTER", "off")
            .ends_with(&["by copies (MGPU_NCCL_REGISTER=off)"; 3][..ranks as usize]);
        assert_eq!(none.count(MEMORY), [0; 6], "{}", none.0);
        let (weights, calls) = Training::new(ranks, &[]).ends_with(&[WINDOW; 3][..ranks as usize]);
        assert_eq!(weights, plain);
        assert_eq!(calls.count(MEMORY), [ranks as usize; 6], "{}", calls.0);
        assert_eq!(calls.count(["ncclCommAbort", "ncclGetUniqueId"]), [0, 1], "{}", calls.0);
        let captured = calls.0.contains("ncclAllReduce captured");
        assert!(captured && !calls.0.contains("ncclCommGetAsyncError in a group"), "{}", calls.0);
        // Every registration ends before the communicator. (Memory of graphs is freed with them.)
        let last = |call: &str| calls.0.lines().collect::<Vec<_>>().iter().rposition(|line| *line == call);
        assert!(last("ncclCommDeregister") < last("ncclCommFinalize"), "{}", calls.0);
    }
}

#[test]
fn all_memory_that_nccl_uses_in_every_step_is_registered() {
    // Sharded: parameters are gathered, too.
    let mut sharded = Training::new(2, &[]);
    sharded.command.arg("shards");
    let (weights, calls) = sharded.ends_with(&[WINDOW; 2]);
    assert_eq!(calls.count(MEMORY), [4; 6], "{}", calls.0);
    let mut plain = Training::new(2, &[]).env("MGPU_NCCL_REGISTER", "off");
    plain.command.arg("shards");
    assert_eq!(weights, plain.ends_with(&[]).0);
    // A single rank that sends its gradients through NCCL, to check NCCL.
    let (_, calls) = Training::new(1, &[]).env("MGPU_NCCL", "always").ends_with(&[REGISTERED]);
    assert_eq!(calls.count(MEMORY), [1, 1, 0, 0, 1, 1], "{}", calls.0);
    // One that does not uses no memory of NCCL.
    let mut alone = Training::new(1, &[]);
    run(&mut alone.command).expect(0, &["gradients: by copies (NCCL does not use it)"]);
    assert!(!alone.folder.path().join("calls").exists());
}

#[test]
fn older_versions_register_what_they_can() {
    let mut without_windows = Training::new(2, &[]);
    fake_gpu::with_older_nccl(&mut without_windows.command, 26);
    let (weights, calls) = without_windows.ends_with(&[REGISTERED; 2]);
    assert_eq!(calls.count(MEMORY), [2, 2, 0, 0, 2, 2], "{}", calls.0);
    let mut without_registration = Training::new(2, &[]);
    fake_gpu::with_older_nccl(&mut without_registration.command, 18);
    let why = "by copies (not registered: NCCL 2.18.5 is too old; 2.19 or newer can)";
    let (plain, calls) = without_registration.ends_with(&[why; 2]);
    assert_eq!(calls.count(MEMORY), [0; 6], "{}", calls.0);
    assert_eq!(weights, plain);
}

/// A failure of one rank is one of all, and training goes on with plain memory.
#[test]
fn training_goes_on_without_registration() {
    let rank_1 = "by copies (not registered: rank 1 cannot register its memory)";
    let none = "by copies (not registered: NCCL registers nothing, perhaps because of NCCL_LOCAL_REGISTER=0)";
    let alloc = "by copies (not registered: ncclMemAlloc failed: unhandled cuda error (NCCL result 1): mem_alloc_error was asked for)";
    let register = "by copies (not registered: ncclCommRegister failed: unhandled system error (NCCL result 2): register_error was asked for)";
    let shared = "by copies (ranks may share a GPU)";
    /// Words before the program, a variable, what ranks say, and the calls.
    type Case<'a> = (&'a [&'a str], &'a str, &'a str, [&'a str; 2], [usize; 6]);
    let cases: [Case<'_>; 6] = [
        (&[], "FAKE_NCCL_FAULT", "mem_alloc_error@1", [rank_1, alloc], [2, 1, 0, 0, 1, 1]),
        (&[], "FAKE_NCCL_FAULT", "register_error@1", [rank_1, register], [2, 2, 0, 0, 1, 2]),
        (&[], "FAKE_NCCL_FAULT", "register_error", [register; 2], [2, 2, 0, 0, 0, 2]),
        (&[], "NCCL_LOCAL_REGISTER", "0", [none; 2], [2, 2, 0, 0, 0, 2]),
        (&[], "NCCL_WIN_ENABLE", "0", [REGISTERED; 2], [2, 2, 2, 0, 2, 2]),
        (&["--share-gpus"], "FAKE_GPU_COUNT", "1", [shared; 2], [0; 6]),
    ];
    let (expected, _) = Training::new(2, &[]).ends_with(&[WINDOW; 2]);
    // Switched off on one rank only.
    let script = "if [ $RANK = 1 ]; then export MGPU_NCCL_REGISTER=off; fi; exec \"$0\" \"$@\"";
    let off = "by copies (MGPU_NCCL_REGISTER=off)";
    let (weights, _) = Training::new(2, &["sh", "-c", script]).ends_with(&[rank_1, off]);
    assert_eq!(weights, expected);
    for (words, name, value, access, count) in cases {
        let (weights, calls) = Training::new(2, words).env(name, value).ends_with(&access);
        assert_eq!(calls.count(MEMORY), count, "{name}={value}: {}", calls.0);
        assert_eq!(weights, expected, "{name}={value}");
    }
}

/// A window that fails makes the communicator unusable: all ranks replace it, and register again.
#[test]
fn a_communicator_is_replaced_after_a_window_has_failed() {
    let (expected, _) = Training::new(2, &[]).ends_with(&[WINDOW; 2]);
    let failing = Training::new(2, &[]).env("FAKE_NCCL_FAULT", "window_error");
    let (weights, calls) = failing.ends_with(&[REGISTERED; 2]);
    assert_eq!(calls.count(MEMORY), [2, 4, 2, 0, 2, 2], "{}", calls.0);
    assert_eq!(
        calls.count(["ncclCommAbort", "ncclGetUniqueId", "ncclCommDestroy"]),
        [2, 2, 2],
        "{}",
        calls.0
    );
    assert_eq!(weights, expected);
    // For a second arena no window is tried.
    let mut sharded = Training::new(2, &[]).env("FAKE_NCCL_FAULT", "window_error");
    sharded.command.arg("shards");
    let (_, calls) = sharded.ends_with(&[REGISTERED; 2]);
    assert_eq!(calls.count(["ncclCommAbort", "ncclCommWindowRegister"]), [2, 2], "{}", calls.0);
}

/// The other ranks wait for it in NCCL, so this ends the run, and says how to avoid it.
#[test]
fn a_window_that_fails_on_one_rank_is_an_error() {
    let mut failing = Training::new(2, &[]).env("FAKE_NCCL_FAULT", "window_error@1").env("MGPU_TIMEOUT", "8");
    let finished = run(&mut failing.command);
    finished.expect(
        9,
        &[
            "[1] error: rank 1 in the registration of a window, communicator-1: ",
            ", but not on all ranks; MGPU_NCCL_REGISTER=off avoids it",
        ],
    );
    // On a busy machine rank 0, which is told, may end first.
    let named = ["mgpurun: rank 1 exited with code 9", "; it blames rank 1; "];
    assert!(named.iter().any(|text| finished.stderr.contains(text)), "{finished:#?}");
}

#[test]
fn programs_register_their_own_memory() {
    for ranks in ["1", "2", "3"] {
        for delay in ["0", "2000"] {
            let mut command = fake_gpu::command(env!("CARGO_BIN_EXE_t-mgpurun"));
            command.env("FAKE_GPU_COUNT", "4").env("FAKE_GPU_DELAY_US", delay);
            command.args(["-n", ranks, "--backend", "nccl", env!("CARGO_BIN_EXE_t-gpu-memory"), "register"]);
            let finished = run(&mut command);
            let expected: &[&str] = match ranks {
                "1" => &["registered: by copies (a single rank)"],
                _ => &[
                    "registered: in place (registered)",
                    "empty: by copies (not registered: the buffer is empty)",
                    "unequal: by copies (not registered: rank 0 has 40 bytes, and rank 1 has 44)",
                ],
            };
            finished.expect(0, expected);
        }
    }
}
