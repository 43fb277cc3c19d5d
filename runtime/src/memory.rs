//! How much memory may still be taken: by the machine, and by the control groups this process is in.
//!
//! The kernel hands out more shared memory than there is and kills somebody later. So a large allocation looks here
//! first and fails with an error instead.

use std::fs;
use std::path::Path;

use crate::control_group;

/// What is wrong with taking `bytes` bytes now, if anything. Where the system does not tell, nothing is.
pub(crate) fn shortage(bytes: usize) -> Option<String> {
    let groups = control_group::folders("memory");
    let limits = groups.iter().filter_map(|folder| available_in_group(folder)).chain(available_on_machine());
    let left = limits.min()?;
    (bytes as u64 > left).then(|| format!("{bytes} bytes are needed where {left} are available"))
}

/// `MemAvailable` of the machine.
fn available_on_machine() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes: u64 = field(&text, "MemAvailable:")?.trim_end_matches("kB").trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// The rest of the line that begins with `name`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Bytes that the group may still take; `None` without a limit. Pages of files that nobody uses count as free.
fn available_in_group(folder: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let statistics = read("memory.stat").unwrap_or_default();
    let reclaimable = field(&statistics, "inactive_file ").and_then(|text| text.parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_machine_has_is_short() {
        let problem = shortage(1 << 60).expect("no machine has an exbibyte");
        assert!(problem.starts_with("1152921504606846976 bytes are needed where "), "{problem}");
        assert_eq!(shortage(4096), None);
    }

    #[test]
    fn a_group_has_left_what_it_does_not_use() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(available_in_group(folder.path()), None);
        for (name, text) in [
            ("memory.max", "1000\n"),
            ("memory.current", "700\n"),
            ("memory.stat", "anon 5\ninactive_file 200\n"),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        assert_eq!(available_in_group(folder.path()), Some(500));
        fs::write(folder.path().join("memory.max"), "max\n").unwrap();
        assert_eq!(available_in_group(folder.path()), None);
    }
}
