//! Which GPUs each job gets. Pure: no I/O.
//!
//! A launch of one job uses all visible GPUs, and its ranks count them as CUDA does. As soon as GPUs are chosen
//! (`--gpus`), or several jobs divide them, each job has a list of its own, and its ranks see only this list.

use std::fmt;
use std::str::FromStr;

use mgpu_control::protocol::MAX_RANKS;

use super::{BackendChoice, Machine, PlanError, Ranks, Request};
use crate::placement::Gpu;

/// Longest list of users in an error.
const MAX_USERS: usize = 8;

/// The GPUs that a job may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum GpuChoice {
    /// All visible ones that no other job of the launch gets.
    #[default]
    All,
    /// Those that nobody uses.
    Free,
    /// These: numbers among the visible ones, or UUIDs.
    Named(Vec<String>),
}

impl FromStr for GpuChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        let is_name = |name: &String| {
            name.parse::<u32>().is_ok()
                || ["GPU-", "MIG-"].iter().any(|kind| name.len() > 4 && name.starts_with(kind))
        };
        match text {
            "all" => Ok(GpuChoice::All),
            "free" => Ok(GpuChoice::Free),
            _ if names.iter().all(is_name) => Ok(GpuChoice::Named(names)),
            _ => Err(
                "it should be all, free, or numbers and UUIDs separated by commas, such as 0,2 or GPU-8a3f"
                    .into(),
            ),
        }
    }
}

impl fmt::Display for GpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuChoice::All => f.write_str("all"),
            GpuChoice::Free => f.write_str("free"),
            GpuChoice::Named(names) => f.write_str(&names.join(",")),
        }
    }
}

/// The ranks of a request and its GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) ranks: u32,
    pub(super) gpus: Vec<Gpu>,
    /// The ranks see only these GPUs.
    pub(super) is_narrowed: bool,
}

/// Divides the visible GPUs among the requests: first those that are named, then those for a given number of ranks, and
/// what is left for `-n auto`.
pub(super) fn divide(
    requests: &[Request],
    one_world: bool,
    machine: &Machine,
) -> Result<Vec<Share>, PlanError> {
    let several = requests.len() > 1;
    let is_narrowed = several && !one_world || requests.iter().any(|request| request.gpus != GpuChoice::All);
    if requests.iter().filter(|request| takes_the_rest(request) && !machine.gpus.is_empty()).count() > 1 {
        return Err(PlanError::TwoAutos);
    }
    for request in requests {
        match request.ranks {
            Ranks::Count(0) => return Err(PlanError::NoRanks),
            Ranks::Count(count) if count > MAX_RANKS => return Err(PlanError::TooManyRanks(count)),
            _ => {}
        }
    }
    if !is_narrowed {
        return Ok(share_all(requests, &machine.gpus));
    }
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|index| match &requests[*index] {
        Request { gpus: GpuChoice::Named(_), .. } => 0,
        request if takes_the_rest(request) => 2,
        _ => 1,
    });
    let taken = vec![false; machine.gpus.len()];
    let mut division = Division { machine, one_world, taken };
    let mut shares = vec![Share::default(); requests.len()];
    for index in order {
        let in_job = |error| PlanError::InJob { job: index, error: Box::new(error) };
        let share = division.share(&requests[index]);
        shares[index] = share.map_err(|error| if several && !one_world { in_job(error) } else { error })?;
    }
    Ok(shares)
}

/// The shares of one world whose ranks see all GPUs.
fn share_all(requests: &[Request], all: &[Gpu]) -> Vec<Share> {
    let given: usize = requests
        .iter()
        .map(|request| match request.ranks {
            Ranks::Count(count) => count as usize,
            Ranks::Auto => 0,
        })
        .sum();
    let left = all.len().saturating_sub(given);
    let share = |request: &Request| Share {
        ranks: count(request.ranks, left),
        gpus: all.to_vec(),
        is_narrowed: false,
    };
    requests.iter().map(share).collect()
}

/// True for a request of one rank for each GPU that is left.
fn takes_the_rest(request: &Request) -> bool {
    let named = matches!(request.gpus, GpuChoice::Named(_));
    request.ranks == Ranks::Auto && request.backend != BackendChoice::Cpu && !named
}

struct Division<'a> {
    machine: &'a Machine,
    one_world: bool,
    /// The GPUs that earlier requests got.
    taken: Vec<bool>,
}

impl Division<'_> {
    fn share(&mut self, request: &Request) -> Result<Share, PlanError> {
        let all = &self.machine.gpus;
        if request.backend == BackendChoice::Cpu && request.gpus != GpuChoice::All {
            return Err(PlanError::GpusForCpu);
        }
        if request.backend == BackendChoice::Cpu {
            return Ok(Share { ranks: count(request.ranks, all.len()), ..Share::default() });
        }
        let chosen = match &request.gpus {
            GpuChoice::Named(names) => self.named(names, request.share_gpus)?,
            GpuChoice::Free | GpuChoice::All if all.is_empty() => return self.without_gpus(request),
            GpuChoice::Free => self.free(request)?,
            GpuChoice::All => self.rest(request)?,
        };
        chosen.iter().for_each(|index| self.taken[*index] = true);
        let gpus: Vec<Gpu> = chosen.into_iter().map(|index| all[index].clone()).collect();
        Ok(Share { ranks: count(request.ranks, gpus.len()), gpus, is_narrowed: true })
    }

    /// The share of a request on a machine on which no GPU is known.
    fn without_gpus(&self, request: &Request) -> Result<Share, PlanError> {
        match request.gpus {
            GpuChoice::Free => Err(no_gpu("free")),
            _ if request.backend == BackendChoice::Nccl => Err(PlanError::UnknownGpus {
                hint: "start the jobs one by one, with CUDA_VISIBLE_DEVICES for each",
            }),
            _ => Ok(Share { ranks: count(request.ranks, 0), gpus: Vec::new(), is_narrowed: false }),
        }
    }

    fn named(&self, names: &[String], may_share: bool) -> Result<Vec<usize>, PlanError> {
        let all = &self.machine.gpus;
        let mut chosen: Vec<usize> = Vec::new();
        for name in names {
            let failed = |problem: String| PlanError::NoSuchGpu { name: name.clone(), problem };
            if all.is_empty() {
                return Err(no_gpu(name));
            }
            let is_it = |(index, gpu): &(usize, &Gpu)| match name.parse::<usize>() {
                Ok(number) => *index == number,
                Err(_) => gpu.uuid.as_ref().unwrap_or(&gpu.name).starts_with(name.as_str()),
            };
            let mut found = all.iter().enumerate().filter(is_it).map(|(index, _)| index);
            let (first, second) = (found.next(), found.next());
            let index = match (first, second) {
                (Some(index), None) => index,
                (Some(_), Some(_)) => return Err(failed("several GPUs have a UUID that begins so".into())),
                (None, _) => {
                    let last = all.len() - 1;
                    return Err(failed(format!(
                        "there is no such GPU among the visible ones, 0 to {last}; `mgpurun doctor` lists all"
                    )));
                }
            };
            if chosen.contains(&index) {
                return Err(failed("the GPU is named twice".into()));
            }
            if self.taken[index] && !may_share {
                return Err(failed("another job of this launch has this GPU, too".into()));
            }
            if let Some(holder) = all[index].holder.as_ref().filter(|_| !may_share) {
                return Err(PlanError::held(&all[index], holder));
            }
            chosen.push(index);
        }
        Ok(chosen)
    }

    fn free(&self, request: &Request) -> Result<Vec<usize>, PlanError> {
        let all = &self.machine.gpus;
        let is_free =
            |index: &usize| !self.taken[*index] && all[*index].holder.is_none() && all[*index].user.is_none();
        let free: Vec<usize> = (0..all.len()).filter(is_free).collect();
        let wanted = match request.ranks {
            Ranks::Auto => free.len().max(1),
            Ranks::Count(count) => count as usize,
        };
        if free.len() >= wanted {
            return Ok(free[..wanted].to_vec());
        }
        let used = all.iter().enumerate().filter(|(index, _)| !free.contains(index));
        let name = |(index, gpu): (usize, &Gpu)| match (&gpu.holder, &gpu.user) {
            (Some(holder), _) => format!("GPU {index} is reserved by {holder}"),
            (None, Some(user)) => format!("GPU {index} is used by {user}"),
            (None, None) => format!("GPU {index} is used by another job of this launch"),
        };
        let mut users: Vec<String> = used.map(name).collect();
        let others = users.len().saturating_sub(MAX_USERS);
        users.truncate(MAX_USERS);
        if others > 0 {
            users.push(format!("{others} more are used"));
        }
        let users = if users.is_empty() { "no GPU is used".to_owned() } else { users.join(", ") };
        Err(PlanError::TooFewFreeGpus { ranks: wanted as u32, free: free.len(), gpus: all.len(), users })
    }

    /// GPUs for a job that has not chosen any.
    fn rest(&self, request: &Request) -> Result<Vec<usize>, PlanError> {
        let all = &self.machine.gpus;
        let left: Vec<usize> = (0..all.len()).filter(|index| !self.taken[*index]).collect();
        let wanted = match request.ranks {
            Ranks::Auto => left.len().max(1),
            Ranks::Count(count) => count as usize,
        };
        if left.len() >= wanted {
            return Ok(left[..wanted].to_vec());
        }
        match (request.share_gpus, left.is_empty()) {
            (true, true) => Ok((0..all.len()).collect()),
            // Too few for a world are reported for all of its ranks.
            _ if self.one_world => Ok(left),
            (true, false) => Ok(left),
            (false, _) => {
                Err(PlanError::TooFewGpusLeft { ranks: wanted as u32, left: left.len(), gpus: all.len() })
            }
        }
    }
}

fn count(ranks: Ranks, gpus: usize) -> u32 {
    match ranks {
        Ranks::Auto => gpus.max(1) as u32,
        Ranks::Count(count) => count,
    }
}

fn no_gpu(name: &str) -> PlanError {
    let problem =
        "neither the driver nor NVML lists a GPU; `mgpurun doctor` shows what is missing".to_owned();
    PlanError::NoSuchGpu { name: name.to_owned(), problem }
}
