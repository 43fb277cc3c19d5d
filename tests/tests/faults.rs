//! A rank that misbehaves in a collective is named by all others and by the launcher; nothing hangs and nothing is
//! left over. The matrix: every payload path times every fault.

use std::fs;
use std::ops::RangeInclusive;

use mgpu_tests::faults::{PAYLOAD_PATHS, PayloadPath};
use mgpu_tests::process::{Finished, command, run, survivors};

/// The expected outcome of a fault.
#[derive(Debug, Clone, Copy)]
enum Outcome {
    /// The others lose the rank: the launcher's exit code, and how they describe the rank's end.
    Lost(i32, &'static str),
    /// The others wait until their timeout.
    Silent,
    /// The others report the call that the rank made instead.
    Mismatch(fn(&PayloadPath) -> String),
}
use Outcome::{Lost, Mismatch, Silent};

fn all_reduce(len: usize, dtype_and_op: &str, path: &str) -> String {
    format!("all_reduce({len} {dtype_and_op}, {path}")
}

/// What a rank may do instead of the next all-reduce.
const FAULTS: [(&str, Outcome); 13] = [
    ("kill", Lost(137, "was killed by SIGKILL")),
    ("exit-3", Lost(3, "exited with code 3")),
    // The first rank to fail is then one that needed it.
    ("exit-0", Lost(9, "exited with code 0")),
    ("panic", Lost(101, "panicked")),
    ("stop", Silent),
    ("wrong-count", Mismatch(|payload| all_reduce(payload.len / 2, "f32, sum", payload.path))),
    ("wrong-type", Mismatch(|payload| format!("all_reduce({} i32, sum", payload.len))),
    ("wrong-reduction", Mismatch(|payload| all_reduce(payload.len, "f32, max", payload.path))),
    (
        "wrong-algorithm",
        Mismatch(|payload| all_reduce(payload.len, "f32, sum", payload.other_algorithm().name())),
    ),
    ("barrier", Mismatch(|_| "barrier".into())),
    (
        "broadcast",
        Mismatch(|payload| format!("broadcast({} f32, root 0, {}", payload.len, payload.usual_path)),
    ),
    ("send", Mismatch(|_| "send(1048576 f32, to rank ".into())),
    ("recv", Mismatch(|payload| format!("recv({} f32, from rank ", payload.len))),
];

/// One combination of the matrix. With a seed, the fault happens during an operation.
#[derive(Debug, Clone, Copy)]
struct Case {
    ranks: u32,
    culprit: u32,
    payload: PayloadPath,
    fault: &'static str,
    outcome: Outcome,
    seed: Option<u64>,
}

/// Every payload path and fault that `choose` selects. The number of ranks and the culprit vary from one to the next,
/// and with the seed.
fn matrix(seed: Option<u64>, choose: impl Fn(&Case) -> bool) -> Vec<Case> {
    let cells = FAULTS
        .into_iter()
        .flat_map(|(fault, outcome)| PAYLOAD_PATHS.map(|payload| (fault, outcome, payload)));
    let case = |(index, (fault, outcome, payload)): (usize, _)| {
        let turn = index + index / PAYLOAD_PATHS.len() + seed.unwrap_or(0) as usize;
        let ranks = [2, 3, 5][turn % 3];
        Case { ranks, culprit: (turn / 3) as u32 % ranks, payload, fault, outcome, seed }
    };
    cells.enumerate().map(case).filter(choose).collect()
}

/// Runs `t-misbehave` in its own environment, and asserts that nothing is left over.
fn misbehave(ranks: u32, arguments: &[&str]) -> Finished {
    let temporary = tempfile::tempdir().unwrap();
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.env("TMPDIR", temporary.path()).env_remove("XDG_RUNTIME_DIR");
    launcher.env("MGPU_TEST_MARK", temporary.path());
    // Only these faults should need a timeout.
    let seconds = |fault: &str| if arguments[0] == fault { "4" } else { "60" };
    launcher.env("MGPU_TIMEOUT", seconds("stop"));
    launcher.args(["-n", &ranks.to_string(), "--timeout", seconds("never-join"), "--grace", "2"]);
    let finished = run(launcher.arg(env!("CARGO_BIN_EXE_t-misbehave")).args(arguments));
    let mark = format!("MGPU_TEST_MARK={}", temporary.path().display());
    assert_eq!(survivors(&mark), [] as [u32; 0]);
    let entries = |folder| fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(entries(temporary.path()).collect::<Vec<_>>(), [] as [&str; 0]);
    // Other programs have files there.
    let ours = |name: &std::ffi::OsString| {
        ["mgpu", "communicator"].iter().any(|part| name.to_string_lossy().contains(part))
    };
    assert_eq!(entries("/dev/shm".as_ref()).find(ours), None);
    finished
}

impl Case {
    fn run(&self) {
        let (culprit, seed) = (self.culprit.to_string(), self.seed.map(|seed| seed.to_string()));
        let mut arguments = vec![self.fault, &culprit, self.payload.name];
        arguments.extend(seed.as_deref());
        let finished = misbehave(self.ranks, &arguments);
        let what = format!("{self:?}: {finished:#?}");
        match self.outcome {
            Lost(code, how) => {
                assert_eq!(finished.code, Some(code), "{what}");
                let said = format!("mgpurun: rank {culprit} ");
                assert!(finished.stderr.contains(&said), "no `{said}`: {what}");
                self.all_others_report(&finished, &[&format!("lost rank {culprit} in "), how]);
            }
            Silent => {
                assert_eq!(finished.code, Some(65), "{what}");
                let said = format!("mgpurun: rank {culprit} made no progress");
                assert!(finished.stderr.contains(&said), "no `{said}`: {what}");
                self.all_others_report(&finished, &[&format!(" s for rank {culprit} in ")]);
            }
            Mismatch(theirs) => {
                assert_eq!(finished.code, Some(9), "{what}");
                let ours = all_reduce(self.payload.len, "f32, sum", self.payload.path);
                let theirs = format!("rank {culprit} calls {}", theirs(&self.payload));
                self.all_others_report(&finished, &["ranks disagree on operation", &ours, &theirs]);
            }
        }
    }

    /// Every rank except the culprit reports an error that contains all `texts`, and then that the error has poisoned
    /// the communicator.
    fn all_others_report(&self, finished: &Finished, texts: &[&str]) {
        for rank in (0..self.ranks).filter(|rank| *rank != self.culprit) {
            let line = |what: &str| {
                let prefix = format!("[{rank}] {what}: ");
                finished.stderr.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_default()
            };
            let (error, then) = (line("error"), line("then"));
            for text in texts {
                assert!(error.contains(text), "rank {rank} should say `{text}`: {self:?}: {finished:#?}");
            }
            let poisoned = format!("communicator of rank {rank} is unusable after an earlier error: {error}");
            assert!(then.contains(&poisoned), "rank {rank} should say so again: {self:?}: {finished:#?}");
        }
    }
}

#[test]
fn a_rank_that_dies_before_an_operation() {
    matrix(None, |case| matches!(case.outcome, Lost(..))).iter().for_each(Case::run);
}

#[test]
fn a_rank_that_dies_within_an_operation() {
    for seed in 1..=8 {
        // A panic cannot come from outside the operation.
        let dies = |case: &Case| matches!(case.outcome, Lost(..)) && case.fault != "panic";
        matrix(Some(seed), dies).iter().for_each(Case::run);
    }
}

/// In a long ring, most ranks learn of the culprit from other ranks that fail before them.
fn around_a_long_ring(seeds: RangeInclusive<u64>, fault: &'static str, outcome: Outcome) -> Vec<Case> {
    let payload = PayloadPath::named("ring").expect("a payload path of this name");
    seeds
        .map(|seed| Case { ranks: 8, culprit: seed as u32 % 8, payload, fault, outcome, seed: Some(seed) })
        .collect()
}

#[test]
fn a_rank_that_leaves_a_long_ring() {
    around_a_long_ring(1..=5, "exit-0", Lost(9, "exited with code 0")).iter().for_each(Case::run);
}

#[test]
fn a_rank_that_is_silent() {
    let mut cases = matrix(None, |case| matches!(case.outcome, Silent));
    cases.extend(matrix(Some(1), |case| matches!(case.outcome, Silent)));
    cases.extend(around_a_long_ring(1..=3, "stop", Silent));
    // They mostly wait, so they run all at once.
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || case.run());
        }
    });
}

#[test]
fn mismatched_collectives_name_both_sides() {
    matrix(None, |case| matches!(case.outcome, Mismatch(_))).iter().for_each(Case::run);
}

#[test]
fn mismatched_arena_ranges_are_named() {
    let payload = PayloadPath::named("direct").unwrap();
    let theirs = |payload: &PayloadPath| {
        format!("all_reduce({} f32, sum, direct, arena 4294967297 at byte 524288", payload.len / 2)
    };
    Case { ranks: 3, culprit: 1, payload, fault: "wrong-place", outcome: Mismatch(theirs), seed: None }.run();
}

#[test]
fn a_rank_that_never_joins() {
    misbehave(3, &["never-join", "2", "direct"]).expect(64, &["rank 2"]);
}
