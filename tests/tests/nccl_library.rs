//! The real NCCL, as far as it works without a GPU: found among Python's packages, it creates a unique id, which the
//! rendezvous sends to the other ranks. From then on it listens on the interface that it has chosen, which is the one
//! that was predicted.

#[path = "hosts/job.rs"]
#[expect(dead_code, reason = "another suite uses the rest")]
mod job;

use std::collections::BTreeSet;

use job::{Job, MGPURUN, expect_all};
use mgpu_tests::hosts::Hosts;
use mgpu_tests::process::{command, run};

const UNIQUE_ID: &str = env!("CARGO_BIN_EXE_t-unique-id");

/// Whether the library can be tested; says why not.
fn has_library() -> bool {
    let opened = nccl_sys::Library::open();
    if let Err(error) = &opened {
        println!("skipped: {}", error.summary());
    }
    opened.is_ok()
}

#[test]
fn ranks_receive_the_unique_id_of_the_real_library() {
    if !has_library() {
        return;
    }
    let launch = || {
        let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
        launcher.args(["-n", "3", "--no-prefix", UNIQUE_ID]);
        let finished = run(launcher.env("NCCL_SOCKET_IFNAME", "lo"));
        finished.expect(0, &["NCCL 2."]);
        let ids = finished.stdout.lines().filter_map(|line| line.strip_prefix("id "));
        let ids: Vec<String> = ids.map(str::to_owned).collect();
        assert_eq!(ids.len(), 3, "{finished:#?}");
        ids.into_iter().collect::<BTreeSet<String>>()
    };
    let (first, second) = (launch(), launch());
    assert_eq!((first.len(), second.len()), (1, 1), "all ranks have the same id");
    assert_ne!(first, second, "every run has its own");
}

#[test]
fn ranks_of_another_host_reach_the_real_library() {
    if !has_library() {
        return;
    }
    let Some(hosts) = Hosts::start(2) else { return };
    let finished = Job::start(&hosts, &["-n", "1", "--backend", "cpu"], &[UNIQUE_ID]).finish();
    expect_all(&finished, 0, &["NCCL listens at 10.99.0.1"]);
    finished[1].expect(0, &["[1] reached 10.99.0.1"]);
}

/// The interface that a dry run predicts is the one at which the library listens.
#[test]
fn the_interface_of_the_real_library_is_predicted() {
    if !has_library() {
        return;
    }
    let Some(hosts) = Hosts::start(1) else { return };
    hosts.ip(0, "link add docker0 type bridge\naddress add 172.17.0.1/16 dev docker0\nlink set docker0 up\n");
    let ask = |arguments: &[&str], (name, value): (&str, &str)| {
        let output = hosts.command(0, MGPURUN).args(arguments).env(name, value).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let compare = |setting: (&str, &str)| {
        let dry = ["--dry-run", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "x:1"];
        let predicted = ask(&[&dry[..], &["-n", "1", "--backend", "nccl", "true"]].concat(), setting);
        let predicted = predicted.lines().find(|line| line.starts_with("# NCCL ")).unwrap_or_default();
        let real = ask(&["-n", "1", "--backend", "cpu", "--no-prefix", UNIQUE_ID], setting);
        match real.lines().find_map(|line| line.strip_prefix("NCCL listens at ")) {
            Some(address) => {
                assert!(predicted.contains(&format!("({address})")), "{setting:?} {predicted} {real}");
            }
            None => assert_eq!(predicted, "# NCCL finds no interface for other hosts", "{setting:?} {real}"),
        }
    };
    for value in ["", "docker", "=docker", "^=docker0,eth0", "^eth0,lo", "eth0:4000,docker0", "e"] {
        compare(("NCCL_SOCKET_IFNAME", value));
    }
    compare(("NCCL_SOCKET_FAMILY", "AF_INET6"));
    hosts.ip(0, "link add ib0 type veth peer name port\naddress add 10.7.0.1/24 dev ib0\nlink set ib0 up\n");
    // Without a link, and with one.
    compare(("NCCL_SOCKET_IFNAME", ""));
    hosts.ip(0, "link set port up\n");
    compare(("NCCL_SOCKET_IFNAME", ""));
}
