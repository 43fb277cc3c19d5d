//! The settings of a node in words, for `--dry-run`. The secret is not among them.

use super::{AuthChoice, NetChoice, NodeSettings, Ports, describe_nodes};

impl NodeSettings {
    /// "2 nodes (from SLURM_STEP_NUM_NODES)".
    pub(crate) fn describe_nodes(&self) -> String {
        format!("{}{}", describe_nodes(&self.nodes), self.source("nodes"))
    }

    /// A line for each setting, with the flag or the variable that it comes from.
    pub(crate) fn describe(&self) -> Vec<String> {
        let rank = self.node_rank.map_or("a node without a rank".to_owned(), |rank| format!("node {rank}"));
        let mut lines = vec![self.describe_nodes(), format!("this is {rank}{}", self.source("node rank"))];
        if let Some(engine) = self.engine {
            lines.push(format!("started by {engine}"));
        }
        lines.push(match &self.endpoint {
            Some((host, ports)) => {
                format!("node 0 is at {}{}", describe_endpoint(host, *ports), self.source("endpoint"))
            }
            None => "node 0 is where PMI says".to_owned(),
        });
        if let Some(id) = &self.run_id {
            lines.push(format!("run id {id}{}", self.source("run id")));
        }
        if let Some(address) = &self.local_addr {
            lines.push(format!("address of this node {address}{}", self.source("local address")));
        }
        let seconds = self.node_timeout.as_secs_f64();
        lines.push(format!("node timeout {seconds} s{}", self.source("node timeout")));
        if self.net != NetChoice::Auto {
            lines.push(format!("hosts connected by {}{}", self.net.name(), self.source("network")));
        }
        let auth = match self.auth {
            AuthChoice::Auto => "by a secret if there is one, otherwise by munge",
            AuthChoice::Secret => "by a secret",
            AuthChoice::Munge => "by munge",
            AuthChoice::None => "none: anybody who reaches node 0 can join",
        };
        lines.push(format!("authentication {auth}{}", self.source("authentication")));
        if let Some(file) = &self.secret_file {
            lines.push(format!("secret in the file {}{}", file.display(), self.source("secret file")));
        }
        lines
    }

    fn source(&self, setting: &str) -> String {
        let source = self.sources.iter().find(|(what, _)| *what == setting);
        source.map(|(_, from)| format!(" (from {from})")).unwrap_or_default()
    }
}

/// `a:29400` or `[fd00::2]:29400`, or without a port what it follows from.
fn describe_endpoint(host: &str, ports: Ports) -> String {
    match ports {
        Ports::One(port) if host.contains(':') => format!("[{host}]:{port}"),
        Ports::One(port) => format!("{host}:{port}"),
        Ports::OfJob => format!("{host}, with a port that follows from the run id"),
    }
}
