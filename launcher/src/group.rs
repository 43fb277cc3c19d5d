//! The end of a process group.
//!
//! A killed process is not gone at once: the kernel takes milliseconds to tear a large one down, and a rank's
//! children are not the launcher's, so it cannot wait for them as it does for ranks. What it can do is to look which
//! processes of a group are left and to wait on their pidfds. That is done once, at the end of a run, and only for a
//! group that is not empty; its processes were sent SIGKILL when their rank ended.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::killpg;
use nix::unistd::Pid;

/// Longest wait for killed processes. One that hangs in the kernel, on a dead file server for instance, is left to it.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Waits until nothing runs in the process groups, whose processes have been killed.
pub(crate) fn wait_for_end(groups: impl Iterator<Item = Pid>) {
    // Without a signal: is there anybody?
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

/// The processes of these groups. Zombies have ended: they wait for whoever adopted them.
pub(crate) fn members(groups: &[i32]) -> impl Iterator<Item = (u32, Stat)> {
    let is_left = |stat: &Stat| !matches!(stat.state, 'Z' | 'X') && groups.contains(&stat.group);
    processes().filter(move |(_, stat)| is_left(stat))
}

/// The name of a process, for people; `?` if it is gone.
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

/// What a `/proc/PID/stat` tells of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    /// One letter, as `ps` shows it.
    pub(crate) state: char,
    pub(crate) parent: i32,
    pub(crate) group: i32,
}

impl Stat {
    /// That of the process or thread whose folder in `/proc` this is; `None` if it is gone.
    pub(crate) fn of(folder: &Path) -> Option<Self> {
        parse_stat(&fs::read(folder.join("stat")).ok()?)
    }
}

/// Reads `PID (NAME) STATE PPID PGRP …`, where NAME may hold anything.
fn parse_stat(stat: &[u8]) -> Option<Stat> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = str::from_utf8(&stat[name_end + 1..]).ok()?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some(Stat { state, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use nix::sys::signal::Signal;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_may_hold_anything() {
        let stat = |state, parent, group| Some(Stat { state, parent, group });
        assert_eq!(parse_stat(b"7 (sh) S 1 42 42 0"), stat('S', 1, 42));
        assert_eq!(parse_stat(b"7 (a) Z 9 9 (b \xff) R 1 42 42 0"), stat('R', 1, 42));
        assert_eq!(parse_stat(b""), None);
        assert_eq!(parse_stat(b"7 (sh"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = parse_stat(&bytes);
        }
    }

    #[test]
    fn a_killed_group_is_waited_for() {
        let mut child = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        let group = Pid::from_raw(child.id() as i32);
        assert_eq!(running_in(&[group.as_raw()]).len(), 1);
        killpg(group, Signal::SIGKILL).unwrap();
        wait_for_end([group].into_iter());
        assert!(running_in(&[group.as_raw()]).is_empty());
        child.wait().unwrap();
    }
}
