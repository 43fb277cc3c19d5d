//! The values of settings. Every error names the flag or the variable, the value, and what it should be.

use std::net::Ipv6Addr;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::super::engine::Given;
use super::super::net::NetChoice;
use super::{AuthChoice, SettingsError};
use crate::launch::MAX_DURATION;

/// Most nodes of a job.
const MAX_NODES: u32 = 65_536;
/// Agents report every second.
const MIN_NODE_TIMEOUT: Duration = Duration::from_secs(3);

/// An error about a value: where it is from, the value, and what it should be.
pub(super) fn wrong(given: &Given<String>, should_be: &str) -> SettingsError {
    SettingsError::new(format!("{} is `{}`: {should_be}", given.from, given.value))
}

pub(in super::super) fn parse_nodes(given: &Given<String>) -> Result<RangeInclusive<u32>, SettingsError> {
    let number = |text: &str| text.trim().parse::<u32>().ok();
    let range = match given.value.split_once(':') {
        Some((min, max)) => number(min).zip(number(max)),
        None => number(&given.value).map(|count| (count, count)),
    };
    match range {
        Some((0, _)) => Err(wrong(given, "at least one node is needed")),
        Some((min, max)) if min > max => {
            Err(wrong(given, "it should be MIN:MAX, and MIN is greater than MAX"))
        }
        Some((_, max)) if max > MAX_NODES => {
            Err(wrong(given, &format!("at most {MAX_NODES} nodes are possible")))
        }
        Some((min, max)) => Ok(min..=max),
        None => Err(wrong(given, "it should be a number of nodes, such as 2, or MIN:MAX, such as 2:4")),
    }
}

/// Host and port of `a`, `a:29400`, `10.0.0.2:29400`, `fd00::2`, `[fd00::2]` and `[fd00::2]:29400`.
pub(super) fn parse_endpoint(given: &Given<String>) -> Result<(String, Option<u16>), SettingsError> {
    let text = given.value.trim();
    let malformed = || wrong(given, "it should be HOST or HOST:PORT, with an IPv6 address in brackets");
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, behind) = rest.split_once(']').ok_or_else(malformed)?;
            if !host.contains(':') {
                return Err(malformed());
            }
            match behind {
                "" => (host, None),
                _ => (host, Some(behind.strip_prefix(':').ok_or_else(malformed)?)),
            }
        }
        // Several colons without brackets: an IPv6 address without a port.
        None if text.matches(':').count() > 1 => (text, None),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    if !is_host(host) {
        return Err(malformed());
    }
    let number = |port: &str| port.parse().ok().filter(|port| *port != 0);
    match port.map(number) {
        Some(None) => Err(wrong(given, "its port should be a number from 1 to 65535")),
        port => Ok((host.to_owned(), port.flatten())),
    }
}

/// A host without a port.
pub(super) fn parse_host(given: &Given<String>) -> Result<String, SettingsError> {
    match parse_endpoint(given)? {
        (host, None) => Ok(host),
        (_, Some(_)) => Err(wrong(given, "it should be a host without a port")),
    }
}

/// True for a name, an IPv4 address, or an IPv6 address, which may have a scope such as `%eth0`.
fn is_host(text: &str) -> bool {
    if text.contains(':') {
        let address = text.split('%').next().unwrap_or_default();
        return address.parse::<Ipv6Addr>().is_ok();
    }
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "-._".contains(c))
}

pub(super) fn parse_port(given: &Given<String>) -> Result<u16, SettingsError> {
    let port = given.value.trim().parse().ok().filter(|port| *port != 0);
    port.ok_or_else(|| wrong(given, "it should be a port from 1 to 65535"))
}

/// torchrun's other backends need a server of their own; the two accepted ones are what mgpurun's rendezvous replaces.
pub(super) fn check_backend(backend: Option<Given<String>>) -> Result<(), SettingsError> {
    match backend {
        Some(given) if !["static", "c10d"].contains(&given.value.as_str()) => {
            Err(wrong(&given, "mgpurun has a rendezvous of its own and accepts static and c10d only"))
        }
        _ => Ok(()),
    }
}

/// The time to join in torchrun's configuration of the rendezvous, `KEY=VALUE,KEY=VALUE`.
pub(super) fn join_timeout(
    conf: Option<Given<String>>,
    notices: &mut Vec<String>,
) -> Result<Option<Duration>, SettingsError> {
    let Some(conf) = conf else { return Ok(None) };
    let (mut timeout, mut join_timeout, mut others) = (None, None, Vec::new());
    for part in conf.value.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (key, value) =
            part.split_once('=').ok_or_else(|| wrong(&conf, "it should be KEY=VALUE,KEY=VALUE"))?;
        let time = match key.trim() {
            "timeout" => &mut timeout,
            "join_timeout" => &mut join_timeout,
            other => {
                others.push(other.to_owned());
                continue;
            }
        };
        let seconds = parse_seconds(value.trim());
        *time = Some(seconds.ok_or_else(|| wrong(&conf, &format!("{key} should be a number of seconds")))?);
    }
    if !others.is_empty() {
        let have = if others.len() == 1 { "has" } else { "have" };
        notices.push(format!("{} of {} {have} no effect", others.join(", "), conf.from));
    }
    Ok(join_timeout.or(timeout))
}

fn parse_seconds(text: &str) -> Option<Duration> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.filter(|seconds| *seconds <= MAX_DURATION)
}

pub(in crate::nodes) fn parse_node_timeout(given: &Given<String>) -> Result<Duration, SettingsError> {
    let seconds = parse_seconds(given.value.trim()).filter(|seconds| *seconds >= MIN_NODE_TIMEOUT);
    seconds.ok_or_else(|| {
        wrong(given, "it should be a number of seconds, at least 3, since nodes report every second")
    })
}

pub(super) fn parse_net(given: &Given<String>) -> Result<NetChoice, SettingsError> {
    match given.value.trim() {
        "auto" => Ok(NetChoice::Auto),
        "tcp" => Ok(NetChoice::Tcp),
        "ucx" => Ok(NetChoice::Ucx),
        _ => Err(wrong(given, "it should be auto, tcp or ucx")),
    }
}

pub(super) fn parse_auth(given: &Given<String>) -> Result<AuthChoice, SettingsError> {
    match given.value.trim() {
        "auto" => Ok(AuthChoice::Auto),
        "secret" => Ok(AuthChoice::Secret),
        "munge" => Ok(AuthChoice::Munge),
        "none" => Ok(AuthChoice::None),
        _ => Err(wrong(given, "it should be auto, secret, munge or none")),
    }
}
