//! `--hosts a,b`: one `mgpurun` on each host through the user's own `ssh`, for workstations without any engine.
//!
//! The `mgpurun` that the user starts becomes the *starter*. It runs no rank: it starts an agent on every host, passes on
//! their output and the user's signals, and waits. All hosts are reached directly and at once; there is no tree. A host
//! that is this one needs no ssh, and is node 0; otherwise the first host is.
//!
//! The standard input of an agent is its tie to the starter ([`attachment`]): first a line with a secret that was made
//! for this job, which so is on no command line, then a line for each signal. Its end, which also comes when ssh or the
//! starter is killed, makes the agent end its ranks. The first line that an agent writes says that it runs: exit codes after
//! that are the job's.
//!
//! | module | job |
//! |---|---|
//! | `command` | hosts + command line → the command of each agent (pure) |
//! | `agents` | starts the agents, and ends with them |
//! | `ending` | which end of an agent ends the others, and what is the exit code? (pure) |
//! | `attachment` | the other end: what an agent reads from its standard input |

mod agents;
pub(crate) mod attachment;
mod command;
mod ending;

use std::error::Error;
use std::ffi::OsString;
use std::net::ToSocketAddrs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use mgpu_control::nodes::owns;
use mgpu_control::protocol::new_run_id;
use nix::sys::signal::Signal;
use nix::unistd::gethostname;

use super::SettingsError;
use super::engine::Given;
use super::settings::{NODE_TIMEOUT, parse_node_timeout, parse_nodes};
use crate::cli::NodeArgs;
use crate::stdout;
pub(crate) use command::Hosts;
use command::{AgentCommand, Agents, shell_line};
use ending::Ending;

/// Variable with another program than `ssh`, and its options: `ssh -p 2222`.
const MGPU_SSH: &str = "MGPU_SSH";

/// What to start on all hosts.
pub(crate) struct Remote<'a> {
    pub(crate) hosts: &'a Hosts,
    /// What the options say about nodes.
    pub(crate) nodes: &'a NodeArgs,
    /// The words of the command line up to the program of the ranks, without `mgpurun` itself.
    pub(crate) options: &'a [OsString],
    /// The program of the ranks, with its arguments.
    pub(crate) program: &'a [OsString],
    /// Agents work in the folder of this process.
    pub(crate) same_folder: bool,
    /// Time between SIGTERM and SIGKILL of the ranks.
    pub(crate) grace: Duration,
    /// Output is passed on byte by byte.
    pub(crate) raw: bool,
    /// Signals that are forwarded to the ranks besides the usual ones.
    pub(crate) signals: &'a [Signal],
}

impl Remote<'_> {
    /// Starts an agent on each host and waits for all of them. Returns the exit code of the job.
    pub(crate) fn run(&self) -> Result<ExitCode, Box<dyn Error>> {
        let commands = self.commands()?;
        let ending = Ending::new(self.grace, commands.len(), self.least_nodes()?);
        // 256 random bits. They go to the agents at once, and no copy stays.
        let secret = new_run_id()? + &new_run_id()?;
        let code = agents::run(&commands, &secret, ending, self.signals, self.raw)?;
        Ok(ExitCode::from(code))
    }

    /// Prints the command of each agent.
    pub(crate) fn describe(&self) -> Result<ExitCode, Box<dyn Error>> {
        let mut text = String::new();
        for (node, agent) in self.commands()?.iter().enumerate() {
            let host = &agent.host;
            let how = if agent.is_here { ", which is this one" } else { "" };
            text += &format!(
                "# node {node} is host {host}{how}\n{}\n",
                shell_line(&agent.words).to_string_lossy()
            );
        }
        text += "# each of them reads a secret, made for this job, from its standard input\n";
        stdout::print(&text, ExitCode::SUCCESS)
    }

    /// The least number of hosts with which the job goes on.
    fn least_nodes(&self) -> Result<usize, SettingsError> {
        let hosts = self.hosts.names().len();
        let Some(nnodes) = &self.nodes.nnodes else { return Ok(hosts) };
        let nodes = parse_nodes(&Given::new(nnodes.clone(), "--nnodes"))?;
        if *nodes.end() as usize != hosts {
            return Err(SettingsError::new(format!(
                "--nnodes is `{nnodes}`, and --hosts has {hosts} hosts: the number of nodes, or MAX of MIN:MAX, should be {hosts}"
            )));
        }
        Ok(*nodes.start() as usize)
    }

    /// The silence after which the nodes take one of them for lost.
    fn node_timeout(&self) -> Result<Duration, SettingsError> {
        let given = self.nodes.node_timeout.as_ref();
        let given = given.map(|text| parse_node_timeout(&Given::new(text.clone(), "--node-timeout")));
        Ok(given.transpose()?.unwrap_or(NODE_TIMEOUT))
    }

    fn commands(&self) -> Result<Vec<AgentCommand>, Box<dyn Error>> {
        self.least_nodes()?;
        let here = self.hosts.names().iter().position(|name| is_here(name.host()));
        if let Some(name) = self.hosts.names().iter().find(|name| is_loopback(name.host())) {
            let host = name.host();
            return Err(Box::new(SettingsError::new(format!(
                "--hosts has {host}, which every host takes for itself: write the name or address by which the other hosts reach it"
            ))));
        }
        let hosts = self.hosts.with_first(here);
        let ssh = ssh_words();
        let endpoint = match &self.nodes.rdzv_endpoint {
            Some(endpoint) => endpoint.clone(),
            None if here.is_some() => hosts.names()[0].host().to_owned(),
            None => {
                name_of_alias(&ssh, hosts.names()[0].login()).unwrap_or(hosts.names()[0].host().to_owned())
            }
        };
        let folder = self.same_folder.then(std::env::current_dir).transpose();
        let agents = Agents {
            hosts: &hosts,
            first_is_here: here.is_some(),
            ssh: &ssh,
            mgpurun: std::env::current_exe()
                .map_err(|error| format!("the path of mgpurun itself is unknown: {error}"))?,
            folder: folder.map_err(|error| format!("the current folder is unknown: {error}"))?,
            endpoint: &endpoint,
            chosen_endpoint: self.nodes.rdzv_endpoint.is_some(),
            chosen_nodes: self.nodes.nnodes.is_some(),
            node_timeout: self.node_timeout()?,
            run_id: &new_run_id()?,
            options: self.options,
            program: self.program,
        };
        Ok(agents.commands())
    }
}

/// The program that reaches other hosts, with its options.
fn ssh_words() -> Vec<OsString> {
    let text = std::env::var(MGPU_SSH).unwrap_or_default();
    let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
    if words.is_empty() { vec!["ssh".into()] } else { words }
}

/// The name behind an alias of the user's configuration of ssh (`HostName`), which other hosts do not know.
fn name_of_alias(ssh: &[OsString], login: &str) -> Option<String> {
    let (program, options) = ssh.split_first()?;
    // Other programs have other options.
    if Path::new(program).file_name()? != "ssh" {
        return None;
    }
    let mut ask = Command::new(program);
    ask.args(options).args(["-G", "--", login]).stdin(Stdio::null()).stderr(Stdio::null());
    let output = ask.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(|line| line.strip_prefix("hostname ").map(|name| name.trim().to_owned()))
}

/// True for a name or an address of this host.
fn is_here(host: &str) -> bool {
    let own = gethostname().unwrap_or_default();
    let own = own.to_string_lossy();
    let is_name = |own: &str| !own.is_empty() && own.eq_ignore_ascii_case(host);
    if is_name(&own) || own.split_once('.').is_some_and(|(label, _)| is_name(label)) {
        return true;
    }
    let mut addresses = (host, 0).to_socket_addrs().into_iter().flatten();
    addresses.any(|address| !address.ip().is_loopback() && owns(address.ip()))
}

/// True for `localhost` and its addresses. (The own name of a host may be 127.0.1.1 on that host; that does no harm.)
fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}
