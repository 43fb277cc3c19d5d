//! Which hosts see the same folder.
//!
//! A path may name one folder on a network file system or a folder of each host's own. The kernel's identity of a
//! folder does not tell: each host numbers its file systems itself. So each host creates a file with a random name in
//! its folder, and looks which of the others' names it sees there. A random name was never looked up before, so no
//! host has a stale answer for it.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::agreement::agree;
use super::failed;
use crate::Result;
use crate::comm::Communicator;
use crate::protocol::new_run_id;

/// Beginning of a marker's name. 32 hexadecimal digits follow.
const MARKER: &str = ".host-";

/// An empty file of a random name. Dropping it removes it.
struct Marker {
    path: PathBuf,
    name: String,
}

impl Marker {
    fn create(folder: &Path) -> Result<Self> {
        let name = format!("{MARKER}{}", new_run_id()?);
        let path = folder.join(&name);
        File::create_new(&path).map_err(|error| failed(&path, error))?;
        Ok(Marker { path, name })
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The lowest host that sees the same folder, for each host. The folder exists on each. Collective.
pub(super) fn owners(
    comm: &mut Communicator,
    hosts: &[Range<u32>],
    host: usize,
    folder: &Path,
) -> Result<Vec<usize>> {
    let is_first = hosts[host].start == comm.rank();
    let marker = agree(comm, folder, host, is_first.then(|| Marker::create(folder)).transpose())?;
    let name = marker.as_ref().map_or("", |marker| &marker.name);
    let names = comm.all_gather_bytes(name.as_bytes())?;
    let is_seen = |other: &Range<u32>| {
        let name = std::str::from_utf8(&names[other.start as usize]);
        name.is_ok_and(|name| is_marker(name) && folder.join(name).exists())
    };
    let owner = if is_first { hosts[..host].iter().position(is_seen).unwrap_or(host) } else { host };
    // No marker is removed before all hosts have looked.
    let owners = comm.all_gather_slice(&[owner as i64])?;
    let first_ranks = hosts.iter().map(|ranks| ranks.start as usize);
    Ok(first_ranks.enumerate().map(|(host, rank)| (owners[rank] as usize).min(host)).collect())
}

/// Removes `path` if it is the marker of a killed run.
pub(super) fn remove_leftover(path: &Path) {
    let is_ours = path.file_name().and_then(|name| name.to_str()).is_some_and(is_marker);
    if is_ours && path.symlink_metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0) {
        let _ = fs::remove_file(path);
    }
}

fn is_marker(name: &str) -> bool {
    let digits = name.strip_prefix(MARKER);
    digits.is_some_and(|digits| digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_markers_of_killed_runs_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let digits = "0123456789abcdef0123456789abcdef";
        let marker = folder.path().join(format!("{MARKER}{digits}"));
        fs::write(&marker, "notes").unwrap();
        let others = [marker.clone(), folder.path().join(format!("{MARKER}b")), folder.path().join(digits)];
        others[1..].iter().for_each(|path| fs::write(path, "").unwrap());
        others.iter().for_each(|path| remove_leftover(path));
        assert!(others.iter().all(|path| path.exists()));
        fs::write(&marker, "").unwrap();
        remove_leftover(&marker);
        assert!(!marker.exists());
    }
}
