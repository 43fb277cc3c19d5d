//! One host of the run, once all have come: its server, and what it exchanges with the other hosts.

use std::collections::VecDeque;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags};

use super::host_link::{HostLink, HostLoss, HostMessage};
use crate::nodes::{Hub, HubAction, Layout, RankEnd, RelayMessage};
use crate::progress::RankState;
use crate::rendezvous::server::{ProcessEnd, Server};

/// The server of a host's ranks, and the host's place in the star.
pub(super) struct Relay {
    server: Server,
    hosts: Vec<String>,
    star: Star,
}

/// The links of a host.
#[expect(clippy::large_enum_variant, reason = "a process has one")]
enum Star {
    /// Node 0 has one to each other node; `None` for one that is closed or lost.
    Hub { hub: Hub, links: Vec<Option<HostLink>>, flush_at: Option<Instant> },
    /// Another node has one to node 0.
    Ray { link: Option<HostLink>, is_closing: bool },
}

impl Relay {
    pub(super) fn new(server: Server, hosts: Vec<String>, mut links: Vec<HostLink>) -> Self {
        let star = match server.layout().node() {
            0 => Star::Hub {
                hub: Hub::new(server.layout().clone(), hosts.clone()),
                links: links.into_iter().map(Some).collect(),
                flush_at: None,
            },
            _ => Star::Ray { link: links.pop(), is_closing: false },
        };
        Relay { server, hosts, star }
    }

    /// True until all ranks of this host have ended and all links are closed.
    pub(super) fn is_needed(&self) -> bool {
        let has_links = match &self.star {
            Star::Hub { links, .. } => links.iter().any(Option::is_some),
            Star::Ray { link, .. } => link.is_some(),
        };
        has_links || !self.has_served()
    }

    /// True if all ranks of this host have ended, or nobody can join any more and nobody is connected.
    fn has_served(&self) -> bool {
        let has_ended =
            |rank| !matches!(self.server.page().state(rank), RankState::Absent | RankState::Joined);
        !self.server.is_needed() || self.server.layout().local_ranks().all(has_ended)
    }

    pub(super) fn poll_fds(&self) -> Vec<PollFd<'_>> {
        let server = self.server.fds().into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        server.chain(self.star.links().map(HostLink::poll_fd)).collect()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let flush_at = match &self.star {
            Star::Hub { flush_at, .. } => *flush_at,
            Star::Ray { .. } => None,
        };
        let links = self.star.links().map(HostLink::next_deadline);
        self.server.next_deadline().into_iter().chain(flush_at).chain(links).min()
    }

    pub(super) fn service(&mut self, now: Instant) {
        self.server.service();
        self.carry_outbox();
        match &self.star {
            Star::Hub { .. } => self.serve_hub(now),
            Star::Ray { .. } => self.serve_ray(now),
        }
    }

    /// Carries what the own server has to say.
    fn carry_outbox(&mut self) {
        let said = self.server.take_outbox();
        match &mut self.star {
            Star::Hub { .. } => said.into_iter().for_each(|message| self.hear(0, message)),
            Star::Ray { link: Some(link), .. } => {
                said.into_iter().for_each(|message| link.send(&HostMessage::Relay { message }));
            }
            Star::Ray { link: None, .. } => {}
        }
    }

    fn serve_hub(&mut self, now: Instant) {
        let Star::Hub { links, .. } = &mut self.star else { return };
        let mut heard = Vec::new();
        for (node, link) in (1..).zip(links) {
            let messages = link.as_mut().map(|link| link.service(now)).unwrap_or_default();
            heard.extend(messages.into_iter().map(|message| (node, message)));
        }
        for (node, message) in heard {
            match message {
                HostMessage::Relay { message } => self.hear(node, message),
                _ => self.break_link(node, "a message of the gathering after its end"),
            }
        }
        self.drop_lost_nodes();
        self.flush_if_due(now);
    }

    /// Hands a message of a node to the hub.
    fn hear(&mut self, node: u32, message: RelayMessage) {
        let Star::Hub { hub, .. } = &mut self.star else { return };
        match hub.handle(node, message) {
            Ok(actions) => self.perform(actions),
            Err(problem) => self.break_link(node, &problem),
        }
    }

    /// Performs actions of the hub, and those that follow from them.
    fn perform(&mut self, actions: Vec<HubAction>) {
        let Star::Hub { hub, links, .. } = &mut self.star else { return };
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                HubAction::Send { node: 0, message } => {
                    // Hub and server are of the same release: nothing between them is refused.
                    let _ = self.server.deliver(message);
                    for message in self.server.take_outbox() {
                        actions.extend(hub.handle(0, message).unwrap_or_default());
                    }
                }
                HubAction::Send { node, message } => {
                    if let Some(Some(link)) = links.get_mut(node as usize - 1) {
                        link.send(&HostMessage::Relay { message });
                    }
                }
                // Its rank has been told.
                HubAction::Incompatible { .. } | HubAction::Admitted | HubAction::StopAsked { .. } => {}
            }
        }
    }

    fn break_link(&mut self, node: u32, problem: &str) {
        let Star::Hub { links, .. } = &mut self.star else { return };
        if let Some(Some(link)) = (node as usize).checked_sub(1).and_then(|index| links.get_mut(index)) {
            link.lose(problem.to_owned());
        }
    }

    /// All ranks of a node whose link is lost have ended, if they had not said goodbye.
    fn drop_lost_nodes(&mut self) {
        let Star::Hub { links, .. } = &mut self.star else { return };
        let mut lost = Vec::new();
        for (node, link) in (1..).zip(links) {
            if let Some(loss) = link.as_ref().and_then(HostLink::loss) {
                lost.push((node, loss.clone()));
                *link = None;
            }
        }
        for (node, loss) in lost {
            // What is known of its ranks is on the page afterwards.
            self.flush();
            let ends = self.ends_of(node, &loss);
            let Star::Hub { hub, .. } = &mut self.star else { return };
            let actions = hub.announce(ends);
            self.perform(actions);
        }
    }

    /// The ends of the ranks of a lost node, that of the rank that served them first.
    fn ends_of(&self, node: u32, loss: &HostLoss) -> Vec<RankEnd> {
        let layout: &Layout = self.server.layout();
        let host = self.hosts.get(node as usize).map_or("", String::as_str);
        let ranks = layout.ranks_of(node);
        let leader = ranks.start;
        let is_open =
            |rank: &u32| matches!(self.server.page().state(*rank), RankState::Absent | RankState::Joined);
        let end =
            |rank| RankEnd { rank, end: ProcessEnd::Failed(loss.describe(host, rank, leader)), blame: None };
        ranks.filter(is_open).map(end).collect()
    }

    fn flush_if_due(&mut self, now: Instant) {
        let Star::Hub { hub, flush_at, .. } = &mut self.star else { return };
        if !hub.has_news() {
            *flush_at = None;
        } else if now >= *flush_at.get_or_insert(now + hub.flush_interval()) {
            *flush_at = None;
            self.flush();
        }
    }

    fn flush(&mut self) {
        let Star::Hub { hub, .. } = &mut self.star else { return };
        let actions = hub.flush();
        self.perform(actions);
    }

    fn serve_ray(&mut self, now: Instant) {
        let has_served = self.has_served();
        let Star::Ray { link: slot, is_closing } = &mut self.star else { return };
        let Some(link) = slot else { return };
        if has_served && !std::mem::replace(is_closing, true) {
            link.close();
        }
        for message in link.service(now) {
            let delivered = match message {
                HostMessage::Relay { message } => self.server.deliver(message),
                _ => Err("a message of the gathering after its end".into()),
            };
            match delivered {
                Ok(()) => {
                    let said = self.server.take_outbox();
                    said.into_iter().for_each(|message| link.send(&HostMessage::Relay { message }));
                }
                Err(problem) => link.lose(problem),
            }
        }
        if let Some(loss) = link.loss().cloned() {
            *slot = None;
            self.lose_hub(&loss);
        }
    }

    /// Without node 0 the run is at its end, unless its ranks have said goodbye.
    fn lose_hub(&mut self, loss: &HostLoss) {
        for RankEnd { rank, end, .. } in self.ends_of(0, loss) {
            self.server.rank_ended(rank, end);
        }
    }
}

impl Star {
    fn links(&self) -> impl Iterator<Item = &HostLink> {
        let (many, one) = match self {
            Star::Hub { links, .. } => (&links[..], None),
            Star::Ray { link, .. } => (&[][..], link.as_ref()),
        };
        many.iter().flatten().chain(one)
    }
}
