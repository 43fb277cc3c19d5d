//! The disk cache of compiled kernels and of autotuning's selections.
//!
//! A file is named after the digest of everything that its content depends on, and begins with the digest of the
//! content: a truncated or foreign file is ignored. Ranks that start together may all compile and write the same
//! file. Each one writes to a new temporary file and renames it, so that readers see complete files only. If the
//! cache cannot be written, the kernels are compiled in every process: that costs seconds, and is not an error.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The variable that names the cache folder.
const VARIABLE: &str = "MGPU_CACHE_DIR";
/// Length in bytes of the digest at the beginning of a file.
const DIGEST: usize = 32;

/// The key of an entry that depends on all of `parts`.
pub(super) fn key(parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part.as_bytes());
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `MGPU_CACHE_DIR`, or `mgpu` in the user's cache folder.
pub(super) fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    variable(VARIABLE).or_else(|| Some(user()?.join("mgpu")))
}

/// The content cached under `key`, if it is complete.
pub(super) fn read(name: &str, key: &str) -> Option<Vec<u8>> {
    read_in(&folder()?, name, key)
}

/// Caches `content` under `key`, if possible.
pub(super) fn write(name: &str, key: &str, content: &[u8]) {
    if let Some(folder) = folder() {
        // Errors are ignored: the next process computes it again.
        let _ = write_in(&folder, name, key, content);
    }
}

/// As [`write`], but keeps an existing entry: of processes that write at the same time, the first one decides.
pub(super) fn write_first(name: &str, key: &str, content: &[u8]) {
    if let Some(folder) = folder() {
        let _ = write_first_in(&folder, name, key, content);
    }
}

fn path(folder: &Path, name: &str, key: &str) -> PathBuf {
    folder.join(format!("{name}-{}.bin", &key[..32]))
}

fn read_in(folder: &Path, name: &str, key: &str) -> Option<Vec<u8>> {
    let path = path(folder, name, key);
    // Only regular files are read: a pipe may have no writer, and a device may never end.
    let mut file =
        fs::metadata(&path).ok().filter(fs::Metadata::is_file).and_then(|_| fs::read(&path).ok())?;
    if file.len() < DIGEST {
        return None;
    }
    let content = file.split_off(DIGEST);
    (Sha256::digest(&content)[..] == file[..]).then_some(content)
}

fn write_in(folder: &Path, name: &str, key: &str, content: &[u8]) -> std::io::Result<()> {
    let target = path(folder, name, key);
    place(folder, &target, content, |own| fs::rename(own, &target))
}

/// As [`write_in`], but keeps an existing entry, if it is complete.
fn write_first_in(folder: &Path, name: &str, key: &str, content: &[u8]) -> std::io::Result<()> {
    let target = path(folder, name, key);
    place(folder, &target, content, |own| match fs::hard_link(own, &target) {
        // A truncated entry is overwritten.
        Err(_) if read_in(folder, name, key).is_none() => fs::rename(own, &target),
        linked => linked,
    })
}

/// Writes a new temporary file beside `target`, and calls `put` to move it there.
fn place(
    folder: &Path,
    target: &Path,
    content: &[u8],
    put: impl FnOnce(&Path) -> std::io::Result<()>,
) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let (mut file, own) = create_beside(target)?;
    let written = file.write_all(&Sha256::digest(content)).and_then(|()| file.write_all(content));
    let outcome = written.and_then(|()| put(&own));
    // This process created the file; after a rename it is gone already.
    let _ = fs::remove_file(&own);
    outcome
}

/// A new file beside `target`. A process with the same id may have left such a file, or may be writing one in another
/// container.
fn create_beside(target: &Path) -> std::io::Result<(fs::File, PathBuf)> {
    for number in 0u64.. {
        let own = target.with_extension(format!("{}-{number}.partial", std::process::id()));
        match fs::File::create_new(&own) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => return Ok((created?, own)),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_entries_are_read_and_truncated_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let key = key(&["source", "options"]);
        assert_eq!(read_in(folder.path(), "pool", &key), None);
        write_in(&folder.path().join("deeper"), "pool", &key, b"image").unwrap();
        let folder = folder.path().join("deeper");
        assert_eq!(read_in(&folder, "pool", &key).as_deref(), Some(&b"image"[..]));
        let file = path(&folder, "pool", &key);
        let whole = fs::read(&file).unwrap();
        for len in 0..whole.len() {
            fs::write(&file, &whole[..len]).unwrap();
            assert_eq!(read_in(&folder, "pool", &key), None, "{len} bytes");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no partial file is left");
    }

    #[test]
    fn write_first_keeps_an_existing_entry() {
        let folder = tempfile::tempdir().unwrap();
        let key = key(&["problem"]);
        write_first_in(folder.path(), "choice", &key, b"first").unwrap();
        assert!(write_first_in(folder.path(), "choice", &key, b"second").is_err());
        assert_eq!(read_in(folder.path(), "choice", &key).as_deref(), Some(&b"first"[..]));
        fs::write(path(folder.path(), "choice", &key), "cut").unwrap();
        write_first_in(folder.path(), "choice", &key, b"third").unwrap();
        assert_eq!(read_in(folder.path(), "choice", &key).as_deref(), Some(&b"third"[..]));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no partial file is left");
    }

    #[test]
    fn other_files_are_not_overwritten_and_only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let (key, precious) = (key(&["source"]), folder.path().join("precious"));
        let target = path(folder.path(), "pool", &key);
        fs::write(&precious, "old").unwrap();
        let own = target.with_extension(format!("{}-0.partial", std::process::id()));
        std::os::unix::fs::symlink(&precious, &own).unwrap();
        nix::unistd::mkfifo(&target, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read_in(folder.path(), "pool", &key), None, "the read does not wait for the pipe");
        write_in(folder.path(), "pool", &key, b"image").unwrap();
        assert_eq!(read_in(folder.path(), "pool", &key).as_deref(), Some(&b"image"[..]));
        assert!(own.is_symlink());
        assert_eq!(fs::read(&precious).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_key_depends_on_every_part_and_its_boundaries() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab", "c"]).len(), 64);
    }
}
