//! The plan of a restart with some of the ranks of the first start. Pure: no I/O.
//!
//! The ranks that go on are known by their numbers in the first plan. They keep their GPUs, and are numbered anew from 0.

use super::gpus::Share;
use super::world::{Part, plan_world};
use super::{LaunchPlan, Machine, PlanError, RankPlan, Request};
use crate::placement::{Group, Placement, place_groups};

/// Checks that jobs that go on with fewer ranks have no option for which all are needed.
pub(super) fn check(requests: &[Request], one_world: bool) -> Result<(), PlanError> {
    let Some(elastic) = requests.iter().find(|request| request.min_ranks.is_some()) else { return Ok(()) };
    if one_world && requests.len() > 1 {
        let why = "it is unknown which of the programs can do with fewer ranks";
        return Err(PlanError::NotElastic { option: "--one-world with several programs", why });
    }
    if elastic.share_gpus {
        let why = "ranks that share a GPU do not go on without it";
        return Err(PlanError::NotElastic { option: "--share-gpus", why });
    }
    Ok(())
}

/// The plan of a restart of a job with the ranks `kept` of its `first` plan, ascending. A job that `is_alone` is placed on
/// the machine as it is now; one of several keeps its cores, since the others have the rest.
///
/// # Errors
/// If the request cannot be met.
pub(crate) fn replan(
    request: &Request,
    (first, kept): (&LaunchPlan, &[u32]),
    is_alone: bool,
    machine: &Machine,
) -> Result<LaunchPlan, PlanError> {
    let kept: Vec<&RankPlan> = kept.iter().map(|rank| &first.ranks[*rank as usize]).collect();
    let gpus: Vec<_> = kept.iter().filter_map(|rank| rank.gpu.clone()).collect();
    let share = Share { ranks: kept.len() as u32, is_narrowed: !gpus.is_empty(), gpus };
    let requests = std::slice::from_ref(request);
    let mut parts = Part::all(requests, vec![share], false);
    for part in &mut parts {
        part.places = if is_alone {
            place_groups(&machine.topology, &[Group { bind: request.bind, gpus: part.nodes() }])
        } else {
            kept.iter().map(|rank| Placement { cores: rank.cores.clone(), threads: rank.threads }).collect()
        };
    }
    plan_world(&parts, machine)
}
