//! How the ranks of a communicator connect over UCX.
//!
//! Every rank publishes the address of its worker with a random secret at the rendezvous, and reads those of all others.
//! From the secrets follow the tags by which a rank knows the others' messages ([`tags`](super::tags)). Then all greet each
//! other: a rank has connected once it has a greeting of every other one. While it waits it watches the progress page as in
//! any wait.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ucx_sys::{Context, Library, UcxError, Version, Worker};
use xxhash_rust::xxh3::xxh3_64;

use super::UcxWire;
use super::links::{Contact, Links, UcxSender};
use super::tags::{SECRET_BYTES, Secret, ticket};
use crate::comm::Members;
use crate::comm::hosts::frame::Stamp;
use crate::comm::hosts::wire::spin::Spinner;
use crate::membership::Membership;
use crate::{Error, Result};

/// Longest wait between two checks of the progress page.
const SLICE: Duration = Duration::from_millis(20);
/// How long a peer that has published its address may take to greet.
const CONNECT_TIME: Duration = Duration::from_secs(30);
/// Endpoints for which UCX plans: it takes other transports for very many.
const ENDPOINTS: usize = 64;

/// UCX in this process, which all its ranks and communicators share.
///
/// # Errors
/// Why it cannot be used, and what to install.
pub(in super::super::super) fn open() -> Result<&'static Arc<Context>, String> {
    static CONTEXT: OnceLock<Result<Arc<Context>, String>> = OnceLock::new();
    let open = || {
        let library = Library::open().map_err(|error| error.to_string())?;
        Context::new(&library, ENDPOINTS).map_err(|error| {
            format!(
                "UCX {} ({}) finds no device to use: {error} (UCX_TLS and UCX_NET_DEVICES exclude devices)",
                library.version(),
                library.origin()
            )
        })
    };
    CONTEXT.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// What a rank publishes for all others.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Invitation {
    version: Version,
    secret: Secret,
    /// The address of its worker.
    address: Vec<u8>,
}

impl Invitation {
    /// Ends with a checksum, because UCX does not check what it gets.
    fn encode(&self) -> Vec<u8> {
        let Version { major, minor, patch } = self.version;
        let version = [major, minor, patch].map(u32::to_le_bytes);
        let bytes = [version.as_flattened(), &self.secret, &self.address].concat();
        let checksum = xxh3_64(&bytes).to_le_bytes();
        [&bytes[..], &checksum].concat()
    }

    /// Reverses [`encode`](Self::encode).
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (bytes, checksum) = bytes.split_last_chunk::<8>()?;
        if xxh3_64(bytes).to_le_bytes() != *checksum {
            return None;
        }
        let (version, rest) = bytes.split_first_chunk::<12>()?;
        let (secret, address) = rest.split_first_chunk::<SECRET_BYTES>()?;
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| version[at + index]));
        let version = Version { major: number(0), minor: number(4), patch: number(8) };
        Some(Invitation { version, secret: *secret, address: address.to_vec() })
    }
}

/// Connects this rank with the other `members` of the communicator called `key`.
pub(in super::super::super) fn connect(
    membership: &Membership,
    (members, stamp): (&Members, Stamp),
    (key, title): (&str, &str),
    spinner: Spinner,
    timeout: Duration,
) -> Result<UcxWire> {
    let failed = |error: UcxError| Error::system("connect ranks over UCX", std::io::Error::other(error));
    let context = open().map_err(|error| Error::system("use UCX", std::io::Error::other(error)))?;
    let worker = Worker::new(context).map_err(failed)?;
    let events = worker
        .event_fd()
        .try_clone_to_owned()
        .map_err(|error| Error::system("copy UCX's descriptor", error))?;
    let secret = crate::protocol::new_run_id()?.into_bytes();
    let own = Invitation {
        version: context.library().version(),
        secret: secret.try_into().expect("an identifier of 32 digits"),
        address: worker.address().map_err(failed)?,
    };
    let (rank, store) = (members.rank(), membership.store());
    let entry = |rank: u32| format!("{key}/ucx-{rank}");
    store.set(&entry(rank), &own.encode(), &[], members.size() - 1)?;
    let mut contacts = Vec::new();
    for peer in 0..members.size() {
        if peer == rank {
            contacts.push(None);
            continue;
        }
        let from = members.world_rank(peer);
        let (value, _) = store.get(&entry(peer), from, timeout)?;
        let invitation = Invitation::decode(&value).ok_or_else(|| Error::Protocol {
            peer: format!("rank {from}"),
            problem: "its address is not that of a rank over UCX".into(),
        })?;
        check_version(&own, &invitation, (membership.rank(), from))?;
        contacts.push(Some(Contact {
            ticket_to: ticket(&invitation.secret, rank),
            ticket_from: ticket(&own.secret, peer),
            address: invitation.address,
        }));
    }
    let links = Links::connect(worker, contacts).map_err(|(peer, error)| Error::PeerLost {
        rank: membership.rank(),
        peer: members.world_rank(peer),
        operation: format!("the connection of {title}"),
        how: format!(
            "cannot be reached over UCX: {error} (does UCX_NET_DEVICES name a device of the hosts' common network?)"
        ),
        silent: false,
    })?;
    let links = Arc::new(UcxSender::new(stamp, events, links));
    greet(membership, members, &links, title, timeout)?;
    Ok(UcxWire::new(links, spinner))
}

/// Checks that both ranks' libraries understand each other's addresses.
fn check_version(own: &Invitation, theirs: &Invitation, (rank, peer): (u32, u32)) -> Result<()> {
    if own.version.is_compatible(theirs.version) {
        return Ok(());
    }
    let problem = format!(
        "is ucx, but rank {rank} has UCX {} and rank {peer} has UCX {}: install the same version on all hosts, or use tcp",
        own.version, theirs.version
    );
    Err(Error::Environment { name: crate::protocol::MGPU_NET, problem })
}

/// Greets all peers, and waits for their greetings.
fn greet(
    membership: &Membership,
    members: &Members,
    links: &UcxSender,
    title: &str,
    timeout: Duration,
) -> Result<()> {
    let started = Instant::now();
    let operation = || format!("the connection of {title}");
    let rank = membership.rank();
    links.lock().greet();
    // Nobody sends this rank's own greetings later, while it works in another communicator. They may only not be confirmed.
    let is_done = |links: &Links| {
        links.silent_peers().is_empty() && (links.has_sent_all() || started.elapsed() >= CONNECT_TIME)
    };
    while !links.drive(SLICE, is_done) {
        let held = links.lock();
        let silent = held.silent_peers();
        let failed = silent.iter().find_map(|peer| Some((*peer, held.failure(*peer)?)));
        drop(held);
        let missing: Vec<u32> = silent.iter().map(|peer| members.world_rank(*peer)).collect();
        if let Some(peer) = missing.first() {
            membership.page().wait(rank, *peer);
        }
        if let Some(error) = membership.lost_peer(&missing, operation) {
            return Err(error);
        }
        let waited = started.elapsed();
        let unreachable = match failed {
            Some((peer, failure)) if waited >= Duration::from_secs(1) => Some((peer, failure)),
            _ if waited >= timeout.min(CONNECT_TIME) => {
                silent.first().map(|peer| (*peer, "no greeting arrives".to_owned()))
            }
            _ => None,
        };
        if let Some((peer, why)) = unreachable {
            let how = format!(
                "cannot be reached over UCX: {why} (do the hosts' firewalls let ranks connect to each other, and does \
                 UCX_NET_DEVICES name a device of the hosts' common network?)"
            );
            let peer = members.world_rank(peer);
            return Err(Error::PeerLost { rank, peer, operation: operation(), how, silent: false });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitations_survive_the_rendezvous_and_nothing_else_is_one() {
        let version = Version { major: 1, minor: 13, patch: 1 };
        let invitation = Invitation { version, secret: [7; SECRET_BYTES], address: vec![3; 100] };
        let bytes = invitation.encode();
        assert_eq!(Invitation::decode(&bytes), Some(invitation));
        for length in 0..bytes.len() {
            assert_eq!(Invitation::decode(&bytes[..length]), None);
        }
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            assert_eq!(Invitation::decode(&changed), None);
        }
    }

    #[test]
    fn different_minor_versions_are_an_error_that_names_both() {
        let with = |minor| Invitation {
            version: Version { major: 1, minor, patch: 0 },
            secret: [0; SECRET_BYTES],
            address: Vec::new(),
        };
        assert!(check_version(&with(13), &with(13), (0, 1)).is_ok());
        let error = check_version(&with(13), &with(22), (0, 1)).unwrap_err().to_string();
        assert!(error.contains("rank 0 has UCX 1.13.0 and rank 1 has UCX 1.22.0"), "{error}");
    }
}
