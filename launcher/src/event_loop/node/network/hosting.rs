//! The coordinator with its listener and its connections to the agents of all other nodes.

use std::net::IpAddr;
use std::time::Instant;

use mgpu_control::nodes::{Link, LinkState, NodeListener, RunTag};
use mgpu_control::protocol::new_run_id;
use nix::poll::PollFd;

use super::super::NodeJob;
use super::{Input, node_loss};
use crate::error::LaunchError;
use crate::exit_code;
use crate::nodes::{Config, Coordinator, FromAgent, MemberId, NodeLoss, OWN, ToAgent};
use crate::port::ReservedPort;

/// The coordinator's connections.
pub(super) struct Hosting {
    coordinator: Coordinator,
    listener: NodeListener,
    links: Vec<(MemberId, Link)>,
    /// Links whose last message was sent.
    leaving: Vec<Link>,
    /// Links of nodes that have been silent. They are told so, and are not waited for.
    silent: Vec<Link>,
    next_id: MemberId,
    /// Reserved until the job is over.
    _port: ReservedPort,
}

impl Hosting {
    /// Listens for the agents of `job`.
    pub(super) fn start(
        job: &NodeJob<'_>,
        address: Option<IpAddr>,
        ports: &[u16],
        run: RunTag,
        now: Instant,
    ) -> Result<Self, LaunchError> {
        let listener = NodeListener::bind(address, ports, job.credentials.clone(), run)?;
        let port = ReservedPort::reserve();
        let config = Config {
            nodes: job.settings.nodes.clone(),
            join_timeout: job.supervision.join_timeout,
            node_timeout: job.settings.node_timeout,
            grace: job.supervision.grace,
            restart: job.supervision.restart,
            run_id: new_run_id()?,
            master_port: port.number(),
        };
        Ok(Hosting {
            coordinator: Coordinator::new(config, job.card.clone(), now),
            listener,
            links: Vec::new(),
            leaving: Vec::new(),
            silent: Vec::new(),
            next_id: OWN + 1,
            _port: port,
        })
    }

    pub(super) fn fds(&self) -> Vec<PollFd<'_>> {
        let links = self.links.iter().map(|(_, link)| link).chain(&self.leaving);
        links.map(Link::poll_fd).chain(self.listener.fds()).collect()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let links = self.leaving.iter().filter_map(Link::next_deadline);
        links.chain(self.listener.next_deadline()).chain(self.coordinator.next_deadline()).min()
    }

    /// Reads, writes and handles deadlines. `ready` tells which of [`fds`](Self::fds) are ready.
    pub(super) fn service(&mut self, now: Instant, ready: &[bool]) -> Vec<Input> {
        let is_ready = |index: usize| ready.get(index).copied().unwrap_or(true);
        let links = self.links.len();
        let mut lost = Vec::new();
        for (index, (id, link)) in self.links.iter_mut().enumerate().filter(|(index, _)| is_ready(*index)) {
            debug_assert!(index < links);
            if let Some(loss) = serve(&mut self.coordinator, *id, link, now) {
                lost.push((*id, loss));
            }
        }
        for (id, loss) in lost {
            self.lose(id, &loss, now);
        }
        self.leaving.retain_mut(|link| link.service(now) == LinkState::Open);
        // The descriptors of the listener are behind those of the links.
        if (links + self.leaving.len()..ready.len()).any(is_ready)
            || self.listener.next_deadline().is_some_and(|at| at <= now)
        {
            for link in self.listener.service(now) {
                self.coordinator.connected(self.next_id, Some(link.peer_address().ip()), now);
                self.links.push((self.next_id, link));
                self.next_id += 1;
            }
        }
        let rejections = self.listener.take_rejections(now, false);
        let mut inputs: Vec<Input> = rejections
            .into_iter()
            .map(|rejected| {
                let what = match rejected.connections {
                    1 => "a connection".to_owned(),
                    many => format!("{many} connections, the first"),
                };
                Input::Say(format!("rejected {what}: {}", rejected.why))
            })
            .collect();
        inputs.extend(self.flush(now));
        inputs
    }

    /// Handles a message of this node's agent.
    pub(super) fn report(&mut self, message: FromAgent, now: Instant) {
        if let Err(why) = self.coordinator.handle(OWN, message, now) {
            // Cannot happen: both are in this process.
            self.coordinator.lost(OWN, &NodeLoss::Failed(why), now);
        }
    }

    /// Sends what the coordinator has decided. Returns what concerns this node.
    pub(super) fn flush(&mut self, now: Instant) -> Vec<Input> {
        self.coordinator.tick(now);
        let mut inputs = Vec::new();
        for (id, message) in self.coordinator.take_outbox() {
            if id == OWN {
                inputs.push(Input::Message(message));
                continue;
            }
            let Some(index) = self.links.iter().position(|(other, _)| *other == id) else { continue };
            self.links[index].1.send(&message);
            let place = match message {
                ToAgent::Refused { exit_code: exit_code::NODE_LOST, .. } => &mut self.silent,
                ToAgent::End { .. } | ToAgent::Refused { .. } => &mut self.leaving,
                _ => continue,
            };
            let (_, mut link) = self.links.remove(index);
            link.close();
            place.push(link);
        }
        inputs
    }

    fn lose(&mut self, id: MemberId, loss: &NodeLoss, now: Instant) {
        if let Some(index) = self.links.iter().position(|(other, _)| *other == id) {
            let (_, mut link) = self.links.remove(index);
            if let NodeLoss::Failed(why) = loss {
                link.send(&ToAgent::Refused { exit_code: exit_code::NODE_LOST, why: why.clone() });
                link.close();
                self.leaving.push(link);
            }
        }
        self.coordinator.lost(id, loss, now);
    }

    /// This host's address as the other nodes reach it.
    pub(super) fn own_address(&self) -> Option<IpAddr> {
        let addresses = self.links.iter().map(|(_, link)| link.local_address().ip());
        addresses.clone().find(|address| !address.is_loopback()).or_else(|| addresses.clone().next())
    }

    /// All links that have not ended.
    pub(super) fn into_links(self) -> Vec<Link> {
        self.links.into_iter().map(|(_, link)| link).chain(self.leaving).collect()
    }
}

/// Reads from a link and passes its messages on. Returns how the link was lost.
fn serve(coordinator: &mut Coordinator, id: MemberId, link: &mut Link, now: Instant) -> Option<NodeLoss> {
    let state = link.service(now);
    // Messages first: what an agent said before it ended counts.
    loop {
        match link.next_message::<FromAgent>() {
            Ok(Some(message)) => {
                if let Err(why) = coordinator.handle(id, message, now) {
                    return Some(NodeLoss::Failed(why));
                }
            }
            Ok(None) => break,
            Err(why) => return Some(NodeLoss::Failed(why)),
        }
    }
    match state {
        LinkState::Open => None,
        LinkState::Lost(loss) => Some(node_loss(loss)),
    }
}
