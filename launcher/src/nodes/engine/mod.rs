//! What the engine that started this `mgpurun` says about the nodes, in its own variables.
//!
//! An engine starts one `mgpurun` on each node, as a task, a process of MPI, or a container. Several engines may be
//! nested: Slurm starts the daemons of Open MPI, which start `mgpurun`, and all their variables are there. The innermost
//! engine counts, so the readers are tried from those that run inside others to those that others run in.
//!
//! Everything here is an offer: flags and variables of `mgpurun` take precedence, and a value that they replace is not
//! looked at. So contradictions within the engine's words are kept as a [`Told::refusal`].

mod containers;
mod mpi;
mod schedulers;
mod torchrun;

use std::fmt;

use super::settings::{Ports, SettingsError, Surroundings};
use containers::{aws_batch, kubernetes, sagemaker};
use mpi::{mpich, open_mpi};
use schedulers::{jsrun, lsf, pbs, slurm};
use torchrun::torchrun;

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
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|text| !text.trim().is_empty())
    }

    fn given(&self, name: &str) -> Option<Given<String>> {
        Some(Given::new(self.text(name)?, name))
    }

    fn number(&self, name: &str) -> Result<Option<Given<u32>>, SettingsError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(value) => Ok(Some(Given::new(value, name))),
            Err(_) => Err(SettingsError::new(format!(
                "the variable {name} is `{text}`, not a number; with --standalone it does not matter"
            ))),
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

/// The remark about nodes of an engine on which nothing was started.
fn several_elsewhere(engine: Engine, nodes: u32, how: &str) -> String {
    format!(
        "this job runs on one of the {nodes} nodes that {engine} has allocated; {how} starts mgpurun on all"
    )
}

/// A notice if the engine lets this process, and so all ranks of the node, use only `usable` of `present` cores: Open MPI
/// binds each of few processes to one core, and srun gives a task one core, unless they are told otherwise.
pub(crate) fn binding_notice(engine: Engine, usable: usize, present: usize) -> Option<String> {
    let advice = match engine {
        Engine::OpenMpi => "add --bind-to none to mpirun",
        Engine::Mpich => "add -bind-to none to mpiexec",
        Engine::Jsrun => "add -b none and -c ALL_CPUS to jsrun",
        Engine::Slurm => "add --cpus-per-task N or --exclusive to srun",
        _ => return None,
    };
    // A part of the cores may be what was asked for, but not a single one.
    let is_few = usable < present && (usable == 1 || engine == Engine::OpenMpi);
    is_few.then(|| {
        format!("{engine} leaves {usable} of {present} cores to mgpurun, which all ranks of this node share; {advice}")
    })
}

/// What to do where the engine does not say where node 0 is.
pub(super) fn endpoint_advice(engine: Option<Engine>) -> String {
    let add = "add --rdzv-endpoint HOST[:PORT]";
    match engine {
        Some(Engine::OpenMpi) => {
            format!("mpirun tells it only if it runs on the first host of its list; {add} with that host")
        }
        Some(Engine::Kubernetes) => {
            format!("{add} with the name of pod 0 and its headless service, JOB-0.SERVICE")
        }
        _ => format!("{add}, the same on all nodes"),
    }
}

#[cfg(test)]
mod tests;
