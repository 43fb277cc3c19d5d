//! The coordinator with its listener and its connections to the agents of all other nodes.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use mgpu_control::nccl::interfaces::own_interfaces;
use mgpu_control::nodes::{Link, LinkState, NodeListener, RunTag};
use mgpu_control::protocol::new_run_id;
use nix::poll::PollFd;

use super::super::NodeJob;
use super::{Input, node_loss};
use crate::error::LaunchError;
use crate::exit_code;
use crate::nodes::{
    Config, Coordinator, FromAgent, MemberId, NcclPreflight, NodeCard, NodeLoss, OWN, ToAgent,
};
use crate::port::ReservedPort;

/// So many links are served as soon as one of them is ready. For each time as many more, they are left alone for
/// [`PAUSE`] after they were served: a poll over a thousand links costs more than what a heartbeat brings, and a thousand
/// heartbeats arrive each second.
const LINKS_PER_PAUSE: u32 = 64;
const PAUSE: Duration = Duration::from_millis(1);

/// The coordinator's connections.
pub(super) struct Hosting {
    coordinator: Coordinator,
    preflight: NcclPreflight,
    listener: NodeListener,
    /// In ascending order of their ids.
    links: Vec<(MemberId, Link)>,
    /// The links are not polled until then.
    paused_until: Option<Instant>,
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
        card: &NodeCard,
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
            stop_grace: job.supervision.stop_grace,
            restart: job.supervision.restart,
            run_id: new_run_id()?,
            master_port: port.number(),
        };
        let mut preflight = NcclPreflight::default();
        preflight.take_answer(OWN, FromAgent::Join(Box::new(card.clone())));
        Ok(Hosting {
            coordinator: Coordinator::new(config, card.clone(), now),
            preflight,
            listener,
            links: Vec::new(),
            paused_until: None,
            leaving: Vec::new(),
            silent: Vec::new(),
            next_id: OWN + 1,
            _port: port,
        })
    }

    pub(super) fn fds(&self) -> Vec<PollFd<'_>> {
        let links = self.polled_links().iter().map(|(_, link)| link).chain(&self.leaving);
        links.map(Link::poll_fd).chain(self.listener.fds()).collect()
    }

    fn polled_links(&self) -> &[(MemberId, Link)] {
        if self.paused_until.is_some() { &[] } else { &self.links }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let links =
            self.links.iter().map(|(_, link)| link).chain(&self.leaving).filter_map(Link::next_deadline);
        let listener = self.listener.next_deadline();
        let decisions = self.coordinator.next_deadline().into_iter().chain(self.preflight.next_deadline());
        links.chain(listener).chain(self.paused_until).chain(decisions).min()
    }

    /// Reads, writes and handles deadlines. `ready` tells which of [`fds`](Self::fds) are ready.
    pub(super) fn service(&mut self, now: Instant, ready: &[bool]) -> Vec<Input> {
        let is_ready = |index: usize| ready.get(index).copied().unwrap_or(true);
        let links = self.polled_links().len();
        self.serve_links(now, |index| index < links && is_ready(index));
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

    /// Serves the links with these indices, and those with a deadline that has passed.
    fn serve_links(&mut self, now: Instant, is_ready: impl Fn(usize) -> bool) {
        let mut lost = Vec::new();
        let mut has_served = false;
        for (index, (id, link)) in self.links.iter_mut().enumerate() {
            if !is_ready(index) && link.next_deadline().is_none_or(|at| now < at) {
                continue;
            }
            has_served = true;
            if let Some(loss) = serve(&mut self.coordinator, &mut self.preflight, *id, link, now) {
                lost.push((*id, loss));
            }
        }
        for (id, loss) in lost {
            self.lose(id, &loss, now);
        }
        let pause = PAUSE * (self.links.len() as u32 / LINKS_PER_PAUSE);
        match self.paused_until {
            Some(until) if until <= now => self.paused_until = None,
            None if has_served && !pause.is_zero() => self.paused_until = Some(now + pause),
            _ => {}
        }
    }

    /// True while no other node has joined, and the ranks have not been started.
    pub(super) fn waits_alone(&self) -> bool {
        self.coordinator.waits_alone()
    }

    /// True if this node has joined itself: the endpoint leads here.
    pub(super) fn has_met_itself(&self) -> bool {
        self.coordinator.has_met_itself()
    }

    fn index_of(&self, id: MemberId) -> Option<usize> {
        self.links.binary_search_by_key(&id, |(other, _)| *other).ok()
    }

    /// Handles a message of this node's agent.
    pub(super) fn report(&mut self, message: FromAgent, now: Instant) {
        let Some(message) = self.preflight.take_answer(OWN, message) else { return };
        if let Err(why) = self.coordinator.handle(OWN, message, now) {
            // Cannot happen: both are in this process.
            self.coordinator.lost(OWN, &NodeLoss::Failed(why), now);
        }
    }

    /// Sends what the coordinator has decided. Returns what concerns this node.
    pub(super) fn flush(&mut self, now: Instant) -> Vec<Input> {
        self.coordinator.tick(now);
        let mut inputs = Vec::new();
        let messages = self.coordinator.take_outbox();
        let own_interface = || interface_of(own_address(&self.links)?);
        for (id, message) in self.preflight.filter(messages, own_interface, now) {
            if id == OWN {
                inputs.push(Input::Message(message));
                continue;
            }
            let Some(index) = self.index_of(id) else { continue };
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
        if let Some(index) = self.index_of(id) {
            let (_, mut link) = self.links.remove(index);
            if let NodeLoss::Failed(why) = loss {
                link.send(&ToAgent::Refused { exit_code: exit_code::NODE_LOST, why: why.clone() });
                link.close();
                self.leaving.push(link);
            }
        }
        self.preflight.forget(id);
        self.coordinator.lost(id, loss, now);
    }

    /// This host's address as the other nodes reach it.
    pub(super) fn own_address(&self) -> Option<IpAddr> {
        own_address(&self.links)
    }

    /// All links that have not ended.
    pub(super) fn into_links(self) -> Vec<Link> {
        self.links.into_iter().map(|(_, link)| link).chain(self.leaving).collect()
    }
}

fn own_address(links: &[(MemberId, Link)]) -> Option<IpAddr> {
    let addresses = links.iter().map(|(_, link)| link.local_address().ip());
    addresses.clone().find(|address| !address.is_loopback()).or_else(|| addresses.clone().next())
}

/// The name of the interface that has an address.
fn interface_of(address: IpAddr) -> Option<String> {
    own_interfaces()
        .into_iter()
        .find(|interface| interface.address == address)
        .map(|interface| interface.name)
}

/// Reads from a link and passes its messages on. Returns how the link was lost.
fn serve(
    coordinator: &mut Coordinator,
    preflight: &mut NcclPreflight,
    id: MemberId,
    link: &mut Link,
    now: Instant,
) -> Option<NodeLoss> {
    let state = link.service(now);
    // Messages first: what an agent said before it ended counts.
    loop {
        match link.next_message::<FromAgent>() {
            Ok(Some(message)) => {
                let Some(message) = preflight.take_answer(id, message) else { continue };
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
