//! The control groups this process is in, and the part of the processors' time that they leave it.
//!
//! A group of the second version has all its limits in one folder; of the first, each controller has a tree of its own.
//! Limits hold for everything below them, so a group's parents count too. Inside a container the path that the kernel
//! names may lie outside of what is mounted; then the root of the mount, which is always among the parents, has the
//! container's own limits.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders of this process's control groups for `controller`, with all their parents: each may have a limit.
pub fn folders(controller: &str) -> Vec<PathBuf> {
    folders_of(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default(), controller)
}

/// How many cores all processes of this one's groups may keep busy together, at least 1; `None` without a limit.
///
/// Unlike `std::thread::available_parallelism` it does not look at the cores that the calling thread is bound to.
pub fn cpu_quota() -> Option<usize> {
    folders("cpu").iter().filter_map(|folder| quota_of(folder)).min()
}

/// The folders for `controller` in `membership`, the text of a `/proc/PID/cgroup`, each followed by its parents.
pub fn folders_of(membership: &str, controller: &str) -> Vec<PathBuf> {
    membership
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let root = match parts.next()? {
                "" => Path::new("/sys/fs/cgroup").to_owned(),
                controllers if controllers.split(',').any(|name| name == controller) => {
                    Path::new("/sys/fs/cgroup").join(controller)
                }
                _ => return None,
            };
            let folder = root.join(parts.next()?.trim_start_matches('/'));
            let within = folder.ancestors().take_while(|folder| folder.starts_with(&root));
            Some(within.map(PathBuf::from).collect())
        })
        .flat_map(|folders: Vec<PathBuf>| folders)
        .collect()
}

/// Whole cores of time that one group may use.
fn quota_of(folder: &Path) -> Option<usize> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let (quota, period) = match read("cpu.max") {
        Some(text) => {
            let (quota, period) = text.trim().split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        }
        None => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
    };
    // `max` and -1 stand for no limit.
    let (quota, period): (u64, u64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
    Some((quota.checked_div(period)? as usize).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_their_parents() {
        let text = "5:cpu,memory:/job/7\n4:pids:/x\n0::/user/me\n";
        let folders = folders_of(text, "memory");
        let names: Vec<&str> = folders.iter().filter_map(|folder| folder.to_str()).collect();
        assert_eq!(
            names,
            [
                "/sys/fs/cgroup/memory/job/7",
                "/sys/fs/cgroup/memory/job",
                "/sys/fs/cgroup/memory",
                "/sys/fs/cgroup/user/me",
                "/sys/fs/cgroup/user",
                "/sys/fs/cgroup"
            ]
        );
        assert_eq!(folders_of(text, "cpu")[0], Path::new("/sys/fs/cgroup/cpu/job/7"));
        assert!(folders_of("x\n::\n5\n", "cpu").iter().all(|folder| folder.starts_with("/sys/fs/cgroup")));
    }

    #[test]
    fn quotas_of_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let quota = || quota_of(folder.path());
        assert_eq!(quota(), None);
        write("cpu.cfs_quota_us", "-1\n");
        write("cpu.cfs_period_us", "100000\n");
        assert_eq!(quota(), None);
        write("cpu.cfs_quota_us", "350000\n");
        assert_eq!(quota(), Some(3));
        for (text, expected) in [
            ("max 100000\n", None),
            ("200000 100000\n", Some(2)),
            ("50000 100000\n", Some(1)),
            ("1 0\n", None),
            ("200000\n", None),
            ("\n", None),
        ] {
            write("cpu.max", text);
            assert_eq!(quota(), expected, "{text:?}");
        }
    }
}
