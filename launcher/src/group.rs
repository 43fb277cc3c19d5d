//! Waits for the end of process groups.
//!
//! A killed process does not end at once: the kernel takes milliseconds to tear down a large one. A rank's children are
//! not children of the launcher, so it cannot wait for them with `waitpid`. Instead it lists the remaining processes of
//! a group and waits on their pidfds. This is done once, at the end of a run, and only for groups that are not empty;
//! their processes got SIGKILL when their rank ended.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::killpg;
use nix::unistd::Pid;

/// Longest wait for killed processes. A process stuck in the kernel, on a dead file server for instance, is not waited
/// for any longer.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Waits until no process runs in these groups, whose processes have been killed.
pub(crate) fn wait_for_end(groups: impl Iterator<Item = Pid>) {
    // Signal 0 only checks whether the group has processes.
    let groups: Vec<i32> = groups.filter(|group| killpg(*group, None).is_ok()).map(Pid::as_raw).collect();
    if groups.is_empty() {
        return;
    }
    let deadline = Instant::now() + KILL_TIMEOUT;
    let mut left = running_in(&groups);
    while !left.is_empty() {
        let mut fds: Vec<PollFd<'_>> =
            left.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
        let time_left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut fds, PollTimeout::try_from(time_left.as_millis()).unwrap_or(PollTimeout::MAX)) {
            Ok(0) => return,
            Ok(_) => {}
            Err(_) => continue,
        }
        let ended: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        let mut ended = ended.into_iter();
        left.retain(|_| !ended.next().unwrap_or(true));
    }
}

/// Pidfds of the processes of these groups.
pub(crate) fn running_in(groups: &[i32]) -> Vec<OwnedFd> {
    members(groups).filter_map(|(pid, _)| mgpu_control::process::pidfd_open(pid).ok()).collect()
}

/// The running processes of these groups. Zombies are left out: they have ended.
pub(crate) fn members(groups: &[i32]) -> impl Iterator<Item = (u32, Stat)> {
    let is_left = |stat: &Stat| !matches!(stat.state, 'Z' | 'X') && groups.contains(&stat.group);
    processes().filter(move |(_, stat)| is_left(stat))
}

/// The name of a process, for people; `?` if it has ended.
pub(crate) fn name_of(pid: u32) -> String {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_else(|_| b"?".to_vec());
    String::from_utf8_lossy(name.trim_ascii_end()).escape_debug().to_string()
}

/// All processes of this machine.
pub(crate) fn processes() -> impl Iterator<Item = (u32, Stat)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(|pid: u32| Some((pid, Stat::of(&Path::new("/proc").join(pid.to_string()))?)))
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    /// One letter, as `ps` shows it.
    pub(crate) state: char,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    /// The time of a core that it has used, in ticks of the kernel; 0 if that is not told.
    pub(crate) ticks: u64,
}

impl Stat {
    /// Reads it for the process or thread with this folder in `/proc`; `None` if it has ended.
    pub(crate) fn of(folder: &Path) -> Option<Self> {
        parse_stat(&fs::read(folder.join("stat")).ok()?)
    }
}

/// Parses `PID (NAME) STATE PPID PGRP …`, where NAME may contain any bytes.
fn parse_stat(stat: &[u8]) -> Option<Stat> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = str::from_utf8(&stat[name_end + 1..]).ok()?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let (parent, group) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    // In user mode and in the kernel: fields 14 and 15, counted from 1 with the process id.
    let ticks = fields.skip(8).take(2).filter_map(|field| field.parse::<u64>().ok());
    Some(Stat { state, parent, group, ticks: ticks.fold(0, u64::saturating_add) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use nix::sys::signal::Signal;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn process_names_may_contain_any_bytes() {
        let stat = |state, parent, group| Some(Stat { state, parent, group, ticks: 0 });
        assert_eq!(parse_stat(b"7 (sh) S 1 42 42 0"), stat('S', 1, 42));
        assert_eq!(parse_stat(b"7 (a) Z 9 9 (b \xff) R 1 42 42 0"), stat('R', 1, 42));
        let stat = parse_stat(b"7 (sh) S 1 42 42 0 -1 4194560 116 0 0 0 30 12 0 0 20").unwrap();
        assert_eq!(stat.ticks, 42);
        assert_eq!(parse_stat(b""), None);
        assert_eq!(parse_stat(b"7 (sh"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = parse_stat(&bytes);
        }
    }

    #[test]
    fn the_end_of_a_killed_group_is_waited_for() {
        let mut child = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        let group = Pid::from_raw(child.id() as i32);
        assert_eq!(running_in(&[group.as_raw()]).len(), 1);
        killpg(group, Signal::SIGKILL).unwrap();
        wait_for_end([group].into_iter());
        assert!(running_in(&[group.as_raw()]).is_empty());
        child.wait().unwrap();
    }
}
