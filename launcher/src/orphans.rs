//! Kills leftover processes of the ranks that have left their process group.
//!
//! A rank's ordinary children are in its process group. A child that starts its own session leaves the group, and when
//! its parents have ended nothing seems to link it to the run any more. But an orphan becomes the child of its nearest
//! ancestor that is a *subreaper*, and that is `mgpurun`. So at the end of a run every leftover process is a child of
//! this process, or becomes one as soon as its parent is killed. Killing children until there are none needs no list
//! from which a process could escape, and never hits an unrelated process: the pid of a child is not reused before its
//! parent has reaped it.

use std::collections::HashSet;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::{Pid, getpid};

use crate::group::{KILL_TIMEOUT, processes};

/// Longest time for killing processes that keep starting others.
const FORK_STORM_TIMEOUT: Duration = Duration::from_secs(30);
/// Milliseconds after which the children are listed again if none of them has ended.
const POLL_INTERVAL_MS: u8 = 50;

/// Makes this process adopt orphans among its descendants (it becomes a subreaper).
pub(crate) fn adopt() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

/// Reaps the children that have ended, except those for which `is_ours` is true.
pub(crate) fn reap(is_ours: impl Fn(Pid) -> bool) {
    for child in children().into_iter().filter(|child| !is_ours(*child)) {
        let _ = waitpid(child, Some(WaitPidFlag::WNOHANG));
    }
}

/// Kills this process's children, and their descendants, until there are none but those for which `is_kept` is true.
/// Returns an error text if some remain. Calls `say` if it takes long.
///
/// Processes that keep starting others do not win: some are killed before they have started the next one, so there are
/// fewer each time.
pub(crate) fn end_all(is_kept: impl Fn(Pid) -> bool, mut say: impl FnMut(&str)) -> Option<String> {
    let started = Instant::now();
    let (mut known, mut last_news) = (HashSet::new(), started);
    let mut is_told = false;
    loop {
        reap(&is_kept);
        let unwanted = |children: Vec<Pid>| -> Vec<Pid> {
            children.into_iter().filter(|child| !is_kept(*child)).collect()
        };
        let mut left = unwanted(children());
        if left.is_empty() && has_children() {
            // The kernel's list may omit a child while another one ends.
            left = unwanted(children_by_parent(getpid()));
        }
        if left.is_empty() {
            return None;
        }
        for child in &left {
            let _ = kill(*child, Signal::SIGKILL);
        }
        let left = HashSet::from_iter(left);
        if known != left {
            (known, last_news) = (left, Instant::now());
        } else if last_news.elapsed() >= KILL_TIMEOUT {
            let count = known.len();
            return Some(format!("{count} leftover processes of the ranks have not ended after SIGKILL"));
        } else {
            wait_for_one(&known);
        }
        if started.elapsed() >= FORK_STORM_TIMEOUT {
            let count = known.len();
            return Some(format!(
                "{count} leftover processes of the ranks start others faster than they are killed"
            ));
        }
        if started.elapsed() >= KILL_TIMEOUT && !std::mem::replace(&mut is_told, true) {
            say("still killing leftover processes of the ranks");
        }
    }
}

/// Waits until one of these children has ended, at most [`POLL_INTERVAL_MS`].
fn wait_for_one(children: &HashSet<Pid>) {
    let open = |child: &Pid| mgpu_control::process::pidfd_open(child.as_raw() as u32).ok();
    let ends: Vec<OwnedFd> = children.iter().filter_map(open).collect();
    let mut fds: Vec<PollFd<'_>> = ends.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
    let _ = poll(&mut fds, POLL_INTERVAL_MS);
}

/// True if a process, or the one that it was forked from, was started with this environment variable. Unknown for a
/// process that has ended or has changed its user: false.
pub(crate) fn has_variable(process: Pid, name: &str, value: &str) -> bool {
    let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    let wanted = format!("{name}={value}");
    environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
}

/// Whether this process has children at all, including zombies.
fn has_children() -> bool {
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    waitid(Id::All, look) != Err(Errno::ECHILD)
}

/// The children of this process, including zombies. A child may be missing while another one ends.
pub(crate) fn children() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists: Result<Vec<String>, _> =
        tasks.map(|task| fs::read_to_string(task.path().join("children"))).collect();
    match lists {
        Ok(lists) => {
            let numbers = lists.iter().flat_map(|list| list.split_ascii_whitespace());
            numbers.filter_map(|number| number.parse().ok()).map(Pid::from_raw).collect()
        }
        // The kernel was built without these lists.
        Err(_) => children_by_parent(getpid()),
    }
}

/// The same, from the `/proc` entries of all processes.
fn children_by_parent(parent: Pid) -> Vec<Pid> {
    let children = processes().filter(|(_, stat)| stat.parent == parent.as_raw());
    children.map(|(pid, _)| Pid::from_raw(pid as i32)).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn both_methods_find_a_child() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32);
        // The kernel may omit a child from its list while another child ends, as those of concurrent tests do.
        assert!((0..100).any(|_| children().contains(&pid)));
        assert!(children_by_parent(getpid()).contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children().contains(&pid));
        assert!(!children_by_parent(getpid()).contains(&pid));
    }
}
