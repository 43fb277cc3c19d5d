//! Several hosts without an engine: `--hosts a,b` starts the agents by ssh, and `doctor --nodes` checks every pair. The
//! hosts are namespaces of this machine, and ssh is a script that enters them; where these are forbidden, nothing is
//! tested.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mgpu_tests::hosts::Hosts;
use mgpu_tests::process::{Finished, command, finish, run, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const MGPURUN: &str = env!("CARGO_BIN_EXE_t-mgpurun");

/// Hosts that are reached by a script in place of ssh.
struct Site {
    hosts: Hosts,
    folder: tempfile::TempDir,
}

impl Site {
    fn start(count: usize) -> Option<Site> {
        let hosts = Hosts::start(count)?;
        let site = Site { hosts, folder: tempfile::tempdir().unwrap() };
        // Called as `ssh -T -o BatchMode=yes HOST LINE`.
        let mut script = String::from("#!/bin/sh\nshift 3\ncase $1 in\n");
        for host in 0..count {
            let enter = words(&site.hosts.command(host, "sh")).join(" ");
            script += &format!("{}) exec {enter} -c \"$2\" ;;\n", site.hosts.name(host));
        }
        script += "*) echo \"ssh: Could not resolve hostname $1\" >&2; exit 255 ;;\nesac\n";
        std::fs::write(site.ssh(), script).unwrap();
        std::fs::set_permissions(site.ssh(), PermissionsExt::from_mode(0o755)).unwrap();
        Some(site)
    }

    fn ssh(&self) -> PathBuf {
        self.folder.path().join("ssh-of-the-tests")
    }

    /// `mgpurun` on a machine that is none of the hosts.
    fn mgpurun(&self, arguments: &[&str]) -> Command {
        let mut starter = command("env");
        starter
            .args(["--default-signal", MGPURUN])
            .args(arguments)
            .env("MGPU_SSH", self.ssh())
            .current_dir(self.folder.path());
        starter
    }

    /// The result, with nothing left on any host.
    fn finish(&self, starter: &mut Child) -> Finished {
        let finished = finish(starter);
        self.expect_no_processes(&finished);
        finished
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        let finished = run(&mut self.mgpurun(arguments));
        self.expect_no_processes(&finished);
        finished
    }

    #[track_caller]
    fn expect_no_processes(&self, finished: &Finished) {
        for host in 0..self.hosts.count() {
            let left = self.hosts.processes(host);
            assert!(left.is_empty(), "left on host {}: {left:?} {finished:#?}", self.hosts.name(host));
        }
    }

    /// Starts ranks that run until they are stopped, one on each host.
    fn start_sleepers(&self) -> Child {
        let mut starter =
            self.mgpurun(&["--hosts", "a,b", "-n", "1", "--grace", "1", "sh", "-c", "exec sleep 1000"]);
        let starter = starter.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let sleeps = |host| self.hosts.processes(host).iter().any(|(_, line)| line.starts_with("sleep"));
        until(|| sleeps(0) && sleeps(1));
        starter
    }
}

fn words(command: &Command) -> Vec<String> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_str().unwrap().to_owned()).collect()
}

#[test]
fn every_host_gets_the_same_words_in_the_same_folder() {
    let Some(site) = Site::start(2) else { return };
    let folder = site.folder.path().join("it's a folder");
    std::fs::create_dir(&folder).unwrap();
    // A line for each rank: the lines of two ranks may alternate.
    let script = "{ printf '%s/%s on %s in %s:' $RANK $WORLD_SIZE $(uname -n) \"$PWD\"; printf ' <%s>' \"$@\"; } \
                  | tr '\\n' '~'; echo";
    let arguments = ["two  words", "it's", "a\nline", "$HOME `x` \\", "", "--hosts", "*"];
    let mut starter =
        site.mgpurun(&["-n", "1", "--no-prefix", "--hosts", "a,b", "--", "sh", "-c", script, "sh"]);
    let finished = run(starter.args(arguments).current_dir(&folder));
    site.expect_no_processes(&finished);
    let tail = "it's a folder: <two  words> <it's> <a~line> <$HOME `x` \\> <> <--hosts> <*>\n";
    for (rank, host) in ["a", "b"].into_iter().enumerate() {
        let at = format!("{rank}/2 on {host} in {}/", site.folder.path().display());
        finished.expect(0, &[&format!("{at}{tail}")]);
    }
}

#[test]
fn the_secret_is_on_no_command_line_and_an_interrupt_leaves_nothing() {
    let Some(site) = Site::start(2) else { return };
    let mut starter = site.start_sleepers();
    let own = std::fs::read_to_string(format!("/proc/{}/cmdline", starter.id())).unwrap();
    let lines = (0..2).flat_map(|host| site.hosts.processes(host)).map(|(_, line)| line).chain([own]);
    let mut agents = 0;
    for line in lines {
        agents += usize::from(line.contains("--secret-file -"));
        let mut words = line.split(|c: char| !c.is_ascii_hexdigit());
        assert!(words.all(|word| word.len() < 64), "a secret? {line}");
    }
    // A guardian and a launcher on each host, at least.
    assert!(agents >= 4, "{agents} agents");
    kill(Pid::from_raw(starter.id() as i32), Signal::SIGINT).unwrap();
    site.finish(&mut starter).expect(130, &["stopped by SIGINT"]);
}

#[test]
fn listed_signals_reach_the_ranks_of_all_hosts() {
    let Some(site) = Site::start(2) else { return };
    let script =
        "trap 'echo got it on $(uname -n); exit 0' XCPU; echo > ready-$RANK; while :; do sleep 0.05; done";
    let words = ["--hosts", "a,b", "-n", "1", "--signals-to-handle", "SIGXCPU", "sh", "-c", script];
    let mut starter = site.mgpurun(&words);
    let mut starter = starter.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| (0..2).all(|rank| site.folder.path().join(format!("ready-{rank}")).exists()));
    kill(Pid::from_raw(starter.id() as i32), Signal::SIGXCPU).unwrap();
    site.finish(&mut starter).expect(0, &["got it on a\n", "got it on b\n"]);
}

/// More than a pipe holds, and a pager reads it late.
#[test]
fn a_slow_reader_gets_all_output() {
    let Some(site) = Site::start(2) else { return };
    let script = "seq 1 8000; echo > done-$RANK";
    let mut starter = site.mgpurun(&["--hosts", "a,b", "-n", "1", "sh", "-c", script]);
    let mut starter = starter.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| (0..2).all(|rank| site.folder.path().join(format!("done-{rank}")).exists()));
    until(|| (0..2).all(|host| site.hosts.processes(host).is_empty()));
    // Longer than `mgpurun` waits for a connection of ssh that is kept for later.
    std::thread::sleep(Duration::from_millis(1500));
    let finished = site.finish(&mut starter);
    assert_eq!((finished.code, finished.stdout.lines().count()), (Some(0), 16000));
}

#[test]
fn nothing_is_left_if_the_starter_is_killed() {
    let Some(site) = Site::start(2) else { return };
    let mut starter = site.start_sleepers();
    starter.kill().unwrap();
    starter.wait().unwrap();
    until(|| (0..2).all(|host| site.hosts.processes(host).is_empty()));
}

#[test]
fn a_host_that_cannot_be_reached_is_named() {
    let Some(site) = Site::start(2) else { return };
    let finished = site.run(&["--hosts", "a,nowhere", "-n", "1", "true"]);
    finished.expect(1, &["Could not resolve hostname nowhere", "host nowhere: ", "has no connection to it"]);
    // The first host is node 0.
    site.run(&["--hosts", "nowhere,b", "-n", "1", "true"]).expect(1, &["host nowhere: "]);
}

#[test]
fn a_host_without_mgpurun_is_named() {
    let Some(site) = Site::start(2) else { return };
    let folder = Path::new(MGPURUN).parent().unwrap();
    let hide = site.hosts.command(1, "mount").args(["-t", "tmpfs", "none"]).arg(folder).status().unwrap();
    assert!(hide.success());
    let finished = site.run(&["--hosts", "a,b", "-n", "1", "true"]);
    finished.expect(1, &["host b: no such program there: mgpurun has to be at the same path on every host"]);
}

#[test]
fn a_rank_that_fails_is_named_and_its_code_is_that_of_the_starter() {
    let Some(site) = Site::start(2) else { return };
    // The last two are also what a shell that finds no `mgpurun` and ssh would exit with.
    for code in [3, 127, 255] {
        let script = format!("test $RANK = 1 && exit {code}; exec sleep 1000");
        let finished = site.run(&["--hosts", "a,b", "-n", "1", "sh", "-c", &script]);
        finished.expect(code, &[&format!("rank 1 (host b) exited with code {code}")]);
        let is_wrong = ["host a: ", "host b: ", "--hosts"].iter().any(|text| finished.stderr.contains(text));
        assert!(!is_wrong, "{finished:#?}");
    }
}

#[test]
fn a_job_goes_on_without_a_host_that_is_lost() {
    let Some(site) = Site::start(3) else { return };
    let script = "echo start $MGPU_RESTART_COUNT of $WORLD_SIZE; test $WORLD_SIZE = 2 || exec sleep 1000";
    let mut starter =
        site.mgpurun(&["--hosts", "a,b,c", "--nnodes", "2:3", "--max-restarts", "1", "-n", "1"]);
    // The third host must arrive in this time, and then it is awaited for as long.
    starter.args(["--timeout", "4", "--no-prefix", "sh", "-c", script]);
    let mut starter = starter.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| (0..3).all(|host| site.hosts.processes(host).iter().any(|(_, line)| line.starts_with("sleep"))));
    for (pid, line) in site.hosts.processes(1) {
        if line.contains("mgpurun") {
            kill(pid, Signal::SIGKILL).unwrap();
        }
    }
    let finished = site.finish(&mut starter);
    finished.expect(0, &["mgpurun on b ", "start 1 of 2\n"]);
}

#[test]
fn the_host_of_the_starter_is_node_0() {
    let Some(site) = Site::start(2) else { return };
    // In the network of `a` and by its name, but where the script can enter `b`.
    let all = words(&site.hosts.command(0, MGPURUN));
    let entered: Vec<String> =
        all.into_iter().filter(|word| !["--pid", "--mount"].contains(&word.as_str())).collect();
    let mut starter = command(&entered[0]);
    let script = "echo rank $RANK is on $(uname -n)";
    starter.args(&entered[1..]).args(["--hosts", "b,a", "-n", "1", "--no-prefix", "sh", "-c", script]);
    let finished = run(starter.env("MGPU_SSH", site.ssh()));
    finished.expect(0, &["rank 0 is on a\n", "rank 1 is on b\n"]);
    site.expect_no_processes(&finished);
}

#[test]
fn a_dry_run_shows_the_command_of_each_host() {
    let mut dry = command(MGPURUN);
    dry.args(["--dry-run", "--hosts", "me@no-such-host-1,no-such-host-2", "-n", "2", "echo", "it's"]);
    let finished = run(dry.env("MGPU_SSH", "my-ssh -p 2222"));
    finished.expect(
        0,
        &[
            "# node 0 is host no-such-host-1\nmy-ssh -p 2222 -T -o 'BatchMode=yes' me@no-such-host-1 '",
            "--nnodes 2 --node-rank 1 --rdzv-endpoint no-such-host-1 --rdzv-id ",
            "--secret-file - ",
        ],
    );
}

#[test]
fn hosts_and_options_that_contradict_each_other_are_refused() {
    for (arguments, text) in [
        (&["--hosts", "a", "true"][..], "--hosts is for at least two"),
        (&["--hosts", "a,b:8", "true"], "-n sets the ranks of each host"),
        (&["--hosts", "a,b", "--node-rank", "1", "true"], "cannot be used with"),
        (&["--hosts", "a,b", "--nnodes", "1:3", "true"], "MAX of MIN:MAX, should be 2"),
        (&["--hosts", "localhost,b", "true"], "which every host takes for itself"),
        (&["--hosts", "a,b", "true", ":", "true"], "on several nodes there is one job"),
        (&["doctor", "--hosts", "a,b"], "options of several nodes need --nodes"),
        (&["doctor", "--nodes", "--standalone"], "doctor --nodes is for several nodes"),
    ] {
        run(command(MGPURUN).args(arguments)).expect(2, &[text]);
    }
}

#[test]
fn a_secret_of_standard_input_is_one_line() {
    let endpoint =
        ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "127.0.0.1:1", "--timeout", "0.1"];
    for (input, code, text) in
        [("0123456789abcdef\nrest", 64, "cannot reach"), ("short\n", 72, "at least 16 are needed")]
    {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), input).unwrap();
        let mut agent = command(MGPURUN);
        agent.args(endpoint).args(["--secret-file", "-", "true"]);
        run(agent.stdin(std::fs::File::open(file.path()).unwrap())).expect(code, &[text]);
    }
}

#[test]
fn healthy_nodes_have_no_problem() {
    let Some(site) = Site::start(3) else { return };
    let finished = site.run(&["doctor", "--nodes", "--hosts", "a,b,c"]);
    finished.expect(0, &["no problem found between 3 nodes", "eth0", "GB/s"]);
    let finished = site.run(&["doctor", "--nodes", "--json", "--hosts", "a,b"]);
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    assert_eq!(finished.json()["pairs"].as_array().unwrap().len(), 2);
}

#[test]
fn a_name_that_leads_elsewhere_is_a_problem() {
    let Some(site) = Site::start(2) else { return };
    let script = "text=$(grep -v ' b$' /etc/hosts); printf '%s\\n127.0.1.1 b\\n' \"$text\" >/etc/hosts";
    assert!(site.hosts.command(0, "sh").args(["-c", script]).status().unwrap().success());
    let finished = site.run(&["doctor", "--nodes", "--hosts", "a,b"]);
    finished.expect(1, &["problem: on a the name b is 127.0.1.1, and b has ", "1 problem found"]);
}

#[test]
fn hosts_that_do_not_reach_each_other_are_a_problem() {
    let Some(site) = Site::start(3) else { return };
    // Both reach the coordinator.
    site.hosts.drop_packets(1, 2);
    let finished = site.run(&["doctor", "--nodes", "--hosts", "a,b,c"]);
    finished.expect(
        1,
        &["problem: b cannot connect to c at ", "problem: c cannot connect to b at ", "2 problems found"],
    );
}

#[test]
fn the_check_also_runs_with_an_agent_started_on_each_host() {
    let Some(site) = Site::start(2) else { return };
    let agent = |host| {
        let mut agent = site.hosts.command(host, MGPURUN);
        agent.args(["doctor", "--nodes", "--nnodes", "2", "--rdzv-endpoint", "a"]);
        let agent = agent.env("MGPU_SECRET", "a secret of the tests").stdout(Stdio::piped());
        agent.stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut agents = [agent(0), agent(1)];
    let finished = agents.each_mut().map(finish);
    finished[0].expect(0, &["no problem found between 2 nodes"]);
    finished[1].expect(0, &[]);
}
