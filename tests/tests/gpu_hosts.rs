//! GPU ranks on several hosts: they meet over an interface that leads to the others, compute together, and name a rank of
//! another host that is lost.
//!
//! The hosts are namespaces of this machine, and the GPUs and NCCL are the fakes of `tests/gpu`. The fake NCCL chooses its
//! interface as the real one does, and hangs if it leads nowhere.

#[path = "hosts/job.rs"]
#[expect(dead_code, reason = "another suite uses the rest")]
mod job;

use std::path::Path;
use std::process::{Child, Command, Stdio};

use job::{Job, SECRET, expect_all};
use mgpu_tests::c_library::{Workshop, compiler, shared_library};
use mgpu_tests::fake_gpu;
use mgpu_tests::hosts::{Hosts, address_v6};
use mgpu_tests::process::{Finished, finish, until};
use nix::sys::signal::{Signal, kill};

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
    /// A folder of the fake NCCL; nothing may be left in it.
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

/// GPU ranks that an engine has started one by one.
struct Tasks {
    ranks: Vec<Child>,
    /// A folder of the fake NCCL; nothing may be left in it.
    files: tempfile::TempDir,
}

impl Tasks {
    fn start(hosts: &Hosts, environment: &[(&str, &str)], body: &str) -> Self {
        Self::start_program(hosts, environment, &[DEVICE, body])
    }

    fn start_program(hosts: &Hosts, environment: &[(&str, &str)], program: &[&str]) -> Self {
        let files = tempfile::tempdir().unwrap();
        let size = hosts.count() as u32 * LOCAL;
        let start = |rank: u32| -> Child {
            let mut command = hosts.command((rank / LOCAL) as usize, program[0]);
            let text = |number: u32| number.to_string();
            with_fakes(&mut command, &files);
            command.env("MGPU_SECRET", SECRET).env_remove("MGPU_BACKEND").args(&program[1..]).envs([
                ("RANK", text(rank)),
                ("WORLD_SIZE", text(size)),
                ("LOCAL_RANK", text(rank % LOCAL)),
                ("LOCAL_WORLD_SIZE", text(LOCAL)),
                ("MASTER_ADDR", "a".into()),
                ("MASTER_PORT", "29500".into()),
                ("TORCHELASTIC_RUN_ID", "none".into()),
            ]);
            command.envs(environment.iter().copied());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nsenter starts")
        };
        Tasks { ranks: (0..size).map(start).collect(), files }
    }

    fn finish(self) -> Vec<Finished> {
        let finished: Vec<Finished> = self.ranks.into_iter().map(|mut rank| finish(&mut rank)).collect();
        assert_eq!(self.files.path().read_dir().unwrap().count(), 0, "{finished:#?}");
        finished
    }
}

#[test]
fn ranks_without_agents_compute_together() {
    let Some(hosts) = Hosts::start(2) else { return };
    for finished in Tasks::start(&hosts, &[], "all").finish() {
        finished.expect(0, &["of 4 on FAKE GPU"]);
        assert!(!finished.stdout.contains("notice"), "{finished:#?}");
    }
}

#[test]
fn an_interface_that_leads_nowhere_is_named_without_agents() {
    let Some(hosts) = Hosts::start(2) else { return };
    add_docker(&hosts);
    let found = "host a cannot reach docker0 (172.17.0.1) of host b, which NCCL would take";
    // By the host's name, a rank that starts before rank 0 listens may connect over IPv4 or IPv6.
    let over_ipv6 = [("MASTER_ADDR", &*address_v6(0))];
    for finished in Tasks::start(&hosts, &over_ipv6, "all").finish() {
        // NCCL would take the other address of the interface.
        let advice = "set NCCL_SOCKET_IFNAME==local0 NCCL_SOCKET_FAMILY=AF_INET6 on all hosts (with \
                      MGPU_NCCL_PREFLIGHT=set the ranks do that themselves)";
        finished.expect(9, &[found, "the ranks would wait for each other forever (", advice]);
    }
    for finished in Tasks::start(&hosts, &[("MGPU_NCCL_PREFLIGHT", "set")], "all").finish() {
        let notice = "the ranks have set the interface of the connections between the hosts, NCCL_SOCKET_IFNAME==local0";
        finished.expect(0, &["of 4 on FAKE GPU", found, notice]);
    }
    // What the user has named is kept.
    for (name, says) in [("docker0", "which NCCL takes because NCCL_SOCKET_IFNAME says so"), ("=local0", "")]
    {
        let environment = [("NCCL_SOCKET_IFNAME", name), ("MGPU_NCCL_PREFLIGHT", "set")];
        for finished in Tasks::start(&hosts, &environment, "show").finish() {
            finished.expect(0, &[&format!("named {name}."), says]);
            assert_eq!(finished.stdout.contains("notice"), !says.is_empty(), "{finished:#?}");
        }
    }
    for finished in Tasks::start(&hosts, &[("MGPU_NCCL_PREFLIGHT", "off")], "show").finish() {
        finished.expect(0, &["named ."]);
        assert!(!finished.stdout.contains("notice"), "{finished:#?}");
    }
}

/// What the ranks have set, as programs in C and Python learn it.
#[test]
fn programs_in_c_and_python_read_the_notices() {
    let Some(hosts) = Hosts::start(2) else { return };
    add_docker(&hosts);
    let workshop = Workshop::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/c/notices.c");
    let c = compiler("CC", "cc").map(|cc| workshop.compile(&cc, &source, &[]));
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository").join("runtime/python");
    let script = package.join("tests/check_notices.py");
    // Says so if there is none, as for a compiler.
    let python = compiler("MGPU_PYTHON", "python3");
    let (library, [package, script]) =
        (shared_library(), [package, script].map(|path| path.display().to_string()));
    let in_python = python.as_ref().map(|python| [python.as_str(), &script]);
    let in_c = c.as_ref().map(|program| [program.to_str().expect("a path in UTF-8")]);
    let programs =
        in_c.iter().map(|program| &program[..]).chain(in_python.iter().map(|program| &program[..]));
    for program in programs {
        for (preflight, says) in [("set", "the ranks have set the interface"), ("off", "0 notices")] {
            let library = library.to_str().expect("a path in UTF-8");
            let environment = [
                ("MGPU_NCCL_PREFLIGHT", preflight),
                ("MGPU_C_LIBRARY", library),
                ("PYTHONPATH", &package),
                ("PYTHONDONTWRITEBYTECODE", "1"),
            ];
            for finished in Tasks::start_program(&hosts, &environment, program).finish() {
                finished.expect(0, &[says]);
                assert_eq!(finished.stdout.contains("notice: "), preflight == "set", "{finished:#?}");
            }
        }
    }
}

/// One host waits for an answer of the other one's interface when it ends.
#[test]
fn a_host_that_ends_while_the_interfaces_are_tried_is_named() {
    for is_turned_off in [false, true] {
        let Some(hosts) = Hosts::start(2) else { return };
        add_docker(&hosts);
        hosts.ip(
            1,
            "address flush dev docker0\naddress add 172.18.0.1/16 dev docker0\nroute add 172.17.0.0/16 dev local0\n\
             neighbour add 172.17.0.1 lladdr 02:00:00:00:00:99 dev local0 nud permanent\n",
        );
        let mut tasks = Tasks::start(&hosts, &[], "show");
        let leader = hosts.program(&tasks.ranks[2]);
        let tries = || {
            let sockets = std::fs::read_to_string(format!("/proc/{leader}/net/tcp")).unwrap_or_default();
            // 172.17.0.1, and a connection that is not answered.
            sockets
                .lines()
                .any(|line| line.split_whitespace().nth(2).is_some_and(|to| to.starts_with("010011AC:")))
        };
        until(tries);
        match is_turned_off {
            true => hosts.power_off(1),
            false => kill(leader, Signal::SIGKILL).unwrap(),
        }
        let of_other = tasks.ranks.split_off(LOCAL as usize);
        for finished in tasks.finish() {
            finished.expect(9, &["error: ", "host b"]);
        }
        of_other.into_iter().for_each(|mut rank| _ = finish(&mut rank));
    }
}
