//! Training on several hosts has the bits of one host, also when it goes on with fewer nodes and grows again.

use std::path::Path;
use std::thread::scope;

use mgpu_tests::hosts::Hosts;
use mgpu_tests::process::{Finished, Program, run};
use nix::sys::signal::{Signal, kill};

use super::job::{Job, MGPURUN, expect_all};

const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

#[test]
fn two_hosts_with_two_ranks_train_as_one_with_four() {
    let Some(hosts) = Hosts::start(2) else { return };
    let arguments = ["--synthetic", "--json", "--steps", "20", "--batch", "4", "--threads", "1"];
    let finished =
        Job::start(&hosts, &["-n", "2", "--no-prefix"], &[&[TRAIN], &arguments[..]].concat()).finish();
    expect_all(&finished, 0, &[]);
    let one_host = Program { launcher: MGPURUN, path: TRAIN };
    assert_eq!(finished[0].weights(), run(one_host.launched(4).args(arguments)).weights());
}

#[test]
fn a_training_that_shrinks_and_grows_again_ends_with_the_weights_of_one_that_did_not() {
    let Some(hosts) = Hosts::start(4) else { return };
    let folder = tempfile::tempdir().unwrap();
    let arguments = |checkpoints: &str| {
        let text = "--synthetic --json --steps 24 --global-batch 8 --world-size-invariant 8 --threads 1 --checkpoint-every 4";
        let mut words: Vec<String> = text.split(' ').map(String::from).collect();
        let place = folder.path().join(checkpoints).to_str().unwrap().to_owned();
        words.extend(["--checkpoint-dir".into(), place, "--resume".into()]);
        words
    };
    let whole = Program { launcher: MGPURUN, path: TRAIN };
    let whole = run(whole.launched(4).args(arguments("whole"))).weights();

    // The ranks hang in step 6, and two nodes are lost there. The others go on and hang in step 14, where the two are
    // replaced and a rank is killed.
    let words = arguments("shrinks");
    let command: Vec<&str> = [TRAIN].into_iter().chain(words.iter().map(String::as_str)).collect();
    let text = "-n 1 --no-prefix --nnodes 2:4 --max-restarts 3 --timeout 4 --grace 0.1 --inject rank=2,step=6,fault=hang \
                --inject rank=0,step=14,restart=1,fault=hang";
    let options: Vec<&str> = text.split_ascii_whitespace().collect();
    let mut job = Job::start(&hosts, &options, &command);
    let has_checkpoint = |step: u64| newest_checkpoint(&folder.path().join("shrinks")) == Some(step);
    job.wait_until(|_| has_checkpoint(4));
    for host in [2, 3] {
        job.mgpuruns(host).iter().for_each(|pid| kill(*pid, Signal::SIGKILL).unwrap());
        job.finish_one(host);
    }
    job.wait_until(|_| has_checkpoint(12));
    [2, 3].into_iter().for_each(|host| job.add(host, &options, &command));
    let ranks = hosts.processes(0).into_iter().filter(|(_, line)| line.starts_with(TRAIN));
    ranks.for_each(|(pid, _)| kill(pid, Signal::SIGKILL).unwrap());
    let finished = job.finish();
    expect_all(&finished, 0, &[]);
    assert_eq!(finished[0].weights(), whole, "{finished:#?}");
    finished[0].expect(0, &["restart 1 of 3", "restart 2 of 3"]);
}

/// Ranks exchange gradients and notice a dead link as soon as the agents do, on both sides; the side that hears nothing
/// may fail first and close its connections. The host is the culprit all the same.
#[test]
fn ranks_that_train_are_not_the_culprits_of_lost_packets() {
    scope(|scope| {
        for (count, directions) in
            [(2, &[(0, 1)][..]), (2, &[(1, 0)]), (2, &[(0, 1), (1, 0)]), (3, &[(0, 1)])]
        {
            scope.spawn(move || {
                let Some(finished) = train_and_drop_packets(count, directions) else { return };
                for survivor in (0..count).filter(|host| *host != 1) {
                    finished[survivor].expect(71, &["host b does not answer; its rank 1 is lost"]);
                }
                finished[1].expect(71, &["host a does not answer; it coordinates the job"]);
            });
        }
    });
}

/// Both hosts reach the coordinator, but not each other.
#[test]
fn a_dead_link_between_two_hosts_is_named_by_their_ranks() {
    for directions in [&[(1, 2), (2, 1)][..], &[(2, 1)]] {
        let Some(finished) = train_and_drop_packets(3, directions) else { return };
        let text = "does not answer: its host has acknowledged nothing for";
        assert!(finished.iter().any(|finished| finished.stderr.contains(text)), "{finished:#?}");
        finished[0].expect(1, &["the other ranks are stopped"]);
    }
}

/// Trains with one rank on each of `count` hosts, and drops the packets of these directions once the ranks have made some
/// steps. Returns how each host's `mgpurun` has ended; nothing where hosts are forbidden.
fn train_and_drop_packets(count: usize, directions: &[(usize, usize)]) -> Option<Vec<Finished>> {
    let hosts = Hosts::start(count)?;
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().to_str().unwrap();
    let words = "--synthetic --steps 100000000 --batch 4 --threads 1 --checkpoint-every 4";
    let words: Vec<&str> = words.split(' ').chain(["--checkpoint-dir", checkpoints]).collect();
    let mut job = Job::start(&hosts, &["-n", "1"], &[&[TRAIN], &words[..]].concat());
    job.wait_until(|_| newest_checkpoint(folder.path()).is_some());
    directions.iter().for_each(|(from, to)| hosts.drop_packets(*from, *to));
    Some(job.finish())
}

/// The step of the newest checkpoint in a folder.
fn newest_checkpoint(folder: &Path) -> Option<u64> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.strip_prefix("step-")?.parse().ok()).max()
}
