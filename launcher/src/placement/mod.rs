//! Which cores each rank may use.
//!
//! The kernel knows better than any list made beforehand which core is free this moment, and worse which memory a rank
//! will use for the next hours. So ranks are kept on the NUMA node where their memory or their GPU is, and left alone
//! within it:
//!
//! | `--bind` | a rank gets |
//! |---|---|
//! | `none` | all cores |
//! | `numa` | every core of one NUMA node: that of its GPU, else nodes in turn, filled in proportion to their cores |
//! | `core` | a share of the cores that no other rank has |
//! | `auto` | `numa` where ranks have GPUs whose node is known, or fill several nodes of the same size evenly; `core` where each rank's share is several whole nodes; else `none` |
//!
//! **Why `auto` does not bind on one node.** A bound rank cannot leave the core on which something else wants to run, and
//! its peers wait for it. Measured with 2 ranks on 2 cores while others were compiling there: a training step took 3.2 to
//! 3.4 ms bound and 2.4 to 2.5 ms unbound; with two such jobs at once 5.7 and 4.1 ms; with several compilers (a load of 5)
//! 3.5 ms either way. The time of an all-reduce was the same within the noise (0.36 and 0.35 µs for 4 bytes, 162 µs for
//! 4 MiB). So binding won nothing and lost up to a third. Ranks that start on the same core part by themselves (see the
//! runtime's `comm/cpu/cores.rs`). Several nodes could not be measured; there the memory decides.
//!
//! **Shares.** With `core` the ranks divide *all* cores, in the order of the nodes: two jobs at once then both use the
//! whole machine, where a job that took the first few cores would sit on those of the other. Shares differ by one
//! physical core at most, and hyper-threads of a core stay together unless there are more ranks than physical cores.
//! Ranks near a GPU divide the cores of its node. Where more ranks are near a node than it has cores, each of them gets
//! the whole node.
//!
//! **More ranks than cores** are never bound: two ranks bound to one core would wait for each other while another core
//! is idle.
//!
//! A rank also learns how many threads it should use (`MGPU_THREADS`, `OMP_NUM_THREADS`): the cores it has been given,
//! divided by the ranks that have the same, and never more than its part of a control group's quota.
//!
//! Everything stays within the affinity mask of the launcher itself, so `taskset` and batch systems have the last word.

mod core_set;
mod gpu;
mod topology;

use std::cmp::Reverse;

pub use core_set::CoreSet;
pub use gpu::Gpu;
pub(crate) use gpu::{Listed, list as list_gpus, visible as visible_gpus};
pub use topology::{Node, Topology};

/// How ranks are bound to cores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Bind {
    /// To NUMA nodes where that helps, else not.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// To a share of the cores each.
    Core,
    /// To a whole NUMA node each.
    Numa,
}

/// The place of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// The cores it is bound to; `None`: all that the launcher may use.
    pub cores: Option<CoreSet>,
    /// The threads it should use.
    pub threads: usize,
}

/// Places a rank for each entry of `gpus`, the NUMA nodes of the ranks' GPUs where they have one and it is known.
///
/// ```
/// use mgpurun::placement::{Bind, Topology, place};
/// // Nothing is known of the machine: nobody is bound, one thread each.
/// let places = place(&Topology::default(), Bind::Core, &[None, None]);
/// assert!(places.iter().all(|place| place.cores.is_none() && place.threads == 1));
/// ```
pub fn place(topology: &Topology, bind: Bind, gpus: &[Option<u32>]) -> Vec<Placement> {
    let ranks = gpus.len();
    let available = topology.all().len();
    let index = |number: &u32| topology.nodes.iter().position(|node| node.number == *number);
    let near: Vec<Option<usize>> = gpus.iter().map(|gpu| gpu.as_ref().and_then(index)).collect();
    let bind = match bind {
        _ if ranks > available => Bind::None,
        Bind::Auto => choose(topology, &near),
        chosen => chosen,
    };
    let sets: Vec<Option<CoreSet>> = match bind {
        Bind::None | Bind::Auto => vec![None; ranks],
        Bind::Core if near.iter().all(Option::is_none) => {
            let nodes: Vec<&Node> = topology.nodes.iter().collect();
            divide(&nodes, ranks).into_iter().map(Some).collect()
        }
        Bind::Core => shares_of_homes(topology, &homes(topology, &near)),
        Bind::Numa => {
            homes(topology, &near).into_iter().map(|home| Some(topology.nodes[home].all())).collect()
        }
    };
    // Without a quota the cores alone decide, however they could be divided.
    let quota = if topology.usable < available { topology.usable / ranks.max(1) } else { usize::MAX };
    let threads = |set: &Option<CoreSet>| {
        let sharing = sets.iter().filter(|other| *other == set).count();
        let share = set.as_ref().map_or(available, CoreSet::len) / sharing;
        share.min(quota).max(1)
    };
    sets.iter().map(|set| Placement { cores: set.clone(), threads: threads(set) }).collect()
}

/// What `auto` is for these ranks.
fn choose(topology: &Topology, near: &[Option<usize>]) -> Bind {
    let (ranks, nodes) = (near.len(), topology.nodes.len());
    let even = topology.nodes.windows(2).all(|pair| pair[0].cores.len() == pair[1].cores.len());
    match nodes {
        0 | 1 => Bind::None,
        _ if near.iter().any(Option::is_some) => Bind::Numa,
        _ if !even || ranks < 2 => Bind::None,
        _ if ranks.is_multiple_of(nodes) => Bind::Numa,
        _ if nodes.is_multiple_of(ranks) => Bind::Core,
        _ => Bind::None,
    }
}

/// The node each rank belongs to: near its GPU, or where there are most cores for each rank so far. Ranks without a GPU
/// are put on the nodes in ascending order, so that neighbours are neighbours.
fn homes(topology: &Topology, near: &[Option<usize>]) -> Vec<usize> {
    let mut ranks_on: Vec<usize> = (0..topology.nodes.len())
        .map(|node| near.iter().filter(|home| **home == Some(node)).count())
        .collect();
    let mut rest = Vec::new();
    for _ in near.iter().filter(|home| home.is_none()) {
        // Cores for each rank if one more came, compared as fractions; the first of equals.
        let better = |best: usize, node: usize| {
            let cores = |node: usize| topology.nodes[node].cores.len();
            let (left, right) = (cores(node) * (ranks_on[best] + 1), cores(best) * (ranks_on[node] + 1));
            if left > right { node } else { best }
        };
        let node = (0..ranks_on.len()).reduce(better).unwrap_or(0);
        ranks_on[node] += 1;
        rest.push(node);
    }
    rest.sort_unstable_by_key(|node| Reverse(*node));
    near.iter().map(|home| home.or_else(|| rest.pop()).unwrap_or(0)).collect()
}

/// The ranks of each node divide its cores, or have all of them where they are too many.
fn shares_of_homes(topology: &Topology, homes: &[usize]) -> Vec<Option<CoreSet>> {
    let mut sets = vec![None; homes.len()];
    for (index, node) in topology.nodes.iter().enumerate() {
        let ranks: Vec<usize> = (0..homes.len()).filter(|rank| homes[*rank] == index).collect();
        let shares = match ranks.len() {
            0 => continue,
            many if many > node.all().len() => vec![node.all(); many],
            some => divide(&[node], some),
        };
        for (rank, share) in ranks.into_iter().zip(shares) {
            sets[rank] = Some(share);
        }
    }
    sets
}

/// Contiguous shares for `ranks` ranks, at most as many as there are hyper-threads.
fn divide(nodes: &[&Node], ranks: usize) -> Vec<CoreSet> {
    let physical: Vec<&CoreSet> = nodes.iter().flat_map(|node| &node.cores).collect();
    let share = |rank: usize, of: usize| rank * of / ranks..(rank + 1) * of / ranks;
    if ranks <= physical.len() {
        return (0..ranks)
            .map(|rank| physical[share(rank, physical.len())].iter().copied().collect())
            .collect();
    }
    // Hyper-threads of a core next to each other, so that a share has few cores in common with others.
    let threads: Vec<usize> = physical.iter().flat_map(|core| core.iter()).collect();
    (0..ranks).map(|rank| threads[share(rank, threads.len())].iter().copied().collect()).collect()
}

/// Why ranks that should be bound are not.
pub(crate) fn unmet(topology: &Topology, bind: Bind, places: &[Placement]) -> Option<String> {
    let wanted = matches!(bind, Bind::Core | Bind::Numa);
    let (ranks, cores) = (places.len(), topology.all().len());
    (wanted && places.iter().any(|place| place.cores.is_none())).then(|| {
        format!("ranks are not bound: {ranks} ranks are more than the {cores} available cores")
    })
}

/// One line about where a rank is.
pub(crate) fn describe(topology: &Topology, rank: u32, placement: &Placement, gpu: Option<&Gpu>) -> String {
    let cores = match &placement.cores {
        Some(cores) => {
            let plural = if cores.len() == 1 { "core" } else { "cores" };
            format!("{plural} {cores} ({})", topology.name_nodes(cores))
        }
        None if topology.nodes.is_empty() => "not bound".into(),
        None => format!("not bound (cores {})", topology.all()),
    };
    let threads = match placement.threads {
        1 => "1 thread".to_owned(),
        threads => format!("{threads} threads"),
    };
    let gpu = match gpu {
        None => String::new(),
        Some(Gpu { name, bus: None, .. }) => format!(", GPU {name}"),
        Some(Gpu { name, bus: Some(bus), .. }) => format!(", GPU {name} at {bus}"),
    };
    format!("rank {rank}: {cores}, {threads}{gpu}")
}

#[cfg(test)]
mod tests;
