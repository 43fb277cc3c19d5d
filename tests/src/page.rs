//! The progress page of a run, from outside.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;

use mgpu_control::progress::{PAGE_NAME, Phase, ProgressPage};

use crate::process::until;

/// The pages that a process holds open, one for each job: a launcher, or a rank that serves the others.
pub fn all_of_process(pid: u32) -> Vec<ProgressPage> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let is_page = |target: &Path| target.to_string_lossy().contains(PAGE_NAME);
    let pages = descriptors.filter(|entry| fs::read_link(entry.path()).is_ok_and(|target| is_page(&target)));
    pages.filter_map(|entry| ProgressPage::inspect(File::open(entry.path()).ok()?.as_fd()).ok()).collect()
}

/// The first of them.
pub fn of_process(pid: u32) -> Option<ProgressPage> {
    all_of_process(pid).into_iter().next()
}

/// Waits until `holds` for the page of a process.
///
/// # Panics
/// If that takes too long.
#[track_caller]
pub fn wait(pid: u32, holds: impl Fn(&ProgressPage) -> bool) {
    let mut page = None;
    until(|| {
        if page.is_none() {
            page = of_process(pid);
        }
        page.as_ref().is_some_and(&holds)
    });
}

/// True once all ranks have made `steps` steps.
pub fn has_made(steps: u64) -> impl Fn(&ProgressPage) -> bool {
    move |page: &ProgressPage| (0..page.world_size()).all(|rank| page.progress(rank).step >= steps)
}

/// True while `rank` evaluates.
pub fn evaluates(rank: u32) -> impl Fn(&ProgressPage) -> bool {
    move |page| page.progress(rank).phase == Phase::Evaluation
}
