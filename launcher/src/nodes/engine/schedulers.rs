//! Batch systems: Slurm's srun and LSF's jsrun start a task on each node; LSF and PBS themselves only list the hosts.
//!
//! Slurm was seen running, the others not: their readers follow manuals and sources.

use mgpu_control::nodes::host_list::first_host;

use super::super::settings::{Ports, SettingsError, Surroundings};
use super::{Engine, Given, Reading, Tasks, Told, several_elsewhere, several_here};

/// jsrun of IBM's Spectrum LSF. The first line of its host file is the launch node, which has no tasks.
pub(super) fn jsrun(variables: &Surroundings<'_>) -> Reading {
    let Some(size) = variables.number("JSM_NAMESPACE_SIZE")? else { return Ok(None) };
    let mut told = Told::by(Engine::Jsrun);
    let rank = variables.number("JSM_NAMESPACE_RANK")?;
    if let (Some(rank), Some(local_size)) = (rank, variables.number("JSM_NAMESPACE_LOCAL_SIZE")?) {
        Tasks { rank, size, local_size }.describe(&mut told, "add -r 1 to jsrun, and -n to mgpurun");
    }
    let hosts = variables.text("LSB_DJOB_RANKFILE").and_then(|path| (variables.file)(&path));
    let first = hosts.and_then(|hosts| hosts.lines().nth(1).map(|host| host.trim().to_owned()));
    told.endpoint = first.map(|host| Given::new((host, Ports::OfJob), "LSB_DJOB_RANKFILE"));
    told.run_id = variables.given("LSB_JOBID");
    Ok(Some(told))
}

/// Slurm: srun starts a task on each node of a step. The script of a batch job is no step.
pub(super) fn slurm(variables: &Surroundings<'_>) -> Reading {
    let Some(job) = variables.text("SLURM_JOB_ID") else { return Ok(None) };
    let mut told = Told::by(Engine::Slurm);
    let nodes = variables.number("SLURM_STEP_NUM_NODES")?;
    let node_rank = variables.number("SLURM_NODEID")?;
    // Besides those of srun there are steps of the system, such as 4294967290, the shell of salloc.
    let step = variables.number("SLURM_STEP_ID")?.filter(|step| step.value < 0xffff_fff0);
    let (Some(step), Some(nodes), Some(node_rank)) = (step, nodes, node_rank) else {
        let of_job = variables.first_number(&["SLURM_JOB_NUM_NODES", "SLURM_NNODES"])?;
        let several = of_job.filter(|nodes| nodes.value > 1);
        told.remark = several.map(|nodes| {
            several_elsewhere(Engine::Slurm, nodes.value, "srun --ntasks-per-node 1 mgpurun ...")
        });
        return Ok(Some(told));
    };
    let tasks = variables.first_number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
    if let Some(tasks) = tasks.filter(|tasks| tasks.value != nodes.value) {
        describe_tasks(&mut told, &tasks, &nodes);
    }
    told.endpoint = endpoint_of_step(variables)?;
    told.nodes = Some(nodes);
    told.node_rank = Some(node_rank);
    told.run_id = Some(Given::new(format!("{job}.{}", step.value), "SLURM_JOB_ID and SLURM_STEP_ID"));
    Ok(Some(told))
}

/// What to say about a step whose `tasks` are not one for each of its `nodes`.
fn describe_tasks(told: &mut Told, tasks: &Given<u32>, nodes: &Given<u32>) {
    if nodes.value == 1 {
        told.remark = Some(several_here(Engine::Slurm, tasks.value));
        return;
    }
    told.refusal = Some(format!(
        "srun has started {} tasks on {} nodes ({}, {}), but one mgpurun starts all ranks of a node: add --ntasks-per-node 1 to srun, and -n to mgpurun",
        tasks.value, nodes.value, tasks.from, nodes.from
    ));
}

/// The first host of the step, with a port that Slurm has reserved, if it reserves ports.
fn endpoint_of_step(variables: &Surroundings<'_>) -> Result<Option<Given<(String, Ports)>>, SettingsError> {
    let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
    let Some(list) = names.into_iter().find_map(|name| variables.given(name)) else { return Ok(None) };
    let reserved = variables.text("SLURM_STEP_RESV_PORTS");
    let port = reserved.as_deref().and_then(first_port).map_or(Ports::OfJob, Ports::One);
    let host = first_host(&list.value).ok_or_else(|| {
        SettingsError::new(format!("the variable {} is `{}`, not a list of hosts", list.from, list.value))
    })?;
    Ok(Some(Given::new((host, port), list.from)))
}

/// The first port of `12000-12003` or `12000,12004`.
fn first_port(ports: &str) -> Option<u16> {
    ports.split(['-', ',']).next()?.trim().parse().ok().filter(|port| *port != 0)
}

/// LSF lists hosts and their slots in one line: `a 4 b 4`. It does not tell on which hosts mgpurun was started.
pub(super) fn lsf(variables: &Surroundings<'_>) -> Reading {
    let Some(job) = variables.given("LSB_JOBID") else { return Ok(None) };
    let hosts = variables.text("LSB_MCPU_HOSTS").unwrap_or_default();
    let names: Vec<&str> = hosts.split_ascii_whitespace().step_by(2).collect();
    Ok(Some(of_hosts(Engine::Lsf, &names, "LSB_MCPU_HOSTS", job, "blaunch mgpurun --nnodes")))
}

/// PBS lists hosts in a file, each as often as it has slots. It does not tell on which hosts mgpurun was started.
pub(super) fn pbs(variables: &Surroundings<'_>) -> Reading {
    let Some(job) = variables.given("PBS_JOBID") else { return Ok(None) };
    let file = variables.text("PBS_NODEFILE").and_then(|path| (variables.file)(&path)).unwrap_or_default();
    let names: Vec<&str> = file.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Ok(Some(of_hosts(Engine::Pbs, &names, "PBS_NODEFILE", job, "pbsdsh -u mgpurun --nnodes")))
}

/// What a list of hosts says about a job whose agents have no ranks: the owner of the first address is node 0.
fn of_hosts(engine: Engine, names: &[&str], from: &str, job: Given<String>, how: &str) -> Told {
    let mut told = Told::by(engine);
    told.endpoint = names.first().map(|host| Given::new(((*host).to_owned(), Ports::OfJob), from));
    told.run_id = Some(job);
    let mut distinct = names.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let count = distinct.len() as u32;
    told.remark = (count > 1).then(|| several_elsewhere(engine, count, &format!("{how} {count} ...")));
    told
}
