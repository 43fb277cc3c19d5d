//! Whatever fails, all surviving hosts end with the same code and name the same culprit.

use std::thread::scope;
use std::time::{Duration, Instant};

use mgpu_tests::hosts::Hosts;
use mgpu_tests::process::{Finished, until};
use nix::sys::signal::{Signal, kill};

use super::job::{Job, SLEEP, STEPS, at_sizes, expect_all};

/// "rank 1 on it is" or "ranks 2-3 on it are", for the ranks of `host`.
fn lost_ranks(host: usize, ranks: usize) -> String {
    match ranks {
        1 => format!("its rank {host} is lost"),
        _ => format!("its ranks {}-{} are lost", host * ranks, (host + 1) * ranks - 1),
    }
}

/// A job whose ranks all run.
fn sleeping<'a>(hosts: &'a Hosts, ranks: usize, options: &[&str]) -> Job<'a> {
    let ranks_option = ranks.to_string();
    let mut job = Job::start(hosts, &[&["-n", &ranks_option], options].concat(), &SLEEP);
    job.wait_for_ranks(ranks * hosts.count());
    job
}

/// The hosts other than `lost` end with the code of a lost node, and say `texts`.
#[track_caller]
fn expect_survivors(finished: &[Finished], lost: usize, texts: &[&str]) {
    for (host, finished) in finished.iter().enumerate().filter(|(host, _)| *host != lost) {
        finished.expect(71, texts);
        assert!(!finished.stderr.contains("panicked"), "on host {host}: {finished:#?}");
    }
}

#[test]
fn a_rank_that_ends_is_named_on_every_host_with_its_last_lines_on_node_0() {
    at_sizes(&[2, 3, 5], &[1, 2], |hosts, ranks| {
        let of_each = ranks.to_string();
        // The last rank of the last host, and rank 0.
        let last = hosts.count() * ranks - 1;
        let name = |rank: usize| format!("rank {rank} (host {})", hosts.name(rank / ranks));
        for (culprit, act, code, how) in [
            (last, "exit 3", 3, "exited with code 3"),
            (last, "kill -SEGV $$", 139, "was killed by SIGSEGV"),
            (0, "exit 4", 4, "exited with code 4"),
        ] {
            let script = format!("test $RANK = {culprit} && {{ echo the reason; {act}; }}; exec sleep 1000");
            let finished = Job::start(hosts, &["-n", &of_each], &["sh", "-c", &script]).finish();
            expect_all(&finished, code, &[&format!("mgpurun: {} {how}", name(culprit))]);
            finished[0].expect(code, &[&format!("the last lines of rank {culprit}"), "the reason"]);
        }
        let fault = format!("rank={last},step=3,fault=panic");
        let finished =
            Job::start(hosts, &["-n", &of_each, "--inject", &fault], &[STEPS, "100000000"]).finish();
        expect_all(&finished, 101, &[&format!("mgpurun: {} exited with code 101", name(last))]);
    });
}

#[test]
fn an_agent_that_is_killed_is_named_and_its_ranks_are_gone() {
    at_sizes(&[2, 3, 5], &[1, 2], |hosts, ranks| {
        let victim = hosts.count() - 1;
        let name = hosts.name(victim);
        let sentence = format!("mgpurun on {name} ended without a goodbye; {}", lost_ranks(victim, ranks));
        for who in [&[0][..], &[1], &[0, 1]] {
            let job = sleeping(hosts, ranks, &[]);
            let processes = job.mgpuruns(victim);
            who.iter().for_each(|index| kill(processes[*index], Signal::SIGKILL).unwrap());
            let finished = job.finish();
            // An agent whose guardian was killed says so before it ends.
            let text = match who {
                [1] => sentence.clone(),
                _ => format!("mgpurun on {name} "),
            };
            expect_survivors(&finished, victim, &[&text, &lost_ranks(victim, ranks)]);
        }
        for who in [&[0][..], &[1], &[0, 1]] {
            let job = sleeping(hosts, ranks, &[]);
            let processes = job.mgpuruns(0);
            who.iter().for_each(|index| kill(processes[*index], Signal::SIGKILL).unwrap());
            let text = if *who == [1] { "mgpurun on a ended without a goodbye" } else { "mgpurun on a " };
            expect_survivors(&job.finish(), 0, &[text, "it coordinates the job"]);
        }
    });
}

#[test]
fn an_interrupt_on_any_node_ends_the_ranks_on_all() {
    at_sizes(&[2, 3, 5], &[1, 2], |hosts, ranks| {
        for host in [0, hosts.count() - 1] {
            let job = sleeping(hosts, ranks, &[]);
            job.interrupt(host);
            expect_all(&job.finish(), 130, &["stopped by SIGINT"]);
        }
        // As a batch system stops a job. One signal to each agent is not a second signal to the job, after which the
        // ranks would have no time to end.
        let script = "trap 'echo ended; exit 0' TERM; touch $STARTED/$RANK; while :; do sleep 0.01; done";
        let of_each = ranks.to_string();
        let mut job = Job::start(hosts, &["-n", &of_each], &["sh", "-c", script]);
        job.wait_for_ranks(ranks * hosts.count());
        for host in 0..hosts.count() {
            kill(job.mgpuruns(host)[0], Signal::SIGTERM).unwrap();
        }
        expect_all(&job.finish(), 143, &["stopped by SIGTERM", "ended"]);
    });
}

#[test]
fn a_second_interrupt_on_any_node_kills_the_ranks_on_all() {
    at_sizes(&[3], &[2], |hosts, _| {
        for host in 0..3 {
            let script = "trap '' INT TERM; touch $STARTED/$RANK; while :; do sleep 0.01; done";
            let mut job = Job::start(hosts, &["-n", "2", "--grace", "1000"], &["sh", "-c", script]);
            job.wait_for_ranks(6);
            let guardian = job.mgpuruns(host)[0];
            kill(guardian, Signal::SIGINT).unwrap();
            // Signals that are not taken yet become one, so it is sent until the job ends.
            until(|| {
                let _ = kill(guardian, Signal::SIGINT);
                std::thread::park_timeout(Duration::from_millis(50));
                job.agents.iter_mut().all(|(_, agent)| agent.try_wait().unwrap().is_some())
            });
            expect_all(&job.finish(), 130, &["stopped by SIGINT"]);
        }
    });
}

/// What takes seconds, all at the same time: hosts that fall silent, agents that are stopped, and ranks that hang.
#[test]
fn whoever_falls_silent_is_named_after_his_deadline() {
    scope(|scope| {
        for (count, ranks) in [(2, 1), (3, 2), (5, 1)] {
            scope.spawn(move || a_host_is_turned_off(count, ranks));
        }
        for (count, ranks) in [(3, 1), (5, 2)] {
            scope.spawn(move || the_coordinator_is_turned_off(count, ranks));
        }
        for directions in [&[(0, 1)][..], &[(1, 0)], &[(0, 1), (1, 0)]] {
            for count in [2, 3] {
                scope.spawn(move || packets_are_lost(count, directions));
            }
        }
        scope.spawn(an_agent_is_stopped);
        scope.spawn(the_coordinator_is_stopped);
        scope.spawn(a_link_is_dead_for_three_seconds);
        for (rank, host) in [(0, "a"), (3, "b")] {
            scope.spawn(move || a_rank_hangs(rank, host));
        }
        scope.spawn(a_rank_never_joins);
    });
}

fn a_host_is_turned_off(count: usize, ranks: usize) {
    let Some(hosts) = Hosts::start(count) else { return };
    let job = sleeping(&hosts, ranks, &[]);
    hosts.power_off(1);
    let sentence = format!("host b does not answer; {}", lost_ranks(1, ranks));
    expect_survivors(&job.finish(), 1, &[&sentence]);
}

fn the_coordinator_is_turned_off(count: usize, ranks: usize) {
    let Some(hosts) = Hosts::start(count) else { return };
    let job = sleeping(&hosts, ranks, &[]);
    hosts.power_off(0);
    expect_survivors(&job.finish(), 0, &["host a does not answer; it coordinates the job"]);
}

fn packets_are_lost(count: usize, directions: &[(usize, usize)]) {
    let Some(hosts) = Hosts::start(count) else { return };
    let job = sleeping(&hosts, 1, &[]);
    directions.iter().for_each(|(from, to)| hosts.drop_packets(*from, *to));
    let finished = job.finish();
    expect_survivors(&finished, 1, &["host b does not answer; its rank 1 is lost"]);
    finished[1].expect(71, &["host a does not answer; it coordinates the job"]);
}

fn an_agent_is_stopped() {
    let Some(hosts) = Hosts::start(3) else { return };
    let mut job = sleeping(&hosts, 2, &["--node-timeout", "3"]);
    job.stop(1);
    for host in [0, 2] {
        let text = "mgpurun on b has been silent for 3 s, though its host answers";
        job.finish_one(host).expect(71, &[text, "its ranks 2-3 are lost"]);
    }
    // When it continues, it finds that the others have gone on without it.
    job.resume(1);
    job.finish()[0].expect(71, &["silent for 3 s"]);
}

fn the_coordinator_is_stopped() {
    let Some(hosts) = Hosts::start(3) else { return };
    let mut job = sleeping(&hosts, 1, &["--node-timeout", "3"]);
    job.stop(0);
    for host in [1, 2] {
        let text = "mgpurun on a has been silent for 3 s, though its host answers";
        job.finish_one(host).expect(71, &[text, "it coordinates the job"]);
    }
    job.resume(0);
    job.finish()[0].expect(71, &["mgpurun on "]);
}

fn a_link_is_dead_for_three_seconds() {
    let Some(hosts) = Hosts::start(2) else { return };
    let script = "touch $STARTED/$RANK; while ! test -e $STARTED/go; do sleep 0.1; done; echo done";
    let mut job = Job::start(&hosts, &["-n", "1"], &["sh", "-c", script]);
    job.wait_for_ranks(2);
    hosts.set_link(1, false);
    let down = Instant::now();
    until(|| down.elapsed() >= Duration::from_secs(3));
    hosts.set_link(1, true);
    let up = Instant::now();
    // Long enough for a loss to be noticed, had the outage caused one.
    job.wait_until(|_| up.elapsed() >= Duration::from_secs(3));
    job.report_start("go");
    expect_all(&job.finish(), 0, &["done"]);
}

fn a_rank_hangs(rank: usize, host: &str) {
    let Some(hosts) = Hosts::start(2) else { return };
    let fault = format!("rank={rank},step=3,fault=hang");
    let options = ["-n", "2", "--progress-timeout", "2", "--inject", &fault];
    let finished = Job::start(&hosts, &options, &[STEPS, "100000000"]).finish();
    let text = format!("mgpurun: rank {rank} (host {host}) made no progress for");
    expect_all(&finished, 65, &[&text]);
}

fn a_rank_never_joins() {
    let Some(hosts) = Hosts::start(3) else { return };
    let options = ["-n", "2", "--timeout", "5", "--inject", "rank=3,phase=start,fault=hang"];
    let finished = Job::start(&hosts, &options, &[STEPS, "100000000"]).finish();
    expect_all(&finished, 64, &["mgpurun: rank 3 (host b) did not join within 5 s"]);
}
