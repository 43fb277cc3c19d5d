//! PMI-1, the protocol in which a process of MPICH or Intel MPI asks its `mpiexec.hydra` about the others.
//!
//! It is text: a line `cmd=get kvsname=x key=y`, answered by a line. Hydra passes each process a connected socket,
//! whose number is in `PMI_FD`. The processes share a store of keys and values, in which every `put` before a barrier is
//! seen by every `get` behind it. That is all that the agents need: node 0 puts its addresses, and the others get them.
//! The name of the store identifies the job.
//!
//! The session ends before the ranks start. For hydra each agent is an MPI process that has called `MPI_Finalize`.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::addresses::{OwnAddress, in_own_subnet, nearest, own_addresses};
use super::settings::{NodeSettings, Ports, SettingsError, Surroundings};

/// The key of node 0's name and addresses.
const KEY: &str = "mgpurun-node-0";
/// The longest line; values have at most 1024 bytes.
const MAX_LINE: u64 = 8192;
/// The longest value of the store, by the defaults of hydra.
const MAX_VALUE: usize = 1000;

/// Asks `mpiexec` where node 0 is and what the job is called, and completes the settings. Waits until all agents ask, at
/// most for `timeout`.
///
/// # Errors
/// If the agents were not started by hydra, it does not answer, or another agent does not ask in time.
pub(crate) fn complete(
    settings: &mut NodeSettings,
    surroundings: &Surroundings<'_>,
    timeout: Duration,
) -> Result<(), SettingsError> {
    let failed = |error: io::Error| {
        SettingsError::new(format!(
            "mpiexec does not tell where node 0 is: {error}; add --rdzv-endpoint HOST[:PORT], the same on all nodes"
        ))
    };
    let is_first = settings.node_rank == Some(0);
    let own = own_addresses();
    // The name in mpiexec's list of hosts.
    let name = surroundings.text("MPIR_CVAR_CH3_INTERFACE_HOSTNAME");
    let published = is_first.then(|| describe(name.as_deref(), &own));
    let stream = connect(surroundings, timeout).map_err(failed)?;
    let found = exchange(&stream, published.as_deref()).map_err(failed)?;
    let host = choose(&found.value, &own)
        .ok_or_else(|| failed(io::Error::other(format!("the addresses of node 0 are `{}`", found.value))))?;
    settings.endpoint = Some((host, Ports::OfJob));
    settings.sources.push(("endpoint", "PMI_FD".into()));
    if settings.run_id.is_none() {
        settings.run_id = Some(found.kvs_name);
        settings.sources.push(("run id", "PMI_FD".into()));
    }
    Ok(())
}

/// The socket to hydra, with `timeout` for each answer.
fn connect(surroundings: &Surroundings<'_>, timeout: Duration) -> io::Result<UnixStream> {
    let text =
        surroundings.text("PMI_FD").ok_or_else(|| io::Error::other("the variable PMI_FD is not set"))?;
    let number = text.trim().parse();
    let number =
        number.map_err(|_| io::Error::other(format!("the variable PMI_FD is `{text}`, not a number")))?;
    let stream = mgpu_control::process::inherited_stream(number)
        .map_err(|error| io::Error::other(format!("the variable PMI_FD is {text}: {error}")))?;
    // A timeout of zero would mean none.
    stream.set_read_timeout(Some(timeout.max(Duration::from_secs(1))))?;
    Ok(stream)
}

/// The name and the addresses of this node: `n0,192.0.2.2,fd00::2`.
fn describe(name: Option<&str>, own: &[OwnAddress]) -> String {
    let mut text = name.unwrap_or_default().to_owned();
    for own in own {
        let address = own.address.to_string();
        if text.len() + address.len() < MAX_VALUE {
            text = format!("{text},{address}");
        }
    }
    text
}

/// The host of node 0 by which this node reaches it: an address in a subnet of its own, else the name, else the nearest
/// address. If all addresses of node 0 are this node's own, both are on one host, and any will do.
fn choose(described: &str, own: &[OwnAddress]) -> Option<String> {
    let (name, addresses) = described.split_once(',').unwrap_or((described, ""));
    let theirs: Vec<IpAddr> = addresses.split(',').filter_map(|address| address.parse().ok()).collect();
    let ours: Vec<IpAddr> = own.iter().map(|own| own.address).collect();
    let name = (!name.is_empty()).then(|| name.to_owned());
    let near = in_own_subnet(&theirs, own).map(|address| address.to_string());
    let nearest = nearest(&theirs, &ours).map(|address| address.to_string());
    let is_here = theirs.iter().all(|address| ours.contains(address));
    if is_here { nearest.or(name) } else { near.or(name).or(nearest) }
}

/// What the store has.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    kvs_name: String,
    /// What node 0 has published.
    value: String,
}

/// A whole session: publishes `published` if there is something, waits for all processes, and gets the value.
fn exchange(stream: impl Read + Write + Copy, published: Option<&str>) -> io::Result<Found> {
    let mut session = Session { reader: BufReader::new(stream), writer: stream };
    session.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")?;
    let answer = session.ask("cmd=get_my_kvsname", "my_kvsname")?;
    let kvs_name = field(&answer, "kvsname")
        .filter(|name| !name.is_empty())
        .ok_or_else(|| unexpected(&answer))?
        .to_owned();
    if let Some(value) = published {
        session.ask(&format!("cmd=put kvsname={kvs_name} key={KEY} value={value}"), "put_result")?;
    }
    session.ask("cmd=barrier_in", "barrier_out")?;
    let answer = session.ask(&format!("cmd=get kvsname={kvs_name} key={KEY}"), "get_result")?;
    let value = field(&answer, "value").ok_or_else(|| unexpected(&answer))?.to_owned();
    session.ask("cmd=finalize", "finalize_ack")?;
    Ok(Found { kvs_name, value })
}

struct Session<R, W> {
    reader: BufReader<R>,
    writer: W,
}

impl<R: Read, W: Write> Session<R, W> {
    /// Sends a line and returns the answer, which must be the command `expected` without an error.
    fn ask(&mut self, line: &str, expected: &str) -> io::Result<String> {
        self.writer.write_all(format!("{line}\n").as_bytes())?;
        let mut answer = String::new();
        let asked = field(line, "cmd").unwrap_or_default();
        let read =
            (&mut self.reader).take(MAX_LINE).read_line(&mut answer).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock if asked == "barrier_in" => {
                    io::Error::other("not all nodes have started mgpurun in time")
                }
                io::ErrorKind::WouldBlock => io::Error::other(format!("no answer to {asked} in time")),
                _ => error,
            })?;
        if read == 0 {
            return Err(io::Error::other(format!(
                "mpiexec has closed the connection instead of answering {asked}"
            )));
        }
        let is_success = field(&answer, "rc").is_none_or(|code| code == "0");
        match field(&answer, "cmd") {
            Some(command) if command == expected && is_success => Ok(answer),
            _ => Err(unexpected(&answer)),
        }
    }
}

fn unexpected(answer: &str) -> io::Error {
    io::Error::other(format!("it answers `{}`", answer.trim_end().escape_debug()))
}

/// The value of a key in a line of `key=value`.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// A session with a server that gives these answers, and what it was asked.
    fn session(answers: &[&str], published: Option<&str>) -> (io::Result<Found>, Vec<String>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answers: Vec<String> = answers.iter().map(|answer| (*answer).to_owned()).collect();
        let server = thread::spawn(move || {
            let mut asked = Vec::new();
            let mut reader = BufReader::new(&theirs);
            for answer in answers {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                asked.push(line);
                (&theirs).write_all(answer.as_bytes()).unwrap();
            }
            asked
        });
        let found = exchange(&ours, published);
        drop(ours);
        (found, server.join().unwrap())
    }

    const INIT: &str = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
    const NAME: &str = "cmd=my_kvsname kvsname=kvs_1_0\n";

    #[test]
    fn node_0_publishes_and_all_get() {
        let answers = [
            INIT,
            NAME,
            "cmd=put_result rc=0 msg=success\n",
            "cmd=barrier_out\n",
            "cmd=get_result rc=0 msg=success value=n0,192.0.2.2\n",
            "cmd=finalize_ack\n",
        ];
        let (found, asked) = session(&answers, Some("n0,192.0.2.2"));
        assert_eq!(found.unwrap(), Found { kvs_name: "kvs_1_0".into(), value: "n0,192.0.2.2".into() });
        assert_eq!(asked[2], "cmd=put kvsname=kvs_1_0 key=mgpurun-node-0 value=n0,192.0.2.2\n");
        let (found, asked) = session(&[&answers[..2], &answers[3..]].concat(), None);
        assert_eq!(found.unwrap().value, "n0,192.0.2.2");
        assert_eq!(asked[3], "cmd=get kvsname=kvs_1_0 key=mgpurun-node-0\n");
    }

    #[test]
    fn wrong_answers_are_errors() {
        for (answers, text) in [
            (&["cmd=response_to_init rc=-1\n"][..], "it answers `cmd=response_to_init rc=-1`"),
            (&["hello\u{1b}\n"], r"it answers `hello\u{1b}`"),
            (&[INIT, "cmd=my_kvsname\n"], "it answers `cmd=my_kvsname`"),
            (&[INIT, NAME, "cmd=barrier_out\n", "cmd=get_result rc=-1 msg=key_not_found\n"], "key_not_found"),
            (&[INIT, ""], ""),
        ] {
            let (found, _) = session(answers, None);
            let error = found.unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let error = exchange(&ours, None).unwrap_err().to_string();
        assert_eq!(error, "no answer to init in time");
    }

    #[test]
    fn an_address_in_an_own_subnet_precedes_the_name() {
        let own = [OwnAddress { address: "10.0.1.5".parse().unwrap(), host_bits: 8 }];
        for (described, host) in [
            ("n0,172.17.0.1,10.0.1.9", Some("10.0.1.9")),
            ("n0,172.17.0.1,10.0.2.9", Some("n0")),
            (",172.17.0.1,10.0.2.9", Some("10.0.2.9")),
            ("n0", Some("n0")),
            ("n0,10.0.1.5", Some("10.0.1.5")),
            ("", None),
        ] {
            assert_eq!(choose(described, &own).as_deref(), host, "{described}");
        }
        let described = describe(Some("n0"), &own);
        assert_eq!(described, "n0,10.0.1.5");
    }
}
