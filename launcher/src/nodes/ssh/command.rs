//! The command of each agent. Pure.
//!
//! ssh joins its arguments with spaces and gives the result to the user's shell on the other host. So the agent's command
//! is one argument, quoted for that shell.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use mgpu_control::nodes::Endpoint;

/// The flag that holds the hosts.
const FLAG: &[u8] = b"--hosts";

/// How often ssh asks for an answer of the other host.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How much later than the nodes ssh gives up on a host, at least.
const LATER: Duration = Duration::from_secs(30);

/// A host as the user has written it: `HOST` or `USER@HOST`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostName {
    login: String,
    host: String,
}

impl HostName {
    /// With the user, as ssh takes it.
    pub(super) fn login(&self) -> &str {
        &self.login
    }

    /// Without the user.
    pub(super) fn host(&self) -> &str {
        &self.host
    }
}

impl FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (user, host) = text.rsplit_once('@').map_or((None, text), |(user, host)| (Some(user), host));
        // ssh would take it for an option.
        if text.starts_with('-') || user == Some("") {
            return Err(format!("`{text}` is neither HOST nor USER@HOST"));
        }
        if user.is_some_and(|user| user.chars().any(|c| c.is_whitespace() || c.is_control())) {
            return Err(format!("`{}` has a user name with a space", text.escape_debug()));
        }
        let endpoint: Endpoint = host.parse()?;
        if endpoint.port().is_some() || host.starts_with('[') {
            return Err(format!(
                "`{text}` should be a host alone: -n sets the ranks of each host, and a port of ssh belongs into \
                 ~/.ssh/config or MGPU_SSH=\"ssh -p PORT\""
            ));
        }
        Ok(HostName { login: text.to_owned(), host: host.to_owned() })
    }
}

/// The hosts of a job, `a,b`: at least two, all different.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hosts(Vec<HostName>);

impl Hosts {
    pub(super) fn names(&self) -> &[HostName] {
        &self.0
    }

    /// The same hosts, with the one of this index in front.
    pub(super) fn with_first(&self, index: Option<usize>) -> Hosts {
        let mut names = self.0.clone();
        if let Some(index) = index {
            names[..=index].rotate_right(1);
        }
        Hosts(names)
    }
}

impl FromStr for Hosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<HostName> =
            text.split(',').map(|name| name.trim().parse()).collect::<Result<_, _>>()?;
        let is_repeated =
            |index: &usize| names[..*index].iter().any(|other| other.host == names[*index].host);
        if let Some(index) = (0..names.len()).find(is_repeated) {
            let host = &names[index].host;
            return Err(format!("host {host} is there twice; -n sets the number of ranks of each host"));
        }
        match names.len() {
            1 => Err(format!("one host, {}: --hosts is for at least two", names[0].host)),
            _ => Ok(Hosts(names)),
        }
    }
}

/// What the commands of all agents follow from.
pub(super) struct Agents<'a> {
    /// The hosts in the order of their node ranks.
    pub(super) hosts: &'a Hosts,
    /// Node 0 is this host.
    pub(super) first_is_here: bool,
    pub(super) ssh: &'a [OsString],
    /// The path of `mgpurun` on every host.
    pub(super) mgpurun: PathBuf,
    /// The working folder on every host.
    pub(super) folder: Option<PathBuf>,
    pub(super) endpoint: &'a str,
    /// The endpoint is among the options already.
    pub(super) chosen_endpoint: bool,
    /// `--nnodes` is among the options already.
    pub(super) chosen_nodes: bool,
    pub(super) run_id: &'a str,
    /// The silence after which the nodes take one of them for lost.
    pub(super) node_timeout: Duration,
    pub(super) options: &'a [OsString],
    pub(super) program: &'a [OsString],
}

/// The command of an agent.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AgentCommand {
    /// Its host, for messages.
    pub(super) host: String,
    /// It is started without ssh.
    pub(super) is_here: bool,
    /// Program and arguments.
    pub(super) words: Vec<OsString>,
}

impl Agents<'_> {
    /// The commands in the order of node ranks.
    pub(super) fn commands(&self) -> Vec<AgentCommand> {
        let names = self.hosts.names().iter().enumerate();
        let command = |(node, name): (usize, &HostName)| {
            let is_here = node == 0 && self.first_is_here;
            let agent = self.agent(node);
            let words = if is_here { agent } else { self.through_ssh(name, &agent) };
            AgentCommand { host: name.host.clone(), is_here, words }
        };
        names.map(command).collect()
    }

    /// The command on its own host.
    fn agent(&self, node: usize) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![self.mgpurun.clone().into()];
        let mut options = without_hosts(self.options);
        // A subcommand comes first, and `--` last.
        let subcommand = options.first().is_some_and(|word| word == "doctor");
        words.extend(subcommand.then(|| options.remove(0)));
        if !self.chosen_nodes {
            words.extend(["--nnodes", &self.hosts.names().len().to_string()].map(OsString::from));
        }
        words.extend(["--node-rank", &node.to_string()].map(OsString::from));
        if !self.chosen_endpoint {
            words.extend(["--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id].map(OsString::from));
        }
        words.extend(["--auth", "secret", "--secret-file", "-", "--attached"].map(OsString::from));
        words.extend(options);
        words.extend_from_slice(self.program);
        words
    }

    fn through_ssh(&self, name: &HostName, agent: &[OsString]) -> Vec<OsString> {
        let mut line = Vec::new();
        if let Some(folder) = &self.folder {
            line.extend_from_slice(b"cd ");
            line.extend(quote(folder.as_os_str()));
            line.extend_from_slice(b" || exit 126; ");
        }
        line.extend_from_slice(b"exec ");
        line.extend(shell_line(agent).into_vec());
        // Without a terminal on the other host, where the secret would appear. Nobody can answer a question of ssh.
        let options = ["-T", "-o", "BatchMode=yes"].map(OsString::from).into_iter();
        let options = options.chain(self.keep_alive()).chain([name.login().into(), OsString::from_vec(line)]);
        self.ssh.iter().cloned().chain(options).collect()
    }

    /// Without these options, ssh notices after hours that the other host has lost its power. The nodes themselves notice it
    /// earlier, and say which one it is.
    fn keep_alive(&self) -> Vec<OsString> {
        if !self.ssh.first().is_some_and(|program| Path::new(program).ends_with("ssh")) {
            return Vec::new();
        }
        let count = (self.node_timeout + LATER).as_secs().div_ceil(KEEP_ALIVE.as_secs());
        let interval = format!("ServerAliveInterval={}", KEEP_ALIVE.as_secs());
        let count = format!("ServerAliveCountMax={count}");
        ["-o", &interval, "-o", &count].map(OsString::from).into()
    }
}

/// The words without `--hosts a,b`, `--hosts=a,b` and `--dry-run`, which concern the starter alone. No other option takes
/// a value that begins with two dashes.
fn without_hosts(words: &[OsString]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_bytes().strip_prefix(FLAG) {
            Some(b"") => _ = words.next(),
            Some([b'=', ..]) => {}
            None if word == "--dry-run" => {}
            _ => kept.push(word.clone()),
        }
    }
    kept
}

/// The words as a line for a shell.
pub(super) fn shell_line(words: &[OsString]) -> OsString {
    let words: Vec<Vec<u8>> = words.iter().map(|word| quote(word)).collect();
    OsString::from_vec(words.join(&b' '))
}

/// A word, quoted for a shell. Words need not be text.
fn quote(word: &OsStr) -> Vec<u8> {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_./:,+@%".contains(byte);
    let bytes = word.as_bytes();
    if !bytes.is_empty() && bytes.iter().all(is_plain) {
        return bytes.to_vec();
    }
    let mut quoted = vec![b'\''];
    for byte in bytes {
        match byte {
            b'\'' => quoted.extend_from_slice(br"'\''"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn words(line: &[&str]) -> Vec<OsString> {
        line.iter().map(OsString::from).collect()
    }

    #[test]
    fn hosts_are_names_addresses_and_logins() {
        let hosts: Hosts = "a, me@b.example,fd00::2".parse().unwrap();
        let names: Vec<_> = hosts.names().iter().map(|name| (name.login(), name.host())).collect();
        assert_eq!(names, [("a", "a"), ("me@b.example", "b.example"), ("fd00::2", "fd00::2")]);
        let first: Vec<_> =
            hosts.with_first(Some(2)).names().iter().map(|name| name.host().to_owned()).collect();
        assert_eq!(first, ["fd00::2", "a", "b.example"]);
        assert_eq!(hosts.with_first(None), hosts);
        for (text, expected) in [
            ("a", "--hosts is for at least two"),
            ("a,", "the host is missing"),
            ("a,b:4", "-n sets the ranks of each host"),
            ("a,[fd00::2]", "should be a host alone"),
            ("a,-oProxyCommand=x", "neither HOST nor USER@HOST"),
            ("a,@b", "neither HOST nor USER@HOST"),
            ("a,x y@b", "a user name with a space"),
            ("a,b c", "that is no name of a host"),
            ("a,me@a", "host a is there twice"),
        ] {
            let error = text.parse::<Hosts>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn every_host_gets_the_same_command_line() {
        let hosts: Hosts = "a,me@b".parse().unwrap();
        let options = words(&[
            "-n",
            "2",
            "--hosts",
            "a,me@b",
            "--hosts=a,b",
            "--dry-run",
            "--log-dir",
            "my logs",
            "--",
        ]);
        let program = words(&["train it", "--hosts", "x", "it's"]);
        let agents = Agents {
            hosts: &hosts,
            first_is_here: true,
            ssh: &words(&["ssh", "-p", "2222"]),
            mgpurun: "/opt/mgpurun".into(),
            folder: Some("/home/me/a folder".into()),
            endpoint: "a",
            chosen_endpoint: false,
            chosen_nodes: false,
            run_id: "77",
            node_timeout: Duration::from_secs(95),
            options: &options,
            program: &program,
        };
        let own = |node| {
            format!(
                "/opt/mgpurun --nnodes 2 --node-rank {node} --rdzv-endpoint a --rdzv-id 77 --auth secret --secret-file - \
                 --attached -n 2 --log-dir 'my logs' -- 'train it' --hosts x 'it'\\''s'"
            )
        };
        let commands = agents.commands();
        assert!(commands[0].is_here && !commands[1].is_here);
        assert_eq!(shell_line(&commands[0].words), *own(0));
        assert_eq!(
            commands[1].words[..11],
            words(&[
                "ssh",
                "-p",
                "2222",
                "-T",
                "-o",
                "BatchMode=yes",
                "-o",
                "ServerAliveInterval=10",
                "-o",
                "ServerAliveCountMax=13",
                "me@b"
            ])
        );
        assert_eq!(
            commands[1].words[11..],
            [OsString::from(format!("cd '/home/me/a folder' || exit 126; exec {}", own(1)))]
        );
    }

    #[test]
    fn a_subcommand_stays_in_front() {
        let hosts: Hosts = "a,b".parse().unwrap();
        let options = words(&["doctor", "--nodes", "--hosts", "a,b", "--nnodes", "1:2"]);
        let agents = Agents {
            hosts: &hosts,
            first_is_here: false,
            ssh: &words(&["ssh"]),
            mgpurun: "/m".into(),
            folder: None,
            endpoint: "e:1",
            chosen_endpoint: true,
            chosen_nodes: true,
            run_id: "77",
            node_timeout: Duration::from_secs(95),
            options: &options,
            program: &[],
        };
        let line = agents.commands().remove(1).words.pop().unwrap();
        assert_eq!(
            line,
            "exec /m doctor --node-rank 1 --auth secret --secret-file - --attached --nodes --nnodes 1:2"
        );
    }

    proptest! {
        #[test]
        fn a_shell_gives_every_word_back(words in prop::collection::vec(prop::collection::vec(1u8.., 0..12), 1..6)) {
            let words: Vec<OsString> = words.into_iter().map(OsString::from_vec).collect();
            let mut script = OsString::from("printf '%s\\0' ");
            script.push(shell_line(&words));
            let output = Command::new("sh").arg("-c").arg(script).output().unwrap();
            let printed: Vec<&[u8]> = output.stdout.split(|byte| *byte == 0).collect();
            let expected: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).chain([&b""[..]]).collect();
            prop_assert_eq!(printed, expected);
        }
    }
}
