//! Reports injected faults that have not happened.
//!
//! A test whose fault never happens passes for the wrong reason: the step is past the end of the run, or the program
//! does not use the runtime, which triggers the faults.

use std::ops::Range;

use mgpu_control::inject::{Fault, Injection, InjectionPoint};
use mgpu_control::progress::{ProgressPage, RankState};

/// One line for each fault of this start of these `ranks` that has not happened, according to the progress `page`.
pub(crate) fn missed(injections: &[Injection], ranks: Range<u32>, page: &ProgressPage) -> Vec<String> {
    let start = page.run().restarts;
    let is_of_this_start = |fault: &Injection| fault.restart == start && ranks.contains(&fault.rank);
    let of_this_start = injections.iter().enumerate().filter(|(_, fault)| is_of_this_start(fault));
    of_this_start
        .filter(|(number, _)| !page.was_triggered(injections[*number].rank, *number))
        .filter_map(|(_, fault)| Some(format!("the fault {fault} did not happen: {}", why(fault, page)?)))
        .collect()
}

/// One line for each fault that was planned for start `restarts`, in a rank that it did not have: it had `ranks`.
pub(crate) fn of_missing_ranks(injections: &[Injection], restarts: u32, ranks: u32) -> Vec<String> {
    let missing = injections.iter().filter(|fault| fault.restart == restarts && fault.rank >= ranks);
    missing.map(|fault| format!("the fault {fault} did not happen: this start had {ranks} ranks")).collect()
}

/// One line for each fault of a later restart than the last one.
pub(crate) fn of_later_starts(injections: &[Injection], restarts: u32) -> Vec<String> {
    let later = injections.iter().filter(|fault| fault.restart > restarts);
    let times = if restarts == 1 { "once".to_owned() } else { format!("{restarts} times") };
    later.map(|fault| format!("the fault {fault} did not happen: the ranks were restarted {times}")).collect()
}

/// Why a fault that its rank has not noted did not happen; `None` if it may have happened.
fn why(fault: &Injection, page: &ProgressPage) -> Option<String> {
    let rank = fault.rank;
    let progress = page.progress(rank);
    let has_joined = progress.pid != 0;
    match fault.point {
        // Before it joins, a rank cannot note its faults. If it left normally, no fault but exit code 0 can have
        // happened.
        _ if !has_joined => {
            let ended_well = progress.state == RankState::Left && fault.fault != Fault::Exit(0);
            let is_later = !matches!(fault.point, InjectionPoint::Start | InjectionPoint::Join);
            (ended_well || is_later).then(|| format!("rank {rank} never joined the run"))
        }
        InjectionPoint::Start | InjectionPoint::Join => None,
        InjectionPoint::Step(_) if progress.step == 0 => Some(format!("rank {rank} began no step")),
        InjectionPoint::Step(_) => Some(format!("the last step of rank {rank} was {}", progress.step)),
        _ => Some(format!("rank {rank} did not reach that phase")),
    }
}
