//! How an agent reaches the coordinator: which may start later, whose name may not exist yet, that may have several
//! addresses of which some lead nowhere, and whose port another program may have taken.
//!
//! Every pair of an address and a port is a *target* with its own attempts. Attempts start 250 ms apart, or at once when
//! the one before has failed, and a target that failed is tried again after a pause that grows. The first target that
//! answers as the coordinator of this run is taken and the other attempts are dropped, so the coordinator authenticates
//! one connection of each agent. Meanwhile the name is looked up again and again: the coordinator's address may change
//! until it is up.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::address::Endpoint;
use super::auth::Credentials;
use super::handshake::Fault;
use super::link::Link;
use super::opening::Opening;
use super::preamble::RunTag;
use super::resolve::{Lookup, literal};

/// Time between the starts of two attempts, unless the first one has failed (as in RFC 8305).
const STAGGER: Duration = Duration::from_millis(250);
/// First and longest pause before a target is tried again.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// First and longest pause before a name that has no address is looked up again.
const LOOKUP_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Pause before a name whose addresses are being tried is looked up again.
const REFRESH_PAUSE: Duration = Duration::from_secs(2);

/// Why there is no link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DialError {
    /// No coordinator of this run answered before the deadline. The text names each address with its last reason.
    Unreachable(String),
    /// The coordinator has other credentials.
    Authentication(String),
    /// The coordinator has another version.
    Incompatible(String),
}

impl fmt::Display for DialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DialError::Unreachable(why) | DialError::Authentication(why) | DialError::Incompatible(why) => {
                f.write_str(why)
            }
        }
    }
}

impl std::error::Error for DialError {}

/// One address and port.
struct Target {
    address: SocketAddr,
    attempt: Option<Opening>,
    /// When it is tried next.
    try_at: Instant,
    pause: Duration,
    /// Why the last attempt failed.
    reason: Option<String>,
}

/// Connects to the coordinator.
///
/// Poll [`fds`](Self::fds). When one is ready or [`next_deadline`](Self::next_deadline) has passed, call
/// [`service`](Self::service), until it returns the result. No call blocks.
pub struct Dialer {
    endpoint: Endpoint,
    ports: Vec<u16>,
    local_address: Option<IpAddr>,
    credentials: Credentials,
    run: RunTag,
    deadline: Instant,
    lookup: Option<Lookup>,
    /// When the name is looked up next; `None` for an address.
    lookup_at: Option<Instant>,
    lookup_pause: Duration,
    lookup_problem: Option<String>,
    targets: Vec<Target>,
    /// No attempt starts before this time.
    start_at: Instant,
}

impl Dialer {
    /// Starts to connect to `endpoint`: at its port, or at each of `ports` in turn if it has none. `local_address`: from
    /// this address. Gives up at `deadline`.
    pub fn new(
        endpoint: &Endpoint,
        ports: &[u16],
        local_address: Option<IpAddr>,
        credentials: Credentials,
        run: RunTag,
        deadline: Instant,
    ) -> Self {
        let now = Instant::now();
        let literal = literal(endpoint.host());
        let mut dialer = Dialer {
            endpoint: endpoint.clone(),
            ports: endpoint.port().map_or(ports.to_vec(), |port| vec![port]),
            local_address,
            credentials,
            run,
            deadline,
            lookup: None,
            lookup_at: literal.is_none().then_some(now),
            lookup_pause: LOOKUP_PAUSE.0,
            lookup_problem: None,
            targets: Vec::new(),
            start_at: now,
        };
        dialer.set_addresses(literal.as_slice(), now);
        dialer
    }

    /// The descriptors with the events to poll them for.
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        let lookup = self.lookup.iter().map(|lookup| PollFd::new(lookup.fd(), PollFlags::POLLIN));
        lookup.chain(self.targets.iter().flat_map(|target| &target.attempt).map(Opening::poll_fd)).collect()
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub fn next_deadline(&self) -> Instant {
        let attempts = self.targets.iter().flat_map(|target| &target.attempt).map(Opening::deadline);
        let idle = self.targets.iter().filter(|target| target.attempt.is_none());
        let starts =
            idle.map(|target| target.try_at.max(self.start_at)).filter(|_| self.answered().is_none());
        let lookup = self.lookup_at.filter(|_| self.lookup.is_none());
        attempts.chain(starts).chain(lookup).fold(self.deadline, Instant::min)
    }

    /// Looks up, connects and authenticates. Returns the result as soon as there is one.
    pub fn service(&mut self, now: Instant) -> Option<Result<Link, DialError>> {
        self.look_up(now);
        loop {
            match self.serve_attempts(now) {
                Ok(None) => {}
                Ok(Some(link)) => return Some(Ok(link)),
                Err(error) => return Some(Err(error)),
            }
            if now >= self.deadline {
                return Some(Err(DialError::Unreachable(self.reasons())));
            }
            if !self.start_attempt(now) {
                return None;
            }
        }
    }

    /// Why there is no link yet: each address with its last reason.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<(IpAddr, &str, Vec<u16>)> = Vec::new();
        for target in &self.targets {
            let (ip, port) = (target.address.ip(), target.address.port());
            let without = if target.attempt.is_some() { "no answer yet" } else { "not tried yet" };
            let reason = target.reason.as_deref().unwrap_or(without);
            match reasons.iter_mut().find(|(other, text, _)| *other == ip && *text == reason) {
                Some((_, _, ports)) => ports.push(port),
                None => reasons.push((ip, reason, vec![port])),
            }
        }
        let ports_of = |ports: Vec<u16>| match self.ports.len() {
            1 => String::new(),
            _ => format!(" port {}", ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")),
        };
        let listed =
            reasons.into_iter().map(|(ip, reason, ports)| format!("{ip}{}: {reason}", ports_of(ports)));
        let problem = self
            .lookup_problem
            .clone()
            .or_else(|| self.lookup.as_ref().map(|_| "no name server answers".into()));
        let problem = problem.filter(|_| self.targets.is_empty());
        let why: Vec<String> = listed.chain(problem).collect();
        format!(
            "{}: {}",
            self.place(),
            if why.is_empty() { "not looked up yet".into() } else { why.join("; ") }
        )
    }

    /// The endpoint, with its port if there is one only.
    fn place(&self) -> Endpoint {
        match self.ports[..] {
            [port] => self.endpoint.with_port(port),
            _ => self.endpoint.clone(),
        }
    }

    /// The target that has answered as the coordinator.
    fn answered(&self) -> Option<usize> {
        self.targets.iter().position(|target| target.attempt.as_ref().is_some_and(Opening::is_answered))
    }

    fn look_up(&mut self, now: Instant) {
        if let Some(result) = self.lookup.as_ref().and_then(Lookup::result) {
            self.lookup = None;
            self.lookup_at = Some(now + REFRESH_PAUSE);
            match result {
                Ok(addresses) => self.set_addresses(&addresses, now),
                Err(why) => self.note_lookup_problem(why, now),
            }
        }
        if self.lookup.is_none() && self.lookup_at.is_some_and(|at| at <= now) {
            match Lookup::start(self.endpoint.host()) {
                Ok(lookup) => self.lookup = Some(lookup),
                Err(why) => self.note_lookup_problem(why, now),
            }
        }
    }

    fn note_lookup_problem(&mut self, why: String, now: Instant) {
        self.lookup_problem = Some(why);
        self.lookup_at = Some(now + self.lookup_pause);
        self.lookup_pause = LOOKUP_PAUSE.1.min(2 * self.lookup_pause);
    }

    /// Replaces the addresses. Attempts that run go on.
    fn set_addresses(&mut self, addresses: &[SocketAddr], now: Instant) {
        self.lookup_problem = None;
        let is_listed = |target: &Target| addresses.iter().any(|address| address.ip() == target.address.ip());
        self.targets.retain(|target| target.attempt.is_some() || is_listed(target));
        for port in &self.ports {
            for address in addresses {
                let mut address = *address;
                address.set_port(*port);
                if self.targets.iter().all(|target| target.address != address) {
                    let (pause, _) = RETRY_PAUSE;
                    self.targets.push(Target { address, attempt: None, try_at: now, pause, reason: None });
                }
            }
        }
    }

    /// Starts the attempt that is due, if one is. At most one target runs beyond the point where it has answered.
    fn start_attempt(&mut self, now: Instant) -> bool {
        if now < self.start_at || self.answered().is_some() {
            return false;
        }
        let idle = self.targets.iter_mut().filter(|target| target.attempt.is_none() && target.try_at <= now);
        let Some(target) = idle.min_by_key(|target| target.try_at) else { return false };
        let attempt = match self.local_address {
            Some(local) if local.is_ipv4() != target.address.is_ipv4() => {
                Err(Fault::Connection(format!("it is of another family than the local address {local}")))
            }
            local => Opening::dial(target.address, local, &self.credentials, self.run, now),
        };
        match attempt {
            Ok(attempt) => {
                target.attempt = Some(attempt);
                self.start_at = now + STAGGER;
            }
            Err(fault) => target.fail(&fault, now),
        }
        true
    }

    fn serve_attempts(&mut self, now: Instant) -> Result<Option<Link>, DialError> {
        for index in 0..self.targets.len() {
            let target = &mut self.targets[index];
            let Some(attempt) = &mut target.attempt else { continue };
            let fault = match attempt.service(now) {
                Ok(None) if !attempt.is_answered() => continue,
                Ok(None) => {
                    self.drop_other_attempts(index, now);
                    return Ok(None);
                }
                Ok(Some(channel)) => match target.attempt.take().map(|attempt| attempt.into_link(channel)) {
                    Some(Ok(link)) => return Ok(Some(link)),
                    Some(Err(fault)) => fault,
                    None => continue,
                },
                Err(fault) => fault,
            };
            target.fail(&fault, now);
            self.start_at = now;
            let text = || format!("{} ({}) {fault}", self.place(), self.targets[index].address.ip());
            match fault {
                Fault::Authentication(_) => return Err(DialError::Authentication(text())),
                // Among several ports it may be the coordinator of another job.
                Fault::Version(_) if self.ports.len() == 1 => return Err(DialError::Incompatible(text())),
                _ => {}
            }
        }
        Ok(None)
    }

    fn drop_other_attempts(&mut self, answered: usize, now: Instant) {
        for (index, target) in self.targets.iter_mut().enumerate() {
            if index != answered && target.attempt.take().is_some() {
                target.try_at = now;
            }
        }
    }
}

impl Target {
    fn fail(&mut self, fault: &Fault, now: Instant) {
        self.attempt = None;
        self.reason = Some(fault.to_string());
        self.try_at = now + self.pause;
        self.pause = RETRY_PAUSE.1.min(2 * self.pause);
    }
}
