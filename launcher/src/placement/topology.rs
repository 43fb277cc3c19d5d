//! The cores that this process may use, grouped by physical core and NUMA node.
//!
//! The topology is read from `/sys/devices/system`. Containers often hide parts of it. Missing or invalid files mean
//! the simplest topology: a core without siblings, one node for all cores. Whatever the files contain, every core of
//! the affinity mask is in exactly one physical core of exactly one node, because the other code relies on it.

use std::fs;
use std::path::Path;

use nix::sched::sched_getaffinity;
use nix::unistd::Pid;

use super::CoreSet;

/// The cores that a launch may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Nodes that have cores for this process, in the order of their numbers.
    pub nodes: Vec<Node>,
    /// Number of cores that the process may keep busy at a time: fewer than all if a control group has a quota.
    pub usable: usize,
    /// The cores of each socket.
    pub sockets: Vec<CoreSet>,
    /// The cores that share a last-level cache, for each of these caches.
    pub caches: Vec<CoreSet>,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number.
    pub number: u32,
    /// Its physical cores, each the set of its usable hyper-threads, ordered by the first one.
    pub cores: Vec<CoreSet>,
}

impl Node {
    /// All its hyper-threads.
    pub fn all(&self) -> CoreSet {
        self.cores.iter().collect()
    }
}

impl Topology {
    /// This machine, within the affinity mask of this process.
    pub fn detect() -> Self {
        let allowed = sched_getaffinity(Pid::from_raw(0)).map(CoreSet::from).unwrap_or_default();
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        Self::read(Path::new("/"), &allowed, usable)
    }

    /// The machine whose root folder is `root`, within `allowed`.
    pub fn read(root: &Path, allowed: &CoreSet, usable: usize) -> Self {
        let system = root.join("sys/devices/system");
        let list = |path: &Path| CoreSet::parse(&fs::read_to_string(path).ok()?);
        let mut nodes = Vec::new();
        let mut left = allowed.clone();
        for number in node_numbers(&system.join("node")) {
            let cores = list(&system.join(format!("node/node{number}/cpulist"))).unwrap_or_default();
            let own = cores.intersection(&left);
            left = left.without(&own);
            if !own.is_empty() {
                nodes.push((number, own));
            }
        }
        if !left.is_empty() {
            // Cores without a node, or no nodes at all.
            match nodes.first_mut() {
                Some((_, first)) => *first = [&*first, &left].into_iter().collect(),
                None => nodes.push((0, left)),
            }
        }
        let siblings =
            |core: usize| list(&system.join(format!("cpu/cpu{core}/topology/thread_siblings_list")));
        let node = |(number, cores): (u32, CoreSet)| Node { number, cores: groups(&cores, siblings) };
        let sockets =
            groups(allowed, |core| list(&system.join(format!("cpu/cpu{core}/topology/core_siblings_list"))));
        let caches = groups(allowed, |core| last_level_cache(&system.join(format!("cpu/cpu{core}/cache"))));
        Topology { nodes: nodes.into_iter().map(node).collect(), usable, sockets, caches }
    }

    /// All cores.
    pub fn all(&self) -> CoreSet {
        self.nodes.iter().flat_map(|node| &node.cores).collect()
    }

    /// Number of physical cores.
    pub fn physical(&self) -> usize {
        self.nodes.iter().map(|node| node.cores.len()).sum()
    }

    /// The nodes of `cores`, as `NUMA node 0` or `NUMA nodes 0-1`.
    pub(super) fn name_nodes(&self, cores: &CoreSet) -> String {
        let touched = self.nodes.iter().filter(|node| !node.all().intersection(cores).is_empty());
        let numbers: CoreSet = touched.map(|node| node.number as usize).collect();
        format!("NUMA node{} {numbers}", if numbers.len() == 1 { "" } else { "s" })
    }
}

/// The cores, divided into groups. `group_of` has the group of a core, if the machine tells; otherwise the core is alone.
fn groups(cores: &CoreSet, group_of: impl Fn(usize) -> Option<CoreSet>) -> Vec<CoreSet> {
    let (mut left, mut groups) = (cores.clone(), Vec::new());
    while let Some(core) = left.first() {
        let alone = CoreSet::from_iter([core]);
        let group = group_of(core).unwrap_or_default().intersection(&left);
        let group = [&group, &alone].into_iter().collect();
        left = left.without(&group);
        groups.push(group);
    }
    groups
}

/// The cores that share the last-level cache of a core, whose caches are in `folder`.
fn last_level_cache(folder: &Path) -> Option<CoreSet> {
    let caches = fs::read_dir(folder).ok()?.flatten().filter_map(|entry| {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
        let level: u32 = read("level")?.trim().parse().ok()?;
        (read("type")?.trim() != "Instruction").then_some(())?;
        Some((level, CoreSet::parse(&read("shared_cpu_list")?)?))
    });
    caches.max_by_key(|(level, _)| *level).map(|(_, cores)| cores)
}

/// `node0`, `node1`, … in ascending order.
fn node_numbers(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("node")?.parse().ok();
    let mut numbers: Vec<u32> = entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join("sys/devices/system").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn sockets_and_caches_are_read() {
        let mut files = vec![
            ("cpu/cpu0/topology/core_siblings_list".to_owned(), "0-3\n"),
            ("cpu/cpu4/topology/core_siblings_list".to_owned(), "4-5\n"),
        ];
        // The instruction cache has the highest level here, which no machine has.
        let caches =
            [("1", "Data", "0"), ("4", "Instruction", "0-5"), ("3", "Unified", "0-1"), ("x", "Unified", "0")];
        for (index, (level, kind, shared)) in caches.into_iter().enumerate() {
            for (name, text) in [("level", level), ("type", kind), ("shared_cpu_list", shared)] {
                files.push((format!("cpu/cpu0/cache/index{index}/{name}"), text));
            }
        }
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, *text)).collect();
        let topology = Topology::read(tree(&files).path(), &(0..5).collect(), 5);
        let shown = |groups: &[CoreSet]| groups.iter().map(CoreSet::to_string).collect::<Vec<_>>();
        assert_eq!(shown(&topology.sockets), ["0-3", "4"]);
        assert_eq!(shown(&topology.caches), ["0-1", "2", "3", "4"]);
    }

    fn shown(topology: &Topology) -> String {
        let node = |node: &Node| {
            let cores: Vec<String> = node.cores.iter().map(|core| format!("[{core}]")).collect();
            format!("{}: {}", node.number, cores.join(" "))
        };
        topology.nodes.iter().map(node).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn siblings_and_nodes_are_restricted_to_the_mask() {
        let root = tree(&[
            ("node/node0/cpulist", "0-1,4-5\n"),
            ("node/node1/cpulist", "2-3,6-7\n"),
            ("node/node10/cpulist", "\n"),
            ("node/possible", "0-1\n"),
            ("cpu/cpu0/topology/thread_siblings_list", "0,4\n"),
            ("cpu/cpu1/topology/thread_siblings_list", "1,5\n"),
            ("cpu/cpu2/topology/thread_siblings_list", "2,6\n"),
            ("cpu/cpu3/topology/thread_siblings_list", "3,7\n"),
        ]);
        let read = |mask| Topology::read(root.path(), &CoreSet::parse(mask).unwrap(), 8);
        assert_eq!(shown(&read("0-7")), "0: [0,4] [1,5]; 1: [2,6] [3,7]");
        assert_eq!(shown(&read("1,3-6")), "0: [1,5] [4]; 1: [3] [6]");
        assert_eq!(shown(&read("2")), "1: [2]");
        assert_eq!(shown(&read("0,99")), "0: [0] [99]");
        assert_eq!(read("0-7").name_nodes(&CoreSet::parse("1-2").unwrap()), "NUMA nodes 0-1");
    }

    #[test]
    fn without_files_there_is_one_node() {
        let root = tempfile::tempdir().unwrap();
        let topology = Topology::read(root.path(), &CoreSet::parse("0-2").unwrap(), 3);
        assert_eq!(shown(&topology), "0: [0] [1] [2]");
        assert_eq!(Topology::read(root.path(), &CoreSet::default(), 1).nodes, []);
    }

    #[test]
    fn this_machine_has_exactly_the_allowed_cores() {
        let topology = Topology::detect();
        let allowed = CoreSet::from(sched_getaffinity(Pid::from_raw(0)).unwrap());
        assert_eq!(topology.all(), allowed);
        assert!((1..=allowed.len()).contains(&topology.usable));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_core_is_in_exactly_one_node_for_any_files(
            nodes in proptest::collection::vec("([0-9]{1,2}[,\\-]){0,4}[0-9x]{0,2}\n?", 0..4),
            siblings in proptest::collection::vec("([0-9]{1,2}[,\\-]){0,3}[0-9x]{0,2}\n?", 0..8),
            mask in proptest::collection::btree_set(0usize..16, 0..12),
        ) {
            let node = |(index, text): (usize, &String)| (format!("node/node{index}/cpulist"), text.clone());
            let core =
                |(index, text): (usize, &String)| (format!("cpu/cpu{index}/topology/thread_siblings_list"), text.clone());
            let files: Vec<(String, String)> = nodes.iter().enumerate().map(node)
                .chain(siblings.iter().enumerate().map(core)).collect();
            let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, &**text)).collect();
            let mask: CoreSet = mask.into_iter().collect();
            let topology = Topology::read(tree(&files).path(), &mask, 1);
            prop_assert_eq!(topology.all(), mask.clone());
            let cores = topology.nodes.iter().flat_map(|node| &node.cores);
            prop_assert!(cores.clone().all(|core| !core.is_empty()));
            prop_assert_eq!(cores.map(CoreSet::len).sum::<usize>(), mask.len());
            for groups in [&topology.sockets, &topology.caches] {
                prop_assert_eq!(groups.iter().map(CoreSet::len).sum::<usize>(), mask.len());
                prop_assert_eq!(groups.iter().collect::<CoreSet>(), mask.clone());
            }
        }
    }
}
