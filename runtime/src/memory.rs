//! How much memory is available: on the machine, and in the control groups of this process.
//!
//! The kernel overcommits shared memory and kills a process later. Large allocations therefore check here first and
//! fail with an error.

use std::fs;
use std::path::Path;

use crate::control_group;

/// Bytes of memory that this process can still allocate: what the machine has available, or what is left of the limit
/// of a control group if that is less. `None` if the system does not tell.
///
/// Other processes share this memory, and may take it at any time.
pub fn available() -> Option<u64> {
    let groups = control_group::folders("memory");
    groups.iter().filter_map(|folder| available_in_group(folder)).chain(available_on_machine()).min()
}

/// Says why `bytes` bytes cannot be allocated now. `None` if they can, or if the system does not tell.
pub(crate) fn shortage(bytes: usize) -> Option<String> {
    let left = available()?;
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

/// Available bytes of the group; `None` without a limit. Inactive page cache counts as available.
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
    fn allocations_beyond_the_machines_memory_are_rejected() {
        let problem = shortage(1 << 60).expect("no machine has an exbibyte");
        assert!(problem.starts_with("1152921504606846976 bytes are needed where "), "{problem}");
        assert_eq!(shortage(4096), None);
    }

    #[test]
    fn available_memory_of_a_control_group_is_limit_minus_usage() {
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
