//! Ranks of different hosts that are connected by UCX, over TCP: no test machine has RDMA devices.

use mgpu_tests::hosts::{Hosts, has_ucx};
use mgpu_tests::process::{Program, run};
use nix::sys::signal::{Signal, kill};

use super::job::{Job, MGPURUN, STEPS, expect_all};

const TRAIN: &str = env!("CARGO_BIN_EXE_t-train_mnist");

/// A job on all hosts, with these variables.
fn start<'a>(hosts: &'a Hosts, options: &[&str], command: &[&str], variables: &[(&str, &str)]) -> Job<'a> {
    let mut job = Job::new(hosts);
    for host in 0..hosts.count() {
        let mut agent = job.command(host, options, command);
        // Hosts that are namespaces of one machine share its memory, as UCX sees it.
        agent.env("UCX_TLS", "tcp").envs(variables.iter().copied());
        job.spawn(host, agent);
    }
    job
}

#[test]
fn training_over_ucx_has_the_bits_of_one_host() {
    if !has_ucx() {
        return;
    }
    let Some(hosts) = Hosts::start(2) else { return };
    let arguments = ["--synthetic", "--json", "--steps", "20", "--batch", "4", "--threads", "1"];
    let command = [&[TRAIN], &arguments[..]].concat();
    let finished = start(&hosts, &["-n", "2", "--no-prefix", "--net", "ucx"], &command, &[]).finish();
    expect_all(&finished, 0, &[]);
    let one_host = Program { launcher: MGPURUN, path: TRAIN };
    assert_eq!(finished[0].weights(), run(one_host.launched(4).args(arguments)).weights());
}

/// The ranks are in all-reduces all the time.
#[test]
fn a_rank_that_is_killed_is_named_over_ucx() {
    if !has_ucx() {
        return;
    }
    let Some(hosts) = Hosts::start(2) else { return };
    let command = [STEPS, "100000000"];
    // Also by the variable.
    let mut job = start(&hosts, &["-n", "1"], &command, &[("MGPU_NET", "ucx")]);
    let rank = |host: usize| hosts.processes(host).into_iter().find(|(_, line)| line.starts_with(STEPS));
    job.wait_until(|_| rank(1).is_some_and(|(pid, _)| is_connected(pid.as_raw())));
    kill(rank(1).unwrap().0, Signal::SIGKILL).unwrap();
    expect_all(&job.finish(), 137, &["mgpurun: rank 1 (host b) was killed by SIGKILL"]);
}

/// Whether a process has opened UCX and then used 50 ms of its core.
fn is_connected(pid: i32) -> bool {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let time = read("stat").rsplit(' ').nth(38).and_then(|ticks| ticks.parse::<u64>().ok());
    read("maps").contains("libucp.so") && time.is_some_and(|ticks| ticks >= 5)
}

#[test]
fn a_host_without_ucx_is_named_and_nothing_starts() {
    if !has_ucx() {
        return;
    }
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = Job::new(&hosts);
    for host in 0..2 {
        let mut agent = job.command(host, &["-n", "1", "--net", "ucx"], &["echo", "a rank"]);
        if host == 1 {
            agent.env("MGPU_UCX_LIBRARY", "/nowhere/libucp.so.0");
        }
        job.spawn(host, agent);
    }
    let finished = job.finish();
    expect_all(
        &finished,
        1,
        &["--net ucx: host b cannot use UCX", "/nowhere/libucp.so.0", "correct MGPU_UCX_LIBRARY"],
    );
    assert!(finished.iter().all(|finished| !finished.stdout.contains("a rank")), "{finished:#?}");
}

#[test]
fn without_rdma_devices_node_0_says_that_tcp_is_used() {
    let Some(hosts) = Hosts::start(2) else { return };
    if !ucx_sys::rdma_devices("/".as_ref()).is_empty() {
        return;
    }
    let finished = Job::start(&hosts, &["-n", "1"], &["sh", "-c", "echo net is $MGPU_NET"]).finish();
    expect_all(&finished, 0, &[]);
    let line = "ranks of different hosts are connected by tcp: no host has an RDMA device";
    assert!(finished[0].stderr.contains(line) && !finished[1].stderr.contains(line), "{finished:#?}");
    assert!(finished.iter().all(|finished| finished.stdout.contains("net is tcp")), "{finished:#?}");
}
