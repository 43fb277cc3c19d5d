//! Limits of the system that make a test fail or make it slow.
//!
//! A control group counts how often its limits were enforced: starts that were refused, processes that were killed for
//! memory, time in which processes were not allowed to run. These counts are compared before and after a test, so that a
//! limit is named only if it was reached. For other limits the messages of the test say so.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mgpu_control::control_group::folders_of;

use super::super::report::{Item, Mark};
use super::super::system::{Host, size};

/// Locked memory below this is too little for network adapters and pinned memory.
const LITTLE_LOCKED: u64 = 64 << 20;
/// A test is slow because of a quota if its processes were stopped for this share of its time.
const STOPPED_SHARE: f64 = 0.1;

/// How often the limits of this process's control groups were enforced so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Enforced {
    /// Processes that were not started (`pids.max`).
    starts: u64,
    /// Processes killed for memory (`memory.max`).
    kills: u64,
    /// Time in which processes had to wait for their CPU quota (`cpu.max`).
    stopped: Duration,
}

impl Enforced {
    pub(super) fn read(host: &Host) -> Self {
        let largest = |controller, files: &[(&str, &str)]| -> u64 {
            let folders = folders(host, controller);
            let counts = folders.iter().flat_map(|folder| files.iter().map(move |file| (folder, file)));
            counts.filter_map(|(folder, (file, key))| count(host, &folder.join(file), key)).max().unwrap_or(0)
        };
        let nanoseconds = largest("cpu", &[("cpu.stat", "throttled_time")]);
        let microseconds = largest("cpu", &[("cpu.stat", "throttled_usec")]);
        Enforced {
            starts: largest("pids", &[("pids.events", "max")]),
            kills: largest("memory", &[("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill")]),
            stopped: Duration::from_nanos(nanoseconds.max(microseconds.saturating_mul(1000))),
        }
    }

    fn since(self, before: Self) -> Self {
        Enforced {
            starts: self.starts.saturating_sub(before.starts),
            kills: self.kills.saturating_sub(before.kills),
            stopped: self.stopped.saturating_sub(before.stopped),
        }
    }
}

/// What happened in a test.
#[derive(Debug, Clone, Copy)]
pub(super) struct Happened<'a> {
    /// The limits that were enforced before it.
    pub(super) before: Enforced,
    pub(super) took: Duration,
    /// All messages; empty if it succeeded.
    pub(super) messages: &'a str,
}

/// The limits that explain what happened, each with what to do.
pub(super) fn causes(host: &Host, happened: Happened<'_>) -> Vec<Item> {
    let enforced = Enforced::read(host).since(happened.before);
    let says = |words: &[&str]| words.iter().any(|word| happened.messages.contains(word));
    let mut causes = Vec::new();
    if enforced.stopped.as_secs_f64() > STOPPED_SHARE * happened.took.as_secs_f64() {
        let quota = quota(host).map_or_else(String::new, |cores| format!(" of {cores} cores (cpu.max)"));
        causes.push((
            "cpu.max",
            format!(
                "the control group's CPU quota{quota} stopped the test's processes for {:.1} s: raise it (--cpus of \
                 containers, limits.cpu of Kubernetes, CPUQuota of systemd)",
                enforced.stopped.as_secs_f64()
            ),
        ));
    }
    if enforced.starts > 0 {
        let most =
            smallest(host, "pids", &["pids.max"]).map_or_else(String::new, |most| format!(" ({most})"));
        causes.push((
            "pids.max",
            format!(
                "the control group's limit on processes{most} refused {} starts: raise it (--pids-limit of containers, \
                 TasksMax of systemd)",
                enforced.starts
            ),
        ));
    }
    if enforced.kills > 0 {
        let most = smallest(host, "memory", &["memory.max", "memory.limit_in_bytes"]);
        let most = most.map_or_else(String::new, |most| format!(" ({})", size(most)));
        causes.push((
            "memory.max",
            format!(
                "the control group's memory limit{most} was reached and the kernel killed {} of its processes: raise it \
                 (--memory of containers, limits.memory of Kubernetes, --mem of Slurm)",
                enforced.kills
            ),
        ));
    }
    if says(&["Too many open files", "EMFILE"]) {
        let files = host.open_files.map_or_else(String::new, |files| format!(" ({files})"));
        let text = format!(
            "the limit on open files{files} was reached: raise the hard limit (ulimit -Hn, LimitNOFILE of systemd)"
        );
        causes.push(("open files", text));
    }
    if says(&["/dev/shm", "shared memory segment", "No space left on device", "SIGBUS"]) {
        causes.extend(host.shm.filter(|(_, free)| *free < 1 << 30).map(|(all, free)| {
            let text = format!(
                "it has {}, {} free, and NCCL needs some for each pair of GPUs without peer access: raise it (--shm-size=1g \
                 or --ipc=host of containers, a volume of medium Memory in Kubernetes)",
                size(all),
                size(free)
            );
            ("/dev/shm", text)
        }));
    }
    if says(&["ibv_reg_mr", "ibv_create_", "cuMemHostRegister", "cudaHostRegister", "Cannot allocate memory"])
    {
        causes.extend(host.locked_memory.filter(|bytes| *bytes < LITTLE_LOCKED).map(|bytes| {
            let text = format!(
                "{} may be locked, which is little for network adapters and pinned memory: ulimit -l unlimited (--ulimit \
                 memlock=-1 of containers, LimitMEMLOCK=infinity of systemd)",
                size(bytes)
            );
            ("locked memory", text)
        }));
    }
    causes.into_iter().map(|(name, text)| Item::new(Mark::Note, name, text)).collect()
}

fn folders(host: &Host, controller: &str) -> Vec<PathBuf> {
    host.read("/proc/self/cgroup").map(|text| folders_of(&text, controller)).unwrap_or_default()
}

fn read(host: &Host, path: &Path) -> Option<String> {
    host.read(path.to_str()?)
}

/// The number after `key` in a file of such pairs.
fn count(host: &Host, path: &Path, key: &str) -> Option<u64> {
    let text = read(host, path)?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The smallest of a limit's values in the groups of this process.
fn smallest(host: &Host, controller: &str, files: &[&str]) -> Option<u64> {
    let folders = folders(host, controller);
    let values = folders.iter().flat_map(|folder| files.iter().map(move |file| folder.join(file)));
    values.filter_map(|path| read(host, &path)?.trim().parse().ok()).min()
}

/// The smallest CPU quota in cores.
fn quota(host: &Host) -> Option<f64> {
    let of = |folder: &PathBuf| -> Option<f64> {
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| *number > 0.0);
        let (quota, period) = match read(host, &folder.join("cpu.max")) {
            Some(text) => {
                text.trim().split_once(' ').map(|(quota, period)| (quota.to_owned(), period.to_owned()))?
            }
            None => {
                let file = |name| read(host, &folder.join(name));
                (file("cpu.cfs_quota_us")?, file("cpu.cfs_period_us")?)
            }
        };
        Some(number(&quota)? / number(&period)?)
    };
    let smallest = folders(host, "cpu").iter().filter_map(of).reduce(f64::min)?;
    Some((smallest * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::{host, write};
    use super::*;

    /// The names of the causes, and their text.
    fn named(host: &Host, before: Enforced, messages: &str) -> (Vec<String>, String) {
        let took = Duration::from_secs(2);
        let items = causes(host, Happened { before, took, messages });
        let text = items.iter().map(|item| item.text.clone() + "\n").collect();
        (items.into_iter().map(|item| item.name).collect(), text)
    }

    #[test]
    fn limits_that_were_enforced_are_named() {
        for (groups, files) in [
            (
                "0::/job/a\n",
                [
                    ("sys/fs/cgroup/job/pids.max", "12\n"),
                    ("sys/fs/cgroup/job/pids.events", "max 4\n"),
                    ("sys/fs/cgroup/job/a/memory.max", "67108864\n"),
                    ("sys/fs/cgroup/job/a/memory.events", "low 0\noom 2\noom_kill 1\n"),
                    ("sys/fs/cgroup/job/cpu.max", "50000 100000\n"),
                    ("sys/fs/cgroup/job/cpu.stat", "nr_throttled 9\nthrottled_usec 1500000\n"),
                ],
            ),
            (
                "5:cpu,cpuacct:/job\n4:pids:/job\n3:memory:/job\n0::/\n",
                [
                    ("sys/fs/cgroup/pids/job/pids.max", "12\n"),
                    ("sys/fs/cgroup/pids/job/pids.events", "max 4\n"),
                    ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "67108864\n"),
                    ("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 1\n"),
                    ("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "50000\n"),
                    ("sys/fs/cgroup/cpu/job/cpu.stat", "nr_periods 9\nthrottled_time 1500000000\n"),
                ],
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            let host = host(root.path());
            assert_eq!(named(&host, Enforced::default(), "").0, [] as [&str; 0]);
            write(root.path(), "proc/self/cgroup", groups);
            write(root.path(), "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
            for (path, text) in files {
                write(root.path(), path, text);
            }
            let (names, text) = named(&host, Enforced::default(), "");
            assert_eq!(names, ["cpu.max", "pids.max", "memory.max"]);
            for part in ["0.5 cores", "1.5 s", "processes (12) refused 4 starts", "64.0 MiB", "killed 1 of"] {
                assert!(text.contains(part), "no `{part}` in {text}");
            }
            // They were enforced before the test, not in it.
            assert_eq!(named(&host, Enforced::read(&host), "").0, [] as [&str; 0]);
        }
    }

    #[test]
    fn limits_that_messages_tell_of_are_named() {
        let root = tempfile::tempdir().unwrap();
        let mut host = host(root.path());
        let names = |host: &Host, messages| named(host, Enforced::default(), messages).0;
        assert_eq!(names(&host, "socket: Too many open files"), ["open files"]);
        let nccl = "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)";
        assert_eq!(names(&host, nccl), ["/dev/shm"]);
        assert_eq!(
            names(&host, "Call to ibv_reg_mr failed with error Cannot allocate memory"),
            [] as [&str; 0]
        );
        host.locked_memory = Some(8 << 20);
        assert_eq!(
            names(&host, "Call to ibv_reg_mr failed with error Cannot allocate memory"),
            ["locked memory"]
        );
        host.shm = Some((64 << 30, 64 << 30));
        assert_eq!(names(&host, nccl), [] as [&str; 0], "there is enough of it");
    }
}
