//! A job with one agent on each host.

use std::fs::{create_dir, read_dir};
use std::process::{Child, Command, Stdio};

use mgpu_tests::hosts::Hosts;
use mgpu_tests::process::{Finished, finish, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

pub(crate) const MGPURUN: &str = env!("CARGO_BIN_EXE_t-mgpurun");
/// Joins, makes steps with an all-reduce each; the argument is their number.
pub(crate) const STEPS: &str = env!("CARGO_BIN_EXE_t-job");
pub(crate) const SECRET: &str = "a secret of the tests";

/// Ranks that report their start to [`Job::wait_for_ranks`] and run until they are stopped.
pub(crate) const SLEEP: [&str; 3] = ["sh", "-c", "touch $STARTED/$RANK.$MGPU_RESTART_COUNT; exec sleep 1000"];

/// A job with one agent on each host, or on some of them.
pub(crate) struct Job<'a> {
    pub(crate) hosts: &'a Hosts,
    /// With their hosts.
    pub(crate) agents: Vec<(usize, Child)>,
    /// A folder for each host's temporary files, and `started` with a file for each rank that has started.
    folder: TempDir,
}

impl<'a> Job<'a> {
    /// A job without agents.
    pub(crate) fn new(hosts: &'a Hosts) -> Self {
        let folder = tempfile::tempdir().unwrap();
        create_dir(folder.path().join("started")).unwrap();
        for host in 0..hosts.count() {
            create_dir(folder.path().join(hosts.name(host))).unwrap();
        }
        Job { hosts, agents: Vec::new(), folder }
    }

    /// Starts an agent on each host. Host `a` has the endpoint.
    pub(crate) fn start(hosts: &'a Hosts, options: &[&str], command: &[&str]) -> Self {
        let mut job = Job::new(hosts);
        (0..hosts.count()).for_each(|host| job.add(host, options, command));
        job
    }

    /// Starts an agent on `host`.
    pub(crate) fn add(&mut self, host: usize, options: &[&str], command: &[&str]) {
        let agent = self.command(host, options, command);
        self.spawn(host, agent);
    }

    /// The command of an agent. Unless `options` has them, it gets the number of hosts and the endpoint.
    pub(crate) fn command(&self, host: usize, options: &[&str], command: &[&str]) -> Command {
        let mut agent = self.hosts.command(host, MGPURUN);
        let count = self.hosts.count().to_string();
        for (option, value) in [("--nnodes", count.as_str()), ("--rdzv-endpoint", "a:29400")] {
            if !options.contains(&option) {
                agent.args([option, value]);
            }
        }
        agent.args(options).args(command).env("MGPU_SECRET", SECRET);
        agent.env("STARTED", self.folder.path().join("started")).env_remove("XDG_RUNTIME_DIR");
        agent.env("TMPDIR", self.folder.path().join(self.hosts.name(host)));
        agent
    }

    /// Starts a command as an agent.
    pub(crate) fn spawn(&mut self, host: usize, mut agent: Command) {
        let agent = agent.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        self.agents.push((host, agent.expect("nsenter starts")));
    }

    /// Waits until so many ranks have started, over all restarts. No agent may end before.
    #[track_caller]
    pub(crate) fn wait_for_ranks(&mut self, count: usize) {
        self.wait_until(|job| job.started() >= count);
    }

    /// Creates a file beside those of [`wait_for_ranks`](Self::wait_for_ranks), for ranks that wait for it.
    pub(crate) fn report_start(&self, name: &str) {
        std::fs::write(self.folder.path().join("started").join(name), "").unwrap();
    }

    /// Number of ranks that have started, over all restarts.
    pub(crate) fn started(&self) -> usize {
        read_dir(self.folder.path().join("started")).unwrap().count()
    }

    /// Waits until `condition` holds; no agent may end before.
    #[track_caller]
    pub(crate) fn wait_until(&mut self, condition: impl Fn(&Self) -> bool) {
        until(|| {
            for (_, agent) in &mut self.agents {
                let end = agent.try_wait().unwrap();
                assert!(end.is_none(), "an agent has ended early: {:#?}", finish(agent));
            }
            condition(self)
        });
    }

    /// The process that the user has started on a host, the guardian, and its child, which is the agent.
    pub(crate) fn mgpuruns(&self, host: usize) -> [Pid; 2] {
        let (_, started) = self.agents.iter().find(|(of, _)| *of == host).expect("an agent");
        let guardian = self.hosts.program(started);
        [guardian, self.hosts.child(guardian)]
    }

    /// Ctrl-C on a host.
    pub(crate) fn interrupt(&self, host: usize) {
        kill(self.mgpuruns(host)[0], Signal::SIGINT).unwrap();
    }

    /// Stops guardian and agent of a host.
    pub(crate) fn stop(&self, host: usize) {
        self.mgpuruns(host).iter().for_each(|pid| kill(*pid, Signal::SIGSTOP).unwrap());
    }

    /// Kills guardian and agent of a host at once, so that neither reports the end of the other.
    #[track_caller]
    pub(crate) fn kill(&mut self, host: usize) -> Finished {
        self.stop(host);
        self.mgpuruns(host).iter().for_each(|pid| kill(*pid, Signal::SIGKILL).unwrap());
        let (_, nsenter) = self.agents.iter_mut().find(|(of, _)| *of == host).expect("an agent");
        let pid = Pid::from_raw(nsenter.id() as i32);
        until(|| {
            // It stops itself, perhaps only now, if it has seen that its child was stopped.
            kill(pid, Signal::SIGCONT).unwrap();
            nsenter.try_wait().unwrap().is_some()
        });
        self.finish_one(host)
    }

    /// Continues what [`stop`](Self::stop) has stopped. `nsenter` has stopped itself when its child was stopped.
    pub(crate) fn resume(&self, host: usize) {
        let processes = self.mgpuruns(host);
        let nsenter = self.agents.iter().filter(|(of, _)| *of == host).map(|(_, started)| started.id());
        let nsenter = nsenter.map(|pid| Pid::from_raw(pid as i32));
        nsenter.chain(processes).for_each(|pid| kill(pid, Signal::SIGCONT).unwrap());
    }

    /// The result of the agent of one host, which takes no further part in the job.
    #[track_caller]
    pub(crate) fn finish_one(&mut self, host: usize) -> Finished {
        let index = self.agents.iter().position(|(of, _)| *of == host).expect("an agent");
        let (_, mut agent) = self.agents.remove(index);
        finish(&mut agent)
    }

    /// The results of the agents, by host. Nothing is left on any host that is still there.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Vec<Finished> {
        self.agents.sort_by_key(|(host, _)| *host);
        let finished: Vec<Finished> = self.agents.iter_mut().map(|(_, agent)| finish(agent)).collect();
        for host in 0..self.hosts.count() {
            let name = self.hosts.name(host);
            let processes = self.hosts.processes(host);
            assert!(processes.is_empty(), "left on host {name}: {processes:?} {finished:#?}");
        }
        for ((host, _), finished) in self.agents.iter().zip(&finished) {
            // A killed agent cannot remove its folder; the next one does.
            if finished.code.is_some_and(|code| code != 137) {
                let place = self.folder.path().join(self.hosts.name(*host));
                let files: Vec<_> = read_dir(place).unwrap().flatten().collect();
                assert!(files.is_empty(), "left on host {}: {files:?} {finished:#?}", self.hosts.name(*host));
            }
        }
        finished
    }
}

/// All agents exited with this code, and said these texts.
#[track_caller]
pub(crate) fn expect_all(finished: &[Finished], code: i32, texts: &[&str]) {
    for finished in finished {
        finished.expect(code, texts);
    }
}

/// Runs `test` on each number of hosts with each number of ranks of a host. The numbers of hosts run at the same time.
pub(crate) fn at_sizes(hosts: &[usize], ranks: &[usize], test: impl Fn(&Hosts, usize) + Sync) {
    std::thread::scope(|scope| {
        for count in hosts {
            scope.spawn(|| {
                let Some(hosts) = Hosts::start(*count) else { return };
                ranks.iter().for_each(|ranks| test(&hosts, *ranks));
            });
        }
    });
}
