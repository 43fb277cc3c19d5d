//! Which wire the ranks of several hosts use.
//!
//! `mgpurun` knows all hosts and tells its ranks `tcp` or `ucx`. Without it ranks agree among themselves: each says what
//! its host has, and rank 0 of the communicator decides for all.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use super::ucx;
use crate::comm::Members;
use crate::membership::Membership;
use crate::{Error, Result};

/// What ranks of different hosts use: the values of `MGPU_NET`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Net {
    /// UCX if all hosts have it and an RDMA device, else TCP.
    #[default]
    Auto,
    /// TCP, without any library.
    Tcp,
    /// UCX, or an error.
    Ucx,
}

impl FromStr for Net {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Net::Auto),
            "tcp" => Ok(Net::Tcp),
            "ucx" => Ok(Net::Ucx),
            _ => Err(format!("is `{text}`; known are auto, tcp and ucx")),
        }
    }
}

/// What rank 0 decides, by what all ranks have published: the version of UCX, or nothing.
fn decide(versions: &[String]) -> Net {
    // Releases of one minor version understand each other.
    let minor = |version: &String| version.rsplit_once('.').map(|(minor, _)| minor.to_owned());
    let first = versions.first().and_then(minor);
    match first.is_some() && versions.iter().all(|version| minor(version) == first) {
        true => Net::Ucx,
        false => Net::Tcp,
    }
}

/// The wire of the communicator of these members, which `key` names at the rendezvous: [`Net::Tcp`] or [`Net::Ucx`].
///
/// # Errors
/// If UCX is demanded and cannot be used.
pub(in super::super) fn agree(
    membership: &Membership,
    members: &Members,
    key: &str,
    wish: Net,
    timeout: Duration,
) -> Result<Net> {
    match wish {
        Net::Tcp => return Ok(Net::Tcp),
        Net::Ucx => {
            ucx::open().map_err(|problem| {
                let host = nix::unistd::gethostname().unwrap_or_default();
                let problem = format!("is ucx, but on host {}: {problem}", host.display());
                Error::Environment { name: crate::protocol::MGPU_NET, problem }
            })?;
            return Ok(Net::Ucx);
        }
        Net::Auto => {}
    }
    let has_device = || !ucx_sys::rdma_devices(Path::new("/")).is_empty();
    let version = || Some(ucx::open().ok()?.library().version().to_string());
    let own = has_device().then(version).flatten().unwrap_or_default();
    let (rank, size, store) = (members.rank(), members.size(), membership.store());
    let decision = format!("{key}/net");
    let entry = |rank: u32| format!("{key}/net-{rank}");
    if rank > 0 {
        store.set(&entry(rank), own.as_bytes(), &[], 1)?;
        let first = members.world_rank(0);
        let (decided, _) = store.get(&decision, first, timeout)?;
        return String::from_utf8_lossy(&decided).parse().map_err(|problem| Error::Protocol {
            peer: format!("rank {first}"),
            problem: format!("a choice of the network that {problem}"),
        });
    }
    let mut versions = vec![own];
    for peer in 1..size {
        let (version, _) = store.get(&entry(peer), members.world_rank(peer), timeout)?;
        versions.push(String::from_utf8_lossy(&version).into_owned());
    }
    let net = decide(&versions);
    let text: &[u8] = if net == Net::Ucx { b"ucx" } else { b"tcp" };
    store.set(&decision, text, &[], size - 1)?;
    Ok(net)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_is_chosen_if_all_hosts_have_the_same_minor_version() {
        for (versions, expected) in [
            (&["1.13.1", "1.13.0"][..], Net::Ucx),
            (&["1.13.1", "1.14.0"], Net::Tcp),
            (&["1.13.1", ""], Net::Tcp),
            (&["", ""], Net::Tcp),
        ] {
            let versions: Vec<String> = versions.iter().map(ToString::to_string).collect();
            assert_eq!(decide(&versions), expected, "{versions:?}");
        }
    }
}
