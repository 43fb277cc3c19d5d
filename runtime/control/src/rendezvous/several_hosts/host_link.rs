//! The link to another host: its messages, and whether the host is still there.

use std::time::{Duration, Instant};

use nix::poll::PollFd;
use serde::{Deserialize, Serialize};

use super::HOST_TIMEOUT;
use super::arrangement::Arrival;
use crate::nccl::{NcclAnswer, NcclTarget};
use crate::nodes::{Layout, Link, LinkState, Loss, RelayMessage};
use crate::rendezvous::message::{Reply, shortened};

/// Time between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// What the threads of two hosts say to each other.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "host", rename_all = "snake_case")]
pub(super) enum HostMessage {
    /// To rank 0's host: these ranks are here.
    Arrived { arrival: Arrival },
    /// From rank 0's host, to a host that has said which interface NCCL takes there: try to reach these interfaces of another
    /// one.
    Reach { targets: Vec<NcclTarget>, tag: String },
    /// The answer.
    Reached { answer: NcclAnswer },
    /// From rank 0's host: all hosts have come. With the address by which this host is reached, and the names of all.
    Arranged {
        layout: Layout,
        address: std::net::IpAddr,
        hosts: Vec<String>,
        /// What the check of NCCL's interfaces has found, for the ranks.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        notices: Vec<String>,
        /// The ranks set NCCL's variables.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        sets_nccl: bool,
    },
    /// From rank 0's host: the run does not start. The reply is for the ranks.
    Failed { reply: Reply },
    /// In both directions: between a server and the hub.
    Relay { message: RelayMessage },
    /// In both directions.
    Heartbeat,
}

/// Why a host is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HostLoss {
    /// The process that served its ranks has ended.
    Ended,
    /// It does not answer.
    Silent,
    /// It broke the protocol.
    Broken(String),
}

impl HostLoss {
    /// How a rank of the host counts as ended, as a predicate. `leader`: the rank that served the host's ranks.
    pub(super) fn describe(&self, host: &str, rank: u32, leader: u32) -> String {
        match self {
            HostLoss::Ended if rank == leader => {
                format!("ended without a goodbye, and with it the rendezvous of host {host}")
            }
            HostLoss::Ended => {
                format!("is lost: the process that served host {host} (rank {leader}) has ended")
            }
            HostLoss::Silent => format!("is lost: host {host} does not answer"),
            HostLoss::Broken(problem) => {
                format!("is lost: the connection with host {host} broke the protocol: {problem}")
            }
        }
    }
}

/// A link with heartbeats.
pub(super) struct HostLink {
    link: Link,
    heard_at: Instant,
    next_heartbeat: Instant,
    loss: Option<HostLoss>,
}

impl HostLink {
    pub(super) fn new(link: Link, now: Instant) -> Self {
        HostLink { link, heard_at: now, next_heartbeat: now + HEARTBEAT, loss: None }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        self.link.poll_fd()
    }

    pub(super) fn next_deadline(&self) -> Instant {
        let silent_at = self.heard_at + HOST_TIMEOUT;
        self.link.next_deadline().into_iter().fold(self.next_heartbeat.min(silent_at), Instant::min)
    }

    pub(super) fn send(&mut self, message: &HostMessage) {
        self.link.send(message);
    }

    /// Says goodbye: call [`service`](Self::service) until the link is lost.
    pub(super) fn close(&mut self) {
        self.link.close();
    }

    /// Why the host is lost, if it is.
    pub(super) fn loss(&self) -> Option<&HostLoss> {
        self.loss.as_ref()
    }

    /// The other side sent nonsense.
    pub(super) fn lose(&mut self, problem: String) {
        // It may quote what the host has sent.
        self.loss.get_or_insert(HostLoss::Broken(shortened(&problem)));
    }

    /// Reads, writes and sends a heartbeat if one is due. Returns the messages that have arrived.
    pub(super) fn service(&mut self, now: Instant) -> Vec<HostMessage> {
        if now >= self.next_heartbeat {
            self.send(&HostMessage::Heartbeat);
            self.next_heartbeat = now + HEARTBEAT;
        }
        let state = self.link.service(now);
        let mut messages = Vec::new();
        loop {
            match self.link.next_message::<HostMessage>() {
                Ok(Some(message)) => {
                    self.heard_at = now;
                    messages.push(message);
                }
                Ok(None) => break,
                Err(problem) => {
                    self.lose(problem);
                    break;
                }
            }
        }
        match state {
            LinkState::Lost(loss) => {
                self.loss.get_or_insert(match loss {
                    Loss::Ended => HostLoss::Ended,
                    Loss::Unreachable => HostLoss::Silent,
                    Loss::Protocol(problem) => HostLoss::Broken(shortened(&problem)),
                });
            }
            // What it sent while this process was stopped has been read by now.
            LinkState::Open if now.saturating_duration_since(self.heard_at) >= HOST_TIMEOUT => {
                self.loss.get_or_insert(HostLoss::Silent);
            }
            LinkState::Open => {}
        }
        messages.retain(|message| !matches!(message, HostMessage::Heartbeat));
        messages
    }
}
