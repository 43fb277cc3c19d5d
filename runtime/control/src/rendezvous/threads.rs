//! The rendezvous of ranks that are threads of one process, on one node or on several.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, poll};

use super::client::{ServedBy, Store};
use super::hosted::{poll_timeout, spawn};
use super::message::Manifest;
use super::server::Server;
use crate::nodes::{Hub, HubAction, Layout, RelayMessage};
use crate::process::start_failure;
use crate::progress::ProgressPage;
use crate::{Error, Result};

/// Connects `world_size` ranks of this process. A thread runs the server and ends with the last connection.
///
/// # Errors
/// If there are no ranks or too many, or the system cannot provide a socket, memory or a thread.
pub fn in_process(world_size: u32, run_id: &str) -> Result<Vec<(Store, ProgressPage)>> {
    let (server, streams) = Server::in_process(world_size, run_id)?;
    spawn(server, None)?;
    join_all(streams, world_size, run_id)
}

/// Connects `world_size` ranks of this process as if they were on several hosts: each node has a server and a progress
/// page of its own, and node h has the ranks from `first_ranks[h]` on. One thread runs all servers and the hub between
/// them, and ends with the last connection. The address of each node is 127.0.0.1.
///
/// # Errors
/// If the nodes are no [`Layout`], or the system cannot provide a socket, memory or a thread.
#[doc(hidden)]
pub fn in_process_on_nodes(
    first_ranks: &[u32],
    world_size: u32,
    run_id: &str,
) -> Result<Vec<(Store, ProgressPage)>> {
    let layout = Layout::new(first_ranks.to_vec(), world_size, 0)
        .map_err(|problem| Error::InvalidArgument { operation: "rendezvous", problem })?;
    let (mut servers, mut streams) = (Vec::new(), Vec::new());
    for node in 0..layout.nodes() {
        let layout = Layout::new(first_ranks.to_vec(), world_size, node)
            .map_err(|problem| Error::InvalidArgument { operation: "rendezvous", problem })?;
        let address = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let (server, of_node) = Server::in_process_of_node(layout, address, run_id)?;
        servers.push(server);
        streams.extend(of_node);
    }
    let hosts = (0..layout.nodes()).map(|node| format!("host{node}")).collect();
    let nodes = ConnectedNodes { servers, hub: Hub::new(layout, hosts) };
    std::thread::Builder::new()
        .name("mgpu-rendezvous".into())
        .spawn(move || nodes.run())
        .map_err(|error| Error::system("start the rendezvous thread", start_failure(&error)))?;
    join_all(streams, world_size, run_id)
}

/// Joins as all ranks, which hold these connections.
fn join_all(streams: Vec<UnixStream>, world_size: u32, run_id: &str) -> Result<Vec<(Store, ProgressPage)>> {
    let apply = |(stream, rank)| {
        Store::send_hello(stream, ServedBy::Launcher, run_id, rank, world_size, Manifest::default())
    };
    // All ranks say hello before the first one waits: none is admitted before all have.
    let pending: Vec<_> = streams.into_iter().zip(0..).map(apply).collect::<Result<_>>()?;
    pending.into_iter().map(|pending| pending.wait()).collect()
}

/// The servers of several nodes in one process, with the hub between them in place of a network.
pub(crate) struct ConnectedNodes {
    pub(crate) servers: Vec<Server>,
    pub(crate) hub: Hub,
}

impl ConnectedNodes {
    /// Carries messages until none is left. The servers and the hub agree, so none of them is wrong.
    ///
    /// # Panics
    /// If a server or the hub refuses a message of the other.
    pub(crate) fn carry_messages(&mut self) {
        loop {
            let mut actions = VecDeque::new();
            for (node, server) in (0..).zip(&mut self.servers) {
                for message in server.take_outbox() {
                    actions.extend(self.hub.handle(node, message).expect("a message of a server"));
                }
            }
            actions.extend(self.hub.flush());
            if actions.is_empty() {
                return;
            }
            actions.into_iter().for_each(|action| self.apply(action));
        }
    }

    /// Does what the hub wants.
    pub(crate) fn apply(&mut self, action: HubAction) {
        if let HubAction::Send { node, message } = action {
            self.deliver(node, message);
        }
    }

    fn deliver(&mut self, node: u32, message: RelayMessage) {
        self.servers[node as usize].deliver(message).expect("a message of the hub");
    }

    fn run(mut self) {
        while self.servers.iter().any(Server::is_needed) {
            let deadline = self.servers.iter().filter_map(Server::next_deadline).min();
            let fds: Vec<_> = self.servers.iter().flat_map(Server::fds).collect();
            let mut fds: Vec<_> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            // An interrupted poll is handled like a timeout: `service` checks everything anyway.
            let _ = poll(&mut fds, poll_timeout(deadline, Instant::now()));
            drop(fds);
            for server in &mut self.servers {
                let _ = server.service();
            }
            self.carry_messages();
        }
    }
}
