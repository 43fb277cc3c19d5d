//! To which addresses do the names of the nodes lead here? All names are looked up at the same time: a name server that
//! does not answer costs its timeout once.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use mgpu_control::nodes::Lookup;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::facts::Facts;

/// Longest wait for a name.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The addresses of each node's host, or why there are none.
pub(super) fn look_up(nodes: &[Facts]) -> Vec<Result<Vec<IpAddr>, String>> {
    let deadline = Instant::now() + TIMEOUT;
    let lookups: Vec<Result<Lookup, String>> = nodes.iter().map(|node| Lookup::start(&node.host)).collect();
    lookups.into_iter().map(|lookup| wait(&lookup?, deadline)).collect()
}

fn wait(lookup: &Lookup, deadline: Instant) -> Result<Vec<IpAddr>, String> {
    loop {
        if let Some(result) = lookup.result() {
            return Ok(result?.iter().map(|address| address.ip()).collect());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(format!("no name server answers within {} s", TIMEOUT.as_secs()));
        }
        let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut [PollFd::new(lookup.fd(), PollFlags::POLLIN)], timeout);
    }
}
