//! The beginning of a run: all hosts come together, and learn which ranks are where. If the ranks use NCCL, the hosts also
//! try the interfaces that it takes.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use nix::poll::PollFd;

use super::arrangement::{Arrival, arrange, missing_ranks};
use super::host_link::{HostLink, HostLoss, HostMessage};
use super::nccl_check::{NcclCheck, Task, Verdict};
use super::{Attempt, HostRun};
use crate::nccl::advice::{MAX_NOTICE, MAX_NOTICES, NcclVariables};
use crate::nccl::{ANSWER_LIMIT, NcclAdvice, NcclEndpoint};
use crate::nodes::{Dialer, Layout, NodeListener, RunTag};
use crate::rendezvous::message::{Reply, shortened};

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
    /// What the ranks of this host have to know about NCCL.
    pub(super) nccl: Option<NcclAdvice>,
    /// How long the check of NCCL's interfaces has taken.
    pub(super) delay: Duration,
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
    /// Where NCCL of this host's ranks is going to listen.
    endpoint: Option<NcclEndpoint>,
    /// The check of NCCL's interfaces, once all hosts have come.
    check: Option<(Arranged, NcclCheck)>,
}

/// The hosts, once all have come.
struct Arranged {
    /// The arrivals by node.
    order: Vec<usize>,
    /// Seen from node 0.
    layout: Layout,
}

impl Arranged {
    /// The arrivals by node.
    fn hosts<'a>(&self, arrivals: &'a [Arrival]) -> Vec<&'a Arrival> {
        self.order.iter().map(|index| &arrivals[*index]).collect()
    }
}

/// What the check of NCCL's interfaces has found, for the ranks of all hosts.
#[derive(Default)]
struct NcclFinding {
    notices: Vec<String>,
    sets_nccl: bool,
    delay: Duration,
}

impl NcclFinding {
    /// For the ranks of a host with these variables.
    fn advice(self, variables: NcclVariables) -> Option<NcclAdvice> {
        let variables = if self.sets_nccl { variables } else { Vec::new() };
        let advice = NcclAdvice { variables, notices: self.notices };
        (advice != NcclAdvice::default()).then_some(advice)
    }
}

impl<'a> Gathering<'a> {
    fn start(run: &'a HostRun) -> Result<Self, Reply> {
        let host = &run.host;
        let tag = RunTag::of(&run.run_id);
        let ports = host.endpoint.port().map_or(host.ports.clone(), |port| vec![port]);
        let listener = NodeListener::bind(None, &ports, host.credentials.clone(), tag);
        let listener = listener.map_err(|error| refused(error.to_string()))?;
        Ok(Gathering {
            run,
            listener,
            arrivals: vec![run.own_arrival(None)],
            links: Vec::new(),
            unknown: Vec::new(),
            rejection: None,
            endpoint: run.open_nccl(),
            check: None,
        })
    }

    fn gather(mut self, attempt: &mut Attempt) -> Result<Option<Gathered>, Reply> {
        loop {
            let (fds, deadline) = self.waits();
            if !attempt.wait(fds, Some(deadline)) {
                return Ok(None);
            }
            match self.service(Instant::now()) {
                Ok(None) => {}
                Ok(Some((arranged, finding))) => return Ok(Some(self.finish(arranged, finding))),
                Err(reply) => {
                    self.fail(&reply);
                    return Err(reply);
                }
            }
        }
    }

    /// What to poll for, and until when.
    fn waits(&self) -> (Vec<PollFd<'_>>, Instant) {
        let Some((_, check)) = &self.check else {
            let links = self.links.iter().chain(&self.unknown);
            let deadlines = links.clone().map(HostLink::next_deadline).chain(self.listener.next_deadline());
            let fds = self.listener.fds().into_iter().chain(links.map(HostLink::poll_fd));
            return (fds.collect(), deadlines.fold(self.run.join_by, Instant::min));
        };
        // Nobody else is expected.
        let of_endpoint = self.endpoint.iter().filter_map(NcclEndpoint::next_deadline);
        let deadlines = self.links.iter().map(HostLink::next_deadline).chain(of_endpoint);
        let fds =
            self.endpoint.iter().flat_map(NcclEndpoint::fds).chain(self.links.iter().map(HostLink::poll_fd));
        (fds.collect(), deadlines.fold(check.deadline, Instant::min))
    }

    fn service(&mut self, now: Instant) -> Result<Option<(Arranged, NcclFinding)>, Reply> {
        if self.check.is_some() {
            return self.serve_check(now);
        }
        let new = self.listener.service(now).into_iter().map(|link| HostLink::new(link, now));
        self.unknown.extend(new);
        for rejected in self.listener.take_rejections(now, false) {
            self.rejection.get_or_insert(rejected.why);
        }
        self.hear_known(now)?;
        self.hear_unknown(now)?;
        if let Some((order, layout)) = arrange(&self.arrivals, self.run.world_size).map_err(refused)? {
            return Ok(self.begin_check(Arranged { order, layout }, now));
        }
        if now >= self.run.join_by {
            return Err(self.time_out(now));
        }
        Ok(None)
    }

    /// All hosts have come: asks them to try the interfaces that NCCL takes. If there is nothing to check, this returns the
    /// result.
    fn begin_check(&mut self, arranged: Arranged, now: Instant) -> Option<(Arranged, NcclFinding)> {
        if let Some(link) = self.links.first() {
            let address = link.link().local_address().ip().to_canonical();
            self.arrivals[0].nccl = self.run.nccl_arrival(self.endpoint.as_ref(), address);
        }
        let begun = NcclCheck::begin(&arranged.hosts(&self.arrivals), now);
        let (Some((check, tasks)), Some(endpoint)) = (begun, &mut self.endpoint) else {
            return Some((arranged, NcclFinding::default()));
        };
        for (index, Task { targets, tag }) in arranged.order.iter().zip(tasks) {
            match index.checked_sub(1) {
                None => endpoint.reach(&targets, &tag, now),
                Some(link) => self.links[link].send(&HostMessage::Reach { targets, tag }),
            }
        }
        self.check = Some((arranged, check));
        None
    }

    fn serve_check(&mut self, now: Instant) -> Result<Option<(Arranged, NcclFinding)>, Reply> {
        let own = self.endpoint.as_mut().and_then(|endpoint| endpoint.service(now));
        if let (Some(answer), Some((_, check))) = (own, &mut self.check) {
            // This host is node 0.
            check.take_answer(0, answer).map_err(refused)?;
        }
        self.hear_known(now)?;
        let Some((arranged, check)) = self.check.take_if(|(_, check)| check.is_over(now)) else {
            return Ok(None);
        };
        let delay = now.saturating_duration_since(check.begun);
        match check.judge(&arranged.hosts(&self.arrivals)) {
            Verdict::Start { notices, sets } => {
                Ok(Some((arranged, NcclFinding { notices, sets_nccl: sets, delay })))
            }
            Verdict::Refuse(why) => Err(refused(why)),
        }
    }

    fn hear_known(&mut self, now: Instant) -> Result<(), Reply> {
        for (index, link) in self.links.iter_mut().enumerate() {
            let arrival = &self.arrivals[index + 1];
            for message in link.service(now) {
                let taken = match (message, &mut self.check) {
                    (HostMessage::Reached { answer }, Some((arranged, check))) => {
                        let node = arranged.order.iter().position(|arrival| *arrival == index + 1);
                        check.take_answer(node.unwrap_or(usize::MAX), answer)
                    }
                    _ => Err("it spoke before all hosts had come".to_owned()),
                };
                if let Err(problem) = taken {
                    link.lose(problem);
                }
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

    /// Tells each host its number, and what was found out about NCCL.
    fn finish(mut self, Arranged { order, layout }: Arranged, finding: NcclFinding) -> Gathered {
        let hosts: Vec<String> = order.iter().map(|index| self.arrivals[*index].host.clone()).collect();
        let mut unsorted: Vec<Option<HostLink>> = self.links.into_iter().map(Some).collect();
        // The first arrival is this host, which is node 0.
        let sorted = order.iter().skip(1).filter_map(|index| unsorted[index - 1].take());
        let mut links: Vec<HostLink> = sorted.collect();
        for (node, link) in (1..).zip(&mut links) {
            let Ok(layout) = layout.seen_from(node) else { continue };
            let address = link.link().peer_address().ip().to_canonical();
            let (notices, sets_nccl) = (finding.notices.clone(), finding.sets_nccl);
            link.send(&HostMessage::Arranged { layout, address, hosts: hosts.clone(), notices, sets_nccl });
        }
        let own = links.first().map(|link| link.link().local_address().ip().to_canonical());
        let address = own.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let variables = self.arrivals[0].nccl.take().map(|nccl| nccl.variables).unwrap_or_default();
        let delay = finding.delay;
        Gathered { layout, address, hosts, links, nccl: finding.advice(variables), delay }
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
    let mut endpoint = run.open_nccl();
    let nccl = run.nccl_arrival(endpoint.as_ref(), link.local_address().ip().to_canonical());
    let variables = nccl.as_ref().map(|nccl| nccl.variables.clone()).unwrap_or_default();
    let mut link = HostLink::new(link, Instant::now());
    link.send(&HostMessage::Arrived { arrival: run.own_arrival(nccl) });
    let mut until = run.join_by + VERDICT_MARGIN;
    let mut check_begun = None;
    loop {
        let now = Instant::now();
        for message in link.service(now) {
            match (message, &mut endpoint) {
                (HostMessage::Reach { targets, tag }, Some(endpoint)) if check_begun.is_none() => {
                    endpoint.reach(&targets, &tag, now);
                    check_begun = Some(now);
                    until = until.max(now + ANSWER_LIMIT + VERDICT_MARGIN);
                }
                (message, _) => {
                    let delay =
                        check_begun.map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun));
                    return verdict(run, link, message, variables, delay).map(Some);
                }
            }
        }
        if let Some(answer) = endpoint.as_mut().and_then(|endpoint| endpoint.service(now)) {
            link.send(&HostMessage::Reached { answer });
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
        let fds = endpoint.iter().flat_map(NcclEndpoint::fds).chain([link.poll_fd()]).collect();
        let of_endpoint = endpoint.iter().filter_map(NcclEndpoint::next_deadline);
        let deadline = of_endpoint.fold(until.min(link.next_deadline()), Instant::min);
        if !attempt.wait(fds, Some(deadline)) {
            return Ok(None);
        }
    }
}

/// What rank 0's host has decided. `variables`: those with which NCCL takes the interface of the link.
fn verdict(
    run: &HostRun,
    link: HostLink,
    message: HostMessage,
    variables: NcclVariables,
    delay: Duration,
) -> Result<Gathered, Reply> {
    let broken = || refused("rank 0's host broke the protocol: it answered without a layout for this host");
    match message {
        HostMessage::Arranged { layout, address, hosts, notices, sets_nccl } => {
            let own = run.host.first_rank..run.host.first_rank + run.host.ranks;
            let is_ours = layout.world_size() == run.world_size && layout.local_ranks() == own;
            if !is_ours || hosts.len() != layout.nodes() as usize {
                return Err(broken());
            }
            let printable = |notice: String| notice.chars().filter(|char| !char.is_control()).collect();
            let notices: Vec<String> = notices.into_iter().map(printable).collect();
            if notices.len() > MAX_NOTICES || notices.iter().any(|notice| notice.len() > MAX_NOTICE) {
                return Err(broken());
            }
            let nccl = NcclFinding { notices, sets_nccl, delay }.advice(variables);
            Ok(Gathered { layout, address, hosts, links: vec![link], nccl, delay })
        }
        // Only ranks that exist may be named to the ranks.
        HostMessage::Failed { reply: Reply::Refused { why } } => Err(refused(shortened(&why))),
        HostMessage::Failed { reply: Reply::PeerGone { peer, how } } if peer < run.world_size => {
            Err(Reply::PeerGone { peer, how: shortened(&how) })
        }
        HostMessage::Failed { reply: Reply::TimedOut { missing } }
            if missing.iter().all(|rank| *rank < run.world_size) =>
        {
            Err(Reply::TimedOut { missing })
        }
        _ => Err(broken()),
    }
}
