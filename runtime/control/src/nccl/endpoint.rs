//! One host's part in the check of the interfaces that NCCL takes: it listens where NCCL is going to listen, and tries to
//! reach another host there, both without blocking. The connections are authenticated like the others between hosts, so
//! a host is not mistaken for another one that has the same address.

use std::net::IpAddr;
use std::time::Instant;

use nix::poll::PollFd;

use super::check::{MAX_TARGETS, NcclCard, NcclTarget, REACH_LIMIT};
use super::interfaces::{Interface, SocketVariables, own_interfaces};
use crate::nodes::{Credentials, Dialer, Endpoint, Link, LinkState, NodeListener, RunTag};
use crate::protocol::new_run_id;

/// Most connections of others that are kept until the others end them.
const MAX_LINKS: usize = 16;

/// Where NCCL of this host's ranks is going to listen.
pub struct NcclEndpoint {
    card: NcclCard,
    variables: SocketVariables,
    credentials: Credentials,
    listeners: Vec<NodeListener>,
    /// Connections of the host that tries to reach this one.
    links: Vec<Link>,
    /// Attempts to reach another host, with their results.
    attempts: Vec<(Dialer, Option<Result<(), String>>)>,
}

impl NcclEndpoint {
    /// Listens. `None` if it cannot be predicted what NCCL takes, or this host cannot listen there. `passes_over_idle` as in
    /// [`SocketVariables::candidates`].
    pub fn open(credentials: &Credentials, passes_over_idle: Option<bool>) -> Option<Self> {
        let (variables, interfaces) = (SocketVariables::detect(), own_interfaces());
        let tag = new_run_id().ok()?;
        let mut listeners = Vec::new();
        let mut listen = |interface: &Interface| {
            let Interface { name, address, .. } = interface;
            let (credentials, run) = (credentials.clone(), RunTag::of(&tag));
            let listener = NodeListener::bind(Some(*address), &[0], credentials, run).ok()?;
            let target = NcclTarget { interface: name.clone(), address: *address, port: listener.port() };
            listeners.push(listener);
            Some(target)
        };
        // If this host cannot listen there, NCCL cannot either, and says so.
        let candidates = variables.candidates(&interfaces, passes_over_idle).into_iter();
        let targets: Option<Vec<NcclTarget>> = candidates.map(&mut listen).collect();
        let targets = targets.filter(|targets| !targets.is_empty())?;
        let card = NcclCard { targets, tag, is_named: variables.names_interfaces(), answer: None };
        Some(NcclEndpoint {
            card,
            variables,
            credentials: credentials.clone(),
            listeners,
            links: Vec::new(),
            attempts: Vec::new(),
        })
    }

    /// What the other hosts have to know.
    pub fn card(&self) -> NcclCard {
        self.card.clone()
    }

    /// What to poll for.
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        let listeners = self.listeners.iter().flat_map(NodeListener::fds);
        let attempts = self.running().flat_map(Dialer::fds);
        listeners.chain(self.links.iter().map(Link::poll_fd)).chain(attempts).collect()
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let listeners = self.listeners.iter().filter_map(NodeListener::next_deadline);
        listeners.chain(self.running().map(Dialer::next_deadline)).min()
    }

    /// The attempts that have no result.
    fn running(&self) -> impl Iterator<Item = &Dialer> {
        self.attempts.iter().filter(|(_, result)| result.is_none()).map(|(dialer, _)| dialer)
    }

    /// Tries to connect to another host, for [`REACH_LIMIT`].
    pub fn reach(&mut self, targets: &[NcclTarget], tag: &str, now: Instant) {
        let attempt = |target: &NcclTarget| {
            let endpoint = Endpoint::of_host(&target.address.to_string()).with_port(target.port);
            let (credentials, run) = (self.credentials.clone(), RunTag::of(tag));
            (Dialer::new(&endpoint, &[], None, credentials, run, now + REACH_LIMIT), None)
        };
        self.attempts = targets.iter().take(MAX_TARGETS).map(attempt).collect();
    }

    /// Reads, writes and handles deadlines. Returns for each target, once all have a result, why it was not reached.
    pub fn service(&mut self, now: Instant) -> Option<Vec<Option<String>>> {
        for listener in &mut self.listeners {
            self.links.extend(listener.service(now));
            // Whoever else connects is of no interest.
            drop(listener.take_rejections(now, true));
        }
        // The other side ends its connection when it has seen the last packet.
        self.links.retain_mut(|link| link.service(now) == LinkState::Open);
        let surplus = self.links.len().saturating_sub(MAX_LINKS);
        self.links.drain(..surplus);
        for (dialer, result) in self.attempts.iter_mut().filter(|(_, result)| result.is_none()) {
            *result = dialer.service(now).map(|link| link.map(drop).map_err(|error| error.to_string()));
        }
        if self.attempts.is_empty() || self.running().next().is_some() {
            return None;
        }
        let results = std::mem::take(&mut self.attempts).into_iter();
        Some(results.map(|(_, result)| result.and_then(Result::err)).collect())
    }

    /// The variables that make NCCL take the interface with `address`, which connects this host with the others. None if the
    /// user has named the interfaces of this host, or no other host can reach the address.
    pub fn variables_for(&self, address: IpAddr) -> Vec<(&'static str, String)> {
        // By its loopback interface no other host could reach this one.
        match self.card.is_named || address.is_loopback() {
            true => Vec::new(),
            false => self.variables.variables_for(address, &own_interfaces()).unwrap_or_default(),
        }
    }
}
