//! Environments of launchers: recorded ones, contradictory ones and random ones.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::Error;

type Variables = BTreeMap<&'static str, String>;

fn variables(pairs: &[(&'static str, &str)]) -> Variables {
    pairs.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

fn read(variables: &Variables) -> Result<Option<LaunchedRank>> {
    let variable = |name: &str| variables.get(name).cloned();
    LaunchEnvironment { variable: &variable, hydra: &|| Some("77 of 12".into()), parent: &|| None }.launched()
}

/// The variables of `rank` of `size` under each launcher.
fn ranks_of(launcher: Launcher, rank: u32, size: u32) -> Variables {
    let (rank, size) = (rank.to_string(), size.to_string());
    match launcher {
        Launcher::Torchrun => variables(&[
            ("RANK", &rank),
            ("WORLD_SIZE", &size),
            ("LOCAL_RANK", &rank),
            ("LOCAL_WORLD_SIZE", &size),
            ("GROUP_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "41131"),
            ("TORCHELASTIC_RUN_ID", "8ec985b2-aa0e-4efd-b1fd-d2bf52eec933"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
        ]),
        Launcher::OpenMpi => variables(&[
            ("OMPI_COMM_WORLD_RANK", &rank),
            ("OMPI_COMM_WORLD_SIZE", &size),
            ("OMPI_COMM_WORLD_LOCAL_RANK", &rank),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", &size),
            ("OMPI_MCA_ess_base_jobid", "186318849"),
            ("PMIX_NAMESPACE", "186318849"),
            ("PMIX_RANK", &rank),
        ]),
        Launcher::Hydra => variables(&[
            ("PMI_RANK", &rank),
            ("PMI_SIZE", &size),
            ("PMI_FD", "6"),
            ("MPI_LOCALRANKID", &rank),
            ("MPI_LOCALNRANKS", &size),
        ]),
        Launcher::Slurm => variables(&[
            ("SLURM_PROCID", &rank),
            ("SLURM_NTASKS", "64"),
            ("SLURM_STEP_NUM_TASKS", &size),
            ("SLURM_LOCALID", &rank),
            ("SLURM_NNODES", "4"),
            ("SLURM_STEP_NUM_NODES", "1"),
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_STEP_ID", "0"),
        ]),
    }
}

const ALL: [Launcher; 4] = [Launcher::Torchrun, Launcher::OpenMpi, Launcher::Hydra, Launcher::Slurm];

fn launchers() -> impl Strategy<Value = Launcher> {
    prop::sample::select(ALL.to_vec())
}

/// Variables of all launchers, with valid and invalid values.
fn any_variables() -> impl Strategy<Value = Variables> {
    let names: Vec<&'static str> = ALL
        .into_iter()
        .flat_map(|launcher| ranks_of(launcher, 0, 1).into_keys())
        .chain(["MGPU_RUN_ID", "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK", "PMI_PORT"])
        .collect();
    let value = prop_oneof![
        (0u32..4).prop_map(|number| number.to_string()),
        Just("4294967290".to_owned()),
        Just(String::new()),
        any::<String>(),
    ];
    prop::collection::btree_map(prop::sample::select(names), value, 0..16)
}

proptest! {
    #[test]
    fn ranks_of_each_launcher_are_recognised_and_share_one_run_id(
        launcher in launchers(), size in 1u32..9, restart in 0u32..3
    ) {
        let mut run_ids = Vec::new();
        for rank in 0..size {
            let launched = read(&ranks_of(launcher, rank, size)).unwrap().unwrap();
            prop_assert_eq!(launched.launcher, launcher);
            prop_assert_eq!((launched.rank, launched.world_size, launched.local_rank), (rank, size, rank));
            run_ids.push(launched.job.unwrap().run_id(restart));
        }
        prop_assert!(run_ids.iter().all(|id| *id == run_ids[0] && id.len() == 32));
    }

    #[test]
    fn accepted_environments_are_consistent(variables in any_variables()) {
        match read(&variables) {
            Ok(None) | Err(Error::Environment { .. }) => {}
            Ok(Some(launched)) => {
                prop_assert!(launched.rank < launched.world_size && launched.local_rank < launched.world_size);
            }
            Err(other) => prop_assert!(false, "{other:?}"),
        }
    }

    /// Without one variable the result is the same rank, an error that names a variable, or no launcher; never
    /// another rank.
    #[test]
    fn a_missing_variable_never_changes_the_rank(
        launcher in launchers(), size in 2u32..9, rank in 0u32..8, gone in any::<prop::sample::Index>()
    ) {
        let rank = rank % size;
        let mut variables = ranks_of(launcher, rank, size);
        let name = *gone.get(&variables.keys().copied().collect::<Vec<_>>());
        variables.remove(name);
        // Without the step's number of tasks that of the allocation is used, which differs here.
        prop_assume!(!name.starts_with("SLURM_STEP_NUM"));
        if let Ok(Some(launched)) = read(&variables) {
            prop_assert_eq!((launched.rank, launched.world_size), (rank, size), "without {}", name);
        }
    }

    #[test]
    fn parsing_any_stat_does_not_panic(stat in any::<String>()) {
        let _ = parse_stat(&stat);
    }
}

fn run_id(variables: &Variables) -> String {
    let launched = read(variables).unwrap().unwrap();
    launched.job.unwrap().run_id(launched.restart_count)
}

#[test]
fn different_jobs_have_different_run_ids() {
    let mut jobs: Vec<Variables> = ALL.into_iter().map(|launcher| ranks_of(launcher, 0, 2)).collect();
    for (launcher, name, value) in [
        (Launcher::Torchrun, "TORCHELASTIC_RESTART_COUNT", "1"),
        (Launcher::Torchrun, "TORCHELASTIC_RUN_ID", "none"),
        (Launcher::Torchrun, "MASTER_PORT", "41132"),
        (Launcher::OpenMpi, "PMIX_NAMESPACE", "186318850"),
        (Launcher::Hydra, "PMI_PORT", "host:4000"),
        (Launcher::Slurm, "SLURM_STEP_ID", "1"),
        (Launcher::Slurm, "SLURM_JOB_ID", "4712"),
        (Launcher::Slurm, "SLURM_RESTART_COUNT", "1"),
        (Launcher::Slurm, "MGPU_RUN_ID", "mine"),
        (Launcher::OpenMpi, "MGPU_RUN_ID", "mine"),
    ] {
        let mut job = ranks_of(launcher, 0, 2);
        job.insert(name, value.into());
        jobs.push(job);
    }
    let ids: std::collections::BTreeSet<String> = jobs.iter().map(run_id).collect();
    assert_eq!(ids.len(), jobs.len());
}

#[test]
fn the_launch_id_survives_restarts_and_is_unique() {
    let id = |variables: &Variables, parent: &str| {
        let parent = (!parent.is_empty()).then(|| parent.to_owned());
        read(variables).unwrap().unwrap().job.unwrap().launch_id(|| parent)
    };
    for (launcher, count, name) in [
        (Launcher::Torchrun, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
        (Launcher::Slurm, "SLURM_RESTART_COUNT", "SLURM_JOB_ID"),
    ] {
        let first = ranks_of(launcher, 0, 2);
        let with = |name, value: &str| first.clone().into_iter().chain([(name, value.to_owned())]).collect();
        assert!(id(&first, "7 of 1").is_some());
        assert_eq!(id(&with(count, "1"), "7 of 1"), id(&first, "7 of 1"));
        assert_ne!(id(&with(name, "99"), "7 of 1"), id(&first, "7 of 1"));
    }
    // Two launches of torchrun may only differ in their process.
    let torchrun = ranks_of(Launcher::Torchrun, 0, 2);
    assert_ne!(id(&torchrun, "7 of 1"), id(&torchrun, "8 of 2"));
    assert_eq!(id(&torchrun, ""), None);
    assert_eq!(super::parent(), super::parent());
    assert!(super::parent().is_some_and(|parent| parent.contains(" of ")));
}

#[test]
fn the_innermost_launcher_takes_precedence() {
    let outer_to_inner = [Launcher::Slurm, Launcher::Hydra, Launcher::OpenMpi, Launcher::Torchrun];
    let mut variables = Variables::new();
    for (rank, launcher) in outer_to_inner.into_iter().enumerate() {
        variables.extend(ranks_of(launcher, rank as u32, 5));
        let launched = read(&variables).unwrap().unwrap();
        assert_eq!((launched.launcher, launched.rank), (launcher, rank as u32));
    }
}

#[test]
fn a_slurm_batch_script_is_not_a_rank() {
    for step in [None, Some("4294967291"), Some("4294967290")] {
        let mut script = ranks_of(Launcher::Slurm, 0, 4);
        script.remove("SLURM_STEP_ID");
        script.extend(step.map(|step| ("SLURM_STEP_ID", step.to_owned())));
        assert_eq!(read(&script).unwrap(), None, "step {step:?}");
        // As if the script had started `mpirun`.
        script.extend(ranks_of(Launcher::Hydra, 1, 2));
        assert_eq!(read(&script).unwrap().unwrap().launcher, Launcher::Hydra);
    }
}

#[test]
fn slurm_takes_precedence_over_mpi_and_torch_variables_within_its_step() {
    let mut variables = ranks_of(Launcher::Slurm, 3, 4);
    variables.extend([("PMI_RANK", "3".into()), ("PMI_SIZE", "4".into()), ("WORLD_SIZE", "4".into())]);
    variables.insert("SLURM_CPUS_PER_TASK", "6".into());
    let launched = read(&variables).unwrap().unwrap();
    assert_eq!((launched.launcher, launched.rank), (Launcher::Slurm, 3));
    assert_eq!(launched.threads.map(NonZeroUsize::get), Some(6));
}

#[test]
fn errors_name_the_variable() {
    use Launcher::{Hydra, OpenMpi, Slurm, Torchrun};
    for (launcher, changes, expected) in [
        (Torchrun, &[("RANK", None)][..], "RANK is missing while WORLD_SIZE is set"),
        (Torchrun, &[("WORLD_SIZE", None)], "WORLD_SIZE is missing while RANK is set"),
        (Torchrun, &[("WORLD_SIZE", Some("two"))], "WORLD_SIZE is `two` where a whole number is expected"),
        (
            Torchrun,
            &[("LOCAL_WORLD_SIZE", Some("1"))],
            "LOCAL_WORLD_SIZE is 1 where WORLD_SIZE is 4: the ranks are on several hosts",
        ),
        (Torchrun, &[("LOCAL_WORLD_SIZE", Some("8"))], "LOCAL_WORLD_SIZE is 8 where WORLD_SIZE is 4"),
        (
            OpenMpi,
            &[("OMPI_COMM_WORLD_RANK", None)],
            "OMPI_COMM_WORLD_RANK is missing while OMPI_COMM_WORLD_SIZE is set",
        ),
        (OpenMpi, &[("OMPI_COMM_WORLD_SIZE", Some("0"))], "OMPI_COMM_WORLD_SIZE is 0"),
        (
            OpenMpi,
            &[("OMPI_COMM_WORLD_LOCAL_SIZE", Some("2"))],
            "OMPI_COMM_WORLD_LOCAL_SIZE is 2 where OMPI_COMM_WORLD_SIZE is 4: the ranks are on several hosts",
        ),
        (Hydra, &[("PMI_RANK", Some("4"))], "PMI_RANK is 4 in a world of 4"),
        (Hydra, &[("PMI_RANK", None)], "PMI_RANK is missing while PMI_SIZE is set"),
        (Hydra, &[("MPI_LOCALRANKID", Some("4"))], "MPI_LOCALRANKID is 4 where 4 ranks are on this host"),
        (
            Slurm,
            &[("SLURM_STEP_NUM_NODES", Some("2"))],
            "SLURM_STEP_NUM_NODES is 2: the ranks are on several hosts",
        ),
        (Slurm, &[("SLURM_STEP_NUM_NODES", None)], "SLURM_NNODES is 4: the ranks are on several hosts"),
        (
            Slurm,
            &[("SLURM_STEP_NUM_TASKS", None), ("SLURM_NTASKS", None)],
            "SLURM_STEP_NUM_TASKS is missing while SLURM_PROCID is set",
        ),
    ] {
        let mut variables = ranks_of(launcher, 1, 4);
        for (name, value) in changes {
            variables.remove(name);
            variables.extend(value.map(|value| (*name, value.to_owned())));
        }
        let error = read(&variables).unwrap_err().to_string();
        assert!(error.contains(expected), "`{error}` should contain `{expected}`");
    }
}

#[test]
fn process_names_may_contain_parentheses() {
    let rest = "S 7 1 1 0 -1 4194560 9 0 0 0 0 0 0 0 20 0 1 0 4242 1 2";
    assert_eq!(parse_stat(&format!("12 (a) b (c) {rest}")), Some(("a) b (c", 7, 4242)));
    let own = std::fs::read_to_string("/proc/self/stat").unwrap();
    assert_eq!(parse_stat(&own).unwrap().1, std::os::unix::process::parent_id());
}
