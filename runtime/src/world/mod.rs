//! The world: this rank's number, the number of ranks, and its membership of the run.
//!
//! [`World::from_env`] reads the launcher's environment variables and joins the run; without a launcher it is a world
//! of one, in which every collective is the identity. Ranks started by torchrun, Slurm or an MPI launcher join
//! through a rendezvous that rank 0 serves, or the first rank of each host. [`World::threads`] creates ranks as threads of one process, for tests:
//! they use the same server, sockets and shared memory as processes.

mod env;
#[cfg(feature = "cuda")]
mod gpu;
mod other_launchers;
mod several_hosts;
mod stop;
mod threads;
mod variable;

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use env::Backend;
use env::{Identity, Rendezvous};
use other_launchers::LaunchEnvironment;

use crate::comm::hosts::HostAddress;
use crate::inject::InjectionPoint;
use crate::membership::{self, Membership};
use crate::progress::Phase;
use crate::rendezvous::message::Manifest;
use crate::rendezvous::{HostedRun, HostedServer, NcclUse, OwnHost, PendingJoin, ServedBy, Store};
use crate::survivor::wait_until_culprit_reaped;
use crate::{Error, Result};

/// This rank's view of the run.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// let world = mgpu::World::from_env()?; // no launcher here: a world of one
/// assert_eq!((world.rank(), world.size()), (0, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct World {
    identity: Identity,
    /// `None` in a world of one without a launcher.
    membership: Option<Arc<Membership>>,
    /// Communicators created so far: their number is part of their keys at the rendezvous.
    communicators: u32,
    /// From which groups are split, after the first split. (In a mutex so that worlds can be shared by threads.)
    split_parent: Mutex<Option<crate::Communicator>>,
    /// This rank wants all ranks to stop.
    wants_stop: AtomicBool,
    /// This process is the rank: signals to it concern the rank.
    handles_signals: bool,
    /// Under the nccl backend.
    #[cfg(feature = "cuda")]
    gpu: Option<gpu::Gpu>,
}

/// The environment of this process.
const PROCESS_ENVIRONMENT: LaunchEnvironment<'static> = LaunchEnvironment {
    variable: &|name| std::env::var(name).ok(),
    hydra: &other_launchers::hydra_proxy,
    parent: &other_launchers::parent,
};

/// Connects to the rendezvous. Under another launcher, the first rank of the host starts it first.
fn connect(
    identity: &Identity,
    rendezvous: &Rendezvous,
    nccl: Option<NcclUse>,
) -> Result<(UnixStream, ServedBy, Option<HostedServer>)> {
    let rank = identity.rank;
    match rendezvous {
        Rendezvous::Launcher(address) => Ok((Store::connect(address, rank)?, ServedBy::Launcher, None)),
        Rendezvous::Ranks { title, patience, host } => {
            let host = host.as_ref().map(|host| host.complete(&identity.run_id)).transpose()?;
            let host = host.map(|host| OwnHost { nccl, ..host });
            let run = HostedRun {
                run_id: &identity.run_id,
                title,
                world_size: identity.world_size,
                restart_count: identity.restart_count,
                join_timeout: *patience,
                host: host.as_ref(),
            };
            let leader = run.leader();
            let server = (rank == leader).then(|| run.serve()).transpose()?;
            Ok((run.connect(rank)?, ServedBy::Rank { rank: leader, join_timeout: *patience }, server))
        }
    }
}

/// Joins the run. `manifest` says what this rank uses.
fn join(
    identity: &Identity,
    rendezvous: &Rendezvous,
    manifest: Manifest,
    nccl: Option<NcclUse>,
) -> Result<Membership> {
    let (rank, ranks, injections) = (identity.rank, identity.world_size, identity.injections.clone());
    let (stream, served_by, server) = connect(identity, rendezvous, nccl)?;
    membership::inject_planned(&injections, InjectionPoint::Join);
    let hello = Store::send_hello(stream, served_by, &identity.run_id, rank, ranks, manifest);
    let admitted = hello.and_then(PendingJoin::wait).map_err(Error::from).inspect_err(|error| {
        if served_by != ServedBy::Launcher {
            wait_until_culprit_reaped(error, |_| None);
        }
    });
    let (store, page) = admitted?;
    let server = server.map(HostedServer::keep_running);
    Ok(Membership::new(rank, store, page, injections).with_server(server))
}

impl World {
    /// Joins the run that the environment describes, or creates a world of one if it describes none. Returns when all
    /// ranks have joined and were found compatible.
    ///
    /// The environment is that of `mgpurun`, or else of torchrun, Open MPI's or hydra's `mpirun` (MPICH, Intel MPI),
    /// or Slurm's `srun`. Under these other launchers: rank 0 serves the rendezvous on a thread, and so does the first
    /// rank of each other host, which needs a secret or munge (`docs/src/hosts.md`); ranks wait for each other for `MGPU_TIMEOUT` (default: 60 s); `MGPU_RUN_ID` names the run if the
    /// launcher does not; without `MGPU_BACKEND`, the number of GPUs decides. The error about a lost peer is delayed
    /// there by 0.3 to 1 s on the peer's host, so that the launcher sees the failed rank's end first. On several hosts
    /// the first rank of a host waits at its end until the others of the host have left, rank 0 until all have.
    ///
    /// There, ranks with GPUs first check whether the hosts reach each other on the interface that NCCL takes
    /// (`docs/src/hosts.md`). If not, this is an error that names the variable to set. With `MGPU_NCCL_PREFLIGHT=set` each
    /// rank sets that variable (`NCCL_SOCKET_IFNAME`) in its own environment: other threads may read the environment during
    /// this call, but none may change it. [`notices`](Self::notices) say so.
    ///
    /// # Errors
    /// If the variables are incomplete or contradict each other (the text names the variable); if the launcher rejects this rank; if another rank ends before it has joined, or does not join in
    /// time. Under the nccl backend, if there is no GPU for this rank, or a library is missing.
    pub fn from_env() -> Result<Self> {
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
        let mut identity = Identity::read(&PROCESS_ENVIRONMENT)?;
        #[cfg(feature = "cuda")]
        if identity.backend_is_auto {
            let narrowed = std::env::var_os("CUDA_VISIBLE_DEVICES").is_some();
            identity.choose_backend(gpu::count()?, narrowed)?;
        }
        #[cfg(not(feature = "cuda"))]
        if identity.backend == Backend::Nccl {
            return Err(Error::Environment {
                name: crate::protocol::MGPU_BACKEND,
                problem: "is nccl, which this program was built without (feature cuda); use cpu".into(),
            });
        }
        #[cfg(feature = "cuda")]
        let mut gpu = None;
        let membership = match &identity.rendezvous {
            None => None,
            Some(rendezvous) => {
                membership::inject_planned(&identity.injections, InjectionPoint::Start);
                #[cfg(not(feature = "cuda"))]
                let (manifest, nccl) = (Manifest::default(), None);
                // Before anything that other ranks could wait for: a rank 0 without a GPU must not serve a
                // rendezvous.
                #[cfg(feature = "cuda")]
                let (manifest, nccl) = match identity.backend {
                    Backend::Cpu => (Manifest::default(), None),
                    Backend::Nccl => {
                        let gpu = gpu.insert(gpu::Gpu::open(&identity)?);
                        (gpu.manifest(&identity)?, gpu.nccl_use(&identity))
                    }
                };
                let membership = join(&identity, rendezvous, manifest, nccl)?;
                #[cfg(feature = "cuda")]
                crate::comm::nccl::set_variables(&membership.store().nccl_advice().variables);
                Some(Arc::new(membership))
            }
        };
        #[cfg(feature = "cuda")]
        if gpu.is_none() && identity.backend == Backend::Nccl {
            gpu = Some(gpu::Gpu::open(&identity)?);
        }
        Ok(World {
            identity,
            membership,
            communicators: 0,
            split_parent: Mutex::default(),
            wants_stop: AtomicBool::new(false),
            handles_signals: true,
            #[cfg(feature = "cuda")]
            gpu,
        })
    }

    /// True if this process was started as a rank, by `mgpurun` or one of the launchers that
    /// [`from_env`](Self::from_env) supports.
    pub fn is_launched() -> bool {
        let is_foreign = || !matches!(PROCESS_ENVIRONMENT.launched(), Ok(None));
        std::env::var_os(crate::protocol::MGPU_RENDEZVOUS).is_some() || is_foreign()
    }

    /// Creates the worlds of `size` ranks within this process; pass one to each thread.
    ///
    /// # Errors
    /// If the system cannot create sockets, shared memory or a thread.
    ///
    /// # Panics
    /// If `size` is 0.
    pub fn threads(size: u32) -> Result<Vec<World>> {
        threads::worlds(size)
    }

    /// As [`threads`](Self::threads), with ranks that believe to be on several hosts: host h has the ranks from
    /// `first_ranks[h]` on. For tests.
    ///
    /// # Errors
    /// As [`threads`](Self::threads); if a host has no ranks.
    #[doc(hidden)]
    pub fn threads_on_hosts(first_ranks: &[u32], size: u32) -> Result<Vec<World>> {
        threads::worlds_on_hosts(first_ranks, size)
    }

    /// Rank of this process, from 0.
    pub fn rank(&self) -> u32 {
        self.identity.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.identity.world_size
    }

    /// Rank among the ranks on this machine.
    pub fn local_rank(&self) -> u32 {
        self.identity.local_rank
    }

    /// Number of ranks on this machine.
    pub fn local_size(&self) -> u32 {
        self.identity.local_world_size
    }

    /// The ranks of each host, in the order of the hosts; of one host if there is only one.
    pub fn hosts(&self) -> Vec<Range<u32>> {
        match self.store().and_then(Store::layout) {
            Some(layout) => (0..layout.nodes()).map(|node| layout.ranks_of(node)).collect(),
            None => std::iter::once(0..self.size()).collect(),
        }
    }

    /// Identifier of the run; empty without a launcher.
    pub fn run_id(&self) -> &str {
        &self.identity.run_id
    }

    /// Identifier of the launch, the same after each restart of the ranks. Checkpoints are marked with it: a
    /// restarted run only resumes from its own. `None` without a launcher, or if it cannot be determined.
    ///
    /// Under `mgpurun` it is the [`run_id`](Self::run_id). Under torchrun it depends on the parent process. Elsewhere
    /// it depends on the launcher's name of the job, or on `MGPU_RUN_ID`.
    pub fn launch_id(&self) -> Option<&str> {
        self.identity.launch_id.as_deref()
    }

    /// What the user should know about the run, as sentences without a full stop: on several hosts without agents, what was
    /// found out about the interfaces that NCCL takes. The same on all ranks, so that one of them can print it.
    pub fn notices(&self) -> &[String] {
        self.store().map_or(&[], |store| &store.nccl_advice().notices)
    }

    /// How often the launcher has restarted the ranks; 0 if it does not say so.
    pub fn restart_count(&self) -> u32 {
        self.identity.restart_count
    }

    /// The backend: that of `MGPU_BACKEND` or of the launcher, or else chosen by the number of GPUs.
    pub fn backend(&self) -> Backend {
        self.identity.backend
    }

    /// Number of threads this rank should use for its own computation, at least 1.
    ///
    /// This is `MGPU_THREADS` if it is set, by the launcher (which knows the cores that it has bound the rank to) or
    /// by the user. Otherwise it is the number of cores this process may use, divided by the ranks on this machine.
    pub fn thread_share(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let share = || (cores() / self.local_size() as usize).max(1);
        self.identity.threads.map_or_else(share, usize::from)
    }

    /// Timeout of a wait for a peer within one operation.
    pub fn timeout(&self) -> Duration {
        self.identity.timeout
    }

    /// Sets the timeout of a wait for a peer within one operation, for communicators created afterwards.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.identity.timeout = timeout;
    }

    /// Ends long waits for other ranks with [`Error::Interrupted`] when `check` returns true. A wait calls it in its own
    /// thread, every 20 ms at least, while it does not spin. For programs whose user may press Ctrl-C during a collective,
    /// such as an interpreter's. Only the first call counts.
    pub fn interrupt_when(&self, check: fn() -> bool) {
        if let Some(membership) = &self.membership {
            membership.store().interrupt_when(check);
        }
    }

    /// Sets what ranks of different hosts use, for communicators created afterwards. For tests.
    #[doc(hidden)]
    pub fn set_net(&mut self, net: crate::comm::Net) {
        self.identity.net = net;
    }

    /// The key/value store of the run; `None` in a world of one without a launcher.
    pub fn store(&self) -> Option<&Store> {
        self.membership.as_ref().map(|membership| membership.store())
    }

    /// The GPU of this rank; `None` under the cpu backend. Its ordinal is `LOCAL_RANK`, or `MGPU_DEVICE` if that is
    /// set.
    #[cfg(feature = "cuda")]
    pub fn device(&self) -> Option<&Arc<mgpu_kernels::cuda::Device>> {
        self.gpu.as_ref().map(|gpu| &gpu.device)
    }

    /// Creates a communicator over all ranks. Collective: all ranks call it equally often.
    ///
    /// # Errors
    /// If a peer does not arrive in time, or shared memory is short; on several hosts, if a peer cannot be reached.
    pub fn communicator(&mut self) -> Result<crate::Communicator> {
        #[cfg(feature = "cuda")]
        if self.size() > 1 && self.backend() == Backend::Nccl {
            let device = Arc::new(self.device_communicator()?);
            return crate::comm::nccl::host_communicator(device);
        }
        self.host_memory_communicator()
    }

    /// Creates a communicator over all ranks for host buffers in memory that they share (over the network, if they are
    /// on several hosts), also under the nccl backend: for [`Placement::Host`](crate::Placement::Host). Collective, as
    /// [`communicator`](Self::communicator).
    ///
    /// # Errors
    /// As [`communicator`](Self::communicator).
    pub fn host_memory_communicator(&mut self) -> Result<crate::Communicator> {
        self.communicators += 1;
        match &self.membership {
            Some(membership) if self.size() > 1 => {
                let (size, number, timeout) = (self.size(), self.communicators, self.timeout());
                let connected = match self.host_address(membership)? {
                    None => crate::comm::cpu::connect(membership, size, number, timeout),
                    Some(host) => crate::comm::hosts::connect(membership, host, size, number, timeout),
                };
                connected.map(|comm| comm.numbered(number))
            }
            membership => Ok(crate::Communicator::alone(membership.clone())),
        }
    }

    #[cfg(test)]
    pub(crate) fn membership(&self) -> Option<&Arc<Membership>> {
        self.membership.as_ref()
    }

    /// How ranks of other hosts reach this one; `None` if all ranks are on one host.
    pub(crate) fn host_address(&self, membership: &Membership) -> Result<Option<HostAddress>> {
        let Some(layout) = membership.store().layout().filter(|layout| !layout.is_one_host()) else {
            return Ok(None);
        };
        let address = membership.store().address().ok_or_else(|| Error::Join {
            rank: self.rank(),
            problem: "the launcher has not said which address this host has".into(),
        })?;
        Ok(Some(HostAddress {
            address,
            local_ranks: layout.local_ranks().len() as u32,
            run: xxhash_rust::xxh3::xxh3_64(self.run_id().as_bytes()),
            epoch: self.restart_count(),
            net: self.identity.net,
        }))
    }

    /// Splits the world into groups: a communicator for the ranks that pass the same `colour`, as
    /// [`Communicator::split`](crate::Communicator::split) of a communicator of the world's own. Collective.
    ///
    /// # Errors
    /// As [`communicator`](Self::communicator).
    pub fn split(&mut self, colour: Option<u32>, key: i32) -> Result<Option<crate::Communicator>> {
        let mut parent = match self.split_parent.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            Some(parent) => parent,
            None => self.communicator()?,
        };
        let group = parent.split(colour, key);
        *self.split_parent.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(parent);
        group
    }

    /// Creates a communicator over all ranks for device memory. Collective: all ranks call it equally often, and in
    /// the same order as [`communicator`](Self::communicator).
    ///
    /// # Errors
    /// Under the cpu backend; if a peer does not arrive in time; if NCCL fails.
    #[cfg(feature = "cuda")]
    pub fn device_communicator(&mut self) -> Result<crate::DeviceCommunicator> {
        self.communicators += 1;
        let Some(gpu) = &self.gpu else {
            let problem = "is cpu, which has no communicator for device memory; use nccl".into();
            return Err(Error::Environment { name: crate::protocol::MGPU_BACKEND, problem });
        };
        match (&self.membership, &gpu.nccl) {
            (Some(membership), Some(nccl)) => crate::DeviceCommunicator::connect(
                membership,
                self.size(),
                self.communicators,
                self.timeout(),
                &gpu.device,
                nccl.clone(),
                gpu.registration.clone(),
            ),
            _ => Ok(crate::DeviceCommunicator::alone(&gpu.device)),
        }
    }

    /// Creates a communicator over all ranks for device memory, and one for host buffers that uses it. Collective, as
    /// [`device_communicator`](Self::device_communicator).
    ///
    /// # Errors
    /// As [`device_communicator`](Self::device_communicator).
    #[cfg(feature = "cuda")]
    pub fn communicators(&mut self) -> Result<(Arc<crate::DeviceCommunicator>, crate::Communicator)> {
        let device = Arc::new(self.device_communicator()?);
        let host = match self.size() {
            1 => crate::Communicator::alone(self.membership.clone()),
            _ => crate::comm::nccl::host_communicator(Arc::clone(&device))?,
        };
        Ok((device, host))
    }

    /// Tells the launcher that training step `step` (from 1) begins.
    pub fn report_step(&self, step: u64) {
        if let Some(membership) = &self.membership {
            membership.begin_step(step);
        }
    }

    /// Tells the launcher that this rank has processed `samples` more: images, sentences, whatever the program counts. Of
    /// all ranks together, `mgpurun top` and `--metrics-listen` show so many a second.
    pub fn report_samples(&self, samples: u64) {
        if let Some(membership) = &self.membership {
            membership.count_samples(samples);
        }
    }

    /// Tells the launcher that another phase of the work begins, which may take long without a step.
    pub fn report_phase(&self, phase: Phase) {
        if let Some(membership) = &self.membership {
            membership.begin_phase(phase);
        }
    }
}
