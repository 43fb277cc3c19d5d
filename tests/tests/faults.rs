//! A rank that misbehaves within a collective is named by all others, and by the launcher.

use mgpu_tests::process::{Finished, command, run};

fn misbehave(ranks: u32, fault: &str, culprit: u32) -> Finished {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.args(["-n", &ranks.to_string(), "--timeout", "2", "--grace", "2"]);
    run(launcher.args([env!("CARGO_BIN_EXE_t-misbehave"), fault, &culprit.to_string()]))
}

/// Every rank but the culprit reports an error that contains `text`.
#[track_caller]
fn all_others_say(finished: &Finished, ranks: u32, culprit: u32, text: &str) {
    for rank in (0..ranks).filter(|rank| *rank != culprit) {
        let prefix = format!("[{rank}] error: ");
        let said = finished.stderr.lines().find(|line| line.starts_with(&prefix));
        assert!(
            said.is_some_and(|line| line.contains(text)),
            "rank {rank} should say `{text}`: {finished:#?}"
        );
    }
}

#[test]
fn a_rank_that_exits_3() {
    for ranks in [2, 5] {
        let finished = misbehave(ranks, "exit-3", 1);
        finished.expect(3, &["mgpurun: rank 1 exited with code 3"]);
        all_others_say(&finished, ranks, 1, "lost rank 1");
        all_others_say(&finished, ranks, 1, "rank 1 exited with code 3");
    }
}

#[test]
fn a_rank_that_leaves_early() {
    let finished = misbehave(3, "exit-0", 0);
    finished.expect(9, &["rank 0"]);
    all_others_say(&finished, 3, 0, "lost rank 0");
}

#[test]
fn a_rank_that_panics() {
    let finished = misbehave(3, "panic", 2);
    finished.expect(101, &["this rank panics", "mgpurun: rank 2 exited with code 101"]);
    all_others_say(&finished, 3, 2, "lost rank 2");
}

#[test]
fn a_rank_that_is_killed() {
    let finished = misbehave(2, "kill", 0);
    finished.expect(137, &["mgpurun: rank 0 was killed by SIGKILL"]);
    all_others_say(&finished, 2, 0, "lost rank 0");
}

#[test]
fn a_rank_that_is_silent() {
    let finished = misbehave(3, "silent", 1);
    finished.expect(65, &["rank 1"]);
    all_others_say(&finished, 3, 1, "for rank 1 in operation");
}

#[test]
fn a_rank_that_never_joins() {
    misbehave(3, "never-join", 2).expect(64, &["rank 2"]);
}

#[test]
fn ranks_that_disagree_name_both_sides() {
    for (fault, ours, theirs) in [
        ("wrong-length", "all_reduce(100000 f32, sum, direct", "all_reduce(50000 f32, sum, direct"),
        ("wrong-type", "all_reduce(100000 f32, sum, direct", "all_reduce(100000 i32, sum, staged"),
        ("wrong-operation", "all_reduce(100000 f32, sum, direct", "barrier"),
    ] {
        let finished = misbehave(3, fault, 1);
        assert_eq!(finished.code, Some(9), "{finished:#?}");
        all_others_say(&finished, 3, 1, "ranks disagree on operation 4");
        all_others_say(&finished, 3, 1, ours);
        all_others_say(&finished, 3, 1, theirs);
    }
    for (fault, theirs) in [("wrong-place", "at byte 200000"), ("wrong-reduction", "max")] {
        let finished = misbehave(2, fault, 1);
        all_others_say(&finished, 2, 1, theirs);
    }
}
