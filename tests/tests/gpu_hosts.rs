//! GPU ranks on several hosts: they meet over an interface that leads to the others, compute together, and name a rank of
//! another host that is lost.
//!
//! The hosts are namespaces of this machine, and the GPUs and NCCL are the fakes of `tests/gpu`. The fake NCCL chooses its
//! interface as the real one does, and hangs if it leads nowhere.

#[path = "hosts/job.rs"]
#[expect(dead_code, reason = "another suite uses the rest")]
mod job;

use std::process::{Child, Command, Stdio};

use job::{Job, SECRET, expect_all};
use mgpu_tests::fake_gpu;
use mgpu_tests::hosts::{Hosts, address_v6};
use mgpu_tests::process::{Finished, finish};

const DEVICE: &str = env!("CARGO_BIN_EXE_t-device");

/// Ranks of each host.
const LOCAL: u32 = 2;

/// Sets the environment in which a program finds the fakes, and NCCL the ranks of other hosts by a file in `folder`.
fn with_fakes(command: &mut Command, folder: &tempfile::TempDir) {
    for (name, value) in fake_gpu::command("true").get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("FAKE_GPU_COUNT", LOCAL.to_string()).env("FAKE_NCCL_HOSTS", folder.path());
}

/// A job of GPU ranks with an agent on each host.
struct GpuJob<'a> {
    job: Job<'a>,
    /// Of the fake NCCL; nothing may be left in it.
    files: tempfile::TempDir,
}

impl<'a> GpuJob<'a> {
    fn new(hosts: &'a Hosts) -> Self {
        GpuJob { job: Job::new(hosts), files: tempfile::tempdir().unwrap() }
    }

    fn add(&mut self, host: usize, ranks: u32, environment: &[(&str, &str)], command: &[&str]) {
        let ranks = ranks.to_string();
        let options = ["-n", &ranks, "--backend", "nccl", "--grace", "5"];
        let mut agent = self.job.command(host, &options, command);
        with_fakes(&mut agent, &self.files);
        self.job.spawn(host, {
            agent.envs(environment.iter().copied());
            agent
        });
    }

    fn run(hosts: &'a Hosts, environment: &[(&str, &str)], command: &[&str]) -> Vec<Finished> {
        let mut job = Self::new(hosts);
        (0..hosts.count()).for_each(|host| job.add(host, LOCAL, environment, command));
        job.finish()
    }

    fn finish(self) -> Vec<Finished> {
        let finished = self.job.finish();
        let left: Vec<_> = self.files.path().read_dir().unwrap().flatten().collect();
        assert!(left.is_empty(), "{left:?} of {finished:#?}");
        finished
    }
}

/// Gives a host the network of many machines with Docker: `docker0` has the same address on each of them. NCCL takes it,
/// because the name of the other interface begins like that of the loopback interface.
fn add_docker(hosts: &Hosts) {
    for host in 0..hosts.count() {
        let rename = "link set eth0 down\nlink set eth0 name local0\nlink set local0 up\n";
        let address = format!("address add {}/64 dev local0 nodad\n", address_v6(host));
        let docker =
            "link add docker0 type bridge\naddress add 172.17.0.1/16 dev docker0\nlink set docker0 up\n";
        hosts.ip(host, &format!("{rename}{address}{docker}"));
    }
}

#[test]
fn ranks_of_several_hosts_compute_together() {
    let Some(hosts) = Hosts::start(2) else { return };
    for (body, family) in [("all", ""), ("groups", "AF_INET6")] {
        for finished in GpuJob::run(&hosts, &[("NCCL_SOCKET_FAMILY", family)], &[DEVICE, body]) {
            finished.expect(0, &["of 4 on FAKE GPU"]);
            assert!(!finished.stderr.contains("NCCL"), "{finished:#?}");
        }
    }
}

#[test]
fn an_interface_that_leads_nowhere_is_replaced() {
    let Some(hosts) = Hosts::start(2) else { return };
    add_docker(&hosts);
    let finished = GpuJob::run(&hosts, &[], &[DEVICE, "all"]);
    expect_all(&finished, 0, &[]);
    finished[0].expect(
        0,
        &[
            "host a cannot reach docker0 (172.17.0.1) of host b, which NCCL would take: NCCL_SOCKET_IFNAME is set to the \
           interface of the connections between the nodes, local0 on host a (",
        ],
    );
    assert!(!finished[1].stderr.contains("docker0"), "{finished:#?}");
    // What the user has named is kept.
    let show = ["sh", "-c", "echo named $NCCL_SOCKET_IFNAME."];
    for (name, says) in [("docker0", "which NCCL takes because NCCL_SOCKET_IFNAME says so"), ("=local0", "")]
    {
        let finished = GpuJob::run(&hosts, &[("NCCL_SOCKET_IFNAME", name)], &show);
        expect_all(&finished, 0, &[&format!("named {name}.")]);
        let stderr = &finished[0].stderr;
        assert_eq!((stderr.contains(says), stderr.contains("reach")), (true, !says.is_empty()), "{stderr}");
    }
}

#[test]
fn unequal_numbers_of_ranks_are_said() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = GpuJob::new(&hosts);
    (0..2).for_each(|host| job.add(host, 1 + host as u32, &[], &["true"]));
    let finished = job.finish();
    finished[0].expect(0, &["numbers of ranks: 1, 2", "NCCL 2.31.2 hangs if nodes have unequal numbers"]);
}

/// Rank 2 is on the other host; ranks 0, 1 and 3 are in NCCL.
#[test]
fn ranks_name_one_of_another_host_that_is_lost() {
    std::thread::scope(|scope| {
        for (fault, code, how) in [
            ("kill", 137, "was killed by SIGKILL"),
            ("panic", 101, "panicked"),
            ("exit-0", 9, "exited with code 0"),
            ("error", 9, ""),
        ] {
            scope.spawn(move || {
                let Some(hosts) = Hosts::start(2) else { return };
                let finished = GpuJob::run(&hosts, &[], &[DEVICE, "loop", fault, "2"]);
                for finished in &finished {
                    finished.expect(code, &["mgpurun: rank 2 (host b) "]);
                }
                for (rank, host) in [(0, 0), (1, 0), (3, 1)] {
                    let said = format!("[{rank}] error: ");
                    let mut lines = finished[host].stderr.lines();
                    let error = lines.find(|line| line.starts_with(&said)).unwrap_or_default();
                    assert!(
                        error.contains("lost rank 2 in ") && error.contains(how),
                        "{fault}: {finished:#?}"
                    );
                }
            });
        }
    });
}

/// Its peer on the other host is in NCCL, and no other rank of its own host can tell it that.
#[test]
fn a_rank_that_returns_an_error_does_not_wait_for_ranks_of_other_hosts() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = GpuJob::new(&hosts);
    // Longer than any program may run here, so that waiting for this timeout would be noticed.
    let environment = [("MGPU_TIMEOUT", "600")];
    (0..2).for_each(|host| job.add(host, 1, &environment, &[DEVICE, "loop", "error", "1"]));
    let finished = job.finish();
    expect_all(&finished, 9, &["mgpurun: rank 1 (host b) exited with code 9"]);
    finished[0].expect(9, &["[0] error: rank 0 lost rank 1 in operation 4 of communicator-1"]);
}

/// The ranks wait for each other for 3 s at most.
#[test]
fn a_silent_rank_is_named_on_every_host() {
    std::thread::scope(|scope| {
        for culprit in ["1", "2"] {
            scope.spawn(move || {
                let Some(hosts) = Hosts::start(2) else { return };
                let finished =
                    GpuJob::run(&hosts, &[("MGPU_TIMEOUT", "3")], &[DEVICE, "loop", "hang", culprit]);
                let name = format!(
                    "mgpurun: rank {culprit} (host {}) made no progress",
                    if culprit == "1" { "a" } else { "b" }
                );
                expect_all(&finished, 65, &[&name]);
            });
        }
    });
}

#[test]
fn ranks_without_agents_compute_together() {
    let Some(hosts) = Hosts::start(2) else { return };
    let files = tempfile::tempdir().unwrap();
    let start = |rank: u32| -> Child {
        let mut command = hosts.command((rank / LOCAL) as usize, DEVICE);
        let text = |number: u32| number.to_string();
        with_fakes(&mut command, &files);
        command.env("MGPU_SECRET", SECRET).env_remove("MGPU_BACKEND").arg("all").envs([
            ("RANK", text(rank)),
            ("WORLD_SIZE", text(2 * LOCAL)),
            ("LOCAL_RANK", text(rank % LOCAL)),
            ("LOCAL_WORLD_SIZE", text(LOCAL)),
            ("MASTER_ADDR", "a".into()),
            ("MASTER_PORT", "29500".into()),
            ("TORCHELASTIC_RUN_ID", "none".into()),
        ]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nsenter starts")
    };
    let ranks: Vec<Child> = (0..2 * LOCAL).map(start).collect();
    for mut rank in ranks {
        finish(&mut rank).expect(0, &["of 4 on FAKE GPU"]);
    }
    assert_eq!(files.path().read_dir().unwrap().count(), 0);
}
