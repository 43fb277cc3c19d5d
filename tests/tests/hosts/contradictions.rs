//! Nodes that differ: an error names both hosts and both values, and all agents exit with code 73.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use mgpu_tests::hosts::Hosts;

use super::job::{Job, SLEEP, expect_all};

#[test]
fn contradictions_between_nodes_name_both_hosts_and_both_values() {
    let Some(hosts) = Hosts::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let programs = ["one", "two"].map(|name| {
        let program = folder.path().join(name);
        fs::write(&program, format!("#!/bin/sh\necho {name}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program.to_str().unwrap().to_owned()
    });
    let [one, two] = programs.each_ref().map(String::as_str);
    let copy = folder.path().join("copy of one");
    fs::copy(one, &copy).unwrap();
    for (of_a, of_b, texts) in [
        (
            [&["--nnodes", "2"][..], &["true"]],
            [&["--nnodes", "2:3"][..], &["true"]],
            vec!["nodes disagree on their number (--nnodes): 2 on host a, 2:3 on host b".to_owned()],
        ),
        (
            [&[], &["echo", "x"]],
            [&[], &["echo", "y"]],
            vec!["argument 1 of the program differs between nodes: `x` on host a, `y` on host b".into()],
        ),
        (
            [&[], &["echo", "x"]],
            [&[], &["echo", "x", "--more"]],
            vec![
                "argument 2 of the program differs between nodes: nothing on host a, `--more` on host b"
                    .into(),
            ],
        ),
        (
            [&[], &[one]],
            [&[], &[two]],
            vec![format!("nodes have different programs: {one} with digest "), format!("{two} with digest ")],
        ),
    ] {
        let mut job = Job::new(&hosts);
        for (host, [options, command]) in [of_a, of_b].into_iter().enumerate() {
            job.add(host, &[&["-n", "1"], options].concat(), command);
        }
        let finished = job.finish();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        expect_all(&finished, 73, &texts);
    }
    // Equal programs at different places are no contradiction.
    let mut job = Job::new(&hosts);
    job.add(0, &["-n", "1"], &[one]);
    job.add(1, &["-n", "1"], &[copy.to_str().unwrap()]);
    expect_all(&job.finish(), 0, &["one"]);
}

#[test]
fn two_nodes_with_one_rank_are_both_named() {
    let Some(hosts) = Hosts::start(3) else { return };
    let mut job = Job::new(&hosts);
    for (host, rank) in ["0", "1", "1"].into_iter().enumerate() {
        job.add(host, &["-n", "1", "--node-rank", rank], &["true"]);
    }
    let finished = job.finish();
    assert!(finished.iter().all(|finished| finished.code == Some(73)), "{finished:#?}");
    // Whoever of them came first is named first.
    for finished in &finished {
        finished.expect(73, &["both have node rank 1: give each its own --node-rank", " b ", " c "]);
    }
}

/// Only one of them is on the host of the endpoint. The other one finds that out, also if the endpoint does not answer.
#[test]
fn two_nodes_0_are_both_named_and_so_is_the_endpoint_of_another_host() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = Job::new(&hosts);
    (0..2).for_each(|host| job.add(host, &["-n", "1", "--node-rank", "0"], &["true"]));
    expect_all(&job.finish(), 73, &["hosts a and b both have node rank 0: give each its own --node-rank"]);
    let mut job = Job::new(&hosts);
    job.add(1, &["-n", "1", "--node-rank", "0", "--timeout", "2"], &["true"]);
    let addresses = "is no address of this host; unless it is forwarded to here";
    job.finish_one(1).expect(
        64,
        &["this is node 0 (--node-rank) on host b, and the endpoint a:29400 (--rdzv-endpoint)", addresses],
    );
}

#[test]
fn another_node_than_expected_is_refused_and_the_job_runs_on() {
    let Some(hosts) = Hosts::start(3) else { return };
    let mut job = Job::new(&hosts);
    for host in [0, 1] {
        job.add(host, &["-n", "1", "--nnodes", "2"], &SLEEP);
    }
    job.wait_for_ranks(2);
    job.add(2, &["-n", "1", "--nnodes", "2"], &SLEEP);
    job.finish_one(2).expect(73, &["the job has all its 2 nodes already: a, b"]);
    job.wait_for_ranks(2);
    job.interrupt(0);
    expect_all(&job.finish(), 130, &[]);
}

#[test]
fn nodes_that_do_not_come_are_named() {
    let Some(hosts) = Hosts::start(3) else { return };
    let mut job = Job::new(&hosts);
    for (host, rank) in ["0", "2"].into_iter().enumerate() {
        job.add(host, &["-n", "1", "--node-rank", rank, "--timeout", "2"], &["true"]);
    }
    expect_all(&job.finish(), 64, &["2 of 3 nodes joined within 2 s (a, b); missing: node 1;"]);
}
