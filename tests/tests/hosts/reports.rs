//! What the user sees of ranks on several hosts.

use std::fs;

use mgpu_tests::hosts::{Hosts, address_v6};
use nix::sys::signal::{Signal, kill};

use super::job::{Job, MGPURUN, SLEEP, STEPS, expect_all};

#[test]
fn ranks_are_numbered_over_all_hosts_and_know_their_node() {
    let Some(hosts) = Hosts::start(3) else { return };
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE on $(uname -n), \
                  secret $MGPU_SECRET.";
    for endpoint in ["a:29400", &format!("[{}]:29401", address_v6(0))] {
        let options = ["-n", "2", "--rdzv-endpoint", endpoint, "--report-bindings"];
        let finished = Job::start(&hosts, &options, &["sh", "-c", script]).finish();
        for (host, (finished, name)) in finished.iter().zip(["a", "b", "c"]).enumerate() {
            for local in 0..2 {
                let rank = 2 * host + local;
                let line = format!("[{rank}] {rank}/6 {local}/2 {host}/3 on {name}, secret .");
                finished.expect(0, &[&line, &format!("mgpurun: rank {rank}:")]);
            }
        }
    }
}

/// As PyTorch's ranks do: rank 0 listens at all addresses, also of IPv6, at `MASTER_PORT`, the others connect to `MASTER_ADDR`.
#[test]
fn ranks_reach_rank_0_at_the_master_address() {
    let Some(hosts) = Hosts::start(3) else { return };
    let script = "
import os, socket, time
rank, size, port = (int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE', 'MASTER_PORT'))
if rank == 0:
    listener = socket.create_server(('', port), family=socket.AF_INET6, dualstack_ipv6=True)
    for _ in range(size - 1):
        listener.accept()[0].sendall(b'x')
else:
    while True:
        try:
            peer = socket.create_connection((os.environ['MASTER_ADDR'], port))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    assert peer.recv(1) == b'x'
    print('rank', rank, 'was answered')
";
    let finished = Job::start(&hosts, &["-n", "2"], &["python3", "-c", script]).finish();
    expect_all(&finished, 0, &["was answered"]);
}

#[test]
fn node_0_shows_the_ranks_of_all_hosts() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = Job::start(&hosts, &["-n", "2"], &[STEPS, "100000000"]);
    let ps = |host: usize| {
        let output = hosts.command(host, MGPURUN).arg("ps").output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // Their progress comes with the next heartbeat.
    job.wait_until(|_| ps(0).lines().filter(|line| line.contains("in step ")).count() == 4);
    let table = ps(0);
    assert_eq!(table.matches("on host b").count(), 2, "{table}");
    let own = ps(1);
    assert_eq!(own.lines().filter(|line| line.contains("in step ")).count(), 2, "{own}");
    assert!(own.contains("on host a"), "{own}");
    kill(job.mgpuruns(0)[0], Signal::SIGQUIT).unwrap();
    // The table is printed before the end of the job.
    job.interrupt(0);
    let finished = job.finish();
    expect_all(&finished, 130, &[]);
    assert_eq!(finished[0].stderr.matches("on host b").count(), 2, "{finished:#?}");
}

#[test]
fn logs_events_and_filters_count_ranks_of_the_world() {
    let Some(hosts) = Hosts::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    // On a shared file system.
    let logs = folder.path().join("logs");
    let mut job = Job::new(&hosts);
    for (host, name) in ["a", "b"].into_iter().enumerate() {
        let events = folder.path().join(format!("events-{name}"));
        let [events, logs] = [&events, &logs].map(|path| path.to_str().unwrap());
        let options = ["-n", "2", "--events", events, "--log-dir", logs, "--tee", "--rank-filter", "1,2"];
        job.add(host, &options, &["sh", "-c", "echo rank $RANK speaks; test $RANK != 3 || exit 3"]);
    }
    let finished = job.finish();
    expect_all(&finished, 3, &["mgpurun: rank 3 (host b) exited with code 3"]);
    finished[0].expect(3, &["[1] rank 1 speaks"]);
    finished[1].expect(3, &["[2] rank 2 speaks"]);
    assert!(!finished[0].stdout.contains("rank 0 speaks"), "{finished:#?}");
    assert!(!finished[1].stdout.contains("rank 3 speaks"), "{finished:#?}");
    for rank in 0..4 {
        let log = fs::read_to_string(logs.join(format!("rank-{rank}.log"))).unwrap();
        assert_eq!(log, format!("rank {rank} speaks\n"));
    }
    assert_eq!(fs::read_dir(&logs).unwrap().count(), 4);
    for (name, ranks) in [("a", [0, 1]), ("b", [2, 3])] {
        let events = fs::read_to_string(folder.path().join(format!("events-{name}"))).unwrap();
        assert!(events.contains("\"exit_code\":3"), "{events}");
        for rank in ranks {
            assert!(events.contains(&format!("\"rank\":{rank}")), "{events}");
        }
    }
}

/// Two jobs on the same hosts do not disturb each other.
#[test]
fn two_jobs_run_on_the_same_hosts() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut first = Job::start(&hosts, &["-n", "1"], &SLEEP);
    first.wait_for_ranks(2);
    let mut second = Job::start(&hosts, &["-n", "1", "--rdzv-endpoint", "a:29401"], &["echo", "second"]);
    for host in [0, 1] {
        second.finish_one(host).expect(0, &["second"]);
    }
    // The port of the first one is taken.
    let mut taken = Job::new(&hosts);
    taken.add(0, &["-n", "1", "--node-rank", "0"], &["true"]);
    let finished = taken.finish_one(0);
    assert_eq!(finished.code, Some(1), "{finished:#?}");
    finished.expect(1, &["cannot listen for other hosts at port 29400", "ss -ltnp"]);
    finished.expect(1, &["if that is node 0 of this job, give this node another --node-rank"]);
    first.interrupt(1);
    expect_all(&first.finish(), 130, &[]);
}
