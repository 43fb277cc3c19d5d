//! The environment variables of a rank, read once.
//!
//! The variables of `mgpurun` take precedence: if `mgpurun` itself was started by another launcher, its variables are
//! the innermost. Without them, those of other launchers are read ([`other_launchers`](super::other_launchers)).

use std::num::NonZeroUsize;
use std::time::Duration;

use mgpu_kernels::level;

use super::other_launchers::{LaunchEnvironment, LaunchedRank};
use super::several_hosts::HostOfRank;
use super::variable::{check_size, number, variable_error};
use crate::Result;
use crate::comm::hosts::Net;
use crate::inject::{self, ScheduledInjection};
use crate::protocol::*;

/// Where collectives run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Shared memory of one host, or the network between several.
    Cpu,
    /// NVIDIA GPUs through NCCL.
    Nccl,
}

/// Default timeout of a wait for a peer within one operation (`MGPU_TIMEOUT`): long enough for a peer that writes a
/// checkpoint, short enough not to waste a night.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// Default timeout of the wait for other ranks to join under another launcher (`MGPU_TIMEOUT`); the same as that of
/// `mgpurun`.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Where the ranks find the rendezvous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rendezvous {
    /// The launcher serves it at this address.
    Launcher(String),
    /// The first rank of each host serves it, because the launcher is not `mgpurun`.
    Ranks {
        /// The run's name for error texts.
        title: String,
        /// How long ranks wait for each other to join.
        patience: Duration,
        /// This host, if there are others.
        host: Option<HostOfRank>,
    },
}

/// What the environment says about this rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Identity {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) local_rank: u32,
    pub(super) local_world_size: u32,
    /// `None` in a world of one without `mgpurun`.
    pub(super) rendezvous: Option<Rendezvous>,
    pub(super) run_id: String,
    /// The same after each restart of the ranks; `None` if no launcher restarts them, or if it cannot be determined.
    pub(super) launch_id: Option<String>,
    pub(super) restart_count: u32,
    pub(super) backend: Backend,
    /// No backend was chosen; it depends on the number of GPUs.
    pub(super) backend_is_auto: bool,
    pub(super) timeout: Duration,
    /// Faults to inject into this rank after this restart.
    pub(super) injections: Vec<ScheduledInjection>,
    pub(super) threads: Option<NonZeroUsize>,
    /// The GPU to use, if it is not `LOCAL_RANK`.
    pub(super) device: Option<u32>,
    /// Several ranks may share one GPU.
    pub(super) share_gpus: bool,
    /// A single rank uses NCCL too, for tests.
    pub(super) nccl_always: bool,
    /// NCCL accesses gradients in place if it can.
    pub(super) nccl_register: bool,
    /// What ranks of different hosts use.
    pub(super) net: Net,
    /// The check of the interfaces that NCCL takes, on several hosts without agents.
    pub(super) nccl_preflight: NcclPreflight,
}

/// What is done about interfaces that NCCL takes and that lead nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NcclPreflight {
    /// They are an error.
    Check,
    /// The ranks set variables with which NCCL takes another one.
    Set,
    /// Nothing is checked.
    Off,
}

impl Identity {
    /// The only rank of a world of one.
    pub(super) fn alone() -> Self {
        Identity {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            rendezvous: None,
            run_id: String::new(),
            launch_id: None,
            restart_count: 0,
            backend: Backend::Cpu,
            backend_is_auto: false,
            timeout: DEFAULT_TIMEOUT,
            injections: Vec::new(),
            threads: None,
            device: None,
            share_gpus: false,
            nccl_always: false,
            nccl_register: true,
            net: Net::Auto,
            nccl_preflight: NcclPreflight::Check,
        }
    }

    /// Reads the environment of this process.
    ///
    /// # Errors
    /// If variables are missing, contradict each other, or cannot be parsed.
    pub(super) fn read(environment: &LaunchEnvironment<'_>) -> Result<Self> {
        let variable = environment.variable;
        let settings = Self::settings(variable)?;
        let mut identity = match variable(MGPU_RENDEZVOUS) {
            Some(address) => Self::of_own_launcher(settings, variable, address)?,
            None => Self::of_another_launcher(settings, environment)?,
        };
        identity.injections = identity.injections(&variable(MGPU_INJECT).unwrap_or_default())?;
        Ok(identity)
    }

    /// The faults in `text` that are meant for this rank.
    fn injections(&self, text: &str) -> Result<Vec<ScheduledInjection>> {
        let faults = inject::split(text)
            .map_err(|problem| variable_error(MGPU_INJECT, format!("is not a list of faults: {problem}")))?;
        // A restart may have fewer ranks than the start for which the faults were planned.
        let is_first_start = self.restart_count == 0;
        if let Some(fault) = faults.iter().find(|fault| fault.rank >= self.world_size && is_first_start) {
            let problem = format!("has {fault}: ranks of a world of {} count from 0", self.world_size);
            return Err(variable_error(MGPU_INJECT, problem));
        }
        if self.rendezvous.is_none() && !faults.is_empty() {
            let problem = "is set for a world of one without mgpurun, where no faults are injected; use mgpurun -n 1 --inject";
            return Err(variable_error(MGPU_INJECT, problem.into()));
        }
        let planned = faults
            .into_iter()
            .enumerate()
            .map(|(number, injection)| ScheduledInjection { number, injection });
        let is_own = |planned: &ScheduledInjection| {
            (planned.injection.rank, planned.injection.restart) == (self.rank, self.restart_count)
        };
        Ok(planned.filter(is_own).collect())
    }

    /// A world of one, with the settings that are allowed under any launcher or none.
    fn settings(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let timeout = match variable(MGPU_TIMEOUT) {
            None => DEFAULT_TIMEOUT,
            Some(text) => match text.trim().parse::<f64>().map(Duration::try_from_secs_f64) {
                Ok(Ok(timeout)) if !timeout.is_zero() => timeout,
                _ => {
                    return Err(variable_error(
                        MGPU_TIMEOUT,
                        format!("is `{text}` where seconds are expected"),
                    ));
                }
            },
        };
        let threads = match variable(MGPU_THREADS) {
            None => None,
            Some(text) => Some(text.trim().parse::<NonZeroUsize>().map_err(|_| {
                variable_error(
                    MGPU_THREADS,
                    format!("is `{text}` where a number of threads from 1 is expected"),
                )
            })?),
        };
        let backend = match variable(MGPU_BACKEND).as_deref() {
            None | Some("cpu") => Backend::Cpu,
            Some("nccl") => Backend::Nccl,
            Some(other) => {
                return Err(variable_error(MGPU_BACKEND, format!("is `{other}`; known are cpu and nccl")));
            }
        };
        if let Some(text) = variable(level::VARIABLE).filter(|text| !level::is_known(text)) {
            let problem = format!("is `{text}`; known are {}", level::NAMES.join(", "));
            return Err(variable_error(level::VARIABLE, problem));
        }
        let device = number(variable, MGPU_DEVICE)?;
        let share_gpus = variable(MGPU_SHARE_GPUS).is_some_and(|value| value.trim() == "1");
        let nccl_always = match variable(MGPU_NCCL).as_deref() {
            None | Some("auto") => false,
            Some("always") => true,
            Some(other) => {
                return Err(variable_error(MGPU_NCCL, format!("is `{other}`; known are auto and always")));
            }
        };
        let nccl_register = match variable(MGPU_NCCL_REGISTER).as_deref() {
            None | Some("auto") => true,
            Some("off") => false,
            Some(other) => {
                let problem = format!("is `{other}`; known are auto and off");
                return Err(variable_error(MGPU_NCCL_REGISTER, problem));
            }
        };
        let net = match variable(MGPU_NET) {
            None => Net::Auto,
            Some(text) => text.parse().map_err(|problem| variable_error(MGPU_NET, problem))?,
        };
        let nccl_preflight = match variable(MGPU_NCCL_PREFLIGHT).as_deref() {
            None | Some("check") => NcclPreflight::Check,
            Some("set") => NcclPreflight::Set,
            Some("off") => NcclPreflight::Off,
            Some(other) => {
                let problem = format!("is `{other}`; known are check, set and off");
                return Err(variable_error(MGPU_NCCL_PREFLIGHT, problem));
            }
        };
        let alone = Self::alone();
        Ok(Identity {
            backend,
            timeout,
            threads,
            device,
            share_gpus,
            nccl_always,
            nccl_register,
            net,
            nccl_preflight,
            ..alone
        })
    }

    fn of_own_launcher(
        settings: Self,
        variable: &dyn Fn(&str) -> Option<String>,
        address: String,
    ) -> Result<Self> {
        let needed = |name| {
            let found = number(variable, name)?;
            found.ok_or_else(|| variable_error(name, format!("is missing while {MGPU_RENDEZVOUS} is set")))
        };
        let world_size = needed(WORLD_SIZE)?;
        check_size(WORLD_SIZE, world_size)?;
        let rank = needed(RANK)?;
        if rank >= world_size {
            return Err(variable_error(
                RANK,
                format!("is {rank} in a world of {world_size}; ranks count from 0"),
            ));
        }
        let run_id = variable(MGPU_RUN_ID).unwrap_or_default();
        if run_id.is_empty() {
            return Err(variable_error(MGPU_RUN_ID, format!("is missing while {MGPU_RENDEZVOUS} is set")));
        }
        let local_world_size = number(variable, LOCAL_WORLD_SIZE)?.unwrap_or(world_size);
        let local_rank = number(variable, LOCAL_RANK)?.unwrap_or(rank);
        if local_rank >= local_world_size {
            let problem = format!("is {local_rank} where {LOCAL_WORLD_SIZE} is {local_world_size}");
            return Err(variable_error(LOCAL_RANK, problem));
        }
        let restart_count = number(variable, MGPU_RESTART_COUNT)?.unwrap_or(0);
        let rendezvous = Some(Rendezvous::Launcher(address));
        Ok(Identity {
            rank,
            world_size,
            local_rank,
            local_world_size,
            rendezvous,
            // The launcher creates it once, for all restarts.
            launch_id: Some(run_id.clone()),
            run_id,
            restart_count,
            ..settings
        })
    }

    fn of_another_launcher(settings: Self, environment: &LaunchEnvironment<'_>) -> Result<Self> {
        let Some(launched) = environment.launched()? else { return Ok(settings) };
        let LaunchedRank { launcher, rank, world_size, local_rank, restart_count, job, threads, host } =
            launched;
        if world_size > 1 && job.is_none() {
            let problem = format!(
                "is missing, and {launcher} does not say which job this rank belongs to; \
                 set it alike on all ranks of a run, or start the program with `mgpurun -n {world_size}`"
            );
            return Err(variable_error(MGPU_RUN_ID, problem));
        }
        // As under `mgpurun`: a slow start may take longer than a step, but not forever.
        let timeout_is_set = (environment.variable)(MGPU_TIMEOUT).is_some();
        let patience = if timeout_is_set { settings.timeout } else { JOIN_TIMEOUT };
        let rendezvous = job.as_ref().filter(|_| world_size > 1);
        Ok(Identity {
            rank,
            world_size,
            local_rank,
            local_world_size: host.as_ref().map_or(world_size, |host| host.ranks),
            rendezvous: rendezvous.map(|job| Rendezvous::Ranks { title: job.title(), patience, host }),
            launch_id: job.as_ref().and_then(|job| job.launch_id(environment.parent)),
            run_id: job.map(|job| job.run_id(restart_count)).unwrap_or_default(),
            restart_count,
            backend_is_auto: (environment.variable)(MGPU_BACKEND).is_none(),
            threads: settings.threads.or(threads),
            ..settings
        })
    }

    /// Chooses the backend as `mgpurun --backend auto` does, if this process sees `gpus` GPUs. `narrowed` says that
    /// `CUDA_VISIBLE_DEVICES` is set: a single visible GPU is then taken as this rank's own.
    ///
    /// # Errors
    /// If there are GPUs, but fewer than ranks. The error names both choices.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn choose_backend(&mut self, gpus: u32, narrowed: bool) -> Result<()> {
        let ranks = self.local_world_size;
        self.backend_is_auto = false;
        match gpus {
            0 => self.backend = Backend::Cpu,
            _ if gpus >= ranks || self.share_gpus => self.backend = Backend::Nccl,
            1 if narrowed => {
                // If all ranks see the same GPU, the rendezvous rejects them when they join.
                self.backend = Backend::Nccl;
                self.device.get_or_insert(0);
            }
            _ => {
                let problem = format!(
                    "is missing, with {ranks} ranks and {gpus} GPUs: start {gpus} for one rank on each GPU, or set it to \
                     cpu for {ranks} ranks without GPUs"
                );
                return Err(variable_error(MGPU_BACKEND, problem));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Identity> {
        let variable =
            |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Identity::read(&LaunchEnvironment { variable: &variable, hydra: &|| None, parent: &|| None })
    }

    #[test]
    fn no_environment_is_a_world_of_one() {
        assert_eq!(read(&[]).unwrap(), Identity::alone());
    }

    #[test]
    fn all_variables_of_a_launched_rank_are_read() {
        let identity = read(&[
            (RANK, "3"),
            (WORLD_SIZE, "4"),
            (LOCAL_RANK, "3"),
            (LOCAL_WORLD_SIZE, "4"),
            (MGPU_RENDEZVOUS, "unix:/run/x"),
            (MGPU_RUN_ID, "abc"),
            (MGPU_RESTART_COUNT, "2"),
            (MGPU_BACKEND, "cpu"),
            (MGPU_TIMEOUT, "1.5"),
            (MGPU_THREADS, "6"),
            (MGPU_DEVICE, "1"),
            (MGPU_SHARE_GPUS, "1"),
        ])
        .unwrap();
        assert_eq!((identity.rank, identity.world_size, identity.restart_count), (3, 4, 2));
        assert_eq!(identity.timeout, Duration::from_millis(1500));
        assert_eq!(identity.threads.map(NonZeroUsize::get), Some(6));
        assert_eq!((identity.device, identity.share_gpus), (Some(1), true));
    }

    #[test]
    fn errors_name_the_variable() {
        for (pairs, expected) in [
            (&[(RANK, "0")][..], "WORLD_SIZE is missing while RANK is set"),
            (&[(WORLD_SIZE, "2")], "RANK is missing while WORLD_SIZE is set"),
            (&[(WORLD_SIZE, "two")], "WORLD_SIZE is `two` where a whole number is expected"),
            (&[(WORLD_SIZE, "0")], "WORLD_SIZE is 0; a world has at least one rank"),
            (&[(WORLD_SIZE, "2"), (RANK, "2")], "RANK is 2 in a world of 2; ranks count from 0"),
            (&[(WORLD_SIZE, "2"), (RANK, "1")], "start the program with `mgpurun -n 2`"),
            (
                &[(WORLD_SIZE, "1"), (RANK, "0"), (MGPU_RENDEZVOUS, "unix:/x")],
                "MGPU_RUN_ID is missing while MGPU_RENDEZVOUS is set",
            ),
            (
                &[
                    (WORLD_SIZE, "1"),
                    (RANK, "0"),
                    (LOCAL_RANK, "1"),
                    (MGPU_RENDEZVOUS, "unix:/x"),
                    (MGPU_RUN_ID, "a"),
                ],
                "LOCAL_RANK is 1 where LOCAL_WORLD_SIZE is 1",
            ),
            (&[(MGPU_RENDEZVOUS, "unix:/x")], "WORLD_SIZE is missing while MGPU_RENDEZVOUS is set"),
            (&[(MGPU_BACKEND, "mpi")], "MGPU_BACKEND is `mpi`; known are cpu and nccl"),
            (&[(MGPU_NCCL_PREFLIGHT, "on")], "MGPU_NCCL_PREFLIGHT is `on`; known are check, set and off"),
            (&[(MGPU_NCCL_REGISTER, "on")], "MGPU_NCCL_REGISTER is `on`; known are auto and off"),
            (&[(MGPU_NET, "ib")], "MGPU_NET is `ib`; known are auto, tcp and ucx"),
            (
                &[(level::VARIABLE, "sse")],
                "MGPU_SIMD is `sse`; known are portable, avx2, avx512, avx512bf16, amx, amx-emulated",
            ),
            (&[(MGPU_THREADS, "0")], "MGPU_THREADS is `0` where a number of threads from 1 is expected"),
            (&[(MGPU_THREADS, "all")], "MGPU_THREADS is `all` where a number of threads from 1 is expected"),
            (&[(MGPU_TIMEOUT, "-1")], "MGPU_TIMEOUT is `-1` where seconds are expected"),
            (&[(WORLD_SIZE, "70000"), (RANK, "0")], "WORLD_SIZE is 70000; a world has at most 65536 ranks"),
            (
                &[(MGPU_RENDEZVOUS, "unix:/x"), (WORLD_SIZE, "4294967295")],
                "WORLD_SIZE is 4294967295; a world has at most 65536 ranks",
            ),
            (
                &[
                    (WORLD_SIZE, "2"),
                    (RANK, "0"),
                    (MGPU_RUN_ID, "a"),
                    (MGPU_INJECT, "rank=2,step=1,fault=abort"),
                ],
                "MGPU_INJECT has rank=2,step=1,fault=abort: ranks of a world of 2 count from 0",
            ),
            (
                &[(MGPU_INJECT, "rank=0,step=1,fault=abort")],
                "MGPU_INJECT is set for a world of one without mgpurun",
            ),
        ] {
            let error = read(pairs).unwrap_err().to_string();
            assert!(error.contains(expected), "`{error}` should contain `{expected}`");
        }
    }

    /// Rank 1 of `ranks` under torchrun, with more variables.
    fn foreign(ranks: &str, more: &[(&str, &str)]) -> Identity {
        let pairs = [(RANK, "1"), (WORLD_SIZE, ranks), (MASTER_ADDR, "localhost"), (MASTER_PORT, "29500")];
        read(&[&pairs[..], more].concat()).unwrap()
    }

    #[test]
    fn user_settings_apply_under_other_launchers() {
        let plain = foreign("2", &[]);
        let Some(Rendezvous::Ranks { title, patience, host: None }) = &plain.rendezvous else {
            panic!("{plain:?}")
        };
        assert_eq!((title.as_str(), *patience), ("torchrun job localhost.29500", JOIN_TIMEOUT));
        assert!(plain.backend_is_auto && plain.injections.is_empty());
        let set = foreign(
            "2",
            &[(MGPU_TIMEOUT, "5"), (MGPU_BACKEND, "cpu"), (MGPU_INJECT, "rank=1,step=2,fault=abort")],
        );
        let Some(Rendezvous::Ranks { patience, .. }) = set.rendezvous else { panic!("{set:?}") };
        assert_eq!((patience, set.timeout), (Duration::from_secs(5), Duration::from_secs(5)));
        assert_eq!((set.backend_is_auto, set.injections.len()), (false, 1));
    }

    #[test]
    fn the_automatic_backend_is_that_of_mgpurun() {
        let choose = |gpus, narrowed, more: &[(&str, &str)]| {
            let mut identity = foreign("4", more);
            identity.choose_backend(gpus, narrowed).map(|()| (identity.backend, identity.device))
        };
        assert_eq!(choose(0, true, &[]).unwrap(), (Backend::Cpu, None));
        assert_eq!(choose(4, false, &[]).unwrap(), (Backend::Nccl, None));
        assert_eq!(choose(8, true, &[]).unwrap(), (Backend::Nccl, None));
        // Each rank only sees its own.
        assert_eq!(choose(1, true, &[]).unwrap(), (Backend::Nccl, Some(0)));
        assert_eq!(choose(2, false, &[(MGPU_SHARE_GPUS, "1")]).unwrap(), (Backend::Nccl, None));
        for (gpus, narrowed) in [(1, false), (2, true), (3, false)] {
            let error = choose(gpus, narrowed, &[]).unwrap_err().to_string();
            let both = ["MGPU_BACKEND is missing", &format!("start {gpus} for one"), "cpu for 4 ranks"];
            assert!(both.iter().all(|text| error.contains(text)), "{error}");
        }
    }
}
