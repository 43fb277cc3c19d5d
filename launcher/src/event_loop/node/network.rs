//! This node's connections: to the coordinator, or as the coordinator to the agents of all other nodes.
//!
//! A node without a rank finds out first whether the endpoint is its own host: then it is node 0. Everything here is
//! non-blocking, and whatever has to be decided about the job is in the pure [`Coordinator`].

mod endpoint_check;
mod hosting;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use mgpu_control::nodes::{
    DEFAULT_PORT, DialError, Dialer, Endpoint, Link, LinkState, Lookup, Loss, RunTag, owns,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{NodeJob, failure};
use crate::error::LaunchError;
use crate::exit_code;
use crate::nodes::{FromAgent, NodeCard, NodeLoss, Ports, ToAgent};
use crate::supervisor::Outcome;
use endpoint_check::EndpointCheck;
use hosting::Hosting;

/// Pause before the name of the endpoint is looked up again.
const LOOKUP_PAUSE: Duration = Duration::from_millis(500);

/// Something that concerns this node.
pub(super) enum Input {
    /// The coordinator says this.
    Message(ToAgent),
    /// To be printed.
    Say(String),
    /// The connection to the coordinator has ended without a goodbye.
    CoordinatorLost(NodeLoss),
    /// This node cannot take part.
    Failed(Outcome),
}

/// This node's connections.
pub(super) struct Network<'a> {
    job: &'a NodeJob<'a>,
    card: NodeCard,
    endpoint: Endpoint,
    ports: Vec<u16>,
    run: RunTag,
    /// Until then the coordinator has to be found.
    deadline: Instant,
    role: Role,
    /// Whether the endpoint leads here; only where this node was told that it is node 0.
    endpoint_check: Option<EndpointCheck<'a>>,
}

enum Role {
    /// The endpoint's name is looked up; at this time again.
    Deciding(Option<Lookup>, Instant),
    Dialing(Box<Dialer>),
    Agent(Box<AgentLink>),
    Coordinator(Box<Hosting>),
    /// Nothing is left to do.
    Left,
}

/// The connection of an agent to the coordinator.
struct AgentLink {
    link: Link,
    /// When the last message arrived.
    heard: Instant,
    /// The job is over for this node, or the coordinator is lost.
    is_over: bool,
    /// The coordinator is lost: nobody hears a goodbye.
    is_lost: bool,
}

impl<'a> Network<'a> {
    /// Begins to look for the coordinator, or listens as it. The card is this node's.
    ///
    /// # Errors
    /// If this is node 0 and cannot listen.
    pub(super) fn new(job: &'a NodeJob<'a>, card: NodeCard) -> Result<Self, LaunchError> {
        let settings = job.settings;
        let run = RunTag::of(settings.run_id.as_deref().unwrap_or_default());
        let (host, ports) = match &settings.endpoint {
            Some((host, Ports::One(port))) => (host.as_str(), vec![*port]),
            Some((host, Ports::OfJob)) => (host.as_str(), run.candidate_ports()),
            None => ("localhost", vec![DEFAULT_PORT]),
        };
        let endpoint = Endpoint::of_host(host);
        let now = Instant::now();
        let deadline = now + job.supervision.join_timeout;
        let role = Role::Deciding(None, now);
        let mut network = Network { job, card, endpoint, ports, run, deadline, role, endpoint_check: None };
        match settings.node_rank {
            Some(0) => {
                network.host(now)?;
                network.endpoint_check = settings.endpoint.is_some().then(|| {
                    EndpointCheck::new(job, network.card.clone(), network.place(), network.dialer(), now)
                });
            }
            Some(_) => network.dial(),
            None => network.look_up(now)?,
        }
        Ok(network)
    }

    /// Becomes the coordinator.
    fn host(&mut self, now: Instant) -> Result<(), LaunchError> {
        let hosting =
            Hosting::start(self.job, &self.card, self.local_address()?, &self.ports, self.run, now)?;
        self.role = Role::Coordinator(Box::new(hosting));
        Ok(())
    }

    /// Becomes an agent that looks for the coordinator.
    fn dial(&mut self) {
        self.role = Role::Dialing(Box::new(self.dialer()));
    }

    fn dialer(&self) -> Dialer {
        let local = self.local_address().ok().flatten();
        let (credentials, run) = (self.job.credentials.clone(), self.run);
        Dialer::new(&self.endpoint, &self.ports, local, credentials, run, self.deadline)
    }

    /// The endpoint, with its port if there is one only.
    fn place(&self) -> Endpoint {
        match self.ports[..] {
            [port] => self.endpoint.with_port(port),
            _ => self.endpoint.clone(),
        }
    }

    /// The address that the user has chosen for this node.
    fn local_address(&self) -> Result<Option<IpAddr>, LaunchError> {
        let Some(text) = &self.job.settings.local_addr else { return Ok(None) };
        text.parse().map(Some).map_err(|_| LaunchError::LocalAddress(text.clone()))
    }

    /// Finds out whether the endpoint is this host, as far as that is known without waiting.
    fn look_up(&mut self, now: Instant) -> Result<(), LaunchError> {
        if let Ok(address) = self.endpoint.host().parse::<IpAddr>() {
            return self.decide(&[address], now);
        }
        let lookup = Lookup::start(self.endpoint.host()).map_err(LaunchError::Network)?;
        self.role = Role::Deciding(Some(lookup), now);
        Ok(())
    }

    /// The owner of the endpoint's address is node 0. Several agents on that host agree by its port: one can listen.
    fn decide(&mut self, addresses: &[IpAddr], now: Instant) -> Result<(), LaunchError> {
        if addresses.iter().any(|address| owns(*address)) && self.host(now).is_ok() {
            return Ok(());
        }
        self.dial();
        Ok(())
    }

    /// The descriptors to poll. [`service`](Self::service) wants to know which are ready.
    pub(super) fn fds(&self) -> Vec<PollFd<'_>> {
        match &self.role {
            Role::Deciding(lookup, _) => {
                lookup.iter().map(|lookup| PollFd::new(lookup.fd(), PollFlags::POLLIN)).collect()
            }
            Role::Dialing(dialer) => dialer.fds(),
            Role::Agent(agent) => vec![agent.link.poll_fd()],
            Role::Coordinator(hosting) => {
                let check = self.endpoint_check.iter().flat_map(EndpointCheck::fds);
                hosting.fds().into_iter().chain(check).collect()
            }
            Role::Left => Vec::new(),
        }
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match &self.role {
            Role::Deciding(None, at) => Some((*at).min(self.deadline)),
            Role::Deciding(Some(_), _) => Some(self.deadline),
            Role::Dialing(dialer) => Some(dialer.next_deadline()),
            Role::Agent(agent) if agent.is_over => agent.link.next_deadline(),
            Role::Agent(agent) => {
                agent.link.next_deadline().into_iter().chain([agent.heard + self.node_timeout()]).min()
            }
            Role::Coordinator(hosting) => {
                let check = self.endpoint_check.as_ref().and_then(EndpointCheck::next_deadline);
                hosting.next_deadline().into_iter().chain(check).min()
            }
            Role::Left => None,
        }
    }

    fn node_timeout(&self) -> Duration {
        self.job.settings.node_timeout
    }

    /// Reads, writes and handles deadlines.
    pub(super) fn service(&mut self, now: Instant, ready: &[bool]) -> Vec<Input> {
        match &mut self.role {
            Role::Deciding(..) => self.serve_lookup(now),
            Role::Dialing(_) => self.serve_dialer(now),
            Role::Agent(_) => self.serve_link(now),
            Role::Coordinator(hosting) => {
                let mut inputs = hosting.service(now, ready);
                inputs.extend(self.endpoint_check.as_mut().and_then(|check| check.service(hosting, now)));
                inputs
            }
            Role::Left => Vec::new(),
        }
    }

    fn serve_lookup(&mut self, now: Instant) -> Vec<Input> {
        let Role::Deciding(lookup, at) = &mut self.role else { return Vec::new() };
        let result = match lookup {
            Some(lookup) => lookup.result(),
            None if *at <= now => {
                *lookup = Lookup::start(self.endpoint.host()).ok();
                None
            }
            None => None,
        };
        let why = match result {
            Some(Ok(addresses)) => {
                let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.ip()).collect();
                return match self.decide(&addresses, now) {
                    Ok(()) => Vec::new(),
                    Err(error) => vec![Input::Failed(failure(exit_code::LAUNCHER, error.to_string()))],
                };
            }
            Some(Err(why)) => {
                (*lookup, *at) = (None, now + LOOKUP_PAUSE);
                why
            }
            None => "no name server answers".into(),
        };
        if now < self.deadline {
            return Vec::new();
        }
        let text = format!("cannot find node 0 at {}: {why}", self.endpoint.host());
        vec![Input::Failed(failure(exit_code::NEVER_JOINED, text))]
    }

    fn serve_dialer(&mut self, now: Instant) -> Vec<Input> {
        let Role::Dialing(dialer) = &mut self.role else { return Vec::new() };
        match dialer.service(now) {
            None => Vec::new(),
            Some(Ok(link)) => {
                let agent = AgentLink { link, heard: now, is_over: false, is_lost: false };
                self.role = Role::Agent(Box::new(agent));
                let card = Box::new(self.card.clone());
                self.report(FromAgent::Join(card), now);
                Vec::new()
            }
            Some(Err(error)) => {
                self.role = Role::Left;
                let code = match error {
                    DialError::Unreachable(_) => exit_code::NEVER_JOINED,
                    DialError::Authentication(_) => exit_code::AUTHENTICATION,
                    DialError::Incompatible(_) => exit_code::NODES_DIFFER,
                };
                vec![Input::Failed(failure(code, format!("cannot reach the coordinator: {error}")))]
            }
        }
    }

    fn serve_link(&mut self, now: Instant) -> Vec<Input> {
        let node_timeout = self.node_timeout();
        let Role::Agent(agent) = &mut self.role else { return Vec::new() };
        let state = agent.link.service(now);
        let mut inputs = Vec::new();
        let mut loss = match state {
            LinkState::Open => None,
            LinkState::Lost(loss) => Some(loss),
        };
        // Messages first: what the coordinator said before it ended counts.
        loop {
            match agent.link.next_message::<ToAgent>() {
                Ok(Some(message)) => {
                    agent.heard = now;
                    agent.is_over |= matches!(message, ToAgent::End { .. } | ToAgent::Refused { .. });
                    inputs.push(Input::Message(message));
                }
                Ok(None) => break,
                Err(why) => {
                    loss = Some(Loss::Protocol(why));
                    break;
                }
            }
        }
        let silence = now.saturating_duration_since(agent.heard);
        let loss = match loss {
            Some(loss) => Some(node_loss(loss)),
            None => (silence >= node_timeout).then_some(NodeLoss::Silent(silence)),
        };
        if let Some(loss) = loss
            && !std::mem::replace(&mut agent.is_over, true)
        {
            agent.is_lost = true;
            inputs.push(Input::CoordinatorLost(loss));
        }
        inputs
    }

    /// Tells the coordinator something.
    pub(super) fn report(&mut self, message: FromAgent, now: Instant) {
        match &mut self.role {
            Role::Agent(agent) => agent.link.send(&message),
            Role::Coordinator(hosting) => hosting.report(message, now),
            // There is no coordinator yet, or no more.
            Role::Deciding(..) | Role::Dialing(_) | Role::Left => {}
        }
    }

    /// Sends what the coordinator has decided because of reports of this node. Returns what concerns this node.
    pub(super) fn flush(&mut self, now: Instant) -> Vec<Input> {
        match &mut self.role {
            Role::Coordinator(hosting) => hosting.flush(now),
            _ => Vec::new(),
        }
    }

    /// True if somebody coordinates this node.
    pub(super) fn is_connected(&self) -> bool {
        match &self.role {
            Role::Agent(agent) => !agent.is_over,
            Role::Coordinator(_) => true,
            Role::Deciding(..) | Role::Dialing(_) | Role::Left => false,
        }
    }

    /// The address of this node as other nodes reach it, if that is known.
    pub(super) fn own_address(&self) -> Option<IpAddr> {
        match &self.role {
            Role::Agent(agent) => Some(agent.link.local_address().ip()),
            Role::Coordinator(hosting) => hosting.own_address(),
            Role::Deciding(..) | Role::Dialing(_) | Role::Left => None,
        }
    }

    /// The address of node 0, for the ranks of this node.
    pub(super) fn master_address(&self) -> String {
        let address = match &self.role {
            Role::Agent(agent) => Some(agent.link.peer_address().ip()),
            _ => self.own_address(),
        };
        address.map_or_else(|| "127.0.0.1".into(), |address| address.to_string())
    }

    /// The host of the coordinator, for messages.
    pub(super) fn coordinator<'s>(&'s self, hosts: &'s [String]) -> &'s str {
        hosts.first().map_or(self.endpoint.host(), String::as_str)
    }

    /// Ends all connections, so that everything that was sent arrives. Waits a few seconds at most.
    pub(super) fn say_goodbye(&mut self) {
        let mut leaving = match std::mem::replace(&mut self.role, Role::Left) {
            Role::Agent(agent) if agent.is_lost => Vec::new(),
            Role::Agent(agent) => vec![agent.link],
            Role::Coordinator(hosting) => hosting.into_links(),
            Role::Deciding(..) | Role::Dialing(_) | Role::Left => Vec::new(),
        };
        leaving.iter_mut().for_each(Link::close);
        loop {
            let now = Instant::now();
            leaving.retain_mut(|link| {
                let state = link.service(now);
                // Nobody reads what still comes.
                while let Ok(Some(serde_json::Value::Null | _)) = link.next_message::<serde_json::Value>() {}
                state == LinkState::Open
            });
            let Some(deadline) = leaving.iter().filter_map(Link::next_deadline).min() else { return };
            let left = deadline.saturating_duration_since(now).as_millis() + 1;
            let mut fds: Vec<PollFd<'_>> = leaving.iter().map(Link::poll_fd).collect();
            let _ = poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        }
    }
}

/// What the loss of a connection means for the node at its other end.
fn node_loss(loss: Loss) -> NodeLoss {
    match loss {
        Loss::Ended => NodeLoss::Ended,
        Loss::Unreachable => NodeLoss::Unreachable,
        Loss::Protocol(why) => NodeLoss::Failed(why),
    }
}
