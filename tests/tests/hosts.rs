//! Jobs on several hosts: whatever fails, every surviving host says the same culprit, exits with the same code, and
//! nothing is left anywhere. The hosts are namespaces of this machine; where these are forbidden, nothing is tested.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use mgpu_tests::hosts::{Hosts, address_v6};
use mgpu_tests::process::{Finished, finish, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const MGPURUN: &str = env!("CARGO_BIN_EXE_t-mgpurun");

/// A job with one agent on each host.
struct Job<'a> {
    hosts: &'a Hosts,
    agents: Vec<Child>,
}

impl<'a> Job<'a> {
    /// Starts an agent on each host. Host `a` has the endpoint.
    fn start(hosts: &'a Hosts, options: &[&str], command: &[&str]) -> Self {
        Job::start_at(hosts, "a:29400", options, command)
    }

    fn start_at(hosts: &'a Hosts, endpoint: &str, options: &[&str], command: &[&str]) -> Self {
        let agents = (0..hosts.count()).map(|host| agent(hosts, host, endpoint, options, command)).collect();
        Job { hosts, agents }
    }

    /// Waits until each host has at least so many processes whose command line begins with `name`.
    #[track_caller]
    fn wait_for_processes(&mut self, name: &str, of_each: usize) {
        let count =
            |host| self.hosts.processes(host).iter().filter(|(_, line)| line.starts_with(name)).count();
        until(|| {
            for agent in &mut self.agents {
                assert!(
                    agent.try_wait().unwrap().is_none(),
                    "an agent has ended early: {:#?}",
                    finish(agent)
                );
            }
            (0..self.hosts.count()).all(|host| count(host) >= of_each)
        });
    }

    /// The launcher and the guardian of a host.
    fn mgpuruns(&self, host: usize) -> Vec<Pid> {
        let all = self.hosts.processes(host).into_iter();
        all.filter(|(_, line)| line.starts_with(MGPURUN)).map(|(pid, _)| pid).collect()
    }

    /// The results of all agents. Nothing is left on the hosts that are still there.
    fn finish(mut self) -> Vec<Finished> {
        let finished = self.agents.iter_mut().map(finish).collect();
        for host in 0..self.hosts.count() {
            let left = self.hosts.processes(host);
            assert!(left.is_empty(), "left on host {}: {left:?} {finished:#?}", self.hosts.name(host));
        }
        finished
    }
}

fn agent(hosts: &Hosts, host: usize, endpoint: &str, options: &[&str], command: &[&str]) -> Child {
    let count = hosts.count().to_string();
    let mut agent = hosts.command(host, MGPURUN);
    if !options.contains(&"--nnodes") {
        agent.args(["--nnodes", &count]);
    }
    agent.args(["--rdzv-endpoint", endpoint]).args(options).args(command);
    agent.env("MGPU_SECRET", "a secret of the tests").stdout(Stdio::piped()).stderr(Stdio::piped());
    agent.spawn().expect("nsenter starts")
}

/// All agents exited with this code, and have said these texts.
#[track_caller]
fn expect_all(finished: &[Finished], code: i32, texts: &[&str]) {
    for finished in finished {
        finished.expect(code, texts);
    }
}

/// Ranks that run until they are stopped.
const SLEEP: [&str; 3] = ["sh", "-c", "exec sleep 1000"];

#[test]
fn the_owner_of_the_endpoint_is_node_0_and_ranks_are_numbered_over_all_hosts() {
    let Some(hosts) = Hosts::start(3) else { return };
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE on $(uname -n), master $MASTER_ADDR, secret $MGPU_SECRET.";
    for endpoint in ["a:29400", &format!("[{}]:29401", address_v6(0))] {
        let job = Job::start_at(&hosts, endpoint, &["-n", "2"], &["sh", "-c", script]);
        let finished = job.finish();
        expect_all(&finished, 0, &[]);
        for (host, (finished, name)) in finished.iter().zip(["a", "b", "c"]).enumerate() {
            for local in 0..2 {
                let rank = 2 * host + local;
                let line = format!("[{rank}] {rank}/6 {local}/2 {host}/3 on {name}, master ");
                finished.expect(0, &[&line, "secret ."]);
            }
        }
    }
}

#[test]
fn a_rank_that_fails_is_named_on_every_host_with_its_last_lines_on_node_0() {
    let Some(hosts) = Hosts::start(3) else { return };
    let script = "test $RANK = 3 && { echo the reason; exit 3; }; exec sleep 1000";
    let finished = Job::start(&hosts, &["-n", "2"], &["sh", "-c", script]).finish();
    expect_all(&finished, 3, &["rank 3 (host b) exited with code 3"]);
    finished[0].expect(3, &["the last lines of rank 3 (host b)", "the reason"]);
}

#[test]
fn an_agent_that_is_killed_is_named_and_its_ranks_are_gone() {
    let Some(hosts) = Hosts::start(2) else { return };
    for only_guardian in [false, true] {
        let mut job = Job::start(&hosts, &["-n", "2"], &SLEEP);
        job.wait_for_processes("sleep", 2);
        let processes = job.mgpuruns(1);
        let victims = if only_guardian { &processes[..1] } else { &processes[..] };
        victims.iter().for_each(|pid| kill(*pid, Signal::SIGKILL).unwrap());
        let finished = job.finish();
        let text = "mgpurun on b ended without a goodbye";
        finished[0].expect(71, &[text, "ranks 2-3"]);
    }
}

#[test]
fn a_host_that_is_turned_off_is_named() {
    let Some(hosts) = Hosts::start(3) else { return };
    let mut job = Job::start(&hosts, &["-n", "1"], &SLEEP);
    job.wait_for_processes("sleep", 1);
    hosts.power_off(1);
    let finished = job.finish();
    for survivor in [0, 2] {
        finished[survivor].expect(71, &["host b does not answer; rank 1 on it"]);
    }
}

#[test]
fn agents_end_their_ranks_if_the_coordinator_is_lost() {
    let Some(hosts) = Hosts::start(3) else { return };
    let mut job = Job::start(&hosts, &["-n", "1"], &SLEEP);
    job.wait_for_processes("sleep", 1);
    hosts.power_off(0);
    let finished = job.finish();
    for survivor in [1, 2] {
        finished[survivor].expect(71, &["host a does not answer; it coordinates the job"]);
    }
}

#[test]
fn packets_lost_in_one_direction_are_noticed_on_both_sides() {
    for (from, to) in [(0, 1), (1, 0)] {
        let Some(hosts) = Hosts::start(2) else { return };
        let mut job = Job::start(&hosts, &["-n", "1"], &SLEEP);
        job.wait_for_processes("sleep", 1);
        hosts.drop_packets(from, to);
        let finished = job.finish();
        finished[0].expect(71, &["host b does not answer"]);
        finished[1].expect(71, &["host a does not answer"]);
    }
}

#[test]
fn a_stopped_agent_is_named_after_the_node_timeout() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = Job::start(&hosts, &["-n", "1", "--node-timeout", "3"], &SLEEP);
    job.wait_for_processes("sleep", 1);
    let processes = job.mgpuruns(1);
    processes.iter().for_each(|pid| kill(*pid, Signal::SIGSTOP).unwrap());
    let Job { hosts, mut agents } = job;
    let stopped = agents.pop().unwrap();
    finish(&mut agents[0]).expect(71, &["mgpurun on b has been silent for", "though its host answers"]);
    // When it continues, it finds that the others have gone on without it.
    processes.iter().for_each(|pid| kill(*pid, Signal::SIGCONT).unwrap());
    let finished = Job { hosts, agents: vec![stopped] }.finish();
    finished[0].expect(71, &["silent for"]);
}

#[test]
fn nothing_happens_if_a_link_is_dead_for_three_seconds() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = Job::start(&hosts, &["-n", "1"], &["sh", "-c", "sleep 5; echo done"]);
    job.wait_for_processes("sleep 5", 1);
    hosts.set_link(1, false);
    let down = Instant::now();
    until(|| down.elapsed() >= Duration::from_secs(3));
    hosts.set_link(1, true);
    expect_all(&job.finish(), 0, &["done"]);
}

#[test]
fn an_interrupt_on_any_node_ends_the_ranks_on_all() {
    let Some(hosts) = Hosts::start(3) else { return };
    for host in 0..3 {
        let mut job = Job::start(&hosts, &["-n", "1"], &SLEEP);
        job.wait_for_processes("sleep", 1);
        kill(hosts.program(&job.agents[host]), Signal::SIGINT).unwrap();
        expect_all(&job.finish(), 130, &["stopped by SIGINT"]);
    }
}

#[test]
fn a_job_goes_on_with_fewer_nodes_and_grows_again() {
    let Some(hosts) = Hosts::start(3) else { return };
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("go");
    let marker = marker.to_str().unwrap();
    // In the third start all nodes are there again.
    let script = format!(
        "echo start $MGPU_RESTART_COUNT: $WORLD_SIZE ranks; \
         test $MGPU_RESTART_COUNT = 2 && exit 0; \
         test $MGPU_RESTART_COUNT = 1 && while ! test -e {marker}; do sleep 0.1; done; \
         test $MGPU_RESTART_COUNT = 1 && exit 5; exec sleep 1000"
    );
    let options = ["-n", "1", "--nnodes", "2:3", "--max-restarts", "3", "--timeout", "3", "--grace", "0.2"];
    let command = ["sh", "-c", &script];
    let mut job = Job::start(&hosts, &options, &command);
    job.wait_for_processes("sleep 1000", 1);
    job.mgpuruns(2).into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
    finish(&mut job.agents.pop().unwrap());
    until(|| hosts.processes(0).iter().any(|(_, line)| line.starts_with("sleep 0.1")));
    job.agents.push(agent(&hosts, 2, "a:29400", &options, &command));
    until(|| hosts.processes(2).iter().any(|(_, line)| line.starts_with(MGPURUN)));
    std::fs::write(marker, "").unwrap();
    let finished = job.finish();
    finished[0]
        .expect(0, &["start 0: 3 ranks", "start 1: 2 ranks", "start 2: 3 ranks", "mgpurun on c ended"]);
    finished[2].expect(0, &["start 2: 3 ranks"]);
}

#[test]
fn contradictions_between_nodes_name_both_hosts_and_both_values() {
    let Some(hosts) = Hosts::start(2) else { return };
    for (of_a, of_b, text) in [
        (
            &["-n", "1"][..],
            &["-n", "1", "--nnodes", "2:3"][..],
            "disagree on their number (--nnodes): 2 on host a, 2:3 on host b",
        ),
        (&["--node-rank", "0"], &["--node-rank", "0"], "hosts a and b both have node rank 0"),
    ] {
        let command = ["true"];
        let agents =
            vec![agent(&hosts, 0, "a:29400", of_a, &command), agent(&hosts, 1, "a:29400", of_b, &command)];
        let finished = Job { hosts: &hosts, agents }.finish();
        if of_b.contains(&"0") {
            // Node 0 of host b listens there, where nobody comes.
            continue;
        }
        expect_all(&finished, 73, &[text]);
    }
    let agents = vec![
        agent(&hosts, 0, "a:29400", &["-n", "1"], &["echo", "x"]),
        agent(&hosts, 1, "a:29400", &["-n", "1"], &["echo", "y"]),
    ];
    let finished = Job { hosts: &hosts, agents }.finish();
    expect_all(
        &finished,
        73,
        &["argument 1 of the program differs between nodes: `x` on host a, `y` on host b"],
    );
}
