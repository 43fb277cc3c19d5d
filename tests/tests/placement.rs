//! CPU placement of ranks: bound as requested, within the launcher's affinity mask, with their share of cores.

use std::collections::BTreeSet;
use std::process::Command;

use mgpu_tests::cores;
use mgpu_tests::process::{command, run};

fn mgpurun(ranks: usize, options: &[&str]) -> Command {
    let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
    launcher.env_remove("MGPU_THREADS").env_remove("OMP_NUM_THREADS");
    launcher.args(["-n", &ranks.to_string(), "--no-prefix", "--backend", "cpu"]).args(options);
    launcher
}

/// Prints a rank's thread count and its cores.
const SHOW: [&str; 3] = [
    "sh",
    "-c",
    "echo $MGPU_THREADS $OMP_NUM_THREADS $(grep Cpus_allowed_list: /proc/self/status | cut -f2)",
];

/// Thread count, OpenMP thread count, and the cores in the kernel's format, one line per rank.
fn shown(launcher: &mut Command) -> Vec<(usize, usize, BTreeSet<usize>)> {
    let finished = run(launcher.args(SHOW));
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    let cores = |list: &str| -> BTreeSet<usize> {
        let ends = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            first.parse::<usize>().unwrap()..=last.parse().unwrap()
        };
        list.split(',').flat_map(ends).collect()
    };
    let line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[0].parse().unwrap(), words[1].parse().unwrap(), cores(words[2]))
    };
    finished.stdout.lines().map(line).collect()
}

#[test]
fn core_shares_are_disjoint_and_cover_all_cores() {
    let own = cores::own();
    let ranks = own.len().min(4);
    let places = shown(&mut mgpurun(ranks, &["--bind", "core"]));
    assert_eq!(places.len(), ranks);
    assert_eq!(places.iter().map(|(_, _, cores)| cores.len()).sum::<usize>(), own.len());
    assert_eq!(places.iter().flat_map(|(_, _, cores)| cores.clone()).collect::<BTreeSet<_>>(), own);
    assert!(places.iter().all(|(threads, omp, cores)| threads == omp && (1..=cores.len()).contains(threads)));
}

#[test]
fn more_ranks_than_cores_are_not_bound() {
    let own = cores::own();
    let places = shown(&mut mgpurun(own.len() + 1, &["--bind", "core"]));
    assert!(places.iter().all(|(threads, _, cores)| *threads == 1 && *cores == own), "{places:?}");
}

#[test]
fn ranks_stay_within_the_launchers_affinity_mask() {
    // This thread starts the launchers.
    let first = cores::bind_to_first();
    for (ranks, bind) in [(1, "core"), (1, "numa"), (2, "auto"), (2, "core"), (2, "none")] {
        let expected = vec![(1, 1, BTreeSet::from([first])); ranks];
        let mut launcher = mgpurun(ranks, &["--bind", bind]);
        assert_eq!(shown(&mut launcher), expected, "--bind {bind} with {ranks} ranks");
    }
}

#[test]
fn report_bindings_lists_the_cores_of_each_rank() {
    let own = cores::own();
    let report = |options: &[&str]| run(mgpurun(1, options).arg("true"));
    let bound = report(&["--bind", "core", "--report-bindings"]);
    let noun = if own.len() == 1 { "core" } else { "cores" };
    bound.expect(0, &[&format!("mgpurun: rank 0: {noun} {}", own.first().unwrap()), "NUMA node"]);
    report(&["--bind", "none", "--report-bindings"]).expect(0, &["mgpurun: rank 0: not bound (cores "]);
    assert_eq!(report(&["--bind", "core"]).stderr, "");
    let dry = report(&["--bind", "core", "--dry-run"]);
    dry.expect(0, &[&format!("# rank 0: {noun} {}", own.first().unwrap()), "MGPU_THREADS="]);
}

#[test]
fn user_set_thread_counts_are_kept() {
    let places = shown(mgpurun(2, &[]).env("MGPU_THREADS", "7").env("OMP_NUM_THREADS", "5"));
    assert!(places.iter().all(|(threads, omp, _)| (*threads, *omp) == (7, 5)), "{places:?}");
    let wrong = run(mgpurun(1, &[]).env("MGPU_THREADS", "many").arg("t-hello_ring"));
    assert!(wrong.code != Some(0));
    assert!(wrong.stderr.contains("MGPU_THREADS is `many` where a number of threads from 1"), "{wrong:#?}");
}

#[test]
fn a_nested_launcher_divides_its_share() {
    let mut outer = mgpurun(1, &[]);
    let outer_share = shown(&mut mgpurun(1, &[]))[0].0;
    outer.args([env!("CARGO_BIN_EXE_t-mgpurun"), "-n", "2", "--no-prefix", "--backend", "cpu"]);
    let places = shown(&mut outer);
    let expected = (outer_share / 2).max(1);
    assert!(places.len() == 2 && places.iter().all(|place| place.0 == expected), "{places:?}");
}

#[test]
fn binding_does_not_change_training() {
    let ranks = cores::own().len().min(2);
    let weights = |bind: &str| {
        let mut launcher = mgpurun(ranks, &["--bind", bind]);
        let finished = run(launcher.args([
            "t-train_mnist",
            "--synthetic",
            "--steps",
            "20",
            "--skip-test",
            "--threads",
            "1",
        ]));
        let line = finished.stdout.lines().find(|line| line.starts_with("weights ")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{finished:#?}"))
    };
    assert_eq!(weights("core"), weights("none"));
}
