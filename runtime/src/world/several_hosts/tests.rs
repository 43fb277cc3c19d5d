//! Environments of ranks on several hosts.

use proptest::prelude::*;

use super::*;

/// The rank that these variables describe.
fn read(pairs: &[(&str, &str)]) -> Result<(u32, HostOfRank)> {
    let variable =
        |name: &str| pairs.iter().rev().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let environment =
        LaunchEnvironment { variable: &variable, hydra: &|| Some("7 of 1".into()), parent: &|| None };
    let launched = environment.launched()?.expect("a launcher");
    Ok((launched.rank, launched.host.expect("several hosts")))
}

const SLURM: [(&str, &str); 8] = [
    ("SLURM_PROCID", "5"),
    ("SLURM_STEP_NUM_TASKS", "7"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "2"),
    ("SLURM_STEP_NUM_NODES", "4"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
    ("SLURM_STEP_NODELIST", "n[07-9,12]"),
    ("SLURM_STEP_ID", "0"),
];
const MPI: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-head-1-24219@1"),
];
const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "0"),
    ("LOCAL_WORLD_SIZE", "1"),
    ("MASTER_ADDR", "fd00::1"),
    ("MASTER_PORT", "29500"),
];
const HYDRA: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
const OPEN: (&str, &str) = ("MGPU_AUTH", "none");

#[test]
fn each_launcher_describes_the_host() {
    let port = ("SLURM_STEP_RESV_PORTS", "12000-12003");
    let daemon = ("PMIX_SERVER_URI41", "prterun-head-1-24219@0.1;tcp4://10.0.0.2:4000");
    let endpoint = ("MGPU_RDZV_ENDPOINT", "[fd00::9]:4000");
    for (pairs, expected) in [
        ([&SLURM[..], &[OPEN]].concat(), (5, 4, 2, "n07")),
        ([&SLURM[..], &[OPEN, port]].concat(), (5, 4, 2, "n07:12000")),
        ([&MPI[..], &[OPEN, daemon]].concat(), (3, 2, 2, "head-1")),
        ([&TORCHRUN[..], &[OPEN]].concat(), (3, 3, 1, "fd00::1")),
        ([&HYDRA[..], &[OPEN, endpoint]].concat(), (1, 0, 2, "[fd00::9]:4000")),
        ([&SLURM[..], &[OPEN, port, endpoint]].concat(), (5, 4, 2, "[fd00::9]:4000")),
    ] {
        let (rank, host) = read(&pairs).unwrap();
        assert_eq!((rank, host.first_rank, host.ranks, host.endpoint.to_string().as_str()), expected);
    }
}

#[test]
fn credentials_are_a_secret_or_munge_under_slurm() {
    let authentication = |pairs: &[(&str, &str)]| {
        read(pairs).map(|(_, host)| host.authentication).map_err(|error| error.to_string())
    };
    let (file, secret) = (("MGPU_SECRET_FILE", "/run/s"), ("MGPU_SECRET", "0123456789abcdef"));
    let of_file = Authentication::SecretFile("/run/s".into());
    assert_eq!(authentication(&SLURM), Ok(Authentication::Munge));
    assert_eq!(authentication(&[&SLURM[..], &[secret]].concat()), Ok(Authentication::Secret));
    assert_eq!(authentication(&[&TORCHRUN[..], &[secret, file]].concat()), Ok(of_file));
    assert_eq!(
        authentication(&[&TORCHRUN[..], &[secret, ("MGPU_AUTH", "munge")]].concat()),
        Ok(Authentication::Munge)
    );
    let missing = authentication(&TORCHRUN).unwrap_err();
    assert_eq!(
        missing,
        "environment variable LOCAL_WORLD_SIZE is 1 where WORLD_SIZE is 4: the ranks are on several hosts, which authenticate each other by a \
         secret, and there is none: set MGPU_SECRET_FILE or MGPU_SECRET alike on all hosts (`openssl rand -hex 32` makes a \
         secret), or MGPU_AUTH=none on a network where nobody else can connect"
    );
    let wrong = authentication(&[&TORCHRUN[..], &[("MGPU_AUTH", "ssh")]].concat()).unwrap_err();
    assert_eq!(wrong, "environment variable MGPU_AUTH is `ssh`; known are auto, secret, munge and none");
}

#[test]
fn errors_say_what_to_do() {
    for (pairs, change, expected) in [
        (&SLURM[..], ("SLURM_PROCID", "2"), "add --distribution block to srun"),
        (&SLURM, ("SLURM_NODEID", "9"), "which has no node 9"),
        (&SLURM, ("SLURM_STEP_TASKS_PER_NODE", "2(x3"), "is `2(x3` where numbers of tasks such as 2(x3),1"),
        (&SLURM, ("SLURM_STEP_TASKS_PER_NODE", "2(x4)"), "8 tasks in all, in a world of 7"),
        (&MPI, OPEN, "Open MPI does not say where rank 0 is: set MGPU_RDZV_ENDPOINT=HOST:PORT"),
        (&HYDRA, OPEN, "hydra does not say where rank 0 is: set MGPU_RDZV_ENDPOINT=HOST:PORT"),
        (&HYDRA, ("PMI_RANK", "0"), "rank 0 of 4 is number 1 of 2 on its host"),
        (&HYDRA, ("MPI_LOCALRANKID", "2"), "rank 1 of 4 is number 2 of 2 on its host"),
        (&TORCHRUN, ("MGPU_RDZV_ENDPOINT", "a:b"), "MGPU_RDZV_ENDPOINT is wrong: \"a:b\" is no HOST"),
    ] {
        let error = read(&[pairs, &[change]].concat()).unwrap_err().to_string();
        assert!(error.contains(expected), "`{error}` should contain `{expected}`");
    }
}

proptest! {
    #[test]
    fn tasks_of_each_node_are_found(counts in prop::collection::vec((0u32..5, 1u32..4), 1..5)) {
        let part = |(tasks, nodes): &(u32, u32)| match nodes {
            1 => tasks.to_string(),
            _ => format!("{tasks}(x{nodes})"),
        };
        let text: Vec<String> = counts.iter().map(part).collect();
        let parsed = parse_tasks(&text.join(",")).unwrap();
        prop_assert_eq!(&parsed, &counts);
        let nodes = counts.iter().flat_map(|(tasks, nodes)| std::iter::repeat_n(*tasks, *nodes as usize));
        let (mut first, mut node) = (0, 0);
        for tasks in nodes {
            prop_assert_eq!(ranks_of_node(&parsed, node), Some((first, tasks)));
            (first, node) = (first + tasks, node + 1);
        }
        prop_assert_eq!(ranks_of_node(&parsed, node), None);
    }

    #[test]
    fn no_text_of_tasks_panics(text in "[0-9x(),]{0,12}", node: u32) {
        if let Some(counts) = parse_tasks(&text)
            && counts.iter().map(|(tasks, nodes)| u64::from(*tasks) * u64::from(*nodes)).sum::<u64>() < 1 << 16
        {
            let _ = ranks_of_node(&counts, node);
        }
    }
}
