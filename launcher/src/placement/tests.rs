use proptest::prelude::*;

use super::*;

/// Nodes with the given numbers of physical cores and `threads` hyper-threads per core, numbered as in Linux: the first
/// hyper-thread of every core first.
fn machine(nodes: &[usize], threads: usize) -> Topology {
    let all: usize = nodes.iter().sum();
    let mut first = 0;
    let node = |(number, cores): (usize, &usize)| {
        let range = first..first + cores;
        first += cores;
        let core = |core: usize| (0..threads).map(|thread| core + thread * all).collect();
        Node { number: number as u32, cores: range.map(core).collect() }
    };
    let nodes: Vec<Node> = nodes.iter().enumerate().map(node).collect();
    Topology { nodes, usable: all * threads, ..Topology::default() }
}

fn sets(topology: &Topology, bind: Bind, gpus: &[Option<u32>]) -> String {
    let place = place(topology, bind, gpus);
    let shown: Vec<String> =
        place.iter().map(|place| place.cores.as_ref().map_or("all".into(), CoreSet::to_string)).collect();
    shown.join(" ")
}

#[test]
fn ranks_are_bound_to_sockets_and_caches() {
    let parts = |sizes: &[usize]| -> Vec<CoreSet> {
        let mut first = 0;
        let part = |size: &usize| {
            first += size;
            (first - size..first).collect()
        };
        sizes.iter().map(part).collect()
    };
    let two_nodes_a_socket =
        Topology { sockets: parts(&[8, 8]), caches: parts(&[1, 3, 4, 4, 4]), ..machine(&[4, 4, 4, 4], 1) };
    assert_eq!(sets(&two_nodes_a_socket, Bind::Socket, &[None; 4]), "0-7 0-7 8-15 8-15");
    assert_eq!(sets(&two_nodes_a_socket, Bind::Socket, &[Some(3), Some(0)]), "8-15 0-7");
    // The larger cache of node 0 comes first; the third rank of a node shares the first one's.
    assert_eq!(
        sets(&two_nodes_a_socket, Bind::Cache, &[Some(0), Some(0), Some(1), Some(0)]),
        "1-3 0 4-7 1-3"
    );
    // A machine that tells nothing about sockets and caches.
    assert_eq!(sets(&machine(&[2, 2], 1), Bind::Socket, &[None; 2]), "0-1 2-3");
    assert_eq!(sets(&machine(&[2, 2], 1), Bind::Cache, &[None; 2]), "0-1 2-3");
}

fn machines() -> impl Strategy<Value = Topology> {
    (proptest::collection::vec(1usize..9, 1..5), 1usize..4)
        .prop_map(|(nodes, threads)| machine(&nodes, threads))
}

fn binds() -> impl Strategy<Value = Bind> {
    let binds = [Bind::Auto, Bind::None, Bind::Core, Bind::Numa, Bind::Socket, Bind::Cache];
    proptest::sample::select(binds.to_vec())
}

proptest! {
    #[test]
    fn shares_of_cores_are_a_partition(topology in machines(), ranks in 1usize..40) {
        let places = place(&topology, Bind::Core, &vec![None; ranks]);
        if ranks > topology.all().len() {
            prop_assert!(places.iter().all(|place| place.cores.is_none() && place.threads == 1));
            return Ok(());
        }
        let sets: Vec<&CoreSet> = places.iter().map(|place| place.cores.as_ref().unwrap()).collect();
        prop_assert!(sets.iter().all(|set| !set.is_empty()));
        // Disjoint and complete: the sizes add up to the union, and the union is everything.
        prop_assert_eq!(sets.iter().map(|set| set.len()).sum::<usize>(), topology.all().len());
        prop_assert_eq!(sets.iter().copied().collect::<CoreSet>(), topology.all());
        let cores: Vec<&CoreSet> = topology.nodes.iter().flat_map(|node| &node.cores).collect();
        let touched = |set: &CoreSet| cores.iter().filter(|core| !core.intersection(set).is_empty()).count();
        if ranks <= topology.physical() {
            let whole = |set: &CoreSet| cores.iter().all(|core| [0, core.len()].contains(&core.intersection(set).len()));
            prop_assert!(sets.iter().all(|set| whole(set)));
            let counts = sets.iter().map(|set| touched(set));
            prop_assert!(counts.clone().max().unwrap() - counts.min().unwrap() <= 1);
        }
        for place in &places {
            prop_assert_eq!(place.threads, place.cores.as_ref().unwrap().len());
        }
    }

    #[test]
    fn a_rank_bound_to_a_node_has_it_whole(topology in machines(), ranks in 1usize..40) {
        let places = place(&topology, Bind::Numa, &vec![None; ranks]);
        if ranks > topology.all().len() {
            prop_assert!(places.iter().all(|place| place.cores.is_none()));
            return Ok(());
        }
        let nodes: Vec<CoreSet> = topology.nodes.iter().map(Node::all).collect();
        let home = |place: &Placement| nodes.iter().position(|node| Some(node) == place.cores.as_ref());
        let homes: Vec<usize> = places.iter().map(|place| home(place).unwrap()).collect();
        prop_assert!(homes.is_sorted());
        // Balanced: no rank would have more cores if it moved to another node.
        let on = |node: usize| homes.iter().filter(|home| **home == node).count();
        for node in 0..nodes.len() {
            for other in (0..nodes.len()).filter(|_| on(node) > 0) {
                let cores = |node: usize| topology.nodes[node].cores.len() as f64;
                prop_assert!(cores(node) / on(node) as f64 >= cores(other) / (on(other) + 1) as f64);
            }
        }
    }

    #[test]
    fn placements_respect_the_mask_and_the_quota(
        topology in machines(), bind in binds(), usable in 1usize..80,
        gpus in proptest::collection::vec(proptest::option::of(0u32..6), 1..40),
    ) {
        let topology = Topology { usable: usable.min(topology.all().len()), ..topology };
        let places = place(&topology, bind, &gpus);
        prop_assert_eq!(places.len(), gpus.len());
        for (place, gpu) in places.iter().zip(&gpus) {
            prop_assert!(place.threads >= 1);
            let Some(cores) = &place.cores else { continue };
            prop_assert!(!cores.is_empty() && cores.without(&topology.all()).is_empty());
            // A rank with a GPU is on its node, if there is such a node.
            let node = topology.nodes.iter().find(|node| Some(node.number) == *gpu);
            prop_assert!(node.is_none_or(|node| cores.without(&node.all()).is_empty()));
        }
        // Every rank has at least one thread; apart from that, there are no more threads than cores.
        let threads: usize = places.iter().map(|place| place.threads).filter(|threads| *threads > 1).sum();
        prop_assert!(threads <= topology.usable);
    }

    #[test]
    fn ranks_near_a_gpu_divide_its_node(topology in machines(), on in proptest::collection::vec(0usize..4, 1..12)) {
        let gpus: Vec<Option<u32>> = on.iter().map(|node| Some((node % topology.nodes.len()) as u32)).collect();
        let places = place(&topology, Bind::Core, &gpus);
        prop_assume!(gpus.len() <= topology.all().len());
        for node in &topology.nodes {
            let here = places.iter().zip(&gpus).filter(|(_, gpu)| **gpu == Some(node.number));
            let sets: Vec<&CoreSet> = here.map(|(place, _)| place.cores.as_ref().unwrap()).collect();
            if sets.is_empty() {
                continue;
            }
            prop_assert_eq!(sets.iter().copied().collect::<CoreSet>(), node.all());
            let sum: usize = sets.iter().map(|set| set.len()).sum();
            let crowded = sets.len() > node.all().len();
            prop_assert_eq!(sum, node.all().len() * if crowded { sets.len() } else { 1 });
        }
    }
}

#[test]
fn shares_follow_the_nodes() {
    let two = machine(&[4, 4], 2);
    assert_eq!(sets(&two, Bind::Core, &[None; 2]), "0-3,8-11 4-7,12-15");
    assert_eq!(sets(&two, Bind::Core, &[None; 4]), "0-1,8-9 2-3,10-11 4-5,12-13 6-7,14-15");
    assert_eq!(sets(&two, Bind::Core, &[None; 3]), "0-1,8-9 2-4,10-12 5-7,13-15");
    assert_eq!(sets(&two, Bind::Numa, &[None; 3]), "0-3,8-11 0-3,8-11 4-7,12-15");
    assert_eq!(sets(&machine(&[2], 2), Bind::Core, &[None; 4]), "0 2 1 3");
    assert_eq!(sets(&machine(&[2], 1), Bind::Core, &[None; 3]), "all all all");
}

#[test]
fn auto_binds_where_it_helps() {
    let (one, two, four) = (machine(&[8], 1), machine(&[4, 4], 1), machine(&[2; 4], 1));
    for (topology, ranks, expected) in [
        (&one, 2, "all all"),
        (&two, 1, "all"),
        (&two, 2, "0-3 4-7"),
        (&two, 3, "all all all"),
        (&two, 4, "0-3 0-3 4-7 4-7"),
        (&two, 9, "all all all all all all all all all"),
        (&four, 2, "0-3 4-7"),
        (&machine(&[4, 3], 1), 2, "all all"),
    ] {
        assert_eq!(sets(topology, Bind::Auto, &vec![None; ranks]), expected);
    }
    assert_eq!(sets(&two, Bind::Auto, &[Some(1)]), "4-7");
    assert_eq!(sets(&two, Bind::Auto, &[Some(1), Some(1), Some(0)]), "4-7 4-7 0-3");
    // The node of one GPU is outside the mask, and that of another is unknown.
    assert_eq!(sets(&two, Bind::Auto, &[Some(7), Some(1), None]), "0-3 4-7 0-3");
    assert_eq!(sets(&one, Bind::Auto, &[Some(0), Some(0)]), "all all");
}

#[test]
fn threads_are_the_share() {
    let threads = |topology: &Topology, bind, ranks: usize| -> Vec<usize> {
        place(topology, bind, &vec![None; ranks]).iter().map(|place| place.threads).collect()
    };
    let two = machine(&[4, 4], 2);
    assert_eq!(threads(&two, Bind::None, 3), [5, 5, 5]);
    assert_eq!(threads(&two, Bind::Core, 3), [4, 6, 6]);
    assert_eq!(threads(&two, Bind::Numa, 4), [4, 4, 4, 4]);
    assert_eq!(threads(&two, Bind::None, 40), [1; 40]);
    // A container with two cores' worth of time on sixteen cores.
    let container = Topology { usable: 2, ..two };
    assert_eq!(threads(&container, Bind::Core, 2), [1, 1]);
    assert_eq!(threads(&container, Bind::None, 1), [2]);
}

#[test]
fn a_placement_is_described_in_one_line() {
    let topology = machine(&[4, 4], 1);
    let line = |cores: Option<&str>, threads, gpu: Option<&Gpu>| {
        let cores = cores.map(|cores| CoreSet::parse(cores).unwrap());
        describe(&topology, 1, &Placement { cores, threads }, gpu)
    };
    let gpu = Gpu { name: "0".into(), bus: Some("0000:3b:00.0".into()), node: Some(0), ..Gpu::default() };
    assert_eq!(
        line(Some("0-3"), 4, Some(&gpu)),
        "rank 1: cores 0-3 (NUMA node 0), 4 threads, GPU 0 at 0000:3b:00.0"
    );
    let unknown = Gpu { bus: None, ..gpu };
    assert_eq!(line(Some("0-7"), 8, Some(&unknown)), "rank 1: cores 0-7 (NUMA nodes 0-1), 8 threads, GPU 0");
    assert_eq!(line(Some("5"), 1, None), "rank 1: core 5 (NUMA node 1), 1 thread");
    assert_eq!(line(None, 4, None), "rank 1: not bound (cores 0-7), 4 threads");
}

/// The cores of each rank of jobs of these bindings and numbers of ranks, without GPUs.
fn groups(topology: &Topology, jobs: &[(Bind, usize)]) -> String {
    let groups: Vec<Group> =
        jobs.iter().map(|(bind, ranks)| Group { bind: *bind, gpus: vec![None; *ranks] }).collect();
    let shown = |place: &Placement| {
        let cores = place.cores.as_ref().map_or("all".into(), CoreSet::to_string);
        format!("{cores}/{}", place.threads)
    };
    place_groups(topology, &groups).iter().map(shown).collect::<Vec<_>>().join(" ")
}

#[test]
fn jobs_share_the_cores_without_overlap() {
    let (one, two) = (machine(&[4], 1), machine(&[4, 4], 1));
    assert_eq!(groups(&one, &[(Bind::Auto, 1), (Bind::Auto, 1)]), "0-1/2 2-3/2");
    assert_eq!(groups(&one, &[(Bind::Auto, 3), (Bind::Auto, 1)]), "0-2/1 0-2/1 0-2/1 3/1");
    assert_eq!(groups(&one, &[(Bind::Core, 2), (Bind::None, 1)]), "0/1 1/1 all/2");
    assert_eq!(groups(&two, &[(Bind::Numa, 3), (Bind::Auto, 1)]), "0-3/2 0-3/2 4-5/2 6-7/2");
    assert_eq!(groups(&one, &[(Bind::Core, 3), (Bind::Auto, 2)]), "all/1 all/1 all/1 all/1 all/1");
    // One job is placed as without any other.
    assert_eq!(groups(&one, &[(Bind::Auto, 2)]), "all/2 all/2");
}
