//! What connects the ranks of different hosts: TCP, which is built in, or UCX, a library that drives InfiniBand, RoCE and
//! EFA. Each node says what its host has; the coordinator decides for all.
//!
//! UCX is opened in a process of its own: opening it starts a thread, replaces functions of the C library, and may crash
//! if it is broken.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How long the process that opens UCX may take: its file may be on a file system that does not answer.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

/// The value of `--net`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NetChoice {
    /// UCX if all hosts have it and an RDMA device, else TCP.
    Auto,
    /// TCP.
    Tcp,
    /// UCX, or an error.
    Ucx,
}

impl NetChoice {
    pub(crate) fn name(self) -> &'static str {
        match self {
            NetChoice::Auto => "auto",
            NetChoice::Tcp => "tcp",
            NetChoice::Ucx => "ucx",
        }
    }
}

/// What a host has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostNet {
    pub(crate) choice: NetChoice,
    /// Its RDMA devices.
    rdma: Vec<String>,
    /// The version of UCX, or why it cannot be used and what to install. `None` if UCX is not wanted.
    ucx: Option<Result<String, String>>,
}

impl HostNet {
    /// Examines this host as far as `choice` needs it.
    pub(crate) fn examine(choice: NetChoice) -> Self {
        let rdma = if choice == NetChoice::Auto { rdma_devices() } else { Vec::new() };
        let wants_ucx = choice == NetChoice::Ucx || !rdma.is_empty();
        HostNet { choice, rdma, ucx: wants_ucx.then(ucx_version) }
    }

    /// A host where nothing needs to be examined.
    pub(crate) fn tcp() -> Self {
        HostNet { choice: NetChoice::Tcp, rdma: Vec::new(), ucx: None }
    }

    /// The version of UCX.
    ///
    /// # Errors
    /// Why it cannot be used.
    fn version(&self) -> Result<&str, &str> {
        match &self.ucx {
            Some(Ok(version)) => Ok(version),
            Some(Err(why)) => Err(why),
            None => Err("it was not searched for"),
        }
    }
}

/// The RDMA devices of this host.
pub(crate) fn rdma_devices() -> Vec<String> {
    ucx_sys::rdma_devices(Path::new("/"))
}

/// What the ranks use, and a line for the user if there was a choice. The hosts have names.
///
/// # Errors
/// If UCX is demanded and a host lacks it.
pub(crate) fn decide(hosts: &[(&str, &HostNet)]) -> Result<(NetChoice, Option<String>), String> {
    let Some((_, first)) = hosts.first().filter(|_| hosts.len() > 1) else {
        return Ok((NetChoice::Tcp, None));
    };
    let usable = common_version(hosts);
    match (first.choice, usable) {
        (NetChoice::Tcp, _) => Ok((NetChoice::Tcp, None)),
        (NetChoice::Ucx, Ok(_)) => Ok((NetChoice::Ucx, None)),
        (NetChoice::Ucx, Err(why)) => Err(format!("--net ucx: {why}")),
        (NetChoice::Auto, usable) => {
            let without: Vec<&str> =
                hosts.iter().filter(|(_, net)| net.rdma.is_empty()).map(|(host, _)| *host).collect();
            let tcp = |why: String| {
                Ok((NetChoice::Tcp, Some(format!("ranks of different hosts are connected by tcp: {why}"))))
            };
            match (without.as_slice(), usable) {
                (all, _) if all.len() == hosts.len() => tcp("no host has an RDMA device".into()),
                ([], Ok(version)) => {
                    let devices = first.rdma.join(", ");
                    let line = format!(
                        "ranks of different hosts are connected by ucx {version}: all hosts have RDMA devices ({devices} on {})",
                        hosts[0].0
                    );
                    Ok((NetChoice::Ucx, Some(line)))
                }
                ([], Err(why)) => tcp(why),
                (without, _) => tcp(format!("no RDMA device on {}", without.join(", "))),
            }
        }
    }
}

/// The version of UCX of the first host, if all have one of the same minor version.
fn common_version<'a>(hosts: &[(&str, &'a HostNet)]) -> Result<&'a str, String> {
    let minor = |version: &'a str| version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    let mut first: Option<(&str, &'a str)> = None;
    for (host, net) in hosts {
        let version = net.version().map_err(|why| format!("host {host} cannot use UCX: {why}"))?;
        match first {
            None => first = Some((host, version)),
            Some((known, other)) if minor(other) != minor(version) => {
                return Err(format!(
                    "UCX {other} on host {known}, {version} on host {host}: install the same version on all hosts"
                ));
            }
            Some(_) => {}
        }
    }
    first.map(|(_, version)| version).ok_or_else(|| "there is no host".into())
}

/// The version of this host's UCX, as ranks would find it.
///
/// # Errors
/// Why it cannot be used, and what to install.
pub(crate) fn ucx_version() -> Result<String, String> {
    let own = std::env::current_exe().map_err(|error| format!("its version is unknown ({error})"))?;
    let mut probe = Command::new(own);
    probe.args(["doctor", "--ucx-probe"]).stdin(Stdio::null()).stderr(Stdio::null());
    let unknown = |error: std::io::Error| format!("its version is unknown ({error})");
    let mut child = probe.stdout(Stdio::piped()).spawn().map_err(unknown)?;
    let started = Instant::now();
    let status = loop {
        match child.try_wait().map_err(unknown)? {
            Some(status) => break status,
            None if started.elapsed() < PROBE_LIMIT => std::thread::sleep(Duration::from_millis(2)),
            None => {
                let _ = child.kill();
                return Err(format!("opening it takes longer than {} s", PROBE_LIMIT.as_secs()));
            }
        }
    };
    let mut text = String::new();
    if let Some(mut output) = child.stdout.take() {
        output.read_to_string(&mut text).map_err(unknown)?;
    }
    let text = text.trim().to_owned();
    match status.code() {
        Some(0) => Ok(text),
        Some(_) if !text.is_empty() => Err(text),
        _ => Err(format!("opening it fails ({status}): is the installation complete?")),
    }
}

/// What the process of [`ucx_version`] prints: the version, or else why there is none.
pub(crate) fn probe_ucx() -> Result<String, String> {
    let ucx = ucx_sys::Library::open().map_err(|error| error.to_string())?;
    let unusable =
        |error: ucx_sys::UcxError| format!("UCX {} ({}) does not work: {error}", ucx.version(), ucx.origin());
    // What ranks make: an interface may be down, or memory must not be locked.
    ucx_sys::Worker::new(&ucx_sys::Context::new(&ucx, 1).map_err(unusable)?).map_err(unusable)?;
    Ok(ucx.version().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(choice: NetChoice, rdma: &[&str], ucx: Result<&str, &str>) -> HostNet {
        let rdma = rdma.iter().map(ToString::to_string).collect();
        HostNet { choice, rdma, ucx: Some(ucx.map(Into::into).map_err(Into::into)) }
    }

    fn decided(a: HostNet, b: HostNet) -> (NetChoice, String) {
        let (net, line) = decide(&[("a", &a), ("b", &b)]).unwrap();
        (net, line.unwrap_or_default())
    }

    #[test]
    fn auto_takes_ucx_if_all_hosts_have_it_and_a_device() {
        use NetChoice::{Auto, Tcp, Ucx};
        let good = || host(Auto, &["mlx5_0"], Ok("1.13.1"));
        for (other, net, reason) in [
            (
                host(Auto, &["mlx5_0"], Ok("1.13.0")),
                Ucx,
                "by ucx 1.13.1: all hosts have RDMA devices (mlx5_0 on a)",
            ),
            (host(Auto, &[], Err("")), Tcp, "by tcp: no RDMA device on b"),
            (host(Auto, &["x"], Err("not found")), Tcp, "by tcp: host b cannot use UCX: not found"),
            (host(Auto, &["x"], Ok("1.22.0")), Tcp, "by tcp: UCX 1.13.1 on host a, 1.22.0 on host b"),
        ] {
            let (found, line) = decided(good(), other);
            assert!(found == net && line.contains(reason), "{line}");
        }
        let none = || HostNet { ucx: None, ..host(Auto, &[], Ok("")) };
        let (net, line) = decided(none(), none());
        assert!(net == Tcp && line.ends_with("by tcp: no host has an RDMA device"), "{line}");
        // A job that goes on with one host.
        assert_eq!(decide(&[("a", &good())]), Ok((Tcp, None)));
    }

    #[test]
    fn a_demanded_network_is_used_silently_or_an_error_names_the_host() {
        use NetChoice::{Tcp, Ucx};
        assert_eq!(decided(HostNet::tcp(), HostNet::tcp()), (Tcp, String::new()));
        let good = || host(Ucx, &[], Ok("1.22.0"));
        assert_eq!(decided(good(), good()), (Ucx, String::new()));
        let bad = host(Ucx, &[], Err("UCX cannot be loaded (…): apt install libucx0"));
        let error = decide(&[("a", &good()), ("b", &bad)]).unwrap_err();
        assert_eq!(error, "--net ucx: host b cannot use UCX: UCX cannot be loaded (…): apt install libucx0");
    }
}
