//! Names of ranks in messages.

/// The hosts of the ranks, if there are several: messages name them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankHosts {
    /// The first rank of each host and the name of the host, in ascending order.
    pub hosts: Vec<(u32, String)>,
}

impl RankHosts {
    /// "rank 5", or "rank 5 (host b)" if there are several hosts.
    pub fn name(&self, rank: u32) -> String {
        let host = self.hosts.iter().rev().find(|(first, _)| *first <= rank);
        match host.filter(|_| self.hosts.len() > 1) {
            Some((_, host)) => format!("rank {rank} (host {host})"),
            None => format!("rank {rank}"),
        }
    }
}
