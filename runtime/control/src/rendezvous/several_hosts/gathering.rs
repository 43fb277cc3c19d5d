//! The beginning of a run: all hosts come together, and learn which ranks are where.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use nix::poll::PollFd;

use super::arrangement::{Arrival, arrange, missing_ranks};
use super::host_link::{HostLink, HostLoss, HostMessage};
use super::{Attempt, HostRun};
use crate::nodes::{Dialer, Layout, NodeListener, RunTag};
use crate::rendezvous::message::Reply;

/// How much longer than its own ranks a host waits for the verdict of rank 0's host.
const VERDICT_MARGIN: Duration = Duration::from_secs(2);
/// How long the links are served after the gathering has failed, so that all hosts hear why.
const FAREWELL: Duration = Duration::from_secs(2);

/// What a host knows after the gathering.
pub(super) struct Gathered {
    pub(super) layout: Layout,
    /// Address of this host as the others reach it.
    pub(super) address: IpAddr,
    /// The names of all hosts, by node.
    pub(super) hosts: Vec<String>,
    /// On node 0 the links to the other nodes, in order; elsewhere the one to node 0.
    pub(super) links: Vec<HostLink>,
}

/// Waits until all hosts have come. `None` if the attempt was given up.
///
/// # Errors
/// Why the run does not start, as the reply for the ranks of this host.
pub(super) fn gather(run: &HostRun, attempt: &mut Attempt) -> Result<Option<Gathered>, Reply> {
    match run.host.first_rank {
        0 => Gathering::start(run)?.gather(attempt),
        _ => join(run, attempt),
    }
}

fn refused(why: impl Into<String>) -> Reply {
    Reply::Refused { why: why.into() }
}

/// The gathering on rank 0's host.
struct Gathering<'a> {
    run: &'a HostRun,
    listener: NodeListener,
    /// That of this host first; the links are those of the others.
    arrivals: Vec<Arrival>,
    links: Vec<HostLink>,
    /// Links that have not said which ranks they speak for.
    unknown: Vec<HostLink>,
    /// Why the first connection was rejected, if one was.
    rejection: Option<String>,
}

impl<'a> Gathering<'a> {
    fn start(run: &'a HostRun) -> Result<Self, Reply> {
        let host = &run.host;
        let tag = RunTag::of(&run.run_id);
        let ports = host.endpoint.port().map_or(host.ports.clone(), |port| vec![port]);
        let listener = NodeListener::bind(None, &ports, host.credentials.clone(), tag);
        let listener = listener.map_err(|error| refused(error.to_string()))?;
        let arrivals = vec![run.own_arrival()];
        Ok(Gathering { run, listener, arrivals, links: Vec::new(), unknown: Vec::new(), rejection: None })
    }

    fn gather(mut self, attempt: &mut Attempt) -> Result<Option<Gathered>, Reply> {
        loop {
            let links = self.links.iter().chain(&self.unknown);
            let deadlines = links.clone().map(HostLink::next_deadline).chain(self.listener.next_deadline());
            let deadline = deadlines.fold(self.run.join_by, Instant::min);
            let fds = self.listener.fds().into_iter().chain(links.map(HostLink::poll_fd)).collect();
            if !attempt.wait(fds, Some(deadline)) {
                return Ok(None);
            }
            match self.service(Instant::now()) {
                Ok(None) => {}
                Ok(Some((order, layout))) => return Ok(Some(self.finish(&order, layout))),
                Err(reply) => {
                    self.fail(&reply);
                    return Err(reply);
                }
            }
        }
    }

    fn service(&mut self, now: Instant) -> Result<Option<(Vec<usize>, Layout)>, Reply> {
        let new = self.listener.service(now).into_iter().map(|link| HostLink::new(link, now));
        self.unknown.extend(new);
        for rejected in self.listener.take_rejections(now, false) {
            self.rejection.get_or_insert(rejected.why);
        }
        self.hear_known(now)?;
        self.hear_unknown(now)?;
        if let Some(arranged) = arrange(&self.arrivals, self.run.world_size).map_err(refused)? {
            return Ok(Some(arranged));
        }
        if now >= self.run.join_by {
            return Err(self.time_out(now));
        }
        Ok(None)
    }

    fn hear_known(&mut self, now: Instant) -> Result<(), Reply> {
        for (link, arrival) in self.links.iter_mut().zip(&self.arrivals[1..]) {
            if !link.service(now).is_empty() {
                link.lose("it spoke before all hosts had come".into());
            }
            if let Some(loss) = link.loss() {
                let rank = arrival.first_rank;
                return Err(Reply::PeerGone { peer: rank, how: loss.describe(&arrival.host, rank, rank) });
            }
        }
        Ok(())
    }

    fn hear_unknown(&mut self, now: Instant) -> Result<(), Reply> {
        let mut index = 0;
        while index < self.unknown.len() {
            match self.unknown[index].service(now).into_iter().next() {
                Some(HostMessage::Arrived { arrival }) => {
                    let link = self.unknown.swap_remove(index);
                    let checked = arrival.check(&self.arrivals[0]);
                    self.links.push(link);
                    self.arrivals.push(arrival);
                    checked.map_err(refused)?;
                }
                // It has given up, or is no host of this release.
                Some(_) => drop(self.unknown.swap_remove(index)),
                None if self.unknown[index].loss().is_some() => drop(self.unknown.swap_remove(index)),
                None => index += 1,
            }
        }
        Ok(())
    }

    /// The reply when the time to join has passed.
    fn time_out(&mut self, now: Instant) -> Reply {
        let missing = missing_ranks(&self.arrivals, self.run.world_size);
        let rejected = self.listener.take_rejections(now, true).into_iter().map(|rejected| rejected.why);
        match self.rejection.take().or_else(|| rejected.into_iter().next()) {
            None => Reply::TimedOut { missing },
            Some(why) => {
                let (first, last) = (missing[0], missing[missing.len() - 1]);
                let after = self.run.join_timeout;
                refused(format!(
                    "the hosts of {} of the ranks {first} to {last} did not come within {after:?}, and a connection was rejected: {why}",
                    missing.len()
                ))
            }
        }
    }

    /// Tells the other hosts why the run does not start.
    fn fail(&mut self, reply: &Reply) {
        let until = Instant::now() + FAREWELL;
        for link in self.links.iter_mut().chain(&mut self.unknown) {
            link.send(&HostMessage::Failed { reply: reply.clone() });
            link.close();
        }
        // The own ranks are told afterwards: this process ends then.
        let mut nobody = Attempt { pipe: None };
        loop {
            let now = Instant::now();
            for link in self.links.iter_mut().chain(&mut self.unknown) {
                link.service(now);
            }
            let open = self.links.iter().chain(&self.unknown).filter(|link| link.loss().is_none());
            let fds: Vec<PollFd<'_>> = open.map(HostLink::poll_fd).collect();
            if fds.is_empty() || now >= until {
                return;
            }
            nobody.wait(fds, Some(until));
        }
    }

    /// Tells each host its number. `order`: the arrivals by node.
    fn finish(self, order: &[usize], layout: Layout) -> Gathered {
        let hosts: Vec<String> = order.iter().map(|index| self.arrivals[*index].host.clone()).collect();
        let mut unsorted: Vec<Option<HostLink>> = self.links.into_iter().map(Some).collect();
        // The first arrival is this host, which is node 0.
        let sorted = order.iter().skip(1).filter_map(|index| unsorted[index - 1].take());
        let mut links: Vec<HostLink> = sorted.collect();
        for (node, link) in (1..).zip(&mut links) {
            let Ok(layout) = layout.seen_from(node) else { continue };
            let address = link.link().peer_address().ip().to_canonical();
            link.send(&HostMessage::Arranged { layout, address, hosts: hosts.clone() });
        }
        let own = links.first().map(|link| link.link().local_address().ip().to_canonical());
        Gathered { layout, address: own.unwrap_or(Ipv4Addr::LOCALHOST.into()), hosts, links }
    }
}

/// The gathering on another host.
fn join(run: &HostRun, attempt: &mut Attempt) -> Result<Option<Gathered>, Reply> {
    let host = &run.host;
    let tag = RunTag::of(&run.run_id);
    let mut dialer =
        Dialer::new(&host.endpoint, &host.ports, None, host.credentials.clone(), tag, run.join_by);
    let link = loop {
        match dialer.service(Instant::now()) {
            Some(Ok(link)) => break link,
            Some(Err(error)) => {
                return Err(refused(format!("host {} cannot reach rank 0: {error}", run.host_name)));
            }
            None => {}
        }
        if !attempt.wait(dialer.fds(), Some(dialer.next_deadline())) {
            return Ok(None);
        }
    };
    let mut link = HostLink::new(link, Instant::now());
    link.send(&HostMessage::Arrived { arrival: run.own_arrival() });
    let until = run.join_by + VERDICT_MARGIN;
    loop {
        if let Some(message) = link.service(Instant::now()).into_iter().next() {
            return verdict(run, link, message).map(Some);
        }
        if let Some(loss) = link.loss() {
            let how = match loss {
                HostLoss::Ended => "ended before all hosts had come".to_owned(),
                loss => loss.describe(host.endpoint.host(), 0, 0),
            };
            return Err(Reply::PeerGone { peer: 0, how });
        }
        if Instant::now() >= until {
            return Err(Reply::TimedOut { missing: vec![0] });
        }
        if !attempt.wait(vec![link.poll_fd()], Some(until.min(link.next_deadline()))) {
            return Ok(None);
        }
    }
}

/// What rank 0's host has decided.
fn verdict(run: &HostRun, link: HostLink, message: HostMessage) -> Result<Gathered, Reply> {
    let broken = || refused("rank 0's host broke the protocol: it answered without a layout for this host");
    match message {
        HostMessage::Arranged { layout, address, hosts } => {
            let own = run.host.first_rank..run.host.first_rank + run.host.ranks;
            let is_ours = layout.world_size() == run.world_size && layout.local_ranks() == own;
            if !is_ours || hosts.len() != layout.nodes() as usize {
                return Err(broken());
            }
            Ok(Gathered { layout, address, hosts, links: vec![link] })
        }
        // Only ranks that exist may be named to the ranks.
        HostMessage::Failed { reply: Reply::Refused { why } } => {
            Err(refused(why.chars().take(1000).collect::<String>()))
        }
        HostMessage::Failed { reply: Reply::PeerGone { peer, how } } if peer < run.world_size => {
            Err(Reply::PeerGone { peer, how: how.chars().take(1000).collect() })
        }
        HostMessage::Failed { reply: Reply::TimedOut { missing } }
            if missing.iter().all(|rank| *rank < run.world_size) =>
        {
            Err(Reply::TimedOut { missing })
        }
        _ => Err(broken()),
    }
}
