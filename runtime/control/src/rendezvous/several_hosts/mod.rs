//! The rendezvous of ranks that another launcher has started on several hosts, without `mgpurun`.
//!
//! On each host the first of its ranks runs the server of the host's ranks on a thread, under an abstract socket as on
//! one host. Nobody has told these processes which ranks are where, so the run begins with a gathering: rank 0's
//! thread listens at the endpoint, the others dial it, and each says which ranks its host has. When these are all
//! ranks of the world ([`arrangement`]), each host gets its number and the layout. From then on the links carry what
//! the servers say to the [`Hub`](crate::nodes::Hub) on rank 0's host ([`relaying`]).
//!
//! If the ranks use NCCL, the hosts then check whether they reach each other on the interface that it takes
//! ([`nccl_check`]). If not, the run does not start, or all ranks are told which interface to take.
//!
//! The ranks of a host connect to its socket while the hosts gather, and wait in its queue: the server is created when
//! the layout is known. If the gathering fails, all of them get the reason.
//!
//! A host is lost when its link ends, when the kernel finds that it does not answer, or when its thread has been silent
//! for [`HOST_TIMEOUT`]. All its ranks count as ended then. A thread ends after the last rank of its host; that of rank 0
//! ends after all others. Its process waits for it ([`RunningServer`](super::RunningServer)), so that a goodbye is not
//! mistaken for a death.

mod arrangement;
mod gathering;
mod host_link;
mod nccl_check;
mod relaying;

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use super::hosted::{owner, poll_timeout};
use super::listener::{ConnectionAttempt, Listener};
use super::message::{Reply, encode};
use super::server::Server;
use super::socket::Connection;
use crate::nccl::NcclEndpoint;
use crate::nodes::{Credentials, Endpoint};
use crate::process::start_failure;
use crate::{Error, Result};
use arrangement::Arrival;
use gathering::{Gathered, gather};
use nccl_check::NcclArrival;
use relaying::Relay;

/// Silence of a host's thread after which the host counts as lost.
const HOST_TIMEOUT: Duration = Duration::from_secs(30);

/// The host of a rank, if the run has ranks on other hosts as well.
#[derive(Debug, Clone)]
pub struct OwnHost {
    /// The first rank of this host, which serves the others.
    pub first_rank: u32,
    /// Number of the host's ranks, which are consecutive.
    pub ranks: u32,
    /// Where rank 0 is.
    pub endpoint: Endpoint,
    /// If the endpoint has no port: rank 0 listens at the first free one of these, and the others try them in turn.
    pub ports: Vec<u16>,
    /// How the hosts authenticate each other.
    pub credentials: Credentials,
    /// The ranks use NCCL, and its interface is to be checked.
    pub nccl: Option<NcclUse>,
}

/// How the ranks of a host use NCCL.
#[derive(Debug, Clone, Copy)]
pub struct NcclUse {
    /// Whether their release passes over interfaces that are not running, if that is known.
    pub passes_over_idle: Option<bool>,
    /// They may set NCCL's variables themselves.
    pub may_set: bool,
}

/// What the thread of a host needs to know of the run.
pub(super) struct HostRun {
    pub(super) run_id: String,
    pub(super) world_size: u32,
    pub(super) program: String,
    pub(super) restart_count: u32,
    pub(super) join_timeout: Duration,
    pub(super) join_by: Instant,
    pub(super) host: OwnHost,
    pub(super) host_name: String,
}

impl HostRun {
    fn own_arrival(&self, nccl: Option<NcclArrival>) -> Arrival {
        let OwnHost { first_rank, ranks, .. } = self.host;
        Arrival { first_rank, ranks, world_size: self.world_size, host: self.host_name.clone(), nccl }
    }

    /// Listens where NCCL is going to listen. `None` without NCCL, or if that cannot be predicted.
    fn open_nccl(&self) -> Option<NcclEndpoint> {
        NcclEndpoint::open(&self.host.credentials, self.host.nccl?.passes_over_idle)
    }

    /// What this host says about NCCL, if the address of its connections with the others is `address`.
    fn nccl_arrival(&self, endpoint: Option<&NcclEndpoint>, address: IpAddr) -> Option<NcclArrival> {
        let (card, variables) = (endpoint?.card(), endpoint?.variables_for(address));
        let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Some(NcclArrival { card, may_set: self.host.nccl?.may_set, variables })
    }
}

/// Starts the thread. It writes to `ended` when it ends, and ends early when the writer of `attempt` is dropped without
/// having written.
pub(super) fn start(
    run: HostRun,
    listener: Listener,
    attempt: PipeReader,
    mut ended: PipeWriter,
) -> Result<()> {
    let serve = move || {
        serve(&run, listener, Attempt { pipe: Some(attempt) });
        // Closing the pipe would not do: a forked child may have a copy.
        let _ = ended.write(&[1]);
    };
    let thread = std::thread::Builder::new().name("mgpu-rendezvous".into()).spawn(serve);
    thread.map(drop).map_err(|error| Error::system("start the rendezvous thread", start_failure(&error)))
}

fn serve(run: &HostRun, mut listener: Listener, mut attempt: Attempt) {
    let gathered = match gather(run, &mut attempt) {
        Ok(Some(gathered)) => gathered,
        Ok(None) => return,
        Err(reply) => return answer_all(&mut listener, &reply),
    };
    let Gathered { layout, address, hosts, links, nccl, delay } = gathered;
    let join_by = run.join_by + delay;
    let server = match Server::unattended_of_node(layout, Some(address), &run.run_id, listener, join_by) {
        Ok(server) => server.with_nccl_advice(nccl),
        // Without the listener, its ranks see that this one has given up.
        Err(_) => return,
    };
    server.describe(&run.program, run.restart_count);
    let mut relay = Relay::new(server, hosts, links);
    while relay.is_needed() {
        if !attempt.wait(relay.poll_fds(), relay.next_deadline()) {
            return;
        }
        relay.service(Instant::now());
    }
}

/// Answers the ranks that wait in the listener's queue. The rank that runs this thread comes last: its process may end
/// as soon as it is told, and the other ranks would not be told.
fn answer_all(listener: &mut Listener, reply: &Reply) {
    let mut waiting = Vec::new();
    loop {
        match listener.accept(Instant::now()) {
            ConnectionAttempt::Accepted(stream) => waiting.push(stream),
            ConnectionAttempt::Rejected(_) => {}
            ConnectionAttempt::None => break,
        }
    }
    let own = std::process::id() as i32;
    waiting.sort_by_key(|stream| owner(stream).is_ok_and(|(pid, _)| pid == own));
    // An old connection that is closed with unread bytes would destroy the answer: the hello is read first.
    for stream in waiting {
        let Ok(mut connection) = Connection::new(stream) else { continue };
        let _ = connection.receive();
        let _ = connection.send(&encode(reply), &[]);
    }
}

/// The attempt of the first rank to join: it may be given up.
struct Attempt {
    /// Readable when it is decided; `None` afterwards.
    pipe: Option<PipeReader>,
}

impl Attempt {
    /// Waits until a descriptor is ready or `deadline`. `false` if the attempt was given up.
    fn wait(&mut self, fds: Vec<PollFd<'_>>, deadline: Option<Instant>) -> bool {
        let timeout = poll_timeout(deadline, Instant::now());
        let decision = self.pipe.iter().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN));
        let mut fds: Vec<PollFd<'_>> = decision.chain(fds).collect();
        // An interrupted poll is handled like a timeout: everything is checked anyway.
        let is_ready = poll(&mut fds, timeout).is_ok_and(|ready| ready > 0);
        let is_decided = is_ready && self.pipe.is_some() && fds[0].any().unwrap_or(true);
        drop(fds);
        let decided = self.pipe.take_if(|_| is_decided);
        decided.is_none_or(|mut pipe| pipe.read(&mut [0]).is_ok_and(|count| count > 0))
    }
}

#[cfg(test)]
mod tests;
