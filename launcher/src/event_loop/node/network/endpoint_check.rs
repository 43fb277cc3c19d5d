//! Whether the endpoint leads to this node, which was told that it is node 0.
//!
//! Two nodes may both say `--node-rank 0`. The one on another host than the endpoint's would listen for nobody, until the
//! time to join is over. So a node 0 that is still alone after a moment looks the endpoint up. That none of the
//! endpoint's addresses belongs to this host proves nothing: on the way to a container or a virtual machine addresses are
//! translated and ports forwarded. So the node connects to the endpoint, and joins whom it finds there:
//!
//! - Another coordinator takes that for the contradiction that it is, and refuses it or ends the job on all nodes.
//! - The coordinator of this node recognises its own card: the endpoint leads here.
//! - If nobody is found, one line says that others may not find this node either.

use std::mem::replace;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use mgpu_control::nodes::{Dialer, Endpoint, Link, LinkState, Lookup, owns};
use nix::poll::{PollFd, PollFlags};

use super::hosting::Hosting;
use super::{Input, NodeJob, failure};
use crate::nodes::{FromAgent, NodeCard, ToAgent};

/// Mostly the other nodes have come by then, and nothing has to be checked.
const DELAY: Duration = Duration::from_millis(500);
/// Time to reach somebody at the endpoint before the user is told that it is elsewhere.
const PATIENCE: Duration = Duration::from_secs(1);

/// The check. It ends when another node joins.
pub(super) struct EndpointCheck<'a> {
    job: &'a NodeJob<'a>,
    /// What the coordinator has from this node: a node 0 that joins itself is known by it.
    card: NodeCard,
    endpoint: Endpoint,
    stage: Stage,
    /// What to tell the user, and when.
    remark: Option<(String, Instant)>,
}

enum Stage {
    Waiting(Instant, Box<Dialer>),
    LookingUp(Lookup, Box<Dialer>),
    Dialing(Box<Dialer>),
    /// The node has joined whom it has found, and waits for the answer.
    Joining(Box<Link>),
    Over,
}

impl<'a> EndpointCheck<'a> {
    /// A check with the `dialer` of this `endpoint`.
    pub(super) fn new(
        job: &'a NodeJob<'a>,
        card: NodeCard,
        endpoint: Endpoint,
        dialer: Dialer,
        now: Instant,
    ) -> Self {
        let stage = Stage::Waiting(now + DELAY, Box::new(dialer));
        EndpointCheck { job, card, endpoint, stage, remark: None }
    }

    pub(super) fn fds(&self) -> Vec<PollFd<'_>> {
        match &self.stage {
            Stage::LookingUp(lookup, _) => vec![PollFd::new(lookup.fd(), PollFlags::POLLIN)],
            Stage::Dialing(dialer) => dialer.fds(),
            Stage::Joining(link) => vec![link.poll_fd()],
            Stage::Waiting(..) | Stage::Over => Vec::new(),
        }
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let of_stage = match &self.stage {
            Stage::Waiting(until, _) => Some(*until),
            Stage::Dialing(dialer) => Some(dialer.next_deadline()),
            Stage::Joining(link) => link.next_deadline(),
            Stage::LookingUp(..) | Stage::Over => None,
        };
        of_stage.into_iter().chain(self.remark.as_ref().map(|(_, at)| *at)).min()
    }

    /// Continues. `hosting` is the coordinator of this node.
    pub(super) fn service(&mut self, hosting: &Hosting, now: Instant) -> Option<Input> {
        if !hosting.waits_alone() {
            (self.stage, self.remark) = (Stage::Over, None);
            return None;
        }
        let mut input = None;
        self.stage = match replace(&mut self.stage, Stage::Over) {
            Stage::Waiting(until, dialer) if until <= now => Lookup::start(self.endpoint.host())
                .map_or(Stage::Over, |lookup| Stage::LookingUp(lookup, dialer)),
            Stage::LookingUp(lookup, dialer) => match lookup.result() {
                None => Stage::LookingUp(lookup, dialer),
                Some(Ok(addresses)) => self.compare(&addresses, dialer, now),
                // The other nodes do not find it either, and say so.
                Some(Err(_)) => Stage::Over,
            },
            Stage::Dialing(mut dialer) => match dialer.service(now) {
                None => Stage::Dialing(dialer),
                Some(Ok(mut link)) => {
                    link.send(&FromAgent::Join(Box::new(self.card.clone())));
                    Stage::Joining(Box::new(link))
                }
                Some(Err(_)) => Stage::Over,
            },
            Stage::Joining(link) => {
                let (stage, answer) = self.read_answer(link, hosting, now);
                input = answer;
                stage
            }
            stage => stage,
        };
        let remark = self.remark.take_if(|(_, at)| *at <= now && input.is_none());
        input.or(remark.map(|(text, _)| Input::Say(text)))
    }

    /// Compares the endpoint's addresses with those of this host.
    fn compare(&mut self, addresses: &[SocketAddr], dialer: Box<Dialer>, now: Instant) -> Stage {
        let addresses: Vec<IpAddr> = addresses.iter().map(SocketAddr::ip).collect();
        if addresses.iter().any(|address| owns(*address) || address.is_unspecified()) {
            return Stage::Over;
        }
        let said_by = |what: &str| {
            let mut sources = self.job.settings.sources.iter();
            sources.find(|(name, _)| *name == what).map_or("default", |(_, source)| source)
        };
        let listed: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let text = format!(
            "this is node 0 ({}) on host {}, and the endpoint {} ({}) is elsewhere: {} is no address of this host; \
             unless it is forwarded to here, the other nodes cannot find this one: correct the node rank or the endpoint",
            said_by("node rank"),
            self.job.card.host,
            self.endpoint,
            said_by("endpoint"),
            listed.join(", ")
        );
        self.remark = Some((text, now + PATIENCE));
        Stage::Dialing(dialer)
    }

    /// Reads what the coordinator at the endpoint says to the card of this node.
    fn read_answer(
        &mut self,
        mut link: Box<Link>,
        hosting: &Hosting,
        now: Instant,
    ) -> (Stage, Option<Input>) {
        let state = link.service(now);
        let answer = loop {
            match link.next_message::<ToAgent>() {
                Ok(Some(ToAgent::Refused { .. })) if hosting.has_met_itself() => break None,
                Ok(Some(ToAgent::Refused { exit_code, why })) => break Some(failure(exit_code, why)),
                Ok(Some(ToAgent::End { outcome })) => break Some(outcome),
                Ok(Some(_)) => {}
                Ok(None) if state == LinkState::Open => return (Stage::Joining(link), None),
                Ok(None) | Err(_) => return (Stage::Over, None),
            }
        };
        self.remark = None;
        (Stage::Over, answer.map(Input::Failed))
    }
}
