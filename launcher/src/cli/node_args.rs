//! The options of several nodes, with their help. Their values are read by [`settings`](crate::nodes::settings()),
//! which reads the same values from the environment, too.

use clap::Args;

use crate::nodes::ssh::Hosts;

/// Options of several nodes.
#[derive(Debug, Default, Clone, PartialEq, Eq, Args)]
#[command(next_help_heading = "Options of several nodes")]
pub(crate) struct NodeArgs {
    /// Number of nodes (hosts) of the job: N, or MIN:MAX.
    ///
    /// Start mgpurun with the same command on each node, by hand or by an engine. Slurm, mpirun, Kubeflow, torchrun,
    /// AWS Batch and SageMaker tell mgpurun the number and the rank of the node, and where node 0 is. With MIN:MAX the
    /// job goes on with fewer nodes after a failure.
    ///
    /// Most options here can also be set by a variable: MGPU_NNODES, MGPU_NODE_RANK, MGPU_RDZV_ENDPOINT, MGPU_RDZV_ID,
    /// MGPU_LOCAL_ADDR, MGPU_NODE_TIMEOUT, MGPU_NET, MGPU_AUTH, MGPU_SECRET_FILE; those of torchrun also by PET_NNODES and so
    /// on. The first that is set counts: flag, MGPU_*, PET_*, the engine's variables. --dry-run shows which.
    #[arg(long, value_name = "N|MIN:MAX")]
    pub(crate) nnodes: Option<String>,

    /// Hosts of the job, such as a,b: starts mgpurun on each of them by ssh.
    ///
    /// For hosts without an engine. HOST or USER@HOST, separated by commas; -n is the number of ranks of each. This host
    /// is node 0 if it is among them, else the first one is. mgpurun, the program and the working folder are at the same
    /// paths on all hosts. `ssh HOST true` has to work without a password; the variable MGPU_SSH has another program
    /// or options, such as MGPU_SSH="ssh -p 2222". The nodes' secret is made for the job. Variables of the environment
    /// are not passed on: `--hosts a,b env NAME=VALUE PROGRAM`. With --nnodes MIN:MAX, where MAX is the number of hosts,
    /// the job goes on without hosts that are lost.
    #[arg(long, value_name = "HOST,HOST...", conflicts_with_all = ["node_rank", "rdzv_id", "master_addr", "master_port", "local_addr", "standalone", "auth", "secret_file", "attached"])]
    pub(crate) hosts: Option<Hosts>,

    /// End when standard input ends, and read signals from it: for the agents of --hosts.
    #[arg(long, hide = true)]
    pub(crate) attached: bool,

    /// Which node this is, from 0.
    ///
    /// If no node has a rank, the one that owns the address of the endpoint is node 0.
    #[arg(long, alias = "node_rank", value_name = "R", allow_negative_numbers = true)]
    pub(crate) node_rank: Option<String>,

    /// Where node 0 listens: its name or address, and a port [default port: 29400].
    ///
    /// Names are asked for again until --timeout. An IPv6 address with a port is written in brackets: [fd00::2]:29400.
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]")]
    pub(crate) rdzv_endpoint: Option<String>,

    /// Name of the job: nodes of another job are rejected. Ranks get it as TORCHELASTIC_RUN_ID.
    #[arg(long, alias = "rdzv_id", value_name = "ID")]
    pub(crate) rdzv_id: Option<String>,

    /// Accepted for torchrun's command lines: static or c10d, which mean the same here.
    #[arg(long, alias = "rdzv_backend", hide_short_help = true, value_name = "NAME")]
    pub(crate) rdzv_backend: Option<String>,

    /// Accepted for torchrun's command lines: of its keys, timeout and join_timeout set --timeout.
    #[arg(long, alias = "rdzv_conf", hide_short_help = true, value_name = "KEY=VALUE,...")]
    pub(crate) rdzv_conf: Option<String>,

    /// Host of node 0, as for torchrun; --rdzv-endpoint takes precedence.
    #[arg(long, alias = "master_addr", hide_short_help = true, value_name = "HOST")]
    pub(crate) master_addr: Option<String>,

    /// Port of node 0 with --master-addr [default: 29500]. On one node: MASTER_PORT of the ranks [default: a free one].
    #[arg(long, alias = "master_port", hide_short_help = true, value_name = "PORT")]
    pub(crate) master_port: Option<String>,

    /// Address of this node that the other nodes reach.
    ///
    /// Without it, the address that the connection to node 0 uses.
    #[arg(long, alias = "local_addr", hide_short_help = true, value_name = "ADDRESS")]
    pub(crate) local_addr: Option<String>,

    /// What connects ranks of different hosts on the cpu backend: auto, tcp or ucx [default: auto].
    ///
    /// `tcp` is built in. `ucx` is the library UCX, which uses InfiniBand, RoCE or EFA; all hosts need the same version
    /// of it (Debian: libucx0, PyPI: libucx-cu12). `auto` takes UCX if all hosts have it and an RDMA device. Ranks of
    /// one host use neither.
    #[arg(long, value_name = "NAME")]
    pub(crate) net: Option<String>,

    /// One node, whatever variables say.
    #[arg(long)]
    pub(crate) standalone: bool,

    /// Seconds that the mgpurun of a node may be silent before the node counts as lost [default: 30].
    ///
    /// This concerns an mgpurun that was stopped or hangs. Dead hosts and links are noticed within 6 s in any case.
    #[arg(long, alias = "node_timeout", value_name = "SECONDS", allow_negative_numbers = true)]
    pub(crate) node_timeout: Option<String>,

    /// How nodes authenticate each other: auto, secret, munge or none [default: auto].
    ///
    /// `secret`: all nodes have the same secret, in the file of --secret-file or in the variable MGPU_SECRET. `munge`:
    /// all nodes have the key of the munge service, as under Slurm. `auto` takes the secret if there is one, and munge
    /// otherwise. With `none` anybody who reaches the port of node 0 can join the job: only for a network that you
    /// trust.
    #[arg(long, value_name = "HOW")]
    pub(crate) auth: Option<String>,

    /// File with the secret that all nodes of the job share, or - for a line of standard input.
    ///
    /// Make one with: umask 077; head -c 32 /dev/urandom | base64 > FILE. In Kubernetes mount a Secret. The
    /// variable MGPU_SECRET has the secret itself; it never reaches the ranks.
    #[arg(long, alias = "secret_file", value_name = "FILE")]
    pub(crate) secret_file: Option<String>,
}
