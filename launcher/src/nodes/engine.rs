//! What the engine that started this `mgpurun` says about the nodes, in its own variables.
//!
//! An engine starts one `mgpurun` on each node, as a task, a process of MPI, or a container. Several engines may be
//! nested: Slurm starts the daemons of Open MPI, which start `mgpurun`, and all their variables are there. The innermost
//! engine counts, so the readers are tried from those that run inside others to those that others run in.
//!
//! Everything here is an offer: flags and variables of `mgpurun` take precedence, and a value that they replace is not
//! looked at. So contradictions within the engine's words are kept as a [`Told::refusal`].

use std::fmt;
use std::net::IpAddr;

use super::host_list::first_host;
use super::settings::{Ports, SettingsError, Surroundings};

/// What starts the agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// torchrun started this `mgpurun` as one of its ranks.
    Torchrun,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpiexec.hydra of MPICH or Intel MPI.
    Mpich,
    /// jsrun, in an LSF job.
    Jsrun,
    /// srun.
    Slurm,
    /// A multi-node parallel job of AWS Batch.
    AwsBatch,
    /// A training job of SageMaker.
    SageMaker,
    /// An LSF job without jsrun.
    Lsf,
    /// A PBS job.
    Pbs,
    /// An Indexed Job or a JobSet.
    Kubernetes,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Torchrun => "torchrun",
            Engine::OpenMpi => "Open MPI",
            Engine::Mpich => "MPICH",
            Engine::Jsrun => "jsrun",
            Engine::Slurm => "Slurm",
            Engine::AwsBatch => "AWS Batch",
            Engine::SageMaker => "SageMaker",
            Engine::Lsf => "LSF",
            Engine::Pbs => "PBS",
            Engine::Kubernetes => "Kubernetes",
        })
    }
}

/// A value with the flag or the variables that it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Given<T> {
    pub(super) value: T,
    pub(super) from: String,
}

impl<T> Given<T> {
    pub(super) fn new(value: T, from: impl Into<String>) -> Self {
        Given { value, from: from.into() }
    }

    pub(super) fn map<U>(self, change: impl FnOnce(T) -> U) -> Given<U> {
        Given { value: change(self.value), from: self.from }
    }
}

/// What an engine says. What it does not say is `None`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) engine: Engine,
    pub(super) nodes: Option<Given<u32>>,
    pub(super) node_rank: Option<Given<u32>>,
    /// Host of node 0, and its port.
    pub(super) endpoint: Option<Given<(String, Ports)>>,
    pub(super) run_id: Option<Given<String>>,
    /// Why number and rank of the nodes cannot be taken from the engine.
    pub(super) refusal: Option<String>,
    /// A remark for the user of a job on one node, who may have meant several.
    pub(super) remark: Option<String>,
}

impl Told {
    fn by(engine: Engine) -> Self {
        Told {
            engine,
            nodes: None,
            node_rank: None,
            endpoint: None,
            run_id: None,
            refusal: None,
            remark: None,
        }
    }
}

/// What the innermost engine says, `None` without an engine.
///
/// # Errors
/// If one of its variables has an impossible value.
pub(super) fn innermost(surroundings: &Surroundings<'_>) -> Result<Option<Told>, SettingsError> {
    let readers = [torchrun, open_mpi, mpich, jsrun, slurm, aws_batch, sagemaker, lsf, pbs, kubernetes];
    for reader in readers {
        if let Some(told) = reader(surroundings)? {
            return Ok(Some(told));
        }
    }
    Ok(None)
}

/// What a reader returns: `None` if the engine is not there.
type Reading = Result<Option<Told>, SettingsError>;

impl Surroundings<'_> {
    /// The value of a variable, if it is set and not empty.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|text| !text.trim().is_empty())
    }

    fn given(&self, name: &str) -> Option<Given<String>> {
        Some(Given::new(self.text(name)?, name))
    }

    fn number(&self, name: &str) -> Result<Option<Given<u32>>, SettingsError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(value) => Ok(Some(Given::new(value, name))),
            Err(_) => Err(SettingsError::new(format!("the variable {name} is `{text}`, not a number"))),
        }
    }

    /// The first of these variables that is a number.
    fn first_number(&self, names: &[&str]) -> Result<Option<Given<u32>>, SettingsError> {
        names.iter().find_map(|name| self.number(name).transpose()).transpose()
    }
}

/// The tasks of an engine that counts them over all nodes, as MPI counts its processes.
struct Tasks {
    rank: Given<u32>,
    size: Given<u32>,
    local_size: Given<u32>,
}

impl Tasks {
    /// Takes each task as the agent of a node, if there is one on each node.
    fn describe(self, told: &mut Told, advice: &str) {
        let Tasks { rank, size, local_size } = self;
        let (tasks, here) = (size.value, local_size.value);
        if here == 1 {
            told.nodes = Some(size);
            told.node_rank = Some(rank);
        } else if here == tasks {
            told.remark = Some(several_here(told.engine, here));
        } else {
            told.refusal = Some(format!(
                "{} has started {here} of {tasks} mgpurun on this node ({}={here}, {}={tasks}), but one mgpurun starts all ranks of a node: {advice}",
                told.engine, local_size.from, size.from
            ));
        }
    }
}

/// The remark about several `mgpurun` of one engine on one node.
fn several_here(engine: Engine, tasks: u32) -> String {
    format!(
        "{engine} has started {tasks} mgpurun on this node, and each of them is a job of its own; one mgpurun -n {tasks} starts {tasks} ranks"
    )
}

/// torchrun sets `TORCHELASTIC_RUN_ID` for its ranks. Its own store has the port `MASTER_PORT`.
fn torchrun(variables: &Surroundings<'_>) -> Reading {
    let Some(run_id) = variables.text("TORCHELASTIC_RUN_ID") else { return Ok(None) };
    let mut told = Told::by(Engine::Torchrun);
    let rank = variables.number("RANK")?;
    let size = variables.number("WORLD_SIZE")?;
    let local_size = variables.number("LOCAL_WORLD_SIZE")?;
    if let (Some(rank), Some(size), Some(local_size)) = (rank, size, local_size) {
        let advice = "start torchrun with --nproc-per-node 1, and mgpurun with -n";
        Tasks { rank, size, local_size }.describe(&mut told, advice);
    }
    told.endpoint = variables.given("MASTER_ADDR").map(|host| host.map(|host| (host, Ports::OfJob)));
    // Jobs without --rdzv-id have the same identifier, but not the same port on one host.
    let port = variables.text("MASTER_PORT").unwrap_or_default();
    told.run_id = Some(Given::new(format!("{run_id}:{port}"), "TORCHELASTIC_RUN_ID and MASTER_PORT"));
    Ok(Some(told))
}

/// Open MPI does not say where rank 0 is, but where mpirun is, which is the same host unless mpirun was started on a
/// login node.
fn open_mpi(variables: &Surroundings<'_>) -> Reading {
    let Some(size) = variables.number("OMPI_COMM_WORLD_SIZE")? else { return Ok(None) };
    let rank = variables.number("OMPI_COMM_WORLD_RANK")?.unwrap_or(Given::new(0, "OMPI_COMM_WORLD_RANK"));
    let local_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let local_size = local_size.unwrap_or(Given::new(1, "OMPI_COMM_WORLD_LOCAL_SIZE"));
    let mut told = Told::by(Engine::OpenMpi);
    let is_first = rank.value == 0;
    Tasks { rank, size, local_size }.describe(&mut told, "add -N 1 to mpirun, and -n to mgpurun");
    told.run_id = variables.given("PMIX_NAMESPACE");
    if let Some((host, is_here)) = host_of_mpirun(variables) {
        if is_here || !is_first {
            told.endpoint = Some(host.map(|host| (host, Ports::OfJob)));
        }
    }
    Ok(Some(told))
}

/// The host of mpirun, and whether it is this host.
fn host_of_mpirun(variables: &Surroundings<'_>) -> Option<(Given<String>, bool)> {
    let of_mpirun = "OMPI_MCA_orte_hnp_uri";
    if let Some(uri) = variables.text(of_mpirun) {
        // Open MPI 4: the addresses of mpirun, and those of the daemon of this host.
        let here = variables.text("OMPI_MCA_orte_local_daemon_uri")?;
        let address = nearest(&addresses(&uri), &addresses(&here))?;
        return Some((Given::new(address.to_string(), of_mpirun), uri == here));
    }
    // Open MPI 5: the name of the job is prterun-HOST-PID@JOB.
    let name = variables.text("PMIX_NAMESPACE")?;
    let (host, _) = name.strip_prefix("prterun-")?.rsplit_once('@')?.0.rsplit_once('-')?;
    let is_here = variables.text("PMIX_HOSTNAME")? == host;
    Some((Given::new(host.to_owned(), "PMIX_NAMESPACE"), is_here))
}

/// The addresses in a URI of Open MPI: `1.0;tcp://192.0.2.2,10.0.0.2:55813;tcp6://[fd00::2]:34629`.
fn addresses(uri: &str) -> Vec<IpAddr> {
    let hosts = uri.split(';').filter_map(|part| {
        let (_, rest) = part.split_once("://")?;
        if let Some(rest) = rest.strip_prefix('[') {
            return rest.split_once(']').map(|(hosts, _)| hosts);
        }
        rest.split(':').next()
    });
    hosts.flat_map(|hosts| hosts.split(',')).filter_map(|host| host.parse().ok()).collect()
}

/// The address of `theirs` that is most likely to be reached from a host with the addresses `ours`: not one that both
/// have, such as that of a bridge of containers, and the one with the longest common prefix.
fn nearest(theirs: &[IpAddr], ours: &[IpAddr]) -> Option<IpAddr> {
    let candidates = theirs.iter().filter(|address| !ours.contains(address));
    let best =
        candidates.rev().max_by_key(|address| ours.iter().map(|own| common_prefix(**address, *own)).max());
    best.or(theirs.first()).copied()
}

/// Number of equal leading bits of two addresses of one family.
fn common_prefix(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

/// Hydra starts the processes of MPICH and Intel MPI. Where rank 0 is, they have to ask it by PMI.
fn mpich(variables: &Surroundings<'_>) -> Reading {
    let Some(local_size) = variables.number("MPI_LOCALNRANKS")? else { return Ok(None) };
    let rank = variables.first_number(&["PMI_RANK", "PMI_ID"])?;
    let (Some(rank), Some(size)) = (rank, variables.number("PMI_SIZE")?) else { return Ok(None) };
    let mut told = Told::by(Engine::Mpich);
    Tasks { rank, size, local_size }.describe(&mut told, "add -ppn 1 to mpiexec, and -n to mgpurun");
    Ok(Some(told))
}

/// jsrun of IBM's Spectrum LSF. The first line of its host file is the launch node, which has no tasks.
fn jsrun(variables: &Surroundings<'_>) -> Reading {
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
fn slurm(variables: &Surroundings<'_>) -> Reading {
    let Some(job) = variables.text("SLURM_JOB_ID") else { return Ok(None) };
    let mut told = Told::by(Engine::Slurm);
    let nodes = variables.number("SLURM_STEP_NUM_NODES")?;
    let node_rank = variables.number("SLURM_NODEID")?;
    let (Some(step), Some(nodes), Some(node_rank)) = (variables.text("SLURM_STEP_ID"), nodes, node_rank)
    else {
        let of_job = variables.first_number(&["SLURM_JOB_NUM_NODES", "SLURM_NNODES"])?;
        let several = of_job.filter(|nodes| nodes.value > 1);
        told.remark = several.map(|nodes| {
            several_elsewhere(Engine::Slurm, nodes.value, "srun --ntasks-per-node 1 mgpurun ...")
        });
        return Ok(Some(told));
    };
    let tasks = variables.first_number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
    match tasks {
        Some(tasks) if tasks.value != nodes.value && nodes.value > 1 => {
            told.refusal = Some(format!(
                "srun has started {} tasks on {} nodes ({}, {}), but one mgpurun starts all ranks of a node: add --ntasks-per-node 1 to srun, and -n to mgpurun",
                tasks.value, nodes.value, tasks.from, nodes.from
            ));
        }
        Some(tasks) if tasks.value > nodes.value => {
            told.remark = Some(several_here(Engine::Slurm, tasks.value))
        }
        _ => {}
    }
    let list =
        ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].into_iter().find_map(|name| variables.given(name));
    if let Some(list) = list {
        let reserved = variables.text("SLURM_STEP_RESV_PORTS");
        let port = reserved.as_deref().and_then(first_port).map_or(Ports::OfJob, Ports::One);
        let host = first_host(&list.value).ok_or_else(|| {
            SettingsError::new(format!("the variable {} is `{}`, not a list of hosts", list.from, list.value))
        })?;
        told.endpoint = Some(Given::new((host, port), list.from));
    }
    told.nodes = Some(nodes);
    told.node_rank = Some(node_rank);
    told.run_id = Some(Given::new(format!("{job}.{step}"), "SLURM_JOB_ID and SLURM_STEP_ID"));
    Ok(Some(told))
}

/// The remark about nodes of an engine on which nothing was started.
fn several_elsewhere(engine: Engine, nodes: u32, how: &str) -> String {
    format!(
        "this job runs on one of the {nodes} nodes that {engine} has allocated; {how} starts mgpurun on all"
    )
}

/// The first port of `12000-12003` or `12000,12004`.
fn first_port(ports: &str) -> Option<u16> {
    ports.split(['-', ',']).next()?.trim().parse().ok().filter(|port| *port != 0)
}

/// AWS Batch: the main node, which need not be the first, becomes node 0. Its address is absent on itself.
fn aws_batch(variables: &Surroundings<'_>) -> Reading {
    let Some(nodes) = variables.number("AWS_BATCH_JOB_NUM_NODES")? else { return Ok(None) };
    let index = variables.number("AWS_BATCH_JOB_NODE_INDEX")?;
    let main = variables.number("AWS_BATCH_JOB_MAIN_NODE_INDEX")?.map_or(0, |main| main.value);
    let mut told = Told::by(Engine::AwsBatch);
    told.nodes = Some(nodes);
    told.node_rank = index.map(|index| {
        index.map(|index| match index {
            main_itself if main_itself == main => 0,
            0 => main,
            other => other,
        })
    });
    let is_main = told.node_rank.as_ref().is_some_and(|rank| rank.value == 0);
    let address = variables.given("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS");
    let own = is_main.then(|| Given::new("localhost".to_owned(), "AWS_BATCH_JOB_NODE_INDEX"));
    told.endpoint = address.or(own).map(|host| host.map(|host| (host, Ports::OfJob)));
    // A node's job has the number of the node behind `#`.
    told.run_id = variables
        .given("AWS_BATCH_JOB_ID")
        .map(|id| id.map(|id| id.split_once('#').map_or(id.clone(), |(job, _)| job.to_owned())));
    Ok(Some(told))
}

/// SageMaker: `SM_HOSTS` is a JSON array of names, the same on all hosts.
fn sagemaker(variables: &Surroundings<'_>) -> Reading {
    let (Some(hosts), Some(own)) = (variables.text("SM_HOSTS"), variables.text("SM_CURRENT_HOST")) else {
        return Ok(None);
    };
    let names: Vec<String> = serde_json::from_str(&hosts).map_err(|_| {
        SettingsError::new(format!("the variable SM_HOSTS is `{hosts}`, not a JSON array of names"))
    })?;
    let mut told = Told::by(Engine::SageMaker);
    told.nodes = Some(Given::new(names.len() as u32, "SM_HOSTS"));
    match names.iter().position(|name| *name == own) {
        Some(index) => told.node_rank = Some(Given::new(index as u32, "SM_CURRENT_HOST")),
        None => told.refusal = Some(format!("SM_CURRENT_HOST is `{own}`, which is not in SM_HOSTS, {hosts}")),
    }
    told.endpoint = names.into_iter().next().map(|host| Given::new((host, Ports::OfJob), "SM_HOSTS"));
    told.run_id = variables.given("TRAINING_JOB_NAME");
    Ok(Some(told))
}

/// LSF lists hosts and their slots in one line: `a 4 b 4`. It does not tell on which hosts mgpurun was started.
fn lsf(variables: &Surroundings<'_>) -> Reading {
    let Some(job) = variables.given("LSB_JOBID") else { return Ok(None) };
    let hosts = variables.text("LSB_MCPU_HOSTS").unwrap_or_default();
    let names: Vec<&str> = hosts.split_ascii_whitespace().step_by(2).collect();
    Ok(Some(of_hosts(Engine::Lsf, &names, "LSB_MCPU_HOSTS", job, "blaunch mgpurun --nnodes")))
}

/// PBS lists hosts in a file, each as often as it has slots. It does not tell on which hosts mgpurun was started.
fn pbs(variables: &Surroundings<'_>) -> Reading {
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

/// Kubernetes numbers the pods of an Indexed Job. How many there are, and their service, it does not tell them.
fn kubernetes(variables: &Surroundings<'_>) -> Reading {
    let Some(index) = variables.number("JOB_COMPLETION_INDEX")? else { return Ok(None) };
    let mut told = Told::by(Engine::Kubernetes);
    told.node_rank = Some(index);
    Ok(Some(told))
}

/// What to do where the engine does not say where node 0 is.
pub(super) fn endpoint_advice(engine: Option<Engine>, node_rank: Option<u32>) -> String {
    let add = "add --rdzv-endpoint HOST[:PORT]";
    match engine {
        Some(Engine::OpenMpi) if node_rank == Some(0) => {
            format!("mpirun runs on another host than its rank 0: {add} with the first host of mpirun's list")
        }
        Some(Engine::OpenMpi) => format!("{add} with the first host of mpirun's list"),
        Some(Engine::Kubernetes) => {
            format!("{add} with the name of pod 0 and its headless service, JOB-0.SERVICE")
        }
        _ => format!("{add}, the same on all nodes"),
    }
}
