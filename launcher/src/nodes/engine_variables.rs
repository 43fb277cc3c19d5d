//! Variables that an engine, or the user, has set for this `mgpurun`, and that would mislead its ranks.
//!
//! An agent that is rank 1 of `mpirun` starts several ranks. If they found `OMPI_COMM_WORLD_RANK=1`, each of them would
//! take itself for that process of MPI: PyTorch Lightning reads `SLURM_PROCID`, and `MPI_Init` in a rank would speak to
//! the daemon in the agent's name. Ranks get their own `RANK` and `WORLD_SIZE` instead. The secret of the nodes is none
//! of their business either.

/// Beginnings of names.
const FAMILIES: [&str; 9] = [
    "PMI_",
    "PMIX_",
    "OMPI_COMM_WORLD_",
    // How a process finds its daemon.
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_",
    "JSM_NAMESPACE_",
    "TORCHELASTIC_",
    "PET_",
    "MPI_LOCAL",
];

/// Whole names. What concerns all ranks of the job, such as `SLURM_JOB_ID`, stays.
const NAMES: [&str; 10] = [
    "MGPU_NNODES",
    "MGPU_NODE_RANK",
    "MGPU_RDZV_ENDPOINT",
    "MGPU_NODE_TIMEOUT",
    "MGPU_AUTH",
    "MGPU_SECRET",
    "MGPU_SECRET_FILE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "HYDI_CONTROL_FD",
];

/// Those of the variables with these `names` that the ranks of an agent must not inherit. Variables that are set for the
/// ranks are set afterwards.
pub(crate) fn variables_to_remove<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let is_misleading =
        |name: &&str| NAMES.contains(name) || FAMILIES.iter().any(|family| name.starts_with(family));
    names.into_iter().filter(is_misleading).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_s_own_variables_are_removed_and_those_of_the_job_stay() {
        let names = [
            "PATH",
            "PMI_RANK",
            "PMIX_NAMESPACE",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_MCA_btl",
            "OMPI_MCA_orte_hnp_uri",
            "SLURM_PROCID",
            "SLURM_JOB_ID",
            "PET_NNODES",
            "TORCHELASTIC_USE_AGENT_STORE",
            "MGPU_SECRET",
            "MGPU_THREADS",
            "PETSC_DIR",
            "PMI",
        ];
        let removed = variables_to_remove(names);
        assert_eq!(
            removed,
            [
                "PMI_RANK",
                "PMIX_NAMESPACE",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_MCA_orte_hnp_uri",
                "SLURM_PROCID",
                "PET_NNODES",
                "TORCHELASTIC_USE_AGENT_STORE",
                "MGPU_SECRET",
            ]
        );
    }
}
