//! Which node is this, how many are there, and where is node 0?
//!
//! Each setting comes from the first place that has it: a flag, `MGPU_*`, `PET_*` (torchrun's variables for its flags,
//! which Kubeflow sets), then the environment of the innermost engine. An empty variable counts as absent. What is read
//! here is one node's view; whether the nodes agree, the coordinator finds out.

mod text;
mod values;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use mgpu_control::protocol::MGPU_RENDEZVOUS;

use super::engine::{self, Engine, Given, Told};
use super::net::NetChoice;
use crate::cli::NodeArgs;
use values::{
    check_backend, join_timeout, parse_auth, parse_endpoint, parse_host, parse_net, parse_port, wrong,
};
pub(super) use values::{parse_node_timeout, parse_nodes};

/// Port of an endpoint without one, as for torchrun.
const ENDPOINT_PORT: u16 = 29400;
/// Port of `--master-addr` without one, as for torchrun.
const MASTER_PORT: u16 = 29500;
/// Silence after which a node is lost.
pub(super) const NODE_TIMEOUT: Duration = Duration::from_secs(30);

/// What the agent of one node knows about the job's nodes before it has reached any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeSettings {
    /// How many nodes the job may have; `2..=2` for exactly two. Never `1..=1`.
    pub(crate) nodes: RangeInclusive<u32>,
    /// This node. If no node has a rank, the owner of the endpoint's address is node 0.
    pub(crate) node_rank: Option<u32>,
    /// Host name or address of node 0, and its port. Unknown only under MPICH before [`super::pmi`] has asked. On node 0
    /// itself it may be `localhost`: there only the port counts.
    pub(crate) endpoint: Option<(String, Ports)>,
    /// Name of the job, the same on all nodes: `--rdzv-id`, or the engine's own.
    pub(crate) run_id: Option<String>,
    /// Address of this node that the others are told.
    pub(crate) local_addr: Option<String>,
    /// Silence after which an agent counts as lost.
    pub(crate) node_timeout: Duration,
    /// Time to join that `--rdzv-conf` sets; `--timeout` takes precedence.
    pub(crate) join_timeout: Option<Duration>,
    /// What connects ranks of different hosts.
    pub(crate) net: NetChoice,
    /// How the nodes authenticate each other.
    pub(crate) auth: AuthChoice,
    /// File with their secret. The variable `MGPU_SECRET` is not read here, so that no copy of it exists.
    pub(crate) secret_file: Option<PathBuf>,
    /// What started the agents, if its variables were recognised.
    pub(crate) engine: Option<Engine>,
    /// Each setting with the flag or the variable that it comes from.
    pub(crate) sources: Vec<(&'static str, String)>,
}

/// The port on which node 0 listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ports {
    /// This one.
    One(u16),
    /// The first free one of a sequence that follows from the name of the job.
    OfJob,
}

/// The requested authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AuthChoice {
    /// A secret if there is one, munge otherwise.
    Auto,
    /// A shared secret.
    Secret,
    /// The key of the munge service.
    Munge,
    /// Anybody may join.
    None,
}

/// Why the settings make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct SettingsError(String);

impl SettingsError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        SettingsError(text.into())
    }
}

/// What the settings are read from besides the flags.
pub(crate) struct Surroundings<'a> {
    /// The value of an environment variable.
    pub(crate) variable: &'a dyn Fn(&str) -> Option<String>,
    /// The text of a file that a variable names.
    pub(crate) file: &'a dyn Fn(&str) -> Option<String>,
}

/// The settings of a job on several nodes, `None` for a job on one. Remarks for the user are added to `notices`.
///
/// # Errors
/// If a value is invalid, two contradict each other, or one is missing.
pub(crate) fn settings(
    args: &NodeArgs,
    surroundings: &Surroundings<'_>,
    notices: &mut Vec<String>,
) -> Result<Option<NodeSettings>, SettingsError> {
    let places = Places::of(surroundings);
    let nnodes = places.find(&args.nnodes, "NNODES");
    if is_standalone(args, &places, nnodes.as_ref())? {
        return Ok(None);
    }
    check_backend(places.find(&args.rdzv_backend, "RDZV_BACKEND"))?;
    let told = if places.is_nested { None } else { engine::innermost(surroundings)? };
    let nodes = match (&nnodes, &told) {
        (Some(given), _) => Some(Given::new(parse_nodes(given)?, &given.from)),
        (None, Some(Told { refusal: Some(refusal), .. })) => return Err(SettingsError::new(refusal.clone())),
        (None, Some(told)) => told.nodes.clone().map(|nodes| nodes.map(|count| count..=count)),
        (None, None) => None,
    };
    notices.extend(disagreement(nodes.as_ref(), told.as_ref()));
    let node_rank = node_rank(args, &places, told.as_ref(), nodes.as_ref())?;
    let Some(nodes) = nodes.filter(|nodes| *nodes.value.end() > 1) else {
        notices.extend(told.filter(|_| nnodes.is_none()).and_then(|told| told.remark));
        notices.extend(without_effect(args, nnodes.as_ref()));
        return Ok(None);
    };
    several(args, &places, told, nodes, node_rank, notices).map(Some)
}

/// What torchrun's options mean for a job on one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OneNode {
    /// `MASTER_PORT` of the ranks, with the option or variable that says so; `None`: any free port.
    pub(crate) master_port: Option<(u16, String)>,
    /// `TORCHELASTIC_RUN_ID` of the ranks.
    pub(crate) run_id: Option<String>,
}

/// The settings of `worlds` worlds on one node.
///
/// # Errors
/// If the port is not one, or an option gives it to several worlds.
pub(crate) fn one_node(
    args: &NodeArgs,
    surroundings: &Surroundings<'_>,
    worlds: usize,
) -> Result<OneNode, SettingsError> {
    let places = Places::of(surroundings);
    let nnodes = places.find(&args.nnodes, "NNODES");
    // Then the variables may be those of another job, which runs in the same container.
    let is_standalone = is_standalone(args, &places, nnodes.as_ref())?;
    let find = |flag: &Option<String>, name: &str| match is_standalone {
        true => flag.as_ref().map(|value| Given::new(value.clone(), flag_name(name))),
        false => places.find(flag, name),
    };
    let port = match find(&args.master_port, "MASTER_PORT").filter(|port| port.value.trim() != "0") {
        Some(Given { value, .. }) if worlds > 1 && args.master_port.is_some() => {
            return Err(SettingsError::new(format!(
                "--master-port is {value}, and this command line has {worlds} jobs: without it, each gets a free port of its own"
            )));
        }
        port => port.filter(|_| worlds == 1),
    };
    let number = port.as_ref().map(parse_port).transpose()?;
    Ok(OneNode {
        master_port: number.zip(port.map(|port| port.from)),
        run_id: find(&args.rdzv_id, "RDZV_ID").map(|id| id.value),
    })
}

/// The settings of several `nodes`.
fn several(
    args: &NodeArgs,
    places: &Places<'_>,
    told: Option<Told>,
    nodes: Given<RangeInclusive<u32>>,
    node_rank: Option<Given<u32>>,
    notices: &mut Vec<String>,
) -> Result<NodeSettings, SettingsError> {
    let engine = told.as_ref().map(|told| told.engine);
    let (told_endpoint, told_id) = told.map_or((None, None), |told| (told.endpoint, told.run_id));
    let run_id = places.find(&args.rdzv_id, "RDZV_ID").or(told_id);
    let endpoint = endpoint(args, places, told_endpoint, run_id.is_some())?;
    // The processes of MPICH ask for it.
    if endpoint.is_none() && engine != Some(Engine::Mpich) {
        let advice = engine::endpoint_advice(engine);
        let nodes = describe_nodes(&nodes.value);
        return Err(SettingsError::new(format!("{nodes}, and it is unknown where node 0 is: {advice}")));
    }
    let local_addr = places.find(&args.local_addr, "LOCAL_ADDR");
    let node_timeout = places.find_ours(&args.node_timeout, "NODE_TIMEOUT");
    let net = places.find_ours(&args.net, "NET");
    let auth = places.find_ours(&args.auth, "AUTH");
    let secret_file = places.find_ours(&args.secret_file, "SECRET_FILE");
    let settings = NodeSettings {
        node_timeout: node_timeout.as_ref().map(parse_node_timeout).transpose()?.unwrap_or(NODE_TIMEOUT),
        join_timeout: join_timeout(places.find(&args.rdzv_conf, "RDZV_CONF"), notices)?,
        net: net.as_ref().map(parse_net).transpose()?.unwrap_or(NetChoice::Auto),
        auth: auth.as_ref().map(parse_auth).transpose()?.unwrap_or(AuthChoice::Auto),
        secret_file: secret_file.as_ref().map(|file| PathBuf::from(&file.value)),
        engine,
        sources: [
            ("nodes", Some(nodes.from)),
            ("node rank", source(&node_rank)),
            ("endpoint", source(&endpoint)),
            ("run id", source(&run_id)),
            ("local address", source(&local_addr)),
            ("node timeout", source(&node_timeout)),
            ("network", source(&net)),
            ("authentication", source(&auth)),
            ("secret file", source(&secret_file)),
        ]
        .into_iter()
        .filter_map(|(what, from)| Some((what, from?)))
        .collect(),
        nodes: nodes.value,
        node_rank: node_rank.map(|rank| rank.value),
        endpoint: endpoint.map(|endpoint| endpoint.value),
        run_id: run_id.map(|id| id.value),
        local_addr: local_addr.map(|address| address.value),
    };
    check_secret(&settings, args, places)?;
    Ok(settings)
}

/// Where a setting comes from.
fn source<T>(given: &Option<Given<T>>) -> Option<String> {
    given.as_ref().map(|given| given.from.clone())
}

/// Where settings are looked for.
struct Places<'a> {
    surroundings: &'a Surroundings<'a>,
    is_nested: bool,
}

impl<'a> Places<'a> {
    /// The variables that started another mgpurun, of which this is a rank, are not meant for this one.
    fn of(surroundings: &'a Surroundings<'a>) -> Self {
        Places { surroundings, is_nested: surroundings.text(MGPU_RENDEZVOUS).is_some() }
    }

    /// A setting that torchrun has, too: the flag of this value, `MGPU_NAME`, or `PET_NAME`.
    fn find(&self, flag: &Option<String>, name: &str) -> Option<Given<String>> {
        self.find_ours(flag, name).or_else(|| self.variable("PET_", name))
    }

    /// A setting that torchrun does not have.
    fn find_ours(&self, flag: &Option<String>, name: &str) -> Option<Given<String>> {
        let of_flag = |value: &String| Given::new(value.clone(), flag_name(name));
        flag.as_ref().map(of_flag).or_else(|| self.variable("MGPU_", name))
    }

    fn variable(&self, family: &str, name: &str) -> Option<Given<String>> {
        let name = format!("{family}{name}");
        let value = self.surroundings.text(&name).filter(|_| !self.is_nested)?;
        Some(Given::new(value, name))
    }
}

/// `--rdzv-endpoint` of `RDZV_ENDPOINT`.
fn flag_name(name: &str) -> String {
    format!("--{}", name.to_ascii_lowercase().replace('_', "-"))
}

/// True if the job has one node, whatever other variables say.
fn is_standalone(
    args: &NodeArgs,
    places: &Places<'_>,
    nnodes: Option<&Given<String>>,
) -> Result<bool, SettingsError> {
    if args.standalone {
        return match &args.nnodes {
            Some(nodes) if nodes != "1" && nodes != "1:1" => Err(SettingsError::new(format!(
                "--standalone means one node, and --nnodes is {nodes}: leave one of them out"
            ))),
            _ => Ok(true),
        };
    }
    // Kubeflow sets it without a value.
    let variable = (places.surroundings.variable)("PET_STANDALONE").filter(|_| !places.is_nested);
    let is_set = variable.is_some_and(|value| value != "0");
    Ok(is_set && nnodes.is_none_or(|nodes| nodes.from.starts_with("PET_")))
}

/// "2 nodes" or "2 to 4 nodes".
pub(super) fn describe_nodes(nodes: &RangeInclusive<u32>) -> String {
    match nodes.start() == nodes.end() {
        true => format!("{} nodes", nodes.end()),
        false => format!("{} to {} nodes", nodes.start(), nodes.end()),
    }
}

/// What to say if the engine has started another number of agents than was asked for.
fn disagreement(nodes: Option<&Given<RangeInclusive<u32>>>, told: Option<&Told>) -> Option<String> {
    let (nodes, told) = (nodes?, told?);
    let started = told.nodes.as_ref().filter(|started| !nodes.value.contains(&started.value))?;
    let (engine, count) = (told.engine, started.value);
    let asked = match nodes.value.end() {
        1 => "1 node".to_owned(),
        _ => describe_nodes(&nodes.value),
    };
    Some(format!(
        "{engine} has started mgpurun on {count} node{} ({}); the job has {asked}, as {} says",
        if count == 1 { "" } else { "s" },
        started.from,
        nodes.from
    ))
}

/// The rank of this node, if it has one.
fn node_rank(
    args: &NodeArgs,
    places: &Places<'_>,
    told: Option<&Told>,
    nodes: Option<&Given<RangeInclusive<u32>>>,
) -> Result<Option<Given<u32>>, SettingsError> {
    let rank = match places.find(&args.node_rank, "NODE_RANK") {
        Some(given) => match given.value.trim().parse() {
            Ok(rank) => Given::new(rank, given.from),
            Err(_) => return Err(wrong(&given, "it should be the number of this node, from 0")),
        },
        None => match told {
            Some(Told { refusal: Some(refusal), .. }) if is_several(nodes) => {
                return Err(SettingsError::new(refusal.clone()));
            }
            // The index of a pod of a job on one node is not about nodes.
            Some(Told { node_rank: Some(rank), .. }) if is_several(nodes) => rank.clone(),
            _ => return Ok(None),
        },
    };
    let Given { value, from } = &rank;
    match nodes {
        Some(nodes) if !(0..*nodes.value.end()).contains(value) => {
            let Given { value: nodes, from: of_nodes } = nodes;
            let count = if *nodes.end() == 1 { "1 node".to_owned() } else { describe_nodes(nodes) };
            let last = nodes.end() - 1;
            Err(SettingsError::new(format!(
                "this is node {value} ({from}), and the job has {count} ({of_nodes}): nodes count from 0 to {last}"
            )))
        }
        None if *value > 0 => Err(SettingsError::new(format!(
            "this is node {value} ({from}), and the number of nodes is unknown: add --nnodes N"
        ))),
        _ => Ok(Some(rank)),
    }
}

fn is_several(nodes: Option<&Given<RangeInclusive<u32>>>) -> bool {
    nodes.is_some_and(|nodes| *nodes.value.end() > 1)
}

/// What to say about flags that need `--nnodes`.
fn without_effect(args: &NodeArgs, nnodes: Option<&Given<String>>) -> Option<String> {
    let flags = [
        ("--node-rank", args.node_rank.is_some()),
        ("--rdzv-endpoint", args.rdzv_endpoint.is_some()),
        ("--master-addr", args.master_addr.is_some()),
        ("--local-addr", args.local_addr.is_some()),
    ];
    let (flag, _) = flags.into_iter().find(|(_, is_given)| *is_given && nnodes.is_none())?;
    Some(format!("{flag} has no effect on one node; --nnodes N says that the job has N nodes"))
}

/// Where node 0 is. Flags precede variables, and an endpoint precedes an address with a port.
fn endpoint(
    args: &NodeArgs,
    places: &Places<'_>,
    told: Option<Given<(String, Ports)>>,
    has_run_id: bool,
) -> Result<Option<Given<(String, Ports)>>, SettingsError> {
    let port = places.find(&args.master_port, "MASTER_PORT");
    let port = port.map(|port| parse_port(&port).map(|number| Given::new(number, port.from))).transpose()?;
    let at_master = |address: Given<String>| {
        let host = parse_host(&address)?;
        let number = port.as_ref().map_or(MASTER_PORT, |port| port.value);
        Ok(Some(Given::new((host, Ports::One(number)), address.from)))
    };
    if args.rdzv_endpoint.is_none() && args.master_addr.is_some() {
        return places.find(&args.master_addr, "MASTER_ADDR").map_or(Ok(None), at_master);
    }
    if let Some(given) = places.find(&args.rdzv_endpoint, "RDZV_ENDPOINT") {
        let (host, port) = parse_endpoint(&given)?;
        let ports = match port {
            // Nobody has chosen one for a job that `--hosts` starts.
            None if args.attached && has_run_id => Ports::OfJob,
            port => Ports::One(port.unwrap_or(ENDPOINT_PORT)),
        };
        return Ok(Some(Given::new((host, ports), given.from)));
    }
    if let Some(address) = places.find(&args.master_addr, "MASTER_ADDR") {
        return at_master(address);
    }
    if let Some(Given { value: (host, ports), from }) = told {
        let ports = match (port, ports) {
            (Some(port), _) => Ports::One(port.value),
            (None, Ports::OfJob) if !has_run_id => Ports::One(ENDPOINT_PORT),
            (None, ports) => ports,
        };
        return Ok(Some(Given::new((host, ports), from)));
    }
    // The script of a batch job exports them for PyTorch.
    let Some(address) = places.variable("", "MASTER_ADDR") else { return Ok(None) };
    let port = places.variable("", "MASTER_PORT").map(|port| parse_port(&port)).transpose()?;
    let host = parse_host(&address)?;
    Ok(Some(Given::new((host, Ports::One(port.unwrap_or(MASTER_PORT))), address.from)))
}

fn check_secret(settings: &NodeSettings, args: &NodeArgs, places: &Places<'_>) -> Result<(), SettingsError> {
    let has_secret = settings.secret_file.is_some() || places.variable("MGPU_", "SECRET").is_some();
    match settings.auth {
        AuthChoice::Secret if !has_secret => Err(SettingsError::new(
            "authentication by a secret needs one: add --secret-file FILE, or set MGPU_SECRET_FILE or MGPU_SECRET",
        )),
        AuthChoice::None | AuthChoice::Munge if args.secret_file.is_some() && args.auth.is_some() => {
            let auth = args.auth.as_deref().unwrap_or_default();
            Err(SettingsError::new(format!(
                "--auth {auth} uses no secret, and --secret-file has one: leave one of them out"
            )))
        }
        _ => Ok(()),
    }
}

/// The variable that sets the number of ranks of a job whose command line does not, with its value.
pub(crate) fn ranks_variable(surroundings: &Surroundings<'_>) -> Option<(&'static str, String)> {
    // The second is that of older versions of Kubeflow.
    let names = ["PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE"];
    let is_nested = surroundings.text(MGPU_RENDEZVOUS).is_some();
    names.into_iter().filter(|_| !is_nested).find_map(|name| Some((name, surroundings.text(name)?)))
}

#[cfg(test)]
mod tests;
