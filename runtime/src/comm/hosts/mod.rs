//! Collectives of ranks on several hosts, over TCP or UCX.
//!
//! Each pair of ranks of a communicator has a connection. Every collective begins with an arrival ([`agree`]): a rank
//! tells its call to all others, waits for theirs and compares. Ranks of one host tell each other in shared memory, and one
//! of them tells those of other hosts ([`gathering`]). Small payloads are sent with the arrival; the pieces of large ones
//! follow when the receiver has arrived, directly to where they belong.
//!
//! | file | question |
//! |---|---|
//! | [`connect`], [`acceptor`], [`hello`] | how do ranks connect, and who is rejected? |
//! | [`frame`] | what do the bytes of a connection mean? |
//! | [`transfer`], [`wire`] | how do posted sends and receives progress without blocking? |
//! | [`wait`], [`deadlock`] | how does a wait end if a peer fails, or calls can never meet? |
//! | [`gathering`], [`arrivals`], [`board`], [`bundle`], [`dissemination`] | how does a rank learn that others have arrived? |
//! | [`agree`], [`collectives`], [`moves`], [`reductions`], [`direct`], [`messages`] | what does each operation exchange? |
//! | [`runs`], [`house`], [`chain`] | how do ranks of one host share the work? |
//!
//! Nothing but [`wire`] and [`connect`] knows of sockets and UCX: operations
//! post transfers and wait for them.

mod acceptor;
mod agree;
mod arrivals;
mod board;
mod bundle;
mod chain;
mod collectives;
mod connect;
mod deadlock;
mod direct;
mod dissemination;
mod family;
mod frame;
mod gathering;
mod hello;
mod house;
mod messages;
mod moves;
mod reductions;
mod runs;
#[cfg(test)]
#[macro_use]
mod tests;
#[cfg(test)]
mod layout_tests;
mod transfer;
mod wait;
mod wire;

use std::cell::Cell;
use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use acceptor::Acceptor;
use agree::Peer;
use family::Family;
use frame::Stamp;
use gathering::Gathering;
use house::House;
use runs::Runs;
use transfer::Transfer;
use wait::Wait;
use wire::Wire;
pub use wire::choice::Net;
use wire::spin::Spinner;
use wire::tcp::TcpWire;
use wire::ucx;

use super::call::{Call, Request};
use super::rules::FailureHandler;
use super::signature::{SIGNATURE_WORDS, Signature};
use super::split::{Members, SplitGroup};
use super::{Buffer, Capabilities, Communicator, DType, Rules, Transport};
use crate::membership::Membership;
use crate::progress::Operation;
use crate::{Error, Result};

/// Numbers of groups begin here, so that they differ from those of the world's communicators.
const FIRST_GROUP: u32 = 1 << 16;
/// How long a communicator that is dropped waits until its last bytes have arrived: as long as a connection may be interrupted.
/// A rank that has left is blamed by those that still need something of it.
const CLOSE_PATIENCE: Duration = Duration::from_secs(6);
/// The same after an error.
const ABORT_PATIENCE: Duration = Duration::from_millis(100);

/// How this rank is reached by those of other hosts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostAddress {
    /// The address of this host.
    pub(crate) address: IpAddr,
    /// Number of ranks on this host.
    pub(crate) local_ranks: u32,
    /// A hash of the run's identifier.
    pub(crate) run: u64,
    /// How often the ranks were restarted.
    pub(crate) epoch: u32,
    /// The wire to use.
    pub(crate) net: Net,
}

/// The listener of a rank, after its first communicator.
#[derive(Debug, Default)]
pub(crate) struct Listener(Mutex<Option<Arc<Acceptor>>>);

impl Listener {
    fn get(&self, host: HostAddress, rank: u32) -> Result<Arc<Acceptor>> {
        let mut acceptor = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if acceptor.is_none() {
            *acceptor = Some(Arc::new(Acceptor::bind(host.address, host.run, rank)?));
        }
        Ok(Arc::clone(acceptor.as_ref().expect("it was just made")))
    }
}

/// The transport of one rank.
pub(crate) struct HostsTransport {
    membership: Arc<Membership>,
    host: HostAddress,
    members: Members,
    /// Number of the communicator among those of this rank.
    number: u32,
    /// Names it at the rendezvous.
    key: String,
    /// Names it in messages.
    title: String,
    runs: Runs,
    /// What this rank shares with the others of its run, if there are others.
    house: Option<House>,
    /// Number of barriers of the house that this rank has come to.
    barriers: u32,
    /// Number of arenas that were allocated.
    arenas: u32,
    family: Arc<Family>,
    wire: Box<dyn Wire>,
    timeout: Duration,
    /// Sequence number of the last collective that was entered.
    sequence: u32,
    /// By rank.
    peers: Vec<Peer>,
    gathering: Gathering,
    /// Number of waits so far, and the one in progress.
    waits: u32,
    waiting: Option<Wait>,
    /// Whether the wait in progress is on the progress page.
    has_noted_wait: bool,
    /// The last wait that has sent probes, and when.
    probed: (u32, Option<Instant>),
    /// The ranks for which the wait in progress was found to wait.
    blocked_by: Vec<u32>,
    /// A cycle of waits with this rank: the next rank in it, and that rank's call.
    cycle: Option<(u32, [u64; SIGNATURE_WORDS])>,
    /// Memory for contributions of other ranks, kept between reductions.
    staging: Option<Buffer>,
    /// Bytes of payload from other ranks.
    received_bytes: u64,
    /// Where to store the time at which all ranks had arrived, if requested.
    arrival: Option<Arc<AtomicU64>>,
    /// Whether, at the last mismatch, some other call was made by more ranks than this rank's: then this rank is at
    /// fault and must not blame the others.
    in_minority: Cell<bool>,
    /// This rank's call at the last mismatch.
    differing_call: Cell<Option<[u64; SIGNATURE_WORDS]>>,
    failed: Cell<bool>,
}

/// Connects communicator `number` of a world of `size` ranks.
pub(crate) fn connect(
    membership: &Arc<Membership>,
    host: HostAddress,
    size: u32,
    number: u32,
    timeout: Duration,
) -> Result<Communicator> {
    let key = format!("communicator-{number}");
    membership.check_process()?;
    let (members, page) = (membership.everyone(size), membership.page());
    let rank = members.rank();
    page.enter(rank, Operation::Connect, number, 0);
    let family = Arc::new(Family::default());
    let names = (key.as_str(), key.as_str());
    let transport =
        HostsTransport::connect(membership, host, (members.clone(), number), names, family, timeout);
    let transport = transport.inspect_err(|error| {
        membership.record_blame(error);
        membership.delay_error(error);
    })?;
    page.leave(rank);
    let rules = Rules::new(Some(Arc::clone(membership)), rank);
    Ok(Communicator::new(transport, members, Arc::new(rules)))
}

impl HostsTransport {
    /// Connects the communicator of these members and this number. `key` names it at the rendezvous, `title` in
    /// messages.
    fn connect(
        membership: &Arc<Membership>,
        host: HostAddress,
        (members, number): (Members, u32),
        (key, title): (&str, &str),
        family: Arc<Family>,
        timeout: Duration,
    ) -> Result<Self> {
        let stamp = Stamp { epoch: host.epoch, communicator: number };
        // A group's members have agreed as those of its parent.
        let net = wire::choice::agree(membership, &members, key, host.net, timeout)?;
        let host = HostAddress { net, ..host };
        let wire: Box<dyn Wire> = if net == Net::Ucx {
            let spinner = Spinner::new(membership.rank(), host.local_ranks);
            Box::new(ucx::connect(membership, (&members, stamp), (key, title), spinner, timeout)?)
        } else {
            let acceptor = membership.listener.get(host, membership.rank())?;
            let place = (&members, stamp, host.run);
            let streams = connect::connect(membership, &acceptor, place, (key, title), timeout)?;
            Box::new(TcpWire::new(stamp, streams))
        };
        let layout = membership.store().layout().filter(|layout| !layout.is_one_host());
        let host_of = |rank: &u32| layout.map_or(0, |layout| layout.node_of(*rank));
        let runs = Runs::new(members.world_ranks().iter().map(host_of), members.rank());
        let own = runs.own();
        let house =
            (own.len() > 1).then(|| House::connect(membership, &members, own, key, timeout)).transpose()?;
        family.add(wire.sender());
        Ok(HostsTransport {
            membership: Arc::clone(membership),
            host,
            number,
            key: key.to_owned(),
            title: title.to_owned(),
            runs,
            house,
            barriers: 0,
            arenas: 0,
            family,
            wire,
            timeout,
            sequence: 0,
            peers: (0..members.size()).map(|_| Peer::default()).collect(),
            gathering: Gathering::default(),
            members,
            waits: 0,
            waiting: None,
            has_noted_wait: false,
            probed: (0, None),
            blocked_by: Vec::new(),
            cycle: None,
            staging: None,
            received_bytes: 0,
            arrival: None,
            in_minority: Cell::new(false),
            differing_call: Cell::new(None),
            failed: Cell::new(false),
        })
    }

    /// The other ranks, beginning with the next one.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, size) = (self.members.rank(), self.members.size());
        (1..size).map(move |distance| (rank + distance) % size)
    }

    /// Whether it was split from another communicator.
    fn is_group(&self) -> bool {
        self.number >= FIRST_GROUP
    }

    /// Nothing to send or to receive.
    fn empty_transfer(&self) -> Transfer<'static> {
        Transfer::new(self.members.size(), self.sequence, [0; SIGNATURE_WORDS], [0; SIGNATURE_WORDS])
    }

    /// The error of a peer whose small payload has another length than its call says.
    #[cold]
    fn short_payload(&self, from: u32) -> Error {
        let problem = "a payload of another length than its call says".into();
        Error::Protocol { peer: format!("rank {}", self.members.world_rank(from)), problem }
    }
}

impl FailureHandler for HostsTransport {
    fn abort(&self) {
        // Nor need this rank's NCCL communicators wait for peers.
        #[cfg(feature = "cuda")]
        self.membership.collectives.fail();
        self.failed.set(true);
        self.announce_abort();
    }

    fn is_at_fault(&self, error: &Error) -> bool {
        matches!(error, Error::Mismatch { .. }) && self.in_minority.get()
    }
}

impl Transport for HostsTransport {
    fn backend(&self) -> &'static str {
        "cpu"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shares_memory: false,
            sums_in_rank_order: true,
            device_buffers: false,
            shares_cores: false,
            crosses_network: true,
        }
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.allocate_in_house(dtype, len)
    }

    fn connect_group(&mut self, group: &SplitGroup, rules: Rules) -> Result<Communicator> {
        let (key, title) = (group.key(), group.title());
        let place = (group.members.clone(), FIRST_GROUP + group.number);
        let transport = Self::connect(
            &self.membership,
            self.host,
            place,
            (&key, &title),
            Arc::clone(&self.family),
            self.timeout,
        )?;
        Ok(Communicator::new(transport, group.members.clone(), Arc::new(rules)))
    }

    fn submit(&mut self, request: &mut Request<'_>) -> Result<()> {
        let Request { call, buffer, .. } = request;
        let signature = &Signature::of(call, buffer).without_location();
        match *call {
            Call::AllReduce(op) => self.all_reduce(buffer, op, signature),
            Call::ReduceScatter(op) => self.reduce_scatter(buffer, op, signature),
            Call::Reduce { op, root, .. } => self.reduce(buffer, op, root, signature),
            Call::Send { to } => self.send_message(buffer, to, signature),
            Call::Recv { from } => self.receive_message(buffer, from, signature),
            Call::SendRecv { from, peer } => self.send_and_receive(from, buffer, peer, signature),
            _ => self.move_parts(call, buffer),
        }
    }

    fn set_oversubscribed(&mut self) {
        self.wire.set_oversubscribed();
    }

    fn traffic(&self) -> Option<u64> {
        Some(self.received_bytes)
    }

    fn record_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.arrival = Some(at);
    }
}

impl Drop for HostsTransport {
    /// Peers get everything that this rank has sent.
    fn drop(&mut self) {
        // A forked child has copies of the connections; they are the parent's.
        if self.membership.check_process().is_ok() {
            self.wire.sender().close(if self.failed.get() { ABORT_PATIENCE } else { CLOSE_PATIENCE });
        }
    }
}
