//! Compiled kernels, kept on disk.
//!
//! A file is named by the digest of everything that the image depends on, and begins with the image's own digest: a
//! truncated or foreign file is taken for none. Ranks that start together may all compile and write the same file; each
//! writes under a name that nothing had and renames, so that readers see whole files only. Where nothing can be written, the
//! kernels are compiled in every process: that costs a second, and is no error.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Names the folder outright.
const VARIABLE: &str = "MGPU_CACHE_DIR";
/// Bytes of the digest in front of an image.
const DIGEST: usize = 32;

/// Stands for everything in `parts`.
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

/// What was kept under `key`, if it is whole.
pub(super) fn read(name: &str, key: &str) -> Option<Vec<u8>> {
    read_in(&folder()?, name, key)
}

/// Keeps `content` under `key`, if it can be.
pub(super) fn write(name: &str, key: &str, content: &[u8]) {
    if let Some(folder) = folder() {
        // Not a loss: the next process makes it again.
        let _ = write_in(&folder, name, key, content);
    }
}

/// As [`write`], but leaves what is there already: of processes that write at the same time the first decides.
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
    // Nobody may write into a pipe, and a device may never come to an end.
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

/// As [`write_in`], but leaves what is there already, if that is whole.
fn write_first_in(folder: &Path, name: &str, key: &str, content: &[u8]) -> std::io::Result<()> {
    let target = path(folder, name, key);
    place(folder, &target, content, |own| match fs::hard_link(own, &target) {
        // A cut file is no choice of anybody's.
        Err(_) if read_in(folder, name, key).is_none() => fs::rename(own, &target),
        linked => linked,
    })
}

/// Writes a file of this process's own beside `target`, and has it put into its place.
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
    // This process has made it; a rename has taken it away.
    let _ = fs::remove_file(&own);
    outcome
}

/// A new file beside `target`. A process of the same number may have left one, or be writing one in another container.
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
    fn what_is_written_is_read_and_what_is_cut_is_not() {
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
    fn the_first_choice_stays() {
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
    fn nothing_is_overwritten_on_the_way_and_nothing_but_files_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let (key, precious) = (key(&["source"]), folder.path().join("precious"));
        let target = path(folder.path(), "pool", &key);
        fs::write(&precious, "old").unwrap();
        let own = target.with_extension(format!("{}-0.partial", std::process::id()));
        std::os::unix::fs::symlink(&precious, &own).unwrap();
        nix::unistd::mkfifo(&target, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read_in(folder.path(), "pool", &key), None, "and nobody waits for the pipe");
        write_in(folder.path(), "pool", &key, b"image").unwrap();
        assert_eq!(read_in(folder.path(), "pool", &key).as_deref(), Some(&b"image"[..]));
        assert!(own.is_symlink());
        assert_eq!(fs::read(&precious).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn every_part_counts_and_so_does_its_border() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab", "c"]).len(), 64);
    }
}
