//! The control groups (cgroups) of this process, and their CPU quota.
//!
//! With cgroup v2, all limits of a group are in one folder; with v1, each controller has its own tree. A limit applies
//! to all groups below it, so the parents of a group are checked too. Inside a container, the path that the kernel
//! reports may lie outside the mount; then the root of the mount, which is always among the parents, has the
//! container's limits.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders of this process's control groups for `controller`, with all their parents: each may have a limit.
pub fn folders(controller: &str) -> Vec<PathBuf> {
    folders_of(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default(), controller)
}

/// Number of cores that all processes of this process's groups may keep busy together, at least 1; `None` without a
/// limit.
///
/// Unlike `std::thread::available_parallelism` it ignores the affinity mask of the calling thread.
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

/// CPU quota of one group in whole cores.
fn quota_of(folder: &Path) -> Option<usize> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let (quota, period) = match read("cpu.max") {
        Some(text) => {
            let (quota, period) = text.trim().split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        }
        None => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
    };
    // `max` and -1 mean no limit.
    let (quota, period): (u64, u64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
    Some((quota.checked_div(period)? as usize).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_a_group_include_its_parents() {
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
    fn quotas_of_cgroup_v1_and_v2_are_read() {
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
