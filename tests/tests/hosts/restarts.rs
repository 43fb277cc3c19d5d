//! Jobs with `--nnodes MIN:MAX` that go on after a failure.

use std::thread::scope;

use mgpu_tests::hosts::Hosts;

use super::job::{Job, expect_all};

/// Options of a job that goes on with two of three nodes, after 4 s.
const OPTIONS: [&str; 10] =
    ["-n", "1", "--nnodes", "2:3", "--max-restarts", "3", "--timeout", "4", "--grace", "0.2"];

/// Ranks that sleep; after a restart as described by the arguments, up to a file `go`; then they fail, and succeed in the
/// start after that.
const SCRIPT: &str = "touch $STARTED/$RANK.$MGPU_RESTART_COUNT; \
    echo start $MGPU_RESTART_COUNT: rank $RANK of $WORLD_SIZE on $(uname -n); \
    test $MGPU_RESTART_COUNT = 2 && exit 0; test $MGPU_RESTART_COUNT = 0 && exec sleep 1000; \
    while ! test -e $STARTED/go; do sleep 0.05; done; exit 5";

#[test]
fn a_job_goes_on_with_fewer_nodes_and_grows_again() {
    scope(|scope| {
        scope.spawn(after_an_agent_was_killed);
        scope.spawn(after_a_partition);
    });
}

fn after_an_agent_was_killed() {
    let Some(hosts) = Hosts::start(3) else { return };
    let command = ["sh", "-c", SCRIPT];
    let mut job = Job::start(&hosts, &OPTIONS, &command);
    job.wait_for_ranks(3);
    job.kill(1);
    job.wait_for_ranks(5);
    // It comes too late for this start, and is there at the next one.
    job.add(1, &OPTIONS, &command);
    job.report_start("go");
    let finished = job.finish();
    expect_all(&finished, 0, &["start 2: rank "]);
    finished[0].expect(0, &["start 1: rank 0 of 2 on a", "start 2: rank 0 of 3 on a", "mgpurun on b ended"]);
    finished[2].expect(0, &["start 1: rank 1 of 2 on c"]);
}

/// The coordinator's side goes on, the other side ends; a node that was cut off may come back as a new one.
fn after_a_partition() {
    let Some(hosts) = Hosts::start(3) else { return };
    let command = ["sh", "-c", SCRIPT];
    let mut job = Job::start(&hosts, &OPTIONS, &command);
    job.wait_for_ranks(3);
    hosts.set_link(2, false);
    job.finish_one(2).expect(71, &["host a does not answer; it coordinates the job"]);
    job.wait_for_ranks(5);
    hosts.set_link(2, true);
    job.add(2, &OPTIONS, &command);
    job.report_start("go");
    let finished = job.finish();
    expect_all(&finished, 0, &["start 2: rank "]);
    finished[0].expect(0, &["host c does not answer", "start 1: rank 0 of 2 on a"]);
    finished[2].expect(0, &["start 2: rank 2 of 3 on c"]);
}
