//! Placement: which cores each rank may use.
//!
//! At any moment the kernel's scheduler knows better than a static list which core is free, but it cannot know which
//! memory a rank will use for hours. So ranks are kept on the NUMA node of their memory or their GPU, and are not bound
//! within it:
//!
//! | `--bind` | a rank gets |
//! |---|---|
//! | `none` | all cores |
//! | `numa` | every core of one NUMA node: the node of its GPU, else nodes in turn, filled in proportion to their cores |
//! | `socket` | as `numa`, and every core of the other nodes of its socket |
//! | `cache` | the cores of one last-level cache of that node; ranks of a node get its caches in turn |
//! | `core` | a share of the cores that no other rank has |
//! | `auto` | `numa` if ranks have GPUs whose node is known, or fill several nodes of the same size evenly; `core` if each rank's share is several whole nodes; else `none` |
//!
//! **Why `auto` does not bind on one node.** A bound rank cannot leave a core on which another process wants to run,
//! and its peers wait for it. Measured with 2 ranks on 2 cores while other processes were compiling there: a training
//! step took 3.2 to 3.4 ms bound and 2.4 to 2.5 ms unbound; with two such jobs at once 5.7 and 4.1 ms; with several
//! compilers (a load of 5) 3.5 ms either way. The time of an all-reduce was the same within the noise (0.36 and 0.35 µs
//! for 4 bytes, 162 µs for 4 MiB). So binding gained nothing and lost up to a third. Ranks that start on the same core
//! separate by themselves (see the runtime's `comm/cpu/cores.rs`). Machines with several nodes could not be measured;
//! there the location of memory decides.
//!
//! **Shares.** With `core` the ranks divide *all* cores, in the order of the nodes: two jobs at once then both use the
//! whole machine, whereas jobs that took the first few cores would share the same ones. Shares differ by at most one
//! physical core, and hyper-threads of a core stay together unless there are more ranks than physical cores. Ranks near
//! a GPU divide the cores of its node. If more ranks are near a node than it has cores, each of them gets the whole
//! node.
//!
//! **More ranks than cores** are never bound: two ranks bound to one core would wait for each other while another core is
//! idle.
//!
//! **Several jobs** get disjoint cores, so that ranks of one job do not wait for those of another. `auto` does not bind
//! within a job's share of the cores, for the reason above.
//!
//! A rank also gets the number of threads it should use (`MGPU_THREADS`, `OMP_NUM_THREADS`): its cores, divided by the
//! number of ranks on the same cores, and never more than its share of the control group's quota.
//!
//! Only cores in the launcher's own affinity mask are used, so `taskset` and batch systems can restrict them.

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
    /// To NUMA nodes if that helps, else not.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// To a share of the cores each.
    Core,
    /// To a whole NUMA node each.
    Numa,
    /// To a whole socket each.
    Socket,
    /// To the cores of a last-level cache each.
    Cache,
}

/// The cores and the number of threads of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// The cores it is bound to; `None`: all that the launcher may use.
    pub cores: Option<CoreSet>,
    /// Number of threads it should use.
    pub threads: usize,
}

/// Places one rank for each entry of `gpus`: the NUMA node of the rank's GPU, `None` if it has no GPU or the node is
/// unknown.
///
/// ```
/// use mgpurun::placement::{Bind, Topology, place};
/// // Nothing is known about the machine: no rank is bound, and each gets one thread.
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
        Bind::Socket => {
            let socket = |home: usize| socket_of(topology, &topology.nodes[home].all());
            homes(topology, &near).into_iter().map(|home| Some(socket(home))).collect()
        }
        Bind::Cache => caches_of_homes(topology, &homes(topology, &near)),
    };
    // Without a quota only the cores limit the number of threads.
    let quota = if topology.usable < available { topology.usable / ranks.max(1) } else { usize::MAX };
    let threads = |set: &Option<CoreSet>| {
        let sharing = sets.iter().filter(|other| *other == set).count();
        let share = set.as_ref().map_or(available, CoreSet::len) / sharing;
        share.min(quota).max(1)
    };
    sets.iter().map(|set| Placement { cores: set.clone(), threads: threads(set) }).collect()
}

/// Ranks that are placed together: those of a job.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    /// How they are bound.
    pub(crate) bind: Bind,
    /// For each rank the NUMA node of its GPU, as for [`place`].
    pub(crate) gpus: Vec<Option<u32>>,
}

/// Places the ranks of several jobs, one after the other. The jobs get disjoint cores if there is one for each rank:
/// every rank has a share of the cores as with `core`, and a job has those of its ranks. Only `none` uses all cores, as
/// for one job; `numa` and `auto` give a rank the shares that its job has in one node, or in all.
pub(crate) fn place_groups(topology: &Topology, groups: &[Group]) -> Vec<Placement> {
    let gpus: Vec<Option<u32>> = groups.iter().flat_map(|group| group.gpus.iter().copied()).collect();
    let shares = match groups {
        [only] => return place(topology, only.bind, &gpus),
        _ => place(topology, Bind::Core, &gpus),
    };
    let mut rest = &shares[..];
    let mut places = Vec::new();
    for group in groups {
        let (own, others) = rest.split_at(group.gpus.len());
        rest = others;
        places.extend(own.iter().map(|share| within_group(topology, group.bind, own, share)));
    }
    places
}

/// The place of a rank that has `share`, one of the shares of its job.
fn within_group(topology: &Topology, bind: Bind, shares: &[Placement], share: &Placement) -> Placement {
    if share.cores.is_none() {
        // There are more ranks than cores.
        return share.clone();
    }
    let node = |place: &Placement| {
        let core = place.cores.as_ref().and_then(CoreSet::first)?;
        topology.nodes.iter().position(|node| node.all().contains(core))
    };
    let joined: Vec<&Placement> = match bind {
        Bind::None => return Placement { cores: None, ..share.clone() },
        // A share is smaller than a cache, or made of whole ones.
        Bind::Core | Bind::Cache => return share.clone(),
        Bind::Socket => {
            let socket = |place: &Placement| place.cores.as_ref().map(|cores| socket_of(topology, cores));
            shares.iter().filter(|other| socket(other) == socket(share)).collect()
        }
        Bind::Numa => shares.iter().filter(|other| node(other) == node(share)).collect(),
        Bind::Auto => shares.iter().collect(),
    };
    let threads = joined.iter().map(|place| place.threads).sum::<usize>() / joined.len();
    let cores = joined.iter().filter_map(|place| place.cores.as_ref()).collect();
    Placement { cores: Some(cores), threads: threads.max(1) }
}

/// The binding that `auto` chooses for these ranks.
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

/// The node of each rank: that of its GPU, or the node with the most cores per rank so far. Ranks without a GPU are
/// placed on the nodes in ascending order, so that consecutive ranks are on the same node.
fn homes(topology: &Topology, near: &[Option<usize>]) -> Vec<usize> {
    let mut ranks_on: Vec<usize> = (0..topology.nodes.len())
        .map(|node| near.iter().filter(|home| **home == Some(node)).count())
        .collect();
    let mut rest = Vec::new();
    for _ in near.iter().filter(|home| home.is_none()) {
        // Cores per rank with one more rank, compared as fractions; the first of equals.
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

/// The cores of the sockets that `cores` are on.
fn socket_of(topology: &Topology, cores: &CoreSet) -> CoreSet {
    let sockets = topology.sockets.iter().filter(|socket| !socket.intersection(cores).is_empty());
    sockets.chain([cores]).collect()
}

/// The ranks of each node get its last-level caches in turn, those with the most cores first.
fn caches_of_homes(topology: &Topology, homes: &[usize]) -> Vec<Option<CoreSet>> {
    let of_node = |node: &Node| {
        let all = node.all();
        let parts = topology.caches.iter().map(|cache| cache.intersection(&all));
        let mut caches: Vec<CoreSet> = parts.filter(|part| !part.is_empty()).collect();
        caches.sort_by_key(|cache| Reverse(cache.len()));
        if caches.is_empty() { vec![all] } else { caches }
    };
    let caches: Vec<Vec<CoreSet>> = topology.nodes.iter().map(of_node).collect();
    let mut ranks_on = vec![0; caches.len()];
    let next = |home: &usize| {
        let number = ranks_on[*home];
        ranks_on[*home] += 1;
        Some(caches[*home][number % caches[*home].len()].clone())
    };
    homes.iter().map(next).collect()
}

/// The ranks of each node divide its cores. If there are more ranks than cores, each of them gets all cores of the node.
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

/// Contiguous shares for `ranks` ranks; there must be at least one hyper-thread for each.
fn divide(nodes: &[&Node], ranks: usize) -> Vec<CoreSet> {
    let physical: Vec<&CoreSet> = nodes.iter().flat_map(|node| &node.cores).collect();
    let share = |rank: usize, of: usize| rank * of / ranks..(rank + 1) * of / ranks;
    if ranks <= physical.len() {
        return (0..ranks)
            .map(|rank| physical[share(rank, physical.len())].iter().copied().collect())
            .collect();
    }
    // Hyper-threads of a core are adjacent, so that shares have few cores in common.
    let threads: Vec<usize> = physical.iter().flat_map(|core| core.iter()).collect();
    (0..ranks).map(|rank| threads[share(rank, threads.len())].iter().copied().collect()).collect()
}

/// The reason if the requested binding was not possible.
pub(crate) fn unmet(topology: &Topology, bind: Bind, places: &[Placement]) -> Option<String> {
    let wanted = !matches!(bind, Bind::Auto | Bind::None);
    let (ranks, cores) = (places.len(), topology.all().len());
    (wanted && places.iter().any(|place| place.cores.is_none()))
        .then(|| format!("ranks are not bound: {ranks} ranks are more than the {cores} available cores"))
}

/// One line about the cores, threads and GPU of a rank.
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
