//! Several hosts on one machine: each is a network, UTS, PID and mount namespace, and all are on one bridge.
//!
//! A host has a name, which the others resolve by their own `/etc/hosts`, and an address of a private network. Its first
//! process keeps its namespaces; when that process is killed, the kernel kills all others of the host and removes its
//! link. All hosts end with the thread that has started them.
//!
//! The machine may forbid namespaces, as some containers and Ubuntu's AppArmor do: then [`Hosts::start`] says so and
//! returns `None`, and the test has nothing to check.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mgpu_control::process::kill_with_parent;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use crate::process::command;

/// Names of the hosts, in order.
const NAMES: &str = "abcdefgh";

/// Whether UCX can be used here; says why not.
pub fn has_ucx() -> bool {
    let opened = ucx_sys::Library::open();
    if let Err(why) = &opened {
        println!("skipped over UCX: {why}");
    }
    opened.is_ok()
}

/// Several hosts.
pub struct Hosts {
    hosts: Vec<Host>,
    /// Holds the bridge.
    switch: Namespaces,
    /// Holds the hosts' `/etc/hosts`.
    folder: tempfile::TempDir,
}

/// One host.
struct Host {
    name: String,
    namespaces: Namespaces,
}

/// A process that keeps namespaces, and the program that has started it.
struct Namespaces {
    unshare: Child,
    /// As the namespaces outside see it.
    pid: i32,
    /// They belong to a user namespace of their own, since this user may not make others.
    is_unprivileged: bool,
}

impl Namespaces {
    /// Starts a shell with `script` in new namespaces; the script says `ready` and then waits.
    fn start(options: &[&str], script: &str, inside: Option<&Namespaces>) -> Result<Self, String> {
        let is_unprivileged = !geteuid().is_root();
        let mut start = match inside {
            Some(outer) => outer.enter(&["--net"], Path::new("unshare")),
            None => Command::new("unshare"),
        };
        if inside.is_none() && is_unprivileged {
            start.args(["--user", "--map-root-user"]);
        }
        start.args(options).args(["--fork", "--kill-child", "sh", "-ec", script]);
        start.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        kill_with_parent(&mut start);
        let mut unshare = start.spawn().map_err(|error| format!("unshare: {error}"))?;
        let mut line = String::new();
        let stdout = unshare.stdout.take().expect("piped");
        let read = BufReader::new(stdout).read_line(&mut line);
        let shell = children(unshare.id() as i32);
        match (read, &shell[..]) {
            (Ok(_), [pid]) if line == "ready\n" => Ok(Namespaces { unshare, pid: *pid, is_unprivileged }),
            _ => {
                let _ = unshare.kill();
                let output = unshare.wait_with_output().map_err(|error| error.to_string())?;
                Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
            }
        }
    }

    /// A command that runs `program` in some of these namespaces.
    fn enter(&self, namespaces: &[&str], program: &Path) -> Command {
        let mut enter = command("nsenter");
        enter.args(["--target", &self.pid.to_string()]);
        if self.is_unprivileged {
            enter.args(["--user", "--preserve-credentials"]);
        }
        enter.args(namespaces).arg("--").arg(program);
        enter
    }

    /// Runs the lines of `script` as commands of `ip` in the network namespace.
    fn ip(&self, script: &str) -> Result<(), String> {
        let mut ip = self.enter(&["--net"], Path::new("ip"));
        ip.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut ip = ip.spawn().map_err(|error| format!("ip: {error}"))?;
        let written = ip.stdin.take().expect("piped").write_all(script.as_bytes());
        let output = ip.wait_with_output().map_err(|error| error.to_string())?;
        match written {
            Ok(()) if output.status.success() => Ok(()),
            _ => Err(format!("ip: {}", String::from_utf8_lossy(&output.stderr).trim())),
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

impl Hosts {
    /// Starts `count` hosts, called `a`, `b`, …; `None`, with a message, if this machine does not allow it.
    ///
    /// # Panics
    /// If there are more hosts than names.
    pub fn start(count: usize) -> Option<Hosts> {
        assert!(count <= NAMES.len());
        match Hosts::try_start(count) {
            Ok(hosts) => Some(hosts),
            Err(why) => {
                println!("skipped: this machine does not allow hosts as namespaces: {why}");
                None
            }
        }
    }

    fn try_start(count: usize) -> Result<Hosts, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let names: Vec<String> = NAMES.chars().take(count).map(String::from).collect();
        let switch = Namespaces::start(&["--net"], "echo ready; exec sleep infinity", None)?;
        switch.ip("link add br0 type bridge\nlink set br0 up\nlink set lo up\n")?;
        let mut hosts = Vec::new();
        for (number, name) in names.iter().enumerate() {
            // As Debian's installer writes it, to catch programs that use their own name as an address.
            let mut text = format!("127.0.0.1 localhost\n127.0.1.1 {name}\n");
            for (other, name) in names.iter().enumerate().filter(|(other, _)| *other != number) {
                text += &format!("{} {name}\n{} {name}\n", address(other), address_v6(other));
            }
            text += &format!("{} {name}\n{} {name}\n", address(number), address_v6(number));
            let file = folder.path().join(name);
            std::fs::write(&file, text).map_err(|error| error.to_string())?;
            let script = format!(
                "echo {name} >/proc/sys/kernel/hostname; mount --bind '{}' /etc/hosts; ip link set lo up; \
                 echo ready; exec sleep infinity",
                file.display()
            );
            let options = ["--net", "--uts", "--pid", "--mount", "--mount-proc"];
            let namespaces = Namespaces::start(&options, &script, Some(&switch))?;
            let pid = namespaces.pid;
            switch.ip(&format!(
                "link add port{number} type veth peer name eth0 netns {pid}\n\
                 link set port{number} master br0\nlink set port{number} up\n"
            ))?;
            namespaces.ip(&format!(
                "address add {}/24 dev eth0\naddress add {}/64 dev eth0 nodad\nlink set eth0 up\n",
                address(number),
                address_v6(number)
            ))?;
            hosts.push(Host { name: name.clone(), namespaces });
        }
        Ok(Hosts { hosts, switch, folder })
    }

    /// The name of a host.
    pub fn name(&self, host: usize) -> &str {
        &self.hosts[host].name
    }

    /// The number of hosts.
    pub fn count(&self) -> usize {
        self.hosts.len()
    }

    /// A command that runs `program` on a host. The started process is one that has entered the host's namespaces; the
    /// program is its [child](Hosts::program). Signals that this process ignores, as a background job of a script does
    /// with SIGINT, are not ignored there.
    pub fn command(&self, host: usize, program: impl AsRef<Path>) -> Command {
        let namespaces = ["--net", "--uts", "--pid", "--mount"];
        let mut command = self.hosts[host].namespaces.enter(&namespaces, Path::new("env"));
        command.arg("--default-signal").arg(program.as_ref());
        command
    }

    /// The process of the program that a command of [`command`](Hosts::command) has started.
    ///
    /// # Panics
    /// If it does not start within 10 s.
    pub fn program(&self, started: &Child) -> Pid {
        only_child(Pid::from_raw(started.id() as i32))
    }

    /// The only child of a process.
    ///
    /// # Panics
    /// If it has none within 10 s.
    pub fn child(&self, pid: Pid) -> Pid {
        only_child(pid)
    }

    /// The processes of a host, without the one that keeps its namespaces: their ids outside, and their command lines.
    pub fn processes(&self, host: usize) -> Vec<(Pid, String)> {
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let Some(own) = namespace(&self.hosts[host].namespaces.pid.to_string()) else { return Vec::new() };
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let pids = names.filter_map(|name| Some((name.parse::<i32>().ok()?, name)));
        let inside = pids.filter(|(pid, name)| {
            *pid != self.hosts[host].namespaces.pid && namespace(name) == Some(own.clone())
        });
        inside
            .map(|(pid, name)| {
                let line = std::fs::read(format!("/proc/{name}/cmdline")).unwrap_or_default();
                (Pid::from_raw(pid), String::from_utf8_lossy(&line).replace('\0', " "))
            })
            .filter(|(_, line)| !line.is_empty())
            .collect()
    }

    /// Takes the link of a host down or up: nobody answers it any more, and it answers nobody.
    ///
    /// # Panics
    /// If that fails.
    pub fn set_link(&self, host: usize, up: bool) {
        let state = if up { "up" } else { "down" };
        self.switch.ip(&format!("link set port{host} {state}\n")).expect("a port of the bridge");
    }

    /// Drops what a host sends to another one, in this direction only.
    ///
    /// # Panics
    /// If that fails.
    pub fn drop_packets(&self, from: usize, to: usize) {
        let routes =
            format!("route add blackhole {}/32\nroute add blackhole {}/128\n", address(to), address_v6(to));
        self.hosts[from].namespaces.ip(&routes).expect("a route");
    }

    /// Runs lines of `ip -batch` on a host, for another network than the usual one.
    ///
    /// # Panics
    /// If one fails.
    pub fn ip(&self, host: usize, script: &str) {
        self.hosts[host].namespaces.ip(script).expect("lines of `ip`");
    }

    /// Replaces the `/etc/hosts` of a host.
    ///
    /// # Panics
    /// If that fails.
    pub fn set_names(&self, host: usize, text: &str) {
        // In place: the file is mounted.
        std::fs::write(self.folder.path().join(self.name(host)), text).expect("the hosts' names");
    }

    /// Turns a host off: its link goes down first, so that nobody hears of the end of its processes.
    pub fn power_off(&self, host: usize) {
        self.set_link(host, false);
        let _ = kill(Pid::from_raw(self.hosts[host].namespaces.pid), Signal::SIGKILL);
    }
}

/// The IPv4 address of a host.
pub fn address(host: usize) -> String {
    format!("10.99.0.{}", host + 1)
}

/// The IPv6 address of a host.
pub fn address_v6(host: usize) -> String {
    format!("fd99::{}", host + 1)
}

/// The child of a process that starts one.
fn only_child(pid: Pid) -> Pid {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let [child] = children(pid.as_raw())[..] {
            return Pid::from_raw(child);
        }
        assert!(Instant::now() < deadline, "process {pid} has started nothing");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// The children of a process.
fn children(pid: i32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_names_and_reach_each_other() {
        let Some(hosts) = Hosts::start(2) else { return };
        let output = hosts.command(0, "uname").arg("-n").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "a\n", "{output:?}");
        let reaches = |from: usize, to: &str| {
            let route = format!("exec 3<>/dev/tcp/{to}/9");
            let output = hosts.command(from, "bash").args(["-c", &route]).output().unwrap();
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        // Nothing listens, but the host answers.
        for to in ["b", &address(1), &address_v6(1)] {
            assert!(reaches(0, to).contains("refused"), "{}", reaches(0, to));
        }
        hosts.drop_packets(0, 1);
        assert!(!reaches(0, &address(1)).contains("refused"));
        assert!(reaches(1, "127.0.0.1").contains("refused"));
    }

    #[test]
    fn nothing_is_left_of_a_host_that_is_turned_off() {
        let Some(hosts) = Hosts::start(1) else { return };
        let mut sleep = hosts.command(0, "sleep").arg("1000").spawn().unwrap();
        let pid = hosts.program(&sleep);
        hosts.power_off(0);
        sleep.wait().unwrap();
        assert!(kill(pid, None).is_err());
        assert_eq!(hosts.processes(0), []);
    }
}
