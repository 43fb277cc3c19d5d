//! What a node says about itself when it joins, and whether two nodes contradict each other. Pure.
//!
//! All nodes of a job run the same command. Digests are compared and not paths: every host may have its own copy of the
//! program. The first difference is an error that names both hosts and both values.

use mgpu_control::nccl::NcclCard;
use serde::{Deserialize, Serialize};

use super::net::HostNet;

/// What a node says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeCard {
    /// Name of its host.
    pub(crate) host: String,
    /// Its number, if its command line or environment says so.
    pub(crate) node_rank: Option<u32>,
    /// Smallest and largest number of nodes that it expects.
    pub(crate) nodes: (u32, u32),
    /// Number of its ranks.
    pub(crate) ranks: u32,
    /// `cpu` or `nccl`.
    pub(crate) backend: String,
    /// What can connect its ranks with those of other hosts. (Of another version, which is refused, it may be missing.)
    #[serde(default = "HostNet::tcp")]
    pub(crate) net: HostNet,
    /// Version of its `mgpurun`.
    pub(crate) version: String,
    /// Path of the program.
    pub(crate) program: String,
    /// Digest of the program's file; `None` if it cannot be read.
    pub(crate) digest: Option<String>,
    /// The program's arguments.
    pub(crate) arguments: Vec<String>,
    /// Where NCCL of its ranks is going to listen, if they use it and that can be predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nccl: Option<NcclCard>,
}

impl NodeCard {
    /// The first contradiction between this node and `other`, as text.
    pub(crate) fn contradiction(&self, other: &NodeCard) -> Option<String> {
        let (a, b) = (&self.host, &other.host);
        let differ = |what: &str, ours: &str, theirs: &str| {
            Some(format!("{what}: {ours} on host {a}, {theirs} on host {b}"))
        };
        if self.version != other.version {
            return differ("nodes have different versions of mgpurun", &self.version, &other.version);
        }
        if self.nodes != other.nodes {
            let [ours, theirs] = [self.nodes, other.nodes].map(|(min, max)| match min == max {
                true => min.to_string(),
                false => format!("{min}:{max}"),
            });
            return differ("nodes disagree on their number (--nnodes)", &ours, &theirs);
        }
        if let (Some(ours), Some(theirs)) = (self.node_rank, other.node_rank)
            && ours == theirs
        {
            return Some(format!(
                "hosts {a} and {b} both have node rank {ours}: give each its own --node-rank"
            ));
        }
        if self.backend != other.backend {
            return differ("nodes have different backends (--backend)", &self.backend, &other.backend);
        }
        if self.net.choice != other.net.choice {
            let [ours, theirs] = [self, other].map(|card| card.net.choice.name());
            return differ("nodes have different networks (--net)", ours, theirs);
        }
        if let (Some(ours), Some(theirs)) = (&self.digest, &other.digest)
            && ours != theirs
        {
            let [ours, theirs] = [(&self.program, ours), (&other.program, theirs)]
                .map(|(program, digest)| format!("{program} with digest {digest}"));
            return differ("nodes have different programs", &ours, &theirs);
        }
        self.different_argument(other)
    }

    fn different_argument(&self, other: &NodeCard) -> Option<String> {
        let count = self.arguments.len().max(other.arguments.len());
        let index = (0..count).find(|index| self.arguments.get(*index) != other.arguments.get(*index))?;
        let name = |card: &NodeCard| match card.arguments.get(index) {
            Some(argument) => format!("`{argument}`"),
            None => "nothing".to_owned(),
        };
        Some(format!(
            "argument {} of the program differs between nodes: {} on host {}, {} on host {}",
            index + 1,
            name(self),
            self.host,
            name(other),
            other.host
        ))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The card of a node with two ranks.
    pub(crate) fn card(host: &str, node_rank: Option<u32>) -> NodeCard {
        NodeCard {
            host: host.into(),
            node_rank,
            nodes: (2, 2),
            ranks: 2,
            backend: "cpu".into(),
            net: HostNet::tcp(),
            version: "1".into(),
            program: "/bin/x".into(),
            digest: Some("77".into()),
            arguments: vec!["--net".into(), "lenet5".into()],
            nccl: None,
        }
    }

    #[test]
    fn contradictions_name_both_hosts_and_both_values() {
        let (a, b) = (card("a", Some(0)), card("b", Some(1)));
        assert_eq!(a.contradiction(&b), None);
        // Every host may have its own copy, and its own number of GPUs.
        assert_eq!(a.contradiction(&NodeCard { program: "/opt/x".into(), ranks: 8, ..b.clone() }), None);
        assert_eq!(a.contradiction(&NodeCard { digest: None, ..b.clone() }), None);
        let arguments = vec!["--net".into(), "deep".into()];
        for (other, expected) in [
            (NodeCard { version: "2".into(), ..b.clone() }, "versions of mgpurun: 1 on host a, 2 on host b"),
            (NodeCard { nodes: (1, 3), ..b.clone() }, "(--nnodes): 2 on host a, 1:3 on host b"),
            (NodeCard { node_rank: Some(0), ..b.clone() }, "hosts a and b both have node rank 0"),
            (NodeCard { backend: "nccl".into(), ..b.clone() }, "(--backend): cpu on host a, nccl on host b"),
            (
                NodeCard { digest: Some("78".into()), ..b.clone() },
                "/bin/x with digest 77 on host a, /bin/x with",
            ),
            (
                NodeCard { arguments, ..b.clone() },
                "argument 2 of the program differs between nodes: `lenet5` on host a, `deep` on host b",
            ),
            (NodeCard { arguments: vec!["--net".into()], ..b }, "`lenet5` on host a, nothing on host b"),
        ] {
            let text = a.contradiction(&other).unwrap();
            assert!(text.contains(expected), "{text}");
        }
    }
}
