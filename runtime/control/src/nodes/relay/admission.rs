//! Admission over nodes: are the nodes compatible, and are all of them ready? Pure.
//!
//! The server of a node has compared its own ranks before it is ready, so one manifest speaks for all of them. GPUs are
//! compared within a node only: another host has other ones.

use std::collections::HashMap;

use super::{HubAction, NodeManifest, NodeProgram, RelayMessage};
use crate::nodes::Layout;
use crate::rendezvous::PreflightFault;

/// Maximum length of a version or a path in a manifest, in bytes.
const MAX_TEXT: usize = 4096;

#[derive(Debug)]
pub(super) struct Admission {
    layout: Layout,
    hosts: Vec<String>,
    state: State,
    ready: Vec<bool>,
    nodes_ready: u32,
    /// The ranks that are known to have joined, on nodes that are not ready.
    joined: Vec<bool>,
    /// The first node that was ready, and its manifest.
    first: Option<(u32, NodeManifest)>,
    /// The first program of each number.
    programs: HashMap<u32, NodeProgram>,
}

#[derive(Debug, PartialEq)]
enum State {
    Gathering,
    Admitted,
    /// A node is incompatible, or a rank ended before all had joined.
    Stopped,
    /// The time to join has passed without these ranks.
    GivenUp(Vec<u32>),
}

impl Admission {
    pub(super) fn new(layout: Layout, hosts: Vec<String>) -> Self {
        Admission {
            hosts,
            state: State::Gathering,
            ready: vec![false; layout.nodes() as usize],
            nodes_ready: 0,
            joined: vec![false; layout.world_size() as usize],
            first: None,
            programs: HashMap::new(),
            layout,
        }
    }

    pub(super) fn is_admitted(&self) -> bool {
        self.state == State::Admitted
    }

    pub(super) fn join(&mut self, ranks: &[u32]) {
        ranks.iter().for_each(|rank| self.joined[*rank as usize] = true);
    }

    /// A rank has ended. If the ranks are not admitted yet, they never will be.
    pub(super) fn stop(&mut self) {
        if self.state == State::Gathering {
            self.state = State::Stopped;
        }
    }

    pub(super) fn ready(&mut self, node: u32, manifest: NodeManifest) -> Result<Vec<HubAction>, String> {
        self.check_manifest(node, &manifest)?;
        if std::mem::replace(&mut self.ready[node as usize], true) {
            return Err(format!("node {node} was ready twice"));
        }
        self.nodes_ready += 1;
        if self.state != State::Gathering {
            return Ok(Vec::new());
        }
        if let Err((rank, fault, why)) = self.compare(node, &manifest) {
            self.state = State::Stopped;
            let refused = RelayMessage::Refused { rank, why: why.clone() };
            return Ok(vec![
                HubAction::Send { node, message: refused },
                HubAction::Incompatible { node, fault, why },
            ]);
        }
        for program in &manifest.programs {
            self.programs.entry(program.number).or_insert_with(|| program.clone());
        }
        self.first.get_or_insert((node, manifest));
        if self.nodes_ready < self.layout.nodes() {
            return Ok(Vec::new());
        }
        self.state = State::Admitted;
        Ok(self.to_all(&RelayMessage::Admit).chain([HubAction::Admitted]).collect())
    }

    /// The time to join has passed on `node`, whose ranks are there except for `missing`.
    pub(super) fn give_up(&mut self, node: u32, missing: &[u32]) -> Vec<HubAction> {
        match &self.state {
            State::Gathering => {}
            State::GivenUp(missing) => {
                return vec![HubAction::Send {
                    node,
                    message: RelayMessage::GaveUp { missing: missing.clone() },
                }];
            }
            // The ranks get another answer, which is on its way.
            State::Admitted | State::Stopped => return Vec::new(),
        }
        for rank in self.layout.ranks_of(node) {
            self.joined[rank as usize] = !missing.contains(&rank);
        }
        let has_joined =
            |rank: u32| self.joined[rank as usize] || self.ready[self.layout.node_of(rank) as usize];
        let missing: Vec<u32> = (0..self.layout.world_size()).filter(|rank| !has_joined(*rank)).collect();
        let told = self.to_all(&RelayMessage::GaveUp { missing: missing.clone() }).collect();
        self.state = State::GivenUp(missing);
        told
    }

    fn to_all(&self, message: &RelayMessage) -> impl Iterator<Item = HubAction> {
        (0..self.layout.nodes()).map(|node| HubAction::Send { node, message: message.clone() })
    }

    /// Checks the manifest's bounds.
    fn check_manifest(&self, node: u32, manifest: &NodeManifest) -> Result<(), String> {
        let ranks = self.layout.ranks_of(node);
        let versions = [&manifest.driver, &manifest.nccl].into_iter().flatten();
        let texts = versions.chain(manifest.programs.iter().map(|program| &program.path));
        if let Some(text) = texts.into_iter().find(|text| text.len() > MAX_TEXT) {
            return Err(format!("node {node} describes itself with a text of {} bytes", text.len()));
        }
        if manifest.programs.len() > ranks.len() {
            return Err(format!(
                "node {node} with {} ranks runs {} programs",
                ranks.len(),
                manifest.programs.len()
            ));
        }
        match manifest.programs.iter().find(|program| !ranks.contains(&program.rank)) {
            Some(program) => Err(format!("node {node} speaks for rank {}", program.rank)),
            None => Ok(()),
        }
    }

    /// Compares a node with those that were ready before. Returns the refused rank with the difference.
    fn compare(&self, node: u32, new: &NodeManifest) -> Result<(), (u32, PreflightFault, String)> {
        let Some((first, old)) = &self.first else { return Ok(()) };
        let rank = self.layout.ranks_of(node).start;
        let (one, other) = (self.name(self.layout.ranks_of(*first).start), self.name(rank));
        if old.version != new.version {
            let why = format!(
                "{one} uses version {} of the protocol and {other} version {}: build both from the same release",
                old.version, new.version
            );
            return Err((rank, PreflightFault::Protocol, why));
        }
        for program in &new.programs {
            let Some(old) = self.programs.get(&program.number) else { continue };
            let (Some(ours), Some(theirs)) = (old.digest, program.digest) else { continue };
            if ours != theirs {
                let why = differing_programs(&self.name(old.rank), old, &self.name(program.rank), program);
                return Err((program.rank, PreflightFault::Program, why));
            }
        }
        let versions = [
            ("NVIDIA driver", &old.driver, &new.driver, "install one version of it on all hosts"),
            ("NCCL", &old.nccl, &new.nccl, "check LD_LIBRARY_PATH on both hosts"),
        ];
        for (what, ours, theirs, remedy) in versions {
            if ours != theirs {
                let name = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".into());
                let (ours, theirs) = (name(ours), name(theirs));
                let why = format!("{one} uses {what} {ours} and {other} {theirs}: {remedy}");
                return Err((rank, PreflightFault::Versions, why));
            }
        }
        Ok(())
    }

    /// A rank with its host.
    fn name(&self, rank: u32) -> String {
        let node = self.layout.node_of(rank);
        match self.hosts.get(node as usize) {
            Some(host) => format!("rank {rank} (host {host})"),
            None => format!("rank {rank} (node {node})"),
        }
    }
}

fn differing_programs(one: &str, old: &NodeProgram, other: &str, new: &NodeProgram) -> String {
    match old.path == new.path {
        true => format!(
            "{one} and {other} run different versions of {}: install the same file on all hosts",
            old.path
        ),
        false => format!(
            "{one} runs {} and {other} runs {}, with another content: all ranks run one program",
            old.path, new.path
        ),
    }
}
